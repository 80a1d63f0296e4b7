"""`mlxrl train`: a run from its config to its folder."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from mlxrl.cli import plan
from mlxrl.cli.trial import Trial, trial
from mlxrl.console import Console
from mlxrl.runs import facts
from mlxrl.runs.experiment import Experiment
from mlxrl.runs.folder import claim, claim_free, free_folder, near, refuse_taken
from mlxrl.runs.memory_limits import limited
from mlxrl.runs.run import Run, summary
from mlxrl.runs.shutdown import Shutdown
from mlxrl.runs.sinks import MetricsFile, SamplesFile
from mlxrl.text import safe


def command(experiment: Experiment, arguments: argparse.Namespace) -> int:
    """Train as a config says, or print what that would be."""
    config, free = experiment.config, arguments.free
    path = Path(config.run.folder or free_folder(free))
    refuse_taken(path)
    tried = trial(experiment) if arguments.dry_run else None
    wanted = arguments.dry_run or config.train.tokens_per_pass is None
    found = plan.planned(experiment, arguments.memory) if wanted else ""
    experiment, chosen = plan.settled(experiment, found)
    if tried is not None:
        return _dry_run(_in(experiment, path), tried, chosen, found)
    with Shutdown().listening() as shutdown, limited(config.memory):
        console = Console(config.steps, config.run.samples_every)
        with console.busy(f"loading {near(config.model.id)}"):
            policy = experiment.load()
            teacher = experiment.teacher(policy)
        folder = claim(path) if config.run.folder else claim_free(free)
        experiment = _in(experiment, folder.path)
        folder.begin(experiment.toml())
        folder.record(
            command=["mlxrl", arguments.command, "--config", arguments.config, *arguments.overrides], seed=config.seed,
            versions=facts.versions(), device=facts.device(), data=_digests(experiment),
        )  # fmt: skip
        sinks = (console, MetricsFile(folder.path), SamplesFile(folder.path), *experiment.sinks)
        lines = [("a pass", f"at most {chosen}")] if chosen else []
        return Run(experiment, folder, policy, teacher, shutdown, sinks, console.busy, lines)()


def _in(experiment: Experiment, folder: Path) -> Experiment:
    """The experiment with its folder."""
    config = experiment.config
    return replace(experiment, config=replace(config, run=replace(config.run, folder=str(folder))))


def _digests(experiment: Experiment) -> list[dict[str, object]]:
    data = experiment.config.data
    held_out = [] if data.evaluation is None else [facts.data_digest(data.evaluation, experiment.held_out)]
    return [facts.data_digest(data.train, experiment.tasks), *held_out]


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
