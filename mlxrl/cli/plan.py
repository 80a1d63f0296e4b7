"""`mlxrl plan`: what a run needs in memory, whether that fits, and what would make it fit."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from mlxrl.algo.algorithm import num_top
from mlxrl.files import read_lines
from mlxrl.policy.skeleton import NotMeasured, skeleton
from mlxrl.rollout.chat import render, start_chat
from mlxrl.rollout.environment import EnvironmentHandle, prepare
from mlxrl.rollout.workers import Workers
from mlxrl.runs.experiment import Experiment
from mlxrl.runs.memory_limits import GB, available
from mlxrl.text import size
from mlxrl.train.batch import TOKENS_PER_PASS
from mlxrl.train.memory_plan import Sketch, Work, passes, rollout
from mlxrl.train.optimizer import make_optimizer

PARTS = ("load", "rollout", "update")
PASS, RECOMPUTE, ROWS, TOKENS = "train.tokens_per_pass", "train.recompute", "rollout.max_rows", "sampling.max_tokens"
SIZES = tuple(2**power for power in range(11, 6, -1))
"""Tokens of a pass, 2,048 down to 128."""
RENDERED, OPENED = 1000, 8
"""Prompts that are looked at, and environments whose first message is."""


@dataclass(frozen=True)
class Plan:
    """A run's needs. prompt: tokens of the longest; memory: bytes; chosen: settings; known: what was measured."""

    experiment: Experiment
    student: Sketch
    teacher: Sketch | None
    prompt: int
    memory: int
    chosen: Mapping[str, Any]
    known: dict[Any, dict[str, float]] = field(default_factory=dict[Any, dict[str, float]])

    @classmethod
    def of(cls, experiment: Experiment, memory: float | None = None) -> Plan:
        """The plan of a run; memory: GB, None for the machine's.

        Raises:
            NotMeasured: the model is not here, or cannot be measured. UserError: its files make no model.
        """
        config = experiment.config
        whole, teacher = skeleton(config.model.id, config.model.dtype), config.teacher
        student = Sketch(whole, config.lora, partial(make_optimizer, config.optimizer))
        other = None if teacher.id in (None, "base") else Sketch(skeleton(teacher.id, teacher.dtype))
        chosen = {
            PASS: config.train.tokens_per_pass or TOKENS_PER_PASS, RECOMPUTE: config.train.recompute,
            ROWS: config.rollout.max_rows, TOKENS: config.sampling.max_tokens,
        }  # fmt: skip
        there = round(memory * GB) if memory else available()
        return cls(experiment, student, other, longest_prompt(experiment, whole.tokenizer), there, chosen)

    def with_(self, chosen: Mapping[str, Any]) -> Plan:
        """The plan with other settings."""
        return replace(self, chosen={**self.chosen, **chosen})

    @property
    def work(self) -> Work:
        """What a step does. A sequence is as long as all turns may be, and an answer of an environment as a turn."""
        config, each = self.experiment.config, self.chosen[TOKENS]
        run, world, most = config.rollout, config.environment, config.train.max_tokens_per_row
        capacity = max(1, (self.student.context or sys.maxsize) - self.prompt)
        answers = world.max_turns - 1 if world.factory else 0
        sampled = min(each * (1 + answers), world.max_episode_tokens or sys.maxsize, capacity)
        tokens = min(sampled + each * answers, capacity)
        return Work(
            tasks=run.tasks_per_step, group=run.group_size, prompt=self.prompt, tokens=tokens, sampled=sampled,
            rows=min(self.chosen[ROWS], run.group_size * run.tasks_per_step), answer=each if answers else 0,
            trained=max(1, min(tokens, (most or sys.maxsize) - self.prompt)), budget=self.chosen[PASS],
            recompute=self.chosen[RECOMPUTE],
        )  # fmt: skip

    def phases(self, part: str) -> dict[str, float]:
        """What is measured of a part, by name."""
        work, config, algorithm = self.work, self.experiment.config, self.experiment.algorithm
        key = part, replace(work, budget=0, recompute=False) if part == "rollout" else replace(work, rows=0)
        if key not in self.known and part == "rollout":
            kept = max(config.sampling.num_top, num_top(algorithm))
            self.known[key] = rollout(self.student, work, replace(config.sampling, num_top=kept))
        elif key not in self.known:
            self.known[key] = passes(self.student, work, algorithm, partial(make_optimizer, config.optimizer))
            if self.teacher is not None:
                self.known[key]["teacher's passes"] = passes(self.teacher, work, algorithm)["passes"]
        return self.known[key]

    def need(self, part: str) -> dict[str, int]:
        """The bytes of a part by name: what is there all the time, and the most of what comes."""
        terms = {"weights": self.student.weights, "adapters": self.student.adapters}
        terms |= {} if self.teacher is None else {"teacher": self.teacher.weights}
        if part == "load":
            return {**terms, "files": self.student.whole.loading}
        phases = self.phases(part)
        name = max(phases, key=lambda name: phases[name])
        return {**terms, "optimizer": self.student.state, name: max(0, round(phases[name]))}

    def peak(self, part: str) -> int:
        """Bytes of a part at its highest."""
        return sum(self.need(part).values())

    @property
    def highest(self) -> str:
        """The part that needs most."""
        return max(PARTS, key=self.peak)

    @property
    def fits(self) -> bool:
        """Whether every part fits."""
        return self.peak(self.highest) <= self.memory


