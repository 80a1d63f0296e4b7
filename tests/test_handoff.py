"""handoff.json: what it holds, how it is found, and what is refused."""

import json
import os
import shutil
from pathlib import Path

import pytest

from handoffs import adapter_folder, ended, rewrite
from mlxrl.runs import facts, handoff
from mlxrl.runs.handoff import HandoffError, locate, read
from mlxrl.store import digest_of, files_of


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.setenv("MLXRL_STORE", str(tmp_path / "store"))
    monkeypatch.chdir(tmp_path)


def test_it_holds_what_the_folder_holds(tmp_path):
    folder = ended(tmp_path / "run")
    found = read(folder.path / "handoff.json")
    assert found.adapter.sha256 == digest_of(files_of(folder.adapters))
    assert [(file.path, file.size) for file in found.adapter.files] == [
        ("adapter_config.json", 3), ("adapters.safetensors", 7),
    ]  # fmt: skip
    model = tmp_path / "model"
    assert (found.model.id, found.model.revision, found.model.files) == (str(model), None, facts.model_digests(model))
    (data,) = found.data
    assert (data.source, data.examples) == (str(tmp_path / "train.jsonl"), 1)
    assert data.file == facts.digest(tmp_path / "train.jsonl")
    assert found.config == (folder.path / "config.toml").read_text()
    assert (found.algorithm, found.steps, found.parent, found.teacher) == ("grpo", 3, None, None)
    assert found.versions == facts.versions()
    assert found.evaluation == json.loads((folder.path / "evaluation.json").read_text())


def test_an_evaluation_is_handed_over_without_the_scores_of_each_example(tmp_path):
    folder = ended(tmp_path / "run")
    folder.record_evaluation({"state": "done", "after": {"accuracy": 1.0}, "scores": {"after": {"rewards": [1.0]}}})
    assert read(handoff.write(folder, "grpo", 3)).evaluation == {"state": "done", "after": {"accuracy": 1.0}}


def test_the_parent_is_the_adapter_as_it_was_when_the_run_began(tmp_path):
    sft = adapter_folder(tmp_path / "sft", b"sft")
    began = digest_of(files_of(sft))
    folder = ended(tmp_path / "run", parent=str(sft))
    (sft / "adapters.safetensors").write_bytes(b"later")
    assert read(handoff.write(folder, "grpo", 3)).parent == handoff.Parent(str(sft), began)
    (sft / "link").symlink_to("adapters.safetensors")
    with pytest.warns(UserWarning, match="goes on from has no digest: .*link: a symbolic link"):
        assert handoff.parent_of(str(sft)) == {"adapter": str(sft), "sha256": None}


def test_it_is_found_by_a_run_an_adapter_and_a_digest(tmp_path):
    folder = ended(tmp_path / "runs/x")
    path, adapter = folder.path / "handoff.json", folder.adapters
    digest = read(path).adapter.sha256
    for name in ("runs/x", "runs/x/adapters", str(adapter), digest, digest[:8], f"sha256:{digest[:10]}"):
        assert locate(name)[0] == path
    assert locate("runs/x") == locate("runs/x/adapters") == (path, adapter)
    name = handoff.keep(folder)
    assert name == f"sha256:{digest}"
    entry = tmp_path / "store" / digest
    assert locate(name) == locate(digest[:8]) == (entry / "handoff.json", entry)


def test_names_that_lead_to_none(tmp_path):
    (tmp_path / "empty").mkdir()
    adapter_folder(tmp_path / "alone/sft")
    wanted = "wanted the folder of a run that has ended, or of its adapter"
    for name, message in {
        "nowhere": f"nowhere: no such folder; {wanted}",
        "empty": f"empty: no handoff.json; {wanted}",
        "alone/sft": f"alone/sft: no handoff.json; {wanted}",
        "a" * 300: f"{'a' * 300}: no such folder; {wanted}",
        "a\0b": "a b: no such folder",
        "sha256:12": "sha256:12: wanted sha256: and 8 to 64 hex digits",
        "a" * 64: f"{'a' * 64}: no adapter of this digest in the store",
    }.items():
        with pytest.raises(ValueError, match=" ") as caught:
            locate(name)
        assert message in str(caught.value).replace("\0", " ")


BAD = {
    b"": "wanted JSON: ",
    b"{": "wanted JSON: ",
    b"\xff": "wanted UTF-8: invalid start byte at byte 0",
    b"[" * 100_000: "wanted JSON",
    b'{"a": 1, "a": 2}': "'a' stands twice",
    b'{"steps": NaN}': "wanted JSON, got NaN",
    b"[]": "expected `object`, got `array`",
    b"null": "expected `object`, got `null`",
    b"{}": "object missing required field `format`",
}


