"""Numbers and untrusted texts as short pieces of a line."""

import math

import pytest

from mlxrl import text

EVIL = "\x1b[31mred\x1b[0m \x07\u202eback\u2028[bold]x[/bold] :smile: \ud800\r\nlast"


@pytest.mark.parametrize(
    ("reward", "before", "mark"),
    [
        (0.5, [], ""),
        (0.5, [0.4], "+"),
        (0.3, [0.4], "-"),
        (0.4, [0.4, 0.4], "="),
        (0.51, [0.0, 1.0, 0.5, 0.5, 0.5, 0.5, 0.5], "="),  # 1 % of the range
        (0.51, [0.1, 0.5, 0.5, 0.5, 0.5, 0.5], "="),
        (0.5, [9.0, 0.1, 0.1, 0.1, 0.1, 0.1], "="),  # 0.4 is 4 % of the range
        (0.7, [9.0, 0.1, 0.1, 0.1, 0.1, 0.1], "+"),  # 0.6 is 7 % of it
        (0.5, [math.nan], ""),
        (math.nan, [0.4], ""),
    ],
)
def test_trend(reward, before, mark):
    assert text.trend(reward, before) == mark


def test_safe_shows_what_it_does_not_pass_on():
    shown = r"\x1b[31mred\x1b[0m \x07\u202eback\u2028[bold]x[/bold] :smile: \ud800\r\nlast"
    assert text.safe(EVIL) == shown
    assert text.safe("größe 数 é ▲ e\u0301") == "größe 数 é ▲ e\u0301"


def test_sparkline():
    assert text.sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert text.sparkline([0, 0, 7, 7], width=2) == "▁█"
    assert text.sparkline([3, 3]) == "▁▁"
    assert text.sparkline([math.nan]) == ""
    assert len(text.sparkline(list(range(1000)))) == 40


def test_durations_and_sizes_and_shortening():
    seconds = (0.4, 59, 60, 3599, 3600, math.inf)
    assert [text.duration(s) for s in seconds] == ["0 s", "59 s", "1:00", "59:59", "1:00:00", "-"]
    assert [text.size(b) for b in (7.3e6, 1.24e9, math.nan)] == ["7 MB", "1.24 GB", "-"]
    assert [text.number(value) for value in (0.375, math.nan, -math.inf)] == ["0.375", "-", "-"]
    assert text.shorten("abcdefghij", 7) == "ab...ij"
    assert text.shorten("abcdefg", 7) == "abcdefg"
