"""Terms: corrections, divergences and what is learned from a teacher, on numbers worked out by hand."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import pytest

from helpers import close, eager_and_compiled, group, micro_batch, value_and_gradient
from mlxrl import algo
from mlxrl.algo import (
    KL,
    Correction,
    Echo,
    Entropy,
    KLReward,
    OffPolicyMask,
    TeacherAdvantage,
    TeacherKL,
    TeacherSurrogate,
    TeacherTopK,
    Term,
    Veto,
)
from mlxrl.types import Comparison, Logprobs, MicroBatch, Totals


def test_correction_and_veto() -> None:
    # trainer/sampler ratios 4, 0.5: truncated at 2: 2, 0.5; cut: 0, 0.5; row: 2, geometric: sqrt 2; veto below 0.6
    old, mask = mx.log(mx.array([[4.0, 0.5, 7.0]])), [[1, 1, 0]]

    def factor(term: Term, old: mx.array) -> Any:
        batch = micro_batch(mask, 1.0, old_logprobs=old, sampler_logprobs=mx.zeros((1, 3)))
        return term.factor(Logprobs(old), batch)

    for function in eager_and_compiled(lambda old: factor(Correction(), old)):
        close(function(old)[:, :2], [[2.0, 0.5]])
    close(factor(Correction(mode="mask"), old)[:, :2], [[0.0, 0.5]])
    close(factor(Correction(level="sequence"), old), [[2.0]])
    close(factor(Correction(level="geometric"), old), [[math.sqrt(2)]])
    close([factor(Veto(threshold=at), old).item() for at in (0.4, 0.6)], [1.0, 0.0])


def test_what_drifted_and_was_punished_is_masked() -> None:
    # the sampler found the tokens likelier by 0.3 on average than the policy does now
    new, sampler = mx.array([[-1.4, -1.2], [-1.4, -1.2]]), mx.full((2, 2), -1.0)
    batch = micro_batch([[1, 1], [1, 1]], [[1.0], [-1.0]], sampler_logprobs=sampler)
    for delta, kept in ((0.2, [[1, 1], [0, 0]]), (0.4, [[1, 1], [1, 1]])):
        close(OffPolicyMask(delta=delta).factor(Logprobs(new), batch), kept)


def test_a_divergence_in_the_reward_is_charged_to_the_tokens_that_lead_there() -> None:
    # old - reference = 0.5 and 1.0, gamma 0.5, coefficient 2: -(0.5 + 0.5 * 1) * 2 and -1 * 2
    old, reference = mx.array([[-1.0, -1.0]]), mx.array([[-1.5, -2.0]])
    batch = micro_batch([[1, 1]], 1.0, old_logprobs=old, reference_logprobs=reference)
    close(KLReward(coefficient=2.0, gamma=0.5).advantage(Logprobs(old), batch), [[-2.0, -2.0]])


def test_distillation_pulls_towards_the_teacher() -> None:
    """A token that the teacher finds likelier gets likelier, in every form, and the other less likely."""
    new, teacher = mx.array([[-2.0, -1.0]]), mx.array([[-1.0, -2.0]])
    batch, totals = micro_batch([[1, 1]], 0.0, teacher_logprobs=teacher), Totals(2, 1, 1, 2)
    for term in (TeacherAdvantage(), TeacherKL()):
        recipe = algo.opd(teacher=term)
        gradient = mx.grad(lambda x, recipe=recipe: recipe.loss(Logprobs(x), batch, totals)[0])(new)
        assert gradient[0, 0].item() < 0 < gradient[0, 1].item()
    student = mx.log(mx.array([[[0.2, 0.5]]]))
    batch = micro_batch(
        [[1]], 0.0, teacher_top_logprobs=mx.log(mx.array([[[0.6, 0.1]]])), top_ids=mx.zeros((1, 1, 2), mx.int32)
    )
    for term in (*(TeacherTopK(beta=beta) for beta in (0.0, 0.5, 1.0)), TeacherSurrogate()):
        recipe = algo.opd(teacher=term)
        own = isinstance(term, TeacherSurrogate)
        assert recipe.comparison == Comparison("student" if own else "teacher", 16)
        assert recipe.needs == {"old", "teacher"} | ({"top_ids"} if own else set())

        def loss(x: mx.array, recipe: Any = recipe) -> mx.array:
            return recipe.loss(Logprobs(mx.zeros((1, 1)), top_logprobs=x), batch, Totals(1, 1, 1, 1))[0]

        gradient = mx.grad(loss)(student)
        assert gradient[0, 0, 0].item() < gradient[0, 0, 1].item()
    assert algo.opd().advantages([group(math.nan)]) == [[0.0]]


def test_the_teachers_lead_is_over_old_or_new_logprobs() -> None:
    # log-probs: teacher -1, old -2, new -1.5: a lead of 1 or 0.5; ratio exp(0.5) = 1.648721, unclipped
    new, batch = (
        mx.array([[-1.5]]),
        micro_batch([[1]], 0.0, teacher_logprobs=mx.array([[-1.0]]), old_logprobs=mx.array([[-2.0]])),
    )
    for source, lead in (("old", 1.0), ("new", 0.5)):
        recipe = algo.opd(teacher=TeacherAdvantage(source=source), clip=None)
        value, gradient = value_and_gradient(recipe, Logprobs(new, new), batch, Totals(1, 1, 1, 1))
        close([value.item(), gradient.item()], [-lead * math.exp(0.5)] * 2)


def test_needs_follow_the_terms() -> None:
    assert algo.grpo().needs == {"old", "reward"}
    assert algo.grpo(terms=[KL(coefficient=0.1)]).needs == {"old", "reward", "reference"}
    both = [KLReward(coefficient=0.1), Entropy(coefficient=0.1)]
    assert algo.rloo(terms=both).needs == {"old", "reward", "reference", "entropy"}
    assert algo.opd().needs == {"old", "teacher"}
    assert algo.opd(reward=1.0, terms=[Echo()]).needs == {"old", "reward", "teacher", "observations"}
    assert algo.grpo(terms=[TeacherAdvantage()]).needs == {"old", "reward", "teacher"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KL(coefficient=0), "algorithm.kl: coefficient: wanted more than 0, got 0; leave the term out"),
        (lambda: KL(coefficient=math.nan), "algorithm.kl: coefficient: wanted more than 0, got NaN"),
        (lambda: KL(), "algorithm.kl: missing key 'coefficient'"),
        (lambda: KL(0.04), "algorithm.kl: wanted keywords, as coefficient=..., got 0.04"),
        (lambda: KL(coefficient=1, estimator="k1"), "algorithm.kl: estimator: 'k1' in the loss has a gradient of mean"),
        (lambda: KL(coefficient=1, clamp=(1, -1)), "clamp: wanted a list of 2, each a number, got [1, -1]; the lower"),
        (lambda: KL(coefficient=1, clmp=1), "algorithm.kl: unknown key 'clmp'; did you mean 'clamp'?"),
        (lambda: TeacherKL(estimator="k1"), "algorithm.teacher_kl: estimator: 'k1' in the loss"),
        (lambda: TeacherTopK(k=0), "algorithm.teacher_top_k: k: wanted a whole number of at least 1, got 0"),
        (lambda: TeacherTopK(beta=2), "algorithm.teacher_top_k: beta: wanted at least 0 and at most 1, got 2"),
        (lambda: TeacherAdvantage(coefficient=0), "teacher_advantage: coefficient: wanted more than 0, got 0"),
        (lambda: Correction(bounds=(2, 1)), "algorithm.correction: bounds: wanted a list of 2"),
        (lambda: Correction(mode="clip"), 'mode: wanted one of "truncate", "mask", got "clip"'),
        (lambda: algo.grpo(terms=KL(coefficient=1)), "grpo: terms: wanted a list of terms, got KL"),
        (lambda: algo.grpo(terms=[0.04]), "grpo: terms: wanted terms such as KL(...), got 0.04"),
        (lambda: algo.grpo(terms=[Veto(threshold=0), Veto(threshold=1)]), "grpo: terms: wanted one Veto, got 2"),
        (lambda: algo.opd(terms=[TeacherKL()]), "opd: terms: wanted one that learns from a teacher, got Teach"),
    ],
)  # fmt: skip
def test_a_term_that_no_equation_takes_is_refused(make, message) -> None:
    with pytest.raises(ValueError) as caught:
        make()
    assert message in str(caught.value)


def test_terms_are_values_and_stand_in_one_order() -> None:
    kl, entropy = KL(coefficient=0.1), Entropy(coefficient=0.01)
    assert algo.grpo(terms=[entropy, kl]) == algo.grpo(terms=[KL(coefficient=0.1), entropy])
    assert algo.opd(terms=[Echo(), kl]).terms == (kl, TeacherAdvantage(), Echo())


@dataclass(frozen=True)
class Constant(Term):
    """A term of one's own: c for every token, and what it reports of it."""

    coefficient: float = 2.0

    def loss(self, new: Logprobs, batch: MicroBatch) -> mx.array:
        return mx.ones_like(batch.mask)

    def metrics(self, new: Logprobs, batch: MicroBatch, totals: Totals) -> dict[str, mx.array]:
        return {"own/tokens": batch.mask.sum() / totals.tokens}


def test_a_term_of_ones_own() -> None:
    # 2 of the step's 4 tokens are computed: the loss gets 2 * 2/4, and the metric is a mean over computed tokens
    algorithm = algo.dapo(terms=[Constant(), KL(coefficient=0.1)])
    assert [type(term) for term in algorithm.terms] == [KL, Constant]
    new = mx.full((1, 2), -1.0)
    batch = micro_batch([[1, 1]], 0.0, reference_logprobs=new)
    totals = Totals(4, 2, 1, 2)
    value, _ = value_and_gradient(algorithm, Logprobs(new), batch, totals)
    close(value, 1.0)
    assert algo.finish(algorithm.loss(Logprobs(new), batch, totals)[1])["own/tokens"] == 1.0
