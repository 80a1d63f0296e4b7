"""Supervised fine-tuning: one more algorithm on the same path."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import mlxrl as rl
from helpers import EXAMPLE, TRAINED, a_policy, assert_same_gradient, flat, length, made, moved
from mlxrl import config
from mlxrl.algo.reduce import finish
from mlxrl.cli.main import main
from mlxrl.cli.plan import Plan
from mlxrl.files import read_lines
from mlxrl.policy.policy import Policy
from mlxrl.rollout.demonstrations import demonstration
from mlxrl.runs.experiment import Experiment
from mlxrl.settings import Train
from mlxrl.train.batch import make_batch, tokens_of
from mlxrl.train.gradient import gradient
from mlxrl.train.update import complete
from mlxrl.types import Group
from models import dense, hybrid, moe


def answers(prompt: int) -> list[Group]:
    """Two groups of answers to a prompt each, without rewards; one has two turns."""
    first, other = (made([math.nan] * 3, prompt=prompt, seed=seed, lengths=[5, 2, 9]) for seed in (0, 1))
    (turn,), (later,) = first[0].turns, first[1].turns
    several = replace(first[0], turns=(turn, replace(later, observation=later.observation[:4])))
    return [(several, *first[1:]), other]


def by_hand(policy: Policy, groups: list[Group]) -> tuple[mx.array, Any]:
    """The masked cross-entropy of the answers' tokens by a plain forward of every trajectory, and its gradient."""
    rows = []
    for one in (one for group in groups for one in group):
        ids = [token for turn in one.turns for token in (*turn.observation, *turn.tokens)]
        mask = [m for turn in one.turns for m in (*[0] * len(turn.observation), *[1] * len(turn.tokens))]
        rows.append((mx.array(ids), mx.array(mask, mx.float32)))

    def loss(model: Any) -> mx.array:
        entropies = [nn.losses.cross_entropy(model(ids[None])[0, :-1], ids[1:]) * mask[1:] for ids, mask in rows]
        return sum(map(mx.sum, entropies)) / sum(mask.sum() for _, mask in rows)

    policy.model.train()
    found = nn.value_and_grad(policy.model, loss)(policy.model)
    policy.model.eval()
    return found


@pytest.mark.parametrize("make", [dense, hybrid, moe])
@pytest.mark.parametrize(("prompt", "budget"), [(90, 100_000), (90, 104), (6, 100_000), (6, 20)])
def test_loss_and_gradient_are_those_of_a_plain_masked_cross_entropy(make: Any, prompt: int, budget: int) -> None:
    """Prompts of 90 tokens are a shared prefix, of 6 are not; the small budgets make several micro-batches."""
    policy, groups, algorithm = a_policy(make), answers(prompt), rl.sft()
    loss, wanted = by_hand(policy, groups)
    batch = make_batch(groups, algorithm, Train(tokens_per_pass=budget))
    assert {one.prefix.size for one in batch} == {90 if prompt == 90 else 0}
    assert (len(batch) > 2) == (budget < 1000)
    metrics, got = gradient(policy, batch, algorithm)
    metrics = finish(metrics)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["perplexity"] == pytest.approx(math.exp(loss.item()), rel=1e-4)
    assert_same_gradient(got, wanted, 1e-4 if make is hybrid else 1e-5)  # chunks of a recurrence round otherwise


def test_the_mean_is_over_tokens_or_over_answers() -> None:
    policy, groups = a_policy(), answers(6)[1:]
    batches = {name: make_batch(groups, rl.sft(reduction=name)) for name in ("token_mean", "sequence_mean", "sum")}
    found = {name: finish(gradient(policy, batch, rl.sft(reduction=name))[0]) for name, batch in batches.items()}
    each = [finish(gradient(policy, make_batch([(one,)], rl.sft()), rl.sft())[0])["loss"] for one in groups[0]]
    assert found["token_mean"]["loss"] == pytest.approx(np.dot(each, [5, 2, 9]) / 16, rel=1e-5)
    assert found["sequence_mean"]["loss"] == pytest.approx(np.mean(each), rel=1e-5)
    assert found["sum"]["loss"] == pytest.approx(np.dot(each, [5, 2, 9]), rel=1e-5)
    for one in found.values():
        assert one["cross_entropy"] == pytest.approx(found["token_mean"]["loss"], rel=1e-5)


