"""Limits of MLX's memory, for the span of a block."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager

import mlx.core as mx

from mlxrl.tables import Memory

GB = 1e9


def limited(memory: Memory) -> AbstractContextManager[None]:
    """The span of a run, in which MLX takes no more memory and keeps no more buffers than [memory] says."""
    most = None if memory.limit is None else round(memory.limit * GB)
    cache = (most or available()) / 4 if memory.cache_limit is None else memory.cache_limit * GB
    wired = None if memory.wired_limit is None or not mx.metal.is_available() else round(memory.wired_limit * GB)
    return limits(round(cache), wired, most)


def available() -> int:
    """Bytes that MLX may use on this machine."""
    gpu, facts = mx.default_device() == mx.Device(mx.gpu), mx.device_info()
    names = ("max_recommended_working_set_size", "memory_size", "total_memory") if gpu else ("memory_size",)
    found = next((int(facts[name]) for name in names if name in facts), 0)
    return found or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def without_effect(memory: Memory) -> str:
    """Which of the limits has no effect on this machine, and why; "" for none."""
    lost = memory.wired_limit is not None and not mx.metal.is_available()
    return "wired_limit has no effect here, because MLX has no Metal" if lost else ""


@contextmanager
def limits(cache: int | None = None, wired: int | None = None, memory: int | None = None) -> Generator[None]:
    """Bound the buffers that MLX keeps for reuse, those it may wire, and its memory, in bytes; None leaves one alone.

    Nothing else here touches the wired limit: raising it has been seen to bring machines down.
    """
    given = ((mx.set_cache_limit, cache), (mx.set_wired_limit, wired), (mx.set_memory_limit, memory))
    before = [(function, function(limit)) for function, limit in given if limit is not None]
    try:
        yield
    finally:
        for function, limit in before:
            function(limit)
