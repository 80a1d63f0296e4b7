"""A model in two parts: the trunk that makes hidden states, and the head that makes logits of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn


@dataclass(frozen=True, slots=True)
class Head:
    """trunk(tokens [B, T], cache) -> hidden [B, T, D]; project(hidden [..., D]) -> logits [..., V].

    Both look their modules up when they are called, so swapped adapters are seen.
    """

    trunk: Callable[..., mx.array]
    project: Callable[[mx.array], mx.array]
    understood: bool = True


def split(model: nn.Module) -> Head:
    """Split an mlx-lm model; one whose head is not understood keeps it in the trunk, and says so once.

    The split is believed only where it gives the model's own logits on a probe.
    """
    head = Head(lambda tokens, cache=None: _owner(model).model(tokens, cache), lambda hidden: _project(model, hidden))
    if _agrees(model, head):
        return head
    warnings.warn(
        f"{type(model).__module__}: the output head is not understood; every pass makes the logits of all positions",
        stacklevel=2,
    )
    return Head(lambda tokens, cache=None: model(tokens, cache=cache), lambda logits: logits, understood=False)


def _owner(model: Any) -> Any:
    return model.language_model if "language_model" in model else model


def _project(model: nn.Module, hidden: mx.array) -> mx.array:
    owner = _owner(model)
    logits = owner.lm_head(hidden) if "lm_head" in owner else owner.model.embed_tokens.as_linear(hidden)
    arguments = owner.args
    if (scale := getattr(arguments, "logit_scale", None)) is not None:
        logits = logits * scale
    if (divisor := getattr(arguments, "logits_scaling", None)) is not None:
        logits = logits / divisor
    if (cap := getattr(arguments, "final_logit_softcapping", None)) is not None:
        logits = mx.tanh(logits / cap) * cap
    return logits


def _agrees(model: nn.Module, head: Head) -> bool:
    probe = mx.array([[0, 1, 2]])
    try:
        mine = head.project(head.trunk(probe)).astype(mx.float32)
    except (AttributeError, TypeError, KeyError, ValueError):
        return False
    wanted = model(probe).astype(mx.float32)
    if mine.shape != wanted.shape:
        return False
    return mx.allclose(mine, wanted, rtol=1e-3, atol=1e-3).item() is True
