"""Optimizers and learning-rate schedules by name, all of them MLX's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim

NAMES = ("adamw", "adam", "sgd", "lion")
SCHEDULES = ("constant", "linear", "cosine")


def schedule(
    name: str, learning_rate: float, steps: int, warmup_steps: int = 0
) -> float | Callable[[mx.array], mx.array]:
    """A learning rate over optimizer steps: a linear warm-up from 0, then constant, or down to 0 at `steps`.

    The first step of a warm-up of n already moves: its rate is learning_rate / (n + 1).
    """
    falling = max(steps - warmup_steps, 1)
    if name == "constant":
        rate: Any = optim.linear_schedule(learning_rate, learning_rate, 1)
    elif name == "linear":
        rate = optim.linear_schedule(learning_rate, 0.0, falling)
    elif name == "cosine":
        rate = optim.cosine_decay(learning_rate, falling)
    else:
        raise ValueError(f"optimizer: schedule: wanted one of {', '.join(SCHEDULES)}, got {name!r}")
    if name == "constant" and not warmup_steps:
        return learning_rate
    if not warmup_steps:
        return rate
    warmup = optim.linear_schedule(learning_rate / (warmup_steps + 1), learning_rate, warmup_steps)
    return optim.join_schedules([warmup, rate], [warmup_steps])


def optimizer(
    name: str = "adamw",
    learning_rate: float = 1e-5,
    *,
    schedule_name: str = "constant",
    warmup_steps: int = 0,
    steps: int = 1,
    weight_decay: float = 0.0,
    betas: tuple[float, float] | None = None,
) -> optim.Optimizer:
    """An optimizer of MLX. Adam's moments are bias-corrected, which MLX leaves out unless asked.

    Args:
        steps: optimizer steps of the whole run, where a schedule ends.
        betas: of the moments; None for (0.9, 0.999), and (0.9, 0.99) for lion.
    """
    moments = list(betas or ((0.9, 0.99) if name == "lion" else (0.9, 0.999)))
    rate = schedule(schedule_name, learning_rate, steps, warmup_steps)
    if name == "adamw":
        return optim.AdamW(rate, betas=moments, weight_decay=weight_decay, bias_correction=True)
    if name == "adam":
        return optim.Adam(rate, betas=moments, bias_correction=True)
    if name == "sgd":
        return optim.SGD(rate, weight_decay=weight_decay)
    if name == "lion":
        return optim.Lion(rate, betas=moments, weight_decay=weight_decay)
    raise ValueError(f"optimizer: name: wanted one of {', '.join(NAMES)}, got {name!r}")
