"""Rewards as one value, and reward functions called on the groups of a step."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TypeAlias

from mlxrl import plugins, settings
from mlxrl.data import RESERVED, is_missing
from mlxrl.errors import brief
from mlxrl.names import renamed_column
from mlxrl.rewards.calls import (
    Call,
    Failure,
    Function,
    Part,
    RewardError,
    TrainerState,
    columns_of,
    name_of,
    parameters_of,
)
from mlxrl.settings import LARGEST_REWARD
from mlxrl.types import Group, Task, Trajectory

ENVIRONMENT = "environment"
"""The part of a reward that is the sum over an episode's turns."""
SUM = "sum"
"""What failed where the parts are numbers and their weighted sum is none."""


@dataclass(frozen=True, slots=True)
class Rewards:
    """Reward functions, the weight of each in the sum, and how they are called."""

    functions: tuple[Function, ...] = ()
    weights: tuple[float, ...] = ()
    call: Call = field(default_factory=Call)

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
        if given is not None and not callable(given) and not isinstance(given, list | tuple):
            raise RewardError("reward", f"wanted a function, a list of functions or Reward(...), got {brief(given)}")
        given = settings.Reward(functions=() if given is None else (given,) if callable(given) else tuple(given))
    functions = tuple(map(_found, given.functions))
    call = Call(given.timeout, given.special_tokens, given.retry_each)
    return Rewards(functions, given.weights or (1.0,) * len(functions), call)


def _found(given: Function | str) -> Function:
    try:
        function = plugins.find(given) if isinstance(given, str) else given
    except plugins.PluginError as error:
        raise error.within("reward", "functions") from error.__cause__
    if not callable(function) or isinstance(function, type):
        name = given if isinstance(given, str) else name_of(given)
        raise RewardError("reward", "functions", f"{name!r}: wanted a function, got a {type(function).__name__}")
    return function


def check_columns(rewards: Rewards, columns: Sequence[str]) -> None:
    """RewardError where a function has a parameter that is neither a column nor one of the keywords of all."""
    offered = [*RESERVED[:2], *columns]
    for function in rewards.functions:
        where = f"reward {name_of(function)!r}"
        for one in parameters_of(function).values():
            needed = one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
            if one.kind is one.POSITIONAL_ONLY:
                raise RewardError(where, f"parameter {one.name!r} cannot be passed as a keyword")
            if needed and one.name not in (*RESERVED, *columns):
                hint = renamed_column(one.name, offered)
                raise RewardError(where, f"wants {one.name!r}, but the data offer {', '.join(offered)}{hint}")


def tell_missing(rewards: Rewards, tasks: Sequence[Task]) -> None:
    """Warn of examples without a value in a column that a function cannot do without: most often the answer."""
    for function in rewards.functions:
        parameters = parameters_of(function)
        for column in [name for name in columns_of(function) if parameters[name].default is parameters[name].empty]:
            lacking = [task for task in tasks if is_missing(task.columns.get(column))]
            if lacking:
                what = f"no {column!r}, which reward {name_of(function)!r} wants; the first is {example_of(lacking[0])}"
                warnings.warn(f"{len(lacking)} of {len(tasks)} examples have {what}", stacklevel=2)


def example_of(task: Task) -> str:
    """What names an example: where it was read from, or how its prompt begins."""
    return task.where or brief(task.prompt if isinstance(task.prompt, str) else list(task.prompt), 40)


def earned(trajectory: Trajectory) -> Trajectory:
    """The trajectory with the sum of its turns' rewards as the environment's part of its reward, its first."""
    total = math.fsum(turn.reward for turn in trajectory.turns)
    return replace(trajectory, reward=total, rewards={ENVIRONMENT: total}, weights={ENVIRONMENT: 1.0})


def score(groups: Sequence[Group], reward: RewardLike = None) -> tuple[Group, ...]:
    """Give every trajectory its reward: the weighted sum over the functions, each called once with all completions.

    `Trajectory.rewards` are the parts by function name, `Trajectory.weights` their weights; the environment's part,
    "environment", has weight 1. A function that returns None for a completion is left out of its sum. Where a function
    returns NaN or a size beyond 1e30 or raises, and where all return None, the reward is NaN; `Trajectory.failures`
    says why. What async functions return is awaited, of all together.

    Args:
        reward: see `rewards_of`. A function may change what it is given: each call has copies.
    Raises:
        RewardError: a function raised for every completion, or returned something else than a number or None for each.
    """
    scored, fault = attempt(groups, rewards_of(reward))
    if fault is not None:
        raise fault
    return scored


