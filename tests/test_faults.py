"""Faults that once lost work or were called a success, through the command line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import ROOT

CONFIG = ROOT / "examples" / "arithmetic.toml"
SMALL = ["steps=3", "rollout.tasks_per_step=2", "rollout.group_size=4", "evaluation.examples=8"]


def mlxrl(folder: Path, *arguments: str, **options) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mlxrl", "train", "--config", str(CONFIG), *SMALL, f'run.folder="{folder}"']
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=120, **options)


def state(folder: Path) -> str:
    return json.loads((folder / "manifest.json").read_text())["state"]


def test_a_reader_that_goes_away_does_not_end_the_run(tmp_path):
    command = f"{sys.executable} -m mlxrl train --config {CONFIG} {' '.join(SMALL)} run.folder={tmp_path}/run | head -1"
    subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], check=True, timeout=120, capture_output=True)
    assert state(tmp_path / "run") == "succeeded"
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("import sys; sys.exit('judge is down')", "raised for each of"),
        ("return [float('nan')] * len(completions)", "wanted a finite number"),
        ("return [None] * len(completions)", "wanted a finite number"),
    ],
)
def test_a_reward_that_never_gives_a_number_ends_the_run_in_one_line(tmp_path, body, words):
    (tmp_path / "mine.py").write_text(f"def reward(completions, **_):\n    {body}\n")
    done = mlxrl(tmp_path / "run", f'reward.functions=["{tmp_path}/mine.py:reward"]')
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert state(tmp_path / "run") == "failed"


def test_a_model_that_is_destroyed_ends_the_run(tmp_path):
    done = mlxrl(tmp_path / "run", "optimizer.learning_rate=1e30", "steps=6")
    assert done.returncode == 2
    assert "not finite" in done.stderr
    assert state(tmp_path / "run") == "failed"


def test_a_file_of_weights_that_is_cut_is_one_line(tmp_path):
    shutil.copytree(ROOT / "examples/arithmetic", tmp_path / "model")
    weights = tmp_path / "model/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    done = mlxrl(tmp_path / "run", f'model.id="{tmp_path}/model"')
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "could not be loaded: model.safetensors: not a whole safetensors file" in done.stderr


def test_a_missing_answer_is_told_once(tmp_path):
    rows = [json.loads(line) for line in (ROOT / "examples/arithmetic/train.jsonl").read_text().splitlines()[:4]]
    del rows[1]["answer"]
    rows[2]["question"] = "1+" * 400 + "1=?"  # fills the context
    (tmp_path / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    functions = 'reward.functions=["mlxrl.rewards:last_number_matches"]'
    usual = {**os.environ, "TRANSFORMERS_VERBOSITY": "warning"}
    few = [f"data.train={tmp_path}/few.jsonl", functions]
    done = mlxrl(tmp_path / "run", "steps=1", *few, "run.evaluate_every=1", env=usual)
    assert done.returncode == 0
    assert done.stderr.count("have no 'answer'") == done.stderr.count("1 of 4 examples have no 'answer'") == 1
    assert done.stderr.count("1 of 4 are left out") == 1
    assert "Token indices sequence length" not in done.stderr
