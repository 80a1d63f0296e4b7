"""Dynamic sampling: which tasks a step samples, and what it does when none of them has a learning signal."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import pytest

from helpers import a_policy, flat
from mlxrl import algo
from mlxrl.policy.policy import Policy
from mlxrl.rollout.draw import fold
from mlxrl.settings import Reward, Rollout, Sampling
from mlxrl.train.loop import run
from mlxrl.train.resample import further_tasks, resample, round_key
from mlxrl.types import Task, Trajectory

SHORT = Sampling(max_tokens=4)
TASKS = [Task(name) for name in "abcdefghijklmnop"]


def collecting(varied: str) -> tuple[Any, list[str]]:
    """A function from tasks to groups, of which those of tasks in `varied` have two rewards, and the tasks it was
    called with."""
    seen: list[str] = []

    def collect(tasks: Any, number: int) -> Any:
        assert number == len(seen)
        seen.append("".join(task.prompt for task in tasks))
        return [tuple(Trajectory(task, (), r) for r in (1.0, float(task.prompt not in varied))) for task in tasks]

    return collect, seen


def names(groups: Any) -> str:
    return "".join(group[0].task.prompt for group in groups)


@pytest.mark.parametrize(
    ("varied", "most", "seen", "kept"),
    [
        ("abcd", 8, ["abcd"], "abcd"),
        ("ac", 0, ["abcd"], "abcd"),  # no further round: all are kept, zero-variance groups too
        ("acfh", 8, ["abcd", "efgh"], "acfh"),  # 2 of 4 had a signal: 2 missing groups take 4 tasks
        ("acefgh", 8, ["abcd", "efgh"], "acef"),  # more than the step needs: the last are left out
        ("abcg", 8, ["abcd", "ef", "gh"], "abcg"),  # 3 of 4, 1 missing: 4/3; then 3 of 6: 2
        ("ajk", 2, ["abcd", "efgh", "ijkl"], "ajk"),  # the bound is reached: what is there counts
        ("", 8, ["abcd", "efgh", "ijkl", "mnop"], ""),  # the tasks are at an end
    ],
)
def test_tasks_are_sampled_until_the_step_has_its_groups(varied, most, seen, kept):
    collect, found = collecting(varied)
    got = resample(collect, TASKS[:4], iter(TASKS[4:]), most)
    assert (found, names(got.groups), got.rounds) == (seen, kept, len(seen))
    assert names(got.sampled) == "".join(seen)


def test_further_tasks_are_the_others_in_an_order_of_the_seed_and_the_step():

    def order(seed: int, step: int) -> str:
        return "".join(task.prompt for task in further_tasks(TASKS, range(3, 6), seed, step))

    assert sorted(order(0, 7)) == [name for name in "abcdefghijklmnop" if name not in "def"]
    assert order(0, 7) == order(0, 7)
    assert len({order(0, 7), order(0, 8), order(1, 7)}) == 3


def test_keys_of_further_rounds_are_none_of_a_rollout():
    """A rollout makes keys of tasks from the step's, and keys of trajectories from those."""
    first = round_key(3, 5, 0)
    tasks = fold(first[None], mx.arange(64))
    trajectories = [fold(mx.repeat(key[None], 32, axis=0), mx.arange(32)) for key in tasks]
    taken = {tuple(key) for key in mx.concatenate([tasks, *trajectories]).tolist()}
    later = {tuple(round_key(3, 5, number).tolist()) for number in range(1, 9)}
    assert len(later) == 8
    assert not later & taken


def picky(completions: list[str], prompts: list[str], **_: Any) -> list[float]:
    """Only for tasks of an even number are rewards different, by the order of the completions."""
    return [float(place % 2) if int(prompt) % 2 == 0 else 0.5 for place, prompt in enumerate(prompts)]


