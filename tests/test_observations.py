"""Observations that are predicted, in batches, gradients and runs."""

from __future__ import annotations

import dataclasses
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest
from environments.maze import Maze, maze_tasks

from helpers import a_policy, assert_same_gradient, calls, flat, made
from mlxrl import algo, train
from mlxrl.algo import Echo
from mlxrl.algo.algorithm import not_predicted
from mlxrl.policy.logprobs import logprobs
from mlxrl.settings import EpisodeLimits, Rollout, Sampling, Train
from mlxrl.train.batch import make_batch
from mlxrl.train.gradient import gradient
from mlxrl.train.loop import run
from mlxrl.train.minibatches import minibatches
from mlxrl.train.teacher import Teacher
from mlxrl.train.update import complete, update
from mlxrl.types import Group, TokenDetails, Trajectory, Turn
from models import dense, hybrid, moe


def episodes(rewards: list[float], *, prompt: int = 90, seed: int = 0, read: tuple[int, ...] = (3, 2)) -> Group:
    """Episodes over one prompt: after the first turn one of four tokens for each number of tokens read before it."""
    draw = np.random.default_rng(seed + 100)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(draw.integers(9, 300, count).tolist())

    def longer(one: Trajectory) -> Trajectory:
        return dataclasses.replace(one, turns=(*one.turns, *[Turn(ids(n), ids(4), (-1.0,) * 4) for n in read]))

    return tuple(longer(one) for one in made(rewards, prompt=prompt, seed=seed))


@pytest.mark.parametrize("prompt", [4, 90])
def test_what_is_observed_and_counted(prompt: int) -> None:
    """Two trajectories of 3 and 4 tokens that read 3 and 2 more, one of which, 7, is a special one. Their rewards are
    equal, so there is no advantage; a trajectory that ended in an error is not predicted."""
    first, second = episodes([1.0, 1.0], prompt=prompt)
    turns = list(first.turns)
    turns[1] = dataclasses.replace(turns[1], observation=(7, *turns[1].observation[1:]))
    first = dataclasses.replace(first, turns=tuple(turns))
    group = (first, second, dataclasses.replace(second, stop="error"))
    batch = make_batch([group], algo.grpo(terms=[Echo(weight=0.1, skip=frozenset({7}))]))
    assert (batch.totals.observation_tokens, batch.totals.without_signal) == (9, 1)
    assert batch.observation_tokens == {0: 4, 1: 5}
    (m,) = batch
    front = 0 if m.prefix.size else prompt
    row = m.trajectories.index(0)
    assert m.observation_mask[row].tolist()[front:][:16] == [0] * 4 + [1] * 2 + [0] * 4 + [1] * 2 + [0] * 4
    assert float(m.observation_mask.sum()) == 9
    assert float((m.observation_mask * m.mask).sum()) == 0
    plain = make_batch([group], algo.grpo())
    assert (len(plain), plain.totals.observation_tokens, plain.totals.without_signal) == (0, 0, 3)
    # A forced token is not the environment's.
    forced = dataclasses.replace(
        second, turns=(dataclasses.replace(second.turns[0], details=TokenDetails(forced=(1,))), *second.turns[1:])
    )
    assert make_batch([(first, forced)], algo.grpo(terms=[Echo(weight=0.1)])).totals.observation_tokens == 10


def test_the_log_probs_are_those_of_the_tokens_after_what_stands_before_them() -> None:
    p, group = a_policy(), episodes([1.0, 0.0])
    a = algo.grpo(terms=[Echo(weight=0.1)])
    for m in make_batch([group], a):
        found = logprobs(p, m, observations=True)
        assert found.observation_logprobs is not None
        wanted = logprobs(p, dataclasses.replace(m, mask=m.observation_mask)).token_logprobs
        assert mx.array_equal(found.observation_logprobs, wanted)
        assert mx.array_equal(found.token_logprobs, logprobs(p, m).token_logprobs)
    metrics, _ = gradient(p, make_batch([group], a), a)
    wanted = 0.0
    for one in group:
        tokens = [*one.prompt, *one.turns[0].tokens]
        for turn in one.turns[1:]:
            for token in turn.observation:
                logits = p.model(mx.array([tokens]))[0, -1]
                wanted -= (logits[token] - mx.logsumexp(logits)).item() / 10
                tokens.append(token)
            tokens += turn.tokens
    assert metrics["echo/loss"] == pytest.approx(wanted, rel=1e-5)


