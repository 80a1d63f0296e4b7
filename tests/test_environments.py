"""The reference environments, by direct calls."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from environments.calculator import calculate, calculator
from environments.guess import GuessingGame, guessing_tasks
from environments.maze import MOVES, Maze, beyond, distance, maze_tasks, named, placed, write

import mlxrl as rl
from helpers import a_policy
from mlxrl import algo
from mlxrl.rollout.sample import sample
from mlxrl.settings import EpisodeLimits, Sampling
from mlxrl.types import Feedback, Task


def game(secret: int, **settings: Any) -> GuessingGame:
    made = GuessingGame(**settings)
    assert made.reset(Task("guess 1-16", {"secret": secret, "low": 1, "high": 16})) == "guess 1-16"
    return made


@pytest.mark.parametrize(("factory", "task"), [(GuessingGame, guessing_tasks(1)[0]), (Maze, maze_tasks(1)[0])])
def test_messages_are_asked_as_they_are(factory: Any, task: Task) -> None:
    """As with data.system."""
    messages = ({"role": "system", "content": "play"}, {"role": "user", "content": task.prompt})
    assert factory().reset(Task(messages, task.columns)) == messages


def test_hints_leave_a_range() -> None:
    """11: 8 is too low and leaves 9-16; 12 leaves 9-11; the third guess earns 1 - 2/8."""
    made = game(11)
    assert made.step("8") == Feedback("higher", state=(9, 16))
    assert made.step("I say 12.") == Feedback("lower", state=(9, 11))
    assert made.step("4") == Feedback("higher", state=(9, 11))  # it was known: a guess lost
    assert made.step("11") == Feedback("right", 1 - 3 / 8, done=True)


@pytest.mark.parametrize("reply", ["", "higher", "17", "0", "-3", "9" * 5000])
def test_what_is_no_guess_costs_one(reply: str) -> None:
    made = game(11, guesses=2)
    assert made.step(reply) == Feedback("a number 1-16", state=(1, 16), invalid=True)
    assert made.step("11") == Feedback("right", 0.5, done=True)


def test_the_last_guess_ends_the_game() -> None:
    made = game(11, guesses=2)
    assert not made.step("8").done
    assert made.step("12") == Feedback("lower", 0.0, done=True, state=(9, 11))
    with pytest.raises(ValueError, match="guesses: wanted at least 1"):
        GuessingGame(0)


def test_guessing_tasks_follow_from_their_seed() -> None:
    tasks = guessing_tasks(200, 3, low=5, high=8)
    assert tasks == guessing_tasks(200, 3, low=5, high=8)
    assert tasks != guessing_tasks(200, 4, low=5, high=8)
    assert {task.columns["secret"] for task in tasks} == {5, 6, 7, 8}
    assert {task.prompt for task in tasks} == {"guess 5-8"}


PLAN = {"A1": "es", "B1": "esw", "C1": "w", "A2": "n", "B2": "n"}


def maze(**settings: Any) -> Maze:
    made = Maze(**settings)
    assert made.reset(Task("to C1. at A1: es", {"doors": PLAN, "start": "A1", "goal": "C1"})) == "to C1. at A1: es"
    return made


def test_moves_and_walls() -> None:
    made = maze(cost=0.1)
    assert made.step("e") == Feedback("at B1: esw", -0.1, state="B1")
    assert made.step(" South. ") == Feedback("at B2: n", -0.1, state="B2")
    assert made.step("w") == Feedback("wall. at B2: n", -0.1, state="B2", invalid=True)
    assert made.step("up") == Feedback("n, e, s or w. at B2: n", -0.1, state="B2", invalid=True)
    assert made.step("") == Feedback("n, e, s or w. at B2: n", -0.1, state="B2", invalid=True)
    assert made.step("north").state == "B1"
    assert made.step("e") == Feedback("at C1", 1.0, done=True)
    with pytest.raises(ValueError, match="cost: wanted at least 0"):
        Maze(-1)


@pytest.mark.parametrize("size", [2, 3, 6])
def test_mazes_can_be_walked(size: int) -> None:
    """Doors lead both ways and stay inside; a tree of n places has n - 1 doors, and a loop one more."""
    for task in maze_tasks(20, 5, size=size, loops=1):
        doors = {placed(name): set(ways) for name, ways in task.columns["doors"].items()}
        assert len(doors) == size * size
        assert sum(map(len, doors.values())) == 2 * (size * size - 1 + 1)
        assert all({"n": "s", "s": "n", "e": "w", "w": "e"}[m] in doors[beyond(p, m)] for p in doors for m in doors[p])
        start, goal = placed(task.columns["start"]), placed(task.columns["goal"])
        assert task.columns["shortest"] == distance(doors, start, goal) > 0
        assert task.prompt == f"to {named(goal)}. at {named(start)}: {task.columns['doors'][named(start)]}"
        made, place = Maze(), start
        made.reset(task)
        for left in range(task.columns["shortest"] - 1, -1, -1):
            move = next(m for m in MOVES if m in doors[place] and distance(doors, beyond(place, m), goal) == left)
            place, got = beyond(place, move), made.step(move)
        assert (got.done, got.reward) == (True, 1.0)


def test_mazes_follow_from_their_seed(tmp_path: Any) -> None:
    tasks = maze_tasks(5, 1)
    assert tasks == maze_tasks(5, 1)
    assert tasks != maze_tasks(5, 2)
    with pytest.raises(ValueError, match="size: wanted 2 to 26, got 1"):
        maze_tasks(1, size=1)
    write(tmp_path / "mazes.jsonl", tasks)
    assert rl.tasks(tmp_path / "mazes.jsonl") == [
        replace(task, columns={"prompt": task.prompt, **task.columns}) for task in tasks
    ]
    assert json.loads((tmp_path / "mazes.jsonl").read_text().splitlines()[0])["goal"] == tasks[0].columns["goal"]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2+3*4", "14"),
        ("(2 + 3) * 4", "20"),
        ("2 - 3 - 4", "-5"),
        ("8 / 4 / 2", "1"),
        ("-(2)*-3", "6"),
        ("1/3", "0.333333333333"),
        ("0.1 + 0.2", "0.3"),
        (".5×4÷2", "1"),
        ("12345678901234567890 * 10", "123456789012345678900"),
    ],
)
def test_the_calculator_computes(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("", "wanted a number, got nothing"),
        ("2 +", "wanted a number, got nothing"),
        ("2 3", "did not expect '3'"),
        ("(2", "a bracket is not closed"),
        ("2)", r"did not expect '\)'"),
        ("1/(2-2)", "division by zero"),
        ("__import__('os')", "did not expect '_'"),
        ("2**9", r"wanted a number, got \*"),
        ("(" * 60 + "1" + ")" * 60, "at most 40 signs and brackets"),
        ("1" * 201, "at most 200 characters, got 201"),
    ],
)
def test_the_calculator_refuses(expression: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        calculate(expression)


def test_the_calculator_is_a_tool() -> None:
    (schema,) = calculator.schemas
    assert schema["function"]["parameters"]["required"] == ["expression"]
    assert "(2 + 3) * 4" in schema["function"]["parameters"]["properties"]["expression"]["description"]


@pytest.mark.parametrize(("factory", "tasks"), [(GuessingGame, guessing_tasks(2)), (Maze, maze_tasks(2))])
def test_a_model_can_play(factory: Any, tasks: list[Task]) -> None:
    """A random model's replies are invalid; the same episodes come out again, and GiGPO credits each turn."""
    p, options = a_policy(), {"group_size": 3, "sampling": Sampling(max_tokens=4), "limits": EpisodeLimits(max_turns=3)}
    groups = sample(p, tasks, environment=factory, key=1, **options)
    again = sample(p, tasks, environment=factory, key=1, **options)
    assert [[t.turns for t in group] for group in groups] == [[t.turns for t in group] for group in again]
    assert {len(one.turns) for group in groups for one in group} <= {1, 2, 3}
    credits = algo.gigpo().advantages(groups)
    assert all(
        len(credit) == one.num_sampled
        for group, own in zip(groups, credits, strict=True)
        for one, credit in zip(group, own, strict=True)
    )
