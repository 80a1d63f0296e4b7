"""Supervised fine-tuning: a step beside mlx-lm's, and a warm start that reinforcement learning goes on from.

    python benchmarks/sft.py --cases tiny,learn
    LD_PRELOAD=libopenblas.so.0 python benchmarks/sft.py --cases smollm2 --model SmolLM2-135M-Instruct.gguf

Cases:
  tiny     epochs over examples/boxed/demonstrations.jsonl, 32 examples a step, by the model of examples/arithmetic
  smollm2  epochs over 16 examples of 30 to 300 tokens, 4 a step, by a real model
  learn    the held-out examples of examples/boxed: the base model, after examples/boxed_sft.toml, and after
           examples/boxed.toml on top, three seeds

In `tiny` and `smollm2` epochs of mlxrl and of the step, the batches and the loss of mlx_lm.tuner.trainer take turns, on
models with the same adapters, after an epoch of each that does not count. mlx-lm has its examples tokenised before;
here they are tokenised in every step. Both learn the answers alone. Tokens are those of the examples; what is padded
besides is counted. Peaks are bytes above what was active before. Writes benchmarks/results/NAME.json.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from machine import machine

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT)]

from mlx_lm.tuner.datasets import CacheDataset, CompletionsDataset  # noqa: E402
from mlx_lm.tuner.trainer import default_loss, iterate_batches  # noqa: E402

import mlxrl as rl  # noqa: E402

EXAMPLES = ROOT / "examples"
RATE = 1e-4
Rows = Sequence[dict[str, str]]
Epoch = Callable[[], dict[str, float]]
WORDS = ["river", "valley", "green", "old", "stone", "houses", "apple", "trees", "quiet", "roads", "runs", "and", "the"]


def boxed() -> Rows:
    """The demonstrations of the example, with their questions as prompts."""
    lines = (EXAMPLES / "boxed" / "demonstrations.jsonl").read_text().splitlines()
    return [{"prompt": row["question"], "completion": row["completion"]} for row in map(json.loads, lines)]


def prose(count: int = 16) -> Rows:
    """Random words: prompts of 5 to 100, answers of 5 to 150."""
    draw = random.Random(0)

    def words(most: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(5, most)))

    return [{"prompt": words(100), "completion": words(150)} for _ in range(count)]


def ours(policy: rl.Policy, rows: Rows, size: int) -> Epoch:
    """An epoch of `rl.run`."""
    tasks, rollout = rl.tasks(rows), rl.Rollout(tasks_per_step=size)
    optimizer = rl.make_optimizer(rl.Optimizer(learning_rate=RATE))
    steps = rl.run(policy, tasks, rl.sft(), steps=10**6, rollout=rollout, optimizer=optimizer)

    def epoch() -> dict[str, float]:
        found = [next(steps).metrics for _ in range(len(rows) // size)]
        return {name: sum(one[f"tokens/{name}"] for one in found) for name in ("learned", "read", "padding")}

    return epoch


def theirs(policy: rl.Policy, rows: Rows, size: int) -> Epoch:
    """An epoch of the step of mlx_lm.tuner.trainer.train."""
    model, optimizer = policy.model, rl.make_optimizer(rl.Optimizer(learning_rate=RATE))
    data = CacheDataset(CompletionsDataset(list(rows), policy.tokenizer, "prompt", "completion", mask_prompt=True))
    learned = nn.value_and_grad(model, default_loss)
    state = [model.state, optimizer.state, mx.random.state]

    @partial(mx.compile, inputs=state, outputs=state)
    def step(batch: mx.array, lengths: mx.array) -> tuple[mx.array, mx.array]:
        (loss, tokens), gradient = learned(model, batch, lengths)
        optimizer.update(model, gradient)
        return loss, tokens

    def epoch() -> dict[str, float]:
        model.train()
        counts = {"learned": 0.0, "read": 0.0, "padding": 0.0}
        for batch, lengths in iterate_batches(data, size, 2048, seed=0):
            loss, tokens = step(batch, lengths)
            mx.eval(state, loss, tokens)
            read = int(lengths[:, 1].sum().item())
            counts["learned"] += float(tokens.item())
            counts["read"] += read
            counts["padding"] += batch.size - read
        model.eval()
        return counts

    return epoch


def beside(load: Callable[[], rl.Policy], rows: Rows, size: int, repeats: int) -> dict[str, Any]:
    """Epochs of both in turn: seconds, processor seconds, peaks and tokens."""
    ways = {"mlxrl": ours(load(), rows, size), "mlx-lm": theirs(load(), rows, size)}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for repeat in range(-1, repeats):
        for name, way in ways.items():
            mx.clear_cache()
            before = mx.get_active_memory()
            mx.reset_peak_memory()
            wall, processor = time.perf_counter(), time.process_time()
            counts = way()
            spent = {"seconds": time.perf_counter() - wall, "processor_seconds": time.process_time() - processor}
            spent |= {"peak": mx.get_peak_memory() - before, **counts}
            print(name, {key: round(value, 3) for key, value in spent.items()}, file=sys.stderr, flush=True)
            if repeat >= 0:
                runs[name].append(spent)
    return {"examples": len(rows), "examples a step": size, **_compared(runs)}


def _compared(runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, own in runs.items():
        seconds = [run["seconds"] for run in own]
        found[name] = {
            "seconds": [round(value, 4) for value in seconds],
            "processor_seconds": [round(run["processor_seconds"], 4) for run in own],
            "tokens_per_second": round(own[0]["read"] / statistics.median(seconds), 1),
            "peak": round(statistics.median(run["peak"] for run in own)),
            **{f"tokens {what}": round(own[-1][what]) for what in ("learned", "read", "padding")},
        }
    pairs = list(zip(runs["mlxrl"], runs["mlx-lm"], strict=True))
    for what in ("seconds", "processor_seconds", "peak"):
        ratios = sorted(other[what] / one[what] for one, other in pairs)
        found[f"mlx-lm / mlxrl, {what}"] = {
            "median": round(statistics.median(ratios), 3), "spread": [round(ratios[0], 3), round(ratios[-1], 3)]
        }  # fmt: skip
    return found


def tiny(arguments: argparse.Namespace) -> dict[str, Any]:
    return beside(lambda: rl.load(str(EXAMPLES / "arithmetic")), boxed(), 32, arguments.repeats)


def smollm2(arguments: argparse.Namespace) -> dict[str, Any]:
    return beside(lambda: rl.load(arguments.model, dtype="float32"), prose(), 4, arguments.repeats)


def learn(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Accuracy and loss on the held-out examples: the base, after fine-tuning, after reinforcement learning on top."""
    return [one for seed in arguments.seeds for one in _learned(seed)]


