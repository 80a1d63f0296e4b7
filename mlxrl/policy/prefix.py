"""Differentiable caches that carry a shared prompt.

The prompt runs once at batch 1, in caches that keep their graph; the rows run against those caches, broadcast
to B. Gradients of the rows reach the prompt through the broadcast. Without an array mask attention keeps its
fused backward, so rows are padded on the right, where causality hides the padding.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxrl.policy.head import Head
from mlxrl.policy.recompute import Arrays


def shared(model: nn.Module) -> bool:
    """Whether every cache of the model can carry a prefix."""
    from mlx_lm.models.cache import make_prompt_cache

    try:
        for cache in make_prompt_cache(model):
            _differentiable(cache)
    except NotImplementedError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prefix that was run: last [D], the hidden state of its last token, and its caches, one a layer."""

    last: mx.array
    caches: list[Any]


def hidden_states(model: nn.Module, head: Head, prefix: mx.array, tokens: mx.array) -> tuple[mx.array | None, mx.array]:
    """Hidden states of the prefix's last token, [D] (None where P is 0), and of the rows but their last token.

    prefix: [P]; tokens: [B, T]; returns rows of [B, T-1, D]: nothing is predicted from the last column.
    """
    rows, read = tokens.shape[0], tokens[:, :-1]
    if prefix.size == 0:
        return None, head.trunk(read)
    if not shared(model):  # every row reads the prefix
        whole = head.trunk(mx.concatenate([mx.broadcast_to(prefix, (rows, prefix.size)), read], axis=1))
        return whole[0, prefix.size - 1], whole[:, prefix.size :]
    run = _carried(model, head, prefix)
    if read.shape[1] == 0:
        return run.last, mx.zeros((rows, 0, run.last.shape[-1]), run.last.dtype)
    return run.last, head.trunk(read, [fork(cache, rows) for cache in run.caches])


def run_prefix(model: nn.Module, head: Head, prefix: mx.array) -> Prefix:
    """Run a prefix [P] at batch 1."""
    caches = prefix_caches(model)
    return Prefix(head.trunk(prefix[None], caches)[0, -1], caches)


@contextmanager
def carrying(model: nn.Module, prefix: mx.array, run: Prefix) -> Generator[None]:
    """Let a model's passes in a block that begin with these ids begin from a run of them that is there already."""
    with _scope({"key": _key(model, prefix), "run": run}):
        yield


@contextmanager
def kept_prefix() -> Generator[None]:
    """Let the passes of a block, all without gradient and at the same weights, run a prefix that repeats once.

    Only the last one is kept, so passes that share a prefix have to follow each other.
    """
    with _scope({}):
        yield


_scopes: list[dict[str, Any]] = []  # a scope and not an argument, as a comparison or a teacher lies in between


@contextmanager
def _scope(scope: dict[str, Any]) -> Generator[None]:
    _scopes.append(scope)
    try:
        yield
    finally:
        _scopes.pop()


def _key(model: nn.Module, prefix: mx.array) -> tuple[int, bytes]:
    return id(model), np.array(prefix).tobytes()


def _carried(model: nn.Module, head: Head, prefix: mx.array) -> Prefix:
    if not _scopes:
        return run_prefix(model, head, prefix)
    scope, key = _scopes[-1], _key(model, prefix)
    if scope.get("key") != key:
        run = run_prefix(model, head, prefix)
        held = Arrays()
        held.out_of(run.caches)
        mx.eval(run.last, held.every)  # its activations end here, not with the rows
        scope.update(key=key, run=run)
    return scope["run"]


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
