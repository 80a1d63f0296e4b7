"""Caches in which every row has a slot of its own, filled to a length of its own.

mlx-lm's batch caches keep all rows at one end and pad them on the left, so a row that joins or leaves copies the
whole batch. Here row b's keys lie at 0 .. length[b] - 1: rows come and go without moving others, and the shapes of
a step stay what they were, so that it can be compiled once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx

from mlxrl.policy.room import capacity_for
from mlxrl.rollout.layers import Layer, arrays_of, caches, padded
from mlxrl.rollout.prefill import Run


class Slots:
    """The caches of B rows, and the loop's dealings with them."""

    joins = True  # a row may join while others are under way

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.capacity = 0
        self.layers: tuple[Layer, ...] = ()
        self.arrays: list[mx.array] = []

    def place(self, places: Sequence[int], run: Run) -> None:
        """Give rows the caches of one prompt, over all that was in their slots."""
        if not self.layers:
            self.layers = run.layers()
        index, arrays = mx.array(list(places)), run.arrays(self.layers)
        if not self.arrays:
            self.arrays = [self._empty(array, grows) for array, grows in zip(arrays, self._grows(), strict=True)]
        for number, (array, grows) in enumerate(zip(arrays, self._grows(), strict=True)):
            self.arrays[number][index] = padded(array, 0, self.capacity - array.shape[2]) if grows else array
        mx.async_eval(self.arrays)  # the prompt's own caches end here

    def _empty(self, array: mx.array, grows: bool) -> mx.array:
        shape = [self.rows, *array.shape[1:]]
        if grows:
            shape[2] = self.capacity
        return mx.zeros(shape, array.dtype)

    def _grows(self) -> list[bool]:
        return [grows for layer in self.layers for grows in layer.grows()]

    def fit(self, tokens: int) -> None:
        """Make room for rows of so many tokens."""
        if tokens <= self.capacity:
            return
        more = capacity_for(tokens) - self.capacity
        self.capacity += more
        self.arrays = [
            padded(array, 0, more) if grows else array for array, grows in zip(self.arrays, self._grows(), strict=True)
        ]

    def keep(self, places: Sequence[int], tokens: int) -> None:
        """Drop every row but those at `places`, and the room that rows of so many tokens leave empty."""
        index = mx.array(list(places))
        self.rows = len(places)
        self.capacity = min(self.capacity, capacity_for(tokens))
        self.arrays = [
            array[index, :, : self.capacity] if grows else array[index]
            for array, grows in zip(self.arrays, self._grows(), strict=True)
        ]

    def caches(self, lengths: mx.array, counts: mx.array | None = None) -> list[Any]:
        """What the model is given, for rows that hold `lengths` tokens [B] and are fed `counts` [B], None for all."""
        return caches(self.layers, self.arrays, lengths, counts)

    def take(self, caches: Iterable[Any], still: mx.array | None = None) -> None:
        """Keep what the model left in them; rows that are `still`, [B] bool, keep the states they had."""
        before, self.arrays = self.arrays, arrays_of(self.layers, caches)
        if still is not None:
            self.arrays = [
                new if grows else mx.where(still.reshape(-1, *[1] * (new.ndim - 1)), old, new)
                for old, new, grows in zip(before, self.arrays, self._grows(), strict=True)
            ]

    def part(self, places: Sequence[int]) -> Slots:
        """The slots at `places`, in arrays of their own."""
        part = Slots(len(places))
        part.layers, part.capacity = self.layers, self.capacity
        part.arrays = [array[mx.array(list(places))] for array in self.arrays]
        return part

    def put(self, places: Sequence[int], part: Slots) -> None:
        """Put slots back where they came from."""
        for array, mine in zip(self.arrays, part.arrays, strict=True):
            array[mx.array(list(places))] = mine
