"""GGUF files written here byte by byte, read back as mlx-lm models."""

from __future__ import annotations

import json
import os
import runpy
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.llama import Model, ModelArgs
from mlx_lm.tuner.utils import linear_to_lora_layers
from tokenizers import pre_tokenizers

from mlxrl.policy import gguf

NUMBERS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q8_0": 8, "Q4_K": 12, "Q6_K": 14, "BF16": 30}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool>"]
MERGES = ["1 2", "3 4", "12 34", "Ġ t", "h e", "Ġt he"]
TOKENS = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]
METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 128,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 1000.0,
    "llama.rope.dimension_count": 16,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 3, 3, 4] + [1] * (len(TOKENS) - 4),
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.chat_template": TEMPLATE,
}
Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def value(item: Any) -> bytes:
    """The item after the number of its type."""
    if isinstance(item, list):
        parts = [value(part) for part in item]
        return struct.pack("<I", 9) + parts[0][:4] + struct.pack("<Q", len(parts)) + b"".join(p[4:] for p in parts)
    if isinstance(item, str):
        return struct.pack("<I", 8) + string(item)
    kind, code = {bool: (7, "?"), int: (4, "I"), float: (6, "f")}[type(item)]
    return struct.pack(f"<I{code}", kind, item)


def write(path: Path, metadata: Mapping[str, Any], tensors: Tensors, version: int = 3) -> Path:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    head += b"".join(string(key) + value(item) for key, item in metadata.items())
    data = b""
    for name, (kind, shape, block) in tensors.items():
        head += string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        head += struct.pack("<IQ", NUMBERS.get(kind, 99), len(data))
        data += block + bytes(-len(block) % 32)
    path.write_bytes(head + bytes(-len(head) % 32) + data)
    return path


def tiny(tied: bool = True, half: bool = False) -> Model:
    """A random llama in GGUF's order of rows: its rotation pairs neighbours, `rope_traditional`."""
    mx.random.seed(3)
    model = Model(
        ModelArgs(
            model_type="llama", hidden_size=64, num_hidden_layers=2, intermediate_size=96, num_attention_heads=4,
            num_key_value_heads=2, rms_norm_eps=1e-5, vocab_size=len(TOKENS), head_dim=16, rope_theta=1000.0,
            max_position_embeddings=128, rope_traditional=True, tie_word_embeddings=tied,
        )
    )  # fmt: skip
    model.set_dtype(mx.float16 if half else mx.float32)
    for layer in model.layers:
        layer.input_layernorm.weight = 1 + 0.1 * mx.random.normal((64,))
    model.set_dtype(mx.float32)
    return model


def tensors_of(model: nn.Module, half: bool = False) -> Tensors:
    """Matrices as F16 where asked for, vectors as F32."""
    found: Tensors = {}
    for name, array in tree_flatten(model.parameters()):
        stem = name.removesuffix(".weight")
        if stem.startswith("model.layers."):
            _, _, index, kind = stem.split(".", 3)
            stem = f"blk.{index}.{NAMES[kind]}"
        else:
            stem = NAMES[stem]
        kind = "F16" if half and array.ndim == 2 else "F32"
        found[f"{stem}.weight"] = kind, array.shape, np.array(array, "<f2" if kind == "F16" else "<f4").tobytes()
    return found


def refusal(path: Path) -> str:
    with pytest.raises(ValueError) as caught:
        gguf.read(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    return message


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "model.gguf", METADATA, tensors_of(tiny()))


# A row of 64 weights is two blocks. In a 4-bit block byte j holds weight j in its low half and weight j + 16 in its
# high half: j and 15 - j here. Scales 0.5 and 0.25 and the minimum -3 are exact in float16.
NIBBLES = bytes(j | (15 - j) << 4 for j in range(16))
HALF, QUARTER, MINUS_3 = (np.float16(x).tobytes() for x in (0.5, 0.25, -3))
BLOCKS = {
    # (q - 8) / 2
    "Q4_0": (HALF + NIBBLES, [(j - 8) / 2 for j in range(16)] + [(7 - j) / 2 for j in range(16)]),
    # q / 2 - 3
    "Q4_1": (HALF + MINUS_3 + NIBBLES, [j / 2 - 3 for j in range(16)] + [(15 - j) / 2 - 3 for j in range(16)]),
    # q / 4 with signed q, -128 and 127 among them
    "Q8_0": (QUARTER + struct.pack("<32b", -128, 127, *range(-15, 15)), [-32, 31.75, *(q / 4 for q in range(-15, 15))]),
    "F16": (np.arange(32, dtype="<f2").tobytes(), list(range(32))),
    "F32": (np.arange(32, dtype="<f4").tobytes(), list(range(32))),
}


