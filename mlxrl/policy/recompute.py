"""Gradient checkpointing a layer at a time: a pass keeps the inputs of layers, and runs each again on the way back.

A layer instance changes its class for the span of a block; its class and other models are left alone. Under a
recomputation only arguments have a gradient, so every array that a layer touches travels as one: its trainable
leaves, its inputs, and the contents of its cache before and after.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from mlxrl.policy.adapters import layers_of, leaves

_engaged = 0


@contextmanager
def recomputed(model: Any) -> Generator[None]:
    """Let every layer of a model forget its activations for the span of a block, and make them again when needed."""
    layers = list(layers_of(model))
    classes = [type(layer) for layer in layers]
    try:
        for layer in layers:
            layer.__class__ = _forgetful(type(layer))
        yield
    finally:
        for layer, own in zip(layers, classes, strict=True):
            layer.__class__ = own


def recomputations() -> int:
    """How many calls of layers were set up to be run again, since the start."""
    return _engaged


def forgetful(function: Callable[..., Sequence[mx.array]]) -> Callable[..., list[mx.array]]:
    """A function of arrays that returns arrays, whose intermediate values are made again in the backward pass.

    Unlike in `mx.checkpoint` they are made only once the gradient of the results is there, so that of a chain of
    such functions one at a time holds its values. Closed-over arrays have no gradient.
    """

    def forward(primals: list[mx.array]) -> list[mx.array]:
        return list(function(*primals))

    def backward(primals: list[mx.array], cotangents: list[mx.array], _: Any) -> list[mx.array]:
        later = mx.depends(primals, cotangents)
        found = list(mx.vjp(lambda *arrays: list(function(*arrays)), later, cotangents)[1])
        return list(mx.depends(found, found))  # all at once, or the gradients of weights would keep their inputs

    again: Any = mx.custom_function(forward)
    again.vjp(backward)
    return lambda *primals: again(list(primals))


@contextmanager
def bound(module: nn.Module | None, parameters: Any, key: mx.array | None = None) -> Generator[None]:
    """Let a module compute with other parameters for the span of a block: a tree like its own, or a part of that.

    key: what its dropout layers draw from, so that a second run drops the same; None leaves them to MLX's generator.
    """
    if module is None:
        yield
        return
    own, layers = module.parameters(), [] if key is None else _dropouts(module)
    try:
        module.update(parameters)
        for layer, part in zip(layers, [] if key is None else mx.random.split(key, len(layers)), strict=True):
            layer.__class__ = _Drawn
            layer.__dict__["key"] = part
        yield
    finally:
        module.update(own)
        for layer in layers:
            layer.__class__ = nn.Dropout
            layer.__dict__.pop("key", None)


def dropout_key(module: nn.Module) -> mx.array | None:
    """A key for one run of a module, None where nothing in it is random."""
    return mx.random.randint(0, 2**31 - 1, (2,)).astype(mx.uint32) if _dropouts(module) else None


def _dropouts(module: nn.Module) -> list[Any]:
    return [m for m in module.modules() if type(m) is nn.Dropout and m.training and m._p_1 < 1]  # pyright: ignore[reportPrivateUsage]


class _Drawn(nn.Dropout):
    """Dropout that draws from a key of its own."""

    def __call__(self, x: mx.array) -> mx.array:
        return mx.random.bernoulli(self._p_1, x.shape, key=self.__dict__["key"]) * x * (1 / self._p_1)


@cache
def _forgetful(own: type) -> type:
    """The subclass of a layer's class that runs its call through `forgetful`."""

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        return _run_again(self, lambda *a, **n: own.__call__(self, *a, **n), arguments, named)

    return type(own.__name__, (own,), {"__call__": call})


def _run_again(module: nn.Module, call: Callable[..., Any], arguments: Any, named: Any) -> Any:
    """call(*arguments, **named) as a function of arrays alone, and what it left in caches put back into them."""
    global _engaged
    _engaged += 1
    taken = Arrays()
    frame = taken.out_of((arguments, named))
    trained = leaves(module.trainable_parameters())
    key = dropout_key(module)
    left: list[tuple[Arrays, Any]] = []

    def pure(*primals: mx.array) -> list[mx.array]:
        own_arguments, own_named = taken.into(frame, primals[len(trained) :])
        with bound(module, tree_unflatten([(name, p) for (name, _), p in zip(trained, primals, strict=False)]), key):
            result = call(*own_arguments, **own_named)
        results = Arrays()
        left[:] = [(results, results.out_of((result, _contents((own_arguments, own_named)))))]
        return results.floating

    outputs = forgetful(pure)(*(leaf for _, leaf in trained), *taken.floating)
    results, form = left[0]
    result, contents = results.into(form, outputs)
    for original, content in zip(_caches((arguments, named)), contents, strict=True):
        vars(original).update(content)
    return result


class Arrays:
    """The arrays taken out of a tree of lists, tuples, dicts and caches, in order; those of floats can be exchanged."""

    def __init__(self) -> None:
        self.every: list[mx.array] = []

    @property
    def floating(self) -> list[mx.array]:
        return [array for array in self.every if mx.issubdtype(array.dtype, mx.floating)]

    def out_of(self, value: Any) -> Any:
        """The tree with places where arrays were."""

        def take(array: mx.array) -> _Place:
            self.every.append(array)
            return _Place(len(self.every) - 1)

        return _mapped(value, mx.array, take)

    def into(self, form: Any, floating: Sequence[mx.array]) -> Any:
        """A new tree, caches new too, with other arrays of floats."""
        others = iter(floating)
        arrays = [next(others) if mx.issubdtype(a.dtype, mx.floating) else a for a in self.every]
        return _mapped(form, _Place, lambda place: arrays[place.index])


@dataclass(frozen=True, slots=True)
class _Place:
    index: int


def _mapped(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """A copy of a tree in which every leaf of a kind is changed."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(item, kind, change) for item in value)
    if isinstance(value, dict):
        return {name: _mapped(item, kind, change) for name, item in value.items()}
    if _is_cache(value):
        clone = copy.copy(value)
        vars(clone).update(_mapped(vars(value), kind, change))
        return clone
    return value


def _is_cache(value: Any) -> bool:
    from mlx_lm.models.cache import _BaseCache  # pyright: ignore

    return isinstance(value, _BaseCache)


def _caches(tree: Any) -> list[Any]:
    """The caches of a tree; those inside a cache are part of it."""
    if _is_cache(tree):
        return [tree]
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    return [cache for item in items for cache in _caches(item)]


def _contents(tree: Any) -> list[dict[str, Any]]:
    return [vars(cache) for cache in _caches(tree)]
