"""What the pieces of a decode step cost, each alone: SmolLM2's shapes, 32 rows, float32.

    LD_PRELOAD=libopenblas.so.0 python benchmarks/primitives.py

Writes benchmarks/results/primitives.json, milliseconds of the median of 40. Products read the same weights again, so
they lie in a cache as far as they fit.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from machine import machine

ROWS, HIDDEN, INSIDE, HEADS, KEY_HEADS, WIDTH, CAPACITY, VOCABULARY = 32, 576, 1536, 9, 3, 64, 96, 49152


def milliseconds(way: Callable[[], Any], repeats: int = 40) -> float:
    """The median of a way that is waited for."""
    spent: list[float] = []
    for _ in range(repeats + 1):
        since = time.perf_counter()
        made = way()
        if isinstance(made, mx.array):
            mx.eval(made)
        spent.append(time.perf_counter() - since)
    return round(1e3 * statistics.median(spent[1:]), 4)


def products() -> dict[str, float]:
    """Rows times weights, of the shapes of a layer, and the head."""
    found: dict[str, float] = {}
    for name, inputs, outputs in (
        ("queries, keys and values", HIDDEN, (HEADS + 2 * KEY_HEADS) * WIDTH), ("attention's output", HIDDEN, HIDDEN),
        ("gate and up", HIDDEN, 2 * INSIDE), ("down", INSIDE, HIDDEN), ("head", HIDDEN, VOCABULARY),
    ):  # fmt: skip
        x, w = mx.random.normal((ROWS, inputs)), mx.random.normal((outputs, inputs))
        mx.eval(x, w)
        found[name] = milliseconds(lambda x=x, w=w: x @ w.T)
    return found


def others() -> dict[str, float]:
    """Attention over a capacity of 96 tokens, a token written to it, and what is made of exponentials."""
    q, new = mx.random.normal((ROWS, HEADS, 1, WIDTH)), mx.random.normal((ROWS, KEY_HEADS, 1, WIDTH))
    k, v = (mx.random.normal((ROWS, KEY_HEADS, CAPACITY, WIDTH)) for _ in range(2))
    mask, place = mx.ones((ROWS, 1, 1, CAPACITY), mx.bool_), mx.full((ROWS, 1, 1, 1), CAPACITY // 2)
    x, y = (mx.random.normal((ROWS, INSIDE)) for _ in range(2))
    mx.eval(q, k, v, mask, place, new, x, y)
    plain = np.array(x)
    return {
        "attention": milliseconds(lambda: mx.fast.scaled_dot_product_attention(q, k, v, scale=0.125, mask=mask)),
        "write a token, copy included": milliseconds(lambda: mx.put_along_axis(k, place, new, axis=2)),
        "gated activation": milliseconds(lambda: nn.silu(x) * y),
        "exponentials": milliseconds(lambda: mx.exp(x)),
        "exponentials, numpy": milliseconds(lambda: np.exp(plain)),
        "products of two arrays": milliseconds(lambda: x * y),
    }


def main() -> None:
    report = {"machine": machine(), "milliseconds": {**products(), **others()}, "exponentials": ROWS * INSIDE}
    path = Path(__file__).parent / "results" / "primitives.json"
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report["milliseconds"], indent=1))


if __name__ == "__main__":
    main()
