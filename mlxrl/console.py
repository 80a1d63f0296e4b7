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
from mlxrl.text import ASCII_BARS, BARS, duration, evaluated, number, safe, shorten, size, sparkline, trend
from mlxrl.train.comparison import gain_interval
from mlxrl.types import Group, Trajectory

if TYPE_CHECKING:
    from mlxrl.train.step import Step

HEADING = "    step   reward  no-signal length trunc.   tok/s  rollout   update     peak"
ANSWERS_HEADING = "    step     loss   perplexity length trunc. padding   tok/s   update     peak"
"""Of steps that learn from answers of the data."""
LEFT = "     left"
"""The last column where there is no progress bar: with it lines are wider than 80 columns."""
HEADING_EVERY = 20
SAMPLE_WIDTH = 240
"""Characters of a completion that are printed."""
MARKS = {"+": ("▲", "green"), "-": ("▼", "red"), "=": ("·", "dim"), "": (" ", "")}


class Console(Sink):
    """Writes a run of so many steps to a stream, standard output by default."""

    def __init__(self, steps: int, samples_every: int = 0, *, stream: IO[str] | None = None, width: int | None = None):
        self._rich = Rich(file=stream, width=width, highlight=False, emoji=False, markup=False)
        self._terminal = self._rich.is_terminal and not self._rich.is_dumb_terminal
        self._unicode = self._rich.encoding.lower().replace("-", "").startswith("utf")
        self._steps, self._samples_every = steps, samples_every
        self._course: list[float] = []
        self._label = "reward"
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
        if len(self._course) % HEADING_EVERY == 0:
            heading = ANSWERS_HEADING if step.demonstrated else HEADING
            self._print(heading if self._terminal else heading + LEFT, "dim")
        self._label = "loss" if step.demonstrated else "reward"
        self._line(step)
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
            (low, high), least = gain_interval(summary), -summary["margin"] or 0
            why = f"its difference from the best, {low:+.3f} to {high:+.3f}, lies below {least:g}"
            self._print(f"  validation {when}: the adapter is taken back, because {why}", "yellow")

    def _evaluated(self, what: str, summary: Mapping[str, Any], style: str) -> None:
        self._print(f"  {what}: {evaluated(summary)}", style)
        if warning := summary.get("warning"):
            self._print(f"  {what}: {safe(warning)}", "yellow")

    def end(self, outcome: Outcome) -> None:
        """How the run ended: the course of the reward or the loss, before and after, and what to do next."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        known = [reward for reward in self._course if math.isfinite(reward)]
        if outcome.state == "succeeded" and known:
            bars = sparkline(known, bars=BARS if self._unicode else ASCII_BARS)
            self._print(f"  {self._label:<8}  {known[0]:.3f} {bars} {known[-1]:.3f}", "bold")
        if "difference" in outcome.evaluation:
            self._compared(outcome.evaluation)
        if "loss_difference" in outcome.evaluation:
            self._compared_losses(outcome.evaluation)
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

    def _line(self, step: Step) -> None:
        """Mean reward or loss, what `_sampled` or `_learned` adds, seconds of the update, peak memory, time left."""
        metrics, done = step.metrics, step.number
        current = float(metrics.get("loss" if step.demonstrated else "reward", math.nan))
        mark, style = MARKS[trend(current, self._course)]
        if step.demonstrated:  # the lower the better
            style = {"green": "red", "red": "green"}.get(style, style)
        self._course.append(current)
        taken = time.monotonic() - (self._started or 0.0)
        left = taken / max(len(self._course) - 1, 1) * (self._steps - done) if len(self._course) > 1 else math.nan
        line = Text(f"{f'{done}/{self._steps}':>8} {number(current):>7} ")
        line.append(mark if self._unicode or mark == " " else {"▲": "+", "▼": "-"}.get(mark, "="), style)
        line.append(_learned(metrics) if step.demonstrated else _sampled(metrics))
        line.append(f"{_of(metrics, 'seconds/update', '.2f'):>7} s{size(metrics.get('memory/peak', math.nan)):>9}")
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
            said, length = shorten(safe(_said(one)), SAMPLE_WIDTH), f"{one.length} tokens, {one.stop}"
            if self._label == "loss":
                self._print(f"  answer {length}  {said}", "green")
            else:
                style = "green" if kind == "best" else "red"
                self._print(f"  {kind:<5}  {number(one.reward):>6}  {length}  {said}", style)

    def _compared(self, evaluation: Mapping[str, Any]) -> None:
        before, after = evaluation["before"], evaluation["after"]
        accuracy = f"accuracy {before['accuracy']:.3f} -> {after['accuracy']:.3f}"
        reward = f"mean reward {before['mean_reward']:.3f} -> {after['mean_reward']:.3f}"
        self._print(f"  held-out  {accuracy}, {reward}", "bold")
        of = f"{evaluation.get('pairs', after['n'])} pairs"
        self._difference(evaluation["difference"], evaluation["interval"], 3, of)
        counts = ", ".join(f"{evaluation[name]} {name}" for name in ("improved", "worsened", "equal"))
        p = f", McNemar p = {evaluation['mcnemar_p']:.3g}" if "mcnemar_p" in evaluation else ""
        self._print(f"            {counts}{p}")

    def _compared_losses(self, evaluation: Mapping[str, Any]) -> None:
        before, after = evaluation["before"], evaluation["after"]
        losses = f"loss {before['loss']:.4f} -> {after['loss']:.4f}"
        perplexity = f"perplexity {before['perplexity']:.4g} -> {after['perplexity']:.4g}"
        self._print(f"  held-out  {losses}, {perplexity}", "bold")
        of = f"{after['answer_tokens']:,} tokens"
        self._difference(evaluation["loss_difference"], evaluation["loss_interval"], 4, of, better=-1)

    def _difference(self, mean: float, interval: Sequence[float], digits: int, of: str, better: int = 1) -> None:
        """A difference with its 95 % interval, green where all of that is better: above 0, or below it for -1."""
        low, high = interval
        worst, best = sorted((better * low, better * high))
        words = f"{mean:+.{digits}f}, 95 % interval {low:+.{digits}f} to {high:+.{digits}f}, {of}"
        style = "green" if worst > 0 else "red" if best < 0 else "yellow"
        self._print(f"            difference {words}", style)

    def _print(self, line: str, style: str = "") -> None:
        encoding = self._rich.encoding
        self._show(Text(line.encode(encoding, "backslashreplace").decode(encoding), style))

    def _show(self, line: Text) -> None:
        self._rich.print(line, soft_wrap=True)


def _of(metrics: Mapping[str, Any], name: str, form: str) -> str:
    return number(float(metrics.get(name, math.nan)), form)


def _sampled(metrics: Mapping[str, Any]) -> str:
    """Zero-variance groups, mean tokens of a completion, the share that ran into the limit, sampled tokens a second,
    seconds of the rollout."""
    groups = f"{_of(metrics, 'groups/zero_variance', '.0f')}/{_of(metrics, 'groups/sampled', '.0f')}"
    return (
        f"{groups:>10}{_of(metrics, 'completions/mean_length', '.1f'):>7}"
        f"{_of(metrics, 'completions/clipped_ratio', '.0%'):>7}"
        f"{_of(metrics, 'rollout/tokens_per_second', '.0f'):>8}{_of(metrics, 'seconds/rollout', '.2f'):>7} s"
    )


def _learned(metrics: Mapping[str, Any]) -> str:
    """Perplexity, mean tokens of an answer, the share that was cut, that of padding, tokens read a second."""
    read, padding = metrics["tokens/read"], metrics["tokens/padding"]
    rate = read / max(metrics["seconds/update"], 1e-9)
    return (
        f"{_of(metrics, 'perplexity', '.4g'):>12}{_of(metrics, 'completions/mean_length', '.1f'):>7}"
        f"{_of(metrics, 'completions/clipped_ratio', '.0%'):>7}{padding / max(read + padding, 1):>8.0%}{rate:>8.0f}"
    )


def _said(one: Trajectory) -> str:
    """The completion; of an episode, its turns with the observations between them."""
    first = one.turns[0].text if one.turns else ""
    return " ".join([first, *(f"[{turn.observation_text}] {turn.text}" for turn in one.turns[1:])])


def _spread(group: Group) -> float:
    rewards = [one.reward for one in group if math.isfinite(one.reward)]
    return max(rewards) - min(rewards) if rewards else -1.0
