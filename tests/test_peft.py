"""Adapters to and from PEFT itself, on a tiny model that transformers and mlx-lm load. Skipped where PEFT is not."""

from __future__ import annotations

import json

import mlx.core as mx
import numpy as np
import pytest

from helpers import moved
from mlxrl.cli import main
from mlxrl.policy.policy import load
from mlxrl.settings import LoRA
from models import tokenizer

pytest.importorskip("torch")
peft = pytest.importorskip("peft")

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM  # noqa: E402

IDS = [[1, 2, 3, 4, 250, 9]]


def folder(path, tied):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=tied, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer()._tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return folder(tmp_path_factory.mktemp("tied"), True)


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    return folder(tmp_path_factory.mktemp("untied"), False)


def theirs(model):
    with torch.no_grad():
        return model.eval()(torch.tensor(IDS)).logits.numpy()


def ours(policy):
    return np.array(policy.model(mx.array(IDS)))


def base(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


EXPORTED = {
    "every layer": {},
    "dora": {"dora": True},
    "the last layers": {"layers": 2, "keys": ("q_proj", "up_proj"), "scale": 0.7},
    "one layer alone": {"keys": ("model.layers.1.self_attn.v_proj",)},
    "an embedding": {"keys": ("model.embed_tokens", "q_proj"), "layers": 1},
}


@pytest.mark.parametrize("kind", EXPORTED)
@pytest.mark.parametrize("model", ["tied", "untied"])
def test_peft_computes_what_an_exported_adapter_does_here(kind, model, tmp_path, request):
    path = request.getfixturevalue(model)
    policy = load(path, lora=LoRA(rank=4, **EXPORTED[kind]))
    moved(policy)
    policy.save(tmp_path / "own")
    written = ["--adapter", str(tmp_path / "own"), "--format", "peft", "--output", str(tmp_path / "peft")]
    assert main(["export", *written]) == 0
    found = peft.PeftModel.from_pretrained(base(path), tmp_path / "peft")
    assert np.abs(ours(policy) - theirs(base(path))).max() > 1e-3
    np.testing.assert_allclose(theirs(found), ours(policy), atol=2e-5)
    again = load(path, lora=None, adapter=tmp_path / "peft")
    assert np.array_equal(ours(again), ours(policy))


IMPORTED = {
    "every linear layer": {"target_modules": "all-linear"},
    "rslora": {"target_modules": ["q_proj", "down_proj"], "use_rslora": True, "lora_alpha": 3},
    "dora": {"target_modules": ["q_proj", "down_proj"], "use_dora": True},
    "some layers": {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [0, 2]},
    "a pattern": {"target_modules": r".*\.(0|1)\.self_attn\.(q|k)_proj"},
    "the head": {"target_modules": ["lm_head", "o_proj"]},
    "an embedding": {"target_modules": ["embed_tokens", "o_proj"]},
}


@pytest.mark.filterwarnings("ignore:.*embedding:UserWarning")
@pytest.mark.parametrize("kind", IMPORTED)
def test_an_adapter_of_peft_computes_here_what_it_does_there(kind, untied, tmp_path):
    settings = {"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM", **IMPORTED[kind]}
    torch.manual_seed(1)
    found = peft.get_peft_model(base(untied), peft.LoraConfig(**settings))
    for name, parameter in found.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    found.save_pretrained(tmp_path / "peft")
    policy = load(untied, lora=None, adapter=tmp_path / "peft")
    assert np.abs(ours(policy) - theirs(base(untied))).max() > 1e-3
    np.testing.assert_allclose(ours(policy), theirs(found), atol=2e-5)
    policy.save(tmp_path / "own")
    assert np.array_equal(ours(load(untied, lora=None, adapter=tmp_path / "own")), ours(policy))


def test_a_fused_model_is_what_peft_merges(untied, tmp_path):
    policy = load(untied, lora=LoRA(rank=4))
    moved(policy)
    policy.save(tmp_path / "own")
    line = ["--model", untied, "--adapter", str(tmp_path / "own"), "--output", str(tmp_path / "fused")]
    assert main(["fuse", *line]) == 0
    np.testing.assert_allclose(theirs(base(tmp_path / "fused")), ours(policy), atol=2e-5)
    assert json.loads((tmp_path / "fused/config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
