"""The KV caches of sequences that decode together: in slots of different lengths, or all of one length.

mlx-lm's batch caches keep all rows at one end and pad them on the left, so a row that joins or leaves copies the
whole batch. In slots row b's keys lie at 0 .. length[b] - 1: rows come and go without moving others, and the shapes of
a step stay what they were, so that it can be compiled once.

Letters: B rows, H heads, C capacity in tokens, D width, N tokens fed to a row at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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
        """Write N tokens after each row's last, [B, H, N, D]; returns the whole slots."""
        count = keys.shape[2]
        # a position beyond the end is the last one: MLX does not check it, and would write elsewhere
        place = mx.minimum(self._next(count), self.keys.shape[2] - 1)[:, None, :, None]
        self.keys = mx.put_along_axis(self.keys, place, keys, axis=2)
        self.values = mx.put_along_axis(self.values, place, values, axis=2)
        self.offset = self.offset + count
        return self.keys, self.values

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        """[B, 1, N, C] bool: what each of the N next tokens sees. The names are mlx-lm's."""
        own = self._next(N)[..., None]
        other = mx.arange(self.keys.shape[2])
        mask = other <= own
        if (window := window_size or self.window) is not None:
            mask = mask & (other > own - window)
        return mask[:, None]

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        return self.keys, self.values

    def _next(self, count: int) -> mx.array:
        """Positions of the next tokens, [B, count]."""
        return self.offset[:, None] + mx.arange(count) if count > 1 else self.offset[:, None]


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

    def arrays(self, cache: Any) -> list[mx.array]:
        """What the model left in a cache."""
        return [cache[name] if self.size else getattr(cache, name) for name in self.names]

    def row(self, cache: Any, number: int, length: int) -> list[mx.array]:
        """The arrays [1, ...] of a prompt of P tokens in a row of a cache; those of attention [1, H, P, D] in order."""
        arrays = self.arrays(cache)
        if self.size:
            return [array[number : number + 1] for array in arrays]
        if self.names and type(cache) is not SlotKeys and cache.offset > cache.keys.shape[2]:
            # a sliding window that has rotated, which is of one prompt
            arrays = [cache._temporal_order(array)[..., -cache.size() :, :] for array in arrays]
            return [_padded(array, length - array.shape[2], 0) for array in arrays]
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
"""Those of a model; of one whose cache is several caches, a tuple of theirs."""


def layers_of(caches: Iterable[Any]) -> Layers:
    """Those of the caches of a prompt; NotImplementedError where rows of different lengths cannot share one."""
    return tuple(layers_of(cache.caches) if hasattr(cache, "caches") else _layer_of(cache) for cache in caches)


def _layer_of(cache: Any) -> Layer:
    from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

    if type(cache) is SlotKeys:
        return Layer(("keys", "values"), cache.window)
    if type(cache) is KVCache or (type(cache) is RotatingKVCache and cache.keep == 0):
        return Layer(() if cache.keys is None else ("keys", "values"), getattr(cache, "max_size", None))
    if type(cache) is ArraysCache:
        filled = tuple(entry for entry, array in enumerate(cache.cache) if array is not None)
        return Layer(filled, size=len(cache.cache))
    raise NotImplementedError(f"a {type(cache).__name__} has no slots")


def flat(items: Iterable[Any]) -> Iterator[Any]:
    """Layers, or caches of a model, without those that they are parts of."""
    for item in items:
        parts = item if isinstance(item, tuple) else getattr(item, "caches", None)
        yield from (item,) if parts is None else flat(parts)


@dataclass(frozen=True, slots=True)
class PrefilledPrompt:
    """A prompt that was run: its row of caches [n, ...], one a layer, its tokens, and the logits [1, V] after it."""

    caches: list[Any]
    row: int
    length: int
    logits: mx.array

    def arrays(self, layers: Layers) -> list[mx.array]:
        """Its arrays of all layers, [1, ...] each."""
        pairs = zip(flat(layers), flat(self.caches), strict=True)
        return [array for layer, cache in pairs for array in layer.row(cache, self.row, self.length)]


