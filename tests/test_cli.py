"""The commands, on the model in examples/."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import warnings
from pathlib import Path

import mlx.core as mx
import mlx.optimizers as optim
import pytest
from mlx.utils import tree_flatten, tree_map

from helpers import CONFIG, EXAMPLE, JUDGE, ROOT
from mlxrl.cli import main
from mlxrl.files import read_lines
from mlxrl.policy.policy import load
from mlxrl.rewards import TrainerState
from mlxrl.rollout import chat, stop_rules
from mlxrl.runs import folder as folder_module
from mlxrl.settings import EpisodeLimits, LoRA, Optimizer, Reward, Rollout, Sampling, Train
from mlxrl.train import evaluate, loop
from mlxrl.train.evaluate import Evaluation
from mlxrl.train.state import RunState
from mlxrl.train.teacher import Teacher


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(folder, *arguments, on_step="pass", config=CONFIG):
    (folder / "run.toml").write_text(config)
    (folder / "judge.py").write_text(JUDGE.format(on_step=on_step))
    return main(["train", "--config", "run.toml", *arguments])


def manifest(folder):
    return json.loads((folder / "out/run/manifest.json").read_text())


def test_a_run_leaves_its_folder(folder, capsys):
    assert train(folder, "steps=4", "run.evaluate_every=2") == 0
    run, out = folder / "out/run", capsys.readouterr().out
    known = manifest(folder)
    assert (known["state"], known["seed"]) == ("succeeded", 0)
    assert known["command"] == ["mlxrl", "train", "--config", "run.toml", "steps=4", "run.evaluate_every=2"]
    assert len(known["model"]["files"]["model.safetensors"]) == 64
    assert [data["examples"] for data in known["data"]] == [len(read_lines(EXAMPLE / "train.jsonl")), 8]
    assert [line["step"] for line in read_lines(run / "metrics.jsonl")] == [1, 2, 3, 4]
    assert {"reward", "groups/zero_variance", "grad_norm"} <= read_lines(run / "metrics.jsonl")[0].keys()
    for line in (run / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON")).values()
        assert all(value is None or type(value) in (int, float) for value in values)
    samples = read_lines(run / "samples.jsonl")
    assert len(samples) == 4 * 2 * 2
    assert all(sample["prompt"].endswith("=?") and sample["length"] <= 12 for sample in samples)
    evaluation = json.loads((run / "evaluation.json").read_text())
    names = {"step", "accuracy", "mean_reward", "n", "unscored"}
    assert evaluation["before"].keys() == evaluation["after"].keys() == names
    gap = evaluation["after"]["mean_reward"] - evaluation["before"]["mean_reward"]
    assert evaluation["difference"] == pytest.approx(gap)
    assert evaluation["interval"][0] <= evaluation["difference"] <= evaluation["interval"][1]
    whens = [event["when"] for event in read_lines(run / "events.jsonl") if event["event"] == "evaluation"]
    assert whens == ["before training", "after step 2", "after training"]
    assert tomllib.loads((run / "config.toml").read_text())["run"]["folder"] == str(run)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-000003", "step-000004"]
    assert "2 prompts x 4 completions = 8 completions of at most 12 tokens" in out
    assert "3 evaluations of 8 examples" in out
    assert "95 % interval" in out
    assert f"--adapter-path {Path('out/run/adapters')}" in out


def test_eval_loads_the_adapter(folder, capsys):
    judge = 'reward.functions=["mlxrl.rewards:last_number_matches"]'
    assert train(folder, "steps=1", judge, "evaluation.examples=32") == 0
    run = folder / "out/run"
    evaluation = json.loads((run / "evaluation.json").read_text())
    weights = mx.load(str(run / "adapters/adapters.safetensors"))
    mx.save_safetensors(
        str(run / "adapters/adapters.safetensors"), {name: mx.ones_like(w) for name, w in weights.items()}
    )
    capsys.readouterr()
    assert main(["eval", "--config", "out/run/config.toml"]) == 0
    assert main(["eval", "--config", "run.toml", "--adapter", "out/run/adapters", judge, "evaluation.examples=32"]) == 0
    plain, spoilt = capsys.readouterr().out.splitlines()
    assert evaluation["before"]["accuracy"] > 0
    assert plain == f"without adapter: accuracy {evaluation['before']['accuracy']:.4f}, " + (
        f"mean reward {evaluation['before']['mean_reward']:.4f}, 32 examples"
    )
    assert spoilt == "out/run/adapters: accuracy 0.0000, mean reward 0.0000, 32 examples"


class Taken:
    """The steps of a run that has taken them."""

    def __init__(self):
        self.state = RunState(optim.SGD(0.0), step=7)

    def __iter__(self):
        return self

    def rewind(self):
        """No step was broken off."""

    def __next__(self):
        raise StopIteration

    def save(self, *arguments):
        pass


def test_every_setting_arrives(folder, monkeypatch):
    """Values unlike the defaults and unlike each other, seen where the library is called."""
    seen, thinking = {}, []

    def spy(module, name, result):
        def called(*arguments, **keywords):
            seen[name] = keywords | dict(enumerate(arguments))
            return result

        monkeypatch.setattr(module, name, called)

    monkeypatch.setattr(Evaluation, "summary", lambda self, success: {"accuracy": success, "mean_reward": 0.0, "n": 8})
    spy(evaluate, "evaluate", Evaluation(()))
    spy(loop, "run", Taken())
    monkeypatch.setattr(chat, "render", lambda *_, **keywords: thinking.append(keywords["thinking"]) or ())
    spy(chat, "check_thinking", None)
    for where in ("train.teacher", "rollout.sample"):
        monkeypatch.setattr(f"mlxrl.{where}.check_thinking", lambda *arguments: None)
    spy(stop_rules, "rules_of", None)  # the model does not think
    settings = {
        "seed": 5, "steps": 7, "model.dtype": '"float16"', "lora.rank": 3, "lora.scale": 1.5, "lora.dropout": 0.25,
        "lora.keys": '["self_attn.q_proj"]', "reward.weights": "[0.5]", "reward.overlong_buffer": 5,
        "reward.overlong_factor": 2, "reward.overlong_cap": 1, "reward.length_penalty": 0.5,
        "sampling.max_tokens": 9, "sampling.temperature": 0.75, "sampling.top_p": 0.875, "sampling.top_k": 11,
        "sampling.min_p": 0.125, "sampling.stop_strings": '["\\n"]', "sampling.min_tokens": 2,
        "sampling.thinking": "true", "sampling.thinking_budget": 5, "sampling.repetition_penalty": 1.125,
        "sampling.presence_penalty": 0.625, "sampling.frequency_penalty": 0.1875, "sampling.penalty_context": 6,
        "sampling.num_top": 8, "rollout.tasks_per_step": 3, "rollout.group_size": 6, "rollout.max_rows": 13,
        "rollout.resampling_rounds": 4, "algorithm.name": "opd", "algorithm.reward": 0.25,
        "algorithm.kl.coefficient": 0.03, "teacher.id": EXAMPLE, "teacher.dtype": "bfloat16",
        "teacher.hint": "answer", "teacher.thinking": "false", "train.tokens_per_pass": 99,
        "train.max_tokens_per_sequence": 77, "train.updates_per_rollout": 2, "train.minibatches": 3,
        "train.recompute": "true", "optimizer.name": '"lion"', "optimizer.learning_rate": 0.5,
        "optimizer.schedule": '"cosine"', "optimizer.warmup_steps": 4, "optimizer.weight_decay": 0.0625,
        "optimizer.betas": "[0.5, 0.25]", "optimizer.max_grad_norm": 17, "evaluation.temperature": 0.375,
        "evaluation.success": 0.6, "evaluation.samples": 3, "evaluation.samples_temperature": 0.625,
    }  # fmt: skip
    assert train(folder, *(f"{key}={value}" for key, value in settings.items())) == 0
    rules = {
        "stop_strings": ("\n",), "min_tokens": 2, "thinking": True, "thinking_budget": 5, "repetition_penalty": 1.125,
        "presence_penalty": 0.625, "frequency_penalty": 0.1875, "penalty_context": 6, "num_top": 8,
    }  # fmt: skip
    sampling = Sampling(max_tokens=9, temperature=0.75, top_p=0.875, top_k=11, min_p=0.125, **rules)
    policy, tasks, algorithm = (seen["run"].pop(place) for place in range(3))
    reward, teacher, resume = (seen["run"].pop(name) for name in ("reward", "teacher", "resume"))
    assert resume is None
    assert reward == Reward(
        functions=reward.functions, weights=(0.5,), overlong_buffer=5, overlong_factor=2, overlong_cap=1,
        length_penalty=0.5,
    )  # fmt: skip
    assert [one.__name__ for one in reward.functions] == ["judge"]
    assert (policy.lora, len(tasks), algorithm.terms[0].coefficient) == (
        LoRA(rank=3, scale=1.5, dropout=0.25, keys=("self_attn.q_proj",)),
        len(read_lines(EXAMPLE / "train.jsonl")),
        0.03,
    )
    assert {a.dtype for name, a in tree_flatten(policy.model.parameters()) if "lora" not in name} == {mx.float16}
    chosen = Optimizer(
        name="lion", learning_rate=0.5, schedule="cosine", warmup_steps=4, weight_decay=0.0625, betas=(0.5, 0.25),
        max_grad_norm=17.0,
    )  # fmt: skip
    learning = Train(
        tokens_per_pass=99, max_tokens_per_sequence=77, recompute=True, updates_per_rollout=2, minibatches=3
    )
    assert seen["run"] == {
        "steps": 7, "rollout": Rollout(tasks_per_step=3, group_size=6, max_rows=13, resampling_rounds=4),
        "sampling": sampling, "limits": EpisodeLimits(), "environment": None, "seed": 5, "optimizer": chosen,
        "train": learning,
    }  # fmt: skip
    assert teacher == Teacher(teacher.policy, hint="answer", thinking=False)
    assert {a.dtype for _, a in tree_flatten(teacher.policy.model.parameters())} == {mx.bfloat16}
    assert teacher.policy.lora is None
    scoring = seen["evaluate"].pop(2)
    assert (seen["evaluate"].pop(0), len(seen["evaluate"].pop(1))) == (policy, 8)
    assert (scoring.functions, scoring.weights) == (reward.functions, (0.5,))
    assert seen["evaluate"] == {
        "sampling": Sampling(max_tokens=9, temperature=0.375, top_p=1.0, top_k=0, min_p=0.0, **rules),
        "environment": None, "limits": EpisodeLimits(), "max_rows": 13, "seed": 5, "state": TrainerState(7, 7),
        "turns": None, "train": learning,
        "samples": 3, "samples_temperature": 0.625,
    }  # fmt: skip
    assert (thinking[0], thinking[-1]) == (True, False)  # of prompts, and of those with the teacher's hint
    assert seen["rules_of"] == {0: policy.tokenizer, 1: sampling}
    assert json.loads((folder / "out/run/evaluation.json").read_text())["after"]["accuracy"] == 0.6


def test_reward_functions_are_put_on_their_own_scales(folder):
    settings = [
        'reward.functions=["judge.py:judge", "mlxrl.rewards:last_number_matches"]', "reward.weights=[1, 0.5]",
        "algorithm.scale=function", "algorithm.whiten={ddof = 1}", "reward.length_penalty=0.1",
        "rollout.resampling_rounds=1",
    ]  # fmt: skip
    assert train(folder, *settings) == 0
    assert all(
        line["updates"] == 1 and line["advantages/abs_mean"] > 0
        for line in read_lines(folder / "out/run/metrics.jsonl")
    )
    for sample in read_lines(folder / "out/run/samples.jsonl"):
        judged, right, length = (sample["rewards"][name] for name in ("judge", "last_number_matches", "shaping/length"))
        assert sample["reward"] == pytest.approx(judged + 0.5 * right + length)
        assert -0.1 * 2.5 <= length <= 0


OPENCLAW = ["algorithm.teacher_surrogate.k=16"]
TEACHER = {
    "by another model": ["teacher.id={model}", "teacher.adapter={adapter}"],
    "by a hint": ["teacher.hint=answer", "algorithm.teacher_vocabulary.beta=1"],
    "by the base": ["teacher.id=base", "teacher.hint=answer", *OPENCLAW],
}


@pytest.mark.parametrize("how", TEACHER)
def test_a_student_is_taught(folder, capsys, how):
    """Without a reward and without held-out examples, from the command line."""
    policy = load(str(EXAMPLE), lora=LoRA(rank=2))
    policy.model.update(tree_map(lambda leaf: leaf + 0.05, policy.model.trainable_parameters()))
    policy.save(folder / "adapter")
    config = CONFIG.replace(f'evaluation = "{EXAMPLE}/test.jsonl"\n', "").replace("[evaluation]\nexamples = 8\n", "")
    config = config.replace('[reward]\nfunctions = ["judge.py:judge"]\n', "")
    settings = [one.format(model=EXAMPLE, adapter="adapter") for one in TEACHER[how]]
    assert train(folder, "algorithm.name=opd", *settings, config=config) == 0
    lines = read_lines(folder / "out/run/metrics.jsonl")
    assert len(lines) == 2
    assert all(line["teacher/kl"] != 0 and line["updates"] == 1 for line in lines)
    assert lines[0]["reward"] is None
    assert ("teacher" in manifest(folder)) == (how == "by another model")
    out = capsys.readouterr().out
    assert {"by another model": f"{EXAMPLE} with adapter", "by a hint": "the model itself, with the hint answer"}.get(
        how, "the model without adapters, with the hint answer"
    ) in out


def test_an_example_without_a_hint_is_refused_before_anything_is_loaded(folder, capsys):
    rows = [{"question": "1+1=?", "answer": "2"}, {"question": "1+2=?", "answer": ""}]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert train(folder, "--dry-run", "algorithm.name=opd", "teacher.hint=answer", "data.train=rows.jsonl") == 2
    assert "teacher: hint: wanted a text in column 'answer' of every task, got \"\"" in capsys.readouterr().err


def test_a_teacher_of_another_vocabulary_is_the_users_fault(folder, capsys):
    other = folder / "other"
    shutil.copytree(EXAMPLE, other)
    words = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(words.replace('"7"', '"_"').replace('"8"', '"7"').replace('"_"', '"8"'))
    assert train(folder, "algorithm.name=opd", "teacher.id=other") == 2
    err = capsys.readouterr().err
    assert "teacher: its vocabulary is not the student's: token" in err
    assert err.count("\n") == 1
    assert train(folder, "algorithm.name=opd", "teacher.hint=answer", "run.folder=out/2") == 0


def test_a_step_without_signal_is_an_event_and_not_the_end(folder, capsys):
    (folder / "judge.py").write_text("def judge(completions, **_):\n    return [1.0] * len(completions)\n")
    (folder / "run.toml").write_text(CONFIG)
    assert main(["train", "--config", "run.toml", "rollout.resampling_rounds=1"]) == 0
    events = [event for event in read_lines(folder / "out/run/events.jsonl") if event["event"] == "no signal"]
    assert [
        (event["step"], event["groups/sampled"], event["groups/used"], event["rollout/rounds"]) for event in events
    ] == [
        (1, 4, 0, 2),
        (2, 4, 0, 2),
    ]
    assert "step 2: none of 4 groups in 2 rounds has a learning signal; no update" in capsys.readouterr().out
    assert manifest(folder)["state"] == "succeeded"


def test_a_folder_in_use_is_refused_before_anything_is_loaded(folder, capsys, monkeypatch):
    (folder / "out/run").mkdir(parents=True)
    (folder / "out/run/notes.txt").write_text("mine")
    monkeypatch.setattr("mlxrl.policy.policy.load", None)
    assert train(folder) == 2
    assert capsys.readouterr().err == (
        'mlxrl: run.folder: out/run is not empty; choose another one, such as run.folder="out/run-2"\n'
    )
    assert [path.name for path in (folder / "out/run").iterdir()] == ["notes.txt"]


def test_without_a_folder_the_first_free_one_is_taken(folder, capsys):
    config = CONFIG.replace('folder = "out/run"\n', "")
    for name in ("runs/run", "runs/run-2"):
        assert train(folder, "--dry-run", config=config) == 0
        assert f'folder = "{folder / name}"' in capsys.readouterr().out
        (folder / name).mkdir(parents=True)
        (folder / name / "x").touch()


def test_a_dry_run_loads_no_weights_writes_nothing_and_prints_toml(folder, capsys, monkeypatch):
    import mlx_lm

    own, lazy = mlx_lm.load, []
    monkeypatch.setattr(mlx_lm, "load", lambda *a, **given: (lazy.append(given.get("lazy")), own(*a, **given))[1])
    assert train(folder, "rollout.group_size=3", "--dry-run", "lora.rank=4") == 0
    assert lazy
    assert all(lazy)
    out = capsys.readouterr().out
    assert tomllib.loads(out)["rollout"]["group_size"] == 3
    assert "# a step: 2 prompts x 3 completions = 6 completions of at most 12 tokens, 1 update" in out
    assert "# a run: 2 steps, 2 evaluations of 8 examples, in out/run" in out
    config = json.loads((EXAMPLE / "config.json").read_text())
    layers, wide = config["num_hidden_layers"], config["hidden_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    parameters = layers * 4 * (wide + queries)
    assert f"# adapted: self_attn.q_proj (Linear {queries} x {wide}), {layers} times, {parameters:,} parameters" in out
    assert sorted(path.name for path in folder.iterdir() if path.name != "__pycache__") == ["judge.py", "run.toml"]


def test_a_dry_run_knows_the_layers_that_do_not_exist(folder, capsys):
    assert train(folder, "--dry-run", 'lora.keys=["self_attn.q_prj"]') == 2
    assert "did you mean 'self_attn.q_proj'?" in capsys.readouterr().err


def test_a_model_that_cannot_be_loaded_is_the_users_fault(folder, capsys):
    (folder / "model").mkdir()
    assert train(folder, "model.id=model") == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (folder / "out").exists()


def test_a_step_larger_than_the_data_is_refused(folder, capsys):
    rows = len(read_lines(EXAMPLE / "train.jsonl"))
    assert train(folder, f"rollout.tasks_per_step={rows + 1}") == 2
    assert f"tasks_per_step: wanted at most the {rows} examples" in capsys.readouterr().err
    assert not (folder / "out").exists()


def test_a_reward_that_always_fails_ends_the_run_in_one_line(folder, capsys):
    assert train(folder, on_step="if calls > 2: raise KeyError('gold')") == 2
    assert re.fullmatch(
        r"mlxrl: reward 'judge' raised for each of 8 completions: KeyError: 'gold' \(\S*judge.py, line \d+\); "
        r"reward.retry_each = true calls it again for each by itself\n",
        capsys.readouterr().err,
    )
    assert manifest(folder)["state"] == "failed"
    assert "Traceback" in read_lines(folder / "out/run/events.jsonl")[-1]["traceback"]
    assert (folder / "out/run/checkpoints/step-000001").exists()


FRAGILE = """
import asyncio

