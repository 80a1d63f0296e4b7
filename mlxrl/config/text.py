"""A config as plain values and as TOML."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import tomli_w

from mlxrl.config.tables import Config


def resolved(config: Config) -> dict[str, Any]:
    """Every setting as a run takes it: defaults filled in, the algorithm's included; what is left out is off.

    `read` makes the same run of it again.
    """
    from mlxrl.algo.table import arguments_of
    from mlxrl.config.check import algorithm

    plain = _plain(config)
    # TOML has no None. What is None comes from the recipe or from a convention, so the two names bring it back.
    given = {"name": config.algorithm.name, **config.algorithm.arguments}
    named = {"name": given["name"], "convention": given.get("convention")}
    plain["algorithm"] = given if ":" in given["name"] else _plain({**named, **arguments_of(algorithm(config))})
    if config.data.evaluation is None:
        del plain["evaluation"]
    if config.environment.factory is None:
        del plain["environment"]
    for table in ("teacher", "memory"):
        if not plain[table]:
            del plain[table]
    if not config.reward.overlong_buffer:
        del plain["reward"]["overlong_factor"]
    return plain


def text(config: Config) -> str:
    """`resolved` as TOML."""
    return _short_lists(tomli_w.dumps(resolved(config)))


def _holds_none(value: Any) -> bool:
    return value is None or (isinstance(value, tuple | list) and any(map(_holds_none, value)))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items() if not _holds_none(item) and item != {}}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


def _short_lists(toml: str) -> str:
    """Put a list on one line where it fits; the writer gives every item a line of its own, and breaks no text."""
    return re.sub(r"(?m)^(\S+ = )\[\n((?:    .*,\n)+)\]$", _joined, toml)


def _joined(found: re.Match[str]) -> str:
    items = ", ".join(line.strip().removesuffix(",") for line in found[2].splitlines())
    line = f"{found[1]}[{items}]"
    return line if len(line) <= 100 else found[0]
