"""Recomputation of layers in the backward pass: which layers, and the same gradient as without."""

from __future__ import annotations

import re
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from mlx.utils import tree_flatten

from architectures import EVERY, a_policy
from families import FAMILIES, FURTHER, OTHERS, REFUSED, architectures, family, other
from helpers import by_hand, calls, flat, made, minibatch, moved
from mlxrl.algo.recipes import grpo
from mlxrl.errors import UserError
from mlxrl.policy import recompute as module
from mlxrl.policy.differentiate import checkpointed
from mlxrl.policy.logprobs import logprobs
from mlxrl.policy.modes import training
from mlxrl.policy.policy import Policy, as_policy
from mlxrl.policy.recompute import recomputed
from mlxrl.settings import LoRA, Train
from mlxrl.train.batch import make_batch
from mlxrl.train.gradient import gradient
from mlxrl.train.update import update
from mlxrl.types import MicroBatch
from models import dense, hybrid, moe, tokenizer


def value_and_gradient(p: Policy, batch: MicroBatch, recompute: bool) -> tuple[float, dict[str, mx.array]]:
    weight = mx.random.normal(batch.tokens.shape, key=mx.random.key(3)) * batch.mask
    with training(p, recompute):
        value, found = nn.value_and_grad(p.model, lambda: (logprobs(p, batch).token_logprobs * weight).sum())()
        mx.eval(value, found)
    return value.item(), flat(found)


def assert_bit_for_bit(got: dict[str, mx.array], wanted: dict[str, mx.array]) -> None:
    for name, value in wanted.items():
        assert mx.array_equal(got[name], value), name


@pytest.mark.parametrize("prefix", [9, 0])
@pytest.mark.parametrize("make", [dense, moe, *EVERY])
def test_gradients_are_those_of_the_plain_pass_bit_for_bit(make, prefix, monkeypatch):
    p = a_policy(make)
    batch = minibatch(prefix, prompt=0 if prefix else 2)
    plain, wanted = value_and_gradient(p, batch, False)
    runs = calls(monkeypatch, module, "run_checkpointed")
    value, got = value_and_gradient(p, batch, True)
    # Every layer once in each forward, and those of the prefix and of the sequences are forwards of their own.
    assert len(runs) == len(p.model.layers) * (2 if prefix else 1)
    assert value == plain
    assert sum(mx.abs(leaf).max().item() > 0 for leaf in wanted.values()) > len(wanted) / 2
    assert_bit_for_bit(got, wanted)


@pytest.mark.parametrize("prefix", [9, 0])
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "rwkv7"])  # whose own gradient is not finite
def test_every_family_has_the_gradient_of_a_plain_forward_with_and_without(name, prefix):
    """gemma4_text among them, whose layers return the keys that they cache, for later layers to share."""
    has_the_gradient_of_a_plain_forward(name, family(name), prefix)


@pytest.mark.slow
@pytest.mark.parametrize("prefix", [9, 0])
@pytest.mark.parametrize("name", sorted({*OTHERS, *FURTHER} - REFUSED.keys()))
def test_every_other_family_that_can_be_built_has_it_too(name, prefix):
    if name == "muse_spark" and not mx.metal.is_available():
        pytest.skip("it has a kernel of Metal's")
    has_the_gradient_of_a_plain_forward(name, other(name), prefix)


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_cannot_be_trained_is_refused_by_its_name(name):
    batch = make_batch([made([1.0, 0.0])], grpo())
    with pytest.raises(UserError, match=re.escape(REFUSED[name])):
        gradient(as_policy(other(name), tokenizer(), lora=LoRA(rank=4)), batch, grpo())


def test_every_family_of_mlx_lm_is_tried():
    left = architectures() - {*FAMILIES, *OTHERS, *FURTHER}
    assert left == {"olmo"}  # it wants a package of its own


def has_the_gradient_of_a_plain_forward(name: str, model: Any, prefix: int) -> None:
    p = as_policy(model, tokenizer(), lora=LoRA(rank=4))
    moved(p.model)
    batch = minibatch(prefix, prompt=0 if prefix else 2)
    weight = mx.random.normal(batch.tokens.shape, key=mx.random.key(3)) * batch.mask
    plain, wanted = value_and_gradient(p, batch, False)
    value, got = value_and_gradient(p, batch, True)
    if name in FAMILIES:  # mamba's differs by the order of a sum
        assert value == plain
        assert_bit_for_bit(got, wanted)
    p.model.train()
    by_plain = flat(nn.value_and_grad(p.model, lambda: (by_hand(p.model, batch) * weight).sum())()[1])
    largest = max(mx.abs(leaf).max().item() for leaf in by_plain.values())
    tolerance = 1e-4 if name == "qwen3_next" else 1e-5  # its gradient moves by as much when weights move by 1e-7
    assert all(mx.abs(got[leaf] - value).max().item() < tolerance * largest for leaf, value in by_plain.items())
    if prefix:
        groups = [made([1.0, 0.0, 0.4], lengths=[6, 6, 6])]
        whole, parts = (make_batch(groups, grpo(), Train(tokens_per_pass=tokens)) for tokens in (None, 97))
        assert (len(whole), len(parts)) == (1, 3)
        wanted, got = (flat(gradient(p, batch, grpo(), recompute=batch is parts)[1]) for batch in (whole, parts))
        largest = max(mx.abs(leaf).max().item() for leaf in wanted.values())
        assert all(mx.abs(got[leaf] - value).max().item() < tolerance * largest for leaf, value in wanted.items())


