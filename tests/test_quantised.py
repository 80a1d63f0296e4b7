"""Quantised bases: adapters in float32, activations in the base's dtype, log-probs in float32."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from mlx.utils import tree_flatten

from helpers import flat, made, moved
from mlxrl.algo.recipes import grpo
from mlxrl.algo.terms import KL
from mlxrl.policy.policy import Policy, as_policy
from mlxrl.policy.prefix import hidden_states
from mlxrl.settings import LoRA, Train
from mlxrl.train.batch import make_batch
from mlxrl.train.gradient import gradient
from mlxrl.train.update import complete, update
from models import dense, hybrid, moe, tokenizer

BASES = [{"bits": 4, "group_size": 32}, {"bits": 8, "group_size": 32}, {"bits": 4, "group_size": 32, "mode": "mxfp4"}]


def quantised(make: Any, base: dict[str, Any]) -> Policy:
    model = make()
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, **base, class_predicate=lambda _, m: hasattr(m, "to_quantized") and m.weight.shape[-1] % 32 == 0)
    return as_policy(model, tokenizer(), lora=LoRA(rank=4))


@pytest.mark.parametrize("base", BASES, ids=lambda base: base.get("mode", f"{base['bits']} bits"))
@pytest.mark.parametrize("make", [dense, hybrid, moe])
def test_train_and_reference_agree_at_step_0_and_a_step_moves_float32_adapters(make, base):
    p, algorithm = quantised(make, base), grpo(terms=[KL(coefficient=0.1)])
    kinds = {type(m).__name__ for _, m in p.model.named_modules()}
    assert kinds & {"QuantizedLinear", "QuantizedEmbedding"}
    weights = {n: v for n, v in tree_flatten(p.model.parameters()) if "lora" not in n}
    batch = complete(p, make_batch([made([1.0, 0.0, 0.4])], algorithm), algorithm, frozenset({"old", "reference"}))
    (m,) = batch
    assert m.old_logprobs.dtype == m.reference_logprobs.dtype == mx.float32
    assert mx.array_equal(m.old_logprobs, m.reference_logprobs)
    metrics, found = gradient(p, batch, algorithm)
    assert metrics["kl"] == 0.0
    assert all(leaf.dtype == mx.float32 for leaf in flat(found).values())
    _, rows = hidden_states(p, m)
    assert rows.dtype == mx.bfloat16
    assert update(p, optim.SGD(1e-1), batch, algorithm)["updates/skipped"] == 0.0
    moved = [leaf for name, leaf in flat(p.model.trainable_parameters()).items() if "lora_b" in name]
    assert all(leaf.dtype == mx.float32 and mx.abs(leaf).max() > 0 for leaf in moved)
    now = dict(tree_flatten(p.model.parameters()))
    assert all(now[name] is value for name, value in weights.items())


@pytest.mark.parametrize("make", [dense, hybrid])
def test_recomputation_and_splitting_leave_the_gradient_of_a_quantised_base(make):
    """In float32 activations, where both have to agree to rounding."""
    model = make()
    nn.quantize(model, group_size=32, bits=4)
    p, algorithm = as_policy(model, tokenizer(), lora=LoRA(rank=4)), grpo()
    update(p, optim.SGD(1.0), make_batch([made([1.0, 0.0, 0.4])], algorithm), algorithm)
    group = [made([1.0, 0.0, 0.4, 0.2], seed=3)]
    wanted = flat(gradient(p, make_batch(group, algorithm), algorithm)[1])
    split = flat(gradient(p, make_batch(group, algorithm, Train(tokens_per_pass=95)), algorithm, recompute=True)[1])
    for name, value in wanted.items():
        assert mx.linalg.norm(value).item() > 0, name
        assert (mx.linalg.norm(split[name] - value) / mx.linalg.norm(value)).item() < 1e-5, name


@pytest.mark.parametrize("base", BASES, ids=lambda base: base.get("mode", f"{base['bits']} bits"))
@pytest.mark.parametrize("make", [dense, hybrid])
def test_a_group_in_several_passes_has_the_gradient_of_one_in_half_precision(make, base):
    """The prefix's caches are bfloat16, and so is their gradient: the two agree as well as bfloat16 can."""
    p, algorithm = quantised(make, base), grpo()
    moved(p)
    group = [made([1.0, 0.0, 0.4, 0.2], seed=3)]
    wanted = flat(gradient(p, make_batch(group, algorithm), algorithm)[1])
    for recompute in (False, True):
        batch = make_batch(group, algorithm, Train(tokens_per_pass=95))
        assert len(batch) > 1
        got = flat(gradient(p, batch, algorithm, recompute=recompute)[1])
        for name, value in wanted.items():
            cosine = (got[name] * value).sum() / (mx.linalg.norm(got[name]) * mx.linalg.norm(value))
            assert cosine.item() > 0.99, name
