"""What a loss reports, in parts that add up over the minibatches of an optimizer step.

Every part is a sum divided by the tokens of the whole step; names that end in `_max` combine by maximum. Rows
without signal are counted in those tokens and never computed, so `finish` divides what describes computed tokens by
the share of them, and makes the effective sample size of the weight's two moments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from mlxrl.algo import correction
from mlxrl.algo import ratio as ratios
from mlxrl.algo.kl import k3
from mlxrl.algo.ratio import clamp
from mlxrl.algo.reduce import masked, token_mean
from mlxrl.types import Metrics, Totals

COMPUTED = "policy/computed"
PER_COMPUTED = frozenset(
    {
        *("policy/ratio_mean", "policy/old_kl", "policy/kl", "policy/teacher_kl", "policy/entropy"),
        *(f"policy/{name}_coefficient" for name in ("kl", "kl_reward", "entropy", "teacher")),
        *("mismatch/abs", "mismatch/k3", "mismatch/weight", "mismatch/weight_square", "mismatch/kept"),
    }
)


def masked_max(values: mx.array, mask: mx.array) -> mx.array:
    """Largest value on a sampled token, for values that are not negative; 0 without a token."""
    return masked(values, mask).max()


def policy_metrics(
    new: mx.array,
    old: mx.array,
    ratio: mx.array,
    low: mx.array,
    high: mx.array,
    advantage: mx.array,
    mask: mx.array,
    totals: Totals,
) -> Metrics:
    """Ratio, drift since sampling, clip fractions and size of the advantage; every array [B, T] or [B, 1]."""
    return {
        COMPUTED: token_mean(mx.ones_like(mask), mask, totals),
        "policy/ratio_mean": token_mean(ratio, mask, totals),
        "policy/ratio_max": masked_max(ratio, mask),
        "policy/old_kl": token_mean(-ratios.token(new, old, mask), mask, totals),
        "policy/clip_low": token_mean(low.astype(mx.float32), mask, totals),
        "policy/clip_high": token_mean(high.astype(mx.float32), mask, totals),
        "policy/adv_abs": token_mean(mx.abs(advantage), mask, totals),
    }


def mismatch_metrics(old: mx.array, rollout: mx.array, mask: mx.array, totals: Totals) -> Metrics:
    """Distance between the trainer's log-probs and the sampler's, [B, T] each, and the moments of the weight."""
    gap = correction.log_gap(old, rollout, mask)
    weight = correction.importance(old, rollout, mask)
    return {
        "mismatch/abs": token_mean(mx.abs(gap), mask, totals),
        "mismatch/k3": token_mean(k3(-clamp(gap, correction.SAFE)), mask, totals),
        "mismatch/weight": token_mean(weight, mask, totals),
        "mismatch/weight_square": token_mean(weight * weight, mask, totals),
        "mismatch/ratio_max": masked_max(weight, mask),
    }


def coefficients(values: Mapping[str, float], mask: mx.array, totals: Totals) -> Metrics:
    """Coefficients that are not 0, each minibatch with its share of them so that they add up to themselves."""
    share = token_mean(mx.ones_like(mask), mask, totals)
    return {f"policy/{name}_coefficient": value * share for name, value in values.items()}


def finish(combined: Mapping[str, Any]) -> dict[str, float]:
    """The combined metrics of a step to what is shown: means over computed tokens, and `mismatch/ess` in (0, 1].

    ess = mean(w)^2 / mean(w^2), w = old/rollout: 1 where trainer and sampler agree (Kish). The loss, the clip
    fractions and the size of the advantage stay means over all tokens of the step; other names pass through.
    """
    out = {name: float(value) for name, value in combined.items()}
    share = out.pop(COMPUTED, 1.0)
    for name in out.keys() & PER_COMPUTED:
        out[name] = out[name] / share if share > 0 else 0.0
    weight, square = out.pop("mismatch/weight", 0.0), out.pop("mismatch/weight_square", 0.0)
    if square > 0:
        out["mismatch/ess"] = min(weight * weight / square, 1.0)
    return out
