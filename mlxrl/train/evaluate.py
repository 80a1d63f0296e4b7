"""Evaluation on held-out examples, and the comparison of two evaluations of the same examples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlxrl.checked import keywords
from mlxrl.errors import UserError
from mlxrl.policy.policy import Policy
from mlxrl.rewards.scoring import RewardLike, require_scores, rewards_of, score
from mlxrl.rollout.draw import key_of
from mlxrl.rollout.environment import Factory, gives_rewards
from mlxrl.rollout.sample import sample
from mlxrl.settings import EpisodeLimits, Sampling
from mlxrl.train.metrics import require_finite
from mlxrl.types import Task, Trajectory

RESAMPLES = 10_000


@dataclass(frozen=True, slots=True, repr=False)
class Evaluation:
    """One trajectory a task, in the order of the tasks."""

    trajectories: tuple[Trajectory, ...]

    @property
    def rewards(self) -> tuple[float, ...]:
        """A reward that failed counts as 0: a model that breaks the scoring is not a good one."""
        return tuple(t.reward if math.isfinite(t.reward) else 0.0 for t in self.trajectories)

    def __repr__(self) -> str:
        found = self.summary() if self.trajectories else {}
        return f"Evaluation({', '.join(f'{name} {value:.4g}' for name, value in found.items())})"

    def summary(self, success: float = 1.0) -> dict[str, float]:
        """accuracy: share of examples whose reward is at least `success`; mean_reward; n examples."""
        rewards = np.array(self.rewards)
        return {
            "accuracy": float((rewards >= success).mean()),
            "mean_reward": float(rewards.mean()),
            "n": len(rewards),
        }


@keywords
def evaluate(
    policy: Policy,
    tasks: Sequence[Task],
    reward: RewardLike = None,
    *,
    sampling: Sampling = Sampling(temperature=0.0),
    environment: Factory | None = None,
    limits: EpisodeLimits = EpisodeLimits(),
    max_rows: int = 32,
    seed: int = 0,
) -> Evaluation:
    """Complete every task once, greedily by default, and score the completions.

    Args:
        reward: may be left out where an environment gives the rewards; what its settings shape is not shaped here.
        environment, limits, max_rows: see `sample`.
    """
    if not tasks:
        raise UserError("evaluate", "wanted at least one task, got none")
    rewards = rewards_of(reward)
    if environment is not None and not rewards.functions and not gives_rewards(environment):
        why = "wanted at least one function, got none; the environment gives no rewards"
        raise UserError("evaluate", "reward", why)
    groups = sample(
        policy, tasks, group_size=1, sampling=sampling, key=key_of(seed, 0), max_rows=max_rows,
        environment=environment, limits=limits,
    )  # fmt: skip
    require_finite(groups, "evaluation")
    return Evaluation(tuple(group[0] for group in require_scores(score(groups, rewards))))


def compare(before: Evaluation, after: Evaluation, seed: int = 0) -> dict[str, Any]:
    """Mean reward after minus before on the same examples, with its 95 % interval.

    The interval is that of a bootstrap over the pairs (percentiles 2.5 and 97.5 of the resampled means).
    """
    if [t.task.prompt for t in before.trajectories] != [t.task.prompt for t in after.trajectories]:
        raise UserError("compare", "the two evaluations are not of the same examples")
    pairs = np.array(after.rewards) - np.array(before.rewards)
    draws = np.random.default_rng(seed).integers(len(pairs), size=(RESAMPLES, len(pairs)))
    low, high = np.percentile(pairs[draws].mean(axis=1), [2.5, 97.5])
    return {"difference": float(pairs.mean()), "interval": [float(low), float(high)]}
