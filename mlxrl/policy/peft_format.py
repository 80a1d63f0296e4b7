"""Adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`, from and to mlx-lm's arrays.

PEFT's y = W x + (lora_alpha / r) B A x has A [r, inputs] and B [outputs, r], mlx-lm's lora_a and lora_b are their
transposes. An embedding has lora_embedding_A [r, V] and lora_embedding_B [dims, r]. DoRA's m is lora_magnitude_vector.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxrl.errors import UserError, brief, one_line
from mlxrl.files import replacing_all
from mlxrl.policy.lora import AdapterError, name_in_block
from mlxrl.settings import LoRA

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
INSTEAD = "merge it into its model with PEFT's merge_and_unload, and take that as model.id"
UNHELD = (
    "modules_to_save", "rank_pattern", "alpha_pattern", "layer_replication", "target_parameters", "lora_bias",
    "trainable_token_indices", "alora_invocation_tokens", "use_qalora", "use_bdlora", "arrow_config",
)  # fmt: skip
"""Keys of what mlx-lm's adapters have no place for: other ranks in some layers, biases, whole layers, further forms."""
STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights that leave the base model as it is."""
PARTS = {"lora_A": "lora_a", "lora_B": "lora_b", "lora_embedding_A": "lora_a", "lora_embedding_B": "lora_b",
         "lora_magnitude_vector": "m"}  # fmt: skip
NAME = re.compile(rf"base_model\.model\.(.+)\.({'|'.join(PARTS)})(?:\.default)?(?:\.weight)?")
OUTER = ("model.language_model.", "language_model.model.")
HEAD = ("lm_head", "language_model.lm_head")
"""How transformers and mlx-lm begin the names of a language model beside a vision tower, and its head's names."""
EMBEDDINGS = ("wte", "wpe")


