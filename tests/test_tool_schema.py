"""Functions as tools: their schemas, and the arguments of calls."""

from __future__ import annotations

import enum
import subprocess
import sys
from typing import Any, Literal, Optional

import pytest

from mlxrl.checked import SettingError
from mlxrl.tools import ToolError, Tools, tool_of


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: the first,
            which comes first.
        b: the second.

    Returns:
        their sum.
    """
    return a + b


def look(
    text: str,
    kind: Literal["short", "long"],
    share: float,
    deep: Optional[bool] = None,  # noqa: UP045
    tags: list[str] | None = None,
    options: dict[str, int] = {},  # noqa: B006
) -> dict[str, Any]:
    """Look something up.

    Args:
        text: what to look up
        kind: how
        share: of it
        deep: whether
        tags: some
        options: more
    """
    return {"text": text, "kind": kind, "share": share, "deep": deep, "tags": tags, "options": options}


def test_a_schema_is_that_of_the_signature() -> None:
    assert tool_of(add).schema == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "the first, which comes first."},
                    "b": {"type": "integer", "description": "the second."},
                },
                "required": ["a"],
            },
            "return": {"type": "integer", "description": "their sum."},
        },
    }
    assert tool_of(look).schema["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "text": {"type": "string", "description": "what to look up"},
            "kind": {"type": "string", "enum": ["short", "long"], "description": "how"},
            "share": {"type": "number", "description": "of it"},
            "deep": {"type": "boolean", "nullable": True, "description": "whether"},
            "tags": {"type": "array", "items": {"type": "string"}, "nullable": True, "description": "some"},
            "options": {"type": "object", "additionalProperties": {"type": "integer"}, "description": "more"},
        },
        "required": ["text", "kind", "share"],
    }


def no_docstring(a: int) -> int:
    return a


def no_description(a: int) -> None:
    """Say nothing of a."""


def no_hint(a) -> None:
    """Say no type of a.

    Args:
        a: a
    """


def itself(self, a: int) -> None:
    """Take what a method has.

    Args:
        a: a
    """


def many(*rest: int) -> None:
    """Take any number."""


def by_place(a: int, /) -> None:
    """Take one by its place."""


def strange(a: set[int]) -> None:
    """Take a set.

    Args:
        a: a
    """


def lists(a: list[int] | list[str]) -> None:
    """Take one of two lists.

    Args:
        a: a
    """


def unknown_type(a: Nowhere) -> None:  # noqa: F821
    """Take what is not defined.

    Args:
        a: a
    """


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (no_docstring, r"tools: no_docstring: cannot be described to a model: Docstring\w+: .*it has no docstring!"),
        (no_description, "tools: no_description: cannot be .*the docstring has no description for the argument 'a'"),
        (no_hint, "tools: no_hint: cannot be described .*Argument a is missing a type hint in function no_hint"),
        (itself, "tools: itself: cannot be described to a model: KeyError: 'self'"),
        (many, r"tools: many: wanted parameters that are given by name, got variadic positional 'rest'"),
        (by_place, "tools: by_place: wanted parameters that are given by name, got positional-only 'a'"),
        (strange, r"tools: strange: cannot be described .*Couldn't parse this type hint.*set\[int\]"),
        (lists, r"tools: lists: cannot be described to a model: TypeError: Type unions may not contain more than one"),
        (unknown_type, "tools: unknown_type: cannot be described .*NameError: name 'Nowhere' is not defined"),
        (lambda: 1, "wanted a function with a name"),
        (3, "tools: 3: wanted a function with a name, got int"),
    ],
)
def test_a_function_that_cannot_be_described_is_refused(function: Any, message: str) -> None:
    with pytest.raises(ToolError, match=message) as found:
        Tools([add, function])
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"text": "x", "kind": "long", "share": 1}, {"text": "x", "kind": "long", "share": 1.0}),
        ({"text": "x", "kind": "long", "share": 0.5, "deep": None}, {"deep": None}),
        ({"text": "x", "kind": "long", "share": 0.5, "tags": ["a"]}, {"tags": ["a"]}),
        ({"text": "x", "kind": "long", "share": 0.5, "options": {"a": 2.0}}, {"options": {"a": 2}}),
        ({"text": 3, "kind": "long", "share": 0.5}, "look: text: wanted a text in quotes, got 3"),
        ({"text": "x", "kind": "wide", "share": 0.5}, 'look: kind: wanted one of "short", "long", got "wide"'),
        ({"text": "x", "kind": "long", "share": True}, "look: share: wanted a number, got true"),
        ({"text": "x", "kind": "long", "share": 10**400}, "look: share: wanted a number, got 1"),
        ({"text": "x", "kind": "long", "share": 1, "deep": "no"}, 'look: deep: wanted true or false, got "no"'),
        ({"text": "x", "kind": "long", "share": 1, "tags": "a"}, "look: tags: wanted a list, each a text in quotes, "),
        ({"text": "x", "kind": "long", "share": 1, "options": [1]}, "look: options: wanted a table, each a whole "),
        ({"text": "x", "kind": "long"}, "look: missing argument 'share'; it takes text, kind, share, deep"),
        ({"txt": "x"}, "look: unknown key 'txt'; did you mean 'text'?"),
    ],
)
def test_arguments_are_checked(given: dict[str, Any], wanted: Any) -> None:
    if isinstance(wanted, dict):
        got = tool_of(look).arguments(given)
        assert {name: got[name] for name in wanted} == wanted
        assert all(type(got[name]) is type(value) for name, value in wanted.items())
    else:
        with pytest.raises(SettingError) as found:
            tool_of(look).arguments(given)
        assert str(found.value).startswith(wanted)


def test_integers_are_whole_numbers() -> None:
    assert tool_of(add).arguments({"a": 3.0}) == {"a": 3}
    for wrong in (2.5, float("inf"), float("nan"), "3", True):
        with pytest.raises(SettingError, match="add: a: wanted a whole number, got "):
            tool_of(add).arguments({"a": wrong})


class Colour(enum.Enum):
    RED = "red"


def paint(colour: Colour, size: int | str, at: tuple[int, int], rest: Any = None) -> None:
    """Paint.

    Args:
        colour: a colour
        size: a number, or its name
        at: a place
        rest: anything
    """


def test_further_types_are_those_of_the_schema() -> None:
    properties = tool_of(paint).schema["function"]["parameters"]["properties"]
    assert properties["colour"] == {"type": "string", "enum": ["red"], "description": "a colour"}
    assert properties["size"]["type"] == ["integer", "string"]
    got = tool_of(paint).arguments({"colour": "red", "size": "big", "at": [1.0, 2], "rest": {"a": [0.5, 1e300, 2.0]}})
    assert got == {"colour": Colour.RED, "size": "big", "at": (1, 2), "rest": {"a": [0.5, 1e300, 2]}}
    for name, value in (("colour", "blue"), ("size", 1.5), ("at", [1])):
        with pytest.raises(SettingError, match=f"paint: {name}: wanted"):
            tool_of(paint).arguments({"colour": "red", "size": 1, "at": [1, 2], name: value})


def test_a_tool_is_made_without_a_word_on_the_console() -> None:
    """Transformers, which is imported for it, would advise to install PyTorch."""
    code = "from mlxrl.tools import tool_of\ndef f(a: int):\n    '''F.\n\n    Args:\n        a: a\n    '''\ntool_of(f)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("", "")
