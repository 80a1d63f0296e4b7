"""Caches of several sequences: what each row holds is what it holds alone."""

from __future__ import annotations

import mlx.core as mx
import pytest

from helpers import RAGGED
from mlxrl.policy.policy import as_policy
from mlxrl.rollout.kv_cache import EqualLengthCache, SlotCache, capacity_for
from mlxrl.rollout.kv_layers import layers_of
from mlxrl.rollout.prefill import prefill
from models import dense, hybrid, moe, tokenizer


def arrays_alone(p, prompt):
    """The arrays of a prompt that was run alone."""
    (one,) = prefill(p, [prompt], 2048)
    return one.arrays(layers_of(one.caches))


def assert_holds(cache, row, prompt, p):
    for whole, own in zip(cache.arrays, arrays_alone(p, prompt), strict=True):
        mine = whole[row : row + 1]
        if mine.shape != own.shape:
            assert not mine[:, :, len(prompt) :].any(), "the capacity after a row is zero"
            mine = mine[:, :, : len(prompt)]
        assert mx.allclose(mine, own, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [dense, hybrid, moe])
def test_slots_hold_after_ragged_prefill_what_each_row_alone_holds(make):
    """States of recurrent layers included: no padding reaches them."""
    p = as_policy(make(), tokenizer(), lora=None)
    slots = SlotCache(len(RAGGED))
    slots.fit(10)
    for row, prompt in enumerate(prefill(p, RAGGED, 2048)):
        slots.place([row], prompt)
    for row, prompt in enumerate(RAGGED):
        assert_holds(slots, row, prompt, p)
    slots.fit(33)
    assert slots.capacity == 64
    for row, prompt in enumerate(RAGGED):
        assert_holds(slots, row, prompt, p)
    part = slots.read([2, 0], 9)
    assert (part.rows, part.capacity) == (2, 32)
    for row, prompt in enumerate((RAGGED[2], RAGGED[0])):
        assert_holds(part, row, prompt, p)
    slots.write([1, 3], slots.read([2, 0]).arrays)
    for row, prompt in enumerate((RAGGED[0], RAGGED[2], RAGGED[2], RAGGED[0])):
        assert_holds(slots, row, prompt, p)


@pytest.mark.parametrize("make", [dense, hybrid])
def test_rows_of_one_length_may_be_placed_in_any_order(make):
    p = as_policy(make(), tokenizer(), lora=None)
    prompts = [(20, 21, 22), (30, 31, 32)]
    cache = EqualLengthCache(3)
    for prompt, slots in zip(prompts, ([0, 2], [1]), strict=True):
        cache.place(slots, prefill(p, [prompt], 2048)[0])
    given = cache.caches(mx.array([3] * 3))
    ends = p.head.project(p.head.trunk(mx.array([[40]] * 3), given)[:, -1])
    for row, prompt in enumerate((prompts[0], prompts[1], prompts[0])):
        assert mx.allclose(ends[row], p.model(mx.array([[*prompt, 40]]))[0, -1], atol=1e-5)
    assert len(cache.read([1]).arrays) == len(cache.arrays) > 0


def test_the_capacity_grows_by_a_quarter_at_most():
    assert [capacity_for(n) for n in (1, 32, 33, 255, 257, 513, 1025)] == [32, 32, 64, 256, 320, 640, 1280]
    assert all(n <= capacity_for(n) <= max(1.25 * n, n + 31) for n in range(1, 5000))
