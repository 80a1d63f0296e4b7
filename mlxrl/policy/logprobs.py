"""Log-probs of chosen tokens under a policy, with gradient. The one place where predictions are shifted."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxrl.policy.activations import lean
from mlxrl.policy.gated_delta import chunked
from mlxrl.policy.head import score
from mlxrl.policy.prefix import hidden_states
from mlxrl.types import Logprobs, MicroBatch

if TYPE_CHECKING:
    from mlxrl.policy.load import Policy


def logprobs(
    policy: Policy,
    batch: MicroBatch,
    *,
    entropy: bool = False,
    candidates: mx.array | None = None,
    compare: Callable[[mx.array], mx.array] | None = None,
    observed: bool = False,
    gradient: bool = True,
) -> Logprobs:
    """Log-prob of every sampled token of a minibatch, at the temperature it was sampled at.

    chosen[b, t] = log softmax(logits / temperature)[tokens[b, t]]   where mask[b, t] = 1, else 0

    Logits are made of the hidden states that predict a sampled token, and of no others, and by chunks.

    Args:
        candidates: [B, T, K] ids to score instead of the tokens.
        compare: from the hidden states [N, D] that predict the N sampled tokens, row by row, to a divergence [N].
        observed: whether the tokens of the minibatch's `observed` are scored too, out of the same pass.
        gradient: whether a backward pass will follow; a wrong answer costs time and nothing else.
    Returns:
        Logprobs of [B, T] float32 arrays, nats; `chosen` is [B, T, K] where candidates are given, `entropy` is None
        unless it is asked for.
    """
    flat = _states(policy, batch)
    index, inverse = _positions(np.array(batch.mask) > 0)
    hidden = flat[index]
    sampled = mx.array(np.flatnonzero(np.array(batch.mask)))
    ids = (batch.tokens if candidates is None else candidates).reshape(batch.tokens.size, -1)[sampled]
    chosen, spread = score(policy.head, hidden, ids, temperature=batch.temperature, entropy=entropy, gradient=gradient)
    if candidates is None:
        chosen = chosen[:, 0]
    return Logprobs(
        scattered(chosen, inverse),
        None if spread is None else scattered(spread, inverse),
        divergence=None if compare is None else scattered(compare(hidden), inverse),
        observation_logprobs=_observed(policy, batch, flat, gradient) if observed else None,
    )


def _observed(policy: Policy, batch: MicroBatch, states: mx.array, gradient: bool) -> mx.array:
    """[B, T] log-probs of the tokens that an environment wrote, 0 elsewhere."""
    assert batch.observation_mask is not None
    written = np.array(batch.observation_mask) > 0
    index, inverse = _positions(written)
    if not written.any():
        return mx.zeros(inverse.shape)
    ids = batch.tokens.reshape(-1, 1)[mx.array(np.flatnonzero(written))]
    found, _ = score(policy.head, states[index], ids, temperature=batch.temperature, gradient=gradient)
    return scattered(found[:, 0], inverse)


def predicting(policy: Policy, batch: MicroBatch) -> tuple[mx.array, mx.array]:
    """Hidden states [N, D] that predict the N sampled tokens, row by row, and [B, T] the number of each among them."""
    index, inverse = _positions(np.array(batch.mask) > 0)
    return _states(policy, batch)[index], inverse


def _states(policy: Policy, batch: MicroBatch) -> mx.array:
    """[1 + B (T - 1), D] hidden states: the prefix's last, zeros without one, and those of the rows but their last."""
    last, rows = hidden_states(policy.model, policy.head, batch.prefix, batch.tokens)
    first = mx.zeros((1, rows.shape[-1]), rows.dtype) if last is None else last[None]
    return mx.concatenate([first, rows.reshape(-1, rows.shape[-1])])


def _positions(mask: np.ndarray) -> tuple[mx.array, mx.array]:
    """Where the N sampled tokens' predictions lie, and where they go.

    index [N]: row of [last of the prefix; rows flattened], that of the token before: the shift.
    inverse [B, T]: entry of the N, N itself where nothing was sampled.
    """
    row, column = np.nonzero(mask)
    index = np.where(column == 0, 0, 1 + row * (mask.shape[1] - 1) + column - 1)
    inverse = np.full(mask.shape, len(row))
    inverse[row, column] = np.arange(len(row))
    return mx.array(index), mx.array(inverse)


def scattered(values: mx.array, inverse: mx.array) -> mx.array:
    """Values [N, ...] of the sampled tokens in their places, [B, T, ...], 0 elsewhere."""
    return mx.concatenate([values, mx.zeros((1, *values.shape[1:]), values.dtype)])[inverse]


@contextmanager
def training(model: nn.Module, *, dropout: bool = False) -> Generator[None]:
    """Put a model in training mode for a pass, its dropout layers only where asked for; then back to evaluation.

    Kernels without a gradient, and router indices that must be constants, are chosen by this mode; linear
    attention goes by chunks, and gated activations keep what they need.
    """
    model.train()
    try:
        if not dropout:
            for module in model.modules():
                if isinstance(module, nn.Dropout):
                    module.eval()
        with chunked(), lean(model):
            yield
    finally:
        model.eval()