def steps_of(
    p: Policy, start: int = 0, steps: int = 3, rounds: int = 5, optimizer: Any = None, reward: Any = picky
) -> Any:
    """The steps of a run that learns from four pairs a step, with so many further rounds."""
    tasks = [Task(str(number)) for number in range(20)]
    rollout = Rollout(tasks_per_step=4, group_size=2, resampling_rounds=rounds, max_rows=64)
    found = run(
        p, tasks, algo.dapo(), reward=reward, steps=steps, rollout=rollout, sampling=SHORT,
        optimizer=optimizer or optim.SGD(0.0),
    )  # fmt: skip
    found.state.step = start
    return list(found)


def test_a_run_resamples_its_steps_and_can_start_anywhere():
    p = a_policy(move=False)
    whole = steps_of(p)
    for step in whole:
        assert [int(group[0].task.prompt) % 2 for group in step.groups] == [0] * 4
        assert step.metrics["groups/sampled"] == len(step.sampled)
        assert step.metrics["groups/used"] == 4
        assert step.metrics["groups/zero_variance"] >= len(step.sampled) - 4 - 3
        assert step.metrics["rollout/tokens"] >= sum(one.length for group in step.groups for one in group)
    assert any(step.metrics["rollout/rounds"] > 1 for step in whole)
    # The reward is that of all that was sampled: 0.5 throughout, and not of the groups that were used alone.
    assert all(step.metrics["reward"] == 0.5 for step in whole)
    (last,) = steps_of(p, start=2)
    assert [t.turns for group in last.groups for t in group] == [t.turns for group in whole[2].groups for t in group]


def test_groups_that_are_used_are_the_whole_step():
    """The denominators count what is used, and nothing of the groups that were left out."""
    (one,) = steps_of(a_policy(), steps=1, optimizer=optim.SGD(1.0))
    (other,) = steps_of(a_policy(), steps=1, rounds=0)
    assert one.metrics["groups/used"] == 4
    assert other.metrics["groups/used"] == other.metrics["groups/sampled"] == 4
    assert one.metrics["advantages/abs_mean"] > other.metrics["advantages/abs_mean"]
    # Rewards 0 and 1 of a pair: (1 - 0.5) / (0.7071 + 1e-6), on every token
    assert one.metrics["advantages/abs_mean"] == pytest.approx(0.5 / (0.5**0.5 + 1e-6), rel=1e-5)


def test_a_step_without_signal_ends_and_the_run_goes_on():
    p = a_policy()
    before = {name: mx.array(leaf) for name, leaf in flat(p.model.trainable_parameters()).items()}
    found = steps_of(p, steps=2, reward=lambda completions, **_: [1.0] * len(completions), rounds=1,
                     optimizer=optim.Adam(0.1))  # fmt: skip
    for step in found:
        assert step.groups == ()
        assert (step.metrics["updates"], step.metrics["rollout/rounds"]) == (0, 2)
        assert step.metrics["groups/zero_variance"] == step.metrics["groups/sampled"] == 8
        assert str(step).startswith(f"step {step.number}  reward 1.000  zero-variance groups 8 of 8")
        assert step.warnings == ("none of 8 groups in 2 rounds has a learning signal; no update",)
    assert all(mx.array_equal(leaf, before[name]) for name, leaf in flat(p.model.trainable_parameters()).items())


def test_resampling_looks_at_rewards_before_they_are_shaped():
    """Completions that are all wrong do not become a signal because one of them is longer."""
    reward = Reward(functions=(picky,), overlong_buffer=4)  # of 4 tokens: each token loses 0.25
    (step,) = steps_of(a_policy(), steps=1, reward=reward)
    assert [int(group[0].task.prompt) % 2 for group in step.groups] == [0] * 4
    for group in step.groups:
        assert [one.reward for one in group] == [float(n % 2) - 0.25 * one.length for n, one in enumerate(group)]
    assert step.metrics["reward"] == 0.5
    shaped = [one.reward for group in step.groups for one in group]
    assert step.metrics["reward/shaped"] == pytest.approx(sum(shaped) / len(shaped))
