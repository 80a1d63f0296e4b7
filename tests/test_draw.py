"""Dynamic sampling: which tasks a step asks, and what it does when none of them teaches anything."""

from __future__ import annotations

import dataclasses
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import pytest

from helpers import a_policy, flat
from mlxrl import algo
from mlxrl.rollout.sampling import fold
from mlxrl.settings import Sampling
from mlxrl.train.draw import draw, draw_key, further_tasks
from mlxrl.train.loop import train
from mlxrl.types import Task, Trajectory

TASKS = [Task(name) for name in "abcdefghijklmnop"]


def asked(teaching: str) -> tuple[Any, list[str]]:
    """A function that asks tasks, of which those in `teaching` are answered right and wrong, and what it was asked."""
    seen: list[str] = []

    def ask(tasks: Any, number: int) -> Any:
        assert number == len(seen)
        seen.append("".join(task.prompt for task in tasks))
        return [tuple(Trajectory(task, (), r) for r in (1.0, float(task.prompt not in teaching))) for task in tasks]

    return ask, seen


def names(groups: Any) -> str:
    return "".join(group[0].task.prompt for group in groups)


@pytest.mark.parametrize(
    ("teaching", "most", "seen", "kept"),
    [
        ("abcd", 9, ["abcd"], "abcd"),
        ("ac", 1, ["abcd"], "abcd"),  # one draw: what comes is kept, silent or not
        ("acfh", 9, ["abcd", "efgh"], "acfh"),  # 2 of 4 had a signal: 2 missing groups take 4 tasks
        ("acefgh", 9, ["abcd", "efgh"], "acef"),  # more than the step needs: the last are left out
        ("abcg", 9, ["abcd", "ef", "gh"], "abcg"),  # 3 of 4, 1 missing: 4/3; then 3 of 6: 2
        ("ajk", 3, ["abcd", "efgh", "ijkl"], "ajk"),  # the bound is reached: what is there counts
        ("", 9, ["abcd", "efgh", "ijkl", "mnop"], ""),  # the tasks are at an end
    ],
)
def test_tasks_are_drawn_until_the_step_has_its_groups(teaching, most, seen, kept):
    ask, found = asked(teaching)
    drawn = draw(ask, TASKS[:4], iter(TASKS[4:]), most)
    assert (found, names(drawn.groups), drawn.draws) == (seen, kept, len(seen))
    assert names(drawn.asked) == "".join(seen)


def test_further_tasks_are_the_others_in_an_order_of_the_seed_and_the_step():
    todo = TASKS[3:6]
    order = names([[Trajectory(task, ())] for task in further_tasks(TASKS, todo, 0, 7)])
    assert sorted(order) == [name for name in "abcdefghijklmnop" if name not in "def"]
    assert order == "".join(task.prompt for task in further_tasks(TASKS, todo, 0, 7))
    others = ["".join(t.prompt for t in further_tasks(TASKS, todo, *at)) for at in ((0, 8), (1, 7))]
    assert len({order, *others}) == 3


def test_keys_of_draws_are_none_of_a_rollout():
    """A rollout makes keys of tasks from the step's, and keys of rows from those."""
    first = draw_key(3, 5, 0)
    tasks = fold(first[None], mx.arange(64))
    rows = [fold(mx.repeat(key[None], 32, axis=0), mx.arange(32)) for key in tasks]
    taken = {tuple(key) for key in mx.concatenate([tasks, *rows]).tolist()}
    later = {tuple(draw_key(3, 5, number).tolist()) for number in range(1, 9)}
    assert len(later) == 8
    assert not later & taken


def picky(completions: list[str], prompts: list[str], **_: Any) -> list[float]:
    """Only tasks of an even number tell attempts apart, by their order."""
    return [float(place % 2) if int(prompt) % 2 == 0 else 0.5 for place, prompt in enumerate(prompts)]


