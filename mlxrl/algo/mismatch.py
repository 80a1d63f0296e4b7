"""How far the engine that sampled and the trainer are apart: summaries of a whole batch, for looking at.

These are exact for the batch they are given and do not add up over minibatches; what a loss reports does
(`metrics.mismatch_metrics`). Shapes: B rows, T tokens; mask [B, T]; results are scalars.
"""

from __future__ import annotations

import mlx.core as mx

from mlxrl.algo.correction import importance, log_gap
from mlxrl.algo.kl import k3
from mlxrl.algo.ratio import lengths
from mlxrl.algo.reduce import masked

Summary = dict[str, mx.array]


def mean(values: mx.array, mask: mx.array) -> mx.array:
    """Mean over sampled tokens; 0 without one."""
    return masked(values, mask).sum() / mx.maximum(mask.sum(), 1)


def row_means(values: mx.array, mask: mx.array) -> mx.array:
    """[B] mean over each row's sampled tokens; 0 for a row without one."""
    return (masked(values, mask).sum(axis=-1, keepdims=True) / lengths(mask))[..., 0]


def extremes(values: mx.array, mask: mx.array) -> tuple[mx.array, mx.array]:
    """Smallest and largest value on a sampled token; 0 without one."""
    inside = mask > 0
    ends = mx.where(inside, values, mx.inf).min(), mx.where(inside, values, -mx.inf).max()
    smallest, largest = (mx.where(mx.any(inside), end, 0.0) for end in ends)
    return smallest, largest


def deviation(values: mx.array) -> mx.array:
    """Standard deviation with n-1 of all values; 0 of a single one."""
    return mx.std(values, ddof=1) if values.size > 1 else mx.array(0.0)


def effective_share(weight: mx.array, mask: mx.array) -> mx.array:
    """Effective sample size as a share of the tokens: mean(w)^2 / mean(w^2) (Kish), in (0, 1]."""
    square = mean(weight * weight, mask)
    return mx.where(square > 0, mean(weight, mask) ** 2 / mx.where(square > 0, square, 1.0), 0.0)


def fractions(weight: mx.array, mask: mx.array, low: float, high: float) -> tuple[mx.array, mx.array]:
    """Shares of the sampled tokens whose weight lies below and above two bounds."""
    return mean((weight < low).astype(mx.float32), mask), mean((weight > high).astype(mx.float32), mask)


def weight_summary(weight: mx.array, mask: mx.array) -> Summary:
    """Weights [B, T] over sampled tokens; `std` divides by n (verl)."""
    average = mean(weight, mask)
    smallest, largest = extremes(weight, mask)
    return {
        "mean": average,
        "std": mx.sqrt(mean((weight - average) ** 2, mask)),
        "min": smallest,
        "max": largest,
        "ess": effective_share(weight, mask),
    }


def row_summary(weight: mx.array, mask: mx.array) -> Summary:
    """The row means of weights [B, T], every row counting once, an empty one with mean 0 (verl)."""
    rows = row_means(weight, mask)
    return {
        "mean": rows.mean(),
        "std": deviation(rows),
        "min": rows.min(),
        "max": rows.max(),
        "max_deviation": mx.abs(rows - 1).max(),
    }


def perplexity_summary(old: mx.array, rollout: mx.array, mask: mx.array) -> Summary:
    """Perplexities of trainer and sampler on the sampled tokens, per row and averaged, and how they differ (verl)."""
    trainer, sampler = -row_means(old, mask), -row_means(rollout, mask)
    apart = trainer - sampler
    return {
        "training_ppl": mx.exp(trainer).mean(),
        "training_log_ppl": trainer.mean(),
        "rollout_ppl": mx.exp(sampler).mean(),
        "rollout_log_ppl": sampler.mean(),
        "log_ppl_diff": apart.mean(),
        "log_ppl_abs_diff": mx.abs(apart).mean(),
        "log_ppl_diff_max": apart.max(),
        "log_ppl_diff_min": apart.min(),
        "ppl_ratio": mx.exp(apart).mean(),
    }


def divergence_summary(old: mx.array, rollout: mx.array, mask: mx.array) -> Summary:
    """KL(rollout || old) by k1 and k3 over tokens, and chi-squared of tokens and of whole rows: E[w^2] - 1."""
    gap = log_gap(old, rollout, mask)
    token, row = importance(old, rollout, mask), importance(old, rollout, mask, "sequence")
    return {
        "kl": mean(-gap, mask),
        "k3_kl": mean(k3(-gap), mask),
        "chi2_token": mean(token * token, mask) - 1,
        "chi2_seq": (row * row).mean() - 1,
    }