def attempt(
    groups: Sequence[Group], rewards: Rewards, state: TrainerState = TrainerState()
) -> tuple[tuple[Group, ...], RewardError | None]:
    """`score`, and the fault of a function that raised for every completion beside the groups."""
    flat = [trajectory for group in groups for trajectory in group]
    rewarded = bool(flat) and all(ENVIRONMENT in one.rewards or one.stop == "error" for one in flat)
    if not rewards.functions and not rewarded:
        raise RewardError("reward", "wanted at least one function, got none")
    functions = dict(zip(rewards.names, rewards.functions, strict=True)) if flat else {}
    parts = replace(rewards.call, state=state).parts(functions, flat)
    weights = dict(zip(rewards.names, rewards.weights, strict=True))
    scored = iter([_scored(one, {name: parts[name][n] for name in parts}, weights) for n, one in enumerate(flat)])
    fault = next((fault for name in parts if (fault := _fault(name, parts[name], rewards.call.retry_each))), None)
    return tuple(tuple(next(scored) for _ in group) for group in groups), fault


def require_scores(groups: Sequence[Group]) -> Sequence[Group]:
    """The groups; RewardError where not one completion that the model finished has a finite reward."""
    finished = [one for group in groups for one in group if one.stop != "error"]
    if finished and not any(math.isfinite(one.reward) for one in finished):
        wanted = f"wanted a finite number for at least one of {len(finished)} completions, got None, NaN, infinity "
        why = f" ({line})" if (line := failure_line(finished)) else ""
        raise RewardError("reward", f"{wanted}or an exception for each{why}; look at the reward functions")
    return groups


@dataclass(frozen=True, slots=True)
class Failed:
    """How often a function gave no number for one reason, and the first example of it."""

    function: str
    error: str
    completions: int
    example: str


def failures_of(trajectories: Sequence[Trajectory]) -> list[Failed]:
    """Why completions have no number of a function, each reason of a function once, in the order they came."""
    found = [(name, why, one) for one in trajectories for name, why in one.failures.items()]
    counts = Counter((name, why) for name, why, _ in found)
    firsts = {(name, why): example_of(one.task) for name, why, one in reversed(found)}
    return [Failed(*key, count, firsts[key]) for key, count in counts.items()]


def failure_line(trajectories: Sequence[Trajectory]) -> str:
    """Which functions failed how often, and the first reason; empty where none failed."""
    found = failures_of(trajectories)
    counts = Counter[str]()
    for one in found:
        counts[one.function] += one.completions
    told = ", ".join(f"{name!r} failed for {number}" for name, number in counts.items())
    return f"{told}; the first: {found[0].example}: {found[0].error}" if found else ""


def best_and_worst(group: Group) -> list[Trajectory]:
    """The trajectories with the highest and the lowest reward, one where they are the same; failed ones come last."""
    ranked = sorted(group, key=lambda one: -math.inf if math.isnan(one.reward) else one.reward, reverse=True)
    return ranked[:1] if len(ranked) < 2 else [ranked[0], ranked[-1]]


def _fault(name: str, parts: Sequence[Part], retried: bool) -> RewardError | None:
    """The fault of a function that raised for every completion."""
    raised = [part for part in parts if isinstance(part, Failure) and part.error is not None]
    if not parts or len(raised) < len(parts):
        return None
    hint = "" if retried or len(parts) == 1 else "; reward.retry_each = true calls it again for each by itself"
    error = RewardError(f"reward {name!r} raised for each of {len(parts)} completions", raised[0].why + hint)
    error.__cause__ = raised[0].error
    return error


def _scored(trajectory: Trajectory, parts: Mapping[str, Part], weights: Mapping[str, float]) -> Trajectory:
    if trajectory.stop == "error":
        return replace(trajectory, reward=math.nan)
    failures = {name: part.why for name, part in parts.items() if isinstance(part, Failure)}
    if ENVIRONMENT in trajectory.rewards:
        parts, weights = {ENVIRONMENT: trajectory.rewards[ENVIRONMENT], **parts}, {ENVIRONMENT: 1.0, **weights}
    known = {name: part if isinstance(part, float) else math.nan for name, part in parts.items()}
    applying = [name for name, part in parts.items() if part is not None]
    total = _total([weights[name] * known[name] for name in applying if weights[name]]) if applying else math.nan
    if math.isinf(total):
        total, failures[SUM] = math.nan, f"the weighted sum is beyond {LARGEST_REWARD:g}"
    return replace(trajectory, reward=total, rewards=known, weights=weights, failures=failures)


def _total(terms: Sequence[float]) -> float:
    """The sum of terms, NaN where one is, infinite where they or it are beyond the largest reward."""
    if any(map(math.isnan, terms)):
        return math.nan
    total = math.inf if any(abs(term) > LARGEST_REWARD for term in terms) else math.fsum(terms)
    return total if abs(total) <= LARGEST_REWARD else math.inf
