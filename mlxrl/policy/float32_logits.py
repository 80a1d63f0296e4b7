"""Logits of a model on a few fixed texts, in float32 whatever the type of its weights, by which models are compared.

In half precision the rounding of activations is larger than what many an adapter changes.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

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

    with _cast_embeddings(model):
        rows = [model(mx.array([prompt]), cache=make_prompt_cache(model))[0].astype(mx.float32) for prompt in prompts]
        found = mx.concatenate(rows)
        found = found - found.mean(axis=-1, keepdims=True)
        mx.eval(found)  # so that it holds nothing of the model
    return found


def rms(values: mx.array) -> float:
    """The root mean square."""
    return cast(float, mx.sqrt(mx.mean(values * values)).item())


@contextmanager
def _cast_embeddings(model: nn.Module) -> Generator[None]:
    """A block in which the vectors of a model's embeddings are float32; as heads they are as before."""
    layers: list[Any] = [one for one in model.modules() if isinstance(one, nn.Embedding | nn.QuantizedEmbedding)]
    classes = [type(layer) for layer in layers]
    try:
        for layer, own in zip(layers, classes, strict=True):
            layer.__class__ = _casting(own)
        yield
    finally:
        for layer, own in zip(layers, classes, strict=True):
            layer.__class__ = own


def _casting(own: Any) -> Any:
    return type(own.__name__, (own,), {"__call__": lambda layer, ids: own.__call__(layer, ids).astype(mx.float32)})
