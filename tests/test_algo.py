"""The recipes and their pieces on numbers worked out by hand, eager and compiled."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from helpers import attempt, close
from mlxrl.algo.defaults import CONVENTIONS, DEFAULTS
from mlxrl.algo.numbers import refuse_number

from mlxrl import algo
from mlxrl.algo import (
    advantages,
    correction,
    distill,
    distributions,
    kl,
    losses,
    ratio,
    recipes,
    reduce,
    returns,
    shaping,
)
from mlxrl.types import Algorithm, Comparison, Logprobs, MicroBatch, TokenDetails, Totals, Trajectory, Turn

NAN = float("nan")
ARRAYS = ("tokens", "mask", "advantages", "sampler_logprobs", "old_logprobs", "reference_logprobs", "teacher_logprobs")


def group(*rewards: float) -> tuple[Trajectory, ...]:
    return tuple(attempt(reward) for reward in rewards)


def minibatch(mask: Any, advantage: Any, **changes: Any) -> MicroBatch:
    m = mx.array(mask, dtype=mx.float32)
    tokens = mx.zeros(m.shape, dtype=mx.int32)
    fields = {"sampler_logprobs": mx.full(m.shape, -1.0), **changes}
    return MicroBatch(tokens[0, :0], tokens, m, mx.array(advantage) * mx.ones_like(m), **fields)


def eager_and_compiled(function: Callable[..., Any]) -> list[Callable[..., Any]]:
    return [function, mx.compile(function)]


# Policy losses


def test_clipped_and_its_gradient() -> None:
    # r = 1.5, 0.5, 1.1; A = 1, -1, 2; bounds 0.8 and 1.28
    # -min(1.5, 1.28) = -1.28, held: gradient 0
    # -min(-0.5, -0.8) = 0.8, held: gradient 0
    # -min(2.2, 2.2) = -2.2, free: d/d log pi = -r A = -2.2
    new, credit = mx.log(mx.array([[1.5, 0.5, 1.1]])), mx.array([[1.0, -1.0, 2.0]])

    def loss(new: mx.array) -> tuple[mx.array, mx.array]:
        values = losses.clipped(mx.exp(new), credit, 0.2, 0.28)
        return values.sum(), values

    for function in eager_and_compiled(mx.value_and_grad(loss)):
        (_, values), gradient = function(new)
        close(values, [[-1.28, 0.8, -2.2]])
        close(gradient, [[0.0, 0.0, -2.2]])


def test_dual_clip_and_delta() -> None:
    # r = 5, A = -1: the plain loss is 5, the dual clip holds it at 3, delta 4 at 4
    r, credit = mx.array([[5.0]]), mx.array([[-1.0]])
    close(losses.clipped(r, credit), [[5.0]])
    close(losses.clipped(r, credit, dual=3.0), [[3.0]])
    close(losses.clipped(r, credit, delta=4.0), [[4.0]])


def test_on_policy_gradient_is_the_policy_gradient() -> None:
    """Where new = old both branches of the minimum tie; the gradient is -A all the same."""
    for low in (0.2, None):
        gradient = mx.grad(lambda x, low=low: losses.clipped(mx.exp(x), mx.array([1.0, -2.0]), low).sum())(mx.zeros(2))
        close(gradient, [-1.0, 2.0])


def test_sequence_ratio() -> None:
    # log-ratios 0.2 and 0.4, a masked one of 9: mean 0.3, sum 0.6; each token's share of the mean's gradient is 1/2
    new, old, mask = mx.array([[0.2, 0.4, 9.0]]), mx.zeros((1, 3)), mx.array([[1.0, 1.0, 0.0]])
    close(ratio.sequence(new, old, mask), [[0.3]])
    close(ratio.sequence_sum(new, old, mask), [[0.6]])
    close(ratio.token_in_sequence(new, old, mask)[:, :2], [[0.3, 0.3]])
    close(mx.grad(lambda x: ratio.sequence(x, old, mask).sum())(new), [[0.5, 0.5, 0.0]])
    close(mx.grad(lambda x: ratio.token_in_sequence(x, old, mask).sum())(new), [[1.0, 1.0, 0.0]])


def test_reductions() -> None:
    # values 1 2 | 3, a masked 100: sum 6; 3 tokens: 2; row means 1.5 and 3: 2.25; constant 2 rows of 4: 0.75
    values, mask = mx.array([[1.0, 2.0], [3.0, 100.0]]), mx.array([[1.0, 1.0], [1.0, 0.0]])
    totals = Totals(tokens=3, sequences=2, groups=1, max_tokens=4)
    close(reduce.total(values, mask), 6.0)
    close(reduce.token_mean(values, mask, totals), 2.0)
    close(reduce.sequence_mean(values, mask, totals), 2.25)
    close(reduce.constant(values, mask, totals), 0.75)
    close(reduce.constant(values, mask, totals, length=1), 3.0)


def test_nothing_under_the_mask_is_seen() -> None:
    values = mx.array([[1.0, NAN], [mx.inf, NAN]])
    mask = mx.array([[1.0, 0.0], [0.0, 0.0]])
    for reduction in reduce.REDUCTIONS.values():
        close(reduction(values, mask, Totals(1, 1, 1, 1)), 1.0)


# Advantages


def test_group_relative() -> None:
    # mean 0.5, std sqrt(4 * 0.25 / 3) = 0.5773503: 0.5 / (0.5773503 + 1e-6) = 0.8660239
    # the second group: mean 2, no std; NaN is out of it
    rewards, ids = [1.0, 3.0, 0.0, NAN, 0.0, 1.0, 1.0], [0, 1, 0, 1, 0, 0, 1]
    close(advantages.group_relative(rewards, ids)[[0, 2, 4, 5]], [0.8660239, -0.8660239, -0.8660239, 0.8660239])
    close(advantages.group_relative(rewards, ids, "none"), [0.5, 1.0, -0.5, 0.0, -0.5, 0.5, -1.0])


@pytest.mark.parametrize("eps", [0.0, 1e-9, 1e-6])
def test_equal_rewards_have_no_advantage(eps: float) -> None:
    """0.1 is no binary fraction: the mean of eight differs from it, and that noise over a small eps is of order 10."""
    rewards, ids = [0.1] * 7, [0] * 7
    assert np.mean(rewards) != 0.1
    for found in (
        advantages.group_relative(rewards, ids, "group", eps),
        advantages.group_relative(rewards, ids, "batch", eps),
        advantages.leave_one_out(rewards, ids),
        advantages.max_rl(rewards, ids),
        advantages.pass_at_k(rewards, ids),
        advantages.gpg(rewards, ids),
        advantages.optimal_baseline(rewards, ids, [1, 2, 3, 4, 5, 6, 7]),
        returns.whiten([0.1] * 7),
    ):
        assert (found == 0).all()


def test_leave_one_out() -> None:
    # others' means: 1 - (0+2)/2 = 0; 0 - 3/2 = -1.5; 2 - 1/2 = 1.5
    close(advantages.leave_one_out([1.0, 0.0, 2.0], [0, 0, 0]), [0.0, -1.5, 1.5])


def test_other_baselines() -> None:
    # mean 0.5: max_rl (1-0.5)/0.5 = 1; pass@k: lead 1 over std sqrt(0.5) = 1.4142, none for the loser
    # lengths 3 and 1: baseline 3/4; gpg: 2 attempts, 1 of them rewarded: 2 * 0.5
    pair, ids = [1.0, 0.0], [0, 0]
    close(advantages.max_rl(pair, ids), [1.0, -1.0])
    close(advantages.pass_at_k(pair, ids, 0.0), [math.sqrt(2), 0.0])
    close(advantages.optimal_baseline(pair, ids, [3, 1]), [0.25, -0.75])
    close(advantages.gpg(pair, ids), [1.0, -1.0])


def test_credit_of_groups() -> None:
    """Groups keep their shape; a truncated row can be masked; the same prompt twice stays two groups."""
    groups = [group(1.0, 0.0), group(3.0, 3.0), (attempt(0.0, stop="length"), attempt(2.0), attempt(NAN))]
    close(np.concatenate(algo.dr_grpo().advantages(groups)), [0.5, -0.5, 0.0, 0.0, -1.0, 1.0, 0.0])
    masked = algo.dr_grpo(mask_truncated=True).advantages(groups)
    assert masked == [[0.5, -0.5], [0.0, 0.0], [0.0, 1.0, 0.0]]


def test_reward_functions_on_their_own_scales() -> None:
    # f: 0 100 | 100 100, g: 1 0 | 0 None, weights 1 and 2. Pairs that differ are -+ 1/sqrt(2) = 0.7071068, others 0:
    # z = (-s + 2 s, s - 2 s, 0, 0) = (s, -s, 0, 0), mean 0, std sqrt(2 s^2 / 3) = 0.5773503: A = 1.2247449
    # The sum is all about f: rewards 2 and 100.
    def scored(f: float, g: float) -> Trajectory:
        reward = f + 2 * (0.0 if math.isnan(g) else g)
        return replace(attempt(reward), rewards={"f": f, "g": g}, weights={"f": 1.0, "g": 2.0})

    groups = [(scored(0.0, 1.0), scored(100.0, 0.0)), (scored(100.0, 0.0), scored(100.0, NAN))]
    found = algo.grpo(combine="normalise", eps=0.0).advantages(groups)
    close(np.concatenate(found), [1.2247449, -1.2247449, 0.0, 0.0])
    assert algo.grpo().advantages(groups)[0][0] < 0
    # an attempt that could not be scored is out of every part
    failed = [(*groups[0], replace(scored(50.0, 0.5), reward=NAN)), groups[1]]
    close(np.concatenate(algo.grpo(combine="normalise", eps=0.0).advantages(failed))[:3], [1.2247449, -1.2247449, 0.0])
    with pytest.raises(ValueError, match="wants the parts of the rewards"):
        algo.grpo(combine="normalise").advantages([group(1.0, 0.0)])


def test_advantages_whitened_over_tokens() -> None:
    # advantages 0.5 on 1 token and -0.5 on 3, the unscored one's 2 tokens left out: mean -0.25,
    # variance (0.5625 + 3 * 0.0625) / 3 = 0.25: 1.5 and -0.5
    groups = [(attempt(1.0, tokens=1), attempt(0.0, tokens=3), attempt(NAN))]
    close(algo.dr_grpo(whiten=True, whiten_eps=0.0).advantages(groups), [[1.5, -0.5, 0.0]])
    close(algo.rloo(whiten=True, whiten_eps=0.0).advantages(groups), [[1.5, -0.5, 0.0]])
    # divided by n: variance 0.1875
    found = algo.dr_grpo(whiten=True, whiten_eps=0.0, whiten_ddof=0).advantages(groups)
    close(found[0][:2], [0.75 / 0.1875**0.5, -0.25 / 0.1875**0.5])
    # tokens that were forced on the model are not counted
    turn = Turn((1,), (2,) * 5, (-1.0,) * 5, details=TokenDetails(forced=(0, 4)))
    forced = [(groups[0][0], replace(groups[0][1], turns=(turn,)), groups[0][2])]
    close(algo.dr_grpo(whiten=True, whiten_eps=0.0).advantages(forced), [[1.5, -0.5, 0.0]])


def test_batch_scale() -> None:
    # rewards 0 1 | 0 3: centred -.5 .5 -1.5 1.5; std of 0 1 0 3 over n-1: mean 1, (1 + 0 + 1 + 4) / 3 = 2
    found = algo.grpo(scale="batch", eps=0.0).advantages([group(0.0, 1.0), group(0.0, 3.0)])
    close(found, np.array([[-0.5, 0.5], [-1.5, 1.5]]) / math.sqrt(2))


def test_reinforce_pp_credits_tokens() -> None:
    # rewards 1 and -1 on the last of 2 tokens, gamma 0.5: returns 0.5 1 | -0.5 -1
    # mean 0, variance (0.25+1+0.25+1)/3 = 0.8333, 1/sqrt = 1.0954451
    found = algo.reinforce_pp(gamma=0.5).advantages([(attempt(1.0), attempt(-1.0))])
    close(found[0][0], [0.5477226, 1.0954451])
    close(found[0][1], [-0.5477226, -1.0954451])


def test_gigpo_credits_steps() -> None:
    # rewards 1 and 0: A_E = 0.5 and -0.5. gamma 0.5: returns of the first 0.5, 1, of the second 0, 0.
    # state "a" is shared: (0.5, 0) around 0.25 gives A_S = 0.25 and -0.25; "b" and "c" are alone: 0
    first = attempt(1.0, turns=[("a", 0.0, 1), ("b", 1.0, 2)])
    second = attempt(0.0, turns=[("a", 0.0, 2), ("c", 0.0, 1)])
    found = algo.gigpo(gamma=0.5).advantages([(first, second)])
    close(found[0][0], [0.75, 0.5, 0.5])
    close(found[0][1], [-0.75, -0.75, -0.5])
    # a token that was forced on the model gets nothing
    forced = replace(second, turns=(replace(second.turns[0], details=TokenDetails(forced=(1,))), second.turns[1]))
    close(algo.gigpo(gamma=0.5).advantages([(first, forced)])[0][1], [-0.75, -0.5])
    # the reward of the whole trajectory comes with its last turn where the turns do not have it
    late = replace(first, turns=tuple(replace(turn, reward=0.0) for turn in first.turns))
    assert algo.gigpo(gamma=0.5).advantages([(late, second)]) == found


def test_returns() -> None:
    # R_t = r_t + 0.5 R_{t+1}: 1 + 0.5 (2 + 0.5 * 4) = 3
    close(returns.reward_to_go(mx.array([[1.0, 2.0, 4.0]]), 0.5), [[3.0, 4.0, 4.0]])
    close(returns.reward_to_go(mx.ones((1, 5))), [[5.0, 4.0, 3.0, 2.0, 1.0]])
    # a token of a tool's output, masked, costs a factor or not
    close(returns.returns([[0, 9, 1]], [[1, 0, 1]], 0.5)[0, 0], 0.25)
    close(returns.returns([[0, 9, 1]], [[1, 0, 1]], 0.5, skip_masked=True)[0, 0], 0.5)


# Divergences and mismatch


def test_kl_estimators() -> None:
    # x = log 2: k1 0.693147, k2 0.240227, k3 = 1/2 - 1 + log 2 = 0.193147; d k3 / d new = 1 - 1/2
    new, zero, mask = mx.array([[math.log(2.0)]]), mx.zeros((1, 1)), mx.ones((1, 1))
    for estimator, want in (("k1", 0.6931472), ("k2", 0.2402265), ("k3", 0.1931472)):
        close(kl.divergence(new, zero, mask, estimator), [[want]])
    close(mx.grad(lambda x: kl.divergence(x, zero, mask).sum())(new), [[0.5]])
    # a small divergence is not lost in rounding: x = 1e-4, k3 = x^2 / 2 - x^3 / 6 = 4.9998e-9
    assert kl.divergence(mx.array([[1e-4]]), zero, mask).item() == pytest.approx(4.9998e-9, rel=1e-3)
    # straight through: the value of k3, the gradient of k2, which is x
    value, gradient = mx.value_and_grad(lambda x: kl.divergence(x, zero, mask, straight="k2").sum())(new)
    close([value.item(), gradient.item()], [0.1931472, 0.6931472])


def test_correction() -> None:
    # trainer/sampler ratios 4, 0.5: truncated at 2: 2, 0.5; cut: 0, 0.5; row: 2, geometric: sqrt 2; veto below 0.6
    old, rollout, mask = mx.log(mx.array([[4.0, 0.5, 7.0]])), mx.zeros((1, 3)), mx.array([[1.0, 1.0, 0.0]])
    for function in eager_and_compiled(lambda o: correction.weights(o, rollout, mask, bounds=(0.0, 2.0))):
        close(function(old)[:, :2], [[2.0, 0.5]])
    close(correction.weights(old, rollout, mask, "mask", bounds=(0.0, 2.0))[:, :2], [[0.0, 0.5]])
    close(correction.importance(old, rollout, mask, "sequence"), [[2.0]])
    close(correction.importance(old, rollout, mask, "geometric"), [[math.sqrt(2)]])
    close([correction.veto(old, rollout, mask, at).item() for at in (0.4, 0.6)], [1.0, 0.0])


def test_effective_sample_size() -> None:
    # weights 2 and 1: (2+1)^2 / (2 (4+1)) = 0.9, whether the two tokens come in one minibatch or in two, and with
    # two tokens of silent rows in the totals
    totals, recipe = Totals(tokens=4, sequences=4, groups=1, max_tokens=1, without_signal=2), algo.grpo()
    old = mx.log(mx.array([[2.0], [1.0]]))
    parts = [
        recipe.loss(
            Logprobs(old[rows]),
            minibatch([[1]], 1.0, sampler_logprobs=mx.zeros((1, 1)), old_logprobs=old[rows]),
            totals,
        )[1]
        for rows in (slice(0, 1), slice(1, 2))
    ]
    added = {
        name: max(p[name] for p in parts) if name.endswith("_max") else sum(p[name] for p in parts) for name in parts[0]
    }
    shown = algo.finish(added)
    close([shown["mismatch/ess"], shown["policy/ratio_mean"], shown["mismatch/ratio_max"]], [0.9, 1.0, 2.0])
    # |log 2| / 2 over the computed tokens; the advantage's size over all four
    close([shown["mismatch/abs"], shown["policy/adv_abs"]], [math.log(2) / 2, 0.5])


# Distillation


def test_distributions() -> None:
    # logits log 1, log 3: p = 1/4, 3/4; entropy 0.562335; p^2 sums to 10/16
    logp = distributions.log_softmax(mx.log(mx.array([[1.0, 3.0]])))
    close(mx.exp(logp), [[0.25, 0.75]])
    close(distributions.entropy(logp), [0.5623351])
    close(distributions.sum_squares(logp), [0.625])
    close(distributions.gather(logp, mx.array([1])), [math.log(0.75)])


def test_divergences_of_candidates() -> None:
    # student 1/2 1/4 | 1/4, teacher 1/4 1/4 | 1/2 in bins of two candidates and a tail:
    # reverse 1/2 log 2 + 0 - 1/4 log 2 = 0.1732868, forward the same; renormalised 2/3 log 4/3 + 1/3 log 2/3
    student, teacher = mx.log(mx.array([0.5, 0.25])), mx.log(mx.array([0.25, 0.25]))
    with_tail = [distill.with_tail(p) for p in (student, teacher)]
    close(distill.reverse_kl(*with_tail), 0.1732868)
    close(distill.forward_kl(*with_tail), 0.1732868)
    close(distill.reverse_kl(distill.renormalised(student), distill.renormalised(teacher)), 0.0566330)
    close(distill.jsd(*with_tail, 0.5), distill.jsd(*with_tail[::-1], 0.5))
    # an absent candidate is one that is not there
    absent = mx.array([math.log(0.25), -mx.inf])
    close(mx.exp(distill.with_tail(absent)), [0.25, 0.0, 0.75])
    assert distill.forward_kl(distill.renormalised(student), distill.renormalised(absent)).item() < mx.inf


def test_distillation_pulls_towards_the_teacher() -> None:
    """A token that the teacher finds likelier gets likelier, in each of the three forms, and the other less likely."""
    new, teacher = mx.array([[-2.0, -1.0]]), mx.array([[-1.0, -2.0]])
    batch, totals = minibatch([[1, 1]], 0.0, teacher_logprobs=teacher), Totals(2, 1, 1, 2)
    for term in ("advantage", "loss"):
        recipe = algo.opd(teacher_term=term)
        gradient = mx.grad(lambda x, recipe=recipe: recipe.loss(Logprobs(x), batch, totals)[0])(new)
        assert gradient[0, 0].item() < 0 < gradient[0, 1].item()
    candidates = mx.log(mx.array([[[0.2, 0.5]]]))
    batch = minibatch([[1]], 0.0, teacher_top_logprobs=mx.log(mx.array([[[0.6, 0.1]]])), top_ids=mx.zeros((1, 1, 2)))
    for divergence in ("forward", "reverse", "jsd", "surrogate"):
        recipe = algo.opd(teacher_term="candidates", teacher_divergence=divergence)
        own = divergence == "surrogate"
        assert recipe.comparison == Comparison("student" if own else "teacher", 16)
        assert recipe.needs == {"old", "teacher"} | ({"candidates"} if own else set())

        def loss(x: mx.array, recipe: Any = recipe) -> mx.array:
            return recipe.loss(Logprobs(mx.zeros((1, 1)), top_logprobs=x), batch, Totals(1, 1, 1, 1))[0]

        gradient = mx.grad(loss)(candidates)
        assert gradient[0, 0, 0].item() < gradient[0, 0, 1].item()
    assert algo.opd().advantages([group(NAN)]) == [[0.0]]


def test_the_teachers_lead_is_over_old_or_new_logprobs() -> None:
    # log-probs: teacher -1, old -2, new -1.5: a lead of 1 or 0.5; ratio exp(0.5) = 1.648721, unclipped
    new, batch = (
        mx.array([[-1.5]]),
        minibatch([[1]], 0.0, teacher_logprobs=mx.array([[-1.0]]), old_logprobs=mx.array([[-2.0]])),
    )
    for source, lead in (("old", 1.0), ("new", 0.5)):
        recipe = algo.opd(teacher_from=source, clip=None)
        value, gradient = value_and_gradient(recipe, Logprobs(new, new), batch, Totals(1, 1, 1, 1))
        close([value.item(), gradient.item()], [-lead * math.exp(0.5)] * 2)


# Every recipe


def example(name: str, columns: int = 3) -> tuple[Any, Logprobs, MicroBatch, Totals]:
    """A recipe with every extra switched on, and a batch with a gap in a row, an empty row and a zero advantage."""
    options: dict[str, Any] = {"kl": 0.1, "kl_reward": 0.05, "entropy": 0.01, "correction": "truncate"}
    recipe: Any = algo.RECIPES[name](**options)
    values = np.random.default_rng(0).normal(size=(5, 4, columns)).astype(np.float32) * 0.05 - 1.0
    new, old, reference, rollout, teacher = (mx.array(v) for v in values)
    mask = np.ones((4, columns), dtype=np.float32)
    mask[1, 1:2] = 0
    mask[2] = 0
    advantage = [[1.0], [-1.0], [0.5], [0.0]]
    batch = minibatch(
        mask,
        advantage,
        old_logprobs=old,
        reference_logprobs=reference,
        sampler_logprobs=rollout,
        teacher_logprobs=teacher,
    )
    return recipe, Logprobs(new, mx.abs(new)), batch, Totals(int(mask.sum()), 4, 2, 16)


def value_and_gradient(recipe: Any, new: Logprobs, batch: MicroBatch, totals: Totals) -> tuple[mx.array, mx.array]:
    def loss(chosen: mx.array) -> mx.array:
        return recipe.loss(Logprobs(chosen, new.entropy), batch, totals)[0]

    return mx.value_and_grad(loss)(new.token_logprobs)


def rows_of(new: Logprobs, batch: MicroBatch, rows: list[int]) -> tuple[Logprobs, MicroBatch]:
    pick = mx.array(rows)
    assert new.entropy is not None
    part = replace(batch, **{name: getattr(batch, name)[pick] for name in ARRAYS})
    return Logprobs(new.token_logprobs[pick], new.entropy[pick]), part


@pytest.mark.parametrize("name", algo.RECIPES)
def test_splitting_order_and_padding_change_nothing(name: str) -> None:
    recipe, new, batch, totals = example(name)
    assert isinstance(recipe, Algorithm)
    value, gradient = value_and_gradient(recipe, new, batch, totals)
    for split in ([[0, 1, 2, 3]], [[3, 1], [0, 2]], [[2], [1], [3], [0]]):
        found = [(rows, value_and_gradient(recipe, *rows_of(new, batch, rows), totals)) for rows in split]
        close(sum(part for _, (part, _) in found), value)
        for rows, (_, part) in found:
            close(part, gradient[mx.array(rows)])
    pad = [(0, 0), (0, 7)]
    padded = replace(batch, **{key: mx.pad(getattr(batch, key), pad) for key in ARRAYS})
    wide = Logprobs(mx.pad(new.token_logprobs, pad, constant_values=-300.0), mx.pad(new.entropy, pad))
    wider, wider_gradient = value_and_gradient(recipe, wide, padded, totals)
    close(wider, value)
    close(wider_gradient[:, :3], gradient)
    assert not wider_gradient[:, 3:].any()


@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("name", algo.RECIPES)
def test_gradient_per_token(name: str, columns: int) -> None:
    """Every sampled token of a row with an advantage has a gradient, also in completions of one token, [B, 1]."""
    recipe, new, batch, totals = example(name, columns)
    value, gradient = value_and_gradient(recipe, new, batch, totals)
    assert gradient.shape == batch.mask.shape
    assert mx.isfinite(value).all()
    assert mx.where(batch.mask[:2] > 0, gradient[:2], 1.0).all()


@pytest.mark.parametrize(("name", "columns"), [("grpo", 1), ("dapo", 3), ("gspo", 3), ("cispo", 3), ("opd", 3)])
def test_compiled_equals_eager(name: str, columns: int) -> None:
    recipe, new, batch, totals = example(name, columns)
    given = {key: getattr(batch, key) for key in ARRAYS}

    def both(chosen: mx.array, entropy: mx.array, given: dict[str, mx.array]) -> tuple[Any, mx.array]:
        part = replace(batch, prefix=mx.array([0]), **given)
        return mx.value_and_grad(lambda x: recipe.loss(Logprobs(x, entropy), part, totals))(chosen)

    found = [function(new.token_logprobs, new.entropy, given) for function in eager_and_compiled(both)]
    ((value, metrics), gradient), ((compiled, more), compiled_gradient) = found
    close(compiled, value)
    close(compiled_gradient, gradient)
    assert metrics.keys() == more.keys()
    for name, item in metrics.items():
        np.testing.assert_allclose(more[name], item, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", algo.RECIPES)
def test_extremes_stay_finite(name: str) -> None:
    """Log-probs of exactly 0, ratios beyond float32, nothing to learn from, no tokens at all."""
    recipe, new, batch, totals = example(name)
    zero, far = mx.zeros_like(batch.mask), mx.full(batch.mask.shape, -200.0)
    same = {"old_logprobs": zero, "reference_logprobs": zero, "teacher_logprobs": zero, "sampler_logprobs": zero}
    apart = {"old_logprobs": far, "reference_logprobs": far, "teacher_logprobs": far, "sampler_logprobs": far}
    lonely = {"old_logprobs": None, "sampler_logprobs": far, "reference_logprobs": far}
    for changes in (
        same,
        apart,
        lonely,
        {"mask": zero},
        {"advantages": zero, "old_logprobs": None},
        {"mask": zero, **apart},
    ):
        changed = replace(batch, **changes)
        for chosen in (zero, far):
            (value, metrics), gradient = mx.value_and_grad(
                lambda x, changed=changed: recipe.loss(Logprobs(x, new.entropy), changed, totals)
            )(chosen)
            assert all(mx.isfinite(item).all() for item in (value, gradient, *metrics.values()))
            assert all(math.isfinite(item) for item in algo.finish(metrics).values())


@pytest.mark.parametrize("name", algo.RECIPES)
def test_a_better_token_gets_likelier(name: str) -> None:
    """Going down the loss raises the log-prob of what was rewarded, and lowers the other's; with no `old`, rho = 1."""
    recipe = algo.RECIPES[name]()
    new = mx.array([[-1.0, -1.0], [-1.0, -1.0]])
    batch = minibatch([[1, 1], [1, 1]], [[1.0], [-1.0]], teacher_logprobs=new)
    totals = Totals(4, 2, 1, 2)
    value, gradient = value_and_gradient(recipe, Logprobs(new), batch, totals)
    assert (gradient[0] < 0).all()
    assert (gradient[1] > 0).all()
    again, same = value_and_gradient(recipe, Logprobs(new), replace(batch, old_logprobs=new), totals)
    close(again, value)
    close(same, gradient)


