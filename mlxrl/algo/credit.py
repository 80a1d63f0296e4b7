"""From scored groups to advantages: what a recipe's `advantages(groups)` is made of.

Advantages come back in the shape of the groups: for every trajectory a float, or a list with a float per token sampled.
A trajectory that could not be scored (NaN) has advantage 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import TypeAlias

import numpy as np

from mlxrl.algo import steps
from mlxrl.algo.advantages import Floats, Ids, group_relative, normalise_then_sum
from mlxrl.algo.returns import discounted
from mlxrl.types import Group, Trajectory

Value: TypeAlias = float | list[float]
Advantages: TypeAlias = list[list[Value]]
Credit: TypeAlias = Callable[[Sequence[Group]], Advantages]
Rewards: TypeAlias = Callable[[list[float], list[int]], Floats]
Baseline: TypeAlias = Callable[[Sequence[Trajectory], list[int]], Floats]
Whitening: TypeAlias = Callable[[Floats], Floats]


def refuse_singles(name: str, groups: Sequence[Group]) -> None:
    """A baseline made of the group's other attempts needs others."""
    for index, group in enumerate(groups):
        if len(group) < 2:
            raise ValueError(
                f"{name}: group {index}: wanted at least 2 trajectories, because the baseline is made of the group's "
                f"own rewards, got {len(group)}; raise group_size, or use reinforce_pp, whose baseline is the batch"
            )


def grouped(values: Sequence[Value], groups: Sequence[Group], mask_truncated: bool) -> Advantages:
    """One value per trajectory, in order, back into the shape of the groups; 0 for truncated rows where asked."""
    remaining = iter(values)

    def own(row: Trajectory) -> Value:
        value = next(remaining)
        return 0.0 if mask_truncated and row.stop == "length" else value

    return [[own(row) for row in group] for group in groups]


def flat(groups: Sequence[Group]) -> tuple[list[Trajectory], list[int]]:
    """All trajectories in order, and the number of each one's group."""
    return [row for group in groups for row in group], [n for n, group in enumerate(groups) for _ in group]


def reward_of(row: Trajectory) -> float:
    """The reward of a trajectory; NaN, which is left out of every statistic, for one that ended in an error."""
    return math.nan if row.stop == "error" else row.reward


def group_credit(name: str, baseline: Baseline, mask_truncated: bool, whitening: Whitening | None = None) -> Credit:
    """Credit per trajectory by a baseline over its group, `baseline(trajectories [N], ids [N]) -> [N]`.

    whitening: of the advantages of all tokens of the step, of which a trajectory's are the same.
    """

    def credit(groups: Sequence[Group]) -> Advantages:
        refuse_singles(name, groups)
        rows, ids = flat(groups)
        values = baseline(rows, ids)
        values = values if whitening is None else whitened(values, rows, whitening)
        return grouped(values.tolist(), groups, mask_truncated)

    return credit


def of_rewards(function: Rewards) -> Baseline:
    """A baseline of the trajectories' rewards, `function(rewards [N], ids [N]) -> [N]`."""
    return lambda rows, ids: function([reward_of(row) for row in rows], ids)


def of_parts(eps: float) -> Baseline:
    """`advantages.normalise_then_sum` of the parts of the trajectories' rewards, each with its weight."""

    def baseline(rows: Sequence[Trajectory], ids: list[int]) -> Floats:
        known = [row for row in rows if row.rewards]
        weights = {name: row.weights.get(name, 1.0) for row in known for name in row.rewards}
        if not weights:
            raise ValueError(
                "combine: 'normalise' wants the parts of the rewards, which score(groups, ...) keeps; got none"
            )
        parts = [[row.rewards.get(name, math.nan) for name in weights] for row in rows]
        failed = np.isnan([reward_of(row) for row in rows])
        return normalise_then_sum(np.where(failed[:, None], np.nan, parts), list(weights.values()), ids, eps)

    return baseline


