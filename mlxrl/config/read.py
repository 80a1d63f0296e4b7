"""From a TOML file and the command line's `key=value` to a checked config."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlxrl import plugins
from mlxrl.config.strict import ConfigError, Origin, fill
from mlxrl.config.tables import Config, Teacher

_BARE = re.compile(r"[^\s\"'\[\]{}#][^\"'\[\]{}#\n]*")
"""An override's value that may be meant as a text without its quotes."""


def read(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a config and check everything that can be checked without a model.

    Args:
        overrides: TOML assignments such as `optimizer.learning_rate=2e-5`; a text may go without its quotes where
            it is not TOML by itself, as in `run.folder=runs/second`.
    Raises:
        ConfigError: one line.
    """
    path = Path(path).expanduser()
    values, overridden = _parse(path), set[str]()
    for override in overrides:
        values = _merged(values, assignment := _assignment(override))
        overridden |= _leaves(assignment)
    origin = Origin(str(path), frozenset(overridden))
    if "echo" in values:
        from mlxrl.algo.conventions import MOVED

        raise origin.error("echo", f"is now {MOVED['echo']}", origin.given("echo"))
    filled = fill(Config, _gather_arguments(values), origin)
    from mlxrl.config.check import check  # knows the recipes, and so takes MLX and numpy: faults above answer without

    config = _located(filled, path.absolute().parent, origin)
    check(config, origin)
    return config


def _parse(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; wanted a config in TOML") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: wanted TOML in UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None


def _assignment(override: str) -> dict[str, Any]:
    """`a.b=value` as nested tables."""
    key, equals, value = (part.strip() for part in override.partition("="))
    if not equals or not re.fullmatch(r"[\w-]+(\.[\w-]+)*", key):
        raise ConfigError(f"command line: wanted key=value such as optimizer.learning_rate=2e-5, got {override!r}")
    try:
        parsed: Any = tomllib.loads(f"value = {value}\n")["value"] if "\n" not in value else value
    except tomllib.TOMLDecodeError as error:
        if not _BARE.fullmatch(value):
            raise ConfigError(
                f"command line: {key}: {value!r} is not TOML ({error}); texts stand in quotes, '{key}=\"...\"'"
            ) from None
        parsed = value
    for part in reversed(key.split(".")):
        parsed = {part: parsed}
    return parsed


def _merged(values: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(values)
    for name, value in over.items():
        old = out.get(name)
        out[name] = _merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return out


def _leaves(values: Mapping[str, Any], prefix: str = "") -> set[str]:
    found: set[str] = set()
    for name, value in values.items():
        found |= _leaves(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}"}
    return found


def _gather_arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of [algorithm] but its name, as one table: which of them exist is the recipe's business."""
    table = values.get("algorithm")
    if not isinstance(table, Mapping):
        return dict(values)
    arguments = {name: value for name, value in table.items() if name != "name"}
    name = {"name": table["name"]} if "name" in table else {}
    return {**values, "algorithm": {**name, "arguments": arguments}}


def _located(config: Config, folder: Path, origin: Origin) -> Config:
    """Every path made absolute, so that the config means the same wherever its resolved text lies."""
    data, evaluation = config.data, config.data.evaluation
    data = replace(
        data,
        train=_source(data.train, folder, origin, "data.train"),
        evaluation=None if evaluation is None else _source(evaluation, folder, origin, "data.evaluation"),
    )
    functions = tuple(_plugin(name, folder, origin, "reward.functions") for name in config.reward.functions)
    world = config.environment
    if world.factory is not None:
        world = replace(world, factory=_plugin(world.factory, folder, origin, "environment.factory"))
    algorithm = config.algorithm
    if ":" in algorithm.name:
        algorithm = replace(algorithm, name=_plugin(algorithm.name, folder, origin, "algorithm.name"))
    model = replace(config.model, id=_model(config.model.id, folder, origin))
    reward, teacher = replace(config.reward, functions=functions), _teacher(config.teacher, folder, origin)
    return replace(
        config, model=model, data=data, reward=reward, environment=world, algorithm=algorithm, teacher=teacher
    )


def _teacher(teacher: Teacher, folder: Path, origin: Origin) -> Teacher:
    if teacher.id not in (None, "base"):
        teacher = replace(teacher, id=_model(teacher.id, folder, origin, "teacher.id"))
    if teacher.adapter is None:
        return teacher
    if (path := _existing(teacher.adapter, folder)) is None:
        raise origin.error(
            "teacher.adapter", f"no folder {teacher.adapter!r} beside the config or in the current directory"
        )
    return replace(teacher, adapter=str(path))


def _plugin(name: str, folder: Path, origin: Origin, key: str) -> str:
    try:
        return plugins.located(name, folder)
    except plugins.PluginError as error:
        raise origin.error(key, str(error)) from None


def _source(name: str, folder: Path, origin: Origin, key: str) -> str:
    if name.startswith("hf:"):
        return name
    if (path := _existing(name, folder)) is None:
        raise origin.error(key, f"no file {name!r} beside the config or in the current directory")
    return str(path)


def _model(id: str, folder: Path, origin: Origin, key: str = "model.id") -> str:
    """A path that exists as an absolute one, a Hugging Face id as it is."""
    if (path := _existing(id, folder)) is not None:
        return str(path)
    looks_like_path = id.startswith((".", "/", "~")) or id.endswith((".gguf", "/")) or id.count("/") > 1
    if looks_like_path:
        raise origin.error(key, f"no folder or file {id!r} beside the config or in the current directory")
    return id


def _existing(name: str, folder: Path) -> Path | None:
    path = Path(name).expanduser()
    found = (base / path for base in (folder, Path.cwd()) if (base / path).exists())
    return next((path.resolve() for path in found), None)
