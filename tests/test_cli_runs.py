"""Runs that are stopped, killed, or lose their folder, and the commands that list, show, cancel and continue them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from helpers import CONFIG, EXAMPLE, JUDGE, ROOT
from mlxrl.cli import main
from mlxrl.files import read_lines
from mlxrl.runs.folder import RunFolder

MEASURED = ("seconds/", "memory/", "rollout/tokens_per_second", "time")
RUN = Path("out/run")
STEPS = ("steps=4", "run.evaluate_every=2", "train.tokens_per_pass=512")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(CONFIG)
    return tmp_path


def train(*arguments: str, on_step: str = "pass") -> int:
    Path("judge.py").write_text(JUDGE.format(on_step=on_step))
    sys.modules.pop("judge", None)
    return main(["train", "--config", "run.toml", *STEPS, *arguments])


def resume(*arguments: str) -> int:
    Path("judge.py").write_text(JUDGE.format(on_step="pass"))
    return main(["train", "--resume", str(RUN), *arguments])


def child(*arguments: str, on_step: str = "pass") -> subprocess.CompletedProcess[str]:
    Path("judge.py").write_text(JUDGE.format(on_step=on_step))
    command = [sys.executable, "-m", "mlxrl", "train", "--config", "run.toml", *STEPS, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def result(path: Path) -> dict[str, Any]:
    """What of a run follows from its config and its seed."""
    last = max((path / "checkpoints").glob("step-*"))
    arrays: Any = {
        file.name: mx.load(str(file))
        for file in (last / "optimizer.safetensors", path / "adapters/adapters.safetensors")
    }
    return {
        "arrays": {name: {key: value.tolist() for key, value in found.items()} for name, found in arrays.items()},
        "metrics": [
            {name: value for name, value in line.items() if not name.startswith(MEASURED)}
            for line in read_lines(path / "metrics.jsonl")
        ],
        "samples": read_lines(path / "samples.jsonl"),
        "evaluation": json.loads((path / "evaluation.json").read_text()),
    }


def states(path: Path = RUN) -> list[str]:
    known = {"configured", "running", "cancelled", "interrupted", "failed", "succeeded", "resumed"}
    return [event["event"] for event in read_lines(path / "events.jsonl") if event["event"] in known]


@pytest.mark.parametrize("when", [*(pytest.param(step, marks=pytest.mark.slow) for step in (1, 3)), 4])
def test_a_killed_run_is_continued_to_the_same_end(folder, when):
    assert train('run.folder="whole"') == 0
    done = child(on_step=f"signal.raise_signal(signal.SIGKILL) if calls == {when + 1 + when // 3} else None")
    assert done.returncode == -signal.SIGKILL
    assert RunFolder(RUN).state() == "interrupted"
    torn = RUN / "metrics.jsonl"
    if torn.exists():
        with torn.open("a") as file:
            file.write('{"step": 9, "reward": 0.')
    assert resume() == 0
    assert result(RUN) == result(folder / "whole")
    assert [line["step"] for line in read_lines(torn)] == [1, 2, 3, 4]
    assert states() == ["configured", "running", "resumed", "running", "succeeded"]


def test_a_cancelled_run_is_continued_and_more_steps_are_told(folder, capsys):
    assert train("steps=2", on_step="calls == 2 and open('out/run/cancel', 'w').close()") == 130
    assert capsys.readouterr().out.endswith(
        "adapter     out/run/adapters\n  go on with  mlxrl train --resume out/run\n"
    )
    assert read_lines(RUN / "events.jsonl")[-1]["reason"] == "mlxrl cancel"
    assert resume("--dry-run", "steps=3", "optimizer.learning_rate=2e-3") == 0
    assert capsys.readouterr().out == (
        "# resumed: from step 1\n# changed: optimizer.learning_rate was 0.001, is 0.002\n# changed: steps was 2, is 3\n"
        "# changed: judge.py is another file than the run began with\n"
    )
    assert resume("steps=3") == 0
    assert "changed    steps was 2, is 3" in capsys.readouterr().out
    assert resume() == 2
    err = capsys.readouterr().err
    assert err == "mlxrl: out/run: the run has taken its 3 steps; steps=N with more of them goes on\n"
    assert states() == ["configured", "running", "cancelled", "resumed", "running", "succeeded"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("lora.rank=4", r"lora\.rank: the run has 8, got 4; a run goes on with its own model, adapters, data and"),
        ("seed=7", r"seed: the run has 0, got 7"),
        ('optimizer.name="sgd"', r"optimizer\.name: the run has \"adamw\", got \"sgd\""),
        ('data.train="other.jsonl"', r"data\.train: the run has"),
    ],
)
def test_what_would_be_another_run_is_refused(folder, capsys, change, words):
    assert train("steps=1", "data.evaluation=") in (0, 2)
    if not RUN.exists():
        assert train("steps=1") == 0
    shutil.copy(Path(ROOT) / "examples/arithmetic/test.jsonl", "other.jsonl")
    capsys.readouterr()
    before = (RUN / "metrics.jsonl").read_bytes()
    assert resume("steps=2", change) == 2
    assert re.fullmatch(rf"mlxrl: out/run: {words}.*\n", capsys.readouterr().err)
    assert (RUN / "metrics.jsonl").read_bytes() == before


def test_data_that_have_changed_are_refused(folder, capsys):
    lines = (Path(ROOT) / "examples/arithmetic/train.jsonl").read_text().splitlines()
    Path("few.jsonl").write_text("\n".join(lines[:9]) + "\n")
    assert train("steps=1", 'data.train="few.jsonl"') == 0
    Path("few.jsonl").write_text("\n".join(lines[1:10]) + "\n")
    capsys.readouterr()
    assert resume("steps=2") == 2
    assert capsys.readouterr().err == "mlxrl: out/run: data: few.jsonl has other examples than the run began with\n"


def test_rewards_that_have_changed_are_told_and_a_teacher_that_has_is_refused(folder, capsys):
    shutil.copytree(EXAMPLE, "teacher")
    assert train("steps=1") == 0
    capsys.readouterr()
    with Path("judge.py").open("a") as file:
        file.write("# other")
    assert main(["train", "--resume", str(RUN), "steps=2", "--dry-run"]) == 0
    assert "# changed: judge.py is another file than the run began with\n" in capsys.readouterr().out
    assert train('run.folder="out/taught"', "steps=1", "algorithm.name=opd", "teacher.id=teacher") == 0
    config = json.loads(Path("teacher/config.json").read_text())
    Path("teacher/config.json").write_text(json.dumps(config))
    capsys.readouterr()
    assert main(["train", "--resume", "out/taught", "steps=2"]) == 2
    wanted = "mlxrl: out/taught: teacher: config.json is another file than the run began with\n"
    assert capsys.readouterr().err == wanted


def test_a_model_and_data_that_were_moved_are_followed(folder, capsys):
    shutil.copytree(ROOT / "examples/arithmetic", "before")
    assert train("steps=1", 'model.id="before"', 'data.train="before/train.jsonl"') == 0
    os.rename("before", "after")
    capsys.readouterr()
    assert resume("steps=2", 'model.id="after"', 'data.train="after/train.jsonl"') == 0
    out = capsys.readouterr().out
    assert "changed    data.train was" in out
    assert "changed    model.id was" in out
    Path("other").mkdir()
    shutil.copytree("after", "other", dirs_exist_ok=True)
    Path("other/config.json").write_text(Path("after/config.json").read_text() + " ")
    assert resume("steps=3", 'model.id="other"', 'data.train="after/train.jsonl"') == 2
    assert "out/run: model.id: the run has" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(folder, capsys):
    assert train('run.folder="whole"') == 0
    assert train("steps=3") == 0
    (RUN / "checkpoints/step-000003/optimizer.safetensors").write_bytes(b"")
    capsys.readouterr()
    assert resume("steps=4") == 0
    out = capsys.readouterr().out
    assert "resumed    from step 2" in out
    assert "damaged    out/run/checkpoints/step-000003: optimizer.safetensors is damaged" in out
    assert [line["step"] for line in read_lines(RUN / "metrics.jsonl")] == [1, 2, 3, 4]
    found, wanted = result(RUN), result(folder / "whole")
    assert found["arrays"] == wanted["arrays"]
    assert found["samples"] == wanted["samples"]
    for path in (RUN / "checkpoints").iterdir():
        (path / "optimizer.safetensors").write_bytes(b"")
    before = (RUN / "metrics.jsonl").read_bytes()
    assert resume("steps=5") == 2
    assert "none of its checkpoints is whole" in capsys.readouterr().err
    assert (RUN / "metrics.jsonl").read_bytes() == before


def test_a_run_goes_on_over_what_kills_and_people_have_left(folder, capsys):
    """Half-written files are removed, records without a step left out, a damaged evaluation.json is made again."""
    assert train("steps=1") == 0
    evaluation = json.loads((RUN / "evaluation.json").read_text())
    with (RUN / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": "x"}\n{"step": null}\n[1]\n{"step": [1]}\n\xff\xfe')
    left = [RUN / ".metrics.123.jsonl", RUN / "checkpoints/.step-000002.77/state.json", RUN / ".notes", RUN / "notes"]
    for path in left:
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    assert main(["runs", "out"]) == 0
    assert main(["show", "out/run"]) == 0
    assert resume("steps=2", 'run.folder="out/new"') == 2
    wanted = "mlxrl: out/run: run.folder: got out/new; a run goes on in its own folder\n"
    assert capsys.readouterr().err.endswith(wanted)
    for steps, broken in enumerate(({"scores": None}, {"scores": {"before": {"rewards": [1]}}}, {"before": [1]}), 2):
        (RUN / "evaluation.json").write_text(json.dumps({**evaluation, **broken}))
        assert resume(f"steps={steps}") == 0
        assert json.loads((RUN / "evaluation.json").read_text())["before"] == evaluation["before"]
    assert [path.exists() for path in left] == [False, False, True, True]
    assert not (RUN / "checkpoints/.step-000002.77").exists()
    assert [line["step"] for line in read_lines(RUN / "metrics.jsonl")] == [1, 2, 3, 4]


HOLDER = """
import fcntl, sys
file = open(sys.argv[1], "ab")
fcntl.lockf(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def test_of_two_processes_on_a_folder_the_second_is_refused(folder, capsys):
    assert train("steps=1") == 0
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, RUN / "lock"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout
    assert holder.stdout.readline() == b"held\n"
    capsys.readouterr()
    try:
        assert resume("steps=2") == 2
        assert re.fullmatch(
            r"mlxrl: run\.folder: out/run is that of a run under way \(process \d+\); mlxrl cancel out/run ends it\n",
            capsys.readouterr().err,
        )
        assert main(["cancel", "out/run"]) == 0
        assert (RUN / "cancel").exists()
    finally:
        holder.communicate(b"")
    assert main(["cancel", "out/run"]) == 2
    assert "the run is succeeded; wanted one under way" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_closed_terminal_ends_a_run_as_a_signal_does(folder, number):
    done = child(on_step=f"signal.raise_signal({int(number)}) if calls == 2 else None")
    assert done.returncode == 130, done.stderr
    assert read_lines(RUN / "events.jsonl")[-1]["reason"] == number.name
    assert (RUN / "adapters/adapters.safetensors").exists()
    assert [path.name for path in (RUN / "checkpoints").iterdir()] == ["step-000001"]


def test_an_impatient_ctrl_c_loses_nothing(folder):
    done = child(on_step="[signal.raise_signal(signal.SIGINT) for _ in range(5)] if calls == 3 else None")
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    assert states()[-1] == "interrupted"
    assert (RUN / "adapters/adapters.safetensors").exists()
    assert resume() == 0
    assert [line["step"] for line in read_lines(RUN / "metrics.jsonl")] == [1, 2, 3, 4]


LOSSES = {
    "import shutil; shutil.rmtree('out/run') if calls == 3 else None": "out/run has gone",
    "import os; os.rename('out/run', 'out/moved') if calls == 3 else None": "out/run has gone",
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_folder_that_goes_away_is_one_line_and_the_adapter_is_saved_beside_it(folder, capsys, loss):
    assert train(on_step=loss) == 1
    captured = capsys.readouterr()
    assert captured.err == f"mlxrl: run.folder: {LOSSES[loss]}\n"
    assert captured.out.endswith(
        "adapter     out/run-rescued/adapters\n  go on with  mlxrl train --resume out/run-rescued\n"
    )
    assert (folder / "out/run-rescued/adapters/adapters.safetensors").exists()
    assert main(["train", "--resume", "out/run-rescued"]) == 0
    last = json.loads((folder / "out/run-rescued/manifest.json").read_text())
    assert last["state"] == "succeeded"


FULL = """import resource
    if calls == 5: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))"""


def test_a_disk_that_is_full_is_one_line_and_the_last_checkpoint_is_whole(folder):
    done = child(on_step=FULL)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("mlxrl: run.folder")]
    assert re.fullmatch(r"mlxrl: run\.folder: out/run cannot be written: .*", line)
    assert done.stdout.endswith("go on with  mlxrl train --resume out/run\n")
    assert RunFolder(RUN.absolute()).state() in ("failed", "interrupted")
    whole = train('run.folder="whole"')
    assert whole == 0
    assert resume() == 0
    assert result(RUN)["arrays"] == result(folder / "whole")["arrays"]


def test_runs_are_listed_and_shown(folder, capsys):
    assert train("steps=2") == 0
    fails = "if calls > 2: raise SystemExit('judge is down')"
    assert child("steps=2", 'run.folder="out/other"', on_step=fails).returncode == 2
    Path("out/strange").mkdir()
    Path("out/strange/manifest.json").write_text("[1]")
    capsys.readouterr()
    assert main(["runs", "out", "--json"]) == 0
    found = {Path(one["folder"]).name: one for one in json.loads(capsys.readouterr().out)}
    assert {name: (one["state"], one["step"], one["steps"]) for name, one in found.items()} == {
        "run": ("succeeded", 2, 2), "other": ("failed", 1, 2), "strange": ("interrupted", 0, 0),
    }  # fmt: skip
    assert found["run"]["held_out"][1] is not None
    assert main(["runs", "out"]) == 0
    assert re.search(r"^succeeded +arithmetic +grpo +2/2 .* out/run$", capsys.readouterr().out, re.M)
    assert main(["show", "out/other"]) == 0
    out = capsys.readouterr().out
    assert "judge is down" in out
    assert out.endswith("go on with  mlxrl train --resume out/other\n")
    assert main(["show", "nowhere"]) == 2
    assert capsys.readouterr().err == "mlxrl: nowhere: no config.toml; wanted the folder of a run\n"


@pytest.mark.parametrize("content", ["{", '{"model": 3, "data": 5, "versions": null, "state": "failed"}'])
def test_a_manifest_that_is_damaged_is_written_anew(folder, content):
    """Also one that a kill has kept from being written: the run goes on and hands its adapter over."""
    assert train("steps=1") == 0
    whole = json.loads((RUN / "manifest.json").read_text())
    (RUN / "manifest.json").write_text(content)
    assert resume("steps=2", "run.evaluate_every=0") == 0
    again = json.loads((RUN / "manifest.json").read_text())
    for name in ("seed", "versions", "device", "data", "model", "parent"):
        assert again[name] == whole[name]
    assert json.loads((RUN / "handoff.json").read_text())["steps"] == 2
