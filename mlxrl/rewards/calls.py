"""Calls of reward functions: the keywords they get, and what a completion's part of the reward is then."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from mlxrl.awaiting import Outcome, begin
from mlxrl.data import RESERVED
from mlxrl.errors import UserError, brief, exception_line, one_line, place_of
from mlxrl.settings import LARGEST_REWARD
from mlxrl.types import Trajectory

Function: TypeAlias = Callable[..., Any]
WIDTH = 300
"""Characters of what is said of an exception."""


class RewardError(UserError):
    """Reward functions are missing, cannot be called with the data, always raise, or return no numbers."""


@dataclass(frozen=True, slots=True)
class TrainerState:
    """What a function learns of the run, by the names of TRL's: updates so far, and those of the whole run.

    Both are counted in steps of the run; 0 where there is none.
    """

    global_step: int = 0
    max_steps: int = 0


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a completion has no number of a function, in one line. error: what the function raised."""

    why: str
    error: BaseException | None = None


Part: TypeAlias = float | Failure | None
"""What a function says of a completion; None where it does not apply."""


@dataclass(frozen=True, slots=True)
class Call:
    """How functions are called; see `settings.Reward`."""

    timeout: float | None = None
    special_tokens: bool = False
    retry_each: bool = False
    state: TrainerState = TrainerState()

    def parts(self, functions: Mapping[str, Function], flat: Sequence[Trajectory]) -> dict[str, list[Part]]:
        """The parts of every completion by function. All that is awaited is awaited together.

        Raises:
            RewardError: a function returned something else than a number or None for each.
        """
        columns = list(dict.fromkeys(column for one in flat for column in one.task.columns))
        begun = {name: self._begin(name, function, columns, flat) for name, function in functions.items()}
        ended = {name: outcome() for name, outcome in begun.items()}
        if self.retry_each and len(flat) > 1:
            for name in [name for name, (_, error) in ended.items() if error is not None]:
                alone = [self._begin(name, functions[name], columns, [one]) for one in flat]
                ended[name] = [_alone(name, *outcome()) for outcome in alone], None
        return {name: _parts(name, functions[name], flat, *ended[name]) for name in functions}

    def _begin(
        self, name: str, function: Function, columns: Sequence[str], flat: Sequence[Trajectory]
    ) -> Callable[[], Outcome]:
        parameters = parameters_of(function)
        everything = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        wanted = [keyword for keyword in (*RESERVED, *columns) if everything or keyword in parameters]
        arguments = {keyword: [self._argument(keyword, one) for one in flat] for keyword in wanted}
        if "trainer_state" in wanted:
            arguments["trainer_state"] = self.state  # pyright: ignore[reportArgumentType]
        return begin(f"reward {name!r}", partial(function, **arguments), self.timeout)

    def _argument(self, keyword: str, trajectory: Trajectory) -> Any:
        """A trajectory's value for a keyword of a function, as a copy."""
        prompt: Any = trajectory.task.prompt
        chat = not isinstance(prompt, str) and all(isinstance(one, Mapping) for one in prompt)
        if keyword == "prompts":
            return prompt if isinstance(prompt, str) else [_copy(one) for one in prompt]
        if keyword == "completions":
            turns = [turn.special_text or turn.text for turn in trajectory.turns]
            text = "\n".join(turns) if self.special_tokens else trajectory.text
            return [{"role": "assistant", "content": text}] if chat else text
        if keyword == "completion_ids":
            return [token for turn in trajectory.turns for token in turn.tokens]
        return _copy(trajectory.task.columns.get(keyword))


def parameters_of(function: Function) -> Mapping[str, inspect.Parameter]:
    """A function's parameters; RewardError where they cannot be read."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        raise RewardError(f"reward {name_of(function)!r}", "its parameters cannot be read; wrap it in a def") from None


def columns_of(function: Function) -> list[str]:
    """The columns that a function wants by name."""
    found = parameters_of(function).values()
    named = [one.name for one in found if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    return [name for name in named if name not in RESERVED]


def name_of(function: Function) -> str:
    """The name of a function, or of what a partial calls; of an object that of its class."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__name__", None) or type(function).__name__


def _copy(value: Any) -> Any:
    """A copy, or the value itself where it cannot be copied."""
    try:
        return deepcopy(value)
    except Exception:  # noqa: BLE001  (a value of the user's may raise anything)
        return value


def _raised(error: BaseException) -> Failure:
    return Failure(f"{one_line(exception_line(error), WIDTH)}{place_of(error)}", error)


def _parts(
    name: str, function: Function, flat: Sequence[Trajectory], returned: Any, error: BaseException | None
) -> list[Part]:
    if error is not None:
        return [_raised(error)] * len(flat)
    values = _listed(name, returned, len(flat))
    return [_part(name, function, value, one) for value, one in zip(values, flat, strict=True)]


def _alone(name: str, returned: Any, error: BaseException | None) -> Any:
    """What a function returned for a single completion, or what it raised."""
    return error or _listed(name, returned, 1)[0]


def _listed(name: str, returned: Any, number: int) -> Sequence[Any]:
    """What a function returned, as a list with an entry for each completion."""
    try:
        returned = returned.tolist() if hasattr(returned, "tolist") else returned
    except Exception as error:
        raise RewardError(f"reward {name!r}", f"its values cannot be read: {exception_line(error)}") from error
    if not isinstance(returned, list | tuple):
        raise RewardError(f"reward {name!r}", f"wanted a list of {number} numbers, got {brief(returned)}")
    found: Sequence[Any] = tuple(returned)
    if len(found) != number:
        raise RewardError(f"reward {name!r}", f"wanted {number} numbers, one per completion, got {len(found)}")
    return found


def _part(name: str, function: Function, value: Any, one: Trajectory) -> Part:
    if value is None:
        return None
    if isinstance(value, BaseException):
        return _raised(value)
    value = _plain(value)
    if not isinstance(value, int | float):
        raise RewardError(f"reward {name!r}", f"wanted a number per completion, got {brief(value)}")
    if abs(value) <= LARGEST_REWARD:
        return float(value)
    bound = "" if isinstance(value, float) and not math.isfinite(value) else f", beyond {LARGEST_REWARD:g}"
    given = "".join(f"; {column} is {brief(one.task.columns.get(column), 40)}" for column in columns_of(function))
    return Failure(f"returned {brief(value, 40)}{bound}{given}")


def _plain(value: Any) -> Any:
    """A number of another library's as one of Python; what has none stays as it is."""
    try:
        return value.item() if hasattr(value, "item") else value
    except Exception:  # noqa: BLE001  (of an array of several, or a value of the user's)
        return value
