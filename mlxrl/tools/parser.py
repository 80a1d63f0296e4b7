"""The tool calls of a reply, as mlx-lm's parser of the model's own format reads them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from mlxrl.errors import message_of, one_line
from mlxrl.tools.schema import ToolError


@dataclass(frozen=True, slots=True)
class Parser:
    """How a model writes calls.

    start, end: what stands around a call; an empty end where everything after the start is calls.
    parse: (text between them, schemas) -> {"name", "arguments"} or a list of them, or an exception.
    think_end: what ends the model's thinking, before which nothing is a call; empty where it does not think.
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
    """The calls of a reply in their order, those that cannot be read and one that nothing ends too."""
    answer = reply.rpartition(parser.think_end)[2] if parser.think_end else reply
    end = rf"{re.escape(parser.end)}|\Z" if parser.end else r"\Z"
    texts = re.findall(rf"{re.escape(parser.start)}(.*?)(?:{end})", answer, re.DOTALL)
    return [call for text in texts for call in _read(text, parser, schemas)]


def _read(text: str, parser: Parser, schemas: Sequence[Mapping[str, Any]]) -> list[ToolCall]:
    try:
        found = parser.parse(text, list(schemas))
    except Exception as error:  # noqa: BLE001  (a parser meets every text that a model can write)
        return [ToolCall(fault=f"the call cannot be read: {one_line(message_of(error), 200)}")]
    return [_call(one) for one in (found if isinstance(found, list) and found else [found])]


def _call(found: Any) -> ToolCall:
    call: Mapping[str, Any] = found if isinstance(found, Mapping) else {}
    name, arguments = call.get("name"), call.get("arguments", call.get("parameters", {}))
    if isinstance(name, str) and isinstance(arguments, Mapping):
        return ToolCall(name, arguments)
    return ToolCall(fault="the call cannot be read: wanted a name and arguments as an object")
