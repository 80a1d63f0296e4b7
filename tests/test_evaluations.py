"""The evaluations of a run: what is evaluated with which weights, what is recorded, and what follows from it."""

import json

import mlx.core as mx
import pytest

from helpers import CONFIG, EXAMPLE
from mlxrl.cli import main
from mlxrl.cli import train as train_command
from mlxrl.files import read_lines
from mlxrl.policy.policy import load

SCORES = """
from mlxrl.rewards import TrainerState

VALUES = {values}

def judge(completions, trainer_state, **_):
    if trainer_state.global_step in VALUES:
        return [VALUES[trainer_state.global_step]] * len(completions)
    return [float(len(text) % 3) for text in completions]
"""
VALIDATED = CONFIG.replace("evaluation = ", 'validation = "chosen.jsonl"\nevaluation = ').replace(
    "checkpoint_every = 1", "checkpoint_every = 0\nevaluate_every = 1"
)
"""A run that is evaluated after each step, also on further examples."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = (EXAMPLE / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "chosen.jsonl").write_text("".join(lines[-8:]))
    return tmp_path


def train(folder, *arguments, values=None, config=CONFIG):
    """Train with rewards of evaluations and steps by the number of steps taken; others are the text's length."""
    (folder / "run.toml").write_text(config)
    (folder / "judge.py").write_text(SCORES.format(values=values or {}))
    return main(["train", "--config", "run.toml", *arguments])


def report(folder):
    return json.loads((folder / "out/run/evaluation.json").read_text())


def events(folder, *kinds):
    return [event for event in read_lines(folder / "out/run/events.jsonl") if event["event"] in kinds]


def weights(folder, name="adapters"):
    return mx.load(str(folder / "out/run" / name / "adapters.safetensors"))


def same(one, other):
    return one.keys() == other.keys() and all(mx.array_equal(one[name], other[name]) for name in one)
