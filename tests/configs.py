"""Minimal configs in a folder of their own, what they mean, and the messages of those that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers import MINIMAL
from mlxrl import config
from mlxrl.errors import UserError
from mlxrl.runs.experiment import Experiment
from mlxrl.tables import Config


def config_folder(base: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a config and its data; the current directory is another one."""
    place, here = base / "conf", base / "here"
    place.mkdir()
    here.mkdir()
    (place / "run.toml").write_text(MINIMAL)
    for name in ("train", "test"):
        (place / f"{name}.jsonl").write_text(json.dumps({"question": name, "answer": "4"}) + "\n")
    monkeypatch.chdir(here)
    return place


def read(folder: Path, *overrides: str, text: str = "") -> Config:
    """The settings of the minimal config with more text and with overrides."""
    return experiment_inputs(folder, *overrides, text=text)[0]


def experiment_inputs(folder: Path, *overrides: str, text: str = "") -> tuple[Config, config.Origin]:
    """The settings, and where each comes from."""
    path = folder / "run.toml"
    path.write_text(MINIMAL + text)
    return config.read(path, overrides)


def experiment(folder: Path, *overrides: str, text: str = "") -> Experiment:
    """What the minimal config means. Examples that a step has fewer of than by default suffice."""
    return Experiment.of(*experiment_inputs(folder, "rollout.tasks_per_step=1", *overrides, text=text))


def again(folder: Path, toml: str) -> Experiment:
    """What a resolved text means."""
    path = folder / "again.toml"
    path.write_text(toml)
    return Experiment.of(*config.read(path))


def refused(folder: Path, *overrides: str, text: str = "", toml: str | None = None) -> str:
    """The message of a refusal, with the folder left out."""
    path = folder / "run.toml"
    path.write_text(MINIMAL + text if toml is None else toml)
    with pytest.raises(UserError) as caught:
        Experiment.of(*config.read(path, overrides))
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(f"{folder}/", "")
