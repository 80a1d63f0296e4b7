"""A model with its adapter in its weights, as a folder that mlx-lm loads. It is compared before it appears."""

from __future__ import annotations

import json
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxrl import settings
from mlxrl.errors import UserError, one_line
from mlxrl.files import expanded, replacing, replacing_all
from mlxrl.policy import gguf, gguf_export
from mlxrl.policy.float32_logits import logits_of, prompts_of, rms
from mlxrl.policy.fuse import FuseError, float_type, fused_arrays, loss_in_weights, packed_layers
from mlxrl.policy.lora import without_adapters
from mlxrl.policy.policy import Policy, folder_of, load, load_mlx_lm

MOST_LOST = 0.5
"""The share of an adapter's effect that may be lost in a quantised base."""
TOLERANCE = {mx.float32: 1e-4, mx.float16: 5e-3, mx.bfloat16: 3e-2}
"""By the type of the weights, what the logits of a dequantised model may be off by, as a share of their size."""
COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
LEFT = ("config.json", "model.safetensors.index.json", "hf_quant_config.json", "adapter_config.json")
"""Files of a model folder that are not copied: one that is written anew, and those about its weights."""
SPARE = 64 << 20
"""Bytes of room for what is not weights."""


@dataclass(frozen=True, slots=True)
class Fused:
    """What came of it.

    dtype: of what is not packed; size: bytes of the weights. Root mean squares over the logits of a few texts, their
    mean at each position taken off: logits, of the adapter's model; effect, of what the adapter changes; error, of the
    difference between the fused model and the adapter's. lost_in_weights: the same share of the changed weights.
    """

    dtype: mx.Dtype
    size: int
    logits: float
    effect: float
    error: float
    lost_in_weights: float

    @property
    def lost(self) -> float:
        """error / effect."""
        return self.error / self.effect if self.effect else float("inf") if self.error else 0.0


def fuse(
    id: str,
    adapter: str | Path,
    output: str | Path,
    *,
    dtype: settings.Dtype | None = None,
    quantised: bool = False,
    force: bool = False,
    gguf_file: str | Path | None = None,
) -> Fused:
    """Write a model with an adapter in its weights; one model at a time is in memory.

    Args:
        id, adapter, dtype: as for `load`. A quantised model is dequantised, to `dtype` or the type of its scales.
        output: a new or empty folder, which appears once the model in it gives the adapter's logits.
        quantised: pack the changed layers as their base is, which is refused where more than MOST_LOST of the effect
            is lost; force: do it all the same.
        gguf_file: a GGUF file of the same model, for llama and mistral with a byte-level tokenizer.
    Raises:
        UserError: something cannot be had, or the fused model is another; nothing is left behind.
    """
    folder, names = new_folder(output, folder_of(id), adapter), list[str]()
    policy, config = load(id, lora=None, dtype=dtype, adapter=adapter), _config(id, dtype)
    if quantised and not packed_layers(policy.model):
        raise FuseError("quantised", f"wanted a quantised model, got {id}, which is not; leave it out")
    if gguf_file is not None:
        gguf_export.check(config, policy.tokenizer, gguf_file, quantised)
    with replacing_all(folder, names) as temporary:
        before = _before(policy, quantised)
        size = _write(policy, config, temporary, quantised)
        del policy  # the fused model takes its place in memory
        made, logits = _compared(before, size, temporary)
        _require_same(made, quantised, force)
        if gguf_file is not None:
            _write_gguf(temporary, logits, made, expanded(gguf_file))
        names += sorted(path.name for path in temporary.iterdir())
    return made


@dataclass(frozen=True, slots=True)
class _Before:
    """A model with its adapter, as it was measured before it left the memory."""

    prompts: list[list[int]]
    logits: mx.array
    dtype: mx.Dtype
    effect: float
    lost_in_weights: float


def _before(policy: Policy, quantised: bool) -> _Before:
    prompts = prompts_of(policy.tokenizer)
    policy.require_ids("the texts that are compared", [id for ids in prompts for id in ids])
    logits = logits_of(policy.model, prompts)
    with without_adapters(policy.model):
        base = logits_of(policy.model, prompts)
    lost = loss_in_weights(policy.model, quantised)
    return _Before(prompts, logits, float_type(policy.model), rms(logits - base), lost)


def _compared(before: _Before, size: int, folder: Path) -> tuple[Fused, mx.array]:
    """What a written model is beside what was to be written, and its logits."""
    try:
        model, tokenizer, _ = load_mlx_lm(str(folder), folder)
    except UserError as error:
        raise FuseError(f"the fused model cannot be loaded, nothing is written: {error.parts[-1]}") from error
    if prompts_of(tokenizer) != before.prompts:
        raise FuseError("the fused model's tokenizer is another than the model's, nothing is written")
    logits = logits_of(model, before.prompts)
    sizes = rms(before.logits), before.effect, rms(logits - before.logits)
    return Fused(before.dtype, size, *sizes, before.lost_in_weights), logits


