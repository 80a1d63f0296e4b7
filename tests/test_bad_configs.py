"""Configs that are refused, through the command: one line that names file and key, exit code 2, nothing left behind."""

import os
import subprocess
import sys

import pytest

from helpers import ROOT
from mlxrl.cli import main
from refusals import BASE, Accepted, refusing, strange

TEXT = {
    "[lora]\nrank = 1979-05-27": "run.toml: lora: rank: wanted a whole number of at least 1 and at most 65536, got",
    "[lora]\nrank = 1e3": "lora: rank: wanted a whole number of at least 1 and at most 65536, got 1000.0",
    "[lora]\nrank.a = 8": "lora: rank: wanted a whole number of at least 1 and at most 65536, got {\"a\": 8}",
    "[lora]\nscale = -inf": "lora: scale: wanted more than 0 and at most 1000000, got -Infinity; at 0 the adapter has",
    "[lora]\ndora = 1": "lora: dora: wanted true or false, got 1",
    "[lora]\nlayers = -1": "lora: layers: wanted a whole number of at least 1, got -1",
    "[lora]\nkeys = 'q_proj'": "lora: keys: wanted a list, each a text that is not empty, got \"q_proj\"",
    "[lora]\nkeys = [['q_proj']]": "lora: keys: wanted a list, each a text that is not empty, got [[\"q_proj\"]]",
    "[lora]\nkeys = {a = 1}": "lora: keys: wanted a list, each a text that is not empty, got {\"a\": 1}",
    "[[lora]]\nrank = 1": "run.toml: lora: wanted a table, got [{\"rank\": 1}]",
    "[lora]\nrank = 8\nrank = 9": "run.toml: not TOML: Cannot overwrite a value",
    "[lora]\nrank = 8\n[lora]\nscale = 1.0": "run.toml: not TOML: Cannot declare ('lora',) twice",
    "[lora]\n\"\" = 1": "run.toml: lora: unknown key ''; there are rank, scale",
    "[lora]\n\"a\\nb\" = 1": "run.toml: lora: unknown key 'a\\nb'",
    "[lora]\n\"\\u001b[31mx\" = 1": "run.toml: lora: unknown key '\\x1b[31mx'",
    f"[lora]\n{'x' * 100_000} = 1": "run.toml: lora: unknown key 'xxx",
    "[LORA]\nrank = 1": "run.toml: unknown table [LORA]; there are seed, steps, model, lora",
    "[sampling]\nmax_tokens = -5": "sampling: max_tokens: wanted a whole number of at least 1, got -5",
    "[sampling]\nmax_tokens = 2147483648": "max_tokens: wanted a whole number of at least 1, got 2147483648; at most 2",
    "[sampling]\nmax_tokens = 9223372036854775808": "max_tokens: wanted a whole number of 64 bits, got one of 65 bits",
    "[sampling]\nstop_strings = 'a'": "sampling: stop_strings: wanted a list, each a text that is not empty, got \"a\"",
    "[sampling]\nthinking = 'on'": "sampling: thinking: wanted true or false, got \"on\"",
    "[sampling]\nrepetition_penalty = 0": "sampling: repetition_penalty: wanted more than 0, got 0",
    "[sampling]\nfrequency_penalty = inf": "sampling: frequency_penalty: wanted a number, got Infinity",
    "[sampling]\ntemperature = 'hot'": "sampling: temperature: wanted at least 0, got \"hot\"",
    "[algorithm]\nname = ''": "algorithm: name: unknown algorithm ''; there are grpo,",
    "[algorithm]\nname = ['grpo']": "algorithm: name: wanted a text in quotes, got [\"grpo\"]",
    "[algorithm]\nname = 'mine.py:'": "algorithm: name: 'mine.py:': wanted 'module:name' or 'file.py:name'",
    f"[algorithm]\nname = '{'x' * 5000}:make'": "algorithm: name: 'xxx",
    "[algorithm]\nconvention = 'x'": "algorithm: grpo: convention: wanted one of openrlhf, slime, trl, verl, got \"x\"",
    "[algorithm]\nclip = [nan, 0.2]": "algorithm: grpo: clip: wanted a list of 2, at least 0 and at most 1, then at",
    "[[algorithm]]\nname = 'grpo'": "algorithm: wanted a table, got [{\"name\": \"grpo\"}]",
    "[algorithm]\nkl = {}": "algorithm.kl: missing key 'coefficient'",
    "[algorithm.kl]\ncoefficient = 1e400": "algorithm.kl: coefficient: wanted more than 0, got Infinity; leave the",
    "[algorithm.kll]\ncoefficient = 0.1": "algorithm: grpo: unknown key 'kll'; did you mean 'kl'?",
    "[optimizer]\nlearning_rate = '1e-5'": "optimizer: learning_rate: wanted more than 0, got \"1e-5\"; at 0 nothing",
    "[optimizer]\nlearning_rate = 1e39": "learning_rate: wanted more than 0, got 1e+39; a float32 is between",
    "[optimizer]\nschedule = 'cosin'": "schedule: wanted one of \"constant\", \"linear\", \"cosine\", got \"cosin\"",
    "[optimizer]\nbetas = [0.9, 'a']": "optimizer: betas: wanted a list of 2, each at least 0 and less than 1, got",
    "[evaluation]\nexamples = true": "evaluation: examples: wanted a whole number of at least 1, got true",
    "[run]\nfolder = 'run.toml'": "run.folder: run.toml is a file; wanted a folder",
    "[run]\nfolder = \"a\\u0000b\"": "run.folder: a\\x00b cannot be written: embedded null byte; choose another one",
    "[run]\nsinks = [{}]": "run: sinks: wanted a list, each a text that is not empty, got [{}]",
    "[run]\ncheckpoint_every = -1": "run: checkpoint_every: wanted a whole number of at least 0, got -1",
    "[run]\nevaluate_every = 1.0": "run: evaluate_every: wanted a whole number of at least 0, got 1.0",
    "[environment]\nmax_turns = 3": "environment: max_turns: has no effect without environment.factory",
    "[environment]\nfactory = 'os'": "environment: factory: 'os': wanted 'module:name' or 'file.py:name'",
    "[environment]\nfactory = 'os:sep'": "environment: wanted a class or a function that makes an environment, got",
    "[environment]\nfactory = 'json:JSONDecoder'\narguments = {a = 1}": "arguments: got an unexpected keyword arg",
    "[environment]\ntimeout = inf": "environment: timeout: wanted more than 0 and at most 1000000, got Infinity",
    "[teacher]\nthinking = true": "teacher: thinking: has no effect without a hint",
    "[memory]\nlimit = '8GB'": "memory: limit: wanted more than 0 and at most 1000000, got \"8GB\"",
    "[train]\nrecompute = 'yes'": "train: recompute: wanted true or false, got \"yes\"",
    "[train.x]\ny = 1": "train: unknown key 'x'; there are tokens_per_pass",
    "[steps]\nx = 1": "run.toml: not TOML: Cannot overwrite a value",
}  # fmt: skip

