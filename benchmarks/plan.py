"""What `mlxrl plan` says of memory against what MLX's allocator has seen, on random models.

    LD_PRELOAD=libopenblas.so.0 python benchmarks/plan.py --cases update,rollout

Each shape is run with an empty buffer cache and its peak compared with the plan's. An update is the second of two, so
that the optimizer's state is there. Shapes marked `held` had no part in finding out what the plan counts. Writes
benchmarks/results/plan.json; a shape that is not run keeps what it has there.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np

from machine import machine

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from mlx_lm.models import llama, qwen3, qwen3_5, qwen3_moe  # noqa: E402

from mlxrl import config  # noqa: E402
from mlxrl.algo.recipes import dr_grpo  # noqa: E402
from mlxrl.cli.plan import Plan  # noqa: E402
from mlxrl.config import tables  # noqa: E402
from mlxrl.policy.files import Files  # noqa: E402
from mlxrl.policy.policy import as_policy  # noqa: E402
from mlxrl.policy.shapes import model_of  # noqa: E402
from mlxrl.rollout.episodes import rollout  # noqa: E402
from mlxrl.settings import LoRA, Sampling  # noqa: E402
from mlxrl.train.pack import pack  # noqa: E402
from mlxrl.train.step import update  # noqa: E402
from mlxrl.types import Group, Task, Trajectory, Turn  # noqa: E402
from models import ready, tokenizer  # noqa: E402

SIZES = {
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 8000, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip
LINEAR = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    "full_attention_interval": 4,
}  # fmt: skip
EXPERTS = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "norm_topk_prob": True,
}  # fmt: skip
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (llama, {}), "qwen3": (qwen3, {}), "qwen3_5": (qwen3_5, LINEAR), "qwen3_moe": (qwen3_moe, EXPERTS)
}  # fmt: skip

UPDATES: tuple[dict[str, Any], ...] = (
    {"kind": "qwen3", "prompt": 20, "completion": 100},
    {"kind": "qwen3", "prompt": 20, "completion": 200, "recompute": True},
    {"kind": "qwen3", "prompt": 200, "group": 8},
    {"kind": "qwen3", "prompt": 200, "group": 8, "recompute": True},
    {"kind": "qwen3", "prompt": 300, "group": 8, "tokens_per_pass": 512},
    {"kind": "qwen3", "prompt": 300, "group": 8, "tokens_per_pass": 512, "recompute": True},
    {"kind": "qwen3", "prompt": 100, "rank": 64},
    {"kind": "qwen3", "prompt": 100, "vocab_size": 32000},
    {"kind": "qwen3_5", "prompt": 20, "completion": 100},
    {"kind": "qwen3_5", "prompt": 256, "group": 8},
    {"kind": "qwen3_5", "prompt": 256, "group": 8, "recompute": True},
    {"kind": "qwen3_moe", "prompt": 20, "completion": 100},
    {"kind": "qwen3_moe", "prompt": 200, "group": 8},
    {"kind": "qwen3_moe", "prompt": 200, "group": 8, "recompute": True},
    {"kind": "llama", "prompt": 150, "group": 6, "completion": 90, "held": True},
    {"kind": "llama", "prompt": 500, "group": 4, "recompute": True, "hidden_size": 384, "held": True},
    {"kind": "qwen3", "prompt": 64, "group": 6, "num_hidden_layers": 6, "hidden_size": 512, "intermediate_size": 1024,
     "num_attention_heads": 8, "vocab_size": 16000, "tie_word_embeddings": False, "held": True},
    {"kind": "qwen3_5", "prompt": 400, "group": 4, "completion": 120, "num_hidden_layers": 8, "vocab_size": 16000,
     "tokens_per_pass": 1024, "linear_num_value_heads": 8, "held": True},
    {"kind": "qwen3_5", "prompt": 90, "group": 8, "completion": 150, "hidden_size": 384, "recompute": True,
     "linear_key_head_dim": 128, "linear_value_head_dim": 128, "held": True},
    {"kind": "qwen3_moe", "prompt": 120, "group": 6, "num_experts": 16, "num_experts_per_tok": 4, "hidden_size": 384,
     "completion": 80, "vocab_size": 16000, "held": True},
    {"kind": "qwen3_moe", "prompt": 300, "group": 6, "num_experts": 16, "num_experts_per_tok": 4, "recompute": True,
     "tokens_per_pass": 512, "rank": 16},
    {"kind": "qwen3_moe", "prompt": 180, "group": 5, "completion": 70, "recompute": True, "hidden_size": 384,
     "held": True},
)  # fmt: skip
ROLLOUTS: tuple[dict[str, Any], ...] = (
    {"kind": "qwen3", "prompt": 60, "group": 8, "tasks": 2, "completion": 100},
    {"kind": "qwen3", "prompt": 60, "group": 16, "tasks": 2, "completion": 60, "vocab_size": 32000},
    {"kind": "qwen3", "prompt": 508, "group": 4, "tasks": 4, "completion": 2},
    {"kind": "qwen3_5", "prompt": 60, "group": 16, "tasks": 2, "completion": 60},
    {"kind": "qwen3_moe", "prompt": 60, "group": 16, "tasks": 2, "completion": 60},
    {"kind": "llama", "prompt": 300, "group": 6, "tasks": 3, "completion": 40, "num_hidden_layers": 6},
    {"kind": "qwen3", "prompt": 100, "group": 8, "tasks": 4, "completion": 130, "max_rows": 20, "held": True},
    {"kind": "qwen3_5", "prompt": 700, "group": 4, "tasks": 2, "completion": 20, "num_hidden_layers": 8},
    {"kind": "llama", "prompt": 210, "group": 5, "tasks": 4, "completion": 30, "num_hidden_layers": 5, "held": True},
    {"kind": "qwen3_5", "prompt": 450, "group": 6, "tasks": 3, "completion": 20, "hidden_size": 384, "held": True},
    {"kind": "qwen3_moe", "prompt": 130, "group": 6, "tasks": 3, "completion": 40, "num_experts": 16, "held": True},
)  # fmt: skip


def model_and_plan(shape: dict[str, Any]) -> tuple[Any, Plan]:
    """A random model of a shape, and the plan that is made of its config."""
    kind = shape["kind"]
    module, more = KINDS[kind]
    sizes = {**SIZES, **more, **{name: value for name, value in shape.items() if name in SIZES or name in more}}
    found = {"model_type": kind, "text_config": sizes} if kind == "qwen3_5" else {"model_type": kind, **sizes}
    mx.random.seed(0)
    model = ready(module.Model(module.ModelArgs.from_dict(found)))
    sized = model_of(found)
    settings = tables.Config(
        model=tables.Model(kind),
        data=tables.Data("none"),
        lora=tables.Lora(rank=shape.get("rank", 8)),
        rollout=tables.Rollout(
            shape.get("tasks", 1), shape.get("group", 4), shape.get("completion", 64),
            max_rows=shape.get("max_rows", 32),
        ),
        algorithm=tables.Algorithm("dr_grpo"),
        train=tables.Train(shape.get("tokens_per_pass", 2048), recompute=shape.get("recompute", False)),
    )  # fmt: skip
    assert config.algorithm(settings).name == "dr_grpo"
    return model, Plan(settings, Files(sized, 4, sized.weights(4), 0, False), shape["prompt"], "", 0, False)


def group_of(shape: dict[str, Any], seed: int) -> Group:
    """Random ids, rewards 0 and 1 in turn."""
    draw, tokens = np.random.default_rng(seed), shape.get("completion", 64)
    seen = tuple(draw.integers(9, 8000, size=shape["prompt"]).tolist())
    turns = [
        Turn(seen, tuple(draw.integers(9, 8000, size=tokens).tolist()), (-1.0,) * tokens)
        for _ in range(shape.get("group", 4))
    ]
    sampling = Sampling(max_tokens=tokens)
    return tuple(Trajectory(Task("x"), (t,), float(i % 2), sampling=sampling) for i, t in enumerate(turns))


def update_peak(model: Any, plan: Plan, shape: dict[str, Any]) -> int:
    """The peak of the second of two updates."""
    train = plan.settings.train
    subject, optimizer, algo = (
        as_policy(model, tokenizer(), lora=LoRA(rank=plan.settings.lora.rank)),
        optim.AdamW(1e-5),
        dr_grpo(),
    )
    peak = 0
    for _ in range(2):
        groups = [group_of(shape, seed) for seed in range(shape.get("tasks", 1))]
        batch = pack(groups, algo, tokens_per_pass=train.tokens_per_pass)
        mx.clear_cache()
        mx.reset_peak_memory()
        update(subject, optimizer, batch, algo, recompute=train.recompute)
        peak = mx.get_peak_memory()
    return peak


def rollout_peak(model: Any, plan: Plan, shape: dict[str, Any]) -> int:
    """The peak of a rollout in which no row stops early."""
    subject = as_policy(model, tokenizer(), lora=LoRA(rank=plan.settings.lora.rank))
    letters, most = np.random.default_rng(0), shape["completion"]
    tasks = [Task("".join(map(chr, letters.integers(97, 123, shape["prompt"] - 4)))) for _ in range(shape["tasks"])]
    options: dict[str, Any] = {"group_size": shape["group"], "max_rows": plan.settings.rollout.max_rows}
    rollout(subject, tasks[:1], group_size=2, sampling=Sampling(max_tokens=2), key=0)  # finds out how rows are served
    mx.clear_cache()
    mx.reset_peak_memory()
    groups = rollout(subject, tasks, sampling=Sampling(max_tokens=most, min_tokens=most), key=1, **options)
    peak = mx.get_peak_memory()
    assert {len(one.prompt) for group in groups for one in group} == {shape["prompt"]}
    return peak


def case(name: str, shapes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every shape measured and planned, in bytes; `error` is the plan's relative one."""
    out: list[dict[str, Any]] = []
    for shape in shapes:
        since = time.perf_counter()
        model, plan = model_and_plan(shape)
        part = next(part for part in plan.parts if part.name == name)
        measured = (update_peak if name == "update" else rollout_peak)(model, plan, shape)
        planned = part.peak - (part.terms["optimizer"] if name == "rollout" else 0)  # nothing has been trained yet
        error = round(planned / measured - 1, 4)
        spent = round(time.perf_counter() - since, 1)
        out.append({"shape": shape, "measured": measured, "planned": planned, "error": error, "seconds": spent})
        mark = "held" if shape.get("held") else "    "
        print(f"{name} {mark} {measured / 1e6:7.1f} MB {100 * error:+6.1f} %  {shape}", file=sys.stderr, flush=True)
        del model, plan
        gc.collect()
    return out


