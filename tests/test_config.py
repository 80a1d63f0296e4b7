"""Strict configs: what is read, what is refused and in which words."""

import ast
import dataclasses
import math
from pathlib import Path

import pytest

from configs import config_folder, read, refused
from helpers import MINIMAL, ROOT
from mlxrl import config
from mlxrl.config import ConfigError, tables
from mlxrl.settings import LoRA, Optimizer, Rollout, Sampling


@pytest.fixture
def folder(tmp_path, monkeypatch):
    return config_folder(tmp_path, monkeypatch)


def test_a_minimal_config_has_defaults_and_absolute_paths(folder):
    got = read(folder)
    assert (got.seed, got.steps, got.model.id, got.model.dtype) == (0, 100, "org/model", None)
    assert (got.data.train, got.data.evaluation) == (f"{folder}/train.jsonl", f"{folder}/test.jsonl")
    assert (got.rollout.group_size, got.optimizer.max_grad_norm, got.algorithm) == (8, 1.0, {"name": "grpo"})
    assert got.lora.keys is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        got.steps = 3  # pyright: ignore


def test_a_table_is_the_value_that_the_library_takes(folder):
    """TOML and Python have the same names: a table is the class of its name."""
    got = read(folder, "lora.rank=4", "sampling.top_p=0.5", "rollout.max_rows=7", "optimizer.betas=[0.5, 0.75]")
    assert (got.lora, got.sampling) == (LoRA(rank=4), Sampling(top_p=0.5))
    assert (got.rollout, got.optimizer) == (Rollout(max_rows=7), Optimizer(betas=(0.5, 0.75)))


def test_overrides_are_toml_and_bare_texts(folder):
    got = read(
        folder,
        "optimizer.learning_rate=2e-5",
        "sampling.top_p=1",
        'run.folder="a = b"',
        "model.id=other/name",
        "model.dtype=bfloat16",
        'lora.keys=["self_attn.q_proj"]',
        "data.columns.answer=answer",
        "sampling.thinking=false",
        "optimizer.betas=[0.9, 0.95]",
        "optimizer.max_grad_norm=inf",
        "algorithm.clip=[0.2, 0.28]",
        text="[optimizer]\nlearning_rate = 1\nwarmup_steps = 3\n",
    )
    assert (got.optimizer.learning_rate, got.optimizer.warmup_steps) == (2e-5, 3)
    assert got.sampling.top_p == 1.0
    assert type(got.sampling.top_p) is float
    assert (got.run.folder, got.model.id, got.model.dtype) == (f"{Path.cwd()}/a = b", "other/name", "bfloat16")
    assert got.lora.keys == ("self_attn.q_proj",)
    assert (got.data.columns, got.sampling.thinking) == ({"answer": "answer"}, False)
    assert got.optimizer.betas == (0.9, 0.95)
    assert got.optimizer.max_grad_norm == math.inf
    assert got.algorithm == {"name": "grpo", "clip": [0.2, 0.28]}


