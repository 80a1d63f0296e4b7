"""GGUF files of the llama architecture as stock mlx-lm models.

MLX reads the tensors; it does not say of which types they are, and makes float16 of others than it can pack, of some of
them wrongly. So the header is read here: types and names, and what configuration and tokenizer are made of.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import mlx.core as mx
import mlx.nn as nn

from mlxrl.errors import UserError, one_line
from mlxrl.policy.differentiate import leaves

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

_TYPES = (
    "F32 F16 Q4_0 Q4_1 Q4_2 Q4_3 Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ2_XXS IQ2_XS IQ3_XXS IQ1_S IQ4_NL "
    "IQ3_S IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M BF16"
)
TYPES = _TYPES.split()
"""The tensor types by GGML's numbers."""

BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}
SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
"""GGUF's number of a metadata type -> its code in `struct`; 8 is a string, 9 an array."""

NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip

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


class GGUFError(UserError):
    """A GGUF file that is damaged, or of a kind that is not read here."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says before its tensors; by the name of each, its shape in MLX's order and its type."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, tuple[tuple[int, ...], str]]

    def __getitem__(self, key: str) -> Any:
        if key not in self.metadata:
            raise GGUFError(str(self.path), f"metadata key {key!r} is missing; convert the model again")
        return self.metadata[key]

    def refusal(self, key: str, wanted: object, got: object, advice: str = "convert the model again") -> GGUFError:
        return GGUFError(str(self.path), key, f"wanted {wanted}, got {got}; {advice}")


def read(path: Path, dtype: mx.Dtype | None = mx.float32) -> tuple[nn.Module, TokenizerWrapper, dict[str, Any]]:
    """A GGUF file as an mlx-lm llama model in evaluation mode, its tokenizer and its mlx-lm configuration.

    Args:
        path: a file of architecture llama with tensors of type F32, F16, Q4_0, Q4_1 or Q8_0.
        dtype: every parameter is dequantised to it. None keeps quantised tensors packed (4 or 8 bits, groups of 32),
            with scales and all else in float16, on the CPU in float32.
    Raises:
        GGUFError: not such a file, truncated, or something in it is not supported; one line.
    """
    found = header(path)
    config = config_of(found, packed=dtype is None)
    model, tokenizer = _model(found, config), tokenizer_of(found)
    arrays, weights = _load(path), dict[str, mx.array]()
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, (_, kind) in found.tensors.items():
        parts = ("weight", "scales", "biases") if kind in BITS else ("weight",)
        stem, target = name.removesuffix("weight"), _renamed(found, name).removesuffix("weight")
        own = {part: _unpermuted(arrays[stem + part], heads.get(name.split(".")[-2])) for part in parts}
        weights |= {target + part: array for part, array in _converted(own, kind, dtype).items()}
    model.load_weights(list(weights.items()))
    mx.eval(model.parameters())  # frees the file's arrays
    return model.eval(), tokenizer, config


def outline(path: Path, packed: bool) -> tuple[dict[str, Any], TokenizerWrapper, mx.Dtype]:
    """A file's mlx-lm configuration, its tokenizer, and the type of what is not packed; no tensor is read.

    packed: with the bits of each quantised layer in the configuration, by its name.
    """
    found = header(path)
    return config_of(found, packed), tokenizer_of(found), _unpacked_dtype()


def save_folder(model: nn.Module, tokenizer: TokenizerWrapper, config: Mapping[str, Any], folder: Path) -> None:
    """Write what `read` returned as an mlx-lm model folder, for mlx_lm.load, generate and fuse.

    Raises:
        GGUFError: the model has adapters already; its base would be stored under other names.
    """
    from mlx_lm.utils import save_config, save_model

    names = [name for name, _ in leaves(model.parameters())]
    if adapter := next((name for name in names if name.endswith("lora_a")), None):
        raise GGUFError(str(folder), f"wanted a model without adapters, got {adapter}; save it before adding them")
    save_model(folder, model)
    save_config(dict(config), Path(folder) / "config.json")
    tokenizer.save_pretrained(folder)


def header(path: Path) -> Header:
    """A file's header; GGUFError where there is no such file, or it is damaged or has tensors that are not read."""
    if not path.is_file():
        raise GGUFError(str(path), "no such file; wanted a GGUF file")
    found = Header(path, {}, {})
    with path.open("rb") as file:
        if (magic := file.read(4)) != b"GGUF":
            raise found.refusal("first bytes", b"GGUF", magic, "this is not a GGUF file")
        try:
            _fill(found, file)
        except EOFError:
            raise GGUFError(str(path), "the file ends too early; it is incomplete, download it again") from None
    return found


