"""`mlxrl plan`: what a run needs in memory, whether that fits, and what would make it fit."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from glob import escape
from pathlib import Path
from typing import Any

from mlxrl.cli.trial import fitting_examples
from mlxrl.errors import UserError
from mlxrl.files import read_lines
from mlxrl.policy.skeleton import Skeleton, skeleton
from mlxrl.rollout.chat import render, start_chat, too_long
from mlxrl.rollout.demonstrations import Rules, demonstrable, demonstration
from mlxrl.rollout.environment import EnvironmentHandle, Factory, prepare
from mlxrl.rollout.prefill import context_of
from mlxrl.rollout.workers import Workers
from mlxrl.runs.experiment import Experiment
from mlxrl.runs.memory_limits import GB, available
from mlxrl.tables import Config
from mlxrl.text import size
from mlxrl.train.batch import TOKENS_PER_PASS
from mlxrl.train.memory_plan import Work, constant, passes, rollout
from mlxrl.train.optimizer import make_optimizer
from mlxrl.train.sequences import sequences_of
from mlxrl.types import Task

PARTS = ("load", "rollout", "update")
PASS, RECOMPUTE, ROWS, TOKENS = "train.tokens_per_pass", "train.recompute", "rollout.max_rows", "sampling.max_tokens"
SIZES = tuple(2**power for power in range(11, 6, -1))
"""Tokens of a pass, 2,048 down to 128."""
RENDERED, OPENED = 1000, 8
"""Prompts that are looked at, and environments whose first message is."""


@dataclass(frozen=True)
class Plan:
    """A run's needs under settings.

    memory: bytes there are. work: what a step does under a config. measure: the bytes of a part of that by name: what
    is there all the time, and the most of what comes. left_out: which prompts do not fit the context, in words.
    """

    config: Config
    memory: int
    work: Callable[[Config], Work]
    measure: Callable[[str, Work], dict[str, int]]
    left_out: str = ""

    @classmethod
    def of(cls, experiment: Experiment, memory: float | None = None) -> Plan:
        """The plan of a run; memory: GB, None for memory.limit or the machine's.

        Raises:
            UserError: the model is not here, its files make none, or it cannot be measured.
        """
        config, algorithm, given = experiment.config, experiment.algorithm, experiment.config.teacher
        whole = skeleton(config.model.id, config.model.dtype)
        teacher = None if given.id in (None, "base") else skeleton(given.id, given.dtype)
        optimizer = partial(make_optimizer, config.optimizer)
        always = constant(whole, config.lora, optimizer())
        always |= {} if teacher is None else {"teacher": constant(teacher)["weights"]}

        @cache
        def measure(part: str, work: Work) -> dict[str, int]:
            if part == "load":
                return {**always, "optimizer": 0, "files": whole.loading}
            if part == "rollout" and learned is not None and not experiment.rewards.functions:
                return dict(always)  # nothing is sampled
            if part == "rollout":
                found = rollout(whole, config.lora, work, config.sampling, algorithm)
            else:
                found = passes(whole, config.lora, work, algorithm, optimizer)
                found |= (
                    {} if teacher is None else {"teacher's passes": passes(teacher, None, work, algorithm)["passes"]}
                )
            name = max(found, key=lambda name: found[name])
            return {**always, name: max(0, round(found[name]))}

        memory, context = memory or config.memory.limit, context_of(whole.model)
        most = round(memory * GB) if memory else available()
        if (learned := experiment.learned(whole.model)) is not None:
            found = demonstrable(whole.tokenizer, experiment.tasks, learned)
            longest = longest_answer(whole.tokenizer, found.tasks, learned)
            return cls(config, most, partial(learning, longest=longest, context=context), measure, found.line)
        prompt, left_out = longest_that_fits(experiment, whole, teacher or whole)
        return cls(config, most, partial(Work.of, prompt=prompt, context=context), measure, left_out)

    def with_(self, chosen: Mapping[str, Any]) -> Plan:
        """The plan with other settings, by their dotted names."""
        config = self.config
        for name, value in chosen.items():
            table, key = name.split(".")
            config = replace(config, **{table: replace(getattr(config, table), **{key: value})})
        return replace(self, config=config)

    def chosen(self, *names: str) -> dict[str, Any]:
        """The values of settings, by their dotted names."""
        return {name: getattr(getattr(self.config, name.split(".")[0]), name.split(".")[1]) for name in names}

    def need(self, part: str) -> dict[str, int]:
        """The bytes of a part by name."""
        work = self.work(self.config)
        work = replace(work, budget=0, recompute=False) if part == "rollout" else replace(work, rows=0)
        return self.measure(part, work)

    def peak(self, part: str) -> int:
        """Bytes of a part at its highest."""
        return sum(self.need(part).values())

    def fits(self, *parts: str) -> bool:
        """Whether parts fit, all of them where none is named."""
        return all(self.peak(part) <= self.memory for part in parts or PARTS)


def longest_answer(tokenizer: Any, tasks: Sequence[Task], rules: Rules) -> tuple[int, int, int]:
    """Of the longest of the first examples: tokens of its prompt, tokens after it, how many of these are learned."""
    sizes: list[tuple[int, int, int]] = []
    for task in tasks[:RENDERED]:
        for one in sequences_of(0, demonstration(tokenizer, task, rules), 1.0):
            sizes.append((len(one.prompt), one.length, int(one.mask.sum())))
    return max(sizes, key=lambda size: size[0] + size[1])


def learning(config: Config, longest: tuple[int, int, int], context: int | None) -> Work:
    """What a step does that learns from answers, and an evaluation that samples."""
    prompt, tokens, learned = longest
    work = Work.of(config, prompt, context)
    return replace(work, group=1, rows=config.rollout.max_rows, trained=tokens, sampled=learned)


def longest_prompt(experiment: Experiment, tokenizer: Any, tasks: Sequence[Task]) -> int:
    """Tokens of the longest of the first prompts."""
    thinking = experiment.config.sampling.thinking
    return max(len(render(tokenizer, task, thinking=thinking)) for task in tasks[:RENDERED])


def longest_that_fits(experiment: Experiment, whole: Skeleton, teacher: Skeleton) -> tuple[int, str]:
    """Tokens of the longest of the first prompts, or of an environment's, that fit, and which do not, in words."""
    if (factory := experiment.environment) is None:
        fitted = fitting_examples(experiment, whole, teacher)
        return longest_prompt(experiment, whole.tokenizer, fitted.tasks), fitted.line
    lengths, context = first_messages(experiment, factory, whole.tokenizer), context_of(whole.model)
    kept = [length for length in lengths if context is None or length < context]
    if context is None or len(kept) == len(lengths):
        return max(lengths, default=1), ""
    line = f"environment: reset: {too_long(max(lengths), context)}"
    if not kept:
        raise UserError(line, f"nor does any other of {len(lengths)}")
    return max(kept), f"{line}; {len(lengths) - len(kept)} of the first {len(lengths)} are left out"


