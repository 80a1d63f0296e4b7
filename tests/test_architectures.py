"""Architectures of mlx-lm, each tiny and random: passes, gradients and steps equal those of a plain forward."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from mlx.utils import tree_flatten

from architectures import (
    EVERY,
    GATED,
    a_policy,
    hybrid_moe,
    kimi,
    next_moe,
    windowed_moe,
)
from helpers import by_hand, calls, made, minibatch
from mlxrl.algo.recipes import grpo
from mlxrl.algo.terms import KL
from mlxrl.policy import gated_delta
from mlxrl.policy.logprobs import logprobs
from mlxrl.policy.lora import without_adapters
from mlxrl.policy.modes import training
from mlxrl.settings import Train
from mlxrl.train.batch import make_batch
from mlxrl.train.gradient import gradient
from mlxrl.train.update import complete, update
from models import moe, ready

EXPERT = [moe, windowed_moe, hybrid_moe, next_moe, kimi]
TOLERANCES = {next_moe: 1e-3}
"""Its gradient moves by 1e-5 to 1e-4 when its random weights move by 1e-7 of themselves."""


@pytest.mark.parametrize("prefix", [9, 0])
@pytest.mark.parametrize("make", EVERY)
def test_values_and_gradients_equal_those_of_a_plain_forward(make, prefix, monkeypatch):
    p = a_policy(make)
    batch = minibatch(prefix, prompt=0 if prefix else 2)
    weight = mx.random.normal(batch.tokens.shape, key=mx.random.key(3)) * batch.mask
    used = calls(monkeypatch, gated_delta, "gated_delta")
    with training(p):
        got = nn.value_and_grad(p.model, lambda: (logprobs(p, batch).token_logprobs * weight).sum())()
    assert bool(used) == (make in GATED)
    p.model.train()
    wanted = nn.value_and_grad(p.model, lambda: (by_hand(p.model, batch) * weight).sum())()
    assert got[0].item() == pytest.approx(wanted[0].item(), rel=1e-4)
    for (name, a), (_, b) in zip(tree_flatten(got[1]), tree_flatten(wanted[1]), strict=True):
        assert (mx.linalg.norm(a - b) <= TOLERANCES.get(make, 2e-5) * mx.linalg.norm(b) + 1e-7).item(), name


@pytest.mark.parametrize("make", EXPERT)
def test_a_step_moves_the_experts_adapters_and_leaves_the_router(make):
    p, algorithm = a_policy(make, move=False), grpo(terms=[KL(coefficient=0.1)])
    routers = {n: mx.array(v) for n, v in tree_flatten(p.model.parameters()) if "gate.weight" in n or "router" in n}
    assert routers
    batch = make_batch([made([1.0, 0.0, 0.3])], algorithm)
    metrics = update(p, optim.SGD(1e-1), batch, algorithm)
    assert metrics["updates/skipped"] == 0.0
    assert metrics["kl"] == 0.0  # the reference is the base, and so is a fresh adapter
    moved_leaves = [n for n, v in tree_flatten(p.model.trainable_parameters()) if "lora_b" in n and mx.abs(v).max() > 0]
    assert any("experts" in name or "switch_mlp" in name for name in moved_leaves)
    now = dict(tree_flatten(p.model.parameters()))
    assert all(mx.array_equal(now[name], value) for name, value in routers.items())


@pytest.mark.parametrize("make", EXPERT)
def test_the_reference_of_experts_is_the_base_bit_for_bit(make):
    ids = mx.array([[1, 2, 3, 4, 5, 6, 7, 8]])
    mx.random.seed(0)
    base = ready(make())(ids)
    p = a_policy(make)
    assert not mx.array_equal(p.model(ids), base)
    with without_adapters(p):
        assert mx.array_equal(p.model(ids), base)


@pytest.mark.parametrize("make", EVERY)
def test_a_group_in_several_passes_has_the_gradient_of_one(make):
    """Caches of every kind carry the prompt to the passes, and its gradient back; so does the reference."""
    p, algorithm = a_policy(make), grpo(terms=[KL(coefficient=0.1)])
    group = [made([1.0, 0.0, 0.4], lengths=[6, 6, 6])]
    whole, split = (
        complete(p, make_batch(group, algorithm, Train(tokens_per_pass=tokens)), algorithm, frozenset({"reference"}))
        for tokens in (None, 97)
    )
    assert (len(whole), len(split)) == (1, 3)
    wanted, got = (dict(tree_flatten(gradient(p, batch, algorithm)[1])) for batch in (whole, split))
    again = dict(tree_flatten(gradient(p, split, algorithm, recompute=True)[1]))
    tolerance = TOLERANCES.get(make, 2e-5)
    for name, value in wanted.items():
        assert (mx.linalg.norm(got[name] - value) <= tolerance * mx.linalg.norm(value) + 1e-7).item(), name
        assert mx.array_equal(again[name], got[name]), name
