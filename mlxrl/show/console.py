"""A run on the console: a header, a row per step, samples, and how it ended.

On a terminal there are colours, a panel and a progress bar. Elsewhere there are plain lines with the same content.
Whatever a model or a data file has written is shown through `safe`.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

from rich import box
from rich.console import Console as Rich
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from mlxrl.rewards import best_and_worst, text_of
from mlxrl.show import text
from mlxrl.show.row import HEADING, Row, row
from mlxrl.types import Group, Trajectory

if TYPE_CHECKING:
    from mlxrl.policy.lora import Adapted
    from mlxrl.train.loop import Step

HEADING_EVERY = 20
SAMPLE_WIDTH = 240
"""Characters of a completion that are shown."""


class Unbroken(Rich):
    """A console whose reader may go away: what it would have shown is dropped, and the run goes on."""

    def on_broken_pipe(self) -> None:
        """Fall silent. The stream is turned away, so that nothing raises when Python flushes it at the end."""
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.file.fileno())
        os.close(nowhere)


class Console:
    """Writes a run of so many steps to a stream, standard output by default."""

    def __init__(self, steps: int, *, stream: IO[str] | None = None, width: int | None = None) -> None:
        self._rich = Unbroken(file=stream, width=width, highlight=False, emoji=False, markup=False)
        self._plain = not self._rich.is_terminal or self._rich.is_dumb_terminal
        self._unicode = self._rich.encoding.lower().replace("-", "").startswith("utf")
        self._steps = steps
        self._rewards: list[float] = []
        self._started = time.monotonic()
        self._progress: Progress | None = None

    def header(self, title: str, pairs: Sequence[tuple[str, str]]) -> None:
        """What the run is, as labelled lines."""
        labels = max(len(label) for label, _ in pairs)
        if self._plain:
            self._say(title)
            for label, value in pairs:
                self._say(f"  {label:<{labels}}  {value}")
            return
        grid = Table.grid(padding=(0, 2))
        for label, value in pairs:
            grid.add_row(Text(label, "dim"), Text(self._fit(value), overflow="fold"))
        self._rich.print(Panel(grid, title=Text(title, "bold"), title_align="left", border_style="cyan"))

    def adapted(self, lines: Sequence[Adapted]) -> None:
        """The table of adapted layers."""
        width = max((len(line.key) for line in lines), default=0)
        self._say(f"  {'adapted':<{width}}  {'layer':<16}{'shape':>16}{'times':>7}{'parameters':>12}", "dim")
        for line in lines:
            shape = " x ".join(map(str, line.shape))
            self._say(f"  {line.key:<{width}}  {line.layer:<16}{shape:>16}{line.count:>7}{line.parameters:>12,}")

    def note(self, line: str, style: str = "dim") -> None:
        """A line of its own."""
        self._say(f"  {line}", style)

    @contextmanager
    def busy(self, doing: str) -> Generator[None]:
        """The span of something that takes a while; a terminal says so."""
        if self._plain or self._progress is not None:
            yield
            return
        with self._rich.status(Text(doing, "dim")):
            yield

    def start(self) -> None:
        """Training begins: the progress bar appears, and the time left is reckoned from here."""
        self._started = time.monotonic()
        if self._plain:
            return
        columns = (
            TextColumn("  training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=self._rich, transient=True, expand=True)
        self._progress.add_task("training", total=self._steps)
        self._progress.start()

    def step(self, step: Step) -> None:
        """The row of a step, and a line for whatever did not go well in it."""
        shown = row(step.metrics, step.index + 1, self._steps, self._rewards, self._unicode)
        if len(self._rewards) % HEADING_EVERY == 0:
            self._say(HEADING + ("     left" if self._plain else ""), "dim")
        self._rewards.append(float(step.metrics.get("reward", math.nan)))
        self._row(shown, self._left(step.index + 1))
        for warning in shown.warnings:
            self._say(f"  step {step.index + 1}: {warning}", "yellow")
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=step.index + 1)

    def samples(self, groups: Sequence[Group]) -> None:
        """The best and the worst attempt of the group whose rewards differ most."""
        group = max(groups, key=_spread)
        prompt = group[0].task.prompt
        first = next((one.turns[0].observation_text for one in group if one.turns), "")
        asked = self._shown(first or (prompt if isinstance(prompt, str) else text_of(list(prompt))))
        if self._plain:
            self._say(f"  asked  {asked}")
            for kind, one in zip(("best", "worst"), best_and_worst(group), strict=False):
                reward, tokens, stop, completion = self._cells(one)
                self._say(f"  {kind:<5}  {reward:>6}  {tokens} tokens, {stop}  {completion}")
            return
        table = Table(
            title=Text(asked), title_justify="left", title_style="cyan", width=self._rich.width, box=box.ROUNDED
        )
        for name, justify in (("", "left"), ("reward", "right"), ("tokens", "right"), ("stop", "left")):
            table.add_column(name, justify=justify, no_wrap=True)  # pyright: ignore[reportArgumentType]
        table.add_column("completion", overflow="fold", ratio=1)
        for kind, one in zip(("best", "worst"), best_and_worst(group), strict=False):
            table.add_row(kind, *map(Text, self._cells(one)), style="green" if kind == "best" else "red")
        self._rich.print(table)

    def evaluation(self, when: str, summary: Mapping[str, Any]) -> None:
        """An evaluation of the held-out rows."""
        self._say(
            f"  held-out {when}: accuracy {summary['accuracy']:.3f}, mean reward {summary['mean_reward']:.3f}, "
            f"{summary['n']} rows",
            "bold",
        )

    def finish(self, evaluation: Mapping[str, Any], lines: Sequence[str] = ()) -> None:
        """How the run ended: the course of the reward, before and after, and what to do next."""
        self.close()
        known = [reward for reward in self._rewards if math.isfinite(reward)]
        if known:
            bars = text.sparkline(known, bars=text.BARS if self._unicode else text.ASCII_BARS)
            self._say(f"  reward    {known[0]:.3f} {bars} {known[-1]:.3f}", "bold")
        if "difference" in evaluation:
            self._compared(evaluation)
        for line in lines:  # commands among them, which have to survive being copied
            self._rich.print(Text(self._fit(f"  {line}")), soft_wrap=True)

    def close(self) -> None:
        """Take the progress bar away."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _compared(self, evaluation: Mapping[str, Any]) -> None:
        before, after = evaluation["before"], evaluation["after"]
        low, high = evaluation["interval"]
        self._say(
            f"  held-out  accuracy {before['accuracy']:.3f} -> {after['accuracy']:.3f}, "
            f"mean reward {before['mean_reward']:.3f} -> {after['mean_reward']:.3f}",
            "bold",
        )
        style = "green" if low > 0 else "red" if high < 0 else "yellow"
        self._say(
            f"            difference {evaluation['difference']:+.3f}, "
            f"95 % interval {low:+.3f} to {high:+.3f}, {after['n']} pairs",
            style,
        )

    def _row(self, shown: Row, left: float) -> None:
        line = Text(shown.before)
        line.append(shown.trend, {"+": "green", "-": "red"}.get(shown.direction, "dim"))
        line.append(shown.after)
        self._print(line.append(f"{text.duration(left):>9}") if self._plain else line)

    def _left(self, done: int) -> float:
        first = done - len(self._rewards)
        return (time.monotonic() - self._started) / max(done - first, 1) * (self._steps - done)

    def _cells(self, one: Trajectory) -> list[str]:
        return [text.number(one.reward), str(one.length), one.stop, self._shown(_said(one))]

    def _shown(self, untrusted: str) -> str:
        return text.shorten(text.safe(untrusted), SAMPLE_WIDTH)

    def _say(self, line: str, style: str = "") -> None:
        self._print(Text(self._fit(line), style))

    def _print(self, line: Text) -> None:
        self._rich.print(line, soft_wrap=self._plain, crop=not self._plain)

    def _fit(self, line: str) -> str:
        """Escape what the stream's encoding cannot hold."""
        encoding = self._rich.encoding
        return line.encode(encoding, "backslashreplace").decode(encoding)


def _said(one: Trajectory) -> str:
    """What a model has said; of an episode, what it was told in between, too."""
    first = one.turns[0].text if one.turns else ""
    return " ".join([first, *(f"[{turn.observation_text}] {turn.text}" for turn in one.turns[1:])])


def _spread(group: Group) -> float:
    rewards = [one.reward for one in group if math.isfinite(one.reward)]
    return max(rewards) - min(rewards) if rewards else -1.0
