"""`mlxrl train`: a run from its config to its folder."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxrl.cli import plan
from mlxrl.cli.trial import Trial, trial
from mlxrl.console import Console
from mlxrl.policy.policy import Policy
from mlxrl.runs import facts
from mlxrl.runs.experiment import Experiment
from mlxrl.runs.folder import RunFolder, claim, claim_free, free_folder, near, refuse_taken, run_folder
from mlxrl.runs.memory_limits import limited
from mlxrl.runs.resume import begin, resumption
from mlxrl.runs.run import Run, summary
from mlxrl.runs.shutdown import Shutdown
from mlxrl.runs.sinks import MetricsFile, SamplesFile
from mlxrl.text import safe
from mlxrl.train.checkpoint import Checkpoint
from mlxrl.train.teacher import Teacher


def command(experiment: Experiment, arguments: argparse.Namespace) -> int:
    """Train as a config says, or print what that would be."""
    if arguments.resume:
        return _resume(experiment, arguments)
    config, free = experiment.config, arguments.free
    path = Path(config.run.folder or free_folder(free))
    refuse_taken(path)
    tried = trial(experiment) if arguments.dry_run else None
    wanted = arguments.dry_run or config.train.tokens_per_pass is None
    found = plan.planned(experiment, arguments.memory) if wanted else ""
    experiment, chosen = plan.settled(experiment, found)
    if tried is not None:
        return _dry_run(experiment.within(path), tried, chosen, found)
    lines = [("a pass", f"at most {chosen}")] if chosen else []
    with Shutdown().listening() as shutdown, limited(config.memory):
        models = Models.of(experiment)
        folder = claim(path, experiment.toml_in) if config.run.folder else claim_free(free, experiment.toml_in)
        with folder.locked():
            command = ["mlxrl", arguments.command, "--config", arguments.config, *arguments.overrides]
            folder.record(command=command, **_facts(experiment))
            return models.run(experiment.within(folder.path), folder, shutdown, lines)


def _facts(experiment: Experiment) -> dict[str, Any]:
    """What a run begins with, besides its models."""
    config = experiment.config
    return {
        "seed": config.seed, "versions": facts.versions(), "device": facts.device(),
        "data": facts.data_digests(experiment), "code": facts.code_digests(config),
    }  # fmt: skip


def _resume(experiment: Experiment, arguments: argparse.Namespace) -> int:
    """Go on with a run in its own folder."""
    folder = run_folder(arguments.resume)
    with folder.locked(), Shutdown().listening() as shutdown, limited(experiment.config.memory):
        found, experiment = resumption(folder, experiment), experiment.within(folder.path)
        if arguments.dry_run:
            print("\n".join(f"# {label}: {safe(value)}" for label, value in found.lines()))
            return 0
        models = Models.of(experiment)
        begin(folder, experiment, found)
        folder.record(**{**_facts(experiment), **folder.manifest()})  # what a kill has kept it from writing
        return models.run(experiment, folder, shutdown, found.lines(), found.checkpoint)


@dataclass(frozen=True, slots=True)
class Models:
    """What a run loads before its folder is touched, and the console that says so."""

    console: Console
    policy: Policy
    teacher: Teacher | None

    @classmethod
    def of(cls, experiment: Experiment) -> Models:
        """The models of an experiment."""
        config = experiment.config
        console = Console(config.steps, config.run.samples_every)
        with console.busy(f"loading {near(config.model.id)}"):
            policy = experiment.load()
            return cls(console, policy, experiment.teacher(policy))

    def run(
        self, experiment: Experiment, folder: RunFolder, shutdown: Shutdown, lines: Sequence[tuple[str, str]],
        start: Checkpoint | None = None,
    ) -> int:  # fmt: skip
        """Run in a folder, from a checkpoint on where there is one."""
        sinks = (self.console, MetricsFile(folder.path), SamplesFile(folder.path), *experiment.sinks)
        return Run(experiment, folder, self.policy, self.teacher, shutdown, sinks, self.console.busy, lines, start)()


def _dry_run(experiment: Experiment, tried: Trial, chosen: str, found: plan.Plan | str) -> int:
    """Print the resolved config and, as comments in it, what was tried and what would be done."""
    print(experiment.toml())
    comments = [f"{label}: {value}" for label, value in summary(experiment)]
    for line in tried.adapted:
        shape = " x ".join(map(str, line.shape))
        comments.append(
            f"adapted: {line.key} ({line.layer} {shape}), {line.count} times, {line.parameters:,} parameters"
        )
    if not tried.adapted:
        comments.append(f"adapted: known once {experiment.config.model.id} is on this machine")
    comments += [f"tried: {line}" for line in tried.found]
    if chosen:
        comments.append(f"memory: tokens_per_pass is at most {chosen}")
    comments += [f"memory: {line}" for line in ([found] if isinstance(found, str) else plan.lines(found))]
    print("\n".join(f"# {safe(line)}" for line in comments))
    return 0
