"""On-policy distillation: a student learns, on its own samples, from a teacher's log-probs of them.

Shapes: B rows, T tokens, V vocabulary, K candidates. Distributions are log-probs on their last axis, [B, T, K] or
[B, T, V]; nats; every result is [B, T]. ABSENT marks a candidate that is not there (-inf does too). Top-K sums need a
tail or a renormalisation: without either, mass that leaves the candidates looks like progress.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import mlx.core as mx

from mlxrl.algo.kl import straight_through
from mlxrl.algo.ratio import Bounds, clamp, token
from mlxrl.algo.returns import reward_to_go

ABSENT = -1e30
Divergence: TypeAlias = Callable[..., mx.array]


def present(logprobs: mx.array) -> mx.array:
    """[..., K] True for candidates that are there."""
    return logprobs > ABSENT / 2


def reverse_kl_advantage(
    old: mx.array, teacher: mx.array, mask: mx.array, gamma: float = 0.0, bounds: Bounds | None = None
) -> mx.array:
    """[B, T] A_t = -sum_{s>=t} gamma^(s-t) clip(log pi_old - log pi_teacher)_s, the sampled token's reverse KL.

    gamma 0 credits the token alone (slime, OpenClaw, tinker's default); the gradient is that of the per-token KL.
    """
    return -reward_to_go(clamp(token(mx.stop_gradient(old), teacher, mask), bounds), gamma)


def centred_kl_advantage(old: mx.array, reference: mx.array, mask: mx.array, gamma: float = 0.0) -> mx.array:
    """[B, T] the same against a reference, less its mean over the batch, so that it adds up to 0 (tinker)."""
    cost = token(mx.stop_gradient(old), reference, mask)
    return reward_to_go((cost.sum() / mx.maximum(mask.sum(), 1) - cost) * mask, gamma)


def minillm_advantage(
    old: mx.array, teacher: mx.array, mask: mx.array, gamma: float = 1.0, per_token: bool = True
) -> mx.array:
    """[B, T] sum_{s>=t} gamma^s (log pi_teacher - log pi_old)_s (MiniLLM, arXiv 2306.08543, as TRL has it).

    per_token: divided by sum_{s>=t} gamma^s m_s, masked tokens counting 1e-4. gamma 0 gives the token's own.
    """
    gain = -token(mx.stop_gradient(old), teacher, mask)
    if gamma == 0:
        return gain
    total = reward_to_go(gain, gamma)
    if per_token:
        return total / reward_to_go(mx.where(mask > 0, 1.0, 1e-4), gamma)
    return total * mx.power(gamma, mx.arange(gain.shape[-1]))


def tail(logprobs: mx.array) -> mx.array:
    """[..., 1] log of the mass outside the candidates: log(1 - sum_k p_k), at least 1e-7 of it."""
    kept = mx.maximum(logprobs, ABSENT)
    largest = mx.argmax(kept, axis=-1, keepdims=True) == mx.arange(kept.shape[-1])
    # 1 - p of the largest keeps its digits where the sum of all would round them away.
    without = -mx.expm1(mx.where(largest, kept, 0.0).sum(axis=-1, keepdims=True))
    outside = without - mx.where(largest, 0.0, mx.exp(kept)).sum(axis=-1, keepdims=True)
    return mx.log(mx.maximum(outside, 1e-7))


def with_tail(logprobs: mx.array) -> mx.array:
    """[..., K+1] the candidates and one more for everything else."""
    return mx.concatenate([logprobs, tail(logprobs)], axis=-1)


def renormalised(logprobs: mx.array) -> mx.array:
    """[..., K] log-probs that add up to 1 over the candidates."""
    kept = mx.maximum(logprobs, ABSENT)
    scaled = kept - mx.logsumexp(kept, axis=-1, keepdims=True)
    return mx.where(present(logprobs), scaled, ABSENT)


def forward_kl(student: mx.array, teacher: mx.array) -> mx.array:
    """[B, T] KL(teacher || student) = sum_k p_t (log p_t - log p_s): the student covers the teacher's modes."""
    there = present(teacher) & present(student)
    safe = mx.where(there, teacher, 0.0)
    return mx.where(there, mx.exp(safe) * (safe - mx.where(there, student, 0.0)), 0.0).sum(axis=-1)


def reverse_kl(student: mx.array, teacher: mx.array) -> mx.array:
    """[B, T] KL(student || teacher) = sum_k p_s (log p_s - log p_t): the student seeks a mode of the teacher's.

    The student's p_s must add up to 1: the gradient is `score_reverse_kl`'s, without the part that then sums to 0.
    """
    return straight_through(forward_kl(teacher, student), score_reverse_kl(student, teacher))


def jsd(student: mx.array, teacher: mx.array, beta: float = 0.5) -> mx.array:
    """[B, T] generalised Jensen-Shannon divergence (GKD, arXiv 2306.13649 eq. 3), with TRL's ends.

    beta KL(p_t || m) + (1-beta) KL(p_s || m),  m = beta p_t + (1-beta) p_s;  beta 0: forward KL, beta 1: reverse KL
    """
    if beta in (0, 1):
        return forward_kl(student, teacher) if beta == 0 else reverse_kl(student, teacher)
    held = [mx.maximum(p, ABSENT) for p in (student, teacher)]
    mixture = mx.logaddexp(held[0] + math.log1p(-beta), held[1] + math.log(beta))
    value = beta * forward_kl(mixture, teacher) + (1 - beta) * forward_kl(mixture, student)
    # The gradient through the mixture cancels term by term; left out, it leaves no rounding error behind.
    return straight_through(value, (1 - beta) * score_reverse_kl(student, mixture))


def truncated_forward_kl(student: mx.array, teacher: mx.array, floor: float | None = -10.0) -> mx.array:
    """[B, T] sum over the teacher's candidates only, log-probs held above `floor` (verl, which cuts it at 0).

    Without tail or renormalisation the sum can be negative, and shrinks as the student's mass leaves the candidates.
    """
    weight = mx.exp(mx.maximum(teacher, ABSENT))
    student, teacher = (clamp(p, (floor, None)) for p in (student, teacher))
    return (weight * (teacher - student)).sum(axis=-1)


def score_reverse_kl(student: mx.array, teacher: mx.array) -> mx.array:
    """[B, T] sum_k p_s sg(log p_s - log p_t): the reverse KL, with its score function's gradient (tinker)."""
    there = present(student) & present(teacher)
    gap = mx.stop_gradient(mx.where(there, student - teacher, 0.0))
    return mx.where(there, mx.exp(mx.where(there, student, 0.0)) * gap, 0.0).sum(axis=-1)


def surrogate(
    student: mx.array,
    teacher: mx.array,
    clip: tuple[float, float] = (0.2, 0.28),
    gap_bound: float | None = None,
    log_ratio_clamp: Bounds | None = (-20.0, 20.0),
    old: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Clipped policy gradient on the student's own top-K candidates (OpenClaw-RL's hint distillation).

    A_k = w_k clip(log p_t - log p_old, -gap_bound, gap_bound),  w = softmax over the candidates of log p_old
    l = sum_k max(-A r, -A clip(r, 1-low, 1+high)),  r = exp(log p_s - log p_old)

    Args:
        student, teacher: [B, T, K] log-probs of the full vocabulary at the student's candidates.
        old: [B, T, K] the student's at sampling time; None takes sg(student), r = 1.
    Returns:
        [B, T] loss, and [B, T] the teacher gap sum_k w |log p_t - log p_old|.
    """
    old = mx.stop_gradient(student if old is None else old)
    weight = mx.softmax(old, axis=-1)
    gap = teacher - old
    bounds = None if gap_bound is None else (-gap_bound, gap_bound)
    advantage = mx.stop_gradient(clamp(gap, bounds) * weight)
    ratio = mx.exp(clamp(student - old, log_ratio_clamp))
    loss = mx.maximum(-advantage * ratio, -advantage * clamp(ratio, (1 - clip[0], 1 + clip[1])))
    return loss.sum(axis=-1), (weight * mx.abs(gap)).sum(axis=-1)


def weighted_advantage(
    teacher: mx.array, rollout: mx.array, mask: mx.array, gamma: float = 0.5, eps: float = 1e-8
) -> tuple[mx.array, mx.array]:
    """Sampled-token advantage that counts more early in the row, where the gap still lies ahead (TRL's iw_opd).

    a_t = log p_teacher - log p_rollout;  w_t = 1 + gamma (1 - sum_{s<t} |a_s| / max(sum_s |a_s|, eps))
    The loss is -w_t a_t log p_t.

    Returns:
        [B, T] advantage a and [B, T] weight w.
    """
    gain = -token(mx.stop_gradient(rollout), teacher, mask)
    size = mx.abs(gain)
    before = mx.cumsum(size, axis=-1) - size
    return gain, 1 + gamma * (1 - before / mx.maximum(size.sum(axis=-1, keepdims=True), eps))


def top_ids(logprobs: mx.array, k: int) -> mx.array:
    """[..., K] ids of the K largest log-probs of [..., V], in no order."""
    width = logprobs.shape[-1]
    if not 1 <= k <= width:
        raise ValueError(f"distill: top_ids: wanted k between 1 and the vocabulary's {width}, got {k}")
    return mx.argpartition(mx.stop_gradient(logprobs), kth=width - k, axis=-1)[..., width - k :]


def union(first: mx.array, second: mx.array) -> tuple[mx.array, mx.array]:
    """Ids [..., K] and [..., L] side by side, [..., K+L], and a flag of those not seen before."""
    ids = mx.concatenate([first, second], axis=-1)
    seen = mx.any(second[..., :, None] == first[..., None, :], axis=-1)
    return ids, mx.concatenate([mx.ones_like(first) > 0, ~seen], axis=-1)


DIVERGENCES: dict[str, Divergence] = {"forward": forward_kl, "reverse": reverse_kl, "jsd": jsd}
