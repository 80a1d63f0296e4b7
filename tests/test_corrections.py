"""Sampler and trainer apart: the gap that is reported, and what corrections for it do to the gradient."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest

from helpers import a_policy, assert_same_gradient, made
from mlxrl import algo
from mlxrl.algo.recipes import grpo
from mlxrl.algo.terms import Correction, OffPolicyMask, Veto
from mlxrl.train.batch import make_batch
from mlxrl.train.gradient import gradient
from mlxrl.train.update import complete, update
from mlxrl.types import Batch, MicroBatch


def laid_out(m: MicroBatch, values: list[list[float]]) -> mx.array:
    """[B, T] of a value for every token that the model chose, given by trajectory."""
    wide = np.zeros(m.mask.shape, np.float32)
    for row, number in enumerate(m.trajectories):
        wide[row, np.flatnonzero(np.array(m.mask)[row])] = values[number]
    return mx.array(wide)


def apart(gaps: list[list[float]]) -> tuple[Any, Batch, MicroBatch]:
    """A policy and a batch of two sequences whose sampler was off by log-ratios old - sampler = gaps, one by one."""
    p, group = a_policy(), made([1.0, 0.0], lengths=[len(own) for own in gaps])
    batch = complete(p, make_batch([group], grpo()), grpo(), frozenset({"old"}))
    (m,) = batch
    return p, batch, dataclasses.replace(m, sampler_logprobs=m.old_logprobs - laid_out(m, gaps))


THREE = [1.5, 1.5, 1.5]


@pytest.mark.parametrize(
    ("term", "weights"),
    [
        # the first sequence has weights 4, 1/2, 1 by token, the second 1, 1: truncated at 2, masked outside (1/4, 2)
        (Correction(), [[2, 0.5, 1], [1, 1]]),
        (Correction(mode="mask"), [[0, 0.5, 1], [1, 1]]),
        # the product of the first is 2, its geometric mean 2^(1/3) = 1.26
        (Correction(mode="mask", level="sequence"), [[2, 2, 2], [1, 1]]),
        (Correction(mode="mask", level="sequence", bounds=(0.5, 1.9)), [[0, 0, 0], [1, 1]]),
        (Correction(level="sequence", bounds=(0, 1.5)), [THREE, [1, 1]]),
        (Correction(mode="mask", level="geometric", bounds=(0.5, 1.2)), [[0] * 3, [1, 1]]),
        (Correction(mode="mask", level="geometric"), [[2 ** (1 / 3)] * 3, [1, 1]]),
        (Veto(threshold=0.6), [[0, 0, 0], [1, 1]]),
        # the first, less likely for the sampler by log 2 / 3 a token, was rewarded, so nothing is masked
        (OffPolicyMask(delta=0.2), [[1, 1, 1], [1, 1]]),
    ],
)  # fmt: skip
def test_corrections_weigh_the_gradient_and_leave_the_denominators(term, weights):
    gaps = [[math.log(4), math.log(0.5), 0.0], [0.0, 0.0]]
    p, batch, m = apart(gaps)
    algorithm = grpo(terms=[term])
    doctored = dataclasses.replace(batch, micro_batches=(m,))
    metrics, got = gradient(p, doctored, algorithm)
    wanted = dataclasses.replace(m, advantages=m.advantages * laid_out(m, weights))
    assert_same_gradient(got, gradient(p, dataclasses.replace(batch, micro_batches=(wanted,)), grpo())[1], 2e-5)
    assert metrics["sampling/weight_mean"] == pytest.approx(sum(map(sum, weights)) / 5, rel=1e-5)
    moved = update(p, optim.SGD(1e-3), doctored, algorithm)
    assert moved["grad_norm"] > 0


def test_a_sequence_that_drifted_from_the_sampler_is_masked_where_it_was_punished():
    # the trainer finds the second, of advantage < 0, less likely by 0.3 a token than the sampler did
    p, batch, m = apart([[0.0, 0.0], [-0.3, -0.3]])
    doctored = dataclasses.replace(batch, micro_batches=(m,))
    kept = gradient(p, doctored, grpo(terms=[OffPolicyMask(delta=0.4)]))[1]
    assert_same_gradient(kept, gradient(p, batch, grpo())[1])
    masked = gradient(p, doctored, grpo(terms=[OffPolicyMask(delta=0.2)]))[1]
    good = mx.array([[float(number == 0)] for number in m.trajectories])
    alone = dataclasses.replace(m, advantages=m.advantages * good)
    assert_same_gradient(masked, gradient(p, dataclasses.replace(batch, micro_batches=(alone,)), grpo())[1])


def test_the_gap_is_always_reported():
    # gaps log 2, 0, log 1/2 and 0, 0: mean |gap| 2 log 2 / 5; weights 2, 1, 1/2, 1, 1
    p, batch, m = apart([[math.log(2), 0.0, -math.log(2)], [0.0, 0.0]])
    metrics = update(p, optim.SGD(0.0), dataclasses.replace(batch, micro_batches=(m,)), grpo())
    assert metrics["sampling/sampling_logp_difference/mean"] == pytest.approx(2 * math.log(2) / 5, rel=1e-4)
    # k3 of the sampler against the trainer: w - 1 - log w, 0.306853 at 2 and 0.193147 at 1/2
    assert metrics["sampling/kl"] == pytest.approx((0.306853 + 0.193147) / 5, rel=1e-4)
    assert metrics["sampling/ess"] == pytest.approx(5.5**2 / (5 * (4 + 1 + 0.25 + 1 + 1)), rel=1e-4)
    assert metrics["sampling/importance_sampling_ratio/max"] == pytest.approx(2.0, rel=1e-4)
    assert "sampling/weight_mean" not in metrics
    assert {name for name in metrics if name.startswith("sampling/")} == {
        name for name in update(p, optim.SGD(0.0), batch, algo.gspo()) if name.startswith("sampling/")
    }
