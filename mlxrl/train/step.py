"""A step of a run as the user sees it, and the iterator of steps."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxrl.policy.policy import Policy
from mlxrl.protocols import Algorithm
from mlxrl.train import checkpoint
from mlxrl.train.metrics import describe, describe_answers, warnings_of
from mlxrl.train.state import RunState, Snapshot
from mlxrl.types import Group, Metrics


@dataclass(frozen=True, slots=True, repr=False)
class Step:
    """What a step did: its metrics, the scored groups it learned from, and what went wrong.

    index: from 0, as that from which everything random follows; `number` is what files and people count, from 1.
    sampled: all groups that were sampled for it, where resampling left some out.
    streaks: what has been so for a few steps, a line each.
    demonstrated: whether the trajectories are answers that the data hold.
    """

    index: int
    metrics: Metrics
    groups: tuple[Group, ...]
    sampled: tuple[Group, ...] = ()
    streaks: tuple[str, ...] = ()
    demonstrated: bool = False

    def __post_init__(self) -> None:
        describing = describe_answers if self.demonstrated else describe
        object.__setattr__(self, "metrics", {**describing(self.sampled or self.groups), **self.metrics})

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
        if self.demonstrated:
            return "\n".join([f"step {self.number}  {self._learned()}", *(f"  {line}" for line in self.warnings)])
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

    def _learned(self) -> str:
        """The numbers of a step that learns from answers."""
        metrics, perplexity = self.metrics, self.metrics.get("perplexity")
        parts = [f"loss {metrics['loss']:.4f}", *([] if perplexity is None else [f"perplexity {perplexity:.3f}"])]
        rate = metrics["tokens/read"] / max(metrics["seconds/update"], 1e-9)
        tokens = f"{metrics['tokens/learned']:.0f} of {metrics['tokens/read']:.0f} tokens learned"
        return "  ".join([*parts, tokens, f"padding {metrics['tokens/padding']:.0f}", f"{rate:.0f} tokens/s"])


class Steps(Iterator[Step]):
    """The steps of a run, each taken when it is asked for. A run that is dropped before its first step says so.

    state: what the run has come to.
    """

    def __init__(
        self, policy: Policy, state: RunState, algorithm: Algorithm, facts: Callable[[], dict[str, Any]],
        steps: Iterator[Step],
    ) -> None:  # fmt: skip
        self.state = state
        self._policy, self._algorithm, self._facts = policy, algorithm, facts
        self._steps, self._begun = steps, False
        self._unrecorded: Snapshot | None = None
        self._own: set[Path] = set()

    def save(self, folder: str | Path, keep: int = 2) -> Path:
        """Save a checkpoint as `folder`/step-000050, after which the newest `keep` of them stay; returns its path.

        A step that was broken off is taken back first, so that the checkpoint is of the last whole one.
        """
        self.rewind()
        folder, facts = Path(folder), self._facts()
        path = checkpoint.save_rolling(folder, keep, self._policy, self.state, self._algorithm, facts, self._own)
        self._own.add(path.absolute())
        return path

    def rewind(self) -> None:
        """Take a step back that was broken off, or not recorded: adapters and state are those before it."""
        if (start := self.state.start or self._unrecorded) is not None:
            start.restore(self._policy, self.state, self._algorithm)
        self.state.start = self._unrecorded = None

    def recorded(self, record: Callable[[Step], None]) -> Iterator[Step]:
        """The steps, each once `record` is done with it. One whose record is broken off is taken back."""
        while True:
            self._unrecorded = Snapshot.of(self._policy, self.state, self._algorithm)
            step = next(self, None)
            if step is not None:
                record(step)
            self._unrecorded = None
            if step is None:
                return
            yield step

    def take_back(self, path: str | Path, **values: Any) -> None:
        """Put adapters, optimizer and counters of a checkpoint back, and keep values with the state.

        The number of steps taken stays, and with it data and keys go on: the steps that led here are not taken again.
        """
        state, other = self.state, RunState(self.state.optimizer)
        state.start = Snapshot.of(self._policy, state, self._algorithm)  # until all is in its place
        checkpoint.restore(checkpoint.read(Path(path)), self._policy, other, self._algorithm, self._facts())
        values = {**state.values, **values}
        state.skipped, state.streaks, state.values, state.start = other.skipped, other.streaks, values, None

    def resumed(self, path: str | Path) -> Steps:
        """These steps from the newest whole checkpoint on; a warning for each damaged one that is newer.

        Raises:
            CheckpointError: there is none, or it is of another run.
        """
        found, damaged = checkpoint.newest(path)
        for line in damaged:
            warnings.warn(line, stacklevel=3)
        if found is None:
            raise checkpoint.CheckpointError(str(path), "no whole checkpoint; wanted one that a run has saved")
        self._begun = True  # one that is refused says why, and nothing more
        checkpoint.restore(found, self._policy, self.state, self._algorithm, self._facts())
        self._begun = False
        self._own.add(found.folder.absolute())
        return self

    def __iter__(self) -> Steps:
        self._begun = True
        return self

    def __next__(self) -> Step:
        self._begun = True
        return next(self._steps)

    def __del__(self) -> None:
        if not self._begun:
            why = "run: nothing was trained, because no step was asked for; write `for step in run(...): ...`"
            warnings.warn(why, stacklevel=2)