def test_a_weight_of_nothing_is_the_algorithm_bit_for_bit() -> None:
    p, groups = a_policy(), [episodes([1.0, 0.0, 0.4])]
    plain = algo.grpo()
    wanted, slope = gradient(p, make_batch(groups, plain), plain)
    spent = algo.grpo(terms=[Echo(weight=0.3, taper=10)]).at(10)
    got = gradient(p, make_batch(groups, spent), spent)
    assert got[0] == wanted
    assert all(mx.array_equal(value, flat(slope)[name]) for name, value in flat(got[1]).items())
    # Nor does a weight change anything where no environment answers.
    alone, a = [made([1.0, 0.0, 0.4])], algo.grpo(terms=[Echo(weight=0.3)])
    got, wanted = gradient(p, make_batch(alone, a), a), gradient(p, make_batch(alone, plain), plain)
    assert got[0] == {**wanted[0], "echo/loss": 0.0, "echo/coefficient": 0.0}
    assert all(mx.array_equal(value, flat(wanted[1])[name]) for name, value in flat(got[1]).items())


def test_the_gradient_is_the_algorithms_and_that_of_the_prediction() -> None:
    """With weight 0.5 it is the algorithm's and half of what weight 1 adds, and both terms are of the same size."""
    p, groups = a_policy(), [episodes([1.0, 0.0, 0.4])]
    slopes = []
    for weight in (0.0, 0.5, 1.0):
        a = algo.dapo(terms=[Echo(weight=weight)] if weight else [])
        slopes.append(flat(gradient(p, make_batch(groups, a), a)[1]))
    for name, half in slopes[1].items():
        np.testing.assert_allclose(half, (slopes[0][name] + slopes[2][name]) / 2, rtol=1e-3, atol=1e-6)
        assert mx.linalg.norm(slopes[2][name] - slopes[0][name]).item() > 0


