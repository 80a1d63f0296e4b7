"""Checkpoints: adapters, optimizer state, counters. Everything random is a function of (seed, step)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from mlxrl.errors import UserError
from mlxrl.files import replacing, write_json
from mlxrl.policy.adapter_folder import load_weights
from mlxrl.policy.policy import Policy
from mlxrl.train.loop import RunState


def save(folder: Path, policy: Policy, state: RunState) -> None:
    """Save what the next step needs. `state.json` comes last: a folder without it is not a checkpoint."""
    policy.save(folder)
    with replacing(folder / "optimizer.safetensors") as temporary:
        mx.save_safetensors(str(temporary), dict(tree_flatten(state.optimizer.state)))
    write_json(folder / "state.json", {"step": state.step, "skipped": state.skipped})


def restore(folder: Path, policy: Policy, state: RunState) -> None:
    """Take adapters, optimizer state and counters over from a checkpoint."""
    if not (folder / "state.json").is_file():
        raise UserError(str(folder), "no state.json; wanted a checkpoint that a run has saved")
    load_weights(policy.model, folder)
    arrays: Any = mx.load(str(folder / "optimizer.safetensors"))
    state.optimizer.state = tree_unflatten(list(arrays.items()))
    saved = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    state.step, state.skipped = saved["step"], saved["skipped"]
