"""What a config's single values cannot tell: settings without effect, combinations that cannot learn, rewards."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any, Protocol, Unpack, cast, get_args, get_origin, get_type_hints

from mlxrl import rewards, types
from mlxrl.algo.probe import learns_alone, uses_rewards
from mlxrl.algo.recipes import RECIPES
from mlxrl.config.strict import ConfigError, Origin, convert
from mlxrl.config.tables import Config, Environment, Evaluation, Reward, Rollout, Teacher
from mlxrl.data import RESERVED, did_you_mean, read_tasks
from mlxrl.plugins import Copying
from mlxrl.rollout.environment import Factory, check_factory, earns

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
    _check_echo(config, origin)


class Recipe(types.Algorithm, Protocol):
    """A built recipe; arguments: every one of its settings, those not given included."""

    @property
    def arguments(self) -> Mapping[str, Any]: ...


def algorithm(config: Config) -> Recipe:
    """The algorithm that a config names, built with its arguments; ValueError where they are wrong."""
    arguments = {name: _frozen(value) for name, value in config.algorithm.arguments.items()}
    return cast(Recipe, RECIPES[config.algorithm.name](**arguments))


def reward_functions(config: Config) -> list[rewards.Function]:
    """The reward functions that a config names."""
    return [rewards.resolve(spec) for spec in config.reward.functions]


def environment(config: Config) -> Factory | None:
    """What makes the environments that a config names, None where it names none."""
    if config.environment.factory is None:
        return None
    return Copying(rewards.find(config.environment.factory, what="environment"), **config.environment.arguments)


def _check_algorithm(config: Config, origin: Origin) -> Recipe:
    name, arguments = config.algorithm.name, config.algorithm.arguments
    if name not in RECIPES:
        hint = did_you_mean(name, RECIPES) or f"; there are {', '.join(RECIPES)}"
        raise origin.error("algorithm.name", f"unknown algorithm {name!r}{hint}")
    hints = _hints(RECIPES[name])
    for key in arguments.keys() & hints.keys():
        convert(hints[key], arguments[key], origin, f"algorithm.{key}")
    try:
        built = algorithm(config)
    except (ValueError, TypeError) as error:
        raise origin.error("algorithm", _line(error), f"algorithm.{_first_named(arguments, str(error))}") from None
    alone = config.rollout.group_size == 1 and ("teacher" not in built.needs or arguments.get("reward"))
    if alone and not learns_alone(built, config.rollout.tasks_per_step):
        raise origin.error("rollout.group_size", f"1 cannot learn with {name}: its baseline needs at least 2 attempts")
    return built


def _first_named(names: Iterable[str], message: str) -> str:
    places = {found.start(): name for name in names if (found := re.search(rf"\b{name}\b", message))}
    return places[min(places)] if places else ""


def _hints(recipe: Callable[..., Any]) -> dict[str, Any]:
    """The types of a recipe's arguments, those of `**arguments: Unpack[...]` included."""
    hints: dict[str, Any] = {}
    for name, hint in get_type_hints(recipe).items():
        hints |= get_type_hints(get_args(hint)[0]) if get_origin(hint) is Unpack else {name: hint}
    return hints


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


def _check_rollout(config: Config, origin: Origin) -> None:
    if config.sampling.temperature == 0:
        why = "at 0 a group's completions are all equal and nothing is learned"
        raise origin.error("sampling.temperature", f"wanted more than 0, got 0; {why}")
    if config.sampling.top_k == 1:
        raise origin.error("sampling.top_k", "1 makes a group's completions all equal and nothing is learned; 0 is off")
    if config.lora.keys is not None and not config.lora.keys:
        raise origin.error("lora.keys", "wanted at least one name, got none; leave it out for every linear layer")
    if config.rollout.max_draws > 1 and config.rollout.group_size == 1:
        raise origin.error("rollout.max_draws", "wanted 1, because a group of 1 attempt has no two different rewards")


def _check_environment(config: Config, origin: Origin) -> None:
    world = config.environment
    if world.factory is None:
        for name in (field.name for field in fields(Environment)):
            if getattr(world, name) != getattr(Environment(), name):
                raise origin.error(f"environment.{name}", "has no effect without environment.factory")
        return
    try:
        found = rewards.find(world.factory, what="environment")
    except ValueError as error:
        message = _line(error).removeprefix("environment").lstrip(": ")
        raise origin.error("environment", message, "environment.factory") from None
    try:
        check_factory(found, world.arguments)
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
        first = {source: read_tasks(source, data.prompt, data.columns, data.system, limit=1)[0] for source in sources}
    except ValueError as error:
        raise ConfigError(_line(error)) from None
    return {source: list(task.columns) for source, task in first.items()}


def _check_rewards(config: Config, origin: Origin, columns: list[list[str]]) -> None:
    specs = config.reward.functions
    if twice := next((spec for spec in specs if specs.count(spec) > 1), None):
        raise origin.error("reward.functions", f"{twice!r} stands there twice; use reward.weights")
    try:
        if specs or config.reward.weights:
            rewards.check_weights(len(specs), config.reward.weights)
        for function in reward_functions(config):
            for names in columns:
                rewards.accept(function, names)
    except ValueError as error:
        raise origin.error("reward", _line(error).removeprefix("reward").lstrip(": ")) from None


def _check_use_of_rewards(config: Config, origin: Origin, built: Recipe) -> None:
    reward, default = config.reward, Reward()
    used = uses_rewards(built)
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
    if reward.overlong_buffer > config.sampling.max_tokens:
        limit = config.sampling.max_tokens
        raise origin.error(
            "reward.overlong_buffer", f"wanted at most sampling.max_tokens, {limit}, got {reward.overlong_buffer}"
        )


def _check_teacher(config: Config, origin: Origin, built: Recipe, columns: list[str] | None) -> None:
    teacher, given = config.teacher, config.teacher != Teacher()
    if given and "teacher" not in built.needs:
        raise origin.error("teacher", f"has no effect, because {built.name} does not learn from a teacher")
    if not given and "teacher" in built.needs:
        raise origin.error("algorithm.name", f"{built.name} needs a teacher; wanted a table [teacher] with id or hint")
    if teacher.id == "base" and teacher.hint is None and not uses_rewards(built):
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


def _check_echo(config: Config, origin: Origin) -> None:
    if config.echo.taper and not config.echo.weight:
        raise origin.error("echo.taper", "has no effect without echo.weight")
    if config.echo.weight and config.environment.factory is None:
        raise origin.error("echo.weight", "has no effect without environment.factory: nothing is answered")
    if config.echo.weight and config.environment.max_turns == 1:
        raise origin.error("echo.weight", "has no effect with environment.max_turns = 1: no answer is read")


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())