calls = 0

def some(completions, answer, **_):
    return [1 / (int(gold) % 3) for gold in answer]

def cancelled(completions, **_):
    global calls
    calls += 1
    if calls == 4:
        raise asyncio.CancelledError("judge timed out")
    return [float(len(said) % 2) for said in completions]
"""


def test_what_could_not_be_scored_is_counted_everywhere(folder, capsys):
    (folder / "fragile.py").write_text(FRAGILE)
    settings = ['reward.functions=["fragile.py:some"]', "reward.retry_each=true"]
    assert train(folder, *settings) == 0
    out, run = capsys.readouterr().out, folder / "out/run"
    why = "ZeroDivisionError: division by zero (fragile.py, line 7)"
    before = json.loads((run / "evaluation.json").read_text())["before"]
    golds = [int(example["answer"]) for example in read_lines(EXAMPLE / "test.jsonl")[:8]]
    assert (before["n"], before["unscored"]) == (8 - before["unscored"], sum(gold % 3 == 0 for gold in golds))
    assert [(one["function"], one["error"]) for one in before["failures"]] == [("some", why)]
    assert f"held-out before training: {before['unscored']} of 8 examples could not be scored and are left out" in out
    counted = [line["rewards/some/unscored"] for line in read_lines(run / "metrics.jsonl")]
    told = [event for event in read_lines(run / "events.jsonl") if event["event"] == "unscored"]
    assert sum(counted) == sum(event["completions"] for event in told) > 0
    assert {event["error"] for event in told} == {why}
    assert main(["eval", "--config", "run.toml", *settings]) == 0
    assert f"'some' failed for {before['unscored']}; the first: " in capsys.readouterr().out


def test_an_evaluation_between_steps_that_cannot_be_scored_does_not_end_the_run(folder):
    (folder / "fragile.py").write_text(FRAGILE)
    with pytest.warns(UserWarning, match="evaluation after step 2: reward 'cancelled' raised for each of 8"):
        assert train(folder, 'reward.functions=["fragile.py:cancelled"]', "steps=3", "run.evaluate_every=2") == 0
    events = [event for event in read_lines(folder / "out/run/events.jsonl") if event["event"] == "evaluation failed"]
    assert [event["when"] for event in events] == ["after step 2"]


def test_a_sink_that_fails_does_not_end_the_run(folder):
    (folder / "mine.py").write_text("def each(step):\n    raise OSError('disk full')\n")
    with pytest.warns(UserWarning, match="sink .*/mine.py:each: step: OSError: disk full; it receives nothing more"):
        assert train(folder, 'run.sinks=["mine.py:each"]') == 0
    assert [line["step"] for line in read_lines(folder / "out/run/metrics.jsonl")] == [1, 2]
    assert tomllib.loads((folder / "out/run/config.toml").read_text())["run"]["sinks"] == [f"{folder}/mine.py:each"]


def test_an_unexpected_error_keeps_its_traceback_and_the_adapter(folder, capsys, monkeypatch):
    real, calls = loop.optimizer_step, []

    def failing(*arguments, **keywords):
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("[matmul] shapes")
        return real(*arguments, **keywords)

    monkeypatch.setattr(loop, "optimizer_step", failing)
    assert train(folder, "sampling.temperature=3.0") == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "[matmul] shapes" in err
    last = read_lines(folder / "out/run/events.jsonl")[-1]
    assert (last["event"], last["error"]) == ("failed", "ValueError: [matmul] shapes")
    assert 'raise ValueError("[matmul] shapes")' in last["traceback"]
    assert [line["step"] for line in read_lines(folder / "out/run/metrics.jsonl")] == [1]
    assert (folder / "out/run/adapters/adapters.safetensors").read_bytes() == (
        folder / "out/run/checkpoints/step-000001/adapters.safetensors"
    ).read_bytes()


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_ends_the_run_after_the_step(folder, capfd, name):
    assert train(folder, "steps=9", on_step=f"calls == 3 and signal.raise_signal(signal.{name})") == 130
    assert manifest(folder)["state"] == "cancelled"
    assert [line["step"] for line in read_lines(folder / "out/run/metrics.jsonl")] == [1, 2]
    assert (folder / "out/run/adapters/adapters.safetensors").read_bytes() == (
        folder / "out/run/checkpoints/step-000002/adapters.safetensors"
    ).read_bytes()
    evaluation = json.loads((folder / "out/run/evaluation.json").read_text())
    assert evaluation["state"] == "begun"
    assert "after" not in evaluation
    assert "once more to stop at once" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_signal_ends_it_at_once(folder, capsys):
    twice = "[signal.raise_signal(signal.SIGINT) for _ in range(2) if calls == 3]"
    assert train(folder, "steps=9", on_step=twice) == 130
    assert manifest(folder)["state"] == "interrupted"
    out = capsys.readouterr().out.splitlines()
    assert [line.strip() for line in out[-3:]] == [
        "stopped at once", "adapter     out/run/adapters", "go on with  mlxrl train --resume out/run",
    ]  # fmt: skip
    assert [line["step"] for line in read_lines(folder / "out/run/metrics.jsonl")] == [1]


def test_ctrl_c_while_a_model_is_loaded_is_said(folder, capsys, monkeypatch):
    def interrupted(*arguments, **keywords):
        raise KeyboardInterrupt

    monkeypatch.setattr("mlxrl.policy.policy.load", interrupted)
    assert train(folder, "train.tokens_per_pass=512") == 130
    assert capsys.readouterr().err == "mlxrl: stopped\n"
    assert not (folder / "out").exists()


def test_ctrl_c_from_outside(folder):
    (folder / "run.toml").write_text(CONFIG.replace("steps = 2", "steps = 100000"))
    (folder / "judge.py").write_text(JUDGE.format(on_step="pass"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "mlxrl", "train", "--config", "run.toml", "run.checkpoint_every=0"]
    child = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    metrics, deadline = folder / "out/run/metrics.jsonl", time.monotonic() + 60
    while len(read_lines(metrics)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 130, err
    assert b"Traceback" not in err
    assert out.endswith(b"adapter     out/run/adapters\n  go on with  mlxrl train --resume out/run\n")
    assert manifest(folder)["state"] == "cancelled"
    assert (folder / "out/run/adapters/adapter_config.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "mlxrl: wanted a command, one of train, sft, eval"),
        (["train"], "mlxrl train: wanted --config FILE or --resume RUN; see mlxrl train --help\n"),
        (["train", "--config", "a.toml", "--dry"], "mlxrl: unknown option --dry; see mlxrl --help\n"),
        (["trian"], "mlxrl: argument COMMAND: invalid choice: 'trian' (choose from"),
    ],
)
def test_a_command_line_that_is_none(capsys, arguments, message):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    err = capsys.readouterr().err
    assert caught.value.code == 2
    assert err.startswith(message)
    assert err.count("\n") == 1


def test_versions_are_printed(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert re.fullmatch(r"mlxrl \S+, mlx \S+, mlx-lm \S+, python \S+\n", capsys.readouterr().out)


def test_overrides_may_stand_between_options(folder, capsys):
    (folder / "run.toml").write_text(CONFIG)
    (folder / "judge.py").write_text(JUDGE.format(on_step="pass"))
    assert main(["train", "steps=5", "--config", "run.toml", "seed=3", "--dry-run", "lora.rank=2"]) == 0
    resolved = tomllib.loads(capsys.readouterr().out)
    assert (resolved["steps"], resolved["seed"], resolved["lora"]["rank"]) == (5, 3, 2)


def test_eval_wants_held_out_examples(folder, capsys):
    (folder / "judge.py").write_text(JUDGE.format(on_step="pass"))
    config = CONFIG.replace(f'evaluation = "{EXAMPLE}/test.jsonl"\n', "").replace("[evaluation]\nexamples = 8\n", "")
    (folder / "run.toml").write_text(config)
    assert main(["eval", "--config", "run.toml"]) == 2
    assert "mlxrl: run.toml: data: missing key 'evaluation'" in capsys.readouterr().err


def test_a_thinking_budget_for_a_model_that_does_not_think_is_the_users_fault(folder, capsys):
    assert train(folder, "sampling.thinking_budget=5") == 2
    assert main(["eval", "--config", "run.toml", "sampling.thinking_budget=5"]) == 2
    line = "mlxrl: sampling: thinking_budget: the tokenizer has no tokens that begin and end thinking; leave it out\n"
    assert capsys.readouterr().err == 2 * line


def corrupt(model, name, text):
    config = json.loads((EXAMPLE / "config.json").read_text())
    if isinstance(text, dict):
        text = json.dumps(config | text)
    (model / name).write_bytes(text if isinstance(text, bytes) else text.encode())


CORRUPT = {
    "a size as text": ("config.json", {"hidden_size": "64"}, "unsupported operand type"),
    "no vocabulary": ("config.json", {"vocab_size": 0}, "AssertionError"),
    "heads without width": ("config.json", {"num_attention_heads": 10**6}, "q_proj.weight"),
    "packed by a word": ("config.json", {"quantization": "4bit"}, "string indices must be integers"),
    "a config cut short": ("config.json", '{"model_type": ', "Expecting value"),
    "a config that is deep": ("config.json", "[" * 100_000, "recursion"),
    "settings cut short": ("tokenizer_config.json", '{"a', "Unterminated string"),
    "settings as a list": ("tokenizer_config.json", "[1]", "'list' object"),
    "a tokenizer cut short": ("tokenizer.json", '{"version": "1.0"', "tokenizer.json"),
    "a template of bytes": ("chat_template.jinja", b"\xff\xfe", "utf-8"),
    "weights of no shape": (
        "model.safetensors", (60).to_bytes(8, "little") + b'{"a": {"dtype": "F32", "shape": 3}}'.ljust(60), "whole",
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", CORRUPT)
def test_a_models_file_that_is_corrupt_is_one_line(folder, capsys, how):
    name, content, message = CORRUPT[how]
    shutil.copytree(EXAMPLE, folder / "model")
    (folder / "model/chat_template.jinja").unlink(missing_ok=True)
    corrupt(folder / "model", name, content)
    assert train(folder, "model.id=model") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "/model could not be loaded: " in line
    assert message in line
    assert not (folder / "out").exists()


KNOWN_BEFORE = {
    "layers": (['lora.keys=["self_attn.q_prj"]'], "did you mean 'self_attn.q_proj'?"),
    "a teacher": (["algorithm.name=opd", "teacher.id=other"], "teacher: its vocabulary is not the student's"),
    "a teacher's adapter": (["algorithm.name=opd", "teacher.id=other", "teacher.adapter=other"], "adapter_config.json"),
    "sampling": (["sampling.thinking_budget=5"], "sampling: thinking_budget: the tokenizer has no tokens"),
}


@pytest.mark.parametrize("what", KNOWN_BEFORE)
def test_a_fault_that_is_known_before_the_run_leaves_no_folder(folder, capsys, what):
    arguments, message = KNOWN_BEFORE[what]
    shutil.copytree(EXAMPLE, folder / "other")
    words = (folder / "other/tokenizer.json").read_text()
    (folder / "other/tokenizer.json").write_text(
        words.replace('"7"', '"_"').replace('"8"', '"7"').replace('"_"', '"8"')
    )
    assert train(folder, *arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (folder / "out").exists()


def test_a_run_stays_where_it_began(folder, capsys):
    """User code changes the current directory, where another folder of the run's name lies."""
    (folder / "elsewhere/out/run").mkdir(parents=True)
    assert train(folder, on_step="import os; os.chdir(os.path.dirname(__file__) + '/elsewhere')") == 0
    assert manifest(folder)["state"] == "succeeded"
    names = {"adapters", "checkpoints", "config.toml", "evaluation.json", "events.jsonl", "lock", "manifest.json"}
    names |= {"handoff.json", "metrics.jsonl", "samples.jsonl"}
    assert {path.name for path in (folder / "out/run").iterdir()} == names
    assert not list((folder / "elsewhere/out/run").iterdir())
    assert f"--adapter-path {folder}/out/run/adapters" in capsys.readouterr().out


