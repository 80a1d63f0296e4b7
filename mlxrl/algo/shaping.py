"""Rewards shaped before credit assignment, and groups left out of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from mlxrl.algo.advantages import Floats, Ids, all_equal, members
from mlxrl.types import Group, Trajectory


def overlong_penalty(length: int, max_tokens: int, buffer: int, factor: float = 1.0, cap: float | None = None) -> float:
    """What a completion of `length` tokens loses near the limit (DAPO, arXiv 2503.14476 eq. 13): 0 or negative.

    -factor (length - (max_tokens - buffer)) / buffer past the start of the buffer;  at most cap (OpenRLHF: the factor)
    """
    over = max(length - (max_tokens - buffer), 0) / buffer * factor
    return -(over if cap is None else min(over, cap))


def shape_overlong(
    groups: Sequence[Group], max_tokens: int, buffer: int, factor: float = 1.0, cap: float | None = None
) -> list[Group]:
    """The groups with `overlong_penalty` added to the reward of every trajectory."""
    lengths = [one.length for group in groups for one in group]
    parts = [overlong_penalty(length, max_tokens, buffer, factor, cap) for length in lengths]
    return _with_part(groups, "shaping/overlong", parts)


def length_penalty(rewards: ArrayLike, ids: Ids, costs: Sequence[tuple[float, ArrayLike]]) -> Floats:
    """[N] rewards less a penalty in proportion to what the completion cost (prime-rl's linear length penalty).

    shaped_i = r_i - max(mean_g(r), 0) sum_c w_c x_ci / max(max_g(x_c), 1)

    A group whose mean is not positive loses nothing: nothing is ever paid for a cost.

    costs: pairs of a weight w and values x [N], such as tokens or turns.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    out = rewards.copy()
    for group in members(ids):
        known = rewards[group][~np.isnan(rewards[group])]
        mean = max(float(known.mean()), 0.0) if known.size else 0.0
        for weight, values in costs:
            x = np.asarray(values, dtype=np.float64)[group]
            out[group] -= mean * weight * x / max(x.max(), 1.0)
    return out


def shape_length(groups: Sequence[Group], weight: float) -> list[Group]:
    """The groups with `length_penalty` for the tokens of every trajectory."""
    trajectories = [one for group in groups for one in group]
    rewards, ids = [one.reward for one in trajectories], [n for n, group in enumerate(groups) for _ in group]
    shaped = length_penalty(rewards, ids, [(weight, [one.length for one in trajectories])]).tolist()
    return _with_part(groups, "shaping/length", [new - old for new, old in zip(shaped, rewards, strict=True)])


def _with_part(groups: Sequence[Group], name: str, values: Sequence[float]) -> list[Group]:
    """The groups with one more part of every trajectory's reward."""
    parts = iter(values)

    def shaped(one: Trajectory) -> Trajectory:
        value = next(parts)
        rewards, weights = {**one.rewards, name: value}, {**one.weights, name: 1.0}
        return replace(one, reward=one.reward + value, rewards=rewards, weights=weights)

    return [tuple(map(shaped, group)) for group in groups]


def keep_varied(groups: Sequence[Group]) -> list[Group]:
    """The groups with two different rewards (DAPO's dynamic sampling, arXiv 2503.14476); others have advantage 0."""
    return [group for group in groups if not all_equal(one.reward for one in group)]