@pytest.mark.parametrize("kind", BLOCKS)
def test_dequantised_values(kind: str, tmp_path: Path) -> None:
    block, expected = BLOCKS[kind]
    tensors = tensors_of(tiny())
    for name, rows in {"blk.0.attn_v.weight": 32, "token_embd.weight": len(TOKENS)}.items():
        tensors[name] = kind, (rows, 64), block * 2 * rows
    path = write(tmp_path / "model.gguf", METADATA, tensors)
    for dtype in (mx.float32, mx.float16):
        model, _, config = gguf.read(path, dtype)
        assert "quantization" not in config
        for weight in (model.layers[0].self_attn.v_proj.weight, model.model.embed_tokens.weight):
            assert weight.dtype == dtype
            assert weight[0].tolist() == expected * 2
            assert mx.array_equal(weight, mx.broadcast_to(weight[0], weight.shape))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("half", [True, False])
def test_rows_are_put_in_the_order_of_a_stock_model(tied: bool, half: bool, tmp_path: Path) -> None:
    """A file's own rotation pairs neighbours; after reading, the stock rotation of halves gives the same logits."""
    source = tiny(tied, half)
    path = write(tmp_path / "model.gguf", METADATA, tensors_of(source, half))
    model, _, config = gguf.read(path)
    assert config["rope_traditional"] is False
    assert config["tie_word_embeddings"] is tied
    assert config["rms_norm_eps"] == 1e-5
    assert not model.training
    tokens = mx.array([[5, 80, 17, 200, 9, 31, 8]])
    assert mx.allclose(model(tokens), source(tokens), atol=1e-5)
    swapped = source.layers[0].self_attn.q_proj.weight
    # Head 0 of 16 rows: GGUF's rows 0, 2, 4, ... are the first half of the head, 1, 3, 5, ... the second.
    order = [*range(0, 16, 2), *range(1, 16, 2)]
    assert mx.array_equal(model.layers[0].self_attn.q_proj.weight[:16], swapped[mx.array(order)])


