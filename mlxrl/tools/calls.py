"""Functions as tools: their schemas, and the calls of a reply, read by mlx-lm's parser of the model's own format."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, get_type_hints

import msgspec

from mlxrl.checked import SettingError, checked_value, refuse_unknown
from mlxrl.errors import UserError, exception_line, message_of, one_line
from mlxrl.files import is_deep, strict_json
from mlxrl.messages import arguments_of


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

    def readable(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call, with what texts hold where the function takes no text, as 3 for "3"."""
        return {name: _read_texts(value) if self._refuses(name, value) else value for name, value in given.items()}

    def _refuses(self, name: str, value: Any) -> bool:
        try:
            checked_value(self.name, name, self.hints.get(name, Any), _whole(value))
        except SettingError:
            return True
        return False


def tool_of(function: Callable[..., Any]) -> Tool:
    """A function as a tool, with the schema of `transformers.utils.get_json_schema`.

    Its docstring says what it does and, in a section `Args:` of Google's style, what each parameter is. Every parameter
    has a type hint: str, int, float, bool, list, tuple and dict with or without the types of their items, unions of
    them, Literal and Enum. It may be async, an object that can be called, or a partial, whose own arguments the model
    is not told of.

    Raises:
        ToolError: the function cannot be described to a model.
    """
    name = _name_of(function)
    where = f"tools: {name or repr(function)}"
    if not callable(function) or not name.isidentifier():
        raise ToolError(where, f"wanted a function with a name, got {type(function).__name__}")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # as mlx-lm does: it advises to install PyTorch
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        described = _described(function, name)
        parameters = inspect.signature(described).parameters
        for one in parameters.values():
            if one.kind not in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY):
                got = f"{one.kind.description} {one.name!r}"
                raise ToolError(where, f"wanted parameters that are given by name, got {got}")
        schema, hints = get_json_schema(described), get_type_hints(described)
        hints = {name: hints[name] for name in parameters}
        msgspec.inspect.multi_type_info(hints.values())  # raises for types that no argument can be converted to
    except ToolError:
        raise
    except Exception as error:  # a hint is an expression of the user's, and may raise anything
        raise ToolError(where, f"cannot be described to a model: {exception_line(error)}") from error
    return Tool(function, schema, hints)


def _name_of(function: Any) -> str:
    """The name of a function, of what a partial calls, or of an object's class."""
    if isinstance(function, partial):
        return _name_of(function.func)
    return getattr(function, "__name__", "") or (type(function).__name__ if callable(function) else "")


def _described(function: Any, name: str) -> Any:
    """What the schema of a function is read from: itself, or a function that is as a partial or an object is called."""
    if inspect.isroutine(function):
        return function
    inner, given = function, dict[str, Any]()
    while isinstance(inner, partial):
        inner, given = inner.func, {**inner.keywords, **given}
    called: Any = inner if inspect.isroutine(inner) else inner.__call__
    parameters = inspect.signature(function).parameters
    names = [one for one in parameters if one not in given]
    hints = get_type_hints(called)

    def described() -> None: ...

    described.__name__, described.__doc__ = name, inspect.getdoc(called) or inspect.getdoc(inner)
    described.__annotations__ = {one: hints[one] for one in (*names, "return") if one in hints}
    own = [parameters[one].replace(annotation=hints.get(one, inspect.Parameter.empty)) for one in names]
    described.__signature__ = inspect.Signature(own)  # pyright: ignore[reportFunctionMemberAccess]
    return described


def _read_texts(value: Any) -> Any:
    """A value in which texts that are JSON of something else, as "3" or "[1]", are what they hold."""
    if isinstance(value, str):
        try:
            return _whole(strict_json(value))
        except ValueError:
            return value
    if isinstance(value, list):
        return [_read_texts(item) for item in value]
    return {key: _read_texts(item) for key, item in value.items()} if isinstance(value, dict) else value


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
    think_end, think_start: the tags around thinking, in which nothing is a call; empty where there are none.
    """

    start: str
    end: str
    parse: Callable[[str, Any], Any]
    think_end: str = ""
    think_start: str = ""


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
    thinks = getattr(tokenizer, "has_thinking", False)
    tags = [(getattr(tokenizer, name, None) or "") if thinks else "" for name in ("think_end", "think_start")]
    if name is not None:
        try:
            module = import_module(f"mlx_lm.tool_parsers.{name}")
            return Parser(module.tool_call_start, module.tool_call_end, module.parse_tool_call, *tags)
        except (ImportError, AttributeError):
            raise ToolError("tools", "parser", f"wanted a module of mlx_lm.tool_parsers, got {name!r}") from None
    if getattr(tokenizer, "tool_parser", None) is None:
        message = "mlx-lm knows no tool calls of this model; name the format that its prompt asks for"
        raise ToolError("tools", f"{message}, as Tools(functions, parser='json_tools')")
    return Parser(tokenizer.tool_call_start, tokenizer.tool_call_end or "", tokenizer.tool_parser, *tags)


def tool_calls(
    reply: str, parser: Parser, schemas: Sequence[Mapping[str, Any]], thinking: bool = False
) -> list[ToolCall]:
    """The calls of a reply in their order, also those that cannot be read and one without an end.

    thinking: whether the reply begins inside a block of thinking.
    """
    answer = f"{parser.think_start}{reply}" if thinking else reply
    if parser.think_end and parser.think_start:
        block = rf"{re.escape(parser.think_start)}.*?(?:{re.escape(parser.think_end)}|\Z)"
        answer = re.sub(block, "", answer, flags=re.DOTALL)
    answer = answer.rpartition(parser.think_end)[2] if parser.think_end else answer
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
    try:
        name, arguments = call.get("name"), arguments_of(call.get("arguments", call.get("parameters")))
    except UserError:
        name, arguments = None, {}
    if isinstance(name, str) and not is_deep(arguments):
        return ToolCall(name, arguments)
    return ToolCall(fault="the call cannot be read: wanted a name and arguments as an object")