def test_user_code_that_changes_the_directory_when_it_is_imported_moves_nothing(folder, capsys):
    (folder / "elsewhere").mkdir()
    text = CONFIG.replace('folder = "out/run"\n', "").replace("judge.py:judge", "moving.py:judge")
    (folder / "run.toml").write_text(text)
    body = "def judge(completions, **_): return [float(len(c) % 3) for c in completions]\n"
    (folder / "moving.py").write_text(f"import os\nos.chdir('elsewhere')\n{body}")
    assert main(["train", "--config", "run.toml", "steps=1"]) == 0
    assert json.loads((folder / "runs/run/manifest.json").read_text())["state"] == "succeeded"
    assert main(["eval", "--config", str(folder / "run.toml"), "--adapter", str(folder / "runs/run/adapters")]) == 0
    assert not list((folder / "elsewhere").iterdir())


def test_runs_without_a_folder_that_begin_at_once_have_one_each(folder, monkeypatch):
    """Each has looked before any has written: what another one took meanwhile is not taken."""
    real, taken = folder_module.free_folder, []

    def late(path):
        free = real(path)
        if len(taken) < 2:
            taken.append(free)
            folder_module.claim(free, lambda path: "")
        return free

    monkeypatch.setattr(folder_module, "free_folder", late)
    assert train(folder, "steps=1", config=CONFIG.replace('folder = "out/run"\n', "")) == 0
    assert sorted(path.name for path in (folder / "runs").iterdir()) == ["run", "run-2", "run-3"]
    assert json.loads((folder / "runs/run-3/manifest.json").read_text())["state"] == "succeeded"
    assert tomllib.loads((folder / "runs/run-3/config.toml").read_text())["run"]["folder"] == f"{folder}/runs/run-3"


