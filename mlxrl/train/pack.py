"""From scored groups to the minibatches of one optimizer step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, count

import mlx.core as mx
import numpy as np

from mlxrl.algo.algorithm import not_predicted, num_top
from mlxrl.train.rows import Row, first, rows_of, with_prompt
from mlxrl.types import Algorithm, Batch, Group, MicroBatch, Totals

TOKENS_PER_PASS = 2048
PASS = 48  # tokens that a forward and backward of any size costs beyond its own, as measured
SHARE_FROM = 128  # prompt tokens saved, below which a pass of its own costs more than the repeated prompt


def pack(
    groups: Sequence[Group],
    algo: Algorithm,
    *,
    tokens_per_pass: int | None = None,
    max_tokens_per_row: int | None = None,
) -> Batch:
    """Credit the trajectories, drop rows without signal, and lay the others out in minibatches.

    A group's rows share their prompt as the prefix where that saves enough; other rows stand with their prompt,
    and P = 0. Rows of like length go together, where the padding that this saves outweighs a further pass. The
    totals count every row, dropped ones too: neither the size of a pass nor the order of rows changes the gradient.
    A token that was forced on the model is read like an observation: it has no mask and no advantage, and no
    denominator counts it. Where the algorithm predicts observations, a row that has some has signal.

    Args:
        tokens_per_pass: padded tokens of a forward at most, the prefix included; one row may exceed it.
        max_tokens_per_row: where a row is cut, its prompt included. Tokens behind it are not trained on and not
            needed; the totals count them, and `Batch.cut` says how many of them the model chose.
    """
    budget = TOKENS_PER_PASS if tokens_per_pass is None else tokens_per_pass
    for name, value in (("tokens_per_pass", budget), ("max_tokens_per_row", max_tokens_per_row)):
        if value is not None and value < 1:
            raise ValueError(f"pack: {name}: wanted at least 1, got {value}")
    advantages = algo.advantages(groups)
    speaks = bool(algo.needs & {"reference", "teacher", "entropy"})
    numbers, kept, skip = count(), num_top(algo), not_predicted(algo)
    rows = [
        [
            row
            for one, credit in zip(group, credits, strict=True)
            for row in rows_of(next(numbers), one, credit, kept, skip)
        ]
        for group, credits in zip(groups, advantages, strict=True)
    ]
    whole = _summed(rows, lambda row: int(row.mask.sum()))
    read = _summed(rows, lambda row: row.observations)
    if max_tokens_per_row is not None:
        rows = [[first(row, max_tokens_per_row - len(row.prompt)) for row in group] for group in rows]
    cut = whole - _summed(rows, lambda row: int(row.mask.sum()))
    heard = [[row for row in group if _has_signal(row, speaks)] for group in rows]
    totals = totals_of(groups, sum(len(group) for group in heard), sum(read.values()))
    minibatches = tuple(_minibatches(heard, budget))
    return Batch(minibatches, totals, tuple(groups), dict(cut), dict(read))


def _summed(groups: Sequence[Sequence[Row]], count: Callable[[Row], int]) -> Counter[int]:
    """Counts of rows by the number of their trajectory, where they are not 0."""
    found = Counter[int]()
    for row in (row for group in groups for row in group):
        found[row.number] += count(row)
    return +found


def _has_signal(row: Row, speaks: bool) -> bool:
    return row.observations > 0 or bool(row.mask.any() and (speaks or row.advantage.any()))


def totals_of(groups: Sequence[Group], heard: int, observations: int = 0) -> Totals:
    """The denominators of groups of which so many rows are computed, and so many observed tokens are predicted."""
    trajectories = [trajectory for group in groups for trajectory in group]
    rows = sum(1 + sum(turn.history_rewritten for turn in trajectory.turns[1:]) for trajectory in trajectories)
    return Totals(
        tokens=sum(trajectory.num_sampled for trajectory in trajectories),
        sequences=rows,
        groups=len(groups),
        max_tokens=max((trajectory.sampling.max_tokens for trajectory in trajectories), default=1),
        without_signal=rows - heard,
        observation_tokens=observations,
    )


def _minibatches(groups: Sequence[Sequence[Row]], budget: int) -> Iterator[MicroBatch]:
    alone: list[Row] = []
    for number, group in enumerate(chain.from_iterable(map(_alike, groups))):
        if len(group[0].prompt) * (len(group) - 1) >= SHARE_FROM:
            yield from _batches(group, budget, prefix_id=number)
        else:
            alone += [with_prompt(row) for row in group]
    for temperature in sorted({row.temperature for row in alone}):
        yield from _batches([row for row in alone if row.temperature == temperature], budget)


def _alike(group: Sequence[Row]) -> Iterator[list[Row]]:
    """The rows of a group that have the same prompt; environments may begin differently, and history be rewritten."""
    prompts: dict[tuple[int, ...], list[Row]] = {}
    for row in group:
        prompts.setdefault(row.prompt, []).append(row)
    yield from prompts.values()


def _batches(rows: Sequence[Row], budget: int, prefix_id: int | None = None) -> Iterator[MicroBatch]:
    """Passes over rows of like length and one prompt, the shortest first."""
    ordered = sorted(rows, key=lambda row: row.length)
    for start, end in _cuts([row.length for row in ordered], budget - len(rows[0].prompt)):
        yield micro_batch(ordered[start:end], prefix_id)


def _cuts(lengths: Sequence[int], budget: int) -> list[tuple[int, int]]:
    """Where sorted rows are cut into passes of at most `budget` padded tokens, so that the whole costs least.

    A pass of n rows costs n times the length of the last, and PASS; best[i] is the least for the first i rows.
    A single row is a pass of any size.
    """
    best, come_from = [0], [0]
    for end in range(1, len(lengths) + 1):
        choices = [(best[end - 1] + lengths[end - 1] + PASS, end - 1)]
        for start in range(end - 2, -1, -1):
            padded = (end - start) * lengths[end - 1]
            if padded > budget:
                break
            choices.append((best[start] + padded + PASS, start))
        cost, start = min(choices)
        best.append(cost)
        come_from.append(start)
    cuts: list[tuple[int, int]] = []
    end = len(lengths)
    while end:
        cuts.append((come_from[end], end))
        end = come_from[end]
    return cuts[::-1]


def widest(prompt: int, completion: int, group: int, groups: int, budget: int) -> tuple[int, int, int]:
    """How groups of rows of one length are laid out: (tokens of the shared prefix, rows and tokens of a pass)."""
    shared = prompt * (group - 1) >= SHARE_FROM
    rows, tokens = (group, completion) if shared else (group * groups, prompt + completion)
    prefix = prompt if shared else 0
    return prefix, min(rows, max(1, (budget - prefix) // tokens)), tokens


def micro_batch(rows: Sequence[Row], prefix_id: int | None = None) -> MicroBatch:
    """Rows of one prefix, padded to the same length."""
    width = max(row.length for row in rows)

    def stacked(name: str) -> mx.array:
        return mx.array(np.stack([_padded(getattr(row, name), width) for row in rows]))

    return MicroBatch(
        prefix=mx.array(rows[0].prompt, mx.int32),
        tokens=stacked("tokens"),
        mask=stacked("mask"),
        advantages=stacked("advantage"),
        sampler_logprobs=stacked("rollout"),
        temperature=rows[0].temperature,
        top_ids=None if rows[0].candidates is None else stacked("candidates"),
        trajectories=tuple(row.number for row in rows),
        observation_mask=None if rows[0].observed is None else stacked("observed"),
        prefix_id=prefix_id,
    )


def _padded(array: np.ndarray, width: int) -> np.ndarray:
    return np.pad(array, [(0, width - len(array)), *[(0, 0)] * (array.ndim - 1)])
