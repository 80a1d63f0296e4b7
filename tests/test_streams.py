"""Standard streams that are broken, full, closed or of few signs: no command ends for their sake."""

import os
import subprocess
import sys

import pytest

from helpers import EVALUATED, ROOT
from mlxrl.cli import main
from mlxrl.cli.streams import tolerant

CONFIG = f"""
steps = 1
{EVALUATED}system = "Réponds \u2192"
[reward]
functions = ["mlxrl.rewards:last_number_matches"]
[sampling]
max_tokens = 4
[rollout]
tasks_per_step = 1
group_size = 2
[evaluation]
examples = 2
[train]
tokens_per_pass = 512
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(CONFIG, encoding="utf-8")
    return tmp_path


def broken():
    """A pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, "w")


COMMANDS = (["train"], ["train", "--dry-run"], ["eval"], ["plan"], ["plan", "--json"])


def full():
    return open("/dev/full", "w")


@pytest.mark.parametrize(("command", "to"), [*((one, broken) for one in COMMANDS), (["eval"], full)])
def test_a_command_whose_output_cannot_be_written_does_its_work(folder, monkeypatch, command, to):
    name, *options = command
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(sys, stream, to())
    assert main([name, "--config", "run.toml", *options]) == 0
    monkeypatch.undo()
    assert (folder / "runs/run/adapters/adapters.safetensors").exists() == (command == ["train"])


@pytest.mark.parametrize(("command", "encoding"), [(["train", "--dry-run"], "ascii"), (["eval"], "latin-1")])
def test_what_a_terminal_has_no_signs_for_is_written_as_escapes(folder, monkeypatch, command, encoding):
    name, *options = command
    with open("out", "w", encoding=encoding) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert main([name, "--config", "run.toml", *options]) == 0
    if options:
        assert "R\\xe9ponds \\u2192" in (folder / "out").read_text("ascii")


def test_help_and_faults_on_streams_that_are_closed(folder):
    shell = 'for words in --version "train --help" train "eval --config none.toml"; do for to in "$FULL" "$CLOSED"; do '
    shell += '( eval "$PYTHON -m mlxrl $words $to"; echo $? >> codes ); done; done'
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "PYTHON": sys.executable, "FULL": ">/dev/full 2>/dev/full",
        "CLOSED": "<&- >&- 2>&-",
    }  # fmt: skip
    done = subprocess.run(["bash", "-c", shell], env=environment, capture_output=True, timeout=60)
    assert (done.stdout, done.stderr) == (b"", b"")
    assert (folder / "codes").read_text().split() == ["0"] * 4 + ["2"] * 4


def test_user_code_may_print_to_what_nobody_reads(monkeypatch):
    monkeypatch.setattr(sys, "stdout", own := broken())
    with tolerant():
        for _ in range(3):
            print("x" * 100_000)
        sys.stdout.close()
        print("still open")
    assert sys.stdout is own
