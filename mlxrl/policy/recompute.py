"""Training passes that keep less for the backward pass: layers their inputs alone, SwiGLU its gate and up.

`recomputed` is gradient checkpointing by layers: each runs once more in the backward pass. Only arguments have a
gradient under a recomputation, so every array that a layer uses travels as one: its trainable leaves, its inputs, and
the contents of its cache before and after. See `differentiate.py`.

`memory_efficient`: MLX's autodiff keeps gate, sigmoid(gate), silu(gate) and up, each as wide as the layer is inside: a
third of what a layer of a usual model keeps. Gate and up are enough. On the CPU, where an exponential costs a dozen
multiplications, the sigmoid is kept too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxrl.policy.differentiate import own_gradient, replaced, run_checkpointed


@contextmanager
def recomputed(model: Any) -> Generator[None]:
    """A block in which every layer of a model keeps its inputs alone, and runs once more when needed.

    Each layer instance changes its class; the class itself and other models are left alone.
    """
    classes = [(layer, type(layer)) for layer in model.layers]
    try:
        for layer, own in classes:
            layer.__class__ = _recomputed_class(own)
        yield
    finally:
        for layer, own in classes:
            layer.__class__ = own


@cache
def _recomputed_class(own: type) -> type:
    """The subclass of a layer's class that runs its call through `run_checkpointed`."""

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        return run_checkpointed(self, lambda *a, **n: own.__call__(self, *a, **n), arguments, named)

    return type(own.__name__, (own,), {"__call__": call})


@contextmanager
def memory_efficient(model: nn.Module) -> Generator[None]:
    """A block in which the modules of a model that use mlx-lm's `swiglu` use ours. They import it by name."""
    from mlx_lm.models.activations import swiglu as theirs

    with ExitStack() as stack:
        for name in sorted({type(module).__module__ for module in model.modules()}):
            if vars(sys.modules[name]).get("swiglu") in (theirs, swiglu):
                stack.enter_context(replaced(sys.modules[name], "swiglu", swiglu))
        yield


def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """silu(gate) up = gate sigmoid(gate) up, value for value as mlx-lm computes it; gate, up: [..., F]."""
    return swiglu_keeping(mx.default_device() == mx.cpu)(gate, up)[0]


@cache
def swiglu_keeping(sigmoid: bool) -> Callable[[mx.array, mx.array], list[mx.array]]:
    """`swiglu` as a function to a list, with sigmoid(gate) as its second entry where that is kept.

    With s = sigmoid(gate) and the cotangent c:  d gate = c up s (1 + gate (1 - s)),  d up = c gate s
    """

    def forward(gate: mx.array, up: mx.array) -> list[mx.array]:
        s = mx.sigmoid(gate)
        return [gate * s * up, s] if sigmoid else [gate * s * up]

    def backward(primals: Any, cotangents: Any, results: Any) -> list[mx.array]:
        (gate, up), cotangent = primals, cotangents[0]
        s = results[1] if sigmoid else mx.sigmoid(gate)
        return [cotangent * up * (s * (1 + gate * (1 - s))), cotangent * (gate * s)]

    return own_gradient(forward, backward)
