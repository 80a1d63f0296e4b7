"""The commands and their exit codes: 0 done, 1 an unexpected error or a plan that does not fit, 2 something that the
user can put right, 130 asked to stop.

What loads MLX or a model is imported where it is used, so that help and faults answer at once.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from mlxrl.cli.arguments import parsed
from mlxrl.cli.streams import tolerant
from mlxrl.errors import UserError, one_line, require_open_files
from mlxrl.text import safe

NO_BACKEND = (
    'MLX has no backend here; pip install "mlxrl[cpu]", or "mlxrl[cuda12]" or "mlxrl[cuda13]" with an NVIDIA GPU'
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; `argv` is without the program's name."""
    with tolerant():
        arguments = parsed(argv)
        warnings.formatwarning = WarningLines()
        try:
            return _run(arguments)
        except (UserError, OSError) as error:
            print(f"mlxrl: {safe(one_line(error))}", file=sys.stderr)
            return getattr(error, "exit_code", 2)
        except KeyboardInterrupt:
            print("mlxrl: stopped", file=sys.stderr)
            return 130


class WarningLines:
    """Warnings as lines, each once a command: libraries that are loaded reset what Python keeps of those it showed."""

    def __init__(self) -> None:
        self._shown: set[str] = set()

    def __call__(self, message: Warning | str, *_: object) -> str:
        line = f"mlxrl: {safe(' '.join(str(message).split()))}\n"
        if line in self._shown:
            return ""
        self._shown.add(line)
        return line


def _run(arguments: argparse.Namespace) -> int:
    """Run a command. One that reads a config gets the experiment that it makes."""
    if not hasattr(arguments, "overrides"):
        return import_module(f"mlxrl.cli.{arguments.command}").command(arguments)
    from mlxrl.config import read

    settings, origin = read(arguments.config, arguments.overrides, getattr(arguments, "defaults", {}))
    arguments.directory = Path.cwd()  # before user code changes it
    arguments.free = arguments.directory / "runs" / Path(arguments.config).stem
    require_backend()
    from mlxrl.runs.experiment import Experiment

    experiment = Experiment.of(settings, origin)
    return import_module(f"mlxrl.cli.{arguments.command}").command(experiment, arguments)


def require_backend() -> None:
    """UserError where MLX does not load, or could not open its files."""
    try:
        import mlx.core  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        raise UserError(f"{NO_BACKEND} ({error})") from error
    require_open_files()
