"""One optimizer step on a batch: where it moves the weights, and when it leaves them."""

from __future__ import annotations

import dataclasses
import math

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest

from helpers import a_policy, assert_same_gradient, flat, made
from mlxrl.algo.recipes import dr_grpo, grpo, rloo
from mlxrl.policy.logprobs import logprobs
from mlxrl.policy.policy import Policy, as_policy
from mlxrl.rollout.sample import sample
from mlxrl.settings import Sampling, Train
from mlxrl.train.batch import make_batch
from mlxrl.train.gradient import gradient
from mlxrl.train.minibatches import minibatches
from mlxrl.train.update import complete, update
from mlxrl.types import Group, MicroBatch, Task, Trajectory
from models import dense, hybrid, moe, tokenizer

MODELS = [dense, hybrid, moe]


RECIPES = [grpo, dr_grpo, rloo]


LONG = "a prompt that is long enough for its completions to share it in one pass, and some more words"


def likelihoods(p: Policy, group: Group) -> list[float]:
    """The log-prob of every trajectory of a group."""
    return [_likelihood(p, trajectory) for trajectory in group]


def _likelihood(p: Policy, trajectory: Trajectory) -> float:
    (turn,) = trajectory.turns
    ones = mx.ones((1, len(turn.tokens)))
    batch = MicroBatch(mx.array(turn.observation), mx.array([turn.tokens]), ones, ones, ones)
    return logprobs(p, batch).token_logprobs.sum().item()


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_one_update_moves_the_adapter_towards_the_rewarded_completion(make, recipe):
    p, group = a_policy(make, move=False), made([1.0, 0.0], lengths=[5, 5])
    before = likelihoods(p, group)
    metrics = update(p, optim.SGD(1e-1), make_batch([group], recipe()), recipe())
    assert all(mx.abs(v).max().item() > 0 for k, v in flat(p.model.trainable_parameters()).items() if "lora_b" in k)
    after = likelihoods(p, group)
    assert after[0] > before[0]
    assert after[1] < before[1]
    assert metrics["grad_norm"] > 0


def test_a_step_without_any_signal_changes_nothing():
    p, algorithm, optimizer = a_policy(), grpo(), optim.AdamW(1e-2)
    before = {k: mx.array(v) for k, v in flat(p.model.trainable_parameters()).items()}
    metrics = update(p, optimizer, make_batch([made([1.0, 1.0])], algorithm), algorithm)
    assert metrics["grad_norm"] == 0.0
    assert metrics["updates/skipped"] == 0.0
    assert all(mx.array_equal(v, before[k]) for k, v in flat(p.model.trainable_parameters()).items())


def test_the_stop_token_is_in_the_loss():
    """A completion of nothing but the stop token that is punished becomes less likely."""
    p, algorithm = a_policy(move=False), grpo()
    group = made([0.0, 1.0], lengths=[1, 4])
    stopped = dataclasses.replace(group[0], turns=(dataclasses.replace(group[0].turns[0], tokens=(2,)),))
    before = likelihoods(p, (stopped,))
    update(p, optim.SGD(1e-1), make_batch([(stopped, group[1])], algorithm), algorithm)
    assert likelihoods(p, (stopped,))[0] < before[0]


def test_several_updates_use_old_logprobs_from_before_the_first():
    p, algorithm, optimizer = a_policy(), grpo(), optim.SGD(1.0)
    batch = complete(p, make_batch([made([1.0, 0.0, 0.3])], algorithm), algorithm, frozenset({"old"}))
    before = mx.array(batch.micro_batches[0].old_logprobs)
    first = update(p, optimizer, batch, algorithm, max_grad_norm=1e9)
    second = update(p, optimizer, batch, algorithm, max_grad_norm=1e9)
    assert first["ratio/max"] == pytest.approx(1.0, abs=1e-5)
    assert second["ratio/max"] > 1.01
    assert mx.array_equal(batch.micro_batches[0].old_logprobs, before)


