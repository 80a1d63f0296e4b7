"""From a TOML file and the command line's `key=value` to settings, and back to TOML."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import tomli_w

from mlxrl import store
from mlxrl.checked import SettingError, hints_of, sentence_of, wanted
from mlxrl.errors import UserError, brief, did_you_mean
from mlxrl.files import expanded
from mlxrl.names import foreign
from mlxrl.plugins import located
from mlxrl.tables import Config
from mlxrl.toml import ConfigError, assignment, parsed

T = TypeVar("T")


RENAMED = {
    **{
        f"rollout.{name}": f"sampling.{name}"
        for name in (
            "max_tokens", "temperature", "top_p", "top_k", "min_p", "stop_strings", "min_tokens", "thinking_budget",
            "repetition_penalty", "presence_penalty", "frequency_penalty", "penalty_context",
        )
    },
    "rollout.max_draws": "rollout.resampling_rounds, one less",
    "data.thinking": "sampling.thinking",
    "evaluation.rows": "evaluation.examples",
    "train.max_tokens_per_row": "train.max_tokens_per_sequence",
    "echo": "algorithm.echo",
}  # fmt: skip
"""Keys by the names they once had. Those of [algorithm] are in `mlxrl.algo.build`."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where values come from: the file's name, and the dotted keys that the command line gave instead."""

    file: str
    overridden: frozenset[str] = frozenset()

    def locate(self, error: UserError) -> ConfigError:
        """The error with the file in front, or with "command line" where that gave the value."""
        *path, message = error.parts
        return ConfigError("command line" if self._given(path, message) else self.file, *error.parts)

    def _given(self, path: Sequence[str], message: str) -> bool:
        places = {".".join(path)}
        if path[:1] == ["algorithm"]:
            places.add(".".join(["algorithm", *path[2:]]))  # the recipe's name stands between
        if path == ["environment", "arguments"]:
            places.add("environment.factory")  # which they are wrong for
        for key in self.overridden:
            table, _, name = key.rpartition(".")
            if any(f"{place}.".startswith(f"{key}.") for place in places):
                return True
            if any(key.startswith(f"{place}.") for place in places - {"algorithm", *tables()}):
                return True  # a table in place of a value
            if (table in places and f"'{name}'" in message) or (not path and f"[{key.partition('.')[0]}]" in message):
                return True
        return False


def read(
    path: str | Path, overrides: Sequence[str] = (), defaults: Mapping[str, Any] = MappingProxyType({})
) -> tuple[Config, Origin]:
    """Read a config; every value is checked against its declaration, and every path is made absolute.

    Args:
        overrides: TOML assignments such as `optimizer.learning_rate=2e-5`; a text may go without its quotes where
            it is not TOML by itself, as in `run.folder=runs/second`.
        defaults: of a command, where the config does not say.
    Raises:
        ConfigError: one line.
    """
    path = expanded(path)
    values, overridden = _merged(defaults, parsed(path)), set[str]()
    for override in overrides:
        values = _merged(values, given := assignment(override))
        overridden |= set(_leaves(given))
    origin = Origin(str(path), frozenset(overridden))
    try:
        _refuse_strange(values)
        return _located(Config(**values), path.absolute().parent), origin
    except UserError as error:
        raise origin.locate(error) from None


