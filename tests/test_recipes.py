"""Every recipe: invariance to splitting, gradients, extremes, and what its signature says."""

from __future__ import annotations

import inspect
import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import mlxrl as rl
from helpers import close, eager_and_compiled, micro_batch, value_and_gradient
from mlxrl import algo, protocols
from mlxrl.types import Logprobs, MicroBatch, Totals

ARRAYS = ("tokens", "mask", "advantages", "sampler_logprobs", "old_logprobs", "reference_logprobs", "teacher_logprobs")


def example(name: str, columns: int = 3) -> tuple[Any, Logprobs, MicroBatch, Totals]:
    """A recipe with every extra switched on, and a batch with a gap in a row, an empty row and a zero advantage."""
    of_samples = [] if name == "sft" else [algo.KLReward(coefficient=0.05), algo.Correction()]
    terms = [algo.KL(coefficient=0.1), algo.Entropy(coefficient=0.01), *of_samples]
    recipe = algo.RECIPES[name](terms=terms)
    values = np.random.default_rng(0).normal(size=(5, 4, columns)).astype(np.float32) * 0.05 - 1.0
    new, old, reference, rollout, teacher = (mx.array(v) for v in values)
    mask = np.ones((4, columns), dtype=np.float32)
    mask[1, 1:2] = 0
    mask[2] = 0
    advantage = [[1.0], [-1.0], [0.5], [0.0]]
    batch = micro_batch(
        mask,
        advantage,
        old_logprobs=old,
        reference_logprobs=reference,
        sampler_logprobs=rollout,
        teacher_logprobs=teacher,
    )
    return recipe, Logprobs(new, mx.abs(new)), batch, Totals(int(mask.sum()), 4, 2, 16)


def rows_of(new: Logprobs, batch: MicroBatch, rows: list[int]) -> tuple[Logprobs, MicroBatch]:
    pick = mx.array(rows)
    assert new.entropy is not None
    part = replace(batch, **{name: getattr(batch, name)[pick] for name in ARRAYS})
    return Logprobs(new.token_logprobs[pick], new.entropy[pick]), part


@pytest.mark.parametrize("name", algo.RECIPES)
def test_splitting_order_and_padding_change_nothing(name: str) -> None:
    recipe, new, batch, totals = example(name)
    assert isinstance(recipe, protocols.Algorithm)
    value, gradient = value_and_gradient(recipe, new, batch, totals)
    for split in ([[0, 1, 2, 3]], [[3, 1], [0, 2]], [[2], [1], [3], [0]]):
        found = [(rows, value_and_gradient(recipe, *rows_of(new, batch, rows), totals)) for rows in split]
        close(sum(part for _, (part, _) in found), value)
        for rows, (_, part) in found:
            close(part, gradient[mx.array(rows)])
    pad = [(0, 0), (0, 7)]
    padded = replace(batch, **{key: mx.pad(getattr(batch, key), pad) for key in ARRAYS})
    wide = Logprobs(mx.pad(new.token_logprobs, pad, constant_values=-300.0), mx.pad(new.entropy, pad))
    wider, wider_gradient = value_and_gradient(recipe, wide, padded, totals)
    close(wider, value)
    close(wider_gradient[:, :3], gradient)
    assert not wider_gradient[:, 3:].any()


@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("name", algo.RECIPES)
def test_gradient_per_token(name: str, columns: int) -> None:
    """Every sampled token of a row with an advantage has a gradient, also in completions of one token, [B, 1]."""
    recipe, new, batch, totals = example(name, columns)
    value, gradient = value_and_gradient(recipe, new, batch, totals)
    assert gradient.shape == batch.mask.shape
    assert mx.isfinite(value).all()
    assert mx.where(batch.mask[:2] > 0, gradient[:2], 1.0).all()


