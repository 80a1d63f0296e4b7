"""A teacher in training: another model, the base, or the policy under a hint, in every form of comparison."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest

from helpers import HINT, a_policy, assert_same_gradient, flat, length, made, moved, rows, with_tasks
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
from mlxrl.rollout.render import render
from mlxrl.settings import LoRA, Sampling
from mlxrl.train.loop import train
from mlxrl.train.pack import pack
from mlxrl.train.step import fill, gradient, update
from mlxrl.train.teacher import Teacher, hinted, teacher_of
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
    """One group; of 4 attempts it shares its prompt, of 2 it does not."""
    return pack([with_tasks(made([1.0, 0.0, 0.5, 0.2][:size], lengths=[3, 5, 2, 4][:size]))], algorithm)


@pytest.mark.parametrize("size", [2, 9])
def test_the_teacher_is_forced_on_the_same_tokens_under_its_own_prompt(size):
    p, other = a_policy(), a_teacher()
    groups = [with_tasks(made([float(n) for n in range(size)]))]
    batch = pack(groups, algo.opd())
    assert all((m.prefix.size > 0) == (size == 9) for m in batch)
    prompts = {None: groups[0][0].prompt, "hint": render(tokenizer(), hinted(groups[0][0].task, "hint"))}
    assert len(prompts["hint"]) > len(prompts[None])
    cases = [(other, None), (other, "hint"), ("base", None), ("base", "hint"), (None, "hint")]
    for given, hint in cases:
        judge = teacher_of(p, algo.opd(), given, hint)
        assert judge is not None
        filled = fill(p, batch, frozenset({"teacher", "reference"} if given == "base" else {"teacher"}), teacher=judge)
        with without_adapters(p) if given == "base" else nullcontext():
            for row, got in rows(filled, "teacher_logprobs").items():
                action = groups[0][row].turns[0].tokens
                wanted = gather(whole(judge.policy, prompts[hint], action), mx.array(action))
                np.testing.assert_allclose(got, np.array(wanted), rtol=1e-5, atol=2e-5)
        if (given, hint) == ("base", None):
            for m in filled:
                assert mx.array_equal(m.teacher_logprobs, m.reference_logprobs)


@pytest.mark.parametrize("term", TERMS[2:], ids=name_of)
def test_comparisons_are_those_of_all_logits_at_once(term, monkeypatch):
    """Value and gradient against log-probs [T, V] of both models, and chunks that cut through rows."""
    p, other, algorithm = a_policy(), a_teacher(), algo.opd(teacher=term)
    batch = a_batch(algorithm)
    monkeypatch.setattr(head, "CHUNK", 320 * 3)
    filled = fill(p, batch, frozenset({"teacher"}), algo=algorithm, teacher=Teacher(other))
    metrics, got = gradient(p, filled, algorithm, Teacher(other))
    group, tokens = batch.groups[0], batch.totals.tokens
    ids = None if isinstance(term, TeacherVocabulary) else rows(filled, "top_ids")

    def loss() -> mx.array:
        total = mx.array(0.0)
        for row, one in enumerate(group):
            (turn,) = one.turns
            pair = [whole(model, one.prompt, turn.tokens) for model in (p, other)]
            if ids is not None:
                pair = [gather(logp, mx.array(ids[row])) for logp in pair]
            total = total + by_definition(term, *pair).sum()
        return total / tokens

    value, wanted = nn.value_and_grad(p.model, loss)()
    assert metrics["policy/loss"] == pytest.approx(value.item(), rel=1e-4, abs=1e-6)
    assert_same_gradient(got, wanted, 2e-4)
    if not isinstance(term, TeacherSurrogate):
        assert metrics["policy/teacher_kl"] == pytest.approx(value.item(), rel=1e-4)
    if ids is not None and filled.micro_batches[0].top_ids is not None and algorithm.comparison.support == "teacher":
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
    group, judge = with_tasks(made([float(n) for n in range(9)])), Teacher(p, base=base, hint=hint)

    def of(tokens: int | None) -> tuple[int, Any]:
        batch = pack([group], algorithm, tokens_per_pass=tokens)
        assert all(m.prefix.size for m in batch)
        filled = fill(p, batch, frozenset({"teacher"}), algo=algorithm, teacher=judge)
        return len(batch), gradient(p, filled, algorithm, judge)[1]

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
    assert metrics["policy/teacher_coefficient"] == 1.0


def test_candidates_and_old_logprobs_survive_several_updates():
    p, other = a_policy(), a_teacher()
    algorithm = algo.opd(teacher=TeacherSurrogate(k=8))
    batch = fill(p, a_batch(algorithm), algorithm.needs | {"old"}, algo=algorithm, teacher=Teacher(other))
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
    assert got["policy/loss"] == pytest.approx((wanted * m.mask).sum().item() / batch.totals.tokens, rel=1e-4)
    assert got["policy/loss"] < first[0]["policy/loss"]


def test_a_reward_is_mixed_in_by_its_weight():
    p, other = a_policy(), a_teacher()
    batch = {weight: pack([with_tasks(made([1.0, 0.0]))], algo.opd(reward=weight)) for weight in (0.0, 0.5)}
    judge = Teacher(other)
    both, taught, rewarded = (
        gradient(p, fill(p, pack([with_tasks(made([1.0, 0.0]))], one), one.needs - {"old"}, teacher=judge), one, judge)[
            1
        ]
        for one in (
            algo.opd(reward=0.5, reduction="sequence_mean"),
            algo.opd(reduction="sequence_mean"),
            algo.opd(reward=0.5, teacher=TeacherAdvantage(coefficient=1e-9), reduction="sequence_mean"),
        )
    )
    assert_same_gradient(both, {n: v + flat(rewarded)[n] for n, v in flat(taught).items()}, 1e-4)
    assert not mx.any(batch[0.0].micro_batches[0].advantages).item()


@pytest.mark.parametrize("term", [TeacherTopK(k=8), TeacherVocabulary()], ids=name_of)
def test_no_more_than_a_chunk_of_logits_exists(term, monkeypatch):
    """4 rows of 16 tokens over 40,960 words: all logits are 10 MB, of the teacher and of the student."""
    wide = {"vocab_size": 40960, "tie_word_embeddings": True}
    p = as_policy(dense(**wide), tokenizer(), lora=LoRA(rank=4))
    moved(p.model)
    other, algorithm = a_teacher(**wide), algo.opd(teacher=term)
    batch = pack([made([0.0, 1.0, 2.0, 3.0], prompt=4, lengths=[16] * 4)], algorithm)
    monkeypatch.setattr(head, "CHUNK", 2**21)  # 8 MB, and 1 MB where distributions are compared
    judge = Teacher(other)
    mx.clear_cache()
    resting = mx.get_active_memory()
    mx.reset_peak_memory()
    filled = fill(p, batch, frozenset({"teacher"}), algo=algorithm, teacher=judge)
    gradient(p, filled, algorithm, judge)
    assert mx.get_peak_memory() - resting < 40e6  # all at once it is 120 MB; a busy CPU runs further ahead


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
        update(
            a_policy(), optim.SGD(0.1), a_batch(algo.opd()), algo.opd(), teacher=as_policy(dense(1), other, lora=None)
        )


@pytest.mark.parametrize(
    ("algorithm", "given", "hint", "message"),
    [
        (algo.opd(), None, None, "opd learns from one; wanted teacher="),
        (algo.grpo(), "base", None, "no effect, because grpo does not learn from one"),
        (algo.grpo(), None, "hint", "no effect, because grpo does not learn from one"),
        (algo.opd(), "bas", None, r"wanted a policy, as mlxrl.load\('bas', lora=None\) gives"),
        (algo.opd(), "self", None, "is the student itself, which teaches nothing"),
        (algo.opd(), None, "answer", "wanted a text in column 'answer' of every task, got None; there are hint, none"),
        (algo.opd(), "base", "none", "wanted a text in column 'none' of every task, got ''"),
    ],
)  # fmt: skip
def test_teachers_that_teach_nothing_are_refused(algorithm, given, hint, message):
    p = a_policy()
    with pytest.raises(ValueError, match=message):
        update(p, optim.SGD(0.1), a_batch(algorithm), algorithm, teacher=p if given == "self" else given, hint=hint)


def test_a_hint_stands_behind_the_last_message():
    chat = Task(({"role": "system", "content": "s"}, {"role": "user", "content": "q"}), {"h": "x"})
    assert hinted(chat, "h").prompt == (chat.prompt[0], {"role": "user", "content": "q\n\nx"})
    assert hinted(Task("q", {"h": "x"}), "h").prompt == "q\n\nx"


@pytest.mark.parametrize("term", [TERMS[0], TERMS[5], TERMS[6]], ids=name_of)
def test_training_needs_no_reward(term):
    p, other = a_policy(), a_teacher()
    run: dict[str, Any] = {"steps": 2, "tasks_per_step": 2, "group_size": 2, "sampling": Sampling(max_tokens=5)}
    tasks = [Task(text, {"hint": HINT}) for text in ("one", "two", "three")]
    found = list(train(p, tasks, algo.opd(teacher=term), teacher=other, minibatches=2, **run))
    for step in found:
        assert math.isnan(step.metrics["reward/mean"])
        assert step.metrics["reward/failed"] == step.metrics["groups/silent"] == 0
        assert step.metrics["policy/updates"] == 2
        assert step.metrics["policy/teacher_kl"] != 0
    scored = list(train(p, tasks, algo.opd(teacher=term), hint="hint", reward=length, **run))
    assert all(step.metrics["policy/updates"] == 1 for step in scored)
    assert all(math.isfinite(step.metrics["reward/mean"]) for step in scored)
    with pytest.raises(ValueError, match="grpo learns from rewards; wanted at least one function"):
        next(train(p, tasks, algo.grpo(), **run))
