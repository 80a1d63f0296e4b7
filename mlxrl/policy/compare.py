"""What distillation asks of a teacher, and its divergence from a student over the whole vocabulary.

No more than a chunk's logits exist at any time, of the teacher or of the student. Letters: B rows, T tokens, N sampled
tokens, D width of a hidden state, V vocabulary, K candidates, n tokens of a chunk. Log-probs in nats, float32.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, TypeAlias

import mlx.core as mx
import numpy as np

from mlxrl.policy.head import compared
from mlxrl.policy.logprobs import predicting, scattered
from mlxrl.types import MicroBatch

if TYPE_CHECKING:
    from mlxrl.policy.load import Policy

Divergence: TypeAlias = Callable[[mx.array, mx.array], mx.array]


def likeliest(policy: Policy, batch: MicroBatch, k: int) -> tuple[mx.array, mx.array]:
    """Ids [B, T, K] and log-probs [B, T, K] of the K likeliest tokens at every sampled one, in no order."""
    hidden, inverse = predicting(policy, batch)

    def best(logits: mx.array, _: mx.array) -> tuple[mx.array, mx.array]:
        count = min(k, logits.shape[-1])
        ids = mx.argpartition(-logits, kth=count - 1, axis=-1)[:, :count]
        values = mx.take_along_axis(logits, ids, axis=-1) - mx.logsumexp(logits, axis=-1, keepdims=True)
        return ids.astype(mx.int32), values

    ids, values = compared(policy.head, hidden, hidden, best, batch.temperature)
    return scattered(ids, inverse), scattered(values, inverse)


def hidden_at(policy: Policy, batch: MicroBatch) -> mx.array:
    """[B, T, D] the hidden states that predict the sampled tokens, 0 elsewhere."""
    return scattered(*predicting(policy, batch))


def divergence_from(
    teacher: Policy, seated: Callable[[], AbstractContextManager[object]], student: Policy, batch: MicroBatch,
    divergence: Divergence,
) -> Callable[[mx.array], mx.array]:  # fmt: skip
    """From the student's hidden states [N, D] to the divergence [N] of a minibatch that has the teacher's.

    divergence(log softmax(student logits / temperature), log softmax(teacher logits / temperature)), [n, V] each; where
    the models pad their vocabularies to different sizes, over what both have.

    Args:
        seated: the span in which the teacher's modules are what they were when it was asked.
    """
    assert batch.teacher_hidden is not None
    sampled = mx.array(np.flatnonzero(np.array(batch.mask)))
    others = batch.teacher_hidden.reshape(batch.mask.size, -1)[sampled]

    def values(logits: mx.array, others: mx.array) -> tuple[mx.array]:
        with seated():
            theirs = teacher.head.project(others).astype(mx.float32) / batch.temperature
        width = min(logits.shape[-1], theirs.shape[-1])
        return (divergence(log_softmax(logits[:, :width]), log_softmax(theirs[:, :width])),)

    return lambda hidden: compared(student.head, hidden, others, values, batch.temperature)[0]


def log_softmax(logits: mx.array) -> mx.array:
    """[..., V] logits less their logsumexp."""
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)
