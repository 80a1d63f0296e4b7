"""What the command answers to a bad config or to bad data: one line, exit code 2, and a folder as it was before."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from helpers import EXAMPLE
from mlxrl.cli import main

BASE = f"""steps = 2
[model]
id = "{EXAMPLE}"
[data]
train = "good.jsonl"
prompt = "question"
[reward]
functions = ["mlxrl.rewards:last_number_matches"]
[rollout]
tasks_per_step = 1
"""
GOOD = '{"question": "1+1=?", "answer": "2"}\n'
LONGEST = 4000
"""Characters of a line at most."""


class Accepted(Exception):
    """The command went on to load a model."""


def refusing(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """A function that gives the line by which a command refuses a config, in a folder with good data.

    Its arguments are overrides; config: the file's bytes, None for what stands there; command: the words before it.
    """

    def accepted(*_: object, **__: object) -> None:
        raise Accepted

    monkeypatch.chdir(folder)
    for name in ("mlxrl.cli.plan.planned", "mlxrl.cli.train.trial", "mlxrl.policy.policy.load"):
        monkeypatch.setattr(name, accepted)
    (folder / "good.jsonl").write_text(GOOD)

    def refused(*overrides: str, config: bytes | None = BASE.encode(), command: Sequence[str] = ("train",)) -> str:
        if config is not None:
            (folder / "run.toml").write_bytes(config)
        before = sorted(folder.rglob("*"))
        code = main([*command, "--config", "run.toml", *overrides])
        out, err = capsys.readouterr()
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert err.startswith("mlxrl: ")
        assert err.strip().isprintable()
        assert len(err) < LONGEST
        assert sorted(folder.rglob("*")) == before
        return err.replace(f"{folder}/", "")

    return refused


def strange(path: Path, kind: str, text: str) -> None:
    """Make what is no file, or no file that can be read, of a kind; root reads everything, which skips the test."""
    if kind == "a dangling link":
        path.symlink_to(path.with_name("nowhere"))
    elif kind == "a loop of links":
        path.symlink_to(path)
    elif kind == "a folder":
        path.mkdir()
    elif kind == "a folder with a folder":
        (path / "train.jsonl").mkdir(parents=True)
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind == "unreadable":
        if os.geteuid() == 0:
            pytest.skip("root reads everything")
        path.write_text(text)
        path.chmod(0)
