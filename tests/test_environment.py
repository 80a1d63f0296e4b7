"""An environment is user code: what it answers is checked, and what goes wrong in it is a line."""

from __future__ import annotations

import asyncio
import math
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from typing import ClassVar

import pytest

from mlxrl import algo
from mlxrl.plugins import Copying
from mlxrl.protocols import Environment
from mlxrl.rewards import score
from mlxrl.rollout import episodes
from mlxrl.rollout.environment import EnvironmentHandle, EpisodeError, gives_rewards
from mlxrl.train.batch import make_batch
from mlxrl.train.step import Step
from mlxrl.types import Feedback, Task
from worlds import TASKS, Counting, brief_policy, every, play


class Failing(Counting):
    """Fails as its task wants, in its second turn."""

    closed = threading.Semaphore(0)

    def reset(self, task):
        if task.prompt == "reset":
            raise RuntimeError("no\nworld")
        return {"prompt": 3}.get(task.prompt, super().reset(task))

    def step(self, reply):
        feedback = super().step(reply)
        if self.turn < 2:
            return feedback
        return {
            "raise": lambda: 1 / 0, "hang": lambda: time.sleep(60), "exit": sys.exit, "text": lambda: "fine",
            "reward": lambda: replace(feedback, reward=math.nan), "state": lambda: replace(feedback, state=[]),
            "large": lambda: replace(feedback, reward=1e308), "odd": lambda: replace(feedback, state=Odd()),
            "done": lambda: replace(feedback, done=1), "invalid": lambda: replace(feedback, invalid="no"), "mute": mute,
            "content": lambda: replace(feedback, observation=({"role": "user", "content": Mute()},)),
            "fault": lambda: replace(feedback, fault=5),
        }.get(self.task.prompt, lambda: feedback)()  # fmt: skip

    def close(self):
        self.closed.release()


FAULTS = {
    "reset": "reset: RuntimeError: no world",
    "prompt": "reset: TypeError: wanted a text or a list of messages as reset, got 3",
    "raise": "step: ZeroDivisionError: division by zero",
    "hang": "step: no answer in 0.3 s",
    "exit": "step: SystemExit",
    "text": 'step: TypeError: wanted a Feedback, got "fine"',
    "reward": "step: TypeError: wanted a number from -1e+30 to 1e+30 as reward, got NaN",
    "large": "step: TypeError: wanted a number from -1e+30 to 1e+30 as reward, got 1e+308",
    "state": "step: TypeError: state: wanted a hashable value, such as a tuple, got list",
    "odd": "step: RuntimeError: not comparable",
    "done": "step: TypeError: done: wanted True or False, got 1",
    "invalid": 'step: TypeError: invalid: wanted True or False, got "no"',
    "mute": "step: Mute: its message cannot be shown",
    "fault": "step: TypeError: fault: wanted a text, got 5",
    "content": "step: TypeError: an observation: message 1: content: wanted a text or a list of text parts, "
    'got "Mute()"',
}


class Odd:
    def __hash__(self):
        return 1

    def __eq__(self, other):
        raise RuntimeError("not comparable")


class Mute(Exception):
    def __str__(self):
        raise KeyError


def mute():
    raise Mute


def test_one_that_fails_ends_its_own_episode():
    p, tasks = brief_policy(), [Task("good"), *map(Task, FAULTS)]
    groups = play(p, Failing, tasks=tasks, max_turns=3, timeout=0.3)
    for group in groups[1:]:
        name = group[0].task.prompt
        for one in group:
            assert (one.stop, one.error.partition(" (tests")[0]) == ("error", FAULTS[name])
            assert math.isnan(one.reward)
            assert len(one.turns) == (0 if name in ("reset", "prompt") else 2)
    assert all(len(one.turns) == 3 and not one.error and one.reward > 0 for one in groups[0])
    for _ in range(2 * len(tasks)):
        assert Failing.closed.acquire(timeout=5)
    assert not Failing.closed.acquire(blocking=False)
    groups = score(groups)
    step = Step(0, {}, groups)
    assert (step.metrics["episodes/errors"], step.metrics["episodes/close_errors"]) == (30, 0)
    assert (step.metrics["stops/error"], step.metrics["rewards/unscored"]) == (30 / 32, 0)
    failed = f"30 episodes ended because their environment failed, the first: {FAULTS['reset']} (tests/"
    assert [line.startswith(failed) for line in step.warnings] == [True]
    for recipe in (algo.rloo(), algo.grpo(), algo.gigpo()):
        assert {row for part in make_batch(groups, recipe) for row in part.trajectories} <= {0, 1}


def test_where_all_fail_it_is_said_in_a_line():
    line = r"failed in each of 2 episodes: reset: RuntimeError: no world \(tests/test_environment.py, line \d+\)$"
    with pytest.raises(EpisodeError, match=line):
        play(brief_policy(), Failing, tasks=[Task("reset")])

    def broken():
        raise OSError("no display")

    with pytest.raises(EpisodeError, match="failed in each of 6 episodes: reset: OSError: no display"):
        play(brief_policy(), broken)


class Bare:
    tools = ()

    def reset(self, task):
        return task.prompt

    def step(self, reply):
        return Feedback(done=True)


class Unlocked(Bare):
    @property
    def close(self):
        raise OSError("no door")


class Offering(Bare):
    tools = (object(),)


