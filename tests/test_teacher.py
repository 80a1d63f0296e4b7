"""A teacher in training: another model, the base, or the policy with a hint, in every form of comparison."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest

from helpers import a_policy, assert_same_gradient, flat, guarded, made, rows, with_tasks
from mlxrl import algo
from mlxrl.algo import divergence
from mlxrl.algo.terms import (
    TeacherAdvantage,
    TeacherKL,
    TeacherSurrogate,
    TeacherTerm,
    TeacherTopK,
    TeacherVocabulary,
)
from mlxrl.policy import head
from mlxrl.policy.logprobs import logprobs
from mlxrl.policy.lora import without_adapters
from mlxrl.policy.policy import Policy, as_policy
from mlxrl.rollout.chat import render
from mlxrl.settings import Train
from mlxrl.train.batch import make_batch
from mlxrl.train.gradient import gradient
from mlxrl.train.teacher import Teacher, hinted, teacher_of
from mlxrl.train.update import complete, update
from mlxrl.types import Batch, Task
from models import dense, tokenizer
from oracles.extra import gather, log_softmax

TERMS = [
    TeacherAdvantage(),
    TeacherKL(),
    TeacherTopK(k=8),
    TeacherTopK(k=8, beta=0.0, tail=False),
    TeacherTopK(k=8, beta=0.3, support="student"),
    TeacherSurrogate(k=8),
    TeacherVocabulary(),
    TeacherVocabulary(beta=0.0),
    TeacherVocabulary(beta=0.3),
]


def name_of(term: TeacherTerm) -> str:
    return f"{type(term).__name__}-{getattr(term, 'beta', '')}"


def a_teacher(seed: int = 1, **changes: Any) -> Policy:
    return as_policy(dense(seed, **changes), tokenizer(), lora=None)


def whole(p: Policy, prompt: tuple[int, ...], action: tuple[int, ...]) -> mx.array:
    """[T, V] log-probs that predict an action's tokens, all logits at once."""
    logits = p.model(mx.array([[*prompt, *action]]))[0, len(prompt) - 1 : -1]
    return log_softmax(logits)


def a_batch(algorithm: Any, size: int = 4) -> Batch:
    """One group; of 4 trajectories it shares its prompt, of 2 it does not."""
    return make_batch([with_tasks(made([1.0, 0.0, 0.5, 0.2][:size], lengths=[3, 5, 2, 4][:size]))], algorithm)


@pytest.mark.parametrize("size", [2, 9])
def test_the_teacher_is_forced_on_the_same_tokens_under_its_own_prompt(size):
    p, other = a_policy(), a_teacher()
    groups = [with_tasks(made([float(n) for n in range(size)]))]
    batch = make_batch(groups, algo.opd())
    assert all((m.prefix.size > 0) == (size == 9) for m in batch)
    prompts = {None: groups[0][0].prompt, "hint": render(tokenizer(), hinted(groups[0][0].task, "hint"))}
    assert len(prompts["hint"]) > len(prompts[None])
    given = [other, Teacher(other, hint="hint"), "base", Teacher(base=True, hint="hint"), Teacher(hint="hint")]
    for one in given:
        teacher = teacher_of(p, algo.opd(), one)
        assert teacher is not None
        needs = frozenset({"teacher", "reference"} if teacher.base else {"teacher"})
        completed = complete(p, batch, algo.opd(), needs, teacher)
        with without_adapters(p) if teacher.base else nullcontext():
            for number, got in rows(completed, "teacher_logprobs").items():
                action = groups[0][number].turns[0].tokens
                wanted = gather(whole(teacher.model, prompts[teacher.hint], action), mx.array(action))
                np.testing.assert_allclose(got, np.array(wanted), rtol=1e-5, atol=2e-5)
        if one == "base":
            for m in completed:
                assert mx.array_equal(m.teacher_logprobs, m.reference_logprobs)


