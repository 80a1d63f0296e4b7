"""Credit: advantage estimators, from the step's scored groups to advantages.

Any function is one that takes the groups and returns, in their shape, a float for every trajectory or a list with
a float for every token that the model sampled. A trajectory without a reward (NaN), or that ended in an error, has
advantage 0 and is in no statistic. A credit may have attributes: `uses_rewards`, whether it needs rewards (True if
missing), and `compares`, what a trajectory is compared with: the others of its "group", which then needs two, those of
the whole "step", or "nothing" (if missing). A third, `turns`, makes it that of an algorithm that learns from the
answers that the data hold: from "all" of the assistant's turns of a conversation, or from the "last".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from mlxrl.algo import advantages as maths
from mlxrl.algo.advantages import Floats, Scale
from mlxrl.checked import Natural, NotNegative, PositiveShare, SettingError, Share, checked, says
from mlxrl.types import Group, Trajectory

Value: TypeAlias = float | list[float]
Advantages: TypeAlias = list[list[Value]]
Credit: TypeAlias = Callable[[Sequence[Group]], Advantages]
Compares: TypeAlias = Literal["group", "step", "nothing"]
Over: TypeAlias = Literal["trajectory", "step"]
Turns: TypeAlias = Literal["all", "last"]


@checked("algorithm.whiten")
class Whiten:
    """Values to mean 0 and variance 1 over all tokens of the step (REINFORCE++, arXiv 2501.03262).

    (x - mean) / sqrt(max(var, floor) + eps),  var divides by n - ddof;  exactly 0 where all values are equal
    """

    ddof: Annotated[Natural, says("taken off the number of values that divides the variance")] = 1
    eps: Annotated[NotNegative, says("added to the variance")] = 1e-8
    floor: Annotated[NotNegative, says("the least variance")] = 0.0

    def __call__(self, values: ArrayLike, mask: ArrayLike | None = None) -> Floats:
        """Values of any shape; masked ones are in no statistic and moved the same way."""
        values = np.asarray(values, dtype=np.float64)
        known = values if mask is None else values[np.asarray(mask, dtype=bool)]
        known = known[~np.isnan(known)]
        if known.size <= self.ddof or maths.all_equal(known):
            return np.zeros_like(values)
        return np.nan_to_num((values - known.mean()) / np.sqrt(max(known.var(ddof=self.ddof), self.floor) + self.eps))


@checked("algorithm")
class GroupBaseline:
    """Credit per trajectory against a baseline of its group's rewards, as `advantages.leave_one_out`.

    baseline: (rewards [N], ids [N] of their groups) to advantages [N].
    whiten: of the advantages of all tokens of the step, of which a trajectory's are the same.
    mask_truncated: a trajectory that ran into the token limit gets advantage 0, and stays in every denominator.
    reward: factor of the advantages; 0 takes no rewards.
    """

    baseline: Any = maths.leave_one_out
    whiten: Whiten | None = None
    mask_truncated: bool = False
    reward: NotNegative = 1.0

    @property
    def uses_rewards(self) -> bool:
        return self.reward > 0

    @property
    def compares(self) -> Compares:
        return "group" if self.reward else "nothing"

    def values(self, trajectories: Sequence[Trajectory], ids: list[int]) -> Floats:
        """[N] advantages of the trajectories."""
        return self.baseline(rewards_of(trajectories), ids)

    def __call__(self, groups: Sequence[Group]) -> Advantages:
        trajectories, ids = flat(groups)
        values = self.reward * self.values(trajectories, ids) if self.reward else np.zeros(len(trajectories))
        values = values if self.whiten is None else _over_tokens(self.whiten, values, trajectories)
        return _grouped(values.tolist(), groups, self.mask_truncated)


@checked("algorithm")
class GroupRelative(GroupBaseline):
    """The baseline is the group's mean: `advantages.group_relative`.

    scale: the standard deviation that divides, that of the "group", of the whole "batch", or "none"; with "function"
    every reward function is put on its group's scale by itself before the sum, `advantages.normalise_then_sum`. With
    "raw" the advantage is the reward itself, without a baseline.
    """

    scale: Literal["group", "batch", "function", "none", "raw"] = "group"
    eps: NotNegative = 1e-6

    @property
    def compares(self) -> Compares:
        return "group" if self.reward and self.scale != "raw" else "nothing"

    def values(self, trajectories: Sequence[Trajectory], ids: list[int]) -> Floats:
        if self.scale == "raw":
            return np.nan_to_num(rewards_of(trajectories))
        if self.scale == "function":
            return _by_function(trajectories, ids, self.eps)
        return maths.group_relative(rewards_of(trajectories), ids, self.scale, self.eps)


@checked("algorithm")
class MeanRelative(GroupBaseline):
    """The lead over the group's mean, relative to it: `advantages.relative_to_mean`, of rewards from 0 on."""

    def values(self, trajectories: Sequence[Trajectory], ids: list[int]) -> Floats:
        rewards = rewards_of(trajectories)
        if (lowest := min((reward for reward in rewards if not math.isnan(reward)), default=0.0)) < 0:
            why = f"wanted rewards of at least 0, as max_rl is defined for, got {lowest:.6g}; use rloo, or shift them"
            raise SettingError("max_rl", "reward", why)
        return maths.relative_to_mean(rewards, ids)


