"""Adapter folders: mlx-lm's of every kind, what is refused, and how one is written."""

from __future__ import annotations

import json
import os
import warnings

import mlx.core as mx
import mlx_lm
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers

from helpers import flat, minibatch, model_folder, moved
from mlxrl.errors import UserError
from mlxrl.policy.adapter_folder import read
from mlxrl.policy.logprobs import logprobs
from mlxrl.policy.modes import scoring
from mlxrl.policy.policy import as_policy, load
from mlxrl.policy.skeleton import outline, skeleton
from mlxrl.settings import LoRA
from models import dense, hybrid, moe, tokenizer

IDS = mx.array([[1, 2, 3, 4]])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(model_folder(tmp_path_factory.mktemp("model")))


def tuned(model, folder, layers=2, dora=False, **changes):
    """An adapter as `mlx_lm.lora` saves one, and mlx-lm's model with it."""
    theirs, _ = mlx_lm.load(model)
    theirs.freeze()
    parameters = {"rank": 4, "scale": 20.0, "dropout": 0.0, **changes}
    linear_to_lora_layers(theirs, layers, parameters, use_dora=dora)
    moved(theirs)
    folder.mkdir(exist_ok=True)
    config = {"fine_tune_type": "dora" if dora else "lora", "num_layers": layers, "lora_parameters": parameters}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "model": model}))
    mx.save_safetensors(str(folder / "adapters.safetensors"), dict(tree_flatten(theirs.trainable_parameters())))
    return theirs


KINDS = {
    "the last layer": {"layers": 1},
    "more layers than there are": {"layers": 16},
    "all by -1": {"layers": -1},
    "keys that match nothing here": {"keys": ["self_attn.q_proj", "self_attn.qkv_proj"]},
    "an embedding beside half": {"layers": 1, "keys": ["self_attn.q_proj", "model.embed_tokens"]},
    "dora": {"dora": True},
    "dora of half": {"layers": 1, "dora": True, "keys": ["self_attn.q_proj", "mlp.up_proj"]},
    "dora of an embedding": {"dora": True, "keys": ["model.embed_tokens"]},
}


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_of_mlx_lm_are_loaded_and_saved_again(kind, model, tmp_path):
    theirs = tuned(model, tmp_path / "sft", **KINDS[kind])
    ours = load(model, adapter=tmp_path / "sft")
    assert mx.array_equal(ours.model(IDS), theirs(IDS))
    assert outline(skeleton(model), ours.lora, str(tmp_path / "sft")) == ours.adapted
    ours.save(tmp_path / "again")
    again, _ = mlx_lm.load(model, adapter_path=str(tmp_path / "again"))
    assert mx.array_equal(again(IDS), theirs(IDS))


def test_the_reference_is_what_training_goes_on_from(model, tmp_path):
    tuned(model, tmp_path / "sft")
    p, batch = load(model, adapter=tmp_path / "sft"), minibatch(4)
    with scoring(p):
        began = logprobs(p, batch, gradient=False).token_logprobs
    moved(p, seed=5)
    leaves = flat(p.model.trainable_parameters())
    with scoring(p, adapters=False):
        assert mx.array_equal(logprobs(p, batch, gradient=False).token_logprobs, began)
    with scoring(p):
        assert not mx.array_equal(logprobs(p, batch, gradient=False).token_logprobs, began)
    assert all(mx.array_equal(value, leaves[name]) for name, value in flat(p.model.trainable_parameters()).items())


def test_the_last_layers_alone_are_adapted():
    model = dense()
    p = as_policy(model, tokenizer(), lora=LoRA(layers=1, keys=("q_proj",)))
    assert list(flat(model.trainable_parameters())) == [f"model.layers.1.self_attn.q_proj.lora_{x}" for x in "ab"]
    assert (p.lora.keys, p.adapted[0].count) == (("self_attn.q_proj",), 1)
    both = as_policy(dense(), tokenizer(), lora=LoRA(layers=7, keys=("q_proj",)))
    assert both.adapted[0].count == 2


def test_short_keys_are_all_names_that_end_so():
    p = as_policy(moe(), tokenizer(), lora=LoRA(keys=("up_proj", "q_proj", "self_attn.q_proj", "embed_tokens")))
    assert p.lora.keys == ("mlp.switch_mlp.up_proj", "self_attn.q_proj", "model.embed_tokens")
    with pytest.raises(UserError, match="'q_prjo' matches no layer; did you mean 'q_proj'"):
        as_policy(moe(), tokenizer(), lora=LoRA(keys=("q_prjo",)))
    with pytest.raises(UserError, match="'roj' matches no layer"):
        as_policy(moe(), tokenizer(), lora=LoRA(keys=("roj",)))


@pytest.mark.parametrize(
    ("make", "lora", "message"),
    [
        (dense, {"rank": 129}, "lora: rank: wanted at most 64, the full rank of the widest layer, got 129"),
        (dense, {"rank": 65, "keys": ("q_proj",)}, "lora: rank: wanted at most 64"),
        (moe, {"dora": True}, "lora: dora: mlp.switch_mlp.down_proj is a SwitchLinear, for which mlx-lm has no DoRA"),
        (hybrid, {"layers": 1, "keys": ("in_proj_qkv",)}, "'in_proj_qkv' matches no layer"),
    ],
)
def test_adapters_that_a_model_cannot_have_are_one_line(make, lora, message):
    with pytest.raises(UserError, match=message):
        as_policy(make(), tokenizer(), lora=LoRA(**lora))


