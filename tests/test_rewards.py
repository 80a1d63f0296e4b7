"""Numbers in texts, functions by name, and the scoring of groups."""

import math

import numpy as np
import pytest

from mlxrl import rewards
from mlxrl.rewards import RewardError, accept, best_and_worst, last_number, resolve, score
from mlxrl.types import Task, Trajectory, Turn


def attempt(text, prompt="1+1", **columns):
    return Trajectory(Task(prompt, columns), (Turn((1,), (2,), (0.0,), text),))


def group(*texts, **columns):
    return tuple(attempt(text, **columns) for text in texts)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("It is 72.", 72.0),
        ("#### 1,234", 1234.0),
        ("1,234,567.5 in all", 1234567.5),
        ("3, 4", 4.0),
        ("12,34", 34.0),
        ("x = -3.5.", -3.5),
        ("x = \u22123", -3.0),
        ("5-3", 3.0),
        ("f(2)-3", 3.0),
        ("$12", 12.0),
        ("-$12.50", -12.5),
        (".5", 0.5),
        ("2e3", 2000.0),
        ("7th", 7.0),
        ("8 7 10: 1078", 1078.0),
        ("none", None),
        ("", None),
        ("9" * 400, None),
        (72, 72.0),
        (7.5, 7.5),
        (None, None),
        ([{"role": "user", "content": "9"}, {"role": "assistant", "content": "it is 4"}], 4.0),
        ([{"role": "assistant", "content": [{"type": "text", "text": "so"}, {"type": "text", "text": " 5"}]}], 5.0),
        ([], None),
    ],
)
def test_last_number(text, number):
    assert last_number(text) == number


def test_the_functions_that_come_with_the_library():
    columns = {"answer": ["4", "5", "6"]}
    texts = ["2+2=4", " 5 ", "no"]
    messages = [[{"role": "assistant", "content": text}] for text in texts]
    for completions in (texts, messages):
        assert rewards.last_number_matches(completions=completions, **columns, level=[1, 2, 3]) == [1, 1, 0]
        assert rewards.exact_match(completions=completions, **columns) == [0, 1, 0]
        assert rewards.contains(completions=completions, **columns) == [1, 1, 0]


def test_two_texts_without_a_number_do_not_match():
    with pytest.raises(ValueError, match="the answer 'none' holds no number"):
        rewards.last_number_matches(completions=["no"], answer=["none"])


def test_a_function_is_called_once_with_all_completions_in_order():
    calls = []

    def reward(prompts, completions, answer, **rest):
        calls.append((prompts, completions, answer, rest))
        return [float(c == a) for c, a in zip(completions, answer, strict=True)]

    scored = score([group("a", "b", answer="a"), group("c", answer="d", level=1)], reward)
    assert calls == [(["1+1"] * 3, ["a", "b", "c"], ["a", "a", "d"], {"level": [None, None, 1]})]
    assert [[one.reward for one in attempts] for attempts in scored] == [[1.0, 0.0], [0.0]]
    assert scored[0][0].rewards == {"reward": 1.0}


def test_messages_reach_a_function_as_messages_that_it_may_change():
    prompt = ({"role": "user", "content": "hi"},)
    seen = []

    def spoil(prompts, completions):
        seen.append((str(prompts), str(completions)))
        prompts[0][0]["content"] = completions[0][0]["content"] = "spoilt"
        return [0.0]

    scored = score([(attempt("yes", prompt),)], spoil, spoil)
    assert seen == [("[[{'role': 'user', 'content': 'hi'}]]", "[[{'role': 'assistant', 'content': 'yes'}]]")] * 2
    assert scored[0][0].task.prompt == prompt


def test_the_reward_is_the_weighted_sum_and_the_parts_are_kept():
    def short(completions):
        return np.array([len(text) for text in completions], dtype=np.float32)

    def is_b(completions):
        return [text == "b" for text in completions]

    one, two = score([group("b", "long")], short, is_b, weights=[0.5, 2])[0]
    assert one.weights == {"short": 0.5, "is_b": 2.0}
    assert (one.reward, dict(one.rewards)) == (0.5 * 1 + 2 * 1, {"short": 1.0, "is_b": 1.0})
    assert (two.reward, dict(two.rewards)) == (0.5 * 4, {"short": 4.0, "is_b": 0.0})
    assert list(score([group("b")], short, short)[0][0].rewards) == ["short", "short_2"]


def test_none_is_left_out_of_the_sum_and_nan_and_infinity_fail():
    def mixed(completions):
        return [None, float("nan"), float("inf"), 1]

    def two(completions):
        return [2.0] * 4

    together = [one.reward for one in score([group(*"abcd")], mixed, two)[0]]
    alone = [one.reward for one in score([group(*"abcd")], mixed)[0]]
    np.testing.assert_equal(together, [2.0, math.nan, math.nan, 3.0])
    np.testing.assert_equal(alone, [math.nan, math.nan, math.nan, 1.0])


