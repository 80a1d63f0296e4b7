"""Limits of MLX's memory, for the span of a block."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager

import mlx.core as mx

from mlxrl.settings import Memory

GB = 1e9


def limited(memory: Memory) -> AbstractContextManager[None]:
    """The span of a run, in which MLX keeps no more buffers than [memory] says."""
    cache = available() / 4 if memory.cache_limit is None else memory.cache_limit * GB
    wired = None if memory.wired_limit is None or not mx.metal.is_available() else round(memory.wired_limit * GB)
    return limits(round(cache), wired)


def available() -> int:
    """Bytes that MLX may use on this machine."""
    gpu, facts = mx.default_device() == mx.Device(mx.gpu), mx.device_info()
    names = ("max_recommended_working_set_size", "memory_size", "total_memory") if gpu else ("memory_size",)
    found = next((int(facts[name]) for name in names if name in facts), 0)
    return found or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def limits(cache: int | None = None, wired: int | None = None) -> Generator[None]:
    """Bound the buffers that MLX keeps for reuse, and those it may wire, in bytes; None leaves a limit alone.

    Nothing else here touches the wired limit: raising it has been seen to bring machines down.
    """
    before = None if cache is None else mx.set_cache_limit(cache)
    wired_before = None if wired is None else mx.set_wired_limit(wired)
    try:
        yield
    finally:
        if before is not None:
            mx.set_cache_limit(before)
        if wired_before is not None:
            mx.set_wired_limit(wired_before)
