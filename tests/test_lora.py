"""Adapters: where they go, what they start as, the base without them, and mlx-lm's folder format."""

from __future__ import annotations

import json
import subprocess
import sys

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.dora import DoRALinear
from mlx_lm.tuner.lora import LoRAEmbedding

from helpers import minibatch, model_folder, moved
from mlxrl.errors import UserError
from mlxrl.policy.adapter_folder import load_weights
from mlxrl.policy.adapter_folder import read as read_config
from mlxrl.policy.logprobs import logprobs
from mlxrl.policy.lora import adapted, without_adapters
from mlxrl.policy.policy import as_policy, load
from mlxrl.settings import LoRA
from models import dense, hybrid, moe, tokenizer

MODELS = [dense, hybrid, moe]
EVERYTHING = ("self_attn.q_proj", "mlp.up_proj", "model.embed_tokens")


def test_only_adapters_are_trainable_and_start_without_effect():
    model = dense()
    base = model(mx.array([[1, 2, 3]]))
    p = as_policy(model, tokenizer(), lora=LoRA(rank=4))
    assert {name.rsplit(".", 1)[-1] for name, _ in tree_flatten(model.trainable_parameters())} == {"lora_a", "lora_b"}
    assert mx.array_equal(model(mx.array([[1, 2, 3]])), base)
    assert p.trainable_parameters == sum(v.size for _, v in tree_flatten(model.trainable_parameters()))


def test_initial_adapters_are_a_function_of_the_seed_alone():
    mx.random.seed(5)
    first = as_policy(dense(), tokenizer(), lora=LoRA(), seed=1).model.layers[0].self_attn.q_proj.lora_a
    mx.random.seed(9)
    again = as_policy(dense(), tokenizer(), lora=LoRA(), seed=1).model.layers[0].self_attn.q_proj.lora_a
    other = as_policy(dense(), tokenizer(), lora=LoRA(), seed=2).model.layers[0].self_attn.q_proj.lora_a
    assert mx.array_equal(first, again)
    assert not mx.array_equal(first, other)


def test_routers_of_experts_are_left_alone():
    keys = {line.key for line in as_policy(moe(), tokenizer(), lora=LoRA()).adapted}
    assert "mlp.switch_mlp.up_proj" in keys
    assert "mlp.gate" not in keys


def test_a_key_that_matches_nothing_lists_the_names_that_exist():
    with pytest.raises(
        ValueError, match=r"'self_attn.q_prjo' matches no layer; did you mean 'self_attn.q_proj'.*mlp.up_proj"
    ):
        as_policy(dense(), tokenizer(), lora=LoRA(keys=("self_attn.q_prjo",)))


@pytest.mark.parametrize("make", MODELS)
def test_without_adapters_is_the_base_bit_for_bit_and_restores_on_exceptions(make):
    model, ids = make(), mx.array([[1, 2, 3, 4]])
    base = model(ids)
    p = as_policy(model, tokenizer(), lora=LoRA())
    moved(model)
    tuned = model(ids)
    assert not mx.array_equal(tuned, base)
    with without_adapters(p):
        assert mx.array_equal(model(ids), base)
    with pytest.raises(RuntimeError), without_adapters(model):
        raise RuntimeError
    assert mx.array_equal(model(ids), tuned)


def test_without_adapters_covers_embeddings_and_dora():
    model, ids = dense(), mx.array([[1, 2, 3, 4]])
    base = model(ids)
    as_policy(model, tokenizer(), lora=LoRA(keys=EVERYTHING))
    block = model.layers[1]
    block.self_attn.k_proj = DoRALinear.from_base(block.self_attn.k_proj)
    block.self_attn.k_proj.lora_b = mx.ones_like(block.self_attn.k_proj.lora_b)
    moved(model)
    assert isinstance(model.model.embed_tokens, LoRAEmbedding)
    assert not mx.array_equal(model(ids), base)
    with without_adapters(model):
        assert mx.array_equal(model(ids), base)


def test_reference_is_the_base_under_compilation_too():
    """An adapter switched off by a number would be baked into the trace; a swapped layer is not."""
    model, ids = dense(), mx.array([[1, 2, 3, 4]])
    base = model(ids)
    as_policy(model, tokenizer(), lora=LoRA())
    moved(model)
    mx.eval(mx.compile(model)(ids))
    with without_adapters(model):
        assert mx.allclose(mx.compile(lambda x: model(x))(ids), base, atol=1e-6)


@pytest.fixture
def folder(tmp_path):
    return model_folder(tmp_path / "model")