@pytest.mark.parametrize("make", [dense, hybrid, moe])
def test_gradients_do_not_depend_on_passes_padding_or_sharing(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    p, a = a_policy(make), algo.grpo(terms=[Echo(weight=0.5)])
    groups = [
        episodes([1.0, 0.0, 0.0, 1.0, 0.2], seed=1),
        episodes([1.0, 1.0, 1.0], prompt=70, seed=2, read=(5,)),
    ]
    whole = make_batch(groups, a)
    assert [m.prefix.size for m in whole] == [90, 70]
    metrics, wanted = gradient(p, whole, a)
    for tokens in (1, 130):
        split = make_batch(groups, a, Train(tokens_per_pass=tokens))
        assert len(split) > 2
        more, got = gradient(p, split, a)
        assert_same_gradient(got, wanted)
        for name in ("loss", "echo/loss", "echo/coefficient"):
            assert more[name] == pytest.approx(metrics[name], abs=1e-5)
    assert_same_gradient(gradient(p, whole, a, recompute=True)[1], wanted)

    def padded(array: Any) -> Any:
        return None if array is None else mx.pad(array, [(0, 0), (0, 9)])

    names = ("tokens", "mask", "advantages", "sampler_logprobs", "observation_mask")
    wide = [dataclasses.replace(m, **{name: padded(getattr(m, name)) for name in names}) for m in whole]
    assert_same_gradient(gradient(p, dataclasses.replace(whole, micro_batches=tuple(wide)), a)[1], wanted)
    monkeypatch.setattr(train.batch, "SHARE_FROM", 10**9)
    repeated = make_batch(groups, a)
    assert {m.prefix.size for m in repeated} == {0}
    assert_same_gradient(gradient(p, repeated, a)[1], wanted)


def test_a_group_without_a_reward_learns_to_predict() -> None:
    p, a = a_policy(), algo.grpo(terms=[Echo(weight=1.0)])
    groups = [episodes([0.0, 0.0])]
    losses = []
    for _ in range(4):
        metrics = update(p, optim.SGD(0.1), make_batch(groups, a), a)
        assert metrics["echo/coefficient"] == 1.0
        losses.append(metrics["echo/loss"])
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.01


def test_minibatches_and_shortened_sequences_have_their_own_denominators() -> None:
    p, a = a_policy(), algo.dapo(terms=[Echo(weight=0.5)])
    groups = [episodes([1.0, 0.0], seed=1), episodes([0.0, 0.0], seed=2, prompt=4, read=(5, 1, 2))]
    batch = complete(p, make_batch(groups, a), a, a.needs | {"old"})
    ones = minibatches(batch, 2, "x")
    assert sorted(one.totals.observation_tokens for one in ones) == [10, 16]
    for one in ones:
        alone = make_batch(one.groups, a)
        assert one.totals.observation_tokens == alone.totals.observation_tokens
        assert_same_gradient(gradient(p, one, a)[1], gradient(p, alone, a)[1])
    # The prompt of 90, 3 or 4 tokens, and what was read first; the second observation is dropped.
    cut = make_batch(groups[:1], a, Train(max_tokens_per_sequence=98))
    assert cut.totals.observation_tokens == 10
    assert sum(float(m.observation_mask.sum()) for m in cut) == 6
    assert gradient(p, cut, a)[0]["echo/coefficient"] == pytest.approx(0.5 * 0.6)


@pytest.mark.parametrize("term", [algo.TeacherAdvantage(), algo.TeacherTopK(), algo.TeacherVocabulary()])
def test_beside_a_teacher(term: Any) -> None:
    """The teacher scores what was sampled, and both come out of one pass: the prediction is that beside grpo."""
    p, groups = a_policy(), [episodes([1.0, 0.0])]
    plain, teacher = algo.opd(teacher=term), Teacher(p, base=True)
    found = []
    for a in (algo.grpo(terms=[Echo(weight=0.5)]), algo.opd(teacher=term, terms=[Echo(weight=0.5)]), plain):
        batch = complete(p, make_batch(groups, a), a, a.needs - {"old"}, teacher)
        found.append(gradient(p, batch, a, teacher)[0])
    beside, both, alone = found
    assert both["echo/loss"] == pytest.approx(beside["echo/loss"], rel=1e-6)
    assert both["teacher/kl"] == pytest.approx(alone["teacher/kl"], rel=1e-5)
    added = 0.5 * both["echo/loss"]
    assert both["loss"] == pytest.approx(alone["loss"] + added, rel=1e-5)


def test_an_answer_in_a_rewritten_history_is_predicted_too() -> None:
    """The second turn's prompt is a whole new one of 20 tokens, the last 3 of which are the answer. It is a sequence of
    its own, whose prompt has 17; the third turn's 2 stand in it. Without `new_suffix` there are these 2 alone."""
    (first,) = episodes([1.0])
    draw = np.random.default_rng(5)
    prompt = tuple(draw.integers(9, 300, 20).tolist())
    turns = list(first.turns)
    turns[1] = dataclasses.replace(turns[1], observation=prompt, history_rewritten=True, new_suffix=3)
    one = dataclasses.replace(first, turns=tuple(turns))
    p, a = a_policy(), algo.grpo(terms=[Echo(weight=0.1)])
    batch = make_batch([(one, dataclasses.replace(one, reward=0.0))], a)
    assert (batch.totals.observation_tokens, batch.totals.sequences) == (10, 4)
    metrics = gradient(p, batch, a)[0]
    wanted, tokens = 0.0, list(prompt[:17])
    for read, action in ((prompt[17:], turns[1].tokens), (turns[2].observation, turns[2].tokens)):
        for token in read:
            logits = p.model(mx.array([tokens]))[0, -1]
            wanted -= (logits[token] - mx.logsumexp(logits)).item() / 5
            tokens.append(token)
        tokens += action
    assert metrics["echo/loss"] == pytest.approx(wanted, rel=1e-5)
    turns[1] = dataclasses.replace(turns[1], new_suffix=0)
    unseen = dataclasses.replace(first, turns=tuple(turns))
    assert make_batch([(unseen, unseen)], a).totals.observation_tokens == 4
    # What is not predicted is laid out as ever.
    plain = [
        [m.tokens.tolist() for m in make_batch([(x, dataclasses.replace(x, reward=0.0))], algo.grpo())]
        for x in (one, unseen)
    ]
    assert plain[0] == plain[1]


def test_a_run_tapers_it_and_leaves_the_special_tokens_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five steps in a maze by a model that knows nothing: the weight is 0.4, 0.3, 0.2 and 0.1, and in the end 0."""
    p, a = a_policy(), algo.gigpo(terms=[Echo(weight=0.4, taper=4)])
    batches = calls(monkeypatch, train.loop, "make_batch")
    found = [step.metrics for step in run(
        p, maze_tasks(2), a, environment=Maze, steps=5, rollout=Rollout(tasks_per_step=1, group_size=2),
        limits=EpisodeLimits(max_turns=2), sampling=Sampling(max_tokens=3), optimizer=optim.SGD(1e-3),
    )]  # fmt: skip
    skipped = [not_predicted(algorithm) for _, algorithm, *_ in batches]
    assert [m.get("echo/coefficient", 0.0) for m in found] == pytest.approx([0.4, 0.3, 0.2, 0.1, 0.0])
    assert all(m["echo/loss"] > 0 for m in found[:4])
    assert skipped == [set(p.tokenizer.all_special_ids)] * 4 + [None]
    assert p.tokenizer.eos_token_id in skipped[0]
