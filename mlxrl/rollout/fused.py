"""Low-rank adapters with fewer and smaller steps, for the span of a rollout.

mlx-lm's LoRALinear multiplies by A, by B, by the scale, and adds: four kernels a layer where one does the work.
Here the scale is in B, the sum is in the product, and layers that read the same input share one product with their
A matrices side by side. The weights themselves are not copied.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn


class Product:
    """An input as [N, inputs] and its product with A, made for the first layer that asks. It holds for one step."""

    def __init__(self) -> None:
        self.input: mx.array | None = None
        self.made: tuple[mx.array, mx.array] | None = None

    def of(self, x: mx.array, a: mx.array) -> tuple[mx.array, mx.array]:
        """x [N, inputs] and x A [N, sum of ranks]."""
        if self.made is None or self.input is not x:
            flat = x.reshape(-1, x.shape[-1])
            self.input, self.made = x, (flat, flat @ a)
        return self.made


def forget(products: Iterable[Product]) -> None:
    """Let go of the arrays of a step."""
    for each in products:
        each.input = each.made = None


class FusedLinear(nn.Module):
    """y = W x + B A x, B scaled, with A [inputs, sum of ranks] shared; this layer's part of it starts at `start`.

    Rows lie in one axis: a batch axis would make the last product one of many small ones.
    """

    def __init__(self, linear: nn.Module, a: mx.array, b: mx.array, start: int, product: Product) -> None:
        super().__init__()
        self.linear, self.a, self.b = linear, a, b
        self._start, self._product = start, product

    def __call__(self, x: mx.array) -> mx.array:
        """[..., outputs]."""
        flat, z = self._product.of(x, self.a)
        y, z = self.linear(flat), z[:, self._start : self._start + self.b.shape[0]]
        y = mx.addmm(y, z, self.b) if y.dtype == z.dtype else y + (z @ self.b).astype(y.dtype)
        return y.reshape(*x.shape[:-1], -1)


@contextmanager
def fused(model: nn.Module) -> Generator[list[Product]]:
    """Swap a model's LoRA layers for fused ones inside a block; yields what must be forgotten after each step."""
    groups: dict[Any, list[tuple[Any, Any, Any]]] = {}
    for container, key, layer in _layers(model):
        group = id(container), layer.lora_a.shape[0], layer.lora_a.dtype
        groups.setdefault(group, []).append((container, key, layer))
    products: list[Product] = []
    try:
        for places in groups.values():
            products.append(Product())
            a = mx.concatenate([layer.lora_a for _, _, layer in places], axis=1)
            start = 0
            for container, key, layer in places:
                container[key] = FusedLinear(layer.linear, a, layer.scale * layer.lora_b, start, products[-1])
                start += layer.lora_a.shape[1]
        mx.eval(model.parameters())
        yield products
    finally:
        for places in groups.values():
            for container, key, layer in places:
                container[key] = layer


def _layers(tree: Any) -> Iterator[tuple[Any, Any, Any]]:
    """(container, key, layer) of every LoRALinear below a module, a list or a dict."""
    from mlx_lm.tuner.lora import LoRALinear

    for key, value in list(tree.items() if isinstance(tree, dict) else enumerate(tree)):
        if type(value) is LoRALinear:
            yield tree, key, value
        elif isinstance(value, dict | list):
            yield from _layers(value)
