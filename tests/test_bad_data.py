"""Data that are refused, through the command: one line that names file and line, exit code 2, nothing left behind."""

import json
import os
import subprocess
import sys

import pytest

from helpers import ROOT
from refusals import BASE, GOOD, refusing, strange


def message(**fields):
    """A line whose prompt is one message."""
    return json.dumps({"question": [fields], "answer": "2"})


def calling(call):
    """A line whose prompt is a call of the assistant and its answer."""
    said = {"role": "assistant", "tool_calls": call}
    return json.dumps({"question": [said, {"role": "tool", "content": "1"}], "answer": "2"})


ANSWER = '{"question": "1", "answer": %s}'
MEGABYTES = "x" * 5_000_000
LINES = {
    "nothing": (b"", "bad.jsonl: wanted at least one example, got none"),
    "blank lines": (b" \t\r\n\n", "bad.jsonl: wanted at least one example, got none"),
    "a NUL": (b"\x00", "bad.jsonl: line 1: wanted JSON, got '\\x00'"),
    "a NUL after a line": (GOOD + "\x00\n", "bad.jsonl: line 2: wanted JSON, got '\\x00'"),
    "a NUL in a text": ('{"question": "a\x00b"}', "line 1: wanted JSON, got '{\"question\": \"a\\x00b\"}' (Invalid"),
    "a mark alone": (b"\xef\xbb\xbf", "bad.jsonl: line 1: wanted JSON, got '\\ufeff'"),
    "UTF-16": (GOOD.encode("utf-16"), "bad.jsonl: line 1: wanted UTF-8, got byte 0xff"),
    "Latin-1": ('{"question": "é"}'.encode("latin-1"), "bad.jsonl: line 1: wanted UTF-8, got byte 0xe9"),
    "gzip": (b"\x1f\x8b\x08\x00abc", "bad.jsonl: line 1: wanted UTF-8, got byte 0x8b"),
    "a table of commas": ("question,answer\n1,2\n", "bad.jsonl: line 1: wanted JSON, got 'question,answer'"),
    "single quotes": ("{'question': '1'}", "bad.jsonl: line 1: wanted JSON, got \"{'question': '1'}\""),
    "a comma too many": ('{"question": "1",}', "bad.jsonl: line 1: wanted JSON, got '{\"question\": \"1\",}'"),
    "a line cut short": (GOOD + GOOD[:-5], "bad.jsonl: line 2: wanted JSON, got '{\"question\": \"1+1=?\","),
    "two on a line": (GOOD.strip() * 2, "line 1: wanted JSON, got '{\"question\": \"1+1=?\", \"answer\": \"2\"}{"),
    "blank lines before": (f"{GOOD}\n\n\nx", "bad.jsonl: line 5: wanted JSON, got 'x'"),
    "over several lines": ('{\n"question": "1"\n}\n', "bad.jsonl: line 1: wanted JSON, got '{'"),
    "a list of all": (f"[\n{GOOD}]\n", "bad.jsonl: line 1: wanted JSON, got '['"),
    "null": ("null", "bad.jsonl: line 1: wanted an object with a column 'question', got nothing (null)"),
    "a text": ('"x"', "bad.jsonl: line 1: wanted an object with a column 'question', got \"x\""),
    "no columns": ("{}", "bad.jsonl: line 1: no column 'question', wanted as the prompt; there are: none"),
    "another case": ('{"Question": "1"}', "there are: Question; did you mean 'Question'?"),
    "a space behind": ('{"question ": "1"}', "there are: question ; did you mean 'question '?"),
    "messages": ('{"messages": [], "answer": "2"}', "there are: messages, answer; did you mean 'messages'?"),
    "a fourth of another type": (GOOD * 3 + '{"question": 1}', "bad.jsonl: line 4: question: wanted a text or a list"),
    "true": ('{"question": true}', "bad.jsonl: line 1: question: wanted a text or a list of messages, got true"),
    "an object": ('{"question": {"a": 1}}', 'question: wanted a text or a list of messages, got {"a": 1}'),
    "white space": ('{"question": " \\u00a0"}', "bad.jsonl: line 1: question: wanted a text, got an empty one"),
    "a list of texts": ('{"question": ["x"]}', "message 1: wanted an object with 'role' and 'content', got \"x\""),
    "half an id": ('{"question": [1.5]}', "message 1: wanted an object with 'role' and 'content', got 1.5"),
    "no role": (message(content="x"), "message 1: role: wanted system, user, assistant or tool, got nothing (null)"),
    "a role of two": (message(role=["user"], content="x"), "role: wanted system, user, assistant or tool, got"),
    "a capital role": (message(role="User", content="x"), "got \"User\"; did you mean 'user'?"),
    "a long role": (message(role=MEGABYTES, content="x"), 'message 1: role: wanted system, user, assistant or tool,'),
    "ShareGPT's names": ('{"question": [{"from": "human", "value": "x"}]}', "message 1: role: wanted system, user"),
    "an image": (message(role="user", content=[{"type": "image_url"}]), "content: part 1: wanted a part with a text"),
    "a part of null": (message(role="user", content=[None]), "content: part 1: wanted a part with a text, got nothing"),
    "empty messages": (message(role="user", content=" "), "question: wanted a message with a text, got only empty"),
    "no parts": (message(role="user", content=[]), "question: wanted a message with a text, got only empty ones"),
    "a call as an object": (calling({"name": "f"}), 'tool_calls: wanted a list of calls, got {"name": "f"}'),
    "a call without a name": (calling([{"function": {}}]), "tool_calls: wanted a function's name and arguments, got"),
    "NaN in arguments": (calling([{"name": "f", "arguments": '{"a": NaN}'}]), "tool_calls: arguments: wanted an"),
    "Infinity": (ANSWER % "Infinity", "bad.jsonl: line 1: wanted JSON, got Infinity"),
    "a large power": (ANSWER % "-1E+999", "bad.jsonl: line 1: wanted JSON, got -1E+999"),
    "too many digits": (ANSWER % ("9" * 5000), "bad.jsonl: line 1: wanted JSON, got '{"),
    "a hexadecimal": (ANSWER % "0x10", "bad.jsonl: line 1: wanted JSON, got '{"),
    "a zero in front": (ANSWER % "01", "bad.jsonl: line 1: wanted JSON, got '{"),
    "a tabulator": (ANSWER % '"a\tb"', "(Invalid control character"),
    "an escape that is none": (ANSWER % '"\\x"', "(Invalid \\escape"),
    "a key twice, deep": (ANSWER % '{"x": [{"y": 1, "y": 2}]}', "bad.jsonl: line 1: 'y' stands twice"),
    "a long key twice": (f'{{"question": "1", "{MEGABYTES}": 1, "{MEGABYTES}": 2}}', "bad.jsonl: line 1: 'xxx"),
    "a keyword of rewards": ('{"question": "1", "trainer_state": 1}', "column 'trainer_state' has the name of a"),
    "no answers": ('{"question": "1", "anwser": "1"}', "wants 'answer', but the data offer prompts, completions,"),
    "objects within one another": (ANSWER % ('{"a":' * 50_000 + "1" + "}" * 50_000), "line 1: wanted JSON, got one"),
    "a long name": (f'{{"{MEGABYTES}": 1}}', "bad.jsonl: line 1: no column 'question', wanted as the prompt; there"),
    "a long line": (MEGABYTES, "bad.jsonl: line 1: wanted JSON, got 'xxx"),
    "a long line cut short": (f'{{"question": "{MEGABYTES}', "bad.jsonl: line 1: wanted JSON, got '{\"question\":"),
}  # fmt: skip

