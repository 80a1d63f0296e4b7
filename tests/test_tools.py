"""Functions as tools: schemas, calls, episodes."""

from __future__ import annotations

import json
import sys
import time
from typing import Any, Literal, Optional

import mlx.core as mx
import numpy as np
import pytest
from helpers import MINIMAL, a_policy

from mlxrl import algo, config
from mlxrl.policy.load import policy
from mlxrl.rollout.environment import EpisodeError, prepare
from mlxrl.rollout.sample import sample
from mlxrl.settings import Sampling
from mlxrl.tools import Parser, Tools, parser_of, tool_of
from mlxrl.tools.calls import calls_in
from mlxrl.train import loop
from mlxrl.train.evaluate import evaluate
from mlxrl.train.pack import pack
from mlxrl.types import Task
from models import TEMPLATE, dense, tokenizer


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: the first,
            which comes first.
        b: the second.
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
    """Look something up."""
    return {"text": text, "kind": kind, "share": share, "deep": deep, "tags": tags, "options": options}


def breaks(why: str) -> str:
    """Raise."""
    raise RuntimeError(why)


def leaves() -> None:
    """Exit."""
    sys.exit("gone")


def halves() -> str:
    """Return half a character."""
    return "a\ud800"


def stops() -> None:
    """Raise what ends a process."""
    raise KeyboardInterrupt


class Mute(Exception):
    def __str__(self) -> str:
        raise SystemExit


def mutters() -> None:
    """Raise what cannot be shown."""
    raise Mute


def sleeps() -> str:
    """Take long."""
    time.sleep(5)
    return "late"


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


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
        },
    }
    assert tool_of(look).schema["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "kind": {"type": "string", "enum": ["short", "long"]},
            "share": {"type": "number"},
            "deep": {"type": "boolean"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "options": {"type": "object", "additionalProperties": {"type": "integer"}},
        },
        "required": ["text", "kind", "share"],
    }


def no_docstring(a: int) -> int:
    return a


def no_hint(a) -> None:
    """Say nothing of a."""


def many(*rest: int) -> None:
    """Take any number."""


def by_place(a: int, /) -> None:
    """Take one by its place."""


def strange(a: set[int]) -> None:
    """Take a set."""


def either(a: int | str) -> None:
    """Take one of two."""


def unknown_type(a: Nowhere) -> None:  # noqa: F821
    """Take what is not defined."""


