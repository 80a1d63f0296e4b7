"""Rewards as one value, and reward functions called on the groups of a step."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, TypeAlias

from mlxrl import plugins, settings
from mlxrl.data import RESERVED
from mlxrl.errors import UserError, brief, exception_line
from mlxrl.names import renamed_column
from mlxrl.types import Group, Trajectory

Function: TypeAlias = Callable[..., Any]
ENVIRONMENT = "environment"
"""The part of a reward that is the sum over an episode's turns."""


class RewardError(UserError):
    """Reward functions are missing, cannot be called with the data, always raise, or return no numbers."""


@dataclass(frozen=True, slots=True)
class Rewards:
    """Reward functions, and the weight of each in the sum."""

    functions: tuple[Function, ...] = ()
    weights: tuple[float, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parts of the reward: those of the functions, with a number where two share a name."""
        names = [ENVIRONMENT]
        for name in map(name_of, self.functions):
            numbered = (f"{name}_{number}" if number > 1 else name for number in count(1))
            names.append(next(one for one in numbered if one not in names))
        return tuple(names[1:])


RewardLike: TypeAlias = Function | Sequence[Function] | settings.Reward | Rewards | None


def rewards_of(given: RewardLike) -> Rewards:
    """A function, several, a `settings.Reward` of functions or their names, or nothing, as one value.

    Raises:
        UserError: a function cannot be found or is none, or the weights are wrong.
    """
    if isinstance(given, Rewards):
        return given
    if not isinstance(given, settings.Reward):
        given = settings.Reward(functions=() if given is None else (given,) if callable(given) else tuple(given))
    functions = tuple(map(_found, given.functions))
    return Rewards(functions, given.weights or (1.0,) * len(functions))


def _found(given: Function | str) -> Function:
    try:
        function = plugins.find(given) if isinstance(given, str) else given
    except plugins.PluginError as error:
        raise error.within("reward", "functions") from error.__cause__
    if not callable(function) or isinstance(function, type):
        name = given if isinstance(given, str) else name_of(given)
        raise RewardError("reward", "functions", f"{name!r}: wanted a function, got a {type(function).__name__}")
    return function


def name_of(function: Function) -> str:
    return getattr(function, "__name__", None) or type(function).__name__


def check_columns(rewards: Rewards, columns: Sequence[str]) -> None:
    """RewardError where a function has a parameter that is neither a column, `prompts` nor `completions`."""
    offered = [*RESERVED, *columns]
    for function in rewards.functions:
        where = f"reward {name_of(function)!r}"
        for one in _parameters(function).values():
            needed = one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
            if one.kind is one.POSITIONAL_ONLY:
                raise RewardError(where, f"parameter {one.name!r} cannot be passed as a keyword")
            if needed and one.name not in offered:
                hint = renamed_column(one.name, offered)
                raise RewardError(where, f"wants {one.name!r}, but the data offer {', '.join(offered)}{hint}")


def earned(trajectory: Trajectory) -> Trajectory:
    """The trajectory with the sum of its turns' rewards as the environment's part of its reward, its first."""
    total = math.fsum(turn.reward for turn in trajectory.turns)
    return replace(trajectory, reward=total, rewards={ENVIRONMENT: total}, weights={ENVIRONMENT: 1.0})


def score(groups: Sequence[Group], reward: RewardLike = None) -> tuple[Group, ...]:
    """Give every trajectory its reward: the weighted sum over the functions, each called once with all completions.

    `Trajectory.rewards` are the parts by function name, `Trajectory.weights` their weights; the environment's part,
    "environment", has weight 1. A function that returns None for a completion is left out of its sum. Where a function
    returns NaN or infinity or raises, and where all return None, the reward is NaN. A function that raises is called
    again one completion at a time, so that only those it raises for are lost.

    Args:
        reward: see `rewards_of`. A function may change what it is given: each call has copies.
    Raises:
        RewardError: a function raised for every completion, or returned something else than a number or None for each.
    """
    rewards = rewards_of(reward)
    flat = [trajectory for group in groups for trajectory in group]
    rewarded = bool(flat) and all(ENVIRONMENT in one.rewards or one.stop == "error" for one in flat)
    if not rewards.functions and not rewarded:
        raise RewardError("reward", "wanted at least one function, got none")
    weights = dict(zip(rewards.names, rewards.weights, strict=True))
    called = zip(rewards.names, rewards.functions, strict=True) if flat else ()
    parts = {name: _values(name, function, flat) for name, function in called}
    scored = iter([_scored(one, {name: parts[name][n] for name in parts}, weights) for n, one in enumerate(flat)])
    return tuple(tuple(next(scored) for _ in group) for group in groups)


def require_scores(groups: Sequence[Group]) -> Sequence[Group]:
    """The groups; RewardError where not one completion that the model finished has a finite reward."""
    finished = [one for group in groups for one in group if one.stop != "error"]
    if finished and not any(math.isfinite(one.reward) for one in finished):
        wanted = f"wanted a finite number for at least one of {len(finished)} completions, got None, NaN, infinity "
        raise RewardError("reward", wanted + "or an exception for each; look at the reward functions")
    return groups


def best_and_worst(group: Group) -> list[Trajectory]:
    """The trajectories with the highest and the lowest reward, one where they are the same; failed ones come last."""
    ranked = sorted(group, key=lambda one: -math.inf if math.isnan(one.reward) else one.reward, reverse=True)
    return ranked[:1] if len(ranked) < 2 else [ranked[0], ranked[-1]]


def _scored(trajectory: Trajectory, parts: Mapping[str, float | None], weights: Mapping[str, float]) -> Trajectory:
    if trajectory.stop == "error":
        return replace(trajectory, reward=math.nan)
    if ENVIRONMENT in trajectory.rewards:
        parts, weights = {ENVIRONMENT: trajectory.rewards[ENVIRONMENT], **parts}, {ENVIRONMENT: 1.0, **weights}
    applying = [(part, weights[name]) for name, part in parts.items() if part is not None]
    total = sum(part * factor for part, factor in applying) if applying else math.nan
    known = {name: math.nan if part is None else part for name, part in parts.items()}
    return replace(trajectory, reward=float(total), rewards=known, weights=weights)


def _values(name: str, function: Function, flat: Sequence[Trajectory]) -> list[float | None]:
    """A function's number for every completion, NaN where it raises."""
    parameters = _parameters(function)
    everything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    offered = dict.fromkeys((*RESERVED, *(column for one in flat for column in one.task.columns)))
    wanted = [name for name in offered if everything or name in parameters]
    returned, error = _called(function, wanted, flat)
    if error is None:
        return _numbers(name, returned, len(flat))
    alone = [_called(function, wanted, [one]) for one in flat] if len(flat) > 1 else [(None, error)]
    if all(raised is not None for _, raised in alone):
        where = f"reward {name!r} raised for each of {len(flat)} completions"
        raise RewardError(where, exception_line(error)) from error
    return [_numbers(name, returned, 1)[0] if raised is None else math.nan for returned, raised in alone]


def _called(function: Function, wanted: Sequence[str], flat: Sequence[Trajectory]) -> tuple[Any, BaseException | None]:
    """What a function returned, and what it raised."""
    try:
        return function(**{name: [_argument(name, one) for one in flat] for name in wanted}), None
    except (Exception, SystemExit) as error:  # noqa: BLE001  (any exception of a user's function costs a sample, not the run)
        return None, error


def _parameters(function: Function) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        raise RewardError(f"reward {name_of(function)!r}", "its parameters cannot be read; wrap it in a def") from None


def _argument(name: str, trajectory: Trajectory) -> Any:
    """A trajectory's value for a keyword of a function, as a copy."""
    prompt, messages = trajectory.task.prompt, trajectory.task.messages
    if name == "prompts":
        return prompt if isinstance(prompt, str) else deepcopy(list(prompt))
    if name == "completions":
        return [{"role": "assistant", "content": trajectory.text}] if messages else trajectory.text
    value = trajectory.task.columns.get(name)
    return deepcopy(value) if isinstance(value, list | dict | set | tuple) else value


def _numbers(name: str, returned: Any, number: int) -> list[float | None]:
    if hasattr(returned, "tolist"):
        returned = returned.tolist()
    if not isinstance(returned, list | tuple):
        raise RewardError(f"reward {name!r}", f"wanted a list of {number} numbers, got {brief(returned)}")
    if len(returned) != number:
        raise RewardError(f"reward {name!r}", f"wanted {number} numbers, one per completion, got {len(returned)}")
    return [None if value is None else _number(name, value) for value in returned]


def _number(name: str, value: Any) -> float:
    value = value.item() if hasattr(value, "item") else value
    if not isinstance(value, int | float):
        raise RewardError(f"reward {name!r}", f"wanted a number per completion, got {brief(value)}")
    return float(value) if abs(value) <= sys.float_info.max else math.nan
