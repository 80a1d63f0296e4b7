"""Adapter folders: written as mlx-lm reads them, and read as mlx-lm, runs and PEFT write them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxrl import store
from mlxrl.errors import UserError, brief, exception_line, one_line
from mlxrl.files import expanded, replacing_all
from mlxrl.policy import peft_format
from mlxrl.policy.differentiate import leaves
from mlxrl.policy.lora import AdapterError, name_in_block
from mlxrl.settings import LoRA

CONFIG, WEIGHTS = "adapter_config.json", "adapters.safetensors"


@dataclass(frozen=True, slots=True)
class Saved:
    """What an adapter folder holds: the settings, the model it was trained on ("" if unknown), and lazy arrays."""

    folder: str
    lora: LoRA
    source: str
    weights: Mapping[str, mx.array]


def save(model: Any, lora: LoRA, folder: str | Path, source: str) -> None:
    """Write an adapter in one piece: a new folder appears whole, in one that is there the weights are replaced first.

    lora: with its keys resolved.
    """
    total = len(model.layers)
    config = {
        "fine_tune_type": "dora" if lora.dora else "lora",
        "model": source,
        "num_layers": min(lora.layers or total, total),
        "lora_parameters": {
            "rank": lora.rank, "scale": lora.scale, "dropout": lora.dropout, "keys": sorted(lora.keys or ()),
        },
    }  # fmt: skip
    with replacing_all(Path(folder), (WEIGHTS, CONFIG)) as temporary:
        mx.save_safetensors(str(temporary / WEIGHTS), dict(leaves(model.trainable_parameters())))
        (temporary / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def read(folder: str | Path) -> Saved:
    """An adapter by its folder or as `sha256:DIGEST` of the store, its arrays not yet in memory.

    The layers are those of which there are arrays, because mlx-lm adapts what a key happens to match.

    Raises:
        AdapterError: its files are missing or damaged, or it is not LoRA or DoRA in mlx-lm's format or PEFT's.
        StoreError: the store does not have it, or it is damaged there.
    """
    folder = store.resolve(folder)
    config = _config(folder)
    if "peft_type" in config:
        return _of_peft(folder, config)
    path = str(_file(folder, CONFIG))
    kind, layers = config.get("fine_tune_type", "lora"), config.get("num_layers")
    given: Any = config.get("lora_parameters")
    if kind not in ("lora", "dora"):
        raise AdapterError(path, _unreadable(folder, config, kind))
    if not isinstance(layers, int | None):
        raise AdapterError(path, "num_layers", f"wanted a whole number, got {brief(layers)}")
    try:
        lora = LoRA(
            rank=given["rank"], scale=given["scale"], dropout=given["dropout"], keys=given.get("keys") or None,
            layers=layers if (layers or 0) > 0 else None, dora=kind == "dora",
        )  # fmt: skip
    except UserError as error:
        raise error.within(path) from None
    except (KeyError, TypeError, AttributeError) as error:
        raise AdapterError(path, f"wanted lora_parameters with rank, scale, dropout, got {error!r}") from error
    weights = _arrays(folder)
    lora = replace(lora, keys=_keys(weights, lora.keys or ()))
    return Saved(str(folder), lora, str(config.get("model") or ""), weights)


def _of_peft(folder: str | Path, config: Mapping[str, Any]) -> Saved:
    if (pickle := expanded(folder) / "adapter_model.bin").is_file():
        raise AdapterError(str(pickle), f"a pickle, which is never read; save it as {peft_format.WEIGHTS}")
    weights = peft_format.arrays_of(folder, config, _loaded(_file(folder, peft_format.WEIGHTS)))
    if not weights:
        raise AdapterError(str(folder), f"{peft_format.WEIGHTS} has no adapter in it")
    lora = peft_format.settings_of(folder, config, weights)
    return Saved(str(folder), lora, str(config.get("base_model_name_or_path") or ""), weights)


def taken_over(given: LoRA | None, saved: Saved) -> LoRA:
    """The settings of a saved adapter; AdapterError where others were given, which would have no effect."""
    if given not in (None, LoRA(), saved.lora):
        raise AdapterError("lora", f"has no effect beside an adapter; the settings are those of {saved.folder}")
    return saved.lora


def fill(model: nn.Module, saved: Saved) -> None:
    """Put an adapter's arrays into a model that is adapted in the same way.

    Raises:
        AdapterError: they are not those of the model's adapters, or not finite.
    """
    wanted = {name: value.shape for name, value in leaves(model.trainable_parameters())}
    got = {name: value.shape for name, value in saved.weights.items()}
    path = str(Path(saved.folder) / WEIGHTS)
    if wanted != got:
        name, shape = sorted(set(wanted.items()) ^ set(got.items()))[0]
        difference = f"not the adapter of this model and [lora] table; first difference: {name} {shape}"
        raise AdapterError(path, difference)
    if name := first_not_finite(saved.weights):
        raise AdapterError(path, f"{name} holds NaN or infinity; take an earlier checkpoint, or train it again")
    model.load_weights(list(saved.weights.items()), strict=False)
    mx.eval(model.trainable_parameters())


def load_weights(model: nn.Module, folder: str | Path) -> None:
    """`fill` from a folder."""
    fill(model, read(folder))


def first_not_finite(arrays: Mapping[str, mx.array]) -> str | None:
    """The name of an array with NaN or infinity in it. The largest and smallest entry say it without a copy."""
    floats = {name: array for name, array in arrays.items() if mx.issubdtype(array.dtype, mx.floating) and array.size}
    for name, array in floats.items():
        if not mx.all(mx.isfinite(mx.stack([array.max(), array.min()]))).item():
            return name
    return None


def warn_of_other_model(saved: Saved, source: str) -> None:
    """Warn where an adapter names another model than it is put on."""
    theirs, ours = Path(saved.source).expanduser(), Path(source).expanduser()
    if not saved.source or not source or saved.source == source:
        return
    same = theirs.resolve() == ours.resolve() if theirs.exists() else theirs.name == ours.name
    if not same:
        warnings.warn(f"{saved.folder}: an adapter of {saved.source}, put on {source}", stacklevel=3)


def _config(folder: str | Path) -> dict[str, Any]:
    path = _file(folder, CONFIG)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        why = f"wanted lora_parameters with rank, scale, dropout, got {exception_line(error)}"
        raise AdapterError(str(path), why) from error
    if not isinstance(config, dict):
        raise AdapterError(str(path), f"wanted lora_parameters with rank, scale, dropout, got {brief(config)}")
    return config


def _unreadable(folder: str | Path, config: Mapping[str, Any], kind: Any) -> str:
    """What to do with an adapter that is neither LoRA nor DoRA in mlx-lm's format."""
    if kind == "full":
        return (
            f"a full fine-tune, no adapter; mlx_lm.fuse --model {config.get('model', 'MODEL')} --adapter-path {folder} "
            "--save-path FOLDER makes a model of it, to be taken as model.id"
        )
    return f"fine_tune_type: wanted lora or dora, got {brief(kind)}"


