"""Strict configs: what is read, what is refused and in which words, and back to TOML."""

import ast
import dataclasses
import json
import math
import tomllib
from pathlib import Path

import pytest

from helpers import MAZE, MINIMAL
from mlxrl import algo, config
from mlxrl.algo.conventions import CONVENTIONS
from mlxrl.algo.table import RECIPES
from mlxrl.config import ConfigError
from mlxrl.config.tables import Config

PACKAGE = Path(config.__file__).parents[1]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a config and its data; the current directory is another one."""
    place, here = tmp_path / "conf", tmp_path / "here"
    place.mkdir()
    here.mkdir()
    (place / "run.toml").write_text(MINIMAL)
    for name in ("train", "test"):
        (place / f"{name}.jsonl").write_text(json.dumps({"question": name, "answer": "4"}) + "\n")
    monkeypatch.chdir(here)
    return place


def read(folder, *overrides, text=""):
    path = folder / "run.toml"
    path.write_text(MINIMAL + text)
    return config.read(path, overrides)


def refused(folder, *overrides, text="", toml=None):
    """The message of a refusal, with the folder left out."""
    path = folder / "run.toml"
    path.write_text(MINIMAL + text if toml is None else toml)
    with pytest.raises(ConfigError) as caught:
        config.read(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(f"{folder}/", "")


def test_a_minimal_config_has_defaults_and_absolute_paths(folder):
    got = read(folder)
    assert (got.seed, got.steps, got.model.id, got.model.dtype) == (0, 100, "org/model", None)
    assert (got.data.train, got.data.evaluation) == (f"{folder}/train.jsonl", f"{folder}/test.jsonl")
    assert (got.rollout.group_size, got.optimizer.max_grad_norm, got.algorithm.name) == (8, 1.0, "grpo")
    assert got.lora.keys is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        got.steps = 3  # pyright: ignore


def test_overrides_are_toml_and_bare_texts(folder):
    got = read(
        folder,
        "optimizer.learning_rate=2e-5",
        "rollout.top_p=1",
        'run.folder="a = b"',
        "model.id=other/name",
        "model.dtype=bfloat16",
        'lora.keys=["self_attn.q_proj"]',
        "data.columns.answer=answer",
        "data.thinking=false",
        "optimizer.betas=[0.9, 0.95]",
        "optimizer.max_grad_norm=inf",
        "algorithm.clip=[0.2, 0.28]",
        text="[optimizer]\nlearning_rate = 1\nwarmup_steps = 3\n",
    )
    assert (got.optimizer.learning_rate, got.optimizer.warmup_steps) == (2e-5, 3)
    assert got.rollout.top_p == 1.0
    assert type(got.rollout.top_p) is float
    assert (got.run.folder, got.model.id, got.model.dtype) == ("a = b", "other/name", "bfloat16")
    assert got.lora.keys == ("self_attn.q_proj",)
    assert (got.data.columns, got.data.thinking) == ({"answer": "answer"}, False)
    assert got.optimizer.betas == (0.9, 0.95)
    assert got.optimizer.max_grad_norm == math.inf
    assert config.algorithm(got) == algo.grpo(clip=(0.2, 0.28))


REFUSED_FILES = {
    "[rollout]\ntemprature = 1": "run.toml: rollout: unknown key 'temprature'; did you mean 'temperature'?",
    "[rolout]\ntop_p = 1": "run.toml: unknown table [rolout]; did you mean 'rollout'?",
    "[run]\nxyz = 1": "run.toml: run: unknown key 'xyz'; there are folder, checkpoint_every, evaluate_every",
    "[lora]\nrank = true": "run.toml: lora: rank: wanted a whole number, got true",
    "[lora]\nrank = 8.0": "run.toml: lora: rank: wanted a whole number, got 8.0",
    "[lora]\nrank = 0": "run.toml: lora: rank: wanted at least 1, got 0",
    "[lora]\nscale = 0": "run.toml: lora: scale: wanted more than 0, got 0; at 0 the adapter has no effect",
    "[lora]\ndropout = 1": "run.toml: lora: dropout: wanted at least 0 and less than 1, got 1",
    "[lora]\nkeys = []": "run.toml: lora: keys: wanted at least one name, got none; leave it out",
    "[lora]\nkeys = [1]": "run.toml: lora: keys: wanted a text in quotes, got [1]",
    "[rollout]\ntop_p = true": "run.toml: rollout: top_p: wanted a number, got true",
    "[rollout]\ntop_p = 0": "run.toml: rollout: top_p: wanted more than 0 and at most 1, got 0",
    "[rollout]\nmin_p = nan": "run.toml: rollout: min_p: wanted at least 0 and at most 1, got NaN",
    "[rollout]\ntemperature = inf": "temperature: wanted more than 0, got Infinity; at 0",
    "[rollout]\ntemperature = 0": "temperature: wanted more than 0, got 0; at 0 a group's attempts are all equal",
    "[rollout]\ntop_k = 1": "run.toml: rollout: top_k: 1 makes a group's attempts all equal and nothing is learned",
    "[rollout]\ngroup_size = 1": "run.toml: rollout: group_size: 1 cannot learn with grpo, which compares",
    "[optimizer]\nlearning_rate = 0": "run.toml: optimizer: learning_rate: wanted more than 0, got 0; at 0 nothing is",
    "[optimizer]\nmax_grad_norm = 0": "wanted more than 0, got 0; at 0 nothing is learned; inf switches clipping off",
    "[optimizer]\nname = 'adamv'": """name: wanted one of "adamw", "adam", "sgd", "lion", got "adamv"; did you mean""",
    "[optimizer]\nbetas = [0.9]": "run.toml: optimizer: betas: wanted a list of 2, got [0.9]",
    "[optimizer]\nbetas = [0.9, 1]": "optimizer: betas: wanted two of at least 0 and less than 1, got (0.9, 1.0)",
    "[optimizer]\nname = 'sgd'\nbetas = [0.9, 0.9]": "optimizer: betas: sgd has none; leave it out",
    "[optimizer]\nname = 'adam'\nweight_decay = 0.1": "optimizer: weight_decay: adam has none; wanted name = 'adamw'",
    "[optimizer]\nwarmup_steps = 100": "optimizer: warmup_steps: wanted less than the 100 steps, got 100",
    "[algorithm]\nname = 'grpoo'": "run.toml: algorithm: name: unknown algorithm 'grpoo'; did you mean 'grpo'?",
    "[algorithm]\nclp = 0.2": "run.toml: algorithm: grpo: unknown key 'clp'; did you mean 'clip'?",
    "[algorithm]\nclip = 0.2": "run.toml: algorithm: grpo: clip: wanted a list of 2, at least 0",
    "[algorithm.kl]\ncoefficient = 'big'": """run.toml: algorithm.kl: coefficient: wanted more than 0, got "big\"""",
    "[algorithm]\nkl_estimator = 'k3'": "run.toml: algorithm: 'kl_estimator' is now algorithm.kl.estimator",
    "[algorithm]\nkl = 0.04": "run.toml: algorithm: 'kl' is now algorithm.kl.coefficient",
    "[algorithm]\nname = 3": "run.toml: algorithm: name: wanted a text in quotes, got 3",
    "[evaluation]\nsuccess = nan": "run.toml: evaluation: success: wanted a finite number, got NaN",
    "[train]\nupdates_per_rollout = 0": "run.toml: train: updates_per_rollout: wanted at least 1, got 0",
    "[train]\nminibatches = 5": "run.toml: train: minibatches: wanted at most the 4 groups of a step, got 5",
    "[rollout]\nmin_tokens = 300": "run.toml: rollout: min_tokens: wanted at most rollout.max_tokens, 256, got 300",
    "[rollout]\npenalty_context = 5": "run.toml: rollout: penalty_context: has no effect without a penalty",
    "[rollout]\nstop_strings = ['']": "run.toml: rollout: stop_strings: wanted texts that are not empty, got ['']",
    "[rollout]\nmax_draws = 0": "run.toml: rollout: max_draws: wanted at least 1, got 0",
    "[algorithm.kl]\ncoefficient = -0.1": "run.toml: algorithm.kl: coefficient: wanted more than 0, got -0.1",
    "[echo]\nweight = 0.1": "run.toml: echo: is now the table [algorithm.echo]",
    f"[algorithm.echo]\nweight = 0.1\n[environment]\nfactory = '{MAZE}:Maze'\nmax_turns = 1": (
        "run.toml: algorithm: echo: has no effect with environment.max_turns = 1: no answer is read"
    ),
    "[teacher]\nid = 'base'": "run.toml: teacher: has no effect, because grpo does not learn from a teacher",
    "[lora": "run.toml: not TOML: ",
}


