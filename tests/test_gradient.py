"""The gradient of a batch: the same however its sequences are laid out in passes, a shared prefix run once."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from families import family
from helpers import a_policy, assert_same_gradient, counted, flat, made, rows
from mlxrl import train
from mlxrl.algo.recipes import dr_grpo, grpo, rloo
from mlxrl.algo.terms import KL
from mlxrl.policy.prefix import by_prefix
from mlxrl.settings import Train
from mlxrl.train.batch import SHARE_FROM, make_batch
from mlxrl.train.gradient import gradient
from mlxrl.train.update import complete
from mlxrl.types import Batch
from models import dense, hybrid, moe

MODELS = [dense, hybrid, moe]


RECIPES = [grpo, dr_grpo, rloo]


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("prompt", [1, 90])
def test_the_ratio_is_exactly_one_on_policy(make, prompt):
    p = a_policy(make)
    algorithm = grpo()
    batch = make_batch([made([1.0, 0.0, 0.4], prompt=prompt)], algorithm)
    assert (batch.micro_batches[0].prefix.size > 0) == (prompt * 2 >= SHARE_FROM)
    assert gradient(p, batch, algorithm)[0]["ratio/mean"] == pytest.approx(1.0, abs=1e-6)
    assert gradient(p, batch, algorithm)[0]["ratio/max"] == 1.0
    old = complete(p, batch, algorithm, frozenset({"old"}))
    assert gradient(p, old, algorithm)[0]["ratio/max"] == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_do_not_depend_on_sharing_passes_or_the_order_of_sequences(make, recipe, monkeypatch):
    p, algorithm = a_policy(make), recipe()
    groups = [made([1.0, 0.0, 0.0, 1.0, 0.2], seed=1), made([0.0, 1.0, 0.3], prompt=70, seed=2)]
    whole = make_batch(groups, algorithm)
    assert [m.prefix.size for m in whole] == [90, 70]
    metrics, wanted = gradient(p, whole, algorithm)
    for tokens in (1, 90, 105):
        split = make_batch(groups, algorithm, Train(tokens_per_pass=tokens))
        assert len(split) > 2
        more, got = gradient(p, split, algorithm)
        assert_same_gradient(got, wanted)
        assert more["loss"] == pytest.approx(metrics["loss"], abs=1e-6)
    shuffled = [tuple(reversed(groups[1])), groups[0][2:] + groups[0][:2]]
    assert_same_gradient(gradient(p, make_batch(shuffled, algorithm), algorithm)[1], wanted)
    monkeypatch.setattr(train.batch, "SHARE_FROM", 10**9)
    repeated = make_batch(groups, algorithm)
    assert {m.prefix.size for m in repeated} == {0}
    assert_same_gradient(gradient(p, repeated, algorithm)[1], wanted)


@pytest.mark.parametrize("pad", [7, 64])
def test_gradients_do_not_depend_on_padding(pad):
    p, algorithm = a_policy(hybrid), grpo()
    batch = make_batch([made([1.0, 0.0, 0.4])], algorithm)

    def padded(array):
        return None if array is None else mx.pad(array, [(0, 0), (0, pad)])

    wide = dataclasses.replace(
        batch,
        micro_batches=tuple(
            dataclasses.replace(
                m, tokens=padded(m.tokens), mask=padded(m.mask), advantages=padded(m.advantages),
                sampler_logprobs=padded(m.sampler_logprobs),
            )
            for m in batch
        ),
    )  # fmt: skip
    assert_same_gradient(gradient(p, wide, algorithm)[1], gradient(p, batch, algorithm)[1])


def test_the_reference_is_the_base_and_its_kl_starts_at_zero():
    fresh, algorithm = a_policy(move=False), grpo(terms=[KL(coefficient=0.1)])
    batch = complete(fresh, make_batch([made([1.0, 0.0])], algorithm), algorithm, frozenset({"reference"}))
    assert gradient(fresh, batch, algorithm)[0]["kl"] == 0.0
    p = a_policy()
    batch = complete(p, make_batch([made([1.0, 0.0])], algorithm), algorithm, frozenset({"reference"}))
    assert gradient(p, batch, algorithm)[0]["kl"] > 0.0


def test_no_gradient_comes_from_tokens_that_are_clipped():
    p, algorithm = a_policy(), grpo(clip=(0.2, 0.28))
    batch = complete(p, make_batch([made([1.0, 0.0], lengths=[3, 3])], algorithm), algorithm, frozenset({"old"}))
    (m,) = batch
    good = np.array([number == 0 for number in m.trajectories])[:, None] & (np.array(m.mask) > 0)

    def shifted(by: float) -> Batch:
        """The rewarded sequence's ratio is exp(by), the other's exp(-by)."""
        old = m.old_logprobs - mx.array(np.where(good, by, -by))
        return dataclasses.replace(batch, micro_batches=(dataclasses.replace(m, old_logprobs=old),))

    metrics, clipped = gradient(p, shifted(math.log(1.5)), algorithm)
    assert metrics["clip_ratio/high_mean"] == metrics["clip_ratio/low_mean"] == pytest.approx(0.5)
    assert all(mx.abs(leaf).max().item() == 0 for leaf in flat(clipped).values())
    metrics, free = gradient(p, shifted(math.log(1.1)), algorithm)
    assert metrics["clip_ratio/high_mean"] == metrics["clip_ratio/low_mean"] == 0
    assert all(mx.abs(leaf).max().item() > 0 for leaf in flat(free).values())
    # Only the rewarded sequence is clipped: the other's gradient is all that is left.
    half = dataclasses.replace(m, old_logprobs=m.old_logprobs - mx.array(np.where(good, math.log(1.5), 0.0)))
    alone = dataclasses.replace(m, advantages=mx.where(mx.array(good), 0.0, m.advantages))
    got, wanted = (gradient(p, dataclasses.replace(batch, micro_batches=(one,)), algorithm)[1] for one in (half, alone))
    assert_same_gradient(got, wanted)


REWARDS = [1.0, 0.0, 0.0, 1.0, 0.2]


def batches(kl: float = 0.0) -> tuple[Any, Batch, Batch]:
    """An algorithm and a group over a prompt of 90 tokens: in one pass, and in passes of 100 tokens."""
    algorithm = grpo(terms=[KL(coefficient=kl)] if kl else [])
    groups = [made(REWARDS, seed=1)]
    return algorithm, make_batch(groups, algorithm), make_batch(groups, algorithm, Train(tokens_per_pass=100))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("make", [dense, hybrid, moe])
def test_gradients_and_metrics_are_those_of_the_group_in_one_pass(make, recompute):
    p, (algorithm, whole, split) = a_policy(make), batches(kl=0.1)
    assert len(whole) == 1
    assert [len(together) for together in by_prefix(split.micro_batches)] == [4]
    filled = complete(p, whole, algorithm, frozenset({"reference"}))
    metrics, wanted = gradient(p, filled, algorithm)
    more, got = gradient(p, complete(p, split, algorithm, frozenset({"reference"})), algorithm, recompute=recompute)
    assert_same_gradient(got, wanted)
    assert set(more) == set(metrics)
    for name, value in metrics.items():
        assert more[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("make", [dense, hybrid])
def test_recomputation_of_a_split_group_is_bit_for_bit_the_same(make):
    p, (algorithm, _, split) = a_policy(make), batches()
    plain, again = (gradient(p, split, algorithm, recompute=recompute)[1] for recompute in (False, True))
    for name, value in flat(plain).items():
        assert mx.array_equal(flat(again)[name], value), name


@pytest.mark.parametrize("make", [dense, hybrid])
def test_the_prefix_runs_once_however_many_passes_there_are(make):
    p, (algorithm, _, split) = a_policy(make), batches()
    p, seen = counted(p)
    gradient(p, split, algorithm)
    assert seen.count((1, 90)) == 1
    assert seen[0] == (1, 90)
    # Sequences of 3 to 7 tokens, at most 10 padded tokens a pass: 3 | 4 5 | 6 | 7. The last token predicts nothing.
    assert seen[1:] == [(1, 2), (2, 4), (1, 5), (1, 6)]
    seen.clear()
    complete(p, split, algorithm, frozenset({"old", "reference"}))
    assert seen.count((1, 90)) == 2  # once with adapters, once without
    assert len(seen) == 10


def test_a_prompt_kept_for_the_reference_is_not_taken_for_the_policy():
    """Both passes start from the same ids; their caches differ, and so do their log-probs."""
    p, (algorithm, whole, split) = a_policy(), batches()
    both = complete(p, split, algorithm, frozenset({"old", "reference"}))
    alone = complete(p, whole, algorithm, frozenset({"old"})), complete(p, whole, algorithm, frozenset({"reference"}))
    for name, one in (("old_logprobs", alone[0]), ("reference_logprobs", alone[1])):
        got, wanted = rows(both, name), rows(one, name)
        assert got.keys() == wanted.keys()
        for number, values in wanted.items():
            np.testing.assert_allclose(got[number], values, rtol=0, atol=1e-5)
    assert mx.abs(both.micro_batches[0].old_logprobs - both.micro_batches[0].reference_logprobs).max().item() > 1e-3


def test_neighbours_go_together_only_with_the_same_prefix():
    algorithm = grpo()
    groups = [made(REWARDS, seed=1), made(REWARDS, seed=1), made(REWARDS, prompt=5, seed=2)]
    split = make_batch(groups, algorithm, Train(tokens_per_pass=100))
    sizes = [len(together) for together in by_prefix(split.micro_batches)]
    assert sizes[:2] == [4, 4]  # the same prompt twice stays two groups
    assert set(sizes[2:]) == {1}
    assert sum(sizes) == len(split)


def test_a_model_whose_caches_cannot_carry_a_prompt_reads_it_with_every_sequence(monkeypatch):
    """llama4's chunked caches: the same gradient as sequences that stand with their prompt."""
    p, (algorithm, whole, split) = a_policy(lambda: family("llama4")), batches(kl=0.1)
    assert not p.shares_prefix
    assert min(len(whole), len(split) - 1) >= 1
    monkeypatch.setattr(train.batch, "SHARE_FROM", 10**9)
    _, apart, _ = batches(kl=0.1)
    assert all(m.prefix.size == 0 for m in apart)
    filled = [complete(p, batch, algorithm, frozenset({"reference"})) for batch in (apart, whole, split)]
    wanted, *others = [gradient(p, batch, algorithm)[1] for batch in filled]
    for got in others:
        assert_same_gradient(got, wanted)
