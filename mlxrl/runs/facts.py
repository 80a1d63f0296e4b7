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
from mlxrl.files import expanded

if TYPE_CHECKING:
    from mlxrl.runs.experiment import Experiment
    from mlxrl.tables import Config
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


def model(source: str, revision: str | None = None) -> dict[str, Any]:
    """What a model is: its id, the revision where it is a snapshot of the Hub, and its files' digests.

    revision: the one to look for; None for the one that was fetched last. Where the model is not on this machine there
    are no files.
    """
    if expanded(source).exists():
        return {"id": source, "revision": None, "files": model_digests(str(expanded(source)))}
    from mlxrl.policy.policy import folder_of

    folder = folder_of(source, revision)
    found = revision if folder is None else folder.name
    return {"id": source, "revision": found, "files": {} if folder is None else model_digests(str(folder))}


def model_digests(source: str) -> dict[str, str]:
    """SHA-256 of a model's files by name: its config, tokenizer and weights; empty for one that is not a local path."""
    path = Path(source)
    if path.is_file():
        return {path.name: digest(path)}
    kinds = ("*.json", "*.safetensors", "*.jinja", "*.model")
    return {file.name: digest(file) for kind in kinds for file in sorted(path.glob(kind))} if path.is_dir() else {}


def data_digest(source: str, tasks: Sequence[Task]) -> dict[str, Any]:
    """A data source, how many examples were taken of it, a SHA-256 over them as they were understood, and its file's.

    The last is null for what is no file.
    """
    from mlxrl.data import fingerprint

    return {
        "source": source, "examples": len(tasks), "sha256": fingerprint(tasks), "file": source_digest(source),
    }  # fmt: skip


def source_digest(source: str) -> str | None:
    """SHA-256 of the file of a data source; None where that is no file of this machine."""
    path = expanded(source)
    path = path / "train.jsonl" if path.is_dir() else path
    return digest(path) if path.is_file() else None


def data_digests(experiment: Experiment) -> list[dict[str, Any]]:
    """The digests of what an experiment trains on, and of what it is evaluated on."""
    data = experiment.config.data
    held_out = ((data.evaluation, experiment.held_out), (data.validation, experiment.validation))
    evaluated = [data_digest(source, tasks) for source, tasks in held_out if source is not None]
    return [data_digest(data.train, experiment.tasks), *evaluated]


def code_digests(config: Config) -> dict[str, str]:
    """The digests of the files of a user's code that a config names, by their paths."""
    named = [*config.reward.functions, *config.run.sinks, config.environment.factory, config.algorithm.get("name")]
    paths = {name.rpartition(":")[0] for name in named if isinstance(name, str)}
    return {path: digest(Path(path)) for path in sorted(paths) if path.endswith(".py") and os.path.isfile(path)}


def digest(path: Path) -> str:
    """SHA-256 of a file; of a big one that of its head, with its size: "head:SIZE:SHA"."""
    total, size = hashlib.sha256(), path.stat().st_size
    left = size if size < WHOLE else HEAD
    with path.open("rb") as file:
        while left > 0 and (block := file.read(min(left, 1 << 20))):
            total.update(block)
            left -= len(block)
    return total.hexdigest() if size < WHOLE else f"head:{size}:{total.hexdigest()}"