@pytest.mark.parametrize(("text", "message"), REFUSED_FILES.items())
def test_a_file_is_refused_in_one_line(folder, text, message):
    assert message in refused(folder, text=text)


REFUSED_OVERRIDES = {
    "rollout.temprature=1": "command line: rollout: unknown key 'temprature'; did you mean 'temperature'?",
    "rolout.top_p=1": "command line: unknown table [rolout]; did you mean 'rollout'?",
    "learning_rate=1": "command line: unknown key 'learning_rate'; did you mean 'optimizer.learning_rate'?",
    "seed=true": "command line: seed: wanted a whole number, got true",
    "seed=4294967296": "command line: seed: wanted at least 0 and at most 4294967295, got 4294967296",
    "steps=0": "command line: steps: wanted at least 1, got 0",
    "steps=ten": """command line: steps: wanted a whole number, got "ten\"""",
    "model=x": """command line: model: wanted a table, got "x\"""",
    "model.id=": "command line: model.id: '' is not TOML",
    'model.id=""': "command line: model: id: wanted a text that is not empty",
    "model.id=./none": "command line: model: id: no folder or file './none' beside the config or in the current dir",
    "model.id=a/b.gguf": "command line: model: id: no folder or file 'a/b.gguf'",
    "model.dtype=float64": """model: dtype: wanted one of "float32", "bfloat16", "float16", got "float64\"""",
    "lora.keys=[q_proj]": "command line: lora.keys: '[q_proj]' is not TOML",
    "data.train=none.jsonl": "command line: data: train: no file 'none.jsonl' beside the config or in the current",
    "data.prompt=questio": "line 1: no column 'questio', wanted as the prompt; there are: question, answer",
    "data.columns.answer=anser": "line 1: no column 'anser', wanted as 'answer'; there are: question, answer",
    "data.columns.system=answer": "run.toml: data: columns: 'system' is a name that is taken",
    "data.columns.gold=answer": "'last_number_matches': wants 'answer', but the data offer prompts,",
    "data.evaluation=train.jsonl": "data: evaluation: wanted rows that are not trained on, got the training",
    'reward.functions=["mlxrl.rewards:last_numbr"]': "has no 'last_numbr'; did you mean 'last_number'?",
    'reward.functions=["nowhere:f"]': "reward: functions: 'nowhere:f': cannot be imported: ModuleNotFoundError",
    'reward.functions=["nowhere.py:f"]': "command line: reward: functions: no file 'nowhere.py' beside the config",
    "reward.functions=[]": "run.toml: reward: wanted at least one function, got none",
    "reward.weights=[1, 2]": "run.toml: reward: weights: wanted 1, one per function, got 2",
    "reward.weights=[0]": "run.toml: reward: weights: wanted numbers that are not all 0, got [0.0]",
    "steps": "command line: wanted key=value such as optimizer.learning_rate=2e-5, got 'steps'",
    "reward.overlong_factor=2": "command line: reward: overlong_factor: has no effect without reward.overlong_buffer",
    "reward.overlong_cap=2": "reward: overlong_cap: has no effect without reward.overlong_buffer",
    "reward.overlong_buffer=257": "reward: overlong_buffer: wanted at most rollout.max_tokens, 256, got 257",
    "reward.length_penalty=-1": "command line: reward: length_penalty: wanted at least 0, got -1",
    "algorithm.clp=[0.1, 0.2]": "command line: algorithm: grpo: unknown key 'clp'; did you mean 'clip'?",
    "algorithm.kl.coeficient=1": "command line: algorithm.kl: unknown key 'coeficient'; did you mean 'coefficient'?",
    "algorithm.kl.clip=1": "command line: algorithm.kl: unknown key 'clip'; did you mean 'algorithm.clip'?",
    "algorithm.name=grpoo": "command line: algorithm: name: unknown algorithm 'grpoo'; did you mean 'grpo'?",
    "algorithm.name=none.py:make": "command line: algorithm: name: no file 'none.py' beside the config",
}


