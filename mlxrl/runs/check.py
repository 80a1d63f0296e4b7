"""Whether the tables of a config go together, and fit its data and its algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from mlxrl.checked import SettingError
from mlxrl.data import fingerprint
from mlxrl.errors import UserError, did_you_mean
from mlxrl.protocols import Algorithm
from mlxrl.rewards.scoring import Rewards, check_columns, tell_missing
from mlxrl.tables import Config
from mlxrl.types import Task


def check_sources(settings: Config, rewarded: bool, algorithm: Algorithm) -> None:
    """SettingError for settings of data and evaluation that do not go together."""
    data, learned = settings.data, "answers" in algorithm.needs
    if taken := [name for name in data.columns if name in ("source", "prompt", "system", "limit", "whole")]:
        raise SettingError("data", "columns", f"{taken[0]!r} is a name that is taken; rename the column to another")
    for name in ("evaluation", "validation"):
        source = getattr(data, name)
        if source is not None and source == data.train:
            raise SettingError("data", name, "wanted examples that are not trained on, got the training data")
        if source is not None and not rewarded and not learned:
            raise SettingError("reward", f"wanted at least one function, got none; data.{name} is scored by them")
    if data.completion is not None and not learned:
        raise SettingError("data", "completion", f"has no effect, because {algorithm.name} learns from samples")
    if data.completion is not None and "completion" in data.columns:
        raise SettingError("data", "columns", "'completion' is data.completion; leave one of them out")
    if data.evaluation is None and data.validation is None:
        given = [("evaluation", one.name) for one in fields(settings.evaluation)
                 if getattr(settings.evaluation, one.name) != one.default]  # fmt: skip
        for where in given + [("run", "evaluate_every")] * (settings.run.evaluate_every > 0):
            raise SettingError(*where, "has no effect without data.evaluation or data.validation")
    for one in fields(settings.evaluation) if learned and not rewarded else ():
        if one.name != "examples" and getattr(settings.evaluation, one.name) != one.default:
            raise SettingError("evaluation", one.name, "has no effect without reward.functions: nothing is sampled")
    if data.evaluation is None and settings.evaluation.samples:
        raise SettingError("evaluation", "samples", "has no effect without data.evaluation")


def check_validation(settings: Config) -> None:
    """SettingError for a choice of adapters without the examples or the evaluations that it is made by."""
    given, run = settings.data.validation, settings.run
    choices = {"keep": run.keep == "best", "patience": run.patience, "accept_margin": run.accept_margin is not None}
    chosen = next((name for name, value in choices.items() if value), None)
    if chosen and given is None:
        why = "wanted data.validation, by which an adapter is chosen: what is reported on data.evaluation is not"
        raise SettingError("run", chosen, why)
    if given is not None and given == settings.data.evaluation:
        why = "wanted other examples than those of data.evaluation, because what is reported is not what is chosen by"
        raise SettingError("data", "validation", why)
    if given is not None and not run.evaluate_every:
        raise SettingError("data", "validation", "has no effect without run.evaluate_every")


def check_echo(settings: Config, algorithm: Algorithm) -> None:
    """SettingError where no answers are read that could be predicted."""
    if "observations" in algorithm.needs and settings.environment.max_turns == 1:
        raise SettingError("algorithm", "echo", "has no effect with environment.max_turns = 1: no answer is read")
    if "observations" in algorithm.needs and settings.environment.factory is None:
        raise SettingError("algorithm", "echo", "has no effect without environment.factory")


def check_teacher(settings: Config, algorithm: Algorithm) -> None:
    """SettingError for a teacher that is missing, has no effect or teaches nothing."""
    teacher, needed = settings.teacher, "teacher" in algorithm.needs
    given = teacher.id is not None or teacher.hint is not None
    if given and not needed:
        raise SettingError("teacher", f"has no effect, because {algorithm.name} does not learn from a teacher")
    if needed and not given:
        why = f"{algorithm.name} needs a teacher; wanted a table [teacher] with id or hint"
        raise SettingError("algorithm", "name", why)
    if teacher.id == "base" and teacher.hint is None and "reward" not in algorithm.needs:
        why = "'base' is what training starts from, so nothing is learned; wanted a hint, or algorithm.reward"
        raise SettingError("teacher", "id", why)


def check_columns_of(
    settings: Config, rewards: Rewards, scored: Sequence[Sequence[Task]], tasks: Sequence[Task]
) -> None:
    """SettingError for columns that rewards want of what they score, or the teacher of tasks, and the data lack."""
    *training, held_out, validation = scored
    if validation and fingerprint(validation) == fingerprint(held_out):
        raise SettingError("data", "validation", "wanted other examples than those of data.evaluation, got the same")
    if not training and rewards.functions:  # which score the model's answers in place of those of the data
        from mlxrl.rollout.demonstrations import all_asked

        all_asked([*held_out, *validation])
    for some in scored:
        if some:
            offered = list(dict.fromkeys(column for task in some for column in task.columns))
            try:
                check_columns(rewards, offered)
            except UserError as error:
                raise SettingError("reward", "functions", *error.parts) from error.__cause__
            tell_missing(rewards, some)
    if (hint := settings.teacher.hint) is not None:
        from mlxrl.train.teacher import hinted

        if hint not in tasks[0].columns:
            near = did_you_mean(hint, tasks[0].columns) or f"; there are {', '.join(tasks[0].columns)}"
            raise SettingError("teacher", "hint", f"no column {hint!r} in {settings.data.train}{near}")
        for task in tasks:
            hinted(task, hint)
