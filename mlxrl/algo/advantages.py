"""Group baselines: from the rewards of the attempts at a task to their advantages.

Host-side float64 numpy: N attempts, `ids` [N] says which group each belongs to (any order, any size). A NaN reward
is an attempt that could not be scored: it is left out of every statistic and has advantage 0. A group whose raw
rewards are all equal has advantage exactly 0, whatever the rounding of its mean. Standard deviations divide by n-1.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats: TypeAlias = NDArray[np.float64]
Ids: TypeAlias = Sequence[Hashable]
Scale = Literal["group", "batch", "none"]
Single = Literal["zero", "raw"]


def members(ids: Ids) -> list[NDArray[np.intp]]:
    """The row numbers of each group, groups in order of first appearance."""
    rows: dict[Hashable, list[int]] = {}
    for row, name in enumerate(ids):
        rows.setdefault(name, []).append(row)
    return [np.array(group, dtype=np.intp) for group in rows.values()]


def spread(values: Floats) -> float:
    """Standard deviation with n-1 of the finite values; exactly 0 where they are all equal, NaN for fewer than 2."""
    known = values[~np.isnan(values)]
    if known.size < 2:
        return float("nan")
    return 0.0 if known.max() == known.min() else float(known.std(ddof=1))


def by_group(rewards: ArrayLike, ids: Ids, function: Callable[[Floats], ArrayLike], single: Single = "zero") -> Floats:
    """Apply `function` to the scorable rewards of every group; 0 for a group without two different rewards.

    single: what a group with one scorable reward gets, "zero" or its own "raw" reward.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    out = np.zeros_like(rewards)
    for rows in members(ids):
        rows = rows[~np.isnan(rewards[rows])]
        values = rewards[rows]
        if rows.size == 1 and single == "raw":
            out[rows] = values
        elif rows.size > 1 and values.max() != values.min():
            out[rows] = function(values)
    return out


def group_spread(rewards: ArrayLike, ids: Ids, single: float = float("nan")) -> Floats:
    """[N] the standard deviation of each attempt's group; `single` for a group with one scorable reward."""
    rewards = np.asarray(rewards, dtype=np.float64)
    out = np.empty_like(rewards)
    for rows in members(ids):
        value = spread(rewards[rows])
        out[rows] = single if np.isnan(value) else value
    return out


def group_relative(
    rewards: ArrayLike, ids: Ids, scale: Scale = "group", eps: float = 1e-6, single: Single = "zero"
) -> Floats:
    """[N] advantages against the group's mean (GRPO, arXiv 2402.03300; without scale Dr. GRPO, 2503.20783).

    A_i = (r_i - mean_g) / (std + eps), std of the group, of the whole batch, or A_i = r_i - mean_g

    eps stands outside the root. With single="raw" a group of one is taken against mean 0 and std 1 (verl).
    """
    centred = by_group(rewards, ids, lambda r: r - r.mean(), single)
    if scale == "none":
        return centred
    whole = spread(np.asarray(rewards, dtype=np.float64))
    divisor = eps + (group_spread(rewards, ids, single=1.0) if scale == "group" else np.nan_to_num(whole))
    return centred / np.where(divisor > 0, divisor, 1.0)


def leave_one_out(rewards: ArrayLike, ids: Ids, single: Single = "zero") -> Floats:
    """[N] advantages against the mean of the others (RLOO, arXiv 2402.14740): A_i = n/(n-1) (r_i - mean_g)."""
    return by_group(rewards, ids, lambda r: (r - r.mean()) * r.size / (r.size - 1), single)


def max_rl(rewards: ArrayLike, ids: Ids) -> Floats:
    """[N] A_i = (r_i - mean_g) / mean_g where the mean is positive, else 0 (prime-rl, for rewards in [0, 1])."""
    return by_group(rewards, ids, lambda r: (r - r.mean()) / r.mean() if r.mean() > 0 else np.zeros_like(r))


def pass_at_k(rewards: ArrayLike, ids: Ids, eps: float = 1e-6) -> Floats:
    """[N] only the best attempt is credited, with its lead over the second (verl's GRPO_PASSK, arXiv 2503.19595).

    A_best = (r_best - r_second) / (std_g + eps), A = 0 for the others
    """

    def lead(r: Floats) -> Floats:
        out = np.zeros_like(r)
        second, best = np.sort(r)[-2:]
        out[r.argmax()] = (best - second) / (spread(r) + eps)
        return out

    return by_group(rewards, ids, lead)


def optimal_baseline(rewards: ArrayLike, ids: Ids, lengths: ArrayLike) -> Floats:
    """[N] baseline weighted by length (OPO, arXiv 2505.23585): A_i = r_i - sum_g(len r) / sum_g(len).

    lengths: [N] sampled tokens of each attempt. A group without a token has advantage 0.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    weights = np.asarray(lengths, dtype=np.float64)
    out = np.zeros_like(rewards)
    for rows in members(ids):
        rows = rows[~np.isnan(rewards[rows])]
        r, w = rewards[rows], weights[rows]
        if rows.size and r.max() != r.min() and w.sum() > 0:
            out[rows] = r - (w * r).sum() / w.sum()
    return out


def gpg(rewards: ArrayLike, ids: Ids) -> Floats:
    """[N] A_i = N / #(r != 0) (r_i - mean_g): rescaled by the share of rewarded attempts (GPG, arXiv 2504.02546)."""
    rewards = np.asarray(rewards, dtype=np.float64)
    scored = rewards[~np.isnan(rewards)]
    rescale = scored.size / max(int((scored != 0).sum()), 1)
    return by_group(rewards, ids, lambda r: rescale * (r - r.mean()))


def weighted_sum(rewards: ArrayLike, weights: ArrayLike) -> Floats:
    """[N, F] rewards of F functions to [N]: sum_f w_f r_f over those that scored; NaN where none did (TRL)."""
    rewards = np.asarray(rewards, dtype=np.float64)
    total = np.nansum(rewards * np.asarray(weights, dtype=np.float64), axis=1)
    return np.where(np.isnan(rewards).all(axis=1), np.nan, total)


def normalise_then_sum(rewards: ArrayLike, weights: ArrayLike, ids: Ids, eps: float = 1e-6) -> Floats:
    """[N, F] rewards to [N] advantages, each reward function on its own scale (GDPO, arXiv 2601.05242).

    z_f = (r_f - mean_g) / (std_g + eps);  s = sum_f w_f z_f;  A = (s - mean(s)) / (std(s) + eps) over the batch
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    scaled = np.stack([group_relative(column, ids, "group", eps) for column in rewards.T], axis=1)
    total = weighted_sum(np.where(np.isnan(rewards), np.nan, scaled), weights)
    return group_relative(total, [0] * len(total), "group", eps)


def length_penalty(rewards: ArrayLike, ids: Ids, costs: Sequence[tuple[float, ArrayLike]]) -> Floats:
    """[N] rewards less a penalty in proportion to what the attempt cost (prime-rl's linear length penalty).

    shaped_i = r_i - mean_g(r) sum_c w_c x_ci / max(max_g(x_c), 1)

    costs: pairs of a weight w and values x [N], such as tokens or turns.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    out = rewards.copy()
    for rows in members(ids):
        known = rewards[rows][~np.isnan(rewards[rows])]
        mean = known.mean() if known.size else 0.0
        for weight, values in costs:
            x = np.asarray(values, dtype=np.float64)[rows]
            out[rows] -= mean * weight * x / max(x.max(), 1.0)
    return out