@checked("algorithm")
class Returns:
    """Credit per token, whitened over all tokens of the step: R_t = gamma^(T-1-t) r, the reward at the last token.

    centred: the mean of the group is taken off the rewards first.
    """

    whiten: Whiten = Whiten()
    gamma: Share = 1.0
    centred: bool = False
    mask_truncated: bool = False

    @property
    def compares(self) -> Compares:
        return "group" if self.centred else "step"

    def __call__(self, groups: Sequence[Group]) -> Advantages:
        trajectories, ids = flat(groups)
        rewards = np.array(rewards_of(trajectories))
        if self.centred:
            rewards = np.where(np.isnan(rewards), np.nan, maths.group_relative(rewards, ids, "none"))
        lengths = [one.num_sampled for one in trajectories]
        tokens = [r * self.gamma ** np.arange(n - 1, -1, -1.0) for r, n in zip(rewards, lengths, strict=True)]
        values = self.whiten(np.concatenate([*tokens, np.zeros(0)]))
        split = np.split(values, np.cumsum(lengths)[:-1]) if trajectories else []
        return _grouped([part.tolist() for part in split], groups, self.mask_truncated)


@checked("algorithm")
class GiGPO:
    """Credit per turn on its tokens: A = A_E + omega A_S (arXiv 2505.10978); a turn without a state has no A_S.

    A_E is the episode against its group (eq. 3), A_S each step against the group's steps from the same state (eq. 7),
    both by `advantages.group_relative`, with returns discounted by gamma.
    similarity: from which on two states are the same, see `advantages.clusters`; None where they must be equal.
    episode_over: the group's statistics count every "trajectory" once (the paper), or every "step" (verl-agent).
    """

    gamma: Share = 0.95
    omega: NotNegative = 1.0
    similarity: PositiveShare | None = None
    episode_over: Over = "trajectory"
    scale: Scale = "none"
    eps: NotNegative = 1e-6
    mask_truncated: bool = False
    compares: ClassVar[Compares] = "group"

    def __call__(self, groups: Sequence[Group]) -> Advantages:
        trajectories, ids = flat(groups)
        turns = [n for n, one in enumerate(trajectories) for _ in one.turns]
        rewards, owners = np.array(rewards_of(trajectories)), [ids[n] for n in turns]
        if self.episode_over == "step":
            total = maths.group_relative(rewards[turns], owners, self.scale, self.eps)
        else:
            total = maths.group_relative(rewards, ids, self.scale, self.eps)[turns]
        if self.omega:
            total = total + self.omega * self._steps(trajectories, owners)
        values = iter(total.tolist())
        spread = [[value for turn in one.turns for value in [next(values)] * turn.num_sampled] for one in trajectories]
        return _grouped(spread, groups, self.mask_truncated)

    def _steps(self, trajectories: Sequence[Trajectory], owners: Sequence[int]) -> Floats:
        """[N] A_S of every turn."""
        returns = [value for one in trajectories for value in maths.discounted(step_rewards(one), self.gamma)]
        states = [turn.state for one in trajectories for turn in one.turns]
        if self.similarity is not None:
            states = maths.clusters(states, owners, self.similarity)
        anchors = [(owner, object() if state is None else state) for owner, state in zip(owners, states, strict=True)]
        return maths.group_relative(returns, anchors, self.scale, self.eps)