@pytest.mark.parametrize(
    ("factory", "error"),
    [
        (lambda: 5, "reset: TypeError: the factory gave 5; wanted an object with reset and step"),
        (lambda: "m:Maze", 'reset: TypeError: the factory gave "m:Maze"; wanted an object with reset and step'),
        (Unlocked, "reset: OSError: no door"),
        (Offering, 'reset: TypeError: tools: wanted schemas of functions, got "<object'),
    ],
)
def test_what_is_no_environment_is_said_in_a_line(factory, error):
    with pytest.raises(EpisodeError) as caught:
        play(brief_policy(), factory)
    assert f"failed in each of 6 episodes: {error}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_episodes_share_neither_task_nor_arguments():
    """Each finds 3 doors in its task, and 2 walls in its arguments; what is scored is the task that was given."""

    found = []

    class Taker(Bare):
        def __init__(self, walls):
            self.walls = walls

        def reset(self, task):
            found.append((len(task.columns["doors"]), len(self.walls), task.prompt[0]["content"]))
            task.columns["doors"].pop()
            task.columns["more"] = self.walls.pop()
            task.prompt[0]["content"] = "?"
            return task.prompt

    task = Task(({"role": "user", "content": "go"},), {"doors": [1, 2, 3]})
    walls = [1, 2]
    (group,) = play(brief_policy(), Copying(Taker, walls=walls), tasks=[task], group_size=3)
    assert found == [(3, 2, "go")] * 3
    assert all(one.task is task for one in group)
    assert (task, walls) == (Task(({"role": "user", "content": "go"},), {"doors": [1, 2, 3]}), [1, 2])


def test_what_fails_or_hangs_in_closing_is_reported_and_not_waited_for_again(monkeypatch):
    """While one of an earlier rollout hangs, 0.2 s are all that others get."""
    monkeypatch.setattr(episodes, "CLOSE_TIMEOUT", 0.6)
    free = threading.Event()

    class Stuck(Bare):
        def close(self):
            free.wait(60)

    class Torn(Bare):
        def close(self):
            raise OSError("gone")

    def played(factory):
        return Step(0, {}, play(p, factory, tasks=TASKS[:1]))

    def errors(factory):
        return [one.close_error.partition(" (tests")[0] for one in every(played(factory).groups)]

    p = brief_policy()
    assert played(Bare).metrics["episodes/close_errors"] == 0
    torn = played(Torn)
    assert [one.close_error.partition(" (tests")[0] for one in every(torn.groups)] == ["close: OSError: gone"] * 2
    assert torn.metrics["episodes/close_errors"] == 2
    assert torn.warnings[0].startswith("2 environments could not be closed, the first: close: OSError: gone (tests/")
    assert errors(Stuck) == ["close: no answer in 0.6 s"] * 2
    assert errors(Stuck) == ["close: no answer in 0.2 s"] * 2
    free.set()
    while any(thread.name == episodes.CLOSING for thread in threading.enumerate()):
        time.sleep(0.01)
    assert errors(Torn) == ["close: OSError: gone"] * 2


class Defaults(Environment):
    """What inherits the protocol sets what differs from it."""

    stop = ("!",)

    def reset(self, task):
        return task.prompt

    def step(self, reply):
        return Feedback(done=True)


def test_the_protocol_need_not_be_inherited():
    for kind, stop in ((Defaults, ("!",)), (Bare, ())):
        handle = EnvironmentHandle(kind, Task("go"))
        assert handle.reset() == "go"
        assert (handle.stop, handle.special_tokens, handle.tools) == (stop, False, ())
        assert handle.step("!").done
    assert gives_rewards(Defaults)
    assert not gives_rewards(None)


class Later:
    """Its methods are async, and those of an episode share one loop with those of others."""

    loops: ClassVar[set[object]] = set()
    closed: ClassVar[list[str]] = []

    async def reset(self, task):
        self.task = task
        self.loops.add(asyncio.get_running_loop())
        return task.prompt

    async def step(self, reply):
        await asyncio.sleep(60 if self.task.prompt == "hangs" else 0)
        if self.task.prompt == "raises":
            raise OSError("gone")
        return Feedback(done=True, reward=1.0)

    async def close(self):
        self.closed.append(self.task.prompt)


def test_async_environments_are_awaited_within_their_time():
    def made():
        return Later()

    groups = play(brief_policy(), partial(made), tasks=[Task("well"), Task("hangs"), Task("raises")], timeout=0.3)
    assert [(one.stop, one.reward) for one in groups[0]] == [("done", 1.0)] * 2
    assert {one.error for one in groups[1]} == {"step: no answer in 0.3 s"}
    assert all(one.error.startswith("step: OSError: gone (tests/test_environment.py, line ") for one in groups[2])
    assert len(Later.loops) == 1
    assert sorted(Later.closed) == ["hangs"] * 2 + ["raises"] * 2 + ["well"] * 2


def test_an_answer_of_the_assistant_is_continued_and_what_failed_besides_is_counted():
    class Begins(Bare):
        def step(self, reply):
            return Feedback([{"role": "assistant", "content": [{"type": "text", "text": "So"}]}], fault="no\ndisk")

    p = brief_policy()
    groups = play(p, Begins, tasks=TASKS[:1], max_turns=2)
    for one in every(groups):
        assert p.tokenizer.decode(list(one.turns[1].observation)).endswith("<assistant>So")
        assert [turn.fault for turn in one.turns] == ["no disk", "no disk"]
    step = Step(0, {}, groups)
    assert step.metrics["episodes/faults"] == 4
    assert "in 4 turns something failed besides the model, the first: no disk" in step.warnings
