"""The calls in a reply, in the formats of models."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlxrl.tools import Parser, parser_of
from mlxrl.tools.calls import tool_calls


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


JSON = parser_of(None, "json_tools")
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
SCHEMAS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("add", "look")]


@pytest.mark.parametrize(
    ("reply", "wanted"),
    [
        ("five", []),
        (f"I add. {call('add', a=2)}", [("add", {"a": 2})]),
        (f"{call('add', a=2)} and\n{call('look')}", [("add", {"a": 2}), ("look", {})]),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}', [("add", {"a": 1})]),  # no end, but whole
        ('<tool_call>{"name": "add", "argum', ["the call cannot be read"]),
        ("<tool_call>[1]</tool_call>", ["the call cannot be read: wanted a name"]),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', ["the call cannot be read: wanted a name"]),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', ["the call cannot be read: wanted a name"]),
        ("<tool_call></tool_call>", ["the call cannot be read"]),
        ('<tool_call>[{"name": "add", "arguments": {}}, 5]</tool_call>', [("add", {}), "the call cannot"]),
        ('<tool_call>{"name": "add", "parameters": {"a": 1}}</tool_call>', [("add", {"a": 1})]),
        (f"{call('add')[:-12]}{call('look')}", ["the call cannot be read: Extra data"]),
    ],
)
def test_calls_are_found(reply: str, wanted: list[Any]) -> None:
    found = tool_calls(reply, JSON, [])
    assert len(found) == len(wanted)
    for one, want in zip(found, wanted, strict=True):
        if isinstance(want, str):
            assert one.fault.startswith(want)
        else:
            assert (one.name, one.arguments, one.fault) == (*want, "")


def test_what_is_thought_is_no_call() -> None:
    thinks = Parser(JSON.start, JSON.end, JSON.parse, "</think>")
    assert [one.name for one in tool_calls(f"{call('look')}</think>{call('add')}", thinks, [])] == ["add"]
    assert tool_calls(f"{call('look')}</think>five", thinks, []) == []


@pytest.mark.parametrize(
    ("name", "reply"),
    [
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 2}look[ARGS]{"b": 1}'),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
         '{"a": 2}<|tool_call_end|><|tool_call_begin|>functions.look:1<|tool_call_argument_begin|>{"b": 1}'
         "<|tool_call_end|><|tool_calls_section_end|>"),
        ("pythonic", "<|tool_call_start|>[add(a=2), look(b=1)]<|tool_call_end|>"),
        ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n</function>\n</tool_call>\n"
         "<tool_call>\n<function=look>\n<parameter=b>\n1\n</parameter>\n</function>\n</tool_call>"),
    ],
)  # fmt: skip
def test_the_formats_of_other_models(name: str, reply: str) -> None:
    found = tool_calls(reply, parser_of(None, name), SCHEMAS)
    assert [one.name for one in found] == ["add", "look"]
    assert found[0].arguments == {"a": 2}
