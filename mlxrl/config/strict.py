"""Values of a TOML file checked against the types and bounds of a dataclass; a fault is one line that says where."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from mlxrl.checked import SettingError
from mlxrl.errors import did_you_mean

Table = TypeVar("Table")

OF_SAMPLING = (
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "stop_strings", "min_tokens", "thinking_budget",
    "repetition_penalty", "presence_penalty", "frequency_penalty", "penalty_context",
)  # fmt: skip
RENAMED = {**{f"rollout.{name}": f"sampling.{name}" for name in OF_SAMPLING}, "data.thinking": "sampling.thinking"}
"""Keys by the names that they once had."""


class ConfigError(ValueError):
    """A fault in a config: one line with the file, the table, what was wanted, what was got, and what to do."""


class Mismatch(Exception):
    """A value that is not what was wanted; the second argument says why that matters."""


@dataclass(frozen=True, slots=True)
class Within:
    """Bounds of a number, or of a text's length; with `above` the lower one is not reached. why: what lies beyond."""

    low: float = -sys.float_info.max
    high: float = sys.float_info.max
    above: bool = False
    why: str = ""

    def check(self, value: Any) -> None:
        """Raise Mismatch unless the value lies within."""
        size = len(value.strip()) if isinstance(value, str) else value
        if not (size > self.low if self.above else size >= self.low) or size > self.high:
            raise Mismatch("a text that is not empty" if isinstance(value, str) else self._wanted(), self.why)

    def _wanted(self) -> str:
        if self.low == -sys.float_info.max:
            return "a finite number"
        lower = f"{'more than' if self.above else 'at least'} {self.low:g}"
        if self.high == math.nextafter(1, 0):
            return f"{lower} and less than 1"
        return lower if self.high >= sys.float_info.max else f"{lower} and at most {self.high:.10g}"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where values come from: the file's name, and the dotted keys that were given on the command line instead."""

    file: str
    overridden: frozenset[str] = frozenset()

    def error(self, key: str, message: str, culprit: str = "") -> ConfigError:
        """A fault at a dotted key, which is spelled out before the message; culprit: the key to blame, if another."""
        blamed = culprit or key
        given = any(f"{blamed}.".startswith(f"{name}.") for name in self.overridden)
        return ConfigError(": ".join(("command line" if given else self.file, *filter(None, key.split(".")), message)))

    def given(self, key: str) -> str:
        """A key of the command line at `key` or below it, else `key`."""
        return next((name for name in self.overridden if name.startswith(f"{key}.")), key)


def fill(cls: type[Table], values: Mapping[str, Any], origin: Origin, prefix: str = "") -> Table:
    """Make a dataclass of a TOML table. Every key must be one of its fields, and every value of its field's type."""
    hints = get_type_hints(cls, include_extras=True)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # pyright: ignore[reportArgumentType]
    for name in values:
        if (new := RENAMED.get(_join(prefix, name))) is not None:
            raise origin.error(_join(prefix, name), f"renamed to {new}")
        if name not in fields:
            raise origin.error(prefix, _unknown(name, values[name], hints), origin.given(_join(prefix, name)))
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in values:
            raise origin.error(prefix, f"missing {_called(name, dataclasses.is_dataclass(hints[name]))}")
    if not hasattr(cls, "table"):
        return cls(**{name: _field(hints[name], value, origin, _join(prefix, name)) for name, value in values.items()})
    try:  # a class of `settings` checks its values itself
        return cls(**values)
    except SettingError as error:
        raise origin.error(".".join(error.parts[:-1]), error.parts[-1]) from None


def _unknown(name: str, value: Any, hints: Mapping[str, Any]) -> str:
    tables = {table: hint for table, hint in hints.items() if dataclasses.is_dataclass(hint)}
    homes = [table for table, hint in tables.items() if name in {field.name for field in dataclasses.fields(hint)}]
    hint = f"; did you mean '{homes[0]}.{name}'?" if homes else did_you_mean(name, hints)
    return f"unknown {_called(name, isinstance(value, Mapping))}" + (hint or f"; there are {', '.join(hints)}")


def _called(name: str, table: bool) -> str:
    return f"table [{name}]" if table else f"key {name!r}"


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _field(hint: Any, value: Any, origin: Origin, key: str) -> Any:
    if not dataclasses.is_dataclass(hint):
        return convert(hint, value, origin, key)
    if not isinstance(value, Mapping):
        raise origin.error(key, f"wanted a table, got {shown(value)}")
    return fill(hint, value, origin, key)  # pyright: ignore[reportArgumentType]


def convert(hint: Any, value: Any, origin: Origin, key: str) -> Any:
    """A TOML value as the type that a hint names; ConfigError where it is none."""
    try:
        return _converted(hint, value)
    except Mismatch as mismatch:
        wanted, why = mismatch.args
        raise origin.error(key, f"wanted {wanted}, got {shown(value)}{f'; {why}' if why else ''}") from None


def shown(value: Any) -> str:
    """A value as it stands in a TOML file, shortened to a line."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def _converted(hint: Any, value: Any) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        converted = _converted(arguments[0], value)
        arguments[1].check(converted)
        return converted
    if origin is Literal:
        return _one_of(arguments, value)
    if origin in (Union, types.UnionType):
        return _union([argument for argument in arguments if argument is not types.NoneType], value)
    if origin is tuple:
        return _tuple(arguments, value)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(arguments, value)
    return _scalar(hint, value)


def _one_of(choices: Sequence[Any], value: Any) -> Any:
    if value not in choices or isinstance(value, bool):
        near = did_you_mean(value, choices) if isinstance(value, str) else ""
        raise Mismatch(f"one of {', '.join(map(shown, choices))}", near.removeprefix("; "))
    return value


def _union(hints: Sequence[Any], value: Any) -> Any:
    faults: list[Mismatch] = []
    for hint in hints:
        try:
            return _converted(hint, value)
        except Mismatch as mismatch:
            faults.append(mismatch)
    raise faults[0] if len(faults) == 1 else Mismatch(" or ".join(str(fault.args[0]) for fault in faults), "")


def _tuple(hints: Sequence[Any], value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise Mismatch("a list", "")
    if hints[-1] is Ellipsis:
        return tuple(_converted(hints[0], item) for item in value)
    if len(value) != len(hints):
        raise Mismatch(f"a list of {len(hints)}", "")
    return tuple(_converted(hint, item) for hint, item in zip(hints, value, strict=True))


def _mapping(hints: Sequence[Any], value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise Mismatch("a table", "")
    return {str(name): _converted(hints[1], item) for name, item in value.items()}


_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a text in quotes"}


def _scalar(hint: Any, value: Any) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint in _NAMES and (not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool)):
        raise Mismatch(_NAMES[hint], "")
    return value
