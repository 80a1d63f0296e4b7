"""GGUF files of fused models, read back by the reader."""

from __future__ import annotations

import json

import mlx.core as mx
import pytest
from mlx_lm.models.llama import Model, ModelArgs
from mlx_lm.utils import save_config, save_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from helpers import moved
from mlxrl.cli import main
from mlxrl.policy import gguf
from mlxrl.policy.gguf_header import header
from mlxrl.policy.policy import load
from mlxrl.settings import LoRA

WORDS = ["<pad>", "<bos>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġt", "he", "Ġthe"]
TEMPLATE = "{% for m in messages %}<bos>{{ m['content'] }}<eos>{% endfor %}"
TEXT = "the 12 cats,  the\n34 dogs"


def llama(path, tied, **changes):
    """A llama with GPT-2's tokenizer on disk; the width of its heads is its own, and it has more rows than tokens."""
    mx.random.seed(0)
    settings = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "head_dim": 32,
        "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": len(WORDS) + 3,
        "max_position_embeddings": 128, "rope_theta": 500.0, "tie_word_embeddings": tied, **changes,
    }  # fmt: skip
    model = Model(ModelArgs.from_dict(settings))
    for layer in model.layers:
        layer.input_layernorm.weight = 1 + 0.1 * mx.random.normal((64,))
    save_model(path, model)
    save_config({**settings, "eos_token_id": [2, 0]}, path / "config.json")
    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he")]
    core = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(WORDS)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)])
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(WORDS[:3])
    fast = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>", bos_token="<bos>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(path)
    policy = load(str(path), lora=LoRA(rank=4))
    moved(policy)
    policy.save(path.parent / "adapter")
    return policy


def line(tmp_path):
    return ["fuse", "--model", str(tmp_path / "model"), "--adapter", str(tmp_path / "adapter"),
            "--output", str(tmp_path / "fused"), "--gguf", str(tmp_path / "fused.gguf")]  # fmt: skip


@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_file_is_the_adapters_model_with_its_tokenizer(tied, tmp_path):
    policy = llama(tmp_path / "model", tied)
    assert main(line(tmp_path)) == 0
    model, tokenizer, config = gguf.read(tmp_path / "fused.gguf", mx.float32)
    ids = mx.array([[1, 2, 3, 4, 200, 9]])
    wanted = policy.model(ids)
    assert mx.abs(model(ids) - wanted).max() < 5e-3 * mx.abs(wanted).max()
    own = policy.tokenizer
    assert tokenizer.encode(TEXT) == own.encode(TEXT)
    assert tokenizer.decode(own.encode(TEXT)) == TEXT
    assert (tokenizer.eos_token_ids, tokenizer.bos_token_id, tokenizer.pad_token_id) == ({2, 0}, 1, 0)
    assert tokenizer.chat_template == TEMPLATE
    assert (config["head_dim"], config["rope_theta"], config["tie_word_embeddings"]) == (32, 500.0, tied)
    found = header(tmp_path / "fused.gguf")
    assert {kind for name, (_, kind) in found.tensors.items() if "norm" not in name} == {"F16"}
    assert {kind for name, (_, kind) in found.tensors.items() if "norm" in name} == {"F32"}
    assert (found["tokenizer.ggml.model"], found["tokenizer.ggml.pre"]) == ("gpt2", "smollm")
    assert found["tokenizer.ggml.token_type"] == [3, 3, 3] + [1] * (len(WORDS) - 3) + [5] * 3


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        (
            "config.json",
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "rope_scaling: wanted none, got {'rope",
        ),
        (
            "tokenizer.json",
            {"pre_tokenizer": {"type": "Whitespace"}},
            "wanted a tokenizer that splits a text as one of",
        ),
    ],
)
def test_what_a_file_cannot_hold_is_refused_before_anything_is_written(file, change, message, tmp_path, capsys):
    llama(tmp_path / "model", True)
    path = tmp_path / "model" / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert main(line(tmp_path)) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("mlxrl: gguf: ")
    assert message in error
    assert "convert_hf_to_gguf.py" in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "model"]


def test_an_adapter_of_a_gguf_file_is_fused_into_its_model(tmp_path):
    llama(tmp_path / "model", True)
    assert main(line(tmp_path)) == 0
    file = str(tmp_path / "fused.gguf")
    policy = load(file, lora=LoRA(rank=4))
    moved(policy, seed=2)
    policy.save(tmp_path / "second")
    arguments = ["--model", file, "--adapter", str(tmp_path / "second"), "--output", str(tmp_path / "again")]
    assert main(["fuse", *arguments, "--dtype", "float32"]) == 0
    ids, found = mx.array([[1, 2, 3, 4, 200, 9]]), load(str(tmp_path / "again"), lora=None)
    wanted = load(file, lora=None, dtype="float32", adapter=tmp_path / "second")
    assert mx.abs(found.model(ids) - wanted.model(ids)).max() < 1e-4
    assert found.tokenizer.encode(TEXT) == wanted.tokenizer.encode(TEXT)
    assert (found.tokenizer.eos_token_ids, found.tokenizer.chat_template) == ({2, 0}, TEMPLATE)
