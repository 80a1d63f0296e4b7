from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from architectures import EVERY, a_policy
from helpers import flat, made, minibatch
from mlx.utils import tree_flatten

from mlxrl.algo.recipes import grpo
from mlxrl.policy.adapters import LoRA
from mlxrl.policy.load import Policy, policy
from mlxrl.policy.logprobs import logprobs, training
from mlxrl.policy.recompute import forgetful, recomputations, recomputed
from mlxrl.train.pack import pack
from mlxrl.train.step import gradient, update
from mlxrl.types import MicroBatch
from models import dense, hybrid, moe, tokenizer


def value_and_gradient(p: Policy, batch: MicroBatch, recompute: bool) -> tuple[float, dict[str, mx.array]]:
    weight = mx.random.normal(batch.tokens.shape, key=mx.random.key(3)) * batch.mask
    with training(p.model), recomputed(p.model) if recompute else nullcontext():
        value, found = nn.value_and_grad(p.model, lambda: (logprobs(p, batch).token_logprobs * weight).sum())()
        mx.eval(value, found)
    return value.item(), flat(found)


def assert_bit_for_bit(got: dict[str, mx.array], wanted: dict[str, mx.array]) -> None:
    for name, value in wanted.items():
        assert mx.array_equal(got[name], value), name


@pytest.mark.parametrize("prefix", [9, 0])
@pytest.mark.parametrize("make", [dense, moe, *EVERY])
def test_gradients_are_those_of_the_plain_pass_bit_for_bit(make, prefix):
    p = a_policy(make)
    batch = minibatch(prefix, prompt=0 if prefix else 2)
    plain, wanted = value_and_gradient(p, batch, False)
    before = recomputations()
    value, got = value_and_gradient(p, batch, True)
    # Every layer once in each forward, and those of the prefix and of the rows are forwards of their own.
    assert recomputations() - before == len(p.model.layers) * (2 if prefix else 1)
    assert value == plain
    assert sum(mx.abs(leaf).max().item() > 0 for leaf in wanted.values()) > len(wanted) / 2
    assert_bit_for_bit(got, wanted)


def test_every_trained_weight_of_a_whole_model_gets_its_gradient():
    """Not adapters alone: whatever is trainable in a layer travels through the recomputation."""
    model = dense()
    p = Policy(model, tokenizer(), policy(dense(), tokenizer(), lora=None).head, None, True, "")
    model.unfreeze()
    ids = mx.array([[5, 6, 7, 8, 9]])

    def loss():
        return mx.square(p.model(ids)).mean()

    wanted = nn.value_and_grad(model, loss)()[1]
    with recomputed(model):
        got = nn.value_and_grad(model, loss)()[1]
    assert all(mx.abs(leaf).max().item() > 0 for leaf in flat(wanted).values())
    assert_bit_for_bit(flat(got), flat(wanted))


def test_the_class_other_models_and_the_weights_are_left_alone():
    p, other = policy(dense(), tokenizer(), lora=LoRA()), dense()
    own, call = type(other.layers[0]), type(other.layers[0]).__call__
    weights = dict(tree_flatten(p.model.parameters()))
    with recomputed(p.model):
        assert type(p.model.layers[0]) is not own
        assert isinstance(p.model.layers[0], own)
        assert type(other.layers[0]) is own
        before = recomputations()
        mx.eval(other(mx.array([[1, 2]])))
        assert recomputations() == before
        mx.eval(p.model(mx.array([[1, 2]])))
        assert recomputations() == before + 2
    assert type(p.model.layers[0]) is own
    assert own.__call__ is call
    assert all(value is weights[name] for name, value in tree_flatten(p.model.parameters()))


def test_layers_are_restored_after_exceptions_and_blocks_may_be_nested():
    model = hybrid()
    classes = [type(layer) for layer in model.layers]
    with pytest.raises(RuntimeError), recomputed(model):
        raise RuntimeError
    assert [type(layer) for layer in model.layers] == classes
    weights = tree_flatten(model.parameters())
    with pytest.raises(ValueError), recomputed(model):
        model(mx.zeros((1, 2, 3, 4, 5), mx.int32))
    assert [type(layer) for layer in model.layers] == classes
    assert all(a is b for (_, a), (_, b) in zip(tree_flatten(model.parameters()), weights, strict=True))
    with recomputed(model), recomputed(model):
        mx.eval(model(mx.array([[1, 2]])))
    assert [type(layer) for layer in model.layers] == classes


