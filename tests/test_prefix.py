"""A prompt that runs once, in caches that keep its graph."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest
from helpers import by_hand, minibatch, moved
from mlx.utils import tree_flatten

from mlxrl.policy.logprobs import logprobs
from mlxrl.policy.modes import training
from mlxrl.policy.policy import as_policy
from mlxrl.settings import LoRA
from models import dense, hybrid, moe, tokenizer


@pytest.mark.parametrize("make", [dense, hybrid, moe])
@pytest.mark.parametrize("prefix", [5, 0])
def test_gradients_through_the_prefix_equal_those_of_a_plain_forward(make, prefix):
    """The prompt's share of the gradient comes back through the shared caches."""
    p = as_policy(make(), tokenizer(), lora=LoRA())
    moved(p.model)
    batch = minibatch(prefix, prompt=0 if prefix else 2)
    weight = mx.random.normal(batch.tokens.shape, key=mx.random.key(3)) * batch.mask
    with training(p):
        ours = nn.value_and_grad(p.model, lambda: (logprobs(p, batch).token_logprobs * weight).sum())()[1]
        plain = nn.value_and_grad(p.model, lambda: (by_hand(p.model, batch) * weight).sum())()[1]
    for (name, got), (_, wanted) in zip(tree_flatten(ours), tree_flatten(plain), strict=True):
        assert mx.abs(wanted).max().item() > 0, name
        assert (mx.linalg.norm(got - wanted) / mx.linalg.norm(wanted)).item() < 1e-5, name
