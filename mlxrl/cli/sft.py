"""`mlxrl sft`: a run that learns from the answers of the data, from its config to its folder."""

from __future__ import annotations

import argparse

from mlxrl.cli import train
from mlxrl.errors import UserError
from mlxrl.runs.experiment import Experiment


def command(experiment: Experiment, arguments: argparse.Namespace) -> int:
    """Train as `mlxrl train` does, with an algorithm that learns from answers."""
    if "answers" not in experiment.algorithm.needs:
        why = f"wanted 'sft', which is the default here, got {experiment.algorithm.name!r}; leave [algorithm] out"
        raise experiment.origin.locate(UserError("algorithm", "name", why))
    return train.command(experiment, arguments)