def test_every_trained_weight_of_a_whole_model_gets_its_gradient():
    """Not adapters alone: whatever is trainable in a layer travels through the recomputation."""
    model = dense()
    p = Policy(model, tokenizer(), as_policy(dense(), tokenizer(), lora=None).head, None, True, "")
    model.unfreeze()
    ids = mx.array([[5, 6, 7, 8, 9]])

    def loss():
        return mx.square(p.model(ids)).mean()

    wanted = nn.value_and_grad(model, loss)()[1]
    with recomputed(model):
        got = nn.value_and_grad(model, loss)()[1]
    assert all(mx.abs(leaf).max().item() > 0 for leaf in flat(wanted).values())
    assert_bit_for_bit(flat(got), flat(wanted))


def test_the_class_other_models_and_the_weights_are_left_alone(monkeypatch):
    runs = calls(monkeypatch, module, "run_checkpointed")
    p, other = as_policy(dense(), tokenizer(), lora=LoRA()), dense()
    own, call = type(other.layers[0]), type(other.layers[0]).__call__
    weights = dict(tree_flatten(p.model.parameters()))
    with recomputed(p.model):
        assert type(p.model.layers[0]) is not own
        assert isinstance(p.model.layers[0], own)
        assert type(other.layers[0]) is own
        mx.eval(other(mx.array([[1, 2]])))
        assert len(runs) == 0
        mx.eval(p.model(mx.array([[1, 2]])))
        assert len(runs) == 2
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


def test_dropout_of_adapters_is_the_same_in_both_runs_of_a_layer():
    """At a loss that is linear in lora_b, value = <gradient, lora_b>: a second mask would break the identity."""
    p = as_policy(dense(num_hidden_layers=1), tokenizer(), lora=LoRA(rank=4, dropout=0.5, keys=("mlp.down_proj",)))
    p.model.model.norm = nn.Identity()
    leaf = p.model.layers[0].mlp.down_proj
    leaf.lora_b = mx.random.normal(leaf.lora_b.shape, key=mx.random.key(5))
    ids = mx.array([[5, 6, 7, 8]])
    base = p.model.model(ids).sum().item()
    zero = mx.zeros_like(leaf.lora_b)
    drawn, leaf.lora_b = leaf.lora_b, zero
    base = p.model.model(ids).sum().item()
    leaf.lora_b = drawn
    with training(p, recompute=True, dropout=3):
        value, found = nn.value_and_grad(p.model, lambda: p.model.model(ids).sum())()
    linear = (flat(found)["model.layers.0.mlp.down_proj.lora_b"] * drawn).sum().item()
    assert abs(linear) > 1e-3
    assert value.item() - base == pytest.approx(linear, rel=1e-3)


def test_a_chain_of_checkpointed_functions_has_the_gradient_of_the_chain():
    double = checkpointed(lambda x: [mx.sin(2 * x)])
    gradient = mx.grad(lambda x: double(double(x)[0])[0].sum())(mx.array([0.3]))
    # d/dx sin(2 sin(2x)) = cos(2 sin 2x) * 2 * cos(2x) * 2 at 0.3: 0.427293 * 4 * 0.825336 = 1.410685
    assert gradient.item() == pytest.approx(1.410685, rel=1e-4)


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (lambda x: [x * x, x * x], [24.0, 36.0]),  # d/dx (x^2 + 5 x^2) = 12 x at 2 and 3
        (lambda x: [x * x] * 2, [24.0, 36.0]),
        (lambda x: [x] * 2, [6.0, 6.0]),
        (lambda x: [x, x * x], [21.0, 31.0]),
    ],
    ids=["two arrays", "one array twice", "the argument twice", "the argument and another"],
)
def test_a_function_that_returns_one_array_twice_has_both_gradients(function, wanted):
    def loss(x: mx.array) -> mx.array:
        first, second = checkpointed(function)(x)
        return (first + 5 * second).sum()

    assert mx.grad(loss)(mx.array([2.0, 3.0])).tolist() == wanted


def test_an_argument_that_is_given_twice_has_the_gradient_of_both():
    square = checkpointed(lambda a, b: [a * a * b])
    assert mx.grad(lambda x: square(x, x)[0].sum())(mx.array([2.0])).item() == 12.0  # d/dx x^3 = 3 x^2


@pytest.mark.parametrize("make", [dense, hybrid, moe])
def test_it_is_a_setting_of_the_update(make, monkeypatch):
    algorithm = grpo()
    batch = make_batch([made([1.0, 0.0, 0.4])], algorithm)
    p = a_policy(make)
    runs = calls(monkeypatch, module, "run_checkpointed")
    metrics, plain = gradient(p, batch, algorithm)
    assert not runs
    more, ours = gradient(p, batch, algorithm, recompute=True)
    assert runs
    assert more == metrics
    assert_bit_for_bit(flat(ours), flat(plain))
    runs.clear()
    update(p, optim.SGD(1e-3), batch, algorithm, recompute=True)
    assert runs
