"""The gated activation of feed-forward layers with a gradient of its own, for the span of a training pass.

MLX's autodiff keeps gate, sigmoid(gate), silu(gate) and up, each as wide as the layer is inside: a third of what a
layer of a usual model holds for its backward pass. Gate and up are enough. On the CPU, where an exponential costs a
dozen multiplications, the sigmoid is kept too.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

_engaged = 0


@contextmanager
def lean(model: nn.Module) -> Generator[None]:
    """Let the modules of a model that use mlx-lm's `swiglu` use `gated` in a block. They import it by name."""
    from mlx_lm.models.activations import swiglu

    names = {type(module).__module__ for module in model.modules()}
    users: list[Any] = [sys.modules[name] for name in sorted(names) if vars(sys.modules[name]).get("swiglu") is swiglu]
    try:
        for user in users:
            user.swiglu = gated
        yield
    finally:
        for user in users:
            user.swiglu = swiglu


def gated(gate: mx.array, up: mx.array) -> mx.array:
    """silu(gate) up = gate sigmoid(gate) up, value for value as mlx-lm computes it; gate, up: [..., F]."""
    global _engaged
    _engaged += 1
    return gated_by(mx.default_device() == mx.cpu)(gate, up)[0]


def activations() -> int:
    """How often `gated` has been called, or traced, since the start."""
    return _engaged


@cache
def gated_by(keeping: bool) -> Any:
    """`gated` as a function to a list, with sigmoid(gate) as its second entry where that is kept.

    With s = sigmoid(gate) and the cotangent c:  d gate = c up s (1 + gate (1 - s)),  d up = c gate s
    """

    def forward(gate: mx.array, up: mx.array) -> list[mx.array]:
        s = mx.sigmoid(gate)
        return [gate * s * up, s] if keeping else [gate * s * up]

    def backward(primals: Any, cotangents: Any, outputs: Any) -> tuple[mx.array, mx.array]:
        (gate, up), cotangent = primals, cotangents[0]
        s = outputs[1] if keeping else mx.sigmoid(gate)
        return cotangent * up * (s * (1 + gate * (1 - s))), cotangent * (gate * s)

    function: Any = mx.custom_function(forward)
    function.vjp(backward)
    return function