def first_messages(experiment: Experiment, factory: Factory, tokenizer: Any) -> list[int]:
    """Tokens of the first messages of an environment's first examples."""
    limits, thinking, lengths = experiment.limits(), experiment.config.sampling.thinking, list[int]()
    prepare(factory, tokenizer)
    with Workers(limits.timeout) as workers:
        for handle in [EnvironmentHandle(factory, task) for task in experiment.tasks[:OPENED]]:
            workers.submit(handle.reset, handle)
        for call in workers.wait(grace=None):
            if call.owner.close is not None:
                workers.submit(call.owner.close)
            if fault := call.fault("reset", limits.timeout):
                raise UserError("environment", fault)
            lengths.append(len(start_chat(tokenizer, call.value, thinking, call.owner.tools).ids))
        workers.wait(grace=None)
    return lengths


def planned(experiment: Experiment, memory: float | None = None) -> Plan | str:
    """The plan of a run with the pass that it takes, or why there is none."""
    try:
        return usual(Plan.of(experiment, memory))
    except UserError as why:
        return f"no plan is possible: {why}"


def settled(experiment: Experiment, plan: Plan | str) -> tuple[Experiment, str]:
    """The experiment with train.tokens_per_pass chosen where it is left out, and how, in words ("" if it is given)."""
    config = experiment.config
    if config.train.tokens_per_pass is not None:
        return experiment, ""
    if isinstance(plan, str):
        chosen, words = TOKENS_PER_PASS, f"as {plan}"
    else:
        chosen = plan.config.train.tokens_per_pass or TOKENS_PER_PASS
        words = f"with which an update needs about {size(plan.peak('update'))} of {size(plan.memory)}"
    config = replace(config, train=replace(config.train, tokens_per_pass=chosen))
    return replace(experiment, config=config), f"{chosen:,}, {words}"


def first_that_fits(plans: Sequence[Plan], *parts: str) -> Plan:
    """The first plan of which some parts fit, or all where none is named; else the last, which needs least."""
    last = plans[-1]
    possible = plans if plans[0].fits(*parts) or last.fits(*parts) else ()
    return next((plan for plan in possible if plan.fits(*parts)), last)


def sizes(plan: Plan) -> list[Plan]:
    """The plan with its pass, or the usual one, and with smaller ones."""
    given = plan.config.train.tokens_per_pass or TOKENS_PER_PASS
    return [plan.with_({PASS: given}), *(plan.with_({PASS: size}) for size in SIZES if size < given)]


