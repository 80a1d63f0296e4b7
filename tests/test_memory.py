"""What a training pass holds, measured: peaks against depth, tokens and vocabulary, and over many steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest

from helpers import made, minibatch
from mlxrl.algo.recipes import grpo
from mlxrl.algo.terms import KL
from mlxrl.policy import head as module
from mlxrl.policy.head import Head, score
from mlxrl.policy.logprobs import logprobs
from mlxrl.policy.modes import training
from mlxrl.policy.policy import as_policy
from mlxrl.settings import LoRA
from mlxrl.train.pack import pack
from mlxrl.train.step import update
from models import dense, hybrid, tokenizer


def peak(run: Callable[[], Any]) -> int:
    """Bytes above what was there."""
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(run())
    return mx.get_peak_memory() - before


def test_the_head_holds_a_chunk_of_the_logits_and_not_all(monkeypatch):
    """1,024 positions over 16,384 tokens: 64 MiB for each array of logits, three of which a plain head holds."""
    monkeypatch.setattr(module, "CHUNK", 2**20)
    layer = nn.Linear(64, 16_384, bias=False)
    layer.freeze()
    head = Head(lambda tokens: tokens, layer, module=lambda: layer)
    hidden, ids = mx.random.normal((1024, 64)), mx.zeros((1024,), mx.int32)
    mx.eval(layer.parameters(), hidden)

    def plain(hidden: mx.array) -> mx.array:
        z = layer(hidden)
        return (mx.take_along_axis(z, ids[:, None], axis=-1)[:, 0] - mx.logsumexp(z, axis=-1)).sum()

    def chosen(hidden: mx.array) -> mx.array:
        return score(head, hidden, ids)[0].sum()

    def entropy(hidden: mx.array) -> mx.array:
        return score(head, hidden, ids, entropy=True)[1].sum()

    most = peak(lambda: mx.grad(plain)(hidden))
    assert peak(lambda: mx.grad(chosen)(hidden)) < 0.15 * most
    assert peak(lambda: mx.grad(entropy)(hidden)) < 0.3 * most
    assert peak(lambda: score(head, hidden, ids, gradient=False)[0]) < 0.15 * most


@pytest.mark.parametrize(("make", "prefix"), [(dense, 0), (dense, 40), (hybrid, 0)])
def test_with_recomputation_a_layer_more_holds_its_input_and_little_else(make, prefix):
    """A layer's activations are some twenty times its input, which is what recomputation keeps."""
    batch = minibatch(prefix, 64, 4)

    def held(layers: int, recompute: bool) -> int:
        model = make(num_hidden_layers=layers) if make is dense else make(layers)
        p = as_policy(model, tokenizer(), lora=LoRA(rank=2))

        def run() -> Any:
            return nn.value_and_grad(p.model, lambda: logprobs(p, batch).token_logprobs.sum())()

        with training(p, recompute):
            return peak(run)

    plain = held(10, False) - held(4, False)
    assert held(10, True) - held(4, True) < plain / 6


def test_memory_is_flat_over_fifty_steps():
    p, optimizer = as_policy(hybrid(2), tokenizer(), lora=LoRA(rank=2)), optim.AdamW(1e-3)
    algo = grpo(terms=[KL(coefficient=0.1)])
    active = []
    for step in range(51):
        batch = pack([made([1.0, 0.0, 0.4], prompt=70, seed=step % 7)], algo, tokens_per_pass=78)
        update(p, optimizer, batch, algo, recompute=bool(step % 2))
        del batch
        active.append(mx.get_active_memory())
    assert active[50] <= 1.02 * active[5]
