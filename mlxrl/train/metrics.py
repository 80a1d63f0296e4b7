"""What a step reports: one table of names, the numbers of its groups, and what went wrong in words."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from mlxrl.algo.advantages import all_equal, spread
from mlxrl.errors import UserError, one_line
from mlxrl.rewards.scoring import failure_line
from mlxrl.types import Group, Metrics, Trajectory

STOPS = ("done", "turns", "length", "error")


class Diverged(UserError):
    """The model's logits, or several updates in a row, were not finite."""


def require_finite(groups: Sequence[Group], where: str) -> None:
    """Diverged where the model had no finite logits in any trajectory."""
    stops = [trajectory.stop for group in groups for trajectory in group if not trajectory.error]
    if stops and all(stop == "error" for stop in stops):
        raise Diverged(
            where,
            f"the model's logits were not finite in any of {len(stops)} completions; lower optimizer.learning_rate, or "
            "look at the model's weights",
        )


def describe(groups: Sequence[Group]) -> Metrics:
    """Rewards, lengths and signal of sampled groups, before anything shapes their rewards."""
    trajectories = [trajectory for group in groups for trajectory in group]
    scored = [one.reward for one in trajectories if math.isfinite(one.reward)]
    lengths = [trajectory.length for trajectory in trajectories]
    constant = sum(map(zero_variance, groups))
    spreads = [found for group in groups if math.isfinite(found := _deviation([one.reward for one in group]))]
    return {
        "reward": fmean(scored) if scored else math.nan,
        "reward_std": fmean(spreads) if spreads else math.nan,
        "reward/std": (0.0 if all_equal(scored) else float(np.std(scored))) if scored else math.nan,
        "rewards/unscored": float(sum(map(unscored, trajectories))),
        **_by_function(trajectories),
        "groups/sampled": float(len(groups)),
        "groups/zero_variance": float(constant),
        "frac_reward_zero_std": constant / len(groups) if groups else 0.0,
        "completions/mean_length": float(np.mean(lengths)) if lengths else 0.0,
        "completions/clipped_ratio": float(np.mean([t.stop == "length" for t in trajectories])) if lengths else 0.0,
        "rollout/tokens": float(sum(lengths)),
        **_of_episodes(trajectories),
    }


def describe_answers(groups: Sequence[Group]) -> Metrics:
    """How many answers of the data a step learns from, their mean tokens, and the share that was cut."""
    named = {"groups/sampled", "completions/mean_length", "completions/clipped_ratio"}
    return {name: value for name, value in describe(groups).items() if name in named}


def zero_variance(group: Group) -> bool:
    """Whether a group that has been scored has no two different rewards, up to rounding."""
    rewards = [trajectory.reward for trajectory in group if math.isfinite(trajectory.reward)]
    scored = bool(rewards) or any(trajectory.rewards for trajectory in group)
    return scored and all_equal(rewards)


def unscored(trajectory: Trajectory) -> bool:
    """Whether reward functions were asked for a trajectory, and gave no finite reward."""
    return bool(trajectory.rewards) and not math.isfinite(trajectory.reward)


def _deviation(values: Sequence[float]) -> float:
    """The standard deviation (n-1) of the values that are finite, NaN for fewer than two."""
    return spread(np.array([value for value in values if math.isfinite(value)]))


def _by_function(trajectories: Sequence[Trajectory]) -> Metrics:
    """rewards/NAME/mean, /std (n-1) and /unscored of every part of the reward, over the trajectories that have it."""
    found: Metrics = {}
    for name in dict.fromkeys(name for one in trajectories for name in one.rewards):
        values = [value for one in trajectories if math.isfinite(value := one.rewards.get(name, math.nan))]
        found[f"rewards/{name}/mean"] = fmean(values) if values else math.nan
        found[f"rewards/{name}/std"] = _deviation(values)
        found[f"rewards/{name}/unscored"] = float(sum(name in one.failures for one in trajectories))
    return found


