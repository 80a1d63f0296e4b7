"""What a config means: algorithm, rewards, data and sinks built once, and what does not go together."""

import dataclasses
import tomllib

import pytest

from configs import again, config_folder, experiment, refused
from helpers import MAZE, MINIMAL
from mlxrl import algo, config
from mlxrl.algo.conventions import CONVENTIONS
from mlxrl.algo.table import RECIPES
from mlxrl.errors import UserError
from mlxrl.runs.experiment import Experiment


@pytest.fixture
def folder(tmp_path, monkeypatch):
    return config_folder(tmp_path, monkeypatch)


def without_evaluation(toml=MINIMAL):
    return toml.replace('evaluation = "test.jsonl"\n', "")


def test_what_a_config_names_is_built_once(folder):
    found = experiment(folder, "algorithm.clip=[0.2, 0.28]", "reward.weights=[0.5]")
    assert found.algorithm == algo.grpo(clip=(0.2, 0.28))
    assert ([one.__name__ for one in found.rewards.functions], found.rewards.weights) == (
        ["last_number_matches"],
        (0.5,),
    )
    assert [task.prompt for task in found.tasks] == ["train"]
    assert [task.prompt for task in found.held_out] == ["test"]
    assert (found.environment, found.sinks) == (None, ())
    assert found.table["clip"] == (0.2, 0.28)


REFUSED_FILES = {
    "[sampling]\ntemperature = 0": "run.toml: sampling: temperature: wanted more than 0, got 0, which makes a group's",
    "[sampling]\ntop_k = 1": "sampling: top_k: 1 makes a group's completions all equal and nothing is learned",
    "[rollout]\ngroup_size = 1": "run.toml: rollout: group_size: 1 cannot learn with grpo, which compares",
    "[optimizer]\nwarmup_steps = 100": "run.toml: optimizer: warmup_steps: wanted less than the 100 steps, got 100",
    "[train]\nminibatches = 5": "run.toml: train: minibatches: wanted at most the 4 groups of a step, got 5",
    "[algorithm]\nname = 'grpoo'": "run.toml: algorithm: name: unknown algorithm 'grpoo'; did you mean 'grpo'?",
    "[algorithm]\nclp = 0.2": "run.toml: algorithm: grpo: unknown key 'clp'; did you mean 'clip'?",
    "[algorithm]\nclip = 0.2": "run.toml: algorithm: grpo: clip: wanted a list of 2, at least 0",
    "[algorithm.kl]\ncoefficient = 'big'": """run.toml: algorithm.kl: coefficient: wanted more than 0, got "big\"""",
    "[algorithm.kl]\ncoefficient = -0.1": "run.toml: algorithm.kl: coefficient: wanted more than 0, got -0.1",
    "[algorithm]\nkl_estimator = 'k3'": "run.toml: algorithm: 'kl_estimator' is now algorithm.kl.estimator",
    "[algorithm]\nkl = 0.04": "run.toml: algorithm: 'kl' is now algorithm.kl.coefficient",
    f"[algorithm.echo]\nweight = 0.1\n[environment]\nfactory = '{MAZE}:Maze'\nmax_turns = 1": (
        "run.toml: algorithm: echo: has no effect with environment.max_turns = 1: no answer is read"
    ),
    "[algorithm.echo]\nweight = 0.1": "run.toml: algorithm: echo: has no effect without environment.factory",
    "[teacher]\nid = 'base'": "run.toml: teacher: has no effect, because grpo does not learn from a teacher",
}


@pytest.mark.parametrize(("text", "message"), REFUSED_FILES.items())
def test_a_file_is_refused_in_one_line(folder, text, message):
    assert message in refused(folder, text=text)