@pytest.mark.parametrize("term", TERMS[2:], ids=name_of)
def test_comparisons_are_those_of_all_logits_at_once(term, monkeypatch):
    """Value and gradient against log-probs [T, V] of both models, in chunks that cut through sequences."""
    p, other, algorithm = a_policy(), a_teacher(), algo.opd(teacher=term)
    batch = a_batch(algorithm)
    monkeypatch.setattr(head, "CHUNK", 320 * 3)
    completed = complete(p, batch, algorithm, frozenset({"teacher"}), Teacher(other))
    metrics, got = gradient(p, completed, algorithm, Teacher(other))
    group, tokens = batch.groups[0], batch.totals.tokens
    ids = None if isinstance(term, TeacherVocabulary) else rows(completed, "top_ids")

    def loss() -> mx.array:
        total = mx.array(0.0)
        for number, one in enumerate(group):
            (turn,) = one.turns
            pair = [whole(model, one.prompt, turn.tokens) for model in (p, other)]
            if ids is not None:
                pair = [gather(logp, mx.array(ids[number])) for logp in pair]
            total = total + by_definition(term, *pair).sum()
        return total / tokens

    value, wanted = nn.value_and_grad(p.model, loss)()
    assert metrics["loss"] == pytest.approx(value.item(), rel=1e-4, abs=1e-6)
    assert_same_gradient(got, wanted, 2e-4)
    if not isinstance(term, TeacherSurrogate):
        assert metrics["teacher/kl"] == pytest.approx(value.item(), rel=1e-4)
    if ids is not None and completed.micro_batches[0].top_ids is not None and algorithm.comparison.support == "teacher":
        best = np.argsort(-np.array(whole(other, group[0].prompt, group[0].turns[0].tokens)), axis=-1)[:, :8]
        assert [set(own) for own in ids[0].tolist()] == [set(own) for own in best.tolist()]


def by_definition(term: Any, student: mx.array, teacher: mx.array) -> mx.array:
    """[T] a term's loss, on distributions [T, K] or [T, V]."""
    if isinstance(term, TeacherSurrogate):
        old = mx.stop_gradient(student)
        credit = mx.softmax(old, axis=-1) * (teacher - old)
        return -(mx.stop_gradient(credit) * mx.exp(student - old)).sum(axis=-1)  # on-policy nothing is clipped
    if isinstance(term, TeacherTopK):
        close = divergence.with_tail if term.tail else divergence.renormalised
        student, teacher = close(student), close(teacher)
    ends = {0.0: divergence.forward_kl, 1.0: divergence.reverse_kl}
    if term.beta in ends:
        return ends[term.beta](student, teacher)
    return divergence.jsd(student, teacher, term.beta)


@pytest.mark.parametrize("term", [TERMS[0], TERMS[4], TERMS[6]], ids=name_of)
@pytest.mark.parametrize(("base", "hint"), [(True, None), (False, "hint")])
def test_passes_that_share_a_prompt_change_nothing(term, base, hint):
    p, algorithm = a_policy(keys=("self_attn.q_proj", "model.embed_tokens")), algo.opd(teacher=term)
    group, teacher = with_tasks(made([float(n) for n in range(9)])), Teacher(p, base=base, hint=hint)

    def of(tokens: int | None) -> tuple[int, Any]:
        batch = make_batch([group], algorithm, Train(tokens_per_pass=tokens))
        assert all(m.prefix.size for m in batch)
        completed = complete(p, batch, algorithm, frozenset({"teacher"}), teacher)
        return len(batch), gradient(p, completed, algorithm, teacher)[1]

    (one, wanted), (several, got) = of(None), of(40)
    assert (one, several > 2) == (1, True)
    assert_same_gradient(got, wanted, 2e-5)


