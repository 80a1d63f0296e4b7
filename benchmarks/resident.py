"""Does memory level off? Resident memory over rollouts of random prompt lengths, limits and numbers of completions.

python benchmarks/resident.py              500 rollouts, as benchmarks/results/resident.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
from pathlib import Path

import mlx.core as mx

import mlxrl as rl
from machine import machine

ROOT = Path(__file__).parents[1]


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Sample, and write the memory after every so many rollouts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rollouts", type=int, default=500)
    parser.add_argument("--name", default="resident")
    arguments = parser.parse_args()
    policy, draw = rl.load(str(ROOT / "examples/arithmetic")), random.Random(0)
    found: list[dict[str, int]] = []
    for number in range(arguments.rollouts + 1):
        if number % 25 == 0:
            mx.clear_cache()
            found.append({"rollouts": number, "resident": resident(), "mlx": mx.get_active_memory()})
            print(found[-1], flush=True)
        tasks = [rl.Task("1+" * draw.randint(1, 100) + "1=?") for _ in range(draw.randint(1, 4))]
        sampling = rl.Sampling(max_tokens=draw.randint(4, 200))
        rl.sample(policy, tasks, group_size=draw.randint(1, 8), sampling=sampling, key=mx.random.key(number))
    path = ROOT / "benchmarks" / "results" / f"{arguments.name}.json"
    path.write_text(json.dumps({"machine": machine(), "memory": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
