"""What a config's single values cannot tell: settings without effect, combinations that cannot learn, rewards."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import fields

from mlxrl import plugins, settings, types
from mlxrl.algo.table import build
from mlxrl.config.strict import ConfigError, Origin
from mlxrl.config.tables import Config, Environment, Evaluation, Reward, Rollout, Teacher
from mlxrl.data import RESERVED, tasks
from mlxrl.errors import UserError, did_you_mean
from mlxrl.rewards.scoring import Rewards, check_columns, rewards_of
from mlxrl.rollout.worlds import Copying, Factory, accept, earns

TASKS_KEYWORDS = ("source", "prompt", "system", "limit")


def check(config: Config, origin: Origin) -> None:
    """Raise ConfigError for the first fault."""
    built = _check_algorithm(config, origin)
    _check_rollout(config, origin)
    _check_environment(config, origin)
    _check_updates(config, origin)
    _check_optimizer(config, origin)
    _check_evaluation(config, origin)
    columns = _columns(config, origin)
    _check_rewards(config, origin, list(columns.values()))
    _check_use_of_rewards(config, origin, built)
    _check_teacher(config, origin, built, columns.get(config.data.train))
    _check_observations(config, origin, built)


def algorithm(config: Config) -> types.Algorithm:
    """The algorithm that a config names, built with its arguments; UserError where they are wrong."""
    return build({"name": config.algorithm.name, **config.algorithm.arguments})


def rewards(config: Config) -> Rewards:
    """The reward functions that a config names, and their weights."""
    return rewards_of(settings.Reward(functions=config.reward.functions, weights=config.reward.weights))


def environment(config: Config) -> Factory | None:
    """What makes the environments that a config names, None where it names none."""
    if config.environment.factory is None:
        return None
    return Copying(plugins.find(config.environment.factory), **config.environment.arguments)


def _check_algorithm(config: Config, origin: Origin) -> types.Algorithm:
    try:
        built = algorithm(config)
    except UserError as error:
        table, given = error.parts[0], config.algorithm.arguments
        keys = given if table == "algorithm" else given.get(table.removeprefix("algorithm."), {})
        blamed = f"{table}.{_first_named(['name', *keys], str(error))}"
        raise origin.error("", str(error), origin.given(blamed)) from None
    size, tasks = config.rollout.group_size, config.rollout.tasks_per_step
    compares = getattr(built, "compares", "nothing")
    if {"group": size, "step": size * tasks}.get(compares, 2) < 2:
        why = f"1 cannot learn with {built.name}, which compares a completion with the others of its {compares}"
        raise origin.error("rollout.group_size", why)
    return built


def _first_named(names: Iterable[str], message: str) -> str:
    places = {found.start(): name for name in names if (found := re.search(rf"\b{name}\b", message))}
    return places[min(places)] if places else ""


def _check_rollout(config: Config, origin: Origin) -> None:
    if config.rollout.top_k == 1:
        raise origin.error("rollout.top_k", "1 makes a group's attempts all equal and nothing is learned; 0 is off")
    if config.lora.keys is not None and not config.lora.keys:
        raise origin.error("lora.keys", "wanted at least one name, got none; leave it out for every linear layer")
    rollout = config.rollout
    if rollout.min_tokens > rollout.max_tokens:
        wanted = f"wanted at most rollout.max_tokens, {rollout.max_tokens}, got {rollout.min_tokens}"
        raise origin.error("rollout.min_tokens", wanted)
    if not all(rollout.stop_strings):
        raise origin.error("rollout.stop_strings", f"wanted texts that are not empty, got {list(rollout.stop_strings)}")
    penalties = (rollout.repetition_penalty, rollout.presence_penalty, rollout.frequency_penalty)
    if rollout.penalty_context != Rollout().penalty_context and penalties == (1, 0, 0):
        raise origin.error("rollout.penalty_context", "has no effect without a penalty")
    if rollout.max_draws > 1 and rollout.group_size == 1:
        raise origin.error("rollout.max_draws", "wanted 1, because a group of 1 attempt has no two different rewards")


def _check_environment(config: Config, origin: Origin) -> None:
    world = config.environment
    if world.factory is None:
        for name in (field.name for field in fields(Environment)):
            if getattr(world, name) != getattr(Environment(), name):
                raise origin.error(f"environment.{name}", "has no effect without environment.factory")
        return
    try:
        found = plugins.find(world.factory)
    except plugins.PluginError as error:
        raise origin.error("environment.factory", str(error)) from None
    try:
        accept(found, world.arguments)
    except ValueError as error:
        wrong = f"environment.arguments.{_first_named(world.arguments, _line(error).partition(';')[0])}"
        blamed = wrong if wrong in origin.overridden else "environment.factory"
        raise origin.error("environment", _line(error), blamed) from None
    if config.reward.overlong_buffer:
        raise origin.error("reward.overlong_buffer", "wanted 0 with an environment, whose turns have a limit each")
    if config.teacher.hint is not None:
        raise origin.error("teacher.hint", "an environment says what is asked; leave the hint out")


def _check_updates(config: Config, origin: Origin) -> None:
    parts, tasks = config.train.minibatches, config.rollout.tasks_per_step
    if parts > tasks:
        raise origin.error("train.minibatches", f"wanted at most the {tasks} groups of a step, got {parts}")


def _check_optimizer(config: Config, origin: Origin) -> None:
    optimizer = config.optimizer
    if optimizer.warmup_steps >= config.steps:
        raise origin.error(
            "optimizer.warmup_steps", f"wanted less than the {config.steps} steps, got {optimizer.warmup_steps}"
        )
    if optimizer.weight_decay and optimizer.name == "adam":
        raise origin.error("optimizer.weight_decay", "adam has none; wanted name = 'adamw', or weight_decay left out")
    if optimizer.betas is not None:
        if optimizer.name == "sgd":
            raise origin.error("optimizer.betas", "sgd has none; leave it out")
        if not all(0 <= beta < 1 for beta in optimizer.betas):
            raise origin.error("optimizer.betas", f"wanted two of at least 0 and less than 1, got {optimizer.betas}")


def _check_evaluation(config: Config, origin: Origin) -> None:
    if config.data.evaluation is None:
        for name in ("rows", "temperature", "success"):
            if getattr(config.evaluation, name) != getattr(Evaluation(), name):
                raise origin.error(f"evaluation.{name}", "has no effect without data.evaluation")
        if config.run.evaluate_every:
            raise origin.error("run.evaluate_every", "has no effect without data.evaluation")
    elif config.data.evaluation == config.data.train:
        raise origin.error("data.evaluation", "wanted rows that are not trained on, got the training data")


def _columns(config: Config, origin: Origin) -> dict[str, list[str]]:
    """The columns of the first row of each data source that is on this machine."""
    for name in config.data.columns:
        if name in RESERVED or name in TASKS_KEYWORDS:
            raise origin.error("data.columns", f"{name!r} is a name that is taken; rename the column to another one")
    sources = [
        source for source in (config.data.train, config.data.evaluation) if source and not source.startswith("hf:")
    ]
    data = config.data
    try:
        first = {one: tasks(one, data.prompt, system=data.system, limit=1, **data.columns)[0] for one in sources}
    except ValueError as error:
        raise ConfigError(_line(error)) from None
    return {source: list(task.columns) for source, task in first.items()}


def _check_rewards(config: Config, origin: Origin, columns: list[list[str]]) -> None:
    try:
        found = rewards(config)
        for names in columns:
            check_columns(found, names)
    except UserError as error:
        raise origin.error("reward", str(error).removeprefix("reward").lstrip(": ")) from None


def _check_use_of_rewards(config: Config, origin: Origin, built: types.Algorithm) -> None:
    reward, default = config.reward, Reward()
    used = "reward" in built.needs
    made = environment(config)
    scored = bool(reward.functions) or earns(made)
    if not scored and (used or config.data.evaluation is not None):
        why = f"{built.name} learns from rewards" if used else "data.evaluation is scored by them"
        why += f", and {config.environment.factory} gives none" if made else ""
        raise origin.error("reward", f"wanted at least one function, got none; {why}")
    if not used:
        for table, name in (("reward", "overlong_buffer"), ("reward", "length_penalty"), ("rollout", "max_draws")):
            if getattr(getattr(config, table), name) != getattr(default if table == "reward" else Rollout(), name):
                raise origin.error(f"{table}.{name}", f"has no effect, because {built.name} does not look at rewards")
    for name in ("overlong_factor", "overlong_cap"):
        if not reward.overlong_buffer and getattr(reward, name) != getattr(default, name):
            raise origin.error(f"reward.{name}", "has no effect without reward.overlong_buffer")
    if reward.overlong_buffer > config.rollout.max_tokens:
        limit = config.rollout.max_tokens
        raise origin.error(
            "reward.overlong_buffer", f"wanted at most rollout.max_tokens, {limit}, got {reward.overlong_buffer}"
        )


def _check_teacher(config: Config, origin: Origin, built: types.Algorithm, columns: list[str] | None) -> None:
    teacher, given = config.teacher, config.teacher != Teacher()
    if given and "teacher" not in built.needs:
        raise origin.error("teacher", f"has no effect, because {built.name} does not learn from a teacher")
    if not given and "teacher" in built.needs:
        raise origin.error("algorithm.name", f"{built.name} needs a teacher; wanted a table [teacher] with id or hint")
    if teacher.id == "base" and teacher.hint is None and "reward" not in built.needs:
        raise origin.error(
            "teacher.id",
            "'base' is what training starts from, so nothing is learned; wanted a hint, or algorithm.reward",
        )
    if teacher.id in (None, "base"):
        for name in ("dtype", "adapter"):
            if getattr(teacher, name) is not None:
                raise origin.error(f"teacher.{name}", "has no effect, because teacher.id names no model to be loaded")
    if teacher.hint is not None and columns is not None and teacher.hint not in columns:
        hint = did_you_mean(teacher.hint, columns) or f"; there are {', '.join(columns)}"
        raise origin.error("teacher.hint", f"no column {teacher.hint!r} in {config.data.train}{hint}")


def _check_observations(config: Config, origin: Origin, built: types.Algorithm) -> None:
    if "observations" not in built.needs:
        return
    if config.environment.factory is None:
        raise origin.error("algorithm.echo", "has no effect without environment.factory: nothing is answered")
    if config.environment.max_turns == 1:
        raise origin.error("algorithm.echo", "has no effect with environment.max_turns = 1: no answer is read")


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())
