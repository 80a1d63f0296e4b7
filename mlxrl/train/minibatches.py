"""Several optimizer steps out of one rollout: its groups split into minibatches with denominators of their own."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import fields, replace

import mlx.core as mx
import numpy as np

from mlxrl.train.batch import totals_of
from mlxrl.types import Batch, MicroBatch


def minibatches(batch: Batch, number: int, key: str) -> list[Batch]:
    """Split a batch into PPO minibatches, one optimizer step each, by its groups, as evenly as possible.

    What was computed for the sequences, as old log-probs, goes with them. No micro-batch is larger than the largest of
    the batch.

    Args:
        key: the order of the groups follows from it alone; one minibatch is the batch as it is.
    """
    number = min(number, len(batch.groups))
    if number <= 1:
        return [batch]
    order = list(range(len(batch.groups)))
    random.Random(key).shuffle(order)
    return [_of_groups(batch, set(order[start::number])) for start in range(number)]


def _of_groups(batch: Batch, chosen: set[int]) -> Batch:
    group_of = [number for number, group in enumerate(batch.groups) for _ in group]
    picked: list[MicroBatch] = []
    for micro_batch in batch:
        rows = [row for row, number in enumerate(micro_batch.trajectories) if group_of[number] in chosen]
        if rows:
            picked.append(of_rows(micro_batch, rows))
    largest = max((_size(micro_batch) for micro_batch in batch), default=0)
    groups = tuple(group for number, group in enumerate(batch.groups) if number in chosen)
    dropped, observed = (
        {number: tokens for number, tokens in counts.items() if group_of[number] in chosen}
        for counts in (batch.dropped_tokens, batch.observation_tokens)
    )
    totals = totals_of(groups, sum(len(one.trajectories) for one in picked), sum(observed.values()))
    return Batch(tuple(_joined(picked, largest)), totals, groups, dropped, observed, batch.dropout_seed)


def of_rows(micro_batch: MicroBatch, rows: list[int]) -> MicroBatch:
    """Some rows of a micro-batch, without the columns after the last token that counts."""
    counted = np.array(micro_batch.mask)[rows] > 0
    if micro_batch.observation_mask is not None:
        counted |= np.array(micro_batch.observation_mask)[rows] > 0
    width = int(np.flatnonzero(counted.any(axis=0))[-1]) + 1
    arrays = {name: array[mx.array(rows), :width] for name, array in _arrays(micro_batch).items()}
    return replace(micro_batch, trajectories=tuple(micro_batch.trajectories[row] for row in rows), **arrays)


def _joined(micro_batches: Iterable[MicroBatch], largest: int) -> list[MicroBatch]:
    """Neighbours without a prefix put together while they are not larger than `largest` tokens."""
    out: list[MicroBatch] = []
    for micro_batch in micro_batches:
        both = _both(out[-1], micro_batch) if out else None
        if both is not None and _size(both) <= largest:
            out[-1] = both
        else:
            out.append(micro_batch)
    return out


def _both(first: MicroBatch, second: MicroBatch) -> MicroBatch | None:
    """Two micro-batches as one, None where one has a prefix, or they differ in temperature."""
    if first.prefix.size or second.prefix.size or first.temperature != second.temperature:
        return None
    width = max(first.tokens.shape[1], second.tokens.shape[1])
    ones, others = _arrays(first), _arrays(second)
    arrays = {name: mx.concatenate([_wide(ones[name], width), _wide(others[name], width)]) for name in ones}
    return replace(first, trajectories=(*first.trajectories, *second.trajectories), **arrays)


def _wide(array: mx.array, width: int) -> mx.array:
    return mx.pad(array, [(0, 0), (0, width - array.shape[1]), *[(0, 0)] * (array.ndim - 2)])


def _arrays(micro_batch: MicroBatch) -> dict[str, mx.array]:
    """The arrays with an entry for every token of every row."""
    found = {field.name: getattr(micro_batch, field.name) for field in fields(micro_batch)}
    return {name: value for name, value in found.items() if isinstance(value, mx.array) and value.ndim > 1}


def _size(micro_batch: MicroBatch) -> int:
    return micro_batch.prefix.size + micro_batch.tokens.size
