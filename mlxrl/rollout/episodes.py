"""From tasks to groups of trajectories."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlxrl.policy.load import Policy
from mlxrl.rollout.decode import Completion, Request, decode
from mlxrl.rollout.render import render
from mlxrl.rollout.sampling import fold, key_of
from mlxrl.types import Group, Sampling, Task, Trajectory, Turn


def rollout(
    policy: Policy,
    tasks: Sequence[Task],
    *,
    group_size: int,
    sampling: Sampling = Sampling(),
    key: int | mx.array = 0,
    max_rows: int = 32,
    thinking: bool | None = None,
) -> tuple[Group, ...]:
    """Sample `group_size` attempts at every task, all of them in one batched loop.

    Args:
        key: a number or a key, [2] uint32. Row r of task i draws from a key made of (key, i, r) alone.
        max_rows: rows that decode together.
    Returns:
        a group of unscored trajectories for every task; a task that stands twice is two groups.
    """
    if group_size < 1:
        raise ValueError(f"rollout: group_size: wanted at least 1, got {group_size}")
    base = key_of(0, key) if isinstance(key, int) else key
    prompts = [render(policy.tokenizer, task, thinking=thinking) for task in tasks]
    keys = row_keys(base, len(tasks), group_size)
    requests = [Request(prompt, keys[i * group_size + r]) for i, prompt in enumerate(prompts) for r in range(group_size)]
    stops = frozenset(policy.tokenizer.eos_token_ids)
    completions = decode(policy.model, policy.head, requests, sampling, stops, max_rows=max_rows)
    return tuple(
        tuple(
            _trajectory(policy, task, prompt, completion, sampling)
            for completion in completions[i * group_size : (i + 1) * group_size]
        )
        for i, (task, prompt) in enumerate(zip(tasks, prompts, strict=True))
    )


def row_keys(base: mx.array, tasks: int, group_size: int) -> mx.array:
    """[tasks * group_size, 2] keys, task by task."""
    of_tasks = fold(base[None], mx.arange(tasks))
    rows = mx.concatenate([mx.arange(group_size)] * max(tasks, 1))
    return fold(mx.repeat(of_tasks, group_size, axis=0), rows) if tasks else mx.zeros((0, 2), mx.uint32)


def _trajectory(
    policy: Policy, task: Task, prompt: tuple[int, ...], completion: Completion, sampling: Sampling
) -> Trajectory:
    text = policy.tokenizer.decode(completion.ids, skip_special_tokens=True)
    turn = Turn(prompt, tuple(completion.ids), tuple(completion.logprobs), text)
    assert completion.stop is not None
    return Trajectory(task, (turn,), stop=completion.stop, sampling=sampling)
