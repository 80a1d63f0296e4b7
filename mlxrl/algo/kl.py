"""Estimators of the divergence of the policy from a reference, one value per sampled token.

For tokens drawn from pi_new, with x = log pi_new - log pi_ref (nats): E[k1] = E[k3] = KL(new || ref), and the gradient
of k2 is that of the divergence (J. Schulman, "Approximating KL divergence", 2020). Shapes: [B, T] in, [B, T] out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import mlx.core as mx

from mlxrl.algo.ratio import Bounds, clamp

Estimator: TypeAlias = Callable[[mx.array], mx.array]


def k1(x: mx.array) -> mx.array:
    """x: unbiased, noisy, and of either sign; its gradient has mean 0, so it belongs in the reward."""
    return x


def absolute(x: mx.array) -> mx.array:
    """|x|."""
    return mx.abs(x)


def k2(x: mx.array) -> mx.array:
    """x^2 / 2: biased in value, right in gradient."""
    return 0.5 * x * x


def k3(x: mx.array) -> mx.array:
    """exp(-x) - 1 + x: unbiased and never negative (GRPO, arXiv 2402.03300 eq. 4)."""
    return mx.expm1(-x) + x  # exp(-x) - 1 would leave nothing but rounding of a small divergence


def straight_through(value: mx.array, gradient: mx.array) -> mx.array:
    """One estimator's value with another one's gradient (verl's "k3+" is k3 with the gradient of k2)."""
    return mx.stop_gradient(value) + gradient - mx.stop_gradient(gradient)


ESTIMATORS: dict[str, Estimator] = {"k1": k1, "abs": absolute, "k2": k2, "k3": k3}


def divergence(
    new: mx.array,
    reference: mx.array,
    mask: mx.array,
    estimator: str = "k3",
    log_ratio_clamp: Bounds | None = (-20.0, 20.0),
    value_clamp: Bounds | None = None,
    weight: mx.array | None = None,
    straight: str | None = None,
) -> mx.array:
    """[B, T] estimate of KL(new || reference) per token, 0 under the mask.

    Args:
        new, reference: [B, T] log-probs; the gradient flows through `new`.
        estimator: "k1", "abs", "k2" or "k3".
        log_ratio_clamp: bounds of x inside the estimator, so that an exponential cannot overflow.
        value_clamp: bounds of the estimate (OpenRLHF, verl: -10 and 10).
        weight: [B, T] importance ratio new/old that multiplies the estimate, before `value_clamp` (slime, TRL).
        straight: the estimator whose gradient is used instead of the value's own.
    """
    x = mx.where(mask > 0, new - mx.stop_gradient(reference), 0.0)
    x = clamp(x, log_ratio_clamp)
    value = ESTIMATORS[estimator](x)
    value = value if weight is None else value * weight
    value = clamp(value, value_clamp)
    return value if straight is None else straight_through(value, ESTIMATORS[straight](x))
