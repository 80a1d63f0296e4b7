"""ECHO: the loss on what environments answer."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest
from environments.maze import Maze, maze_tasks

from helpers import MAZE, MINIMAL, a_policy, assert_same_gradient, close, flat, made
from mlxrl import algo, config
from mlxrl.algo import Echo
from mlxrl.algo.algorithm import at_step, not_predicted
from mlxrl.algo.echo import without_special_ids
from mlxrl.policy.logprobs import logprobs
from mlxrl.rollout.turns import go_on, open_chat
from mlxrl.settings import Sampling
from mlxrl.train.loop import train
from mlxrl.train.pack import pack
from mlxrl.train.parts import parts
from mlxrl.train.step import fill, gradient, update
from mlxrl.train.teacher import Teacher
from mlxrl.types import Group, Logprobs, MicroBatch, TokenDetails, Totals, Trajectory, Turn
from models import dense, hybrid, moe, tokenizer


def episodes(rewards: list[float], *, prompt: int = 90, seed: int = 0, read: tuple[int, ...] = (3, 2)) -> Group:
    """Episodes of a turn for each number, which says how many tokens are read before it, and the first."""
    draw = np.random.default_rng(seed + 100)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(draw.integers(9, 300, count).tolist())

    def longer(one: Trajectory) -> Trajectory:
        return dataclasses.replace(one, turns=(*one.turns, *[Turn(ids(n), ids(4), (-1.0,) * 4) for n in read]))

    return tuple(longer(one) for one in made(rewards, prompt=prompt, seed=seed))


def test_the_loss_of_two_observed_tokens() -> None:
    """-log p of 0.5 and 0.25 nats, over the step's 3 observed tokens, times 0.2: 0.2 * 0.75 / 3 = 0.05, and the
    derivative of each -0.2 / 3. The log-prob under the mask of nothing, NaN, has no part."""

    def one(new: mx.array, old: mx.array, advantages: mx.array, mask: mx.array) -> mx.array:
        return mx.ones_like(new)

    zeros = mx.zeros((1, 4))
    observed = mx.array([[0.0, 1.0, 1.0, 0.0]])
    mask = mx.array([[1.0, 0.0, 0.0, 0.0]])
    batch = MicroBatch(zeros[0, :0], zeros.astype(mx.int32), mask, zeros, zeros, observation_mask=observed)
    algorithm = algo.Algorithm("nothing", lambda groups: [], one, algo.reduce.token_mean, (Echo(weight=0.2),))

    def loss(read: mx.array) -> Any:
        return algorithm.loss(Logprobs(zeros, observation_logprobs=read), batch, Totals(1, 1, 1, 4, 0, 3))

    read = mx.array([[float("nan"), -0.5, -0.25, float("nan")]])
    (value, metrics), slope = mx.value_and_grad(loss)(read)
    close(value, 1.05)
    close(slope, [[0, -0.2 / 3, -0.2 / 3, 0]])
    close(metrics["policy/loss"], 1.05)
    close(metrics["policy/echo_loss"], 0.25)
    close(metrics["policy/echo_coefficient"], 0.2 * 2 / 3)


@pytest.mark.parametrize("prompt", [4, 90])
def test_what_is_observed_and_counted(prompt: int) -> None:
    """Two attempts of 3 and 4 tokens, each reads 3 and 2 more, of which one, 7, is a mark. Their rewards are equal, so
    there is no advantage; an attempt that ended in an error is not predicted."""
    first, second = episodes([1.0, 1.0], prompt=prompt)
    turns = list(first.turns)
    turns[1] = dataclasses.replace(turns[1], observation=(7, *turns[1].observation[1:]))
    first = dataclasses.replace(first, turns=tuple(turns))
    group = (first, second, dataclasses.replace(second, stop="error"))
    batch = pack([group], algo.grpo(terms=[Echo(weight=0.1, skip=frozenset({7}))]))
    assert (batch.totals.observation_tokens, batch.totals.without_signal, batch.observation_tokens) == (
        9,
        1,
        {0: 4, 1: 5},
    )
    (m,) = batch
    front = 0 if m.prefix.size else prompt
    row = m.trajectories.index(0)
    assert m.observation_mask[row].tolist()[front:][:16] == [0] * 4 + [1] * 2 + [0] * 4 + [1] * 2 + [0] * 4
    assert float(m.observation_mask.sum()) == 9
    assert float((m.observation_mask * m.mask).sum()) == 0
    plain = pack([group], algo.grpo())
    assert (len(plain), plain.totals.observation_tokens, plain.totals.without_signal) == (0, 0, 3)
    # A forced token is not the environment's.
    forced = dataclasses.replace(
        second, turns=(dataclasses.replace(second.turns[0], details=TokenDetails(forced=(1,))), *second.turns[1:])
    )
    assert pack([(first, forced)], algo.grpo(terms=[Echo(weight=0.1)])).totals.observation_tokens == 10


def test_the_log_probs_are_those_of_the_tokens_after_what_stands_before_them() -> None:
    p, group = a_policy(), episodes([1.0, 0.0])
    a = algo.grpo(terms=[Echo(weight=0.1)])
    for m in pack([group], a):
        found = logprobs(p, m, observations=True)
        assert found.observation_logprobs is not None
        asked = logprobs(p, dataclasses.replace(m, mask=m.observation_mask)).token_logprobs
        assert mx.array_equal(found.observation_logprobs, asked)
        assert mx.array_equal(found.token_logprobs, logprobs(p, m).token_logprobs)
    metrics, _ = gradient(p, pack([group], a), a)
    wanted = 0.0
    for one in group:
        tokens = [*one.prompt, *one.turns[0].tokens]
        for turn in one.turns[1:]:
            for token in turn.observation:
                logits = p.model(mx.array([tokens]))[0, -1]
                wanted -= (logits[token] - mx.logsumexp(logits)).item() / 10
                tokens.append(token)
            tokens += turn.tokens
    assert metrics["policy/echo_loss"] == pytest.approx(wanted, rel=1e-5)


def test_a_weight_of_nothing_is_the_algorithm_bit_for_bit() -> None:
    p, groups = a_policy(), [episodes([1.0, 0.0, 0.4])]
    plain = algo.grpo()
    wanted, slope = gradient(p, pack(groups, plain), plain)
    spent = algo.grpo(terms=[Echo(weight=0.3, taper=10)]).at(10)
    got = gradient(p, pack(groups, spent), spent)
    assert got[0] == wanted
    assert all(mx.array_equal(value, flat(slope)[name]) for name, value in flat(got[1]).items())
    # Nor does a weight change anything where no environment answers.
    alone, a = [made([1.0, 0.0, 0.4])], algo.grpo(terms=[Echo(weight=0.3)])
    got, wanted = gradient(p, pack(alone, a), a), gradient(p, pack(alone, plain), plain)
    assert got[0] == {**wanted[0], "policy/echo_loss": 0.0, "policy/echo_coefficient": 0.0}
    assert all(mx.array_equal(value, flat(wanted[1])[name]) for name, value in flat(got[1]).items())


def test_the_gradient_is_the_algorithms_and_that_of_the_prediction() -> None:
    """With weight 0.5 it is the algorithm's and half of what weight 1 adds, and both terms are of the same size."""
    p, groups = a_policy(), [episodes([1.0, 0.0, 0.4])]
    slopes = []
    for weight in (0.0, 0.5, 1.0):
        a = algo.dapo(terms=[Echo(weight=weight)] if weight else [])
        slopes.append(flat(gradient(p, pack(groups, a), a)[1]))
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
    whole = pack(groups, a)
    assert [m.prefix.size for m in whole] == [90, 70]
    metrics, wanted = gradient(p, whole, a)
    for tokens in (1, 130):
        split = pack(groups, a, tokens_per_pass=tokens)
        assert len(split) > 2
        more, got = gradient(p, split, a)
        assert_same_gradient(got, wanted)
        for name in ("policy/loss", "policy/echo_loss", "policy/echo_coefficient"):
            assert more[name] == pytest.approx(metrics[name], abs=1e-5)
    assert_same_gradient(gradient(p, whole, a, recompute=True)[1], wanted)

    def padded(array: Any) -> Any:
        return None if array is None else mx.pad(array, [(0, 0), (0, 9)])

    names = ("tokens", "mask", "advantages", "sampler_logprobs", "observation_mask")
    wide = [dataclasses.replace(m, **{name: padded(getattr(m, name)) for name in names}) for m in whole]
    assert_same_gradient(gradient(p, dataclasses.replace(whole, micro_batches=tuple(wide)), a)[1], wanted)
    monkeypatch.setattr(sys.modules["mlxrl.train.pack"], "SHARE_FROM", 10**9)
    repeated = pack(groups, a)
    assert {m.prefix.size for m in repeated} == {0}
    assert_same_gradient(gradient(p, repeated, a)[1], wanted)