@pytest.mark.parametrize(("override", "message"), REFUSED_OVERRIDES.items())
def test_an_override_is_refused_in_one_line(folder, override, message):
    assert message in refused(folder, override)


OPD = ("algorithm.name=opd", "teacher.hint=answer")
REFUSED_TEACHERS = {
    "teacher.dtype=float32": "teacher: dtype: has no effect, because teacher.id names no model to be loaded",
    "teacher.adapter=.": "teacher: adapter: has no effect, because teacher.id names no model to be loaded",
    "teacher.id=base": "teacher: id: 'base' is what training starts from, so nothing is learned; wanted a hint, or",
    "teacher.id=./none": "command line: teacher: id: no folder or file './none' beside the config",
    "teacher.hint=answr": "command line: teacher: hint: no column 'answr' in train.jsonl; did you mean 'answer'?",
    "rollout.max_draws=2": "command line: rollout: max_draws: has no effect, because opd does not look at rewards",
    "reward.length_penalty=0.1": "reward: length_penalty: has no effect, because opd does not look at rewards",
    "reward.overlong_buffer=8": "reward: overlong_buffer: has no effect, because opd does not look at rewards",
    "reward.functions=[]": "reward: wanted at least one function, got none; data.evaluation is scored by them",
}


@pytest.mark.parametrize(("override", "message"), REFUSED_TEACHERS.items())
def test_settings_beside_a_teacher_that_have_no_effect_are_refused(folder, override, message):
    bare = override.startswith(("teacher.id", "teacher.hint"))
    assert message in refused(folder, *OPD[: 1 if bare else 2], override)


