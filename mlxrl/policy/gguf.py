"""GGUF files of the llama architecture as stock mlx-lm models.

MLX reads the tensors; it does not tell their types, and turns those it does not know into float16.
The header is therefore parsed here first: it holds the exact types, every name, and all metadata.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

_TYPES = (
    "F32 F16 Q4_0 Q4_1 Q4_2 Q4_3 Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ2_XXS IQ2_XS "
    "IQ3_XXS IQ1_S IQ4_NL IQ3_S IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M BF16"
)
TYPES = dict(enumerate(_TYPES.split()))
"""GGML's number of a tensor type -> its name."""

BLOCKS = {"F32": (1, 4), "F16": (1, 2), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q8_0": (32, 34)}
"""The types read here -> (weights in a block, bytes of a block)."""

BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}
HEADS = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
"""GGUF's number of a metadata type -> its code in `struct`; 8 is a string, 9 an array."""

AGAIN = "convert the model again"
ELSE = "use an mlx-lm folder of this model"
OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SPLITS = {
    "smollm": (r"\p{N}", _GPT2),
    "gpt-2": (_GPT2,),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "llama-bpe": (_LLAMA3,),
}
"""tokenizer.ggml.pre -> the patterns that split a text, one after the other, as in llama.cpp."""


class Tensor(NamedTuple):
    """One entry of the header: `shape` in MLX's order, `offset` in bytes from the data section."""

    shape: tuple[int, ...]
    type: str
    offset: int


class Metadata(dict[str, Any]):
    """The file's metadata; asking for a key that is missing is a ValueError that names it."""

    def __init__(self, path: Path):
        super().__init__()
        self.path = path

    def __missing__(self, key: str) -> Any:
        raise ValueError(f"{self.path}: metadata key {key!r} is missing; convert the model again")


def read(path: Path, dtype: mx.Dtype | None = mx.float32) -> tuple[nn.Module, TokenizerWrapper, dict[str, Any]]:
    """A GGUF file as an mlx-lm llama model, its tokenizer and its mlx-lm configuration.

    The rows of the query and key projections are put back into Hugging Face's order (GGUF
    interleaves the two halves of a head), so this is the stock model, `rope_traditional` off.

    Args:
        path: a file of architecture llama with tensors of type F32, F16, Q4_0, Q4_1 or Q8_0.
        dtype: every parameter is dequantised to it. None keeps quantised tensors packed (4 or 8
            bits, groups of 32), with scales and all else in float16, on the CPU in float32.
    Returns:
        The model in evaluation mode, the tokenizer with the file's chat template, the
        configuration; `eos_token_id` in it is a list.
    Raises:
        ValueError: not such a file, truncated, or something in it is not supported; one line.
    """
    path = Path(path)
    metadata, tensors = header(path)
    config = _config(metadata, tensors)
    names = {name: _rename(path, name) for name in tensors}
    model = _model(path, config, {names[name]: tensor.shape for name, tensor in tensors.items()})
    tokenizer = _tokenizer(metadata, config)
    if dtype is None:
        config |= _quantization((names[name], tensor.type) for name, tensor in tensors.items())
        layers = config.get("quantization", {})
        nn.quantize(model, class_predicate=lambda layer, _: layers.get(layer, False))
    arrays, weights = _load(path), dict[str, mx.array]()
    for name, tensor in tensors.items():
        heads = config.get(HEADS.get(name.split(".")[-2], ""))
        weights |= _weights(arrays, name, names[name], tensor.type, heads, dtype)
    model.load_weights(list(weights.items()))
    mx.eval(model.parameters())  # frees the file's arrays
    return model.eval(), tokenizer, config


def sizes(path: Path, dtype: int | None, rest: int) -> tuple[dict[str, Any], int]:
    """The mlx-lm configuration of a file, and the bytes of its weights once they are read, without reading them.

    Args:
        dtype: bytes of a number that all are dequantised to, None where they stay packed; rest: those of the others.
    """
    metadata, tensors = header(path)
    total = 0
    for tensor in tensors.values():
        count = math.prod(tensor.shape)
        packed = tensor.type in BITS and dtype is None
        total += count * BITS[tensor.type] // 8 + 2 * rest * count // 32 if packed else count * (dtype or rest)
    return _config(metadata, tensors), total