def _fill(header: Header, file: BinaryIO) -> None:
    version, n_tensors, n_keys = _numbers(file, "IQQ")
    if version not in (2, 3):
        raise header.refusal("GGUF version", "2 or 3", version)
    for _ in range(n_keys):
        key = _string(file)
        header.metadata[key] = _value(header, file, *_numbers(file, "I"))
    for _ in range(n_tensors):
        name = _string(file)
        shape = _numbers(file, f"{_numbers(file, 'I')[0]}Q")[::-1]
        number, _ = _numbers(file, "IQ")
        kind = TYPES[number] if number < len(TYPES) else f"number {number}"
        if kind not in ("F32", "F16", *BITS):
            wanted = f"wanted one of F32, F16, {', '.join(BITS)}; convert the file to one of these"
            raise GGUFError(str(header.path), name, f"tensor type {kind} is not supported; {wanted}")
        header.tensors[name] = shape, kind


def _bytes(file: BinaryIO, size: int) -> bytes:
    found = file.read(size) if size < 2**31 else b""
    if len(found) < size:
        raise EOFError
    return found


def _numbers(file: BinaryIO, codes: str) -> tuple[int, ...]:
    return struct.unpack(f"<{codes}", _bytes(file, struct.calcsize(f"<{codes}")))


def _string(file: BinaryIO) -> str:
    return _bytes(file, *_numbers(file, "Q")).decode("utf-8", errors="replace")


def _value(header: Header, file: BinaryIO, kind: int) -> Any:
    if kind == 8:
        return _string(file)
    if kind == 9:
        inner, length = *_numbers(file, "I"), *_numbers(file, "Q")
        return [_value(header, file, inner) for _ in range(length)]
    if kind not in SCALARS:
        raise GGUFError(str(header.path), f"metadata of unknown type {kind}; the file is damaged")
    return _numbers(file, SCALARS[kind])[0]


