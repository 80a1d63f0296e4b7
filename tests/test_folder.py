"""The run folder: never overwritten, never torn."""

import os

import pytest

from mlxrl.checked import SettingError
from mlxrl.files import read_lines
from mlxrl.runs import folder as folder_module
from mlxrl.runs.folder import claim, free_folder, refuse_taken


def create(path, config):
    return claim(path, lambda _: config)


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


def test_a_manifest_is_whole_or_the_one_before(tmp_path, monkeypatch):
    folder = create(tmp_path / "run", "")

    def fail(*arguments):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        folder.record(seed=1)
    assert folder.manifest() == {"state": "configured"}
    assert sorted(path.name for path in folder.path.iterdir()) == ["config.toml", "events.jsonl", "manifest.json"]


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


BAD = {
    "a\0b": "embedded null byte",
    "x" * 300: "File name too long",
    "dangling": "is a link that leads to no folder; wanted a folder",
    "dangling/run": "Not a directory",
    "loop": "Too many levels of symbolic links|is a link that leads to no folder",
    "loop/run": "Too many levels of symbolic links",
    "closed/run": "Permission denied",
    "file/run": "Not a directory",
}


@pytest.mark.parametrize("name", BAD)
def test_a_folder_that_cannot_be_is_a_fault_of_the_key(tmp_path, monkeypatch, name):
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").touch()
    (tmp_path / "closed").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path / "closed")
    before = sorted(tmp_path.iterdir())
    for function in (refuse_taken, lambda path: create(path, "")):
        with pytest.raises(SettingError, match=BAD[name]) as found:
            function(tmp_path / name)
        assert str(found.value).startswith("run.folder: ")
        assert "\n" not in str(found.value)
    assert sorted(tmp_path.iterdir()) == before


def test_a_disk_that_is_full_is_a_fault_of_the_key(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(SettingError, match=r"run\.folder: .*run cannot be written: No space left on device"):
        create(tmp_path / "run", "")
