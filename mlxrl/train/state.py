"""What a run has come to: all that a step changes, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_unflatten

from mlxrl.policy.differentiate import leaves
from mlxrl.policy.policy import Policy
from mlxrl.protocols import Algorithm
from mlxrl.train.own import state_of, take_state


@dataclass(slots=True)
class RunState:
    """The training state besides the policy's adapters: what a checkpoint holds.

    Tasks, keys and dropout masks of a step are functions of (seed, step): there is no cursor besides `step`.

    step: of the run, the next to be taken; skipped: updates in a row, up to now, that were not finite.
    streaks: by what it is, for how many steps in a row it has been so.
    values: what whoever takes the steps keeps with them, as a best score: strict JSON.
    start: what the step under way began with; None between steps.
    """

    optimizer: optim.Optimizer
    step: int = 0
    skipped: int = 0
    streaks: dict[str, int] = field(default_factory=dict[str, int])
    values: dict[str, Any] = field(default_factory=dict[str, Any])
    start: Snapshot | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Adapters, optimizer, counters and the algorithm's own state at a moment. Arrays are referred to, no copies."""

    adapters: Mapping[str, mx.array]
    optimizer: Mapping[str, mx.array]
    step: int
    skipped: int
    streaks: Mapping[str, int]
    own: Any = None

    @classmethod
    def of(cls, policy: Policy, state: RunState, algorithm: Algorithm) -> Snapshot:
        """The present values."""
        adapters: dict[str, Any] = dict(leaves(policy.model.trainable_parameters()))
        optimizer: Any = dict(tree_flatten(state.optimizer.state))
        return cls(adapters, optimizer, state.step, state.skipped, dict(state.streaks), state_of(algorithm))

    def restore(self, policy: Policy, state: RunState, algorithm: Algorithm) -> None:
        """Put the values back."""
        policy.model.load_weights(list(self.adapters.items()), strict=False)
        state.optimizer.state = tree_unflatten(list(self.optimizer.items()))
        state.step, state.skipped, state.streaks = self.step, self.skipped, dict(self.streaks)
        take_state(algorithm, self.own)