def capacity_for(tokens: int) -> int:
    """The capacity in tokens for so many: multiples of 32, from 128 on of a quarter of the power of two below."""
    grain = max(32, 2 ** (max(tokens, 1).bit_length() - 3))
    return -(-tokens // grain) * grain


class SlotCache:
    """The caches of B rows, each filled to a length of its own, up to `capacity` tokens; arrays: of all layers."""

    def __init__(self, rows: int, capacity: int = 0, layers: Layers = (), arrays: Sequence[mx.array] = ()) -> None:
        self.rows, self.capacity, self.layers, self.arrays = rows, capacity, layers, list(arrays)

    @property
    def grows(self) -> list[bool]:
        """Which arrays have a place for every token."""
        return [not layer.size for layer in flat(self.layers) for _ in layer.names]

    def place(self, slots: Sequence[int], prompt: PrefilledPrompt) -> None:
        """Give rows the caches of one prompt, over all that was in their slots."""
        self.layers = self.layers or layers_of(prompt.caches)
        placed = self._filled(prompt.arrays(self.layers))
        if not self.arrays:
            self.arrays = [mx.zeros((self.rows, *array.shape[1:]), array.dtype) for array in placed]
        self.write(slots, placed)
        mx.async_eval(self.arrays)  # the prompt's own caches end here

    def fit(self, tokens: int) -> None:
        """Raise the capacity to that of rows of so many tokens."""
        if tokens > self.capacity:
            self.capacity = capacity_for(tokens)
            self.arrays = self._filled(self.arrays)

    def caches(self, lengths: mx.array, counts: mx.array | None = None) -> list[Any]:
        """What the model is given, for rows that hold `lengths` tokens [B] and are fed `counts` [B], None for all."""
        from mlx_lm.models.cache import CacheList

        arrays = iter(self.arrays)

        def given(layer: Layer | Layers) -> Any:
            if isinstance(layer, tuple):
                return CacheList(*map(given, layer))
            return layer.cache([next(arrays) for _ in layer.names], lengths, counts)

        return list(map(given, self.layers))

    def update(self, caches: Iterable[Any], frozen: mx.array | None = None) -> None:
        """Keep what the model left in them; rows that are `frozen`, [B] bool, keep the states they had."""
        pairs = zip(flat(self.layers), flat(caches), strict=True)
        before, self.arrays = self.arrays, [array for layer, part in pairs for array in layer.arrays(part)]
        if frozen is not None:
            self.arrays = [
                new if grows else mx.where(frozen.reshape(-1, *[1] * (new.ndim - 1)), old, new)
                for old, new, grows in zip(before, self.arrays, self.grows, strict=True)
            ]

    def read(self, slots: Sequence[int], tokens: int | None = None) -> SlotCache:
        """A copy of some slots, without the capacity beyond so many tokens."""
        index, capacity = mx.array(list(slots)), self.capacity
        if tokens is not None:
            capacity = min(capacity, capacity_for(tokens))
        pairs = zip(self.arrays, self.grows, strict=True)
        arrays = [array[index, :, :capacity] if grows else array[index] for array, grows in pairs]
        return SlotCache(len(slots), capacity, self.layers, arrays)

    def write(self, slots: Sequence[int], arrays: Sequence[mx.array]) -> None:
        """Put arrays, or one row of them for all, into some slots."""
        index = mx.array(list(slots))
        for own, new in zip(self.arrays, arrays, strict=True):
            own[index] = new

    def _filled(self, arrays: Iterable[mx.array]) -> list[mx.array]:
        """Arrays of all layers with the whole capacity."""
        pairs = zip(arrays, self.grows, strict=True)
        return [_padded(array, 0, self.capacity - array.shape[2]) if grows else array for array, grows in pairs]


class EqualLengthCache:
    """The model's own caches of B rows of one length, for models whose rows cannot have slots.

    Nothing is padded or masked; a row cannot join while others are under way. The rest as `SlotCache`.
    """

    def __init__(self, rows: int, joined: Sequence[Any] = ()) -> None:
        self.rows, self._joined = rows, list(joined)
        self._placed: dict[int, list[Any]] = {}

    @property
    def arrays(self) -> list[Any]:
        return [cache.state for cache in self._joined]

    def place(self, slots: Sequence[int], prompt: PrefilledPrompt) -> None:
        """Give rows the caches of one prompt; they are joined when all have theirs."""
        self._placed |= dict.fromkeys(slots, prompt.caches)
        if len(self._placed) == self.rows:
            layers = zip(*(self._placed[slot] for slot in range(self.rows)), strict=True)
            self._joined = [_mapped(lambda arrays: mx.concatenate(list(arrays)), layer) for layer in layers]
            self._placed = {}

    def fit(self, tokens: int) -> None:
        """The model's caches grow by themselves."""

    def caches(self, lengths: mx.array, counts: mx.array | None = None) -> list[Any]:
        return self._joined

    def update(self, caches: Iterable[Any], frozen: mx.array | None = None) -> None:
        """The model wrote into the caches that it was given."""

    def read(self, slots: Sequence[int], tokens: int | None = None) -> EqualLengthCache:
        index = mx.array(list(slots))
        return EqualLengthCache(len(slots), [_mapped(lambda arrays: arrays[0][index], [one]) for one in self._joined])


KVCache: TypeAlias = SlotCache | EqualLengthCache


def _mapped(change: Callable[[Sequence[mx.array]], mx.array], caches: Sequence[Any]) -> Any:
    """The first of several like objects, every array in it replaced by what `change` makes of theirs."""
    first = caches[0]
    if isinstance(first, mx.array):
        return change(caches) if first.ndim else first
    if isinstance(first, list | tuple):
        return type(first)(_mapped(change, parts) for parts in zip(*caches, strict=True))
    if isinstance(first, dict):
        return {name: _mapped(change, [cache[name] for cache in caches]) for name in first}
    if not hasattr(first, "__dict__"):
        return first
    made = object.__new__(type(first))
    for name in vars(first):
        setattr(made, name, _mapped(change, [getattr(cache, name) for cache in caches]))
    return made


def _padded(array: mx.array, before: int, after: int) -> mx.array:
    """[..., P, D] with zeros before and after its tokens. Zeros, because a masked NaN would still spread."""
    if before == after == 0:
        return array
    return mx.pad(array, [(0, 0)] * (array.ndim - 2) + [(before, after), (0, 0)])
