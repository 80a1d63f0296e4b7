"""Divergences from a reference and from a teacher's distributions, on numbers worked out by hand."""

from __future__ import annotations

import math

import mlx.core as mx
import pytest

from helpers import close
from mlxrl.algo import divergence
from oracles import extra


def test_kl_estimators() -> None:
    # x = log 2: k1 0.693147, k2 0.240227, k3 = 1/2 - 1 + log 2 = 0.193147; d k3 / d new = 1 - 1/2
    new, zero, mask = mx.array([[math.log(2.0)]]), mx.zeros((1, 1)), mx.ones((1, 1))
    for estimator, want in (("k1", 0.6931472), ("k2", 0.2402265), ("k3", 0.1931472)):
        close(divergence.estimate(new, zero, mask, estimator), [[want]])
    close(mx.grad(lambda x: divergence.estimate(x, zero, mask).sum())(new), [[0.5]])
    # a small divergence is not lost in rounding: x = 1e-4, k3 = x^2 / 2 - x^3 / 6 = 4.9998e-9
    assert divergence.estimate(mx.array([[1e-4]]), zero, mask).item() == pytest.approx(4.9998e-9, rel=1e-3)
    # straight through: the value of k3, the gradient of k2, which is x
    value, gradient = mx.value_and_grad(lambda x: divergence.estimate(x, zero, mask, straight="k2").sum())(new)
    close([value.item(), gradient.item()], [0.1931472, 0.6931472])


def test_distributions() -> None:
    # logits log 1, log 3: p = 1/4, 3/4; entropy 0.562335; p^2 sums to 10/16
    logp = extra.log_softmax(mx.log(mx.array([[1.0, 3.0]])))
    close(mx.exp(logp), [[0.25, 0.75]])
    close(extra.entropy(logp), [0.5623351])
    close(extra.sum_squares(logp), [0.625])
    close(extra.gather(logp, mx.array([1])), [math.log(0.75)])


def test_divergences_over_top_ids() -> None:
    # student 1/2 1/4 | 1/4, teacher 1/4 1/4 | 1/2 in bins of two ids and a tail:
    # reverse 1/2 log 2 + 0 - 1/4 log 2 = 0.1732868, forward the same; renormalised 2/3 log 4/3 + 1/3 log 2/3
    student, teacher = mx.log(mx.array([0.5, 0.25])), mx.log(mx.array([0.25, 0.25]))
    with_tail = [divergence.with_tail(p) for p in (student, teacher)]
    close(divergence.reverse_kl(*with_tail), 0.1732868)
    close(divergence.forward_kl(*with_tail), 0.1732868)
    close(divergence.reverse_kl(divergence.renormalised(student), divergence.renormalised(teacher)), 0.0566330)
    close(divergence.jsd(*with_tail, 0.5), divergence.jsd(*with_tail[::-1], 0.5))
    # an absent id is one that is not there
    absent = mx.array([math.log(0.25), -mx.inf])
    close(mx.exp(divergence.with_tail(absent)), [0.25, 0.0, 0.75])
    assert divergence.forward_kl(divergence.renormalised(student), divergence.renormalised(absent)).item() < mx.inf
