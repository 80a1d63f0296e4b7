"""`mlxrl plan`: what a run needs in memory, whether that fits, and what would make it fit."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlxrl.cli import compose
from mlxrl.cli.fit import GB, Plan, fitted, largest, machine, now, peak_of, plan_of, remedies
from mlxrl.config import Config
from mlxrl.files import read_lines
from mlxrl.policy.memory import Part
from mlxrl.policy.shapes import Uncovered
from mlxrl.train.pack import TOKENS_PER_PASS
from mlxrl.types import Task

NOTE = "on a GPU these are estimates: attention without a matrix of scores, less in flight"


def settled(settings: Config, rows: Sequence[Task]) -> tuple[Config, str]:
    """The settings with train.tokens_per_pass chosen where it is left out, and how, in words ("" if it is given).

    Raises:
        ValueError: a file of the model is not what it should be.
    """
    given = settings.train.tokens_per_pass is not None
    try:
        plan = plan_of(settings, rows)
    except (Uncovered, OSError) as why:
        if given:
            return settings, ""
        settings = replace(settings, train=replace(settings.train, tokens_per_pass=TOKENS_PER_PASS))
        return settings, f"{TOKENS_PER_PASS:,}, as the plan does not cover {why}"
    if given:
        return settings, ""
    chosen = largest(plan)
    need, there = gigabytes(peak_of(chosen, "update")), gigabytes(plan.memory)
    return (
        chosen.settings,
        f"{chosen.settings.train.tokens_per_pass:,}, with which an update needs about {need} of {there}",
    )


def told(settings: Config, rows: Sequence[Task], chosen: str) -> list[str]:
    """The plan as lines for a dry run, with how the size of a pass was chosen."""
    first = [f"tokens_per_pass is at most {chosen}"] if chosen else []
    try:
        return [*first, *lines(plan_of(settings, rows))]
    except (Uncovered, OSError) as why:
        return [*first, f"not planned; not covered: {why}"]


def limited(settings: Config) -> AbstractContextManager[None]:
    """The span of a run, in which MLX keeps no more buffers than [memory] says."""
    from mlxrl.runs.memory_limits import limits

    there, gpu = machine()
    asked = settings.memory
    cache = there / 4 if asked.cache_limit is None else asked.cache_limit * GB
    wired = None if asked.wired_limit is None or not gpu else round(asked.wired_limit * GB)
    return limits(round(cache), wired)


def command(settings: Config, name: str, *, memory: float | None, fit: bool, as_json: bool) -> int:
    """Print the plan of a run; 0 where it fits, 1 where not.

    Args:
        name: of the run, where the config has no folder for it; memory: GB, None for the machine's.
    """
    rows = compose.training_rows(settings)
    try:
        plan = plan_of(settings, rows, memory)
    except Uncovered as why:
        raise ValueError(f"plan: not covered: {why}") from None
    chosen = fitted(plan) if fit else ()
    plan = plan.with_(*chosen) if fit else plan if settings.train.tokens_per_pass else largest(plan)
    seconds = past_seconds(settings, name)
    if as_json:
        print(json.dumps(report(plan, chosen, seconds), indent=2))
    else:
        show(plan, chosen, seconds)
    return 0 if plan.fits else 1


def past_seconds(settings: Config, name: str) -> dict[str, float]:
    """The median seconds of the parts of a step in the run's folder, or in that of the last run of its name."""
    folder = Path(settings.run.folder) if settings.run.folder else Path("runs") / name
    found = sorted(folder.parent.glob(f"{folder.name}*/metrics.jsonl"), key=lambda path: path.stat().st_mtime)
    lines = read_lines(found[-1]) if found else []
    names = sorted({key for line in lines for key in line if key.startswith("seconds/")})
    return {
        key.removeprefix("seconds/"): round(statistics.median(line[key] for line in lines if key in line), 3)
        for key in names
    }


