"""`mlxrl plan`: what a run needs in memory, whether that fits, and what would make it fit."""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mlxrl import config
from mlxrl.cli import compose
from mlxrl.config import Config
from mlxrl.policy.files import Files, files_of, read_table, read_text
from mlxrl.policy.memory import Part, Work, parts
from mlxrl.policy.shapes import AGAIN, Uncovered
from mlxrl.runs.lines import read_lines
from mlxrl.train.pack import TOKENS_PER_PASS, widest
from mlxrl.types import Task

LEAST = 128
PASSES = tuple(2**power for power in range(11, 6, -1))  # 2,048 down to 128
CHARACTERS = 3  # of a token, where there is no tokenizer to ask
TEMPLATE = 24  # tokens that a chat template adds
GB = 1e9
NOTE = "on a GPU these are estimates: attention without a matrix of scores, less in flight"


@dataclass(frozen=True)
class Plan:
    """A run's needs. prompt: tokens of the longest; told: how they were counted; memory: bytes there are."""

    settings: Config
    files: Files
    prompt: int
    told: str
    memory: int
    gpu: bool

    @cached_property
    def parts(self) -> list[Part]:
        """The parts of a step; an evaluation is a rollout of as many rows."""
        return parts(self.files.model, self.work)

    @property
    def work(self) -> Work:
        """What a step does."""
        rollout, train, lora = self.settings.rollout, self.settings.train, self.settings.lora
        length, most = self.completion, train.max_tokens_per_row
        learned = length if most is None else min(self.room if self.hears else length, most - self.prompt)
        tasks, group = rollout.tasks_per_step, rollout.group_size
        budget = train.tokens_per_pass or TOKENS_PER_PASS
        prefix, rows, tokens = widest(self.prompt, max(learned, 1), group, tasks, budget)
        every = group * tasks
        return Work(
            size=self.files.size, weights=self.files.weights, loading=self.files.loading, rank=lora.rank,
            keys=lora.keys, optimizer=self.settings.optimizer.name, rows=min(rollout.max_rows, group * tasks),
            prompts=min(tasks, rollout.max_rows), prompt=self.prompt, completion=length, prefix=prefix, pass_rows=rows,
            pass_tokens=tokens, chunked=bool(prefix) and rows < group,
            units=tasks if prefix else -(-every // rows), learned=max(learned, 1),
            recompute=train.recompute, entropy="entropy" in config.algorithm(self.settings).needs, gpu=self.gpu,
        )  # fmt: skip

    @property
    def completion(self) -> int:
        """Tokens that the longest row samples behind its prompt, as many as the context leaves."""
        world, each = self.settings.environment, self.settings.rollout.max_tokens
        if not self.hears:
            return max(1, min(each, self.room))
        return max(1, min(each * world.max_turns, world.max_episode_tokens or each * world.max_turns, self.room))

    @property
    def room(self) -> int:
        """Tokens that the context leaves behind the prompt, without end where it is not known."""
        return (self.files.model.context or sys.maxsize) - self.prompt

    @property
    def hears(self) -> bool:
        """Whether rows hold what an environment answers, too, of a length that nobody knows."""
        return self.settings.environment.factory is not None

    @property
    def highest(self) -> Part:
        """The part that needs most."""
        return max(self.parts, key=lambda part: part.peak)

    @property
    def fits(self) -> bool:
        """Whether every part fits."""
        return self.highest.peak <= self.memory

    def with_(self, *assignments: tuple[str, Any]) -> Plan:
        """The plan with other settings, `table.key` and a value each."""
        settings = self.settings
        for name, value in assignments:
            table, key = name.split(".")
            settings = replace(settings, **{table: replace(getattr(settings, table), **{key: value})})
        return replace(self, settings=settings)


def plan_of(settings: Config, rows: Sequence[Task], memory: float | None = None) -> Plan:
    """The plan of a run; memory: GB, None for the machine's.

    Raises:
        Uncovered: the model, its adapters or its files are not covered.
    """
    found, gpu = machine()
    teacher = settings.teacher.id
    files = files_of(settings.model.id, settings.model.dtype, gpu)
    files.model.adapted(settings.lora.keys)
    if teacher not in (None, "base"):
        other = files_of(teacher, settings.teacher.dtype, gpu)
        files = replace(files, weights=files.weights + other.weights)
    prompt, told = longest_prompt(settings, rows, files.folder)
    return Plan(settings, files, prompt, told, round(memory * GB) if memory else found, gpu)


def machine() -> tuple[int, bool]:
    """Bytes that MLX may use here, and whether on a GPU."""
    import mlx.core as mx

    gpu, facts = mx.default_device() == mx.gpu, mx.device_info()
    names = ("max_recommended_working_set_size", "memory_size", "total_memory") if gpu else ("memory_size",)
    found = next((int(facts[name]) for name in names if name in facts), 0)
    return found or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), gpu


def longest_prompt(settings: Config, rows: Sequence[Task], folder: Path | None) -> tuple[int, str]:
    """Tokens of the longest of the first prompts, and how they were counted."""
    texts = [_text(row) for row in rows[: compose.RENDERED]]
    longest = max(texts, key=len, default="")
    seen = f"the longest of {len(texts):,} prompts"
    path = folder / "tokenizer.json" if folder else None
    if path is not None and path.is_file():
        from tokenizers import Tokenizer

        text, more = _templated(path.parent, longest)
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # it raises bare ones
            raise ValueError(f"{path}: not a tokenizer: {error}; {AGAIN}") from error
        text = text.encode("utf-8", "replace").decode("utf-8")  # a run says what is wrong with halves of characters
        return len(tokenizer.encode(text).ids) + more, f"{seen}, by the model's tokenizer"
    return len(longest) // CHARACTERS + 1 + TEMPLATE, f"{seen}, at {CHARACTERS} characters a token"


