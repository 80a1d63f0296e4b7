"""Minibatches that share a prefix, as one pass: the prefix runs forward once and backward once for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, TypeAlias

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from mlxrl.policy.adapters import leaves
from mlxrl.policy.load import Policy
from mlxrl.policy.prefix import Prefix, carrying, run_prefix
from mlxrl.policy.recompute import Arrays, bound
from mlxrl.types import Metrics, MicroBatch

Loss: TypeAlias = Callable[[MicroBatch], tuple[mx.array, Metrics]]


def units(minibatches: Sequence[MicroBatch], sharing: bool = True) -> Iterator[list[MicroBatch]]:
    """Neighbours that carry the same prefix array together, others alone; all alone where the model cannot share."""
    if not sharing:
        yield from ([minibatch] for minibatch in minibatches)
        return
    keyed = groupby(enumerate(minibatches), lambda item: id(item[1].prefix) if item[1].prefix.size else -item[0] - 1)
    for _, unit in keyed:
        yield [minibatch for _, minibatch in unit]


def unit_gradient(policy: Policy, unit: Sequence[MicroBatch], loss: Loss) -> tuple[list[Metrics], Any]:
    """The metrics of every minibatch of a unit, and the gradient of the sum of their losses.

    One after the other they run forward and backward against the prefix's caches, which only then hand their summed
    cotangents to the prefix. So no more than the prefix and one minibatch are in memory.
    """
    found: list[Metrics] = []

    def whole() -> mx.array:
        if len(unit) == 1:
            value, metrics = loss(unit[0])
            found.append(metrics)
            return value
        run = run_prefix(policy.model, policy.head, unit[0].prefix)
        return _summed(policy, unit, loss, run, found)

    _, gradients = nn.value_and_grad(policy.model, whole)()
    return found, gradients


def _summed(policy: Policy, unit: Sequence[MicroBatch], loss: Loss, run: Prefix, found: list[Metrics]) -> mx.array:
    """The sum of the losses as a function of the parameters and of the prefix's run, its gradient made with it."""
    carried = Arrays()
    form = carried.out_of((run.last, run.caches))
    parameters = leaves(policy.model.trainable_parameters())
    names = [name for name, _ in parameters]

    def one(minibatch: MicroBatch, *primals: mx.array) -> tuple[mx.array, Metrics]:
        last, caches = carried.into(form, primals[len(names) :])
        own = tree_unflatten(list(zip(names, primals, strict=False)))
        with bound(policy.model, own), carrying(policy.model, minibatch.prefix, Prefix(last, caches)):
            return loss(minibatch)

    def forward(*primals: mx.array) -> list[mx.array]:
        start = [mx.stop_gradient(primal) for primal in primals]  # what is differentiated is differentiated here
        total, sums, given = mx.zeros(()), [mx.zeros_like(primal) for primal in primals], start
        for minibatch in unit:
            differentiated = mx.value_and_grad(one, argnums=list(range(1, len(primals) + 1)))
            (value, metrics), gradients = differentiated(minibatch, *given)
            found.append(metrics)
            total, sums = total + value, [a + b for a, b in zip(sums, gradients, strict=True)]
            given = mx.depends(start, sums)  # the next begins when the gradients of this one are there
        return [total, *sums]

    def backward(primals: Any, cotangents: Any, outputs: Any) -> list[mx.array]:
        return [cotangents[0] * gradient for gradient in outputs[1:]]

    summed: Any = mx.custom_function(forward)
    summed.vjp(backward)
    return summed(*(leaf for _, leaf in parameters), *carried.floating)[0]