@pytest.mark.parametrize("make", [dense, hybrid])
def test_caches_are_filled_as_without(make):
    from mlx_lm.models.cache import make_prompt_cache

    model, ids = make(), mx.array([[5, 6, 7, 8, 9, 10]])
    plain, ours = make_prompt_cache(model), make_prompt_cache(model)
    wanted = model(ids, cache=plain)
    with recomputed(model):
        assert mx.array_equal(model(ids, cache=ours), wanted)
    for a, b in zip(plain, ours, strict=True):
        assert type(a) is type(b)
        assert getattr(a, "offset", 0) == getattr(b, "offset", 0)
        for (_, x), (_, y) in zip(tree_flatten(a.state), tree_flatten(b.state), strict=True):
            assert x is None or mx.array_equal(x, y)
    step = mx.array([[11]])
    assert mx.array_equal(model(step, cache=plain), model(step, cache=ours))


def test_dropout_drops_the_same_the_second_time():
    """w enters linearly: dropped entries have gradient 0, kept ones 1 / keep, and the value is their sum."""
    layer = nn.Dropout(0.5)
    model: Any = nn.Module()
    inner = nn.Sequential(layer)
    model.layers = [inner]
    model.train()
    mx.random.seed(0)
    with recomputed(model):
        value, slope = mx.value_and_grad(lambda w: (inner(w) * mx.arange(1.0, 65.0)).sum())(mx.ones(64))
    kept = slope / mx.arange(1.0, 65.0)
    assert set(kept.tolist()) == {0.0, 2.0}
    assert value.item() == slope.sum().item()
    assert type(layer) is nn.Dropout


def test_dropout_of_adapters_is_the_same_in_both_runs_of_a_layer():
    """At a loss that is linear in lora_b, value = <gradient, lora_b>: a second mask would break the identity."""
    p = policy(dense(num_hidden_layers=1), tokenizer(), lora=LoRA(rank=4, dropout=0.5, keys=("mlp.down_proj",)))
    p.model.model.norm = nn.Identity()
    leaf = p.model.layers[0].mlp.down_proj
    leaf.lora_b = mx.random.normal(leaf.lora_b.shape, key=mx.random.key(5))
    ids = mx.array([[5, 6, 7, 8]])
    base = p.model.model(ids).sum().item()
    zero = mx.zeros_like(leaf.lora_b)
    drawn, leaf.lora_b = leaf.lora_b, zero
    base = p.model.model(ids).sum().item()
    leaf.lora_b = drawn
    with training(p.model, dropout=True), recomputed(p.model):
        value, found = nn.value_and_grad(p.model, lambda: p.model.model(ids).sum())()
    linear = (flat(found)["model.layers.0.mlp.down_proj.lora_b"] * drawn).sum().item()
    assert abs(linear) > 1e-3
    assert value.item() - base == pytest.approx(linear, rel=1e-3)


def test_a_chain_of_forgetful_functions_has_the_gradient_of_the_chain():
    double = forgetful(lambda x: [mx.sin(2 * x)])
    slope = mx.grad(lambda x: double(double(x)[0])[0].sum())(mx.array([0.3]))
    # d/dx sin(2 sin(2x)) = cos(2 sin 2x) * 2 * cos(2x) * 2 at 0.3: 0.427293 * 4 * 0.825336 = 1.410685
    assert slope.item() == pytest.approx(1.410685, rel=1e-4)


@pytest.mark.parametrize("make", [dense, hybrid, moe])
def test_it_is_a_setting_of_the_update(make):
    algo = grpo()
    batch = pack([made([1.0, 0.0, 0.4])], algo)
    p = a_policy(make)
    before = recomputations()
    metrics, plain = gradient(p, batch, algo)
    assert recomputations() == before
    more, ours = gradient(p, batch, algo, recompute=True)
    assert recomputations() > before
    assert more == metrics
    assert_bit_for_bit(flat(ours), flat(plain))
    before = recomputations()
    update(p, optim.SGD(1e-3), batch, algo, recompute=True)
    assert recomputations() > before
