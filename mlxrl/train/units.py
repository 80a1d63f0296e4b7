"""Micro-batches that share a prefix, as one pass: it runs forward once and backward once for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import mlx.core as mx
import mlx.nn as nn

from mlxrl.policy.differentiate import bound, flattened, precomputed, trainable
from mlxrl.policy.policy import Policy
from mlxrl.policy.prefix import PrefixRun, run_prefix
from mlxrl.types import Metrics, MicroBatch

Loss: TypeAlias = Callable[[MicroBatch, PrefixRun | None], tuple[mx.array, Metrics]]


def units(micro_batches: Sequence[MicroBatch], sharing: bool = True) -> Iterator[list[MicroBatch]]:
    """Neighbours that carry the same prefix together, others alone; all alone where the model cannot share."""
    unit: list[MicroBatch] = []
    for micro_batch in micro_batches:
        same = sharing and micro_batch.prefix_id is not None
        if unit and not (same and micro_batch.prefix_id == unit[-1].prefix_id):
            yield unit
            unit = []
        unit.append(micro_batch)
    if unit:
        yield unit


def with_prefix_runs(
    policy: Policy, micro_batches: Sequence[MicroBatch]
) -> Iterator[tuple[MicroBatch, PrefixRun | None]]:
    """Each micro-batch and the run of its prefix, for passes without gradient: neighbours that carry one share it."""
    for unit in units(micro_batches, policy.shares_prefix):
        shared = policy.shares_prefix and unit[0].prefix.size
        run = run_prefix(policy, unit[0].prefix).evaluated() if shared else None
        for micro_batch in unit:
            yield micro_batch, run


def unit_gradient(policy: Policy, unit: Sequence[MicroBatch], loss: Loss) -> tuple[list[Metrics], Any]:
    """The metrics of every micro-batch of a unit, and the gradient of the sum of their losses.

    One after the other they run forward and backward against the prefix's caches, which only then hand their summed
    cotangents to the prefix. So no more than the prefix and one micro-batch are in memory.
    """
    found: list[Metrics] = []

    def whole() -> mx.array:
        if len(unit) > 1:
            return _summed(policy, unit, loss, run_prefix(policy, unit[0].prefix), found)
        value, metrics = loss(unit[0], None)
        found.append(metrics)
        return value

    _, gradients = nn.value_and_grad(policy.model, whole)()
    return found, gradients


def _summed(policy: Policy, unit: Sequence[MicroBatch], loss: Loss, run: PrefixRun, found: list[Metrics]) -> mx.array:
    """The sum of the losses as a function of the parameters and of the prefix's run, its gradient made with it."""
    names, parameters = trainable(policy.model)
    carried = flattened((run.last, run.caches))

    def one(micro_batch: MicroBatch, *arrays: mx.array) -> tuple[mx.array, Metrics]:
        last, caches = carried.rebuilt(arrays[len(names) :])
        with bound(policy.model, names, arrays[: len(names)]):
            return loss(micro_batch, PrefixRun(last, caches))

    def whole(*arrays: mx.array) -> tuple[mx.array, list[mx.array]]:
        start = [mx.stop_gradient(array) for array in arrays]
        total, sums, given = mx.zeros(()), [mx.zeros_like(array) for array in arrays], start
        for micro_batch in unit:
            differentiated = mx.value_and_grad(one, argnums=list(range(1, len(arrays) + 1)))
            (value, metrics), gradients = differentiated(micro_batch, *given)
            found.append(metrics)
            total, sums = total + value, [a + b for a, b in zip(sums, gradients, strict=True)]
            given = mx.depends(start, sums)  # the next begins when the gradients of this one are there
        return total, sums

    return precomputed(whole)(*parameters, *carried.floating)
