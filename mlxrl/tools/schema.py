"""A function as a tool: its JSON schema, from name, docstring and type hints, and arguments checked against them."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

import msgspec

from mlxrl.checked import SettingError, checked_value, refuse_unknown
from mlxrl.errors import UserError, exception_line


class ToolError(UserError):
    """A function that cannot be a tool, or tools that a model cannot have."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call, its schema, and the types of its parameters."""

    function: Callable[..., Any]
    schema: Mapping[str, Any]
    hints: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.schema["function"]["name"]

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call as the function takes them; SettingError, a line for the model, where it does not."""
        refuse_unknown(self.name, given, self.hints)
        required = self.schema["function"]["parameters"].get("required", ())
        if missing := [name for name in required if name not in given]:
            raise SettingError(self.name, f"missing argument {missing[0]!r}; it takes {', '.join(self.hints)}")
        return {name: checked_value(self.name, name, self.hints[name], _whole(value)) for name, value in given.items()}


def tool_of(function: Callable[..., Any]) -> Tool:
    """A function as a tool, with the schema of `transformers.utils.get_json_schema`.

    Its docstring says what it does and, in a section `Args:` of Google's style, what each parameter is. Every parameter
    has a type hint: str, int, float, bool, list, tuple and dict with or without the types of their items, unions of
    them, Literal and Enum. One with a default need not be given.

    Raises:
        ToolError: one line that says why the function cannot be described to a model.
    """
    name, later = getattr(function, "__name__", ""), inspect.iscoroutinefunction(function)
    where = f"tools: {name or repr(function)}"
    if not callable(function) or not name.isidentifier() or later:
        got = "a coroutine function (async def)" if later else type(function).__name__
        raise ToolError(where, f"wanted a plain function with a name, got {got}")
    parameters = inspect.signature(function).parameters
    for one in parameters.values():
        if one.kind not in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY):
            got = f"{one.kind.description} {one.name!r}"
            raise ToolError(where, f"wanted parameters that are given by name, got {got}")
    try:
        schema, hints = _schema(function), get_type_hints(function)
        hints = {name: hints[name] for name in parameters}
        msgspec.inspect.multi_type_info(hints.values())  # raises for types that no argument can be converted to
    except Exception as error:  # a hint is an expression of the user's, and may raise anything
        raise ToolError(where, f"cannot be described to a model: {exception_line(error)}") from error
    return Tool(function, schema, hints)


def _schema(function: Callable[..., Any]) -> dict[str, Any]:
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # as mlx-lm does: it advises to install PyTorch
    from transformers.utils.chat_template_utils import get_json_schema

    return get_json_schema(function)


def _whole(value: Any) -> Any:
    """A value of JSON, which has one kind of number, with those that are whole as ints: they do for a float too."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < 2**53 else value
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return {key: _whole(item) for key, item in value.items()} if isinstance(value, dict) else value
