"""The command line: from a config to the functions of the library."""

from mlxrl.cli.main import main

__all__ = ["main"]
