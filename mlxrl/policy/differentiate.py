"""Functions with a gradient of our own, and how modules compute with arrays that travel as arguments.

A training pass keeps less than autodiff would in three places: layers are recomputed in the backward pass
(`recompute.py`), so are the logits of a chunk (`head.py`), and a prefix that several micro-batches share runs backward
once for all of them (`train/gradient.py`). `checkpointed` keeps the arguments of a function, and runs it once more in
the backward pass. `precomputed` makes the gradient together with the value, so that what both need is computed once and
freed before the backward pass. Five properties of MLX decide how they are written:

1. Only arguments have a gradient. Under `mx.custom_function` and `mx.checkpoint`, an array that a function closes over
   gets a gradient of zero, without an error. So whatever is trained, or depends on what is trained, is an argument:
   the trainable leaves of a module (`trainable`, put back by `bound`), and the arrays inside of arguments and KV caches
   (`flattened`). What a layer leaves in a cache is one of its results.
2. `mx.vjp` of a function that returns one array twice drops the second cotangent. A layer that shares its keys with
   later ones returns what it cached, and its gradient would be wrong without an error: `distinct` makes two of one.
3. MLX computes whatever it can. In the backward graph of `mx.checkpoint` the recomputation needs the arguments alone,
   so that of all layers could run first, and their values exist together. Here the arguments depend on the cotangents:
   a layer is recomputed once the gradient of its results is there. Its gradients depend on each other, because one
   that nothing waits for, as that of a weight, would keep alive what it is made of until the end.
4. For the same reason each chunk of the head depends on the one before. MLX's CPU stream besides accepts, and allocates
   for, `IN_FLIGHT` operations before the first has run; `after` puts as many that do nothing between two chunks.
5. A cotangent has the type of its array, or `astype` refuses it: the product of a float32 cotangent and a bfloat16
   gradient is cast back.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, TypeAlias, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map, tree_unflatten

Rebuild: TypeAlias = Callable[[Sequence[mx.array]], Any]

IN_FLIGHT = 100


def own_gradient(
    forward: Callable[..., Sequence[mx.array]], backward: Callable[[Any, Any, Any], Sequence[mx.array]]
) -> Callable[..., list[mx.array]]:
    """A function of arrays that returns arrays, whose gradient is backward(arguments, cotangents, results)."""
    function: Any = mx.custom_function(lambda primals: distinct(forward(*primals)))
    function.vjp(lambda primals, cotangents, results: list(backward(primals, cotangents, results)))
    return lambda *primals: function(list(primals))


def checkpointed(function: Callable[..., Sequence[mx.array]]) -> Callable[..., list[mx.array]]:
    """A function of arrays that returns arrays, which runs once more in the backward pass and keeps nothing for it."""

    def backward(primals: list[mx.array], cotangents: list[mx.array], _: Any) -> list[mx.array]:
        gradients = vjp(function, mx.depends(primals, cotangents), cotangents)
        return list(mx.depends(gradients, gradients))

    return own_gradient(function, backward)


def precomputed(function: Callable[..., Sequence[mx.array]]) -> Callable[..., mx.array]:
    """A function of arrays to [value, *gradients] as one to the value, whose backward pass is cotangent * gradient.

    gradients: of the first arguments, as many as there are; the others are constants.
    """

    def backward(primals: list[mx.array], cotangents: list[mx.array], results: list[mx.array]) -> list[mx.array]:
        gradients = [(cotangents[0] * gradient).astype(gradient.dtype) for gradient in results[1:]]
        return [*gradients, *(mx.zeros_like(primal) for primal in primals[len(gradients) :])]

    whole = own_gradient(function, backward)
    return lambda *primals: whole(*primals)[0]


def vjp(
    function: Callable[..., Sequence[mx.array]], primals: Sequence[mx.array], cotangents: Sequence[mx.array]
) -> list[mx.array]:
    """The gradients of a function's arguments, given those of its results."""
    return list(mx.vjp(lambda *arrays: distinct(function(*arrays)), list(primals), list(cotangents))[1])


def distinct(arrays: Sequence[mx.array]) -> list[mx.array]:
    """The arrays, each an object of its own; no values are copied."""
    found: list[mx.array] = []
    for array in arrays:
        repeated = any(array is other for other in found)
        found.append(mx.depends([array], [array])[0] if repeated else array)
    return found


