"""The runs in a folder, and one run, read from the files of their folders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxrl.errors import UserError
from mlxrl.files import read_lines
from mlxrl.runs.folder import RunFolder, near
from mlxrl.text import number, safe, shorten, sparkline
from mlxrl.toml import parsed

WIDTH = 200
"""Characters of a completion that are printed."""
SAMPLES = 4
NUMBERS = ("accuracy", "mean_reward", "loss", "perplexity")
"""Of an evaluation, those that it has."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A run in a line. step: taken, of `steps`; reward: of the last step; held_out: accuracy before and last, or the
    loss on answers of the data where there is none."""

    folder: str
    state: str
    model: str
    algorithm: str
    step: int
    steps: int
    reward: float | None
    held_out: tuple[float | None, float | None]
    started: str

    @classmethod
    def of(cls, folder: RunFolder) -> RunSummary:
        """The summary of a run's folder, of which every file may be missing or damaged."""
        config, manifest, metrics = _config(folder), folder.manifest(), _metrics(folder)
        last: Mapping[str, Any] = metrics[-1] if metrics else {}
        events = [event for event in read_lines(folder.path / "events.jsonl") if event.get("event") == "evaluation"]
        scores = [_number(event.get("accuracy", event.get("loss")), None) for event in events]
        return cls(
            near(folder.path), folder.state(), Path(str(_of(config, "model", "id"))).name,
            str(_of(config, "algorithm", "name")), last.get("step", 0), _number(config.get("steps"), 0),
            _number(last.get("reward"), None), (scores[0], scores[-1]) if scores else (None, None),
            str(manifest.get("started", "")),
        )  # fmt: skip

    def line(self) -> str:
        """The summary for a terminal, under `HEADING`."""
        steps = f"{self.step}/{self.steps}"
        reward = "-" if self.reward is None else f"{self.reward:.3f}"
        first, last = ("-" if one is None else f"{one:.3f}" for one in self.held_out)
        held_out = f"{first} -> {last}" if self.held_out[0] is not None else "-"
        words = f"{self.state:<12} {shorten(self.model, 24):<24} {shorten(self.algorithm, 14):<14}"
        return safe(f"{words} {steps:>9} {reward:>7} {held_out:>16}  {self.folder}")


HEADING = f"{'state':<12} {'model':<24} {'algorithm':<14} {'step':>9} {'reward':>7} {'held-out':>16}  run"


def runs_in(path: str | Path) -> list[RunSummary]:
    """The runs in a folder, the latest last.

    Raises:
        UserError: there is no such folder.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(str(path), "no such folder; wanted one with runs in it")
    found = [RunSummary.of(RunFolder(one.parent.absolute())) for one in folder.glob("*/manifest.json")]
    return sorted(found, key=lambda one: (one.started, one.folder))


def described(folder: RunFolder) -> Iterator[str]:
    """A run as lines for a terminal: its summary, the course of its reward, its evaluations, its last samples."""
    one = RunSummary.of(folder)
    yield HEADING
    yield one.line()
    metrics = _metrics(folder)
    name = "loss" if any("perplexity" in line for line in metrics) else "reward"
    course = [line[name] for line in metrics if isinstance(line.get(name), int | float)]
    if course:
        yield f"{name:<8}  {course[0]:.3f} {sparkline(course)} {course[-1]:.3f}"
    yield from _evaluations(folder)
    events = read_lines(folder.path / "events.jsonl")
    if why := next((event["error"] for event in reversed(events) if event.get("error")), ""):
        yield safe(f"error     {why}")
    for sample in read_lines(folder.path / "samples.jsonl")[-SAMPLES:]:
        words = f"{sample.get('kind', ''):<5} {number(sample.get('reward') or 0.0):>6}"
        yield safe(f"step {sample.get('step')}  {words}  {shorten(str(sample.get('completion', '')), WIDTH)}")
    if one.state in ("cancelled", "interrupted", "failed"):
        yield f"go on with  {folder.resume_command}"


def _evaluations(folder: RunFolder) -> Iterator[str]:
    events = [event for event in read_lines(folder.path / "events.jsonl") if event.get("event") == "evaluation"]
    for when, event in {event.get("when"): event for event in events}.items():  # the last one, of a resumed run
        numbers = "".join(f"{key.replace('_', ' ')} {event[key]}, " for key in NUMBERS if key in event)
        yield safe(f"held-out  {when}: {numbers}{event.get('n')} examples")
    found = folder.evaluation()
    if found.get("difference") is not None:
        low, high = found["interval"]
        counts = ", ".join(f"{found[name]} {name}" for name in ("improved", "worsened", "equal"))
        yield f"held-out  difference {found['difference']:+.3f}, 95 % interval {low:+.3f} to {high:+.3f}, {counts}"
    if found.get("loss_difference") is not None:
        low, high = found["loss_interval"]
        yield f"held-out  loss difference {found['loss_difference']:+.4f}, 95 % interval {low:+.4f} to {high:+.4f}"
    if best := found.get("validation"):
        name = "mean_reward" if "mean_reward" in best else "loss"
        value = f"{name.replace('_', ' ')} {best[name]:.3f}"
        yield f"best      after step {best['best_step']}: {value} on data.validation"


def _metrics(folder: RunFolder) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that are of a step."""
    return [line for line in read_lines(folder.path / "metrics.jsonl") if isinstance(line.get("step"), int)]


def _number(value: Any, other: int | None) -> Any:
    return value if isinstance(value, int | float) else other


def _config(folder: RunFolder) -> Mapping[str, Any]:
    try:
        return parsed(folder.path / "config.toml")
    except UserError:
        return {}


def _of(config: Mapping[str, Any], table: str, key: str) -> Any:
    value = config.get(table)
    return value.get(key, "-") if isinstance(value, Mapping) else "-"
