"""Optimizers and learning-rate schedules made of settings."""

from __future__ import annotations

import mlx.core as mx
import mlx.optimizers as optim
import pytest

from mlxrl.settings import Optimizer
from mlxrl.train.optimizer import make_optimizer, schedule


def rates(name: str, warmup: int) -> list[float]:
    """The learning rates of ten steps, of which the highest is 1."""
    rate = schedule(Optimizer(learning_rate=1.0, schedule=name), 10, warmup)
    return [float(rate(mx.array(step))) if callable(rate) else rate for step in range(10)]


def test_schedules():
    assert rates("constant", 0) == [1.0] * 10
    assert rates("constant", 3) == pytest.approx([0.25, 0.5, 0.75] + [1.0] * 7)
    assert rates("linear", 0) == pytest.approx([1 - 0.1 * step for step in range(10)])
    assert rates("linear", 2)[:4] == pytest.approx([1 / 3, 2 / 3, 1.0, 0.875])
    assert rates("cosine", 0)[5] == pytest.approx(0.5)


def test_a_schedule_moves_on_with_every_update_of_a_step():
    """Ten steps of two updates: a warm-up of one step is two updates, and the rate falls over the 18 others."""
    optimizer = make_optimizer(Optimizer(learning_rate=1.0, schedule="linear", warmup_steps=1), 10, 2)
    found = []
    for _ in range(20):
        optimizer.apply_gradients({"w": mx.ones(1)}, {"w": mx.zeros(1)})
        found.append(float(optimizer.learning_rate))
    assert found[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert found[11] == pytest.approx(1 - 9 / 18)
    assert found[19] == pytest.approx(1 - 17 / 18)


@pytest.mark.parametrize(
    ("name", "made"), [("adamw", optim.AdamW), ("adam", optim.Adam), ("sgd", optim.SGD), ("lion", optim.Lion)]
)
def test_every_name_is_the_optimizer_of_that_name(name, made):
    assert type(make_optimizer(Optimizer(name=name))) is made
