"""The loop: roll out, score, update, as an iterator of steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np

from mlxrl.algo.echo import at_step
from mlxrl.algo.probe import candidates_kept, uses_rewards
from mlxrl.data import cycle
from mlxrl.policy.load import Policy
from mlxrl.rewards import require_scores, score
from mlxrl.rollout.environment import Factory, earns
from mlxrl.rollout.prefill import context_of
from mlxrl.rollout.sample import sample
from mlxrl.settings import EpisodeLimits, Sampling
from mlxrl.train.draw import Drawn, draw, draw_key, further_tasks
from mlxrl.train.episodes import of_episodes
from mlxrl.train.optimizer import optimizer as make_optimizer
from mlxrl.train.pack import pack
from mlxrl.train.parts import parts as dealt
from mlxrl.train.step import averaged, fill, update
from mlxrl.train.teacher import Teacher, teacher_of
from mlxrl.types import Algorithm, Batch, Group, Metrics, Task

SKIPS = 3
Shape = Callable[[Sequence[Group]], Sequence[Group]]


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
    """Reward, length and signal of groups; `silent` groups are those whose rewards are all equal."""
    trajectories = [trajectory for group in groups for trajectory in group]
    rewards = np.array([trajectory.reward for trajectory in trajectories])
    scored = rewards[np.isfinite(rewards)]
    lengths = [trajectory.length for trajectory in trajectories]
    return {
        "reward/mean": float(scored.mean()) if scored.size else math.nan,
        "reward/std": float(scored.std()) if scored.size else math.nan,
        "reward/failed": float(sum(bool(t.rewards) and not math.isfinite(t.reward) for t in trajectories)),
        "groups/total": float(len(groups)),
        "groups/silent": float(sum(_silent(group) for group in groups)),
        "length/mean": float(np.mean(lengths)) if lengths else 0.0,
        "length/truncated": float(np.mean([t.stop == "length" for t in trajectories])) if trajectories else 0.0,
        "rollout/tokens": float(sum(lengths)),
        **of_episodes(trajectories),
    }


def _silent(group: Group) -> bool:
    """Whether a group that has been scored has no two different rewards."""
    rewards = [trajectory.reward for trajectory in group if math.isfinite(trajectory.reward)]
    scored = bool(rewards) or any(trajectory.rewards for trajectory in group)
    return scored and (not rewards or min(rewards) == max(rewards))


def run(
    policy: Policy,
    tasks: Sequence[Task],
    algo: Algorithm,
    *,
    reward: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
    steps: int,
    tasks_per_step: int = 4,
    group_size: int = 8,
    sampling: Sampling = Sampling(),
    optimizer: optim.Optimizer | None = None,
    seed: int = 0,
    weights: Sequence[float] | None = None,
    shape: Shape | None = None,
    max_draws: int = 1,
    teacher: Policy | Teacher | Literal["base"] | None = None,
    hint: str | None = None,
    max_rows: int = 32,
    tokens_per_pass: int | None = None,
    max_tokens_per_row: int | None = None,
    recompute: bool = False,
    updates_per_rollout: int = 1,
    minibatches: int = 1,
    max_grad_norm: float = 1.0,
    start: int = 0,
    environment: Factory | None = None,
    limits: EpisodeLimits = EpisodeLimits(),
) -> Iterator[Step]:
    """Train from step `start` to `steps`. Everything random is a function of (seed, step), so a run can be resumed.

    Args:
        reward: a function of TRL's shape or several, summed with `weights`; None where a teacher alone teaches, or
            an environment gives the rewards.
        optimizer: AdamW at a constant 1e-5 where none is given.
        shape: what is made of the scored groups before they are credited, as `algo.shaping.shape_overlong`.
        max_draws: how often a step may draw tasks. With more than one, groups whose rewards are all equal are left
            out and further tasks are asked in their place; see `draw.draw`.
        teacher, hint, recompute: see `update`. tokens_per_pass, max_tokens_per_row: see `pack`.
        updates_per_rollout, minibatches: how often a step goes through its groups, and in how many optimizer steps each
            time, for which they are dealt anew. Old log-probs are computed once, before the first of several.
        environment, limits: see `sample`.
    Raises:
        Diverged: three updates in a row were not finite.
    """
    optimizer = optimizer or make_optimizer(learning_rate=1e-5)
    functions = [] if reward is None else [reward] if callable(reward) else list(reward)
    _refuse(algo, [*functions, *([environment] if earns(environment) else [])], shape, max_draws)
    judge = teacher_of(policy, algo, teacher, hint, sampling.thinking)
    if environment is not None and judge is not None and judge.hint is not None:
        raise ValueError("train: hint: an environment says what is asked; leave the hint out")
    asking = Asking(policy, group_size, _keeping(sampling, algo), max_rows, functions, weights, environment, limits)
    sizes = {"tokens_per_pass": tokens_per_pass, "max_tokens_per_row": max_tokens_per_row}
    options: dict[str, Any] = {"teacher": judge, "max_grad_norm": max_grad_norm, "recompute": recompute}
    learning = Learning(policy, optimizer, judge, updates_per_rollout, minibatches, sizes, options)
    for index, todo in zip(range(start, steps), cycle(tasks, tasks_per_step, seed=seed, start=start), strict=False):
        mx.reset_peak_memory()
        clock, more = Clock(), further_tasks(tasks, todo, seed, index)
        drawn = draw(partial(asking.groups, clock, seed, index), todo, more, max_draws)
        groups = tuple(drawn.groups if shape is None else shape(drawn.groups))
        found = learning.from_(groups, at_step(algo, index), index, f"{seed}:{index}")
        clock.lap("update")
        costs = {**_costs(clock, drawn.asked), **_filled(policy, drawn.asked)}
        yield Step(index, {**_drawn(drawn), **averaged(found), **costs}, groups)


def _refuse(algo: Algorithm, functions: Sequence[Any], shape: Shape | None, max_draws: int) -> None:
    """ValueError for rewards that would have no effect, or would be missing."""
    if uses_rewards(algo):
        if not functions:
            raise ValueError(f"train: reward: {algo.name} learns from rewards; wanted at least one function, got none")
        return
    for name, given in (("shape", shape is not None), ("max_draws", max_draws > 1)):
        if given:
            raise ValueError(f"train: {name} has no effect, because {algo.name} does not look at rewards")


def _keeping(sampling: Sampling, algo: Algorithm) -> Sampling:
    """The sampling that keeps as many candidates as the algorithm compares."""
    return replace(sampling, num_top=max(sampling.num_top, candidates_kept(algo)))


@dataclass(frozen=True, slots=True)
class Learning:
    """How scored groups become updates. sizes: of `pack`; options: of `update`."""

    policy: Policy
    optimizer: optim.Optimizer
    judge: Teacher | None
    epochs: int
    minibatches: int
    sizes: Mapping[str, int | None]
    options: Mapping[str, Any]
    patience: Patience = field(default_factory=lambda: Patience())

    def from_(self, groups: Sequence[Group], algo: Algorithm, index: int, key: str) -> list[Metrics]:
        """Make the updates of a step; returns the metrics of each."""
        if not groups:
            return []
        parts = self._updates(pack(groups, algo, **self.sizes), algo, key)
        return [
            self.patience.with_(update(self.policy, self.optimizer, part, algo, **self.options), index)
            for part in parts
        ]

    def _updates(self, batch: Batch, algo: Algorithm, key: str) -> Iterator[Batch]:
        """The batch of every optimizer step. Before several, what they compare with is computed."""
        if self.epochs * min(self.minibatches, len(batch.groups)) > 1:
            batch = fill(self.policy, batch, algo.needs | {"old"}, teacher=self.judge, algo=algo)
        for epoch in range(self.epochs):
            yield from dealt(batch, self.minibatches, f"{key}:{epoch}")


@dataclass(frozen=True, slots=True)
class Asking:
    """How tasks become scored groups."""

    policy: Policy
    group_size: int
    sampling: Sampling
    max_rows: int
    functions: Sequence[Callable[..., Any]]
    weights: Sequence[float] | None
    environment: Factory | None = None
    limits: EpisodeLimits = field(default_factory=EpisodeLimits)

    def groups(self, clock: Clock, seed: int, step: int, tasks: Sequence[Task], number: int) -> Sequence[Group]:
        """The attempts at the tasks of a step's draw, scored where there is a reward."""
        groups = sample(
            self.policy, tasks, group_size=self.group_size, sampling=self.sampling, key=draw_key(seed, step, number),
            max_rows=self.max_rows, environment=self.environment, limits=self.limits,
        )  # fmt: skip
        clock.lap("rollout")
        require_finite(groups, f"step {step}")
        if self.functions or self.environment is not None:
            groups = require_scores(score(groups, *self.functions, weights=self.weights))
        clock.lap("reward")
        return groups


