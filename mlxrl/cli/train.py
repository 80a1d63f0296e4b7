"""`mlxrl train`: a run from its config to its folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mlxrl.cli import plan
from mlxrl.console import Console
from mlxrl.runs import facts
from mlxrl.runs.experiment import Experiment
from mlxrl.runs.folder import claim, claim_free, free_folder, near, refuse_taken
from mlxrl.runs.memory_limits import limited
from mlxrl.runs.run import Run, summary
from mlxrl.runs.shutdown import Shutdown
from mlxrl.runs.sinks import MetricsFile, SamplesFile


def command(
    experiment: Experiment, free: Path, line: Sequence[str], *, dry_run: bool = False, memory: float | None = None
) -> int:
    """Train as a config says, or print what that would be.

    Args:
        free: the run's folder, where the config has none and nobody else has taken it; line: the command line, for the
            manifest.
    """
    config = experiment.config
    path = Path(config.run.folder or free_folder(free))
    refuse_taken(path)
    wanted = dry_run or config.train.tokens_per_pass is None
    found = plan.planned(experiment, memory) if wanted else ""
    experiment, chosen = plan.settled(experiment, found)
    if dry_run:
        return _dry_run(_in(experiment, path), chosen, found)
    with Shutdown().listening() as shutdown, limited(config.memory):
        console = Console(config.steps, config.run.samples_every)
        with console.busy(f"loading {near(config.model.id)}"):
            policy = experiment.load()
            teacher = experiment.teacher(policy)
        folder = claim(path) if config.run.folder else claim_free(free)
        experiment = _in(experiment, folder.path)
        folder.begin(experiment.toml())
        folder.record(
            command=["mlxrl", "train", "--config", *line], seed=config.seed, versions=facts.versions(),
            device=facts.device(), data=_digests(experiment),
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


def _dry_run(experiment: Experiment, chosen: str, found: plan.Plan | str) -> int:
    """Print the resolved config and, as comments in it, what would be done."""
    from mlxrl.policy.skeleton import NotHere, outline

    model = experiment.config.model.id
    try:
        adapted = outline(model, experiment.config.lora)
    except NotHere:
        adapted = None
    print(experiment.toml())
    for label, value in summary(experiment):
        print(f"# {label}: {value}")
    if adapted is None:
        print(f"# adapted: known once {model} is on this machine")
    for line in adapted or ():
        shape = " x ".join(map(str, line.shape))
        print(f"# adapted: {line.key} ({line.layer} {shape}), {line.count} times, {line.parameters:,} parameters")
    if chosen:
        print(f"# memory: tokens_per_pass is at most {chosen}")
    for line in [found] if isinstance(found, str) else plan.lines(found):
        print(f"# memory: {line}")
    return 0
