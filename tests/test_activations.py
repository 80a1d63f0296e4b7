"""SwiGLU that keeps less for the backward pass, with mlx-lm's values."""

from __future__ import annotations

from contextlib import ExitStack

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import activations as theirs
from mlx_lm.models import qwen3, switch_layers

from helpers import assert_same_gradient, calls, minibatch, moved
from mlxrl.policy import recompute as ours
from mlxrl.policy.logprobs import logprobs
from mlxrl.policy.modes import training
from mlxrl.policy.policy import as_policy
from mlxrl.policy.recompute import memory_efficient, swiglu, swiglu_keeping
from mlxrl.settings import LoRA
from models import dense, hybrid, moe, tokenizer


def variant(keeping: bool):
    return lambda gate, up: swiglu_keeping(keeping)(gate, up)[0]


@pytest.mark.parametrize("keeping", [True, False])
def test_gradients_worked_out_by_hand(keeping):
    """gate ln 3: s = 3/4, silu = 0.823959; d/d gate = up s (1 + gate (1 - s)) = 2 * 0.75 * 1.274653 = 1.911980."""
    gate, up = mx.array([np.log(3)], mx.float32), mx.array([2.0])
    value, (by_gate, by_up) = mx.value_and_grad(lambda a, b: variant(keeping)(a, b).sum(), argnums=(0, 1))(gate, up)
    assert value.item() == pytest.approx(1.647918, rel=1e-6)
    assert by_gate.item() == pytest.approx(1.911980, rel=1e-6)
    assert by_up.item() == pytest.approx(0.823959, rel=1e-6)


@pytest.mark.parametrize("keeping", [True, False])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_values_are_those_of_mlx_lm_bit_for_bit_and_gradients_to_rounding(dtype, keeping):
    gated = variant(keeping)
    keys = mx.random.split(mx.random.key(0), 3)
    gate, up, weigh = ((4 * mx.random.normal((50, 30), key=key)).astype(dtype) for key in keys)
    assert mx.array_equal(gated(gate, up), theirs.swiglu(gate, up))
    found = [
        mx.grad(lambda a, b, f=f: (f(a, b) * weigh).sum(), argnums=(0, 1))(gate, up) for f in (gated, theirs.swiglu)
    ]
    for got, wanted in zip(*found, strict=True):
        assert got.dtype == dtype
        assert (mx.linalg.norm(got - wanted) / mx.linalg.norm(wanted)).item() < (1e-6 if dtype == mx.float32 else 1e-2)
    large = mx.grad(lambda a: gated(a, mx.ones(2)).sum())(mx.array([-200.0, 200.0]))
    assert large.tolist() == [0.0, 1.0]


@pytest.mark.parametrize(("make", "user"), [(dense, qwen3), (moe, switch_layers)])
def test_installed_where_a_model_uses_it_and_restored_in_any_order(make, user, monkeypatch):
    model = make()
    with memory_efficient(model):
        assert user.swiglu is swiglu
        with memory_efficient(model):
            assert user.swiglu is swiglu
        assert user.swiglu is swiglu
    assert user.swiglu is theirs.swiglu
    first, second = ExitStack(), ExitStack()
    first.enter_context(memory_efficient(model))
    second.enter_context(memory_efficient(model))
    first.close()
    assert user.swiglu is swiglu
    second.close()
    assert user.swiglu is theirs.swiglu
    with pytest.raises(RuntimeError), memory_efficient(model):
        raise RuntimeError
    assert user.swiglu is theirs.swiglu
    used = calls(monkeypatch, ours, "swiglu")
    with memory_efficient(model):
        mx.eval(model(mx.array([[1, 2, 3]])))
    assert len(used) == 2


@pytest.mark.parametrize("make", [dense, hybrid, moe])
def test_training_passes_use_it_with_the_gradient_of_autodiff(make, monkeypatch):
    p = as_policy(make(), tokenizer(), lora=LoRA())
    moved(p.model)
    batch = minibatch(5)
    weigh = mx.random.normal(batch.tokens.shape, key=mx.random.key(3)) * batch.mask
    used = calls(monkeypatch, ours, "swiglu")
    with training(p):
        got = nn.value_and_grad(p.model, lambda: (logprobs(p, batch).token_logprobs * weigh).sum())()
    assert len(used) == 2 * len(p.model.layers)
    monkeypatch.setattr(ours, "swiglu", theirs.swiglu)
    with training(p):
        wanted = nn.value_and_grad(p.model, lambda: (logprobs(p, batch).token_logprobs * weigh).sum())()
    assert got[0].item() == wanted[0].item()
    assert_same_gradient(got[1], wanted[1], 1e-5)


def test_two_or_three_arrays_are_kept_instead_of_four():
    """Twelve more activations in a chain, each of a gate and an up of its own."""
    keys = mx.random.split(mx.random.key(0), 48)
    x = mx.random.normal((256, 256), key=keys[0])
    weights = [0.06 * mx.random.normal((256, 256), key=key) for key in keys]
    mx.eval(x, weights)

    def kept(rule, links: int) -> float:
        def loss(x):
            for a, b in zip(weights[:links], weights[24 : 24 + links], strict=True):
                x = rule(x @ a, x @ b)
            return x.sum()

        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(mx.grad(loss)(x))
        return (mx.get_peak_memory() - before) / x.nbytes

    for rule, arrays in ((theirs.swiglu, 4), (variant(True), 3), (variant(False), 2)):
        assert kept(rule, 24) - kept(rule, 12) == pytest.approx(12 * arrays, abs=5)  # MLX allocates a few ahead
