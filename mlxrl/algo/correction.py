"""The gap between the engine that sampled and the trainer's own log-probs: importance weights and masks.

x = log pi_old - log pi_rollout per token, trainer minus sampler. Shapes: B rows, T tokens; log-probs in nats; mask
[B, T]. Weights and masks multiply a loss [B, T], carry no gradient and leave its denominators alone.
"""

from __future__ import annotations

from typing import Literal

import mlx.core as mx

from mlxrl.algo import ratio as ratios
from mlxrl.algo.kl import ESTIMATORS
from mlxrl.algo.ratio import Bounds, clamp, lengths

SAFE: Bounds = (-20.0, 20.0)
Level = Literal["token", "sequence", "geometric"]
Over = Literal["token", "sum", "mean", "max"]


def log_gap(old: mx.array, rollout: mx.array, mask: mx.array, level: Level = "token") -> mx.array:
    """Log-ratio of trainer to sampler, without gradient.

    [B, T] for a "token"; [B, 1] for a "sequence" (sum over its tokens) or "geometric" (their mean).
    """
    levels = {"token": ratios.token, "sequence": ratios.sequence_sum, "geometric": ratios.sequence}
    return mx.stop_gradient(levels[level](old, rollout, mask))


def importance(
    old: mx.array, rollout: mx.array, mask: mx.array, level: Level = "token", safe: Bounds | None = SAFE
) -> mx.array:
    """[B, T] or [B, 1] importance weight exp(x), x held within `safe` so that it cannot overflow."""
    return mx.exp(clamp(log_gap(old, rollout, mask, level), safe))


def within(values: mx.array, bounds: Bounds) -> mx.array:
    """1.0 where low <= value <= high, a None bound being open; else 0.0."""
    low, high = bounds
    inside = mx.ones_like(values) > 0
    inside = inside if low is None else inside & (values >= low)
    return (inside if high is None else inside & (values <= high)).astype(mx.float32)


def truncated(weight: mx.array, bounds: Bounds) -> mx.array:
    """clip(w, low, high): truncated importance sampling (TIS; verl, slime, TRL)."""
    return clamp(weight, bounds)


def cut(weight: mx.array, bounds: Bounds) -> mx.array:
    """w where low <= w <= high, else 0: IcePop per token, MIS (TRL's sequence mask) per row."""
    return weight * within(weight, bounds)


def weights(
    old: mx.array,
    rollout: mx.array,
    mask: mx.array,
    mode: Literal["truncate", "mask"] = "truncate",
    level: Level = "token",
    bounds: Bounds = (0.0, 2.0),
) -> mx.array:
    """[B, T] or [B, 1] weight of the sampler mismatch: `truncated` or `cut` importance at a level."""
    weight = importance(old, rollout, mask, level)
    return truncated(weight, bounds) if mode == "truncate" else cut(weight, bounds)


def batch_normalised(weight: mx.array, mask: mx.array, by_row: bool = False) -> mx.array:
    """Weights [B, T] divided by their mean over sampled tokens, or over rows of the row's mean (verl)."""
    total = (weight * mask).sum(axis=-1, keepdims=True)
    if by_row:
        mean = (total / lengths(mask)).sum() / mx.maximum(mx.any(mask > 0, axis=-1).sum(), 1)
    else:
        mean = total.sum() / mx.maximum(mask.sum(), 1)
    return mx.where(mean > 1e-8, weight / mx.maximum(mean, 1e-8), weight)


def veto(old: mx.array, rollout: mx.array, mask: mx.array, threshold: float) -> mx.array:
    """[B, 1] 0.0 for a row with a token whose weight is below `threshold`, else 1.0 (slime's veto)."""
    low = importance(old, rollout, mask) < threshold
    return 1.0 - mx.any(low & (mask > 0), axis=-1, keepdims=True).astype(mx.float32)


def rejection(
    old: mx.array,
    rollout: mx.array,
    mask: mx.array,
    estimator: str = "k3",
    over: Over = "token",
    bounds: Bounds = (None, 0.1),
) -> mx.array:
    """[B, T] or [B, 1] 1.0 where the divergence sampler/trainer lies within bounds, else 0.0 (verl's rejection).

    d = k(-x) of a token, or its "sum", "mean" or "max" over the row's tokens; k1, abs, k2 or k3 of `kl.ESTIMATORS`.
    k1 is a log-ratio: its bounds are logs.
    """
    values = ESTIMATORS[estimator](-clamp(log_gap(old, rollout, mask), SAFE))
    if over == "token":
        return within(values, bounds)
    if over == "max":
        row = mx.where(mask > 0, values, -mx.inf).max(axis=-1, keepdims=True)
        return within(mx.where(mx.isinf(row), 0.0, row), bounds)
    row = (values * mask).sum(axis=-1, keepdims=True)
    return within(row if over == "sum" else row / lengths(mask), bounds)


def off_policy_mask(new: mx.array, behaviour: mx.array, advantage: mx.array, mask: mx.array, delta: float) -> mx.array:
    """[B, T] 0.0 where A < 0 and the row has drifted (OPSM, DeepSeek-V3.2, arXiv 2512.02556), else 1.0.

    keep = not (A < 0 and sum_t (behaviour - new) m / max(len, 1) > delta);  behaviour: rollout (TRL) or old (slime)
    """
    drift = -log_gap(new, behaviour, mask, "geometric")
    return 1.0 - ((advantage < 0) & (drift > delta)).astype(mx.float32)
