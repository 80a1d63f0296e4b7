"""Episodes with tools."""

from __future__ import annotations

import asyncio
import functools
import json
import re
import sys
import time
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from helpers import MAZE, MINIMAL, a_policy
from mlxrl import algo, config
from mlxrl.policy.policy import as_policy
from mlxrl.rollout.environment import EpisodeError, prepare
from mlxrl.rollout.sample import sample
from mlxrl.runs.experiment import Experiment
from mlxrl.settings import EpisodeLimits, Sampling
from mlxrl.tools import Tools, parser_of
from mlxrl.train import loop
from mlxrl.train.batch import make_batch
from mlxrl.train.evaluate import evaluate
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


def look(text: str) -> dict[str, Any]:
    """Look something up.

    Args:
        text: what to look up.
    """
    return {"text": text, "found": [1, None]}


def breaks(why: str) -> str:
    """Raise.

    Args:
        why: the reason.
    """
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


def test_settings_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="tools: wanted at least one function, got none"):
        Tools([])
    with pytest.raises(ValueError, match="wanted functions of different names, got add, add"):
        Tools([add, add])
    for seconds in (0, "3", None, 1e9, float("nan")):
        with pytest.raises(ValueError, match="tools: timeout: wanted more than 0 and at most 1000000, got "):
            Tools([add], timeout=seconds)
    with pytest.raises(ValueError, match=r"wanted a list of functions, got a function; write Tools\(\[add\]\)"):
        Tools(add)  # pyright: ignore
    with pytest.raises(ValueError, match=r'role: wanted one of system, .*, got "tol"'):
        Tools([add], role="tol")
    with pytest.raises(ValueError, match=r"parser: wanted a name of mlx_lm.tool_parsers or a Parser, got 5"):
        Tools([add], parser=5)  # pyright: ignore


def environment(*functions: Any, **settings: Any) -> Any:
    return Tools(functions, parser="json_tools", offered=False, **settings)


def played(tools: Tools, reply: str) -> Any:
    tools.prepare(tokenizer())
    return tools().step(reply)


def test_calls_are_answered() -> None:
    tools = environment(add, look)
    got = played(tools, f"{call('add', a=2)}{call('look', text='ü')}")
    assert [dict(message) for message in got.observation] == [
        {"role": "tool", "name": "add", "content": "3"},
        {"role": "tool", "name": "look", "content": '{"text": "ü", "found": [1, null]}'},
    ]
    assert (got.done, got.invalid, got.reward) == (False, False, 0.0)
    assert played(tools, "It is 3.").done
    assert tools.counts == {"answered": 2}


