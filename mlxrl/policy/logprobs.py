"""Log-probs of tokens under a policy, with gradient. The one place where predictions are shifted.

Also what distillation needs: top-k log-probs, hidden states, and divergences over the whole vocabulary. No more than a
chunk's logits exist at any time. Letters: B sequences, T tokens, N sampled tokens, D width of a hidden state,
V vocabulary, K ids of a token, n tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, TypeAlias

import mlx.core as mx
import numpy as np

from mlxrl.policy.head import compare as compare_chunks
from mlxrl.policy.head import score
from mlxrl.policy.lora import base_of
from mlxrl.policy.prefix import PrefixRun, hidden_states
from mlxrl.types import Logprobs, MicroBatch, TopIds

if TYPE_CHECKING:
    from mlxrl.policy.policy import Policy

Divergence: TypeAlias = Callable[[mx.array, mx.array], mx.array]


def logprobs(
    policy: Policy,
    micro_batch: MicroBatch,
    *,
    entropy: bool = False,
    top_ids: TopIds | None = None,
    compare: Callable[[mx.array], mx.array] | None = None,
    observations: bool = False,
    gradient: bool = True,
    prefix: PrefixRun | None = None,
) -> Logprobs:
    """Log-prob of every sampled token of a micro-batch, at the temperature it was sampled at.

    token_logprobs[b, t] = log softmax(logits / temperature)[tokens[b, t]]   where mask[b, t] = 1, else 0

    Logits are computed by chunks, and only at the positions that predict a sampled token, in one pass of the model.

    Args:
        top_ids: [B, T, K] ids that are scored besides the tokens.
        compare: from the hidden states [N, D] that predict the N sampled tokens to a divergence [N].
        observations: whether the tokens of the micro-batch's `observation_mask` are scored too.
        gradient: whether a backward pass will follow; a wrong answer costs time and nothing else.
        prefix: the run of the micro-batch's prefix, where it has run already.
    Returns:
        float32 arrays [B, T], nats; top_logprobs is [B, T, K]. What was not requested is None.
    """
    states = _states(policy, micro_batch, prefix)
    hidden, sampled, inverse = _predicting(states, micro_batch.mask)
    ids = micro_batch.tokens[..., None]
    if top_ids is not None:
        ids = mx.concatenate([ids, top_ids], axis=-1)
    found, spread = score(
        policy.head, hidden, ids.reshape(micro_batch.tokens.size, -1)[sampled],
        temperature=micro_batch.temperature, entropy=entropy, gradient=gradient,
    )  # fmt: skip
    return Logprobs(
        scattered(found[:, 0], inverse),
        None if spread is None else scattered(spread, inverse),
        None if top_ids is None else scattered(found[:, 1:], inverse),
        None if compare is None else scattered(compare(hidden), inverse),
        _of_observations(policy, micro_batch, states, gradient) if observations else None,
    )


def _of_observations(policy: Policy, batch: MicroBatch, states: mx.array, gradient: bool) -> mx.array:
    """[B, T] log-probs of the tokens that an environment wrote, 0 elsewhere."""
    assert batch.observation_mask is not None
    hidden, written, inverse = _predicting(states, batch.observation_mask)
    if written.size == 0:
        return mx.zeros(inverse.shape)
    ids = batch.tokens.reshape(-1)[written]
    return scattered(score(policy.head, hidden, ids, temperature=batch.temperature, gradient=gradient)[0], inverse)


def top_k(
    policy: Policy, batch: MicroBatch, k: int, prefix: PrefixRun | None = None, vocabulary: int | None = None
) -> tuple[mx.array, mx.array]:
    """Ids [B, T, K] and log-probs [B, T, K] of the K most likely tokens at every sampled one, in no order.

    vocabulary: of another model; only ids that it has are taken, and what the others have is missing from the sum.
    """
    hidden, _, inverse = _predicting(_states(policy, batch, prefix), batch.mask)

    def best(logits: mx.array, _: mx.array) -> tuple[mx.array, mx.array]:
        both = logits[:, :vocabulary]
        count = min(k, both.shape[-1])
        ids = mx.argpartition(-both, kth=count - 1, axis=-1)[:, :count]
        values = mx.take_along_axis(logits, ids, axis=-1) - mx.logsumexp(logits, axis=-1, keepdims=True)
        return ids.astype(mx.int32), values

    ids, values = compare_chunks(policy.head, hidden, hidden, best, batch.temperature)
    return scattered(ids, inverse), scattered(values, inverse)


def hidden_at(policy: Policy, batch: MicroBatch, prefix: PrefixRun | None = None) -> Annotated[mx.array, "B T D"]:
    """[B, T, D] the hidden states that predict the sampled tokens, 0 elsewhere."""
    hidden, _, inverse = _predicting(_states(policy, batch, prefix), batch.mask)
    return scattered(hidden, inverse)


def divergence_from(
    teacher: Policy, student: Policy, batch: MicroBatch, divergence: Divergence, *, adapters: bool = True
) -> Callable[[mx.array], mx.array]:
    """From the student's hidden states [N, D] to the divergence [N] of a micro-batch that has the teacher's.

    divergence(log softmax(student logits / temperature), log softmax(teacher logits / temperature)), [n, V] each; where
    the models pad their vocabularies to different sizes, over what both have.

    Args:
        adapters: whether the teacher's head has its adapter, where it has one.
    """
    assert batch.teacher_hidden is not None
    sampled = mx.array(np.flatnonzero(np.array(batch.mask)))
    others = batch.teacher_hidden.reshape(batch.mask.size, -1)[sampled]

    def values(logits: mx.array, others: mx.array) -> tuple[mx.array]:
        base = None if adapters else base_of(teacher.head.module())
        theirs = teacher.head.project(others, base).astype(mx.float32) / batch.temperature
        width = min(logits.shape[-1], theirs.shape[-1])
        return (divergence(log_softmax(logits[:, :width]), log_softmax(theirs[:, :width])),)

    return lambda hidden: compare_chunks(student.head, hidden, others, values, batch.temperature)[0]


def log_softmax(logits: mx.array) -> mx.array:
    """[..., V] logits less their logsumexp."""
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def _states(policy: Policy, batch: MicroBatch, prefix: PrefixRun | None) -> mx.array:
    """[1 + B (T-1), D] hidden states: the prefix's last, zeros without one, and the sequences' but their last."""
    last, rows = hidden_states(policy, batch, prefix)
    first = mx.zeros((1, rows.shape[-1]), rows.dtype) if last is None else last[None]
    return mx.concatenate([first, rows.reshape(-1, rows.shape[-1])])


def _predicting(states: mx.array, mask: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """The hidden states [N, D] that predict the N tokens of a mask [B, T]: those of the tokens before.

    Also [N] these tokens' positions in the flattened mask, and [B, T] the inverse: the entry of the N, N elsewhere.
    """
    row, column = np.nonzero(np.array(mask))
    index = np.where(column == 0, 0, 1 + row * (mask.shape[1] - 1) + column - 1)
    inverse = np.full(mask.shape, len(row))
    inverse[row, column] = np.arange(len(row))
    return states[mx.array(index)], mx.array(row * mask.shape[1] + column), mx.array(inverse)


def scattered(values: mx.array, inverse: mx.array) -> mx.array:
    """Values [N, ...] of the N tokens at their positions, [B, T, ...], 0 elsewhere."""
    return mx.concatenate([values, mx.zeros((1, *values.shape[1:]), values.dtype)])[inverse]
