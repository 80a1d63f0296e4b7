"""Does it learn? Trains through the command line, over recipes and seeds, and tabulates the held-out rows.

    python benchmarks/learning.py                                             every line of RUNS, 3 seeds each
    python benchmarks/learning.py --runs grpo --seeds 0 1 2 3 4 --name learning
    python benchmarks/learning.py --config examples/maze.toml --runs grpo gigpo --name maze --set run.evaluate_every=10

Writes benchmarks/results/NAME.json after every run, and prints a Markdown table at the end. `tokens` are those sampled
in training; `curve` pairs them with the accuracy of the evaluations under way, the first and last included.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

from machine import machine

ROOT = Path(__file__).parent.parent
SEVERAL = ("train.updates_per_rollout=2", "train.minibatches=2")
TAUGHT = ("algorithm.name=opd", "teacher.id=arithmetic", "teacher.adapter={teacher}")

RUNS: dict[str, tuple[str, ...]] = {
    "grpo": (),
    "dr_grpo": (),
    "dapo": ("rollout.resampling_rounds=3", "reward.overlong_buffer=8"),
    "gspo": SEVERAL,
    "gspo_token": (),
    "rloo": (),
    "reinforce_pp": (),
    "reinforce_pp_baseline": (),
    "cispo": SEVERAL,
    "gigpo": (),
    "max_rl": (),
    "sapo": (),
    "gmpo": (),
    "dppo": (),
    "luspo": (),
    "opd": TAUGHT,
    "opd, candidates": (*TAUGHT, "algorithm.teacher_top_k.k=8"),
    "opd, surrogate": (*TAUGHT, "algorithm.teacher_surrogate.k=8"),
    "opd, vocabulary": (*TAUGHT, "algorithm.teacher_vocabulary.beta=1"),
}
"""Overrides of the config, by line of the table; its first word is the recipe.

Bounds matter from the second update on, so GSPO and CISPO make four of every rollout.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(ROOT / "examples" / "arithmetic.toml"))
    parser.add_argument("--runs", nargs="+", default=list(RUNS), choices=list(RUNS), metavar="RUN")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--name", default="recipes")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="given to every run")
    arguments = parser.parse_args()
    path = ROOT / "benchmarks" / "results" / f"{arguments.name}.json"
    path.parent.mkdir(exist_ok=True)
    found: list[dict[str, Any]] = []
    with teacher(arguments) as adapter:
        for name in arguments.runs:
            for seed in arguments.seeds:
                found.append(run(arguments, name, seed, adapter))
                results = {"machine": machine(), "config": Path(arguments.config).name, "runs": found}
                path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(table(found))


@contextmanager
def teacher(arguments: argparse.Namespace) -> Iterator[str]:
    """The folder of an adapter that has learned the task, where a run is taught by one: GRPO's, of another seed."""
    with tempfile.TemporaryDirectory() as folder:
        if any("{teacher}" in setting for name in arguments.runs for setting in RUNS[name]):
            train(arguments, Path(folder) / "run", ["seed=100", "algorithm.name=grpo"])
        yield str(Path(folder) / "run" / "adapters")


def run(arguments: argparse.Namespace, name: str, seed: int, adapter: str) -> dict[str, Any]:
    """Train once; the line of the table."""
    recipe = [f"algorithm.name={name.split(',')[0]}"]
    settings = [*recipe, *RUNS[name], *arguments.set]
    with tempfile.TemporaryDirectory() as folder:
        since = time.perf_counter()
        train(arguments, Path(folder) / "run", [f"seed={seed}", *(one.format(teacher=adapter) for one in settings)])
        seconds = time.perf_counter() - since
        evaluation = json.loads((Path(folder) / "run" / "evaluation.json").read_text(encoding="utf-8"))
        del evaluation["settings"], evaluation["scores"]
        evaluation["curve"] = curve(Path(folder) / "run")
    print(f"{name}, seed {seed}:", evaluation["before"]["accuracy"], evaluation["after"]["accuracy"], file=sys.stderr)
    tokens = evaluation["curve"][-1][0]
    line = {"run": name, "seed": seed, "overrides": settings, "seconds": round(seconds, 1), "tokens": tokens}
    return {**line, **evaluation}


def curve(folder: Path) -> list[tuple[int, float]]:
    """Tokens sampled and accuracy at every evaluation of a run."""

    def lines(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").splitlines()]

    sampled = [0, *accumulate(int(line["rollout/tokens"]) for line in lines("metrics.jsonl"))]
    known = {"before training": 0, "after training": len(sampled) - 1}
    evaluations = [event for event in lines("events.jsonl") if event["event"] == "evaluation"]
    steps = [known[when] if (when := event["when"]) in known else int(when.split()[-1]) for event in evaluations]
    return [(sampled[step], event["accuracy"]) for step, event in zip(steps, evaluations, strict=True)]


def train(arguments: argparse.Namespace, folder: Path, settings: list[str]) -> None:
    """`mlxrl train` in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "mlxrl",
        "train",
        "--config",
        arguments.config,
        f'run.folder="{folder}"',
        *settings,
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def table(runs: list[dict[str, Any]]) -> str:
    """The runs as a Markdown table."""
    lines = ["| run | seed | before | after | difference, 95 % interval | seconds |", "|---|---|---|---|---|---|"]
    for line in runs:
        low, high = line["interval"]
        lines.append(
            f"| {line['run']} | {line['seed']} | {line['before']['accuracy']:.3f} | {line['after']['accuracy']:.3f} "
            f"| {line['difference']:+.3f} ({low:+.3f} to {high:+.3f}) | {line['seconds']:.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