def usual(plan: Plan) -> Plan:
    """The plan with the pass that is given, or the largest with which an update fits."""
    given = plan.config.train.tokens_per_pass is not None
    return plan if given else first_that_fits(sizes(plan), "load", "update")


def fitted(plan: Plan) -> Plan:
    """The plan that costs least time of those that fit, with smaller passes, recomputation, and fewer sequences."""
    most, recompute = plan.config.rollout.max_rows, sorted({plan.config.train.recompute, True})
    rows = [most // 2**power for power in range(most.bit_length())]
    plans = [plan.with_({ROWS: row, RECOMPUTE: one}) for row in rows for one in recompute]
    return first_that_fits([smaller for one in plans for smaller in sizes(one)])


def remedy(plan: Plan) -> list[str]:
    """The settings to be changed for the plan to fit, as the command line takes them; none where nothing is enough."""
    names = PASS, RECOMPUTE, ROWS, TOKENS
    for part in (1, 4, 16):
        found = fitted(plan.with_({TOKENS: max(1, plan.config.sampling.max_tokens // part)}))
        if found.fits():
            return assignments(dict(found.chosen(*names).items() - plan.chosen(*names).items()))
    return []


def assignments(chosen: Mapping[str, Any]) -> list[str]:
    """Settings as the command line takes them."""
    return [f"{name}={str(value).lower()}" for name, value in sorted(chosen.items(), reverse=True)]


def command(experiment: Experiment, arguments: argparse.Namespace) -> int:
    """Print the plan of a run; 0 where it fits, 1 where not."""
    plan = Plan.of(experiment, arguments.memory)
    plan = fitted(plan) if arguments.fit else usual(plan)
    chosen, fits, highest = plan.chosen(PASS, RECOMPUTE, ROWS), plan.fits(), max(map(plan.peak, PARTS))
    seconds = past_seconds(Path(experiment.config.run.folder or arguments.free))
    if arguments.json:
        parts = {part: {"peak": plan.peak(part), **plan.need(part)} for part in PARTS}
        found = {"fits": fits, "memory": plan.memory, "peak": highest, "prompt": plan.work(plan.config).prompt}
        found |= {"parts": parts, "settings": chosen, "remedy": [] if fits else remedy(plan), "seconds": seconds}
        print(json.dumps(found, indent=2))
    else:
        print("\n".join([*lines(plan, seconds), *(assignments(chosen) if arguments.fit else [])]))
    return 0 if fits else 1


def past_seconds(folder: Path) -> dict[str, float]:
    """The median seconds of the parts of a step in a run's folder, or in that of the last run of its name."""
    found: list[Path] = []
    with suppress(OSError, ValueError):  # there can be no folder of that name
        found = sorted(folder.parent.glob(f"{escape(folder.name)}*/metrics.jsonl"), key=lambda one: one.stat().st_mtime)
    steps = read_lines(found[-1]) if found else []
    names = sorted({key for step in steps for key in step if key.startswith("seconds/")})
    medians = (statistics.median(step[key] for step in steps if key in step) for key in names)
    return {key.removeprefix("seconds/"): round(median, 3) for key, median in zip(names, medians, strict=True)}


def lines(plan: Plan, seconds: Mapping[str, float] | None = None) -> list[str]:
    """The plan as lines of text: its parts, what was assumed, seconds of a step, and whether it fits."""
    work, part = plan.work(plan.config), max(PARTS, key=plan.peak)
    found = [plan.left_out] if plan.left_out else []
    found += [f"{name}: {size(plan.peak(name))} = {terms(plan.need(name))}" for name in PARTS]
    prefix, rows, tokens = work.widest()
    after = f"tokens after a prompt of {prefix}" if prefix else f"tokens with a prompt of {work.prompt}"
    found.append(f"a pass: {rows} sequences of {tokens} {after}, of at most {work.budget:,}")
    if work.answer:
        found.append(f"an environment's answer is taken to have {work.answer} tokens, as many as a turn may have")
    if seconds:
        spent = ", ".join(f"{name} {value:g} s" for name, value in seconds.items())
        found.append(f"seconds of a step, as the last run took: {sum(seconds.values()):.2f} s ({spent})")
    if plan.fits():
        return [*found, f"fits in {size(plan.peak(part))} of {size(plan.memory)}"]
    ways = " ".join(remedy(plan))
    advice = f"these settings would: {ways}" if ways else "no setting would: a smaller or packed model, or more memory"
    return [*found, f"does not fit, because {part} needs {size(plan.peak(part))} of {size(plan.memory)}; {advice}"]


def terms(need: Mapping[str, int]) -> str:
    """What a part is made of, the largest first, without what is nothing."""
    ordered = sorted(need.items(), key=lambda term: -term[1])
    return ", ".join(f"{name} {size(bytes)}" for name, bytes in ordered if bytes >= 0.001 * sum(need.values()))
