"""Which tasks a step asks: its own, and further ones in place of those that teach nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import mlx.core as mx

from mlxrl.algo.shaping import keep_varied
from mlxrl.rollout.draw import fold, key_of
from mlxrl.types import Group, Task

FURTHER = 2**31
"""Added to the number of a draw, so that its key is none of those that `sample` makes for the tasks of a step."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """groups: what the step learns from; asked: all that was sampled for it, in so many draws."""

    groups: tuple[Group, ...]
    asked: tuple[Group, ...]
    draws: int


def draw(
    ask: Callable[[Sequence[Task], int], Sequence[Group]], todo: Sequence[Task], more: Iterator[Task], max_draws: int
) -> Drawn:
    """Ask a step's tasks; with more than one draw, drop groups without signal and ask further tasks for them.

    Dynamic sampling (DAPO, arXiv 2503.14476): a group whose scored rewards are all equal has advantage 0. A further
    draw asks as many tasks as, at the share of groups with signal so far, give those that are missing, but never more
    than the step has. What is drawn beyond the step's number of groups is left out, the last first.

    Args:
        ask: from tasks and the number of the draw to scored groups.
        more: the further tasks; the draws end with them, with `max_draws`, or when no group is missing.
    """
    asked = list(ask(todo, 0))
    if max_draws == 1:
        return Drawn(tuple(asked), tuple(asked), 1)
    wanted, draws = len(todo), 1
    found = keep_varied(asked)
    while len(found) < wanted and draws < max_draws:
        further = list(islice(more, _enough(wanted, len(found), len(asked))))
        if not further:
            break
        asked += ask(further, draws)
        found = keep_varied(asked)
        draws += 1
    return Drawn(tuple(found[:wanted]), tuple(asked), draws)


def _enough(wanted: int, found: int, asked: int) -> int:
    """Tasks to ask for the groups that are missing: missing * asked / found, rounded up, `wanted` at most."""
    return min(wanted, -(-(wanted - found) * asked // max(found, 1)))


def further_tasks(tasks: Sequence[Task], todo: Sequence[Task], seed: int, step: int) -> Iterator[Task]:
    """All tasks but those of the step, in an order made from (seed, step) alone."""
    taken = {id(task) for task in todo}
    left = [task for task in tasks if id(task) not in taken]
    random.Random(f"{seed}:{step}:further").shuffle(left)
    return iter(left)


def draw_key(seed: int, step: int, number: int) -> mx.array:
    """The key of a step's draw, [2] uint32; that of the first is the step's."""
    key = key_of(seed, step)
    return fold(key[None], mx.array([FURTHER + number], mx.uint32))[0] if number else key