def test_a_saved_adapter_is_read_by_mlx_lm_with_equal_logits(folder, tmp_path):
    p = load(str(folder), lora=LoRA(rank=4, keys=("self_attn.q_proj", "mlp.up_proj", "model.embed_tokens")))
    moved(p.model)
    p.save(tmp_path / "adapter")
    ids = mx.array([[1, 2, 3, 4]])
    theirs, _ = mlx_lm.load(str(folder), adapter_path=str(tmp_path / "adapter"))
    assert mx.array_equal(theirs(ids), p.model(ids))
    ours = load(str(folder), adapter=tmp_path / "adapter")
    assert mx.array_equal(ours.model(ids), p.model(ids))
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert config["lora_parameters"]["keys"] == ["mlp.up_proj", "model.embed_tokens", "self_attn.q_proj"]
    assert (config["num_layers"], config["fine_tune_type"]) == (2, "lora")


def test_a_saved_adapter_generates_and_fuses(folder, tmp_path):
    p = load(str(folder), lora=LoRA(rank=4))
    moved(p.model)
    p.save(tmp_path / "adapter")
    fuse = [sys.executable, "-m", "mlx_lm", "fuse", "--model", str(folder), "--adapter-path", str(tmp_path / "adapter")]
    subprocess.run([*fuse, "--save-path", str(tmp_path / "fused")], check=True, capture_output=True)
    fused, _ = mlx_lm.load(str(tmp_path / "fused"))
    ids = mx.array([[1, 2, 3, 4]])
    assert mx.abs(fused(ids) - p.model(ids)).max().item() < 1e-4
    model, words = mlx_lm.load(str(folder), adapter_path=str(tmp_path / "adapter"))
    assert isinstance(mlx_lm.generate(model, words, prompt="hi", max_tokens=3), str)


def test_an_interrupted_save_leaves_the_old_adapter(tmp_path, monkeypatch):
    p = as_policy(dense(), tokenizer(), lora=LoRA())
    p.save(tmp_path)
    before = (tmp_path / "adapters.safetensors").read_bytes()
    moved(p.model)
    monkeypatch.setattr(mx, "save_safetensors", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        p.save(tmp_path)
    assert (tmp_path / "adapters.safetensors").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter_config.json", "adapters.safetensors"]


def test_an_adapter_of_another_shape_is_refused(tmp_path):
    as_policy(dense(), tokenizer(), lora=LoRA(rank=4)).save(tmp_path)
    with pytest.raises(ValueError, match="not the adapter of this model"):
        load_weights(as_policy(dense(), tokenizer(), lora=LoRA(rank=8)).model, tmp_path)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_base_agrees_with_its_reference_before_the_first_update(bits):
    model = dense()
    nn.quantize(model, group_size=32, bits=bits)
    p = as_policy(model, tokenizer(), lora=LoRA())
    batch = minibatch(4)
    new = logprobs(p, batch).token_logprobs
    with without_adapters(p):
        assert mx.array_equal(logprobs(p, batch).token_logprobs, new)
    assert new.dtype == mx.float32
    assert all(line.layer == "QuantizedLinear" for line in adapted(model))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "no adapter_config.json; wanted a folder that a run, mlx-lm or PEFT has saved"),
        ("{", "wanted lora_parameters with rank, scale, dropout, got JSONDecodeError"),
        ("[]", "wanted lora_parameters with rank, scale, dropout, got []"),
        ('{"lora_parameters": {"rank": 8}}', "wanted lora_parameters with rank, scale, dropout, got KeyError"),
        ('{"lora_parameters": {"rank": 0, "scale": 2.0, "dropout": 0.0}}', "lora: rank: wanted a whole number of at l"),
    ],
)
def test_an_adapter_folder_that_cannot_be_read_is_one_line(tmp_path, config, message):
    if config is not None:
        (tmp_path / "adapter_config.json").write_text(config)
    with pytest.raises(UserError) as caught:
        read_config(tmp_path)
    assert str(caught.value).startswith(str(tmp_path))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_weights_that_are_cut_short_are_one_line(tmp_path):
    p = as_policy(dense(), tokenizer(), lora=LoRA())
    p.save(tmp_path)
    path = tmp_path / "adapters.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UserError, match="not a whole safetensors file"):
        load_weights(p.model, tmp_path)


def test_a_policy_without_adapters_has_nothing_to_save(tmp_path):
    with pytest.raises(UserError, match="loaded without adapters, there is nothing to save"):
        as_policy(dense(), tokenizer(), lora=None).save(tmp_path)
