"""Examples as tasks, and the order of a run."""

import json
import sys
import types
from itertools import islice

import numpy as np
import pytest

from mlxrl.data import as_tasks, cycle, is_missing, tasks
from mlxrl.types import Task

ROWS = [{"question": "1+1", "solution": "2", "level": 3}, {"question": "2+2", "solution": "4", "level": 5}]


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_an_example_becomes_a_task_with_renamed_and_passed_through_columns(tmp_path):
    first = {"question": "1+1", "level": 3, "answer": "2"}
    wanted = [Task("1+1", first), Task("2+2", {"question": "2+2", "level": 5, "answer": "4"})]
    folder = tmp_path / "set"
    folder.mkdir()
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    for source in (ROWS, jsonl(folder / "train.jsonl", ROWS), str(folder), tmp_path / "rows.json"):
        assert tasks(source, prompt="question", answer="solution") == wanted


def test_limit_does_not_read_on(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", ROWS)
    path.write_text(path.read_text() + "broken")
    assert [task.prompt for task in tasks(path, "question", limit=2)] == ["1+1", "2+2"]
    with pytest.raises(ValueError, match=r"a\.jsonl: line 3: wanted JSON, got 'broken'"):
        tasks(path, "question")
    with pytest.raises(ValueError, match="limit: wanted at least 1 example, got 0"):
        tasks(path, "question", limit=0)


def test_blank_lines_marks_and_line_separators_inside_texts_do_not_break_rows(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes('\ufeff{"prompt": "a\u2028b\x85c"}\n\n  \n{"prompt": "d"}'.encode())
    assert [task.prompt for task in tasks(path)] == ["a\u2028b\x85c", "d"]


def test_system_makes_messages_of_texts_and_stands_before_messages():
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}
    found = tasks([{"prompt": "Hi"}, {"prompt": [user]}], system="Be brief.")
    assert found == [Task((system, user), {"prompt": "Hi"}), Task((system, user), {"prompt": [user]})]
    with pytest.raises(ValueError, match="system message of its own"):
        tasks([{"prompt": [system, user]}], system="Be brief.")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"promt": "x", "answer": 1}', "line 1: no column 'prompt', wanted as the prompt; there are: promt, answer; "
         "did you mean 'promt'?"),
        ("", "wanted at least one example, got none"),
        ('{"prompt": "x"}\n[1]', r"line 2: wanted an object with a column 'prompt', got \[1\]"),
        ('{"prompt": "x"}\n{"prompt": " "}', "line 2: prompt: wanted a text, got an empty one"),
        ('{"prompt": 3}', "line 1: prompt: wanted a text or a list of messages, got 3"),
        ('{"prompt": null}', r"line 1: prompt: wanted a text or a list of messages, got nothing \(null\)"),
        ('{"prompt": []}', "line 1: prompt: wanted at least one message, got an empty list"),
        ('{"prompt": [{"role": "user"}]}', "prompt: message 1: content: wanted a text or a list of text parts, got"),
        ('{"prompt": "x"}\n{"prompt": "a", "prompt": "b"}', "line 2: 'prompt' stands twice"),
        ('{"prompt": "x", "answer": {"a": 1, "a": 1}}', "line 1: 'a' stands twice"),
        ('{"prompt": "x", "answer": NaN}', "line 1: wanted JSON, got NaN"),
        ('{"prompt": "x", "answer": [-Infinity]}', "line 1: wanted JSON, got -Infinity"),
        ('{"prompt": "x", "answer": 1e999}', "line 1: wanted JSON, got 1e999"),
        ('{"prompt": "x", "answer": ' + "[" * 101 + "]" * 101 + "}", "line 1: wanted JSON, got one nested too deeply"),
        ("[" * 100_000 + "]" * 100_000, "line 1: wanted JSON, got one nested too deeply"),
        ('{"prompt": [{"role": "user", "content": null}]}', r"content: wanted .*, got nothing \(null\)"),
        ('{"prompt": [{"role": "user", "content": 5}]}', "content: wanted a text or a list of text parts, got 5"),
        ('{"prompt": [{"role": "user", "content": {"a": 1}}]}', 'content: wanted .*, got {"a": 1}'),
        ('{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}', "part 1: wanted a part with a text, got {"),
        ('{"prompt": [{"role": "", "content": "x"}]}', 'role: wanted system, user, assistant or tool, got ""'),
        ('{"prompt": [{"role": "usr", "content": "x"}]}', "got \"usr\"; did you mean 'user'?"),
        ('{"prompt": "a\\ud800"}', r"line 1: prompt: wanted Unicode, got the lone surrogate '\\ud800'"),
        ('{"prompt": [{"role": "user", "content": "a\\udfff"}]}', "message 1: content: wanted Unicode, got the lone"),
        ('{"prompt": [{"role": "assistant", "tool_calls": [5]}]}', r"tool_calls: wanted a list of calls, got \[5\]"),
        ('{"prompt": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]}]}',
         r"arguments: wanted an object, got \"\[1\]\""),
        ('{"prompt": [{"role": "assistant", "tool_calls": [{"name": "f"}]}]}', "wanted the answers of its tool_calls"),
        ('{"prompt": "x", "completions": 1}', "line 1: column 'completions' has the name of a keyword"),
        ("[" * 100_000, "line 1: wanted JSON, got one nested too deeply"),
    ],
)  # fmt: skip
def test_a_fault_names_file_line_wanted_and_got(tmp_path, content, message):
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        tasks(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_every_column_stays_that_of_the_prompt_too():
    """But for one with the name of a keyword of rewards, which get the prompt as `prompts` anyway."""
    messages = [{"role": "user", "content": "Hi"}]
    assert tasks([{"question": "1+1"}], "question")[0].columns == {"question": "1+1"}
    assert tasks([{"chat": messages, "n": 1}], "chat")[0].columns == {"chat": messages, "n": 1}
    assert tasks([{"question": "1+1"}], "question", text="question")[0].columns == {"text": "1+1"}
    assert tasks([{"prompts": "1+1", "n": 1}], "prompts") == [Task("1+1", {"n": 1})]


def test_messages_have_a_text_each_and_calls_an_object():
    """Parts are joined; a call's arguments may be a text of JSON or null; nulls of a table are left out."""
    parts = [{"type": "text", "text": "what is "}, "1+0?"]
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    said = {"role": "assistant", "tool_calls": [call, {"name": "now", "arguments": None}], "content": None}
    messages = [{"role": "user", "content": parts, "name": None}, said, {"role": "tool", "content": "1"}]
    first, second, _ = tasks([{"prompt": messages}])[0].prompt
    assert first == {"role": "user", "content": "what is 1+0?"}
    assert second["content"] == ""
    assert [call.get("function", call)["arguments"] for call in second["tool_calls"]] == [{"a": 1}, {}]
    assert call["function"]["arguments"] == '{"a": 1}'  # the example is not changed


class Frame:
    """As a data frame of pandas."""

    def __init__(self, rows):
        self.rows, self.itertuples = rows, None

    def to_dict(self, orient):
        assert orient == "records"
        return self.rows


def test_rows_may_come_from_generators_and_frames_and_hold_values_of_numpy():
    row = {"prompt": np.str_("1+1"), "answer": np.int64(2), "scores": np.array([[1.5], [2.0]])}
    wanted = [Task("1+1", {"prompt": "1+1", "answer": 2, "scores": [[1.5], [2.0]]})]
    for source in ([row], (row for _ in range(1)), Frame([row]), as_tasks(iter([row])), as_tasks(iter(wanted))):
        assert as_tasks(source) == wanted
    assert type(tasks([row])[0].columns["answer"]) is int
    chat = np.array([{"role": "user", "content": "hi"}], dtype=object)
    assert tasks([{"prompt": chat}])[0].prompt == ({"role": "user", "content": "hi"},)
    assert as_tasks(wanted) is wanted
    for source in ({"prompt": ["a"]}, 5, None):
        with pytest.raises(
            ValueError, match="data: wanted the name of a file, or a list of dicts, one for each example"
        ):
            tasks(source)
    with pytest.raises(ValueError, match="example 1: wanted an object with a column 'prompt', got 5"):
        tasks([5])


def test_token_ids_may_be_a_prompt():
    assert tasks([{"prompt": np.array([4, 7])}])[0].prompt == (4, 7)
    with pytest.raises(ValueError, match="token ids, which take no system message"):
        tasks([{"prompt": [4, 7]}], system="Be brief.")
    for ids in ([4, -7], [4, True], [4, "a"]):
        with pytest.raises(
            ValueError, match="example 1: prompt: message 1: wanted an object with 'role' and 'content'"
        ):
            tasks([{"prompt": ids}])


def test_a_task_knows_where_it_was_read(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", ROWS)
    assert [task.where for task in tasks(path, "question")] == [f"{path}: line 1", f"{path}: line 2"]
    assert [is_missing(value) for value in (None, " ", float("nan"), 0, False, "0", [])] == [True] * 3 + [False] * 4


def test_columns_may_have_names_that_are_no_keywords():
    renamed = {"the answer": "solution"}
    assert tasks(ROWS, "question", **renamed)[0].columns == {"question": "1+1", "level": 3, "the answer": "2"}


def test_files_that_are_none(tmp_path):
    with pytest.raises(ValueError, match=r"none\.jsonl: no such file"):
        tasks(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match=r"wanted a \.jsonl or \.json file"):
        tasks(tmp_path / "rows.csv")
    (tmp_path / "bad.jsonl").write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(ValueError, match="line 1: wanted UTF-8, got byte 0xff"):
        tasks(tmp_path / "bad.jsonl")


def test_hugging_face_names_are_taken_apart(monkeypatch):
    asked = []

    def load_dataset(*arguments, **keywords):
        asked.append((*arguments, keywords["split"]))
        return [{"question": "1+1", "answer": "2"}]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    for source in ("hf:openai/gsm8k", "hf:openai/gsm8k:main", "hf:openai/gsm8k:main:test", "hf:squad::test"):
        assert tasks(source, "question") == [Task("1+1", {"question": "1+1", "answer": "2"})]
    assert asked == [
        ("openai/gsm8k", None, "train"),
        ("openai/gsm8k", "main", "train"),
        ("openai/gsm8k", "main", "test"),
        ("squad", None, "test"),
    ]
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"hf:squad: needs the 'datasets' package; pip install datasets"):
        tasks("hf:squad")


def test_every_task_comes_once_an_epoch_in_an_order_of_its_own():
    rows = [Task(str(number)) for number in range(7)]
    stream = [task.prompt for batch in islice(cycle(rows, 3, seed=1), 14) for task in batch]  # 42 = 6 epochs of 7
    epochs = [tuple(stream[start : start + 7]) for start in range(0, 42, 7)]
    assert all(sorted(epoch) == list("0123456") for epoch in epochs)
    assert len(set(epochs)) == 6


def test_a_step_is_a_function_of_seed_and_step():
    rows = [Task(str(number)) for number in range(7)]
    whole = list(islice(cycle(rows, 3, seed=1), 9))
    for start in range(9):
        assert list(islice(cycle(rows, 3, seed=1, start=start), 9 - start)) == whole[start:]
    assert list(islice(cycle(rows, 3, seed=2), 9)) != whole


def test_a_batch_larger_than_the_data_is_refused_at_once():
    with pytest.raises(ValueError, match="wanted between 1 and the 2 tasks there are, got 3"):
        cycle([Task("a"), Task("b")], 3)


def test_the_answer_that_is_learned_keeps_its_own_name_too():
    (one,) = tasks([{"question": "1+1", "answer": "2"}], prompt="question", completion="answer")
    assert one.columns == {"question": "1+1", "answer": "2", "completion": "2"}
