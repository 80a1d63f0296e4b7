"""Evaluation on rows that are not trained on, and the comparison of two evaluations of the same rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np

from mlxrl.policy.policy import Policy
from mlxrl.rewards import require_scores, rewards_of, score
from mlxrl.rewards.scoring import RewardLike
from mlxrl.rollout.episodes import refuse_limits, rollout
from mlxrl.rollout.play import Limits
from mlxrl.rollout.sampling import key_of
from mlxrl.rollout.worlds import Factory, earns
from mlxrl.settings import Sampling
from mlxrl.train.loop import require_finite
from mlxrl.types import Task, Trajectory

RESAMPLES = 10_000


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One trajectory a task, in the order of the tasks."""

    trajectories: tuple[Trajectory, ...]

    @property
    def rewards(self) -> tuple[float, ...]:
        """A reward that failed counts as 0: a model that breaks the scoring is not a good one."""
        return tuple(t.reward if math.isfinite(t.reward) else 0.0 for t in self.trajectories)

    def summary(self, success: float = 1.0) -> dict[str, float]:
        """accuracy: share of rows whose reward is at least `success`; mean_reward; n rows."""
        rewards = np.array(self.rewards)
        return {
            "accuracy": float((rewards >= success).mean()),
            "mean_reward": float(rewards.mean()),
            "n": len(rewards),
        }


def evaluate(
    policy: Policy,
    tasks: Sequence[Task],
    reward: RewardLike = (),
    *,
    sampling: Sampling = Sampling(temperature=0.0),
    max_rows: int = 32,
    thinking: bool | None = None,
    seed: int = 0,
    environment: Factory | None = None,
    **limits: Unpack[Limits],
) -> Evaluation:
    """Answer every task once, greedily by default, and score the answers.

    Args:
        reward: see `rewards.rewards_of`; may be left out where an environment gives the rewards.
        environment, limits: see `rollout`.
    """
    if not tasks:
        raise ValueError("evaluate: wanted at least one task, got none")
    refuse_limits(evaluate, environment, limits)
    rewards = rewards_of(reward)
    if environment is not None and not rewards.functions and not earns(environment):
        raise ValueError("evaluate: reward: wanted at least one function, got none; the environment gives no rewards")
    groups = rollout(
        policy, tasks, group_size=1, sampling=sampling, key=key_of(seed, 0), max_rows=max_rows, thinking=thinking,
        environment=environment, **limits,
    )  # fmt: skip
    require_finite(groups, "evaluation")
    scored = require_scores(score(groups, rewards))
    return Evaluation(tuple(group[0] for group in scored))


def compare(before: Evaluation, after: Evaluation, seed: int = 0) -> dict[str, Any]:
    """Mean reward after minus before on the same rows, with its 95 % interval.

    The interval is that of a bootstrap over the pairs (percentiles 2.5 and 97.5 of the resampled means).
    """
    if [t.task.prompt for t in before.trajectories] != [t.task.prompt for t in after.trajectories]:
        raise ValueError("compare: the two evaluations are not of the same rows")
    pairs = np.array(after.rewards) - np.array(before.rewards)
    draws = np.random.default_rng(seed).integers(len(pairs), size=(RESAMPLES, len(pairs)))
    low, high = np.percentile(pairs[draws].mean(axis=1), [2.5, 97.5])
    return {"difference": float(pairs.mean()), "interval": [float(low), float(high)]}
