"""MLX's optimizers and learning-rate schedules, made of settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim

from mlxrl.settings import Optimizer


def schedule(settings: Optimizer, steps: int, warmup: int) -> float | Callable[[mx.array], mx.array]:
    """A learning rate over optimizer steps: a linear warm-up from 0, then constant, or down to 0 at `steps`.

    The first step of a warm-up of n already moves: its rate is learning_rate / (n + 1).
    """
    rate, falling = settings.learning_rate, max(steps - warmup, 1)
    if settings.schedule == "constant" and not warmup:
        return rate
    after: Any = {
        "constant": optim.linear_schedule(rate, rate, 1),
        "linear": optim.linear_schedule(rate, 0.0, falling),
        "cosine": optim.cosine_decay(rate, falling),
    }[settings.schedule]
    if not warmup:
        return after
    return optim.join_schedules([optim.linear_schedule(rate / (warmup + 1), rate, warmup), after], [warmup])


def make_optimizer(settings: Optimizer, steps: int = 1, updates_per_step: int = 1) -> optim.Optimizer:
    """MLX's optimizer. Adam's moments are bias-corrected, which MLX leaves out unless asked.

    Args:
        steps: of the run, where a schedule ends; updates_per_step: optimizer steps of each, with which it moves on.
    """
    moments = list(settings.betas or ((0.9, 0.99) if settings.name == "lion" else (0.9, 0.999)))
    rate = schedule(settings, steps * updates_per_step, settings.warmup_steps * updates_per_step)
    if settings.name == "adamw":
        return optim.AdamW(rate, betas=moments, weight_decay=settings.weight_decay, bias_correction=True)
    if settings.name == "adam":
        return optim.Adam(rate, betas=moments, bias_correction=True)
    if settings.name == "sgd":
        return optim.SGD(rate, weight_decay=settings.weight_decay)
    return optim.Lion(rate, betas=moments, weight_decay=settings.weight_decay)