BYTES = {
    b"": "run.toml: missing key 'model'",
    b"\x00": "run.toml: not TOML: Invalid statement (at line 1, column 1)",
    BASE.encode() + b"\x00": "run.toml: not TOML: Invalid statement (at line ",
    BASE.encode("utf-16"): "run.toml: wanted TOML in UTF-8",
    BASE.encode() + b"# \xe9": "run.toml: wanted TOML in UTF-8",
    b"\xef\xbb\xbf\xef\xbb\xbf" + BASE.encode(): "run.toml: not TOML: Invalid statement (at line 1, column 1)",
    b'{"model": {"id": "x"}}': "run.toml: not TOML: Invalid statement (at line 1, column 1)",
    b"model:\n  id: x\n": "run.toml: not TOML: Expected '=' after a key",
    b"[model]\nid = org/model\n": "run.toml: not TOML: Invalid value (at line 2, column 6)",
    b"[model]\nid = 'x'\n[data]\n": "run.toml: data: missing key 'train'",
    b"[[model]]\nid = 'x'\n[data]\ntrain = 'good.jsonl'": 'run.toml: model: wanted a table, got [{"id": "x"}]',
    b"model.id = 'x'\n" + BASE.encode(): "run.toml: not TOML: Cannot declare ('model',) twice",
    b'x = "\\ud800"': "run.toml: not TOML: Escaped character is not a Unicode scalar value",
    b"a" * 5_000_000: "run.toml: not TOML: Expected '=' after a key in a key/value pair",
    b"a." * 100_000 + b"a = 1": "run.toml: not TOML: nested too deeply",
    b'x = {"a" . ' + b"a ." * 100_000 + b"a = 1}": "run.toml: not TOML: nested too deeply",
    b"[" * 100_000: "run.toml: not TOML: ",
}

