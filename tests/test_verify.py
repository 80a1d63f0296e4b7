"""What a handoff.json says, compared with what is here."""

import json
import os
import shutil

import pytest

from handoffs import adapter_folder, ended, rewrite
from mlxrl.cli import main
from mlxrl.runs import facts, handoff
from mlxrl.runs.verify import verify


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.setenv("MLXRL_STORE", str(tmp_path / "store"))
    monkeypatch.chdir(tmp_path)


def outcomes(name):
    return {part.name: part.outcome for part in verify(str(name)) if part.outcome != "equal"}


def detail(name, part):
    return next(one.detail for one in verify(str(name)) if one.name == part)


def test_a_run_that_was_not_touched_is_equal(tmp_path, capsys):
    folder = ended(tmp_path / "run", teacher=facts.model(str(adapter_folder(tmp_path / "teacher"))))
    parts = verify("run")
    assert [part.name for part in parts] == [
        "adapter", "parent", "model", "teacher", "data", "config", "evaluation", "versions",
    ]  # fmt: skip
    assert {part.outcome for part in parts} == {"equal"}
    assert main(["verify", "run"]) == main(["verify", "run/adapters"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"adapter     equal               {handoff.keep(folder)}, 2 files\n")
    assert "model       equal               model, 1 file\n" in out


def flip(path, place=0):
    path.chmod(0o644)
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


CHANGES = {
    "run/adapters/adapters.safetensors": ("adapter", "run/adapters: adapters.safetensors: wanted "),
    "run/adapters/adapter_config.json": ("adapter", "run/adapters: adapter_config.json: wanted "),
    "model/model.safetensors": ("model", "model: model.safetensors: wanted "),
    "train.jsonl": ("data", "train.jsonl: wanted "),
    "run/config.toml": ("config", "run/config.toml has other contents"),
    "sft/adapters.safetensors": ("parent", "sft: wanted "),
}


@pytest.mark.parametrize("name", CHANGES)
def test_one_changed_byte_is_found(tmp_path, name, capsys):
    sft = adapter_folder(tmp_path / "sft")
    ended(tmp_path / "run", b"more", parent=str(sft))
    assert outcomes("run") == {}
    flip(tmp_path / name, -2)
    part, message = CHANGES[name]
    assert outcomes("run") == {part: "differs"}
    assert detail("run", part).startswith(message)
    assert main(["verify", "run"]) == 1
    assert f"\n{part:<12}differs             {message}" in f"\n{capsys.readouterr().out}"


def test_other_files_are_found(tmp_path):
    folder = ended(tmp_path / "run")
    (folder.adapters / "more").touch()
    (folder.adapters / "adapter_config.json").unlink()
    (folder.adapters / "adapter_config.json").mkdir()
    shutil.copy(tmp_path / "model/model.safetensors", tmp_path / "model/model-2.safetensors")
    folder.record_evaluation({"before": {"accuracy": 0.25}, "after": {"accuracy": 0.75}})
    (folder.path / "manifest.json").write_text("[]")
    assert outcomes("run") == dict.fromkeys(("adapter", "model", "evaluation", "versions"), "differs")
    assert detail("run", "adapter") == "run/adapters: adapter_config.json: is missing; 1 more differ"
    assert detail("run", "model") == "model: model-2.safetensors: was added"


def test_files_that_cannot_be_compared_differ_with_the_reason(tmp_path):
    folder = ended(tmp_path / "run")
    (folder.adapters / "link").symlink_to("adapters.safetensors")
    (folder.path / "evaluation.json").write_text("{")
    assert outcomes("run") == {"adapter": "differs", "evaluation": "differs"}
    assert "link: a symbolic link; wanted a file" in detail("run", "adapter")
    assert "run/evaluation.json: wanted JSON" in detail("run", "evaluation")
    shutil.rmtree(folder.adapters)
    assert detail("run", "adapter") == f"{folder.adapters}: cannot be read: No such file or directory"


def test_what_is_not_here_is_said_and_does_not_differ(tmp_path, capsys):
    sft = adapter_folder(tmp_path / "sft")
    folder = ended(tmp_path / "run", b"more", parent=str(sft))
    name = handoff.keep(folder)
    for gone in ("run", "sft", "model"):
        shutil.rmtree(tmp_path / gone)
    (tmp_path / "train.jsonl").unlink()
    assert main(["verify", name, "--json"]) == 0
    parts = {part["name"]: part for part in json.loads(capsys.readouterr().out)}
    assert [part for part in parts if parts[part]["outcome"] == "equal"] == ["adapter"]
    assert {part["outcome"] for part in parts.values()} == {"equal", "not checkable here"}
    assert parts["model"]["detail"] == "model is not on this machine"
    assert parts["data"]["detail"] == "train.jsonl is not on this machine"
    assert parts["parent"]["detail"] == "sft is neither there nor in the store"
    assert parts["config"]["detail"] == "no config.toml beside handoff.json"


def test_a_parent_is_looked_for_in_the_store_first(tmp_path):
    first = ended(tmp_path / "first")
    name = handoff.keep(first)
    ended(tmp_path / "run", b"more", parent=str(first.adapters))
    flip(first.adapters / "adapters.safetensors")
    assert (outcomes("run"), detail("run", "parent")) == ({}, name)
    flip(tmp_path / "store" / name.removeprefix("sha256:") / "adapters.safetensors")
    assert outcomes("run") == {"parent": "differs"}


def test_a_source_and_a_model_without_digests_cannot_be_checked(tmp_path):
    path = ended(tmp_path / "run").path / "handoff.json"
    rewrite(path, data__0__file=None, model__files={}, parent={"adapter": "sft", "sha256": None})
    assert outcomes("run") == dict.fromkeys(("data", "model", "parent"), "not checkable here")
    rewrite(path, evaluation={"state": "not_run", "reason": "no data"})
    assert outcomes("run")["evaluation"] == "differs"
    os.unlink(tmp_path / "run/evaluation.json")
    assert outcomes("run")["evaluation"] == "not checkable here"


def test_files_that_cannot_be_read_are_not_checkable(tmp_path, monkeypatch):
    ended(tmp_path / "run")

    def closed(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(facts, "digest", closed)
    assert outcomes("run") == dict.fromkeys(("data", "model"), "not checkable here")
    assert (detail("run", "data"), detail("run", "model")) == (
        "train.jsonl: Permission denied", "model: Permission denied",
    )  # fmt: skip


def test_a_big_file_is_compared_by_its_head_and_that_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(facts, "WHOLE", 4)
    ended(tmp_path / "run")
    assert detail("run", "model") == "model, 1 file, of 1 of them the size and the first 64 MiB"


def test_a_snapshot_of_the_hub_is_checked_at_its_revision(tmp_path, monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    snapshot = adapter_folder(tmp_path / "snapshots/0123abcd")

    def cached(id, revision, local_files_only):
        assert (id, local_files_only) == ("org/tiny", True)
        if revision not in (None, "0123abcd"):
            raise LocalEntryNotFoundError("not here")
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", cached)
    folder = ended(tmp_path / "run")
    folder.record(model=facts.model("org/tiny"))
    assert folder.manifest()["model"]["revision"] == "0123abcd"
    path = handoff.write(folder, "grpo", 3)
    assert detail("run", "model") == "org/tiny at 0123abcd, 2 files"
    rewrite(path, model__revision="4567")
    assert detail("run", "model") == "org/tiny at 4567 is not on this machine"


def test_a_bad_handoff_is_one_line(tmp_path, capsys):
    path = ended(tmp_path / "run").path / "handoff.json"
    rewrite(path, adapter__files__0__path="../x")
    assert main(["verify", "run"]) == 2
    message = "mlxrl: run/handoff.json: adapter: files: wanted paths in the adapter's folder, got '../x'\n"
    assert capsys.readouterr().err == message
