"""Files that are whole or not there, and lines of JSON that survive a kill."""

import json
import math
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from helpers import ROOT
from mlxrl.files import append_lines, read_lines, replacing, write_json


def test_a_torn_line_costs_itself_only(tmp_path):
    path = tmp_path / "a.jsonl"
    append_lines(path, [{"step": 1}])
    with path.open("a") as file:
        file.write('{"step": 2, "rew')
    assert read_lines(path) == [{"step": 1}]
    append_lines(path, [{"step": 3}])
    assert read_lines(path) == [{"step": 1}, {"step": 3}]
    assert read_lines(tmp_path / "none.jsonl") == []


def test_lines_survive_a_kill(tmp_path):
    path = tmp_path / "a.jsonl"
    code = (
        "from pathlib import Path\nfrom mlxrl.files import append_lines\n"
        f"i = 0\nwhile True:\n    append_lines(Path({str(path)!r}), [{{'i': i, 'text': 'x' * 5000}}])\n    i += 1\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    deadline = time.monotonic() + 30
    while not (path.exists() and path.stat().st_size > 100_000) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    found = [record["i"] for record in read_lines(path)]
    assert found == list(range(len(found)))
    assert len(found) >= 19


def strict(text):
    """JSON without NaN and Infinity, which are not in its standard."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_numbers_that_are_not_finite_are_null(tmp_path):
    record = {"a": math.nan, "b": [math.inf, 1.5, -math.inf], "c": {"d": np.float64(math.nan)}, "e": (2, None)}
    append_lines(tmp_path / "a.jsonl", [record])
    write_json(tmp_path / "a.json", record)
    for name in ("a.jsonl", "a.json"):
        found = strict((tmp_path / name).read_text())
        assert found == {"a": None, "b": [None, 1.5, None], "c": {"d": None}, "e": [2, None]}


def test_a_lone_surrogate_is_written_as_its_escape(tmp_path):
    append_lines(tmp_path / "a.jsonl", [{"text": "yes\n\ud800"}])
    assert read_lines(tmp_path / "a.jsonl") == [{"text": "yes\n\ud800"}]


def test_a_file_is_replaced_in_one_piece_or_stays(tmp_path):
    path = tmp_path / "deep" / "a.txt"
    with replacing(path) as temporary:
        assert temporary.suffix == ".txt"
        temporary.write_text("first")
        assert not path.exists()
    assert path.read_text() == "first"

    def torn():
        with replacing(path) as temporary:
            temporary.write_text("sec")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        torn()
    assert [one.name for one in path.parent.iterdir()] == ["a.txt"]
    assert path.read_text() == "first"