@pytest.mark.parametrize("term", TERMS, ids=name_of)
def test_every_form_brings_the_student_closer(term):
    p, other, algorithm = a_policy(move=False), a_teacher(), algo.opd(teacher=term)
    batch = a_batch(algorithm)

    def gap() -> float:
        """KL(student || teacher) at the tokens of the batch."""
        found = [
            divergence.reverse_kl(*(whole(model, one.prompt, one.turns[0].tokens) for model in (p, other))).mean()
            for one in batch.groups[0]
        ]
        return float(mx.stack(found).mean())

    optimizer, before = optim.Adam(5e-3), gap()
    for _ in range(6):
        metrics = update(p, optimizer, batch, algorithm, teacher=other)
    assert gap() < before - 0.01
    assert metrics["teacher/coefficient"] == 1.0


def test_top_ids_and_old_logprobs_stay_those_from_before_several_updates():
    p, other = a_policy(), a_teacher()
    algorithm = algo.opd(teacher=TeacherSurrogate(k=8))
    batch = complete(p, a_batch(algorithm), algorithm, algorithm.needs | {"old"}, Teacher(other))
    (m,) = batch
    assert mx.array_equal(m.old_logprobs, logprobs(p, m).token_logprobs)
    first = gradient(p, batch, algorithm, Teacher(other))
    update(p, optim.SGD(1.0), batch, algorithm, teacher=other, max_grad_norm=1e9)
    again = logprobs(p, m, top_ids=m.top_ids).top_logprobs
    assert mx.abs(again - m.old_top_logprobs).max().item() > 0.01
    # The weights and gaps are those at sampling time: l = sum_k max(-A r, -A clip r) with r of now over then.
    credit = mx.softmax(m.old_top_logprobs, axis=-1) * (m.teacher_top_logprobs - m.old_top_logprobs)
    r = mx.exp(again - m.old_top_logprobs)
    wanted = mx.maximum(-credit * r, -credit * mx.clip(r, 0.8, 1.2)).sum(axis=-1)
    got = gradient(p, batch, algorithm, Teacher(other))[0]
    assert got["loss"] == pytest.approx((wanted * m.mask).sum().item() / batch.totals.tokens, rel=1e-4)
    assert got["loss"] < first[0]["loss"]


def test_a_reward_is_mixed_in_by_its_weight():
    p, teacher, groups = a_policy(), Teacher(a_teacher()), [with_tasks(made([1.0, 0.0]))]

    def of(**options: Any) -> Any:
        algorithm = algo.opd(reduction="sequence_mean", **options)
        batch = make_batch(groups, algorithm)
        assert mx.any(batch.micro_batches[0].advantages).item() == ("reward" in options)
        batch = complete(p, batch, algorithm, algorithm.needs - {"old"}, teacher)
        return flat(gradient(p, batch, algorithm, teacher)[1])

    both, taught = of(reward=0.5), of()
    rewarded = of(reward=0.5, teacher=TeacherAdvantage(coefficient=1e-9))
    assert_same_gradient(both, {name: value + rewarded[name] for name, value in taught.items()}, 1e-4)


@pytest.mark.parametrize("term", TERMS, ids=name_of)
def test_a_teacher_of_more_token_ids_is_compared_at_those_of_the_student(term):
    """Each loss by its definition, over distributions of the teacher's 384 ids cut to the student's 320."""
    p, other, algorithm = a_policy(lambda: guarded(dense())), a_teacher(vocab_size=384), algo.opd(teacher=term)
    batch = complete(p, a_batch(algorithm), algorithm, frozenset({"teacher"}), Teacher(other))
    ids = rows(batch, "top_ids") if batch.micro_batches[0].top_ids is not None else {}
    assert all(own.max() < 320 for own in ids.values())
    metrics, got = gradient(p, batch, algorithm, Teacher(other))

    def loss() -> mx.array:
        total = mx.array(0.0)
        for number, one in enumerate(batch.groups[0]):
            (turn,) = one.turns
            pair = [whole(model, one.prompt, turn.tokens) for model in (p, other)]
            assert [logp.shape[1] for logp in pair] == [320, 384]
            if isinstance(term, TeacherVocabulary):
                pair = [log_softmax(logp[:, :320]) for logp in pair]
            else:
                chosen = mx.array(ids[number]) if ids else mx.array(turn.tokens)
                pair = [gather(logp, chosen) for logp in pair]
            total = (
                total + (by_definition(term, *pair) if ids or "Vocab" in name_of(term) else sampled(term, *pair)).sum()
            )
        return total / batch.totals.tokens

    value, wanted = nn.value_and_grad(p.model, loss)()
    assert metrics["loss"] == pytest.approx(value.item(), rel=1e-4, abs=1e-6)
    assert_same_gradient(got, wanted, 2e-4)