def config_of(header: Header, packed: bool = False) -> dict[str, Any]:
    """The mlx-lm configuration of a file; packed: with the bits of each quantised layer, by its name."""
    stock = "use an mlx-lm folder of this model"
    if (got := header["general.architecture"]) != "llama":
        raise header.refusal("general.architecture", "llama", got, stock)
    width, heads = header["llama.embedding_length"], header["llama.attention.head_count"]
    head_dim = header.metadata.get("llama.attention.key_length", width // heads)
    only = {
        "llama.attention.value_length": head_dim,
        "llama.rope.dimension_count": head_dim,
        "llama.rope.scaling.type": "none",
        "llama.rope.scale_linear": 1.0,
    }
    for key, wanted in only.items():
        if (got := header.metadata.get(key, wanted)) != wanted:
            raise header.refusal(key, wanted, got, stock)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": width,
        "num_hidden_layers": header["llama.block_count"],
        "intermediate_size": header["llama.feed_forward_length"],
        "num_attention_heads": heads,
        "num_key_value_heads": header.metadata.get("llama.attention.head_count_kv", heads),
        "head_dim": head_dim,
        # The shortest decimal of the float32, 1e-05 and not 9.999999747378752e-06.
        "rms_norm_eps": float(f"{header['llama.attention.layer_norm_rms_epsilon']:.7g}"),
        "rope_theta": header.metadata.get("llama.rope.freq_base", 10000.0),
        "rope_traditional": False,
        "max_position_embeddings": header["llama.context_length"],
        "vocab_size": len(header["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "bos_token_id": _token_id(header, "bos"),
        "pad_token_id": _token_id(header, "padding"),
        "eos_token_id": _stops(header),
    }
    names = {_renamed(header, name): kind for name, (_, kind) in header.tensors.items() if kind in BITS}
    layers = {name.removesuffix(".weight"): {"group_size": 32, "bits": BITS[kind]} for name, kind in names.items()}
    return {**config, "quantization": {"group_size": 32, "bits": 4, **layers}} if packed and layers else config


def _stops(header: Header) -> list[int]:
    ids = (_token_id(header, name) for name in ("eos", "eot", "eom"))
    return [index for index in ids if index is not None]


def _token_id(header: Header, name: str) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    index = header[key] if name == "eos" else header.metadata.get(key)
    count = len(header["tokenizer.ggml.tokens"])
    if index is not None and not 0 <= index < count:
        raise header.refusal(key, f"an id below {count}", index)
    return index


def _renamed(header: Header, name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight."""
    match name.split("."):
        case ["blk", index, kind, "weight"] if kind in NAMES:
            return f"model.layers.{index}.{NAMES[kind]}.weight"
        case [kind, "weight"] if kind in NAMES:
            return f"{NAMES[kind]}.weight"
        case _:
            raise header.refusal("tensors", "those of a plain llama", name, "use an mlx-lm folder of this model")


def _model(header: Header, config: dict[str, Any]) -> nn.Module:
    """The model without its weights, its layers packed where the configuration says so."""
    from mlx_lm.models.llama import Model, ModelArgs

    model = Model(ModelArgs.from_dict(config))
    wanted = {name: array.shape for name, array in leaves(model.parameters())}
    shapes = {_renamed(header, name): shape for name, (shape, _) in header.tensors.items()}
    for name in [*wanted, *shapes]:
        if wanted.get(name) != shapes.get(name):
            raise header.refusal(name, wanted.get(name, "nothing"), shapes.get(name, "nothing"))
    if layers := config.get("quantization"):
        nn.quantize(model, class_predicate=lambda layer, _: layers.get(layer, False))
    return model


def _load(path: Path) -> dict[str, mx.array]:
    if not os.access(path, os.W_OK):
        raise GGUFError(str(path), "read-only; MLX maps GGUF files writable: chmod u+w or copy it")
    try:
        return mx.load(str(path), format="gguf")  # pyright: ignore
    except RuntimeError as error:
        raise GGUFError(str(path), f"MLX cannot read it: {one_line(error)}; download or convert it again") from None


def _unpermuted(rows: mx.array, heads: int | None) -> mx.array:
    """Undo GGUF's order of a query or key projection, [heads * D, N] of any dtype or packing; others are left.

    Within a head GGUF has rows 0, D/2, 1, D/2 + 1, ... for a rotation of neighbours; the result has 0, 1, ..., D - 1
    for a rotation of the two halves: that of the stock model, `rope_traditional` off.
    """
    if heads is None:
        return rows
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _converted(parts: dict[str, mx.array], kind: str, dtype: mx.Dtype | None) -> dict[str, mx.array]:
    """A tensor's weight, scales and biases as those of the model: one array, or three where it stays packed."""
    if kind in BITS and dtype is not None:
        # The products are exact in float32; in float16 they would be rounded twice.
        scales, biases = (parts[name].astype(mx.float32) for name in ("scales", "biases"))
        dense = mx.dequantize(parts["weight"], scales, biases, group_size=32, bits=BITS[kind])
        return {"weight": dense.astype(dtype)}
    rest = dtype or _unpacked_dtype()
    return {name: array if array.dtype == mx.uint32 else array.astype(rest) for name, array in parts.items()}


def _unpacked_dtype() -> mx.Dtype:
    """MLX's packed matrix product on the CPU adds up in float16, slowly and 1.6 logits off on SmolLM2-135M."""
    return mx.float32 if mx.default_device() == mx.Device(mx.cpu) else mx.float16


def tokenizer_of(header: Header) -> TokenizerWrapper:
    """A file's tokenizer, with its chat template where it has one."""
    from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
    from transformers import PreTrainedTokenizerFast

    tokens, stops = header["tokenizer.ggml.tokens"], _stops(header)
    roles = {"bos": "bos", "unk": "unknown", "pad": "padding", "eos": "eos"}
    ids = {role: _token_id(header, name) for role, name in roles.items()}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_bpe(header, ids["bos"]),
        model_max_length=header["llama.context_length"],
        clean_up_tokenization_spaces=False,
        **{f"{role}_token": tokens[index] for role, index in ids.items() if index is not None},
    )
    tokenizer.chat_template = header.metadata.get("tokenizer.chat_template")
    detokenizer: Any = BPEStreamingDetokenizer
    return TokenizerWrapper(tokenizer, detokenizer, stops)


def _bpe(header: Header, bos: int | None) -> Any:
    """The byte-level `tokenizers.Tokenizer`; of the added tokens the control ones are special."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models
    from tokenizers import pre_tokenizers as pre
    from tokenizers.processors import TemplateProcessing

    name, (vocabulary, merges) = header["tokenizer.ggml.pre"], _vocabulary(header)
    llama3 = name == "llama-bpe"
    bpe = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=llama3))
    splits = [pre.Split(Regex(pattern), "isolated") for pattern in SPLITS[name]]
    bpe.pre_tokenizer = pre.Sequence([*splits, pre.ByteLevel(False, use_regex=False)])
    bpe.decoder = decoders.ByteLevel()
    for token, kind in zip(header["tokenizer.ggml.tokens"], header["tokenizer.ggml.token_type"], strict=True):
        if kind in (2, 3):
            bpe.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == 4:
            bpe.add_tokens([AddedToken(token, special=False, normalized=False)])
    if header.metadata.get("tokenizer.ggml.add_bos_token", llama3) and bos is not None:
        first = header["tokenizer.ggml.tokens"][bos]
        bpe.post_processor = TemplateProcessing(single=f"{first}:0 $A:0", special_tokens=[(first, bos)])
    return bpe


def _vocabulary(header: Header) -> tuple[dict[str, int], list[Any]]:
    """Tokens and merges, checked."""
    if (kind := header["tokenizer.ggml.model"]) != "gpt2":
        raise header.refusal("tokenizer.ggml.model", "gpt2", kind, "use an mlx-lm folder of this model")
    if (name := header["tokenizer.ggml.pre"]) not in SPLITS:
        raise header.refusal("tokenizer.ggml.pre", f"one of {', '.join(SPLITS)}", name)
    tokens, types = header["tokenizer.ggml.tokens"], header["tokenizer.ggml.token_type"]
    if len(types) != len(tokens):
        raise header.refusal("tokenizer.ggml.token_type", f"{len(tokens)}, one per token", len(types))
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ", 1)) for merge in header["tokenizer.ggml.merges"]]
    for merge in merges:
        if not {*merge, "".join(merge)} <= vocabulary.keys():
            raise header.refusal("tokenizer.ggml.merges", "pairs of tokens", merge)
    return vocabulary, merges
