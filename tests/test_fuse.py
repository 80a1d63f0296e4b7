"""Adapters in their models' weights: the formula by hand, folders that mlx-lm loads, what packing loses, refusals."""

from __future__ import annotations

import json
import shutil
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.tuner.dora import DoRALinear
from mlx_lm.tuner.lora import LoRAEmbedding, LoRALinear, LoRASwitchLinear
from mlx_lm.utils import save_config, save_model

from helpers import EXAMPLE, MINIMAL, flat, moved
from mlxrl.cli import main
from mlxrl.errors import UserError
from mlxrl.policy import fused_folder
from mlxrl.policy.fuse import dense, fused
from mlxrl.policy.fused_folder import fuse
from mlxrl.policy.policy import load
from mlxrl.settings import LoRA
from models import dense as dense_model
from models import moe, tokenizer

IDS = mx.array([[1, 2, 3, 4, 250, 9]])


def adapter(kind: Any, layer: Any, seed: int = 0) -> Any:
    """An adapter of rank 2 with scale 0.5 and random arrays."""
    made = kind.from_base(layer, r=2, scale=0.5)
    for key, name in zip(mx.random.split(mx.random.key(seed), 3), ("lora_a", "lora_b", "m"), strict=True):
        if name in made:
            made[name] = 1 + mx.random.uniform(shape=made[name].shape, key=key)
    return made


def test_the_weights_are_those_of_the_formula():
    linear, embedding, experts = nn.Linear(5, 3), nn.Embedding(7, 4), SwitchLinear(5, 3, 2, bias=False)
    one = adapter(LoRALinear, linear)
    a, b, w = np.array(one.lora_a), np.array(one.lora_b), np.array(linear.weight)
    update = 0.5 * np.einsum("ir,ro->oi", a, b)
    np.testing.assert_allclose(fused(one), w + update, rtol=1e-6)

    one = adapter(DoRALinear, linear)
    rows = np.sqrt(((w + update) ** 2).sum(axis=1))
    np.testing.assert_allclose(fused(one), (np.array(one.m) / rows)[:, None] * (w + update), rtol=1e-6)

    one = adapter(LoRAEmbedding, embedding)
    update = 0.5 * np.einsum("vr,rd->vd", np.array(one.lora_a), np.array(one.lora_b))
    np.testing.assert_allclose(fused(one), np.array(embedding.weight) + update, rtol=1e-6)

    one = adapter(LoRASwitchLinear, experts)
    update = 0.5 * np.einsum("eri,eor->eoi", np.array(one.lora_a), np.array(one.lora_b))
    np.testing.assert_allclose(fused(one), np.array(experts.weight) + update, rtol=1e-6)


@pytest.mark.parametrize(("mode", "size"), [("affine", 32), ("mxfp4", 32), ("nvfp4", 16)])
def test_packed_experts_are_dequantised_each_with_its_own_scale(mode, size):
    """Within half a step of 4 bits: an expert of weights up to 1, and one of weights a hundred times as large."""
    mx.random.seed(1)
    layer = SwitchLinear(64, 3, 2, bias=False)
    layer.weight = layer.weight * mx.array([8.0, 800.0])[:, None, None]
    packed = layer.to_quantized(
        group_size=size, bits=4, mode=mode, **({"global_scale": True} if mode == "nvfp4" else {})
    )
    difference, largest = mx.abs(dense(packed) - layer.weight).max(axis=(1, 2)), mx.abs(layer.weight).max(axis=(1, 2))
    assert mx.all(difference < 0.2 * largest)


