"""PEFT's adapters against y = W x + (lora_alpha / r) B A x in numpy, and those that are refused by name."""

from __future__ import annotations

import json

import mlx.core as mx
import numpy as np
import pytest

from helpers import flat, model_folder, moved
from mlxrl.cli import main
from mlxrl.errors import UserError
from mlxrl.policy import peft_format
from mlxrl.policy.adapter_folder import read
from mlxrl.policy.lora import base_of
from mlxrl.policy.policy import load
from mlxrl.settings import LoRA

Q, UP = "model.layers.{}.self_attn.q_proj", "model.layers.{}.mlp.up_proj"
WIDE = {"q_proj": (64, 64), "up_proj": (128, 64)}  # of the tiny model: outputs, inputs


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(model_folder(tmp_path_factory.mktemp("model")))


def peft(
    folder, names=tuple(name.format(layer) for name in (Q, UP) for layer in (0, 1)), arrays=(), dora=False, **changes
):
    """An adapter of rank 3 as PEFT saves one, its arrays by their names."""
    draw, made = np.random.default_rng(0), {}
    for name in names:
        outputs, inputs = WIDE[name.rpartition(".")[2]]
        made[f"base_model.model.{name}.lora_A.weight"] = draw.normal(size=(3, inputs))
        made[f"base_model.model.{name}.lora_B.weight"] = draw.normal(size=(outputs, 3))
        if dora:
            made[f"base_model.model.{name}.lora_magnitude_vector"] = 1 + draw.random(outputs)
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "lora_dropout": 0.1, "bias": "none", "use_dora": dora,
              "target_modules": ["q_proj", "up_proj"], "base_model_name_or_path": "", **changes}  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    stored = {name: mx.array(array).astype(mx.float32) for name, array in {**made, **dict(arrays)}.items()}
    mx.save_safetensors(str(folder / "adapter_model.safetensors"), stored)
    return made


@pytest.mark.parametrize(
    ("changes", "scale"),
    [({}, 2.0), ({"use_rslora": True}, 6 / 3**0.5), ({"lora_alpha": 1.5}, 0.5), ({"dora": True}, 2.0)],
)
def test_a_layer_computes_pefts_formula(changes, scale, model, tmp_path):
    arrays = peft(tmp_path / "peft", **changes)
    policy = load(model, lora=None, adapter=tmp_path / "peft")
    assert (policy.lora.rank, policy.lora.dropout, policy.lora.keys) == (3, 0.1, ("mlp.up_proj", "self_attn.q_proj"))
    layers, x = dict(policy.model.named_modules()), np.random.default_rng(1).normal(size=(5, 64)).astype(np.float32)
    for name in (Q.format(1), UP.format(0)):
        a, b = (arrays[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
        weight = np.array(base_of(layers[name]).weight) + scale * b @ a
        if changes.get("dora"):
            rows = np.sqrt((weight**2).sum(axis=1))
            weight = (arrays[f"base_model.model.{name}.lora_magnitude_vector"] / rows)[:, None] * weight
        np.testing.assert_allclose(layers[name](mx.array(x)), x @ weight.T, atol=2e-4)


def test_layers_in_the_middle_are_adapted_alone_and_saved_so(model, tmp_path):
    peft(tmp_path / "peft", names=[Q.format(0)], layers_to_transform=[0], target_modules=["q_proj"])
    policy = load(model, lora=None, adapter=tmp_path / "peft")
    assert policy.lora.keys == (Q.format(0),)
    assert list(flat(policy.model.trainable_parameters())) == [f"{Q.format(0)}.lora_{x}" for x in "ab"]
    policy.save(tmp_path / "own")
    again = load(model, lora=None, adapter=tmp_path / "own")
    ids = mx.array([[1, 2, 3]])
    assert mx.array_equal(again.model(ids), policy.model(ids))


def test_an_export_has_pefts_arrays_and_settings(model, tmp_path, capsys):
    policy = load(
        model, lora=LoRA(rank=4, scale=0.7, dropout=0.25, layers=1, keys=("q_proj", "embed_tokens"), dora=False)
    )
    moved(policy)
    policy.save(tmp_path / "own")
    line = ["export", "--adapter", str(tmp_path / "own"), "--format", "peft", "--output", str(tmp_path / "peft")]
    assert main([*line, "--model", "org/base"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'peft'}: PEFT, rank 4, of org/base\n"
    config = json.loads((tmp_path / "peft/adapter_config.json").read_text())
    wanted = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "org/base", "r": 4, "lora_alpha": 2.8,
        "lora_dropout": 0.25, "target_modules": ["model.embed_tokens", "self_attn.q_proj"], "layers_to_transform": [1],
        "layers_pattern": "layers", "bias": "none", "fan_in_fan_out": False, "use_dora": False, "use_rslora": False,
        "modules_to_save": None, "init_lora_weights": True, "inference_mode": True, "ensure_weight_tying": True,
    }  # fmt: skip
    assert config == wanted
    arrays = mx.load(str(tmp_path / "peft/adapter_model.safetensors"))
    own = flat(policy.model.trainable_parameters())
    q, words = f"base_model.model.{Q.format(1)}", "base_model.model.model.embed_tokens"
    assert set(arrays) == {
        f"{q}.lora_A.weight",
        f"{q}.lora_B.weight",
        f"{words}.lora_embedding_A",
        f"{words}.lora_embedding_B",
    }
    assert mx.array_equal(arrays[f"{q}.lora_A.weight"], own[f"{Q.format(1)}.lora_a"].T)
    assert mx.array_equal(arrays[f"{words}.lora_embedding_B"], own["model.embed_tokens.lora_b"].T)
    assert main(line) == 2
    assert "output: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arrays", "lora", "message"),
    [
        (
            {"model.layers.0.mlp.switch_mlp.up_proj.lora_a": (2, 4, 8)},
            {},
            "an adapter of experts, for which PEFT has no",
        ),
        ({"model.embed_tokens.m": (8,)}, {"dora": True}, "DoRA of an embedding has other norms in PEFT"),
    ],
)
def test_what_peft_has_no_form_for_is_refused(arrays, lora, message, tmp_path):
    with pytest.raises(UserError, match=message):
        peft_format.save(LoRA(**lora), {name: mx.zeros(shape) for name, shape in arrays.items()}, "", tmp_path / "peft")
    assert list(tmp_path.iterdir()) == []


