"""A function as a tool: its JSON schema, from name, docstring and type hints, and arguments checked against them."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_NAMES: Mapping[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}
_KINDS = "str, int, float, bool, list, dict, Optional and Literal"


class ArgumentError(ValueError):
    """Arguments that a tool does not take, in one line for the model."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call.

    schema: what is told of it, {"type": "function", "function": {"name", "description", "parameters"}}.
    hints: the types of its parameters; required: those without a default.
    """

    function: Callable[..., Any]
    schema: Mapping[str, Any]
    hints: Mapping[str, Any]
    required: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.schema["function"]["name"]

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call as the function takes them; ArgumentError where it does not."""
        takes = f"it takes {', '.join(self.hints) or 'none'}"
        if unknown := [name for name in given if name not in self.hints]:
            raise ArgumentError(f"{self.name}: unknown argument {unknown[0]!r}; {takes}")
        if missing := [name for name in self.required if name not in given]:
            raise ArgumentError(f"{self.name}: missing argument {missing[0]!r}; {takes}")
        return {name: self._converted(name, value) for name, value in given.items()}

    def _converted(self, name: str, value: Any) -> Any:
        try:
            return converted(self.hints[name], value)
        except ArgumentError as error:
            raise ArgumentError(f"{self.name}: {name}: {error}") from None


def tool_of(function: Callable[..., Any]) -> Tool:
    """A function as a tool.

    Its docstring says what it does, up to the section `Args:`, whose lines `name: text` describe the parameters.
    Every parameter has a type hint: str, int, float, bool, list and dict with or without the types of their items,
    Optional, and Literal. One with a default need not be given.

    Raises:
        ValueError: one line that says what of its signature cannot be told to a model.
    """
    name = getattr(function, "__name__", "")
    where = f"tools: {name or repr(function)}"
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"{where}: wanted a plain function with a name, got a coroutine function (async def)")
    if not callable(function) or not name.isidentifier():
        raise ValueError(f"{where}: wanted a plain function with a name, got {type(function).__name__}")
    text, lines = described(function)
    if not text:
        raise ValueError(f"{where}: wanted a docstring, which tells the model what it does, got none")
    hints = _hints(function, where)
    parameters = inspect.signature(function).parameters
    for parameter in parameters.values():
        _refuse(parameter, hints, where)
    required = tuple(name for name, one in parameters.items() if one.default is inspect.Parameter.empty)
    properties = {
        name: {**_typed(hints[name], f"{where}: {name}"), **({"description": lines[name]} if name in lines else {})}
        for name in parameters
    }
    schema = {"type": "object", "properties": properties, "required": list(required)}
    told = {"type": "function", "function": {"name": name, "description": text, "parameters": schema}}
    return Tool(function, told, {name: hints[name] for name in parameters}, required)


def described(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """What a docstring says of a function, and of each of its parameters."""
    text, _, section = (inspect.getdoc(function) or "").partition("\nArgs:\n")
    found: dict[str, str] = {}
    for line in section.splitlines():
        if not line.startswith(" "):
            break
        name, colon, words = line.strip().partition(":")
        if colon and name.isidentifier():
            found[name] = words.strip()
        elif found:
            last = list(found)[-1]
            found[last] = f"{found[last]} {line.strip()}"
    return text.strip(), found


def _hints(function: Callable[..., Any], where: str) -> dict[str, Any]:
    try:
        return get_type_hints(function)
    except Exception as error:  # a hint is an expression of the user's, and may raise anything
        raise ValueError(f"{where}: its type hints cannot be read: {error}") from error


def _refuse(parameter: inspect.Parameter, hints: Mapping[str, Any], where: str) -> None:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
        got = f"{parameter.kind.description} {parameter.name!r}"
        raise ValueError(f"{where}: wanted parameters that are given by name, got {got}")
    if parameter.name not in hints:
        raise ValueError(f"{where}: {parameter.name}: wanted a type hint, one of {_KINDS}, got none")


def _typed(hint: Any, where: str) -> dict[str, Any]:
    """The schema of a type."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint in _NAMES:
        return {"type": _NAMES[hint]}
    if origin is Literal and {type(value) for value in arguments} <= {str, int, bool}:
        kinds = {_NAMES[type(value)] for value in arguments}
        return {**({"type": kinds.pop()} if len(kinds) == 1 else {}), "enum": list(arguments)}
    if (inner := optional(hint)) is not None:
        return _typed(inner, where)
    if list in (hint, origin):
        return {"type": "array", **({"items": _typed(arguments[0], where)} if arguments else {})}
    if hint is dict or (origin is dict and arguments[0] is str):
        return {"type": "object", **({"additionalProperties": _typed(arguments[1], where)} if arguments else {})}
    raise ValueError(f"{where}: wanted a type hint of {_KINDS}, got {hint!r}")


def optional(hint: Any) -> Any:
    """The type that may also be None; None where the hint is no such union of two."""
    if get_origin(hint) not in (Union, types.UnionType):
        return None
    others = [part for part in get_args(hint) if part is not types.NoneType]
    return others[0] if len(others) == 1 and len(get_args(hint)) == 2 else None


def converted(hint: Any, value: Any) -> Any:
    """A value of JSON as a type; ArgumentError where it is none. 3 does for a float, and 3.0 for an int."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint in _NAMES:
        return _scalar(hint, value)
    if origin is Literal:
        return _one_of(arguments, value)
    if (inner := optional(hint)) is not None:
        return None if value is None else converted(inner, value)
    if list in (hint, origin):
        if not isinstance(value, list):
            raise ArgumentError(f"wanted an array, got {_shown(value)}")
        return [converted(arguments[0], item) for item in value] if arguments else value
    if not isinstance(value, dict):
        raise ArgumentError(f"wanted an object, got {_shown(value)}")
    return {key: converted(arguments[1], item) for key, item in value.items()} if arguments else value


def _scalar(hint: Any, value: Any) -> Any:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int and number and value == value // 1:
        return int(value)
    if hint is float and number and abs(value) <= sys.float_info.max:
        return float(value)
    if hint in (str, bool) and isinstance(value, hint):
        return value
    raise ArgumentError(f"wanted {'an' if hint is int else 'a'} {_NAMES[hint]}, got {_shown(value)}")


def _one_of(choices: Sequence[Any], value: Any) -> Any:
    for choice in choices:
        if type(choice) is type(value) and choice == value:
            return choice
    raise ArgumentError(f"wanted one of {', '.join(map(repr, choices))}, got {_shown(value)}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