def longest_prompt(experiment: Experiment, tokenizer: Any) -> int:
    """Tokens of the longest of the first prompts; with an environment, of the first messages of the first few."""
    factory, limits, thinking = experiment.environment, experiment.limits(), experiment.config.sampling.thinking
    if factory is None:
        return max(len(render(tokenizer, task, thinking=thinking)) for task in experiment.tasks[:RENDERED])
    prepare(factory, tokenizer)
    lengths = [1]
    with Workers(limits.timeout) as workers:
        for handle in [EnvironmentHandle(factory, task) for task in experiment.tasks[:OPENED]]:
            workers.submit(handle.reset, handle)
        for call in workers.wait(grace=None):
            if call.owner.close is not None:
                workers.submit(call.owner.close)
            if fault := call.fault("reset", limits.timeout):
                raise NotMeasured("environment", fault)
            lengths.append(len(start_chat(tokenizer, call.value, thinking, call.owner.tools).ids))
        workers.wait(grace=None)
    return max(lengths)


def settled(experiment: Experiment, memory: float | None = None) -> tuple[Experiment, str]:
    """The experiment with train.tokens_per_pass chosen where it is left out, and how, in words ("" if it is given)."""
    config = experiment.config
    if config.train.tokens_per_pass is not None:
        return experiment, ""
    try:
        plan = largest(Plan.of(experiment, memory))
        chosen = plan.chosen[PASS]
        words = f"with which an update needs about {size(plan.peak('update'))} of {size(plan.memory)}"
    except NotMeasured as why:
        chosen, words = TOKENS_PER_PASS, f"as no plan is possible: {why}"
    config = replace(config, train=replace(config.train, tokens_per_pass=chosen))
    return experiment.with_config(config), f"{chosen:,}, {words}"


def described(experiment: Experiment, chosen: str, memory: float | None = None) -> list[str]:
    """The plan as lines for a dry run, with how the size of a pass was chosen."""
    first = [f"tokens_per_pass is at most {chosen}"] if chosen else []
    try:
        return [*first, *lines(Plan.of(experiment, memory))]
    except NotMeasured as why:
        return [*first, f"no plan is possible: {why}"]


def largest(plan: Plan) -> Plan:
    """The plan with the largest pass whose update fits."""
    plans = [plan.with_({PASS: size}) for size in SIZES if size == SIZES[-1] or plan.peak("load") <= plan.memory]
    return next((one for one in plans if one.peak("update") <= plan.memory), plans[-1])


def fitted(plan: Plan) -> Plan:
    """The plan that fits and costs least time; that of the smallest pass and the fewest rows where none fits."""
    rows, given = plan.chosen[ROWS], plan.chosen[PASS]
    while rows > 1 and plan.with_({ROWS: rows}).peak("rollout") > plan.memory:
        rows //= 2
    sizes = dict.fromkeys([given, *(size for size in SIZES if size < given)])
    again = sorted({plan.chosen[RECOMPUTE], True})
    plans = [plan.with_({PASS: size, RECOMPUTE: one, ROWS: rows}) for one in again for size in sizes]
    return next((one for one in plans if one.peak("update") <= plan.memory), plans[-1])


