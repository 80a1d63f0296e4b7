"""Runs with environments through the command line, on the model in examples/."""

from __future__ import annotations

import json
import tomllib

import pytest

from helpers import EVALUATED
from mlxrl.cli import main
from mlxrl.files import read_lines

CONFIG = f"""
steps = 2
{EVALUATED}[environment]
factory = "worlds.py:Sum"
arguments = {{ tries = 2 }}
max_turns = 3
timeout = 5
invalid_penalty = 0.25
[sampling]
max_tokens = 16
[rollout]
tasks_per_step = 3
group_size = 4
[optimizer]
learning_rate = 1e-3
[evaluation]
examples = 8
[run]
folder = "out/run"
samples_every = 1
"""

WORLDS = """
from mlxrl import Feedback
from mlxrl.rewards import last_number


class Sum:
    def __init__(self, tries: int, text: str = "no"):
        self.tries, self.text = tries, text

    def reset(self, task):
        if self.text == "raise":
            raise KeyError("no table")
        self.answer, self.left = last_number(task.columns["answer"]), self.tries
        return task.prompt

    def step(self, reply):
        right, self.left = last_number(reply) == self.answer, self.left - 1
        if self.text == "sometimes" and not right:
            raise ValueError("cannot\\x1b[31m go on")
        return Feedback(self.text, float(right), right or not self.left, self.left, last_number(reply) is None)


class Other:
    pass


class Wanting(Sum):
    def __init__(self, size, tries):
        pass


nothing = 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(CONFIG)
    (tmp_path / "worlds.py").write_text(WORLDS)
    return tmp_path


def test_a_run_with_an_environment(folder, capsys):
    assert main(["train", "--config", "run.toml"]) == 0
    out, run = capsys.readouterr().out, folder / "out/run"
    assert "environment  worlds.py:Sum(tries=2), at most 3 turns" in out
    assert "3 prompts x 4 completions = 12 completions of at most 16 tokens a turn, 1 update" in out
    lines, samples = read_lines(run / "metrics.jsonl"), read_lines(run / "samples.jsonl")
    assert all(1 <= line["episodes/turns"] <= 2 and line["episodes/errors"] == 0 for line in lines)
    assert all(line["stops/done"] == 1.0 for line in lines)
    for sample in samples:
        turns = sample["turns"]
        assert turns[0]["observation"] == sample["prompt"]
        assert [turn["observation"] for turn in turns[1:]] == ["no"] * (len(turns) - 1)
        assert sample["completion"] == "\n".join(turn["action"] for turn in turns)
        assert sample["reward"] == sum(turn["reward"] for turn in turns) == sample["rewards"]["environment"]
    assert any(len(sample["turns"]) == 2 for sample in samples)
    assert " [no] " in out
    evaluation = json.loads((run / "evaluation.json").read_text())
    assert main(["eval", "--config", str(run / "config.toml"), "--adapter", "out/run/adapters"]) == 0
    assert f"accuracy {evaluation['after']['accuracy']:.4f}" in capsys.readouterr().out
    known = tomllib.loads((run / "config.toml").read_text())["environment"]
    assert known == {
        "factory": f"{folder}/worlds.py:Sum", "arguments": {"tries": 2}, "max_turns": 3, "timeout": 5.0,
        "invalid_penalty": 0.25,
    }  # fmt: skip


def test_reward_functions_stand_beside_an_environment(folder):
    settings = ['reward.functions=["mlxrl.rewards:last_number_matches"]', "reward.weights=[0.5]", "steps=1"]
    assert main(["train", "--config", "run.toml", *settings]) == 0
    for sample in read_lines(folder / "out/run/samples.jsonl"):
        parts = sample["rewards"]
        assert sample["reward"] == parts["environment"] + 0.5 * parts["last_number_matches"]


def test_environments_that_fail_are_shown_once_a_step(folder, capsys):
    assert main(["train", "--config", "run.toml", "environment.arguments.text=sometimes"]) == 0
    out, lines = capsys.readouterr().out, read_lines(folder / "out/run/metrics.jsonl")
    failed = [line for line in lines if line["episodes/errors"]]
    assert failed
    assert out.count("episodes ended because their environment failed, the first: step: ValueError: cannot") == len(
        failed
    )
    assert "\x1b[31m" not in out


@pytest.mark.parametrize(
    ("setting", "piece"),
    [
        (
            "factory=worlds.py:Nothing",
            "environment: factory: 'worlds.py:Nothing': worlds.py has no 'Nothing'; did",
        ),
        ("factory=nowhere.py:Sum", "environment: factory: no file 'nowhere.py' beside the config"),
        ("factory=worlds.py", "environment: factory: 'worlds.py': wanted 'module:name' or 'file.py:name'"),
        ("factory=worlds.py:nothing", "wanted a class or a function that makes an environment, got 3"),
        ("factory=bad.py:Sum", "bad.py:Sum': cannot be imported: ZeroDivisionError: division by zero"),
        ("arguments={trys=2}", "arguments: got an unexpected keyword argument 'trys'; did you mean 'tries'?"),
        ("arguments={tries=2, colour=1}", "unexpected keyword argument 'colour'; it takes tries, text"),
        ("arguments.text=raise", "environment: failed in each of 8 episodes: reset: KeyError: 'no table'"),
        ("max_turns=0", "environment: max_turns: wanted a whole number of at least 1, got 0"),
        ("max_turn=3", "environment: unknown key 'max_turn'; did you mean 'max_turns'?"),
        ("factory=worlds.py:Other", "command line: environment: arguments: got an unexpected keyword argument 'tries'"),
        ("arguments.trys=2", "command line: environment: arguments: got an unexpected keyword argument 'trys'; did"),
        ("factory=worlds.py:Wanting", "command line: environment: arguments: missing a required argument: 'size'"),
        ("timeout=1e7", "environment: timeout: wanted more than 0 and at most 1000000, got"),
        ("invalid_penalty=1e308", "environment: invalid_penalty: wanted at least 0 and at most 1e+30, got"),
    ],
)
def test_faults_of_an_environment_are_one_line(folder, capsys, setting, piece):
    (folder / "bad.py").write_text("1 / 0\n")
    for command in ("train", "eval"):
        assert main([command, "--config", "run.toml", f"environment.{setting}"]) == 2
        err = capsys.readouterr().err
        assert piece in err.replace(f"{folder}/", "")
        assert err.count("\n") == 1


def test_settings_of_an_environment_need_one(folder, capsys):
    lines = CONFIG.splitlines()
    (folder / "run.toml").write_text("\n".join(line for line in lines if not line.startswith(("factory", "arguments"))))
    assert main(["train", "--config", "run.toml"]) == 2
    assert "environment: max_turns: has no effect without environment.factory" in capsys.readouterr().err
    (folder / "run.toml").write_text(CONFIG)
    assert main(["train", "--config", "run.toml", "reward.overlong_buffer=4"]) == 2
    assert "reward: overlong_buffer: wanted 0 with an environment" in capsys.readouterr().err
