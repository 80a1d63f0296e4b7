"""Adapters that are merged while a policy decodes."""

from __future__ import annotations

import contextlib

import mlx.core as mx
import pytest
from mlx_lm.tuner.lora import LoRALinear

from helpers import moved
from mlxrl.policy.merged_lora import MergedLinear
from mlxrl.policy.modes import decoding
from mlxrl.policy.policy import as_policy
from mlxrl.settings import LoRA
from models import dense, hybrid, moe, tokenizer


def layers(model, kind):
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, kind)}


@pytest.mark.parametrize("make", [dense, hybrid, moe])
def test_merged_adapters_give_the_logits_of_the_plain_ones_and_leave_no_trace(make):
    p = as_policy(make(), tokenizer(), lora=LoRA())
    moved(p, scale=0.05)
    ids = mx.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    before, plain = layers(p.model, LoRALinear), p.model(ids)
    with contextlib.suppress(KeyboardInterrupt), decoding(p) as merged:
        assert len(layers(p.model, MergedLinear)) == len(before) > 0
        assert mx.abs(merged.head.project(merged.head.trunk(ids)) - plain).max().item() < 1e-5
        raise KeyboardInterrupt
    now = layers(p.model, LoRALinear)
    assert len(now) == len(before)
    assert all(now[name] is layer for name, layer in before.items())
    assert mx.array_equal(p.model(ids), plain)


def test_layers_that_read_one_input_multiply_it_by_their_adapters_once():
    """Queries and keys: one product with both ranks of 4."""
    p = as_policy(
        dense(num_hidden_layers=1), tokenizer(), lora=LoRA(rank=4, keys=("self_attn.q_proj", "self_attn.k_proj"))
    )
    with decoding(p):
        found = layers(p.model, MergedLinear)
        assert {layer.a.shape for layer in found.values()} == {(64, 8)}
        first, second = found.values()
        assert first.a is second.a


def test_merged_adapters_keep_the_dtype_of_16_bit_weights():
    model = dense()
    model.set_dtype(mx.bfloat16)
    p = as_policy(model, tokenizer(), lora=LoRA())
    moved(p, scale=0.02)
    assert p.model.layers[0].self_attn.q_proj.lora_a.dtype == mx.float32
    ids = mx.array([[3, 1, 4]])
    plain = p.model(ids)
    with decoding(p) as merged:
        found = merged.head.project(merged.head.trunk(ids))
        assert found.dtype == plain.dtype == mx.bfloat16
        assert mx.abs(found - plain).max().item() < 0.02 * mx.abs(plain).max().item()


def test_nothing_of_a_pass_is_kept():
    """The input and its product are let go of after each pass."""
    p = as_policy(dense(), tokenizer(), lora=LoRA())
    with decoding(p) as merged:
        mx.eval(merged.head.project(merged.head.trunk(mx.array([[1, 2]]))))
        mx.synchronize()
        before = mx.get_active_memory()
        mx.eval(merged.head.project(merged.head.trunk(mx.zeros((4, 400), mx.int32))))
        mx.synchronize()
        assert mx.get_active_memory() <= before