@pytest.mark.parametrize(("name", "columns"), [("grpo", 1), ("dapo", 3), ("gspo", 3), ("cispo", 3), ("opd", 3)])
def test_compiled_equals_eager(name: str, columns: int) -> None:
    recipe, new, batch, totals = example(name, columns)
    given = {key: getattr(batch, key) for key in ARRAYS}

    def both(chosen: mx.array, entropy: mx.array, given: dict[str, mx.array]) -> tuple[Any, mx.array]:
        part = replace(batch, prefix=mx.array([0]), **given)
        return mx.value_and_grad(lambda x: recipe.loss(Logprobs(x, entropy), part, totals))(chosen)

    found = [function(new.token_logprobs, new.entropy, given) for function in eager_and_compiled(both)]
    ((value, metrics), gradient), ((compiled, more), compiled_gradient) = found
    close(compiled, value)
    close(compiled_gradient, gradient)
    assert metrics.keys() == more.keys()
    for name, item in metrics.items():
        np.testing.assert_allclose(more[name], item, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", algo.RECIPES)
def test_extremes_stay_finite(name: str) -> None:
    """Log-probs of exactly 0, ratios beyond float32, nothing to learn from, no tokens at all."""
    recipe, new, batch, totals = example(name)
    zero, far = mx.zeros_like(batch.mask), mx.full(batch.mask.shape, -200.0)
    same = {"old_logprobs": zero, "reference_logprobs": zero, "teacher_logprobs": zero, "sampler_logprobs": zero}
    apart = {"old_logprobs": far, "reference_logprobs": far, "teacher_logprobs": far, "sampler_logprobs": far}
    lonely = {"old_logprobs": None, "sampler_logprobs": far, "reference_logprobs": far}
    for changes in (
        same,
        apart,
        lonely,
        {"mask": zero},
        {"advantages": zero, "old_logprobs": None},
        {"mask": zero, **apart},
    ):
        changed = replace(batch, **changes)
        for chosen in (zero, far):
            (value, metrics), gradient = mx.value_and_grad(
                lambda x, changed=changed: recipe.loss(Logprobs(x, new.entropy), changed, totals)
            )(chosen)
            assert all(mx.isfinite(item).all() for item in (value, gradient, *metrics.values()))
            assert all(math.isfinite(item) for item in algo.finish(metrics).values())


@pytest.mark.parametrize("name", algo.RECIPES)
def test_a_better_token_gets_likelier(name: str) -> None:
    """Going down the loss raises the log-prob of what was rewarded, and lowers the other's; with no `old`, rho = 1."""
    recipe = algo.RECIPES[name]()
    new = mx.array([[-1.0, -1.0], [-1.0, -1.0]])
    batch = micro_batch([[1, 1], [1, 1]], [[1.0], [-1.0]], teacher_logprobs=new)
    totals = Totals(4, 2, 1, 2)
    value, gradient = value_and_gradient(recipe, Logprobs(new), batch, totals)
    assert (gradient[0] < 0).all()
    assert (gradient[1] > 0).all()
    again, same = value_and_gradient(recipe, Logprobs(new), replace(batch, old_logprobs=new), totals)
    close(again, value)
    close(same, gradient)


@pytest.mark.parametrize("name", algo.RECIPES)
def test_a_recipe_is_a_function_of_keywords_that_is_documented(name: str) -> None:
    recipe = algo.RECIPES[name]
    parameters = inspect.signature(recipe).parameters.values()
    assert all(one.kind is one.KEYWORD_ONLY and one.annotation and one.default is not one.empty for one in parameters)
    assert recipe is getattr(rl, name)
    assert recipe().name == name
    used = [one for one in parameters if one.name in algo.arguments_of(recipe())]
    assert recipe() == recipe(**{one.name: one.default for one in used})
    assert any(source in (recipe.__doc__ or "") for source in ("arXiv", "prime-rl"))


def test_an_argument_that_a_recipe_does_not_have_is_refused_before_it_runs_and_when_it_does(tmp_path) -> None:
    """By the type checker, and in one line."""
    (tmp_path / "wrong.py").write_text("import mlxrl as rl\nrl.rloo(tau_pos=1.0)\nrl.grpo(clip=(0.2, 0.28))\n")
    checker = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "wrong.py"]
    done = subprocess.run(checker, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    errors = [line for line in done.stdout.splitlines() if " error: " in line]
    assert len(errors) == 1
    assert 'wrong.py:2:9 - error: No parameter named "tau_pos"' in errors[0]
    with pytest.raises(ValueError, match="rloo: unknown key 'tau_pos'; there are clip, dual_clip, delta, ratio"):
        rl.rloo(tau_pos=1.0)  # pyright: ignore
    with pytest.raises(ValueError, match="sapo: unknown key 'tau_po'; did you mean 'tau_pos'"):
        rl.sapo(tau_po=1.0)  # pyright: ignore


@pytest.mark.parametrize(
    ("recipe", "given", "message"),
    [
        ("grpo", {"clip": (-1.0, 0.2)}, "grpo: clip: wanted a list of 2, at least 0 and at most 1, then at least 0"),
        ("grpo", {"eps": -1e-6}, "grpo: eps: wanted at least 0, got -1e-06"),
        ("grpo", {"dual_clip": 0.5}, "grpo: dual_clip: wanted more than 1, got 0.5"),
        ("grpo", {"eps": math.nan}, "grpo: eps: wanted at least 0, got NaN"),
        ("grpo", {"log_ratio_clamp": (2.0, -2.0)}, "got [2.0, -2.0]; the lower bound stands first"),
        ("gigpo", {"gamma": 1.5}, "gigpo: gamma: wanted at least 0 and at most 1, got 1.5"),
        ("sapo", {"tau_pos": 0.0}, "sapo: tau_pos: wanted more than 0, got 0.0"),
        ("grpo", {"ratio": "row"}, 'grpo: ratio: wanted one of "token", "sequence"'),
        ("gmpo", {"clip": (None, 0.4)}, "gmpo: clip: wanted a list of 2"),
        ("grpo", {"reduction": "tokens"}, 'grpo: reduction: wanted one of "token_mean", "sequence_mean"'),
        ("grpo", {"reduction": 0}, "grpo: reduction: wanted more than 0, got 0"),
        ("grpo", {"whiten": True}, "grpo: whiten: wanted a table, got true"),
        ("grpo", {"scale": "none", "eps": 1e-4}, "grpo: eps: has no effect, because scale is 'none'"),
        ("gigpo", {"omega": 0, "similarity": 0.9}, "gigpo: similarity: has no effect, because omega is 0"),
        ("opd", {"scale": "none"}, "opd: scale: has no effect, because reward is 0"),
        ("opd", {"whiten": algo.Whiten()}, "opd: whiten: has no effect, because reward is 0"),
        ("opd", {"teacher": algo.TeacherKL(), "clip": (0.1, 0.1)}, "opd: clip: has no effect, because reward is 0 and"),
        ("opd", {"teacher": algo.TeacherKL(), "terms": [algo.Veto(threshold=1)]}, "opd: algorithm.veto: has no effect"),
        ("rloo", {"scale": "function"}, "rloo: unknown key 'scale'"),
        ("sapo", {"clip": (0.2, 0.2)}, "sapo: unknown key 'clip'"),
        ("cispo", {"dual_clip": 3.0}, "cispo: unknown key 'dual_clip'"),
        ("dr_grpo", {"eps": 1e-4}, "dr_grpo: unknown key 'eps'"),
        ("grpo", {"kl_clamp": (0, 1)}, "grpo: 'kl_clamp' is now algorithm.kl.clamp"),
        ("grpo", {"estimator": "k2"}, "grpo: unknown key 'estimator'; did you mean 'algorithm.kl.estimator'?"),
    ],
)  # fmt: skip
def test_what_no_equation_takes_or_has_no_effect_is_refused(recipe, given, message) -> None:
    with pytest.raises(ValueError) as caught:
        algo.RECIPES[recipe](**given)
    assert message in str(caught.value)
