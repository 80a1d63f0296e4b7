"""A file or an assignment of the command line as values of TOML; whatever is wrong with it is one line."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlxrl.errors import UserError, one_line


class ConfigError(UserError):
    """A fault in a config: one line with the file or "command line", the table, the key and what was wanted."""


_BARE = re.compile(r"[^\s\"'\[\]{}#][^\"'\[\]{}#\n]*")
"""An override's value that may be meant as a text without its quotes."""

DEEPEST = 20
"""Tables and lists within one another."""
_PART = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')"""
_CHAIN = re.compile(rf"(?<![\w-]){_PART}(?:[ \t]*+\.[ \t]*+{_PART}){{5000}}")
"""A dotted key of so many parts that Python's parser takes more memory for it than there is."""


def parsed(path: Path) -> dict[str, Any]:
    """The values of a file; ConfigError where it cannot be read or is no TOML."""
    try:
        return _sound(str(path), _toml(path.read_text(encoding="utf-8-sig")))
    except FileNotFoundError:
        raise ConfigError(str(path), "no such file; wanted a config in TOML") from None
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(str(path), "wanted TOML in UTF-8") from None
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(path), f"not TOML: {error}") from None
    except RecursionError:
        raise ConfigError(str(path), "not TOML: nested too deeply") from None


def assignment(override: str) -> dict[str, Any]:
    """`a.b=value` as nested tables."""
    key, equals, value = (part.strip() for part in override.partition("="))
    if not equals or not re.fullmatch(r"[\w-]+(\.[\w-]+)*", key):
        got = one_line(repr(override), 100)
        raise ConfigError("command line", f"wanted key=value such as optimizer.learning_rate=2e-5, got {got}")
    try:
        parsed: Any = _toml(f"value = {value}\n")["value"] if "\n" not in value else value
    except (ValueError, RecursionError) as error:
        if not _BARE.fullmatch(value):
            why = f"{one_line(repr(value), 100)} is not TOML ({error}); texts stand in quotes, '{key}=\"...\"'"
            raise ConfigError("command line", key, why) from None
        parsed = value
    _sound("command line", parsed, *key.split("."))
    for part in reversed(key.split(".")):
        parsed = {part: parsed}
    return parsed


def _toml(text: str) -> dict[str, Any]:
    """A text's values. Numbers of any length are read, so that `_sound` can say where they stand."""
    if _CHAIN.search(text):
        raise ValueError("nested too deeply")
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        return tomllib.loads(text)
    finally:
        sys.set_int_max_str_digits(before)


def _sound(place: str, value: Any, *path: str) -> Any:
    """A value; ConfigError where it is nested too deeply, or has a whole number that TOML has not."""
    if len(path) > DEEPEST:
        raise ConfigError(place, ".".join(path[:3]), "nested too deeply")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ConfigError(place, *path, f"wanted a whole number of 64 bits, got one of {value.bit_length() + 1} bits")
    if isinstance(value, Mapping | list):
        for name, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            _sound(place, item, *path, *([str(name)] if isinstance(value, Mapping) else [f"entry {name + 1}"]))
    return value
