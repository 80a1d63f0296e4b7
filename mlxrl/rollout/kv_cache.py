"""The KV caches of sequences that decode together: in slots of different lengths, or all of one length.

mlx-lm's batch caches keep all rows at one end and pad them on the left, so a row that joins or leaves copies the
whole batch. In slots row b's keys lie at 0 .. length[b] - 1: rows come and go without moving others, and the shapes of
a step stay what they were, so that it can be compiled once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import mlx.core as mx

from mlxrl.rollout.kv_layers import Layers, caches_of, flat, layers_of, padded
from mlxrl.rollout.sequence import PrefilledPrompt


def capacity_for(tokens: int) -> int:
    """The capacity in tokens for so many: multiples of 32, from 128 on of a quarter of the power of two below."""
    grain = max(32, 2 ** (max(tokens, 1).bit_length() - 3))
    return -(-tokens // grain) * grain


class SlotCache:
    """The caches of B rows, each filled to a length of its own, up to `capacity` tokens.

    arrays: what all layers keep, in a row; grows: which of them have a place for every token.
    """

    joins = True  # a row may join while others are under way

    def __init__(self, rows: int, capacity: int = 0, layers: Layers = (), arrays: Sequence[mx.array] = ()) -> None:
        self.rows, self.capacity, self.layers, self.arrays = rows, capacity, layers, list(arrays)

    @property
    def grows(self) -> list[bool]:
        return [layer.grows for layer in flat(self.layers) for _ in layer.names]

    def place(self, slots: Sequence[int], prompt: PrefilledPrompt) -> None:
        """Give rows the caches of one prompt, over all that was in their slots."""
        self.layers = self.layers or layers_of(prompt.caches)
        placed = [
            padded(array, 0, self.capacity - array.shape[2]) if grows else array
            for array, grows in zip(prompt.arrays(self.layers), self.grows, strict=True)
        ]
        if not self.arrays:
            self.arrays = [mx.zeros((self.rows, *array.shape[1:]), array.dtype) for array in placed]
        self.write(slots, placed)
        mx.async_eval(self.arrays)  # the prompt's own caches end here

    def fit(self, tokens: int) -> None:
        """Raise the capacity to that of rows of so many tokens."""
        if tokens > self.capacity:
            more = capacity_for(tokens) - self.capacity
            pairs = zip(self.arrays, self.grows, strict=True)
            self.arrays = [padded(array, 0, more) if grows else array for array, grows in pairs]
            self.capacity += more

    def caches(self, lengths: mx.array, counts: mx.array | None = None) -> list[Any]:
        """What the model is given, for rows that hold `lengths` tokens [B] and are fed `counts` [B], None for all."""
        return caches_of(self.layers, iter(self.arrays), lengths, counts)

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


class EqualLengthCache:
    """The model's own caches of B rows of one length, for models whose rows cannot have slots.

    Nothing is padded or masked; a row cannot join while others are under way. The rest as `SlotCache`.
    """

    joins = False

    def __init__(self, rows: int, joined: Sequence[Any] = ()) -> None:
        self.rows, self._joined = rows, list(joined)
        self._placed: dict[int, list[Any]] = {}

    @property
    def arrays(self) -> list[mx.array]:
        found: list[mx.array] = []

        def note(arrays: Sequence[mx.array]) -> mx.array:
            found.append(arrays[0])
            return arrays[0]

        _mapped(note, [self._joined])
        return found

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