def after(arrays: Sequence[mx.array], then: mx.array) -> mx.array:
    """An array that exists after some others do; on the CPU also after they have been computed, see 4. above."""
    (mark,) = mx.depends([mx.zeros(1)], list(arrays))
    for _ in range(IN_FLIGHT if mx.default_device() == mx.cpu else 0):
        mark = mark + 0
    return mx.depends([then], [mark])[0]


def leaves(tree: Any) -> list[tuple[str, mx.array]]:
    """The arrays of a tree with their names, as MLX flattens it."""
    return cast(list[tuple[str, mx.array]], tree_flatten(tree))


def trainable(module: nn.Module) -> tuple[list[str], list[mx.array]]:
    """Names and arrays of a module's trainable parameters."""
    found = dict(leaves(module.trainable_parameters()))
    return list(found), list(found.values())


@contextmanager
def bound(module: nn.Module, names: Sequence[str], arrays: Sequence[mx.array]) -> Generator[None]:
    """A block in which a module computes with other arrays as its parameters of these names."""
    own = module.parameters()
    try:
        module.update(tree_unflatten(list(zip(names, arrays, strict=True))))
        yield
    finally:
        module.update(own)


def flattened(tree: Any) -> tuple[list[mx.array], Rebuild]:
    """The floating arrays of lists, tuples, dicts and KV caches, and what makes a new tree with others in their place.

    Caches are new too, with the contents that they had here.
    """
    arrays: list[mx.array] = []

    def take(array: mx.array) -> mx.array:
        if mx.issubdtype(array.dtype, mx.floating):
            arrays.append(array)
        return array

    form = mapped(take, tree)

    def rebuild(others: Sequence[mx.array]) -> Any:
        rest = iter(others)
        return mapped(lambda array: next(rest) if mx.issubdtype(array.dtype, mx.floating) else array, form)

    return arrays, rebuild


def mapped(change: Callable[[mx.array], mx.array], tree: Any) -> Any:
    """A copy of a tree with every array changed, also those in its KV caches, which are copied."""

    def leaf(value: Any) -> Any:
        if isinstance(value, mx.array):
            return change(value)
        if not _is_cache(value):
            return value
        clone = copy.copy(value)
        vars(clone).update(mapped(change, vars(value)))
        return clone

    return tree_map(leaf, tree)


def _is_cache(value: Any) -> bool:
    """Whether a value is a KV cache or another state of mlx-lm's layers."""
    from mlx_lm.models.cache import _BaseCache  # pyright: ignore

    return isinstance(value, _BaseCache)


def run_checkpointed(
    module: nn.Module, call: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]
) -> Any:
    """call(*arguments, **named) as a function of arrays alone, and what it left in caches put back into them."""
    names, trained = trainable(module)
    given, rebuild_given = flattened((arguments, named))
    first: list[Rebuild] = []

    def pure(*arrays: mx.array) -> list[mx.array]:
        own_arguments, own_named = rebuild_given(arrays[len(names) :])
        with bound(module, names, arrays[: len(names)]):
            result = call(*own_arguments, **own_named)
        found, rebuild = flattened((result, _caches((own_arguments, own_named))))
        if not first:
            first.append(rebuild)
        return found

    arrays = checkpointed(pure)(*trained, *given)
    result, caches = first[0](arrays)
    for original, changed in zip(_caches((arguments, named)), caches, strict=True):
        vars(original).update(vars(changed))
    return result


def _caches(tree: Any) -> list[Any]:
    """The caches of a tree; those inside a cache are part of it."""
    return [value for _, value in leaves(tree) if _is_cache(value)]


_replaced: dict[tuple[ModuleType, str], tuple[Any, list[Any]]] = {}
"""By module and name, its own function and those of the blocks that replace it."""


@contextmanager
def replaced(module: ModuleType, name: str, function: Any) -> Generator[None]:
    """A block in which a module's function is another. Blocks may overlap, and end in any order."""
    own, blocks = _replaced.setdefault((module, name), (getattr(module, name), []))
    blocks.append(function)
    setattr(module, name, function)
    try:
        yield
    finally:
        blocks.pop()
        if not blocks:
            setattr(module, name, own)
            del _replaced[module, name]
