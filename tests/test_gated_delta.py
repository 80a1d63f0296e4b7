"""The gated delta rule by chunks: the reference's numbers, the loop's gradients, less work and memory."""

from __future__ import annotations

import io
import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import gated_delta as module

from helpers import by_hand, calls, minibatch, moved
from mlxrl.policy import gated_delta as ours
from mlxrl.policy.gated_delta import by_chunks, by_kernel, chunked, gated_delta, kernel_agrees
from mlxrl.policy.logprobs import logprobs
from mlxrl.policy.modes import training
from mlxrl.policy.policy import as_policy
from mlxrl.settings import LoRA
from models import hybrid, tokenizer

ORACLES = Path(os.environ.get("MLXRL_ORACLES", Path(__file__).parent / "oracles"))
CASES = sorted(ORACLES.glob("gated_delta__*.npz"))
loop = module.gated_delta_ops


def drawn(tokens: int, rows: int = 1, heads: tuple[int, int] = (2, 4), width: int = 8, per_key: bool = False,
          seed: int = 0) -> list[mx.array]:  # fmt: skip
    """q, k, v, g, beta, state of unit keys; decays from 0.5 to 0.999."""
    keys = mx.random.split(mx.random.key(seed), 6)
    shapes = [(heads[0], width)] * 2 + [(heads[1], width), (heads[1], width) if per_key else (heads[1],), (heads[1],)]
    q, k, v, g, beta = (mx.random.normal((rows, tokens, *s), key=key) for s, key in zip(shapes, keys, strict=False))
    state = mx.random.normal((rows, heads[1], width, width), key=keys[5])
    q, k = (x / mx.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    return [q * width**-0.5, k, v, mx.exp(-mx.exp(g - 2)), mx.sigmoid(beta), state]


def results(rule: Any, arguments: list[mx.array], mask: mx.array | None = None) -> list[mx.array]:
    """y, the last state, and the gradients of a random linear function of both."""
    shape = arguments[2].shape
    kept = mx.ones(shape[:2]) if mask is None else mask
    weigh_y = mx.random.normal(shape, key=mx.random.key(11)) * kept[..., None, None]
    weigh_state = mx.random.normal(arguments[5].shape, key=mx.random.key(12))

    def loss(*arguments: mx.array) -> mx.array:
        y, state = rule(*arguments, mask)
        return (y * weigh_y).sum() + (state * weigh_state).sum()

    y, state = rule(*arguments, mask)
    return [y * kept[..., None, None], state, *mx.grad(loss, argnums=list(range(6)))(*arguments)]


def assert_close(got: list[mx.array], wanted: list[mx.array], tolerance: float = 2e-6) -> None:
    for index, (a, b) in enumerate(zip(got, wanted, strict=True)):
        assert mx.linalg.norm(b).item() > 0, index
        assert (mx.linalg.norm(a - b) / mx.linalg.norm(b)).item() < tolerance, index


def test_the_cases_of_the_reference_are_there():
    assert len(CASES) == 8


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem.rsplit("__", 1)[-1])
def test_outputs_states_and_gradients_equal_those_of_the_reference(path):
    """transformers in float64; its states are [Dk, Dv], its decays logarithms, its scale and normalisation inside."""
    case = dict(np.load(path))
    hyper = json.loads(str(case["meta"]))["hyper"]
    names = ["q", "k", "v", "g", "beta", *(["s0"] if "in_s0" in case else [])]
    cotangent, cotangent_state = mx.array(case["in_cot_out"]), mx.array(case["in_cot_state"])

    def rule(q, k, v, log, beta, state=None):
        if hyper["l2norm"]:
            q, k = (x * mx.rsqrt(mx.square(x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
        state = None if state is None else state.swapaxes(-1, -2)
        y, state = gated_delta(q * q.shape[-1] ** -0.5, k, v, mx.exp(log), beta, state)
        return y, state.swapaxes(-1, -2)

    def loss(*arguments):
        y, state = rule(*arguments)
        return (y * cotangent).sum() + (state * cotangent_state).sum()

    inputs = [mx.array(case[f"in_{name}"]) for name in names]
    gradients = mx.grad(loss, argnums=list(range(len(inputs))))(*inputs)
    got = dict(zip(["out", "state", *(f"grad_{name}" for name in names)], [*rule(*inputs), *gradients], strict=True))
    for name, value in got.items():
        wanted = case[f"out_{name}"].astype(np.float64)
        scale = max(np.abs(wanted).max(), 1e-2 if "grad" in name else 1.0)
        assert (np.abs(np.array(value) - wanted) <= 1e-5 * np.abs(wanted) + 1e-5 * scale).all(), name


@pytest.mark.parametrize("per_key", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("tokens", [1, 2, 5, 63, 64, 65, 130, 300])
def test_equal_to_the_loop_over_tokens(tokens, rows, per_key):
    arguments = drawn(tokens, rows, per_key=per_key)
    assert_close(results(gated_delta, arguments), results(loop, arguments))


@pytest.mark.parametrize("per_key", [False, True])
def test_a_masked_token_neither_decays_nor_writes(per_key):
    arguments = drawn(70, 2, per_key=per_key)
    mask = mx.array(np.random.default_rng(0).random((2, 70)) < 0.7)
    assert_close(results(gated_delta, arguments, mask), results(loop, arguments, mask))
    short = [x[:, :50] for x in arguments[:5]]
    padded = mx.broadcast_to(mx.arange(70) < 50, (2, 70))
    assert_close(list(gated_delta(*arguments, padded)[1:]), list(gated_delta(*short, arguments[5])[1:]), 1e-6)


@pytest.mark.parametrize("per_key", [False, True])
def test_rows_are_independent_of_each_other(per_key):
    """Row permutation commutes with the rule and its gradients, row for row."""
    arguments, order = drawn(130, 3, per_key=per_key), mx.array([2, 0, 1])
    alone = [mx.concatenate(parts) for parts in zip(
        *([*gated_delta(*(x[row : row + 1] for x in arguments))] for row in range(3)), strict=True)]  # fmt: skip
    assert_close(list(gated_delta(*arguments)), alone, 1e-6)

    def gradients(arguments, order):
        weights = mx.random.normal(arguments[2].shape, key=mx.random.key(5))[order]
        return mx.grad(lambda *a: (gated_delta(*a)[0] * weights).sum(), argnums=list(range(6)))(*arguments)

    plain, permuted = gradients(arguments, mx.arange(3)), gradients([x[order] for x in arguments], order)
    assert_close(list(permuted), [x[order] for x in plain], 1e-6)


@pytest.mark.parametrize("per_key", [False, True])
@pytest.mark.parametrize("decay", [0.0, 1e-30, 1e-4, 1.0])
def test_decays_of_any_strength_are_finite_and_exact(decay, per_key):
    """In the middle of a chunk a strong decay forgets; a decay of 1 keeps everything."""
    arguments = drawn(80, per_key=per_key)
    arguments[3] = mx.concatenate(
        [arguments[3][:, :20], mx.full(arguments[3][:, 20:60].shape, decay), arguments[3][:, 60:]], axis=1
    )
    got, wanted = results(gated_delta, arguments), results(loop, arguments)
    assert all(mx.isfinite(x).all().item() for x in got)
    # A decay below 1e-37 counts as 1e-37: the gradient with respect to it is cut, its effect on the rest is not.
    skip = {5} if decay == 0.0 else set()
    keep = [i for i in range(len(got)) if i not in skip]
    assert_close([got[i] for i in keep], [wanted[i] for i in keep], 5e-6)


def test_equal_keys_written_at_full_strength_do_not_blow_up():
    """The triangular system at its worst: every key the same, beta 1, no decay. A power series reaches 2^63 here."""
    q, k, v, g, beta, state = drawn(64)
    k = mx.broadcast_to(k[:, :1], k.shape)
    arguments = [q, k, v, mx.ones_like(g), mx.ones_like(beta), state]
    assert_close(results(gated_delta, arguments), results(loop, arguments), 2e-5)


def test_half_precision_goes_in_and_out_and_the_state_stays_float32():
    arguments = [x.astype(mx.bfloat16) for x in drawn(70)[:5]]
    y, state = gated_delta(*arguments)
    wanted, state_wanted = gated_delta(*(x.astype(mx.float32) for x in arguments))
    assert (y.dtype, state.dtype) == (mx.bfloat16, mx.float32)
    assert mx.array_equal(y, wanted.astype(mx.bfloat16))
    assert mx.array_equal(state, state_wanted)


def test_the_path_of_mlx_own_kernel_equals_the_chunks():
    """Outside Metal the kernel is a loop, but states travel between its calls all the same."""
    arguments = drawn(130)
    assert_close(results(lambda *a: by_kernel(*a[:6]), arguments), results(gated_delta, arguments))


def test_mlx_own_kernel_is_taken_only_where_the_graph_shows_it(monkeypatch):
    def agrees() -> bool:
        kernel_agrees.cache_clear()
        return kernel_agrees(2, 8, 4, 8)

    assert not agrees()  # not a GPU
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    assert not agrees()  # a loop, as the graph shows
    monkeypatch.setattr(mx, "export_to_dot", lambda text, *arrays: text.write("GatedDeltaUpdateVJP"))
    assert agrees()
    monkeypatch.setattr(ours, "by_kernel", lambda q, k, v, g, beta, state: by_chunks(q, k, v, g, beta / 2, state))
    assert not agrees()
    kernel_agrees.cache_clear()


def test_installed_for_a_block_and_restored_in_any_order():
    with chunked():
        assert module.gated_delta_ops is gated_delta
        with chunked():
            assert module.gated_delta_ops is gated_delta
        assert module.gated_delta_ops is gated_delta
    assert module.gated_delta_ops is loop
    first, second = ExitStack(), ExitStack()
    first.enter_context(chunked())
    second.enter_context(chunked())
    first.close()
    assert module.gated_delta_ops is gated_delta
    second.close()
    assert module.gated_delta_ops is loop
    with pytest.raises(RuntimeError), chunked():
        raise RuntimeError
    assert module.gated_delta_ops is loop
    y, _ = gated_delta(*drawn(3), something_new=1)
    assert y.shape == (1, 3, 4, 8)


def test_training_passes_use_it_and_nothing_else_does(monkeypatch):
    p, batch = as_policy(hybrid(), tokenizer(), lora=LoRA()), minibatch(5)
    used = calls(monkeypatch, ours, "gated_delta")
    mx.eval(p.model(mx.array([[1, 2, 3]])))
    assert len(used) == 0
    with training(p):
        mx.eval(logprobs(p, batch).token_logprobs)
    assert len(used) == 4  # two linear layers, for the prefix and for the rows
    assert module.gated_delta_ops is loop


@pytest.mark.parametrize(("prefix", "tokens"), [(5, 7), (70, 66)])
def test_gradients_through_the_shared_prefix_equal_those_of_the_loop(prefix, tokens):
    p = as_policy(hybrid(), tokenizer(), lora=LoRA())
    moved(p.model)
    batch = minibatch(prefix, tokens)
    weight = mx.random.normal(batch.tokens.shape, key=mx.random.key(3)) * batch.mask
    with training(p):
        got = nn.value_and_grad(p.model, lambda: (logprobs(p, batch).token_logprobs * weight).sum())()
    p.model.train()
    wanted = nn.value_and_grad(p.model, lambda: (by_hand(p.model, batch) * weight).sum())()
    assert got[0].item() == pytest.approx(wanted[0].item(), rel=1e-4)
    for (name, a), (_, b) in zip(tree_flatten(got[1]), tree_flatten(wanted[1]), strict=True):
        assert mx.abs(b).max().item() > 0, name
        assert (mx.linalg.norm(a - b) / mx.linalg.norm(b)).item() < 1e-5, name


def peak(rule: Any, arguments: list[mx.array]) -> int:
    """Bytes above what was there, of a forward and backward pass."""
    mx.eval(arguments)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(results(rule, arguments)[2:])
    return mx.get_peak_memory() - before


def operations(rule: Any, arguments: list[mx.array]) -> int:
    """Nodes in the graph of a forward and backward pass."""
    text = io.StringIO()
    mx.export_to_dot(text, *results(rule, arguments)[2:])
    return text.getvalue().count("label")


@pytest.mark.parametrize("heads", [(2, 4), (4, 8)])
def test_512_tokens_take_a_fifteenth_of_the_loops_operations_and_a_quarter_of_its_memory(heads):
    arguments = drawn(512, heads=heads, width=64)
    assert operations(gated_delta, arguments) <= operations(loop, arguments) / 15
    assert peak(gated_delta, arguments) <= peak(loop, arguments) / 4


def test_memory_grows_linearly_with_tokens():
    peaks = [peak(gated_delta, drawn(tokens, width=32)) for tokens in (512, 1024, 2048)]
    assert peaks[1] <= 2.1 * peaks[0]
    assert peaks[2] <= 2.1 * peaks[1]
