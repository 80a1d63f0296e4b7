"""Functions as tools: their schemas, and the calls of a reply, read by mlx-lm's parser of the model's own format."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, get_type_hints

import msgspec

from mlxrl.checked import SettingError, checked_value, refuse_unknown
from mlxrl.errors import UserError, exception_line, message_of, one_line


class ToolError(UserError):
    """A function that cannot be a tool, or tools that a model cannot have."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call, and the types of its parameters."""

    function: Callable[..., Any]
    schema: Mapping[str, Any]
    hints: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.schema["function"]["name"]

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The checked arguments of a call; SettingError, a line for the model, if the function does not take them."""
        refuse_unknown(self.name, given, self.hints)
        required = self.schema["function"]["parameters"].get("required", ())
        if missing := [name for name in required if name not in given]:
            raise SettingError(self.name, f"missing argument {missing[0]!r}; it takes {', '.join(self.hints)}")
        return {name: checked_value(self.name, name, self.hints[name], _whole(value)) for name, value in given.items()}


def tool_of(function: Callable[..., Any]) -> Tool:
    """A function as a tool, with the schema of `transformers.utils.get_json_schema`.

    Its docstring says what it does and, in a section `Args:` of Google's style, what each parameter is. Every parameter
    has a type hint: str, int, float, bool, list, tuple and dict with or without the types of their items, unions of
    them, Literal and Enum.

    Raises:
        ToolError: the function cannot be described to a model.
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
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # as mlx-lm does: it advises to install PyTorch
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        schema, hints = get_json_schema(function), get_type_hints(function)
        hints = {name: hints[name] for name in parameters}
        msgspec.inspect.multi_type_info(hints.values())  # raises for types that no argument can be converted to
    except Exception as error:  # a hint is an expression of the user's, and may raise anything
        raise ToolError(where, f"cannot be described to a model: {exception_line(error)}") from error
    return Tool(function, schema, hints)


def _whole(value: Any) -> Any:
    """A value of JSON with whole numbers as ints, which are accepted for a float too."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < 2**53 else value
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return {key: _whole(item) for key, item in value.items()} if isinstance(value, dict) else value


@dataclass(frozen=True, slots=True)
class Parser:
    """How a model writes calls.

    start, end: the tags around a call; an empty end where everything after the start is calls.
    parse: (text between them, schemas) -> {"name", "arguments"} or a list of them, or an exception.
    think_end: the tag that ends the model's thinking, in which nothing is a call; empty where it does not think.
    """

    start: str
    end: str
    parse: Callable[[str, Any], Any]
    think_end: str = ""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call in a reply, or why it cannot be read: `fault`, one line for the model."""

    name: str = ""
    arguments: Mapping[str, Any] | None = None
    fault: str = ""


def parser_of(tokenizer: Any, name: str | None = None) -> Parser:
    """The parser of mlx-lm for a tokenizer's model, or the one with a name of `mlx_lm.tool_parsers`.

    Raises:
        ToolError: mlx-lm knows none for the model, or none of that name.
    """
    think_end = (getattr(tokenizer, "think_end", None) or "") if getattr(tokenizer, "has_thinking", False) else ""
    if name is not None:
        try:
            module = import_module(f"mlx_lm.tool_parsers.{name}")
            return Parser(module.tool_call_start, module.tool_call_end, module.parse_tool_call, think_end)
        except (ImportError, AttributeError):
            raise ToolError("tools", "parser", f"wanted a module of mlx_lm.tool_parsers, got {name!r}") from None
    if getattr(tokenizer, "tool_parser", None) is None:
        message = "mlx-lm knows no tool calls of this model; name the format that its prompt asks for"
        raise ToolError("tools", f"{message}, as Tools(functions, parser='json_tools')")
    return Parser(tokenizer.tool_call_start, tokenizer.tool_call_end or "", tokenizer.tool_parser, think_end)


def tool_calls(reply: str, parser: Parser, schemas: Sequence[Mapping[str, Any]]) -> list[ToolCall]:
    """The calls of a reply in their order, also those that cannot be read and one without an end."""
    answer = reply.rpartition(parser.think_end)[2] if parser.think_end else reply
    end = rf"{re.escape(parser.end)}|\Z" if parser.end else r"\Z"
    texts = re.findall(rf"{re.escape(parser.start)}(.*?)(?:{end})", answer, re.DOTALL)
    return [call for text in texts for call in _read(text, parser, schemas)]


def _read(text: str, parser: Parser, schemas: Sequence[Mapping[str, Any]]) -> list[ToolCall]:
    try:
        found = parser.parse(text, list(schemas))
    except Exception as error:  # noqa: BLE001  (a parser meets every text that a model can write)
        return [ToolCall(fault=f"the call cannot be read: {one_line(message_of(error), 200)}")]
    calls: list[ToolCall] = []
    for one in found if isinstance(found, list) and found else [found]:
        call: Mapping[str, Any] = one if isinstance(one, Mapping) else {}
        name, arguments = call.get("name"), call.get("arguments", call.get("parameters", {}))
        if isinstance(name, str) and isinstance(arguments, Mapping):
            calls.append(ToolCall(name, arguments))
        else:
            calls.append(ToolCall(fault="the call cannot be read: wanted a name and arguments as an object"))
    return calls
