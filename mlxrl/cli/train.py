"""`mlxrl train`: a run from its config to its folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mlxrl.cli import plan
from mlxrl.console import Console
from mlxrl.runs import facts
from mlxrl.runs.experiment import Experiment
from mlxrl.runs.folder import create, free_folder, refuse_taken
from mlxrl.runs.memory_limits import limited
from mlxrl.runs.run import Run, summary
from mlxrl.runs.shutdown import Shutdown
from mlxrl.runs.sinks import MetricsFile, SamplesFile


def command(
    experiment: Experiment, name: str, line: Sequence[str], *, dry_run: bool = False, memory: float | None = None
) -> int:
    """Train as a config says, or print what that would be.

    Args:
        name: of the run, where the config has no folder for it; line: the command line, for the manifest.
    """
    config = experiment.config
    path = Path(config.run.folder or free_folder(Path("runs") / name)).expanduser()
    refuse_taken(path)
    experiment = replace(experiment, config=replace(config, run=replace(config.run, folder=str(path))))
    wanted = dry_run or config.train.tokens_per_pass is None
    found = plan.planned(experiment, memory) if wanted else ""
    experiment, chosen = plan.settled(experiment, found)
    if dry_run:
        return _dry_run(experiment, chosen, found)
    with Shutdown().listening() as shutdown:
        folder = create(path, experiment.toml())
        folder.record(
            command=["mlxrl", "train", "--config", *line], seed=config.seed, versions=facts.versions(),
            device=facts.device(), data=_digests(experiment),
        )  # fmt: skip
        console = Console(config.steps, config.run.samples_every)
        sinks = (console, MetricsFile(path), SamplesFile(path), *experiment.sinks)
        lines = [("a pass", f"at most {chosen}")] if chosen else []
        with limited(config.memory):
            return Run(experiment, folder, shutdown, sinks, console.busy, lines)()


def _digests(experiment: Experiment) -> list[dict[str, object]]:
    data = experiment.config.data
    held_out = [] if data.evaluation is None else [facts.data_digest(data.evaluation, experiment.held_out)]
    return [facts.data_digest(data.train, experiment.tasks), *held_out]


def _dry_run(experiment: Experiment, chosen: str, found: plan.Plan | str) -> int:
    """Print the resolved config and, as comments in it, what would be done."""
    from mlxrl.policy.skeleton import NotHere, outline

    model, adapter = experiment.config.model.id, experiment.config.model.adapter
    try:
        adapted = outline(model, experiment.config.lora, adapter)
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