def _text(row: Task) -> str:
    if isinstance(row.prompt, str):
        return row.prompt
    return "\n".join(str(message.get("content", "")) for message in row.prompt)


def _templated(folder: Path, text: str) -> tuple[str, int]:
    """A text through the chat template; where that cannot be read, the text and the tokens it is taken to add."""
    path, settings = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    source = read_text(path) if path.is_file() else None
    if source is None and settings.is_file():
        source = read_table(settings).get("chat_template")
    if not source:
        return text, 0
    try:
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(source)
        asked = [{"role": "user", "content": text}]
        return template.render(messages=asked, add_generation_prompt=True, bos_token="", eos_token=""), 0
    except Exception:  # noqa: BLE001  (a template is a program of the model's, and may raise anything)
        return text, TEMPLATE


def fitted(plan: Plan) -> tuple[tuple[str, Any], ...]:
    """The assignments that fit and cost least time; those of the largest pass and most rows that do where none fits."""
    given = plan.settings.train
    passes = [given.tokens_per_pass] if given.tokens_per_pass else []
    sizes = [*passes, *(size for size in PASSES if size < (given.tokens_per_pass or TOKENS_PER_PASS + 1))]
    rows = plan.settings.rollout.max_rows
    while rows > 1 and _peak(plan.with_(("rollout.max_rows", rows)), "rollout") > plan.memory:
        rows //= 2
    choices = [(size, recompute) for recompute in sorted({given.recompute, True}) for size in sizes]
    update = next((choice for choice in choices if _update_fits(plan, *choice)), choices[-1])
    return ("train.tokens_per_pass", update[0]), ("train.recompute", update[1]), ("rollout.max_rows", rows)


def _update_fits(plan: Plan, size: int, recompute: bool) -> bool:
    changed = plan.with_(("train.tokens_per_pass", size), ("train.recompute", recompute))
    return _peak(changed, "update") <= plan.memory


def _peak(plan: Plan, name: str) -> int:
    return next(part.peak for part in plan.parts if part.name == name)


def remedies(plan: Plan) -> list[tuple[tuple[str, Any], ...]]:
    """Assignments that make the plan fit, those that cost least time first."""
    return [assignments for assignments in _remedies(plan) if plan.with_(*assignments).fits]


def _remedies(plan: Plan) -> Iterator[tuple[tuple[str, Any], ...]]:
    train, rollout = plan.settings.train, plan.settings.rollout
    best = fitted(plan)
    yield tuple(one for one in best if one != _now(plan, one[0]))
    if not train.recompute:
        yield ("train.recompute", True), best[2]
    for part in (2, 4, 8, 16):
        if rollout.max_tokens >= 2 * part:
            yield *best, ("rollout.max_tokens", rollout.max_tokens // part)


def _now(plan: Plan, name: str) -> tuple[str, Any]:
    table, key = name.split(".")
    return name, getattr(getattr(plan.settings, table), key)


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
        return _with_pass(settings, TOKENS_PER_PASS), f"{TOKENS_PER_PASS:,}, as the plan does not cover {why}"
    if given:
        return settings, ""
    recompute = settings.train.recompute
    size = next((size for size in PASSES if _update_fits(plan, size, recompute)), LEAST)
    chosen = plan.with_(("train.tokens_per_pass", size))
    need, there = gigabytes(_peak(chosen, "update")), gigabytes(plan.memory)
    return chosen.settings, f"{size:,}, with which an update needs about {need} of {there}"


def told(settings: Config, rows: Sequence[Task], chosen: str) -> list[str]:
    """The plan as lines for a dry run, with how the size of a pass was chosen."""
    first = [f"tokens_per_pass is at most {chosen}"] if chosen else []
    try:
        return [*first, *lines(plan_of(settings, rows))]
    except (Uncovered, OSError) as why:
        return [*first, f"not planned; not covered: {why}"]


def limited(settings: Config) -> AbstractContextManager[None]:
    """The span of a run, in which MLX keeps no more buffers than [memory] says."""
    from mlxrl.rollout.memory import limits

    there, gpu = machine()
    asked = settings.memory
    cache = there / 4 if asked.cache_limit is None else asked.cache_limit * GB
    wired = None if asked.wired_limit is None or not gpu else round(asked.wired_limit * GB)
    return limits(round(cache), wired)


def _with_pass(settings: Config, size: int) -> Config:
    return replace(settings, train=replace(settings.train, tokens_per_pass=size))


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
    plan = plan.with_(*chosen) if fit else plan if settings.train.tokens_per_pass else _largest(plan)
    seconds = past_seconds(settings, name)
    if as_json:
        print(json.dumps(report(plan, chosen, seconds), indent=2))
    else:
        show(plan, chosen, seconds)
    return 0 if plan.fits else 1


def _largest(plan: Plan) -> Plan:
    recompute = plan.settings.train.recompute
    size = next((size for size in PASSES if _update_fits(plan, size, recompute)), LEAST)
    return plan.with_(("train.tokens_per_pass", size))


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
        "settings": dict(_now(plan, name) for name in FITTED),
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
