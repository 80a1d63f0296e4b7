"""Divergences of the policy from a reference or a teacher: estimated on sampled tokens, or summed over distributions.

Distributions are log-probs in nats on their last axis, [B, T, K] of top ids or [B, T, V] of the vocabulary; ABSENT or
-inf marks an id that is missing. Sums over top ids need a tail or a renormalisation: without either, mass that leaves
the ids lowers the loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Literal, TypeAlias

import mlx.core as mx

from mlxrl.algo.losses import SAFE, PerToken, clamp, log_ratio
from mlxrl.checked import Interval

ABSENT = -1e30
Estimator: TypeAlias = Literal["k1", "abs", "k2", "k3"]
Distribution: TypeAlias = Annotated[mx.array, "... K"]
Values: TypeAlias = Annotated[mx.array, "..."]


def k3(x: mx.array) -> mx.array:
    """exp(-x) - 1 + x: unbiased and never negative (GRPO, arXiv 2402.03300 eq. 4)."""
    return mx.expm1(-x) + x  # exp(-x) - 1 would leave only the rounding of a small divergence


def reward_to_go(rewards: PerToken, gamma: float = 1.0) -> PerToken:
    """R_t = sum_{s>=t} gamma^(s-t) r_s, in log2(T) shifted additions; gamma 0 gives r back."""
    width, span, summed = rewards.shape[-1], 1, rewards
    while span < width:
        later = mx.pad(summed[..., span:], [(0, 0)] * (summed.ndim - 1) + [(0, span)])
        summed, span = summed + gamma**span * later, 2 * span
    return summed


def straight_through(value: mx.array, gradient: mx.array) -> mx.array:
    """One estimator's value with another one's gradient (verl's "k3+" is k3 with the gradient of k2)."""
    return mx.stop_gradient(value) + gradient - mx.stop_gradient(gradient)


ESTIMATORS: dict[str, Callable[[mx.array], mx.array]] = {
    "k1": lambda x: x,  # unbiased, noisy, and of either sign; its gradient has mean 0, so it belongs in the reward
    "abs": mx.abs,
    "k2": lambda x: 0.5 * x * x,  # biased in value, right in gradient
    "k3": k3,
}


def estimate(
    new: PerToken,
    reference: PerToken,
    mask: PerToken,
    estimator: Estimator = "k3",
    log_ratio_clamp: Interval | None = SAFE,
    value_clamp: Interval | None = None,
    weight: PerToken | None = None,
    straight: Estimator | None = None,
) -> PerToken:
    """Estimate of KL(new || reference) per sampled token, 0 under the mask (Schulman, "Approximating KL divergence").

    For tokens drawn from pi_new, with x = log pi_new - log pi_ref: E[k1] = E[k3] = KL(new || ref), and the gradient of
    k2 is that of the divergence. The gradient flows through `new`.

    Args:
        log_ratio_clamp: bounds of x inside the estimator, so that an exponential cannot overflow.
        value_clamp: bounds of the estimate (OpenRLHF, verl: -10 and 10).
        weight: importance ratio new/old that multiplies the estimate, before `value_clamp` (slime, TRL).
        straight: the estimator whose gradient is used instead of the value's own.
    """
    x = clamp(log_ratio(new, reference, mask), log_ratio_clamp)
    value = ESTIMATORS[estimator](x)
    value = clamp(value if weight is None else value * weight, value_clamp)
    return value if straight is None else straight_through(value, ESTIMATORS[straight](x))


def present(logprobs: Distribution) -> mx.array:
    """False for ids that are missing."""
    return logprobs > ABSENT / 2


def shared(student: Distribution, teacher: Distribution) -> tuple[Distribution, Distribution]:
    """Both at the ids that both have, ABSENT at the others: padded vocabularies may differ."""
    there = present(student) & present(teacher)
    return mx.where(there, student, ABSENT), mx.where(there, teacher, ABSENT)


def tail(logprobs: Distribution) -> mx.array:
    """[..., 1] log of the mass outside the ids: log(1 - sum_k p_k), at least 1e-7 of it."""
    kept = mx.maximum(logprobs, ABSENT)
    largest = mx.argmax(kept, axis=-1, keepdims=True) == mx.arange(kept.shape[-1])
    # 1 - p of the largest keeps its digits where the sum of all would round them away.
    without = -mx.expm1(mx.where(largest, kept, 0.0).sum(axis=-1, keepdims=True))
    outside = without - mx.where(largest, 0.0, mx.exp(kept)).sum(axis=-1, keepdims=True)
    return mx.log(mx.maximum(outside, 1e-7))


def with_tail(logprobs: Distribution) -> mx.array:
    """[..., K+1] the ids and one more for everything else."""
    return mx.concatenate([logprobs, tail(logprobs)], axis=-1)


def renormalised(logprobs: Distribution) -> Distribution:
    """Log-probs that add up to 1 over the ids."""
    kept = mx.maximum(logprobs, ABSENT)
    scaled = kept - mx.logsumexp(kept, axis=-1, keepdims=True)
    return mx.where(present(logprobs), scaled, ABSENT)


def forward_kl(student: Distribution, teacher: Distribution) -> Values:
    """KL(teacher || student) = sum_k p_t (log p_t - log p_s): the student covers the teacher's modes."""
    there = present(teacher) & present(student)
    safe = mx.where(there, teacher, 0.0)
    return mx.where(there, mx.exp(safe) * (safe - mx.where(there, student, 0.0)), 0.0).sum(axis=-1)


def reverse_kl(student: Distribution, teacher: Distribution) -> Values:
    """KL(student || teacher) = sum_k p_s (log p_s - log p_t): the student seeks a mode of the teacher's.

    The student's p_s must add up to 1: the gradient is `score_reverse_kl`'s, without the part that then sums to 0.
    """
    return straight_through(forward_kl(teacher, student), score_reverse_kl(student, teacher))


def score_reverse_kl(student: Distribution, teacher: Distribution) -> Values:
    """sum_k p_s sg(log p_s - log p_t): the reverse KL, with its score function's gradient (tinker)."""
    there = present(student) & present(teacher)
    gap = mx.stop_gradient(mx.where(there, student - teacher, 0.0))
    return mx.where(there, mx.exp(mx.where(there, student, 0.0)) * gap, 0.0).sum(axis=-1)


def jsd(student: Distribution, teacher: Distribution, beta: float = 0.5) -> Values:
    """Generalised Jensen-Shannon divergence (GKD, arXiv 2306.13649 eq. 3), with TRL's ends.

    beta KL(p_t || m) + (1-beta) KL(p_s || m),  m = beta p_t + (1-beta) p_s;  beta 0: forward KL, beta 1: reverse KL
    """
    if beta in (0, 1):
        return forward_kl(student, teacher) if beta == 0 else reverse_kl(student, teacher)
    both = [mx.maximum(p, ABSENT) for p in (student, teacher)]
    mixture = mx.logaddexp(both[0] + math.log1p(-beta), both[1] + math.log(beta))
    value = beta * forward_kl(mixture, teacher) + (1 - beta) * forward_kl(mixture, student)
    # The gradient through the mixture cancels term by term; left out, it adds no rounding error.
    return straight_through(value, (1 - beta) * score_reverse_kl(student, mixture))