def test_tokens_of_a_batch_are_counted_with_its_padding() -> None:
    batch = make_batch(answers(6), rl.sft(), Train(tokens_per_pass=10**5))
    # 6 + 5 + 4 + 2 in two turns; 6 + 2, 6 + 9; 6 + 5, 6 + 2, 6 + 9: 74 tokens, of which 5 + 2 + 2 + 9 + 5 + 2 + 9
    found = tokens_of(batch)
    assert (found["tokens/learned"], found["tokens/read"]) == (34.0, 74.0)
    assert found["tokens/padding"] == sum(one.tokens.size for one in batch) - 74
    shared = tokens_of(make_batch(answers(90), rl.sft()))
    assert (shared["tokens/learned"], shared["tokens/read"]) == (34.0, 2 * 90 + 4 + 34.0)


PAIRS = {"prompt": "question", "completion": "answer"}


def adder() -> tuple[Policy, list[rl.Task]]:
    return rl.load(str(EXAMPLE)), rl.tasks(EXAMPLE / "train.jsonl", **PAIRS)


def test_a_run_without_a_reward_learns_the_answers() -> None:
    policy, tasks = adder()
    steps = list(rl.run(policy, tasks[:64], rl.sft(), steps=20, rollout=rl.Rollout(tasks_per_step=32),
                        optimizer=rl.Optimizer(learning_rate=1e-2)))  # fmt: skip
    assert steps[-1].metrics["loss"] < 0.5 * steps[0].metrics["loss"]
    (one,) = steps[0].groups[0]
    assert policy.tokenizer.decode(list(one.turns[0].tokens)) == f"{one.task.columns['completion']}<|end|>"
    assert str(steps[0]).startswith("step 1  loss 1")
    assert "perplexity" in str(steps[0])
    named = {"reward", "groups/zero_variance", "rollout/tokens", "ratio/mean", "sampling/kl"}
    assert not named & steps[0].metrics.keys()
    assert {"cross_entropy", "tokens/padding", "seconds/data", "seconds/update"} <= steps[0].metrics.keys()


def test_terms_that_add_to_the_loss_go_with_it() -> None:
    policy, tasks = adder()
    terms = [rl.KL(coefficient=0.1), rl.Entropy(coefficient=0.01)]
    first, second = rl.run(policy, tasks, rl.sft(terms=terms), steps=2, optimizer=rl.Optimizer(learning_rate=1e-2))
    assert first.metrics["kl"] == 0.0
    assert second.metrics["kl"] > 0
    with pytest.raises(rl.algo.table.SettingError, match=r"sft: algorithm.correction: has no effect"):
        rl.sft(terms=[rl.Correction(mode="truncate")])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rollout": rl.Rollout(group_size=4)}, "rollout: group_size: has no effect, because sft samples nothing"),
        ({"rollout": rl.Rollout(max_rows=4)}, "rollout: max_rows: has no effect"),
        ({"sampling": rl.Sampling(temperature=0.5)}, "sampling: temperature: has no effect"),
        ({"sampling": rl.Sampling(max_tokens=5)}, "sampling: max_tokens: has no effect"),
        ({"train": Train(updates_per_rollout=2)}, "train: updates_per_rollout: has no effect"),
        ({"reward": length}, "reward: has no effect, because sft samples nothing"),
        ({"environment": dense}, "environment: has no effect, because sft samples nothing"),
    ],
)
def test_what_is_about_samples_is_refused(settings: dict[str, Any], message: str) -> None:
    policy, tasks = adder()
    with pytest.raises(ValueError, match=message):
        rl.run(policy, tasks, rl.sft(), steps=1, **settings)


def test_a_run_counts_what_it_leaves_out_and_cuts() -> None:
    policy, tasks = adder()
    some = [*tasks[:8], rl.Task("1" * 600, {"completion": "1"}), rl.Task("1+1", {"completion": "2" * 600})]
    with pytest.warns(UserWarning, match="more than 512 tokens; 1 of 10 are cut there, and 1 left out"):
        run = rl.run(policy, some, rl.sft(), steps=1, rollout=rl.Rollout(tasks_per_step=9))
    (step,) = run
    assert step.metrics["prompts/left_out"] == 1
    assert step.metrics["completions/clipped_ratio"] == pytest.approx(1 / 9)