def test_a_teacher_makes_groups_of_one_and_runs_without_rewards_possible(folder):
    assert read(folder, *OPD, "rollout.group_size=1").rollout.group_size == 1
    assert "1 cannot learn with opd" in refused(folder, *OPD, "rollout.group_size=1", "algorithm.reward=1")
    toml = MINIMAL.replace('evaluation = "test.jsonl"\n', "").partition("[reward]")[0]
    assert (
        refused(folder, toml=toml)
        == "run.toml: reward: wanted at least one function, got none; grpo learns from rewards"
    )
    (folder / "run.toml").write_text(toml)
    got = config.read(folder / "run.toml", ["algorithm.name=opd", "teacher.hint=answer"])
    assert (config.rewards(got).functions, got.teacher.id, got.teacher.hint) == ((), None, "answer")
    (folder / "weights").mkdir()
    got = read(folder, "algorithm.name=opd", "teacher.id=weights", "teacher.adapter=weights", "teacher.dtype=float32")
    assert got.teacher.id == got.teacher.adapter == f"{folder}/weights"
    again = folder / "again.toml"
    again.write_text(config.text(got))
    assert dataclasses.replace(config.read(again), algorithm=got.algorithm) == got
    assert "no folder 'nowhere'" in refused(
        folder, "algorithm.name=opd", "teacher.id=weights", "teacher.adapter=nowhere"
    )


def test_a_draw_needs_pairs(folder):
    one = ("algorithm.name=reinforce_pp", "rollout.group_size=1", "rollout.max_draws=2")
    assert "rollout: max_draws: wanted 1, because a group of 1 attempt has no two different rewards" in refused(
        folder, *one
    )


