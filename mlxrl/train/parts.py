"""Several optimizer steps out of one rollout: its groups dealt into parts, each with denominators of its own."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

import mlx.core as mx
import numpy as np

from mlxrl.train.pack import totals_of
from mlxrl.types import Batch, MicroBatch


def parts(batch: Batch, count: int, key: str) -> list[Batch]:
    """Deal a batch's groups into `count` batches of an optimizer step each, as even as they come.

    What was computed for the rows, as old log-probs, goes with them. No pass is larger than the largest of the batch.

    Args:
        key: the order in which groups are dealt follows from it alone; one part is the batch as it is.
    """
    count = min(count, len(batch.groups))
    if count <= 1:
        return [batch]
    order = list(range(len(batch.groups)))
    random.Random(key).shuffle(order)
    return [_part(batch, set(order[place::count])) for place in range(count)]


def _part(batch: Batch, chosen: set[int]) -> Batch:
    owners = [number for number, group in enumerate(batch.groups) for _ in group]
    picked: list[MicroBatch] = []
    for minibatch in batch:
        places = [place for place, row in enumerate(minibatch.trajectories) if owners[row] in chosen]
        if places:
            picked.append(_rows(minibatch, places))
    largest = max((_size(minibatch) for minibatch in batch), default=0)
    groups = tuple(group for number, group in enumerate(batch.groups) if number in chosen)
    heard = sum(len(minibatch.trajectories) for minibatch in picked)
    cut, observations = (
        {row: tokens for row, tokens in counts.items() if owners[row] in chosen}
        for counts in (batch.dropped_tokens, batch.observation_tokens)
    )
    totals = totals_of(groups, heard, sum(observations.values()))
    return Batch(tuple(_joined(picked, largest)), totals, groups, cut, observations)


def _rows(minibatch: MicroBatch, places: list[int]) -> MicroBatch:
    """Some rows of a minibatch, cut after the last token that counts."""
    picked = mx.array(places)
    counted = np.array(minibatch.mask)[places] > 0
    if minibatch.observation_mask is not None:
        counted |= np.array(minibatch.observation_mask)[places] > 0
    width = int(np.flatnonzero(counted.any(axis=0))[-1]) + 1
    arrays = {name: array[picked, :width] for name, array in _arrays(minibatch).items()}
    return replace(minibatch, trajectories=tuple(minibatch.trajectories[place] for place in places), **arrays)


def _joined(minibatches: Iterable[MicroBatch], largest: int) -> list[MicroBatch]:
    """Neighbours without a prefix put together while they are not larger than `largest` tokens."""
    out: list[MicroBatch] = []
    for minibatch in minibatches:
        both = _both(out[-1], minibatch) if out and _alike(out[-1], minibatch) else None
        if both is not None and _size(both) <= largest:
            out[-1] = both
        else:
            out.append(minibatch)
    return out


def _alike(first: MicroBatch, second: MicroBatch) -> bool:
    return first.prefix.size == second.prefix.size == 0 and first.temperature == second.temperature


def _both(first: MicroBatch, second: MicroBatch) -> MicroBatch:
    width = max(first.tokens.shape[1], second.tokens.shape[1])
    ones, others = _arrays(first), _arrays(second)
    arrays = {name: mx.concatenate([_wide(ones[name], width), _wide(others[name], width)]) for name in ones}
    return replace(first, trajectories=(*first.trajectories, *second.trajectories), **arrays)


def _wide(array: mx.array, width: int) -> mx.array:
    return mx.pad(array, [(0, 0), (0, width - array.shape[1]), *[(0, 0)] * (array.ndim - 2)])


def _arrays(minibatch: MicroBatch) -> dict[str, Any]:
    """The arrays with an entry for every token of every row."""
    found = {field.name: getattr(minibatch, field.name) for field in fields(minibatch)}
    return {name: value for name, value in found.items() if isinstance(value, mx.array) and value.ndim > 1}


def _size(minibatch: MicroBatch) -> int:
    return minibatch.prefix.size + minibatch.tokens.size
