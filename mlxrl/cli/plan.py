"""placeholder until the measured plan is merged"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from mlxrl.runs.experiment import Experiment
from mlxrl.settings import Config


def settled(experiment: Experiment, memory: float | None) -> tuple[Experiment, str]:
    if experiment.config.train.tokens_per_pass is None:
        config = experiment.config
        return replace(experiment, config=replace(config, train=replace(config.train, tokens_per_pass=2048))), "2,048"
    return experiment, ""


def described(experiment: Experiment, chosen: str, memory: float | None) -> list[str]:
    return []


def limited(config: Config) -> AbstractContextManager[None]:
    return nullcontext()


def command(experiment: Experiment, name: str, **options: Any) -> int:
    raise NotImplementedError
