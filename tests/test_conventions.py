"""Conventions at their extremes, against the libraries' formulas written out: log-ratios of 40 on single tokens in the
middle of rows, rows of one token, a row that is masked whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np
import pytest

from helpers import micro_batch
from mlxrl import algo
from mlxrl.algo.conventions import CONVENTIONS
from mlxrl.types import Logprobs, Totals

Formula: TypeAlias = Callable[[mx.array, mx.array, mx.array, mx.array], mx.array]


def clipped(ratio: mx.array, a: mx.array, low: float = 0.2, high: float = 0.2, dual: float | None = None) -> mx.array:
    loss = mx.maximum(-a * ratio, -a * mx.clip(ratio, 1 - low, 1 + high))
    return loss if dual is None else mx.where(a < 0, mx.minimum(loss, -a * dual), loss)


def ppo(new, old, a, mask, held=None, **options):
    x = new - old
    return clipped(mx.exp(x if held is None else mx.clip(x, -held, held)), a, **options)


def mean(x, mask):
    return (x * mask).sum(axis=1, keepdims=True) / mx.maximum(mask.sum(axis=1, keepdims=True), 1)


def gspo(new, old, a, mask, **options):
    return clipped(mx.exp(mean(new - old, mask)), a, **options)


def gspo_tokens(new, old, a, mask, most=None, **options):
    x = new - mx.stop_gradient(new) + mx.stop_gradient(mean(new - old, mask))
    return clipped(mx.exp(x if most is None else mx.clip(x, None, most)), a, **options)


def whole(new, old, a, mask):
    return clipped(mx.exp(((new - old) * mask).sum(axis=1, keepdims=True)), a)


def cispo(new, old, a, mask, low, high, held=None):
    x = new - old if held is None else mx.clip(new - old, -held, held)
    return -mx.stop_gradient(mx.clip(mx.exp(x), None if low is None else 1 - low, 1 + high)) * a * new


def sapo(new, old, a, mask, held=None):
    ratio = mx.exp(new - old if held is None else mx.clip(new - old, -held, held))
    tau = mx.where(a > 0, 1.0, 1.05)
    return -a * mx.sigmoid(tau * (ratio - 1)) * 4 / tau


def gmpo(new, old, a, mask):
    x, sign = new - old, mx.sign(a)
    x = sign * mx.minimum(sign * x, sign * mx.clip(x, -0.4, 0.4))
    return -mean(a, mask) * mx.exp(mean(x, mask))


def dppo(new, old, a, mask):
    moved = mx.exp(new) - mx.exp(old)
    kept = mx.where(a > 0, moved <= 0.2, moved >= -0.2)
    return -a * mx.stop_gradient(mx.minimum(mx.exp(mx.clip(new - old, -20, 20)), 20) * kept) * new


PPO = ("grpo", "dapo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline")
WIDE = {"low": 0.2, "high": 0.28}
NARROW = {"low": 3e-4, "high": 4e-4}
FORMULAS: dict[str, dict[str, Formula]] = {
    "verl": {
        **dict.fromkeys((*PPO, "opd"), partial(ppo, held=20, dual=3.0)),
        "dapo": partial(ppo, held=20, dual=10.0, **WIDE),
        "gspo": partial(gspo_tokens, most=10.0, **NARROW), "cispo": partial(cispo, low=0.2, high=0.2, held=20),
        "sapo": partial(sapo, held=20), "gmpo": gmpo, "dppo": dppo,
    },
    "trl": {
        **dict.fromkeys(PPO, ppo), "dapo": partial(ppo, **WIDE), "rloo": whole, "gspo": partial(gspo, **NARROW),
        "gspo_token": partial(gspo_tokens, **NARROW), "cispo": partial(cispo, low=None, high=4.0), "sapo": sapo,
        "luspo": partial(gspo, low=2e-3, high=2.5e-3),
    },
    "openrlhf": {**dict.fromkeys(PPO, partial(ppo, held=20)), "gspo": partial(gspo, **NARROW)},
    "slime": {
        **dict.fromkeys((*PPO, "opd"), ppo), "gspo": partial(gspo, **NARROW),
        "cispo": partial(cispo, low=None, high=0.2),
    },
    "openclaw": {"opd": partial(ppo, **WIDE)},
    "verl_agent": {"gigpo": partial(ppo, held=20, dual=3.0)},
    "prime_rl": {},
}  # fmt: skip
HELD = {
    ("verl", name): 20 for name in (*PPO, "cispo", "sapo", "dppo", "opd")
} | {("openrlhf", name): 20 for name in PPO} | {("verl_agent", "gigpo"): 20}  # fmt: skip
"""Where the drift that is reported is that of the clamped log-ratio."""


def extremes() -> tuple[mx.array, ...]:
    """new, old, advantages, mask: [10, 5]."""
    draw = np.random.default_rng(0)
    old = draw.uniform(-3, -0.5, (10, 5))
    x = draw.normal(scale=0.3, size=(10, 5))
    x[:4, 2] = x[4:8, 0] = [40, -40, 40, -40]
    mask = np.ones((10, 5))
    mask[4:8, 1:] = mask[8] = 0
    mask[1, 4] = mask[2, 1] = 0
    a = np.array([1, 1, -1, -1, 1, 1, -1, -1, 1, -0.5])[:, None] * np.ones((10, 5))
    return tuple(mx.array(values.astype(np.float32)) for values in (old + x, old, a, mask))


@pytest.mark.parametrize(("library", "name"), [(one, name) for one, names in CONVENTIONS.items() for name in names])
def test_a_convention_is_the_librarys_formula_at_extremes(library: str, name: str) -> None:
    new, old, a, mask = extremes()
    table: dict[str, Any] = {"name": name, "convention": library, "reduction": "sum"}
    recipe: Any = algo.build(table | ({"teacher_advantage": {"coefficient": 1e-9}} if name == "opd" else {}))
    formula = FORMULAS[library].get(name, partial(ppo, held=20))  # max_rl of prime_rl has no formula of its own

    def wanted(x: mx.array) -> mx.array:
        return mx.where(mask > 0, formula(x, old, a, mask), 0.0).sum()

    def ours(x: mx.array) -> mx.array:
        return mx.where(mask > 0, recipe.policy_loss(x, old, a, mask).loss, 0.0).sum()

    for row in range(len(mask)):  # each by itself: what 1e17 is added to is lost

        def alone(function: Any, row: int = row) -> tuple[mx.array, mx.array]:
            def picked(x: mx.array) -> mx.array:
                return function(mx.where(mx.arange(len(mask))[:, None] == row, x, mx.stop_gradient(new)))

            return mx.grad(picked)(new)[row]

        np.testing.assert_allclose(alone(ours), alone(wanted), rtol=1e-5, atol=1e-7)
        one = [values[row : row + 1] for values in (new, old, a, mask)]
        losses = [mx.where(one[3] > 0, f(*one), 0.0) for f in (lambda *z: recipe.policy_loss(*z).loss, formula)]
        np.testing.assert_allclose(*losses, rtol=1e-5, atol=1e-7)
    batch = micro_batch(mask, a, old_logprobs=old, teacher_logprobs=old, sampler_logprobs=old)
    drift = recipe.loss(Logprobs(new), batch, Totals(int(mask.sum()), 10, 2, 8))[1]["ppo_kl"]
    bound = HELD.get((library, name), 20 if library == "prime_rl" else 1e9)
    assert drift.item() == pytest.approx(
        -(mx.clip(new - old, -bound, bound) * mask).sum().item() / mask.sum().item(), abs=1e-5
    )


@pytest.mark.parametrize(("library", "held", "inside"), [("verl", 10.0, 20), ("slime", 10.0, None), ("trl", None, None),
                                                         ("openrlhf", 10.0, 20)])  # fmt: skip
def test_the_divergence_of_a_convention_is_the_librarys(library, held, inside) -> None:
    """k3 of reference - new within +-20, and its value within +-10, where the library does so."""
    new, reference, _, mask = extremes()
    (term,) = algo.build({"name": "grpo", "convention": library, "kl": {"coefficient": 1.0}}).terms
    batch = micro_batch(mask, mx.zeros((10, 1)), reference_logprobs=reference, old_logprobs=new, sampler_logprobs=new)
    x = reference - new if inside is None else mx.clip(reference - new, -inside, inside)
    wanted = mx.exp(x) - 1 - x
    wanted = mask * (wanted if held is None else mx.clip(wanted, -held, held))
    np.testing.assert_allclose(term.loss(Logprobs(new), batch), wanted, rtol=1e-5, atol=1e-6)
    if library == "slime":  # where it weighs with the ratio, before its bound
        weighed = algo.KL(coefficient=1.0, weighted=True, clamp=term.clamp, log_ratio_clamp=term.log_ratio_clamp)
        batch = micro_batch(mask, mx.zeros((10, 1)), reference_logprobs=reference, old_logprobs=reference)
        wanted = mask * mx.clip(mx.exp(new - reference) * (mx.exp(x) - 1 - x), -10, 10)
        np.testing.assert_allclose(weighed.loss(Logprobs(new), batch), wanted, rtol=1e-5, atol=1e-6)
