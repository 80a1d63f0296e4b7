"""ECHO: the loss on what environments answer."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import pytest

from helpers import close
from mlxrl import algo
from mlxrl.algo import Echo
from mlxrl.algo.algorithm import at_step, not_predicted
from mlxrl.algo.echo import without_special_ids
from mlxrl.types import Logprobs, MicroBatch, Totals


def test_the_loss_of_two_observed_tokens() -> None:
    """-log p of 0.5 and 0.25 nats, over the step's 3 observed tokens, times 0.2: 0.2 * 0.75 / 3 = 0.05, and the
    derivative of each -0.2 / 3. Log-probs outside the mask, NaN, have no part."""

    def one(new: mx.array, old: mx.array, advantages: mx.array, mask: mx.array) -> mx.array:
        return mx.ones_like(new)

    zeros = mx.zeros((1, 4))
    observed = mx.array([[0.0, 1.0, 1.0, 0.0]])
    mask = mx.array([[1.0, 0.0, 0.0, 0.0]])
    ids = zeros.astype(mx.int32)
    batch = MicroBatch(ids[0, :0], ids, mask, zeros, zeros, observation_mask=observed)
    algorithm = algo.Algorithm("nothing", lambda groups: [], one, algo.reduce.token_mean, (Echo(weight=0.2),))

    def loss(read: mx.array) -> Any:
        return algorithm.loss(Logprobs(zeros, observation_logprobs=read), batch, Totals(1, 1, 1, 4, 0, 3))

    read = mx.array([[float("nan"), -0.5, -0.25, float("nan")]])
    (value, metrics), slope = mx.value_and_grad(loss)(read)
    close(value, 1.05)
    close(slope, [[0, -0.2 / 3, -0.2 / 3, 0]])
    close(metrics["loss"], 1.05)
    close(metrics["echo/loss"], 0.25)
    close(metrics["echo/coefficient"], 0.2 * 2 / 3)


def weights(algorithm: Any, steps: tuple[int, ...]) -> list[float]:
    return [next((term.weight for term in at_step(algorithm, step).terms), 0.0) for step in steps]


def test_a_weight_that_is_tapered() -> None:
    a = algo.grpo(terms=[Echo(weight=0.4, taper=4)])
    assert weights(a, (0, 1, 3, 4, 9)) == pytest.approx([0.4, 0.3, 0.1, 0.0, 0.0])
    assert "observations" in a.at(3).needs
    assert a.at(4) == algo.grpo()
    assert weights(algo.grpo(terms=[Echo(weight=0.4)]), (0, 9)) == [0.4, 0.4]
    plain = algo.grpo()
    assert at_step(plain, 3) is plain


def test_special_ids_are_not_predicted_unless_ids_are_named() -> None:
    named = algo.grpo(terms=[Echo(skip=frozenset({7}))])
    assert not_predicted(algo.grpo(terms=[Echo()])) == frozenset()
    assert not_predicted(without_special_ids(algo.grpo(terms=[Echo()]), [1, 2])) == {1, 2}
    assert without_special_ids(named, [1, 2]) == named
    assert not_predicted(without_special_ids(algo.grpo(), [1, 2])) is None


def test_the_weight_from_a_table() -> None:
    off = algo.build({"name": "grpo"})
    assert "echo" not in algo.arguments_of(off)
    assert off.needs == {"old", "reward"}
    made = algo.build({"name": "grpo", "echo": {"weight": 0.2, "taper": 4}})
    assert algo.arguments_of(made)["echo"] == {"weight": 0.2, "taper": 4, "skip": None}
    assert made.at(1).terms == (Echo(weight=0.2 * 0.75),)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"weight": -1}, "algorithm.echo: weight: wanted more than 0, got -1"),
        ({"taper": True}, "algorithm.echo: taper: wanted a whole number of at least 0, got true"),
    ],
)
def test_tables_that_mean_nothing_are_refused(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        algo.build({"name": "grpo", "echo": table})


@pytest.mark.parametrize("weight", [-0.1, 0.0, math.inf, math.nan])
def test_weights_that_mean_nothing_are_refused(weight: float) -> None:
    with pytest.raises(ValueError, match=r"algorithm\.echo: weight: wanted more than 0"):
        Echo(weight=weight)
