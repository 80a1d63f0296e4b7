"""A prompt run through the model once, before its rows decode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxrl.policy.gated_delta import chunked
from mlxrl.policy.head import Head


@dataclass(frozen=True, slots=True)
class Filled:
    """A prompt's caches, one a layer at batch 1, and the logits [1, V] that follow it."""

    caches: list[Any]
    logits: mx.array


def prefill(model: Any, head: Head, prompt: Sequence[int], chunk: int) -> Filled:
    """Run a prompt, `chunk` tokens a forward; logits are made of its last position only."""
    from mlx_lm.models.cache import make_prompt_cache

    caches = make_prompt_cache(model)
    hidden = None
    with chunked():
        for start in range(0, len(prompt), chunk):
            hidden = head.trunk(mx.array([prompt[start : start + chunk]]), caches)[:, -1]
            if start + chunk < len(prompt):
                mx.eval([cache.state for cache in caches])  # bounds the memory of a long prompt to a chunk's
    assert hidden is not None
    filled = Filled(caches, head.project(hidden))
    mx.async_eval(filled.logits, [cache.state for cache in caches])  # and that of many prompts to one's
    return filled


def context_of(model: Any) -> int | None:
    """Tokens of a sequence that the model was made for, prompt included; None where it does not say."""
    owner = model.language_model if "language_model" in model else model
    limit = getattr(getattr(owner, "args", None), "max_position_embeddings", None)
    return int(limit) if limit else None
