"""Folders of runs that have ended, with a model and data of a few bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mlxrl.data import tasks
from mlxrl.runs import facts, handoff
from mlxrl.runs.folder import RunFolder, claim


def adapter_folder(folder: Path, weights: bytes = b"weights") -> Path:
    """What an adapter folder looks like, without arrays."""
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_bytes(b"{}\n")
    (folder / "adapters.safetensors").write_bytes(weights)
    return folder


def ended(path: Path, weights: bytes = b"weights", parent: str | None = None, **changes: Any) -> RunFolder:
    """A run whose adapter is final, its model and data beside it.

    changes: of the manifest.
    """
    model, data = path.parent / "model", path.parent / "train.jsonl"
    model.mkdir(parents=True, exist_ok=True)
    (model / "model.safetensors").write_bytes(b"base")
    data.write_text('{"prompt": "1+1"}\n')
    folder = claim(path, lambda _: "seed = 0\n")
    folder.record(
        versions=facts.versions(), data=[facts.data_digest(str(data), tasks(data))], model=facts.model(str(model)),
        parent=handoff.parent_of(parent), **changes,
    )  # fmt: skip
    folder.record_evaluation({"before": {"accuracy": 0.25}, "after": {"accuracy": 0.5}})
    adapter_folder(folder.adapters, weights)
    handoff.write(folder, "grpo", 3)
    return folder


def rewrite(path: Path, **changes: Any) -> None:
    """A handoff.json with other values at dotted keys, written `adapter__sha256`."""
    value = json.loads(path.read_text())
    for key, new in changes.items():
        *outer, last = key.split("__")
        place = value
        for name in outer:
            place = place[int(name) if isinstance(place, list) else name]
        place[int(last) if isinstance(place, list) else last] = new
    path.write_text(json.dumps(value))
