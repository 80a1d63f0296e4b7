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


Weigh: TypeAlias = Callable[[np.ndarray, np.ndarray], np.ndarray]


def trl_weight(mode: str, low: float | None, high: float, x: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """TRL's vllm_importance_sampling_mode: the token's ratio, or [B, 1] that of the sequence."""
    level, kind = mode.split("_")
    w = np.exp(x * mask if level == "token" else (x * mask).sum(1, keepdims=True))
    inside = (w >= (-np.inf if low is None else low)) & (w <= high)
    return np.clip(w, low, high) if kind == "truncate" else np.where(inside, w, 0)


def seq_mask_tis(low: float, high: float, x: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """OpenRLHF: the token's ratio as it is, where the mean log-ratio of the sequence lies inside."""
    centre = np.exp((x * mask).sum(1, keepdims=True) / np.maximum(mask.sum(1, keepdims=True), 1))
    return ((centre >= low) & (centre <= high)) * np.exp(x)


def verl_weight(level: str, high: float, x: np.ndarray, mask: np.ndarray) -> np.ndarray:
    x = x if level == "token" else (x * mask).sum(1, keepdims=True)
    return np.minimum(np.exp(np.clip(x, -20, 20)), high)


WEIGHTS: dict[str, tuple[str, dict[str, Any], Weigh]] = {
    "trl's default": ("trl", {}, partial(trl_weight, "sequence_mask", None, 3.0)),
    **{f"trl {level} {kind} {low}": (
        "trl", {"level": level, "mode": kind, "bounds": [low, 3.0]}, partial(trl_weight, f"{level}_{kind}", low, 3.0))
       for level in ("token", "sequence") for kind in ("truncate", "mask") for low in (None, 0.5)},
    "openrlhf tis": ("openrlhf", {}, lambda x, mask: np.clip(np.exp(x), 0.5, 5)),
    "openrlhf icepop": ("openrlhf", {"mode": "mask"}, lambda x, mask: np.exp(x) * (np.abs(np.exp(x) - 2.75) <= 2.25)),
    "openrlhf seq-mask-tis": ("openrlhf", {"mode": "mask", "mask_level": "geometric"}, partial(seq_mask_tis, 0.5, 5)),
    "openrlhf wide": ("openrlhf", {"mode": "mask", "mask_level": "geometric", "bounds": [0, None]},
                      partial(seq_mask_tis, 0, np.inf)),
    "slime tis": ("slime", {}, lambda x, mask: np.clip(np.exp(x), 0, 2)),
    "verl token": ("verl", {"bounds": [None, 2.0]}, partial(verl_weight, "token", 2.0)),
    "verl sequence": ("verl", {"level": "sequence", "bounds": [None, 1e9]}, partial(verl_weight, "sequence", 1e9)),
}  # fmt: skip
"""Library, keys of [algorithm.correction], and what the library multiplies the policy loss by."""


@pytest.mark.parametrize("case", WEIGHTS)
def test_the_correction_of_a_convention_is_the_librarys_at_extremes(case: str) -> None:
    """In float64, over log-ratios old - sampler of 40, whole rows of which have a product of e^80."""
    library, keys, formula = WEIGHTS[case]
    old, sampler, _, mask = extremes()
    old = mx.where(mx.arange(10)[:, None] == 9, sampler + 16, old)
    (term,) = algo.build({"name": "grpo", "convention": library, "correction": keys}).terms
    batch = micro_batch(mask, mx.zeros((10, 1)), old_logprobs=old, sampler_logprobs=sampler)
    x, seen = (np.array(values).astype(np.float64) for values in (old - sampler, mask))
    wanted = formula(x, seen)
    got = term.factor(Logprobs(old), batch)
    assert got.shape == wanted.shape
    np.testing.assert_allclose(np.array(got) * seen, wanted * seen, rtol=2e-5, atol=1e-12)
    # of a batch of 12 sequences, two of which had no signal: TRL's importance_sampling_ratio/mean over rows
    mean = term.metrics(Logprobs(old), batch, Totals(40, 12, 3, 8, without_signal=2))
    assert mean.keys() == ({"sampling/sequence_weight_mean"} if wanted.shape[1] == 1 else set())
    for value in mean.values():
        assert value.item() == pytest.approx(wanted.mean(), rel=2e-5)


def test_a_sequence_whose_product_overflows_is_masked() -> None:
    (term,) = algo.build({"name": "grpo", "convention": "trl", "correction": {}}).terms
    batch = micro_batch(
        mx.ones((1, 4)), 1.0, old_logprobs=mx.full((1, 4), -1.0), sampler_logprobs=mx.full((1, 4), -41.0)
    )
    assert term.factor(Logprobs(batch.old_logprobs), batch).tolist() == [[0.0]]


@pytest.mark.parametrize(("library", "held"), [("openrlhf", 10.0), ("verl", None), ("slime", None)])
def test_the_cost_of_a_convention_is_the_librarys_at_extremes(library: str, held: float | None) -> None:
    """k1 in the reward, cut at +-10 in OpenRLHF, as the return of every token."""
    old, reference, _, mask = extremes()
    (term,) = algo.build({"name": "rloo" if library == "verl" else "grpo", "convention": library,
                          "kl_reward": {"coefficient": 0.5}}).terms  # fmt: skip
    batch = micro_batch(mask, mx.zeros((10, 1)), old_logprobs=old, reference_logprobs=reference)
    cost = np.array(old - reference).astype(np.float64)
    cost = np.array(mask) * (cost if held is None else np.clip(cost, -held, held))
    wanted = -0.5 * np.cumsum(cost[:, ::-1], axis=1)[:, ::-1]
    np.testing.assert_allclose(term.advantage(Logprobs(old), batch), wanted, rtol=1e-5, atol=1e-5)


def test_a_veto_sees_a_weight_of_any_size() -> None:
    """slime compares the log-ratio itself: e^-40 is below 1e-12, and e^-25 is not."""
    sampler = mx.array([[-1.0, -1.0], [-1.0, -1.0]])
    old = sampler + mx.array([[0.0, -40.0], [0.0, -25.0]])
    batch = micro_batch(mx.ones((2, 2)), 1.0, old_logprobs=old, sampler_logprobs=sampler)
    assert algo.Veto(threshold=1e-12).factor(Logprobs(old), batch).tolist() == [[0.0], [1.0]]
