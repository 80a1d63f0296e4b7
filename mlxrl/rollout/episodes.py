"""From tasks to groups of trajectories."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any, Unpack

import mlx.core as mx

from mlxrl.errors import did_you_mean
from mlxrl.policy.policy import Policy
from mlxrl.rollout.decode import Loop
from mlxrl.rollout.play import Bounds, Limits, Play
from mlxrl.rollout.render import render
from mlxrl.rollout.row import Request, Row
from mlxrl.rollout.rules import Processor, Rules
from mlxrl.rollout.sampling import fold, key_of
from mlxrl.rollout.turns import turn_of
from mlxrl.rollout.worlds import Factory, accept, prepare
from mlxrl.settings import Sampling
from mlxrl.types import Group, Task, Trajectory


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a rollout. groups: those of the tasks, with the rows that had ended."""

    def __init__(self, groups: tuple[Group, ...]) -> None:
        super().__init__()
        self.groups = groups


def rollout(
    policy: Policy,
    tasks: Sequence[Task],
    *,
    group_size: int,
    sampling: Sampling = Sampling(),
    key: int | mx.array = 0,
    max_rows: int = 32,
    thinking: bool | None = None,
    processors: Sequence[Processor] = (),
    environment: Factory | None = None,
    **limits: Unpack[Limits],
) -> tuple[Group, ...]:
    """Sample `group_size` attempts at every task, all of them in one batched loop.

    Args:
        key: a number or a key, [2] uint32. Row r of task i draws from a key made of (key, i, r) alone, and of the
            number of its turn.
        max_rows: rows that decode together.
        processors: mlx-lm's logits processors, called with a row's tokens [T] and its logits [1, V]. Log-probs stay
            those of the model.
        environment: makes the environment of an attempt, which then is an episode of several turns; see
            `types.Environment`. Its reward is the sum over the turns, before reward functions.
        limits: of an episode: max_turns, max_episode_tokens, timeout, invalid_penalty, see `play.Bounds`.
    Returns:
        a group of trajectories for every task; a task that stands twice is two groups.
    Raises:
        Interrupted: on Ctrl-C, with the rows that had ended.
        EpisodeError: the environment failed in every episode. One that fails in some ends only those.
    """
    if group_size < 1:
        raise ValueError(f"rollout: group_size: wanted at least 1, got {group_size}")
    refuse_limits(rollout, environment, limits)
    base = key_of(0, key) if isinstance(key, int) else key
    keys = row_keys(base, len(tasks), group_size)
    rules = rules_of(policy.tokenizer, sampling)
    if environment is not None:
        prepare(environment, policy.tokenizer)
        return _played(Play(
            policy, tasks, environment, Bounds(**limits), rules, keys, group_size,
            max_rows=max_rows, thinking=thinking, processors=processors,
        ))  # fmt: skip
    prompts = [render(policy.tokenizer, task, thinking=thinking) for task in tasks]
    asked = [prompt for prompt in prompts for _ in range(group_size)]
    requests = [Request(prompt, key) for prompt, key in zip(asked, keys, strict=True)]
    loop = Loop(
        policy.model, policy.head, requests, rules, max_rows=max_rows,
        text=policy.tokenizer.decode, processors=processors,
    )  # fmt: skip
    try:
        with closing(loop.run()) as rows:
            deque(rows, maxlen=0)
    except KeyboardInterrupt:
        raise Interrupted(_groups(policy.tokenizer, tasks, loop.ordered, group_size, sampling)) from None
    return _groups(policy.tokenizer, tasks, loop.ordered, group_size, sampling)


def refuse_limits(function: Callable[..., Any], environment: Factory | None, limits: Limits) -> None:
    """ValueError for keywords of a function that are none, limits without episodes, and what makes no environment."""
    known = Limits.__annotations__
    if strange := next((name for name in limits if name not in known), None):
        hint = did_you_mean(strange, [*known, *inspect.signature(function).parameters])
        raise ValueError(f"{function.__name__}: unknown argument {strange!r}{hint}")
    if environment is None and limits:
        raise ValueError(f"rollout: {next(iter(limits))} has no effect without an environment")
    if environment is not None:
        try:
            accept(environment, {})
        except ValueError as error:
            raise ValueError(f"{function.__name__}: environment: {error}") from None


def _played(play: Play) -> tuple[Group, ...]:
    try:
        play.run()
    except KeyboardInterrupt:
        raise Interrupted(play.groups()) from None
    return play.groups()


def rules_of(tokenizer: Any, sampling: Sampling) -> Rules:
    """How rows draw and end with a tokenizer: any of its eos ids is a stop."""
    if sampling.thinking_budget is not None and not tokenizer.has_thinking:
        raise ValueError(
            "sampling: thinking_budget: the tokenizer has no tokens that begin and end thinking; leave it out"
        )
    stops = tuple(sorted(tokenizer.eos_token_ids))
    if sampling.thinking_budget is None:
        return Rules(sampling, stops)
    return Rules(sampling, stops, tuple(tokenizer.think_start_tokens), tuple(tokenizer.think_end_tokens))


def row_keys(base: mx.array, tasks: int, group_size: int) -> mx.array:
    """[tasks * group_size, 2] keys, task by task."""
    of_tasks = fold(base[None], mx.arange(tasks))
    rows = mx.concatenate([mx.arange(group_size)] * max(tasks, 1))
    return fold(mx.repeat(of_tasks, group_size, axis=0), rows) if tasks else mx.zeros((0, 2), mx.uint32)


def _groups(
    tokenizer: Any, tasks: Sequence[Task], rows: Sequence[Row], group_size: int, sampling: Sampling
) -> tuple[Group, ...]:
    """The rows that have ended as trajectories, group by group."""
    return tuple(
        tuple(
            _trajectory(tokenizer, task, row, sampling)
            for row in rows[number * group_size : (number + 1) * group_size]
            if row.stop is not None
        )
        for number, task in enumerate(tasks)
    )


def _trajectory(tokenizer: Any, task: Task, row: Row, sampling: Sampling) -> Trajectory:
    assert row.stop is not None
    return Trajectory(task, (turn_of(tokenizer, row, sampling),), stop=row.stop, sampling=sampling)