def _require_same(made: Fused, quantised: bool, force: bool) -> None:
    if quantised:
        if made.lost > MOST_LOST and not force:
            figures = f"the logits change by {made.effect:.3g}, and are then off by {made.error:.3g}"
            advice = "leave --quantised out for a dequantised model, or give --force"
            raise FuseError("quantised", f"more than half of the adapter's effect would be lost: {figures}; {advice}")
        return
    limit = TOLERANCE[made.dtype] * made.logits
    if not made.error <= limit:  # NaN is none
        why = f"the fused model's logits are off by {made.error:.3g}, wanted at most {limit:.3g}"
        raise FuseError(f"{why}, a share of {TOLERANCE[made.dtype]:g} of their size; nothing is written")
    if made.lost > MOST_LOST:
        what = f"the adapter changes the logits by {made.effect:.2g}, and rounding the weights by {made.error:.2g}"
        warnings.warn(what if made.dtype == mx.float32 else f"{what}; --dtype float32 resolves more", stacklevel=3)


def new_folder(output: str | Path, *others: str | Path | None) -> Path:
    """The folder that something is written to; FuseError where it is there already, or is one of some others."""
    folder = expanded(output).resolve()
    if any(other is not None and folder == expanded(other).resolve() for other in others):
        raise FuseError("output", f"{output} is the folder that is read; wanted a new one")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FuseError("output", f"{output} is there already; wanted a new or an empty folder")
    return folder


def _require_room(folder: Path, size: int) -> None:
    if (free := shutil.disk_usage(folder).free) < size + SPARE:
        raise FuseError("output", f"wanted {(size + SPARE) / 1e9:.2f} GB of room on the disk, got {free / 1e9:.2f} GB")


def _config(id: str, dtype: str | None) -> dict[str, Any]:
    """A model's config without what is said of packed weights."""
    from mlx_lm.utils import load_config

    folder = folder_of(id)
    config = gguf.outline(expanded(id), packed=False)[0] if folder is None else load_config(folder)
    for table in (config, config.get("text_config") or {}):
        method = (table.get("quantization_config") or {}).get("quant_method")
        if method == "bitnet":
            raise FuseError("model", "id", f"{id}: bitnet's weights have no other form; it cannot be fused")
        for key in ("quantization", "quantization_config", "quantize_activations"):
            table.pop(key, None)
        table |= {key: dtype for key in ("dtype", "torch_dtype") if dtype and key in table}
    return config


def _write(policy: Policy, config: dict[str, Any], folder: Path, quantised: bool) -> int:
    """Write a fused model's folder; the bytes of its weights."""
    from mlx_lm.utils import save_config

    source = folder_of(policy.source)
    arrays = fused_arrays(policy.model, quantised)
    size = sum(array.nbytes for array in arrays.values())
    _require_room(folder, size)
    if quantised:
        config = {**config, "quantization": _quantization(policy.model)}
    vision = "vision_tower" in getattr(policy.model, "model", {})
    save_config(config, folder / "config.json", keep_vision_config=vision)
    if source is None:
        policy.tokenizer.save_pretrained(folder)
    else:
        for path in sorted({path for pattern in COPIED for path in source.glob(pattern)}):
            if path.name not in LEFT:
                shutil.copyfile(path, folder / path.name)
    _save(arrays, folder)
    return size


def _quantization(model: Any) -> dict[str, Any]:
    """The `quantization` of a config: how each layer is packed, after the three keys that mlx-lm always wants."""
    layers = {
        name: {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}
        | ({} if layer.get("global_scale") is None else {"global_scale": True})
        for name, layer in packed_layers(model).items()
    }
    return {**next(iter(layers.values())), **layers}


def _save(arrays: dict[str, mx.array], folder: Path) -> None:
    """Write weights in files of a few GB, of which one at a time is in memory; `arrays` is emptied."""
    from mlx_lm.utils import make_shards

    shards = make_shards(arrays)
    arrays.clear()
    count, places = len(shards), dict[str, str]()
    for number in range(1, count + 1):
        name = f"model-{number:05d}-of-{count:05d}.safetensors" if count > 1 else "model.safetensors"
        shard = shards.pop(0)
        try:
            mx.save_safetensors(str(folder / name), shard, {"format": "mlx"})
        except RuntimeError as error:
            raise FuseError("output", f"{name} cannot be written: {one_line(error)}") from error
        places |= dict.fromkeys(shard, name)
    if count > 1:
        index = json.dumps({"metadata": {}, "weight_map": places}, indent=2)
        (folder / "model.safetensors.index.json").write_text(index, encoding="utf-8")


def _write_gguf(folder: Path, logits: mx.array, made: Fused, file: Path) -> None:
    """Write a written model as a GGUF file, which appears once it is read back with the model's logits."""
    with replacing(file) as temporary:
        model, tokenizer, config = load_mlx_lm(str(folder), folder, lazy=True)
        gguf_export.save(model, tokenizer, config, temporary)
        prompts = prompts_of(tokenizer)
        del model
        again, _, _ = gguf.read(temporary, mx.float16)
        error, limit = rms(logits_of(again, prompts) - logits), TOLERANCE[mx.float16] * made.logits
        if not error <= limit:
            raise FuseError(
                str(file), f"its logits are off by {error:.3g}, wanted at most {limit:.3g}; it is not written"
            )