def test_files_that_are_none(folder):
    assert refused(folder, toml="") == "run.toml: missing table [model]"
    assert refused(folder, toml="[model]\n[data]\n[reward]") == "run.toml: model: missing key 'id'"
    with pytest.raises(ConfigError, match=r"none\.toml: no such file; wanted a config in TOML"):
        config.read(folder / "none.toml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        config.read(folder)
    (folder / "run.toml").write_bytes(b"a = '\xff'")
    with pytest.raises(ConfigError, match="wanted TOML in UTF-8"):
        config.read(folder / "run.toml")


def test_evaluation_settings_without_data_to_evaluate_on_are_refused(folder):
    bare = MINIMAL.replace('evaluation = "test.jsonl"\n', "")
    for text, message in {
        "[evaluation]\nrows = 3": "evaluation: rows: has no effect without data.evaluation",
        "[evaluation]\ntemperature = 1": "evaluation: temperature: has no effect without data.evaluation",
        "[evaluation]\nsuccess = 0.5": "evaluation: success: has no effect without data.evaluation",
        "[run]\nevaluate_every = 3": "run: evaluate_every: has no effect without data.evaluation",
    }.items():
        assert refused(folder, toml=bare + text) == f"run.toml: {message}"


def test_the_columns_of_the_evaluation_rows_are_checked_too(folder):
    (folder / "test.jsonl").write_text('{"question": "1", "result": "4"}\n')
    assert "wants 'answer', but the data offer prompts, completions, question, result" in refused(folder)


def test_rewards_beside_the_config_are_found_and_made_absolute(folder):
    (folder / "mine.py").write_text("def close(completions, answer): return [0.0 for _ in completions]\n")
    got = read(folder, 'reward.functions=["mine.py:close"]')
    assert got.reward.functions == (f"{folder}/mine.py:close",)
    (function,) = config.rewards(got).functions
    assert function(completions=["a"], answer=["b"]) == [0.0]


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
    assert got.run.folder == "out"


def test_group_size_1_is_refused_only_where_the_baseline_is_the_group(folder):
    assert "1 cannot learn with rloo, which compares a completion with the others of its group" in refused(
        folder, "algorithm.name=rloo", "rollout.group_size=1"
    )
    one = ("algorithm.name=reinforce_pp", "rollout.group_size=1")
    assert read(folder, *one).rollout.group_size == 1
    alone = refused(folder, *one, "rollout.tasks_per_step=1")
    assert "1 cannot learn with reinforce_pp, which compares a completion with the others of its step" in alone
    assert read(folder, *OPD, "rollout.group_size=1").rollout.group_size == 1


def test_an_algorithm_of_ones_own_is_found_beside_the_config_and_read_back(folder, tmp_path, monkeypatch):
    (folder / "mine.py").write_text(
        "from dataclasses import replace\nimport mlxrl as rl\n\n"
        "def make(*, low=0.2, terms=()):\n"
        "    return replace(rl.grpo(clip=(low, 0.3), terms=terms), name='mine')\n"
    )
    settings = ("algorithm.name=mine.py:make", "algorithm.low=0.1", "algorithm.kl.coefficient=0.5")
    first = read(folder, *settings)
    built = config.algorithm(first)
    assert (built.name, built.policy_loss.clip, built.terms) == ("mine", (0.1, 0.3), (algo.KL(coefficient=0.5),))
    text = config.text(first)
    assert tomllib.loads(text)["algorithm"] == {
        "name": f"{folder}/mine.py:make", "low": 0.1, "kl": {"coefficient": 0.5}
    }  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "again.toml").write_text(text)
    assert config.algorithm(config.read(tmp_path / "again.toml")) == built
    assert "mine.py:make: unknown key 'lo'; did you mean 'low'?" in refused(folder, settings[0], "algorithm.lo=1")
    (folder / "mine.py").write_text("def make(): return 3\n\ndef needs(x): pass\n")
    assert "has no 'mak'; did you mean 'make'?" in refused(folder, "algorithm.name=mine.py:mak")


