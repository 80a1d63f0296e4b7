"""A run's needs, and the settings with which it fits."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from mlxrl import config
from mlxrl.cli.prompts import longest_prompt
from mlxrl.config import Config
from mlxrl.policy.files import Files, files_of
from mlxrl.policy.memory import Part, Work, parts
from mlxrl.train.pack import TOKENS_PER_PASS, widest
from mlxrl.types import Task

LEAST = 128
PASSES = tuple(2**power for power in range(11, 6, -1))  # 2,048 down to 128
GB = 1e9


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
        world, each = self.settings.environment, self.settings.sampling.max_tokens
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


def fitted(plan: Plan) -> tuple[tuple[str, Any], ...]:
    """The assignments that fit and cost least time; those of the largest pass and most rows that do where none fits."""
    given = plan.settings.train
    passes = [given.tokens_per_pass] if given.tokens_per_pass else []
    sizes = [*passes, *(size for size in PASSES if size < (given.tokens_per_pass or TOKENS_PER_PASS + 1))]
    rows = plan.settings.rollout.max_rows
    while rows > 1 and peak_of(plan.with_(("rollout.max_rows", rows)), "rollout") > plan.memory:
        rows //= 2
    choices = [(size, recompute) for recompute in sorted({given.recompute, True}) for size in sizes]
    update = next((choice for choice in choices if _update_fits(plan, *choice)), choices[-1])
    return ("train.tokens_per_pass", update[0]), ("train.recompute", update[1]), ("rollout.max_rows", rows)


def _update_fits(plan: Plan, size: int, recompute: bool) -> bool:
    changed = plan.with_(("train.tokens_per_pass", size), ("train.recompute", recompute))
    return peak_of(changed, "update") <= plan.memory


def peak_of(plan: Plan, name: str) -> int:
    return next(part.peak for part in plan.parts if part.name == name)


def remedies(plan: Plan) -> list[tuple[tuple[str, Any], ...]]:
    """Assignments that make the plan fit, those that cost least time first."""
    return [assignments for assignments in _remedies(plan) if plan.with_(*assignments).fits]


def _remedies(plan: Plan) -> Iterator[tuple[tuple[str, Any], ...]]:
    train, sampling = plan.settings.train, plan.settings.sampling
    best = fitted(plan)
    yield tuple(one for one in best if one != now(plan, one[0]))
    if not train.recompute:
        yield ("train.recompute", True), best[2]
    for part in (2, 4, 8, 16):
        if sampling.max_tokens >= 2 * part:
            yield *best, ("sampling.max_tokens", sampling.max_tokens // part)


def now(plan: Plan, name: str) -> tuple[str, Any]:
    table, key = name.split(".")
    return name, getattr(getattr(plan.settings, table), key)


def largest(plan: Plan) -> Plan:
    """The plan with the largest pass whose update fits."""
    recompute = plan.settings.train.recompute
    size = next((size for size in PASSES if _update_fits(plan, size, recompute)), LEAST)
    return plan.with_(("train.tokens_per_pass", size))