REFUSED_OVERRIDES = {
    "data.prompt=questio": "line 1: no column 'questio', wanted as the prompt; there are: question, answer",
    "data.columns.answer=anser": "line 1: no column 'anser', wanted as 'answer'; there are: question, answer",
    "data.columns.system=answer": "command line: data: columns: 'system' is a name that is taken",
    "data.columns.gold=answer": "'last_number_matches': wants 'answer', but the data offer prompts,",
    "evaluation.samples_temperature=0.5": "evaluation: samples_temperature: has no effect without samples",
    "data.evaluation=train.jsonl": "data: evaluation: wanted examples that are not trained on, got the training data",
    "rollout.tasks_per_step=2": "rollout: tasks_per_step: wanted at most the 1 examples of train.jsonl, got 2",
    'reward.functions=["mlxrl.rewards:last_numbr"]': "has no 'last_numbr'; did you mean 'last_number'?",
    'reward.functions=["nowhere:f"]': "reward: functions: 'nowhere:f': cannot be imported: ModuleNotFoundError",
    "reward.functions=[]": "reward: wanted at least one function, got none; grpo learns from rewards",
    "reward.overlong_buffer=257": "reward: overlong_buffer: wanted at most sampling.max_tokens, 256, got 257",
    "algorithm.clp=[0.1, 0.2]": "command line: algorithm: grpo: unknown key 'clp'; did you mean 'clip'?",
    "algorithm.clip=0.2": "command line: algorithm: grpo: clip: wanted a list of 2, at least 0",
    "algorithm.kl.coeficient=1": "command line: algorithm.kl: unknown key 'coeficient'; did you mean 'coefficient'?",
    "algorithm.kl.clip=1": "command line: algorithm.kl: unknown key 'clip'; did you mean 'algorithm.clip'?",
    "algorithm.name=grpoo": "command line: algorithm: name: unknown algorithm 'grpoo'; did you mean 'grpo'?",
    "algorithm.name=opd": "algorithm: name: opd needs a teacher; wanted a table [teacher] with id or hint",
    'run.sinks=["nowhere:f"]': "command line: run: sinks: 'nowhere:f': cannot be imported: ModuleNotFoundError",
    'run.sinks=["mlxrl.algo.losses:SAFE"]': "run: sinks: 'mlxrl.algo.losses:SAFE': wanted a function of a step, or",
}


@pytest.mark.parametrize(("override", "message"), REFUSED_OVERRIDES.items())
def test_an_override_is_refused_in_one_line(folder, override, message):
    assert message in refused(folder, "rollout.tasks_per_step=1", override)


def test_a_store_that_means_another_place_in_each_directory_is_refused_before_a_run(folder, monkeypatch):
    monkeypatch.setenv("MLXRL_STORE", "adapters")
    assert experiment(folder).config.run.store is False
    why = "run: store: MLXRL_STORE: wanted an absolute path, got 'adapters'"
    assert refused(folder, "rollout.tasks_per_step=1", "run.store=true") == f"command line: {why}"


OPD = ("algorithm.name=opd", "teacher.hint=answer")
REFUSED_TEACHERS = {
    "teacher.id=base": "teacher: id: 'base' is what training starts from, so nothing is learned; wanted a hint, or",
    "teacher.hint=answr": "command line: teacher: hint: no column 'answr' in train.jsonl; did you mean 'answer'?",
    "rollout.resampling_rounds=1": "rollout: resampling_rounds: has no effect, because opd does not use rewards",
    "reward.length_penalty=0.1": "reward: length_penalty: has no effect, because opd does not use rewards",
    "reward.overlong_buffer=8": "reward: overlong_buffer: has no effect, because opd does not use rewards",
    "reward.functions=[]": "reward: wanted at least one function, got none; data.evaluation is scored by them",
    f"environment.factory={MAZE}:Maze": "teacher: hint: an environment writes the prompts; leave the hint out",
}


@pytest.mark.parametrize(("override", "message"), REFUSED_TEACHERS.items())
def test_settings_beside_a_teacher_that_have_no_effect_are_refused(folder, override, message):
    bare = override.startswith(("teacher.id", "teacher.hint"))
    assert message in refused(folder, "rollout.tasks_per_step=1", *OPD[: 1 if bare else 2], override)


def test_an_overlong_buffer_beside_an_environment_is_refused(folder):
    why = "command line: reward: overlong_buffer: wanted 0 with an environment, whose turns have a limit each"
    assert refused(folder, f"environment.factory={MAZE}:Maze", "reward.overlong_buffer=4") == why


def test_a_teacher_makes_groups_of_one_and_runs_without_rewards_possible(folder):
    assert experiment(folder, *OPD, "rollout.group_size=1").config.rollout.group_size == 1
    assert "1 cannot learn with opd" in refused(folder, *OPD, "rollout.group_size=1", "algorithm.reward=1")
    toml = without_evaluation().partition("[reward]")[0]
    assert (
        refused(folder, toml=toml)
        == "run.toml: reward: wanted at least one function, got none; grpo learns from rewards"
    )
    (folder / "run.toml").write_text(toml)
    got = Experiment.of(*config.read(folder / "run.toml", [*OPD, "rollout.tasks_per_step=1"]))
    assert (got.rewards.functions, got.config.teacher.id, got.config.teacher.hint) == ((), None, "answer")