def test_a_recipe_without_its_teacher_is_refused(folder):
    assert "algorithm: name: opd needs a teacher; wanted a table [teacher]" in refused(folder, "algorithm.name=opd")


def test_the_resolved_text_makes_the_same_run_from_anywhere(folder, tmp_path, monkeypatch):
    first = read(
        folder,
        "algorithm.kl.coefficient=0.01",
        'run.folder="a[\\n\\"b = ["',
        "data.columns.answer=answer",
        'data.system="Say = [\\n]"',
        "evaluation.rows=1",
        "optimizer.max_grad_norm=inf",
    )
    text = config.text(first)
    assert "clip = [0.2, 0.2]" in text
    assert tomllib.loads(text) == config.resolved(first)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "again.toml").write_text(text)
    again = config.read(tmp_path / "again.toml")
    assert config.resolved(again) == config.resolved(first)
    assert config.algorithm(again) == config.algorithm(first)
    assert dataclasses.replace(again, algorithm=first.algorithm) == first


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_the_same_after_a_round_trip(folder, name):
    first = read(folder, f"algorithm.name={name}", *(["teacher.hint=answer"] if name == "opd" else []))
    (folder / "again.toml").write_text(config.text(first))
    assert config.algorithm(config.read(folder / "again.toml")) == config.algorithm(first)


@pytest.mark.parametrize(
    ("family", "name"), [(family, name) for family, recipes in CONVENTIONS.items() for name in recipes]
)
def test_every_convention_is_the_same_after_a_round_trip(folder, family, name):
    judge = ["teacher.hint=answer"] if name == "opd" else []
    first = read(folder, f"algorithm.name={name}", f"algorithm.convention={family}", *judge)
    (folder / "again.toml").write_text(config.text(first))
    assert config.algorithm(config.read(folder / "again.toml")) == config.algorithm(first)


def test_short_lists_stand_on_one_line_and_long_ones_do_not(folder):
    keys = [f"self_attn.{letter * 9}_proj" for letter in "abcdef"]
    text = config.text(read(folder, f"lora.keys={keys}"))
    assert "log_ratio_clamp = [-20.0, 20.0]\n" in text
    assert 'keys = [\n    "self_attn.aaaaaaaaa_proj",\n' in text
    assert tomllib.loads(text)["lora"]["keys"] == keys


def test_a_config_without_evaluation_has_no_evaluation_table(folder):
    toml = MINIMAL.replace('evaluation = "test.jsonl"\n', "")
    (folder / "run.toml").write_text(toml)
    first = config.read(folder / "run.toml")
    assert "evaluation" not in config.resolved(first)
    (folder / "again.toml").write_text(config.text(first))
    assert config.resolved(config.read(folder / "again.toml")) == config.resolved(first)


def test_every_setting_is_read_somewhere():
    """`settings.table.key` must stand in the package, outside the config's own files."""
    reads = set()
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name != "config":
            reads |= _reads(ast.parse(path.read_text()))
    hints = {field.name: field for field in dataclasses.fields(Config)}
    unread = []
    for name in hints:
        table = getattr(config.tables, name.capitalize(), None)
        keys = [field.name for field in dataclasses.fields(table)] if table else [""]
        unread += [
            f"{name}.{key}" for key in keys if (name, key) not in reads and (key or ("settings", name) not in reads)
        ]
    handed_on_whole = ("algorithm.", "reward.weights")
    assert [key for key in unread if not key.startswith(handed_on_whole)] == []


def _reads(tree):
    """(table, key) of every `x.table.key` and `table.key`, through names that stand for a table."""
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            pairs = [(node.targets[0], node.value)]
            if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = zip(node.targets[0].elts, node.value.elts, strict=True)
            aliases |= {
                target.id: value.attr
                for target, value in pairs
                if isinstance(target, ast.Name) and isinstance(value, ast.Attribute)
            }
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = node.value
            if isinstance(owner, ast.Attribute):
                found.add((owner.attr, node.attr))
            elif isinstance(owner, ast.Name):
                found.add((aliases.get(owner.id, owner.id), node.attr))
    return found
