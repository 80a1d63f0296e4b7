"""The tool calls of a reply, as mlx-lm's parser of the model's own format reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True, slots=True)
class Parser:
    """How a model writes calls.

    start, end: what stands around a call; an empty end where everything behind the start is calls.
    parse: (text between them, schemas) -> {"name", "arguments"} or a list of them, or an exception.
    thought: what ends the model's thinking, before which nothing is a call; empty where it does not think.
    """

    start: str
    end: str
    parse: Callable[[str, Any], Any]
    thought: str = ""


@dataclass(frozen=True, slots=True)
class Asked:
    """A call in a reply, or why it is none: `fault`, one line for the model."""

    name: str = ""
    arguments: Mapping[str, Any] | None = None
    fault: str = ""


def parser_of(tokenizer: Any, name: str | None = None) -> Parser:
    """The parser of mlx-lm for a tokenizer's model, or the one with a name of `mlx_lm.tool_parsers`.

    Raises:
        ValueError: mlx-lm knows none for the model, or none of that name.
    """
    thought = (getattr(tokenizer, "think_end", None) or "") if getattr(tokenizer, "has_thinking", False) else ""
    if name is not None:
        try:
            module = import_module(f"mlx_lm.tool_parsers.{name}")
            return Parser(module.tool_call_start, module.tool_call_end, module.parse_tool_call, thought)
        except (ImportError, AttributeError):
            raise ValueError(f"tools: parser: wanted a module of mlx_lm.tool_parsers, got {name!r}") from None
    if getattr(tokenizer, "tool_parser", None) is None:
        raise ValueError(
            "tools: mlx-lm knows no tool calls of this model; name the format that its prompt asks for, as "
            "Tools(functions, parser='json_tools')"
        )
    return Parser(tokenizer.tool_call_start, tokenizer.tool_call_end or "", tokenizer.tool_parser, thought)


def calls_in(reply: str, parser: Parser, schemas: Sequence[Mapping[str, Any]]) -> list[Asked]:
    """The calls of a reply in their order, those that cannot be read too."""
    said = reply.rpartition(parser.thought)[2] if parser.thought else reply
    return [call for text in between(said, parser.start, parser.end) for call in _read(text, parser, schemas)]


def between(text: str, start: str, end: str) -> Iterator[str]:
    """What stands between the marks, behind the last start also where nothing ends it."""
    place = text.find(start)
    while place >= 0:
        begin = place + len(start)
        close = text.find(end, begin) if end else -1
        if close < 0:
            yield text[begin:]
            return
        yield text[begin:close]
        place = text.find(start, close + len(end))


def _read(text: str, parser: Parser, schemas: Sequence[Mapping[str, Any]]) -> list[Asked]:
    try:
        found = parser.parse(text, list(schemas))
    except Exception as error:  # noqa: BLE001  (a parser meets every text that a model can write)
        return [Asked(fault=f"the call cannot be read: {_line(error)}")]
    calls = found if isinstance(found, list) and found else [found]
    return [_checked(call) for call in calls]


def _checked(call: Any) -> Asked:
    name = call.get("name") if isinstance(call, Mapping) else None
    arguments = call.get("arguments", call.get("parameters", {})) if isinstance(call, Mapping) else None
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        return Asked(fault="the call cannot be read: wanted a name and arguments as an object")
    return Asked(name, arguments)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
