"""What do checkpoints cost? Seconds and bytes of one, and their share of a run's time.

    python benchmarks/checkpoints.py --config examples/arithmetic.toml examples/smollm2.toml

Takes two steps of each config and saves each state ten times. The share is that of the config's own settings: a
checkpoint every run.checkpoint_every steps or run.checkpoint_minutes minutes, whichever comes first.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from machine import machine
from mlxrl.config import read
from mlxrl.runs.experiment import Experiment

ROOT = Path(__file__).parents[1]


def measured(path: str, overrides: list[str]) -> dict[str, Any]:
    """Seconds of a step and of a checkpoint, bytes of a checkpoint, and the share of the time that they take."""
    experiment = Experiment.of(*read(path, overrides))
    policy, run = experiment.load(), experiment.config.run
    steps, seconds, saves = experiment.steps(policy, experiment.teacher(policy)), list[float](), list[float]()
    for _ in range(2):
        began = time.perf_counter()
        next(steps)
        seconds.append(time.perf_counter() - began)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(10):
            began = time.perf_counter()
            saved = steps.save(Path(folder, str(number)))
            saves.append(time.perf_counter() - began)
        size = sum(file.stat().st_size for file in saved.iterdir())
    step, save = min(seconds), median(saves)
    between = min(run.checkpoint_every * step, run.checkpoint_minutes * 60)
    return {"step_seconds": step, "checkpoint_seconds": saves, "bytes": size, "share": save / between}


def main() -> None:
    """Measure the configs and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--config", nargs="+", default=[str(ROOT / "examples" / "arithmetic.toml")])
    parser.add_argument("--set", nargs="*", default=[], help="overrides of every config")
    parser.add_argument("--name", default="checkpoints")
    arguments = parser.parse_args()
    found = {Path(path).stem: measured(path, arguments.set) for path in arguments.config}
    print(json.dumps(found, indent=1))
    path = ROOT / "benchmarks" / "results" / f"{arguments.name}.json"
    path.write_text(json.dumps({"machine": machine(), "runs": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