def test_a_teacher_of_its_own_is_read_back(folder):
    (folder / "weights").mkdir()
    own = ("algorithm.name=opd", "teacher.id=weights", "teacher.adapter=weights", "teacher.dtype=float32")
    first = experiment(folder, *own)
    assert first.config.teacher.id == first.config.teacher.adapter == f"{folder}/weights"
    assert again(folder, first.toml()).config.teacher == first.config.teacher
    assert "no folder 'nowhere'" in refused(folder, *own[:2], "teacher.adapter=nowhere")


def test_evaluation_settings_without_data_to_evaluate_on_are_refused(folder):
    for text, message in {
        "[evaluation]\nexamples = 3": "evaluation: examples",
        "[evaluation]\ntemperature = 1": "evaluation: temperature",
        "[evaluation]\nsuccess = 0.5": "evaluation: success",
        "[evaluation]\nsamples = 4": "evaluation: samples",
        "[run]\nevaluate_every = 3": "run: evaluate_every",
    }.items():
        message = f"run.toml: {message}: has no effect without data.evaluation or data.validation"
        assert refused(folder, toml=without_evaluation() + text) == message


def with_validation(folder, *overrides):
    (folder / "chosen.jsonl").write_text('{"question": "chosen", "answer": "4"}\n')
    return ["data.validation=chosen.jsonl", "run.evaluate_every=1", *overrides]


REFUSED_CHOICES = {
    "run.keep=best": "run: keep: wanted data.validation, by which an adapter is chosen: what is",
    "run.patience=2": "run: patience: wanted data.validation, by which an adapter is chosen: what is",
    "run.accept_margin=0": "run: accept_margin: wanted data.validation, by which an adapter is chosen: what is",
    "data.validation=test.jsonl": "data: validation: wanted other examples than those of data.evaluation, because what",
    "data.validation=train.jsonl": "data: validation: wanted examples that are not trained on, got the training data",
    "data.validation=copy.jsonl": "data: validation: wanted other examples than those of data.evaluation, got the same",
    "data.validation=nowhere.jsonl": "data: validation: no file 'nowhere.jsonl' beside the config or in the current",
}


@pytest.mark.parametrize(("override", "message"), REFUSED_CHOICES.items())
def test_an_adapter_is_chosen_by_examples_of_their_own(folder, override, message):
    (folder / "copy.jsonl").write_text((folder / "test.jsonl").read_text())
    assert message in refused(folder, "rollout.tasks_per_step=1", "run.evaluate_every=1", override)


def test_validation_wants_evaluations_between_steps(folder):
    chosen = with_validation(folder, "run.keep=best", "run.evaluate_every=0")
    assert "data: validation: has no effect without run.evaluate_every" in refused(folder, *chosen)


def test_validation_is_read_and_comes_back_from_the_resolved_text(folder):
    options = with_validation(
        folder, "run.keep=best", "run.patience=3", "run.accept_margin=0.1", "evaluation.samples=4",
        "evaluation.samples_temperature=0.75",
    )  # fmt: skip
    first = experiment(folder, *options)
    assert [task.prompt for task in first.validation] == ["chosen"]
    assert (first.config.run.keep, first.config.run.patience, first.config.run.accept_margin) == ("best", 3, 0.1)
    assert dataclasses.replace(again(folder, first.toml()).config, algorithm=first.config.algorithm) == first.config
    plain = experiment(folder, *with_validation(folder))
    assert again(folder, plain.toml()).toml() == plain.toml()


def test_validation_suffices_for_evaluations_but_for_samples(folder):
    toml = f"{without_evaluation()}[run]\nevaluate_every = 1\n[rollout]\ntasks_per_step = 1\n"
    toml = toml.replace("[data]", '[data]\nvalidation = "chosen.jsonl"')
    with_validation(folder)
    assert again(folder, f"{toml}[evaluation]\nexamples = 1\n").held_out == ()
    message = refused(folder, toml=f"{toml}[evaluation]\nsamples = 2\n")
    assert "evaluation: samples: has no effect without data.evaluation" in message


def test_the_columns_of_the_held_out_examples_are_checked_too(folder):
    (folder / "test.jsonl").write_text('{"question": "1", "result": "4"}\n')
    assert "wants 'answer', but the data offer prompts, completions, question, result" in refused(folder)