def _of_episodes(trajectories: Sequence[Trajectory]) -> Metrics:
    """Means and counts of trajectories that an environment had a part in; nothing where there are none."""
    played = [one for one in trajectories if one.error or "environment" in one.rewards or one.stop in ("done", "turns")]
    if not played:
        return {}
    turns = [turn for one in played for turn in one.turns]
    return {
        "episodes/turns": len(turns) / len(played),
        "episodes/invalid": float(sum(turn.invalid for turn in turns)),
        "episodes/rewritten": float(sum(turn.history_rewritten for turn in turns)),
        "episodes/faults": float(sum(bool(turn.fault) for turn in turns)),
        "episodes/errors": float(sum(bool(one.error) for one in played)),
        "episodes/close_errors": float(sum(bool(one.close_error) for one in played)),
        **{f"stops/{stop}": sum(one.stop == stop for one in played) / len(played) for stop in STOPS},
    }


def combined(metrics: Mapping[str, float], more: Mapping[str, Any]) -> Metrics:
    """Add a micro-batch's metrics: sums, but for maxima and minima."""
    result = dict(metrics)
    for name, value in more.items():
        result[name] = _extreme(name)((result[name], float(value))) if name in result else float(value)
    return result


def averaged(found: Sequence[Metrics]) -> Metrics:
    """Metrics of several optimizer steps as those of one: means, but for maxima, minima and counts.

    `updates` is the number of those that changed the weights, `updates/skipped` of those that were not finite.
    """
    out: Metrics = {}
    for name in dict.fromkeys(name for one in found for name in one):
        values = [float(one[name]) for one in found if name in one]
        out[name] = _extreme(name)(values) / (1 if _is_extreme(name) else len(values))
    moved = [one for one in found if one["grad_norm"] > 0 and not one["updates/skipped"]]
    out["updates"] = float(len(moved))
    out["updates/skipped"] = sum(one["updates/skipped"] for one in found)
    return out


def _is_extreme(name: str) -> bool:
    return name.rpartition("/")[2] in ("max", "min")


def _extreme(name: str) -> Any:
    return {"max": max, "min": min}.get(name.rpartition("/")[2], sum)


def warnings_of(metrics: Mapping[str, Any], trajectories: Sequence[Trajectory]) -> tuple[str, ...]:
    """What did not go well in a step, a line each."""
    found: list[str] = []
    for what, name in (("episodes ended because their environment failed", "error"),
                       ("environments could not be closed", "close_error")):  # fmt: skip
        lines = [line for one in trajectories if (line := getattr(one, name))]
        if lines:
            found.append(f"{len(lines)} {what}, the first: {one_line(lines[0], 160)}")
    if faults := [turn.fault for one in trajectories for turn in one.turns if turn.fault]:
        found.append(
            f"in {len(faults)} turns something failed besides the model, the first: {one_line(faults[0], 160)}"
        )
    if full := metrics.get("completions/context_full"):
        context = f"the context of {metrics['rollout/context']:.0f} tokens"
        if metrics["rollout/tokens"]:
            found.append(f"{full:.0f} of {len(trajectories)} completions were cut off, because they fill {context}")
        else:
            found.append(f"nothing was sampled: the prompt fills {context}")
    if dropped := metrics.get("sequences/dropped_tokens"):
        found.append(
            f"{dropped:.0f} sampled tokens were not trained on: they are beyond train.max_tokens_per_sequence, or "
            "come from a token on that the teacher does not have"
        )
    if failed := metrics.get("rewards/unscored"):
        why = f": {line}" if (line := failure_line(trajectories)) else ""
        found.append(f"{failed:.0f} completions could not be scored and are left out{why}")
    if metrics.get("updates/skipped"):
        found.append("loss or gradient was not finite; the update was skipped")
    elif metrics.get("updates") == 0:
        rounds = f" in {metrics['rollout/rounds']:.0f} rounds" if metrics.get("rollout/rounds", 0) > 1 else ""
        found.append(f"none of {metrics['groups/sampled']:.0f} groups{rounds} has a learning signal; no update")
    return tuple(found)


class Clock:
    """Seconds of the parts of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def lap(self, part: str) -> None:
        """Add the time since the last lap to a part."""
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._since
        self._since = now