async def later(a: int) -> None:
    """Come back later."""


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (no_docstring, "tools: no_docstring: wanted a docstring, which tells the model what it does, got none"),
        (no_hint, "tools: no_hint: a: wanted a type hint, one of str, int, float"),
        (many, r"tools: many: wanted parameters that are given by name, got variadic positional 'rest'"),
        (by_place, "tools: by_place: wanted parameters that are given by name, got positional-only 'a'"),
        (strange, r"tools: strange: a: wanted a type hint of str, .*, got set\[int\]"),
        (either, r"tools: either: a: wanted a type hint of str, .*, got int \| str"),
        (unknown_type, "tools: unknown_type: its type hints cannot be read: name 'Nowhere' is not defined"),
        (later, r"tools: later: wanted a plain function with a name, got a coroutine function \(async def\)"),
        (lambda: 1, "wanted a plain function with a name"),
        (3, "tools: 3: wanted a plain function with a name, got int"),
    ],
)
def test_a_signature_that_cannot_be_told_is_refused(function: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as found:
        Tools([add, function])
    assert "\n" not in str(found.value)


def test_settings_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="tools: wanted at least one function, got none"):
        Tools([])
    with pytest.raises(ValueError, match="wanted functions of different names, got add, add"):
        Tools([add, add])
    for seconds in (0, "3", None, 1e9, float("nan")):
        with pytest.raises(ValueError, match="timeout: wanted more than 0 seconds"):
            Tools([add], timeout=seconds)
    with pytest.raises(ValueError, match=r"wanted a list of functions, got a function; write Tools\(\[add\]\)"):
        Tools(add)  # pyright: ignore
    with pytest.raises(ValueError, match=r"parser: wanted a name of mlx_lm.tool_parsers or a Parser, got 5"):
        Tools([add], parser=5)  # pyright: ignore


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"text": "x", "kind": "long", "share": 1}, {"text": "x", "kind": "long", "share": 1.0}),
        ({"text": "x", "kind": "long", "share": 0.5, "deep": None}, {"deep": None}),
        ({"text": "x", "kind": "long", "share": 0.5, "tags": ["a"]}, {"tags": ["a"]}),
        ({"text": "x", "kind": "long", "share": 0.5, "options": {"a": 2.0}}, {"options": {"a": 2}}),
        ({"text": 3, "kind": "long", "share": 0.5}, "look: text: wanted a string, got 3"),
        ({"text": "x", "kind": "wide", "share": 0.5}, "look: kind: wanted one of 'short', 'long', got 'wide'"),
        ({"text": "x", "kind": "long", "share": True}, "look: share: wanted a number, got True"),
        ({"text": "x", "kind": "long", "share": 10**400}, "look: share: wanted a number, got 1"),
        ({"text": "x", "kind": "long", "share": 1, "deep": "no"}, "look: deep: wanted a boolean, got 'no'"),
        ({"text": "x", "kind": "long", "share": 1, "tags": "a"}, "look: tags: wanted an array, got 'a'"),
        ({"text": "x", "kind": "long", "share": 1, "options": [1]}, "look: options: wanted an object, got [1]"),
        ({"text": "x", "kind": "long"}, "look: missing argument 'share'; it takes text, kind, share, deep"),
        ({"txt": "x"}, "look: unknown argument 'txt'; it takes text, kind"),
    ],
)
def test_arguments_are_checked(given: dict[str, Any], wanted: Any) -> None:
    if isinstance(wanted, dict):
        got = tool_of(look).arguments(given)
        assert {name: got[name] for name in wanted} == wanted
        assert all(type(got[name]) is type(value) for name, value in wanted.items())
    else:
        with pytest.raises(ValueError) as found:
            tool_of(look).arguments(given)
        assert str(found.value).startswith(wanted)


def test_integers_are_whole_numbers() -> None:
    assert tool_of(add).arguments({"a": 3.0}) == {"a": 3}
    for wrong in (2.5, float("inf"), float("nan"), "3", True):
        with pytest.raises(ValueError, match="add: a: wanted an integer"):
            tool_of(add).arguments({"a": wrong})


JSON = parser_of(None, "json_tools")


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
    ],
)
def test_calls_are_found(reply: str, wanted: list[Any]) -> None:
    found = calls_in(reply, JSON, [])
    assert len(found) == len(wanted)
    for one, want in zip(found, wanted, strict=True):
        if isinstance(want, str):
            assert one.fault.startswith(want)
        else:
            assert (one.name, one.arguments, one.fault) == (*want, "")


def test_what_is_thought_is_no_call() -> None:
    thinks = Parser(JSON.start, JSON.end, JSON.parse, "</think>")
    assert [one.name for one in calls_in(f"{call('look')}</think>{call('add')}", thinks, [])] == ["add"]
    assert calls_in(f"{call('look')}</think>five", thinks, []) == []


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
    found = calls_in(reply, parser_of(None, name), [tool_of(add).schema])
    assert [one.name for one in found] == ["add", "look"]
    assert found[0].arguments == {"a": 2}


def environment(*functions: Any, **settings: Any) -> Any:
    return Tools(functions, parser="json_tools", offered=False, **settings)


def played(tools: Tools, reply: str) -> Any:
    tools.prepare(tokenizer())
    return tools().step(reply)