def summary(cases: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Median and worst of the absolute errors, of all shapes and of those held out."""
    found: dict[str, Any] = {}
    every = [row for some in cases.values() for row in some]
    for name, rows in {**cases, "all": every}.items():
        for label, some in ((name, rows), (f"{name}, held out", [row for row in rows if row["shape"].get("held")])):
            errors = [abs(row["error"]) for row in some] or [0.0]
            found[label] = {
                "shapes": len(some), "median": round(statistics.median(errors), 4), "worst": max(errors)
            }  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="update,rollout")
    parser.add_argument("--shapes", default="0:99", help="a part of each case's shapes, as 0:10")
    given = parser.parse_args()
    path = Path(__file__).parent / "results" / "plan.json"
    path.parent.mkdir(exist_ok=True)
    cases = json.loads(path.read_text())["cases"] if path.is_file() else {}
    first, last = map(int, given.shapes.split(":"))
    for name in given.cases.split(","):
        shapes = {"update": UPDATES, "rollout": ROLLOUTS}[name]
        known = {json.dumps(row["shape"]): row for row in cases.get(name, [])}
        known |= {json.dumps(row["shape"]): row for row in case(name, shapes[first:last])}
        cases[name] = [known[key] for shape in shapes if (key := json.dumps(shape)) in known]
        report = {"machine": machine(), "summary": summary(cases), "cases": cases}
        path.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(summary(cases), indent=1))


if __name__ == "__main__":
    main()
