"""From scored groups to the batch of one optimizer step: credit, denominators, micro-batches."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, count

import mlx.core as mx
import numpy as np

from mlxrl.algo.algorithm import not_predicted, num_top
from mlxrl.checked import keywords
from mlxrl.protocols import Algorithm
from mlxrl.settings import Train
from mlxrl.train.own import advantages_of
from mlxrl.train.sequences import TokenSequence, sequences_of, shortened, with_prompt
from mlxrl.types import Batch, Group, Metrics, MicroBatch, Totals

TOKENS_PER_PASS = 2048
PASS = 48  # tokens' worth that a micro-batch of any size costs besides its own, as measured
SHARE_FROM = 128  # prompt tokens saved, below which a pass of its own costs more than the repeated prompt


@keywords
def make_batch(groups: Sequence[Group], algorithm: Algorithm, train: Train = Train()) -> Batch:
    """Credit the trajectories, drop sequences without learning signal, and lay the others out in micro-batches.

    The sequences of a group share their prompt as the prefix where that saves enough; others stand with their prompt,
    and P = 0. Sequences of like length go together, where the padding that this saves outweighs a further pass. The
    totals count every sequence, dropped ones too: neither the size of a pass nor the order changes the gradient.
    A token that was forced on the model is read like an observation: it has no mask and no advantage, and no
    denominator counts it. Where the algorithm predicts observations, a sequence that has some has a signal.

    Args:
        train: of which `tokens_per_pass` bounds the padded tokens of a forward, the prefix included (one sequence may
            exceed it), and tokens beyond `max_tokens_per_sequence`, prompt included, are not trained on: the totals
            count them, and `Batch.dropped_tokens` says how many of them the model chose.
    """
    numbers, kept, skip = count(), num_top(algorithm), not_predicted(algorithm)
    sequences = [
        [
            sequence
            for trajectory, credit in zip(group, credits, strict=True)
            for sequence in sequences_of(next(numbers), trajectory, credit, kept, skip)
        ]
        for group, credits in zip(groups, advantages_of(algorithm, groups), strict=True)
    ]
    whole = _counted(sequences, lambda sequence: int(sequence.mask.sum()))
    observed = _counted(sequences, lambda sequence: sequence.observation_tokens)
    if train.max_tokens_per_sequence is not None:
        most = train.max_tokens_per_sequence
        sequences = [[shortened(one, most - len(one.prompt)) for one in group] for group in sequences]
    dropped = whole - _counted(sequences, lambda sequence: int(sequence.mask.sum()))
    needs_loss = bool(algorithm.needs & {"reference", "teacher", "entropy"})
    learned = [[one for one in group if _has_signal(one, needs_loss)] for group in sequences]
    totals = totals_of(groups, sum(len(group) for group in learned), sum(observed.values()))
    micro_batches = tuple(_micro_batches(learned, train.tokens_per_pass or TOKENS_PER_PASS))
    return Batch(micro_batches, totals, tuple(groups), dict(dropped), dict(observed), _dropout_seed(groups))


def _dropout_seed(groups: Sequence[Group]) -> int:
    """A number for what was sampled: it follows from the run's seed and step, and differs from step to step."""
    tokens = [turn.tokens for group in groups for trajectory in group for turn in trajectory.turns]
    return zlib.crc32(repr(tokens).encode())


def _counted(groups: Sequence[Sequence[TokenSequence]], counts: Callable[[TokenSequence], int]) -> Counter[int]:
    """Counts of sequences by the number of their trajectory, where they are not 0."""
    found = Counter[int]()
    for sequence in chain.from_iterable(groups):
        found[sequence.number] += counts(sequence)
    return +found


def _has_signal(sequence: TokenSequence, needs_loss: bool) -> bool:
    """Whether a sequence changes the gradient; needs_loss: whether a term does so without an advantage."""
    return sequence.observation_tokens > 0 or bool(sequence.mask.any() and (needs_loss or sequence.advantages.any()))


def totals_of(groups: Sequence[Group], learned: int, observation_tokens: int = 0) -> Totals:
    """The denominators of groups of which so many sequences are computed, and so many observed tokens predicted."""
    trajectories = [trajectory for group in groups for trajectory in group]
    sequences = sum(1 + sum(turn.history_rewritten for turn in one.turns[1:]) for one in trajectories)
    return Totals(
        tokens=sum(trajectory.num_sampled for trajectory in trajectories),
        sequences=sequences,
        groups=len(groups),
        max_tokens=max((trajectory.sampling.max_tokens for trajectory in trajectories), default=1),
        without_signal=sequences - learned,
        observation_tokens=observation_tokens,
    )


