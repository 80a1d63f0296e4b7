"""The parts of one-line messages, whatever goes into them."""

import os
import subprocess
import sys

from helpers import EXAMPLE, ROOT
from mlxrl.errors import WIDEST, UserError, place_of


def test_a_message_is_a_line_of_bounded_parts():
    """A part may be a whole file by mistake, or have line ends in it."""
    error = UserError("run.toml", "", "x" * 100_000, "wanted\na text")
    assert error.parts == ("run.toml", "x" * (WIDEST - 3) + "...", "wanted a text")
    assert str(error.within("here")) == ": ".join(("here", *error.parts))


def test_the_place_of_an_exception_is_known_in_a_folder_that_has_gone(tmp_path, monkeypatch):
    def raised():
        try:
            raise ValueError
        except ValueError as error:
            return place_of(error)

    line = raised.__code__.co_firstlineno + 2
    monkeypatch.chdir(os.path.dirname(__file__))
    assert raised() == f" (test_errors.py, line {line})"
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert raised() == f" ({__file__}, line {line})"


def test_a_limit_of_open_files_that_cannot_be_raised_is_a_line(tmp_path):
    """mlx-lm raises it when it is imported, which not even root may do everywhere."""
    settings = f"[model]\nid = '{EXAMPLE}'\n[data]\ntrain = '{EXAMPLE}/train.jsonl'\nprompt = 'question'\n"
    (tmp_path / "run.toml").write_text(f"{settings}[reward]\nfunctions = ['mlxrl.rewards:last_number_matches']\n")
    code = (
        "import resource, sys\n"
        "def refused(*_): raise ValueError('not allowed to raise maximum limit')\n"
        "resource.getrlimit, resource.setrlimit = lambda _: (64, 64), refused\n"
        "from mlxrl.cli import main\n"
        "sys.exit(main(['train', '--config', 'run.toml']))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    wanted = "mlxrl: ulimit -n: wanted at least 4096 open files, as mlx-lm asks for, got 64; raise the limit\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", wanted)
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]