def language(path: Path) -> tuple[Any, str | None]:
    """A file's `tokenizers.Tokenizer` and its chat template, None where it has none."""
    metadata, tensors = header(path)
    return _bpe(metadata, _config(metadata, tensors)["bos_token_id"]), metadata.get("tokenizer.chat_template")


def save_folder(model: nn.Module, tokenizer: TokenizerWrapper, config: Mapping[str, Any], folder: Path) -> None:
    """Write what `read` returned as an mlx-lm model folder, for mlx_lm.load, generate and fuse.

    Raises:
        ValueError: the model has adapters already; its base would be stored under other names.
    """
    from mlx.utils import tree_flatten
    from mlx_lm.utils import save_config, save_model

    names = [name for name, _ in tree_flatten(model.parameters())]
    if adapter := next((name for name in names if name.endswith("lora_a")), None):
        raise ValueError(f"{folder}: wanted a model without adapters, got {adapter}; save it before adding them")
    save_model(folder, model)
    save_config(dict(config), Path(folder) / "config.json")
    tokenizer.save_pretrained(folder)


def unpermute(rows: mx.array, heads: int) -> mx.array:
    """Undo GGUF's order of a query or key projection: [heads * D, N], any dtype or packing.

    Within a head GGUF has rows 0, D/2, 1, D/2 + 1, ... for a rotation of neighbours; the result
    has 0, 1, ..., D - 1 for a rotation of the two halves.
    """
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def header(path: Path) -> tuple[Metadata, dict[str, Tensor]]:
    """The metadata as plain Python values, and every tensor's shape, type and offset.

    Raises:
        ValueError: no such file, not GGUF, truncated, or a tensor of a type that is not read here.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file; wanted a GGUF file")
    size = path.stat().st_size
    with path.open("rb") as file:
        if (magic := file.read(4)) != b"GGUF":
            raise _refusal(path, "first bytes", b"GGUF", magic, "this is not a GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(path, data)
            if (version := cursor.scalar("I")) not in (2, 3):
                raise _refusal(path, "GGUF version", "2 or 3", version, AGAIN)
            n_tensors, n_keys = cursor.scalar("Q"), cursor.scalar("Q")
            metadata = Metadata(path)
            for _ in range(n_keys):
                key = cursor.string()
                metadata[key] = cursor.value(cursor.scalar("I"))
            tensors = dict(cursor.tensor() for _ in range(n_tensors))
    alignment = metadata.get("general.alignment", 32)
    start = -(-cursor.at // alignment) * alignment
    for name, tensor in tensors.items():
        _check(path, name, tensor, size - start)
    return metadata, tensors


class _Cursor:
    """A position in a file's header; everything read moves it."""

    def __init__(self, path: Path, data: mmap.mmap):
        self.path, self.data, self.at = path, data, 4

    def take(self, size: int) -> bytes:
        if self.at + size > len(self.data):
            raise _truncated(self.path)
        self.at += size
        return self.data[self.at - size : self.at]

    def scalar(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def string(self) -> str:
        return self.take(self.scalar("Q")).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == 8:
            return self.string()
        if kind == 9:
            inner, length = self.scalar("I"), self.scalar("Q")
            return [self.value(inner) for _ in range(length)]
        if kind not in SCALARS:
            raise ValueError(f"{self.path}: metadata of unknown type {kind}; the file is damaged")
        return self.scalar(SCALARS[kind])

    def tensor(self) -> tuple[str, Tensor]:
        name = self.string()
        shape = tuple(self.scalar("Q") for _ in range(self.scalar("I")))[::-1]
        number, offset = self.scalar("I"), self.scalar("Q")
        return name, Tensor(shape, TYPES.get(number, f"number {number}"), offset)


def _check(path: Path, name: str, tensor: Tensor, available: int) -> None:
    if tensor.type not in BLOCKS:
        raise ValueError(
            f"{path}: {name}: tensor type {tensor.type} is not supported; wanted one of "
            f"{', '.join(BLOCKS)}; convert the file to one of these"
        )
    weights, size = BLOCKS[tensor.type]
    if tensor.type in BITS and (len(tensor.shape) != 2 or tensor.shape[-1] % weights):
        wanted = f"rows of a multiple of {weights} weights for {tensor.type}"
        raise _refusal(path, name, wanted, tensor.shape, "convert the file to F16")
    if tensor.offset + math.prod(tensor.shape) // weights * size > available:
        raise _truncated(path)


def _truncated(path: Path) -> ValueError:
    return ValueError(f"{path}: the file ends too early; it is incomplete, download it again")


def _refusal(path: Path, key: str, wanted: object, got: object, advice: str = ELSE) -> ValueError:
    return ValueError(f"{path}: {key}: wanted {wanted}, got {got}; {advice}")


def _config(metadata: Metadata, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    path = metadata.path
    if (got := metadata["general.architecture"]) != "llama":
        raise _refusal(path, "general.architecture", "llama", got)
    width, heads = metadata["llama.embedding_length"], metadata["llama.attention.head_count"]
    head_dim = metadata.get("llama.attention.key_length", width // heads)
    only = {
        "llama.attention.value_length": head_dim,
        "llama.rope.dimension_count": head_dim,
        "llama.rope.scaling.type": "none",
        "llama.rope.scale_linear": 1.0,
    }
    for key, wanted in only.items():
        if (got := metadata.get(key, wanted)) != wanted:
            raise _refusal(path, key, wanted, got)
    stops = ("eos", "eot", "eom")
    ids = {name: _token_id(metadata, name) for name in ("bos", "padding", *stops)}
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": width,
        "num_hidden_layers": metadata["llama.block_count"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get("llama.attention.head_count_kv", heads),
        "head_dim": head_dim,
        # The shortest decimal of the float32, 1e-05 and not 9.999999747378752e-06.
        "rms_norm_eps": float(f"{metadata['llama.attention.layer_norm_rms_epsilon']:.7g}"),
        "rope_theta": metadata.get("llama.rope.freq_base", 10000.0),
        "rope_traditional": False,
        "max_position_embeddings": metadata["llama.context_length"],
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": ids["bos"],
        "pad_token_id": ids["padding"],
        "eos_token_id": [ids[name] for name in stops if ids[name] is not None],
    }


def _token_id(metadata: Metadata, name: str) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    index = metadata[key] if name == "eos" else metadata.get(key)
    count = len(metadata["tokenizer.ggml.tokens"])
    if index is not None and not 0 <= index < count:
        raise _refusal(metadata.path, key, f"an id below {count}", index, AGAIN)
    return index


def _rename(path: Path, name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight."""
    match name.split("."):
        case ["blk", index, kind, "weight"] if kind in LAYER:
            return f"model.layers.{index}.{LAYER[kind]}.weight"
        case _ if name in OUTSIDE:
            return OUTSIDE[name]
        case _:
            raise _refusal(path, "tensors", "those of a plain llama", name)


def _model(path: Path, config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> nn.Module:
    from mlx.utils import tree_flatten
    from mlx_lm.models.llama import Model, ModelArgs

    model = Model(ModelArgs.from_dict(config))
    parameters: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    wanted = {name: array.shape for name, array in parameters.items()}
    for name in [*wanted, *shapes]:
        if wanted.get(name) != shapes.get(name):
            want, got = wanted.get(name, "nothing"), shapes.get(name, "nothing")
            raise _refusal(path, name, want, got, AGAIN)
    return model


def _load(path: Path) -> dict[str, mx.array]:
    if not os.access(path, os.W_OK):
        raise ValueError(f"{path}: read-only; MLX maps GGUF files writable: chmod u+w or copy it")
    arrays = mx.load(str(path), format="gguf")
    assert isinstance(arrays, dict)
    return arrays


def _weights(
    arrays: Mapping[str, mx.array], name: str, target: str, kind: str, heads: int | None, dtype: mx.Dtype | None
) -> dict[str, mx.array]:
    """Tensor `name` as parameters of the model: one array, or three where it stays packed."""
    stem, parts = name.removesuffix("weight"), ("weight", "scales", "biases")
    found = {part: arrays[stem + part] for part in (parts if kind in BITS else parts[:1])}
    if heads is not None:
        found = {part: unpermute(array, heads) for part, array in found.items()}
    if kind in BITS and dtype is not None:
        # The products are exact in float32; in float16 they would be rounded twice.
        scales, biases = (found[part].astype(mx.float32) for part in parts[1:])
        dense = mx.dequantize(found["weight"], scales, biases, group_size=32, bits=BITS[kind])
        return {target: dense.astype(dtype)}
    # MLX's packed matrix product on the CPU adds up in float16, slowly and 1.6 logits off on SmolLM2-135M.
    rest = dtype or (mx.float32 if mx.default_device() == mx.Device(mx.cpu) else mx.float16)
    return {
        target.removesuffix("weight") + part: array if array.dtype == mx.uint32 else array.astype(rest)
        for part, array in found.items()
    }


def _quantization(types: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """mlx-lm's `quantization` entry: the bits of every packed layer, by the layer's name."""
    layers = {
        name.removesuffix(".weight"): {"group_size": 32, "bits": BITS[kind]} for name, kind in types if kind in BITS
    }
    return {"quantization": {"group_size": 32, "bits": 4, **layers}} if layers else {}


def _tokenizer(metadata: Metadata, config: Mapping[str, Any]) -> TokenizerWrapper:
    from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
    from transformers import PreTrainedTokenizerFast

    tokens = metadata["tokenizer.ggml.tokens"]
    roles = {"eos": config["eos_token_id"][0], "unk": _token_id(metadata, "unknown")}
    roles |= {"bos": config["bos_token_id"], "pad": config["pad_token_id"]}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_bpe(metadata, config["bos_token_id"]),
        model_max_length=config["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
        **{f"{role}_token": tokens[index] for role, index in roles.items() if index is not None},
    )
    tokenizer.chat_template = metadata.get("tokenizer.chat_template")
    detokenizer: Any = BPEStreamingDetokenizer
    return TokenizerWrapper(tokenizer, detokenizer, config["eos_token_id"])


def _bpe(metadata: Metadata, bos: int | None) -> Any:
    """The byte-level `tokenizers.Tokenizer`; of the added tokens the control ones are special."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models
    from tokenizers import pre_tokenizers as pre
    from tokenizers.processors import TemplateProcessing

    path = metadata.path
    if (kind := metadata["tokenizer.ggml.model"]) != "gpt2":
        raise _refusal(path, "tokenizer.ggml.model", "gpt2", kind)
    if (name := metadata["tokenizer.ggml.pre"]) not in SPLITS:
        raise _refusal(path, "tokenizer.ggml.pre", f"one of {', '.join(SPLITS)}", name)
    tokens = metadata["tokenizer.ggml.tokens"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    for merge in merges:
        if not {*merge, "".join(merge)} <= vocabulary.keys():
            raise _refusal(path, "tokenizer.ggml.merges", "pairs of tokens", merge, AGAIN)
    llama3 = name == "llama-bpe"
    bpe = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=llama3))
    splits = [pre.Split(Regex(pattern), "isolated") for pattern in SPLITS[name]]
    bpe.pre_tokenizer = pre.Sequence([*splits, pre.ByteLevel(False, use_regex=False)])
    bpe.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"]
    if len(types) != len(tokens):
        raise _refusal(path, "tokenizer.ggml.token_type", f"{len(tokens)}, one per token", len(types), AGAIN)
    for token, group in zip(tokens, types, strict=True):
        if group in (2, 3):
            bpe.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif group == 4:
            bpe.add_tokens([AddedToken(token, special=False, normalized=False)])
    if metadata.get("tokenizer.ggml.add_bos_token", llama3) and bos is not None:
        single = f"{tokens[bos]}:0 $A:0"
        bpe.post_processor = TemplateProcessing(single=single, special_tokens=[(tokens[bos], bos)])
    return bpe
