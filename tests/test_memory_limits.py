"""Limits of MLX's memory, for the span of a run."""

from __future__ import annotations

import mlx.core as mx

from mlxrl.policy.policy import as_policy
from mlxrl.rollout.sample import sample
from mlxrl.runs.memory_limits import available, limited, limits, without_effect
from mlxrl.settings import LoRA, Sampling
from mlxrl.tables import Memory
from mlxrl.types import Task
from models import dense, tokenizer


def test_the_buffer_cache_is_bounded_and_the_wired_limit_left_alone(monkeypatch):
    wired = []
    monkeypatch.setattr(mx, "set_wired_limit", lambda limit: wired.append(limit) or 7)
    p = as_policy(dense(), tokenizer(), lora=LoRA())
    with limits(cache=100_000):
        for seed in range(3):
            sample(p, [Task("hi")], group_size=2, sampling=Sampling(max_tokens=4), key=seed)
            assert mx.get_cache_memory() <= 100_000
    assert mx.set_cache_limit(mx.set_cache_limit(2**30)) == 2**30
    assert wired == []
    with limits(wired=1234):
        assert wired == [1234]
    assert wired == [1234, 7]


def test_settings_bound_the_buffers_that_a_run_keeps():
    """0.5 GB where that is asked for, a quarter of the memory where nothing is; afterwards what it was."""
    before = mx.set_cache_limit(10**9)
    try:
        for memory, bytes in ((Memory(cache_limit=0.5), 500_000_000), (Memory(), round(available() / 4))):
            with limited(memory):
                assert mx.set_cache_limit(bytes) == bytes
            assert mx.set_cache_limit(10**9) == 10**9
    finally:
        mx.set_cache_limit(before)


def test_the_memory_of_a_run_is_bounded(monkeypatch):
    """MLX's limit, a quarter of it as buffers, and afterwards what they were."""
    set_to = []
    monkeypatch.setattr(mx, "set_memory_limit", lambda limit: set_to.append(limit) or 77)
    monkeypatch.setattr(mx, "set_cache_limit", lambda limit: set_to.append(limit) or 7)
    with limited(Memory(limit=2.0)):
        assert set_to == [500_000_000, 2_000_000_000]
    assert set_to[2:] == [7, 77]


def test_a_limit_without_effect_on_this_machine_is_told(monkeypatch):
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    assert without_effect(Memory()) == ""
    assert without_effect(Memory(wired_limit=1.0)) == "wired_limit has no effect here, because MLX has no Metal"
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    assert without_effect(Memory(wired_limit=1.0)) == ""