def saved(model: Any, path: Any, bits: dict[str, Any] | None = None, dtype: mx.Dtype = mx.float32) -> str:
    """A tiny model on disk, packed or not, with what a folder may have beside it."""
    model.set_dtype(dtype)
    config = {**vars(model.args), "eos_token_id": 2}
    if bits is not None:
        nn.quantize(
            model, **bits, class_predicate=lambda _, m: hasattr(m, "to_quantized") and m.weight.shape[-1] % 32 == 0
        )
        config["quantization"] = bits
    save_model(path, model)
    save_config(config, path / "config.json")
    tokenizer()._tokenizer.save_pretrained(path)
    (path / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    return str(path)


def trained(id: str, folder: Any, scale: float = 0.1, **lora: Any) -> str:
    policy = load(id, lora=LoRA(rank=4, **lora))
    moved(policy, scale=scale)
    policy.save(folder)
    return str(folder)


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "dense": (dense_model, {}),
    "dora": (dense_model, {"dora": True}),
    "a tied embedding": (dense_model, {"keys": ("model.embed_tokens", "q_proj"), "layers": 1}),
    "dora of a tied embedding": (dense_model, {"keys": ("model.embed_tokens",), "dora": True}),
    "experts and a head": (moe, {"keys": ("up_proj", "down_proj", "o_proj", "lm_head")}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_fused_folder_is_the_adapters_model_to_mlx_lm(kind, tmp_path):
    make, lora = KINDS[kind]
    id = saved(make(), tmp_path / "model")
    adapter = trained(id, tmp_path / "adapter", **lora)
    wanted = load(id, lora=None, adapter=adapter).model(IDS)
    made = fuse(id, adapter, tmp_path / "fused")
    model, its = mlx_lm.load(str(tmp_path / "fused"))
    assert mx.abs(model(IDS) - wanted).max() < 1e-4
    assert made.effect > 1e-3
    assert made.lost < 1e-3
    names = {"config.json", "model.safetensors", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in (tmp_path / "fused").iterdir()} == names | {"chat_template.jinja"}
    assert its.eos_token_ids == {2, 3}
    assert its.chat_template == tokenizer().chat_template
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "fused", "model"]


@pytest.mark.parametrize(("make", "mode"), [(dense_model, "mxfp4"), (moe, "affine")])
def test_a_quantised_model_is_dequantised_to_the_type_of_its_scales(make, mode, tmp_path):
    id = saved(make(), tmp_path / "model", {"group_size": 32, "bits": 4, "mode": mode}, mx.bfloat16)
    adapter = trained(id, tmp_path / "adapter", keys=("q_proj", "up_proj"))
    made = fuse(id, adapter, tmp_path / "fused")
    config = json.loads((tmp_path / "fused/config.json").read_text())
    assert not config.keys() & {"quantization", "quantization_config"}
    arrays = mx.load(str(tmp_path / "fused/model.safetensors"))
    assert {array.dtype for array in arrays.values()} == {mx.bfloat16}
    assert not any(name.endswith(("scales", "biases")) for name in arrays)
    assert made.dtype == mx.bfloat16
    assert 0 < made.lost < 0.2
    precise = fuse(id, adapter, tmp_path / "precise", dtype="float32")
    assert precise.lost < 1e-3


def test_packing_again_keeps_a_large_change_and_is_refused_for_a_small_one(tmp_path, capsys):
    """The change of a layer, against the step of its 8 bits: far above it, and far below."""
    id = saved(dense_model(), tmp_path / "model", {"group_size": 32, "bits": 8, "mode": "affine"})
    large, small = trained(id, tmp_path / "large"), trained(id, tmp_path / "small", scale=0.005)
    made = fuse(id, large, tmp_path / "fused", quantised=True)
    assert 0 < made.lost < 0.2
    assert 0 < made.lost_in_weights < 0.2
    model, _ = mlx_lm.load(str(tmp_path / "fused"))
    kinds = {type(layer).__name__ for layer in model.modules()}
    assert {"QuantizedLinear", "QuantizedEmbedding"} <= kinds
    wanted = load(id, lora=None, adapter=large).model(IDS)
    assert mx.abs(model(IDS) - wanted).max() < 0.2 * mx.abs(wanted - load(id, lora=None).model(IDS)).max()
    line = ["fuse", "--model", id, "--adapter", small, "--output", str(tmp_path / "lossy"), "--quantised"]
    assert main(line) == 2
    assert "more than half of the adapter's effect would be lost" in capsys.readouterr().err
    assert not (tmp_path / "lossy").exists()
    assert main([*line, "--force"]) == 0
    assert "of that change" in capsys.readouterr().out


def test_a_change_below_the_rounding_of_half_precision_is_told(tmp_path):
    id = saved(dense_model(), tmp_path / "model", dtype=mx.bfloat16)
    small = trained(id, tmp_path / "small", scale=0.003)
    with pytest.warns(UserWarning, match="and rounding the weights by .*; --dtype float32 resolves more"):
        fuse(id, small, tmp_path / "fused")


def test_a_run_is_fused_by_its_folder(tmp_path, capsys):
    id = saved(dense_model(), tmp_path / "model")
    run = tmp_path / "run"
    trained(id, run / "adapters")
    (run / "config.toml").write_text(MINIMAL.replace("org/model", id))
    assert main(["fuse", "--run", str(run), "--output", str(tmp_path / "fused")]) == 0
    assert "weights in float32" in capsys.readouterr().out
    wanted = load(id, lora=None, adapter=run / "adapters").model(IDS)
    assert mx.abs(mlx_lm.load(str(tmp_path / "fused"))[0](IDS) - wanted).max() < 1e-4


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The model of the examples, and an adapter of it."""
    folder = tmp_path_factory.mktemp("pair")
    return str(EXAMPLE), trained(str(EXAMPLE), folder / "adapter")


def refused(capsys, arguments: list[str], message: str) -> None:
    assert main(["fuse", *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.startswith("mlxrl: ")
    assert err.count("\n") == 1


BAD = {
    "no adapter": (["--adapter", "none"], "none: no adapter_config.json; wanted a folder"),
    "no model": (["--model", "./none"], "model: id: no folder ./none"),
    "a model that is none": (["--model", "there"], "there has no config.json"),
    "an output with files": (["--output", "there"], "output: there is there already; wanted a new or an empty folder"),
    "an output that is a file": (["--output", "there/file"], "there/file is there already"),
    "the model's folder": (["--output", str(EXAMPLE)], f"output: {EXAMPLE} is the folder that is read"),
    "no quantised model": (["--quantised"], f"quantised: wanted a quantised model, got {EXAMPLE}"),
    "another family's gguf": (
        ["--gguf", "x.gguf"],
        "gguf: model_type: wanted llama, got qwen3; write the folder alone",
    ),
    "a gguf of another name": (["--gguf", "x.bin"], "gguf: wanted a new file NAME.gguf, got x.bin"),
    "a run beside": (["--run", "there"], "--model has no effect beside --run"),
}


@pytest.mark.parametrize("how", BAD)
def test_what_cannot_be_fused_is_one_line_and_leaves_nothing(how, pair, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "there/file").write_text("mine")
    arguments, message = BAD[how]
    id, adapter = pair
    refused(capsys, ["--model", id, "--adapter", adapter, "--output", "fused", *arguments], message)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "there"]


def test_an_adapter_of_another_model_is_one_line(pair, tmp_path, capsys):
    other = saved(dense_model(hidden_size=32), tmp_path / "other")
    trained(other, tmp_path / "adapter")
    with (
        pytest.warns(UserWarning, match="an adapter of"),
        pytest.raises(UserError, match="not the adapter of this model"),
    ):
        fuse(pair[0], tmp_path / "adapter", tmp_path / "fused")
    assert not (tmp_path / "fused").exists()


def test_what_fails_under_way_leaves_nothing(pair, tmp_path, monkeypatch):
    """A disk without room, one that fills up, weights that are not those of the adapter, and Ctrl-C."""

    def fails(message: str, error: Any = UserError) -> None:
        with pytest.raises(error, match=message):
            fuse(*pair, tmp_path / "new/fused")
        assert not [path for path in tmp_path.rglob("*") if path.is_file()]
        monkeypatch.undo()

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    fails("of room on the disk, got 0.00 GB")

    def full(*_: Any) -> None:
        raise RuntimeError("no space left")

    monkeypatch.setattr(mx, "save_safetensors", full)
    fails("model.safetensors cannot be written: no space left")
    own = fused_folder.fused_arrays
    monkeypatch.setattr(fused_folder, "fused_arrays", lambda m, q: {**own(m, q), "model.norm.weight": mx.zeros(64)})
    fails("the fused model's logits are off by .*; nothing is written")
    monkeypatch.setattr(fused_folder, "logits_of", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    fails("^$", KeyboardInterrupt)


def test_one_model_at_a_time_is_in_memory(tmp_path):
    """While a float model is fused: the model, and one file of weights."""
    id = saved(dense_model(hidden_size=256, num_hidden_layers=3), tmp_path / "model")
    adapter = trained(id, tmp_path / "adapter", keys=("q_proj",))
    size = sum(array.nbytes for array in flat(load(id, lora=None).model.parameters()).values())
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    fuse(id, adapter, tmp_path / "fused")
    assert mx.get_peak_memory() - before < 1.7 * size
