"""What an algorithm makes of rewards, found out by showing it some, and what it asks of teacher and sampler."""

from __future__ import annotations

from collections.abc import Sequence

from mlxrl.types import Algorithm, Comparison, Group, Task, Trajectory, Turn


def credited(algo: Algorithm, rewards: Sequence[Sequence[float]]) -> list[bool]:
    """For every group of rewards, whether any of its attempts gets an advantage; none where they are refused."""
    groups = [_group(own) for own in rewards]
    try:
        found = algo.advantages(groups)
    except ValueError:
        return [False] * len(groups)
    return [any(value for one in group for value in (one if isinstance(one, list) else [one])) for group in found]


def uses_rewards(algo: Algorithm) -> bool:
    """Whether an attempt that is right and one that is wrong are told apart."""
    return any(credited(algo, [(1.0, 0.0)]))


def learns_alone(algo: Algorithm, tasks: int) -> bool:
    """Whether groups of one attempt, with a reward of its own for each of a step's tasks, give any advantage."""
    return any(credited(algo, [(float(number),) for number in range(tasks)]))


def comparison_of(algo: Algorithm) -> Comparison | None:
    """What an algorithm compares of a teacher's distributions; None for one that compares none."""
    return getattr(algo, "comparison", None)


def candidates_kept(algo: Algorithm) -> int:
    """How many of its likeliest tokens the sampler has to keep for an algorithm."""
    compared = comparison_of(algo)
    return compared.num_top if compared is not None and compared.support == "student" else 0


def _group(rewards: Sequence[float]) -> Group:
    turn = Turn((0,), (0,), (0.0,))
    return tuple(Trajectory(Task("?"), (turn,), reward, rewards={"?": reward}) for reward in rewards)
