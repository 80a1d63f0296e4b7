"""GGUF files of the llama architecture as stock mlx-lm models.

MLX reads the tensors without their types, and converts those that it cannot pack to float16, some of them wrongly. So
the header is read here: types, names, and the metadata for configuration and tokenizer.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxrl.errors import UserError, exception_line, one_line
from mlxrl.policy.differentiate import leaves
from mlxrl.policy.gguf_header import BITS, Header, header
from mlxrl.policy.model_folder import ModelError, tokenizer_fault

NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SPLITS = {
    "smollm": (r"\p{N}", _GPT2),
    "gpt-2": (_GPT2,),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "llama-bpe": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
}
"""tokenizer.ggml.pre -> the patterns that split a text, one after the other, as in llama.cpp."""
STOCK = "use an mlx-lm folder of this model"


def read(path: Path, dtype: mx.Dtype | None = mx.float32) -> tuple[nn.Module, Any, dict[str, Any]]:
    """A GGUF file as an mlx-lm llama model in evaluation mode, its tokenizer as mlx-lm's, and its configuration.

    Args:
        path: a file of architecture llama with tensors of type F32, F16, Q4_0, Q4_1 or Q8_0.
        dtype: every parameter is dequantised to it. None keeps quantised tensors packed (4 or 8 bits, groups of 32),
            with scales and all else in float16, on the CPU in float32.
    Raises:
        ModelError: not such a file, truncated, or something in it is not supported; one line.
    """
    found = header(path)
    with _understood(path):
        config = config_of(found, packed=dtype is None)
        model, tokenizer = _model(found, config), _tokenizer(found, config)
    if not os.access(path, os.W_OK):
        raise ModelError(str(path), "read-only; MLX maps GGUF files writable: chmod u+w or copy it")
    try:
        arrays: dict[str, mx.array] = mx.load(str(path), format="gguf")  # pyright: ignore
    except RuntimeError as error:
        raise ModelError(str(path), f"MLX cannot read it: {one_line(error)}; download or convert it again") from None
    weights: dict[str, mx.array] = {}
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, (_, kind) in found.tensors.items():
        stem, target = name.removesuffix("weight"), _renamed(found, name).removesuffix("weight")
        own = {part: arrays[stem + part] for part in ("weight", "scales", "biases") if stem + part in arrays}
        converted = _weights(own, kind, dtype, heads.get(name.split(".")[-2]))
        weights |= {target + part: array for part, array in converted.items()}
    model.load_weights(list(weights.items()))
    mx.eval(model.parameters())  # frees the file's arrays
    return model.eval(), tokenizer, config


def outline(path: Path, packed: bool) -> tuple[dict[str, Any], Any, mx.Dtype]:
    """A file's mlx-lm configuration, its tokenizer, and the type of what is not packed; no tensor is read.

    packed: with the bits of each quantised layer in the configuration, by its name.
    """
    found = header(path)
    with _understood(path):
        config = config_of(found, packed)
        return config, _tokenizer(found, config), _unpacked_dtype()


@contextmanager
def _understood(path: Path) -> Generator[None]:
    """A block in which metadata are used, which may hold anything."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        why = f"metadata that make no model: {exception_line(error)}; convert the model again"
        raise ModelError(str(path), one_line(why, 300)) from error


def save_folder(model: nn.Module, tokenizer: Any, config: Mapping[str, Any], folder: Path) -> None:
    """Write what `read` returned as an mlx-lm model folder, for mlx_lm.load, generate and fuse.

    Raises:
        ModelError: the model has adapters already; its base would be stored under other names.
    """
    from mlx_lm.utils import save_config, save_model

    if adapter := next((name for name, _ in leaves(model.parameters()) if name.endswith("lora_a")), None):
        raise ModelError(str(folder), f"wanted a model without adapters, got {adapter}; save it before adding them")
    save_model(folder, model)
    save_config(dict(config), Path(folder) / "config.json")
    tokenizer.save_pretrained(folder)


def config_of(header: Header, packed: bool = False) -> dict[str, Any]:
    """The mlx-lm configuration of a file; packed: with the bits of each quantised layer, by its name."""
    architecture = header["general.architecture"]
    header.check(architecture == "llama", "general.architecture", "llama", architecture, STOCK)
    width, heads = header["llama.embedding_length"], header["llama.attention.head_count"]
    head_dim = header.metadata.get("llama.attention.key_length", width // heads)
    only = {
        "llama.attention.value_length": head_dim,
        "llama.rope.dimension_count": head_dim,
        "llama.rope.scaling.type": "none",
        "llama.rope.scale_linear": 1.0,
    }
    for key, wanted in only.items():
        got = header.metadata.get(key, wanted)
        header.check(got == wanted, key, wanted, got, STOCK)
    layers = header["llama.block_count"]
    header.check(layers <= len(header.tensors), "llama.block_count", "at most the number of tensors", layers)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": width,
        "num_hidden_layers": layers,
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
        "eos_token_id": [i for role in ("eos", "eot", "eom") if (i := _token_id(header, role)) is not None],
    }
    names = {_renamed(header, name): kind for name, (_, kind) in header.tensors.items() if kind in BITS}
    layers = {name.removesuffix(".weight"): {"group_size": 32, "bits": BITS[kind]} for name, kind in names.items()}
    return {**config, "quantization": {"group_size": 32, "bits": 4, **layers}} if packed and layers else config


