"""An algorithm as a value: its loss and metrics, and algorithms of one's own in training."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import mlx.core as mx
import pytest

from helpers import a_policy, close, length, micro_batch
from mlxrl import algo, protocols
from mlxrl.algo import KL
from mlxrl.algo.algorithm import at_step, comparison_of, not_predicted, num_top
from mlxrl.settings import Rollout, Sampling
from mlxrl.train.loop import run
from mlxrl.types import Group, Logprobs, MicroBatch, Task, Totals


def test_effective_sample_size() -> None:
    # weights 2 and 1: (2+1)^2 / (2 (4+1)) = 0.9, whether the two tokens come in one micro-batch or in two, and with
    # two tokens of sequences without signal in the totals
    totals, recipe = Totals(tokens=4, sequences=4, groups=1, max_tokens=1, without_signal=2), algo.grpo()
    old = mx.log(mx.array([[2.0], [1.0]]))
    parts = [
        recipe.loss(
            Logprobs(old[rows]),
            micro_batch([[1]], 1.0, sampler_logprobs=mx.zeros((1, 1)), old_logprobs=old[rows]),
            totals,
        )[1]
        for rows in (slice(0, 1), slice(1, 2))
    ]
    added = {
        name: max(p[name] for p in parts) if name.endswith("/max") else sum(p[name] for p in parts) for name in parts[0]
    }
    shown = algo.finish(added)
    close(
        [shown["sampling/ess"], shown["ratio/mean"], shown["sampling/importance_sampling_ratio/max"]], [0.9, 1.0, 2.0]
    )
    # |log 2| / 2 over the computed tokens; the advantage's size over all four
    close([shown["sampling/sampling_logp_difference/mean"], shown["advantages/abs_mean"]], [math.log(2) / 2, 0.5])


def test_metrics_of_a_loss() -> None:
    # two tokens, r = 1.5 (A = 1, above 1.28) and 1: mean 1.25; the totals count four tokens, two of them without signal
    old = mx.log(mx.array([[1.0, 1.0]]))
    batch = micro_batch([[1, 1]], 1.0, old_logprobs=old, reference_logprobs=old, sampler_logprobs=old)
    recipe = algo.dapo(terms=[KL(coefficient=0.5)])
    new = Logprobs(mx.log(mx.array([[1.5, 1.0]])))
    shown = algo.finish(
        recipe.loss(new, batch, Totals(tokens=4, sequences=2, groups=1, max_tokens=2, without_signal=1))[1]
    )
    close(shown["ratio/mean"], 1.25)
    close(shown["ratio/max"], 1.5)
    close(shown["clip_ratio/high_mean"], 0.25)
    close(shown["ppo_kl"], -math.log(1.5) / 2)
    # k3 = 1/1.5 - 1 + log 1.5 = 0.0721318, over two tokens
    close(shown["kl"], 0.0721318 / 2)
    close(shown["kl/coefficient"], 0.5)
    # -(1.28 + 1) / 4 + 0.5 * 0.0721318 / 4
    close(shown["loss"], -0.5609835)


def test_a_policy_loss_may_say_no_more_than_its_losses() -> None:
    # -A r of r = 1.5 and 1 with A = 1: -1.25 on average; the ratio is reported, nothing is clipped
    old, new = mx.zeros((1, 2)), mx.log(mx.array([[1.5, 1.0]]))
    batch = micro_batch([[1, 1]], 1.0, old_logprobs=old, sampler_logprobs=old)

    def plain(new: mx.array, old: mx.array, advantages: mx.array, mask: mx.array) -> mx.array:
        return -advantages * mx.exp(new - old)

    algorithm = algo.Algorithm("plain", lambda groups: [], plain, algo.reduce.token_mean)
    value, metrics = algorithm.loss(Logprobs(new), batch, Totals(2, 1, 1, 2))
    shown = algo.finish(metrics)
    close([value.item(), shown["ratio/mean"], shown["clip_ratio/high_mean"]], [-1.25, 1.25, 0.0])
    assert algorithm.needs == {"old", "reward"}
    assert algorithm.compares == "nothing"


def test_an_algorithm_is_a_value() -> None:
    assert algo.grpo() == algo.grpo()
    assert hash(algo.grpo(terms=[KL(coefficient=0.1)])) == hash(algo.grpo(terms=[KL(coefficient=0.1)]))
    with pytest.raises(dataclasses.FrozenInstanceError):
        algo.grpo().name = "x"  # pyright: ignore
    other = dataclasses.replace(algo.grpo(), policy_loss=algo.losses.Clipped(clip=(0.1, 0.1)))
    assert other == algo.grpo(clip=(0.1, 0.1))


class Bare:
    """An algorithm that has the four members of the protocol and no more: the reward over the task's difficulty."""

    name, needs = "bare", frozenset({"reward", "old"})

    def advantages(self, groups: Any) -> list[list[float | list[float]]]:
        return [[one.reward / one.task.columns["difficulty"] - 0.5 for one in group] for group in groups]

    def loss(self, new: Logprobs, batch: MicroBatch, totals: Totals) -> tuple[mx.array, dict[str, mx.array]]:
        value = algo.reduce.token_mean(-batch.advantages * new.token_logprobs, batch.mask, totals)
        return value, {"loss": mx.stop_gradient(value)}


def test_what_an_algorithm_does_not_say_has_defaults() -> None:
    bare: protocols.Algorithm = Bare()
    assert isinstance(bare, protocols.Algorithm)
    assert (comparison_of(bare), num_top(bare), not_predicted(bare)) == (None, 0, None)
    assert at_step(bare, 3) is bare


def by_difficulty(groups: list[Group]) -> list[list[float]]:
    return [[one.reward / one.task.columns["difficulty"] for one in group] for group in groups]


@pytest.mark.parametrize(
    "algorithm",
    [
        Bare(),
        algo.Algorithm("own", by_difficulty, algo.losses.Clipped(), algo.reduce.token_mean),  # pyright: ignore
    ],
)
def test_an_algorithm_that_reads_columns_trains(algorithm: Any) -> None:
    """It is called with groups of tasks alone, so that it may read their columns."""
    tasks = [Task(text, {"difficulty": n + 1.0}) for n, text in enumerate(("one", "two", "three"))]
    short: dict[str, Any] = {"steps": 1, "rollout": Rollout(tasks_per_step=2, group_size=2)}
    (step,) = run(a_policy(), tasks, algorithm, reward=length, sampling=Sampling(max_tokens=5), **short)
    assert math.isfinite(step.metrics["loss"])
    assert step.metrics["updates"] == 1
    with pytest.raises(ValueError, match=r"wanted at least one function, got none; (bare|own) learns from rewards"):
        run(a_policy(), tasks, algorithm, **short)
