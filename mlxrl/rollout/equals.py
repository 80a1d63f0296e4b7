"""Rows of one length in a model's own caches: what serves a model whose rows cannot have slots.

All rows hold the same number of tokens, so no cache needs padding, masks or places of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mlx.core as mx

from mlxrl.rollout.prefill import Filled, Run


class Equals:
    """The caches of B rows of one length. A row cannot join while others are under way."""

    joins = False

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.held: list[list[Any]] = []
        self.arrays: list[mx.array] = []

    def place(self, places: Sequence[int], run: Run) -> None:
        """Give the next rows, in order, the caches of one prompt."""
        assert list(places) == list(range(len(self.held), len(self.held) + len(places)))
        assert isinstance(run, Filled), "rows of equal length start from caches of their own"
        self.held += [list(run.caches)] * len(places)
        if len(self.held) == self.rows:
            layers = zip(*self.held, strict=True)
            self.joined = [_mapped(lambda arrays: mx.concatenate(list(arrays)), layer) for layer in layers]
            self.held = []
            self._list()

    def fit(self, tokens: int) -> None:
        """The model's caches grow by themselves."""

    def keep(self, places: Sequence[int], tokens: int) -> None:
        """Drop every row but those at `places`."""
        index = mx.array(list(places))
        self.rows = len(places)
        self.joined = [_mapped(lambda arrays: arrays[0][index], [cache]) for cache in self.joined]
        self._list()

    def caches(self, lengths: mx.array) -> list[Any]:
        """What the model is given."""
        return self.joined

    def take(self, caches: Iterable[Any], still: mx.array | None = None) -> None:
        """The model wrote into the caches it was given."""
        self._list()

    def _list(self) -> None:
        self.arrays = []

        def note(arrays: Sequence[mx.array]) -> mx.array:
            self.arrays.append(arrays[0])
            return arrays[0]

        for cache in self.joined:
            _mapped(note, [cache])


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
