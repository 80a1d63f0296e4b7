"""From tasks to groups of trajectories."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import mlx.core as mx

from mlxrl.policy.load import Policy
from mlxrl.rollout.decode import Loop
from mlxrl.rollout.render import render
from mlxrl.rollout.row import Request, Row
from mlxrl.rollout.rules import Processor, Rules
from mlxrl.rollout.sampling import fold, key_of
from mlxrl.types import Group, Sampling, Task, Trajectory, Turn


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
) -> tuple[Group, ...]:
    """Sample `group_size` attempts at every task, all of them in one batched loop.

    Args:
        key: a number or a key, [2] uint32. Row r of task i draws from a key made of (key, i, r) alone.
        max_rows: rows that decode together.
        processors: mlx-lm's logits processors, called with a row's tokens [T] and its logits [1, V]. Log-probs stay
            those of the model.
    Returns:
        a group of unscored trajectories for every task; a task that stands twice is two groups.
    Raises:
        Interrupted: on Ctrl-C, with the rows that had ended.
    """
    if group_size < 1:
        raise ValueError(f"rollout: group_size: wanted at least 1, got {group_size}")
    base = key_of(0, key) if isinstance(key, int) else key
    prompts = [render(policy.tokenizer, task, thinking=thinking) for task in tasks]
    keys = row_keys(base, len(tasks), group_size)
    asked = [prompt for prompt in prompts for _ in range(group_size)]
    requests = [Request(prompt, key) for prompt, key in zip(asked, keys, strict=True)]
    loop = Loop(
        policy.model, policy.head, requests, rules_of(policy.tokenizer, sampling), max_rows=max_rows,
        text=policy.tokenizer.decode, processors=processors,
    )  # fmt: skip
    try:
        with closing(loop.run()) as rows:
            deque(rows, maxlen=0)
    except KeyboardInterrupt:
        raise Interrupted(_groups(policy.tokenizer, tasks, loop.ordered, group_size, sampling)) from None
    return _groups(policy.tokenizer, tasks, loop.ordered, group_size, sampling)


def rules_of(tokenizer: Any, sampling: Sampling) -> Rules:
    """How rows draw and end with a tokenizer: any of its eos ids is a stop."""
    if sampling.thinking_budget is not None and not tokenizer.has_thinking:
        raise ValueError("sampling: thinking_budget: the tokenizer has no tokens that begin and end thinking")
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
    turn = Turn(
        row.prompt,
        tuple(row.ids),
        tuple(row.logprobs),
        tokenizer.decode(row.ids, skip_special_tokens=True),
        forced=tuple(row.forced),
        truncated=tuple(row.truncated) or None,
        candidates=tuple(row.candidates) if sampling.candidates else None,
        candidate_logprobs=tuple(row.candidate_logprobs) if sampling.candidates else None,
    )
    assert row.stop is not None
    return Trajectory(task, (turn,), stop=row.stop, sampling=sampling)