def test_held_out_loss_is_the_mean_over_all_answers_tokens_and_its_change_is_paired() -> None:
    policy, tasks = adder()
    some = tasks[:12]
    before = rl.evaluate(policy, some, turns="all")
    losses = [finish(gradient(policy, make_batch([group], rl.sft()), rl.sft())[0])["loss"]
              for group in [(demonstration(policy.tokenizer, task),) for task in some]]  # fmt: skip
    assert before.answers is not None
    counts = before.answers.tokens
    assert counts == tuple(len(task.columns["completion"]) + 1 for task in some)
    assert before.summary()["loss"] == pytest.approx(np.dot(losses, counts) / sum(counts), rel=1e-5)
    assert before.summary().keys() == {"loss", "perplexity", "answer_tokens", "n"}
    moved(policy)
    after = rl.evaluate(policy, some, turns="all")
    found = rl.compare(before, after)
    assert found["loss_difference"] == pytest.approx(after.summary()["loss"] - before.summary()["loss"], abs=1e-9)
    assert found["loss_interval"][0] < found["loss_difference"] < found["loss_interval"][1]


def test_with_a_reward_an_evaluation_has_both() -> None:
    policy, tasks = adder()
    reply = {"role": "assistant", "content": "12"}
    talks = [rl.Task(({"role": "user", "content": task.prompt}, reply), {"answer": "x"}) for task in tasks[:3]]
    found = rl.evaluate(policy, talks, length, turns="last", sampling=rl.Sampling(max_tokens=3, temperature=0.0))
    assert {"loss", "accuracy", "mean_reward"} <= found.summary().keys()
    assert [len(one.task.messages) for one in found.trajectories] == [1, 1, 1]  # asked without the answer
    (text,) = rl.tasks([{"text": "abc"}], prompt="text")
    with pytest.raises(ValueError, match="a text has no prompt that could be answered"):
        rl.evaluate(policy, [text], length, turns="all")


def test_the_reference_is_the_start_or_the_base(tmp_path: Path) -> None:
    """Bit for bit: log-probs of the base model, or of the model with the adapter as it was loaded."""
    first = rl.load(str(EXAMPLE))
    moved(first)
    first.save(tmp_path)
    tasks = rl.tasks(EXAMPLE / "train.jsonl", **PAIRS)[:4]
    algorithm = rl.sft(terms=[rl.KL(coefficient=0.1)])
    wanted = {"base": rl.load(str(EXAMPLE), lora=None), "start": first, None: first}
    for reference, other in wanted.items():
        policy = rl.load(str(EXAMPLE), adapter=tmp_path, reference=reference)
        moved(policy, seed=2)
        batch = make_batch([(demonstration(policy.tokenizer, task),) for task in tasks], algorithm)
        found = complete(policy, batch, algorithm, frozenset({"reference"}))
        plain = complete(other, batch, algorithm, frozenset({"old"}))
        for one, same in zip(found, plain, strict=True):
            assert one.reference_logprobs is not None
            assert same.old_logprobs is not None
            assert mx.array_equal(one.reference_logprobs, same.old_logprobs)


def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *words: str, command: str = "sft") -> int:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sft.toml").write_text(
        TRAINED.replace("[data]", '[data]\ncompletion = "answer"\n') + f'evaluation = "{EXAMPLE}/test.jsonl"\n'
        "[evaluation]\nexamples = 8\n[optimizer]\nlearning_rate = 1e-2\n"
    )
    return main([command, "--config", "sft.toml", "steps=3", "train.tokens_per_pass=256", 'run.folder="out"', *words])


