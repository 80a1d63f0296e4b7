"""Low-rank adapters with fewer and smaller steps, while a policy decodes.

mlx-lm's LoRALinear multiplies by A, by B, by the scale, and adds: four kernels a layer where one does the work.
Here the scale is in B, the sum is in the product, and layers that read the same input share one product with their
A matrices side by side. The weights themselves are not copied.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn


class SharedLoraInput:
    """An input as [N, inputs] and its product with A, made for the first of the layers that read it."""

    def __init__(self) -> None:
        self.input: mx.array | None = None
        self.made: tuple[mx.array, mx.array] | None = None

    def of(self, x: mx.array, a: mx.array) -> tuple[mx.array, mx.array]:
        """x [N, inputs] and x A [N, sum of ranks]."""
        if self.made is None or self.input is not x:
            flat = x.reshape(-1, x.shape[-1])
            self.input, self.made = x, (flat, flat @ a)
        return self.made

    def clear(self) -> None:
        """Let go of the arrays of a forward pass."""
        self.input = self.made = None


class MergedLinear(nn.Module):
    """y = W x + B A x, B scaled, with A [inputs, sum of ranks] shared; this layer's part of it starts at `start`.

    All positions lie in one axis: a batch axis would make the last product one of many small ones.
    """

    def __init__(self, linear: nn.Module, a: mx.array, b: mx.array, start: int, shared: SharedLoraInput) -> None:
        super().__init__()
        self.linear, self.a, self.b = linear, a, b
        self._start, self._shared = start, shared

    def __call__(self, x: mx.array) -> mx.array:
        """[..., outputs]."""
        flat, z = self._shared.of(x, self.a)
        y, z = self.linear(flat), z[:, self._start : self._start + self.b.shape[0]]
        y = mx.addmm(y, z, self.b) if y.dtype == z.dtype else y + (z @ self.b).astype(y.dtype)
        return y.reshape(*x.shape[:-1], -1)


@contextmanager
def merged(model: nn.Module) -> Generator[list[SharedLoraInput]]:
    """Swap a model's LoRA layers for merged ones inside a block; yields what must be cleared after each forward."""
    readers = [(container, {key: container[key] for key in keys}) for container, keys in _readers(model)]
    try:
        shared = [_merge(container, layers) for container, layers in readers]
        mx.eval(model.parameters())
        yield shared
    finally:
        for container, layers in readers:
            for key, layer in layers.items():
                container[key] = layer


def _merge(container: Any, layers: dict[Any, Any]) -> SharedLoraInput:
    """Put merged layers in the place of LoRA layers of a container that may read the same input."""
    shared, start = SharedLoraInput(), 0
    a = mx.concatenate([layer.lora_a for layer in layers.values()], axis=1)
    for key, layer in layers.items():
        container[key] = MergedLinear(layer.linear, a, layer.scale * layer.lora_b, start, shared)
        start += layer.lora_a.shape[1]
    return shared


def _readers(tree: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Every container below a module, a list or a dict, with the keys of its LoRALinears of one width and dtype."""
    from mlx_lm.tuner.lora import LoRALinear

    groups: dict[Any, list[Any]] = {}
    for key, value in list(tree.items() if isinstance(tree, dict) else enumerate(tree)):
        if type(value) is LoRALinear:
            groups.setdefault((value.lora_a.shape[0], value.lora_a.dtype), []).append(key)
        elif isinstance(value, dict | list):
            yield from _readers(value)
    yield from ((tree, keys) for keys in groups.values())
