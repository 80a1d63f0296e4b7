"""Returns of every token or step, and whitening over a batch.

`reward_to_go` works on MLX arrays inside a loss; the others are host-side float64 numpy. Shapes: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import ArrayLike

from mlxrl.algo.advantages import Floats, Ids, members


def reward_to_go(rewards: mx.array, gamma: float = 1.0) -> mx.array:
    """[B, T] R_t = sum_{s>=t} gamma^(s-t) r_s, in log2(T) shifted additions; gamma 0 gives r back."""
    width, span, total = rewards.shape[-1], 1, rewards
    while span < width:
        later = mx.pad(total[..., span:], [(0, 0)] * (total.ndim - 1) + [(0, span)])
        total, span = total + gamma**span * later, 2 * span
    return total


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


def whiten(
    values: ArrayLike, mask: ArrayLike | None = None, ddof: int = 1, eps: float = 1e-8, floor: float = 0.0
) -> Floats:
    """Values to mean 0 and variance 1 over the unmasked ones (REINFORCE++, arXiv 2501.03262).

    (x - mean) / sqrt(max(var, floor) + eps);  var divides by n - ddof. Masked values are moved the same way.
    verl, slime: ddof 1, eps 1e-8. OpenRLHF: ddof 0, eps 0, floor 1e-8. All values equal: exactly 0.
    """
    values = np.asarray(values, dtype=np.float64)
    known = values if mask is None else values[np.asarray(mask, dtype=bool)]
    known = known[~np.isnan(known)]
    if known.size <= ddof or known.max() == known.min():
        return np.zeros_like(values)
    return np.nan_to_num((values - known.mean()) / np.sqrt(max(known.var(ddof=ddof), floor) + eps))


def step_returns(rewards: ArrayLike, trajectories: Ids, steps: ArrayLike, gamma: float = 0.95) -> Floats:
    """[N] G_n = r_n + gamma G_{n+1} within each trajectory, in the order of `steps` (GiGPO, arXiv 2505.10978).

    trajectories: [N] whose step it is; steps: [N] its place in time. Rows may be in any order.
    """
    rewards, steps = np.asarray(rewards, dtype=np.float64), np.asarray(steps)
    out = np.zeros_like(rewards)
    for rows in members(trajectories):
        running = 0.0
        for row in reversed(rows[np.argsort(steps[rows], kind="stable")]):
            running = rewards[row] + gamma * running
            out[row] = running
    return out


def discounted(rewards: Sequence[float], gamma: float) -> list[float]:
    """Returns of one trajectory's steps in time order."""
    return step_returns(rewards, [0] * len(rewards), range(len(rewards)), gamma).tolist()
