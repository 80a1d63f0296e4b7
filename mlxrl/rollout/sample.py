"""From tasks to groups of trajectories."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial

import mlx.core as mx

from mlxrl.checked import checked_value, keywords
from mlxrl.data import Source, as_tasks
from mlxrl.errors import UserError
from mlxrl.policy.modes import decoding
from mlxrl.policy.policy import Policy
from mlxrl.rollout.chat import Fitting, check_thinking, fitting
from mlxrl.rollout.draw import key_of, sequence_keys
from mlxrl.rollout.engine import Engine
from mlxrl.rollout.environment import Factory, check_factory, prepare
from mlxrl.rollout.episodes import Episodes
from mlxrl.rollout.prefill import context_of
from mlxrl.rollout.stop_rules import Processor
from mlxrl.rollout.workers import Workers
from mlxrl.settings import EpisodeLimits, Sampling, Some
from mlxrl.types import Group, Task

MIN_BATCH_FRACTION = 0.25
"""Share of the sequences that must have an answer of their environment before they continue while others are drawn:
what they read is one forward pass, and sequences that decode at the same time cost little more than one."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a rollout. groups: those of the tasks, with the trajectories that had ended."""

    def __init__(self, groups: tuple[Group, ...]) -> None:
        super().__init__()
        self.groups = groups


@keywords
def sample(
    policy: Policy,
    tasks: Sequence[Task] | Source,
    *,
    group_size: int,
    sampling: Sampling = Sampling(),
    key: int | mx.array = 0,
    max_rows: int = 32,
    environment: Factory | None = None,
    limits: EpisodeLimits = EpisodeLimits(),
    processors: Sequence[Processor] = (),
) -> tuple[Group, ...]:
    """Sample `group_size` trajectories of every task, all of them in one batch; returns a group for every task.

    Args:
        tasks: those of `mlxrl.tasks`, or what that reads. One whose prompt fills the context ends in an error.
        key: a number or a key, [2] uint32. Each turn draws from a key made of (key, task, trajectory, turn) alone.
        max_rows: sequences that decode together.
        environment: makes the environment of a trajectory, which then is an episode of several turns; see
            `protocols.Environment`. Its reward is the sum over the turns, before reward functions.
        processors: mlx-lm's logits processors, as in `Engine`. Log-probs stay those of the model.
    Raises:
        Interrupted: on Ctrl-C, with the trajectories that had ended.
        EpisodeError: the environment failed in every episode. One that fails in some ends only those.
    """
    check_sample(group_size, environment, limits)
    tasks = as_tasks(tasks)
    check_thinking(policy.tokenizer, sampling.thinking, "sampling")
    if environment is not None:
        prepare(environment, policy.tokenizer)
    keys = sequence_keys(key_of(0, key) if isinstance(key, int) else key, len(tasks), group_size)
    episodes = Episodes(policy.tokenizer, tasks, group_size, sampling, environment, limits, keys)
    try:
        with (
            episodes,
            Workers(limits.timeout) as workers,
            decoding(policy) as merged,
            Engine(merged, max_rows=max_rows, processors=processors) as engine,
        ):
            _run_episodes(episodes, engine, workers)
    except KeyboardInterrupt:
        raise Interrupted(episodes.groups()) from None
    episodes.require_one()
    return episodes.groups()


def _run_episodes(episodes: Episodes, engine: Engine, workers: Workers) -> None:
    """Decode and act until all episodes have ended."""
    episodes.begin(engine, workers)
    while engine.busy or workers.busy:
        ended = engine.step()
        # answers of earlier actions: those of this step get the time of the next
        enough = max(1, MIN_BATCH_FRACTION * engine.occupied)
        answers = workers.finished(enough) if engine.drawing else []
        for sequence in ended:
            episodes.acted(sequence)
        for answer in answers if engine.busy else workers.wait():
            episodes.observed(answer)


def fitting_prompts(
    policy: Policy, tasks: Sequence[Task] | Source, sampling: Sampling, environment: Factory | None
) -> Fitting:
    """The tasks, without those whose prompts fill the context, with a warning. Prompts of environments come later."""
    tasks = as_tasks(tasks)
    check_thinking(policy.tokenizer, sampling.thinking, "sampling")
    if environment is not None:
        return Fitting(tasks)
    find = partial(fitting, policy.tokenizer, context_of(policy.model), tasks, sampling.thinking)
    return found_once(policy, tasks, sampling.thinking, find)


def found_once(policy: Policy, tasks: Sequence[Task], key: object, find: Callable[[], Fitting]) -> Fitting:
    """What fits of tasks, with a warning.

    A tuple cannot change, so what was found for one is kept with the policy: evaluations do not render it again.
    """
    known: list[tuple[Sequence[Task], object, Fitting]] = policy.memo.setdefault("fitting prompts", [])
    for given, by, fitted in known:
        if given is tasks and by == key:
            return fitted
    fitted = find()
    if isinstance(tasks, tuple):
        known[:] = [*known[-3:], (tasks, key, fitted)]  # of training, of its teacher, of validation and evaluation
    if fitted.line:
        warnings.warn(fitted.line, stacklevel=4)
    return fitted


def check_sample(group_size: int, environment: Factory | None, limits: EpisodeLimits) -> None:
    """UserError for arguments of `sample` that are wrong or without effect."""
    checked_value("sample", "group_size", Some, group_size)
    changed = [one.name for one in fields(limits) if getattr(limits, one.name) != one.default]
    if environment is None and changed:
        raise UserError("sample", f"{changed[0]} has no effect without an environment")
    try:
        if environment is not None:
            check_factory(environment, {})
    except UserError as error:
        raise error.within("sample", "environment") from None