def whitened(values: Floats, rows: Sequence[Trajectory], whitening: Whitening) -> Floats:
    """[N] advantages whitened over the tokens that carry them; a trajectory without a reward stays at 0."""
    known = np.array([row.num_sampled > 0 and not math.isnan(reward_of(row)) for row in rows])
    lengths = np.array([row.num_sampled for row in rows])[known]
    out = np.zeros_like(values)
    if known.any():
        out[known] = whitening(np.repeat(values[known], lengths))[np.cumsum(lengths) - 1]
    return out


def no_credit(groups: Sequence[Group]) -> Advantages:
    """Advantage 0 for everyone, where the teacher alone teaches."""
    return [[0.0] * len(group) for group in groups]


def whitened_credit(gamma: float, whitening: Whitening, centre: bool, name: str, mask_truncated: bool) -> Credit:
    """Credit per token, whitened over all tokens of the step: R_t = gamma^(T-1-t) r, the reward at the last token.

    centre: the mean of the group is taken off the rewards first, and gamma is not used.
    """

    def credit(groups: Sequence[Group]) -> Advantages:
        rows, ids = flat(groups)
        rewards = np.array([reward_of(row) for row in rows])
        if centre:
            refuse_singles(name, groups)
            rewards = np.where(np.isnan(rewards), np.nan, group_relative(rewards, ids, "none"))
        lengths = [row.num_sampled for row in rows]
        tokens = [r * gamma ** np.arange(n - 1, -1, -1.0) for r, n in zip(rewards, lengths, strict=True)]
        values = whitening(np.concatenate([*tokens, np.zeros(0)]))
        split = np.split(values, np.cumsum(lengths)[:-1]) if rows else []
        return grouped([part.tolist() for part in split], groups, mask_truncated)

    return credit


def gigpo_credit(
    gamma: float,
    omega: float,
    similarity: float | None,
    episode: Callable[[list[float], Ids, Ids], Floats],
    step: Callable[[list[float], Ids, Ids], Floats],
    mask_truncated: bool,
) -> Credit:
    """Credit per turn, spread over its tokens: A = A_E + omega A_S of `steps`; a turn without a state has no A_S.

    States are compared inside a group only. A trajectory without a reward, or one that ended in an error, is in no
    statistic and has advantage 0.

    episode(rewards, groups, trajectories) and step(returns, groups, anchors), each [N] over all turns.
    """

    def credit(groups: Sequence[Group]) -> Advantages:
        refuse_singles("gigpo", groups)
        rows, ids = flat(groups)
        turns = [n for n, row in enumerate(rows) for _ in row.turns]
        owners = [ids[n] for n in turns]
        total = episode([reward_of(rows[n]) for n in turns], owners, turns)
        if omega:
            returns = [g for row in rows for g in discounted(step_rewards(row), gamma)]
            anchors = _anchors([turn.state for row in rows for turn in row.turns], owners, similarity)
            total = total + omega * step(returns, owners, anchors)
        values = iter(total.tolist())
        spread = [[value for turn in row.turns for value in [next(values)] * turn.num_sampled] for row in rows]
        return grouped(spread, groups, mask_truncated)

    return credit


def step_rewards(row: Trajectory) -> list[float]:
    """The rewards of the turns; what the trajectory's reward has beyond their sum comes with the last."""
    rewards = [turn.reward for turn in row.turns]
    rest = reward_of(row) - math.fsum(rewards)
    return [*rewards[:-1], rewards[-1] + rest] if rewards else []


def _anchors(states: Sequence[Hashable], owners: Sequence[int], similarity: float | None) -> list[Hashable]:
    """An id per turn, equal where the states are (alike); a turn without a state is alone."""
    anchors: list[Hashable] = [object() if state is None else state for state in states]
    if similarity is not None:
        seen = [n for n, state in enumerate(states) if state is not None]
        alike = steps.clusters([str(states[n]) for n in seen], [owners[n] for n in seen], similarity)
        for n, number in zip(seen, alike, strict=True):
            anchors[n] = number
    return anchors