def test_dora_starts_as_the_base_and_has_a_reference():
    base = dense()(IDS)
    p = as_policy(dense(), tokenizer(), lora=LoRA(dora=True))
    assert mx.abs(p.model(IDS) - base).max().item() < 1e-5
    batch = minibatch(4)
    with scoring(p, adapters=False):
        reference = logprobs(p, batch, gradient=False).token_logprobs
    with scoring(q := as_policy(dense(), tokenizer(), lora=None)):
        assert mx.array_equal(reference, logprobs(q, batch, gradient=False).token_logprobs)


def edited(folder, **changes):
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    parameters = {**config["lora_parameters"], **changes.pop("parameters", {})}
    path.write_text(json.dumps({**config, "lora_parameters": parameters, **changes}))


REFUSED = {
    "a full fine-tune": ({"fine_tune_type": "full"}, "a full fine-tune, no adapter; mlx_lm.fuse --model "),
    "another kind": ({"fine_tune_type": "ia3"}, 'fine_tune_type: wanted lora or dora, got "ia3"'),
    "peft's without arrays": (
        {"peft_type": "LORA", "r": 8},
        "no adapter_model.safetensors; wanted a folder that a run",
    ),
    "keys that are numbers": ({"parameters": {"keys": [1]}}, "lora: keys: wanted a list, each a text"),
    "keys that are a text": ({"parameters": {"keys": "q_proj"}}, "lora: keys: wanted a list"),
    "a rank of 10**12": ({"parameters": {"rank": 10**12}}, "lora: rank: wanted a whole number of at least 1 and at m"),
    "a rank that is another": ({"parameters": {"rank": 64}}, "not the adapter of this model"),
    "a rank of text": ({"parameters": {"rank": "8"}}, "lora: rank: wanted a whole number"),
    "a scale that is nothing": ({"parameters": {"scale": float("nan")}}, "lora: scale: wanted"),
    "a scale without bounds": ({"parameters": {"scale": 1e300}}, "lora: scale: wanted"),
    "layers as text": ({"num_layers": "16"}, 'num_layers: wanted a whole number, got "16"'),
    "layers without number": ({"num_layers": 10**400}, "lora: layers: wanted a whole number"),
    "no parameters": ({"parameters": {}, "lora_parameters": None}, "wanted lora_parameters with rank, scale, dropout"),
}


@pytest.mark.parametrize("how", REFUSED)
def test_an_adapter_that_cannot_be_had_is_one_line(how, model, tmp_path):
    changes, message = REFUSED[how]
    tuned(model, tmp_path, keys=["self_attn.q_proj"])
    edited(tmp_path, **changes)
    with pytest.raises(UserError) as caught:
        load(model, adapter=tmp_path)
    assert str(caught.value).startswith(str(tmp_path))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_an_adapter_that_is_not_finite_is_one_line(value, model, tmp_path):
    tuned(model, tmp_path, keys=["self_attn.q_proj"])
    arrays = mx.load(str(tmp_path / "adapters.safetensors"))
    name = "model.layers.1.self_attn.q_proj.lora_b"
    arrays[name][1, 2] = value
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), arrays)
    with pytest.raises(UserError, match=f"adapters.safetensors: {name} holds NaN or infinity"):
        load(model, adapter=tmp_path)


def test_settings_beside_an_adapter_are_refused(model, tmp_path):
    tuned(model, tmp_path)
    with pytest.raises(UserError, match="lora: has no effect beside an adapter"):
        load(model, lora=LoRA(rank=16), adapter=tmp_path)
    assert load(model, lora=None, adapter=tmp_path).lora.rank == 4


def test_an_adapter_of_another_model_is_told(model, tmp_path):
    tuned(model, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(model, adapter=tmp_path)
        edited(tmp_path, model=os.path.relpath(model))
        load(model, adapter=tmp_path)
    edited(tmp_path, model="org/another")
    with pytest.warns(UserWarning, match=f"{tmp_path}: an adapter of org/another, put on {model}"):
        load(model, adapter=tmp_path)


def test_a_folder_appears_whole(tmp_path, monkeypatch):
    """What dies before the rename leaves no adapter, and what dies between two leaves the weights of the old or new."""
    p = as_policy(dense(), tokenizer(), lora=LoRA(rank=4))
    real = os.replace

    def dies(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", dies)
    with pytest.raises(KeyboardInterrupt):
        p.save(tmp_path / "adapters")
    assert list(tmp_path.iterdir()) == []
    moves = []
    monkeypatch.setattr(os, "replace", lambda a, b: (moves.append(os.path.basename(b)), real(a, b)))
    p.save(tmp_path / "adapters")
    assert moves == ["adapters"]
    p.save(tmp_path / "adapters")
    assert moves == ["adapters", "adapters.safetensors", "adapter_config.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["adapters"]
    assert read(tmp_path / "adapters").lora.keys == p.lora.keys