def require_finite(groups: Sequence[Group], where: str) -> None:
    """Diverged where the model had no finite logits in any row."""
    stops = [trajectory.stop for group in groups for trajectory in group if not trajectory.error]
    if stops and all(stop == "error" for stop in stops):
        raise Diverged(
            f"{where}: the model's logits were not finite in any of {len(stops)} rows; lower "
            "optimizer.learning_rate, or look at the model's weights"
        )


class Patience:
    """How many updates in a row were not finite."""

    def __init__(self) -> None:
        self._skips = 0

    def with_(self, metrics: Metrics, index: int) -> Metrics:
        """The metrics of an update; Diverged where it was one too many."""
        self._skips = self._skips + 1 if metrics["policy/skipped"] else 0
        if self._skips >= SKIPS:
            raise Diverged(
                f"step {index}: loss or gradient was not finite in {SKIPS} updates in a row; weights are those before "
                "them. Lower optimizer.learning_rate, or look at the rewards in samples.jsonl"
            )
        return metrics


class Clock:
    """Seconds of the parts of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def lap(self, part: str) -> None:
        """Add the time since the last lap to a part."""
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._since
        self._since = now


def _drawn(drawn: Drawn) -> Metrics:
    """Of all that was asked, so that the reward is that of the policy and not of a selection."""
    return {
        **describe(drawn.asked),
        "groups/kept": float(len(drawn.groups)),
        "rollout/draws": float(drawn.draws),
    }


def _filled(policy: Policy, groups: Sequence[Group]) -> Metrics:
    """rollout/context: the tokens of the model's context, where prompts fill it and nothing could be sampled."""
    context, rows = context_of(policy.model), [trajectory for group in groups for trajectory in group]
    full = any(row.stop == "length" for row in rows) and not any(row.length for row in rows)
    return {"rollout/context": float(context)} if full and context is not None else {}


def _costs(clock: Clock, groups: Sequence[Group]) -> Metrics:
    tokens = sum(trajectory.length for group in groups for trajectory in group)
    return {
        **{f"seconds/{part}": seconds for part, seconds in clock.seconds.items()},
        "rollout/tokens_per_second": tokens / max(clock.seconds["rollout"], 1e-9),
        "memory/peak": float(mx.get_peak_memory()),
    }
