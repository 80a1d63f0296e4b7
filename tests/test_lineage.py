"""The adapters that an adapter came from."""

import json
import shutil

import pytest

from handoffs import adapter_folder, ended, rewrite
from mlxrl.cli import main
from mlxrl.runs import handoff
from mlxrl.runs import lineage as module
from mlxrl.runs.handoff import read
from mlxrl.runs.lineage import lineage


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.setenv("MLXRL_STORE", str(tmp_path / "store"))
    monkeypatch.chdir(tmp_path)


def chain(folder, count=3):
    """Runs a, b, c, each going on from the one before; their digests."""
    parent, digests = None, []
    for name in "abcdefgh"[:count]:
        made = ended(folder / name, name.encode(), parent=parent)
        parent = str(made.adapters)
        digests.append(read(made.path / "handoff.json").adapter.sha256)
    return digests


def digests(name):
    return [one.sha256 for one in lineage(name)]


def test_parents_are_told_back_to_the_model(tmp_path, capsys):
    a, b, c = chain(tmp_path / "elsewhere")
    assert main(["lineage", "elsewhere/c"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"sha256:{c[:12]}  elsewhere/model  grpo  3 steps  held-out accuracy 0.250 -> 0.500",
        f"sha256:{b[:12]}  elsewhere/model  grpo  3 steps  held-out accuracy 0.250 -> 0.500",
        f"sha256:{a[:12]}  elsewhere/model  grpo  3 steps, from the model  held-out accuracy 0.250 -> 0.500",
    ]
    assert main(["lineage", "elsewhere/b/adapters", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["sha256"] for one in found] == [b, a]
    assert found[0]["handoff"]["parent"]["sha256"] == a


def test_parents_are_found_in_the_store_and_below_runs(tmp_path, monkeypatch):
    a, b, c = chain(tmp_path / "before")
    for name in "abc":
        handoff.keep(handoff.RunFolder(tmp_path / "before" / name))
    shutil.move(tmp_path / "before", tmp_path / "after")
    assert digests(c) == digests(f"sha256:{c[:8]}") == [c, b, a]
    monkeypatch.setenv("MLXRL_STORE", str(tmp_path / "another"))
    (tmp_path / "runs").mkdir()
    for name in "abc":
        shutil.move(tmp_path / "after" / name, tmp_path / "runs" / name)
    shutil.move(tmp_path / "runs/c", tmp_path / "c")
    assert digests("c") == [c, b, a]
    assert digests(b[:8]) == [b, a]


def test_parents_that_are_missing_are_said(tmp_path, capsys):
    a, *_ = chain(tmp_path / "x")
    (tmp_path / "x/a/handoff.json").unlink()
    assert main(["lineage", "x/c"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:] == [f"sha256:{a[:12]}  missing: no handoff.json of it here"]
    (tmp_path / "x/a/handoff.json").write_text("{")
    assert "x/a/handoff.json: wanted JSON" in lineage("x/b")[-1].missing
    rewrite(tmp_path / "x/b/handoff.json", parent={"adapter": str(tmp_path / "sft"), "sha256": None})
    assert main(["lineage", "x/b"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["no digest            missing: sft had no digest"]


def test_the_adapter_of_another_time_is_not_the_parent(tmp_path):
    a, b = chain(tmp_path / "x", 2)
    shutil.rmtree(tmp_path / "x/a")
    ended(tmp_path / "x/a", b"another")
    assert digests("x/b") == [b, a]
    assert lineage("x/b")[-1].handoff is None


def test_a_run_that_changed_nothing_ends_no_walk(tmp_path, monkeypatch):
    """b has the digest of its parent a, which lies in the store; c came from b."""
    first = ended(tmp_path / "x/a")
    name = handoff.keep(first)
    same = ended(tmp_path / "x/b", parent=str(first.adapters))
    ended(tmp_path / "x/c", b"more", parent=str(same.adapters))
    digest = name.removeprefix("sha256:")
    assert digests("x/b") == [digest, digest]
    assert digests("x/c")[1:] == [digest]
    shutil.rmtree(tmp_path / "x/a")
    monkeypatch.setenv("MLXRL_STORE", str(tmp_path / "another"))
    assert [one.handoff is None for one in lineage("x/b")] == [False, True]


def test_generations_are_bounded(tmp_path, monkeypatch):
    chain(tmp_path / "x", 4)
    monkeypatch.setattr(module, "MOST", 3)
    assert len(lineage("x/d")) == 3


def test_no_evaluation_is_said(tmp_path, capsys):
    path = ended(tmp_path / "run").path / "handoff.json"
    for evaluation, message in {
        '{"state": "not_run", "reason": "data.evaluation is left out"}': "not evaluated: data.evaluation is left out",
        '{"before": {"accuracy": 0.5}}': "held-out accuracy 0.500 -> -",
        '{"before": 1, "after": {"accuracy": "x"}}': "held-out accuracy - -> -",
    }.items():
        rewrite(path, evaluation=json.loads(evaluation))
        assert main(["lineage", "run"]) == 0
        assert capsys.readouterr().out.endswith(f"{message}\n")


def test_what_is_not_there_is_one_line(tmp_path, capsys):
    adapter_folder(tmp_path / "sft")
    assert main(["lineage", "sft"]) == main(["lineage", "sha256:12345678"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("mlxrl: sft: no handoff.json; wanted")
    assert lines[1].startswith("mlxrl: sha256:12345678: no adapter of this digest in the store, ")