def _token_id(header: Header, name: str) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    index = header[key] if name == "eos" else header.metadata.get(key)
    count = len(header["tokenizer.ggml.tokens"])
    header.check(index is None or 0 <= index < count, key, f"an id below {count}", index)
    return index


def _renamed(header: Header, name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight."""
    match name.split("."):
        case ["blk", index, kind, "weight"] if kind in NAMES:
            return f"model.layers.{index}.{NAMES[kind]}.weight"
        case [kind, "weight"] if kind in NAMES:
            return f"{NAMES[kind]}.weight"
        case _:
            raise ModelError(str(header.path), "tensors", f"wanted those of a plain llama, got {name}; {STOCK}")


def _model(header: Header, config: dict[str, Any]) -> nn.Module:
    """The model without its weights, its layers packed where the configuration says so."""
    from mlx_lm.models.llama import Model, ModelArgs

    model = Model(ModelArgs.from_dict(config))
    wanted = {name: array.shape for name, array in leaves(model.parameters())}
    shapes = {_renamed(header, name): shape for name, (shape, _) in header.tensors.items()}
    for name in [*wanted, *shapes]:
        needed, got = wanted.get(name, "nothing"), shapes.get(name, "nothing")
        header.check(needed == got, name, needed, got)
    if layers := config.get("quantization"):
        nn.quantize(model, class_predicate=lambda layer, _: layers.get(layer, False))
    return model


def _weights(parts: dict[str, mx.array], kind: str, dtype: mx.Dtype | None, heads: int | None) -> dict[str, mx.array]:
    """A tensor's weight, scales and biases as those of the model: one array, or three where it stays packed.

    heads: of a query or key projection, [heads * D, N]. Within a head GGUF has rows 0, D/2, 1, D/2 + 1, ... for a
    rotation of neighbours; the model has 0, 1, ..., D - 1 for a rotation of the two halves, `rope_traditional` off.
    """
    if heads is not None:
        order = mx.arange(len(parts["weight"])).reshape(heads, -1, 2).swapaxes(1, 2).flatten()
        parts = {name: rows[order] for name, rows in parts.items()}
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


def _tokenizer(header: Header, config: Mapping[str, Any]) -> Any:
    """A file's tokenizer, with its chat template where it has one."""
    from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
    from transformers import PreTrainedTokenizerFast

    tokens, stops, bos = header["tokenizer.ggml.tokens"], config["eos_token_id"], config["bos_token_id"]
    ids = {"bos": bos, "unk": _token_id(header, "unknown"), "pad": config["pad_token_id"], "eos": stops[0]}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_bpe(header, bos),
        model_max_length=config["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
        **{f"{role}_token": tokens[index] for role, index in ids.items() if index is not None},
    )
    template = header.metadata.get("tokenizer.chat_template")
    header.check(template is None or isinstance(template, str), "tokenizer.chat_template", "a text", template)
    tokenizer.chat_template = template
    wrapper = TokenizerWrapper(tokenizer, BPEStreamingDetokenizer, stops)  # pyright: ignore
    if fault := tokenizer_fault(wrapper, len(tokens)):
        raise ModelError(str(header.path), fault)
    return wrapper


def _bpe(header: Header, bos: int | None) -> Any:
    """The byte-level `tokenizers.Tokenizer`; of the added tokens those of kinds 2 and 3, control ones, are special."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models
    from tokenizers import pre_tokenizers as pre
    from tokenizers.processors import TemplateProcessing

    model = header["tokenizer.ggml.model"]
    header.check(model == "gpt2", "tokenizer.ggml.model", "gpt2", model, STOCK)
    name = header["tokenizer.ggml.pre"]
    header.check(name in SPLITS, "tokenizer.ggml.pre", f"one of {', '.join(SPLITS)}", name)
    tokens, types = header["tokenizer.ggml.tokens"], header["tokenizer.ggml.token_type"]
    header.check(len(types) == len(tokens), "tokenizer.ggml.token_type", f"{len(tokens)}, one per token", len(types))
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ", 1)) for merge in header["tokenizer.ggml.merges"]]
    for merge in merges:
        header.check({*merge, "".join(merge)} <= vocabulary.keys(), "tokenizer.ggml.merges", "pairs of tokens", merge)
    llama3 = name == "llama-bpe"
    bpe = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=llama3))
    splits = [pre.Split(Regex(pattern), "isolated") for pattern in SPLITS[name]]
    bpe.pre_tokenizer = pre.Sequence([*splits, pre.ByteLevel(False, use_regex=False)])
    bpe.decoder = decoders.ByteLevel()
    added = [(token, kind) for token, kind in zip(tokens, types, strict=True) if kind in (2, 3, 4)]
    bpe.add_tokens([AddedToken(token, special=kind != 4, normalized=False) for token, kind in added])
    if header.metadata.get("tokenizer.ggml.add_bos_token", llama3) and bos is not None:
        first = tokens[bos]
        bpe.post_processor = TemplateProcessing(single=f"{first}:0 $A:0", special_tokens=[(first, bos)])
    return bpe
