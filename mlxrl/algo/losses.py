"""Importance ratios, and policy losses per token that are made of them.

A policy loss takes log-probs new and old (nats), advantages and mask, [B, T] each, and returns the loss per token, to
be minimised after `reduce`. The gradient flows through `new` alone. What is where the mask is 0 reaches neither loss
nor gradient, because masks come before exponentials and sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Literal, NamedTuple, TypeAlias

import mlx.core as mx

from mlxrl.checked import AboveOne, Interval, NotNegative, Positive, Share, Unbounded, because, checked
from mlxrl.types import PerToken

Spread: TypeAlias = Annotated[mx.array, "B #T"]
"""[B, T], or [B, 1] where a sequence has one value."""
PerSequence: TypeAlias = Annotated[mx.array, "B 1"]

_DISTANCES = because("they are distances from 1, the lower one at most 1")
Clip: TypeAlias = Annotated[tuple[Share | None, NotNegative | None], _DISTANCES]
ClosedClip: TypeAlias = Annotated[tuple[Share, NotNegative], _DISTANCES]
Level: TypeAlias = Literal["token", "sequence", "sequence_token", "sequence_sum"]
SAFE = (-20.0, 20.0)
"""Bounds of a log-ratio at which its exponential cannot overflow."""


def clamp(values: mx.array, bounds: tuple[float | None, float | None] | None) -> mx.array:
    """Values between two bounds, either of which may be None; no gradient outside them."""
    low, high = bounds or (None, None)
    values = values if low is None else mx.maximum(values, low)
    return values if high is None else mx.minimum(values, high)


def within(values: mx.array, bounds: tuple[float | None, float | None]) -> mx.array:
    """1.0 where low <= value <= high, a None bound being open; else 0.0."""
    return (clamp(values, bounds) == values).astype(mx.float32)


def lengths(mask: PerToken) -> PerSequence:
    """Tokens of each sequence, at least 1 so that an empty one divides by something."""
    return mx.maximum(mask.sum(axis=-1, keepdims=True), 1)


def log_ratio(new: PerToken, old: PerToken, mask: PerToken) -> PerToken:
    """log pi_new / pi_old of every token (PPO, arXiv 1707.06347); 0 where the mask is."""
    return mx.where(mask > 0, new - mx.stop_gradient(old), 0.0)


def summed_log_ratio(new: PerToken, old: PerToken, mask: PerToken) -> PerSequence:
    """Log-ratio of the whole completion, the sum over its tokens (RLOO, arXiv 2402.14740)."""
    return log_ratio(new, old, mask).sum(axis=-1, keepdims=True)


def mean_log_ratio(new: PerToken, old: PerToken, mask: PerToken) -> PerSequence:
    """Mean log-ratio of a completion (GSPO, arXiv 2507.18071 eq. 7)."""
    return summed_log_ratio(new, old, mask) / lengths(mask)


def mean_log_ratio_on_tokens(new: PerToken, old: PerToken, mask: PerToken) -> PerToken:
    """Mean log-ratio in value, the token's own log-prob in gradient (GSPO-token, arXiv 2507.18071 eq. 14).

    sg(mean_t(new - old)) + new - sg(new)
    """
    own = mx.where(mask > 0, new - mx.stop_gradient(new), 0.0)
    return mx.stop_gradient(mean_log_ratio(new, old, mask)) + own


LEVELS: dict[str, Callable[[mx.array, mx.array, mx.array], mx.array]] = {
    "token": log_ratio,
    "sequence": mean_log_ratio,
    "sequence_token": mean_log_ratio_on_tokens,
    "sequence_sum": summed_log_ratio,
}


def importance(
    old: PerToken, sampler: PerToken, mask: PerToken, level: Level = "token", bounds: Interval | None = SAFE
) -> Spread:
    """Weight exp(x) of the trainer against the sampler, x = log pi_old / pi_sampler within `bounds`; no gradient."""
    return mx.exp(clamp(mx.stop_gradient(LEVELS[level](old, sampler, mask)), bounds))


class Surrogate(NamedTuple):
    """A policy loss, its ratio, and flags of tokens whose gradient the lower and the upper bound stop: [B, #T]."""

    loss: mx.array
    ratio: mx.array
    low: mx.array
    high: mx.array


def bounded(ratio: Spread, low: float | None, high: float | None) -> Spread:
    """clip(r, 1-low, 1+high), without gradient outside; None leaves a side open."""
    return clamp(ratio, (None if low is None else 1 - low, None if high is None else 1 + high))


def outside(ratio: Spread, advantages: Spread, low: float | None, high: float | None) -> tuple[mx.array, mx.array]:
    """Flags [B, T]: tokens whose gradient the lower bound stops (A < 0), and the upper one (A > 0)."""
    low, high = (math.inf if distance is None else distance for distance in (low, high))
    return (ratio < 1 - low) & (advantages < 0), (ratio > 1 + high) & (advantages > 0)


@checked("algorithm")
class Ratio:
    """The importance ratio r of a policy loss.

    ratio: whose log-ratio is exponentiated: that of the "token", of the "sequence" (its mean), of the "sequence_token"
    (the same in value, the token's own in gradient) or "sequence_sum" (its sum).
    """

    ratio: Level = "token"
    log_ratio_clamp: Interval | None = SAFE

    def log_ratio(self, new: PerToken, old: PerToken, mask: PerToken) -> Spread:
        return clamp(LEVELS[self.ratio](new, old, mask), self.log_ratio_clamp)


@checked("algorithm")
class Clipped(Ratio):
    """Clipped surrogate (PPO, arXiv 1707.06347 eq. 7; asymmetric bounds from DAPO, 2503.14476).

    l = -min(r A, clip(r, 1-low, 1+high) A)

    clip: low and high, distances of the bounds from 1; None leaves a side open.
    dual_clip: where A < 0 the loss is at most -dual_clip A (arXiv 1912.09729).
    delta: the first r is min(r, delta) (two-sided clip, INTELLECT-2, arXiv 2505.07291).
    """

    clip: Clip | None = (0.2, 0.2)
    dual_clip: AboveOne | None = None
    delta: AboveOne | None = None

    def __call__(self, new: PerToken, old: PerToken, advantages: Spread, mask: PerToken) -> Surrogate:
        ratio = mx.exp(self.log_ratio(new, old, mask))
        low, high = self.clip or (None, None)
        loose = ratio if self.delta is None else mx.minimum(ratio, self.delta)
        loss = -mx.minimum(loose * advantages, bounded(ratio, low, high) * advantages)
        if self.dual_clip is not None:
            loss = mx.where(advantages < 0, mx.minimum(loss, -self.dual_clip * advantages), loss)
        return Surrogate(loss, ratio, *outside(ratio, advantages, low, high))


@checked("algorithm")
class ClippedWeight(Ratio):
    """Clipped importance weight, unclipped gradient (CISPO, MiniMax-M1, arXiv 2506.13585 eq. 4).

    l = -sg(clip(r, 1-low, 1+high)) A log pi;  flagged are weights outside the bounds, whatever the advantage
    """

    clip: Clip | None = (None, 4.0)

    def __call__(self, new: PerToken, old: PerToken, advantages: Spread, mask: PerToken) -> Surrogate:
        ratio = mx.exp(self.log_ratio(new, old, mask))
        low, high = self.clip or (None, None)
        loss = -mx.stop_gradient(bounded(ratio, low, high)) * advantages * new
        one = mx.ones_like(ratio)
        return Surrogate(loss, ratio, outside(ratio, -one, low, high)[0], outside(ratio, one, low, high)[1])


@checked("algorithm")
class SoftGate(Ratio):
    """Soft gate in place of the clip (SAPO, arXiv 2511.20347).

    l = -A (4 / tau) sigmoid(tau (r - 1)),  tau = tau_pos where A > 0, else tau_neg
    """

    tau_pos: Positive = 1.0
    tau_neg: Positive = 1.05

    def __call__(self, new: PerToken, old: PerToken, advantages: Spread, mask: PerToken) -> Surrogate:
        ratio = mx.exp(self.log_ratio(new, old, mask))
        tau = mx.where(advantages > 0, self.tau_pos, self.tau_neg)
        loss = -advantages * mx.sigmoid(tau * (ratio - 1)) * 4 / tau
        return Surrogate(loss, ratio, mx.zeros_like(ratio), mx.zeros_like(ratio))


@checked("algorithm")
class GeometricMean(Ratio):
    """Geometric mean of the clipped token ratios (GMPO, arXiv 2507.20673), to be reduced by `sequence_mean`.

    l_b = -A_b exp(mean_t x'_t),  A x' = min(A x, A clip(x, -low, high)) in sign;  A_b the sequence's mean advantage
    """

    clip: ClosedClip = (0.4, 0.4)

    def __call__(self, new: PerToken, old: PerToken, advantages: Spread, mask: PerToken) -> Surrogate:
        x, (low, high), count = self.log_ratio(new, old, mask), self.clip, lengths(mask)
        bound = clamp(x, (-low, high))
        worse = mx.where(advantages > 0, mx.minimum(x, bound), mx.maximum(x, bound))
        worse = mx.where(advantages == 0, 0.0, worse)
        ratio = mx.exp((worse * mask).sum(axis=-1, keepdims=True) / count)
        loss = -(advantages * mask).sum(axis=-1, keepdims=True) / count * ratio
        return Surrogate(loss, ratio, (x < -low) & (advantages < 0), (x > high) & (advantages > 0))


def probability_outside(
    new: PerToken, old: PerToken, advantages: Spread, low: float = 0.2, high: float = 0.2
) -> tuple[mx.array, mx.array]:
    """Flags [B, T] of tokens whose probability already moved too far, down (A <= 0) or up (A > 0) (DPPO-TV).

    down: p_new - p_old < -low;  up: p_new - p_old > high  (verl's dppo_tv, prime-rl's default)
    """
    moved = mx.stop_gradient(mx.exp(new) - mx.exp(old))
    return (moved < -low) & (advantages <= 0), (moved > high) & (advantages > 0)


@checked("algorithm")
class TrustRegion(Ratio):
    """REINFORCE with a capped weight, inside the region that `probability_outside` leaves (DPPO, arXiv 2602.04879).

    l = -A sg(min(r, cap) keep) log pi
    """

    clip: ClosedClip = (0.2, 0.2)
    cap: Annotated[Positive, Unbounded] = 20.0

    def __call__(self, new: PerToken, old: PerToken, advantages: Spread, mask: PerToken) -> Surrogate:
        ratio = mx.exp(self.log_ratio(new, old, mask))
        below, above = probability_outside(new, old, advantages, *self.clip)
        weight = mx.stop_gradient(mx.minimum(ratio, self.cap) * ~(below | above))
        return Surrogate(-advantages * weight * new, ratio, below, above)


@checked("algorithm")
class CrossEntropy:
    """Cross-entropy with the tokens themselves, times their weight: l = -A log pi; there is no ratio."""

    def __call__(self, new: PerToken, old: PerToken, advantages: Spread, mask: PerToken) -> Surrogate:
        none = mx.zeros_like(new)
        return Surrogate(-advantages * new, mx.ones_like(new), none, none)
