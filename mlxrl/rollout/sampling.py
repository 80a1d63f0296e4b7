"""Drawing a token for every row, and the log-prob of what was drawn."""

from __future__ import annotations

import mlx.core as mx

from mlxrl.types import Sampling


def fold(keys: mx.array, numbers: mx.array) -> mx.array:
    """A key for every (key, number): [..., 2] uint32 and [N] give [N, 2]. It depends on nothing else."""
    lane = mx.stack([mx.zeros_like(numbers), numbers], axis=-1).astype(mx.uint32)
    return mx.vmap(mx.random.split)(keys + lane)[:, 0]


def key_of(seed: int, step: int) -> mx.array:
    """The key of a step of a run, [2] uint32."""
    return mx.random.split(mx.array([seed % 2**32, step % 2**32], mx.uint32))[0]


def sample(logits: mx.array, keys: mx.array, sampling: Sampling) -> tuple[mx.array, mx.array, mx.array]:
    """Draw a token for every row with a key of its own.

    Args:
        logits: [B, V], any dtype; keys: [B, 2] uint32.
    Returns:
        tokens [B] int32; their log-probs [B] float32, of softmax(logits / temperature) before any filter;
        the keys of the next step [B, 2].
    """
    logits = logits.astype(mx.float32)
    if sampling.temperature not in (0.0, 1.0):
        logits = logits / sampling.temperature
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    if sampling.temperature == 0:
        tokens = mx.argmax(logprobs, axis=-1)
    else:
        pairs = mx.vmap(mx.random.split)(keys)
        keys = pairs[:, 0]
        tokens = mx.vmap(_categorical)(_filtered(logprobs, sampling), pairs[:, 1])
    tokens = tokens.astype(mx.int32)
    return tokens, mx.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0], keys


def _categorical(logits: mx.array, key: mx.array) -> mx.array:
    return mx.random.categorical(logits, key=key)


def _filtered(logprobs: mx.array, sampling: Sampling) -> mx.array:
    """Drop unlikely tokens: top-k, then top-p, then min-p. The likeliest always stays."""
    from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

    if 0 < sampling.top_k < logprobs.shape[-1]:
        logprobs = apply_top_k(logprobs, sampling.top_k)
    if sampling.top_p < 1:
        logprobs = apply_top_p(logprobs, sampling.top_p)
    if sampling.min_p > 0:
        logprobs = apply_min_p(logprobs, sampling.min_p)
    return logprobs