@pytest.mark.parametrize("name", algo.RECIPES)
def test_arguments_can_be_read_back(name: str) -> None:
    """What a recipe was resolved to builds it again, under every convention that knows it."""
    for family in [None, *(family for family, known in CONVENTIONS.items() if name in known)]:
        recipe: Any = algo.RECIPES[name](convention=family)
        assert recipe.name == name
        again: Any = algo.RECIPES[name](**recipe.arguments)
        assert again.arguments == recipe.arguments
        assert again.needs == recipe.needs
    assert set(inspect.signature(algo.RECIPES[name]).parameters) == {"convention", *DEFAULTS[name]}


def test_conventions_name_arguments_that_exist() -> None:
    for known in CONVENTIONS.values():
        for name, arguments in known.items():
            assert arguments.keys() <= DEFAULTS[name].keys()


def test_needs_follow_the_coefficients() -> None:
    assert algo.grpo().needs == {"old"}
    assert algo.grpo(kl=0.1).needs == {"old", "reference"}
    assert algo.rloo(kl_reward=0.1, entropy=0.1).needs == {"old", "reference", "entropy"}
    assert algo.opd().needs == {"old", "teacher"}


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("grpo", {"kl_estimator": "k2"}, "kl_estimator has no effect, because kl is 0"),
        ("grpo", {"length": 8}, "length has no effect, because reduction is not 'constant'"),
        ("dr_grpo", {"eps": 1e-4}, "eps has no effect, because scale is 'none'"),
        ("grpo", {"correction_bounds": (0, 3)}, "correction_bounds has no effect, because correction is None"),
        ("grpo", {"combine": "normalise", "scale": "batch"}, "scale has no effect, because combine is 'normalise'"),
        ("grpo", {"whiten_ddof": 0}, "whiten_ddof has no effect, because whiten is false"),
        ("rloo", {"whiten_eps": 0.1}, "whiten_eps has no effect, because whiten is false"),
        ("rloo", {"combine": "normalise"}, "rloo: unknown argument 'combine'"),
        ("opd", {"combine": "normalise"}, "combine has no effect, because reward is 0"),
        ("opd", {"teacher_k": 4}, "teacher_k has no effect, because teacher_term is not 'candidates'"),
        ("opd", {"teacher_term": "candidates", "teacher_k": 0}, "teacher_k: wanted at least 1, got 0"),
        (
            "opd",
            {"teacher_term": "vocabulary", "teacher_tail": False},
            "teacher_tail has no effect, because teacher_term",
        ),
        ("opd", {"teacher_term": "vocabulary", "teacher_clamp": (0, 1)}, "teacher_clamp has no effect"),
        ("opd", {"teacher_term": "vocabulary", "teacher_divergence": "surrogate"}, "'surrogate' is of candidates"),
        ("opd", {"teacher_term": "vocabulary", "teacher_beta": 0.1}, "because teacher_divergence is not 'jsd'"),
        ("opd", {"teacher_divergence": "jsd"}, "because teacher_term is neither 'candidates' nor 'vocabulary'"),
        (
            "opd",
            {"teacher_term": "candidates", "teacher_divergence": "surrogate", "teacher_support": "teacher"},
            "teacher_support has no effect, because teacher_divergence is 'surrogate'",
        ),
        ("grpo", {"clip": None, "dual_clip": 3.0}, "dual_clip has no effect, because clip is None"),
        ("opd", {"scale": "none"}, "scale has no effect, because reward is 0"),
        ("opd", {"teacher_term": "loss", "clip": (0.1, 0.1)}, "clip has no effect, because reward is 0"),
        ("opd", {"teacher": 0.0}, "without a teacher use grpo"),
        ("sapo", {"clip": (0.2, 0.2)}, "sapo: unknown argument 'clip'"),
        ("cispo", {"dual_clip": 3.0}, "cispo: unknown argument 'dual_clip'"),
        ("grpo", {"kl_coefficient": 0.1}, "unknown argument 'kl_coefficient'"),
        ("grpo", {"clp": (0.2, 0.2)}, "did you mean 'clip'"),
        ("grpo", {"convention": "nobody"}, "wanted one of openrlhf, slime, trl, verl, got 'nobody'"),
        ("grpo", {"ratio": "row"}, "ratio: wanted one of token, sequence"),
        ("grpo", {"kl": 0.1, "kl_estimator": "k1"}, "teaches nothing"),
        ("gmpo", {"clip": (None, 0.4)}, "clip: wanted two numbers"),
    ],
)
def test_dead_and_wrong_arguments_are_refused(name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        algo.RECIPES[name](**arguments)


@pytest.mark.parametrize("name", [name for name in algo.RECIPES if name not in ("reinforce_pp", "opd")])
def test_a_group_of_one_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: group 1: wanted at least 2 .* got 1; raise group_size"):
        algo.RECIPES[name]().advantages([group(1.0, 0.0), group(1.0)])


def test_reinforce_pp_needs_no_group() -> None:
    assert np.isfinite(algo.reinforce_pp().advantages([group(1.0), group(0.0)])).all()


@pytest.mark.parametrize("name", algo.RECIPES)
def test_unscorable_attempts_are_left_out(name: str) -> None:
    """NaN rewards change nobody else's advantage and have 0; groups that cannot be scored at all have 0 too."""
    known = algo.RECIPES[name]().advantages([group(1.0, 0.0, 0.5)])[0]
    found = algo.RECIPES[name]().advantages([group(1.0, 0.0, 0.5, NAN), group(NAN, NAN)])
    for got, want in zip(found[0], [*known, 0.0], strict=True):
        close(got, want if isinstance(got, float) else np.broadcast_to(want, np.shape(got)))
    assert not np.any(found[1])


def test_metrics_of_a_loss() -> None:
    # two tokens, r = 1.5 (A = 1, above 1.28) and 1: mean 1.25; the totals count four tokens, two of them silent
    old = mx.log(mx.array([[1.0, 1.0]]))
    batch = minibatch([[1, 1]], 1.0, old_logprobs=old, reference_logprobs=old, sampler_logprobs=old)
    recipe = algo.dapo(kl=0.5)
    new = Logprobs(mx.log(mx.array([[1.5, 1.0]])))
    shown = algo.finish(
        recipe.loss(new, batch, Totals(tokens=4, sequences=2, groups=1, max_tokens=2, without_signal=1))[1]
    )
    close(shown["policy/ratio_mean"], 1.25)
    close(shown["policy/ratio_max"], 1.5)
    close(shown["policy/clip_high"], 0.25)
    close(shown["policy/old_kl"], -math.log(1.5) / 2)
    # k3 = 1/1.5 - 1 + log 1.5 = 0.0721318, over two tokens
    close(shown["policy/kl"], 0.0721318 / 2)
    close(shown["policy/kl_coefficient"], 0.5)
    # -(1.28 + 1) / 4 + 0.5 * 0.0721318 / 4
    close(shown["policy/loss"], -0.5609835)


# Shaping


def test_overlong_penalty() -> None:
    # limit 10, buffer 4: free up to 6, then 1/4 a token, 1 at 10; beyond, only a cap stops it
    assert [shaping.overlong_penalty(n, 10, 4) for n in (3, 6, 7, 10, 12)] == [0, 0, -0.25, -1, -1.5]
    assert shaping.overlong_penalty(12, 10, 4, cap=1.0) == -1
    shaped = shaping.shape_overlong([(attempt(1.0, tokens=7), attempt(0.0, tokens=2))], 10, 4)
    assert [row.reward for row in shaped[0]] == [0.75, 0.0]
    assert shaped[0][0].rewards == {"shaping/overlong": -0.25}
    # parts of a reward, those of shaping included, are each on a scale of their own
    close(np.concatenate(algo.grpo(combine="normalise", eps=0.0).advantages(shaped)), [-(0.5**0.5), 0.5**0.5])


def test_length_penalty() -> None:
    # mean 0.5, longest 4: less 0.5 * 0.2 * (4/4, 2/4); a group of mean 0 loses nothing
    groups = [(attempt(1.0, tokens=4), attempt(0.0)), (attempt(0.0, tokens=4), attempt(0.0))]
    shaped = shaping.shape_length(groups, 0.2)
    close([row.reward for group in shaped for row in group], [0.9, -0.05, 0.0, 0.0])
    assert shaped[0][1].rewards == {"shaping/length": pytest.approx(-0.05)}
    assert shaped[0][1].weights == {"shaping/length": 1.0}


def test_keep_varied() -> None:
    groups = [group(0.1, 0.1, 0.1), group(0.0, 1.0), group(NAN, 1.0)]
    assert shaping.keep_varied(groups) == [groups[1]]


@pytest.mark.parametrize(
    ("recipe", "given", "words"),
    [
        ("grpo", {"clip": (-1.0, 0.2)}, "grpo: clip: wanted distances from 1, the lower between 0 and 1"),
        ("grpo", {"eps": -1e-6}, "grpo: eps: wanted at least 0, got -1e-06"),
        ("grpo", {"dual_clip": 0.5}, "grpo: dual_clip: wanted more than 1, or none, got 0.5"),
        ("grpo", {"kl": -0.1}, "grpo: kl: wanted at least 0, got -0.1"),
        ("rloo", {"entropy": -0.1}, "rloo: entropy: wanted at least 0, got -0.1"),
        ("grpo", {"kl": math.nan}, "grpo: kl: wanted a finite number, got nan"),
        ("grpo", {"log_ratio_clamp": (2.0, -2.0)}, "grpo: log_ratio_clamp: wanted a lower bound below the upper one"),
        ("gigpo", {"gamma": 1.5}, "gigpo: gamma: wanted between 0 and 1, got 1.5"),
        ("sapo", {"tau_pos": 0.0}, "sapo: tau_pos: wanted more than 0, got 0.0"),
    ],
)
def test_a_number_that_no_equation_takes_is_refused(recipe, given, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        getattr(recipes, recipe)(**given)


def test_every_convention_is_within_the_bounds():
    for family, tables in CONVENTIONS.items():
        for name, table in tables.items():
            getattr(recipes, name)(convention=family)
            for key, value in {**DEFAULTS[name], **table}.items():
                refuse_number(name, key, value)
