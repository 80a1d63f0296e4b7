"""The head of a model: log-probs, entropies and top ids from hidden states, a chunk of the logits at a time."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import cohere, falcon_h1, gemma2, granite
from mlx_lm.tuner.lora import LoRAEmbedding, LoRALinear

from helpers import minibatch, moved
from mlxrl.policy import head as module
from mlxrl.policy.head import Head, compare, score, split
from mlxrl.policy.logprobs import logprobs
from mlxrl.policy.modes import training
from mlxrl.policy.policy import as_policy
from mlxrl.settings import LoRA
from models import dense, hybrid, moe, ready, tokenizer

ORACLES = Path(os.environ.get("MLXRL_ORACLES", Path(__file__).parent / "oracles"))
CASES = sorted(ORACLES.glob("logprobs__*.npz"))
N, D, V = 23, 16, 50
SIZES = {
    "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 50,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
}  # fmt: skip


def head_of(layer: Any, adjust: Any = lambda logits: logits) -> Head:
    tied = hasattr(layer, "as_linear")
    return Head(lambda tokens: tokens, lambda hidden: adjust((layer.as_linear if tied else layer)(hidden)),
                module=lambda: layer)  # fmt: skip


def trained_lora(layer: Any) -> Any:
    adapted = (LoRAEmbedding if isinstance(layer, nn.Embedding) else LoRALinear).from_base(layer, r=4, scale=2.0)
    adapted.lora_b = mx.random.normal(adapted.lora_b.shape) * 0.1
    adapted.freeze()
    adapted.unfreeze(keys=["lora_a", "lora_b"], recurse=False)
    return adapted


def frozen(layer: Any) -> Any:
    layer.freeze()
    return layer


def quantised() -> Any:
    layer = nn.Linear(64, V, bias=False)
    return frozen(layer.to_quantized(group_size=32, bits=4))


def capped(logits: mx.array) -> mx.array:
    return mx.tanh(logits / 2) * 2


HEADS = {
    "linear": lambda: head_of(frozen(nn.Linear(D, V, bias=False))),
    "bias": lambda: head_of(frozen(nn.Linear(D, V))),
    "tied": lambda: head_of(frozen(nn.Embedding(V, D))),
    "quantised": lambda: head_of(quantised()),
    "capped": lambda: head_of(frozen(nn.Linear(D, V, bias=False)), capped),
    "scaled": lambda: head_of(frozen(nn.Linear(D, V, bias=False)), lambda logits: logits * 0.25),
    "trained": lambda: head_of(nn.Linear(D, V)),
    "trained embedding": lambda: head_of(nn.Embedding(V, D)),
    "lora": lambda: head_of(trained_lora(nn.Linear(D, V, bias=False))),
    "lora on an embedding": lambda: head_of(trained_lora(nn.Embedding(V, D))),
    "lora on a quantised head": lambda: head_of(trained_lora(quantised())),
}


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch):
    """Four rows at a time: six chunks, the last of three rows."""
    monkeypatch.setattr(module, "CHUNK", 4 * V)


def plainly(head: Head, hidden: mx.array, ids: mx.array, temperature: float) -> tuple[mx.array, mx.array]:
    z = head.project(hidden).astype(mx.float32) / temperature
    log = z - mx.logsumexp(z, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(log, ids.reshape(len(hidden), -1), axis=-1).reshape(ids.shape)
    return chosen, -(mx.exp(log) * log).sum(axis=-1)


def both(head: Head, ids: mx.array, entropy: bool, temperature: float, gradient: bool = True) -> list[Any]:
    """Values and gradients of a random linear function of them, of `score` and of the formula."""
    mx.random.seed(3)
    layer = head.module()
    width = 64 if isinstance(getattr(layer, "linear", layer), nn.QuantizedLinear) else D
    hidden = mx.random.normal((N, width))
    weigh, weigh_entropy = mx.random.normal(ids.shape), mx.random.normal((N,))
    names = [name for name, _ in tree_flatten(layer.trainable_parameters())]

    def ours(hidden, ids, temperature):
        return score(head, hidden, ids, temperature=temperature, entropy=entropy, gradient=gradient)

    found = []
    for rule in (ours, lambda *a: plainly(head, *a)):
        own = layer.trainable_parameters()

        def loss(parameters, hidden, rule=rule):
            layer.update(parameters)
            chosen, spread = rule(hidden, ids, temperature)
            return (chosen * weigh).sum() + ((spread * weigh_entropy).sum() if entropy else 0)

        by_parameters, by_hidden = mx.grad(loss, argnums=(0, 1))(own, hidden)
        layer.update(own)
        chosen, spread = rule(hidden, ids, temperature)
        found.append([chosen, *([spread] if entropy else []), by_hidden,
                      *(dict(tree_flatten(by_parameters))[name] for name in names)])  # fmt: skip
    return found


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(("candidates", "entropy"), [(None, False), (None, True), (3, False), (3, True)])
@pytest.mark.parametrize("name", HEADS)
def test_values_and_gradients_equal_those_of_the_formula(name, candidates, entropy, temperature):
    mx.random.seed(1)
    shape = (N,) if candidates is None else (N, candidates)
    ids = mx.array(np.random.default_rng(0).integers(0, V, size=shape))
    ours, plain = both(HEADS[name](), ids, entropy, temperature)
    for got, wanted in zip(ours, plain, strict=True):
        assert got.dtype == mx.float32
        assert mx.linalg.norm(wanted).item() > 0
        assert (mx.linalg.norm(got - wanted) / mx.linalg.norm(wanted)).item() < 2e-6


@pytest.mark.parametrize("name", ["linear", "lora"])
def test_a_wrong_word_about_the_gradient_changes_nothing(name):
    mx.random.seed(1)
    ids = mx.array(np.random.default_rng(0).integers(0, V, size=(N,)))
    ours, plain = both(HEADS[name](), ids, False, 1.0, gradient=False)
    for got, wanted in zip(ours, plain, strict=True):
        assert (mx.linalg.norm(got - wanted) / mx.linalg.norm(wanted)).item() < 2e-6


def test_the_cases_of_the_reference_are_there():
    assert len(CASES) == 4


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem.rsplit("__", 1)[-1])
def test_logprobs_entropy_and_gradients_equal_those_of_the_reference(path, entropy, trained):
    """The hidden states are the logits of the case, and the head is the identity."""
    case = dict(np.load(path))
    temperature = json.loads(str(case["meta"]))["hyper"]["temperature"]
    size = case["in_logits"].shape[-1]
    layer = nn.Linear(size, size, bias=False)
    layer.weight = mx.eye(size)
    head = head_of(layer if trained else frozen(layer))
    hidden, ids = mx.array(case["in_logits"]).reshape(-1, size), mx.array(case["in_tokens"]).reshape(-1)
    cotangents = [mx.array(case[name]).reshape(-1) for name in ("in_cot", "in_cot2")]

    def loss(hidden):
        chosen, spread = score(head, hidden, ids, temperature=temperature, entropy=entropy)
        return (chosen * cotangents[0]).sum() + ((spread * cotangents[1]).sum() if entropy else 0)

    chosen, spread = score(head, hidden, ids, temperature=temperature, entropy=entropy)
    got = {"out_logp": chosen}
    if entropy:
        got |= {"out_entropy": spread, "out_grad_logits": mx.grad(loss)(hidden)}
    for name, value in got.items():
        wanted = case[name].reshape(value.shape)
        scale = max(np.abs(wanted).max(), 1e-2 if "grad" in name else 1.0)
        assert (np.abs(np.array(value) - wanted) <= 1e-5 * np.abs(wanted) + 1e-6 * scale).all(), name


def test_three_logits_worked_out_by_hand():
    """z = (0, ln 2, ln 5), so p = (1/8, 2/8, 5/8). log p_1 = -1.386294; H = 0.259930 + 0.346574 + 0.293752 = 0.900256.

    d log p_1 / d z = (-1/8, 6/8, -5/8), and the head is the identity.
    """
    layer = nn.Linear(3, 3, bias=False)
    layer.weight = mx.eye(3)
    head = head_of(frozen(layer))
    hidden = mx.array([[0.0, np.log(2), np.log(5)]])
    chosen, spread = score(head, hidden, mx.array([1]), entropy=True)
    assert chosen.item() == pytest.approx(-1.386294, abs=1e-6)
    assert spread.item() == pytest.approx(0.900256, abs=1e-6)
    gradient = mx.grad(lambda hidden: score(head, hidden, mx.array([1]))[0].sum())(hidden)
    assert np.allclose(np.array(gradient), [[-1 / 8, 6 / 8, -5 / 8]], atol=1e-6)


def test_half_precision_logits_are_upcast_before_the_normaliser():
    """In bfloat16 a likely token's log-prob would round to 0."""
    layer = nn.Linear(1, 2, bias=False)
    layer.weight = mx.array([[6.0], [0.0]], mx.bfloat16)
    chosen, _ = score(head_of(frozen(layer)), mx.ones((1, 1), mx.bfloat16), mx.array([0]))
    # ln(1 / (1 + e^-6)) = -0.00247569
    assert chosen.dtype == mx.float32
    assert chosen.item() == pytest.approx(-0.00247569, rel=1e-4)


