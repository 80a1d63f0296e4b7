"""The digest of an adapter folder, and the store of adapters by their digests."""

import hashlib
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from handoffs import adapter_folder
from mlxrl import store
from mlxrl.store import StoreError, digest_of, files_of, keep, resolve


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("MLXRL_STORE", str(tmp_path / "store"))
    return tmp_path / "store"


@pytest.fixture
def adapter(tmp_path):
    folder = adapter_folder(tmp_path / "run/adapters")
    (folder.parent / "handoff.json").write_text("{}")
    return folder


def kept(adapter):
    return keep(adapter, adapter.parent / "handoff.json")


def digest(folder):
    return digest_of(files_of(folder))


def test_the_digest_follows_the_rule(adapter):
    """By hand: 3 bytes of "{}" and a newline, 7 of "weights", names of 19 and 20 bytes, é of 2."""
    (adapter / "é").mkdir()
    (adapter / "é/a b").write_bytes(b"")
    lines = (
        "mlxrl-tree-1\n"
        f"19 adapter_config.json 3 {hashlib.sha256(b'{}' + bytes([10])).hexdigest()}\n"
        f"20 adapters.safetensors 7 {hashlib.sha256(b'weights').hexdigest()}\n"
        f"6 é/a b 0 {hashlib.sha256(b'').hexdigest()}\n"
    )
    assert digest(adapter) == hashlib.sha256(lines.encode()).hexdigest()


def test_every_byte_name_and_file_counts_and_metadata_does_not(adapter):
    seen = {digest(adapter)}
    (adapter / "handoff.json").write_text("{}")
    (adapter / ".DS_Store").write_text("x")
    (adapter / "empty").mkdir()
    assert digest(adapter) in seen
    weights = adapter / "adapters.safetensors"
    for change in (
        lambda: weights.write_bytes(b"weighty"),
        lambda: weights.rename(adapter / "adapters.safetensorz"),
        lambda: (adapter / "more").write_bytes(b""),
        lambda: (adapter / "more").rename(adapter / "empty/more"),
        lambda: (adapter / "empty/handoff.json").write_bytes(b""),
    ):
        change()
        assert digest(adapter) not in seen
        seen.add(digest(adapter))


def test_a_name_that_looks_like_a_line_makes_another_digest(tmp_path):
    """Without lengths in front, one file of this name and two files would have the same lines."""
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    empty = hashlib.sha256(b"").hexdigest()
    (one / f"a 0 {empty}\nb").write_bytes(b"")
    for name in "ab":
        (two / name).write_bytes(b"")
    assert digest(one) != digest(two)


def test_what_is_no_file_has_no_digest(adapter):
    link = adapter / "link"
    for make, message in {
        lambda: link.symlink_to("adapters.safetensors"): "link: a symbolic link; wanted a file",
        lambda: link.symlink_to("/etc"): "link: a symbolic link; wanted a file",
        lambda: link.symlink_to("nowhere"): "link: a symbolic link; wanted a file",
        lambda: os.mkfifo(link): "link: wanted a file, got something that is neither file nor folder",
    }.items():
        make()
        with pytest.raises(StoreError, match=message):
            files_of(adapter)
        link.unlink()
    with pytest.raises(StoreError, match="nowhere: cannot be read: No such file or directory"):
        files_of(adapter / "nowhere")


@pytest.mark.skipif(sys.platform != "linux", reason="file systems of other systems have no such names")
def test_a_name_that_is_not_utf8_has_no_digest(adapter):
    (adapter / os.fsdecode(b"\xff")).write_bytes(b"")
    with pytest.raises(StoreError, match=r"adapters: wanted names in UTF-8, got b'\\xff'"):
        files_of(adapter)


def test_an_adapter_is_kept_read_only_under_its_digest(adapter, home):
    wanted = digest(adapter)
    (adapter / "sub").mkdir()
    (adapter / ".hidden").write_text("")
    folder = kept(adapter)
    assert folder == home / wanted
    assert sorted(path.name for path in folder.iterdir()) == [
        "adapter_config.json", "adapters.safetensors", "handoff.json",
    ]  # fmt: skip
    assert stat.S_IMODE(folder.stat().st_mode) == 0o555
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o444}
    before = folder.stat()
    assert kept(adapter) == folder
    assert (folder.stat().st_ino, [path.name for path in home.iterdir()]) == (before.st_ino, [wanted])
    assert resolve(f"sha256:{wanted}") == resolve(f"sha256:{wanted[:8].upper()}") == folder
    assert resolve(adapter) == adapter
    assert store.full_name(f"sha256:{wanted[:8]}") == f"sha256:{wanted}"


def test_two_processes_at_once_keep_one(adapter, home):
    code = f"from pathlib import Path; from mlxrl.store import keep; keep(Path({str(adapter)!r}), Path({__file__!r}))"
    both = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    assert [process.wait(30) for process in both] == [0, 0]
    assert [path.name for path in home.iterdir()] == [digest(adapter)]


def test_who_comes_second_takes_what_is_there(adapter, home, monkeypatch):
    """The other process renames between the look and the rename."""
    own = os.rename

    def slow(source, target):
        monkeypatch.setattr(os, "rename", own)
        kept(adapter)
        own(source, target)

    monkeypatch.setattr(os, "rename", slow)
    assert kept(adapter) == home / digest(adapter)
    assert [path.name for path in home.iterdir()] == [digest(adapter)]


def test_what_cannot_be_kept_leaves_nothing(adapter, home, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match="store: cannot be written: No space left on device"):
        kept(adapter)
    assert list(home.iterdir()) == []
    monkeypatch.undo()
    monkeypatch.setenv("MLXRL_STORE", str(adapter / "adapters.safetensors"))
    with pytest.raises(StoreError, match=r"adapters\.safetensors: cannot be written: "):
        kept(adapter)


def test_a_damaged_entry_is_refused_when_it_is_resolved(adapter):
    folder = kept(adapter)
    weights = folder / "adapters.safetensors"
    weights.chmod(0o644)
    weights.write_bytes(b"weighty")
    for attempt in (lambda: resolve(f"sha256:{folder.name}"), lambda: kept(adapter)):
        with pytest.raises(StoreError, match=f"{folder}: damaged: its bytes give {digest(folder)}; remove it: chmod"):
            attempt()


NAMES = {
    "sha256:": "wanted sha256: and 8 to 64 hex digits",
    "sha256:abcdef1": "wanted sha256: and 8 to 64 hex digits",
    "sha256:" + "a" * 65: "wanted sha256: and 8 to 64 hex digits",
    "sha256:../../etc": "wanted sha256: and 8 to 64 hex digits",
    "sha256:" + "0" * 8: "2 adapters in the store begin so; give more digits",
    "sha256:" + "1" * 8: "no adapter of this digest in the store, ",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_leads_to_no_adapter(home, name):
    for last in "12":
        (home / ("0" * 63 + last)).mkdir(parents=True)
    with pytest.raises(StoreError, match=NAMES[name]):
        resolve(name)


def test_where_the_store_is(monkeypatch):
    monkeypatch.setenv("MLXRL_STORE", "")
    monkeypatch.setenv("HOME", "/nowhere/someone")
    assert store.place() == Path("/nowhere/someone/.mlxrl/adapters")
    monkeypatch.setenv("MLXRL_STORE", "store")
    with pytest.raises(StoreError, match="MLXRL_STORE: wanted an absolute path, got 'store'"):
        store.place()