def test_a_group_without_a_reward_learns_to_predict() -> None:
    p, a = a_policy(), algo.grpo(terms=[Echo(weight=1.0)])
    groups = [episodes([0.0, 0.0])]
    losses = []
    for _ in range(4):
        metrics = update(p, optim.SGD(0.1), pack(groups, a), a)
        assert metrics["policy/echo_coefficient"] == 1.0
        losses.append(metrics["policy/echo_loss"])
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.01


def test_parts_and_cut_rows_have_their_own_denominators() -> None:
    p, a = a_policy(), algo.dapo(terms=[Echo(weight=0.5)])
    groups = [episodes([1.0, 0.0], seed=1), episodes([0.0, 0.0], seed=2, prompt=4, read=(5, 1, 2))]
    batch = fill(p, pack(groups, a), a.needs | {"old"}, algo=a)
    ones = parts(batch, 2, "x")
    assert sorted(one.totals.observation_tokens for one in ones) == [10, 16]
    for one in ones:
        alone = pack(one.groups, a)
        assert one.totals.observation_tokens == alone.totals.observation_tokens
        assert_same_gradient(gradient(p, one, a)[1], gradient(p, alone, a)[1])
    # The prompt of 90, 3 or 4 tokens, and what was read first; the second observation is cut off.
    cut = pack(groups[:1], a, max_tokens_per_row=98)
    assert cut.totals.observation_tokens == 10
    assert sum(float(m.observation_mask.sum()) for m in cut) == 6
    assert gradient(p, cut, a)[0]["policy/echo_coefficient"] == pytest.approx(0.5 * 0.6)


