from __future__ import annotations

import json

import mlx.core as mx
import mlx.nn as nn
import pytest
from helpers import by_hand, minibatch, moved
from mlx.utils import tree_flatten
from mlx_lm.tuner.dora import DoRALinear
from mlx_lm.tuner.lora import LoRAEmbedding

from mlxrl.policy.adapters import LoRA, adapted, without_adapters
from mlxrl.policy.load import load, policy
from mlxrl.policy.logprobs import logprobs, training
from models import dense, hybrid, moe, tokenizer

MODELS = [dense, hybrid, moe]
EVERYTHING = (
    "self_attn.q_proj", "mlp.up_proj", "model.embed_tokens",
)  # fmt: skip


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize(("prefix", "tokens", "prompt"), [(5, 7, 0), (0, 7, 2), (1, 1, 0), (4, 2, 0)])
def test_logprobs_equal_those_of_a_plain_forward(make, prefix, tokens, prompt):
    p = policy(make(), tokenizer(), lora=LoRA())
    moved(p.model)
    batch = minibatch(prefix, tokens, rows=min(3, tokens), temperature=0.7, prompt=prompt)
    with training(p.model):
        assert mx.abs(logprobs(p, batch).token_logprobs - by_hand(p.model, batch)).max().item() < 2e-5


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("prefix", [5, 0])
def test_gradients_through_the_prefix_equal_those_of_a_plain_forward(make, prefix):
    """The prompt's share of the gradient comes back through the shared caches."""
    p = policy(make(), tokenizer(), lora=LoRA())
    moved(p.model)
    batch = minibatch(prefix, prompt=0 if prefix else 2)
    weight = mx.random.normal(batch.tokens.shape, key=mx.random.key(3)) * batch.mask
    with training(p.model):
        ours = nn.value_and_grad(p.model, lambda: (logprobs(p, batch).token_logprobs * weight).sum())()[1]
        plain = nn.value_and_grad(p.model, lambda: (by_hand(p.model, batch) * weight).sum())()[1]
    for (name, got), (_, wanted) in zip(tree_flatten(ours), tree_flatten(plain), strict=True):
        assert mx.abs(wanted).max().item() > 0, name
        assert (mx.linalg.norm(got - wanted) / mx.linalg.norm(wanted)).item() < 1e-5, name


def test_entropy_of_a_uniform_head_is_log_vocabulary():
    model = dense()
    model.model.embed_tokens.weight = mx.zeros_like(model.model.embed_tokens.weight)
    p = policy(model, tokenizer(), lora=LoRA())
    out = logprobs(p, minibatch(2), entropy=True)
    # 320 equally likely tokens: H = ln 320 = 5.768321, log p = -5.768321
    assert abs(out.entropy[0, 0].item() - 5.768321) < 1e-5
    assert abs(out.token_logprobs[0, 0].item() + 5.768321) < 1e-5
    assert out.entropy[2, 6].item() == 0.0  # padding


def test_only_adapters_are_trainable_and_start_without_effect():
    model = dense()
    base = model(mx.array([[1, 2, 3]]))
    p = policy(model, tokenizer(), lora=LoRA(rank=4))
    assert {name.rsplit(".", 1)[-1] for name, _ in tree_flatten(model.trainable_parameters())} == {"lora_a", "lora_b"}
    assert mx.array_equal(model(mx.array([[1, 2, 3]])), base)
    assert p.trainable_parameters == sum(v.size for _, v in tree_flatten(model.trainable_parameters()))


def test_initial_adapters_are_a_function_of_the_seed_alone():
    mx.random.seed(5)
    first = policy(dense(), tokenizer(), lora=LoRA(), seed=1).model.layers[0].self_attn.q_proj.lora_a
    mx.random.seed(9)
    again = policy(dense(), tokenizer(), lora=LoRA(), seed=1).model.layers[0].self_attn.q_proj.lora_a
    other = policy(dense(), tokenizer(), lora=LoRA(), seed=2).model.layers[0].self_attn.q_proj.lora_a
    assert mx.array_equal(first, again)
    assert not mx.array_equal(first, other)


def test_routers_of_experts_are_left_alone():
    keys = {line.key for line in policy(moe(), tokenizer(), lora=LoRA()).adapted}
    assert "mlp.switch_mlp.up_proj" in keys
    assert "mlp.gate" not in keys


def test_a_key_that_matches_nothing_lists_the_names_that_exist():
    with pytest.raises(
        ValueError, match=r"'self_attn.q_prjo' matches no layer; did you mean 'self_attn.q_proj'.*mlp.up_proj"
    ):
        policy(dense(), tokenizer(), lora=LoRA(keys=("self_attn.q_prjo",)))


@pytest.mark.parametrize("make", MODELS)
def test_without_adapters_is_the_base_bit_for_bit_and_restores_on_exceptions(make):
    model, ids = make(), mx.array([[1, 2, 3, 4]])
    base = model(ids)
    p = policy(model, tokenizer(), lora=LoRA())
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
    policy(model, tokenizer(), lora=LoRA(keys=EVERYTHING))
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
    policy(model, tokenizer(), lora=LoRA())
    moved(model)
    mx.eval(mx.compile(model)(ids))
    with without_adapters(model):
        assert mx.allclose(mx.compile(lambda x: model(x))(ids), base, atol=1e-6)


@pytest.fixture
def folder(tmp_path):
    """A tiny model on disk, as mlx-lm saves one."""
    from mlx_lm.utils import save_config, save_model

    path = tmp_path / "model"
    model = dense()
    save_model(path, model)
    save_config({**vars(model.args), "eos_token_id": 2}, path / "config.json")
    tokenizer()._tokenizer.save_pretrained(path)
    return path


def test_a_saved_adapter_is_read_by_mlx_lm_with_equal_logits(folder, tmp_path):
    import mlx_lm

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
    import subprocess
    import sys

    import mlx_lm

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
    p = policy(dense(), tokenizer(), lora=LoRA())
    p.save(tmp_path)
    before = (tmp_path / "adapters.safetensors").read_bytes()
    moved(p.model)
    monkeypatch.setattr(mx, "save_safetensors", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        p.save(tmp_path)
    assert (tmp_path / "adapters.safetensors").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter_config.json", "adapters.safetensors"]


def test_an_adapter_of_another_shape_is_refused(tmp_path):
    policy(dense(), tokenizer(), lora=LoRA(rank=4)).save(tmp_path)
    from mlxrl.policy.adapters import load_weights

    with pytest.raises(ValueError, match="not the adapter of this model"):
        load_weights(policy(dense(), tokenizer(), lora=LoRA(rank=8)).model, tmp_path)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_base_agrees_with_its_reference_before_the_first_update(bits):
    model = dense()
    nn.quantize(model, group_size=32, bits=bits)
    p = policy(model, tokenizer(), lora=LoRA())
    batch = minibatch(4)
    new = logprobs(p, batch).token_logprobs
    with without_adapters(p):
        assert mx.array_equal(logprobs(p, batch).token_logprobs, new)
    assert new.dtype == mx.float32
    assert all(line.layer == "QuantizedLinear" for line in adapted(model))


@pytest.mark.parametrize("id", ["./nowhere", "/nowhere/at/all", "nowhere.gguf"])
def test_a_model_that_is_not_there_is_one_line(id):
    with pytest.raises(ValueError, match=r"model: id: no (folder|file)"):
        load(id)
