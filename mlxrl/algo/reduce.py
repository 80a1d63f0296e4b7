"""From values per token to scalars, always with the counts of the whole optimizer step: the loss, and the metrics.

The results of a step's micro-batches add up to that of the whole batch: neither splitting, padding nor the order of
sequences changes a gradient. A metric whose name ends in `max` combines by maximum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import mlx.core as mx

from mlxrl.algo.divergence import k3
from mlxrl.algo.losses import SAFE, PerToken, Spread, Surrogate, clamp, importance, lengths, log_ratio
from mlxrl.checked import Positive, SettingError, checked, converted
from mlxrl.types import Metrics, Totals

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
    return next((name for name, known in REDUCTIONS.items() if known == reduction), None)


COMPUTED = "computed"
OVER_THE_STEP = {
    "loss", "clip_ratio/low_mean", "clip_ratio/high_mean", "advantages/abs_mean", "ratio/max",
    "sampling/importance_sampling_ratio/max", "sampling/sequence_weight_mean", "echo/loss", "echo/coefficient",
}  # fmt: skip
"""Metrics that `finish` does not divide by the share of computed tokens."""


def of_policy(surrogate: Surrogate, drift: PerToken, advantages: PerToken, mask: PerToken, totals: Totals) -> Metrics:
    """Ratio, clip fractions, size of the advantage, and the log-ratio as the loss takes it for its drift."""
    return {
        COMPUTED: token_mean(mx.ones_like(mask), mask, totals),
        "ratio/mean": token_mean(surrogate.ratio, mask, totals),
        "ratio/max": masked(surrogate.ratio, mask).max(),
        "ppo_kl": token_mean(-drift, mask, totals),
        "clip_ratio/low_mean": token_mean(surrogate.low.astype(mx.float32), mask, totals),
        "clip_ratio/high_mean": token_mean(surrogate.high.astype(mx.float32), mask, totals),
        "advantages/abs_mean": token_mean(mx.abs(advantages), mask, totals),
    }


def of_mismatch(old: PerToken, sampler: PerToken, mask: PerToken, totals: Totals) -> Metrics:
    """Distance between the trainer's log-probs and the sampler's, and the moments of the weight."""
    gap = mx.stop_gradient(log_ratio(old, sampler, mask))
    weight = importance(old, sampler, mask)
    return {
        "sampling/sampling_logp_difference/mean": token_mean(mx.abs(gap), mask, totals),
        "sampling/kl": token_mean(k3(-clamp(gap, SAFE)), mask, totals),
        "sampling/importance_sampling_ratio/mean": token_mean(weight, mask, totals),
        "sampling/importance_sampling_ratio/square": token_mean(weight * weight, mask, totals),
        "sampling/importance_sampling_ratio/max": masked(weight, mask).max(),
    }


def of_answers(new: PerToken, mask: PerToken, totals: Totals) -> Metrics:
    """Mean cross-entropy in nats of tokens that the data hold, of which `finish` makes the perplexity."""
    return {COMPUTED: token_mean(mx.ones_like(mask), mask, totals), "cross_entropy": token_mean(-new, mask, totals)}


def finish(combined: Mapping[str, Any]) -> dict[str, float]:
    """The combined metrics of a step to what is reported: means over computed tokens, and `sampling/ess` in (0, 1].

    Sequences without a learning signal are counted in the denominators and never computed, so what describes computed
    tokens is divided by their share; without `computed`, as of an algorithm of one's own, everything stays as it is.
    ess = mean(w)^2 / mean(w^2), w = old/sampler: 1 where trainer and sampler agree (Kish).
    perplexity = exp(cross_entropy), where that is there.
    """
    out = {name: float(value) for name, value in combined.items()}
    share = out.pop(COMPUTED, 1.0)
    for name in out.keys() - OVER_THE_STEP:
        out[name] = out[name] / share if share > 0 else 0.0
    square = out.pop("sampling/importance_sampling_ratio/square", 0.0)
    if square > 0:
        out["sampling/ess"] = min(out["sampling/importance_sampling_ratio/mean"] ** 2 / square, 1.0)
    if "cross_entropy" in out:
        out["perplexity"] = perplexity(out["cross_entropy"])
    return out


def perplexity(cross_entropy: float) -> float:
    """exp of a mean cross-entropy in nats, infinite where that is no float."""
    return math.exp(cross_entropy) if cross_entropy < 700 else math.inf