def test_no_more_logits_are_asked_for_at_a_time_than_a_chunk_holds():
    seen = []
    layer = frozen(nn.Linear(D, V))

    def project(hidden):
        seen.append(hidden.shape[0])
        return layer(hidden)

    head = Head(lambda tokens: tokens, project, module=lambda: layer)
    mx.eval(score(head, mx.random.normal((N, D)), mx.zeros((N,), mx.int32))[0])
    assert max(seen) == 4
    values = compare(head, mx.random.normal((N, D)), mx.zeros((N, 1)), lambda z, other: (z.max(axis=-1) + other[:, 0],))
    assert values[0].shape == (N,)
    assert max(seen) == 4


def test_a_trained_head_and_its_embedding_get_the_whole_gradient():
    """A tied embedding is looked up in the trunk and multiplied with in the head; both shares add up."""
    p = as_policy(dense(), tokenizer(), lora=LoRA(rank=4, keys=("model.embed_tokens", "self_attn.q_proj")))
    moved(p.model)
    batch = minibatch(4)

    def ours():
        return logprobs(p, batch).token_logprobs.sum()

    def plain():
        ids = mx.concatenate([mx.broadcast_to(batch.prefix, (3, 4)), batch.tokens], axis=1)
        z = p.model(ids)[:, 3:-1]
        log = z - mx.logsumexp(z, axis=-1, keepdims=True)
        return (mx.take_along_axis(log, batch.tokens[..., None], axis=-1)[..., 0] * batch.mask).sum()

    with training(p):
        got, wanted = (nn.value_and_grad(p.model, rule)()[1] for rule in (ours, plain))
    for (name, a), (_, b) in zip(tree_flatten(got), tree_flatten(wanted), strict=True):
        assert mx.linalg.norm(b).item() > 0, name
        assert (mx.linalg.norm(a - b) / mx.linalg.norm(b)).item() < 1e-5, name


