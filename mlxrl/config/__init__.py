"""A run's settings: strict TOML in, frozen dataclasses out, and back to TOML."""

from typing import TYPE_CHECKING, Any

from mlxrl.config.read import read
from mlxrl.config.strict import ConfigError
from mlxrl.config.tables import Config
from mlxrl.config.text import resolved, text

if TYPE_CHECKING:
    from mlxrl.config.check import algorithm, environment, rewards

__all__ = ["Config", "ConfigError", "algorithm", "environment", "read", "resolved", "rewards", "text"]


def __getattr__(name: str) -> Any:
    """What the recipes are needed for, imported when it is first asked for."""
    if name in ("algorithm", "environment", "rewards"):
        from mlxrl.config import check

        return getattr(check, name)
    raise AttributeError(f"module 'mlxrl.config' has no attribute {name!r}")
