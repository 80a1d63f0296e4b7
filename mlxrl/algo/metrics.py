"""What a loss reports, in parts that add up over the micro-batches of an optimizer step.

Every part is a sum divided by the tokens of the whole step; one named `max` at its end combines by maximum. Sequences
without a learning signal are counted in those tokens and never computed, so `finish` divides what describes computed
tokens by the share of them, and makes the effective sample size of the weight's two moments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from mlxrl.algo.divergence import k3
from mlxrl.algo.losses import SAFE, PerToken, Surrogate, clamp, importance, log_ratio
from mlxrl.algo.reduce import masked, token_mean
from mlxrl.types import Metrics, Totals

COMPUTED = "computed"
OVER_THE_STEP = frozenset(
    {
        *("loss", "clip_ratio/low_mean", "clip_ratio/high_mean", "advantages/abs_mean", "ratio/max"),
        *("sampling/importance_sampling_ratio/max", "echo/loss", "echo/coefficient"),
    }
)
"""What `finish` does not divide: over all tokens of the step, over observed ones, or a maximum."""


def largest(values: mx.array, mask: PerToken) -> mx.array:
    """Largest value on a sampled token, for values that are not negative; 0 without a token."""
    return masked(values, mask).max()


def of_policy(
    surrogate: Surrogate, new: PerToken, old: PerToken, advantages: PerToken, mask: PerToken, totals: Totals
) -> Metrics:
    """Ratio, drift since sampling, clip fractions and size of the advantage."""
    return {
        COMPUTED: token_mean(mx.ones_like(mask), mask, totals),
        "ratio/mean": token_mean(surrogate.ratio, mask, totals),
        "ratio/max": largest(surrogate.ratio, mask),
        "ppo_kl": token_mean(-log_ratio(new, old, mask), mask, totals),
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
        "sampling/importance_sampling_ratio/max": largest(weight, mask),
    }


def finish(combined: Mapping[str, Any]) -> dict[str, float]:
    """The combined metrics of a step to what is shown: means over computed tokens, and `sampling/ess` in (0, 1].

    ess = mean(w)^2 / mean(w^2), w = old/sampler: 1 where trainer and sampler agree (Kish). The loss, the clip
    fractions and the size of the advantage stay means over all tokens of the step; without `computed`, as of an
    algorithm of one's own, everything stays as it is.
    """
    out = {name: float(value) for name, value in combined.items()}
    share = out.pop(COMPUTED, 1.0)
    for name in out.keys() - OVER_THE_STEP:
        out[name] = out[name] / share if share > 0 else 0.0
    square = out.pop("sampling/importance_sampling_ratio/square", 0.0)
    if square > 0:
        out["sampling/ess"] = min(out["sampling/importance_sampling_ratio/mean"] ** 2 / square, 1.0)
    return out
