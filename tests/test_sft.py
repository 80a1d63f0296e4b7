"""Supervised fine-tuning: one more algorithm on the same path."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import mlxrl as rl
from helpers import EXAMPLE, a_policy, assert_same_gradient, length, made
from mlxrl.algo.reduce import finish
from mlxrl.policy.policy import Policy
from mlxrl.settings import Train
from mlxrl.train.batch import make_batch, tokens_of
from mlxrl.train.gradient import gradient
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