def sampled(term: Any, student: mx.array, teacher: mx.array) -> mx.array:
    """[T] a term's loss, on log-probs [T] of the sampled tokens; on-policy the ratio is 1."""
    x = student - teacher
    if isinstance(term, TeacherKL):
        return mx.exp(-x) - 1 + x
    return -mx.stop_gradient(-x) * mx.exp(student - mx.stop_gradient(student))


@pytest.mark.parametrize("hint", [None, "hint"])
@pytest.mark.parametrize("size", [2, 9])
@pytest.mark.parametrize("term", TERMS, ids=name_of)
def test_a_teacher_of_fewer_token_ids_teaches_up_to_the_first_that_it_has_not(term, size, hint):
    """The same as where the sequence ended there, and nothing behind its embedding is read."""
    p, other = a_policy(lambda: dense(vocab_size=384)), as_policy(guarded(dense(1)), tokenizer(), lora=None)
    algorithm, teacher = algo.opd(teacher=term, reduction="sum"), Teacher(other, hint=hint)
    group = with_tasks(made([float(n) for n in range(size)]))
    strange = [383, 320][: size - 1]  # in the first as the first token, in the second as the third

    def changed(cut: bool) -> Any:
        new = []
        for number, one in enumerate(group):
            (turn,) = one.turns
            tokens, place = list(turn.tokens), 2 * number
            if number < len(strange):
                tokens[place] = strange[number]
            end = place if cut and number < len(strange) else len(tokens)
            kept = [(350, *ids[1:]) for ids in turn.details.top_ids[:end]]  # an id that the teacher does not have
            details = dataclasses.replace(turn.details, top_ids=tuple(kept))
            new.append(
                dataclasses.replace(
                    one,
                    turns=(
                        dataclasses.replace(
                            turn, tokens=tuple(tokens[:end]), logprobs=turn.logprobs[:end], details=details
                        ),
                    ),
                )
            )
        return tuple(one for one in new if one.turns[0].tokens)

    got, wanted = (
        gradient(p, complete(p, batch, algorithm, frozenset({"teacher"}), teacher), algorithm, teacher)
        for batch in (make_batch([changed(cut)], algorithm) for cut in (False, True))
    )
    lost = complete(p, make_batch([changed(False)], algorithm), algorithm, frozenset({"teacher"}), teacher)
    assert lost.dropped_tokens == ({0: 3, 1: 2} if size == 9 else {0: 3})
    assert np.isfinite(got[0]["loss"])
    assert got[0]["loss"] == pytest.approx(wanted[0]["loss"], rel=1e-5)
    assert_same_gradient(got[1], wanted[1], 1e-4)


def test_nothing_is_taught_where_the_teacher_has_none_of_the_tokens():
    p, other = a_policy(lambda: dense(vocab_size=384)), as_policy(guarded(dense(1)), tokenizer(), lora=None)
    (turn,) = (one := made([1.0, 0.0])[0]).turns
    strange = dataclasses.replace(one, turns=(dataclasses.replace(turn, tokens=(320,) * len(turn.tokens)),))
    batch = make_batch([(strange, dataclasses.replace(strange, reward=2.0))], algo.opd())
    metrics = update(p, optim.SGD(0.1), batch, algo.opd(), teacher=other)
    assert metrics["grad_norm"] == 0.0
    assert metrics["sequences/dropped_tokens"] == 6.0


