"""The loop: roll out, score, update, as an iterator of steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np

from mlxrl.data import cycle
from mlxrl.policy.load import Policy
from mlxrl.rewards import score
from mlxrl.rollout.episodes import rollout
from mlxrl.rollout.sampling import key_of
from mlxrl.train.optimizer import optimizer as make_optimizer
from mlxrl.train.pack import pack
from mlxrl.train.step import combined, fill, update
from mlxrl.types import Algorithm, Group, Metrics, Sampling, Task

SKIPS = 3


class Diverged(ValueError):
    """Several updates in a row were not finite."""


@dataclass(frozen=True, slots=True)
class Step:
    """What a step did: its number from 0, its metrics, and the scored groups it learned from."""

    index: int
    metrics: Metrics
    groups: tuple[Group, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "metrics", {**describe(self.groups), **self.metrics})

    def __str__(self) -> str:
        rate = self.metrics.get("rollout/tokens_per_second")
        parts = [
            f"step {self.index}",
            f"reward {self.metrics['reward/mean']:.3f}",
            f"silent groups {self.metrics['groups/silent']:.0f} of {self.metrics['groups/total']:.0f}",
            f"length {self.metrics['length/mean']:.1f}",
            f"truncated {self.metrics['length/truncated']:.0%}",
        ]
        return "  ".join([*parts, f"{rate:.0f} tokens/s"] if rate is not None else parts)


def describe(groups: Sequence[Group]) -> Metrics:
    """Reward, length and signal of scored groups; `silent` groups are those whose rewards are all equal."""
    trajectories = [trajectory for group in groups for trajectory in group]
    rewards = np.array([trajectory.reward for trajectory in trajectories])
    scored = rewards[np.isfinite(rewards)]
    lengths = [trajectory.length for trajectory in trajectories]
    return {
        "reward/mean": float(scored.mean()) if scored.size else math.nan,
        "reward/std": float(scored.std()) if scored.size else math.nan,
        "reward/failed": float(rewards.size - scored.size),
        "groups/total": float(len(groups)),
        "groups/silent": float(sum(_silent(group) for group in groups)),
        "length/mean": float(np.mean(lengths)) if lengths else 0.0,
        "length/truncated": float(np.mean([t.stop == "length" for t in trajectories])) if trajectories else 0.0,
        "rollout/tokens": float(sum(lengths)),
    }


def _silent(group: Group) -> bool:
    rewards = [trajectory.reward for trajectory in group if math.isfinite(trajectory.reward)]
    return not rewards or min(rewards) == max(rewards)


def train(
    policy: Policy,
    tasks: Sequence[Task],
    algo: Algorithm,
    *,
    reward: Callable[..., Any] | Sequence[Callable[..., Any]],
    steps: int,
    tasks_per_step: int = 4,
    group_size: int = 8,
    sampling: Sampling = Sampling(),
    optimizer: optim.Optimizer | None = None,
    seed: int = 0,
    weights: Sequence[float] | None = None,
    max_rows: int = 32,
    thinking: bool | None = None,
    tokens_per_pass: int | None = None,
    updates_per_rollout: int = 1,
    max_grad_norm: float = 1.0,
    start: int = 0,
) -> Iterator[Step]:
    """Train from step `start` to `steps`. Everything random is a function of (seed, step), so a run can be resumed.

    Args:
        reward: a function of TRL's shape or several, summed with `weights`.
        optimizer: AdamW at a constant 1e-5 where none is given.
        updates_per_rollout: optimizer steps on each batch; old log-probs are computed once, before the first,
            and not at all where there is only one.
    Raises:
        Diverged: three updates in a row were not finite.
    """
    optimizer = optimizer or make_optimizer(learning_rate=1e-5)
    functions = [reward] if callable(reward) else list(reward)
    skips = 0
    for index, todo in zip(range(start, steps), cycle(tasks, tasks_per_step, seed=seed, start=start), strict=False):
        mx.reset_peak_memory()
        clock = Clock()
        key = key_of(seed, index)
        groups = rollout(
            policy, todo, group_size=group_size, sampling=sampling, key=key, max_rows=max_rows, thinking=thinking
        )
        clock.lap("rollout")
        groups = score(groups, *functions, weights=weights)
        clock.lap("reward")
        batch = pack(groups, algo, tokens_per_pass=tokens_per_pass)
        if updates_per_rollout > 1:
            batch = fill(policy, batch, algo.needs | {"old"})
        metrics: Metrics = {}
        for _ in range(updates_per_rollout):
            metrics = update(policy, optimizer, batch, algo, max_grad_norm=max_grad_norm)
            skips = skips + 1 if metrics["policy/skipped"] else 0
            if skips >= SKIPS:
                raise Diverged(_diverged(index))
        clock.lap("update")
        yield Step(index, combined(metrics, _costs(clock, groups)), groups)


def _diverged(index: int) -> str:
    return (
        f"step {index}: loss or gradient was not finite in {SKIPS} updates in a row; weights are those before them. "
        "Lower optimizer.learning_rate, or look at the rewards in samples.jsonl"
    )


class Clock:
    """Seconds of the parts of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def lap(self, part: str) -> None:
        """Give the time since the last lap to a part."""
        now = time.perf_counter()
        self.seconds[part] = now - self._since
        self._since = now


def _costs(clock: Clock, groups: Sequence[Group]) -> Metrics:
    tokens = sum(trajectory.length for group in groups for trajectory in group)
    return {
        **{f"seconds/{part}": seconds for part, seconds in clock.seconds.items()},
        "rollout/tokens_per_second": tokens / max(clock.seconds["rollout"], 1e-9),
        "memory/peak": float(mx.get_peak_memory()),
    }
