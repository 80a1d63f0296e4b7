"""Does a run survive? Kills real runs at random moments, resumes each to its end, and compares with a run never killed.

    python benchmarks/kills.py                 50 kills of each kind, as benchmarks/results/kills.json
    python benchmarks/kills.py --kills 5 --kinds single-turn

A run is killed with SIGKILL again and again, until it has been so often or has ended: in a step, in a save, in an
evaluation, between two renames, wherever the moment falls. What must be equal bit for bit: the adapter, the optimizer's
state, metrics but for times and memory, samples, and the evaluations.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import mlx.core as mx

from machine import machine

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
SMALL = ["run.checkpoint_every=1", "run.evaluate_every=2", "run.checkpoints=2", "evaluation.examples=16"]
KINDS = {
    "single-turn": ("arithmetic.toml", [*SMALL, "steps=12", "rollout.tasks_per_step=4", "lora.dropout=0.1",
                                        "train.updates_per_rollout=2"]),
    "multi-turn": ("maze.toml", [*SMALL, "steps=8", "rollout.tasks_per_step=2", "rollout.group_size=4"]),
    "distillation": ("arithmetic.toml", [*SMALL, "steps=12", "rollout.tasks_per_step=4", 'algorithm={name="opd"}',
                                         'teacher.hint="answer"']),
    "sft": ("boxed_sft.toml", [*SMALL, "steps=12"]),
}  # fmt: skip
MEASURED = ("seconds/", "memory/", "rollout/tokens_per_second", "time")
"""Names of numbers that depend on the machine."""


def begun(config: str, changes: list[str], folder: Path) -> list[str]:
    """The command that begins a run."""
    verb = "sft" if "sft" in config else "train"
    return [verb, "--config", str(EXAMPLES / config), *changes, f"run.folder={folder}"]


def start(command: list[str]) -> subprocess.Popen[bytes]:
    """A run as a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-m", "mlxrl", *command], env=environment, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )  # fmt: skip


def state(folder: Path) -> str:
    """What the folder of a run says that its state is."""
    return json.loads((folder / "manifest.json").read_text())["state"]


def whole(command: list[str]) -> float:
    """Run to the end; its seconds."""
    began = time.monotonic()
    child = start(command)
    _, err = child.communicate()
    if child.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {child.returncode}: {err.decode()}")
    return time.monotonic() - began


def killed(config: str, changes: list[str], folder: Path, kills: int, seconds: float, draw: random.Random) -> int:
    """Run with kills at random moments, resume after each, and run to the end; how often it was killed."""
    command = begun(config, changes, folder)
    done = 0
    while done < kills:
        child = start(command)
        try:
            child.communicate(timeout=draw.uniform(0.5, 1.1) * seconds if draw.random() < 0.5 else draw.uniform(0.3, 3))
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGKILL)
            child.communicate()
            done += 1
        else:
            if child.returncode:
                raise SystemExit(f"{' '.join(command)} ended with {child.returncode}")
            break
        if (folder / "manifest.json").exists() and state(folder) == "succeeded":
            break
        if (folder / "config.toml").exists():
            command = [command[0], "--resume", str(folder)]
    if not (folder / "manifest.json").exists() or state(folder) != "succeeded":
        whole(command)
    return done


def values(path: Path) -> dict[str, Any]:
    """The arrays of a file by name."""
    arrays: Any = mx.load(str(path))
    return {name: array.tolist() for name, array in sorted(arrays.items())}


def result(folder: Path) -> dict[str, Any]:
    """What must be equal: bytes of the arrays, and the lines without what depends on the machine."""
    last = max((folder / "checkpoints").glob("step-*"))
    arrays = {path.name: values(path) for path in last.glob("*.safetensors")}
    metrics = [
        {name: value for name, value in json.loads(line).items() if not name.startswith(MEASURED)}
        for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    evaluation = json.loads((folder / "evaluation.json").read_text())
    samples = (folder / "samples.jsonl").read_text()
    adapter = values(folder / "adapters" / "adapters.safetensors")
    return {"arrays": arrays, "adapter": adapter, "metrics": metrics, "samples": samples, "evaluation": evaluation}


def of_kind(kind: str, kills: int, draw: random.Random) -> dict[str, Any]:
    """Runs of a kind with so many kills in all, each compared with the run that was never killed."""
    config, changes = KINDS[kind]
    with tempfile.TemporaryDirectory() as base:
        seconds = whole(begun(config, changes, Path(base, "whole")))
        wanted = result(Path(base, "whole"))
        done, runs, equal = 0, 0, 0
        while done < kills:
            folder = Path(base, f"run-{runs}")
            done += killed(config, changes, folder, min(draw.randint(1, 5), kills - done), seconds, draw)
            found = result(folder)
            runs, equal = runs + 1, equal + (found == wanted)
            for name in wanted:
                if found[name] != wanted[name]:
                    print(f"{kind}: run {runs}: {name} differs", file=sys.stderr)
            print(f"{kind}: {done} kills, {equal} of {runs} runs equal", flush=True)
    return {"kills": done, "runs": runs, "equal": equal, "seconds": seconds}


def main() -> None:
    """Run the kinds and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", help="of the file under benchmarks/results; left out, nothing is written")
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    found = {kind: of_kind(kind, arguments.kills, draw) for kind in arguments.kinds}
    if arguments.name:
        path = ROOT / "benchmarks" / "results" / f"{arguments.name}.json"
        path.write_text(json.dumps({"machine": machine(), "kinds": found}, indent=1) + "\n", encoding="utf-8")
    sys.exit(0 if all(one["equal"] == one["runs"] for one in found.values()) else 1)


if __name__ == "__main__":
    main()
