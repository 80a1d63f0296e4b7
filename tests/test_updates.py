"""Several optimizer steps out of one rollout, forced tokens, and the gap between sampler and trainer."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_map

from helpers import a_policy, assert_same_gradient, flat, length, made
from mlxrl import algo
from mlxrl.algo.credit import Whiten
from mlxrl.algo.recipes import dapo, gigpo, grpo, opd, reinforce_pp
from mlxrl.algo.terms import KL, Correction, OffPolicyMask, TeacherSurrogate, TeacherTopK, Veto
from mlxrl.policy.logprobs import logprobs
from mlxrl.settings import Reward, Sampling
from mlxrl.train import loop
from mlxrl.train.pack import pack
from mlxrl.train.parts import parts
from mlxrl.train.step import averaged, fill, gradient, update
from mlxrl.types import Batch, MicroBatch, Task, TokenDetails, Trajectory, Turn

ARRAYS = ("tokens", "mask", "advantages", "sampler_logprobs")


def same(first: Batch, second: Batch) -> None:
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert all(mx.array_equal(getattr(one, name), getattr(other, name)) for name in ARRAYS)


# Forced tokens and candidates


@pytest.mark.parametrize("prompt", [4, 90])
@pytest.mark.parametrize("recipe", [grpo, reinforce_pp, gigpo])
def test_a_forced_token_is_laid_out_like_one_that_was_read(recipe, prompt):
    group = made([1.0, 0.0], prompt=prompt, lengths=[4, 5])

    def split(one: Trajectory) -> Trajectory:
        (turn,) = one.turns
        head = dataclasses.replace(turn, tokens=turn.tokens[:1], logprobs=turn.logprobs[:1])
        return dataclasses.replace(one, turns=(head, Turn(turn.tokens[1:2], turn.tokens[2:], turn.logprobs[2:])))

    def forced(one: Trajectory) -> Trajectory:
        (turn,) = one.turns
        logprobs = (turn.logprobs[0], 0.0, *turn.logprobs[2:])
        return dataclasses.replace(
            one, turns=(dataclasses.replace(turn, details=TokenDetails(forced=(1,)), logprobs=logprobs),)
        )

    read, taken = (pack([tuple(map(change, group))], recipe()) for change in (split, forced))
    same(read, taken)
    assert taken.totals == read.totals
    assert taken.totals.tokens == 3 + 4
    assert sum(float(m.mask.sum()) for m in taken) == 7
    assert forced(group[0]).length == 4


@pytest.mark.parametrize("prompt", [2, 90])
def test_candidates_stand_beside_their_tokens(prompt):
    group = made([0.0, 0.0], prompt=prompt, lengths=[2, 1])
    kept = [((7, 8, 9), (5, 6, 4)), ((3, 2, 1),)]
    second = Turn((11, 12), (13,), (-1.0,), details=TokenDetails(top_ids=((20, 21, 22),)))
    first = dataclasses.replace(group[0].turns[0], details=TokenDetails(top_ids=kept[0]))
    long = dataclasses.replace(group[0], turns=(first, second))
    short = dataclasses.replace(
        group[1], turns=(dataclasses.replace(group[1].turns[0], details=TokenDetails(top_ids=kept[1])),)
    )
    algorithm = opd(teacher=TeacherSurrogate(k=2))
    (m,) = pack([(long, short)], algorithm)
    front = 0 if m.prefix.size else prompt
    assert m.trajectories == (1, 0)
    blank = [[0, 0]]
    assert m.top_ids[0].tolist() == blank * front + [[3, 2]] + blank * 4
    assert m.top_ids[1].tolist() == blank * front + [[7, 8], [5, 6]] + blank * 2 + [[20, 21]]
    assert next(iter(pack([(long, short)], grpo(terms=[KL(coefficient=0.1)])))).top_ids is None
    with pytest.raises(ValueError, match=r"4 likeliest .* and 3 were kept; sample with Sampling\(num_top=4\)"):
        pack([(long, short)], opd(teacher=TeacherTopK(support="student", k=4)))
    with pytest.raises(ValueError, match="and 0 were kept"):
        pack([group], algorithm)


# Several optimizer steps


def batches(seed: int = 0) -> list[Any]:
    """Four groups, two of which share their prompt in a pass of their own, and one of which has no signal."""
    return [
        made([1.0, 0.0, 0.5], prompt=90, seed=seed, lengths=[3, 5, 4]),
        made([0.0, 1.0, 1.0], prompt=6, seed=seed + 1, lengths=[2, 2, 7]),
        made([0.5, 0.5, 0.5], prompt=6, seed=seed + 2, lengths=[3, 3, 3]),
        made([0.0, 0.0, 1.0], prompt=80, seed=seed + 3, lengths=[2, 3, 2]),
        made([1.0, 0.0, 0.0], prompt=5, seed=seed + 4, lengths=[4, 2, 1]),
    ]


def by_row(batch: Batch, name: str) -> dict[int, list[float]]:
    """The values of the chosen tokens of every row."""
    return {
        row: np.array(getattr(m, name))[place][np.array(m.mask)[place] > 0].tolist()
        for m in batch
        for place, row in enumerate(m.trajectories)
    }


def test_parts_are_the_groups_dealt_out_with_all_that_was_computed_for_them():
    p, algorithm = a_policy(), grpo()
    whole = fill(p, pack(batches(), algorithm), frozenset({"old"}))
    for count in (2, 3, 5, 9):
        dealt = parts(whole, count, "0:0:0")
        assert sorted(len(part.groups) for part in dealt) == sorted(
            len(own) for own in np.array_split(range(5), min(count, 5))
        )
        for name in (*ARRAYS, "old_logprobs"):
            rows: dict[int, list[float]] = {}
            for part in dealt:
                found = by_row(part, name)
                assert not rows.keys() & found.keys()
                rows |= found
            assert rows == by_row(whole, name)
        assert sum(part.totals.tokens for part in dealt) == whole.totals.tokens
        assert sum(part.totals.sequences for part in dealt) == 15
        assert (
            sum(part.totals.without_signal for part in dealt) == whole.totals.without_signal == 4
        )  # the reward of 0.5 is the mean of its group
        largest = max(m.tokens.size + m.prefix.size for m in whole)
        assert all(m.tokens.size + m.prefix.size <= largest for part in dealt for m in part)
    assert parts(whole, 1, "0:0:0") == [whole]


def test_how_groups_are_dealt_follows_from_the_key():
    whole = pack(batches(), grpo())
    orders = {key: [[g[0].prompt for g in part.groups] for part in parts(whole, 2, key)] for key in map(str, range(6))}
    assert orders["0"] == [[g[0].prompt for g in part.groups] for part in parts(whole, 2, "0")]
    assert len({str(order) for order in orders.values()}) > 1


def test_gradients_of_parts_are_those_of_their_groups_alone():
    """Each optimizer step divides by the tokens of its own groups: weighted by them, the parts make up the whole."""
    p, algorithm = a_policy(), dapo(scale="none")
    whole = pack(batches(), algorithm)
    wanted = gradient(p, whole, algorithm)[1]
    dealt = parts(whole, 2, "0")
    shares = [part.totals.tokens / whole.totals.tokens for part in dealt]
    found = [gradient(p, part, algorithm)[1] for part in dealt]
    scaled = [tree_map(lambda leaf, share=share: leaf * share, tree) for tree, share in zip(found, shares, strict=True)]
    assert_same_gradient(tree_map(mx.add, *scaled), wanted)
    # Statistics of the batch are those of the whole batch, and come with the rows.
    whitened = pack(batches(), dapo(whiten=Whiten()))
    values = np.concatenate(list(by_row(whitened, "advantages").values()))
    assert abs(values.mean()) < 1e-6
    part = parts(whitened, 2, "0")[0]
    assert by_row(part, "advantages").items() <= by_row(whitened, "advantages").items()


def test_old_logprobs_are_those_from_before_the_first_update_in_every_part_of_every_epoch():
    p, algorithm, optimizer = a_policy(), grpo(), optim.SGD(0.5)
    whole = fill(p, pack(batches(), algorithm), frozenset({"old"}))
    old = by_row(whole, "old_logprobs")
    for epoch in range(2):
        for number, part in enumerate(parts(whole, 2, f"0:0:{epoch}")):
            for m in part:
                new = logprobs(p, m).token_logprobs
                drift = mx.abs(new - m.old_logprobs).max().item()
                assert drift < 1e-5 if (epoch, number) == (0, 0) else drift > 1e-3
            assert by_row(part, "old_logprobs").items() <= old.items()
            metrics = update(p, optimizer, part, algorithm, max_grad_norm=1e9)
            if (epoch, number) != (0, 0):
                assert metrics["policy/ratio_max"] > 1.01


def test_no_gradient_comes_from_tokens_that_the_bounds_hold():
    p, algorithm = a_policy(), grpo(clip=(0.2, 0.28))
    batch = fill(p, pack([made([1.0, 0.0], lengths=[3, 3])], algorithm), frozenset({"old"}))
    (m,) = batch
    good = np.array([row == 0 for row in m.trajectories])[:, None] & (np.array(m.mask) > 0)

    def shifted(by: float) -> Batch:
        """The rewarded row's ratio is exp(by), the other's exp(-by)."""
        old = m.old_logprobs - mx.array(np.where(good, by, -by))
        return dataclasses.replace(batch, micro_batches=(dataclasses.replace(m, old_logprobs=old),))

    metrics, held = gradient(p, shifted(math.log(1.5)), algorithm)
    assert metrics["policy/clip_high"] == metrics["policy/clip_low"] == pytest.approx(0.5)
    assert all(mx.abs(leaf).max().item() == 0 for leaf in flat(held).values())
    metrics, free = gradient(p, shifted(math.log(1.1)), algorithm)
    assert metrics["policy/clip_high"] == metrics["policy/clip_low"] == 0
    assert all(mx.abs(leaf).max().item() > 0 for leaf in flat(free).values())
    # One row leaves the bounds the way it should not: the other's gradient is all that is left.
    half = dataclasses.replace(m, old_logprobs=m.old_logprobs - mx.array(np.where(good, math.log(1.5), 0.0)))
    alone = dataclasses.replace(m, advantages=mx.where(mx.array(good), 0.0, m.advantages))
    got, wanted = (gradient(p, dataclasses.replace(batch, micro_batches=(one,)), algorithm)[1] for one in (half, alone))
    assert_same_gradient(got, wanted)


def steps(recipe: Any, **settings: Any) -> list[Any]:
    run = {"reward": length, "tasks_per_step": 4, "group_size": 4, "sampling": Sampling(max_tokens=6), "steps": 1}
    tasks = [Task(text) for text in ("one", "two", "three", "four", "five")]
    return list(loop.train(a_policy(), tasks, recipe, **{**run, **settings}))


def test_the_loop_makes_epochs_times_minibatches_optimizer_steps():
    optimizer = optim.SGD(lambda step: 0.3 / (step + 1))
    (step,) = steps(
        dapo(clip=(0.05, 0.05)), optimizer=optimizer, updates_per_rollout=3, minibatches=2, max_grad_norm=1e9
    )
    assert int(optimizer.step) == 6
    assert step.metrics["policy/updates"] == 6
    assert step.metrics["policy/ratio_max"] > 1.05
    assert step.metrics["policy/clip_high"] > 0
    assert step.metrics["policy/clip_low"] > 0
    assert step.metrics["policy/old_kl"] != 0


def test_one_update_needs_no_old_pass(monkeypatch):
    seen: list[Any] = []
    real = loop.update

    def spy(policy: Any, optimizer: Any, batch: Batch, *rest: Any, **more: Any) -> Any:
        seen.extend(m.old_logprobs is None for m in batch)
        return real(policy, optimizer, batch, *rest, **more)

    monkeypatch.setattr(loop, "update", spy)
    (step,) = steps(grpo())
    assert all(seen)
    assert step.metrics["policy/ratio_max"] == 1.0
    seen.clear()
    steps(grpo(), minibatches=2)
    assert seen
    assert not any(seen)


def test_a_run_of_several_updates_can_start_anywhere():
    settings: dict[str, Any] = {"updates_per_rollout": 2, "minibatches": 2, "optimizer": optim.SGD(0.0), "steps": 3}
    whole = steps(grpo(), **settings)
    (last,) = steps(grpo(), start=2, **settings)
    for name, value in last.metrics.items():
        if name.split("/")[0] in ("reward", "policy", "mismatch"):
            assert value == whole[2].metrics[name], name


def test_metrics_of_several_updates():
    one = {"policy/ratio_mean": 1.0, "policy/ratio_max": 1.0, "policy/grad_norm": 2.0, "policy/skipped": 0.0}
    two = {"policy/ratio_mean": 3.0, "policy/ratio_max": 5.0, "policy/grad_norm": math.nan, "policy/skipped": 1.0}
    idle = {"policy/grad_norm": 0.0, "policy/skipped": 0.0}
    got = averaged([one, two, idle])
    assert (got["policy/ratio_mean"], got["policy/ratio_max"]) == (2.0, 5.0)
    assert (got["policy/updates"], got["policy/skipped"]) == (1.0, 1.0)
    assert averaged([])["policy/updates"] == 0


def test_rewards_that_fail_cost_their_attempts_and_nothing_else():
    """None from every function and NaN from any are left out; None from one leaves the other's."""

    def first(completions: list[str], **_: Any) -> list[float | None]:
        return [1.0, None, None, math.nan] * (len(completions) // 4)

    def second(completions: list[str], **_: Any) -> list[float | None]:
        return [0.5, 0.25, None, 1.0] * (len(completions) // 4)

    for recipe in (grpo(), grpo(scale="function"), dapo(whiten=Whiten()), reinforce_pp()):
        (step,) = steps(recipe, reward=Reward(functions=(first, second), weights=(1.0, 2.0)), max_draws=2)
        for group in step.groups:
            np.testing.assert_allclose([t.reward for t in group], [2.0, 0.5, math.nan, math.nan])
        assert step.metrics["reward/failed"] == 8
        assert step.metrics["reward/mean"] == 1.25
        assert (step.metrics["policy/updates"], step.metrics["policy/skipped"]) == (1, 0)
        credit = recipe.advantages(step.groups)
        assert all(np.all(np.array(own[0]) > 0) for own in credit)
        assert not any(np.any(own[place]) for own in credit for place in (2, 3))


# Sampler and trainer apart


def placed(m: MicroBatch, values: list[list[float]]) -> mx.array:
    """[B, T] of a value for every chosen token of every row."""
    wide = np.zeros(m.mask.shape, np.float32)
    for place, row in enumerate(m.trajectories):
        wide[place, np.flatnonzero(np.array(m.mask)[place])] = values[row]
    return mx.array(wide)


def apart(gaps: list[list[float]]) -> tuple[Any, Batch, MicroBatch]:
    """A policy and a pair of rows whose sampler was off by log-ratios old - rollout = gaps, row by row."""
    p = a_policy()
    batch = fill(p, pack([made([1.0, 0.0], lengths=[len(own) for own in gaps])], grpo()), frozenset({"old"}))
    (m,) = batch
    return p, batch, dataclasses.replace(m, sampler_logprobs=m.old_logprobs - placed(m, gaps))


THREE = [1.5, 1.5, 1.5]


@pytest.mark.parametrize(
    ("term", "weights"),
    [
        # row 0 has weights 4, 1/2, 1 by token; row 1 has 1, 1: truncated at 2, cut at (1/4, 2)
        (Correction(), [[2, 0.5, 1], [1, 1]]),
        (Correction(mode="mask"), [[0, 0.5, 1], [1, 1]]),
        # the product of the row is 2, its geometric mean 2^(1/3) = 1.26
        (Correction(mode="mask", level="sequence"), [[2, 2, 2], [1, 1]]),
        (Correction(mode="mask", level="sequence", bounds=(0.5, 1.9)), [[0, 0, 0], [1, 1]]),
        (Correction(level="sequence", bounds=(0, 1.5)), [THREE, [1, 1]]),
        (Correction(mode="mask", level="geometric", bounds=(0.5, 1.2)), [[0] * 3, [1, 1]]),
        (Correction(mode="mask", level="geometric"), [[2 ** (1 / 3)] * 3, [1, 1]]),
        (Veto(threshold=0.6), [[0, 0, 0], [1, 1]]),
        # the sampler was likelier by log 2 / 3 a token in row 0, which was rewarded, so nothing is masked
        (OffPolicyMask(delta=0.2), [[1, 1, 1], [1, 1]]),
    ],
)  # fmt: skip
def test_corrections_weigh_the_gradient_and_leave_the_denominators(term, weights):
    gaps = [[math.log(4), math.log(0.5), 0.0], [0.0, 0.0]]
    p, batch, m = apart(gaps)
    algorithm = grpo(terms=[term])
    doctored = dataclasses.replace(batch, micro_batches=(m,))
    metrics, got = gradient(p, doctored, algorithm)
    wanted = dataclasses.replace(m, advantages=m.advantages * placed(m, weights))
    assert_same_gradient(got, gradient(p, dataclasses.replace(batch, micro_batches=(wanted,)), grpo())[1], 2e-5)
    assert metrics["mismatch/kept"] == pytest.approx(sum(map(sum, weights)) / 5, rel=1e-5)
    moved = update(p, optim.SGD(1e-3), doctored, algorithm)
    assert moved["policy/grad_norm"] > 0


def test_a_row_that_drifted_from_the_sampler_is_masked_where_it_was_punished():
    # the trainer finds row 1, of advantage < 0, less likely by 0.3 a token than the sampler did
    p, batch, m = apart([[0.0, 0.0], [-0.3, -0.3]])
    doctored = dataclasses.replace(batch, micro_batches=(m,))
    kept = gradient(p, doctored, grpo(terms=[OffPolicyMask(delta=0.4)]))[1]
    assert_same_gradient(kept, gradient(p, batch, grpo())[1])
    masked = gradient(p, doctored, grpo(terms=[OffPolicyMask(delta=0.2)]))[1]
    good = mx.array([[float(row == 0)] for row in m.trajectories])
    alone = dataclasses.replace(m, advantages=m.advantages * good)
    assert_same_gradient(masked, gradient(p, dataclasses.replace(batch, micro_batches=(alone,)), grpo())[1])


def test_the_gap_is_always_reported():
    # gaps log 2, 0, log 1/2 and 0, 0: mean |gap| 2 log 2 / 5; weights 2, 1, 1/2, 1, 1
    p, batch, m = apart([[math.log(2), 0.0, -math.log(2)], [0.0, 0.0]])
    metrics = update(p, optim.SGD(0.0), dataclasses.replace(batch, micro_batches=(m,)), grpo())
    assert metrics["mismatch/abs"] == pytest.approx(2 * math.log(2) / 5, rel=1e-4)
    # k3 of the sampler against the trainer: w - 1 - log w, 0.306853 at 2 and 0.193147 at 1/2
    assert metrics["mismatch/k3"] == pytest.approx((0.306853 + 0.193147) / 5, rel=1e-4)
    assert metrics["mismatch/ess"] == pytest.approx(5.5**2 / (5 * (4 + 1 + 0.25 + 1 + 1)), rel=1e-4)
    assert metrics["mismatch/ratio_max"] == pytest.approx(2.0, rel=1e-4)
    assert "mismatch/kept" not in metrics
    assert {"mismatch/abs", "mismatch/k3", "mismatch/ess", "mismatch/ratio_max"} <= steps(algo.gspo())[0].metrics.keys()