REFUSED_FILES = {
    "[sampling]\ntemprature = 1": "run.toml: sampling: unknown key 'temprature'; did you mean 'temperature'?",
    "[rolout]\ntop_p = 1": "run.toml: unknown table [rolout]; did you mean 'rollout'?",
    "[run]\nxyz = 1": "run.toml: run: unknown key 'xyz'; there are folder, checkpoint_every, checkpoint_minutes",
    "[rollout]\nnum_top = 1": "run.toml: rollout: unknown key 'num_top'; did you mean 'sampling.num_top'?",
    "[lora]\nrank = true": "run.toml: lora: rank: wanted a whole number of at least 1 and at most 65536, got true",
    "[lora]\nrank = 8.0": "run.toml: lora: rank: wanted a whole number of at least 1 and at most 65536, got 8.0",
    "[lora]\nrank = 0": "run.toml: lora: rank: wanted a whole number of at least 1 and at most 65536, got 0",
    "[lora]\nscale = 0": "run.toml: lora: scale: wanted more than 0 and at most 1000000, got 0; at 0 the",
    "[lora]\ndropout = 1": "run.toml: lora: dropout: wanted at least 0 and less than 1, got 1",
    "[lora]\nkeys = []": "run.toml: lora: keys: wanted at least one name, got none; leave it out",
    "[lora]\nkeys = [1]": "run.toml: lora: keys: wanted a list, each a text that is not empty, got [1]",
    "[sampling]\ntop_p = true": "run.toml: sampling: top_p: wanted more than 0 and at most 1, got true",
    "[sampling]\ntop_p = 0": "run.toml: sampling: top_p: wanted more than 0 and at most 1, got 0",
    "[sampling]\nmin_p = nan": "run.toml: sampling: min_p: wanted at least 0 and at most 1, got NaN",
    "[sampling]\ntemperature = inf": "run.toml: sampling: temperature: wanted at least 0, got Infinity",
    "[sampling]\nmin_tokens = 300": "run.toml: sampling: min_tokens: wanted at most max_tokens, 256, got 300",
    "[sampling]\npenalty_context = 5": "run.toml: sampling: penalty_context: has no effect without a penalty",
    "[sampling]\nstop_strings = ['']": "stop_strings: wanted a list, each a text that is not empty, got [\"\"]",
    "[optimizer]\nlearning_rate = 0": "run.toml: optimizer: learning_rate: wanted more than 0, got 0; at 0 nothing is",
    "[optimizer]\nmax_grad_norm = 0": "wanted more than 0, got 0; at 0 nothing is learned; inf switches clipping off",
    "[optimizer]\nname = 'adamv'": """name: wanted one of "adamw", "adam", "sgd", "lion", got "adamv"; did you mean""",
    "[optimizer]\nbetas = [0.9]": "betas: wanted a list of 2, each at least 0 and less than 1, got [0.9]",
    "[optimizer]\nbetas = [0.9, 1]": "betas: wanted a list of 2, each at least 0 and less than 1, got [0.9, 1]",
    "[optimizer]\nname = 'sgd'\nbetas = [0.9, 0.9]": "optimizer: betas: sgd has none; leave it out",
    "[optimizer]\nname = 'adam'\nweight_decay = 0.1": "optimizer: weight_decay: adam has none; wanted name = 'adamw'",
    "[algorithm]\nname = 3": "run.toml: algorithm: name: wanted a text in quotes, got 3",
    "[evaluation]\nsuccess = nan": "run.toml: evaluation: success: wanted a number, got NaN",
    "[train]\nupdates_per_rollout = 0": "train: updates_per_rollout: wanted a whole number of at least 1, got 0",
    "[rollout]\nresampling_rounds = -1": "rollout: resampling_rounds: wanted a whole number of at least 0, got -1",
    "[lora": "run.toml: not TOML: ",
    f"[evaluation]\nexamples = {'9' * 5000}": "run.toml: evaluation: examples: wanted a whole number of 64 bits, got",
    f"[algorithm.a{'.a' * 3000}]\nb = 1": "run.toml: algorithm.a.a: nested too deeply",
    f"[algorithm]\nb = {'[' * 5000}{']' * 5000}": "run.toml: not TOML: nested too deeply",
}  # fmt: skip


@pytest.mark.parametrize(("text", "message"), REFUSED_FILES.items())
def test_a_file_is_refused_in_one_line(folder, text, message):
    assert message in refused(folder, text=text)


