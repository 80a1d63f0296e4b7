"""The update: log-probs, loss, gradient, one optimizer step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_map

from mlxrl.algo import finish
from mlxrl.policy.adapters import leaves, without_adapters
from mlxrl.policy.load import Policy
from mlxrl.policy.logprobs import logprobs, training
from mlxrl.types import Algorithm, Metrics, Minibatch, Pack


def update(
    policy: Policy,
    optimizer: optim.Optimizer,
    batch: Pack,
    algo: Algorithm,
    *,
    max_grad_norm: float = 1.0,
) -> Metrics:
    """One optimizer step on a packed batch. Gradients of its minibatches add up to that of the whole.

    A loss or gradient that is not finite leaves weights and optimizer as they were, and is reported as skipped;
    so does a batch in which no row has a signal, reported as a gradient norm of 0.

    Returns:
        the algorithm's metrics and `policy/grad_norm` (before clipping), `policy/skipped`, `policy/learning_rate`.
    """
    batch = fill(policy, batch, algo.needs - {"old"})
    metrics, gradients = gradient(policy, batch, algo)
    metrics = finish(metrics)
    norm = grad_norm(gradients) if gradients is not None else 0.0
    finite = math.isfinite(norm) and math.isfinite(metrics.get("policy/loss", 0.0))
    if gradients is not None and finite:
        scale = min(1.0, max_grad_norm / (norm + 1e-6))
        optimizer.update(policy.model, tree_map(lambda leaf: leaf * scale, gradients))
        mx.eval(policy.model.trainable_parameters(), optimizer.state)  # ends the step's graph
    metrics["policy/grad_norm"] = norm
    metrics["policy/skipped"] = float(not finite)
    metrics["policy/learning_rate"] = float(optimizer.learning_rate)
    return metrics


def fill(policy: Policy, batch: Pack, needs: frozenset[str]) -> Pack:
    """Compute what the loss compares with, where it is not there yet: "old" and "reference" log-probs.

    Both come from the function that the loss uses, so that equal weights give equal numbers.
    """

    def filled(minibatch: Minibatch) -> Minibatch:
        if "old" in needs and minibatch.old is None:
            minibatch = replace(minibatch, old=_fixed(policy, minibatch))
        if "reference" in needs and minibatch.reference is None:
            with without_adapters(policy.model):
                minibatch = replace(minibatch, reference=_fixed(policy, minibatch))
        return minibatch

    return replace(batch, minibatches=tuple(filled(minibatch) for minibatch in batch))


def _fixed(policy: Policy, minibatch: Minibatch) -> mx.array:
    with training(policy.model):
        chosen = mx.stop_gradient(logprobs(policy, minibatch).chosen)
        mx.eval(chosen)  # the pass's activations end here
    return chosen


def gradient(policy: Policy, batch: Pack, algo: Algorithm) -> tuple[Metrics, Any | None]:
    """Metrics and gradient of a batch, summed over its minibatches; no gradient where it has none.

    Returns:
        metrics as floats, and a tree like the policy's trainable parameters.
    """

    def loss(minibatch: Minibatch) -> tuple[mx.array, Metrics]:
        new = logprobs(policy, minibatch, entropy="entropy" in algo.needs)
        return algo.loss(new, minibatch, batch.totals)

    pass_ = nn.value_and_grad(policy.model, loss)
    metrics: Metrics = {}
    total: Any = None
    with training(policy.model, dropout=policy.lora is not None and policy.lora.dropout > 0):
        for minibatch in batch:
            (_, more), gradients = pass_(minibatch)
            total = gradients if total is None else tree_map(mx.add, total, gradients)
            mx.eval(total, more)  # a pass's activations end here, not with the batch
            metrics = combined(metrics, more)
    return metrics, total


def combined(metrics: Mapping[str, float], more: Mapping[str, Any]) -> Metrics:
    """Add a minibatch's metrics: sums, but for names in `_max` and `_min`."""
    result = dict(metrics)
    for name, value in more.items():
        number = float(value)
        if name not in result:
            result[name] = number
        elif name.endswith("_max"):
            result[name] = max(result[name], number)
        elif name.endswith("_min"):
            result[name] = min(result[name], number)
        else:
            result[name] += number
    return result


def grad_norm(gradients: Any) -> float:
    """The Euclidean norm over every leaf, NaN where one is not finite."""
    squares = [mx.square(leaf.astype(mx.float32)).sum() for _, leaf in leaves(gradients)]
    return float(cast(float, mx.sqrt(mx.stack(squares).sum()).item()))
