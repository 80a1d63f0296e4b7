"""What `mlxrl plan` says against the peaks of real updates and rollouts of random models.

    python benchmarks/plan.py [--shapes 0:8]

An update is the second of two; no sequence of a rollout ends early. Shapes that are `held` out had no part in any
choice that the plan is made of. Writes `benchmarks/results/plan.json`.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from machine import machine

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from mlxrl.algo.recipes import grpo
from mlxrl.policy.differentiate import leaves
from mlxrl.policy.policy import as_policy
from mlxrl.policy.skeleton import Skeleton, built
from mlxrl.rollout.sample import sample
from mlxrl.settings import EpisodeLimits, LoRA, Optimizer, Sampling, Train
from mlxrl.train import memory_plan
from mlxrl.train.batch import make_batch
from mlxrl.train.memory_plan import Work
from mlxrl.train.optimizer import make_optimizer
from mlxrl.train.update import update
from mlxrl.types import Feedback, Group, Task, Trajectory, Turn
from models import tokenizer

SIZES = {
    "hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "vocab_size": 8000, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}  # fmt: skip
LINEAR = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    "full_attention_interval": 4,
}  # fmt: skip
EXPERTS = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "norm_topk_prob": True,
}  # fmt: skip
SLIDING = {"sliding_window": 96, "sliding_window_pattern": 6}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {}, "qwen3": {}, "qwen3_5": LINEAR, "qwen3_moe": EXPERTS, "gemma3_text": SLIDING,
}  # fmt: skip
QWEN3 = {
    "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": 151936,
}  # fmt: skip
"""Of Qwen3-0.6B, which has 28 layers."""
MORE = {"num_experts": 16, "num_experts_per_tok": 4, "hidden_size": 384}

UPDATES: tuple[dict[str, Any], ...] = (
    {"kind": "qwen3", "layers": 12, "prompt": 20, "completion": 100, "group": 4},
    {"kind": "qwen3", "layers": 12, "prompt": 20, "completion": 200, "group": 4, "recompute": True},
    {"kind": "qwen3", "layers": 24, "prompt": 200, "completion": 64, "group": 8},
    {"kind": "qwen3", "layers": 24, "prompt": 200, "completion": 64, "group": 8, "recompute": True},
    {"kind": "qwen3", "layers": 12, "prompt": 300, "completion": 64, "group": 8, "budget": 512},
    {"kind": "qwen3", "layers": 12, "prompt": 300, "completion": 64, "group": 8, "budget": 512, "recompute": True},
    {"kind": "qwen3_5", "layers": 12, "prompt": 20, "completion": 100, "group": 4},
    {"kind": "qwen3_5", "layers": 24, "prompt": 256, "completion": 64, "group": 8, "recompute": True},
    {"kind": "qwen3_moe", "layers": 12, "prompt": 30, "completion": 60, "group": 8, "tasks": 4},
    {"kind": "qwen3_moe", "layers": 24, "prompt": 200, "completion": 64, "group": 8, "recompute": True},
    {"kind": "qwen3", "layers": 28, "prompt": 120, "completion": 48, "group": 4, "sizes": QWEN3, "held": True},
    {"kind": "qwen3", "layers": 28, "prompt": 120, "completion": 48, "group": 4, "sizes": QWEN3, "recompute": True,
     "held": True},
    {"kind": "qwen3", "layers": 28, "prompt": 60, "completion": 24, "group": 4, "sizes": QWEN3, "bits": 4,
     "held": True},
    {"kind": "qwen3", "layers": 20, "prompt": 45, "completion": 70, "group": 6, "tasks": 3,
     "sizes": {"hidden_size": 512, "num_attention_heads": 8, "vocab_size": 32000}, "held": True},
    {"kind": "llama", "layers": 5, "prompt": 90, "completion": 50, "group": 6, "bits": 4, "held": True},
    {"kind": "llama", "layers": 16, "prompt": 260, "completion": 90, "group": 6, "budget": 512, "held": True},
    {"kind": "llama", "layers": 28, "prompt": 300, "completion": 500, "group": 2, "held": True},
    {"kind": "qwen3_5", "layers": 24, "prompt": 75, "completion": 110, "group": 6, "sizes": {"hidden_size": 384},
     "held": True},
    {"kind": "qwen3_5", "layers": 16, "prompt": 200, "completion": 40, "group": 4, "bits": 4, "held": True},
    {"kind": "qwen3_5", "layers": 4, "prompt": 90, "completion": 150, "group": 8, "recompute": True, "held": True},
    {"kind": "qwen3_5", "layers": 28, "prompt": 150, "completion": 80, "group": 6, "recompute": True, "held": True},
    {"kind": "qwen3_moe", "layers": 14, "prompt": 110, "completion": 60, "group": 6, "sizes": MORE, "held": True},
    {"kind": "qwen3_moe", "layers": 24, "prompt": 30, "completion": 90, "group": 4, "bits": 4, "held": True},
    {"kind": "qwen3_moe", "layers": 6, "prompt": 180, "completion": 70, "group": 5, "recompute": True, "held": True},
    {"kind": "gemma3_text", "layers": 26, "prompt": 140, "completion": 64, "group": 5, "held": True},
)  # fmt: skip
ROLLOUTS: tuple[dict[str, Any], ...] = (
    {"kind": "qwen3", "layers": 12, "prompt": 60, "completion": 100, "group": 8, "tasks": 2},
    {"kind": "qwen3", "layers": 24, "prompt": 508, "completion": 2, "group": 4, "tasks": 4},
    {"kind": "qwen3", "layers": 12, "prompt": 100, "completion": 130, "group": 8, "tasks": 4, "rows": 20},
    {"kind": "qwen3", "layers": 24, "prompt": 60, "completion": 20, "group": 1, "tasks": 32},
    {"kind": "llama", "layers": 12, "prompt": 300, "completion": 40, "group": 6, "tasks": 3},
    {"kind": "qwen3_5", "layers": 12, "prompt": 60, "completion": 60, "group": 16, "tasks": 2},
    {"kind": "qwen3_5", "layers": 24, "prompt": 700, "completion": 20, "group": 4, "tasks": 2},
    {"kind": "qwen3_moe", "layers": 12, "prompt": 60, "completion": 60, "group": 16, "tasks": 2},
    {"kind": "qwen3", "layers": 28, "prompt": 90, "completion": 24, "group": 6, "tasks": 2, "sizes": QWEN3,
     "held": True},
    {"kind": "qwen3", "layers": 28, "prompt": 40, "completion": 12, "group": 4, "sizes": QWEN3, "bits": 4,
     "held": True},
    {"kind": "llama", "layers": 18, "prompt": 210, "completion": 40, "group": 5, "tasks": 4},
    {"kind": "llama", "layers": 5, "prompt": 330, "completion": 50, "group": 4, "tasks": 3, "held": True},
    {"kind": "llama", "layers": 16, "prompt": 80, "completion": 60, "group": 6, "tasks": 5, "rows": 12, "held": True},
    {"kind": "qwen3_5", "layers": 24, "prompt": 450, "completion": 20, "group": 4, "tasks": 3},
    {"kind": "qwen3_5", "layers": 12, "prompt": 50, "completion": 90, "group": 6, "tasks": 2, "bits": 4, "held": True},
    {"kind": "qwen3_moe", "layers": 10, "prompt": 130, "completion": 50, "group": 6, "tasks": 3, "sizes": MORE,
     "held": True},
    {"kind": "qwen3_moe", "layers": 26, "prompt": 70, "completion": 70, "group": 8, "tasks": 2, "bits": 4,
     "held": True},
    {"kind": "gemma3_text", "layers": 26, "prompt": 64, "completion": 80, "group": 8, "tasks": 2, "held": True},
    {"kind": "qwen3", "layers": 20, "prompt": 70, "completion": 24, "group": 6, "tasks": 3, "turns": 3, "held": True},
    {"kind": "qwen3_5", "layers": 16, "prompt": 50, "completion": 30, "group": 8, "tasks": 2, "turns": 4, "held": True},
    {"kind": "qwen3_moe", "layers": 12, "prompt": 90, "completion": 20, "group": 6, "tasks": 4, "turns": 2, "rows": 12,
     "held": True},
    {"kind": "qwen3_5", "layers": 20, "prompt": 380, "completion": 24, "group": 5, "tasks": 3, "held": True},
    {"kind": "qwen3_5", "layers": 28, "prompt": 240, "completion": 30, "group": 3, "tasks": 5, "held": True},
    {"kind": "llama", "layers": 22, "prompt": 170, "completion": 60, "group": 7, "tasks": 3, "held": True},
    {"kind": "qwen3_moe", "layers": 18, "prompt": 290, "completion": 30, "group": 4, "tasks": 4, "held": True},
    {"kind": "llama", "layers": 4, "prompt": 260, "completion": 40, "group": 6, "tasks": 2, "held": True},
    {"kind": "qwen3", "layers": 14, "prompt": 120, "completion": 70, "group": 4, "tasks": 6, "rows": 12, "held": True},
)  # fmt: skip


class Answering:
    """An environment whose answers are as long as a turn, where there is no template."""

    def __init__(self, length: int) -> None:
        self.length = length

    def reset(self, task: Task) -> Any:
        return task.prompt

    def step(self, reply: str) -> Feedback:
        return Feedback("b" * self.length)


def skeleton_of(shape: dict[str, Any]) -> Skeleton:
    kind = shape["kind"]
    sizes = {**SIZES, **KINDS[kind], **shape.get("sizes", {}), "num_hidden_layers": shape["layers"]}
    config = {"model_type": kind, **({"text_config": sizes} if kind == "qwen3_5" else sizes)}
    mx.random.seed(0)
    model = built(config)
    if "bits" in shape:
        nn.quantize(model, 64, shape["bits"])
    return Skeleton(kind, config, model, tokenizer())


def optimizer_of() -> Any:
    return make_optimizer(Optimizer())


def work_of(shape: dict[str, Any]) -> Work:
    tasks, group, each, turns = shape.get("tasks", 1), shape["group"], shape["completion"], shape.get("turns", 1)
    tokens = each * (2 * turns - 1)
    return Work(
        tasks, group, min(shape.get("rows", 32), tasks * group), shape["prompt"], tokens, each * turns, tokens,
        each if turns > 1 else 0, shape.get("budget", 2048), shape.get("recompute", False),
    )  # fmt: skip


def planned(shape: dict[str, Any], part: str) -> tuple[int, dict[str, int]]:
    """Bytes of a part, and those of its phases beside what is always there."""
    whole, work = skeleton_of(shape), work_of(shape)
    always = memory_plan.constant(whole, LoRA(), optimizer_of())
    if part == "update":
        phases = memory_plan.passes(whole, LoRA(), work, grpo(), optimizer_of)
    else:
        phases = memory_plan.rollout(whole, LoRA(), work, Sampling(), grpo())
        always["optimizer"] = 0  # nothing was trained yet
    return round(sum(always.values()) + max(phases.values())), {name: round(size) for name, size in phases.items()}


def measured(shape: dict[str, Any], part: str) -> int:
    """The peak of an update or a rollout."""
    model = skeleton_of(shape).model
    for _, array in leaves(model.parameters()):
        mx.eval(array)
    subject = as_policy(model, tokenizer(), lora=LoRA())
    return (update_peak if part == "update" else rollout_peak)(subject, shape)


def settle() -> None:
    gc.collect()
    mx.clear_cache()
    mx.reset_peak_memory()


def group_of(shape: dict[str, Any], seed: int) -> Group:
    """Random ids, rewards 0 and 1 in turn."""
    draw, tokens = np.random.default_rng(seed), shape["completion"]

    def ids(count: int) -> tuple[int, ...]:
        return tuple(draw.integers(9, 8000, size=count).tolist())

    seen = ids(shape["prompt"])
    turns = [Turn(seen, ids(tokens), (-1.0,) * tokens) for _ in range(shape["group"])]
    sampling = Sampling(max_tokens=tokens)
    return tuple(Trajectory(Task("x"), (turn,), float(i % 2), sampling=sampling) for i, turn in enumerate(turns))


def update_peak(subject: Any, shape: dict[str, Any]) -> int:
    rule, algo = optimizer_of(), grpo()
    groups = [group_of(shape, number) for number in range(shape.get("tasks", 1))]
    batch = make_batch(groups, algo, Train(tokens_per_pass=shape.get("budget", 2048)))
    for _ in range(2):
        settle()
        update(subject, rule, batch, algo, recompute=shape.get("recompute", False))
    return mx.get_peak_memory()


def rollout_peak(subject: Any, shape: dict[str, Any]) -> int:
    letters, most = np.random.default_rng(0), shape["completion"]
    texts = ["".join(map(chr, letters.integers(97, 123, shape["prompt"] - 4))) for _ in range(shape.get("tasks", 1))]
    sample(subject, [Task("a")], group_size=2, sampling=Sampling(max_tokens=2))  # finds out how sequences are batched
    turns = shape.get("turns", 1)
    if turns > 1:  # a random model's replies are not what the template makes of them
        subject.tokenizer.has_chat_template = False
        texts = [text + "aaaa" for text in texts]
    several: dict[str, Any] = {
        "environment": partial(Answering, most), "limits": EpisodeLimits(max_turns=turns)
    } if turns > 1 else {}  # fmt: skip
    settle()
    groups = sample(
        subject, [Task(text) for text in texts], group_size=shape["group"], max_rows=shape.get("rows", 32),
        sampling=Sampling(max_tokens=most, min_tokens=most), key=1, **several,
    )  # fmt: skip
    peak = mx.get_peak_memory()
    one = groups[0][0]
    lengths = [len(turn.observation) for turn in one.turns]
    assert set(lengths) <= {shape["prompt"], most}, (lengths, one.error)
    assert {one.length for group in groups for one in group} == {most * turns}
    return peak


def summary(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Median and worst of the absolute errors, of all shapes and of those held out."""
    found: dict[str, Any] = {}
    for part in ("update", "rollout", ""):
        for held in (False, True):
            some = [one for one in cases if one["part"].startswith(part) and (one["shape"].get("held") or not held)]
            errors = [abs(one["error"]) for one in some] or [0.0]
            name = (part or "all") + (", held out" if held else "")
            found[name] = {"shapes": len(some), "median": round(statistics.median(errors), 4), "worst": max(errors)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="0:99", help="some of the shapes, updates first, as 0:10")
    first, last = map(int, parser.parse_args().shapes.split(":"))
    path = Path(__file__).parent / "results" / "plan.json"
    every = [("update", shape) for shape in UPDATES] + [("rollout", shape) for shape in ROLLOUTS]
    known = {json.dumps([one["part"], one["shape"]]): one for one in json.loads(path.read_text()).get("shapes", [])}
    for part, shape in every[first:last]:
        since = time.perf_counter()
        said, phases = planned(shape, part)
        spent = round(time.perf_counter() - since, 1)
        settle()
        was = measured(shape, part)
        one = {"part": part, "shape": shape, "measured": was, "planned": said, "error": round(said / was - 1, 4)}
        known[json.dumps([part, shape])] = {**one, "phases": phases, "seconds": spent}
        cases = [known[key] for one in every if (key := json.dumps(list(one))) in known]
        path.write_text(json.dumps({"machine": machine(), "summary": summary(cases), "shapes": cases}, indent=1) + "\n")
        mark = "held" if shape.get("held") else "    "
        print(f"{part} {mark} {was / 1e6:7.1f} MB {100 * one['error']:+6.1f} % {spent} s  {shape}", flush=True)
        settle()
    print(json.dumps(summary(cases), indent=1))


if __name__ == "__main__":
    main()
