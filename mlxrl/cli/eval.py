"""`mlxrl eval`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from mlxrl.errors import UserError
from mlxrl.files import expanded
from mlxrl.runs import facts
from mlxrl.runs.experiment import Experiment
from mlxrl.runs.folder import RunFolder, near
from mlxrl.store import located
from mlxrl.text import evaluated, safe
from mlxrl.train.comparison import Scores


def command(experiment: Experiment, arguments: argparse.Namespace) -> int:
    """Evaluate a model, with an adapter or as it is, and print what came out; 1 where a run recorded something else."""
    config = experiment.config
    if config.data.evaluation is None:
        why = "missing key 'evaluation'; wanted the examples to evaluate on"
        raise UserError(experiment.origin.file, "data", why)
    folder = RunFolder(arguments.directory / expanded(arguments.run)) if arguments.run else None
    adapter, name = _subject(experiment, arguments, folder)
    recorded = folder.evaluation() if folder is not None and name else {}
    step = recorded.get(name, {}).get("step", 0)
    policy = experiment.load(trained=False, adapter=adapter)
    found = experiment.evaluate(policy, experiment.held_out, step, config.evaluation.samples)
    numbers = found.summary(config.evaluation.success)
    print(f"{safe(near(adapter or 'without adapter'))}: {evaluated(numbers, digits=4)}")
    if warning := numbers.get("warning"):
        print(safe(warning))
    if folder is None or not name:
        return 0
    return _reproduced(folder, recorded, name, found.scores)


def _subject(experiment: Experiment, arguments: argparse.Namespace, folder: RunFolder | None) -> tuple[str | None, str]:
    """The adapter to evaluate, None for the base model, and the name of a run's evaluation of it, "" for none."""
    start = experiment.config.model.adapter
    if arguments.adapter:
        return located(arguments.adapter, arguments.directory), ""
    if arguments.base:
        return None, "before" if start is None else ""
    return (start, "") if folder is None else (str(folder.adapters), "after")


def _reproduced(folder: RunFolder, recorded: Mapping[str, Any], name: str, found: Scores) -> int:
    """Say whether an evaluation is, example by example, what a run recorded; 1 where it is not."""
    when = f"{name} training"
    if name not in recorded:
        why = recorded.get("reason") or "it did not come to it"
        print(safe(f"the run recorded no evaluation {when}: {why}"))
        return 0
    scores = Scores.of_json(recorded["scores"][name])
    if scores.as_json() == found.as_json():
        parts = [f"{len(scores.rewards)} rewards"] if scores.rewards else []
        parts += [f"{len(scores.samples[0])} samples of each"] if scores.samples else []
        parts += [f"the losses of {len(scores.answers.losses)} examples"] if scores.answers else []
        print(f"equal to what the run recorded {when}: {' and '.join(parts)}")
        return 0
    print(f"not what the run recorded {when}: {_difference(folder, recorded, name, scores, found)}")
    return 1


def _difference(folder: RunFolder, recorded: Mapping[str, Any], name: str, scores: Scores, found: Scores) -> str:
    if scores.examples != found.examples:
        return "the examples are others"
    before, now = scores.as_json(), found.as_json()
    key = "rewards" if scores.rewards else "losses"
    others = sum(one != other for one, other in zip(before[key], now[key], strict=True))
    what = f"{others} of {len(now[key])} {key} differ; {evaluated(recorded[name], digits=4)}"
    weights = folder.adapters / "adapters.safetensors"
    if name == "after" and facts.digest(weights) != recorded.get("adapter"):
        return f"{what}; {near(weights)} is another file"
    return what
