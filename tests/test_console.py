"""The console: same content on a terminal and off it, and nothing a model writes is obeyed."""

import io
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlxrl.console import HEADING, LEFT, Console
from mlxrl.runs.sinks import Description, Outcome
from mlxrl.types import Task, Trajectory, Turn

METRICS = {
    "reward": 0.375, "rewards/unscored": 0.0, "groups/zero_variance": 1.0, "groups/sampled": 4.0,
    "completions/mean_length": 12.4, "completions/clipped_ratio": 0.25, "rollout/tokens_per_second": 1204.4,
    "seconds/rollout": 0.81, "seconds/update": 11.2, "memory/peak": 1.24e9, "updates/skipped": 0.0,
}  # fmt: skip
EVALUATION = {
    "before": {"accuracy": 0.4, "mean_reward": 0.41, "n": 200},
    "after": {"accuracy": 0.95, "mean_reward": 0.96, "n": 200},
    "difference": 0.55,
    "interval": [0.48, 0.62],
    "improved": 112,
    "worsened": 2,
    "equal": 86,
}
EVIL = "\x1b[31mred\x1b[0m \x07\u202eback\u2028[bold]x[/bold] :smile: \ud800\r\nlast"


def completion(answer, reward, prompt="585+445=?"):
    return Trajectory(Task(prompt), (Turn((1,), (2, 3), (0.0, 0.0), answer),), reward=reward)


GROUPS = ((completion("a", 1.0), completion("b", 1.0)), (completion("1030", 1.0), completion(EVIL, 0.0, EVIL)))


def step(index, groups=(), warnings=(), **metrics):
    return SimpleNamespace(
        index=index, number=index + 1, metrics={**METRICS, **metrics}, groups=groups, warnings=warnings,
        demonstrated=False,
    )  # fmt: skip


def description(*lines):
    adapted = [SimpleNamespace(key="self_attn.q_proj", layer="Linear", shape=(64, 32), count=2, parameters=4096)]
    config = SimpleNamespace()
    return Description("mlxrl 0.1.0", [("model", "arithmetic"), *lines], adapted, config, Path("runs/x"))  # pyright: ignore


class Terminal(io.StringIO):
    def isatty(self):
        return True


def run(stream, width=80):
    console = Console(2, samples_every=1, stream=stream, width=width)
    console.begin(description(("algorithm", "grpo(" + "clip=(0.2, 0.28), " * 6 + ")")))
    console.evaluation("before training", EVALUATION["before"])
    console.step(step(0, GROUPS))
    console.step(step(1, warnings=(f"the update was skipped {EVIL}",), reward=0.875))
    console.end(Outcome("succeeded", EVALUATION, ["adapter   runs/x/adapters"]))
    return stream.getvalue()


def lines_of(*steps, **options):
    """The lines that steps take off a terminal, without the heading."""
    stream = io.StringIO()
    console = Console(2, stream=stream, width=80, **options)
    for one in steps:
        console.step(one)
    return stream.getvalue().splitlines()[1:]


@pytest.fixture(autouse=True)
def _terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


CONTENT = (
    "mlxrl 0.1.0", "model      arithmetic", "self_attn.q_proj", "64 x 32", "4,096",
    "held-out before training: accuracy 0.400, mean reward 0.410, 200 examples",
    HEADING.strip(), "1/2   0.375         1/4   12.4    25%    1204   0.81 s  11.20 s  1.24 GB",
    "2/2   0.875 ▲       1/4   12.4    25%    1204   0.81 s  11.20 s  1.24 GB",
    "prompt 585+445=?", "best    1.000  2 tokens, eos  1030", "worst   0.000  2 tokens, eos",
    "[bold]x[/bold] :smile:", "step 2: the update was skipped", "0.375 ▁█ 0.875",
    "accuracy 0.400 -> 0.950, mean reward 0.410 -> 0.960",
    "difference +0.550, 95 % interval +0.480 to +0.620, 200 pairs", "112 improved, 2 worsened, 86 equal",
    "runs/x/adapters",
)  # fmt: skip


def test_a_pipe_gets_plain_lines_with_everything():
    out = run(io.StringIO())
    for piece in CONTENT:
        assert piece in out
    assert not any(ord(character) < 32 and character != "\n" for character in out)
    assert HEADING + LEFT in out


def test_a_terminal_gets_the_same_in_colour_and_a_progress_bar():
    raw = run(Terminal())
    out = visible(raw)
    for piece in CONTENT:
        assert piece in out
    assert "\x1b[" in raw
    assert "\x1b[31mred" not in raw
    assert "training" in out  # the progress bar, which has the time that is left
    assert HEADING + LEFT not in out


def visible(raw):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", raw).replace("\r", "\n")


