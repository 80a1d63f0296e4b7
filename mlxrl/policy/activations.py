"""The gated activation of feed-forward layers with a gradient of its own: memory-efficient SwiGLU.

MLX's autodiff keeps gate, sigmoid(gate), silu(gate) and up, each as wide as the layer is inside: a third of what a
layer of a usual model holds for its backward pass. Gate and up are enough. On the CPU, where an exponential costs a
dozen multiplications, the sigmoid is kept too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxrl.policy.differentiate import own_gradient, replaced


@contextmanager
def memory_efficient(model: nn.Module) -> Generator[None]:
    """Let the modules of a model that use mlx-lm's `swiglu` use ours in a block. They import it by name."""
    from mlx_lm.models.activations import swiglu as theirs

    modules = [sys.modules[name] for name in sorted({type(module).__module__ for module in model.modules()})]
    with ExitStack() as stack:
        for module in modules:
            if vars(module).get("swiglu") in (theirs, swiglu):
                stack.enter_context(replaced(module, "swiglu", swiglu))
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