def test_calls_are_answered() -> None:
    tools = environment(add, look)
    got = played(tools, f"{call('add', a=2)}{call('look', text='ü', kind='long', share=1)}")
    assert [dict(message) for message in got.observation] == [
        {"role": "tool", "name": "add", "content": "3"},
        {"role": "tool", "name": "look", "content": '{"text": "ü", "kind": "long", "share": 1.0, "deep": null, '
         '"tags": null, "options": {}}'},
    ]  # fmt: skip
    assert (got.done, got.invalid, got.reward) == (False, False, 0.0)
    assert played(tools, "It is 3.").done
    assert tools.counts == {"answered": 2}


@pytest.mark.parametrize(
    ("reply", "content", "outcome", "invalid"),
    [
        ("<tool_call>add(2)</tool_call>", "error: the call cannot be read: Expecting value", "malformed", True),
        (call("sub", a=2), "error: unknown function 'sub'; there are add, breaks, leaves, ", "unknown", True),
        (call("\ud800"), "error: unknown function '\\ud800'; there are", "unknown", True),
        (call("add", a="x"), "error: add: a: wanted an integer, got 'x'", "arguments", True),
        (call("breaks", why="no disk"), "error: no disk", "raised", False),
        (call("leaves"), "error: gone", "raised", False),
        (call("stops"), "error: KeyboardInterrupt", "raised", False),
        (call("mutters"), "error: Mute", "raised", False),
        (call("halves"), "a?", "answered", False),
        (call("breaks", why="\ud800"), "error: ?", "raised", False),
        (call("sleeps"), "error: sleeps: no answer in 0.05 s", "late", False),
    ],
)
def test_faults_are_read_by_the_model(reply: str, content: str, outcome: str, invalid: bool) -> None:
    tools = environment(add, breaks, leaves, sleeps, halves, stops, mutters, timeout=0.05)
    got = played(tools, reply)
    (message,) = got.observation
    assert "\ud800" not in message["name"] + message["content"]
    assert message["content"].startswith(content)
    assert (got.invalid, got.done) == (invalid, False)
    assert tools.counts == {outcome: 1}


def test_one_call_that_is_wrong_makes_the_turn_invalid_and_the_others_are_answered() -> None:
    got = played(environment(add), f"{call('add', a=2)}{call('sub')}")
    assert [message["content"][:6] for message in got.observation] == ["3", "error:"]
    assert got.invalid


def test_a_model_without_a_format_or_a_template_without_tools_is_refused() -> None:
    plain = tokenizer()
    with pytest.raises(ValueError, match="mlx-lm knows no tool calls of this model; name the format"):
        Tools([add]).prepare(plain)
    with pytest.raises(ValueError, match="the chat template of this model does not tell it of tools"):
        Tools([add], parser="json_tools").prepare(plain)
    for name in ("jsn", "__init__", "", "a b"):
        with pytest.raises(ValueError, match=f"wanted a module of mlx_lm.tool_parsers, got '{name}'"):
            Tools([add], parser=name).prepare(plain)
    with pytest.raises(ValueError, match=r"call prepare\(tokenizer\) first"):
        Tools([add])()


def test_a_factory_that_a_config_names_is_prepared(tmp_path: Any) -> None:
    (tmp_path / "train.jsonl").write_text('{"question": "2+3?", "answer": "5"}\n')
    (tmp_path / "test.jsonl").write_text('{"question": "2+4?", "answer": "6"}\n')
    (tmp_path / "run.toml").write_text(MINIMAL)
    named = "environment.factory=mlxrl.environments.calculator:calculator"
    settings = config.read(tmp_path / "run.toml", [named])
    with pytest.raises(config.ConfigError, match=r"grpo learns from rewards, and \S+:calculator gives none"):
        config.read(tmp_path / "run.toml", [named, "reward.functions=[]"])
    with pytest.raises(ValueError, match="grpo learns from rewards; wanted at least one function, got none"):
        next(loop.run(a_policy(), [Task("x")], algo.grpo(), steps=1, environment=Tools([add])))
    with pytest.raises(ValueError, match="evaluate: reward: wanted at least one function, got none"):
        evaluate(a_policy(), [Task("x")], environment=Tools([add]))
    made = config.environment(settings)
    assert made is not None
    with pytest.raises(EpisodeError, match="environment: tools: mlx-lm knows no tool calls of this model"):
        prepare(made, tokenizer())
    prepare(made, offering())
    assert made().stop == ("</tool_call>",)


