"""What a model's files say of its size, none of its weights read."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxrl.policy.shapes import AGAIN, Model, Uncovered, model_of

SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "U8": 1, "I8": 1, "I64": 8, "BOOL": 1}
FLOATS = ("F64", "F32", "F16", "BF16")
DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
ASIDE = ("vision", "visual", "model.visual", "mtp", "model.vision")  # tensors that mlx-lm leaves out


@dataclass(frozen=True, slots=True)
class Files:
    """A model's sizes; size: bytes of an activation; weights: bytes in memory; loading: more of them while it loads."""

    model: Model
    size: int
    weights: int
    loading: int
    folder: Path | None = None


def files_of(id: str, dtype: str | None, gpu: bool = False) -> Files:
    """The sizes of a model folder, of a Hugging Face id that was fetched before, or of a .gguf file.

    Raises:
        Uncovered: its files are not on this machine, or the model is not covered.
        ValueError: a file is not what it should be.
    """
    path = Path(id).expanduser()
    if id.endswith(".gguf"):
        return _gguf(path, dtype, gpu)
    folder = path if path.is_dir() else _fetched(id)
    if folder is None or not (folder / "config.json").is_file():
        raise Uncovered(f"{id}, which has no config.json on this machine yet")
    config = read_table(folder / "config.json")
    model = model_of(config, folder / "config.json")
    tensors = [tensor for file in sorted(folder.glob("*.safetensors")) for tensor in _tensors(file)]
    if not tensors:
        size = DTYPES.get(dtype or str(config.get("torch_dtype") or config.get("dtype")), 2)
        return Files(model, size, model.weights(size), 0, folder)
    stored = {kind: sum(count for kind_, count in tensors if kind_ == kind) for kind in FLOATS}
    size = DTYPES[dtype] if dtype else SIZES[max(stored, key=lambda kind: stored[kind])]
    changed = sum(count * (size if kind in FLOATS and dtype else SIZES.get(kind, 4)) for kind, count in tensors)
    before = sum(count * SIZES.get(kind, 4) for kind, count in tensors)
    return Files(model, size, changed, before if changed != before else 0, folder)


def _gguf(path: Path, dtype: str | None, gpu: bool) -> Files:
    from mlxrl.policy import gguf

    size, header = DTYPES[dtype] if dtype else 2 if gpu else 4, gguf.header(path)
    weights = 0
    for shape, kind in header.tensors.values():
        count = math.prod(shape)
        packed = kind in gguf.BITS and dtype is None
        weights += count * gguf.BITS[kind] // 8 + 2 * size * count // 32 if packed else count * size
    return Files(model_of(gguf.config_of(header), path), size, weights, path.stat().st_size)


def read_table(path: Path) -> dict[str, Any]:
    """A model's settings, of a file that holds an object in JSON; ValueError where it does not."""
    try:
        found = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: wanted a model's config in JSON: {error}; {AGAIN}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: wanted a JSON object, got {type(found).__name__}; {AGAIN}")
    return found


def read_text(path: Path) -> str:
    """A file of a model as text; ValueError where it is none."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: wanted text in UTF-8: {error}; {AGAIN}") from None


def _tensors(path: Path) -> Iterator[tuple[str, int]]:
    """The type and count of every tensor of a file that a language model uses."""
    with path.open("rb") as file:
        first = file.read(8)
        size = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
        try:
            header = json.loads(file.read(size)) if 0 < size <= path.stat().st_size else None
        except ValueError:
            header = None
    if not isinstance(header, dict):
        raise ValueError(f"{path}: not a safetensors file; {AGAIN}")
    for name, tensor in header.items():
        if name != "__metadata__" and not name.startswith(ASIDE):
            try:
                yield str(tensor["dtype"]), int(math.prod(tensor["shape"]))
            except (KeyError, TypeError, ValueError):
                raise ValueError(f"{path}: {name}: its shape cannot be read; {AGAIN}") from None


def _fetched(id: str) -> Path | None:
    """The newest snapshot of a Hugging Face id in the cache, None where there is none."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub")) / f"models--{id.replace('/', '--')}" / "snapshots"
    found = sorted(cache.glob("*/config.json"), key=lambda path: path.stat().st_mtime)
    return found[-1].parent if found else None