@checked("algorithm")
class Demonstrated:
    """Weight 1 on every token of the answers that the data hold.

    turns: of a conversation, "all" that the assistant says is learned, or its "last" turn.
    """

    turns: Turns = "all"
    uses_rewards: ClassVar[bool] = False

    def __call__(self, groups: Sequence[Group]) -> Advantages:
        return [[1.0 for _ in group] for group in groups]


def flat(groups: Sequence[Group]) -> tuple[list[Trajectory], list[int]]:
    """All trajectories in order, and the number of each one's group."""
    return [one for group in groups for one in group], [n for n, group in enumerate(groups) for _ in group]


def rewards_of(trajectories: Sequence[Trajectory]) -> list[float]:
    """Rewards; NaN, which is left out of every statistic, for a trajectory that ended in an error."""
    return [math.nan if one.stop == "error" else one.reward for one in trajectories]


def step_rewards(trajectory: Trajectory) -> list[float]:
    """The rewards of the turns; what the trajectory's reward has beyond their sum comes with the last."""
    rewards = [turn.reward for turn in trajectory.turns]
    rest = rewards_of([trajectory])[0] - math.fsum(rewards)
    return [*rewards[:-1], rewards[-1] + rest] if rewards else []


def _grouped(values: Sequence[Value], groups: Sequence[Group], mask_truncated: bool) -> Advantages:
    """One value per trajectory, in order, in the shape of the groups; 0 for those masked as truncated."""
    lost = [mask_truncated and one.stop == "length" for one in flat(groups)[0]]
    remaining = iter([0.0 if masked else value for value, masked in zip(values, lost, strict=True)])
    return [[next(remaining) for _ in group] for group in groups]


def _over_tokens(whiten: Whiten, values: Floats, trajectories: Sequence[Trajectory]) -> Floats:
    """[N] advantages whitened over the tokens that carry them; a trajectory without a reward stays at 0."""
    scored = ~np.isnan(rewards_of(trajectories))
    lengths = np.array([one.num_sampled for one in trajectories])
    known = scored & (lengths > 0)
    out = np.zeros_like(values)
    if known.any():
        out[known] = whiten(np.repeat(values[known], lengths[known]))[np.cumsum(lengths[known]) - 1]
    return out


def _by_function(trajectories: Sequence[Trajectory], ids: list[int], eps: float) -> Floats:
    """`advantages.normalise_then_sum` of the parts of the trajectories' rewards, each with its weight."""
    weights = {name: one.weights.get(name, 1.0) for one in trajectories for name in one.rewards}
    if not weights:
        raise SettingError(
            "scale", "'function' wants the parts of the rewards, which score(groups, ...) keeps; got none"
        )
    parts = [[one.rewards.get(name, math.nan) for name in weights] for one in trajectories]
    failed = np.isnan(rewards_of(trajectories))
    return maths.normalise_then_sum(np.where(failed[:, None], np.nan, parts), list(weights.values()), ids, eps)
