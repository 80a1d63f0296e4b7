"""From a value per token to a scalar, always with the counts of the whole optimizer step.

Every function takes values [B, T], mask [B, T] and the step's `Totals`, and its results over the minibatches of
a step add up to its result over the whole batch: neither splitting, padding nor row order changes a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import mlx.core as mx

from mlxrl.algo.ratio import lengths
from mlxrl.types import Totals

Reduction: TypeAlias = Callable[[mx.array, mx.array, Totals], mx.array]


def masked(values: mx.array, mask: mx.array) -> mx.array:
    """[B, T] values on sampled tokens and exactly 0 elsewhere, also where a value is not finite."""
    return mx.where(mask > 0, values, 0.0)


def total(values: mx.array, mask: mx.array, totals: Totals | None = None) -> mx.array:
    """sum_bt v m (prime-rl, tinker: the caller scales)."""
    return masked(values, mask).sum()


def token_mean(values: mx.array, mask: mx.array, totals: Totals) -> mx.array:
    """sum_bt v m / tokens: every token weighs the same (DAPO, arXiv 2503.14476 eq. 8)."""
    return total(values, mask) / mx.maximum(totals.tokens, 1)


def sequence_mean(values: mx.array, mask: mx.array, totals: Totals) -> mx.array:
    """sum_b (sum_t v m / max(len_b, 1)) / rows: every row weighs the same (GRPO, arXiv 2402.03300 eq. 3)."""
    means = masked(values, mask).sum(axis=-1, keepdims=True) / lengths(mask)
    return means.sum() / mx.maximum(totals.sequences, 1)


def constant(values: mx.array, mask: mx.array, totals: Totals, length: float | None = None) -> mx.array:
    """sum_bt v m / (rows length): no length bias (Dr. GRPO, arXiv 2503.20783).

    length: the constant a row is divided by; None takes the sampling limit, `totals.max_tokens`. A length of 1 is
    the mean over rows of the sum over tokens.
    """
    length = totals.max_tokens if length is None else length
    return total(values, mask) / mx.maximum(totals.sequences * length, 1)


REDUCTIONS: dict[str, Reduction] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "constant": constant,
    "sum": total,
}