def test_only_the_completions_that_raise_are_lost():
    sizes = []

    def fragile(completions, answer):
        sizes.append(len(completions))
        return [1 / int(text) for text in completions]

    scored = score([group("2", "x", answer=1), group("0", "4")], fragile)
    np.testing.assert_equal([one.reward for attempts in scored for one in attempts], [0.5, math.nan, math.nan, 0.25])
    assert sizes == [4, 1, 1, 1, 1]


def test_a_function_that_always_raises_ends_the_run_with_its_name():
    def broken(completions):
        raise KeyError("total\nmess")

    for texts in (("a", "b"), ("a",)):
        with pytest.raises(
            RewardError, match=r"'broken' raised for each of \d completions: KeyError: 'total"
        ) as caught:
            score([group(*texts)], broken)
        assert "\n" not in str(caught.value)


def test_ctrl_c_in_a_function_is_not_a_failed_sample():
    def slow(completions):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score([group("a", "b")], slow)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0], "'odd': wanted 2 numbers, one per completion, got 1"),
        (1.0, "'odd': wanted a list of 2 numbers, got float 1.0"),
        ("ab", "'odd': wanted a list of 2 numbers, got str 'ab'"),
        ({0: 1.0, 1: 2.0}, "'odd': wanted a list of 2 numbers, got dict"),
        ([[1.0], [2.0]], r"'odd': wanted a number per completion, got list \[1.0\]"),
        (["1", "2"], "'odd': wanted a number per completion, got str '1'"),
        (np.ones((2, 1)), r"'odd': wanted a number per completion, got list \[1.0\]"),
    ],
)
def test_what_is_not_a_number_per_completion_is_refused(returned, message):
    def odd(completions):
        return returned

    with pytest.raises(RewardError, match=message):
        score([group("a", "b")], odd)


def test_weights_are_one_finite_number_each_and_not_all_zero():
    def zero(completions):
        return [0.0]

    with pytest.raises(ValueError, match="wanted at least one function"):
        score([group("a")])
    for weights in ([1, 2], [0], [float("nan")]):
        with pytest.raises(ValueError, match="weights: wanted"):
            score([group("a")], zero, weights=weights)


def test_best_and_worst_put_failed_ones_last():
    texts = dict(zip("abc", (0.5, math.nan, 1.0), strict=True))
    scored = score([group(*texts)], lambda completions: [texts[text] for text in completions])[0]
    assert [one.text for one in best_and_worst(scored)] == ["c", "b"]
    assert [one.text for one in best_and_worst(scored[:1])] == ["a"]


def test_functions_are_found_beside_the_config_and_in_modules(tmp_path, monkeypatch):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "judges.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nimport neighbour\n"
        "@dataclass\nclass Box:\n    x: int\ndef fair(completions): return [neighbour.value]\nlimit = 3\n"
    )
    (tmp_path / "conf" / "neighbour.py").write_text("value = 7.0\n")
    monkeypatch.chdir(tmp_path)
    wanted = f"{tmp_path}/conf/judges.py:fair"
    for spec in ("judges.py:fair", "judges:fair"):
        assert rewards.located(spec, tmp_path / "conf") == wanted
        assert resolve(spec, tmp_path / "conf")([""]) == [7.0]
    assert resolve("conf/judges.py:fair") is resolve(wanted)
    assert rewards.located("mlxrl.rewards:contains", tmp_path) == "mlxrl.rewards:contains"
    assert resolve("mlxrl.rewards:contains") is rewards.contains
    for spec, message in {
        "judges.py:fare": "has no 'fare'; did you mean 'fair'",
        "judges.py:limit": "wanted a function, got a int",
        "judges.py:Box": "wanted a function, got a type",
        "judge.py:fair": "no file 'judge.py' beside the config",
        "no_such_module:fair": "cannot be imported: ModuleNotFoundError: No module named 'no_such_module'",
        "fair": "wanted 'module:function' or 'file.py:function'",
    }.items():
        with pytest.raises(ValueError, match=message):
            resolve(spec, tmp_path / "conf")


def test_a_file_that_fails_to_run_says_why(tmp_path):
    (tmp_path / "bad.py").write_text("1 / 0\n")
    with pytest.raises(ValueError, match=r"bad\.py:f': cannot be imported: ZeroDivisionError: division by zero"):
        resolve(f"{tmp_path}/bad.py:f")


def test_a_function_is_checked_against_the_columns():
    def fine(completions, answer, level=1, **rest): ...
    def no_rest(completions): ...
    def wrong(completions, anser): ...
    def positional(completions, /): ...

    accept(fine, ["answer"])
    accept(no_rest, ["answer"])
    with pytest.raises(
        ValueError,
        match="'wrong': wants 'anser', but the data offer prompts, completions, answer; did you mean 'answer'",
    ):
        accept(wrong, ["answer"])
    with pytest.raises(ValueError, match="'completions' cannot be passed as a keyword"):
        accept(positional, [])
