"""The update: log-probs, loss, gradient, one optimizer step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_map

from mlxrl.algo import finish
from mlxrl.algo.algorithm import comparison_of
from mlxrl.policy.differentiate import leaves
from mlxrl.policy.logprobs import logprobs
from mlxrl.policy.modes import scoring, training
from mlxrl.policy.policy import Policy
from mlxrl.policy.prefix import PrefixRun
from mlxrl.train.forward import forward
from mlxrl.train.teacher import Teacher, taught, teacher_of
from mlxrl.train.units import unit_gradient, units, with_prefix_runs
from mlxrl.types import Algorithm, Batch, Logprobs, Metrics, MicroBatch


def update(
    policy: Policy,
    optimizer: optim.Optimizer,
    batch: Batch,
    algo: Algorithm,
    *,
    teacher: Policy | Teacher | Literal["base"] | None = None,
    hint: str | None = None,
    max_grad_norm: float = 1.0,
    recompute: bool = False,
) -> Metrics:
    """One optimizer step on a packed batch. Gradients of its minibatches add up to that of the whole.

    A loss or gradient that is not finite leaves weights and optimizer as they were, and is reported as skipped;
    so does a batch in which no row has a signal, reported as a gradient norm of 0.

    Args:
        teacher: for an algorithm that learns from one: another policy with the same vocabulary, or "base" for the
            policy without its adapters. It is forced on the token ids that the policy sampled.
        hint: a column of the tasks that is put behind the prompt for the teacher alone; without a teacher, the policy
            itself under that prompt is the teacher.
        recompute: see `gradient`.
    Returns:
        the algorithm's metrics and `policy/grad_norm` (before clipping), `policy/skipped`, `policy/learning_rate`, and
        `policy/cut_tokens` where rows were cut.
    """
    judge = teacher_of(policy, algo, teacher, hint)
    batch = fill(policy, batch, algo.needs - {"old"}, algo=algo, teacher=judge)
    metrics, gradients = gradient(policy, batch, algo, judge, recompute=recompute)
    metrics = finish(metrics)
    norm = grad_norm(gradients) if gradients is not None else 0.0
    finite = math.isfinite(norm) and math.isfinite(metrics.get("policy/loss", 0.0))
    if gradients is not None and finite:
        scale = min(1.0, max_grad_norm / (norm + 1e-6))
        optimizer.update(policy.model, tree_map(lambda leaf: leaf * scale, gradients))
        mx.eval(policy.model.trainable_parameters(), optimizer.state)  # ends the step's graph
    if batch.dropped_tokens:
        metrics["policy/cut_tokens"] = float(sum(batch.dropped_tokens.values()))
    metrics["policy/grad_norm"] = norm
    metrics["policy/skipped"] = float(not finite)
    metrics["policy/learning_rate"] = float(optimizer.learning_rate)
    return metrics


def fill(
    policy: Policy,
    batch: Batch,
    needs: frozenset[str],
    *,
    algo: Algorithm | None = None,
    teacher: Teacher | None = None,
) -> Batch:
    """Compute what the loss compares with, where it is not there yet: "old", "reference" and "teacher".

    All come from the function that the loss uses, so that equal weights give equal numbers.
    """
    found = list(batch.micro_batches)
    if "teacher" in needs and any(map(_untaught, found)):
        assert teacher is not None
        found = taught(teacher, found, None if algo is None else comparison_of(algo), batch.groups)
    if "old" in needs and any(m.old_logprobs is None for m in found):
        with scoring(policy):
            found = [replace(m, **_old(policy, m, run)) for m, run in with_prefix_runs(policy, found)]
    if "reference" in needs and any(m.reference_logprobs is None for m in found):
        with scoring(policy, adapters=False):
            found = [
                replace(m, reference_logprobs=_fixed(policy, m, run).token_logprobs)
                for m, run in with_prefix_runs(policy, found)
            ]
    return replace(batch, micro_batches=tuple(found))


def _untaught(micro_batch: MicroBatch) -> bool:
    found = (micro_batch.teacher_logprobs, micro_batch.teacher_top_logprobs, micro_batch.teacher_hidden)
    return all(array is None for array in found)


def _old(policy: Policy, micro_batch: MicroBatch, run: PrefixRun | None) -> dict[str, mx.array | None]:
    """Log-probs at the present weights, of the tokens and of the top ids where there are any."""
    found = _fixed(policy, micro_batch, run, micro_batch.top_ids)
    return {"old_logprobs": found.token_logprobs, "old_top_logprobs": found.top_logprobs}


def _fixed(policy: Policy, micro_batch: MicroBatch, run: PrefixRun | None, top_ids: mx.array | None = None) -> Logprobs:
    found = logprobs(policy, micro_batch, top_ids=top_ids, gradient=False, prefix=run)
    mx.eval(found.token_logprobs, found.top_logprobs)  # the pass's activations end here
    return found


def gradient(
    policy: Policy, batch: Batch, algo: Algorithm, teacher: Teacher | None = None, *, recompute: bool = False
) -> tuple[Metrics, Any | None]:
    """Metrics and gradient of a batch, summed over its minibatches; no gradient where it has none.

    Args:
        recompute: keep the inputs of layers only and run each again in the backward pass: a third more time, and memory
            that hardly grows with depth. The gradient is the same.
    Returns:
        metrics as floats, and a tree like the policy's trainable parameters.
    """

    def loss(micro_batch: MicroBatch, prefix: PrefixRun | None) -> tuple[mx.array, Metrics]:
        new = forward(policy, micro_batch, algo, teacher, prefix)
        return algo.loss(new, micro_batch, batch.totals)

    metrics: Metrics = {}
    total: Any = None
    dropout = policy.lora is not None and policy.lora.dropout > 0
    with training(policy, recompute, dropout):
        for unit in units(batch.micro_batches, policy.shares_prefix):
            found, gradients = unit_gradient(policy, unit, loss)
            total = gradients if total is None else tree_map(mx.add, total, gradients)
            mx.eval(total, found)  # a pass's activations end here, not with the batch
            for more in found:
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


def averaged(found: Sequence[Metrics]) -> Metrics:
    """Metrics of several optimizer steps as those of one: means, but for names in `_max` and `_min`, and counts.

    `policy/updates` is the number of those that changed the weights, `policy/skipped` of those that were not finite.
    """
    names = list(dict.fromkeys(name for one in found for name in one))
    out: Metrics = {}
    for name in names:
        values = [float(one[name]) for one in found if name in one]
        most = max if name.endswith("_max") else min if name.endswith("_min") else None
        out[name] = most(values) if most else sum(values) / len(values)
    moved = [one for one in found if one["policy/grad_norm"] > 0 and not one["policy/skipped"]]
    out["policy/updates"] = float(len(moved))
    out["policy/skipped"] = sum(one["policy/skipped"] for one in found)
    return out


def grad_norm(gradients: Any) -> float:
    """The Euclidean norm over every leaf, NaN where one is not finite."""
    squares = [mx.square(leaf.astype(mx.float32)).sum() for _, leaf in leaves(gradients)]
    return float(cast(float, mx.sqrt(mx.stack(squares).sum()).item()))