def _learned(seed: int) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        adapter = Path(folder) / "sft" / "adapters"
        runs = {"sft": ("boxed_sft", ()), "rl": ("boxed", (f"model.adapter={adapter}",)), "rl alone": ("boxed", ())}
        for name, (config, settings) in runs.items():
            command = [sys.executable, "-m", "mlxrl", "sft" if name == "sft" else "train", "--config"]
            command += [str(EXAMPLES / f"{config}.toml"), f"seed={seed}", f'run.folder="{folder}/{name}"', *settings]
            since = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            found = json.loads((Path(folder) / name / "evaluation.json").read_text())
            seconds = round(time.perf_counter() - since, 1)
            print(name, seed, found["before"]["accuracy"], found["after"]["accuracy"], file=sys.stderr, flush=True)
            yield {"run": name, "seed": seed, "seconds": seconds, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="tiny,learn")
    parser.add_argument("--model", help="a .gguf file, for the case smollm2")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--name", default="sft")
    arguments = parser.parse_args()
    path = Path(__file__).parent / "results" / f"{arguments.name}.json"
    report: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    cases = {"tiny": tiny, "smollm2": smollm2, "learn": learn}
    for name in arguments.cases.split(","):
        report[name] = {"machine": machine(), "measured": cases[name](arguments)}
        path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
