"""Maths that other libraries have and no algorithm of ours: what the numeric cases need besides `mlxrl.algo`.

Shapes: B sequences, T tokens, K top ids, V vocabulary, N completions; mask [B, T]; log-probs in nats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from numpy.typing import ArrayLike, NDArray

from mlxrl.algo.advantages import Floats, Ids, by_group, members, spread
from mlxrl.algo.divergence import ABSENT, ESTIMATORS, k3
from mlxrl.algo.losses import SAFE, clamp, importance, lengths, log_ratio
from mlxrl.algo.reduce import masked
from mlxrl.algo.terms import reward_to_go, within

Summary = dict[str, mx.array]
Over = Literal["token", "sum", "mean", "max"]

# Advantages


def group_spread(rewards: ArrayLike, ids: Ids) -> Floats:
    """[N] the standard deviation of each completion's group; NaN for a group with fewer than two scorable rewards."""
    rewards = np.asarray(rewards, dtype=np.float64)
    out = np.empty_like(rewards)
    for group in members(ids):
        out[group] = spread(rewards[group])
    return out


def raw_singles(advantages: Floats, rewards: ArrayLike, ids: Ids, eps: float = 0.0) -> Floats:
    """Advantages in which a group of one is taken against mean 0 and std 1 (verl), r / (1 + eps)."""
    out, rewards = advantages.copy(), np.asarray(rewards, dtype=np.float64)
    for group in members(ids):
        if group.size == 1:
            out[group] = rewards[group] / (1 + eps)
    return out


def pass_at_k(rewards: ArrayLike, ids: Ids, eps: float = 1e-6) -> Floats:
    """[N] only the best attempt is credited, with its lead over the second (verl's GRPO_PASSK, arXiv 2503.19595).

    A_best = (r_best - r_second) / (std_g + eps), A = 0 for the others
    """

    def lead(r: Floats) -> Floats:
        out = np.zeros_like(r)
        second, best = np.sort(r)[-2:]
        out[r.argmax()] = (best - second) / (spread(r) + eps)
        return out

    return by_group(rewards, ids, lead)


def optimal_baseline(rewards: ArrayLike, ids: Ids, lengths: ArrayLike) -> Floats:
    """[N] baseline weighted by length (OPO, arXiv 2505.23585): A_i = r_i - sum_g(len r) / sum_g(len).

    lengths: [N] sampled tokens of each attempt. A group without a token has advantage 0.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    weights = np.asarray(lengths, dtype=np.float64)
    out = np.zeros_like(rewards)
    for rows in members(ids):
        rows = rows[~np.isnan(rewards[rows])]
        r, w = rewards[rows], weights[rows]
        if rows.size and r.max() != r.min() and w.sum() > 0:
            out[rows] = r - (w * r).sum() / w.sum()
    return out


def gpg(rewards: ArrayLike, ids: Ids) -> Floats:
    """[N] A_i = N / #(r != 0) (r_i - mean_g): rescaled by the share of rewarded attempts (GPG, arXiv 2504.02546)."""
    rewards = np.asarray(rewards, dtype=np.float64)
    scored = rewards[~np.isnan(rewards)]
    rescale = scored.size / max(int((scored != 0).sum()), 1)
    return by_group(rewards, ids, lambda r: rescale * (r - r.mean()))