def remedy(plan: Plan) -> list[str]:
    """The settings to be changed for the plan to fit, as the command line takes them; none where nothing is enough."""
    for part in (1, 4, 16) if plan.peak("load") <= plan.memory else ():
        found = fitted(plan.with_({TOKENS: max(1, plan.chosen[TOKENS] // part)}))
        if found.fits:
            return assignments({name: one for name, one in found.chosen.items() if one != plan.chosen[name]})
    return []


def assignments(chosen: Mapping[str, Any]) -> list[str]:
    """Settings as the command line takes them."""
    return [f"{name}={str(value).lower()}" for name, value in chosen.items()]


def command(experiment: Experiment, name: str, *, memory: float | None, fit: bool, as_json: bool) -> int:
    """Print the plan of a run; 0 where it fits, 1 where not.

    Args:
        name: of the run, where the config has no folder for it; memory: GB, None for the machine's.
    """
    plan = Plan.of(experiment, memory)
    plan = fitted(plan) if fit else plan if experiment.config.train.tokens_per_pass else largest(plan)
    chosen = {name: plan.chosen[name] for name in (PASS, RECOMPUTE, ROWS)}
    seconds = past_seconds(experiment.config.run.folder or f"runs/{name}")
    if as_json:
        parts = {part: {"peak": plan.peak(part), **plan.need(part)} for part in PARTS}
        found = {"fits": plan.fits, "memory": plan.memory, "peak": plan.peak(plan.highest), "prompt": plan.prompt}
        found |= {"parts": parts, "settings": chosen, "remedy": [] if plan.fits else remedy(plan), "seconds": seconds}
        print(json.dumps(found, indent=2))
    else:
        print("\n".join([*lines(plan, seconds), *(assignments(chosen) if fit else [])]))
    return 0 if plan.fits else 1


def past_seconds(folder: str) -> dict[str, float]:
    """The median seconds of the parts of a step in a run's folder, or in that of the last run of its name."""
    path = Path(folder)
    found = sorted(path.parent.glob(f"{path.name}*/metrics.jsonl"), key=lambda path: path.stat().st_mtime)
    steps = read_lines(found[-1]) if found else []
    names = sorted({key for step in steps for key in step if key.startswith("seconds/")})
    medians = (statistics.median(step[key] for step in steps if key in step) for key in names)
    return {key.removeprefix("seconds/"): round(median, 3) for key, median in zip(names, medians, strict=True)}


def lines(plan: Plan, seconds: Mapping[str, float] | None = None) -> list[str]:
    """The plan as lines of text: its parts, what was assumed, seconds of a step, and whether it fits."""
    work, part, there = plan.work, plan.highest, size(plan.memory)
    found = [f"{name}: {size(plan.peak(name))} = {terms(plan.need(name))}" for name in PARTS]
    prefix, rows, tokens = work.widest()
    after = f"tokens after a prompt of {prefix}" if prefix else f"tokens with a prompt of {work.prompt}"
    found.append(f"a pass: {rows} sequences of {tokens} {after}, of at most {work.budget:,}")
    if work.answer:
        found.append(f"an environment's answer is taken to have {work.answer} tokens, as many as a turn may have")
    if seconds:
        spent = ", ".join(f"{name} {value:g} s" for name, value in seconds.items())
        found.append(f"seconds of a step, as the last run took: {sum(seconds.values()):.2f} s ({spent})")
    if plan.fits:
        return [*found, f"fits in {size(plan.peak(part))} of {there}"]
    ways = " ".join(remedy(plan))
    advice = f"these settings would: {ways}" if ways else "no setting would: a smaller or packed model, or more memory"
    return [*found, f"does not fit, because {part} needs {size(plan.peak(part))} of {there}; {advice}"]


def terms(need: Mapping[str, int]) -> str:
    """What a part is made of, the largest first, without what is nothing."""
    ordered = sorted(need.items(), key=lambda term: -term[1])
    return ", ".join(f"{name} {size(bytes)}" for name, bytes in ordered if bytes >= 0.001 * sum(need.values()))
