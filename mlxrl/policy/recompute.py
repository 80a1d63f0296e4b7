"""Gradient checkpointing by layers: a pass keeps the inputs of each, and runs it once more in the backward pass.

A layer instance changes its class for the span of a block; its class and other models are left alone. Only arguments
have a gradient under a recomputation, so every array that a layer touches travels as one: its trainable leaves, its
inputs, and the contents of its cache before and after. See `differentiate.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxrl.policy.differentiate import Flat, bound, checkpointed, dropout_key, flattened, is_cache, trainable
from mlxrl.policy.lora import layers_of


@contextmanager
def recomputed(model: Any) -> Generator[None]:
    """Let every layer of a model keep its inputs alone for the span of a block, and run once more when needed."""
    layers = list(layers_of(model))
    classes = [type(layer) for layer in layers]
    try:
        for layer in layers:
            layer.__class__ = _recomputed_class(type(layer))
        yield
    finally:
        for layer, own in zip(layers, classes, strict=True):
            layer.__class__ = own


@cache
def _recomputed_class(own: type) -> type:
    """The subclass of a layer's class that runs its call through `run_checkpointed`."""

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        return run_checkpointed(self, lambda *a, **n: own.__call__(self, *a, **n), arguments, named)

    return type(own.__name__, (own,), {"__call__": call})


def run_checkpointed(
    module: nn.Module, call: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]
) -> Any:
    """call(*arguments, **named) as a function of arrays alone, and what it left in caches put back into them."""
    names, trained = trainable(module)
    given = flattened((arguments, named))
    key = dropout_key(module)
    first: list[Flat] = []

    def pure(*arrays: mx.array) -> list[mx.array]:
        own_arguments, own_named = given.rebuilt(arrays[len(names) :])
        with bound(module, names, arrays[: len(names)], key):
            result = call(*own_arguments, **own_named)
        found = flattened((result, [vars(cache) for cache in _caches((own_arguments, own_named))]))
        if not first:
            first.append(found)
        return found.floating

    arrays = checkpointed(pure)(*trained, *given.floating)
    result, contents = first[0].rebuilt(arrays)
    for original, content in zip(_caches((arguments, named)), contents, strict=True):
        vars(original).update(content)
    return result


def _caches(tree: Any) -> list[Any]:
    """The caches of a tree; those inside a cache are part of it."""
    if is_cache(tree):
        return [tree]
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    return [cache for item in items for cache in _caches(item)]
