"""What receives the steps of a run: one small class. Console, metrics.jsonl and samples.jsonl are three of them."""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxrl.awaiting import is_async
from mlxrl.errors import UserError, brief, exception_line
from mlxrl.files import append_lines, extend_last_line
from mlxrl.rewards import best_and_worst
from mlxrl.text import safe
from mlxrl.types import Trajectory

if TYPE_CHECKING:
    from mlxrl.policy.lora import Adapted
    from mlxrl.tables import Config
    from mlxrl.train.step import Step


@dataclass(frozen=True, slots=True)
class Description:
    """What a run is: its title, labelled lines for people, the adapted layers, its config and its folder."""

    title: str
    lines: Sequence[tuple[str, str]]
    adapted: Sequence[Adapted]
    config: Config
    folder: Path


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended: its state, its evaluations, and what to do next."""

    state: str
    evaluation: Mapping[str, Any]
    next_lines: Sequence[str] = ()


class Sink:
    """What receives a run: any object with some of these methods, which do nothing here."""

    def begin(self, run: Description) -> None:
        """The model is loaded; the first evaluation comes next."""

    def step(self, step: Step) -> None:
        """A step was taken. Its metrics are numbers; its groups are there too."""

    def evaluation(self, when: str, summary: Mapping[str, Any]) -> None:
        """The held-out examples were evaluated "before training", "after step 10" or "after training"."""

    def validation(self, when: str, summary: Mapping[str, Any]) -> None:
        """data.validation was evaluated, in the same way, and the adapter judged by it."""

    def end(self, outcome: Outcome) -> None:
        """The run ends, however it does."""


METHODS = ("begin", "step", "evaluation", "validation", "end")


class UserSink(Sink):
    """A sink of the user's: an object with some of a sink's methods, what makes one when called without arguments, or
    a function of a step.

    What it raises is a warning, and it receives nothing more: a run does not end for its sake.
    """

    def __init__(self, name: str, given: Any) -> None:
        if callable(given) and _makes(given):
            try:
                given = given()
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                raise UserError(f"{name!r}", f"cannot be made: {exception_line(error)}") from error
        self._name = name
        self._methods = {method: function for method in METHODS if callable(function := getattr(given, method, None))}
        if not self._methods and callable(given):
            self._methods = {"step": given}
        if not self._methods:
            why = f"wanted a function of a step, or an object with {', '.join(METHODS)}, got {brief(given)}"
            raise UserError(f"{name!r}", why)
        if waiting := next((method for method, function in self._methods.items() if is_async(function)), None):
            raise UserError(f"{name!r}", f"{waiting} is async; wanted a plain function, which a run waits for")

    def begin(self, run: Description) -> None:
        """Hand it on."""
        self._send("begin", run)

    def step(self, step: Step) -> None:
        """Hand it on."""
        self._send("step", step)

    def evaluation(self, when: str, summary: Mapping[str, Any]) -> None:
        """Hand it on."""
        self._send("evaluation", when, summary)

    def validation(self, when: str, summary: Mapping[str, Any]) -> None:
        """Hand it on."""
        self._send("validation", when, summary)

    def end(self, outcome: Outcome) -> None:
        """Hand it on."""
        self._send("end", outcome)

    def _send(self, method: str, *arguments: Any) -> None:
        if method not in self._methods:
            return
        try:
            self._methods[method](*arguments)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001  (user code)
            self._methods = {}
            line = safe(exception_line(error))
            warnings.warn(f"sink {self._name}: {method}: {line}; it receives nothing more", stacklevel=2)


def _makes(given: Any) -> bool:
    """Whether something can be called without arguments, as a class of sinks or a function that makes one."""
    if any(callable(getattr(given, method, None)) for method in METHODS) and not isinstance(given, type):
        return False
    try:
        inspect.signature(given).bind()
    except (TypeError, ValueError):
        return isinstance(given, type)
    return True


class MetricsFile(Sink):
    """metrics.jsonl: the numbers of every step, and of the evaluation after it.

    An evaluation is `evaluation/accuracy` and so on in the line of the step that it comes after; the one before
    training is `evaluation/before/accuracy` and so on in the first line. Those on data.validation are `validation/...`.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "metrics.jsonl"
        self._before: dict[str, Any] = {}

    def step(self, step: Step) -> None:
        append_lines(self._path, [{"step": step.number, "time": time.time(), **step.metrics, **self._before}])
        self._before = {}

    def evaluation(self, when: str, summary: Mapping[str, Any]) -> None:
        self._add("evaluation", summary)

    def validation(self, when: str, summary: Mapping[str, Any]) -> None:
        self._add("validation", summary)

    def _add(self, what: str, summary: Mapping[str, Any]) -> None:
        numbers = {name: value for name, value in summary.items() if isinstance(value, int | float)}
        if not extend_last_line(self._path, {f"{what}/{name}": value for name, value in numbers.items()}):
            self._before |= {f"{what}/before/{name}": value for name, value in numbers.items()}


class SamplesFile(Sink):
    """samples.jsonl: the best and the worst trajectory of every group."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "samples.jsonl"

    def step(self, step: Step) -> None:
        samples = [
            {"step": step.number, "group": number, "kind": kind, **_sample(one)}
            for number, group in enumerate(step.groups)
            for kind, one in zip(("best", "worst"), best_and_worst(group), strict=False)
        ]
        append_lines(self._path, samples)


def _sample(one: Trajectory) -> dict[str, Any]:
    """A trajectory for people, with its turns where an environment answered."""
    sample: dict[str, Any] = {
        "prompt": one.task.prompt, "completion": one.text, "reward": one.reward, "rewards": dict(one.rewards),
        "stop": one.stop, "length": one.length,
    }  # fmt: skip
    if one.error:
        sample["error"] = one.error
    if one.error or any(turn.observation_text for turn in one.turns):
        sample["turns"] = [
            {
                "observation": turn.observation_text, "action": turn.text, "reward": turn.reward,
                "length": len(turn.tokens), "invalid": turn.invalid,
            }
            for turn in one.turns
        ]  # fmt: skip
    return sample
