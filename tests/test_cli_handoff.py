"""From run to run by digests, through the commands."""

import json

import mlx.core as mx
import pytest

import mlxrl as rl
from helpers import CONFIG, EXAMPLE, JUDGE
from mlxrl.cli import main
from mlxrl.runs.handoff import read
from mlxrl.store import digest_of, files_of

SMALL = ("steps=1", "evaluation.examples=4", "run.store=true", "train.tokens_per_pass=512")
MATCHES = 'reward.functions=["mlxrl.rewards:last_number_matches"]'


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.setenv("MLXRL_STORE", str(tmp_path / "store"))
    monkeypatch.chdir(tmp_path)


def train(folder, *arguments, on_step="pass"):
    (folder / "run.toml").write_text(CONFIG)
    (folder / "judge.py").write_text(JUDGE.format(on_step=on_step))
    return main(["train", "--config", "run.toml", *SMALL, *arguments])


def test_the_next_run_goes_on_from_the_digest_of_the_last(tmp_path, capsys):
    assert train(tmp_path, "run.folder=runs/a", MATCHES) == 0
    first = read(tmp_path / "runs/a/handoff.json")
    name = f"sha256:{first.adapter.sha256}"
    assert f"  stored    {name}\n" in capsys.readouterr().out
    assert first.adapter.sha256 == digest_of(files_of(tmp_path / "runs/a/adapters"))
    assert (first.steps, first.parent) == (1, None)
    assert first.evaluation == json.loads((tmp_path / "runs/a/evaluation.json").read_text())
    short = name[:20]
    assert train(tmp_path, "run.folder=runs/b", f"model.adapter={short}", MATCHES) == 0
    assert f'adapter = "{name}"' in (tmp_path / "runs/b/config.toml").read_text()
    second = read(tmp_path / "runs/b/handoff.json")
    assert (second.parent.adapter, second.parent.sha256) == (name, first.adapter.sha256)
    weights = mx.load(str(tmp_path / "runs/a/adapters/adapters.safetensors"))
    loaded = rl.load(str(EXAMPLE), adapter=short).start
    assert all(mx.array_equal(loaded[key], value) for key, value in weights.items())
    capsys.readouterr()
    assert main(["verify", "runs/b"]) == main(["lineage", second.adapter.sha256]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[-2:]] == [f"sha256:{one.adapter.sha256[:12]}" for one in (second, first)]
    assert main(["eval", "--config", "run.toml", "--adapter", short, MATCHES, *SMALL]) == 0
    after = first.evaluation["after"]["accuracy"]
    assert capsys.readouterr().out.startswith(f"{name}: accuracy {after:.4f}, ")


def test_a_name_that_leads_to_no_adapter_is_one_line(tmp_path, capsys):
    lost = "sha256:12345678"
    why = f"no adapter of this digest in the store, {tmp_path / 'store'}"
    teacher = ("algorithm.name=opd", f"teacher.id={EXAMPLE}", f"teacher.adapter={lost}")
    assert train(tmp_path, f"model.adapter={lost}") == train(tmp_path, *teacher) == 2
    assert main(["eval", "--config", "run.toml", "--adapter", lost]) == 2
    with pytest.raises(ValueError, match=why):
        rl.load(str(EXAMPLE), adapter=lost)
    assert capsys.readouterr().err.splitlines() == [
        f"mlxrl: command line: model: adapter: {lost}: {why}",
        f"mlxrl: command line: teacher: adapter: {lost}: {why}",
        f"mlxrl: {lost}: {why}",
    ]


def test_a_run_that_is_gone_on_with_hands_over_anew_and_keeps_its_parent(tmp_path, capsys):
    rl.load(str(EXAMPLE), lora=rl.LoRA(rank=2)).save(tmp_path / "sft")
    start, began = tmp_path / "sft/adapters.safetensors", digest_of(files_of(tmp_path / "sft"))
    stop = "import os; os.path.exists('go') or signal.raise_signal(signal.SIGINT)"
    assert train(tmp_path, "steps=2", "model.adapter=sft", on_step=stop) == 130
    path, resume = tmp_path / "out/run/handoff.json", ["train", "--resume", "out/run"]
    assert (read(path).steps, read(path).parent.sha256) == (1, began)
    (tmp_path / "go").touch()
    weights = start.read_bytes()
    start.write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    capsys.readouterr()
    assert main(resume) == 2
    assert capsys.readouterr().err == "mlxrl: out/run: model: sft is another adapter than the run began with\n"
    assert read(path).steps == 1
    start.write_bytes(weights)
    assert main(resume) == 0
    assert (read(path).steps, read(path).parent.sha256) == (2, began)
    assert main(["verify", "out/run"]) == 0
