"""Log-probs of chosen tokens under a policy, with gradient. The one place where predictions are shifted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxrl.policy.prefix import hidden_states
from mlxrl.types import Logprobs, Minibatch

if TYPE_CHECKING:
    from mlxrl.policy.load import Policy


def logprobs(policy: Policy, batch: Minibatch, *, entropy: bool = False) -> Logprobs:
    """Log-prob of every sampled token of a minibatch, at the temperature it was sampled at.

    chosen[b, t] = log softmax(logits / temperature)[tokens[b, t]]   where mask[b, t] = 1, else 0

    Logits are made of the hidden states that predict a sampled token, and of no others.

    Returns:
        Logprobs of [B, T] float32 arrays, nats; `entropy` is None unless it is asked for.
    """
    last, rows = hidden_states(policy.model, policy.head, batch.prefix, batch.tokens)
    index, inverse = _positions(np.array(batch.mask) > 0)
    first = mx.zeros((1, rows.shape[-1]), rows.dtype) if last is None else last[None]
    hidden = mx.concatenate([first, rows.reshape(-1, rows.shape[-1])])[index]
    logits = policy.head.project(hidden).astype(mx.float32)
    if batch.temperature != 1.0:
        logits = logits / batch.temperature
    tokens = batch.tokens.reshape(-1)[mx.array(np.flatnonzero(np.array(batch.mask)))]
    normaliser = mx.logsumexp(logits, axis=-1)
    chosen = mx.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0] - normaliser
    spread = _entropy(logits, normaliser) if entropy else None
    return Logprobs(_scatter(chosen, inverse), None if spread is None else _scatter(spread, inverse))


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


def _scatter(values: mx.array, inverse: mx.array) -> mx.array:
    return mx.concatenate([values, mx.zeros((1,), values.dtype)])[inverse]


def _entropy(logits: mx.array, normaliser: mx.array) -> mx.array:
    """H = logsumexp(z) - sum_v p_v z_v, [N]."""
    return normaliser - (mx.softmax(logits, axis=-1) * logits).sum(axis=-1)


@contextmanager
def training(model: nn.Module, *, dropout: bool = False) -> Iterator[None]:
    """Put a model in training mode for a pass, its dropout layers only where asked for; then back to evaluation.

    Kernels without a gradient, and router indices that must be constants, are chosen by this mode.
    """
    model.train()
    try:
        if not dropout:
            for module in model.modules():
                if isinstance(module, nn.Dropout):
                    module.eval()
        yield
    finally:
        model.eval()
