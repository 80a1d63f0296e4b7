"""A prompt that runs once, in caches that keep its graph."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import cache as caches_of_mlx_lm

from families import family
from helpers import a_policy, by_hand, calls, minibatch, moved
from mlxrl.policy.logprobs import logprobs
from mlxrl.policy.modes import scoring, training
from mlxrl.policy.policy import as_policy
from mlxrl.policy.prefix import hidden_states, run_prefix
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


@pytest.mark.parametrize("make", [dense, hybrid, moe])
def test_passes_may_share_a_run_and_leave_it_as_it_was(make):
    p, batch = a_policy(make), minibatch(5)
    with scoring(p):
        alone = logprobs(p, batch).token_logprobs
        run = run_prefix(p, batch.prefix)
        for _ in range(2):
            assert mx.array_equal(logprobs(p, batch, prefix=run).token_logprobs, alone)
    with scoring(p, adapters=False):
        of_the_base = run_prefix(p, batch.prefix)
        assert mx.abs(logprobs(p, batch, prefix=of_the_base).token_logprobs - alone).max().item() > 1e-3


def test_caches_are_made_once_for_a_run(monkeypatch):
    p, batch = a_policy(), minibatch(5)
    made = calls(monkeypatch, caches_of_mlx_lm, "make_prompt_cache")
    with scoring(p):
        logprobs(p, batch)
        assert len(made) == 1
        run = run_prefix(p, batch.prefix)
        logprobs(p, batch, prefix=run)
        logprobs(p, batch, prefix=run)
        assert len(made) == 2
        logprobs(p, minibatch(0, prompt=2))
        assert len(made) == 2


def test_a_model_whose_caches_cannot_carry_a_prefix_makes_none(monkeypatch):
    p, batch = as_policy(family("llama4"), tokenizer(), lora=LoRA()), minibatch(5)
    assert not p.shares_prefix
    made = calls(monkeypatch, caches_of_mlx_lm, "make_prompt_cache")
    with scoring(p):
        assert mx.abs(logprobs(p, batch).token_logprobs - by_hand(p.model, batch)).max().item() < 2e-5
    assert not made


def test_hidden_states_are_those_that_predict():
    """[D] of the prefix's last token; [B, T-1, D] of the sequences, whose last token predicts nothing."""
    p, batch = a_policy(), minibatch(5, tokens=7, rows=3)
    with scoring(p):
        last, rows = hidden_states(p, batch)
        whole = p.head.trunk(mx.concatenate([mx.broadcast_to(batch.prefix, (3, 5)), batch.tokens], axis=1))
        assert mx.allclose(last, whole[0, 4], atol=1e-5)
        assert mx.allclose(rows, whole[:, 5:-1], atol=1e-5)
        single = minibatch(5, tokens=1, rows=1)
        last, rows = hidden_states(p, single)
        assert (last.shape, rows.shape) == ((64,), (1, 0, 64))
        assert hidden_states(p, minibatch(0, prompt=2))[0] is None