REFUSED_OVERRIDES = {
    "sampling.temprature=1": "command line: sampling: unknown key 'temprature'; did you mean 'temperature'?",
    "rolout.top_p=1": "command line: unknown table [rolout]; did you mean 'rollout'?",
    "learning_rate=1": "command line: unknown key 'learning_rate'; did you mean 'optimizer.learning_rate'?",
    "seed=true": "command line: seed: wanted a whole number of at least 0 and at most 4294967295, got true",
    f"steps={'9' * 5000}": "command line: steps: wanted a whole number of 64 bits, got one of 16611 bits",
    "algorithm.clip=[0, -1e2, 9223372036854775808]": "command line: algorithm: clip: entry 3: wanted a whole",
    f"data.columns={'{a=' * 30}1{'}' * 30}": "command line: data.columns.a: nested too deeply",
    f"data{'.a' * 3000}=1": "command line: data.a.a: nested too deeply",
    f"lora.keys={'[' * 9000}": "command line: lora.keys: '[[[[",
    "lora.rank=65537": "lora: rank: wanted a whole number of at least 1 and at most 65536, got 65537",
    "lora.scale=1e300": "lora: scale: wanted more than 0 and at most 1000000, got 1e+300",
    "optimizer.learning_rate=1e-300": "learning_rate: wanted more than 0, got 1e-300; a float32 is between",
    "sampling.temperature=1e-30": "temperature: wanted at least 1e-06, or 0 for greedy decoding, got 1e-30",
    "evaluation.temperature=1e-30": "evaluation: temperature: wanted at least 1e-06, or 0 for greedy decoding",
    "rollout.group_size=2147483647": "rollout: group_size: wanted at most 65,536, got 2,147,483,647",
    "rollout={tasks_per_step=100, group_size=20000}": "group_size: wanted at most 10000, which make 1,000,000 compl",
    'model.id="~nobody/x"': "command line: model: id: no folder or file '~nobody/x'",
    'data.train="~nobody/x.jsonl"': "command line: data: train: no file '~nobody/x.jsonl'",
    'model.id="a\\u0000b"': "command line: model: id: no folder or file",
    'reward.functions=["a\\u0000.py:f"]': "command line: reward: functions: no file",
    "seed=4294967296": "seed: wanted a whole number of at least 0 and at most 4294967295, got 4294967296",
    "steps=0": "command line: steps: wanted a whole number of at least 1, got 0",
    "steps=ten": """command line: steps: wanted a whole number of at least 1, got "ten\"""",
    "steps": "command line: wanted key=value such as optimizer.learning_rate=2e-5, got 'steps'",
    "model=x": """command line: model: wanted a table, got "x\"""",
    "model.id=": "command line: model.id: '' is not TOML",
    'model.id=""': "command line: model: id: wanted a text that is not empty",
    "model.id=./none": "command line: model: id: no folder or file './none' beside the config or in the current dir",
    "model.id=a/b.gguf": "command line: model: id: no folder or file 'a/b.gguf'",
    "model.dtype=float64": """model: dtype: wanted one of "float32", "bfloat16", "float16", got "float64\"""",
    "lora.keys=[q_proj]": "command line: lora.keys: '[q_proj]' is not TOML",
    "data.train=none.jsonl": "command line: data: train: no file 'none.jsonl' beside the config or in the current",
    "reward.weights=[1, 2]": "command line: reward: weights: wanted 1, one per function, got 2",
    "reward.weights=[0]": "command line: reward: weights: wanted numbers that are not all 0, got [0.0]",
    "reward.overlong_factor=2": "command line: reward: overlong_factor: has no effect without overlong_buffer",
    "reward.overlong_cap=2": "command line: reward: overlong_cap: has no effect without overlong_buffer",
    "reward.length_penalty=-1": "command line: reward: length_penalty: wanted at least 0, got -1",
    'reward.functions=["nowhere.py:f"]': "command line: reward: functions: no file 'nowhere.py' beside the config",
    'reward.functions=["a:f", "a:f"]': "command line: reward: functions: 'a:f' stands there twice; use weights",
    'run.sinks=["nowhere.py:f"]': "command line: run: sinks: no file 'nowhere.py' beside the config",
    "algorithm.name=none.py:make": "command line: algorithm: name: no file 'none.py' beside the config",
    "teacher.dtype=float32": "teacher: dtype: has no effect, because teacher.id names no model to be loaded",
    "teacher.adapter=.": "teacher: adapter: has no effect, because teacher.id names no model to be loaded",
    "teacher.id=./none": "command line: teacher: id: no folder or file './none' beside the config",
}