LISTS = {
    "": "bad.json: wanted JSON, got ''",
    "{}": "bad.json: wanted a list of objects, got {}",
    "[]": "bad.json: wanted at least one example, got none",
    "[null]": "bad.json: example 1: wanted an object with a column 'question', got nothing (null)",
    f"[{GOOD},]": "bad.json: wanted JSON, got '[{",
    GOOD * 2: "bad.json: wanted JSON, got '{",
    f'{{"data": [{GOOD}]}}': "bad.json: wanted a list of objects, got {\"data\":",
    f'[{GOOD}, {{"qestion": "1"}}]': "bad.json: example 2: no column 'question', wanted as the prompt; there are:",
}  # fmt: skip


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    return refusing(tmp_path, monkeypatch, capsys)


def encoded(content):
    return content if isinstance(content, bytes) else content.encode()


@pytest.mark.parametrize("what", LINES)
def test_lines_are_refused(refused, tmp_path, what):
    content, words = LINES[what]
    (tmp_path / "bad.jsonl").write_bytes(encoded(content))
    assert words in refused("data.train=bad.jsonl")


@pytest.mark.parametrize("content", LISTS)
def test_a_list_is_refused(refused, tmp_path, content):
    (tmp_path / "bad.json").write_text(content)
    assert LISTS[content] in refused("data.train=bad.json")


PLACES = {
    "missing": "command line: data: train: no file 'bad.jsonl' beside the config or in the current directory",
    "a dangling link": "command line: data: train: no file 'bad.jsonl' beside the config or in the current directory",
    "a loop of links": "command line: data: train: no file 'bad.jsonl' beside the config or in the current directory",
    "a folder": "bad.jsonl/train.jsonl: no such file",
    "a folder with a folder": "bad.jsonl/train.jsonl: no such file",
    "a pipe": "bad.jsonl: no such file",
    "unreadable": "bad.jsonl",
}


@pytest.mark.parametrize("kind", PLACES)
def test_a_path_that_is_no_data_is_refused(refused, tmp_path, kind):
    strange(tmp_path / "bad.jsonl", kind, GOOD)
    assert PLACES[kind] in refused("data.train=bad.jsonl")


def test_data_of_another_kind_are_refused(refused, tmp_path):
    (tmp_path / "bad\x1b.csv").write_text(GOOD)
    words = "bad\\x1b.csv: wanted a .jsonl or .json file, a folder with train.jsonl, or hf:NAME"
    assert words in refused(f"data.train={json.dumps('bad' + chr(27) + '.csv')}")


@pytest.mark.parametrize("command", [["train"], ["train", "--dry-run"], ["eval"], ["plan"]])
def test_every_command_refuses_held_out_examples_alike(refused, tmp_path, command):
    (tmp_path / "bad.jsonl").write_text(GOOD + ANSWER % "NaN")
    assert "bad.jsonl: line 2: wanted JSON, got NaN" in refused("data.evaluation=bad.jsonl", command=command)


@pytest.mark.parametrize("content", [b"\xff", b"[" * 100_000, MEGABYTES.encode()])
def test_a_process_ends_with_a_line(tmp_path, content):
    (tmp_path / "run.toml").write_text(BASE)
    (tmp_path / "good.jsonl").write_bytes(content)
    command = [sys.executable, "-m", "mlxrl", "train", "--config", "run.toml"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=60, env=environment, check=False
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"mlxrl: {tmp_path}/good.jsonl: line 1: wanted ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good.jsonl", "run.toml"]
