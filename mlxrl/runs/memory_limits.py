"""Limits of MLX's memory, for the span of a block."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import mlx.core as mx


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
