"""The reward functions that come with the library."""

import math

import numpy as np
import pytest

from mlxrl import rewards
from mlxrl.rewards import last_number


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
        (10**400, None),
        (True, None),
        ("1e999999999999999999999", None),
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


MISSING = [None, "", " \n", math.nan, np.float32("nan"), [], {}, [None], [math.nan]]


@pytest.mark.parametrize("answer", MISSING, ids=repr)
def test_what_has_no_answer_earns_nothing(answer):
    for function in (rewards.contains, rewards.exact_match, rewards.last_number_matches):
        found = function(completions=["no idea", "", "nan", "None"], answer=[answer] * 4)
        assert all(map(math.isnan, found))


def test_an_answer_without_a_number_has_none_to_match():
    for answer in ("none", True, "true"):
        assert math.isnan(rewards.last_number_matches(completions=["no"], answer=[answer])[0])


@pytest.mark.parametrize(
    ("answer", "same", "other"),
    [
        (4, ["4", "4.0", " $4.00 "], ["14", "-4", "four", ""]),
        (4.0, ["4", "4.0"], ["44", "True"]),
        ("4", ["4", "4.0"], ["14"]),
        (["4"], ["4"], ["5"]),
        (0.1 + 0.2, ["0.3"], ["0.30001"]),
        (1_000_000_001, ["1000000001", "1,000,000,001"], ["1000000002"]),
        (10**400, ["1" + "0" * 400], ["1"]),
        (True, ["true", "True"], ["1", "false", "untrue"]),
        (False, ["FALSE"], ["0", ""]),
        ("True", ["true"], ["1"]),
        ("yes", ["yes "], ["no"]),
    ],
)
def test_one_comparison_for_answers_of_every_type(answer, same, other):
    for said in same:
        assert rewards.exact_match(completions=[said], answer=[answer]) == [1.0]
        assert rewards.contains(completions=[f"it is {said} or so"], answer=[answer]) == [1.0]
    for said in other:
        assert rewards.exact_match(completions=[said], answer=[answer]) == [0.0]
        assert rewards.contains(completions=[f"it is {said} or so"], answer=[answer]) == [0.0]
