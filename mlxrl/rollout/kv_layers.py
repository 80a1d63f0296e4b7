"""What a layer of a model keeps of many sequences, and the caches that its forward pass is given.

A model has a cache a layer; one that is several caches is a tuple of their layers here. What a layer keeps is arrays
with a row for each sequence. Letters: B rows, H heads, C capacity in tokens, D width, N tokens fed to a row at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import mlx.core as mx


class SlotKeys:
    """The keys and values of one layer, [B, H, C, D]: what mlx-lm's attention takes for its cache.

    offset: [B] int32, tokens in each slot; window: tokens that a token sees, None for all before it.
    """

    def __init__(self, keys: mx.array, values: mx.array, offset: mx.array, window: int | None) -> None:
        self.keys, self.values, self.offset, self.window = keys, values, offset, window

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write N tokens after each row's last, [B, H, N, D]; returns the whole slots.

        A position beyond the end is the last one: MLX does not check it, and would write elsewhere.
        """
        count = keys.shape[2]
        place = mx.minimum(_next(self.offset, count), self.keys.shape[2] - 1)[:, None, :, None]
        self.keys = mx.put_along_axis(self.keys, place, keys, axis=2)
        self.values = mx.put_along_axis(self.values, place, values, axis=2)
        self.offset = self.offset + count
        return self.keys, self.values

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        """[B, 1, N, C] bool: what each of the N next tokens sees. The names are mlx-lm's."""
        own = _next(self.offset, N)[..., None]
        other = mx.arange(self.keys.shape[2])
        mask = other <= own
        if (window := window_size or self.window) is not None:
            mask = mask & (other > own - window)
        return mask[:, None]

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """The whole slots."""
        return self.keys, self.values

    @property
    def state(self) -> tuple[mx.array, mx.array]:
        """What an evaluation must reach."""
        return self.keys, self.values


def _next(offset: mx.array, count: int) -> mx.array:
    """Positions of the next tokens, [B, count], after `offset` [B]."""
    return offset[:, None] + mx.arange(count) if count > 1 else offset[:, None]


@dataclass(frozen=True, slots=True)
class Layer:
    """What one cache of a model keeps of every sequence: arrays with a row for each.

    names: where the cache has them: `keys` and `values` of attention, with a place for every token, or entries of a
    recurrent layer, of a fixed size; none where the cache stays empty.
    window: tokens that a token sees, None for all before it; size: entries of a recurrent layer's cache, 0 for others.
    """

    names: tuple[Any, ...]
    window: int | None = None
    size: int = 0

    @property
    def grows(self) -> bool:
        """Whether the arrays have a place for every token."""
        return not self.size

    def arrays(self, cache: Any) -> list[mx.array]:
        """What the model left in a cache."""
        return [cache[name] if self.size else getattr(cache, name) for name in self.names]

    def row(self, cache: Any, number: int, length: int) -> list[mx.array]:
        """The arrays [1, ...] of a prompt of P tokens in a row of a cache; those of attention [1, H, P, D] in order."""
        arrays = self.arrays(cache)
        if not self.grows:
            return [array[number : number + 1] for array in arrays]
        if self.names and type(cache) is not SlotKeys and cache.offset > cache.keys.shape[2]:
            # a window that has turned, which is of one prompt
            arrays = [cache._temporal_order(array)[..., -cache.size() :, :] for array in arrays]
            return [padded(array, length - array.shape[2], 0) for array in arrays]
        return [array[number : number + 1, :, :length] for array in arrays]

    def cache(self, arrays: Sequence[mx.array], lengths: mx.array, counts: mx.array | None) -> Any:
        """The cache that the model is given, for rows that hold `lengths` tokens [B] and are fed `counts` [B]."""
        from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

        if not self.size:
            empty = KVCache() if self.window is None else RotatingKVCache(self.window)
            return SlotKeys(arrays[0], arrays[1], lengths, self.window) if arrays else empty
        cache = ArraysCache(self.size)
        cache.lengths = None if counts is None else counts + 0  # the model counts it down in place
        for name, array in zip(self.names, arrays, strict=True):
            cache[name] = array
        return cache


Layers: TypeAlias = "tuple[Layer | Layers, ...]"


def layers_of(caches: Iterable[Any]) -> Layers:
    """What the caches of a prompt hold, mlx-lm's or those that slots have given.

    Raises:
        NotImplementedError: rows of different lengths cannot share a cache of this kind.
    """
    return tuple(layers_of(cache.caches) if hasattr(cache, "caches") else _layer_of(cache) for cache in caches)


def _layer_of(cache: Any) -> Layer:
    from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

    if type(cache) is SlotKeys:
        return Layer(("keys", "values"), cache.window)
    if type(cache) is KVCache or (type(cache) is RotatingKVCache and cache.keep == 0):
        window = cache.max_size if type(cache) is RotatingKVCache else None
        return Layer(() if cache.keys is None else ("keys", "values"), window)
    if type(cache) is ArraysCache:
        filled = tuple(entry for entry, array in enumerate(cache.cache) if array is not None)
        return Layer(filled, size=len(cache.cache))
    raise NotImplementedError(f"a {type(cache).__name__} has no slots")


def flat(items: Iterable[Any]) -> Iterator[Any]:
    """Layers, or caches of a model, without those that they are parts of."""
    for item in items:
        parts = item if isinstance(item, tuple) else getattr(item, "caches", None)
        yield from (item,) if parts is None else flat(parts)


def caches_of(layers: Layers, arrays: Iterator[mx.array], lengths: mx.array, counts: mx.array | None) -> list[Any]:
    """The caches that a model is given, made of the arrays of all layers in a row."""
    from mlx_lm.models.cache import CacheList

    return [
        CacheList(*caches_of(layer, arrays, lengths, counts))
        if isinstance(layer, tuple)
        else layer.cache([next(arrays) for _ in layer.names], lengths, counts)
        for layer in layers
    ]


def padded(array: mx.array, before: int, after: int) -> mx.array:
    """[..., P, D] with zeros before and after its tokens. Zeros, because a masked NaN would still spread."""
    if before == after == 0:
        return array
    return mx.pad(array, [(0, 0)] * (array.ndim - 2) + [(before, after), (0, 0)])