def test_samples_are_shown_when_they_are_due():
    (_,) = lines_of(step(0, GROUPS), samples_every=2)
    shown = lines_of(step(1, GROUPS), samples_every=2)
    assert [line.split()[0] for line in shown[1:]] == ["prompt", "best", "worst"]
    (_,) = lines_of(step(1, GROUPS), samples_every=0)


def test_the_samples_of_an_episode_have_what_the_model_read_in_between():
    turns = (
        Turn((1,), (2,), (0.0,), "left", observation_text="a maze"),
        Turn((1,), (2,), (0.0,), "up", observation_text="a wall\x1b[31m"),
    )
    shown = lines_of(step(0, ((Trajectory(Task("go"), turns, reward=0.5),),)), samples_every=1)
    assert shown[1:] == ["  prompt a maze", r"  best    0.500  2 tokens, eos  left [a wall\x1b[31m] up"]


def test_a_stream_that_cannot_hold_the_signs_gets_others():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    console = Console(2, samples_every=2, stream=stream, width=80)
    console.begin(description(("data", "größe")))
    console.step(step(0))
    console.step(step(1, ((completion("ü", 1.0),),), reward=0.5))
    console.end(Outcome("succeeded", {}))
    stream.flush()
    out = stream.buffer.getvalue().decode("ascii")
    assert "gr\\xf6\\xdfe" in out
    assert "0.500 +" in out
    assert "_@" in out
    assert "\\xfc" in out


def test_lines_of_steps_stay_in_80_columns_on_a_terminal():
    large = {
        "reward": -1234.5, "completions/mean_length": 2048.0, "rollout/tokens_per_second": 123456.0,
        "seconds/rollout": 999.99, "seconds/update": 999.99, "memory/peak": 12.34e9,
    }  # fmt: skip
    stream = Terminal()
    console = Console(1000, stream=stream, width=80)
    console.step(step(999, **large))
    console.end(Outcome("failed", {}))
    shown = [line for line in visible(stream.getvalue()).splitlines() if "1000/1000 " in line and "left" not in line]
    assert [line.split() for line in shown] == [
        ["1000/1000", "-1234.500", "1/4", "2048.0", "25%", "123456", "999.99", "s", "999.99", "s", "12.34", "GB"]
    ]
    assert len(shown[0]) <= 80
    assert len(HEADING) <= 80


def test_missing_numbers_are_dashes():
    stream = io.StringIO()
    Console(2, stream=stream, width=80).step(
        SimpleNamespace(index=0, number=1, metrics={"reward": math.nan}, groups=(), warnings=(), demonstrated=False)
    )
    line = stream.getvalue().splitlines()[1]
    assert "nan" not in line
    assert line.split() == ["1/2", "-", "-/-", "-", "-", "-", "-", "s", "-", "s", "-", "-"]


def test_a_run_that_is_stopped_has_no_course_of_the_reward():
    stream = io.StringIO()
    console = Console(2, stream=stream, width=80)
    console.step(step(0))
    console.end(Outcome("cancelled", {"before": EVALUATION["before"]}, ["stopped; the adapter so far is in x"]))
    assert stream.getvalue().splitlines()[2:] == ["  stopped; the adapter so far is in x"]


def printed(call):
    stream = io.StringIO()
    call(Console(2, stream=stream, width=80))
    return stream.getvalue().splitlines()


def test_the_comparison_has_mcnemars_p_where_there_is_one():
    tested = {**EVALUATION, "mcnemar_p": 0.0000012345}
    assert "112 improved, 2 worsened, 86 equal, McNemar p = 1.23e-06" in "\n".join(
        printed(lambda console: console.end(Outcome("succeeded", tested)))
    )
    assert "McNemar" not in "\n".join(printed(lambda console: console.end(Outcome("succeeded", EVALUATION))))


def test_an_evaluation_has_its_pass_at_k_and_a_validation_what_it_decided():
    numbers = {"accuracy": 0.5, "mean_reward": 0.5, "pass@1": 0.25, "pass@4": 0.75, "n": 8}
    assert printed(lambda console: console.evaluation("before training", numbers)) == [
        "  held-out before training: accuracy 0.500, mean reward 0.500, pass@1 0.250, pass@4 0.750, 8 examples"
    ]
    numbers = {"accuracy": 0.5, "mean_reward": 0.5, "n": 8, "interval": [-0.75, -0.25], "margin": 0.0}
    accepted = printed(lambda console: console.validation("after step 5", {**numbers, "decision": "accepted"}))
    assert accepted == ["  validation after step 5: accuracy 0.500, mean reward 0.500, 8 examples"]
    rejected = printed(lambda console: console.validation("after step 5", {**numbers, "decision": "rejected"}))
    assert rejected == [
        *accepted,
        "  validation after step 5: the adapter is taken back, because its difference from the best, -0.750 to -0.250, "
        "lies below 0",
    ]
