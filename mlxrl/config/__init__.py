"""A run's settings: strict TOML in, frozen dataclasses out, and back to TOML."""

from mlxrl.config.check import algorithm, environment, reward_functions
from mlxrl.config.read import read
from mlxrl.config.strict import ConfigError
from mlxrl.config.tables import Config
from mlxrl.config.text import resolved, text

__all__ = ["Config", "ConfigError", "algorithm", "environment", "read", "resolved", "reward_functions", "text"]
