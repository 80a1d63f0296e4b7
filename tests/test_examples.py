"""What the README and the examples show, run as it stands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from helpers import ROOT

SMALL = ["steps=2", "evaluation.examples=4", "rollout.tasks_per_step=4"]


@pytest.fixture
def here(tmp_path):
    """A folder that looks like the root of the repository and can be written to."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


def python(here, *arguments: str) -> str:
    """What Python prints, run in a folder; nothing may go to its standard error."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=here, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def train(here, config: str, *settings: str) -> str:
    """What a run of an example's config prints."""
    return python(here, "-m", "mlxrl", "train", "--config", f"examples/{config}.toml", *settings)


def rewards(output: str) -> list[float]:
    return [float(value) for value in re.findall(r"^step \d+  reward ([\d.]+)", output, re.MULTILINE)]


def test_the_loop_of_the_library_learns_and_saves_an_adapter(here):
    found = rewards(python(here, "examples/loop.py"))
    assert len(found) == 31
    assert sum(found[-10:]) > sum(found[:10]) + 0.5
    import mlx_lm

    model, _ = mlx_lm.load(str(ROOT / "examples/arithmetic"), adapter_path=str(here / "runs/loop/adapters"))
    moved = [value for name, value in tree_flatten(model.parameters()) if name.endswith("lora_b")]
    assert moved
    assert all(mx.abs(value).max().item() > 0 for value in moved)


@pytest.mark.slow
def test_the_maze_is_walked_from_its_config(here):
    out = train(here, "maze", "steps=2", "evaluation.examples=20", "rollout.tasks_per_step=4", "run.folder=walks")
    assert "held-out after training: accuracy" in out
    lines = (here / "walks" / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert all(1 < one["episodes/turns"] <= 8 and one["episodes/errors"] == 0 for one in found)
    assert all(one["grad_norm"] > 0 for one in found)


@pytest.mark.slow
def test_an_own_algorithm_runs_by_itself_and_from_a_config(here):
    code = (ROOT / "examples/own_algorithm.py").read_text()
    assert code.count("\n") <= 30
    assert len(rewards(python(here, "examples/own_algorithm.py"))) == 3
    named = ["algorithm.name=own_algorithm.py:make", "algorithm.power=2", "algorithm.kl.coefficient=0.1"]
    out = train(here, "arithmetic", *SMALL, "run.folder=own", *named)
    assert "hard_tasks_first(power=2, kl={'coefficient': 0.1})" in out
    found = [json.loads(line) for line in (here / "own" / "metrics.jsonl").read_text().splitlines()]
    assert all(one["kl/coefficient"] == pytest.approx(0.1) for one in found)


@pytest.mark.slow
def test_an_own_sink_receives_a_run_from_python_and_from_a_config(here):
    code = (ROOT / "examples/own_sink.py").read_text()
    assert code.count("\n") <= 30
    python(here, "examples/own_sink.py")
    assert [line.split(",")[0] for line in (here / "steps.csv").read_text().splitlines()] == ["1", "2", "3"]
    train(here, "arithmetic", *SMALL, "run.folder=own", 'run.sinks=["own_sink.py:make"]')
    found = [json.loads(line) for line in (here / "own" / "metrics.jsonl").read_text().splitlines()]
    names = ("step", "reward", "loss", "grad_norm", "completions/mean_length")
    table = [line.split(",") for line in (here / "own" / "steps.csv").read_text().splitlines()]
    assert table == [[str(one.get(name, "")) for name in names] for one in found]
    assert all(float(reward) >= 0 for _, reward, *_ in table)


@pytest.mark.slow
def test_rl_goes_beyond_fine_tuning_on_a_format_that_the_base_never_emits(here):
    python(here, "-m", "mlxrl", "sft", "--config", "examples/boxed_sft.toml", "run.folder=sft")
    train(here, "boxed", "model.adapter=sft/adapters", "run.folder=rl")
    sft, rl = (json.loads((here / name / "evaluation.json").read_text()) for name in ("sft", "rl"))
    assert sft["before"]["accuracy"] == 0
    assert sft["after"]["accuracy"] == rl["before"]["accuracy"] > 0.1
    assert rl["after"]["accuracy"] > sft["after"]["accuracy"] + 0.3
    assert sft["loss_interval"][1] < 0
