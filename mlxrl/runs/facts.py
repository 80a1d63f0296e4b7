"""What a manifest records of where a run came from: versions, device, digests."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from platform import python_version
from typing import TYPE_CHECKING, Any

from mlxrl import __version__

if TYPE_CHECKING:
    from mlxrl.runs.experiment import Experiment
    from mlxrl.types import Task

WHOLE = 1 << 30
HEAD = 64 << 20
"""Bytes: a file of at least WHOLE is digested by its first HEAD only, which is recorded as such."""


def versions() -> dict[str, str]:
    """Versions of the packages and the Python that decide what a run does."""
    return {"mlxrl": __version__, "mlx": _version("mlx"), "mlx-lm": _version("mlx-lm"), "python": python_version()}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def device() -> dict[str, Any]:
    """The machine and the device that MLX computes on."""
    import mlx.core as mx  # here, so that versions can be told where MLX does not load

    return {
        "mlx": str(mx.default_device()),
        "name": str(mx.device_info().get("device_name", "")),
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "cores": os.cpu_count(),
    }


def model_digests(source: str) -> dict[str, str]:
    """SHA-256 of a model's files by name: its config, tokenizer and weights; empty for one that is not a local path."""
    path = Path(source)
    if path.is_file():
        return {path.name: digest(path)}
    kinds = ("*.json", "*.safetensors", "*.jinja", "*.model")
    return {file.name: digest(file) for kind in kinds for file in sorted(path.glob(kind))} if path.is_dir() else {}


def data_digest(source: str, tasks: Sequence[Task]) -> dict[str, Any]:
    """A data source, how many examples were taken of it, and a SHA-256 over them as they were understood."""
    from mlxrl.data import fingerprint

    return {"source": source, "examples": len(tasks), "sha256": fingerprint(tasks)}


def data_digests(experiment: Experiment) -> list[dict[str, Any]]:
    """The digests of what an experiment trains on and of what it is evaluated on."""
    data = experiment.config.data
    held_out = [] if data.evaluation is None else [data_digest(data.evaluation, experiment.held_out)]
    return [data_digest(data.train, experiment.tasks), *held_out]


def digest(path: Path) -> str:
    """SHA-256 of a file; of a big one that of its head, with its size: "head:SIZE:SHA"."""
    total, size = hashlib.sha256(), path.stat().st_size
    left = size if size < WHOLE else HEAD
    with path.open("rb") as file:
        while left > 0 and (block := file.read(min(left, 1 << 20))):
            total.update(block)
            left -= len(block)
    return total.hexdigest() if size < WHOLE else f"head:{size}:{total.hexdigest()}"