def test_the_command_trains_evaluates_and_leaves_an_adapter_that_rl_goes_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_folder(tmp_path, monkeypatch, "run.checkpoint_every=2", "run.evaluate_every=2") == 0
    shown = capsys.readouterr().out
    assert "answers of 4 examples, 1 update" in shown
    assert "perplexity length trunc. padding" in shown
    assert "held-out  loss" in shown
    out = tmp_path / "out"
    lines = read_lines(out / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert {"loss", "perplexity", "tokens/padding", "evaluation/before/loss"} <= lines[0].keys()
    assert "evaluation/loss" in lines[1]
    assert "evaluation/accuracy" not in lines[1]
    found = json.loads((out / "evaluation.json").read_text())
    assert found["loss_difference"] == pytest.approx(found["after"]["loss"] - found["before"]["loss"])
    assert found["loss_difference"] < 0
    assert (out / "checkpoints" / "step-000002" / "state.json").is_file()
    assert json.loads((out / "manifest.json").read_text())["command"][1] == "sft"
    # the resolved config says which algorithm it was
    assert main(["eval", "--run", "out"]) == 0
    shown = capsys.readouterr().out
    assert f"loss {found['after']['loss']:.4f}" in shown
    assert "equal to what the run recorded after training: the losses of 8 examples" in shown
    assert main(["show", "out"]) == 0
    assert f"held-out  loss difference {found['loss_difference']:+.4f}" in capsys.readouterr().out
    assert main(["lineage", "out"]) == 0
    assert f"held-out loss {found['before']['loss']:.3f} -> {found['after']['loss']:.3f}" in capsys.readouterr().out
    policy = rl.load(str(EXAMPLE), adapter=out / "adapters")
    assert policy.start


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rollout.group_size=4"], "rollout: group_size: has no effect, because sft samples nothing"),
        (["sampling.max_tokens=9"], "sampling: max_tokens: has no effect"),
        (["model.reference='base'"], "model: reference: has no effect, because no term compares with a reference"),
        (["data.completion=nothing"], "no column 'nothing', wanted as 'completion'"),
        (["data.columns.completion='answer'"], "data: columns: 'completion' is data.completion"),
        (["algorithm.correction={}"], "sft: algorithm.correction: has no effect, because nothing is sampled"),
    ],
)
def test_settings_without_effect_are_refused_by_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert run_folder(tmp_path, monkeypatch, *words) == 2
    assert message in capsys.readouterr().err


def test_each_command_refuses_what_is_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reward = 'reward.functions=["mlxrl.rewards:last_number_matches"]'
    assert run_folder(tmp_path, monkeypatch, reward, command="train") == 2
    assert "data: completion: has no effect, because grpo learns from samples" in capsys.readouterr().err
    (tmp_path / "rl.toml").write_text(f'{TRAINED}[algorithm]\nname = "grpo"\n')
    assert main(["sft", "--config", "rl.toml", reward]) == 2
    assert "rl.toml: algorithm: name: wanted 'sft', which is the default here, got 'grpo'" in capsys.readouterr().err


def test_a_plan_knows_what_a_step_reads(tmp_path: Path) -> None:
    (tmp_path / "sft.toml").write_text(f'{TRAINED}completion = "answer"\n[algorithm]\nname = "sft"\n')
    plan = Plan.of(Experiment.of(*config.read(tmp_path / "sft.toml")))
    assert plan.work(plan.config).widest() == (0, 4, 17)  # 12 tokens of a prompt, and 4 digits with their end
    assert not plan.need("rollout").keys() & {"first prompts", "decoding", "later prompts"}  # nothing is sampled


def test_a_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"optimizer": rl.Optimizer(learning_rate=1e-2), "rollout": rl.Rollout(tasks_per_step=3)}

    def steps(**given: Any) -> tuple[Policy, Any]:
        policy, tasks = adder()
        return policy, rl.run(policy, tasks[:7], rl.sft(terms=[rl.KL(coefficient=0.1)]), steps=4, **settings, **given)

    policy, whole = steps()
    losses = [step.metrics["loss"] for step in whole]
    _, first = steps()
    assert [next(first).metrics["loss"] for _ in range(2)] == losses[:2]
    first.save(tmp_path)
    other, rest = steps(resume=tmp_path)
    assert [step.metrics["loss"] for step in rest] == losses[2:]
    for name, value in flat(policy.model.trainable_parameters()).items():
        assert mx.array_equal(value, flat(other.model.trainable_parameters())[name])