def run(p: Any, start: int = 0, steps: int = 3, **more: Any) -> list[Any]:
    settings: dict[str, Any] = {
        "reward": picky, "tasks_per_step": 4, "group_size": 2, "max_draws": 6, "sampling": Sampling(max_tokens=4),
        "optimizer": optim.SGD(0.0), "max_rows": 64,
    }  # fmt: skip
    tasks = [Task(str(number)) for number in range(20)]
    return list(train(p, tasks, algo.dapo(), start=start, steps=steps, **{**settings, **more}))


def test_a_run_refills_its_steps_and_can_start_anywhere():
    p = a_policy(move=False)
    whole = run(p)
    for step in whole:
        assert [int(group[0].task.prompt) % 2 for group in step.groups] == [0] * 4
        asked = step.metrics["groups/total"]
        assert step.metrics["groups/kept"] == 4
        assert step.metrics["groups/silent"] >= asked - 4 - 3
        assert step.metrics["rollout/tokens"] >= sum(one.length for group in step.groups for one in group)
    assert any(step.metrics["rollout/draws"] > 1 for step in whole)
    # The reward is that of everything asked: 0.5 throughout, and not of the groups that were kept alone.
    assert all(step.metrics["reward/mean"] == 0.5 for step in whole)
    (last,) = run(p, start=2)
    assert [t.turns for group in last.groups for t in group] == [t.turns for group in whole[2].groups for t in group]


def test_groups_that_were_drawn_again_are_the_whole_step():
    """The denominators count what is kept: a step of the same groups without refilling has the same gradient."""
    one = run(a_policy(), steps=1, optimizer=optim.SGD(1.0))[0]
    other = run(a_policy(), steps=1, max_draws=1)[0]
    assert one.metrics["groups/kept"] == 4
    assert other.metrics["groups/kept"] == other.metrics["groups/total"] == 4
    assert one.metrics["policy/adv_abs"] > other.metrics["policy/adv_abs"]
    # Rewards 0 and 1 of a pair: (1 - 0.5) / (0.7071 + 1e-6), on every token of every row
    assert one.metrics["policy/adv_abs"] == pytest.approx(0.5 / (0.5**0.5 + 1e-6), rel=1e-5)


def test_a_step_without_signal_ends_and_the_run_goes_on():
    p, optimizer = a_policy(), optim.Adam(0.1)
    before = {name: mx.array(leaf) for name, leaf in flat(p.model.trainable_parameters()).items()}
    steps = run(p, steps=2, reward=lambda completions, **_: [1.0] * len(completions), max_draws=2, optimizer=optimizer)
    for step in steps:
        assert step.groups == ()
        assert (step.metrics["policy/updates"], step.metrics["rollout/draws"]) == (0, 2)
        assert step.metrics["groups/silent"] == step.metrics["groups/total"] == 8
        assert str(step).startswith(f"step {step.index}  reward 1.000  silent groups 8 of 8")
    assert all(mx.array_equal(leaf, before[name]) for name, leaf in flat(p.model.trainable_parameters()).items())


def test_refilling_looks_at_rewards_before_they_are_shaped():
    """Attempts that are all wrong do not become a signal because one of them is longer."""

    def shape(groups: Any) -> Any:
        return [tuple(dataclasses.replace(t, reward=t.reward + n) for n, t in enumerate(group)) for group in groups]

    (step,) = run(a_policy(), steps=1, shape=shape)
    assert [int(group[0].task.prompt) % 2 for group in step.groups] == [0] * 4
    assert [t.reward for t in step.groups[0]] == [0.0, 2.0]
    with pytest.raises(ValueError, match="max_draws has no effect, because opd does not look at rewards"):
        next(train(a_policy(), TASKS, algo.opd(), steps=1, max_draws=2, teacher="base"))
    with pytest.raises(ValueError, match="shape has no effect"):
        next(train(a_policy(), TASKS, algo.opd(), steps=1, shape=shape, teacher="base"))
