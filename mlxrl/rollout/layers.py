"""What a layer of a model keeps of many rows, and the caches that its forward is given.

Letters: B rows, H heads, C capacity in tokens, D width, N tokens fed to a row at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import mlx.core as mx


class Keys:
    """The keys and values of one layer, [B, H, C, D]: what mlx-lm's attention takes for its cache.

    offset: [B] int32, tokens in each slot; window: tokens that a token sees, None for all before it.
    """

    def __init__(self, keys: mx.array, values: mx.array, offset: mx.array, window: int | None) -> None:
        self.keys, self.values, self.offset, self.window = keys, values, offset, window

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write N tokens behind each row's last, [B, H, N, D]; returns the whole slots.

        A place behind the end is the last one: MLX does not check it, and would write elsewhere.
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


@dataclass(frozen=True, slots=True)
class Attention:
    """A layer with keys and values."""

    window: int | None
    count: int = 2

    def row(self, cache: Any, number: int, length: int) -> list[mx.array]:
        """Keys and values of a prompt, [1, H, P, D] each, its P tokens in order and at their places."""
        arrays = [cache.keys, cache.values]
        if cache.offset > cache.keys.shape[2]:  # a window that has turned: of one prompt, and only its end
            arrays = [cache._temporal_order(array)[..., -cache.size() :, :] for array in arrays]
            return [padded(array, length - array.shape[2], 0) for array in arrays]
        return [array[number : number + 1, :, :length] for array in arrays]

    def cache(self, arrays: Sequence[mx.array], lengths: mx.array, counts: mx.array | None) -> Keys:
        """The cache that the model is given."""
        return Keys(arrays[0], arrays[1], lengths, self.window)

    def arrays(self, cache: Any) -> list[mx.array]:
        """What the model left in it."""
        return [cache.keys, cache.values]

    def grows(self) -> list[bool]:
        """Which of its arrays have a place for every token."""
        return [True, True]


@dataclass(frozen=True, slots=True)
class Unused:
    """A layer whose cache stays empty."""

    window: int | None
    count: int = 0

    def row(self, cache: Any, number: int, length: int) -> list[mx.array]:
        """Nothing."""
        return []

    def cache(self, arrays: Sequence[mx.array], lengths: mx.array, counts: mx.array | None) -> Any:
        """A new one."""
        from mlx_lm.models.cache import KVCache, RotatingKVCache

        return KVCache() if self.window is None else RotatingKVCache(self.window)

    def arrays(self, cache: Any) -> list[mx.array]:
        """Nothing."""
        return []

    def grows(self) -> list[bool]:
        """Nothing."""
        return []


@dataclass(frozen=True, slots=True)
class Recurrence:
    """A layer with states [B, ...] of a fixed size; `filled` are the entries it uses."""

    size: int
    filled: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many arrays it holds."""
        return len(self.filled)

    def row(self, cache: Any, number: int, length: int) -> list[mx.array]:
        """A prompt's states."""
        return [array[number : number + 1] for array in self.arrays(cache)]

    def cache(self, arrays: Sequence[mx.array], lengths: mx.array, counts: mx.array | None) -> Any:
        """The cache that the model is given."""
        from mlx_lm.models.cache import ArraysCache

        cache = ArraysCache(self.size)
        cache.lengths = None if counts is None else counts + 0  # the model counts it down in place
        for entry, array in zip(self.filled, arrays, strict=True):
            cache[entry] = array
        return cache

    def arrays(self, cache: Any) -> list[mx.array]:
        """What the model left in it."""
        return [cache[entry] for entry in self.filled]

    def grows(self) -> list[bool]:
        """None of its arrays."""
        return [False] * self.count


@dataclass(frozen=True, slots=True)
class Several:
    """A layer with several caches."""

    parts: tuple[Layer, ...]

    @property
    def count(self) -> int:
        """How many arrays they hold."""
        return sum(part.count for part in self.parts)

    def row(self, cache: Any, number: int, length: int) -> list[mx.array]:
        """A prompt's arrays, part by part."""
        parts = zip(self.parts, cache.caches, strict=True)
        return [array for part, child in parts for array in part.row(child, number, length)]

    def cache(self, arrays: Sequence[mx.array], lengths: mx.array, counts: mx.array | None) -> Any:
        """The cache that the model is given."""
        from mlx_lm.models.cache import CacheList

        return CacheList(*caches(self.parts, arrays, lengths, counts))

    def arrays(self, cache: Any) -> list[mx.array]:
        """What the model left in them."""
        return arrays_of(self.parts, cache.caches)

    def grows(self) -> list[bool]:
        """Those of the parts."""
        return [grows for part in self.parts for grows in part.grows()]


Layer: TypeAlias = "Attention | Unused | Recurrence | Several"


def layer_of(cache: Any) -> Layer:
    """What a prompt's cache of mlx-lm's holds.

    Raises:
        NotImplementedError: rows of different lengths cannot share a cache of this kind.
    """
    from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

    if type(cache) is KVCache or (type(cache) is RotatingKVCache and cache.keep == 0):
        window = cache.max_size if type(cache) is RotatingKVCache else None
        return Unused(window) if cache.keys is None else Attention(window)
    if type(cache) is ArraysCache:
        return Recurrence(len(cache.cache), tuple(i for i, array in enumerate(cache.cache) if array is not None))
    if type(cache) is CacheList:
        return Several(tuple(layer_of(part) for part in cache.caches))
    raise NotImplementedError(f"a {type(cache).__name__} has no slots")


def caches(
    layers: Iterable[Layer], arrays: Sequence[mx.array], lengths: mx.array, counts: mx.array | None
) -> list[Any]:
    """The caches of all layers, made of their arrays in a row."""
    made: list[Any] = []
    start = 0
    for layer in layers:
        made.append(layer.cache(arrays[start : start + layer.count], lengths, counts))
        start += layer.count
    return made


def arrays_of(layers: Iterable[Layer], caches: Iterable[Any]) -> list[mx.array]:
    """The arrays of all layers in a row, after the model has used their caches."""
    return [array for layer, cache in zip(layers, caches, strict=True) for array in layer.arrays(cache)]


def _next(offset: mx.array, count: int) -> mx.array:
    """Places of the next tokens, [B, count], behind `offset` [B]."""
    return offset[:, None] + mx.arange(count) if count > 1 else offset[:, None]


def padded(array: mx.array, before: int, after: int) -> mx.array:
    """[..., P, D] with zeros in front of and behind its tokens. Zeros, because a masked NaN would still spread."""
    if before == after == 0:
        return array
    return mx.pad(array, [(0, 0)] * (array.ndim - 2) + [(before, after), (0, 0)])