def test_stops() -> None:
    closing, several = environment(add), environment(add, parallel=True)
    for tools in (closing, several):
        tools.prepare(tokenizer())
    assert (closing().stop, several().stop) == (("</tool_call>",), ())
    rest = Tools([add], parser="mistral", offered=False)
    rest.prepare(tokenizer())
    assert rest().stop == ()


def offering() -> Any:
    """A tokenizer whose template tells of tools and knows their answers."""
    made = tokenizer()
    made._tokenizer.chat_template = "{% for t in tools or [] %}<system>{{ t['function']['name'] }}<end>{% endfor %}" + (
        TEMPLATE.replace("<think>{% endif %}{% endif %}", "{% endif %}{% endif %}")
    )
    made._tool_parser, made._tool_call_start, made._tool_call_end = JSON.parse, JSON.start, JSON.end
    return made


def scripted(tokenizer: Any, lines: list[str]) -> Any:
    """A processor that makes the model say a line in each turn, then its end."""
    turn = tokenizer.encode("<assistant>", add_special_tokens=False)[0]

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        ids = tokens.tolist()
        places = [place for place, token in enumerate(ids) if token == turn]
        line = tokenizer.encode(lines[len(places) - 1], add_special_tokens=False)
        said = len(ids) - places[-1] - 1
        wanted = line[said] if said < len(line) else tokenizer.eos_token_id
        return mx.where(mx.arange(logits.shape[-1])[None] == wanted, 0.0, -1e9)

    return process


def test_an_episode_with_tools() -> None:
    """The model calls, reads 5, and answers. What the tool said is read, not learned."""
    p = policy(dense(), offering(), lora=None)
    lines = [call("add", a=2, b=3), "It is 5."]
    tools = Tools([add])
    (group,) = sample(
        p, [Task("2+3?")], group_size=2, environment=tools, sampling=Sampling(max_tokens=120),
        processors=[scripted(p.tokenizer, lines)],
    )  # fmt: skip
    first = group[0]
    assert p.tokenizer.decode(list(first.prompt)) == "<system>add<end><user>2+3?<end><assistant>"
    assert [turn.text for turn in first.turns] == lines
    assert p.tokenizer.decode(list(first.turns[1].observation)).endswith("<tool>5<end><assistant>")
    assert (first.stop, first.turns[0].invalid) == ("done", False)
    assert tools.counts == {"answered": 2}
    scored = tuple(
        type(one)(one.task, one.turns, reward, one.stop, one.sampling)
        for one, reward in zip(group, (1.0, 0.0), strict=True)
    )
    trained = pack([scored], algo.grpo())
    learned = sum(float(m.mask.sum()) for m in trained)
    assert learned == sum(len(turn.tokens) for one in group for turn in one.turns)
    m = trained.micro_batches[0]
    row = np.array(m.mask[0])
    tokens = np.array(m.tokens[0])
    answer = p.tokenizer.decode(tokens[row == 0].tolist())
    assert "<tool>5" in answer
    assert "It is" not in answer


def test_a_rollout_asks_a_factory_to_look_at_its_tokenizer() -> None:
    seen: list[Any] = []

    class Factory(Tools):
        def prepare(self, tokenizer: Any) -> None:
            seen.append(tokenizer)
            super().prepare(tokenizer)

    p = a_policy()
    sample(p, [Task("x")], group_size=1, environment=Factory([add], parser="json_tools", offered=False))
    assert seen == [p.tokenizer]