def settings_of(folder: str | Path, config: Mapping[str, Any], weights: Mapping[str, mx.array]) -> LoRA:
    """The settings of a PEFT adapter, from its config and its arrays as `arrays_of` gives them.

    Raises:
        AdapterError: it is no LoRA, or has something that mlx-lm's adapters have no place for.
    """
    path = str(Path(folder) / CONFIG)
    _require_held(path, config)
    try:
        rank, alpha = config["r"], config["lora_alpha"]
        scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
        lora = LoRA(
            rank=rank, scale=float(scale), dropout=float(config.get("lora_dropout") or 0.0),
            keys=_keys(config, weights), dora=bool(config.get("use_dora")),
        )  # fmt: skip
    except UserError as error:
        raise error.within(path) from None
    except (KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
        raise AdapterError(path, f"wanted numbers r, lora_alpha and lora_dropout, got {error!r}") from error
    for name, array in weights.items():
        if name.endswith("lora_a") and array.shape[-1] != rank:
            got = f"{name} has {array.shape[-1]}"
            raise AdapterError(str(Path(folder) / WEIGHTS), f"wanted rank {rank} as in {CONFIG}, got {got}; {INSTEAD}")
    return lora


def arrays_of(folder: str | Path, config: Mapping[str, Any], found: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """PEFT's arrays as mlx-lm's, in float32.

    Raises:
        AdapterError: one of them is no part of an adapter, or has no other.
    """
    path, arrays = str(Path(folder) / WEIGHTS), dict[str, mx.array]()
    beside = any(OUTER[0] in name for name in found)
    for name, array in found.items():
        if name.endswith(".base_layer.weight"):  # a copy of the base's embedding, which PEFT saves beside its adapter
            continue
        if (match := NAME.fullmatch(name)) is None:
            raise AdapterError(path, f"{name}: wanted {' or '.join(PARTS)} of a layer; {INSTEAD}")
        layer, part = match.groups()
        embedding = "embedding" in part
        if array.ndim != (1 if PARTS[part] == "m" else 2):
            raise AdapterError(path, f"{name}: wanted the matrix of a linear layer, got {array.shape}; {INSTEAD}")
        if embedding and config.get("use_dora"):
            raise AdapterError(path, f"{name}: DoRA of an embedding has other norms in PEFT; {INSTEAD}")
        if embedding and not config.get("ensure_weight_tying"):
            what = f"{folder}: {layer} is adapted, which here is the head too where the model's embedding is tied"
            warnings.warn(f"{what}, and in PEFT is not", stacklevel=4)
        arrays[f"{_ours(layer, beside)}.{PARTS[part]}"] = array.T.astype(mx.float32)
    for name in arrays:
        layer = name.rpartition(".")[0]
        if missing := {f"{layer}.lora_a", f"{layer}.lora_b"} - arrays.keys():
            raise AdapterError(path, f"{layer}: wanted both A and B, {sorted(missing)[0]} is missing")
    return arrays


def save(lora: LoRA, weights: Mapping[str, mx.array], source: str, folder: str | Path) -> None:
    """Write an adapter as PEFT reads it.

    weights: mlx-lm's arrays by their names. source: the model that PEFT loads, base_model_name_or_path.

    Raises:
        AdapterError: PEFT has no form for one of its layers.
    """
    arrays: dict[str, mx.array] = {}
    for name, array in weights.items():
        layer, _, part = name.rpartition(".")
        embedding = _is_embedding(layer)
        if array.ndim == 3:
            raise AdapterError(layer, "an adapter of experts, for which PEFT has no form; fuse it into its model")
        if embedding and lora.dora:
            raise AdapterError(layer, "DoRA of an embedding has other norms in PEFT; fuse it into its model")
        theirs = "lora_magnitude_vector" if part == "m" else f"lora_{'embedding_' * embedding}{part[-1].upper()}"
        suffix = "" if embedding or part == "m" else ".weight"
        arrays[f"base_model.model.{_theirs(layer)}.{theirs}{suffix}"] = mx.contiguous(array.T)
    config = _config(lora, sorted({name.rpartition(".")[0] for name in weights}), source)
    with replacing_all(Path(folder), (WEIGHTS, CONFIG)) as temporary:
        mx.save_safetensors(str(temporary / WEIGHTS), arrays, {"format": "pt"})
        (temporary / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _config(lora: LoRA, layers: list[str], source: str) -> dict[str, Any]:
    """A target is a name in a block, of all blocks or those in layers_to_transform, or else a name in the model."""
    alpha, alone = lora.scale * lora.rank, lora.keys or ()
    targets = {layer: layer if layer in alone else name_in_block(layer) for layer in layers}
    found = (re.search(r"\.layers\.(\d+)\.", f".{layer}") for layer, target in targets.items() if layer != target)
    blocks = sorted({int(match[1]) for match in found if match})
    every = blocks == list(range(len(blocks))) and (lora.layers or len(blocks)) >= len(blocks)
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": source, "inference_mode": True,
        "r": lora.rank, "lora_alpha": int(alpha) if alpha == int(alpha) else alpha, "lora_dropout": lora.dropout,
        "target_modules": sorted(map(_theirs, set(targets.values()))),
        "layers_to_transform": None if every else blocks, "layers_pattern": None if every else "layers",
        "bias": "none", "fan_in_fan_out": False, "use_dora": lora.dora, "use_rslora": False,
        "modules_to_save": None, "init_lora_weights": True,
    }  # fmt: skip
    # mlx-lm adapts an embedding as a head too, where it is both.
    return {**config, "ensure_weight_tying": True} if any(map(_is_embedding, layers)) else config


def _theirs(layer: str) -> str:
    """transformers' name of mlx-lm's layer."""
    return HEAD[0] if layer == HEAD[1] else re.sub(f"^{re.escape(OUTER[1])}", OUTER[0], layer)


def _ours(layer: str, beside: bool) -> str:
    """mlx-lm's name of transformers' layer; beside: in a model that has a vision tower too."""
    return HEAD[1] if beside and layer == HEAD[0] else re.sub(f"^{re.escape(OUTER[0])}", OUTER[1], layer)


def _is_embedding(layer: str) -> bool:
    name = layer.rpartition(".")[2]
    return "embed" in name or name in EMBEDDINGS


def _keys(config: Mapping[str, Any], weights: Mapping[str, mx.array]) -> tuple[str, ...]:
    """Names in a block, where these mean the same in all; else the full names of what has adapters."""
    names = [name.removesuffix(".lora_a") for name in weights if name.endswith(".lora_a")]
    targets = config.get("target_modules")
    some = isinstance(targets, str) or any(".layers." in f".{target}" for target in targets or ())
    if some or config.get("layers_to_transform") is not None or config.get("exclude_modules"):
        return tuple(sorted(names))
    return tuple(sorted({name_in_block(name) for name in names}))


def _require_held(path: str, config: Mapping[str, Any]) -> None:
    if (kind := config.get("peft_type")) != "LORA":
        raise AdapterError(path, f"peft_type: wanted LORA, got {brief(kind)}; {INSTEAD}")
    if (bias := config.get("bias")) not in (None, "none"):
        raise AdapterError(path, f"bias: wanted none, got {brief(bias)}; {INSTEAD}")
    if (start := config.get("init_lora_weights")) not in STARTS:
        raise AdapterError(path, f"init_lora_weights: {one_line(start, 40)} changes the base model; {INSTEAD}")
    if key := next((key for key in UNHELD if config.get(key)), None):
        raise AdapterError(path, f"{key}: mlx-lm's adapters have none, got {brief(config[key])}; {INSTEAD}")
