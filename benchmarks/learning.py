"""Does it learn? Runs a config over seeds and recipes through the command line, and tabulates the held-out rows.

    python benchmarks/learning.py --seeds 0 1 2 3 4
    python benchmarks/learning.py --recipes grpo rloo --seeds 0 1 2 --name recipes

Writes benchmarks/results/NAME.json and prints a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import machine

ROOT = Path(__file__).parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(ROOT / "examples" / "arithmetic.toml"))
    parser.add_argument("--recipes", nargs="+", default=["grpo"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--name", default="learning")
    parser.add_argument("overrides", nargs="*", help="key=value, given to every run", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    runs = [
        run(arguments.config, recipe, seed, arguments.overrides)
        for recipe in arguments.recipes
        for seed in arguments.seeds
    ]
    results = {"machine": machine(), "config": Path(arguments.config).name, "runs": runs}
    path = ROOT / "benchmarks" / "results" / f"{arguments.name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(table(runs))


def run(config: str, recipe: str, seed: int, overrides: list[str]) -> dict[str, Any]:
    """Train once in a process of its own; the line of the table."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"seed={seed}", f'algorithm.name="{recipe}"', f'run.folder="{folder}/run"', *overrides]
        since = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "mlxrl", "train", "--config", config, *settings],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        seconds = time.perf_counter() - since
        evaluation = json.loads((Path(folder) / "run" / "evaluation.json").read_text(encoding="utf-8"))
    print(recipe, seed, evaluation["before"]["accuracy"], evaluation["after"]["accuracy"], file=sys.stderr)
    return {"recipe": recipe, "seed": seed, "overrides": overrides, "seconds": round(seconds, 1), **evaluation}


def table(runs: list[dict[str, Any]]) -> str:
    """The runs as a Markdown table."""
    lines = ["| recipe | seed | before | after | difference, 95 % interval | seconds |", "|---|---|---|---|---|---|"]
    for line in runs:
        low, high = line["interval"]
        lines.append(
            f"| {line['recipe']} | {line['seed']} | {line['before']['accuracy']:.3f} | {line['after']['accuracy']:.3f} "
            f"| {line['difference']:+.3f} ({low:+.3f} to {high:+.3f}) | {line['seconds']:.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
