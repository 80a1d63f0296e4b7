"""Differentiable caches that carry a shared prompt.

The prompt runs once at batch 1, in caches that keep their graph; the rows run against those caches, broadcast
to B. Gradients of the rows reach the prompt through the broadcast. Without an array mask attention keeps its
fused backward, so rows are padded on the right, where causality hides the padding.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxrl.policy.head import Head


def shared(model: nn.Module) -> bool:
    """Whether every cache of the model can carry a prefix."""
    from mlx_lm.models.cache import make_prompt_cache

    try:
        for cache in make_prompt_cache(model):
            _differentiable(cache)
    except NotImplementedError:
        return False
    return True


def hidden_states(model: nn.Module, head: Head, prefix: mx.array, tokens: mx.array) -> tuple[mx.array | None, mx.array]:
    """Hidden states of the prefix's last token, [D] (None where P is 0), and of the rows but their last token.

    prefix: [P]; tokens: [B, T]; returns rows of [B, T-1, D]: nothing is predicted from the last column.
    """
    rows, read = tokens.shape[0], tokens[:, :-1]
    if prefix.size == 0:
        return None, head.trunk(read)
    caches = prefix_caches(model)
    last = head.trunk(prefix[None], caches)[0, -1]
    if read.shape[1] == 0:
        return last, mx.zeros((rows, 0, last.shape[-1]), last.dtype)
    return last, head.trunk(read, [fork(cache, rows) for cache in caches])


def prefix_caches(model: nn.Module) -> list[Any]:
    """Fresh caches for a prefix, one a layer."""
    from mlx_lm.models.cache import make_prompt_cache

    return [_differentiable(cache) for cache in make_prompt_cache(model)]


def _differentiable(cache: Any) -> Any:
    """The cache of the same contents that never writes in place. A sliding window becomes a matter of the mask."""
    from mlx_lm.models.cache import ArraysCache, CacheList, ConcatenateKVCache, KVCache, RotatingKVCache

    if type(cache) in (KVCache, RotatingKVCache):
        return ConcatenateKVCache()
    if type(cache) is ArraysCache:
        return cache
    if type(cache) is CacheList:
        return CacheList(*(_differentiable(part) for part in cache.caches))
    raise NotImplementedError(f"a {type(cache).__name__} cannot carry a prefix")


def fork(cache: Any, rows: int) -> Any:
    """The cache of one sequence as that of `rows` sequences, in arrays of its own."""
    from mlx_lm.models.cache import ArraysCache, CacheList, ConcatenateKVCache

    def tile(array: mx.array | None) -> mx.array | None:
        return None if array is None else mx.broadcast_to(array, (rows, *array.shape[1:]))

    if isinstance(cache, CacheList):
        return CacheList(*(fork(part, rows) for part in cache.caches))
    if isinstance(cache, ArraysCache):
        forked = ArraysCache(len(cache.cache))
        forked.cache = [tile(array) for array in cache.cache]
        return forked
    forked = ConcatenateKVCache()
    if cache.keys is not None:
        forked.state = tile(cache.keys), tile(cache.values)
    return forked
