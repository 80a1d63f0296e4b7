"""What receives a run: the files of metrics and samples, and sinks of the user's."""

import json
import math
import re
import warnings
from types import SimpleNamespace

import pytest

from mlxrl.errors import UserError
from mlxrl.files import read_lines
from mlxrl.runs.sinks import MetricsFile, Outcome, SamplesFile, Sink, UserSink
from mlxrl.train.step import Step
from mlxrl.types import Task, Trajectory, Turn


def completion(text, reward):
    return Trajectory(Task("1+1"), (Turn((1,), (2, 3), (0.0, 0.0), text),), reward=reward, rewards={"f": reward})


def step(index=0, groups=(), **metrics):
    return Step(index, metrics, groups)


def strict(text):
    """JSON without NaN and Infinity, which are not in its standard."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_metrics_are_lines_of_strict_json_with_finite_numbers_or_null(tmp_path):
    sink = MetricsFile(tmp_path)
    sink.step(step(loss=0.5, grad_norm=math.inf))
    sink.step(step(1, ((completion("a", 1.0), completion("b", 0.0)),), loss=math.nan))
    first, second = map(strict, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert (first["step"], first["loss"], first["grad_norm"], first["reward"]) == (1, 0.5, None, None)
    assert (second["step"], second["loss"], second["reward"], second["reward_std"]) == (2, None, 0.5, 0.5**0.5)
    for line in (first, second):
        assert all(value is None or (type(value) in (int, float) and math.isfinite(value)) for value in line.values())


def test_samples_are_the_best_and_the_worst_of_every_group(tmp_path):
    group = (completion("no", 0.0), completion("yes\n\ud800", 1.0), completion("so", 0.5))
    SamplesFile(tmp_path).step(step(groups=(group, group[:1])))
    best, worst, only = read_lines(tmp_path / "samples.jsonl")
    assert best == {
        "step": 1, "group": 0, "kind": "best", "prompt": "1+1", "completion": "yes\n\ud800",
        "reward": 1.0, "rewards": {"f": 1.0}, "stop": "eos", "length": 2,
    }  # fmt: skip
    assert (worst["kind"], worst["completion"]) == ("worst", "no")
    assert (only["group"], only["kind"], only["completion"]) == (1, "best", "no")


def test_a_sample_of_an_episode_has_its_turns(tmp_path):
    turns = (
        Turn((1,), (2, 3), (0.0, 0.0), "left", reward=0.25, observation_text="a maze"),
        Turn((1,), (2,), (0.0,), "up", reward=0.5, invalid=True, observation_text="a wall"),
    )
    SamplesFile(tmp_path).step(step(groups=((Trajectory(Task("go"), turns, reward=0.75, error="step: lost"),),)))
    (line,) = read_lines(tmp_path / "samples.jsonl")
    assert line["error"] == "step: lost"
    assert line["turns"] == [
        {"observation": "a maze", "action": "left", "reward": 0.25, "length": 2, "invalid": False},
        {"observation": "a wall", "action": "up", "reward": 0.5, "length": 1, "invalid": True},
    ]


class Kept(Sink):
    """Notes what it receives."""

    def __init__(self):
        self.seen = []

    def begin(self, run):
        self.seen.append(("begin", run))

    def step(self, step):
        self.seen.append(("step", step))

    def end(self, outcome):
        self.seen.append(("end", outcome))


def send(sink):
    sink.begin("run")
    sink.step("step")
    sink.evaluation("before training", {"accuracy": 1.0})
    sink.end("outcome")


WHOLE = [("begin", "run"), ("step", "step"), ("end", "outcome")]


def test_a_sink_is_an_object_or_a_class_of_such_or_a_function_that_makes_one():
    made = []

    class Remembered(Kept):
        def __init__(self):
            super().__init__()
            made.append(self)

    def make(path="steps.csv"):
        return Remembered()

    own = Kept()
    for given in (own, Remembered, make):
        send(UserSink("mine.py:sink", given))
    assert [own.seen, *(one.seen for one in made)] == [WHOLE] * 3


def test_a_sink_is_a_function_of_a_step_or_an_object_with_some_of_the_methods():
    seen = []
    send(UserSink("f", lambda step: seen.append(step)))
    send(UserSink("f", SimpleNamespace(evaluation=lambda when, summary: seen.append((when, summary)))))
    assert seen == ["step", ("before training", {"accuracy": 1.0})]


async def asynchronous(step): ...


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (3, "'m:f': wanted a function of a step, or an object with begin, step, evaluation, validation, end, got 3"),
        (lambda: None, "'m:f': wanted a function of a step, or an object with begin, step, evaluation, validation, "),
        (lambda: 1 / 0, "'m:f': cannot be made: ZeroDivisionError: division by zero"),
        (int, "'m:f': wanted a function of a step, or an object with begin, step, evaluation, validation, end, got 0"),
        (SimpleNamespace(finish=print), "'m:f': wanted a function of a step, or an object with begin"),
        (asynchronous, "'m:f': step is async; wanted a plain function, which a run waits for"),
        (SimpleNamespace(end=asynchronous), "'m:f': end is async; wanted a plain function, which a run waits for"),
    ],
)  # fmt: skip
def test_what_is_no_sink_is_refused(given, message):
    with pytest.raises(UserError) as found:
        UserSink("m:f", given)
    assert str(found.value).startswith(message)


def test_a_class_that_wants_arguments_is_refused():
    class Wanting(Sink):
        def __init__(self, path): ...

    with pytest.raises(UserError, match=r"'m:f': cannot be made: TypeError: .* missing 1 required positional argument"):
        UserSink("m:f", Wanting)


def test_a_sink_that_raises_is_a_warning_and_receives_nothing_more():
    seen = []

    class Broken(Kept):
        def step(self, step):
            raise OSError("disk\nfull \x1b[31m")

        def end(self, outcome):
            seen.append(outcome)

    sink = UserSink("mine.py:Broken", Broken)
    line = r"sink mine.py:Broken: step: OSError: disk full \x1b[31m; it receives nothing more"
    with pytest.warns(UserWarning, match=f"^{re.escape(line)}$"):
        sink.step("step")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sink.step("step")
        sink.end(Outcome("succeeded", {}))
    assert seen == []


def test_ctrl_c_in_a_sink_is_no_fault_of_it():
    def stop(step):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        UserSink("m:f", stop).step("step")


def test_evaluations_stand_in_the_line_of_the_step_before_them(tmp_path):
    sink = MetricsFile(tmp_path)
    sink.evaluation("before training", {"accuracy": 0.25, "n": 8})
    sink.step(step(loss=0.5))
    sink.step(step(1, loss=0.25))
    sink.evaluation("after step 2", {"accuracy": 0.75, "n": 8})
    sink.step(step(2, loss=0.125))
    sink.evaluation("after training", {"accuracy": math.nan, "n": 8})
    first, second, third = map(strict, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert (first["evaluation/before/accuracy"], first["evaluation/before/n"]) == (0.25, 8)
    assert "evaluation/accuracy" not in first
    assert (second["step"], second["loss"], second["evaluation/accuracy"]) == (2, 0.25, 0.75)
    assert (third["step"], third["loss"], third["evaluation/accuracy"]) == (3, 0.125, None)


def test_validation_stands_beside_evaluations_in_the_same_lines(tmp_path):
    sink = MetricsFile(tmp_path)
    sink.evaluation("before training", {"accuracy": 0.25})
    sink.validation("before training", {"accuracy": 0.5, "best_step": 0})
    sink.step(step(loss=0.5))
    sink.validation("after step 1", {"accuracy": 0.75, "best_step": 1, "decision": "accepted", "interval": [0, 1]})
    sink.evaluation("after step 1", {"accuracy": 0.3})
    (line,) = map(strict, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert {name: value for name, value in line.items() if name.startswith(("eval", "valid"))} == {
        "evaluation/before/accuracy": 0.25, "validation/before/accuracy": 0.5, "validation/before/best_step": 0,
        "validation/accuracy": 0.75, "validation/best_step": 1, "evaluation/accuracy": 0.3,
    }  # fmt: skip