def packed(path: Path) -> Path:
    """Every matrix of the layers as random Q4_1 blocks, the embedding as Q8_0, one projection as F16."""
    rng = np.random.default_rng(0)
    tensors = tensors_of(tiny(), half=True)
    for name, (_, shape, _) in tensors.items():
        if len(shape) == 2 and name != "blk.1.attn_v.weight":
            kind, size = ("Q8_0", 34) if name == "token_embd.weight" else ("Q4_1", 20)
            blocks = rng.integers(0, 256, (shape[0] * shape[1] // 32, size), dtype=np.uint8)
            blocks[:, :2] = np.frombuffer(np.float16(0.001 if kind == "Q8_0" else 0.02).tobytes(), np.uint8)
            if kind == "Q4_1":
                blocks[:, 2:4] = np.frombuffer(np.float16(-0.15).tobytes(), np.uint8)
            tensors[name] = kind, shape, blocks.tobytes()
    return write(path, METADATA, tensors)


def test_packed_layers_give_the_logits_of_dequantised_ones(tmp_path: Path) -> None:
    path = packed(tmp_path / "model.gguf")
    dense, _, _ = gguf.read(path)
    model, tokenizer, config = gguf.read(path, None)
    attention = model.layers[1].self_attn
    assert (attention.q_proj.bits, attention.q_proj.group_size) == (4, 32)
    assert model.model.embed_tokens.bits == 8
    assert type(attention.v_proj) is nn.Linear
    assert attention.q_proj.scales.dtype == (mx.float32 if mx.default_device() == mx.Device(mx.cpu) else mx.float16)
    model.set_dtype(mx.float32)
    tokens = mx.array([[5, 80, 17, 200, 9]])
    assert mx.allclose(model(tokens), dense(tokens), atol=1e-4)
    gguf.save_folder(model, tokenizer, config, tmp_path / "folder")
    loaded, *_ = mlx_lm.load(str(tmp_path / "folder"))
    assert mx.array_equal(loaded(tokens), model(tokens))


def test_saved_folder_is_the_same_model_to_mlx_lm(file: Path, tmp_path: Path) -> None:
    model, tokenizer, config = gguf.read(file)
    folder = tmp_path / "folder"
    gguf.save_folder(model, tokenizer, config, folder)
    loaded, its_tokenizer, *_ = mlx_lm.load(str(folder))
    tokens = mx.array([[5, 80, 17, 200, 9]])
    assert mx.array_equal(loaded(tokens), model(tokens))
    assert its_tokenizer.eos_token_ids == tokenizer.eos_token_ids == {2}
    for text in ("the 1234 the", " a  b\t\n", "<|im_start|>1<tool>2<|im_end|>"):
        assert its_tokenizer.encode(text) == tokenizer.encode(text)
    chat = [{"role": "user", "content": "12"}]
    assert its_tokenizer.apply_chat_template(chat) == tokenizer.apply_chat_template(chat)
    assert json.loads((folder / "config.json").read_text())["rope_traditional"] is False


@pytest.mark.parametrize("dtype", ["float32", "packed"])
def test_the_example_writes_a_folder(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, folder = packed(tmp_path / "model.gguf"), tmp_path / "folder"
    example = str(Path(__file__).parent.parent / "examples" / "convert_gguf.py")
    monkeypatch.setattr("sys.argv", ["convert_gguf.py", str(path), str(folder), "--dtype", dtype])
    runpy.run_path(example, run_name="__main__")
    loaded, *_ = mlx_lm.load(str(folder))
    tokens = mx.array([[5, 80, 17, 200, 9]])
    assert mx.allclose(loaded(tokens).astype(mx.float32), gguf.read(path)[0](tokens), atol=1e-4)
    monkeypatch.setattr("sys.argv", ["convert_gguf.py", str(tmp_path / "none.gguf"), str(folder)])
    with pytest.raises(SystemExit, match=r"none\.gguf: no such file"):
        runpy.run_path(example, run_name="__main__")


def test_a_model_with_adapters_is_not_saved_as_a_base(file: Path, tmp_path: Path) -> None:
    model, tokenizer, config = gguf.read(file)
    linear_to_lora_layers(model, 1, {"rank": 2, "scale": 1.0, "dropout": 0.0})
    with pytest.raises(ValueError, match="wanted a model without adapters"):
        gguf.save_folder(model, tokenizer, config, tmp_path / "folder")


def pieces(tmp_path: Path, text: str, **changes: Any) -> list[str]:
    metadata = METADATA | {f"tokenizer.ggml.{key}": item for key, item in changes.items()}
    _, tokenizer, _ = gguf.read(write(tmp_path / "model.gguf", metadata, tensors_of(tiny())))
    return tokenizer.convert_ids_to_tokens(tokenizer.encode(text))


def test_pre_tokenizers_split_as_their_names_say(tmp_path: Path) -> None:
    # The merges 1 2, 3 4 and 12 34 can only act where the digits stay in one piece.
    assert pieces(tmp_path, "the 1234") == ["t", "he", "Ġ", "1", "2", "3", "4"]
    assert pieces(tmp_path, "the the1234", pre="gpt-2") == ["t", "he", "Ġthe", "1234"]
    # llama-bpe takes at most three digits: 123 and 4. It puts its first token, <|im_start|> here, in front.
    assert pieces(tmp_path, "1234", pre="llama-bpe", add_bos_token=True) == ["<|im_start|>", "12", "3", "4"]
    assert pieces(tmp_path, "1234", pre="llama-bpe", add_bos_token=False) == ["12", "3", "4"]
    # default splits like gpt-2 and then groups of three digits: 123 and 4.
    assert pieces(tmp_path, "the1234", pre="default") == ["t", "he", "12", "3", "4"]


def test_tokenizer_round_trip(file: Path) -> None:
    _, tokenizer, _ = gguf.read(file)
    for text in ("It's 12,345.", " a  b \n\n c\t", "héllo 日本 🙂 ²½", "<|im_start|>user\n12<|im_end|>\n"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("<|im_end|>") == [2]
    # Control tokens are special, user-defined ones are not.
    assert tokenizer.decode([1, 3, 2], skip_special_tokens=True) == "<tool>"
    detokenizer = tokenizer.detokenizer
    for token in tokenizer.encode("the 日本"):
        detokenizer.add_token(token)
    detokenizer.finalize()
    assert detokenizer.text == "the 日本"


def test_chat_template_and_special_ids(tmp_path: Path) -> None:
    metadata = METADATA | {"tokenizer.ggml.eot_token_id": 0, "tokenizer.ggml.add_bos_token": True}
    _, tokenizer, config = gguf.read(write(tmp_path / "model.gguf", metadata, tensors_of(tiny())))
    assert tokenizer.has_chat_template
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "12"}], add_generation_prompt=True)
    assert tokenizer.decode(ids) == "<|im_start|>user\n12<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.eos_token_ids == {0, 2}
    assert (config["bos_token_id"], config["pad_token_id"], config["eos_token_id"]) == (1, 2, [2, 0])
    assert tokenizer.encode("a")[0] == 1


def test_a_file_without_chat_template_has_none(tmp_path: Path) -> None:
    metadata = {key: item for key, item in METADATA.items() if key != "tokenizer.chat_template"}
    _, tokenizer, _ = gguf.read(write(tmp_path / "model.gguf", metadata, tensors_of(tiny())))
    assert not tokenizer.has_chat_template


def test_the_header_alone_says_how_large_a_file_is(file: Path, tmp_path: Path) -> None:
    """What `plan` reads."""
    header = gguf.header(file)
    assert header.tensors["token_embd.weight"] == ((len(TOKENS), 64), "F32")
    assert gguf.config_of(header) == gguf.read(file)[2]
    path = packed(tmp_path / "packed.gguf")
    config = gguf.config_of(gguf.header(path), packed=True)
    assert config == gguf.read(path, None)[2]
    assert config["quantization"]["model.embed_tokens"] == {"group_size": 32, "bits": 8}


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q5_0", "BF16", "number 99"])
def test_other_tensor_types_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    tensors = tensors_of(tiny())
    name = "blk.1.ffn_up.weight"
    tensors[name] = kind, *tensors[name][1:]
    message = refusal(write(tmp_path / "model.gguf", METADATA, tensors))
    assert f"{name}: tensor type {kind} is not supported; wanted one of F32, F16, Q4_0, Q4_1, Q8_0;" in message


@pytest.mark.parametrize(
    ("key", "item", "message"),
    [
        ("general.architecture", "qwen2", "general.architecture: wanted llama, got qwen2"),
        ("llama.rope.scaling.type", "yarn", "llama.rope.scaling.type: wanted none, got yarn"),
        ("llama.rope.dimension_count", 8, "llama.rope.dimension_count: wanted 16, got 8"),
        ("llama.attention.value_length", 8, "llama.attention.value_length: wanted 16, got 8"),
        ("llama.block_count", 3, "model.layers.2.self_attn.q_proj.weight: wanted (64, 64), got nothing"),
        ("llama.block_count", 1, "model.layers.1.self_attn.q_proj.weight: wanted nothing, got (64, 64)"),
        ("llama.feed_forward_length", 64, "wanted (64, 64), got (96, 64)"),
        ("tokenizer.ggml.model", "llama", "tokenizer.ggml.model: wanted gpt2, got llama"),
        ("tokenizer.ggml.pre", "tekken", "wanted one of smollm, gpt-2, default, llama-bpe, got tekken"),
        ("tokenizer.ggml.merges", ["q u"], "tokenizer.ggml.merges: wanted pairs of tokens, got ('q', 'u')"),
        ("tokenizer.ggml.eos_token_id", 999, "tokenizer.ggml.eos_token_id: wanted an id below"),
        ("llama.block_count", 10**9, "llama.block_count: wanted at most the number of tensors, got 1000000000"),
        ("llama.embedding_length", "64", "metadata that make no model: TypeError"),
        ("llama.attention.head_count", 0, "metadata that make no model: ZeroDivisionError"),
        ("tokenizer.ggml.merges", [1, 2], "metadata that make no model: AttributeError"),
        ("tokenizer.ggml.eos_token_id", "2", "metadata that make no model: TypeError"),
        ("tokenizer.chat_template", 5, "tokenizer.chat_template: wanted a text, got 5"),
        ("general.alignment", 0, "general.alignment: wanted a whole number above 0, got 0"),
        ("tokenizer.ggml.token_type", [1, 2], "tokenizer.ggml.token_type: wanted 266, one per token, got 2"),
    ],
)
def test_other_metadata_is_refused_by_name(key: str, item: Any, message: str, tmp_path: Path) -> None:
    assert message in refusal(write(tmp_path / "model.gguf", METADATA | {key: item}, tensors_of(tiny())))


def test_tensors_of_another_kind_of_llama_are_refused_by_name(tmp_path: Path) -> None:
    tensors = tensors_of(tiny()) | {"rope_freqs.weight": ("F32", (8,), bytes(32))}
    message = refusal(write(tmp_path / "model.gguf", METADATA, tensors))
    assert "tensors: wanted those of a plain llama, got rope_freqs.weight" in message


OPTIONAL = (
    "llama.attention.head_count_kv", "llama.rope.freq_base", "llama.rope.dimension_count", "tokenizer.chat_template",
    "tokenizer.ggml.bos_token_id", "tokenizer.ggml.padding_token_id", "tokenizer.ggml.add_bos_token",
)  # fmt: skip


@pytest.mark.parametrize("key", [key for key in METADATA if key not in OPTIONAL])
def test_a_missing_key_is_named(key: str, tmp_path: Path) -> None:
    metadata = {name: item for name, item in METADATA.items() if name != key}
    message = refusal(write(tmp_path / "model.gguf", metadata, tensors_of(tiny())))
    assert f"metadata key {key!r} is missing" in message


@pytest.mark.parametrize("part", [0.0001, 0.005, 0.02, 0.05, 0.5, 0.9999])
def test_a_truncated_file_is_refused(part: float, file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: max(5, int(part * (len(content) - 1)))])
    assert "the file ends too early; it is incomplete" in refusal(file)
    with pytest.raises(ValueError, match="ends too early"):
        gguf.outline(file, packed=True)


