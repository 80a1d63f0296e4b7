"""Importance ratios, policy losses and reductions on numbers worked out by hand, eager and compiled."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest

from helpers import close, eager_and_compiled
from mlxrl.algo import losses, reduce
from mlxrl.algo.losses import Clipped, ClippedWeight, GeometricMean, SoftGate, TrustRegion
from mlxrl.types import Totals

NAN = float("nan")


def test_clipped_and_its_gradient() -> None:
    # r = 1.5, 0.5, 1.1; A = 1, -1, 2; bounds 0.8 and 1.28
    # -min(1.5, 1.28) = -1.28, clipped: gradient 0
    # -min(-0.5, -0.8) = 0.8, clipped: gradient 0
    # -min(2.2, 2.2) = -2.2, free: d/d log pi = -r A = -2.2
    new, credit = mx.log(mx.array([[1.5, 0.5, 1.1]])), mx.array([[1.0, -1.0, 2.0]])
    clipped = Clipped(clip=(0.2, 0.28))

    def loss(new: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        found = clipped(new, mx.zeros_like(new), credit, mx.ones_like(new))
        return found.loss.sum(), found.loss, found.low, found.high

    for function in eager_and_compiled(mx.value_and_grad(loss)):
        (_, values, low, high), gradient = function(new)
        close(values, [[-1.28, 0.8, -2.2]])
        close(gradient, [[0.0, 0.0, -2.2]])
        assert (low.tolist(), high.tolist()) == ([[False, True, False]], [[True, False, False]])


def test_dual_clip_and_delta() -> None:
    # r = 5, A = -1: the plain loss is 5, the dual clip holds it at 3, delta 4 at 4
    new, old, credit, mask = mx.log(mx.array([[5.0]])), mx.zeros((1, 1)), mx.array([[-1.0]]), mx.ones((1, 1))
    for settings, want in (({}, 5.0), ({"dual_clip": 3.0}, 3.0), ({"delta": 4.0}, 4.0)):
        close(Clipped(**settings)(new, old, credit, mask).loss, [[want]])


def test_on_policy_gradient_is_the_policy_gradient() -> None:
    """Where new = old both branches of the minimum tie; the gradient is -A all the same."""
    zeros, credit = mx.zeros((1, 2)), mx.array([[1.0, -2.0]])
    for clip in ((0.2, 0.2), (None, 0.2), None):

        def loss(new: mx.array, clipped: Clipped = Clipped(clip=clip)) -> mx.array:
            return clipped(new, zeros, credit, mx.ones_like(new)).loss.sum()

        close(mx.grad(loss)(zeros), [[-1.0, 2.0]])


def test_the_other_policy_losses() -> None:
    # r = 2 of log 2, A = 1, log pi = log 2: clipped weight 1.5 * -log 2; gate -4 sigmoid(1); geometric mean of one
    # token clipped at 0.4: -exp(0.4), outside; p_new - p_old = 0.5 > 0.2: the trust region drops the token
    new, old = mx.log(mx.array([[0.5]])), mx.log(mx.array([[0.25]]))
    credit, mask = mx.ones((1, 1)), mx.ones((1, 1))
    found = ClippedWeight(clip=(None, 0.5))(new, old, credit, mask)
    close(found.loss, [[-1.5 * math.log(0.5)]])
    assert found.high.item()
    close(SoftGate()(new, old, credit, mask).loss, [[-4 / (1 + math.exp(-1))]])
    found = GeometricMean()(new, old, credit, mask)
    close([found.loss.item(), found.ratio.item(), found.high.item()], [-math.exp(0.4), math.exp(0.4), 1])
    close(TrustRegion(clip=(0.2, 0.3))(new, old, credit, mask).loss, [[-2 * math.log(0.5)]])
    dropped = TrustRegion()(new, old, credit, mask)
    assert (dropped.loss.item(), dropped.high.item()) == (0.0, True)


def test_sequence_ratio() -> None:
    # log-ratios 0.2 and 0.4, a masked one of 9: mean 0.3, sum 0.6; each token's share of the mean's gradient is 1/2
    new, old, mask = mx.array([[0.2, 0.4, 9.0]]), mx.zeros((1, 3)), mx.array([[1.0, 1.0, 0.0]])
    close(losses.mean_log_ratio(new, old, mask), [[0.3]])
    close(losses.summed_log_ratio(new, old, mask), [[0.6]])
    close(losses.mean_log_ratio_on_tokens(new, old, mask)[:, :2], [[0.3, 0.3]])
    close(mx.grad(lambda x: losses.mean_log_ratio(x, old, mask).sum())(new), [[0.5, 0.5, 0.0]])
    close(mx.grad(lambda x: losses.mean_log_ratio_on_tokens(x, old, mask).sum())(new), [[1.0, 1.0, 0.0]])


def test_importance() -> None:
    # trainer/sampler ratios 4, 0.5: the sequence's product 2, its geometric mean sqrt 2
    old, sampler, mask = mx.log(mx.array([[4.0, 0.5, 7.0]])), mx.zeros((1, 3)), mx.array([[1.0, 1.0, 0.0]])
    close(losses.importance(old, sampler, mask), [[4.0, 0.5, 1.0]])
    close(losses.importance(old, sampler, mask, "sequence_sum"), [[2.0]])
    close(losses.importance(old, sampler, mask, "sequence"), [[math.sqrt(2)]])


def test_reductions() -> None:
    # values 1 2 | 3, a masked 100: sum 6; 3 tokens: 2; row means 1.5 and 3: 2.25; constant 2 rows of 4: 0.75
    values, mask = mx.array([[1.0, 2.0], [3.0, 100.0]]), mx.array([[1.0, 1.0], [1.0, 0.0]])
    totals = Totals(tokens=3, sequences=2, groups=1, max_tokens=4)
    close(reduce.total(values, mask), 6.0)
    close(reduce.token_mean(values, mask, totals), 2.0)
    close(reduce.sequence_mean(values, mask, totals), 2.25)
    close(reduce.Constant()(values, mask, totals), 0.75)
    close(reduce.Constant(length=1)(values, mask, totals), 3.0)
    close(reduce.named(8)(values, mask, totals), 0.375)


@pytest.mark.parametrize("name", ["token_mean", "sequence_mean", "constant", "sum", 8.0])
def test_a_reduction_is_read_back(name) -> None:
    assert reduce.name_of(reduce.named(name)) == name
    assert reduce.name_of(lambda values, mask, totals: values.sum()) is None


def test_nothing_under_the_mask_is_seen() -> None:
    values = mx.array([[1.0, NAN], [mx.inf, NAN]])
    mask = mx.array([[1.0, 0.0], [0.0, 0.0]])
    for reduction in reduce.REDUCTIONS.values():
        close(reduction(values, mask, Totals(1, 1, 1, 1)), 1.0)
    new, old = mx.array([[0.5, NAN]]), mx.array([[0.5, -mx.inf]])
    for level in losses.LEVELS.values():
        np.testing.assert_array_equal(level(new, old, mask[:1]), np.zeros_like(level(new, old, mask[:1])))