@pytest.mark.parametrize(("override", "message"), REFUSED_OVERRIDES.items())
def test_an_override_is_refused_in_one_line(folder, override, message):
    assert message in refused(folder, override)


RENAMED = {
    "rollout.max_tokens=9": "command line: rollout: max_tokens: is now sampling.max_tokens",
    "rollout.temperature=1": "command line: rollout: temperature: is now sampling.temperature",
    "rollout.max_draws=2": "command line: rollout: max_draws: is now rollout.resampling_rounds, one less",
    "data.thinking=true": "command line: data: thinking: is now sampling.thinking",
    "echo.weight=0.1": "echo: is now algorithm.echo",
}


@pytest.mark.parametrize(("override", "message"), RENAMED.items())
def test_a_key_that_was_renamed_names_its_new_place(folder, override, message):
    assert message in refused(folder, override)


def test_resampling_needs_two_completions(folder):
    one = ("algorithm.name=reinforce_pp", "rollout.group_size=1", "rollout.resampling_rounds=1")
    why = "rollout: resampling_rounds: wanted 0, because a group of 1 completion has no two different rewards"
    assert why in refused(folder, *one)


def test_a_file_with_a_byte_order_mark_is_read(folder):
    (folder / "run.toml").write_text("\ufeff" + MINIMAL, encoding="utf-8")
    assert config.read(folder / "run.toml")[0] == read(folder)


def test_files_that_are_none(folder):
    assert refused(folder, toml="") == "run.toml: missing key 'model'"
    assert refused(folder, toml="[model]\n[data]\n[reward]") == "run.toml: model: missing key 'id'"
    with pytest.raises(ConfigError, match=r"none\.toml: no such file; wanted a config in TOML"):
        config.read(folder / "none.toml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        config.read(folder)
    (folder / "run.toml").write_bytes(b"a = '\xff'")
    with pytest.raises(ConfigError, match="wanted TOML in UTF-8"):
        config.read(folder / "run.toml")


def test_a_path_beside_the_config_comes_before_one_in_the_current_directory(folder):
    for place in (folder, Path.cwd()):
        (place / "weights").mkdir()
        (place / "train.jsonl").write_text('{"question": "1", "answer": "4"}\n')
    assert read(folder, "model.id=weights").model.id == f"{folder}/weights"
    (folder / "weights").rmdir()
    (folder / "train.jsonl").unlink()
    got = read(folder, "model.id=weights", "run.folder=out")
    assert got.model.id == f"{Path.cwd()}/weights"
    assert got.data.train == f"{Path.cwd()}/train.jsonl"
    assert got.run.folder == f"{Path.cwd()}/out"


def test_files_of_code_beside_the_config_are_made_absolute(folder):
    (folder / "mine.py").write_text("def thing(): ...\n")
    got = read(
        folder, 'reward.functions=["mine.py:thing"]', "environment.factory=mine.py:thing",
        "algorithm.name=mine.py:thing", 'run.sinks=["mine.py:thing"]',
    )  # fmt: skip
    there = f"{folder}/mine.py:thing"
    assert (got.reward.functions, got.run.sinks) == ((there,), (there,))
    assert got.environment.factory == got.algorithm["name"] == there


def test_short_lists_stand_on_one_line_and_long_ones_do_not(folder):
    keys = [f"self_attn.{letter * 9}_proj" for letter in "abcdef"]
    text = config.text(read(folder, f"lora.keys={keys}"), {"name": "grpo", "log_ratio_clamp": (-20.0, 20.0)})
    assert "log_ratio_clamp = [-20.0, 20.0]\n" in text
    assert 'keys = [\n    "self_attn.aaaaaaaaa_proj",\n' in text


def test_every_setting_is_read_somewhere():
    """An attribute of its name stands in the package, outside of where settings are declared and read."""
    apart = {"settings.py", "config.py", "checked.py"}
    read_names = {
        node.attr
        for path in (ROOT / "mlxrl").rglob("*.py")
        if path.name not in apart
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
    }
    keys = {field.name for table in tables().values() for field in dataclasses.fields(table)}
    assert keys - read_names == set()