def report(plan: Plan, chosen: Sequence[tuple[str, Any]], seconds: dict[str, float]) -> dict[str, Any]:
    """The plan as plain values, bytes and seconds."""
    work = plan.work
    return {
        "fits": plan.fits,
        "memory": plan.memory,
        "peak": plan.highest.peak,
        "estimated": plan.gpu,
        "prompt": {"tokens": plan.prompt, "counted": plan.told},
        "pass": {"prefix": work.prefix, "rows": work.pass_rows, "tokens": work.pass_tokens},
        "parts": {part.name: {"peak": part.peak, **part.terms} for part in plan.parts},
        "settings": dict(now(plan, name) for name in FITTED),
        "fit": dict(chosen),
        "remedies": [] if plan.fits else [dict(one) for one in remedies(plan)],
        "seconds": seconds,
    }


FITTED = ("train.tokens_per_pass", "train.recompute", "rollout.max_rows")


def show(plan: Plan, chosen: Sequence[tuple[str, Any]], seconds: dict[str, float]) -> None:
    """Print the plan as a table and a sentence."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("part", "peak", "of which"):
        table.add_column(title, justify="right" if title == "peak" else "left")
    for part in plan.parts:
        table.add_row(part.name, gigabytes(part.peak), terms(part))
    Console(width=118, highlight=False).print(table)
    for line in lines(plan, seconds)[len(plan.parts) :]:
        print(line)
    for name, value in chosen:
        print(f"{name}={toml(value)}")


def lines(plan: Plan, seconds: dict[str, float] | None = None) -> list[str]:
    """The plan as lines of text: its parts, what was assumed, seconds of a step, and whether it fits."""
    found = [f"{part.name}: {gigabytes(part.peak)} = {terms(part)}" for part in plan.parts]
    found.append(f"prompt: {plan.prompt} tokens, {plan.told}")
    work = plan.work
    behind = f" behind a prompt of {work.prefix}" if work.prefix else ""
    found.append(f"a pass: {work.pass_rows} rows of {work.pass_tokens} tokens{behind}, of at most "
                 f"{plan.settings.train.tokens_per_pass or TOKENS_PER_PASS:,}")  # fmt: skip
    if plan.gpu:
        found.append(NOTE)
    if plan.hears and plan.settings.train.max_tokens_per_row is None:
        found.append("what the environment answers is not counted; train.max_tokens_per_row would bound an update")
    if seconds:
        each = ", ".join(f"{name} {value:g} s" for name, value in seconds.items())
        found.append(f"seconds of a step, as the last run took: {sum(seconds.values()):.2f} s ({each})")
    return [*found, sentence(plan)]


def sentence(plan: Plan) -> str:
    """Whether it fits and, if not, what would."""
    part, there = plan.highest, gigabytes(plan.memory)
    deaf = ", without what the environment answers" if plan.hears else ""
    if plan.fits:
        return f"fits in {gigabytes(part.peak)} of {there}{deaf}"
    ways = [" ".join(f"{name}={toml(value)}" for name, value in one) for one in remedies(plan)]
    advice = (
        f"these settings would: {'; or '.join(ways[:3])}" if ways else "no setting of the plan would: a smaller or "
    )
    advice += "" if ways else "packed model, or more memory"
    return f"does not fit, because {part.name} needs {gigabytes(part.peak)} of {there}{deaf}; {advice}"


def terms(part: Part) -> str:
    """What a part is made of, the largest first, without what is nothing."""
    ordered = sorted(part.terms.items(), key=lambda term: -term[1])
    return ", ".join(f"{name} {gigabytes(size)}" for name, size in ordered if size >= 0.001 * part.peak and size)


def gigabytes(size: float) -> str:
    """Bytes for people."""
    return f"{size / GB:.2f} GB" if size >= GB / 10 else f"{size / 1e6:.1f} MB"


def toml(value: Any) -> str:
    """A value as it stands in TOML."""
    return str(value).lower() if isinstance(value, bool) else str(value)