@pytest.mark.parametrize("term", [algo.TeacherAdvantage(), algo.TeacherTopK(), algo.TeacherVocabulary()])
def test_beside_a_teacher(term: str) -> None:
    """The teacher judges what was sampled, and both come out of one pass: the prediction is that beside grpo."""
    p, groups = a_policy(), [episodes([1.0, 0.0])]
    plain, judge = algo.opd(teacher=term), Teacher(p, base=True)
    found = []
    for a in (algo.grpo(terms=[Echo(weight=0.5)]), algo.opd(teacher=term, terms=[Echo(weight=0.5)]), plain):
        batch = fill(p, pack(groups, a), a.needs - {"old"}, algo=a, teacher=judge)
        found.append(gradient(p, batch, a, judge)[0])
    beside, both, alone = found
    assert both["policy/echo_loss"] == pytest.approx(beside["policy/echo_loss"], rel=1e-6)
    assert both["policy/teacher_kl"] == pytest.approx(alone["policy/teacher_kl"], rel=1e-5)
    added = 0.5 * both["policy/echo_loss"]
    assert both["policy/loss"] == pytest.approx(alone["policy/loss"] + added, rel=1e-5)


def test_an_answer_in_a_rewritten_history_is_predicted_too() -> None:
    """The second turn's prompt is a whole new one of 20 tokens, the last 3 of which are the answer. It is a row of its
    own, whose prompt has 17; the third turn's 2 stand in it. Without `new` there are these 2 alone."""
    (first,) = episodes([1.0])
    draw = np.random.default_rng(5)
    prompt = tuple(draw.integers(9, 300, 20).tolist())
    turns = list(first.turns)
    turns[1] = dataclasses.replace(turns[1], observation=prompt, history_rewritten=True, new_suffix=3)
    one = dataclasses.replace(first, turns=tuple(turns))
    p, a = a_policy(), algo.grpo(terms=[Echo(weight=0.1)])
    batch = pack([(one, dataclasses.replace(one, reward=0.0))], a)
    assert (batch.totals.observation_tokens, batch.totals.sequences) == (10, 4)
    metrics = gradient(p, batch, a)[0]
    wanted, tokens = 0.0, list(prompt[:17])
    for read, action in ((prompt[17:], turns[1].tokens), (turns[2].observation, turns[2].tokens)):
        for token in read:
            logits = p.model(mx.array([tokens]))[0, -1]
            wanted -= (logits[token] - mx.logsumexp(logits)).item() / 5
            tokens.append(token)
        tokens += action
    assert metrics["policy/echo_loss"] == pytest.approx(wanted, rel=1e-5)
    turns[1] = dataclasses.replace(turns[1], new_suffix=0)
    unseen = dataclasses.replace(first, turns=tuple(turns))
    assert pack([(unseen, unseen)], a).totals.observation_tokens == 4
    # What is not predicted is laid out as ever.
    plain = [
        [m.tokens.tolist() for m in pack([(x, dataclasses.replace(x, reward=0.0))], algo.grpo())] for x in (one, unseen)
    ]
    assert plain[0] == plain[1]


