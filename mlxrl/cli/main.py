"""The commands and their exit codes: 0 done, 1 an unexpected error or a plan that does not fit, 2 something that the
user can put right, 130 asked to stop.

What loads MLX or a model is imported where it is used, so that help and faults answer at once.
"""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from mlxrl.cli.streams import tolerant
from mlxrl.errors import UserError, one_line, require_open_files
from mlxrl.files import expanded
from mlxrl.names import foreign
from mlxrl.text import safe

NO_BACKEND = (
    'MLX has no backend here; pip install "mlxrl[cpu]", or "mlxrl[cuda12]" or "mlxrl[cuda13]" with an NVIDIA GPU'
)
EPILOG = """key=value sets a key of the config, as TOML:
  mlxrl {name} --config run.toml optimizer.learning_rate=2e-5 run.folder="runs/second"
"""
KEYS = "keys, with their defaults; those of [algorithm] are the arguments of its recipe:"


class Parser(argparse.ArgumentParser):
    """A parser whose faults are one line, and whose help ends with the keys of a config where it takes some."""

    keyed = False

    def format_help(self) -> str:
        """The help, with a line for each key of a config."""
        if not self.keyed:
            return super().format_help()
        from mlxrl.config import keys

        lines = [(f"{key.name} = {key.default}" if key.default else key.name, key.sentence) for key in keys()]
        named = "\n".join(f"  {name:<33} {sentence}" for name, sentence in lines)
        return f"{super().format_help()}\n{KEYS}\n{named}\n"

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and exit with 2."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; `argv` is without the program's name."""
    with tolerant():
        arguments = _arguments(argv)
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
    from mlxrl.config import read

    settings, origin = read(arguments.config, arguments.overrides)
    free = Path("runs", Path(arguments.config).stem).absolute()  # before user code changes the directory
    adapter = getattr(arguments, "adapter", None) and str(expanded(arguments.adapter).absolute())
    try:
        import mlx.core  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        raise UserError(f"{NO_BACKEND} ({error})") from error
    require_open_files()
    from mlxrl.runs.experiment import Experiment

    experiment = Experiment.of(settings, origin)
    if arguments.command == "eval":
        from mlxrl.cli import eval

        return eval.command(experiment, adapter)
    if arguments.command == "plan":
        from mlxrl.cli import plan

        return plan.command(experiment, free, memory=arguments.memory, fit=arguments.fit, as_json=arguments.json)
    from mlxrl.cli import train

    line = [arguments.config, *arguments.overrides]
    return train.command(experiment, free, line, dry_run=arguments.dry_run, memory=arguments.memory)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("mlxrl", description="Reinforcement-learning post-training on MLX.", allow_abbrev=False)
    parser.add_argument("--version", action="store_true", help="print versions and exit")
    commands = parser.add_subparsers(dest="command", metavar="train | eval | plan", parser_class=Parser)
    train = _command(commands, "train", "train adapters as a config says")
    train.add_argument("--dry-run", action="store_true", help="check the config and print what would be done")
    evaluate = _command(commands, "eval", "evaluate on a config's held-out examples")
    evaluate.add_argument("--adapter", metavar="DIR", help="a saved adapter; else model.adapter, or none")
    plan = _command(commands, "plan", "measure what memory a config's run needs, and whether it fits; 1 if not")
    plan.add_argument(
        "--fit", action="store_true", help="choose the size of a pass, recomputation and rows so that it fits"
    )
    plan.add_argument("--json", action="store_true", help="print JSON")
    for command in (train, plan):
        command.add_argument("--memory", metavar="GB", type=_gigabytes, help="memory there is; else the machine's")
    arguments, rest = parser.parse_known_args(argv)
    if arguments.version:
        from mlxrl.runs.facts import versions

        print(", ".join(f"{name} {version}" for name, version in versions().items()))
        parser.exit()
    if unknown := next((word for word in rest if word.startswith("-")), None):
        parser.error(f"unknown option {unknown}{_meant(unknown)}")
    if arguments.command is None:
        parser.error("wanted a command, train, eval or plan")
    arguments.overrides += rest  # those that argparse leaves over when options stand between them
    return arguments


def _command(commands: Any, name: str, about: str) -> Parser:
    command: Parser = commands.add_parser(
        name,
        help=about,
        description=about,
        epilog=EPILOG.format(name=name),
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.keyed = True
    command.add_argument("--config", required=True, metavar="FILE", help="a config in TOML")
    command.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace the config's")
    return command


def _meant(option: str) -> str:
    """The key that an unknown option may stand for."""
    from mlxrl.config import keys

    name = option.partition("=")[0].lstrip("-").replace("-", "_")
    same = next((key.name for key in keys() if name in (key.name, key.name.rpartition(".")[2])), None)
    return foreign(name) or (f"; here it is {same}=..." if same else "")


def _gigabytes(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1e6:
        raise argparse.ArgumentTypeError(f"wanted GB, a number above 0 and at most 1e6, got {word!r}")
    return value
