"""The run folder: never overwritten, never torn."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlxrl.files import append_line, read_lines
from mlxrl.runs import facts
from mlxrl.runs import folder as folder_module
from mlxrl.runs.folder import create, free_folder, refuse_taken
from mlxrl.runs.shutdown import Stop
from mlxrl.types import Task, Trajectory, Turn


def attempt(text, reward):
    return Trajectory(Task("1+1"), (Turn((1,), (2, 3), (0.0, 0.0), text),), reward=reward, rewards={"f": reward})


def test_a_folder_with_anything_in_it_is_refused_and_a_free_one_named(tmp_path):
    taken = tmp_path / "run"
    create(taken, "seed = 0\n")
    with pytest.raises(ValueError, match=f'{taken} is not empty; choose another one, such as run.folder="{taken}-2"'):
        create(taken, "")
    assert (taken / "config.toml").read_text() == "seed = 0\n"
    (tmp_path / "run-2").mkdir()
    assert free_folder(taken) == tmp_path / "run-2"
    (tmp_path / "run-2" / "x").touch()
    assert free_folder(taken) == tmp_path / "run-3"
    with pytest.raises(ValueError, match="is a file; wanted a folder"):
        refuse_taken(tmp_path / "run-2" / "x")


def test_states_go_to_the_manifest_and_the_events(tmp_path):
    folder = create(tmp_path / "run", "")
    assert folder.manifest() == {"state": "configured"}
    folder.record(seed=3)
    folder.enter("running")
    assert "ended" not in folder.manifest()
    try:
        raise RuntimeError("no more")
    except RuntimeError as error:
        folder.failure(error)
    manifest = folder.manifest()
    assert (manifest["state"], manifest["seed"], manifest["pid"]) == ("failed", 3, os.getpid())
    assert manifest["started"] <= manifest["ended"]
    events = read_lines(folder.path / "events.jsonl")
    assert [event["event"] for event in events] == ["configured", "running", "failed"]
    assert events[-1]["error"] == "RuntimeError: no more"
    assert "test_states_go_to_the_manifest" in events[-1]["traceback"]


def test_metrics_and_samples_are_lines(tmp_path):
    folder = create(tmp_path / "run", "")
    folder.metrics(1, {"reward": float("nan"), "loss": 0.5})
    (line,) = read_lines(folder.path / "metrics.jsonl")
    assert (line["step"], line["reward"], line["loss"]) == (1, None, 0.5)
    folder.samples(1, [(attempt("no", 0.0), attempt("yes\n\ud800", 1.0), attempt("so", 0.5))])
    best, worst = read_lines(folder.path / "samples.jsonl")
    assert best == {
        "step": 1, "group": 0, "kind": "best", "prompt": "1+1", "completion": "yes\n\ud800",
        "reward": 1.0, "rewards": {"f": 1.0}, "stop": "eos", "length": 2,
    }  # fmt: skip
    assert (worst["kind"], worst["completion"]) == ("worst", "no")


def test_a_torn_line_costs_itself_only(tmp_path):
    path = tmp_path / "a.jsonl"
    append_line(path, {"step": 1})
    with path.open("a") as file:
        file.write('{"step": 2, "rew')
    assert read_lines(path) == [{"step": 1}]
    append_line(path, {"step": 3})
    assert read_lines(path) == [{"step": 1}, {"step": 3}]
    assert read_lines(tmp_path / "none.jsonl") == []


def test_lines_survive_a_kill(tmp_path):
    path = tmp_path / "a.jsonl"
    code = (
        "from pathlib import Path\nfrom mlxrl.files import append_line\n"
        f"i = 0\nwhile True:\n    append_line(Path({str(path)!r}), {{'i': i, 'text': 'x' * 5000}})\n    i += 1\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[1])
    deadline = time.monotonic() + 30
    while not (path.exists() and path.stat().st_size > 100_000) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    found = [record["i"] for record in read_lines(path)]
    assert found == list(range(len(found)))
    assert len(found) >= 19


def test_a_manifest_is_whole_or_the_one_before(tmp_path, monkeypatch):
    folder = create(tmp_path / "run", "")

    def fail(*arguments):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        folder.record(seed=1)
    assert folder.manifest() == {"state": "configured"}
    assert sorted(path.name for path in folder.path.iterdir()) == ["config.toml", "events.jsonl", "manifest.json"]


def test_digests(tmp_path, monkeypatch):
    (tmp_path / "model.safetensors").write_bytes(b"abcdef")
    (tmp_path / "notes.txt").write_bytes(b"")
    assert facts.model_digests(str(tmp_path)) == {"model.safetensors": hashlib.sha256(b"abcdef").hexdigest()}
    monkeypatch.setattr(facts, "WHOLE", 6)
    monkeypatch.setattr(facts, "HEAD", 2)
    assert facts.digest(tmp_path / "model.safetensors") == f"head:6:{hashlib.sha256(b'ab').hexdigest()}"
    assert facts.model_digests("some/model-on-the-hub") == {}
    one, two = [Task("a", {"x": 1})], [Task("a", {"x": 2})]
    assert facts.data_digest("d", one)["rows"] == 1
    assert facts.data_digest("d", one) == facts.data_digest("d", list(one))
    assert facts.data_digest("d", one)["sha256"] != facts.data_digest("d", two)["sha256"]


def test_versions_name_what_decides_a_run():
    found = facts.versions()
    assert list(found) == ["mlxrl", "mlx", "mlx-lm", "python"]
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert json.dumps(facts.device())


def test_the_first_signal_is_a_wish_and_the_second_an_end():
    with Stop().listening() as stop:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with stop.patiently():
            signal.raise_signal(signal.SIGTERM)
            assert stop.asked
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_of_two_runs_that_begin_at_once_one_has_the_folder(tmp_path, monkeypatch):
    """Both have looked before either has written."""
    looked = []
    monkeypatch.setattr(folder_module, "refuse_taken", lambda path: looked.append(path) or len(looked) < 3 or taken())

    def taken():
        raise ValueError("not empty")

    create(tmp_path / "run", "seed = 0\n")
    with pytest.raises(ValueError, match="not empty"):
        create(tmp_path / "run", "seed = 1\n")
    assert (tmp_path / "run" / "config.toml").read_text() == "seed = 0\n"


def test_a_folder_that_cannot_be_written_is_a_fault_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"run\.folder: .* cannot be written: Not a directory; choose another one"):
        create(tmp_path / "file" / "run", "")