def tokens_of(batch: Batch) -> Metrics:
    """Tokens of a batch: those learned, those read, a shared prefix once, and the padding besides."""
    read = learned = size = 0
    prefixes = {one.prefix_id: one.prefix.size for one in batch if one.prefix_id is not None}
    for one in batch:
        mask = np.array(one.mask) > 0
        learned += int(mask.sum())
        read += int((mask.shape[1] - mask[:, ::-1].argmax(axis=1)).sum())
        size += mask.size
    shared = sum(prefixes.values())
    return {"tokens/learned": float(learned), "tokens/read": float(read + shared), "tokens/padding": float(size - read)}


def _micro_batches(groups: Sequence[Sequence[TokenSequence]], budget: int) -> Iterator[MicroBatch]:
    alone: list[TokenSequence] = []
    for number, group in enumerate(chain.from_iterable(map(_by_prompt, groups))):
        if len(group[0].prompt) * (len(group) - 1) >= SHARE_FROM:
            yield from _of_like_length(group, budget, prefix_id=number)
        else:
            alone += [with_prompt(sequence) for sequence in group]
    for temperature in sorted({sequence.temperature for sequence in alone}):
        yield from _of_like_length([one for one in alone if one.temperature == temperature], budget)


def _by_prompt(group: Sequence[TokenSequence]) -> Iterator[list[TokenSequence]]:
    """The sequences of a group that have the same prompt; environments may begin differently."""
    prompts: dict[tuple[int, ...], list[TokenSequence]] = {}
    for sequence in group:
        prompts.setdefault(sequence.prompt, []).append(sequence)
    yield from prompts.values()


def _of_like_length(
    sequences: Sequence[TokenSequence], budget: int, prefix_id: int | None = None
) -> Iterator[MicroBatch]:
    """Passes over sequences of one prompt and of like length, the shortest first."""
    ordered = sorted(sequences, key=lambda sequence: sequence.length)
    for start, end in _cuts([sequence.length for sequence in ordered], budget - len(sequences[0].prompt)):
        yield micro_batch(ordered[start:end], prefix_id)


def _cuts(lengths: Sequence[int], budget: int) -> list[tuple[int, int]]:
    """Where sorted sequences are cut into passes of at most `budget` padded tokens, so that the whole costs least.

    A pass of n sequences costs n times the length of the last, and PASS; best[i] is the least for the first i. A
    single sequence is a pass of any size.
    """
    best, came_from = [0], [0]
    for end in range(1, len(lengths) + 1):
        choices = [(best[end - 1] + lengths[end - 1] + PASS, end - 1)]
        for start in range(end - 2, -1, -1):
            padded = (end - start) * lengths[end - 1]
            if padded > budget:
                break
            choices.append((best[start] + padded + PASS, start))
        cost, start = min(choices)
        best.append(cost)
        came_from.append(start)
    cuts: list[tuple[int, int]] = []
    end = len(lengths)
    while end:
        cuts.append((came_from[end], end))
        end = came_from[end]
    return cuts[::-1]


def micro_batch(sequences: Sequence[TokenSequence], prefix_id: int | None = None) -> MicroBatch:
    """Sequences of one prompt, which is the prefix, padded on the right to the same length."""
    rows = [sequence.arrays() for sequence in sequences]
    arrays = {name: mx.array(_padded([row[name] for row in rows])) for name in rows[0]}
    return MicroBatch(
        prefix=mx.array(sequences[0].prompt, mx.int32),
        temperature=sequences[0].temperature,
        trajectories=tuple(sequence.number for sequence in sequences),
        prefix_id=prefix_id,
        **arrays,
    )


def _padded(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Arrays [T, ...] of different lengths as one, [B, T, ...], with zeros after the shorter ones."""
    found = np.zeros((len(arrays), max(map(len, arrays)), *arrays[0].shape[1:]), arrays[0].dtype)
    for row, array in zip(found, arrays, strict=True):
        row[: len(array)] = array
    return found
