"""The reward functions that come with the library."""

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
