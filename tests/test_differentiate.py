"""Functions with a gradient of our own, and the arrays that travel as their arguments."""

from __future__ import annotations

import types

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, ConcatenateKVCache

from mlxrl.policy.differentiate import (
    after,
    bound,
    distinct,
    flattened,
    own_gradient,
    precomputed,
    replaced,
    trainable,
    vjp,
)


def test_a_gradient_of_our_own_is_the_one_that_is_used():
    """Twice the true gradient of x^2, at 3: 12."""
    square = own_gradient(lambda x: [x * x], lambda primals, cotangents, results: [4 * primals[0] * cotangents[0]])
    value, gradient = mx.value_and_grad(lambda x: square(x)[0])(mx.array(3.0))
    assert (value.item(), gradient.item()) == (9.0, 12.0)


def test_a_precomputed_gradient_is_multiplied_by_the_cotangent():
    """f = a^2 b with gradients (2 a b, a^2): at 3, 5 and for 10 f they are 300 and 90; what has none is constant."""
    function = precomputed(lambda a, b, c: [a * a * b, 2 * a * b, a * a])
    gradients = mx.grad(lambda a, b, c: 10 * function(a, b, c), argnums=(0, 1, 2))(*map(mx.array, (3.0, 5.0, 7.0)))
    assert [gradient.item() for gradient in gradients] == [300.0, 90.0, 0.0]


def test_a_precomputed_gradient_has_the_type_of_its_argument():
    """A cotangent of another type would be refused by the operations before."""
    function = precomputed(lambda x: [x.astype(mx.float32).sum(), mx.ones_like(x)])
    gradient = mx.grad(lambda x: function((2 * x).astype(mx.bfloat16)))(mx.ones(3))
    assert gradient.tolist() == [2.0, 2.0, 2.0]


def test_one_array_becomes_two_without_a_copy():
    x = mx.array([1.0, 2.0])
    first, second, third = distinct([x, x, 2 * x])
    assert first is x
    assert second is not x
    assert second.tolist() == x.tolist()
    assert third.tolist() == [2.0, 4.0]
    (gradient,) = vjp(lambda x: [x, x], [x], [mx.ones(2), 5 * mx.ones(2)])
    assert gradient.tolist() == [6.0, 6.0]


def test_what_comes_after_has_the_same_values():
    assert after([mx.ones(3), mx.zeros(2)], mx.array([4.0, 5.0])).tolist() == [4.0, 5.0]


def test_arrays_travel_out_of_trees_and_caches_and_back():
    keys = ConcatenateKVCache()
    keys.update_and_fetch(mx.ones((1, 1, 3, 2)), 2 * mx.ones((1, 1, 3, 2)))
    state = ArraysCache(2)
    state[0] = mx.array([3.0])
    tree = ({"mask": mx.array([True]), "n": 5}, [CacheList(keys, state), None], mx.array(7.0))
    floating, rebuild = flattened(tree)
    assert [array.dtype for array in floating] == [mx.float32] * 4
    again = rebuild([array + 1 for array in floating])
    assert again[0]["n"] == 5
    assert again[0]["mask"].item()
    assert again[1][1] is None
    others, states = again[1][0].caches
    assert type(others) is ConcatenateKVCache
    assert (others.keys[0, 0, 0, 0].item(), others.values[0, 0, 0, 0].item(), others.offset) == (2.0, 3.0, 3)
    assert (states[0].item(), states[1], again[2].item()) == (4.0, None, 8.0)
    assert (keys.keys[0, 0, 0, 0].item(), state[0].item()) == (1.0, 3.0)  # those given are left alone


def test_a_module_computes_with_other_arrays_for_a_block():
    layer = nn.Linear(2, 1, bias=False)
    layer.weight = mx.array([[1.0, 2.0]])
    own, x = layer.weight, mx.array([3.0, 4.0])
    names, arrays = trainable(layer)
    assert (names, trainable(nn.Module())) == (["weight"], ([], []))
    with bound(layer, names, [2 * array for array in arrays]):
        assert layer(x).item() == 22.0
    assert layer(x).item() == 11.0
    assert layer.weight is own
    with pytest.raises(RuntimeError), bound(layer, names, arrays):
        raise RuntimeError
    assert layer.weight is own
    with bound(nn.Module(), [], []):
        pass


def test_a_function_is_replaced_until_the_last_block_ends():
    module = types.ModuleType("module")
    module.double = own = lambda x: 2 * x
    first, second = replaced(module, "double", abs), replaced(module, "double", abs)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert module.double is abs
    second.__exit__(None, None, None)
    assert module.double is own
