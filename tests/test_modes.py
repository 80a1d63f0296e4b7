"""Modes: what they change, in which order, and that nothing of it is left."""

from __future__ import annotations

import re
from contextlib import contextmanager, suppress
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import gated_delta as delta_of_mlx_lm
from mlx_lm.models import qwen3
from mlx_lm.tuner.lora import LoRALinear

from helpers import a_policy, minibatch
from mlxrl.policy import modes
from mlxrl.policy.gated_delta import gated_delta
from mlxrl.policy.logprobs import logprobs
from mlxrl.policy.lora import without_adapters
from mlxrl.policy.modes import scoring, training
from mlxrl.policy.policy import Policy
from mlxrl.policy.recompute import swiglu
from models import dense, hybrid, moe

MODES = {
    "scoring": scoring,
    "scoring the base": lambda p: scoring(p, adapters=False),
    "training": training,
    "training with everything": lambda p: training(p, recompute=True, dropout=3),
}


def seen(p: Policy) -> dict[str, object]:
    """All that a mode may change."""
    modules = dict(p.model.named_modules())
    return {
        "classes": {name: type(module) for name, module in modules.items()},
        "objects": list(map(id, modules.values())),
        "training": {name: module.training for name, module in modules.items()},
        "functions": (delta_of_mlx_lm.gated_delta_ops, qwen3.swiglu),
        "weights": {name: id(array) for name, array in tree_flatten(p.model.parameters())},
        "attributes": vars(p.model).keys(),
    }


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("make", [dense, hybrid, moe])
def test_a_mode_leaves_the_model_as_it_was(make, mode):
    p = a_policy(make, dropout=0.5)
    before = seen(p)
    with mode(p):
        assert seen(p) != before
        mx.eval(logprobs(p, minibatch(4)).token_logprobs)
    assert seen(p) == before
    with pytest.raises(RuntimeError), mode(p):
        raise RuntimeError
    assert seen(p) == before


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("piece", ["chunked", "memory_efficient", "recomputed", "without_adapters"])
def test_a_mode_that_cannot_be_entered_leaves_the_model_as_it_was(mode, piece, monkeypatch):
    @contextmanager
    def failing(*_):
        raise OSError
        yield

    p = a_policy(hybrid)
    before = seen(p)
    monkeypatch.setattr(modes, piece, failing)
    with suppress(OSError), mode(p):
        pass
    assert seen(p) == before


def test_what_a_mode_changes():
    p = a_policy(dense, dropout=0.5)
    layer = p.model.layers[0]
    own, adapter = type(layer), layer.self_attn.q_proj
    dropouts = [module for module in p.model.modules() if isinstance(module, nn.Dropout)]
    with scoring(p):
        assert p.model.training
        assert not any(dropout.training for dropout in dropouts)
        assert (delta_of_mlx_lm.gated_delta_ops, qwen3.swiglu) == (gated_delta, swiglu)
        assert type(layer) is own
        assert layer.self_attn.q_proj is adapter
    with scoring(p, adapters=False):
        assert layer.self_attn.q_proj is adapter.linear
    with training(p, dropout=3):
        kept = [np.array(dropout(mx.ones((2, 3, 64))))[..., :] for dropout in dropouts[:2]]
        assert all((mask == mask[0, 0]).all() and set(mask[0, 0].tolist()) == {0.0, 2.0} for mask in kept)
        assert (kept[0] != kept[1]).any()  # each layer its own
        assert type(layer) is own
    with training(p, recompute=True):
        assert not any(dropout.training for dropout in dropouts)
        assert type(layer) is not own
        assert isinstance(layer, own)
        assert isinstance(layer.self_attn.q_proj, LoRALinear)


def test_changes_are_made_in_one_order_and_undone_in_the_other(monkeypatch):
    """Layers look functions up in the module of their class, which recomputation swaps: it has to come last."""
    p, done = a_policy(dense), []

    def noted(name):
        own = getattr(modes, name)

        @contextmanager
        def entered(*arguments):
            with own(*arguments):
                done.append(f"+{name}")
                yield
            done.append(f"-{name}")

        monkeypatch.setattr(modes, name, entered)

    for name in ("chunked", "memory_efficient", "recomputed", "without_adapters"):
        noted(name)
    with training(p, recompute=True):
        assert done == ["+chunked", "+memory_efficient", "+recomputed"]
    assert done[3:] == ["-recomputed", "-memory_efficient", "-chunked"]
    done.clear()
    with scoring(p, adapters=False):
        assert done == ["+without_adapters", "+chunked", "+memory_efficient"]
    assert done[3:] == ["-memory_efficient", "-chunked", "-without_adapters"]


@pytest.mark.parametrize("inner", MODES.values(), ids=MODES)
@pytest.mark.parametrize("outer", MODES.values(), ids=MODES)
def test_a_mode_inside_another_is_refused(outer, inner):
    p, other = a_policy(dense), a_policy(dense)
    before = seen(p)
    with outer(p):
        during = seen(p)
        with pytest.raises(AssertionError, match="a model is in one mode at a time"), inner(p):
            pass
        assert seen(p) == during
        with inner(other):  # that of another model has nothing to do with it
            mx.eval(logprobs(other, minibatch(4)).token_logprobs)
        assert seen(p) == during
    assert seen(p) == before


def test_the_base_is_scored_bit_for_bit():
    p, batch = a_policy(hybrid), minibatch(5)
    with scoring(p):
        adapted = logprobs(p, batch).token_logprobs
    with training(p):
        assert mx.array_equal(logprobs(p, batch).token_logprobs, adapted)
    with scoring(p, adapters=False):
        base = logprobs(p, batch).token_logprobs
    with without_adapters(p), scoring(p):
        assert mx.array_equal(logprobs(p, batch).token_logprobs, base)
    assert mx.abs(base - adapted).max().item() > 1e-3


def test_nothing_else_in_the_package_puts_a_model_in_training_or_swaps_a_class():
    package = Path(modes.__file__).parents[1]
    changes = re.compile(r"\.train\(\)|\.__class__ = (?!_Library)")
    found = {path.relative_to(package) for path in package.rglob("*.py") if changes.search(path.read_text("utf-8"))}
    assert {str(path) for path in found} == {"policy/modes.py", "policy/recompute.py"}