@pytest.mark.parametrize("make", [
    dense, hybrid, moe,
    lambda: ready(gemma2.Model(gemma2.ModelArgs(model_type="gemma2", head_dim=16, **SIZES))),
    lambda: ready(cohere.Model(cohere.ModelArgs(
        model_type="cohere", logit_scale=0.3, **{**{k: v for k, v in SIZES.items() if k != "rms_norm_eps"}}))),
    lambda: ready(granite.Model(granite.ModelArgs(
        model_type="granite", logits_scaling=3.0, attention_multiplier=0.1, embedding_multiplier=2.0,
        residual_multiplier=0.5, max_position_embeddings=64, attention_bias=False, mlp_bias=False, rope_theta=1e4,
        **SIZES))),
    lambda: ready(falcon_h1.Model(falcon_h1.ModelArgs(
        **SIZES, head_dim=16, mamba_d_head=16, mamba_d_ssm=64, mamba_d_state=16, mamba_n_heads=4, rope_theta=1e4))),
], ids=["dense", "hybrid", "moe", "gemma2", "cohere", "granite", "falcon_h1"])  # fmt: skip
def test_caps_and_scales_of_known_heads_are_understood(make):
    model = make()
    head = split(model)
    assert head.module()
    ids = mx.array([[3, 1, 4, 1, 5]])
    assert mx.abs(head.project(head.trunk(ids)) - model(ids)).max().item() < 1e-5


def test_a_head_that_is_not_understood_says_so_and_still_scores(recwarn):
    class Strange(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = nn.Embedding(V, D)
            self.out = nn.Linear(D, V)

        def __call__(self, tokens, cache=None):
            return self.out(self.model(tokens)) ** 2

    head = split(Strange())
    assert not head.module()
    assert "not understood" in str(recwarn.pop().message)
    logits = head.trunk(mx.array([[1, 2, 3]]))[0]
    chosen, _ = score(head, logits, mx.array([4, 5, 6]))
    wanted = plainly(head_of(SimpleNamespace(as_linear=lambda x: x)), logits, mx.array([4, 5, 6]), 1.0)[0]
    assert mx.allclose(chosen, wanted, atol=1e-6)
