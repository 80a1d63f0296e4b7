"""Names of other libraries lead to ours, wherever they are written."""

import re

import pytest

import mlxrl as rl
from configs import config_folder, refused
from mlxrl.algo.algorithm import TERMS
from mlxrl.algo.table import RECIPES
from mlxrl.checked import SettingError, hints_of
from mlxrl.cli import main
from mlxrl.config import keys
from mlxrl.names import FOREIGN, renamed_column


def test_what_is_named_exists():
    known = {key.name for key in keys()} | {f"algorithm.{name}" for make in RECIPES.values() for name in hints_of(make)}
    known |= {f"algorithm.{table}.{name}" for table, kind in TERMS.items() for name in hints_of(kind)}
    named = {key for ours in FOREIGN.values() for key in re.findall(r"\b[a-z]+\.[a-z_.]*[a-z]", ours)}
    assert named - known - {"run.folder"} == set()


@pytest.mark.parametrize(
    ("override", "message"),
    {
        "algorithm.beta=0.1": "algorithm: grpo: unknown key 'beta'; here it is algorithm.kl.coefficient",
        "algorithm.epsilon_high=0.3": "unknown key 'epsilon_high'; here it is algorithm.clip = [below, above]",
        "lr=1e-5": "command line: unknown key 'lr'; here it is optimizer.learning_rate",
        "optimizer.lr=1e-5": "command line: optimizer: unknown key 'lr'; here it is optimizer.learning_rate",
        "lora.alpha=16": "command line: lora: unknown key 'alpha'; here it is lora.scale, which is alpha / rank",
        "rollout.num_generations=8": "rollout: unknown key 'num_generations'; here it is rollout.group_size",
        "sampling.max_completion_length=8": "sampling: unknown key 'max_completion_length'; here it is sampling.max_",
        "per_device_train_batch_size=8": "unknown key 'per_device_train_batch_size'; here it is rollout.tasks_per_step",
        "num_layers=16": "command line: unknown key 'num_layers'; here it is lora.layers",
        "resume_adapter_file=a.safetensors": "unknown key 'resume_adapter_file'; here it is model.adapter",
        "algorithm.kl_loss_type=k3": "unknown key 'kl_loss_type'; here it is algorithm.kl.estimator",
        "algorithm.vllm_importance_sampling_cap=2": "cap'; here it is algorithm.correction.bounds",
        "rollout.n_samples_per_prompt=8": "unknown key 'n_samples_per_prompt'; here it is rollout.group_size",
        "actor_rollout_ref.rollout.n=8": "line: actor_rollout_ref: rollout: unknown key 'n'; here it is rollout.group_",
        "actor_rollout_ref.model.path=x": "command line: unknown table [actor_rollout_ref]; there are seed, steps",
        "trainer.total_epochs=3": "command line: trainer: unknown key 'total_epochs'; here it is steps",
        "trian.recompute=true": "command line: unknown table [trian]; did you mean 'train'?",
        "iters=100": "command line: unknown key 'iters'; here it is steps",
        "optimizer.group_size=3": "optimizer: unknown key 'group_size'; did you mean 'rollout.group_size'?",
    }.items(),
)  # fmt: skip
def test_a_key_of_another_library_names_ours(tmp_path, monkeypatch, override, message):
    assert message in refused(config_folder(tmp_path, monkeypatch), override)


@pytest.mark.parametrize(
    ("words", "message"),
    {
        "eval --adapter-path out": "unknown option --adapter-path; here it is the folder run.folder/adapters",
        "train --iters 100": "unknown option --iters; here it is steps",
        "train --learning-rate=1e-5": "unknown option --learning-rate=1e-5; here it is optimizer.learning_rate=...",
        "train --batch-size 4": "unknown option --batch-size; here it is rollout.tasks_per_step",
    }.items(),
)  # fmt: skip
def test_an_option_of_another_library_names_ours(capsys, words, message):
    command, *rest = words.split()
    with pytest.raises(SystemExit):
        main([command, "--config", "run.toml", *rest])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rl.run(max_tokens=32), "run: unknown key 'max_tokens'; wanted Sampling(max_tokens=...)"),
        (lambda: rl.run(beta=0.1), "run: unknown key 'beta'; here it is algorithm.kl.coefficient"),
        (lambda: rl.run(lr=0.1), "run: unknown key 'lr'; here it is optimizer.learning_rate"),
        (lambda: rl.run(stepz=1), "run: unknown key 'stepz'; did you mean 'steps'?"),
        (lambda: rl.sample(num_generations=4), "sample: unknown key 'num_generations'; here it is rollout.group_size"),
        (lambda: rl.evaluate(max_new_tokens=4), "evaluate: unknown key 'max_new_tokens'; here it is sampling.max_tok"),
        (lambda: rl.load("x", adapter_path="y"), "load: unknown key 'adapter_path'; here it is the folder run.folder"),
        (lambda: rl.grpo(epsilon=0.2), "grpo: unknown key 'epsilon'; here it is algorithm.clip = [below, above]"),
        (lambda: rl.Rollout(max_tokens=4), "rollout: unknown key 'max_tokens'; wanted Sampling(max_tokens=...)"),
        (lambda: rl.LoRA(alpha=16), "lora: unknown key 'alpha'; here it is lora.scale, which is alpha / rank"),
    ],
)
def test_a_keyword_of_another_library_names_ours(call, message):
    with pytest.raises(SettingError) as found:
        call()
    assert str(found.value).startswith(message)


def test_a_column_by_another_name_is_told_with_the_setting_that_renames_it(tmp_path, monkeypatch):
    folder = config_folder(tmp_path, monkeypatch)
    (folder / "other.jsonl").write_text('{"question": "1+1", "solution": "2"}\n')
    hint = 'data.columns = {answer = "solution"} renames it'
    assert refused(folder, "data.train=other.jsonl", "rollout.tasks_per_step=1").endswith(f"solution; {hint}")
    assert renamed_column("answer", ["question", "answers"]) == "; did you mean 'answers'?"
    with pytest.raises(ValueError, match="did you mean 'problem'"):
        rl.tasks([{"problem": "1+1", "answer": "2"}], prompt="question")
