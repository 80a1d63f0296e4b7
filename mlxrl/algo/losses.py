"""Policy losses per token, to be reduced by `reduce.*` with the step's totals.

Shapes: B rows, T tokens. `ratio` is pi_new / pi_old, [B, T] or, for a whole completion, [B, 1]; `advantage` is
[B, T] or broadcasts to it; log-probs in nats. Losses are minimised. `sg` stops the gradient.
"""

from __future__ import annotations

import math

import mlx.core as mx

from mlxrl.algo.ratio import clamp, lengths, token


def clipped(
    ratio: mx.array,
    advantage: mx.array,
    low: float | None = 0.2,
    high: float | None = 0.2,
    dual: float | None = None,
    delta: float | None = None,
) -> mx.array:
    """Clipped surrogate (PPO, arXiv 1707.06347 eq. 7; asymmetric bounds from DAPO, 2503.14476).

    l = -min(r A, clip(r, 1-low, 1+high) A)

    Args:
        ratio: [B, T] or [B, 1]; the gradient flows through it.
        advantage: [B, T].
        low, high: distance of the bounds from 1; None leaves that side open.
        dual: where A < 0 the loss is at most -dual A (dual clip, arXiv 1912.09729).
        delta: the first r is min(r, delta) (two-sided clip, INTELLECT-2, arXiv 2505.07291).
    Returns:
        [B, T] losses.
    """
    loose = ratio if delta is None else mx.minimum(ratio, delta)
    loss = -mx.minimum(loose * advantage, bounded(ratio, low, high) * advantage)
    if dual is None:
        return loss
    return mx.where(advantage < 0, mx.minimum(loss, -dual * advantage), loss)


def bounded(ratio: mx.array, low: float | None, high: float | None) -> mx.array:
    """clip(r, 1-low, 1+high), without gradient outside; None leaves a side open."""
    return clamp(ratio, (None if low is None else 1 - low, None if high is None else 1 + high))


def outside(ratio: mx.array, advantage: mx.array, low: float | None, high: float | None) -> tuple[mx.array, mx.array]:
    """[B, T] flags: tokens whose gradient the lower bound stops (A < 0), and the upper one (A > 0)."""
    never = mx.zeros_like(ratio * advantage) > 0
    below = never if low is None else (ratio < 1 - low) & (advantage < 0)
    above = never if high is None else (ratio > 1 + high) & (advantage > 0)
    return below, above


def reinforce(new: mx.array, advantage: mx.array) -> mx.array:
    """Score-function loss l = -A log pi (Williams, 1992)."""
    return -advantage * new


def cispo(
    new: mx.array, ratio: mx.array, advantage: mx.array, low: float | None = None, high: float | None = 4.0
) -> mx.array:
    """Clipped importance weight, unclipped gradient (CISPO, MiniMax-M1, arXiv 2506.13585 eq. 4).

    l = -sg(clip(r, 1-low, 1+high)) A log pi;  low=None, high=4 is ScaleRL's cap of 5 (arXiv 2510.13786)
    """
    return -mx.stop_gradient(bounded(ratio, low, high)) * advantage * new


def sapo(ratio: mx.array, advantage: mx.array, tau_pos: float = 1.0, tau_neg: float = 1.05) -> mx.array:
    """Soft gate in place of the clip (SAPO, arXiv 2511.20347).

    l = -A (4 / tau) sigmoid(tau (r - 1)),  tau = tau_pos where A > 0, else tau_neg
    """
    tau = mx.where(advantage > 0, tau_pos, tau_neg)
    return -advantage * mx.sigmoid(tau * (ratio - 1)) * 4 / tau


def gmpo(
    log_ratio: mx.array, advantage: mx.array, mask: mx.array, low: float = 0.4, high: float = 0.4
) -> tuple[mx.array, mx.array]:
    """Geometric mean of the clipped token ratios (GMPO, arXiv 2507.20673), to be reduced by `sequence_mean`.

    l_b = -A_b exp(mean_t x'_t),  A x' = min(A x, A clip(x, -low, high)) in sign;  A_b the row's mean advantage

    Returns:
        [B, 1] loss and [B, 1] ratio.
    """
    bound = clamp(log_ratio, (-low, high))
    worse = mx.where(advantage > 0, mx.minimum(log_ratio, bound), mx.maximum(log_ratio, bound))
    worse = mx.where(advantage == 0, 0.0, worse)
    count = lengths(mask)
    ratio = mx.exp((worse * mask).sum(axis=-1, keepdims=True) / count)
    return -(advantage * mask).sum(axis=-1, keepdims=True) / count * ratio, ratio


def probability_outside(
    new: mx.array, old: mx.array, advantage: mx.array, low: float = 0.2, high: float = 0.2
) -> tuple[mx.array, mx.array]:
    """[B, T] flags of tokens whose probability already moved too far, down (A <= 0) or up (A > 0) (DPPO-TV).

    down: p_new - p_old < -low;  up: p_new - p_old > high  (verl's dppo_tv, prime-rl's default)
    """
    moved = mx.stop_gradient(mx.exp(new) - mx.exp(old))
    return (moved < -low) & (advantage <= 0), (moved > high) & (advantage > 0)


def dppo(new: mx.array, ratio: mx.array, advantage: mx.array, keep: mx.array, cap: float = 20.0) -> mx.array:
    """REINFORCE with a capped weight inside the trust region (verl's dppo): l = -A sg(min(r, cap) keep) log pi."""
    return -advantage * mx.stop_gradient(mx.minimum(ratio, cap) * keep) * new


def dro(new: mx.array, log_ratio: mx.array, advantage: mx.array, beta: float = 0.5) -> mx.array:
    """Direct reward optimisation (arXiv 2405.19107), per token: l = -A log pi + beta/2 (log pi_new - log pi_old)^2."""
    return -advantage * new + 0.5 * beta * log_ratio * log_ratio


def vespo(
    new: mx.array,
    old: mx.array,
    advantage: mx.array,
    mask: mx.array,
    positive: tuple[float, float] = (2.0, 3.0),
    negative: tuple[float, float] = (3.0, 2.0),
) -> tuple[mx.array, mx.array]:
    """Gamma-shaped sequence weight (TRL's vespo): l = -phi A log pi, phi = w^k exp(lam (1 - w)) without gradient.

    w = the row's product of ratios, log w in [log 1e-8, 20]; (k, lam) is `positive` where A >= 0, else `negative`.

    Returns:
        [B, T] loss and phi, [B, T].
    """
    held = clamp(token(new, old, mask), (-20.0, 20.0)).sum(axis=-1, keepdims=True)
    log_w = clamp(held, (math.log(1e-8), 20.0))
    k, lam = (mx.where(advantage >= 0, p, n) for p, n in zip(positive, negative, strict=True))
    phi = mx.stop_gradient(mx.exp(lam + k * log_w - lam * mx.exp(log_w)))
    return -phi * advantage * new, phi
