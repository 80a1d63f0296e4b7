"""GGUF files of llama models with a byte-level tokenizer, in float16 with float32 norms.

mlx-lm's own export renames and reorders the weights as llama.cpp wants them, which is used here. Its metadata call
every tokenizer a SentencePiece one and leave out merges, chat template and the width of a head; these are written here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxrl.errors import one_line
from mlxrl.files import expanded
from mlxrl.policy.adapter_folder import first_not_finite
from mlxrl.policy.differentiate import leaves
from mlxrl.policy.fuse import FuseError
from mlxrl.policy.gguf import SPLITS

OTHERWISE = "write the folder alone, and convert it with llama.cpp's convert_hf_to_gguf.py"
NORMAL, CONTROL, USER, UNUSED = 1, 3, 4, 5
"""GGUF's kinds of tokens."""
PLAIN: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama", "mistral"), "rope_scaling": (None,), "attention_bias": (None, False),
    "mlp_bias": (None, False), "sliding_window": (None,), "rope_traditional": (None, False),
    "hidden_act": (None, "silu"),
}  # fmt: skip
"""Keys of a config, and the values that a file without more metadata stands for."""


def check(config: Mapping[str, Any], tokenizer: Any, file: str | Path, quantised: bool) -> None:
    """FuseError for a model that is not written as GGUF, or a file that is there."""
    path = expanded(file)
    if path.suffix != ".gguf" or path.exists():
        raise FuseError("gguf", f"wanted a new file NAME.gguf, got {file}")
    if quantised:
        raise FuseError("gguf", "wanted a dequantised model; leave --quantised out")
    for key, values in PLAIN.items():
        if (got := config.get(key)) not in values:
            raise FuseError("gguf", f"{key}: wanted {values[0] or 'none'}, got {one_line(got, 40)}; {OTHERWISE}")
    _pre(_core(tokenizer))


def save(model: Any, tokenizer: Any, config: Mapping[str, Any], path: Path) -> None:
    """Write an mlx-lm llama model as a GGUF file.

    Raises:
        FuseError: its weights are not those of a plain llama, or too large for float16.
    """
    from mlx_lm.gguf import permute_weights, translate_weight_names

    heads = {"q_proj": config["num_attention_heads"], "k_proj": _key_heads(config)}
    arrays: dict[str, mx.array] = {}
    for name, array in leaves(model.parameters()):
        if not name.endswith(".weight"):
            raise FuseError("gguf", f"wanted the weights of a plain llama, got {name}; {OTHERWISE}")
        count = heads.get(name.split(".")[-2])
        array = array if count is None else permute_weights(array, count)
        dtype = mx.float32 if array.ndim == 1 else mx.float16
        arrays[translate_weight_names(name)] = mx.contiguous(array.astype(mx.float32).astype(dtype))
    if name := first_not_finite(arrays):
        raise FuseError("gguf", f"{name} is too large for float16; {OTHERWISE}")
    try:
        mx.save_gguf(str(path), arrays, _metadata(tokenizer, config, len(model.layers)))
    except RuntimeError as error:
        raise FuseError("gguf", f"the file cannot be written: {one_line(error)}") from error


def _metadata(tokenizer: Any, config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    width, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or width // heads
    llama = {
        "block_count": layers, "context_length": config.get("max_position_embeddings", 2048),
        "embedding_length": width, "feed_forward_length": config["intermediate_size"],
        "vocab_size": config["vocab_size"],
        "attention.head_count": heads, "attention.head_count_kv": _key_heads(config),
        "attention.key_length": head_dim, "attention.value_length": head_dim, "rope.dimension_count": head_dim,
    }  # fmt: skip
    floats = {
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "llama.rope.freq_base": config.get("rope_theta") or 10000.0,
    }
    whole = {f"llama.{key}": value for key, value in llama.items()} | {"general.file_type": 1, "general.alignment": 32}
    return {
        "general.architecture": "llama", "general.name": "llama",
        **{key: mx.array(value, mx.uint32) for key, value in whole.items()},
        **{key: mx.array(value, mx.float32) for key, value in floats.items()},
        **_vocabulary(tokenizer, config["vocab_size"]),
    }  # fmt: skip


def _vocabulary(tokenizer: Any, rows: int) -> dict[str, Any]:
    core = _core(tokenizer)
    ids, added = (
        {index: token for token, index in tokenizer.get_vocab().items()},
        {token["id"]: token["special"] for token in core["added_tokens"]},
    )
    kinds = [
        UNUSED if i not in ids else NORMAL if i not in added else CONTROL if added[i] else USER for i in range(rows)
    ]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in core["model"]["merges"]]
    first = tokenizer.encode("")
    roles = {"bos": tokenizer.bos_token_id, "padding": tokenizer.pad_token_id, "unknown": tokenizer.unk_token_id}
    own = tokenizer.eos_token_id
    roles |= dict(zip(("eos", "eot", "eom"), [own, *sorted(set(tokenizer.eos_token_ids) - {own})], strict=False))
    found = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": _pre(core),
        "tokenizer.ggml.tokens": [ids.get(index, f"[PAD{index}]") for index in range(rows)],
        "tokenizer.ggml.token_type": mx.array(kinds, mx.int32), "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.add_bos_token": mx.array(bool(first) and first[0] == tokenizer.bos_token_id),
        **{f"tokenizer.ggml.{role}_token_id": mx.array(i, mx.uint32) for role, i in roles.items() if i is not None},
    }  # fmt: skip
    template = tokenizer.chat_template
    return {**found, "tokenizer.chat_template": template} if isinstance(template, str) else found


def _core(tokenizer: Any) -> dict[str, Any]:
    """The parts of a byte-level tokenizer, as `tokenizers` writes them."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    core: dict[str, Any] = {} if backend is None else json.loads(backend.to_str())
    if (core.get("model") or {}).get("type") != "BPE":
        raise FuseError("gguf", f"wanted a byte-level BPE tokenizer; {OTHERWISE}")
    return core


def _pre(core: Mapping[str, Any]) -> str:
    """llama.cpp's name for how a tokenizer splits a text."""
    whole = core.get("pre_tokenizer") or {}
    parts = whole.get("pretokenizers", [whole])
    patterns: list[str] = []
    for part in parts:
        match part:
            case {"type": "Digits", "individual_digits": True}:
                patterns.append(r"\p{N}")
            case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}:
                patterns.append(pattern)
            case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": regex}:
                patterns += [SPLITS["gpt-2"][0]] if regex else []
            case _:
                patterns.append(str(part))
    name = next((name for name, known in SPLITS.items() if list(known) == patterns), None)
    if name is None:
        raise FuseError("gguf", f"wanted a tokenizer that splits a text as one of {', '.join(SPLITS)}; {OTHERWISE}")
    return name


def _key_heads(config: Mapping[str, Any]) -> int:
    return config.get("num_key_value_heads") or config["num_attention_heads"]
