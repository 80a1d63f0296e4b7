"""Answers of the data as trajectories: which tokens are read and which are learned."""

from __future__ import annotations

from typing import Any

import pytest

from mlxrl.data import tasks
from mlxrl.errors import UserError
from mlxrl.rollout.demonstrations import Rules, asked, demonstrable, demonstration
from mlxrl.types import Task
from models import tokenizer

PLAIN = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<eos>{% endfor %}"
PLAIN += "{% if add_generation_prompt %}<assistant>{% endif %}"
"""A template that writes a conversation by appending to it."""
STRIPPING = (
    "{% for m in messages %}<{{ m['role'] }}>"
    "{{ m['content'] if loop.last or m['role'] != 'assistant' else m['content'].split('</think>')[-1] }}<eos>\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""A template that leaves the thinking of earlier turns out."""
CALLING = (
    "{% if tools %}<system>{{ tools | map(attribute='name') | join(',') }}<eos>{% endif %}"
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}[{{ c.function.name }} {{ c.function.arguments.x }}]{% endfor %}"
    "<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def with_template(template: str | None) -> Any:
    made = tokenizer()
    made._tokenizer.chat_template = template
    made.has_chat_template = template is not None
    return made


def pieces(tokens: Any, task: Task, **rules: Any) -> list[tuple[str, str]]:
    """What each turn reads and what of it is learned, as text, special tokens written out."""
    turns = demonstration(tokens, task, Rules(**rules)).turns
    return [(tokens.decode(list(turn.observation)), tokens.decode(list(turn.tokens))) for turn in turns]


def said(*contents: str) -> list[dict[str, Any]]:
    """Messages of user and assistant in turn."""
    return [{"role": ("user", "assistant")[n % 2], "content": content} for n, content in enumerate(contents)]


def chat(*contents: str, **columns: Any) -> Task:
    return Task(tuple(said(*contents)), columns)


def test_a_completion_is_learned_with_the_end_that_the_template_writes():
    one = Task("2+2?", {"completion": "4"})
    assert pieces(with_template(PLAIN), one) == [("<user>2+2?<eos><assistant>", "4<eos>")]


def test_what_the_template_writes_after_the_end_of_an_answer_is_not_learned():
    tokens, one = with_template(PLAIN.replace("<eos>", "<eos>\n")), Task("a", {"completion": "b"})
    assert pieces(tokens, one) == [("<user>a<eos>\n<assistant>", "b<eos>")]


def test_without_a_template_the_end_of_sequence_token_follows():
    one, bare = Task("2+2=", {"completion": "4"}), with_template(None)
    assert pieces(bare, one) == [("2+2=", "4<eos>")]
    ids = Task((20, 21), {"completion": [30, 31]})
    assert demonstration(bare, ids).turns[0].tokens == (30, 31)  # token ids are taken as they are


def test_a_completion_continues_a_begun_answer():
    begun = Task((*said("2+2?"), {"role": "assistant", "content": "It is"}), {"completion": " 4"})
    assert pieces(with_template(PLAIN), begun) == [("<user>2+2?<eos><assistant>It is", " 4<eos>")]


def test_all_turns_of_a_conversation_or_the_last():
    tokens, one = with_template(PLAIN), chat("a", "b", "c", "d", "e")
    assert pieces(tokens, one) == [("<user>a<eos><assistant>", "b<eos>"), ("<user>c<eos><assistant>", "d<eos>")]
    assert pieces(tokens, one, turns="last") == [("<user>a<eos><assistant>b<eos><user>c<eos><assistant>", "d<eos>")]


def test_the_ids_are_those_of_the_whole_conversation():
    tokens, one = with_template(PLAIN), chat("ab", "cd", "ef", "gh")
    turns = demonstration(tokens, one).turns
    ids = [token for turn in turns for token in (*turn.observation, *turn.tokens)]
    assert ids == list(tokens.encode(tokens.apply_chat_template(said("ab", "cd", "ef", "gh"), tokenize=False)))
    assert not any(turn.history_rewritten for turn in turns)


def test_a_rewritten_history_begins_a_further_sequence():
    tokens, one = with_template(STRIPPING), chat("a", "<think>t</think>b", "c", "<think>u</think>d")
    assert pieces(tokens, one) == [
        ("<user>a<eos>\n<assistant>", "<think>t</think>b<eos>"),
        ("<user>a<eos>\n<assistant>b<eos>\n<user>c<eos>\n<assistant>", "<think>u</think>d<eos>"),
    ]
    assert [turn.history_rewritten for turn in demonstration(tokens, one).turns] == [False, True]


def test_an_answer_that_the_template_begins_otherwise_is_refused():
    one = Task("a", {"completion": "b"}, "rows.jsonl: line 3")
    with pytest.raises(UserError, match=r"^rows.jsonl: line 3: answer: the chat template begins an answer .*<think>"):
        demonstration(tokenizer(), one)  # its prompts end in <think>, which a message of the assistant has not
    assert pieces(tokenizer(), Task("a", {"completion": "<think>t</think>b"}))[0][0].endswith("<assistant><think>")


def test_the_completion_may_be_messages_with_calls_of_tools():
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": '{"x": 1}'}}]}
    tokens, reply = with_template(CALLING), {"role": "assistant", "content": "it is 7"}
    one = Task("q", {"completion": [call, {"role": "tool", "content": "7"}, reply], "tools": [{"name": "add"}]})
    assert pieces(tokens, one) == [
        ("<system>add<eos><user>q<eos><assistant>", "[add 1]<eos>"),
        ("<tool>7<eos><assistant>", "it is 7<eos>"),
    ]
    rows = [{"prompt": [*said("q"), call]}]
    assert pieces(tokens, tasks(rows, whole=True)[0])[0][1] == "[add 1]<eos>"
    with pytest.raises(UserError, match="wanted the answers of its tool_calls"):
        tasks(rows)


def test_a_text_is_learned_but_for_its_first_token():
    (one,) = tasks([{"text": "abc"}], prompt="text")
    assert pieces(with_template(PLAIN), one) == [("a", "bc<eos>")]


def test_an_example_without_an_answer_is_refused():
    (one,) = tasks([{"question": "a", "answer": "b"}], prompt="question")
    with pytest.raises(UserError, match="example 1: no column 'completion', wanted as the answer; there are: quest"):
        demonstration(tokenizer(), one)
    with pytest.raises(UserError, match="wanted one of the assistant's, got none"):
        demonstration(tokenizer(), chat("a"))


def test_what_is_too_long_is_cut_or_left_out_and_counted():
    tokens = with_template(PLAIN)
    some = [Task("q", {"completion": "b" * n}) for n in (1, 4, 9)] + [Task("q" * 9, {"completion": "b"})]
    found = demonstrable(tokens, some, Rules(longest=8))  # <user> q <eos> <assistant> are 4, so 4 are left
    assert [len(task.columns["completion"]) for task in found.tasks] == [1, 4, 9]
    assert found.left_out == 1
    assert found.line == '"q": has more than 8 tokens; 2 of 4 are cut there, and 1 left out'
    cut = demonstration(tokens, some[2], Rules(longest=8))
    assert (cut.stop, cut.turns[0].text, cut.length) == ("length", "bbbb", 4)
    with pytest.raises(UserError, match="no token of an answer is left in any of 1 examples"):
        demonstrable(tokens, some[3:], Rules(longest=8))
    assert demonstrable(tokens, some, Rules()).line == ""


def test_a_turn_after_the_cut_is_not_read():
    one = demonstration(with_template(PLAIN), chat("a", "b", "c", "d"), Rules(longest=8))
    assert [turn.text for turn in one.turns] == ["b"]


def test_a_conversation_is_asked_without_its_last_answer():
    assert [message["content"] for message in asked(chat("a", "b", "c", "d")).messages] == ["a", "b", "c"]
    pair = Task("a", {"completion": "b"})
    assert asked(pair) is pair
