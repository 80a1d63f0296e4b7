"""The arguments of the commands. A command is a module of its name beside this one, with a function `command`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from mlxrl.names import foreign

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


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command and its arguments; those of a command that reads a config have `overrides`."""
    parser = Parser("mlxrl", description="Reinforcement-learning post-training on MLX.", allow_abbrev=False)
    parser.add_argument("--version", action="store_true", help="print versions and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for add in (_train, _sft, _eval, _plan, _runs, _show, _cancel, _verify, _lineage, _fuse, _export):
        add(commands)
    arguments, rest = parser.parse_known_args(argv)
    if arguments.version:
        from mlxrl.runs.facts import versions

        print(", ".join(f"{name} {version}" for name, version in versions().items()))
        parser.exit()
    if hasattr(arguments, "overrides"):
        _locate_config(commands.choices[arguments.command], arguments)
    if unknown := next((word for word in rest if word.startswith("-")), None):
        parser.error(f"unknown option {unknown}{_meant(unknown)}")
    if arguments.command is None:
        parser.error(f"wanted a command, one of {', '.join(commands.choices)}")
    if rest and not hasattr(arguments, "overrides"):
        parser.error(f"{arguments.command} takes no {rest[0]!r}")
    if rest:
        arguments.overrides += rest  # those that argparse leaves over when options stand between them
    return arguments


def _locate_config(parser: Parser, arguments: argparse.Namespace) -> None:
    """The config of a run that goes on, or is evaluated, is that in its folder."""
    for name in ("resume", "run"):
        folder = getattr(arguments, name, None)
        if folder and arguments.config:
            parser.error(f"--{name} takes the config of its run; leave --config out")
        if folder:
            arguments.config = str(Path(folder) / "config.toml")
    if not arguments.config:
        others = "".join(f" or --{name} RUN" for name in ("resume", "run") if hasattr(arguments, name))
        parser.error(f"wanted --config FILE{others}")


def _train(commands: Any) -> None:
    _trains(_with_config(commands, "train", "train adapters as a config says"))


def _sft(commands: Any) -> None:
    sft = _with_config(commands, "sft", "train adapters on the answers that a config's data hold")
    sft.set_defaults(defaults={"algorithm": {"name": "sft"}})
    _trains(sft)


def _trains(command: Parser) -> None:
    command.add_argument("--resume", metavar="RUN", help="go on with the run in this folder, with its config")
    command.add_argument("--dry-run", action="store_true", help="check the config and print what would be done")
    _memory(command)


def _eval(commands: Any) -> None:
    evaluate = _with_config(commands, "eval", "evaluate on a config's held-out examples")
    evaluate.add_argument("--run", metavar="RUN", help="a run's folder: its config, and the adapter that it made")
    which = evaluate.add_mutually_exclusive_group()
    which.add_argument(
        "--adapter", metavar="DIR", help="a saved adapter, or sha256:DIGEST; else that of the run, or model.adapter"
    )
    which.add_argument("--base", action="store_true", help="the model without an adapter")


def _plan(commands: Any) -> None:
    plan = _with_config(commands, "plan", "measure what memory a config's run needs, and whether it fits; 1 if not")
    plan.add_argument(
        "--fit", action="store_true", help="choose the size of a pass, recomputation and rows so that it fits"
    )
    plan.add_argument("--json", action="store_true", help="print JSON")
    _memory(plan)


def _runs(commands: Any) -> None:
    runs = _plain(commands, "runs", "list the runs in a folder")
    runs.add_argument("folder", nargs="?", default="runs", help="the folder; left out, runs")
    runs.add_argument("--json", action="store_true", help="print JSON")


def _show(commands: Any) -> None:
    _plain(commands, "show", "tell one run").add_argument("run", metavar="RUN", help="the folder of a run")


def _cancel(commands: Any) -> None:
    cancel = _plain(commands, "cancel", "ask a run to end after its present step")
    cancel.add_argument("run", metavar="RUN", help="the folder of a run")


def _verify(commands: Any) -> None:
    _on_name(commands, "verify", "compare a handoff.json with the files that it is about; 1 where one differs")


def _lineage(commands: Any) -> None:
    _on_name(commands, "lineage", "tell the adapters that an adapter came from")


def _on_name(commands: Any, name: str, about: str) -> None:
    """A command about an adapter that has a handoff.json."""
    command = _plain(commands, name, about)
    command.add_argument("name", metavar="FOLDER|DIGEST", help="a run's or an adapter's folder, or sha256:DIGEST")
    command.add_argument("--json", action="store_true", help="print JSON")


def _fuse(commands: Any) -> None:
    fuse = _plain(commands, "fuse", "write a model with an adapter in its weights, as a folder that mlx-lm loads")
    fuse.add_argument("--run", metavar="DIR", help="the folder of a run, in place of --model and --adapter")
    fuse.add_argument("--model", metavar="ID", help="Hugging Face id, mlx-lm folder, or llama .gguf file")
    fuse.add_argument("--adapter", metavar="DIR", help="a saved adapter, of a run, mlx-lm or PEFT")
    fuse.add_argument("--output", metavar="DIR", required=True, help="a new folder")
    fuse.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="type of the weights; else that of the files"
    )
    fuse.add_argument("--quantised", action="store_true", help="pack the changed layers as their base is")
    fuse.add_argument("--force", action="store_true", help="also where packing loses most of the adapter's effect")
    fuse.add_argument("--gguf", metavar="FILE", help="write a GGUF file too: llama with a byte-level tokenizer")


def _export(commands: Any) -> None:
    export = _plain(commands, "export", "write an adapter in the format of another library")
    export.add_argument("--adapter", metavar="DIR", required=True, help="a saved adapter, of a run, mlx-lm or PEFT")
    export.add_argument("--format", choices=("peft",), required=True, help="peft: for transformers, vLLM and others")
    export.add_argument("--output", metavar="DIR", required=True, help="a new folder")
    export.add_argument("--model", metavar="ID", help="the base model as that library names it; else the adapter's")


def _plain(commands: Any, name: str, about: str) -> Parser:
    """A command that reads no config."""
    command: Parser = commands.add_parser(name, help=about, description=about, allow_abbrev=False)
    return command


def _memory(command: Parser) -> None:
    command.add_argument("--memory", metavar="GB", type=_gigabytes, help="memory there is; else the machine's")


def _with_config(commands: Any, name: str, about: str) -> Parser:
    """A command that reads a config."""
    command: Parser = commands.add_parser(
        name,
        help=about,
        description=about,
        epilog=EPILOG.format(name=name),
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.keyed = True
    command.add_argument("--config", metavar="FILE", help="a config in TOML")
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
