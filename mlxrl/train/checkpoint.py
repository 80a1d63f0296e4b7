"""Checkpoints: adapters, optimizer state and the step. Everything random is a function of (seed, step)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_unflatten

from mlxrl.files import replacing, write_text
from mlxrl.policy.lora import load_weights
from mlxrl.policy.policy import Policy


def save(folder: Path, policy: Policy, optimizer: optim.Optimizer, step: int) -> None:
    """Save what the next step needs. `state.json` comes last: a folder without it is not a checkpoint.

    Args:
        step: the number of steps done.
    """
    policy.save(folder)
    with replacing(folder / "optimizer.safetensors") as temporary:
        mx.save_safetensors(str(temporary), dict(tree_flatten(optimizer.state)))
    write_text(folder / "state.json", json.dumps({"step": step}) + "\n")


def restore(folder: Path, policy: Policy, optimizer: optim.Optimizer) -> int:
    """Take adapters and optimizer state over from a checkpoint; returns the number of steps done."""
    if not (folder / "state.json").is_file():
        raise ValueError(f"{folder}: no state.json; wanted a checkpoint that a run has saved")
    load_weights(policy.model, folder)
    state: Any = mx.load(str(folder / "optimizer.safetensors"))
    optimizer.state = tree_unflatten(list(state.items()))
    return int(json.loads((folder / "state.json").read_text(encoding="utf-8"))["step"])
