"""Steps in a row that taught nothing: what is said of them, and when a run does not go on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from mlxrl.algo.advantages import all_equal
from mlxrl.errors import UserError
from mlxrl.settings import Sampling, Train
from mlxrl.types import Metrics, Trajectory

FEW = 3
"""Steps in a row after which it is said."""


class NoSignal(UserError):
    """Step after step had no learning signal."""


@dataclass(slots=True)
class Streaks:
    """Counts steps in a row, by what they were. "unscored": without any reward, there after the first that had one."""

    sampling: Sampling
    train: Train
    counts: dict[str, int] = field(default_factory=dict[str, int])

    def unscorable(self, last: bool) -> bool:
        """Count a step without any finite reward; whether the run ends: at its first or last step, or after a few."""
        known = "unscored" in self.counts
        return last or not known or self._counted("unscored", True) >= FEW

    def scored(self) -> None:
        """Note a step with rewards."""
        self._counted("unscored", False)

    def step(self, metrics: Metrics, trajectories: Sequence[Trajectory]) -> tuple[str, ...]:
        """Count a step, and return a line for what has just been so for a few steps: why, and what to change."""
        idle = metrics["updates"] == 0 and not metrics["updates/skipped"]
        limited = bool(trajectories) and all(one.stop == "length" for one in trajectories)
        lines = [
            (self._counted("idle", idle), f"no learning signal: {self._why(metrics, trajectories, limited)}"),
            (self._counted("limited", limited and not idle), self._limit(metrics, trajectories)),
        ]
        return tuple(f"for {FEW} steps {line}" for count, line in lines if count == FEW)

    def require_signal(self, step: int) -> None:
        """NoSignal after as many steps in a row without one as the settings allow."""
        most, count = self.train.max_steps_without_signal, self.counts.get("idle", 0)
        if 0 < most <= count:
            why = f"train.max_steps_without_signal: the last {count} steps had no learning signal"
            raise NoSignal(f"step {step}", why)

    def _counted(self, name: str, so: bool) -> int:
        self.counts[name] = self.counts.get(name, 0) + 1 if so else 0
        return self.counts[name]

    def _why(self, metrics: Metrics, trajectories: Sequence[Trajectory], limited: bool) -> str:
        rewards = [one.reward for one in trajectories if math.isfinite(one.reward)]
        if limited:
            return self._limit(metrics, trajectories)
        if not rewards:
            return "no completion could be scored; look at the reward functions"
        equal = f"all rewards are {rewards[0]:g}" if all_equal(rewards) else "the rewards of each group are all equal"
        advice = "other examples, a reward with more steps, a larger rollout.group_size or sampling.temperature"
        return f"{equal}; look at the completions, and try {advice}"

    def _limit(self, metrics: Metrics, trajectories: Sequence[Trajectory]) -> str:
        if metrics.get("completions/context_full", 0.0) >= len(trajectories):
            context = f"the model's context of {metrics['rollout/context']:.0f} tokens"
            return f"every prompt with its completion fills {context}; shorten the prompts"
        return f"every completion ran into the limit of {self.sampling.max_tokens} tokens; raise sampling.max_tokens"