@pytest.mark.slow
def test_a_run_goes_on_from_an_adapter(folder, capsys):
    assert train(folder, "lora.rank=4", "lora.layers=1", 'lora.keys=["q_proj"]', "steps=1") == 0
    capsys.readouterr()
    more = ('model.adapter="out/run/adapters"', 'run.folder="out/more"')
    assert train(folder, *more, "--dry-run") == 0
    out = capsys.readouterr().out
    assert tomllib.loads(out)["lora"] == {
        "rank": 4, "scale": 2.0, "dropout": 0.0, "keys": ["self_attn.q_proj"], "layers": 1, "dora": False,
    }  # fmt: skip
    assert "# adapters: LoRA rank 4, scale 2, from out/run/adapters" in out
    assert "# adapted: self_attn.q_proj (Linear 64 x 64), 1 times, 512 parameters" in out
    assert train(folder, *more, "lora.rank=8", "lora.scale=3") == 2
    assert "lora: has no effect beside an adapter" in capsys.readouterr().err
    assert train(folder, *more, "steps=1") == 0
    assert main(["train", "--config", "out/more/config.toml", "--dry-run", 'run.folder="out/again"']) == 0
    capsys.readouterr()
    assert main(["eval", "--config", "run.toml", *more]) == 0
    assert capsys.readouterr().out.startswith("out/run/adapters: accuracy ")