def _arrays(folder: str | Path) -> dict[str, mx.array]:
    path = _file(folder, WEIGHTS)
    arrays = _loaded(path)
    if not any(name.endswith(".lora_a") for name in arrays):
        name = brief(next(iter(arrays), None))
        raise AdapterError(
            str(path), f"no adapter in mlx-lm's format: wanted arrays NAME.lora_a and NAME.lora_b, got {name}"
        )
    return arrays


def _loaded(path: Path) -> dict[str, mx.array]:
    try:
        arrays: dict[str, mx.array] = mx.load(str(path))  # pyright: ignore
        mx.eval(arrays)
    except (RuntimeError, ValueError) as error:
        raise AdapterError(str(path), f"not a whole safetensors file: {one_line(error)}") from error
    return arrays


def _keys(weights: Mapping[str, mx.array], given: Collection[str]) -> tuple[str, ...]:
    """The names, in a block or in the model, of what has adapters; in the model where they were given so."""
    names = [name.removesuffix(".lora_a") for name in weights if name.endswith(".lora_a")]
    return tuple(sorted({name if name in given else name_in_block(name) for name in names}))


def _file(folder: str | Path, name: str) -> Path:
    path = Path(folder).expanduser() / name
    if not path.is_file():
        raise AdapterError(str(folder), f"no {name}; wanted a folder that a run, mlx-lm or PEFT has saved")
    return path
