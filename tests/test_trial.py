"""A dry run builds and calls everything once."""

from types import SimpleNamespace
from typing import Any

import pytest

from helpers import EXAMPLE, TRAINED
from mlxrl.cli import main

CONFIG = f"""
steps = 1
{TRAINED}[reward]
functions = ["mine.py:length"]
[train]
tokens_per_pass = 512
"""
MINE = """
import json
from mlxrl.tools import Tools

def length(completions, **_): return [float(len(c)) for c in completions]
def undefined(completions, **_): return [gold for _ in completions]
def numbers_only(completions, **_): return [float(int(c)) for c in completions]
def json_only(completions, **_): return [json.loads(c)["x"] for c in completions]
def not_a_list(completions, **_): return 1.0
def of_one(completions, **_): return [1.0]

class World:
    def __init__(self, fails=""): self.fails = fails
    def reset(self, task):
        open("log", "a").write(f"reset {task.columns['answer'] != ''} ")
        if self.fails: raise RuntimeError(self.fails)
        return "begin"
    def step(self, reply): raise AssertionError
    def close(self): open("log", "a").write("close ")

def add(a: int, b: int) -> int:
    '''Add.

    Args:
        a: one.
        b: the other.
    '''
    return a + b

def tools(): return Tools([add])
tools_of = Tools([add])
of_no_format = Tools([add], parser="json_tools")
"""


@pytest.fixture
def dry(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(CONFIG)
    (tmp_path / "mine.py").write_text(MINE)

    def run(*arguments):
        code = main(["train", "--config", "run.toml", "--dry-run", *arguments])
        assert not (tmp_path / "runs").exists()
        out, err = capsys.readouterr()
        assert err.count("\n") == (code > 0)
        return code, out + err

    return run


def test_a_reward_is_called_with_an_example(dry):
    code, out = dry('reward.functions=["mine.py:length", "mine.py:numbers_only"]', "reward.retry_each=true")
    assert code == 0
    assert '# tried: reward length gives 16.000 for "The answer is 1."' in out
    assert '# tried: reward numbers_only gives - for "The answer is 1.",' in out


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "undefined",
            "reward 'undefined' raised for each of 3 completions: NameError: name 'gold' is not defined "
            "(mine.py, line 6); reward.retry_each = true calls it again for each by itself",
        ),
        ("not_a_list", "reward 'not_a_list': wanted a list of 3 numbers, got 1.0"),
        ("of_one", "reward 'of_one': wanted 3 numbers, one per completion, got 1"),
    ],
)
def test_a_reward_that_cannot_be_called_is_told(dry, name, message):
    code, out = dry(f'reward.functions=["mine.py:{name}"]')
    assert (code, out) == (2, f"mlxrl: a trial with made-up completions: {message}\n")


def test_an_environment_is_built_reset_and_closed_once(dry, monkeypatch, tmp_path):
    monkeypatch.setattr("mlxrl.cli.plan.OPENED", 0)
    code, out = dry("environment.factory=mine.py:World")
    assert code == 0
    assert '# tried: the environment begins with "begin"' in out
    assert (tmp_path / "log").read_text() == "reset True close "
    assert dry("environment.factory=mine.py:World", 'environment.arguments={fails = "no maze"}') == (
        2, "mlxrl: environment: reset: RuntimeError: no maze (mine.py, line 16)\n",
    )  # fmt: skip


def test_tools_are_held_against_the_template_and_the_format_of_calls(dry):
    assert dry("environment.factory=mine.py:tools_of")[0] == 2
    code, out = dry("environment.factory=mine.py:of_no_format")
    assert code == 2
    assert "tools: the chat template of this model does not describe tools" in out


def test_a_model_that_is_not_here_and_cannot_be_fetched_is_told(dry, monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import RepositoryNotFoundError

    def asked(answer):
        def ask(url, **options):
            assert url == "https://huggingface.co/nobody/nothing/resolve/main/config.json"
            if answer is not None:
                raise answer

        monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", ask)

    response: Any = SimpleNamespace(status_code=401, headers={}, request=None)
    asked(RepositoryNotFoundError("401 Client Error.\nNone", response=response))
    why = "is not on this machine and cannot be fetched"
    code, out = dry("model.id=nobody/nothing")
    assert code == 2
    assert f"mlxrl: model: id: nobody/nothing {why}: RepositoryNotFoundError: 401 Client Error. None" in out
    code, out = dry("algorithm.name=opd", "teacher.id=nobody/nothing", "reward.functions=[]")
    assert (code, f"mlxrl: teacher: id: nobody/nothing {why}" in out) == (2, True)
    code, out = dry("model.id=foo")
    assert (code, "no model foo here; wanted a Hugging Face id as ORG/NAME" in out) == (2, True)
    asked(OSError("no network"))
    code, out = dry("model.id=nobody/nothing")
    assert (code, f"# tried: model nobody/nothing {why}: OSError: no network" in out) == (0, True)
    asked(None)
    code, out = dry("model.id=nobody/nothing")
    assert (code, "# tried: model nobody/nothing is not on this machine, and can be fetched" in out) == (0, True)
    assert "# adapted: known once nobody/nothing is on this machine" in out


def test_a_teacher_of_another_vocabulary_and_a_wrong_adapter_are_told(dry, tmp_path):
    (tmp_path / "adapter").mkdir()
    taught = ("algorithm.name=opd", f"teacher.id={EXAMPLE}", "teacher.adapter=adapter", "reward.functions=[]")
    code, out = dry(*taught)
    assert (code, "no adapter_config.json" in out) == (2, True)
