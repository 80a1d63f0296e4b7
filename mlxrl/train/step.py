"""A step of a run as the user sees it, and the iterator of steps."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from mlxrl.train.metrics import describe, warnings_of
from mlxrl.types import Group, Metrics


@dataclass(frozen=True, slots=True, repr=False)
class Step:
    """What a step did: its metrics, the scored groups it learned from, and what went wrong.

    index: from 0, as that from which everything random follows; `number` is what files and people count, from 1.
    sampled: all groups that were sampled for it, where resampling left some out.
    streaks: what has been so for a few steps, a line each.
    """

    index: int
    metrics: Metrics
    groups: tuple[Group, ...]
    sampled: tuple[Group, ...] = ()
    streaks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "metrics", {**describe(self.sampled or self.groups), **self.metrics})

    @property
    def number(self) -> int:
        """Which step of the run it is, from 1, as the console and the run's files count."""
        return self.index + 1

    @property
    def warnings(self) -> tuple[str, ...]:
        """What did not go well, a line each."""
        found = warnings_of(self.metrics, [one for group in self.sampled or self.groups for one in group])
        return found + self.streaks

    def __str__(self) -> str:
        metrics, rate = self.metrics, self.metrics.get("rollout/tokens_per_second")
        learned = {name: metrics.get(name, math.nan) for name in ("reward", "teacher/kl")}
        parts = [
            f"step {self.number}",
            *(f"{name} {value:.3f}" for name, value in learned.items() if math.isfinite(value)),
            f"zero-variance groups {metrics['groups/zero_variance']:.0f} of {metrics['groups/sampled']:.0f}",
            f"length {metrics['completions/mean_length']:.1f}",
            f"truncated {metrics['completions/clipped_ratio']:.0%}",
        ]
        line = "  ".join([*parts, f"{rate:.0f} tokens/s"] if rate is not None else parts)
        return "\n".join([line, *(f"  {warning}" for warning in self.warnings)])

    __repr__ = __str__


class Steps(Iterator[Step]):
    """The steps of a run, each taken when it is asked for. A run that is dropped before its first step says so."""

    def __init__(self, steps: Iterator[Step]) -> None:
        self._steps, self._begun = steps, False

    def __next__(self) -> Step:
        self._begun = True
        return next(self._steps)

    def __del__(self) -> None:
        if not self._begun:
            why = "run: nothing was trained, because no step was asked for; write `for step in run(...): ...`"
            warnings.warn(why, stacklevel=2)