A, B = f"base_model.model.{Q.format(0)}.lora_A.weight", f"base_model.model.{Q.format(0)}.lora_B.weight"
REFUSED = {
    "another method": ({"peft_type": "LOHA"}, 'peft_type: wanted LORA, got "LOHA"; merge it into its model'),
    "biases": ({"bias": "lora_only"}, 'bias: wanted none, got "lora_only"; merge it'),
    "whole layers": (
        {"modules_to_save": ["lm_head"]},
        'modules_to_save: mlx-lm\'s adapters have none, got ["lm_head"]',
    ),
    "ranks by layer": ({"rank_pattern": {"q_proj": 8}}, "rank_pattern: mlx-lm's adapters have none"),
    "scales by layer": ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern: mlx-lm's adapters have none"),
    "a start that moves the base": (
        {"init_lora_weights": "pissa_niter_4"},
        "init_lora_weights: pissa_niter_4 changes the",
    ),
    "no rank": ({"r": None}, "wanted numbers r, lora_alpha and lora_dropout"),
    "rank 0": ({"r": 0}, "wanted numbers r, lora_alpha and lora_dropout"),
    "no alpha": ({"lora_alpha": 0}, "lora: scale: wanted"),
    "another rank": ({"r": 5}, "wanted rank 5 as in adapter_config.json, got"),
    "an array that is none": ({"arrays": {"x.weight": np.ones((2, 2))}}, "x.weight: wanted lora_A or lora_B"),
    "a convolution": ({"arrays": {A: np.ones((3, 8, 1))}}, "wanted the matrix of a linear layer, got (3, 8, 1)"),
    "half an adapter": (
        {"arrays": {A.replace("q_", "k_"): np.ones((3, 64))}},
        "k_proj: wanted both A and B, model.layers",
    ),
    "arrays of another width": ({"arrays": {A: np.ones((3, 8))}}, "not the adapter of this model"),
    "a layer that is not there": (
        {"arrays": {A.replace("q_", "z_"): np.ones((3, 64)), B.replace("q_", "z_"): np.ones((64, 3))}},
        "'self_attn.z_proj' matches no layer",
    ),
    "nothing": ({"names": ()}, "adapter_model.safetensors has no adapter in it"),
}


@pytest.mark.parametrize("how", REFUSED)
def test_an_adapter_of_peft_that_cannot_be_held_is_one_line(how, model, tmp_path):
    changes, message = REFUSED[how]
    peft(tmp_path / "peft", **changes)
    with pytest.raises(UserError) as caught:
        load(model, lora=None, adapter=tmp_path / "peft")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_language_model_beside_a_vision_tower_has_transformers_names(tmp_path):
    ours = [f"language_model.{name}.lora_{x}" for name in ("lm_head", "model.layers.0.mlp.up_proj") for x in "ab"]
    peft_format.save(LoRA(rank=4), {name: mx.ones((4, 4)) for name in ours}, "", tmp_path / "peft")
    saved = mx.load(str(tmp_path / "peft/adapter_model.safetensors"))
    theirs = ("lm_head", "model.language_model.layers.0.mlp.up_proj")
    assert set(saved) == {f"base_model.model.{name}.lora_{x}.weight" for name in theirs for x in "AB"}
    config = json.loads((tmp_path / "peft/adapter_config.json").read_text())
    assert config["target_modules"] == ["lm_head", "mlp.up_proj"]
    assert sorted(read(tmp_path / "peft").weights) == sorted(ours)


def test_a_pickle_is_not_read(model, tmp_path):
    peft(tmp_path / "peft")
    (tmp_path / "peft/adapter_model.safetensors").rename(tmp_path / "peft/adapter_model.bin")
    with pytest.raises(
        UserError, match=r"adapter_model.bin: a pickle, which is never read; save it as adapter_model\."
    ):
        load(model, lora=None, adapter=tmp_path / "peft")


def test_an_embedding_that_may_be_tied_is_told(model, tmp_path):
    words = "base_model.model.model.embed_tokens"
    arrays = {f"{words}.lora_embedding_A": np.ones((3, 320)), f"{words}.lora_embedding_B": np.ones((64, 3)),
              f"{words}.base_layer.weight": np.ones((320, 64))}  # fmt: skip
    peft(tmp_path / "peft", names=(), arrays=arrays, target_modules=["embed_tokens"])
    with pytest.warns(UserWarning, match="model.embed_tokens is adapted, which here is the head too"):
        policy = load(model, lora=None, adapter=tmp_path / "peft")
    assert policy.lora.keys == ("model.embed_tokens",)
