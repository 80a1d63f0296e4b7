"""The gradient of a batch: every micro-batch forward and backward, a shared prefix once for all that carry it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from mlxrl.algo.algorithm import comparison_of
from mlxrl.errors import one_line
from mlxrl.policy.differentiate import bound, flattened, precomputed, trainable
from mlxrl.policy.logprobs import divergence_from, logprobs
from mlxrl.policy.modes import training
from mlxrl.policy.policy import ModelError, Policy
from mlxrl.policy.prefix import PrefixRun, by_prefix, run_prefix
from mlxrl.protocols import Algorithm
from mlxrl.train.metrics import combined
from mlxrl.train.own import loss_of
from mlxrl.train.teacher import Teacher
from mlxrl.types import Batch, Logprobs, Metrics, MicroBatch

Loss: TypeAlias = Callable[[MicroBatch, PrefixRun | None], tuple[mx.array, Metrics]]


def gradient(
    policy: Policy, batch: Batch, algorithm: Algorithm, teacher: Teacher | None = None, *, recompute: bool = False
) -> tuple[Metrics, Any | None]:
    """Metrics and gradient of a batch, summed over its micro-batches; no gradient where it has none.

    Args:
        recompute: gradient checkpointing: keep the inputs of layers only and run each again in the backward pass, a
            third more time, and memory that hardly grows with depth. The gradient is the same.
    Returns:
        metrics as floats, and a tree like the policy's trainable parameters.
    """

    def loss(micro_batch: MicroBatch, prefix: PrefixRun | None) -> tuple[mx.array, Metrics]:
        return loss_of(algorithm, forward(policy, micro_batch, algorithm, teacher, prefix), micro_batch, batch.totals)

    metrics: Metrics = {}
    total: Any = None
    with training(policy, recompute, batch.dropout_seed):
        for shared in by_prefix(batch.micro_batches, policy.shares_prefix):
            found, gradients = _gradient(policy, shared, loss)
            total = gradients if total is None else tree_map(mx.add, total, gradients)
            mx.eval(total, found)  # a pass's activations end here, not with the batch
            for more in found:
                metrics = combined(metrics, more)
    return metrics, total


def forward(
    policy: Policy,
    micro_batch: MicroBatch,
    algorithm: Algorithm,
    teacher: Teacher | None = None,
    prefix: PrefixRun | None = None,
) -> Logprobs:
    """What the loss looks at: log-probs of tokens and top ids, entropy and observations, divergence from a teacher."""
    compared, compare = comparison_of(algorithm), None
    if compared is not None and compared.divergence is not None and teacher is not None:
        compare = divergence_from(teacher.model, policy, micro_batch, compared.divergence, adapters=not teacher.base)
    return logprobs(
        policy, micro_batch, entropy="entropy" in algorithm.needs, top_ids=micro_batch.top_ids, compare=compare,
        observations="observations" in algorithm.needs, prefix=prefix,
    )  # fmt: skip


def _gradient(policy: Policy, micro_batches: Sequence[MicroBatch], loss: Loss) -> tuple[list[Metrics], Any]:
    """The metrics of micro-batches that share a prefix, and the gradient of the sum of their losses.

    One after the other they run forward and backward against the prefix's caches, which only then hand their summed
    cotangents to the prefix. So no more than the prefix and one micro-batch are in memory.
    """
    found: list[Metrics] = []

    def whole() -> mx.array:
        if len(micro_batches) > 1:
            return _summed(policy, micro_batches, loss, run_prefix(policy, micro_batches[0].prefix), found)
        value, metrics = loss(micro_batches[0], None)
        found.append(metrics)
        return value

    try:
        _, gradients = nn.value_and_grad(policy.model, whole)()
    except (ValueError, RuntimeError) as error:
        if "vjp" not in str(error).lower():
            raise
        why = f"cannot be trained, because mlx-lm computes it without a gradient: {one_line(error, 120)}"
        raise ModelError(type(policy.model).__module__, why) from error
    return found, gradients


def _summed(
    policy: Policy, micro_batches: Sequence[MicroBatch], loss: Loss, run: PrefixRun, found: list[Metrics]
) -> mx.array:
    """The sum of the losses as a function of the parameters and of the prefix's run, its gradient made with it."""
    names, parameters = trainable(policy.model)
    carried, rebuild = flattened((run.last, run.caches))

    def one(micro_batch: MicroBatch, *arrays: mx.array) -> tuple[mx.array, Metrics]:
        last, caches = rebuild(arrays[len(names) :])
        with bound(policy.model, names, arrays[: len(names)]):
            return loss(micro_batch, PrefixRun(last, caches))

    def whole(*arrays: mx.array) -> list[mx.array]:
        start = [mx.stop_gradient(array) for array in arrays]
        total, sums, given = mx.zeros(()), [mx.zeros_like(array) for array in arrays], start
        for micro_batch in micro_batches:
            differentiated = mx.value_and_grad(one, argnums=list(range(1, len(arrays) + 1)))
            (value, metrics), gradients = differentiated(micro_batch, *given)
            found.append(metrics)
            total, sums = total + value, [a + b for a, b in zip(sums, gradients, strict=True)]
            given = mx.depends(start, sums)  # the next begins when the gradients of this one are there
        return [total, *sums]

    return precomputed(whole)(*parameters, *carried)
