"""The console: same content on a terminal and off it, and nothing a model writes is obeyed."""

import io
import math
import re
from types import SimpleNamespace

import pytest
from mlxrl.show import text
from mlxrl.show.row import HEADING, direction, row

from mlxrl.console import Console
from mlxrl.types import Task, Trajectory, Turn

METRICS = {
    "reward": 0.375, "rewards/unscored": 0.0, "groups/zero_variance": 1.0, "groups/sampled": 4.0, "completions/mean_length": 12.4,
    "completions/clipped_ratio": 0.25, "rollout/tokens_per_second": 1204.4, "seconds/rollout": 0.81, "seconds/update": 11.2,
    "memory/peak": 1.24e9, "updates/skipped": 0.0,
}  # fmt: skip
EVALUATION = {
    "before": {"accuracy": 0.4, "mean_reward": 0.41, "n": 200},
    "after": {"accuracy": 0.95, "mean_reward": 0.96, "n": 200},
    "difference": 0.55,
    "interval": [0.48, 0.62],
}
EVIL = "\x1b[31mred\x1b[0m \x07\u202eback\u2028[bold]x[/bold] :smile: \ud800\r\nlast"


def attempt(answer, reward, prompt="585+445=?"):
    return Trajectory(Task(prompt), (Turn((1,), (2, 3), (0.0, 0.0), answer),), reward=reward)


def test_tokens_that_are_cut_are_told():
    shown = row({**METRICS, "sequences/dropped_tokens": 12.0}, 1, 2, [])
    assert shown.warnings == ("12 sampled tokens lie behind train.max_tokens_per_row and were not trained on",)


def step(index, **metrics):
    return SimpleNamespace(index=index, metrics={**METRICS, **metrics})


class Terminal(io.StringIO):
    def isatty(self):
        return True


def run(stream, width=80):
    console = Console(2, stream=stream, width=width)
    console.header("mlxrl 0.1.0", [("model", "arithmetic"), ("algorithm", "grpo(" + "clip=(0.2, 0.28), " * 6 + ")")])
    console.adapted([SimpleNamespace(key="self_attn.q_proj", layer="Linear", shape=(64, 32), count=2, parameters=4096)])
    console.evaluation("before training", EVALUATION["before"])
    console.start()
    console.step(step(0))
    console.samples([(attempt("a", 1.0), attempt("b", 1.0)), (attempt("1030", 1.0), attempt(EVIL, 0.0, EVIL))])
    console.step(step(1, **{"reward": 0.875, "rewards/unscored": 2.0, "updates/skipped": 1.0}))
    console.finish(EVALUATION, ["adapter   runs/x/adapters"])
    return stream.getvalue()


@pytest.fixture(autouse=True)
def _terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


CONTENT = (
    "mlxrl 0.1.0", "arithmetic", "self_attn.q_proj", "64 x 32", "4,096", "accuracy 0.400, mean reward 0.410, 200 rows",
    HEADING.strip(), "1/2   0.375      1/4    12.4  25%     1204   0.81 s  11.20 s  1.24 GB",
    "2/2   0.875 ▲    1/4    12.4  25%     1204   0.81 s  11.20 s  1.24 GB",
    "1030", "585+445=?", "best", "worst", "1.000", "0.000", "eos", "[bold]x[/bold] :smile:",
    "2 completions could not be scored", "the update was skipped", "0.375 ▁█ 0.875",
    "accuracy 0.400 -> 0.950, mean reward 0.410 -> 0.960",
    "difference +0.550, 95 % interval +0.480 to +0.620, 200 pairs", "runs/x/adapters",
)  # fmt: skip


def test_a_pipe_gets_plain_lines_with_everything():
    out = run(io.StringIO())
    for piece in CONTENT:
        assert piece in out
    assert not any(ord(character) < 32 and character != "\n" for character in out)
    assert "left" in out


def test_a_terminal_gets_the_same_in_colour_and_80_columns():
    raw = run(Terminal())
    out = visible(raw)
    for piece in CONTENT:
        assert piece in out
    assert "\x1b[" in raw
    assert "\x1b[31mred" not in raw
    assert max(len(line) for line in out.splitlines()) <= 80
    assert "training" in out  # the progress bar


def visible(raw):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", raw).replace("\r", "\n")


def test_a_stream_that_cannot_hold_the_signs_gets_others():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    console = Console(2, stream=stream, width=80)
    console.header("mlxrl", [("model", "größe")])
    console.step(step(0))
    console.step(step(1, **{"reward": 0.5}))
    console.samples([(attempt("ü", 1.0),)])
    console.finish({})
    stream.flush()
    out = stream.buffer.getvalue().decode("ascii")
    assert "gr\\xf6\\xdfe" in out
    assert "0.500 +" in out
    assert "_@" in out


def test_rows_stay_in_80_columns():
    large = {**METRICS, "reward": -1234.5, "completions/mean_length": 2048.0, "rollout/tokens_per_second": 123456.0}
    line = row({**large, "seconds/rollout": 999.99, "seconds/update": 999.99}, 1000, 1000, [1.0])
    assert len(line.before + line.trend + line.after) <= 80
    assert len(HEADING) <= 80


def test_missing_numbers_are_dashes():
    line = row({"reward": math.nan}, 1, 2, [])
    assert "nan" not in line.before + line.after
    assert line.after.count("-") >= 5


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
    assert direction(reward, before) == mark


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
    assert [text.duration(s) for s in (0.4, 59, 60, 3599, 3600, math.inf)] == [
        "0 s",
        "59 s",
        "1:00",
        "59:59",
        "1:00:00",
        "-",
    ]
    assert [text.size(b) for b in (7.3e6, 1.24e9, math.nan)] == ["7 MB", "1.24 GB", "-"]
    assert text.shorten("abcdefghij", 7) == "ab...ij"
    assert text.shorten("abcdefg", 7) == "abcdefg"
