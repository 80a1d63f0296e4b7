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
    kind = type(state.optimizer).__name__
    write_json(folder / "state.json", {"step": state.step, "skipped": state.skipped, "optimizer": kind})


def restore(folder: Path, policy: Policy, state: RunState) -> None:
    """Take adapters, optimizer state and counters over from a checkpoint; a constant learning rate stays as it is.

    Raises:
        UserError: it is none, or that of another optimizer or policy; nothing has been taken over then.
    """
    if not (folder / "state.json").is_file():
        raise UserError(str(folder), "no state.json; wanted a checkpoint that a run has saved")
    saved = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    kind = type(state.optimizer).__name__
    if saved.get("optimizer") != kind:
        why = f"its optimizer is {saved.get('optimizer')}, wanted the state of {kind}, with which the run goes on"
        raise UserError(str(folder), why)
    load_weights(policy.model, folder)
    arrays: Any = mx.load(str(folder / "optimizer.safetensors"))
    if "learning_rate" in arrays and "learning_rate" not in state.optimizer._schedulers:  # pyright: ignore
        arrays["learning_rate"] = state.optimizer.learning_rate
    state.optimizer.state = tree_unflatten(list(arrays.items()))
    state.step, state.skipped = saved["step"], saved["skipped"]
