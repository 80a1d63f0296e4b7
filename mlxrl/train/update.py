"""One optimizer step on a batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_map

from mlxrl.algo.reduce import finish, masked
from mlxrl.checked import keywords
from mlxrl.errors import UserError
from mlxrl.policy.differentiate import leaves
from mlxrl.policy.logprobs import logprobs
from mlxrl.policy.modes import scoring
from mlxrl.policy.policy import Policy
from mlxrl.policy.prefix import PrefixRun, with_prefix_runs
from mlxrl.protocols import Algorithm
from mlxrl.train.gradient import gradient
from mlxrl.train.teacher import Teacher, TeacherLike, teacher_of, with_teacher
from mlxrl.types import Batch, Metrics, MicroBatch

ROUNDING = {mx.bfloat16: 0.25, mx.float16: 0.03, mx.float32: 0.02}
"""Nats a token by which log-probs of equal weights may differ: for float32 on devices that multiply with fewer bits."""
ON_CPU = 0.002
"""The same for float32 on the CPU, which multiplies with all of them."""
FEWEST = 8
"""Tokens over which a mean is taken at least: a single one may be off by more."""


@keywords
def update(
    policy: Policy,
    optimizer: optim.Optimizer,
    batch: Batch,
    algorithm: Algorithm,
    *,
    teacher: TeacherLike = None,
    max_grad_norm: float = 1.0,
    recompute: bool = False,
) -> Metrics:
    """One optimizer step on a batch. Gradients of its micro-batches add up to that of the whole.

    A loss or gradient that is not finite leaves weights and optimizer as they were, and is reported as skipped; so does
    a batch in which no sequence has a learning signal, reported as a gradient norm of 0.

    Args:
        optimizer: one of `train.optimizer`, or MLX's own.
        teacher: for an algorithm that learns from one: another policy of the same vocabulary, "base" for the policy
            without its adapters, or a `Teacher`. It is teacher-forced on the token ids that the policy sampled.
        recompute: see `gradient`.
    Returns:
        the algorithm's metrics and `grad_norm` (before clipping), `updates/skipped`, `learning_rate`, and
        `sequences/dropped_tokens` where sampled tokens lie beyond the longest sequence.
    """
    policy.require_trainable("update: policy")
    own = teacher_of(policy, algorithm, teacher)
    return optimizer_step(policy, optimizer, batch, algorithm, own, max_grad_norm, recompute)


def optimizer_step(
    policy: Policy,
    optimizer: optim.Optimizer,
    batch: Batch,
    algorithm: Algorithm,
    teacher: Teacher | None,
    max_grad_norm: float,
    recompute: bool,
) -> Metrics:
    """`update` with a teacher that `teacher_of` has found."""
    batch = complete(policy, batch, algorithm, algorithm.needs - {"old"}, teacher)
    metrics, gradients = gradient(policy, batch, algorithm, teacher, recompute=recompute)
    metrics = finish(metrics)
    norm = grad_norm(gradients) if gradients is not None else 0.0
    finite = math.isfinite(norm) and math.isfinite(metrics.get("loss", 0.0))
    if gradients is not None and finite:
        scale = min(1.0, max_grad_norm / (norm + 1e-6))
        optimizer.update(policy.model, tree_map(lambda leaf: leaf * scale, gradients))
        mx.eval(policy.model.trainable_parameters(), optimizer.state)  # ends the step's graph
    if batch.dropped_tokens:
        metrics["sequences/dropped_tokens"] = float(sum(batch.dropped_tokens.values()))
    metrics["grad_norm"] = norm
    metrics["updates/skipped"] = float(not finite)
    metrics["learning_rate"] = float(optimizer.learning_rate)
    return metrics


def complete(
    policy: Policy, batch: Batch, algorithm: Algorithm, needs: frozenset[str], teacher: Teacher | None = None
) -> Batch:
    """Compute what the loss compares with, where it is not there yet: "old", "reference" and "teacher".

    All come from the function that the loss uses, so that equal weights give equal numbers.
    """
    if "teacher" in needs:
        batch = with_teacher(policy, teacher, batch, algorithm)
    found = list(batch.micro_batches)
    if "old" in needs and any(one.old_logprobs is None for one in found):
        found = _with_old(policy, found, batch.dropout_seed)
    if "reference" in needs and any(one.reference_logprobs is None for one in found):
        with scoring(policy, adapters=False):
            found = [
                replace(one, reference_logprobs=_old(policy, replace(one, top_ids=None), run)["old_logprobs"])
                for one, run in with_prefix_runs(policy, found)
            ]
    return replace(batch, micro_batches=tuple(found))


def require_agreement(policy: Policy, batch: Batch, where: str) -> None:
    """UserError where a policy's fresh samples have other log-probs in a training pass than when they were drawn.

    Once a policy, on every micro-batch of its first step: a family whose passes are another function than its decoding
    would learn from samples that are not its own, and the metrics alone would tell. Old log-probs that are there
    already are compared, but for those under dropout, which decoding has not.
    """
    if policy.memo.get("passes agree") or not len(batch):
        return
    found, dropout = list(batch.micro_batches), policy.lora is not None and policy.lora.dropout > 0
    if dropout or any(one.old_logprobs is None for one in found):
        found = _with_old(policy, [replace(one, top_ids=None) for one in found])
    parameters = [array.dtype for _, array in leaves(policy.model.parameters())]
    widest = max((dtype for dtype in ROUNDING if dtype in parameters), key=ROUNDING.__getitem__)
    exact = widest == mx.float32 and mx.default_device() == mx.Device(mx.cpu)
    most = ON_CPU if exact else ROUNDING[widest]
    if over := [gap for one in found if (gap := _gap(one)) > most]:
        raise UserError(
            where,
            f"fresh samples of {type(policy.model).__module__} differ by {max(over):.3g} nats a token between decoding "
            f"and the training pass, wanted at most the {most} that "
            f"{str(widest).removeprefix('mlx.core.')} rounds; this family cannot be trained here",
        )
    policy.memo["passes agree"] = True


def _gap(one: MicroBatch) -> float:
    """Mean of |old - sampler| over the tokens that were sampled, nats."""
    assert one.old_logprobs is not None
    gap = masked(mx.abs(one.old_logprobs - one.sampler_logprobs), one.mask).sum()
    return float(cast(float, (gap / mx.maximum(one.mask.sum(), FEWEST)).item()))


def _with_old(policy: Policy, micro_batches: Sequence[MicroBatch], dropout: int | None = None) -> list[MicroBatch]:
    """Micro-batches with the log-probs at the present weights; dropout: as in `training`."""
    with scoring(policy, dropout=dropout):
        return [replace(one, **_old(policy, one, run)) for one, run in with_prefix_runs(policy, micro_batches)]


def _old(policy: Policy, micro_batch: MicroBatch, run: PrefixRun | None) -> dict[str, mx.array | None]:
    """Log-probs at the present weights, of the tokens and of the top ids where there are any."""
    found = logprobs(policy, micro_batch, top_ids=micro_batch.top_ids, gradient=False, prefix=run)
    mx.eval(found.token_logprobs, found.top_logprobs)  # the pass's activations end here
    return {"old_logprobs": found.token_logprobs, "old_top_logprobs": found.top_logprobs}


def grad_norm(gradients: Any) -> float:
    """The Euclidean norm over every leaf, NaN where one is not finite."""
    squares = [mx.square(leaf.astype(mx.float32)).sum() for _, leaf in leaves(gradients)]
    return float(cast(float, mx.sqrt(mx.stack(squares).sum()).item()))