def episode_advantages(rewards: ArrayLike, groups: Ids, trajectories: Ids, relative: Any) -> Floats:
    """[N] each step with the advantage of its episode, where the group's statistics count every episode once.

    relative(rewards, groups): the advantages of episodes.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    episodes = members(list(zip(groups, trajectories, strict=True)))
    first = [int(steps[0]) for steps in episodes]
    out = np.zeros_like(rewards)
    for steps, value in zip(episodes, relative(rewards[first], [groups[n] for n in first]), strict=True):
        out[steps] = value
    return out


# Returns


def returns(rewards: ArrayLike, mask: ArrayLike, gamma: float = 1.0, skip_masked: bool = False) -> Floats:
    """[B, T] R_t = m_t r_t + gamma R_{t+1}, from the right.

    skip_masked: a masked token carries the return on undiscounted (verl); else it costs a factor gamma too.
    """
    rewards, mask = np.asarray(rewards, dtype=np.float64), np.asarray(mask, dtype=bool)
    out = np.zeros_like(rewards)
    running = np.zeros(rewards.shape[0])
    for t in reversed(range(rewards.shape[1])):
        step = np.where(mask[:, t], rewards[:, t], 0.0) + gamma * running
        running = np.where(mask[:, t] | (not skip_masked), step, running)
        out[:, t] = running
    return out


def at_last_token(values: ArrayLike, mask: ArrayLike) -> Floats:
    """[B] values placed on the last sampled token of their rows, [B, T]; nothing for a row without one."""
    values, mask = np.asarray(values, dtype=np.float64), np.asarray(mask, dtype=bool)
    out = np.zeros(mask.shape)
    rows = np.flatnonzero(mask.any(axis=1))
    last = mask.shape[1] - 1 - mask[:, ::-1].argmax(axis=1)
    out[rows, last[rows]] = values[rows]
    return out


# Policy losses


def reinforce(new: mx.array, advantage: mx.array) -> mx.array:
    """Score-function loss l = -A log pi (Williams, 1992)."""
    return -advantage * new


def dro(new: mx.array, log_ratio: mx.array, advantage: mx.array, beta: float = 0.5) -> mx.array:
    """Direct reward optimisation (arXiv 2405.19107), per token: l = -A log pi + beta/2 (log pi_new - log pi_old)^2."""
    return -advantage * new + 0.5 * beta * log_ratio * log_ratio


def vespo(
    new: mx.array,
    old: mx.array,
    advantage: mx.array,
    mask: mx.array,
    positive: tuple[float, float] = (2.0, 3.0),
    negative: tuple[float, float] = (3.0, 2.0),
) -> tuple[mx.array, mx.array]:
    """Gamma-shaped sequence weight (TRL's vespo): l = -phi A log pi, phi = w^k exp(lam (1 - w)) without gradient.

    w = the row's product of ratios, log w in [log 1e-8, 20]; (k, lam) is `positive` where A >= 0, else `negative`.

    Returns:
        [B, T] loss and phi, [B, T].
    """
    held = clamp(log_ratio(new, old, mask), (-20.0, 20.0)).sum(axis=-1, keepdims=True)
    log_w = clamp(held, (math.log(1e-8), 20.0))
    k, lam = (mx.where(advantage >= 0, p, n) for p, n in zip(positive, negative, strict=True))
    phi = mx.stop_gradient(mx.exp(lam + k * log_w - lam * mx.exp(log_w)))
    return -phi * advantage * new, phi


# Distributions and distillation


def log_softmax(logits: mx.array, temperature: float = 1.0) -> mx.array:
    """[..., V] log softmax(logits / temperature), upcast to float32 before the sum."""
    logits = logits.astype(mx.float32) / temperature
    largest = mx.stop_gradient(mx.argmax(logits, axis=-1, keepdims=True))
    below = logits - mx.take_along_axis(logits, largest, axis=-1)
    # log(1 + the others) keeps the digits of a token of p near 1, on which the mass left for all others depends.
    others = mx.where(mx.arange(logits.shape[-1]) == largest, 0.0, mx.exp(below))
    return below - mx.log1p(others.sum(axis=-1, keepdims=True))


def gather(logprobs: mx.array, ids: mx.array) -> mx.array:
    """[..., V] log-probs at ids [...] (one each) or [..., K] (K each)."""
    if ids.ndim == logprobs.ndim:
        return mx.take_along_axis(logprobs, ids, axis=-1)
    return mx.take_along_axis(logprobs, ids[..., None], axis=-1)[..., 0]


def entropy(logprobs: mx.array) -> mx.array:
    """[...] -sum_v p log p of log-probs [..., V]; an impossible token (-inf) adds 0."""
    finite = mx.maximum(logprobs, -1e30)
    return -(mx.exp(finite) * finite).sum(axis=-1)


def sum_squares(logprobs: mx.array) -> mx.array:
    """[...] sum_v p^2 of log-probs [..., V], the chance of drawing the same token twice."""
    return mx.exp(2 * logprobs).sum(axis=-1)


def high_entropy(entropies: ArrayLike, mask: ArrayLike, share: float) -> NDArray[np.float32]:
    """[B, T] 1 on the `share` of sampled tokens with the highest entropy (arXiv 2506.01939; TRL's top quantile).

    The threshold is the (1 - share) quantile of the unmasked entropies, linearly interpolated, in numpy.
    """
    entropies, mask = np.asarray(entropies, dtype=np.float64), np.asarray(mask) > 0
    if not mask.any():
        return np.zeros(mask.shape, dtype=np.float32)
    return ((entropies >= np.quantile(entropies[mask], 1 - share)) & mask).astype(np.float32)


def centred_kl_advantage(old: mx.array, reference: mx.array, mask: mx.array, gamma: float = 0.0) -> mx.array:
    """[B, T] the same against a reference, less its mean over the batch, so that it adds up to 0 (tinker)."""
    cost = log_ratio(mx.stop_gradient(old), reference, mask)
    return reward_to_go((cost.sum() / mx.maximum(mask.sum(), 1) - cost) * mask, gamma)


def minillm_advantage(
    old: mx.array, teacher: mx.array, mask: mx.array, gamma: float = 1.0, per_token: bool = True
) -> mx.array:
    """[B, T] sum_{s>=t} gamma^s (log pi_teacher - log pi_old)_s (MiniLLM, arXiv 2306.08543, as TRL has it).

    per_token: divided by sum_{s>=t} gamma^s m_s, masked tokens counting 1e-4. gamma 0 gives the token's own.
    """
    gain = -log_ratio(mx.stop_gradient(old), teacher, mask)
    if gamma == 0:
        return gain
    total = reward_to_go(gain, gamma)
    if per_token:
        return total / reward_to_go(mx.where(mask > 0, 1.0, 1e-4), gamma)
    return total * mx.power(gamma, mx.arange(gain.shape[-1]))


def truncated_forward_kl(student: mx.array, teacher: mx.array, floor: float | None = -10.0) -> mx.array:
    """[B, T] sum over the teacher's candidates only, log-probs held above `floor` (verl, which cuts it at 0).

    Without tail or renormalisation the sum can be negative, and shrinks as the student's mass leaves the candidates.
    """
    weight = mx.exp(mx.maximum(teacher, ABSENT))
    student, teacher = (clamp(p, (floor, None)) for p in (student, teacher))
    return (weight * (teacher - student)).sum(axis=-1)


def weighted_advantage(
    teacher: mx.array, rollout: mx.array, mask: mx.array, gamma: float = 0.5, eps: float = 1e-8
) -> tuple[mx.array, mx.array]:
    """Sampled-token advantage that counts more early in the row, where the gap still lies ahead (TRL's iw_opd).

    a_t = log p_teacher - log p_rollout;  w_t = 1 + gamma (1 - sum_{s<t} |a_s| / max(sum_s |a_s|, eps))
    The loss is -w_t a_t log p_t.

    Returns:
        [B, T] advantage a and [B, T] weight w.
    """
    gain = -log_ratio(mx.stop_gradient(rollout), teacher, mask)
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


# Mismatch between sampler and trainer


def batch_normalised(weight: mx.array, mask: mx.array, by_row: bool = False) -> mx.array:
    """Weights [B, T] divided by their mean over sampled tokens, or over rows of the row's mean (verl)."""
    total = (weight * mask).sum(axis=-1, keepdims=True)
    if by_row:
        mean = (total / lengths(mask)).sum() / mx.maximum(mx.any(mask > 0, axis=-1).sum(), 1)
    else:
        mean = total.sum() / mx.maximum(mask.sum(), 1)
    return mx.where(mean > 1e-8, weight / mx.maximum(mean, 1e-8), weight)


def rejection(
    old: mx.array,
    rollout: mx.array,
    mask: mx.array,
    estimator: str = "k3",
    over: Over = "token",
    bounds: tuple[float | None, float | None] = (None, 0.1),
) -> mx.array:
    """[B, T] or [B, 1] 1.0 where the divergence sampler/trainer lies within bounds, else 0.0 (verl's rejection).

    d = k(-x) of a token, or its "sum", "mean" or "max" over the row's tokens; k1, abs, k2 or k3 of `kl.ESTIMATORS`.
    k1 is a log-ratio: its bounds are logs.
    """
    values = ESTIMATORS[estimator](-clamp(mx.stop_gradient(log_ratio(old, rollout, mask)), SAFE))
    if over == "token":
        return within(values, bounds)
    if over == "max":
        row = mx.where(mask > 0, values, -mx.inf).max(axis=-1, keepdims=True)
        return within(mx.where(mx.isinf(row), 0.0, row), bounds)
    row = (values * mask).sum(axis=-1, keepdims=True)
    return within(row if over == "sum" else row / lengths(mask), bounds)


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
    gap = mx.stop_gradient(log_ratio(old, rollout, mask))
    token, row = importance(old, rollout, mask), importance(old, rollout, mask, "sequence_sum")
    return {
        "kl": mean(-gap, mask),
        "k3_kl": mean(k3(-gap), mask),
        "chi2_token": mean(token * token, mask) - 1,
        "chi2_seq": (row * row).mean() - 1,
    }


# Rewards and groups


def truncated_reward(reward: float, truncated: bool, coefficient: float) -> float:
    """Reward of a row that may have run into the limit: times a coefficient >= 0, or a negative one in its place.

    (OpenRLHF's stop-properly penalty.)
    """
    if not truncated:
        return reward
    return reward * coefficient if coefficient >= 0 else coefficient


def varied(rewards: Sequence[float], tolerance: float = 0.0) -> bool:
    """Whether a group teaches something: two scorable rewards that differ by a standard deviation over `tolerance`.

    tolerance 0 compares the raw rewards (tinker); slime asks for a standard deviation (n-1) over 1e-6. DAPO's dynamic
    sampling (arXiv 2503.14476) keeps such groups only.
    """
    known = [reward for reward in rewards if not math.isnan(reward)]
    if len(known) < 2 or max(known) == min(known):
        return False
    mean = math.fsum(known) / len(known)
    return math.sqrt(math.fsum((r - mean) ** 2 for r in known) / (len(known) - 1)) > tolerance


def mean_between(rewards: Sequence[float], low: float = 0.0, high: float = 1.0) -> bool:
    """Whether the group's mean reward lies strictly between two bounds (OpenRLHF's dynamic filtering)."""
    known = [reward for reward in rewards if not math.isnan(reward)]
    return bool(known) and low < math.fsum(known) / len(known) < high
