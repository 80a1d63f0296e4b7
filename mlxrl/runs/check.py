"""Tables of a config that do not go together, beyond what `train.check` says of the settings of a run."""

from __future__ import annotations

from dataclasses import fields

from mlxrl.checked import SettingError
from mlxrl.protocols import Algorithm
from mlxrl.tables import Config


def check_config(settings: Config, algorithm: Algorithm, rewarded: bool) -> None:
    """SettingError for the first fault; rewarded: as in `train.check.check_run`."""
    _check_data_settings(settings, rewarded)
    _check_validation(settings)
    _check_echo(settings, algorithm)
    _check_teacher(settings, algorithm)


def _check_data_settings(settings: Config, rewarded: bool) -> None:
    """SettingError for settings of data and evaluation that do not go together."""
    data = settings.data
    if taken := [name for name in data.columns if name in ("source", "prompt", "system", "limit")]:
        raise SettingError("data", "columns", f"{taken[0]!r} is a name that is taken; rename the column to another")
    for name in ("evaluation", "validation"):
        source = getattr(data, name)
        if source is not None and source == data.train:
            raise SettingError("data", name, "wanted examples that are not trained on, got the training data")
        if source is not None and not rewarded:
            raise SettingError("reward", f"wanted at least one function, got none; data.{name} is scored by them")
    if data.evaluation is None and data.validation is None:
        given = [("evaluation", one.name) for one in fields(settings.evaluation)
                 if getattr(settings.evaluation, one.name) != one.default]  # fmt: skip
        for where in given + [("run", "evaluate_every")] * (settings.run.evaluate_every > 0):
            raise SettingError(*where, "has no effect without data.evaluation or data.validation")
    if data.evaluation is None and settings.evaluation.samples:
        raise SettingError("evaluation", "samples", "has no effect without data.evaluation")


def _check_validation(settings: Config) -> None:
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


def _check_echo(settings: Config, algorithm: Algorithm) -> None:
    if "observations" in algorithm.needs and settings.environment.max_turns == 1:
        raise SettingError("algorithm", "echo", "has no effect with environment.max_turns = 1: no answer is read")
    if "observations" in algorithm.needs and settings.environment.factory is None:
        raise SettingError("algorithm", "echo", "has no effect without environment.factory")


def _check_teacher(settings: Config, algorithm: Algorithm) -> None:
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
