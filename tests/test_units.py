"""Rows of a group in several chunks against one run of its prompt."""

from __future__ import annotations

import dataclasses
from typing import Any

import mlx.core as mx
import pytest

from families import family
from helpers import a_policy, assert_same_gradient, flat, made
from mlxrl.algo.recipes import grpo
from mlxrl.algo.terms import KL
from mlxrl.policy.policy import Policy
from mlxrl.train import pack as packing
from mlxrl.train.pack import pack
from mlxrl.train.step import fill, gradient
from mlxrl.train.units import units
from mlxrl.types import Batch
from models import dense, hybrid, moe

REWARDS = [1.0, 0.0, 0.0, 1.0, 0.2]


def counting(p: Policy) -> tuple[Policy, list[tuple[int, ...]]]:
    """The policy, and the shapes of the tokens that its trunk will have run."""
    seen: list[tuple[int, ...]] = []
    trunk = p.head.trunk

    def counted(tokens: mx.array, cache: Any = None) -> mx.array:
        seen.append(tuple(tokens.shape))
        return trunk(tokens, cache)

    return dataclasses.replace(p, head=dataclasses.replace(p.head, trunk=counted)), seen


def batches(kl: float = 0.0, prompt: int = 90) -> tuple[Any, Batch, Batch]:
    algo = grpo(terms=[KL(coefficient=kl)] if kl else [])
    groups = [made(REWARDS, prompt=prompt, seed=1)]
    return algo, pack(groups, algo), pack(groups, algo, tokens_per_pass=prompt + 10)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("make", [dense, hybrid, moe])
def test_gradients_and_metrics_are_those_of_the_group_in_one_pass(make, recompute):
    p, (algo, whole, split) = a_policy(make), batches(kl=0.1)
    assert len(whole) == 1
    assert [len(unit) for unit in units(split.micro_batches)] == [4]
    filled = fill(p, whole, frozenset({"reference"}))
    metrics, wanted = gradient(p, filled, algo)
    more, got = gradient(p, fill(p, split, frozenset({"reference"})), algo, recompute=recompute)
    assert_same_gradient(got, wanted)
    assert set(more) == set(metrics)
    for name, value in metrics.items():
        assert more[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("make", [dense, hybrid])
def test_recomputation_of_a_split_group_is_bit_for_bit_the_same(make):
    p, (algo, _, split) = a_policy(make), batches()
    plain, again = (gradient(p, split, algo, recompute=recompute)[1] for recompute in (False, True))
    for name, value in flat(plain).items():
        assert mx.array_equal(flat(again)[name], value), name


@pytest.mark.parametrize("make", [dense, hybrid])
def test_the_prefix_runs_once_however_many_chunks_there_are(make):
    p, (algo, _, split) = a_policy(make), batches()
    p, seen = counting(p)
    gradient(p, split, algo)
    assert seen.count((1, 90)) == 1
    assert seen[0] == (1, 90)
    # Rows of 3 to 7 tokens, at most 10 padded tokens a chunk: 3 | 4 5 | 6 | 7. The last token predicts nothing.
    assert seen[1:] == [(1, 2), (2, 4), (1, 5), (1, 6)]
    seen.clear()
    fill(p, split, frozenset({"old", "reference"}))
    assert seen.count((1, 90)) == 2  # once with adapters, once without
    assert len(seen) == 10


def test_a_prompt_kept_for_the_reference_is_not_taken_for_the_policy():
    """Both passes start from the same ids; their caches differ, and so do their log-probs."""
    p, (_, whole, split) = a_policy(), batches()
    both = fill(p, split, frozenset({"old", "reference"}))
    alone = fill(p, whole, frozenset({"old"})), fill(p, whole, frozenset({"reference"}))
    for split_name, one in (("old_logprobs", alone[0]), ("reference_logprobs", alone[1])):
        rows = {row: (m, place) for m in both for place, row in enumerate(m.trajectories)}
        (m,) = one.micro_batches
        for place, row in enumerate(m.trajectories):
            part, where = rows[row]
            length = int(part.mask[where].sum().item())
            got = getattr(part, split_name)[where, :length]
            assert mx.allclose(got, getattr(m, split_name)[place, :length], atol=1e-5)
    assert mx.abs(both.micro_batches[0].old_logprobs - both.micro_batches[0].reference_logprobs).max().item() > 1e-3


def test_neighbours_are_one_unit_only_with_the_same_prefix():
    algo = grpo()
    groups = [made(REWARDS, seed=1), made(REWARDS, seed=1), made(REWARDS, prompt=5, seed=2)]
    split = pack(groups, algo, tokens_per_pass=100)
    sizes = [len(unit) for unit in units(split.micro_batches)]
    assert sizes[:2] == [4, 4]  # the same prompt twice stays two groups
    assert set(sizes[2:]) == {1}
    assert sum(sizes) == len(split)


@pytest.mark.parametrize("make", [dense, hybrid])
def test_memory_of_a_split_group_is_that_of_its_prompt_and_one_chunk(make):
    """Eight rows in chunks of two: about a quarter of the rows' activations."""
    p, algo = a_policy(make), grpo()
    group = made([1.0, 0.0] * 4, prompt=40, lengths=[80] * 8)

    def peak(tokens_per_pass: int) -> int:
        batch = pack([group], algo, tokens_per_pass=tokens_per_pass)
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        gradient(p, batch, algo)
        return mx.get_peak_memory() - before

    assert peak(40 + 160) < 0.5 * peak(10_000)


def test_a_model_whose_caches_cannot_carry_a_prompt_reads_it_with_every_row(monkeypatch):
    """llama4's chunked caches: the same gradient as rows that stand with their prompt."""
    p, (algo, whole, split) = a_policy(lambda: family("llama4")), batches(kl=0.1)
    assert not p.shares_prefix
    assert min(len(whole), len(split) - 1) >= 1
    monkeypatch.setattr(packing, "SHARE_FROM", 10**9)
    _, apart, _ = batches(kl=0.1)
    assert all(minibatch.prefix.size == 0 for minibatch in apart)
    filled = [fill(p, batch, frozenset({"reference"})) for batch in (apart, whole, split)]
    wanted, *others = [gradient(p, batch, algo)[1] for batch in filled]
    for got in others:
        assert_same_gradient(got, wanted)