@pytest.mark.parametrize("make", [dense, hybrid, moe])
def test_dropout_drops_the_same_in_old_and_new(make):
    """Ratios are exactly 1 at equal weights, in minibatches of another layout too, and nothing else is random."""
    p, algorithm = a_policy(make, dropout=0.5), grpo()
    groups = [made([1.0, 0.0, 0.3]), made([0.0, 1.0], prompt=5, seed=1)]
    batch, plain = make_batch(groups, algorithm), dataclasses.replace(make_batch(groups, algorithm), dropout_seed=7)
    batch, other = (complete(p, one, algorithm, frozenset({"old"})) for one in (batch, plain))
    assert not mx.array_equal(batch.micro_batches[0].old_logprobs, other.micro_batches[0].old_logprobs)
    for part in [batch, *minibatches(batch, 2, "x")]:
        metrics, found = gradient(p, part, algorithm)
        assert metrics["ratio/max"] == pytest.approx(1.0, abs=1e-5)
        mx.random.seed(5)
        for recompute in (False, True):
            again = flat(gradient(p, part, algorithm, recompute=recompute)[1])
            assert all(mx.allclose(again[name], value, rtol=1e-4, atol=1e-7) for name, value in flat(found).items())
    assert not any(module.training for module in p.model.modules())


def test_dropout_is_the_same_in_every_layout():
    p, algorithm = a_policy(dropout=0.3), grpo()
    group = [made([float(n) for n in range(6)])]
    shared, split = (make_batch(group, algorithm, Train(tokens_per_pass=tokens)) for tokens in (None, 97))
    alone = dataclasses.replace(shared, micro_batches=tuple(
        dataclasses.replace(m, prefix_id=None) for m in split))  # fmt: skip
    assert len(split) > len(shared) == 1
    wanted = gradient(p, shared, algorithm)[1]
    for batch in (split, alone):
        assert_same_gradient(gradient(p, batch, algorithm)[1], wanted, 2e-5)


def test_a_policy_without_adapters_is_not_updated():
    p, batch = as_policy(dense(), tokenizer(), lora=None), make_batch([made([1.0, 0.0])], grpo())
    with pytest.raises(ValueError, match=r"update: policy: this policy was loaded without adapters, wanted .*lora="):
        update(p, optim.SGD(0.1), batch, grpo())


def test_clipping_scales_the_gradient_to_the_norm_asked_for():
    p, algorithm = a_policy(), grpo()
    batch = make_batch([made([1.0, 0.0])], algorithm)
    before = {k: mx.array(v) for k, v in flat(p.model.trainable_parameters()).items()}
    metrics = update(p, optim.SGD(1.0), batch, algorithm, max_grad_norm=1e-3)
    moved_by = math.sqrt(
        sum(mx.square(v - before[k]).sum().item() for k, v in flat(p.model.trainable_parameters()).items())
    )
    assert metrics["grad_norm"] > 1e-3
    assert moved_by == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize("poison", ["advantages", "sampler_logprobs"])
def test_a_step_that_is_not_finite_leaves_weights_and_optimizer_untouched(poison):
    p, algorithm, optimizer = a_policy(), grpo(), optim.AdamW(1e-2)
    good = make_batch([made([1.0, 0.0])], algorithm)
    update(p, optimizer, good, algorithm)
    weights = {k: mx.array(v) for k, v in flat(p.model.trainable_parameters()).items()}
    state = {k: mx.array(v) for k, v in flat(optimizer.state).items()}
    (m,) = good.micro_batches
    array = getattr(m, poison)
    bad = dataclasses.replace(good, micro_batches=(dataclasses.replace(m, **{poison: mx.full(array.shape, mx.nan)}),))
    metrics = update(p, optimizer, bad, algorithm)
    if poison == "sampler_logprobs":  # a metric only, by default: the update goes on
        assert metrics["updates/skipped"] == 0.0
        return
    assert metrics["updates/skipped"] == 1.0
    assert all(mx.array_equal(v, weights[k]) for k, v in flat(p.model.trainable_parameters()).items())
    assert all(mx.array_equal(v, state[k]) for k, v in flat(optimizer.state).items())
    assert update(p, optimizer, good, algorithm)["updates/skipped"] == 0.0


def test_sampled_groups_train_end_to_end():
    p, algorithm = a_policy(hybrid, move=False), grpo()
    groups = sample(p, [Task(LONG), Task("hi")], group_size=4, sampling=Sampling(max_tokens=6), key=0)
    scored = [tuple(dataclasses.replace(t, reward=float(i % 2)) for i, t in enumerate(group)) for group in groups]
    batch = make_batch(scored, algorithm)
    assert [m.prefix.size > 0 for m in batch] == [True, False]
    metrics = update(p, optim.AdamW(1e-3), batch, algorithm)
    assert metrics["sampling/sampling_logp_difference/mean"] < 1e-5
    assert np.isfinite(list(metrics.values())).all()
