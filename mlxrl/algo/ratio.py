"""Importance ratios between the policy that is trained and the one that sampled, as log-ratios.

Every function masks before it exponentiates or sums, so that whatever stands under the mask cannot reach a
loss or a gradient. Shapes: B rows, T tokens; log-probs in nats; mask [B, T] is 1 on sampled tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import mlx.core as mx

Bounds: TypeAlias = tuple[float | None, float | None]
LogRatio: TypeAlias = Callable[[mx.array, mx.array, mx.array], mx.array]


def clamp(values: mx.array, bounds: Bounds | None) -> mx.array:
    """Values held between two bounds, either of which may be None; no gradient outside them."""
    if bounds is None:
        return values
    low, high = bounds
    if low is not None:
        values = mx.maximum(values, low)
    return values if high is None else mx.minimum(values, high)


def lengths(mask: mx.array) -> mx.array:
    """[B, 1] tokens of each row, at least 1 so that an empty row divides by something."""
    return mx.maximum(mask.sum(axis=-1, keepdims=True), 1)


def token(new: mx.array, old: mx.array, mask: mx.array) -> mx.array:
    """[B, T] log pi_new / pi_old of every token (PPO, arXiv 1707.06347); 0 under the mask."""
    return mx.where(mask > 0, new - mx.stop_gradient(old), 0.0)


def sequence_sum(new: mx.array, old: mx.array, mask: mx.array) -> mx.array:
    """[B, 1] log-ratio of the whole completion, the sum over its tokens (RLOO, arXiv 2402.14740)."""
    return token(new, old, mask).sum(axis=-1, keepdims=True)


def sequence(new: mx.array, old: mx.array, mask: mx.array) -> mx.array:
    """[B, 1] mean log-ratio of a completion (GSPO, arXiv 2507.18071 eq. 7); the gradient flows through the mean."""
    return sequence_sum(new, old, mask) / lengths(mask)


def token_in_sequence(new: mx.array, old: mx.array, mask: mx.array) -> mx.array:
    """[B, T] mean log-ratio in value, the token's own log-prob in gradient (GSPO-token, arXiv 2507.18071 eq. 14).

    sg(mean_t(new - old)) + new - sg(new): with one advantage per row its gradient is that of `sequence`, and
    it allows an advantage for every token.
    """
    own = mx.where(mask > 0, new - mx.stop_gradient(new), 0.0)
    return mx.stop_gradient(sequence(new, old, mask)) + own


LEVELS: dict[str, LogRatio] = {
    "token": token,
    "sequence": sequence,
    "sequence_token": token_in_sequence,
    "sequence_sum": sequence_sum,
}
