"""Logits of a model on a few fixed texts, in float32 whatever the type of its weights, by which models are compared.

In half precision the rounding of activations is larger than what many an adapter changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx

from mlxrl.policy.modes import float32_activations

TEXTS = ("The capital of France is", "def add(a, b):\n    return", "12 + 30 = ", "Once upon a time there was")
TOKENS = 32
"""Of each text."""


def prompts_of(tokenizer: Any) -> list[list[int]]:
    """The ids of the texts."""
    return [ids for text in TEXTS if (ids := list(tokenizer.encode(text))[:TOKENS])]


def logits_of(model: Any, prompts: Sequence[Sequence[int]]) -> mx.array:
    """The logits [N, V] at all N positions of some prompts, the mean at each position taken off.

    The embeddings are cast to float32, and the types of all that follows from them are promoted with it.
    """
    from mlx_lm.models.cache import make_prompt_cache

    with float32_activations(model):
        rows = [model(mx.array([prompt]), cache=make_prompt_cache(model))[0].astype(mx.float32) for prompt in prompts]
        found = mx.concatenate(rows)
        found = found - found.mean(axis=-1, keepdims=True)
        mx.eval(found)  # so that it holds nothing of the model
    return found


def rms(values: mx.array) -> float:
    """The root mean square."""
    return cast(float, mx.sqrt(mx.mean(values * values)).item())
