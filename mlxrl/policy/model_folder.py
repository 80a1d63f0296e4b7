"""The files of an mlx-lm model folder, looked at before anything is made of them."""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.nn as nn

from mlxrl.errors import UserError, brief, exception_line
from mlxrl.policy.adapter_folder import first_not_finite
from mlxrl.policy.differentiate import leaves

COUNTS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
TOKENIZERS = ("tokenizer*", "vocab*", "*.tiktoken", "tekken.json", "*.model")
SECONDS = 10.0
"""That a chat template may take for two letters."""
ANY = 1000
"""Layers that a model is always believed to have."""


class ModelError(UserError):
    """A model that cannot be found or read."""


def check_folder(folder: Path) -> None:
    """ModelError, without the folder's name, for what makes no model: a config that is none, files that are missing
    or cut short, more layers than arrays, no tokenizer, or Python to be run."""
    config = _json(folder / "config.json")
    if not isinstance(config.get("model_type"), str):
        raise ModelError("config.json", f"model_type: wanted a text, got {brief(config.get('model_type'))}")
    if config.get("model_file") is not None:
        raise ModelError("config.json", "model_file: it wants Python of its folder to be run, which is never done")
    arrays = sum(map(_arrays, _files(folder)))
    for name, value in _numbers(config):
        if name in COUNTS and value > max(arrays, ANY):
            why = f"{name}: wanted at most the {arrays} arrays of its files, got {brief(value)}"
            raise ModelError("config.json", why)
        if name == "group_size" and value < 1:  # MLX divides by it
            raise ModelError("config.json", f"group_size: wanted at least 1, got {brief(value)}")
    if not any(any(folder.glob(pattern)) for pattern in TOKENIZERS):
        raise ModelError("no tokenizer; wanted tokenizer.json")


def check_weights(model: nn.Module, source: str) -> None:
    """ModelError for weights that are not finite."""
    if name := first_not_finite(dict(leaves(model.parameters()))):
        why = f"{name} holds NaN or infinity; the file is damaged, or the weights are too large for their type"
        raise ModelError("model", source, why)


def tokenizer_fault(tokenizer: Any, rows: int | None) -> str:
    """What is wrong with a tokenizer for a model of so many ids: a stop token beyond, a template without end."""
    for index in tokenizer.eos_token_ids:
        if not isinstance(index, int) or index < 0 or (rows is not None and index >= rows):
            return f"eos_token_id: wanted an id below {rows}, got {brief(index)}"
    return "" if _ends(tokenizer) else f"its chat template has not ended after {SECONDS:g} s on one short message"


def _ends(tokenizer: Any) -> bool:
    """Whether the chat template comes to an end; where not it is stopped. What it raises is told of a real prompt."""

    def render() -> None:
        messages = [{"role": "user", "content": "hi"}]
        try:
            tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except BaseException:  # noqa: BLE001  (a template's own, and the one that stops it)
            return

    if not tokenizer.has_chat_template:
        return True
    thread = threading.Thread(target=render, daemon=True)
    thread.start()
    thread.join(SECONDS)
    if thread.is_alive() and thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
        return False
    return True


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ModelError(path.name, f"not JSON: {exception_line(error)}") from None
    if not isinstance(value, dict):
        raise ModelError(path.name, f"wanted a JSON object, got {brief(value)}")
    return value


def _files(folder: Path) -> list[Path]:
    """A model's files of weights, of which none may be missing."""
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise ModelError("no weights; wanted files model*.safetensors")
    if (index := folder / "model.safetensors.index.json").is_file():
        named = _json(index).get("weight_map")
        wanted = {str(name) for name in named.values()} if isinstance(named, Mapping) else set[str]()
        if missing := sorted(wanted - {file.name for file in files}):
            why = f"{len(missing)} of {len(wanted)} files of weights are missing, as {missing[0]}; fetch it again"
            raise ModelError(why)
    return files


def _arrays(file: Path) -> int:
    """How many arrays a safetensors file has, which is as long as its header says."""
    size = file.stat().st_size
    try:
        with file.open("rb") as opened:
            start = 8 + int.from_bytes(opened.read(8), "little")
            header: Any = json.loads(opened.read(start - 8)) if 8 < start <= size else None
        arrays = {name: value for name, value in header.items() if name != "__metadata__"}
        end = start + max((value["data_offsets"][1] for value in arrays.values()), default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        raise ModelError(file.name, "not a whole safetensors file; fetch it again") from None
    if end != size:
        raise ModelError(file.name, f"not a whole safetensors file: wanted {end} bytes, got {size}; fetch it again")
    return len(arrays)


def _numbers(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """The whole numbers of a config, of its parts too."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _numbers(value)
        elif isinstance(value, int):
            yield name, value
