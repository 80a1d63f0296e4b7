"""The gated activation of feed-forward layers with a gradient of its own, for the span of a training pass.

MLX's autodiff keeps gate, sigmoid(gate), silu(gate) and up, each as wide as the layer is inside: half of what a layer
of a usual model holds for its backward pass. Two of them are enough.
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
    return _gated()(gate, up)


def activations() -> int:
    """How often `gated` has been called, or traced, since the start."""
    return _engaged


@cache
def _gated() -> Any:
    from mlx_lm.models.activations import swiglu

    def backward(primals: Any, cotangent: mx.array, _: Any) -> tuple[mx.array, mx.array]:
        gate, up = primals
        return _slopes(gate, up, cotangent)

    function: Any = mx.custom_function(swiglu)
    function.vjp(backward)
    return function


def _slopes(gate: mx.array, up: mx.array, cotangent: mx.array) -> tuple[mx.array, mx.array]:
    """d gate = c up s (1 + gate (1 - s)) and d up = c gate s, where s = sigmoid(gate)."""
    s = mx.sigmoid(gate)
    return cotangent * up * (s * (1 + gate * (1 - s))), cotangent * (gate * s)
