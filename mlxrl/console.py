"""A run on the console: a header, a line per step, samples, and how it ended. One sink among others.

On a terminal there are colours and a progress bar; elsewhere the same lines without them. Whatever a model or a data
file has written goes through `safe`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console as Rich
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from mlxrl.rewards import best_and_worst, text_of
from mlxrl.runs.sinks import Description, Outcome, Sink
from mlxrl.text import ASCII_BARS, BARS, duration, number, safe, shorten, size, sparkline, trend
from mlxrl.types import Group, Trajectory

if TYPE_CHECKING:
    from mlxrl.train.step import Step

HEADING = "    step   reward  no-signal length trunc.   tok/s  rollout   update     peak"
LEFT = "     left"
"""The last column where there is no progress bar: with it lines are wider than 80 columns."""
HEADING_EVERY = 20
SAMPLE_WIDTH = 240
"""Characters of a completion that are shown."""
MARKS = {"+": ("▲", "green"), "-": ("▼", "red"), "=": ("·", "dim"), "": (" ", "")}


class Console(Sink):
    """Writes a run of so many steps to a stream, standard output by default."""

    def __init__(self, steps: int, samples_every: int = 0, *, stream: IO[str] | None = None, width: int | None = None):
        self._rich = Rich(file=stream, width=width, highlight=False, emoji=False, markup=False)
        self._terminal = self._rich.is_terminal and not self._rich.is_dumb_terminal
        self._unicode = self._rich.encoding.lower().replace("-", "").startswith("utf")
        self._steps, self._samples_every = steps, samples_every
        self._rewards: list[float] = []
        self._started: float | None = None
        self._progress: Progress | None = None

    def begin(self, run: Description) -> None:
        """What the run is, as labelled lines, and the table of adapted layers."""
        self._print(run.title, "bold")
        labels = max(len(label) for label, _ in run.lines)
        for label, value in run.lines:
            self._print(f"  {label:<{labels}}  {value}")
        width = max((len(line.key) for line in run.adapted), default=0)
        self._print(f"  {'adapted':<{width}}  {'layer':<16}{'shape':>16}{'times':>7}{'parameters':>12}", "dim")
        for line in run.adapted:
            shape = " x ".join(map(str, line.shape))
            self._print(f"  {line.key:<{width}}  {line.layer:<16}{shape:>16}{line.count:>7}{line.parameters:>12,}")

    @contextmanager
    def busy(self, doing: str) -> Generator[None]:
        """The span of something that takes a while; a terminal shows it."""
        if not self._terminal or self._progress is not None:
            yield
            return
        with self._rich.status(Text(doing, "dim")):
            yield

    def step(self, step: Step) -> None:
        """The line of a step, and a line for whatever did not go well in it."""
        done = step.number
        if self._started is None:
            self._start(done - 1)
        if len(self._rewards) % HEADING_EVERY == 0:
            self._print(HEADING if self._terminal else HEADING + LEFT, "dim")
        self._line(step.metrics, done)
        for warning in step.warnings:
            self._print(f"  step {done}: {safe(warning)}", "yellow")
        if self._samples_every and done % self._samples_every == 0 and step.groups:
            self._samples(step.groups)
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=done)

    def evaluation(self, when: str, summary: Mapping[str, Any]) -> None:
        """An evaluation of the held-out examples."""
        self._evaluated(f"held-out {when}", summary, "bold")

    def validation(self, when: str, summary: Mapping[str, Any]) -> None:
        """An evaluation of data.validation, and what it decided."""
        self._evaluated(f"validation {when}", summary, "")
        if summary.get("decision") == "rejected":
            (low, high), least = summary["interval"], -summary["margin"] or 0
            why = f"its difference from the best, {low:+.3f} to {high:+.3f}, lies below {least:g}"
            self._print(f"  validation {when}: the adapter is taken back, because {why}", "yellow")

    def _evaluated(self, what: str, summary: Mapping[str, Any], style: str) -> None:
        passes = "".join(f", {name} {value:.3f}" for name, value in summary.items() if name.startswith("pass@"))
        numbers = f"accuracy {summary['accuracy']:.3f}, mean reward {summary['mean_reward']:.3f}{passes}"
        self._print(f"  {what}: {numbers}, {summary['n']} examples", style)
        if warning := summary.get("warning"):
            self._print(f"  {what}: {safe(warning)}", "yellow")

    def end(self, outcome: Outcome) -> None:
        """How the run ended: the course of the reward, before and after, and what to do next."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        known = [reward for reward in self._rewards if math.isfinite(reward)]
        if outcome.state == "succeeded" and known:
            bars = sparkline(known, bars=BARS if self._unicode else ASCII_BARS)
            self._print(f"  reward    {known[0]:.3f} {bars} {known[-1]:.3f}", "bold")
        if "difference" in outcome.evaluation:
            self._compared(outcome.evaluation)
        for line in outcome.next_lines:
            self._print(f"  {line}")

    def _start(self, done: int) -> None:
        """Training begins: the time left is estimated from here, and a terminal has a progress bar."""
        self._started = time.monotonic()
        if self._terminal:
            columns = (
                TextColumn("  training"), BarColumn(bar_width=None), MofNCompleteColumn(), TextColumn("left"),
                TimeRemainingColumn(),
            )  # fmt: skip
            self._progress = Progress(*columns, console=self._rich, transient=True, expand=True)
            self._progress.add_task("training", total=self._steps, completed=done)
            self._progress.start()

    def _line(self, metrics: Mapping[str, Any], done: int) -> None:
        """Mean reward, zero-variance groups, mean tokens of a completion, the share that ran into the limit, sampled
        tokens a second, seconds of rollout and update, peak memory, and the time left."""

        def value(name: str, form: str) -> str:
            return number(float(metrics.get(name, math.nan)), form)

        reward = float(metrics.get("reward", math.nan))
        mark, style = MARKS[trend(reward, self._rewards)]
        self._rewards.append(reward)
        taken = time.monotonic() - (self._started or 0.0)
        left = taken / max(len(self._rewards) - 1, 1) * (self._steps - done) if len(self._rewards) > 1 else math.nan
        groups = f"{value('groups/zero_variance', '.0f')}/{value('groups/sampled', '.0f')}"
        line = Text(f"{f'{done}/{self._steps}':>8} {number(reward):>7} ")
        line.append(mark if self._unicode or mark == " " else {"▲": "+", "▼": "-"}.get(mark, "="), style)
        line.append(
            f"{groups:>10}{value('completions/mean_length', '.1f'):>7}{value('completions/clipped_ratio', '.0%'):>7}"
            f"{value('rollout/tokens_per_second', '.0f'):>8}{value('seconds/rollout', '.2f'):>7} s"
            f"{value('seconds/update', '.2f'):>7} s{size(float(metrics.get('memory/peak', math.nan))):>9}"
        )
        if not self._terminal:
            line.append(f"{duration(left):>9}")
        self._show(line)

    def _samples(self, groups: Sequence[Group]) -> None:
        """The best and the worst trajectory of the group whose rewards differ most."""
        group = max(groups, key=_spread)
        prompt = group[0].task.prompt
        first = next((one.turns[0].observation_text for one in group if one.turns), "")
        shown = first or (prompt if isinstance(prompt, str) else text_of(list(prompt)))
        self._print(f"  prompt {shorten(safe(shown), SAMPLE_WIDTH)}", "cyan")
        for kind, one in zip(("best", "worst"), best_and_worst(group), strict=False):
            numbers = f"{number(one.reward):>6}  {one.length} tokens, {one.stop}"
            said = shorten(safe(_said(one)), SAMPLE_WIDTH)
            self._print(f"  {kind:<5}  {numbers}  {said}", "green" if kind == "best" else "red")

    def _compared(self, evaluation: Mapping[str, Any]) -> None:
        before, after, (low, high) = evaluation["before"], evaluation["after"], evaluation["interval"]
        accuracy = f"accuracy {before['accuracy']:.3f} -> {after['accuracy']:.3f}"
        reward = f"mean reward {before['mean_reward']:.3f} -> {after['mean_reward']:.3f}"
        self._print(f"  held-out  {accuracy}, {reward}", "bold")
        interval = f"95 % interval {low:+.3f} to {high:+.3f}, {evaluation.get('pairs', after['n'])} pairs"
        style = "green" if low > 0 else "red" if high < 0 else "yellow"
        self._print(f"            difference {evaluation['difference']:+.3f}, {interval}", style)
        counts = ", ".join(f"{evaluation[name]} {name}" for name in ("improved", "worsened", "equal"))
        p = f", McNemar p = {evaluation['mcnemar_p']:.3g}" if "mcnemar_p" in evaluation else ""
        self._print(f"            {counts}{p}")

    def _print(self, line: str, style: str = "") -> None:
        encoding = self._rich.encoding
        self._show(Text(line.encode(encoding, "backslashreplace").decode(encoding), style))

    def _show(self, line: Text) -> None:
        self._rich.print(line, soft_wrap=True)


def _said(one: Trajectory) -> str:
    """What a model has said; of an episode, what it read in between, too."""
    first = one.turns[0].text if one.turns else ""
    return " ".join([first, *(f"[{turn.observation_text}] {turn.text}" for turn in one.turns[1:])])


def _spread(group: Group) -> float:
    rewards = [one.reward for one in group if math.isfinite(one.reward)]
    return max(rewards) - min(rewards) if rewards else -1.0