def _merged(values: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(values)
    for name, value in over.items():
        old = out.get(name)
        out[name] = _merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return out


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def tables() -> dict[str, Any]:
    """The tables of a config by name, each the class that declares its keys."""
    return {name: hint for name, hint in hints_of(Config).items() if hasattr(hint, "table")}


@dataclass(frozen=True, slots=True)
class Key:
    """A key of a config: its dotted name, what it may be, its default as TOML ("" for none), and what it means."""

    name: str
    wanted: str
    default: str
    sentence: str


def keys() -> Iterator[Key]:
    """Every key of a config, as its declaration has it; those of [algorithm] are the arguments of the recipes."""
    for cls, prefix in ((Config, ""), *((cls, f"{name}.") for name, cls in tables().items())):
        for field in dataclasses.fields(cls):
            hint = hints_of(cls)[field.name]
            if field.name == "algorithm":
                yield Key("algorithm.name", "a text", '"grpo"', sentence_of(hint))
            elif not hasattr(hint, "table"):
                yield Key(f"{prefix}{field.name}", wanted(hint), _default(field), sentence_of(hint))


def _default(field: dataclasses.Field[Any]) -> str:
    made: Any = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return "" if made in (None, dataclasses.MISSING) else json.dumps(made)


def _refuse_strange(values: Mapping[str, Any]) -> None:
    """SettingError for keys that were renamed, are in the wrong table, or are none at all."""
    for key in (*values, *_leaves(values)):
        if key in RENAMED:
            raise SettingError(*key.split("."), f"is now {RENAMED[key]}")
    known = tables()
    for name, value in values.items():
        if name not in hints_of(Config):
            for leaf in _leaves(value) if isinstance(value, Mapping) and not foreign(name) else ():
                *inside, key = leaf.split(".")
                if there := foreign(key):
                    raise SettingError(name, *inside, f"unknown key {key!r}{there}")
            kind = f"table [{name}]" if isinstance(value, Mapping) else f"key {name!r}"
            raise SettingError(f"unknown {kind}{_near(name, known)}")
        for key in value if name in known and isinstance(value, Mapping) else ():
            if key not in hints_of(known[name]):
                raise SettingError(name, f"unknown key {key!r}{_near(key, known, name)}")


def _near(key: str, known: Mapping[str, Any], table: str = "") -> str:
    """The key that may be meant: another library's, of the table it stands in, or by the same name in another one."""
    own = hints_of(known[table]) if table else hints_of(Config)
    if there := foreign(key):
        return there
    homes = [name for name, cls in known.items() if key in hints_of(cls)]
    if homes:
        return f"; did you mean '{homes[0]}.{key}'?"
    return did_you_mean(key, own) or f"; there are {', '.join(own)}"


def _located(config: Config, folder: Path) -> Config:
    """Every path made absolute, so that the config means the same wherever its resolved text lies."""
    data, teacher, environment, model = config.data, config.teacher, config.environment, config.model
    sources = {key: source for key in ("train", "evaluation", "validation") if (source := getattr(data, key))}
    data = replace(data, **{key: _source(source, folder, key) for key, source in sources.items()})
    model = replace(model, id=_model(model.id, folder))
    if model.adapter is not None:
        model = replace(model, adapter=_adapter(model.adapter, folder, "model"))
    if teacher.id not in (None, "base"):
        teacher = replace(teacher, id=_model(teacher.id, folder, "teacher"))
    if teacher.adapter is not None:
        teacher = replace(teacher, adapter=_adapter(teacher.adapter, folder, "teacher"))
    if environment.factory is not None:
        factory = _within(("environment", "factory"), located, environment.factory, folder)
        environment = replace(environment, factory=factory)
    functions = tuple(_within(("reward", "functions"), located, name, folder) for name in config.reward.functions)
    sinks = tuple(_within(("run", "sinks"), located, name, folder) for name in config.run.sinks)
    home = None if config.run.folder is None else str(expanded(config.run.folder).absolute())
    return replace(
        config, data=data, teacher=teacher, environment=environment, algorithm=_algorithm(config.algorithm, folder),
        reward=replace(config.reward, functions=functions), run=replace(config.run, sinks=sinks, folder=home),
        model=model,
    )  # fmt: skip


def _within(where: tuple[str, ...], function: Callable[..., T], *arguments: Any) -> T:
    try:
        return function(*arguments)
    except UserError as error:
        raise SettingError(*where, *error.parts) from None


def _algorithm(table: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """The table with the path of a file that makes the algorithm made absolute."""
    name = table.get("name", "grpo")
    if not isinstance(name, str):
        raise SettingError("algorithm", "name", f"wanted a text in quotes, got {brief(name)}")
    return {**table, "name": _within(("algorithm", "name"), located, name, folder) if ":" in name else name}


def _source(name: str, folder: Path, key: str) -> str:
    return name if name.startswith("hf:") else _existing(name, folder, "data", key, "file")


def _model(id: str, folder: Path, table: str = "model") -> str:
    """A path that exists as an absolute one, a Hugging Face id as it is."""
    looks_like_path = id.startswith((".", "/", "~")) or id.endswith((".gguf", "/")) or id.count("/") > 1 or "\0" in id
    if _found(id, folder) is None and not looks_like_path:
        return id
    return _existing(id, folder, table, "id", "folder or file")


def _adapter(name: str, folder: Path, table: str) -> str:
    """A path as an absolute one, an adapter of the store by its whole digest."""
    if store.is_digest(name):
        return _within((table, "adapter"), store.full_name, name)
    return _existing(name, folder, table, "adapter", "folder")


def _existing(name: str, folder: Path, table: str, key: str, kind: str) -> str:
    if (path := _found(name, folder)) is None:
        raise SettingError(table, key, f"no {kind} {name!r} beside the config or in the current directory")
    return str(path)


def _found(name: str, folder: Path) -> Path | None:
    path = expanded(name)
    try:
        return next(((base / path).resolve() for base in (folder, Path.cwd()) if (base / path).exists()), None)
    except (OSError, ValueError):  # too long, a NUL, a loop of links
        return None


def resolved(config: Config, algorithm: Mapping[str, Any]) -> dict[str, Any]:
    """Every setting as a run takes it, defaults filled in; what is left out is off. `read` makes the same of it again.

    Args:
        algorithm: the resolved table of the algorithm.
    """
    plain = {**_plain(config), "algorithm": _plain(algorithm)}
    if config.data.evaluation is None and config.data.validation is None:
        del plain["evaluation"]
    elif not config.evaluation.samples:
        del plain["evaluation"]["samples_temperature"]
    if config.environment.factory is None:
        del plain["environment"]
    if not config.reward.overlong_buffer:
        del plain["reward"]["overlong_factor"]
    if not config.sampling.penalized:
        del plain["sampling"]["penalty_context"]
    return {name: value for name, value in plain.items() if value != {}}


def text(config: Config, algorithm: Mapping[str, Any]) -> str:
    """`resolved` as TOML, with short lists on one line."""
    toml = tomli_w.dumps(resolved(config, algorithm))
    return re.sub(r"(?m)^(\S+ = )\[\n((?:    .*,\n)+)\]$", _joined, toml)


def _plain(value: Any) -> Any:
    """A value as TOML holds it; None is left out, and so is a list that holds one."""
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items() if not _holds_none(item) and item != {}}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


def _holds_none(value: Any) -> bool:
    return value is None or (isinstance(value, tuple | list) and any(map(_holds_none, value)))


def _joined(found: re.Match[str]) -> str:
    items = ", ".join(line.strip().removesuffix(",") for line in found[2].splitlines())
    line = f"{found[1]}[{items}]"
    return line if len(line) <= 100 else found[0]