def test_what_is_new_in_a_rewritten_history() -> None:
    """The template drops what was thought, so the second prompt is a new one; it ends in the answer and its marks."""
    tokens = tokenizer()
    opening = open_chat(tokens, "one?")
    reply = tokens.encode("<think>so</think>1", add_special_tokens=False)
    got = go_on(tokens, opening.chat, reply, (), "two?")
    assert got.fresh
    assert tokens.decode(list(got.ids[-got.new :])) == "two?<end><assistant><think>"
    said = go_on(tokens, opening.chat, reply, (), ({"role": "tool", "content": "a"}, {"role": "tool", "content": "b"}))
    assert tokens.decode(list(said.ids[-said.new :])) == "a<end><tool>b<end><assistant><think>"


def test_a_run_tapers_it_and_leaves_the_special_tokens_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four turns of a maze by a model that knows nothing: the weight is 0.4, 0.3, 0.2 and 0.1, and in the end 0."""
    p, a = a_policy(), algo.gigpo(terms=[Echo(weight=0.4, taper=4)])
    skipped = []

    def packing(groups: Any, algorithm: Any, **sizes: Any) -> Any:
        skipped.append(not_predicted(algorithm))
        return pack(groups, algorithm, **sizes)

    monkeypatch.setattr(sys.modules["mlxrl.train.loop"], "pack", packing)
    run = train(
        p, maze_tasks(2), a, environment=Maze, steps=5, tasks_per_step=1, group_size=2, max_turns=2,
        sampling=Sampling(max_tokens=3), optimizer=optim.SGD(1e-3),
    )  # fmt: skip
    found = [step.metrics for step in run]
    assert [m.get("policy/echo_coefficient", 0.0) for m in found] == pytest.approx([0.4, 0.3, 0.2, 0.1, 0.0])
    assert all(m["policy/echo_loss"] > 0 for m in found[:4])
    assert skipped == [set(p.tokenizer.all_special_ids)] * 4 + [None]
    assert p.tokenizer.eos_token_id in skipped[0]


def weights(algorithm: Any, steps: tuple[int, ...]) -> list[float]:
    return [next((term.weight for term in at_step(algorithm, step).terms), 0.0) for step in steps]


def test_a_weight_that_is_tapered() -> None:
    a = algo.grpo(terms=[Echo(weight=0.4, taper=4)])
    assert weights(a, (0, 1, 3, 4, 9)) == pytest.approx([0.4, 0.3, 0.1, 0.0, 0.0])
    assert "observations" in a.at(3).needs
    assert a.at(4) == algo.grpo()
    assert weights(algo.grpo(terms=[Echo(weight=0.4)]), (0, 9)) == [0.4, 0.4]
    plain = algo.grpo()
    assert at_step(plain, 3) is plain


def test_special_ids_are_not_predicted_unless_ids_are_named() -> None:
    named = algo.grpo(terms=[Echo(skip=frozenset({7}))])
    assert not_predicted(algo.grpo(terms=[Echo()])) == frozenset()
    assert not_predicted(without_special_ids(algo.grpo(terms=[Echo()]), [1, 2])) == {1, 2}
    assert without_special_ids(named, [1, 2]) == named
    assert not_predicted(without_special_ids(algo.grpo(), [1, 2])) is None


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A config beside its data."""
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text('{"question": "x", "answer": "4"}\n')
    (tmp_path / "run.toml").write_text(MINIMAL)
    return tmp_path / "run.toml"


WORLD = (f"environment.factory={MAZE}:Maze",)


def test_the_weight_from_toml(run: Path) -> None:
    off = config.read(run, WORLD)
    assert "echo" not in config.resolved(off)["algorithm"]
    assert config.algorithm(off).needs == {"old", "reward"}
    settings = config.read(run, [*WORLD, "algorithm.echo.weight=0.2", "algorithm.echo.taper=4"])
    assert config.resolved(settings)["algorithm"]["echo"] == {"weight": 0.2, "taper": 4}
    made: Any = config.algorithm(settings)
    assert made.at(1).terms == (Echo(weight=0.2 * 0.75),)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([*WORLD, "echo.weight=0.1"], r"command line: echo: is now the table \[algorithm.echo\]"),
        (["algorithm.echo.weight=0.1"], "echo: has no effect without environment.factory: nothing is answered"),
        ([*WORLD, "algorithm.echo.weight=-1"], "command line: algorithm.echo: weight: wanted more than 0, got -1"),
        ([*WORLD, "algorithm.echo.taper=true"], "algorithm.echo: taper: wanted a whole number of at least 0, got true"),
    ],
)  # fmt: skip
def test_settings_without_effect_are_refused(run: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(config.ConfigError, match=message):
        config.read(run, overrides)


@pytest.mark.parametrize("weight", [-0.1, 0.0, math.inf, math.nan])
def test_weights_that_mean_nothing_are_refused(weight: float) -> None:
    with pytest.raises(ValueError, match=r"algorithm\.echo: weight: wanted more than 0"):
        Echo(weight=weight)
