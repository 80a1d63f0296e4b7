"""Rewards shaped before credit assignment, and groups left out of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from mlxrl.algo.advantages import length_penalty
from mlxrl.types import Group, Trajectory


def overlong_penalty(length: int, max_tokens: int, buffer: int, factor: float = 1.0, cap: float | None = None) -> float:
    """What a completion of `length` tokens loses near the limit (DAPO, arXiv 2503.14476 eq. 13): 0 or negative.

    -factor (length - (max_tokens - buffer)) / buffer past the start of the buffer;  cap: it never exceeds it
    (OpenRLHF caps at the factor; in verl a length beyond max_tokens costs more).
    """
    over = max(length - (max_tokens - buffer), 0) / buffer * factor
    return -(over if cap is None else min(over, cap))


def shape_overlong(
    groups: Sequence[Group], max_tokens: int, buffer: int, factor: float = 1.0, cap: float | None = None
) -> list[Group]:
    """The groups with `overlong_penalty` added to the reward of every trajectory."""
    return [
        tuple(
            with_part(row, "shaping/overlong", overlong_penalty(row.length, max_tokens, buffer, factor, cap))
            for row in group
        )
        for group in groups
    ]


def shape_length(groups: Sequence[Group], weight: float) -> list[Group]:
    """The groups with a penalty in proportion to length, `advantages.length_penalty` with tokens as the cost."""
    rows = [row for group in groups for row in group]
    rewards, ids = [row.reward for row in rows], [n for n, group in enumerate(groups) for _ in group]
    shaped = length_penalty(rewards, ids, [(weight, [row.length for row in rows])]).tolist()
    parts = iter([new - old for new, old in zip(shaped, rewards, strict=True)])
    return [tuple(with_part(row, "shaping/length", next(parts)) for row in group) for group in groups]


def with_part(row: Trajectory, name: str, value: float) -> Trajectory:
    """The trajectory with one more part of its reward."""
    rewards, weights = {**row.rewards, name: value}, {**row.weights, name: 1.0}
    return replace(row, reward=row.reward + value, rewards=rewards, weights=weights)


def truncated_reward(reward: float, truncated: bool, coefficient: float) -> float:
    """Reward of a row that may have run into the limit: times a coefficient >= 0, or a negative one in its place.

    (OpenRLHF's stop-properly penalty.)
    """
    if not truncated:
        return reward
    return reward * coefficient if coefficient >= 0 else coefficient


def varied(rewards: Sequence[float], tolerance: float = 0.0) -> bool:
    """Whether a group teaches something: two scorable rewards that differ by a standard deviation over `tolerance`.

    tolerance 0 compares the raw rewards (tinker); slime asks for a standard deviation (n-1) over 1e-6. DAPO's dynamic
    sampling (arXiv 2503.14476) keeps such groups only.
    """
    known = [reward for reward in rewards if not math.isnan(reward)]
    if len(known) < 2 or max(known) == min(known):
        return False
    mean = math.fsum(known) / len(known)
    return math.sqrt(math.fsum((r - mean) ** 2 for r in known) / (len(known) - 1)) > tolerance


def mean_between(rewards: Sequence[float], low: float = 0.0, high: float = 1.0) -> bool:
    """Whether the group's mean reward lies strictly between two bounds (OpenRLHF's dynamic filtering)."""
    known = [reward for reward in rewards if not math.isnan(reward)]
    return bool(known) and low < math.fsum(known) / len(known) < high


def keep_varied(groups: Sequence[Group], tolerance: float = 0.0) -> list[Group]:
    """The groups whose rewards vary; the others would have advantage 0 throughout."""
    return [group for group in groups if varied([row.reward for row in group], tolerance)]
