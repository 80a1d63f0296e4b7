"""From the rewards of a task's completions to their advantages, in float64 numpy.

N completions (or steps), `ids` [N] says which group each belongs to. A NaN reward is a completion that could not be
scored: it is in no statistic and has advantage 0. A group whose rewards are all equal, up to rounding, has advantage
exactly 0. Standard deviations divide by n-1.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats: TypeAlias = NDArray[np.float64]
Ids: TypeAlias = Sequence[Hashable]
Scale: TypeAlias = Literal["group", "batch", "none"]


NEAR = {"rel_tol": 1e-9, "abs_tol": 1e-12}
"""Numbers are equal up to rounding where they differ by 1e-9 of the larger one's size at most, or by 1e-12."""


def equal(one: float, other: float) -> bool:
    """Whether two rewards are equal up to rounding."""
    return math.isclose(one, other, **NEAR)


def all_equal(values: Iterable[float]) -> bool:
    """Whether numbers are all equal up to rounding; those that are NaN are left out."""
    known = [value for value in values if not math.isnan(value)]
    return not known or equal(min(known), max(known))


def members(ids: Ids) -> list[NDArray[np.intp]]:
    """The indices of each group's members, groups in order of first appearance."""
    found: dict[Hashable, list[int]] = {}
    for index, name in enumerate(ids):
        found.setdefault(name, []).append(index)
    return [np.array(group, dtype=np.intp) for group in found.values()]


def spread(values: Floats) -> float:
    """Standard deviation with n-1 of the finite values; exactly 0 where they are all equal, NaN for fewer than 2."""
    known = values[~np.isnan(values)]
    if known.size < 2:
        return float("nan")
    return 0.0 if all_equal(known) else float(known.std(ddof=1))


def by_group(rewards: ArrayLike, ids: Ids, function: Callable[[Floats], ArrayLike]) -> Floats:
    """Apply `function` to the scorable rewards of every group; 0 for a group without two different rewards."""
    rewards = np.asarray(rewards, dtype=np.float64)
    out = np.zeros_like(rewards)
    for group in members(ids):
        group = group[~np.isnan(rewards[group])]
        values = rewards[group]
        if group.size > 1 and not all_equal(values):
            out[group] = function(values)
    return out


def group_relative(rewards: ArrayLike, ids: Ids, scale: Scale = "group", eps: float = 1e-6) -> Floats:
    """[N] advantages against the group's mean (GRPO, arXiv 2402.03300; without scale Dr. GRPO, 2503.20783).

    A_i = (r_i - mean_g) / (std + eps), std of the group or of the whole batch, or A_i = r_i - mean_g
    """
    if scale == "none":
        return by_group(rewards, ids, lambda r: r - r.mean())
    whole = np.nan_to_num(spread(np.asarray(rewards, dtype=np.float64)))
    return by_group(rewards, ids, lambda r: (r - r.mean()) / (eps + (spread(r) if scale == "group" else whole)))


def leave_one_out(rewards: ArrayLike, ids: Ids) -> Floats:
    """[N] advantages against the mean of the others (RLOO, arXiv 2402.14740): A_i = n/(n-1) (r_i - mean_g)."""
    return by_group(rewards, ids, lambda r: (r - r.mean()) * r.size / (r.size - 1))


def relative_to_mean(rewards: ArrayLike, ids: Ids) -> Floats:
    """[N] A_i = (r_i - mean_g) / mean_g where the mean is positive, else 0 (prime-rl, for rewards in [0, 1])."""
    return by_group(rewards, ids, lambda r: (r - r.mean()) / r.mean() if r.mean() > 0 else np.zeros_like(r))


def weighted_sum(rewards: ArrayLike, weights: ArrayLike) -> Floats:
    """[N, F] rewards of F functions to [N]: sum_f w_f r_f over those that scored; NaN where none did (TRL)."""
    rewards = np.asarray(rewards, dtype=np.float64)
    known, terms = ~np.isnan(rewards), rewards * np.asarray(weights, dtype=np.float64)
    return np.array([math.fsum(term[own]) if own.any() else np.nan for term, own in zip(terms, known, strict=True)])


def normalise_then_sum(rewards: ArrayLike, weights: ArrayLike, ids: Ids, eps: float = 1e-6) -> Floats:
    """[N, F] rewards to [N] advantages, each reward function on its own scale (GDPO, arXiv 2601.05242).

    z_f = (r_f - mean_g) / (std_g + eps);  s = sum_f w_f z_f;  A = (s - mean(s)) / (std(s) + eps) over the batch
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    scaled = np.stack([group_relative(column, ids, "group", eps) for column in rewards.T], axis=1)
    total = weighted_sum(np.where(np.isnan(rewards), np.nan, scaled), weights)
    return group_relative(total, [0] * len(total), "group", eps)


def discounted(rewards: Sequence[float], gamma: float) -> list[float]:
    """[T] returns G_t = r_t + gamma G_{t+1} of one trajectory's steps in time order (GiGPO, arXiv 2505.10978)."""
    running, out = 0.0, list[float]()
    for reward in reversed(rewards):
        running = reward + gamma * running
        out.append(running)
    return out[::-1]


def clusters(states: Sequence[Hashable | None], groups: Ids, threshold: float = 0.9) -> list[int]:
    """[N] a cluster number for each step, in order of first appearance (verl-agent's similarity grouping).

    A step joins the first cluster of its group whose first member is similar, SequenceMatcher ratio >= threshold. One
    without a state, None, is alone.
    """
    found: dict[Hashable, list[tuple[str, int]]] = {}
    count, out = 0, list[int]()
    for state, group in zip(states, groups, strict=True):
        known = found.setdefault(group, []) if state is not None else []
        alike = (n for first, n in known if difflib.SequenceMatcher(None, str(state), first).ratio() >= threshold)
        number = next(alike, count)
        if number == count:
            known.append((str(state), count))
            count += 1
        out.append(number)
    return out