def test_rewards_beside_the_config_are_found(folder):
    (folder / "mine.py").write_text("def close(completions, answer): return [0.0 for _ in completions]\n")
    (function,) = experiment(folder, 'reward.functions=["mine.py:close"]').rewards.functions
    assert function(completions=["a"], answer=["b"]) == [0.0]


def test_group_size_1_is_refused_only_where_the_baseline_is_the_group(folder):
    assert "1 cannot learn with rloo, which compares a completion with the others of its group" in refused(
        folder, "algorithm.name=rloo", "rollout.group_size=1"
    )
    one = ("algorithm.name=reinforce_pp", "rollout.group_size=1")
    alone = refused(folder, *one, "rollout.tasks_per_step=1")
    assert "1 cannot learn with reinforce_pp, which compares a completion with the others of its step" in alone
    (folder / "train.jsonl").write_text('{"question": "1", "answer": "4"}\n' * 2)
    assert experiment(folder, *one, "rollout.tasks_per_step=2").config.rollout.group_size == 1


def test_an_algorithm_of_ones_own_is_found_beside_the_config_and_read_back(folder):
    (folder / "mine.py").write_text(
        "from dataclasses import replace\nimport mlxrl as rl\n\n"
        "def make(*, low=0.2, terms=()):\n"
        "    return replace(rl.grpo(clip=(low, 0.3), terms=terms), name='mine')\n"
    )
    settings = ("algorithm.name=mine.py:make", "algorithm.low=0.1", "algorithm.kl.coefficient=0.5")
    first = experiment(folder, *settings)
    built = first.algorithm
    assert (built.name, built.policy_loss.clip, built.terms) == ("mine", (0.1, 0.3), (algo.KL(coefficient=0.5),))
    assert tomllib.loads(first.toml())["algorithm"] == {
        "name": f"{folder}/mine.py:make", "low": 0.1, "kl": {"coefficient": 0.5}
    }  # fmt: skip
    assert again(folder, first.toml()).algorithm == built
    assert "mine.py:make: unknown key 'lo'; did you mean 'low'?" in refused(folder, settings[0], "algorithm.lo=1")
    (folder / "mine.py").write_text("def make(): return 3\n\ndef needs(x): pass\n")
    assert "has no 'mak'; did you mean 'make'?" in refused(folder, "algorithm.name=mine.py:mak")


def test_the_resolved_text_makes_the_same_run_from_anywhere(folder, tmp_path, monkeypatch):
    first = experiment(
        folder,
        "algorithm.kl.coefficient=0.01",
        'run.folder="a[\\n\\"b = ["',
        "data.columns.answer=answer",
        'data.system="Say = [\\n]"',
        "evaluation.examples=1",
        "optimizer.max_grad_norm=inf",
    )
    text = first.toml()
    assert "clip = [0.2, 0.2]" in text
    assert tomllib.loads(text) == config.resolved(first.config, first.table)
    monkeypatch.chdir(tmp_path)
    second = again(tmp_path, text)
    assert second.toml() == text
    assert second.algorithm == first.algorithm
    assert dataclasses.replace(second.config, algorithm=first.config.algorithm) == first.config


def round_trip(folder, *overrides):
    first = experiment(folder, *overrides)
    assert again(folder, first.toml()).algorithm == first.algorithm


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_the_same_after_a_round_trip(folder, name):
    further = {"opd": ["teacher.hint=answer"], "sft": ["data.completion=answer"]}.get(name, [])
    round_trip(folder, f"algorithm.name={name}", *further)


@pytest.mark.parametrize(
    ("family", "name"), [(family, name) for family, recipes in CONVENTIONS.items() for name in recipes]
)
def test_every_convention_is_the_same_after_a_round_trip(folder, family, name):
    hint = ["teacher.hint=answer"] if name == "opd" else []
    round_trip(folder, f"algorithm.name={name}", f"algorithm.convention={family}", *hint)


def test_a_config_without_evaluation_has_no_evaluation_table(folder):
    text = without_evaluation() + "[rollout]\ntasks_per_step = 1\n"
    first = again(folder, text)
    assert "evaluation" not in tomllib.loads(first.toml())
    assert again(folder, first.toml()).toml() == first.toml()


def test_all_faults_are_errors_of_the_user(folder):
    """One base class, which the command line and a notebook can tell from an error of the package."""
    for override in REFUSED_OVERRIDES:
        with pytest.raises(UserError):
            experiment(folder, override)
