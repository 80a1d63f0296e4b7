"""Log-probs and entropy from logits, in float32. Shapes: B rows, T tokens, V vocabulary, K candidates; nats."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from numpy.typing import ArrayLike, NDArray


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
