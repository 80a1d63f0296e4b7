"""Dynamic sampling: which tasks a step samples, its own and further ones in place of zero-variance groups."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import mlx.core as mx

from mlxrl.algo.shaping import keep_varied
from mlxrl.rollout.draw import fold, key_of
from mlxrl.types import Group, Task

FURTHER = 2**31
"""Added to the number of a round, so that its key is none of those that `sample` makes for the tasks of a step."""


@dataclass(frozen=True, slots=True)
class Resampled:
    """groups: what the step learns from; sampled: all that was sampled for it, in so many rounds."""

    groups: tuple[Group, ...]
    sampled: tuple[Group, ...]
    rounds: int


def resample(
    collect: Callable[[Sequence[Task], int], Sequence[Group]],
    tasks: Sequence[Task],
    further: Iterator[Task],
    max_rounds: int,
) -> Resampled:
    """Sample a step's tasks; in further rounds replace zero-variance groups by those of further tasks.

    Dynamic sampling (DAPO, arXiv 2503.14476): a group whose scored rewards are all equal has advantage 0. A further
    round samples as many tasks as, at the share of groups with variance so far, give those that are missing, but never
    more than the step has. Groups beyond the step's number are left out, the last first.

    Args:
        collect: from tasks and the number of the round to scored groups.
        further: the rounds end with them, after `max_rounds` further ones, or when no group is missing.
    """
    sampled = list(collect(tasks, 0))
    if max_rounds == 0:
        return Resampled(tuple(sampled), tuple(sampled), 1)
    rounds, varied = 1, keep_varied(sampled)
    while len(varied) < len(tasks) and rounds <= max_rounds:
        missing = len(tasks) - len(varied)
        wanted = min(len(tasks), -(-missing * len(sampled) // max(len(varied), 1)))
        more = list(islice(further, wanted))
        if not more:
            break
        sampled += collect(more, rounds)
        varied = keep_varied(sampled)
        rounds += 1
    return Resampled(tuple(varied[: len(tasks)]), tuple(sampled), rounds)


def further_tasks(tasks: Sequence[Task], own: Collection[int], seed: int, step: int) -> Iterator[Task]:
    """All tasks but those of the step, whose indices are `own`, in an order made from (seed, step) alone."""
    left = [task for index, task in enumerate(tasks) if index not in own]
    random.Random(f"{seed}:{step}:further").shuffle(left)
    return iter(left)


def round_key(seed: int, step: int, number: int) -> mx.array:
    """The key of a step's round, [2] uint32; that of the first is the step's."""
    key = key_of(seed, step)
    return fold(key[None], mx.array([FURTHER + number], mx.uint32))[0] if number else key