def test_vocabularies_are_compared():
    odd = as_policy(dense(1), tokenizer(), lora=None)
    core = odd.tokenizer._tokenizer
    core.add_tokens(["more"])  # one token more than the student has is no fault
    assert teacher_of(a_policy(), algo.opd(), odd) is not None
    other = tokenizer()
    vocabulary = other.get_vocab()
    first, second = (next(t for t, n in vocabulary.items() if n == number) for number in (20, 21))
    swapped = {**vocabulary, first: 21, second: 20}
    other._tokenizer.get_vocab = lambda: swapped
    with pytest.raises(ValueError, match=rf"token 20 is '{first}' for the student and '{second}' for the teacher"):
        teacher_of(a_policy(), algo.opd(), as_policy(dense(1), other, lora=None))


@pytest.mark.parametrize(
    ("algorithm", "given", "message"),
    [
        (algo.opd(), None, r"opd learns from one; wanted a policy, 'base', or Teacher\(hint=...\)"),
        (algo.grpo(), "base", "has no effect, because grpo does not learn from one"),
        (algo.grpo(), Teacher(hint="hint"), "has no effect, because grpo does not learn from one"),
        (algo.opd(), "bas", r'wanted a policy, as mlxrl.load\("bas", lora=None\) gives'),
        (algo.opd(), "self", "is the student itself, which teaches nothing"),
        (algo.opd(), Teacher(), "is the student itself, which teaches nothing"),
        (algo.opd(), Teacher(hint="answer"), "a text in column 'answer' of every task, got nothing .*; there are hint"),
        (algo.opd(), Teacher(base=True, hint="none"), 'a text in column .none. of every task, got ""; there are'),
    ],
)  # fmt: skip
def test_teachers_that_teach_nothing_are_refused(algorithm, given, message):
    p = a_policy()
    with pytest.raises(ValueError, match=message):
        update(p, optim.SGD(0.1), a_batch(algorithm), algorithm, teacher=p if given == "self" else given)


def test_a_hint_stands_after_the_last_message():
    chat = Task(({"role": "system", "content": "s"}, {"role": "user", "content": "q"}), {"h": "x"})
    assert hinted(chat, "h").prompt == (chat.prompt[0], {"role": "user", "content": "q\n\nx"})
    assert hinted(Task("q", {"h": "x"}), "h").prompt == "q\n\nx"
    parts = Task(({"role": "user", "content": [{"type": "text", "text": "q"}]},), {"h": "x"})
    assert hinted(parts, "h").prompt == ({"role": "user", "content": "q\n\nx"},)
    begun = {"role": "assistant", "content": "So"}
    asked = Task((parts.prompt[0], begun), {"h": "x"})
    assert hinted(asked, "h").prompt == ({"role": "user", "content": "q\n\nx"}, begun)
    for prompt, line in (((begun,), "wanted a message before the answer"), ((4, 5), "got token ids")):
        with pytest.raises(ValueError, match=line):
            hinted(Task(prompt, {"h": "x"}), "h")


@pytest.mark.parametrize("hint", [None, "hint"])
@pytest.mark.parametrize("size", [2, 9])
def test_a_teacher_scores_what_is_left_of_a_shortened_sequence(size, hint):
    """Under a hinted prompt sequences are laid out anew, and end after the same token."""
    p, algorithm = a_policy(dense), algo.opd()
    group = with_tasks(made([float(n) for n in range(size)], lengths=list(range(3, 3 + size))))

    def of(limit: int | None) -> tuple[int, dict[int, np.ndarray]]:
        batch = make_batch([group], algorithm, Train(max_tokens_per_sequence=limit))
        completed = complete(p, batch, algorithm, frozenset({"teacher"}), Teacher(p, hint=hint))
        return sum(batch.dropped_tokens.values()), rows(completed, "teacher_logprobs")

    (none, wanted), (dropped, got) = of(None), of(len(group[0].prompt) + 4)
    assert (none, dropped) == (0, sum(max(n - 4, 0) for n in range(3, 3 + size)))
    for number, values in got.items():
        assert len(values) == min(3 + number, 4)
        np.testing.assert_allclose(values, wanted[number][: len(values)], rtol=1e-5, atol=2e-5)
