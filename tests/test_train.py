from __future__ import annotations

import dataclasses
import math
import sys
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest

from helpers import a_policy, assert_same_gradient, flat, length, made
from mlxrl.algo.recipes import dr_grpo, grpo, rloo
from mlxrl.algo.terms import KL
from mlxrl.policy.logprobs import logprobs
from mlxrl.policy.modes import training
from mlxrl.policy.policy import Policy
from mlxrl.rollout.episodes import rollout
from mlxrl.settings import Sampling
from mlxrl.train.loop import Diverged, train
from mlxrl.train.pack import SHARE_FROM, pack
from mlxrl.train.step import fill, gradient, update
from mlxrl.types import Group, MicroBatch, Task, Trajectory
from models import dense, hybrid, moe

MODELS = [dense, hybrid, moe]
RECIPES = [grpo, dr_grpo, rloo]
LONG = "a prompt that is long enough for its rows to share it in one pass, and then some more words"


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
    metrics = update(p, optim.SGD(1e-1), pack([group], recipe()), recipe())
    assert all(mx.abs(v).max().item() > 0 for k, v in flat(p.model.trainable_parameters()).items() if "lora_b" in k)
    after = likelihoods(p, group)
    assert after[0] > before[0]
    assert after[1] < before[1]
    assert metrics["policy/grad_norm"] > 0


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("prompt", [1, 90])
def test_the_ratio_is_exactly_one_on_policy(make, prompt):
    p = a_policy(make)
    algo = grpo()
    batch = pack([made([1.0, 0.0, 0.4], prompt=prompt)], algo)
    assert (batch.micro_batches[0].prefix.size > 0) == (prompt * 2 >= SHARE_FROM)
    assert gradient(p, batch, algo)[0]["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-6)
    assert gradient(p, batch, algo)[0]["policy/ratio_max"] == 1.0
    old = fill(p, batch, frozenset({"old"}))
    assert gradient(p, old, algo)[0]["policy/ratio_max"] == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_do_not_depend_on_sharing_passes_or_the_order_of_rows(make, recipe, monkeypatch):
    p, algo = a_policy(make), recipe()
    groups = [made([1.0, 0.0, 0.0, 1.0, 0.2], seed=1), made([0.0, 1.0, 0.3], prompt=70, seed=2)]
    whole = pack(groups, algo)
    assert [m.prefix.size for m in whole] == [90, 70]
    metrics, wanted = gradient(p, whole, algo)
    for tokens in (1, 90, 105):
        split = pack(groups, algo, tokens_per_pass=tokens)
        assert len(split) > 2
        more, got = gradient(p, split, algo)
        assert_same_gradient(got, wanted)
        assert more["policy/loss"] == pytest.approx(metrics["policy/loss"], abs=1e-6)
    shuffled = [tuple(reversed(groups[1])), groups[0][2:] + groups[0][:2]]
    assert_same_gradient(gradient(p, pack(shuffled, algo), algo)[1], wanted)
    monkeypatch.setattr(sys.modules["mlxrl.train.pack"], "SHARE_FROM", 10**9)
    repeated = pack(groups, algo)
    assert {m.prefix.size for m in repeated} == {0}
    assert_same_gradient(gradient(p, repeated, algo)[1], wanted)


@pytest.mark.parametrize("pad", [7, 64])
def test_gradients_do_not_depend_on_padding(pad):
    p, algo = a_policy(hybrid), grpo()
    batch = pack([made([1.0, 0.0, 0.4])], algo)

    def padded(array):
        return None if array is None else mx.pad(array, [(0, 0), (0, pad)])

    wide = dataclasses.replace(
        batch,
        micro_batches=tuple(
            dataclasses.replace(
                m, tokens=padded(m.tokens), mask=padded(m.mask), advantages=padded(m.advantages),
                sampler_logprobs=padded(m.sampler_logprobs),
            )
            for m in batch
        ),
    )  # fmt: skip
    assert_same_gradient(gradient(p, wide, algo)[1], gradient(p, batch, algo)[1])


def test_rows_without_signal_are_counted_and_not_computed():
    p, algo = a_policy(), grpo()
    flat_group, mixed = made([0.1, 0.1, 0.1], seed=1), made([1.0, 0.0, 0.0], seed=2)
    batch = pack([flat_group, mixed], algo)
    assert (batch.totals.sequences, batch.totals.without_signal, batch.totals.tokens) == (6, 3, 24)
    assert sum(m.tokens.shape[0] for m in batch) == 3
    # The mean over rows is over 6 of them: half of what the mixed group gives alone.
    alone = gradient(p, pack([mixed], algo), algo)[1]
    got = gradient(p, batch, algo)[1]
    for name, value in flat(alone).items():
        assert mx.allclose(2 * flat(got)[name], value, rtol=1e-4, atol=1e-8), name


def test_a_step_without_any_signal_changes_nothing():
    p, algo, optimizer = a_policy(), grpo(), optim.AdamW(1e-2)
    before = {k: mx.array(v) for k, v in flat(p.model.trainable_parameters()).items()}
    metrics = update(p, optimizer, pack([made([1.0, 1.0])], algo), algo)
    assert metrics["policy/grad_norm"] == 0.0
    assert metrics["policy/skipped"] == 0.0
    assert all(mx.array_equal(v, before[k]) for k, v in flat(p.model.trainable_parameters()).items())


def test_the_stop_token_is_in_the_loss():
    """A completion of nothing but the stop token that is punished becomes less likely."""
    p, algo = a_policy(move=False), grpo()
    group = made([0.0, 1.0], lengths=[1, 4])
    stopped = dataclasses.replace(group[0], turns=(dataclasses.replace(group[0].turns[0], tokens=(2,)),))
    before = likelihoods(p, (stopped,))
    update(p, optim.SGD(1e-1), pack([(stopped, group[1])], algo), algo)
    assert likelihoods(p, (stopped,))[0] < before[0]


def test_prompt_tokens_are_not_trained_on():
    """Another prompt under the same hidden states would change a loss over prompt targets; ours has none."""
    algo = grpo()
    batch = pack([made([1.0, 0.0], prompt=5)], algo)
    (m,) = batch.micro_batches
    assert m.prefix.size == 0
    assert m.mask[:, :5].sum().item() == 0
    assert m.mask.sum().item() == batch.totals.tokens == 7
    assert mx.abs(m.advantages[:, :5]).max().item() == 0


def test_several_updates_use_old_logprobs_from_before_the_first():
    p, algo, optimizer = a_policy(), grpo(), optim.SGD(1.0)
    batch = fill(p, pack([made([1.0, 0.0, 0.3])], algo), frozenset({"old"}))
    before = mx.array(batch.micro_batches[0].old_logprobs)
    first = update(p, optimizer, batch, algo, max_grad_norm=1e9)
    second = update(p, optimizer, batch, algo, max_grad_norm=1e9)
    assert first["policy/ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert second["policy/ratio_max"] > 1.01
    assert mx.array_equal(batch.micro_batches[0].old_logprobs, before)


def test_one_update_a_rollout_runs_one_forward_of_each_token(monkeypatch):
    """No old pass and no reference pass where nothing needs them; the prefix runs once."""
    p, algo = a_policy(), grpo()
    seen: list[tuple[int, ...]] = []
    trunk = p.head.trunk

    def counted(tokens, cache=None):
        seen.append(tokens.shape)
        return trunk(tokens, cache)

    p = dataclasses.replace(p, head=dataclasses.replace(p.head, trunk=counted))
    update(p, optim.SGD(1e-3), pack([made([1.0, 0.0, 0.4])], algo), algo)
    assert seen == [(1, 90), (3, 4)]  # three rows of up to 5 tokens, the last of which predicts nothing
    seen.clear()
    algo = grpo(terms=[KL(coefficient=0.1)])
    update(p, optim.SGD(1e-3), pack([made([1.0, 0.0, 0.4])], algo), algo)
    assert seen == [(1, 90), (3, 4)] * 2


def test_the_reference_is_the_base_and_its_kl_starts_at_zero():
    fresh, algo = a_policy(move=False), grpo(terms=[KL(coefficient=0.1)])
    batch = fill(fresh, pack([made([1.0, 0.0])], algo), frozenset({"reference"}))
    assert gradient(fresh, batch, algo)[0]["policy/kl"] == 0.0
    p = a_policy()
    batch = fill(p, pack([made([1.0, 0.0])], algo), frozenset({"reference"}))
    assert gradient(p, batch, algo)[0]["policy/kl"] > 0.0


def test_dropout_is_active_in_the_gradient_pass_alone():
    p, algo = a_policy(dropout=0.5), grpo()
    batch = fill(p, pack([made([1.0, 0.0])], algo), frozenset({"old"}))
    assert mx.array_equal(fill(p, pack([made([1.0, 0.0])], algo), frozenset({"old"})).micro_batches[0].old_logprobs,
                          batch.micro_batches[0].old_logprobs)  # fmt: skip
    assert gradient(p, batch, algo)[0]["policy/ratio_max"] > 1.001
    with training(p, dropout=True):
        pass
    assert not any(module.training for module in p.model.modules())


def test_clipping_scales_the_gradient_to_the_norm_asked_for():
    p, algo = a_policy(), grpo()
    batch = pack([made([1.0, 0.0])], algo)
    before = {k: mx.array(v) for k, v in flat(p.model.trainable_parameters()).items()}
    metrics = update(p, optim.SGD(1.0), batch, algo, max_grad_norm=1e-3)
    moved_by = math.sqrt(
        sum(mx.square(v - before[k]).sum().item() for k, v in flat(p.model.trainable_parameters()).items())
    )
    assert metrics["policy/grad_norm"] > 1e-3
    assert moved_by == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize("poison", ["advantages", "sampler_logprobs"])
def test_a_step_that_is_not_finite_leaves_weights_and_optimizer_untouched(poison):
    p, algo, optimizer = a_policy(), grpo(), optim.AdamW(1e-2)
    good = pack([made([1.0, 0.0])], algo)
    update(p, optimizer, good, algo)
    weights = {k: mx.array(v) for k, v in flat(p.model.trainable_parameters()).items()}
    state = {k: mx.array(v) for k, v in flat(optimizer.state).items()}
    (m,) = good.micro_batches
    array = getattr(m, poison)
    bad = dataclasses.replace(good, micro_batches=(dataclasses.replace(m, **{poison: mx.full(array.shape, mx.nan)}),))
    metrics = update(p, optimizer, bad, algo)
    if poison == "sampler_logprobs":  # a metric only, by default: the update goes on
        assert metrics["policy/skipped"] == 0.0
        return
    assert metrics["policy/skipped"] == 1.0
    assert all(mx.array_equal(v, weights[k]) for k, v in flat(p.model.trainable_parameters()).items())
    assert all(mx.array_equal(v, state[k]) for k, v in flat(optimizer.state).items())
    assert update(p, optimizer, good, algo)["policy/skipped"] == 0.0


def test_training_stops_after_three_steps_that_are_not_finite():
    class Exploding:
        name, needs = "exploding", frozenset()

        def advantages(self, groups):
            return [[1.0] * len(group) for group in groups]

        def loss(self, new, batch, totals):
            return new.token_logprobs.sum() * mx.nan, {"policy/loss": mx.array(mx.nan)}

    run = train(a_policy(), [Task("hi")], Exploding(), reward=length, steps=9, tasks_per_step=1, group_size=2,
                sampling=Sampling(max_tokens=4))  # fmt: skip
    assert [next(run).metrics["policy/skipped"] for _ in range(2)] == [1.0, 1.0]
    with pytest.raises(Diverged, match=r"step 2: .* in 3 updates in a row"):
        next(run)


def test_the_loop_is_a_function_of_the_seed_and_can_start_anywhere():
    settings: dict[str, Any] = {
        "reward": length, "tasks_per_step": 2, "group_size": 3, "sampling": Sampling(max_tokens=6),
    }  # fmt: skip
    tasks = [Task(text) for text in ("one", "two", "three", "four", "five")]

    def actions(start: int, steps: int, seed: int) -> list[Any]:
        run = train(a_policy(move=False), tasks, grpo(), optimizer=optim.SGD(0.0), seed=seed, start=start, steps=steps,
                    **settings)  # fmt: skip
        return [[t.turns[0].tokens for group in step.groups for t in group] for step in run]

    whole = actions(0, 4, seed=1)
    assert actions(0, 4, seed=1) == whole
    assert actions(2, 4, seed=1) == whole[2:]
    assert actions(0, 4, seed=2) != whole


def test_a_step_prints_its_reward_and_length():
    (step,) = train(a_policy(), [Task("hi")], grpo(), reward=length, steps=1, tasks_per_step=1, group_size=4,
                    sampling=Sampling(max_tokens=4))  # fmt: skip
    assert str(step).startswith("step 0  reward ")
    assert "tokens/s" in str(step)
    assert step.metrics["rollout/tokens"] == sum(t.length for t in step.groups[0])


def test_group_of_one_is_refused_where_the_baseline_is_the_group():
    with pytest.raises(ValueError, match="group"):
        pack([made([1.0])], grpo())


def test_greedy_evaluation_is_the_same_twice_and_pairs_compare():
    from mlxrl.train.evaluate import compare, evaluate

    p = a_policy()
    tasks = [Task(text) for text in ("one", "two", "three")]
    first, second = (evaluate(p, tasks, length, sampling=Sampling(max_tokens=5, temperature=0.0)) for _ in range(2))
    assert first.rewards == second.rewards
    assert compare(first, second) == {"difference": 0.0, "interval": [0.0, 0.0]}
    assert first.summary()["n"] == 3


def test_the_interval_of_a_paired_difference():
    from mlxrl.train.evaluate import Evaluation, compare

    # 100 pairs of which 40 go from 0 to 1: mean 0.4, standard error sqrt(0.4 * 0.6 / 100) = 0.049
    before = Evaluation(tuple(Trajectory(Task(str(i)), (), 0.0) for i in range(100)))
    after = Evaluation(tuple(Trajectory(Task(str(i)), (), float(i < 40)) for i in range(100)))
    result = compare(before, after)
    assert result["difference"] == pytest.approx(0.4)
    assert result["interval"][0] == pytest.approx(0.4 - 1.96 * 0.049, abs=0.015)
    assert result["interval"][1] == pytest.approx(0.4 + 1.96 * 0.049, abs=0.015)


def test_a_checkpoint_brings_back_adapters_optimizer_and_step(tmp_path):
    from mlxrl.train import checkpoint

    algo, batch = grpo(), pack([made([1.0, 0.0])], grpo())
    p, optimizer = a_policy(), optim.AdamW(optim.cosine_decay(1e-2, 10))
    update(p, optimizer, batch, algo)
    checkpoint.save(tmp_path, p, optimizer, 1)
    other, fresh = a_policy(move=False), optim.AdamW(optim.cosine_decay(1e-2, 10))
    assert checkpoint.restore(tmp_path, other, fresh) == 1
    for one, opt in ((p, optimizer), (other, fresh)):
        update(one, opt, batch, algo)
    wanted, got = flat(p.model.trainable_parameters()), flat(other.model.trainable_parameters())
    assert all(mx.array_equal(got[name], value) for name, value in wanted.items())


def test_schedules():
    from mlxrl.train.optimizer import schedule

    def rates(name: str, warmup: int) -> list[float]:
        rate = schedule(name, 1.0, 10, warmup)
        return [float(rate(mx.array(step))) if callable(rate) else rate for step in range(10)]

    assert rates("constant", 0) == [1.0] * 10
    assert rates("constant", 3) == pytest.approx([0.25, 0.5, 0.75] + [1.0] * 7)
    assert rates("linear", 0) == pytest.approx([1 - 0.1 * step for step in range(10)])
    assert rates("linear", 2)[:4] == pytest.approx([1 / 3, 2 / 3, 1.0, 0.875])
    assert rates("cosine", 0)[5] == pytest.approx(0.5)


def test_rollout_groups_train_end_to_end():
    p, algo = a_policy(hybrid, move=False), grpo()
    groups = rollout(p, [Task(LONG), Task("hi")], group_size=4, sampling=Sampling(max_tokens=6), key=0)
    scored = [tuple(dataclasses.replace(t, reward=float(i % 2)) for i, t in enumerate(group)) for group in groups]
    batch = pack(scored, algo)
    assert [m.prefix.size > 0 for m in batch] == [True, False]
    metrics = update(p, optim.AdamW(1e-3), batch, algo)
    assert metrics["mismatch/abs"] < 1e-5
    assert np.isfinite(list(metrics.values())).all()
