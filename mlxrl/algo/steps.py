"""Credit for the steps of an episode: GiGPO (arXiv 2505.10978).

A = A_E + omega A_S: the episode against the group's other episodes, and each step against the steps that other
attempts took from the same state (the anchor). Host-side float64 numpy over N steps of all trajectories; `groups`,
`trajectories` and `anchors` are ids [N].
"""

from __future__ import annotations

import difflib
from collections.abc import Hashable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from mlxrl.algo.advantages import Floats, Ids, Scale, Single, group_relative, members

Over = Literal["trajectory", "step"]


def episode_advantages(
    rewards: ArrayLike,
    groups: Ids,
    trajectories: Ids,
    scale: Scale = "none",
    over: Over = "trajectory",
    eps: float = 1e-6,
    single: Single = "raw",
) -> Floats:
    """[N] A_E of each step's episode (eq. 3); every step carries its episode's reward.

    over: the group's statistics count every "trajectory" once (the paper), or every "step", so that long
    trajectories weigh more (verl-agent). single: see `advantages.group_relative`; "raw" is verl-agent's.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    if over == "step":
        return group_relative(rewards, groups, scale, eps, single)
    rows = members(list(zip(groups, trajectories, strict=True)))
    first = [int(steps[0]) for steps in rows]
    credit = group_relative(rewards[first], [groups[row] for row in first], scale, eps, single)
    out = np.zeros_like(rewards)
    for steps, value in zip(rows, credit, strict=True):
        out[steps] = value
    return out


def step_advantages(returns: ArrayLike, groups: Ids, anchors: Ids, scale: Scale = "none", eps: float = 1e-6) -> Floats:
    """[N] A_S of each step among the steps of its group that start in the same state; alone there: 0 (eq. 7)."""
    return group_relative(returns, list(zip(groups, anchors, strict=True)), scale, eps, single="zero")


def clusters(texts: Sequence[str], groups: Ids, threshold: float = 0.9) -> list[int]:
    """[N] a cluster number for each step, equal where states are alike, in order of first appearance.

    A step joins the first cluster of its group whose first member is similar, SequenceMatcher ratio >= threshold
    (verl-agent's similarity grouping).
    """
    found: dict[Hashable, list[tuple[str, int]]] = {}
    count, out = 0, list[int]()
    for text, group in zip(texts, groups, strict=True):
        known = found.setdefault(group, [])
        alike = (n for first, n in known if difflib.SequenceMatcher(None, text, first).ratio() >= threshold)
        number = next(alike, count)
        if number == count:
            known.append((text, count))
            count += 1
        out.append(number)
    return out