@pytest.mark.parametrize(
    ("reply", "content", "outcome", "invalid"),
    [
        ("<tool_call>add(2)</tool_call>", "error: the call cannot be read: Expecting value", "malformed", True),
        (call("sub", a=2), "error: unknown function 'sub'; there are add, breaks, leaves, ", "unknown", True),
        (call("\ud800"), "error: unknown function '\\ud800'; there are", "unknown", True),
        (call("add", a="x"), 'error: add: a: wanted a whole number, got "x"', "arguments", True),
        (call("breaks", why="no disk"), "error: no disk", "raised", False),
        (call("leaves"), "error: gone", "raised", False),
        (call("stops"), "error: KeyboardInterrupt", "raised", False),
        (call("mutters"), "error: Mute", "raised", False),
        (call("halves"), "a?", "answered", False),
        (call("breaks", why="\ud800"), "error: ?", "raised", False),
        (call("sleeps"), "error: sleeps: no answer in 0.05 s", "late", False),
        ('<tool_call>{"name": "halves", "arguments": null}</tool_call>', "a?", "answered", False),
        ('<tool_call>{"name": "halves"}</tool_call>', "a?", "answered", False),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 2}"}</tool_call>', "3", "answered", False),
        (
            '<tool_call>{"name": "add", "arguments": "[2]"}</tool_call>',
            "error: the call cannot be read",
            "malformed",
            True,
        ),
        (
            f'<tool_call>{{"name": "add", "arguments": {{"a": {"[" * 200}{"]" * 200}}}}}</tool_call>',
            "error: the call",
            "malformed",
            True,
        ),
        (call("add", a="1.5"), "error: add: a: wanted a whole number, got 1.5", "arguments", True),
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


def many(count: int, share: float, exact: bool, sizes: list[int], title: str) -> list[Any]:
    """Return them.

    Args:
        count: a number.
        share: a number.
        exact: whether.
        sizes: numbers.
        title: a text.
    """
    return [count, share, exact, sizes, title]


def test_numbers_as_texts_are_converted_and_counted() -> None:
    tools = environment(many)
    got = played(tools, call("many", count="3", share=" 1.5", exact="true", sizes=["1", 2], title="4"))
    assert got.observation[0]["content"] == '[3, 1.5, true, [1, 2], "4"]'
    assert tools.counts == {"answered": 1, "converted": 1}
    played(tools, call("many", count=3, share=1.5, exact=True, sizes=[], title="4"))
    assert tools.counts == {"answered": 2, "converted": 1}
    assert played(tools, call("many", count="NaN", share=1, exact=True, sizes=[], title="")).invalid


class Shop:
    """Knows prices."""

    def __init__(self, prices: dict[str, float]) -> None:
        self.prices = prices

    def __call__(self, thing: str) -> float:
        """Say what something costs.

        Args:
            thing: its name.
        """
        return self.prices[thing]


async def fetch(page: str, wait: float = 0.0) -> str:
    """Fetch a page.

    Args:
        page: its name.
        wait: seconds before.
    """
    await asyncio.sleep(wait)
    return page * 2


@functools.wraps(fetch)
def wrapped(*arguments: Any, **named: Any) -> Any:
    return fetch(*arguments, **named)


def test_tools_may_be_objects_partials_and_async() -> None:
    """A partial's own arguments are not described to the model."""
    wrapped.__name__ = "wrapped"
    quick = functools.partial(fetch, wait=0.01)
    for function, name, given, answer in (
        (Shop({"tea": 2.5}), "Shop", {"thing": "tea"}, "2.5"),
        (Shop({"tea": 2.5}).__call__, "__call__", {"thing": "tea"}, "2.5"),
        (fetch, "fetch", {"page": "a"}, "aa"), (quick, "fetch", {"page": "a"}, "aa"),
        (wrapped, "wrapped", {"page": "a"}, "aa"),
        (functools.partial(Shop({"tea": 2.5}), thing="tea"), "Shop", {}, "2.5"),
    ):  # fmt: skip
        tools = environment(function)
        assert played(tools, call(name, **given)).observation[0]["content"] == answer
        assert tools.counts == {"answered": 1}
    schema = environment(quick).schemas[0]["function"]
    assert (schema["description"], schema["parameters"]["required"]) == ("Fetch a page.", ["page"])
    assert list(schema["parameters"]["properties"]) == ["page"]
    late = environment(fetch, timeout=0.05)
    got = played(late, call("fetch", page="a", wait=60))
    assert (got.observation[0]["content"], got.fault) == (
        "error: fetch: no answer in 0.05 s",
        "fetch: no answer in 0.05 s",
    )


def test_what_a_tool_raises_is_a_fault_with_its_line() -> None:
    fault = played(environment(add, breaks), f"{call('add', a=2)}{call('breaks', why='no disk')}").fault
    assert re.fullmatch(r"breaks: RuntimeError: no disk \(tests/test_tools.py, line \d+\)", fault)
    assert played(environment(add), call("sub")).fault == ""  # that is the model's


def test_nothing_in_a_block_of_thinking_is_a_call() -> None:
    drafted, made = call("add", a=1), call("add", a=2)
    for reply, thinking, answers in (
        (f"hm {drafted}</think>no", True, []), (f"hm {drafted}", True, []), (f"{made}<think>{drafted}", False, ["3"]),
        (f"<think>{drafted}</think>{made}", False, ["3"]), (f"{drafted}</think>{made}", True, ["3"]),
        (made, False, ["3"]),
    ):  # fmt: skip
        tools = environment(add)
        tools.prepare(tokenizer())
        episode = tools()
        episode.thinking = thinking
        assert [message["content"] for message in episode.step(reply).observation] == answers


@pytest.mark.parametrize("parallel", [False, True])
def test_a_call_that_is_drafted_while_thinking_is_neither_a_stop_nor_made(parallel: bool) -> None:
    """The template opens the block, in place of a line's first letter; one that a cut leaves open holds no call."""
    p, said = as_policy(dense(), tokenizer(), lora=None), f"hm {call('add', a=1)} no</think>{call('add', a=2)}"
    for line, most, text in ((said, 150, said), (said, 60, said[:60])):
        tools = environment(add, parallel=parallel)
        (group,) = sample(
            p, [Task("2+1?")], group_size=1, environment=tools, sampling=Sampling(max_tokens=most), max_rows=1,
            limits=EpisodeLimits(max_turns=2), processors=[scripted(p.tokenizer, [f"-{line}", "-3"])],
        )  # fmt: skip
        assert group[0].turns[0].text == text.replace("</think>", "")
        assert (len(group[0].turns), tools.counts["answered"]) == ((2, 1) if line == text else (1, 0))


def test_one_call_that_is_wrong_makes_the_turn_invalid_and_the_others_are_answered() -> None:
    got = played(environment(add), f"{call('add', a=2)}{call('sub')}")
    assert [message["content"][:6] for message in got.observation] == ["3", "error:"]
    assert got.invalid


def test_a_model_without_a_format_or_a_template_without_tools_is_refused() -> None:
    plain = tokenizer()
    with pytest.raises(ValueError, match="mlx-lm knows no tool calls of this model; name the format"):
        Tools([add]).prepare(plain)
    with pytest.raises(ValueError, match="the chat template of this model does not describe tools"):
        Tools([add], parser="json_tools").prepare(plain)
    for name in ("jsn", "__init__", "", "a b"):
        with pytest.raises(ValueError, match=f"wanted a module of mlx_lm.tool_parsers, got '{name}'"):
            Tools([add], parser=name).prepare(plain)
    with pytest.raises(ValueError, match=r"call prepare\(tokenizer\) first"):
        Tools([add])()


def test_tools_are_prepared_anew_for_every_model() -> None:
    tools, other = Tools([add]), offering()
    tools.prepare(offering())
    assert tools().stop == ("</tool_call>",)
    other._tool_call_end = "</call>"
    tools.prepare(other)
    assert tools().stop == ("</call>",)


def test_a_factory_that_a_config_names_is_prepared(tmp_path: Any) -> None:
    (tmp_path / "train.jsonl").write_text('{"question": "2+3?", "answer": "5"}\n')
    (tmp_path / "test.jsonl").write_text('{"question": "2+4?", "answer": "6"}\n')
    (tmp_path / "run.toml").write_text(MINIMAL)
    named = [f"environment.factory={MAZE.with_name('calculator.py')}:calculator", "rollout.tasks_per_step=1"]
    made = Experiment.of(*config.read(tmp_path / "run.toml", named)).environment
    with pytest.raises(config.ConfigError, match="wanted at least one function, got none; grpo learns from rewards"):
        Experiment.of(*config.read(tmp_path / "run.toml", [*named, "reward.functions=[]"]))
    with pytest.raises(ValueError, match="wanted at least one function, got none; grpo learns from rewards"):
        next(loop.run(a_policy(), [Task("x")], algo.grpo(), steps=1, environment=Tools([add])))
    with pytest.raises(ValueError, match="evaluate: reward: wanted at least one function, got none"):
        evaluate(a_policy(), [Task("x")], environment=Tools([add]))
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
    """A tokenizer whose template describes tools and knows their answers."""
    made = tokenizer()
    made._tokenizer.chat_template = "{% for t in tools or [] %}<system>{{ t['function']['name'] }}<end>{% endfor %}" + (
        TEMPLATE.replace("<think>{% endif %}{% endif %}", "{% endif %}{% endif %}")
    )
    json_tools = parser_of(None, "json_tools")
    made._tool_parser, made._tool_call_start, made._tool_call_end = json_tools.parse, json_tools.start, json_tools.end
    return made


def scripted(tokenizer: Any, lines: list[str]) -> Any:
    """A processor that makes the model say a line in each turn, then its end."""
    turn = tokenizer.encode("<assistant>", add_special_tokens=False)[0]

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        ids = tokens.tolist()
        places = [place for place, token in enumerate(ids) if token == turn]
        line = tokenizer.encode(lines[len(places) - 1], add_special_tokens=False)
        written = len(ids) - places[-1] - 1
        wanted = line[written] if written < len(line) else tokenizer.eos_token_id
        return mx.where(mx.arange(logits.shape[-1])[None] == wanted, 0.0, -1e9)

    return process


def test_an_episode_with_tools() -> None:
    """The model calls, reads 5, and answers. What the tool answered is read, not learned."""
    p = as_policy(dense(), offering(), lora=None)
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
    trained = make_batch([scored], algo.grpo())
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
