"""`mlxrl eval`."""

from __future__ import annotations

import argparse

from mlxrl.errors import UserError
from mlxrl.files import expanded
from mlxrl.runs.experiment import Experiment
from mlxrl.runs.folder import near
from mlxrl.text import evaluated, safe


def command(experiment: Experiment, arguments: argparse.Namespace) -> int:
    """Evaluate a model, with an adapter or as it is, and print what came out."""
    if experiment.config.data.evaluation is None:
        why = "missing key 'evaluation'; wanted the examples to evaluate on"
        raise UserError(experiment.origin.file, "data", why)
    given = arguments.adapter and str(arguments.directory / expanded(arguments.adapter))
    adapter = given or experiment.config.model.adapter
    policy = experiment.load(trained=False, adapter=adapter)
    found = experiment.evaluator(policy)(0).summary(experiment.config.evaluation.success)
    name = safe(near(adapter or "without adapter"))
    print(f"{name}: {evaluated(found, digits=4)}")
    if warning := found.get("warning"):
        print(safe(warning))
    return 0
