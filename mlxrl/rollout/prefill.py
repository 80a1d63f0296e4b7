"""Prompts run through the model once, before their rows decode. Letters: n prompts, V vocabulary."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from mlxrl.policy.gated_delta import chunked
from mlxrl.policy.head import Head
from mlxrl.rollout.layers import Layer, layer_of

Prompt = tuple[int, ...]


class Run(Protocol):
    """A prompt that was run, as slots take it."""

    def layers(self) -> tuple[Layer, ...]:
        """What each layer keeps."""
        ...

    def arrays(self, layers: Iterable[Layer]) -> list[mx.array]:
        """Its arrays in a row, [1, ...] each."""
        ...


@dataclass(frozen=True, slots=True)
class Filled:
    """A prompt that was run: its row of caches [n, ...], one a layer, its tokens, and the logits [1, V] behind them."""

    caches: list[Any]
    number: int
    length: int
    logits: mx.array

    def layers(self) -> tuple[Layer, ...]:
        """What each layer keeps."""
        return tuple(layer_of(cache) for cache in self.caches)

    def arrays(self, layers: Iterable[Layer]) -> list[mx.array]:
        """Its arrays in a row, [1, ...] each."""
        pairs = zip(layers, self.caches, strict=True)
        return [array for layer, cache in pairs for array in layer.row(cache, self.number, self.length)]


def prefill(model: Any, head: Head, prompts: Sequence[Prompt], chunk: int) -> list[Filled]:
    """Run prompts, `chunk` tokens a forward; several together fit in one. Logits are made of last positions only.

    Shorter prompts are padded on the right, where causality hides the padding from attention, and their lengths
    from recurrences.
    """
    from mlx_lm.models.cache import make_prompt_cache

    caches = make_prompt_cache(model)
    lengths, width = [len(prompt) for prompt in prompts], max(map(len, prompts))
    assert len(prompts) == 1 or len(prompts) * width <= chunk
    if min(lengths) < width:
        _tell(caches, lengths)
    tokens = mx.array([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts])
    hidden = None
    with chunked():
        for start in range(0, width, chunk):
            hidden = head.trunk(tokens[:, start : start + chunk], caches)
            if start + chunk < width:
                mx.eval([cache.state for cache in caches])  # bounds the memory of a long prompt to a chunk's
    assert hidden is not None
    last = mx.array(lengths if len(prompts) > 1 else [hidden.shape[1]]) - 1
    logits = head.project(mx.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0])
    mx.async_eval(logits, [cache.state for cache in caches])  # and that of many prompts to one forward's
    return [Filled(caches, number, length, logits[number : number + 1]) for number, length in enumerate(lengths)]


def _tell(caches: Iterable[Any], lengths: Sequence[int]) -> None:
    """Tell recurrent layers how long their rows are."""
    from mlx_lm.models.cache import ArraysCache, CacheList

    for cache in caches:
        if isinstance(cache, CacheList):
            _tell(cache.caches, lengths)
        elif isinstance(cache, ArraysCache):
            cache.lengths = mx.array(list(lengths))


def batches(prompts: Iterable[Prompt], chunk: int, known: int = 0) -> Iterator[list[Prompt]]:
    """Prompts of like length together, as long as they fill no more than `chunk` tokens, padding included.

    known: tokens at their beginning that are not run with them.
    """
    batch: list[Prompt] = []
    for prompt in sorted(prompts, key=len):
        if batch and (len(batch) + 1) * (len(prompt) - known) > chunk:
            yield batch
            batch = []
        batch.append(prompt)
    if batch:
        yield batch


def context_of(model: Any) -> int | None:
    """Tokens of a sequence that the model was made for, prompt included; None where it does not say."""
    owner = model.language_model if "language_model" in model else model
    limit = getattr(getattr(owner, "args", None), "max_position_embeddings", None)
    return int(limit) if limit else None