def test_eval_tells_a_fault_from_an_error(folder, capsys, monkeypatch):
    (folder / "judge.py").write_text("def judge(completions):\n    return [1.0]\n")
    (folder / "run.toml").write_text(CONFIG)
    assert main(["eval", "--config", "run.toml"]) == 2
    assert capsys.readouterr().err == "mlxrl: reward 'judge': wanted 8 numbers, one per completion, got 1\n"

    def broken(*arguments, **keywords):
        raise ValueError("[matmul] shapes")

    monkeypatch.setattr(evaluate, "sample", broken)
    with pytest.raises(ValueError, match=r"\[matmul\] shapes"):
        main(["eval", "--config", "run.toml"])


@pytest.mark.slow
def test_prompts_that_fill_the_context_are_told_by_every_command(folder, capsys):
    rows = read_lines(EXAMPLE / "train.jsonl")[:4]
    rows[1]["question"] = "1+" * 400 + "1=?"
    (folder / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = "long.jsonl: line 2: a prompt of 806 tokens does not fit the context of 512; 1 of 4 are left out"
    long = ["data.train=long.jsonl", "steps=1"]
    assert train(folder, *long, "--dry-run") == 0
    assert line in capsys.readouterr().out
    assert main(["plan", "--config", "run.toml", *long]) == 0
    assert line in capsys.readouterr().out
    with pytest.warns(UserWarning, match="does not fit"):
        assert train(folder, *long) == 0
    assert json.loads((folder / "out/run/metrics.jsonl").read_text())["prompts/left_out"] == 1
    with pytest.warns(UserWarning, match="does not fit"):
        assert main(["eval", "--config", "run.toml", "data.evaluation=long.jsonl"]) == 0
    assert " 3 examples" in capsys.readouterr().out


def test_hints_that_fill_the_teachers_context_are_told_and_counted(folder, capsys):
    rows = [row | {"hint": "so 2"} for row in read_lines(EXAMPLE / "train.jsonl")[:4]]
    rows[2]["hint"] = "1+" * 400
    (folder / "hints.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    long = ["data.train=hints.jsonl", "steps=1", "algorithm.name=opd", "teacher.hint=hint", "train.tokens_per_pass=512"]
    with pytest.warns(UserWarning, match="line 3: the teacher's prompt, with 'hint', of ") as told:
        assert train(folder, *long) == 0
    assert len([one for one in told if "1 of 4 are left out" in str(one.message)]) == 1
    assert json.loads((folder / "out/run/metrics.jsonl").read_text())["prompts/left_out"] == 1
    capsys.readouterr()
    for dry in ([], ["--dry-run"]):
        with warnings.catch_warnings(action="ignore"):
            assert train(folder, *long, "rollout.tasks_per_step=4", "run.folder=out/other", *dry) == 2
        err = capsys.readouterr().err
        assert re.match(r"mlxrl: rollout: tasks_per_step: wanted at most the 3 examples of \S+ that fit, got 4\n", err)
    assert not (folder / "out/other").exists()