def test_files_that_are_not_gguf_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    assert "no such file" in refusal(path)
    for content in (b"", b"PK\x03\x04 and more"):
        path.write_bytes(content)
        assert "this is not a GGUF file" in refusal(path)
    assert "GGUF version: wanted 2 or 3, got 1" in refusal(write(path, METADATA, {}, version=1))


def test_a_read_only_file_says_what_to_do(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "read-only" in refusal(file)


def test_damaged_headers_are_refused(file: Path) -> None:
    content = file.read_bytes()
    # After magic, version and two counts: the length of the first key, the key, and the number of its value's type.
    kind = 24 + 8 + len("general.architecture")
    for place, damage, message in (
        (24, b"\xff" * 8, "ends too early"),
        (kind, struct.pack("<I", 13), "unknown type 13"),
    ):
        file.write_bytes(content[:place] + damage + content[place + len(damage) :])
        assert message in refusal(file)


def test_tensors_at_places_of_others_are_refused(file: Path) -> None:
    content, name = file.read_bytes(), b"blk.0.ffn_up.weight"
    place = content.index(name) + len(name) + 4 + 2 * 8 + 4  # after the dimensions and the type
    for wrong in (0, 7, 2**62):
        file.write_bytes(content[:place] + struct.pack("<Q", wrong) + content[place + 8 :])
        message = refusal(file)
        assert "the file is damaged" in message or "ends too early" in message


def test_arrays_in_arrays_without_end_are_refused(tmp_path: Path) -> None:
    nested = string("x") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + nested)
    assert "metadata of arrays in arrays; the file is damaged" in refusal(path)


def test_quantised_rows_must_be_whole_blocks(tmp_path: Path) -> None:
    tensors = tensors_of(tiny())
    for layer in range(2):
        tensors |= {f"blk.{layer}.ffn_{name}.weight": ("F32", (48, 64), bytes(4 * 48 * 64)) for name in ("up", "gate")}
        tensors[f"blk.{layer}.ffn_down.weight"] = "Q8_0", (64, 48), bytes(34 * 96)
    message = refusal(write(tmp_path / "model.gguf", METADATA | {"llama.feed_forward_length": 48}, tensors))
    assert "MLX cannot read it" in message
    assert "blk.0.ffn_down.weight" in message