@pytest.mark.parametrize("content", BAD, ids=lambda content: content[:10].decode("latin-1"))
def test_a_file_that_is_none_is_refused_in_one_line(tmp_path, content):
    path = tmp_path / "handoff.json"
    path.write_bytes(content)
    with pytest.raises(HandoffError) as caught:
        read(path)
    assert str(caught.value).startswith(f"handoff.json: {BAD[content]}")
    assert "\n" not in str(caught.value)


VALUES = {
    "format": ("mlxrl-handoff-9", "format: invalid enum value 'mlxrl-handoff-9'"),
    "adapter": (None, "adapter: expected `object`, got `null`"),
    "adapter__rule": ("sha1", "adapter.rule: invalid enum value 'sha1'"),
    "adapter__sha256": ("0" * 64, "adapter: sha256: its files give "),
    "adapter__files": ([], "adapter: sha256: its files give "),
    "adapter__files__0__size": ("3", "adapter.files[0].size: expected `int`, got `str`"),
    "adapter__files__0__sha256": (7, "adapter.files[0].sha256: expected `str`, got `int`"),
    "adapter__files__1": ("x", "adapter.files[1]: expected `object`, got `str`"),
    "parent": ("abc", "parent: expected `object | null`, got `str`"),
    "model__id": ("", "model.id: expected `str` of length >= 1"),
    "model__revision": (1, "model.revision: expected `str | null`, got `int`"),
    "model__files": ({"a": "b"}, "model.files[...]: expected `str` matching regex "),
    "data": ({}, "data: expected `array`, got `object`"),
    "data__0__source": ("a\0b", "data[0].source: expected `str` matching regex "),
    "data__0__examples": (-1, "data[0].examples: expected `int` >= 0"),
    "data__0__file": ("head:x", "data[0].file: expected `str` matching regex "),
    "config": (["seed = 0"], "config: expected `str`, got `array`"),
    "steps": (1.5, "steps: expected `int`, got `float`"),
    "versions": ({"mlx": 1}, "versions[...]: expected `str`, got `int`"),
    "evaluation": ([], "evaluation: expected `object`, got `array`"),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return ended(tmp_path_factory.mktemp("whole") / "run").path / "handoff.json"


@pytest.mark.parametrize("key", VALUES)
def test_a_value_of_another_form_is_refused_in_one_line(tmp_path, whole, key):
    path = Path(shutil.copy(whole, tmp_path))
    value, message = VALUES[key]
    rewrite(path, **{key: value})
    with pytest.raises(HandoffError) as caught:
        read(path)
    assert str(caught.value).startswith(f"handoff.json: {message}")


OUTSIDE = ("../x", "/etc/passwd", "//x", "a/../../x", "", ".", "a//b", "./a", "a/", "a\0b", "\ud800")


@pytest.mark.parametrize("name", OUTSIDE)
def test_files_outside_the_adapter_are_refused(tmp_path, whole, name):
    path = Path(shutil.copy(whole, tmp_path))
    rewrite(path, adapter__files__0__path=name)
    with pytest.raises(HandoffError, match=r"adapter: files: wanted paths in the adapter's folder, got "):
        read(path)


def test_a_file_that_stands_twice_is_refused(tmp_path, whole):
    path = Path(shutil.copy(whole, tmp_path))
    rewrite(path, adapter__files=json.loads(path.read_text())["adapter"]["files"] * 2)
    with pytest.raises(HandoffError, match=r"adapter: files: 'adapter_config\.json' stands twice"):
        read(path)


def test_a_file_that_cannot_be_read(tmp_path, monkeypatch):
    with pytest.raises(HandoffError, match=r"^handoff\.json: cannot be read: No such file or directory$"):
        read(tmp_path / "handoff.json")
    (tmp_path / "handoff.json").mkdir()
    with pytest.raises(HandoffError, match=r"^handoff\.json: cannot be read: Is a directory$"):
        read(tmp_path / "handoff.json")
    os.mkdir(tmp_path / "adapters")
    with pytest.raises(HandoffError, match=r"no handoff\.json"):
        locate(str(tmp_path))


def test_a_store_that_cannot_be_written_loses_no_run(tmp_path, monkeypatch):
    folder = ended(tmp_path / "run")
    monkeypatch.setenv("MLXRL_STORE", "relative")
    with pytest.warns(UserWarning, match="the adapter is not in the store: MLXRL_STORE: wanted an absolute path"):
        assert handoff.keep(folder) == ""
