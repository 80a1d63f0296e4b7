"""From a value per token to a scalar, always with the counts of the whole optimizer step.

Every reduction takes values, mask [B, T] and the step's `Totals`, and its results over the micro-batches of a step add
up to its result over the whole batch: neither splitting, padding nor the order of sequences changes a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import mlx.core as mx

from mlxrl.algo.losses import PerToken, Spread, lengths
from mlxrl.checked import Positive, SettingError, checked, converted
from mlxrl.types import Totals

Reduction: TypeAlias = Callable[[mx.array, mx.array, Totals], mx.array]
Name: TypeAlias = Literal["token_mean", "sequence_mean", "constant", "sum"]


def masked(values: Spread, mask: PerToken) -> PerToken:
    """Values on sampled tokens and exactly 0 elsewhere, also where a value is not finite."""
    return mx.where(mask > 0, values, 0.0)


def total(values: Spread, mask: PerToken, totals: Totals | None = None) -> mx.array:
    """sum_bt v m (prime-rl, tinker: the caller scales)."""
    return masked(values, mask).sum()


def token_mean(values: Spread, mask: PerToken, totals: Totals) -> mx.array:
    """sum_bt v m / tokens: every token weighs the same (DAPO, arXiv 2503.14476 eq. 8)."""
    return total(values, mask) / mx.maximum(totals.tokens, 1)


def sequence_mean(values: Spread, mask: PerToken, totals: Totals) -> mx.array:
    """sum_b (sum_t v m / max(len_b, 1)) / sequences: every sequence weighs the same (GRPO, arXiv 2402.03300 eq. 3)."""
    means = masked(values, mask).sum(axis=-1, keepdims=True) / lengths(mask)
    return means.sum() / mx.maximum(totals.sequences, 1)


@checked("algorithm.reduction")
class Constant:
    """sum_bt v m / (sequences length): no length bias (Dr. GRPO, arXiv 2503.20783).

    length: what a sequence is divided by; None takes the sampling limit, `totals.max_tokens`. A length of 1 is the mean
    over sequences of the sum over tokens.
    """

    length: Positive | None = None

    def __call__(self, values: Spread, mask: PerToken, totals: Totals) -> mx.array:
        length = totals.max_tokens if self.length is None else self.length
        return total(values, mask) / mx.maximum(totals.sequences * length, 1)


REDUCTIONS: dict[Name, Reduction] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "constant": Constant(),
    "sum": total,
}


def named(name: Name | float) -> Reduction:
    """The reduction of a name, or that which divides every sequence by a number."""
    try:
        chosen: Name | float = converted(Name if isinstance(name, str) else Positive, name)
    except SettingError as error:
        raise error.within("algorithm", "reduction") from None
    return REDUCTIONS[chosen] if isinstance(chosen, str) else Constant(length=chosen)


def name_of(reduction: Reduction) -> Name | float | None:
    """The name or the number that `named` makes the reduction of; None for one's own."""
    if isinstance(reduction, Constant) and reduction.length is not None:
        return reduction.length
    names: tuple[Name, ...] = ("token_mean", "sequence_mean", "constant", "sum")
    return next((name for name in names if REDUCTIONS[name] == reduction), None)