OVERRIDES = {
    "": "command line: wanted key=value such as optimizer.learning_rate=2e-5, got ''",
    "a..b=1": "command line: wanted key=value such as optimizer.learning_rate=2e-5, got 'a..b=1'",
    "'lora'.rank=8": "command line: wanted key=value such as optimizer.learning_rate=2e-5, got \"'lora'.rank=8\"",
    "lora.rank==8": "command line: lora: rank: wanted a whole number of at least 1 and at most 65536, got \"=8\"",
    "lora.rank=８": "command line: lora: rank: wanted a whole number of at least 1 and at most 65536, got",
    "lora.rank={rank=8": "command line: lora.rank: '{rank=8' is not TOML (",
    "lora.rank=8\nsteps=3": "command line: lora: rank: wanted a whole number of at least 1 and at most 65536, got",
    "lora.rank.x=3": "command line: lora: rank: wanted a whole number of at least 1 and at most 65536, got {\"x\": 3}",
    "steps.x=3": "command line: steps: wanted a whole number of at least 1, got {\"x\": 3}",
    "steps=\x1b[31m": "command line: steps: '\\x1b[31m' is not TOML",
    "algorithm=dapo": "command line: algorithm: wanted a table, got \"dapo\"",
    "algorithm.clip.x=1": "command line: algorithm: grpo: clip: wanted a list of 2",
    "data.columns={answer=3}": "command line: data: columns: wanted a table, each a text that is not empty, got",
    "data.train=/dev/null": "/dev/null: wanted a .jsonl or .json file, a folder with train.jsonl, or hf:NAME",
    "model.adapter=.": "command line: model: adapter: ",
    "reward.functions=['math:sqrt']": "command line: reward: functions: reward 'sqrt': parameter 'x' cannot be",
    "reward.functions=['builtins:dict']": "command line: reward: functions: 'builtins:dict': wanted a function, got",
    f"reward.functions=['{'x' * 300}.py:f']": "command line: reward: functions: no file 'xxx",
    "reward.weights=[nan]": "command line: reward: weights: wanted a list, each a number, got [NaN]",
}  # fmt: skip


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    return refusing(tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize(("text", "words"), TEXT.items(), ids=range(len(TEXT)))
def test_a_config_is_refused(refused, text, words):
    assert words in refused(config=f"{BASE}{text}\n".encode())


@pytest.mark.parametrize(("content", "words"), BYTES.items(), ids=range(len(BYTES)))
def test_a_file_that_is_no_config_is_refused(refused, content, words):
    assert words in refused(config=content)


@pytest.mark.parametrize(("override", "words"), OVERRIDES.items(), ids=range(len(OVERRIDES)))
def test_an_override_is_refused(refused, override, words):
    assert words in refused(override)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("missing", "run.toml: no such file; wanted a config in TOML"),
        ("a dangling link", "run.toml: no such file; wanted a config in TOML"),
        ("a loop of links", "run.toml: cannot be read: Too many levels of symbolic links"),
        ("a folder", "run.toml: cannot be read: Is a directory"),
        ("unreadable", "run.toml: cannot be read: Permission denied"),
    ],
)
def test_a_path_that_is_no_config_is_refused(refused, tmp_path, kind, words):
    strange(tmp_path / "run.toml", kind, BASE)
    assert words in refused(config=None)


@pytest.mark.parametrize("command", [["train"], ["train", "--dry-run"], ["eval"], ["plan"]])
def test_every_command_refuses_alike(refused, command):
    assert "command line: lora: rank: wanted" in refused("lora.rank=0", command=command)


def test_a_config_that_is_right_is_accepted(refused, tmp_path):
    """What the others are changed from."""
    (tmp_path / "run.toml").write_text(BASE)
    with pytest.raises(Accepted):
        main(["train", "--config", "run.toml"])


@pytest.mark.parametrize("config", [BASE.encode() + b"[lora]\nrank = 0\n", b"\xff", b"[" * 100_000])
def test_a_process_ends_with_a_line(refused, tmp_path, config):
    (tmp_path / "run.toml").write_bytes(config)
    command = [sys.executable, "-m", "mlxrl", "train", "--config", "run.toml"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("mlxrl: run.toml: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good.jsonl", "run.toml"]
