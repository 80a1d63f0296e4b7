"""Reward functions called on the groups of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mlxrl.rewards.functions import Function, check_weights, name_of, parameters
from mlxrl.types import Group, Trajectory

ENVIRONMENT = "environment"
"""The part of a reward that is the sum over an episode's turns."""


class RewardError(ValueError):
    """A reward function that raised for every completion of a call, or did not return a number for each."""


def earned(trajectory: Trajectory) -> Trajectory:
    """The trajectory with the sum of what an environment gave for its turns as a part of the reward, and so far all."""
    total = math.fsum(turn.reward for turn in trajectory.turns)
    return replace(trajectory, reward=total, rewards={ENVIRONMENT: total}, weights={ENVIRONMENT: 1.0})


def score(groups: Sequence[Group], *functions: Function, weights: Sequence[float] | None = None) -> tuple[Group, ...]:
    """Give every trajectory its reward: the weighted sum over the functions, each called once with all completions.

    `Trajectory.rewards` holds the parts by function name, `Trajectory.weights` their weights. A function that returns
    None for a completion is left out of its sum. Where a function returns NaN or infinity or raises, and where all
    return None, the reward is NaN, which means "failed". A function that raises is called again one completion at a
    time, so that only those it raises for are lost. What an environment has given is a part of its own, "environment",
    with weight 1, and needs no function besides.

    Args:
        weights: one per function, 1 each if left out.
    Raises:
        RewardError: a function raised for every completion, or returned something else than a number or None for each.
    """
    flat = [trajectory for group in groups for trajectory in group]
    given = bool(flat) and all(ENVIRONMENT in row.rewards or row.stop == "error" for row in flat)
    names, factors = _names(functions), check_weights(len(functions), weights, alone=given)
    parts = {name: _call(name, function, flat) for name, function in zip(names, functions, strict=True)} if flat else {}
    weighted = dict(zip(names, factors, strict=True))
    scored = iter([_scored(one, {name: parts[name][i] for name in names}, weighted) for i, one in enumerate(flat)])
    return tuple(tuple(next(scored) for _ in group) for group in groups)


def require_scores(groups: Sequence[Group]) -> Sequence[Group]:
    """The groups; RewardError where not one completion that the model finished has a finite reward."""
    finished = [trajectory for group in groups for trajectory in group if trajectory.stop != "error"]
    if finished and not any(math.isfinite(trajectory.reward) for trajectory in finished):
        raise RewardError(
            f"reward: wanted a finite number for at least one of {len(finished)} completions, got None, NaN, infinity "
            "or an exception for each; look at the reward functions"
        )
    return groups


def best_and_worst(group: Group) -> list[Trajectory]:
    """The attempts with the highest and the lowest reward, one where they are the same; failed ones come last."""
    order = sorted(range(len(group)), key=lambda place: _rank(group[place]), reverse=True)
    return [group[place] for place in dict.fromkeys((order[0], order[-1]))] if order else []


def _scored(trajectory: Trajectory, parts: Mapping[str, float | None], weights: Mapping[str, float]) -> Trajectory:
    if trajectory.stop == "error":
        return replace(trajectory, reward=math.nan)
    if ENVIRONMENT in trajectory.rewards:
        parts, weights = {ENVIRONMENT: trajectory.rewards[ENVIRONMENT], **parts}, {ENVIRONMENT: 1.0, **weights}
    applying = [(part, weights[name]) for name, part in parts.items() if part is not None]
    total = sum(part * factor for part, factor in applying) if applying else math.nan
    known = {name: math.nan if part is None else part for name, part in parts.items()}
    return replace(trajectory, reward=float(total), rewards=known, weights=weights)


def _rank(trajectory: Trajectory) -> float:
    return -math.inf if math.isnan(trajectory.reward) else trajectory.reward


def _call(name: str, function: Function, flat: Sequence[Trajectory]) -> list[float | None]:
    columns = list(dict.fromkeys(name for trajectory in flat for name in trajectory.task.columns))
    try:
        returned = function(**_keywords(function, flat, columns))
    except (Exception, SystemExit) as error:  # noqa: BLE001  (any exception of a user's function costs a sample, not the run)
        return _one_by_one(name, function, flat, columns, error)
    return _numbers(name, returned, len(flat))


def _one_by_one(
    name: str, function: Function, flat: Sequence[Trajectory], columns: Sequence[str], error: BaseException
) -> list[float | None]:
    values: list[float | None] = []
    failed = 0
    for trajectory in flat if len(flat) > 1 else ():
        try:
            returned = function(**_keywords(function, [trajectory], columns))
        except (Exception, SystemExit):  # noqa: BLE001  (as above)
            values.append(math.nan)
            failed += 1
        else:
            values += _numbers(name, returned, 1)
    if failed == len(values):
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise RewardError(f"reward {name!r} raised for each of {len(flat)} completions: {reason}") from error
    return values


def _keywords(function: Function, flat: Sequence[Trajectory], columns: Sequence[str]) -> dict[str, list[Any]]:
    """The arguments of a call, made anew each time: a function that changes them cannot reach another one."""
    keywords: dict[str, list[Any]] = {
        "prompts": [_prompt(trajectory) for trajectory in flat],
        "completions": [_completion(trajectory) for trajectory in flat],
        **{name: [trajectory.task.columns.get(name) for trajectory in flat] for name in columns},
    }
    accepted = parameters(function, variadic=True)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted):
        return keywords
    names = {parameter.name for parameter in accepted}
    return {name: values for name, values in keywords.items() if name in names}


def _prompt(trajectory: Trajectory) -> str | list[dict[str, Any]]:
    prompt = trajectory.task.prompt
    return prompt if isinstance(prompt, str) else [dict(message) for message in prompt]


def _completion(trajectory: Trajectory) -> str | list[dict[str, Any]]:
    if isinstance(trajectory.task.prompt, str):
        return trajectory.text
    return [{"role": "assistant", "content": trajectory.text}]


def _numbers(name: str, returned: Any, count: int) -> list[float | None]:
    if hasattr(returned, "tolist"):
        returned = returned.tolist()
    if not isinstance(returned, list | tuple):
        raise RewardError(f"reward {name!r}: wanted a list of {count} numbers, got {_shown(returned)}")
    if len(returned) != count:
        raise RewardError(f"reward {name!r}: wanted {count} numbers, one per completion, got {len(returned)}")
    return [_value(name, value) for value in returned]


def _value(name: str, value: Any) -> float | None:
    if value is None:
        return None
    value = value.item() if hasattr(value, "item") else value
    if not isinstance(value, int | float):
        raise RewardError(f"reward {name!r}: wanted a number per completion, got {_shown(value)}")
    return float(value) if math.isfinite(value) else math.nan


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {repr(value)[:60]}"


def _names(functions: Sequence[Function]) -> list[str]:
    names = [ENVIRONMENT]
    for function in functions:
        name, number = name_of(function), 2
        while name in names:
            name, number = f"{name_of(function)}_{number}", number + 1
        names.append(name)
    return names[1:]
