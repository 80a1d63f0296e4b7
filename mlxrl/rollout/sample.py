"""From tasks to groups of trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import mlx.core as mx

from mlxrl.errors import UserError
from mlxrl.policy.modes import decoding
from mlxrl.policy.policy import Policy
from mlxrl.rollout.draw import key_of, sequence_keys
from mlxrl.rollout.engine import Engine
from mlxrl.rollout.environment import Factory, check_factory, prepare
from mlxrl.rollout.episodes import Episodes
from mlxrl.rollout.stop_rules import Processor
from mlxrl.rollout.workers import Call, Workers
from mlxrl.settings import EpisodeLimits, Sampling
from mlxrl.types import Group, Task

MIN_BATCH_FRACTION = 0.25
"""Share of the sequences that must have an answer of their environment before they continue while others are drawn:
what they read is one forward pass, and sequences that decode at the same time cost little more than one."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a rollout. groups: those of the tasks, with the trajectories that had ended."""

    def __init__(self, groups: tuple[Group, ...]) -> None:
        super().__init__()
        self.groups = groups


def sample(
    policy: Policy,
    tasks: Sequence[Task],
    *,
    group_size: int,
    sampling: Sampling = Sampling(),
    key: int | mx.array = 0,
    max_rows: int = 32,
    environment: Factory | None = None,
    limits: EpisodeLimits = EpisodeLimits(),
    processors: Sequence[Processor] = (),
) -> tuple[Group, ...]:
    """Sample `group_size` trajectories of every task, all of them in one batch.

    Args:
        key: a number or a key, [2] uint32. Trajectory r of task i draws from a key made of (key, i, r) alone, and of
            the number of its turn.
        max_rows: sequences that decode together.
        environment: makes the environment of a trajectory, which then is an episode of several turns; see
            `types.Environment`. Its reward is the sum over the turns, before reward functions.
        limits: of an episode with an environment.
        processors: mlx-lm's logits processors, called with a sequence's tokens [T] and its logits [1, V]. Log-probs
            stay those of the model.
    Returns:
        a group of trajectories for every task; a task that stands twice is two groups.
    Raises:
        Interrupted: on Ctrl-C, with the trajectories that had ended.
        EpisodeError: the environment failed in every episode. One that fails in some ends only those.
    """
    _check(group_size, environment, limits)
    if environment is not None:
        prepare(environment, policy.tokenizer)
    base = key_of(0, key) if isinstance(key, int) else key
    keys = sequence_keys(base, len(tasks), group_size)
    episodes = Episodes(policy.tokenizer, tasks, group_size, sampling, environment, limits, keys)
    try:
        with (
            episodes,
            Workers(limits.timeout) as workers,
            decoding(policy) as merged,
            Engine(merged, max_rows=max_rows, processors=processors) as engine,
        ):
            episodes.begin(engine, workers)
            while engine.busy or workers.busy:
                ended = engine.step()
                answers = _answers(engine, workers)  # of earlier actions: those of this step get the time of the next
                for sequence in ended:
                    episodes.acted(sequence)
                if not engine.busy:
                    answers = workers.wait()
                for answer in answers:
                    episodes.observed(answer)
    except KeyboardInterrupt:
        raise Interrupted(episodes.groups()) from None
    episodes.require_one()
    return episodes.groups()


def _answers(engine: Engine, workers: Workers) -> list[Call]:
    """The answers of environments to continue with while others are drawn: once they are enough for a batch."""
    return workers.finished(max(1, MIN_BATCH_FRACTION * engine.occupied)) if engine.drawing else []


def _check(group_size: int, environment: Factory | None, limits: EpisodeLimits) -> None:
    if group_size < 1:
        raise UserError("sample", "group_size", f"wanted at least 1, got {group_size}")
    if environment is None:
        for one in fields(limits):
            if getattr(limits, one.name) != one.default:
                raise UserError("sample", f"{one.name} has no effect without an environment")
        return
    try:
        check_factory(environment, {})
    except UserError as error:
        raise error.within("sample", "environment") from None
