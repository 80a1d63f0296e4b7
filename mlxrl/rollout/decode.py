"""The batched decode loop: many rows of many prompts, each until its own stop token.

A distinct prompt is prefilled once, at batch 1, and its caches are tiled. Rows that have stopped are dropped in
lumps. The next step is enqueued before the last one is read back, so the device does not wait for Python.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from mlxrl.policy.head import Head
from mlxrl.rollout.sampling import sample
from mlxrl.types import Sampling, Stop

DEAD_FRACTION = 0.25


@dataclass(frozen=True, slots=True)
class Request:
    """A row to decode: the ids of its prompt, and its key, [2] uint32."""

    prompt: tuple[int, ...]
    key: mx.array


@dataclass(slots=True)
class Completion:
    """What a row was given: ids with the stop token, their float32 log-probs in nats, and why it ended."""

    ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    stop: Stop | None = None


@dataclass(slots=True)
class Batch:
    """The rows that decode together: who they are, their caches, and their last tokens and keys."""

    rows: list[Completion]
    caches: list[Any]
    tokens: mx.array
    logprobs: mx.array
    keys: mx.array

    def keep(self, places: list[int]) -> None:
        """Drop every row but those at `places`."""
        index = mx.array(places)
        self.rows = [self.rows[place] for place in places]
        for cache in self.caches:
            cache.filter(index)
        self.tokens, self.logprobs, self.keys = self.tokens[index], self.logprobs[index], self.keys[index]

    def live(self) -> list[int]:
        """Places of the rows that have not stopped."""
        return [place for place, row in enumerate(self.rows) if row.stop is None]


def decode(
    model: Any,
    head: Head,
    requests: Sequence[Request],
    sampling: Sampling,
    stops: frozenset[int],
    *,
    max_rows: int = 32,
    prefill_chunk: int = 2048,
) -> list[Completion]:
    """Decode every request until a stop token or `sampling.max_tokens`, at most `max_rows` at a time.

    Args:
        stops: token ids that end a row; the one that did is kept.
        prefill_chunk: prompt tokens in one forward.
    Returns:
        a Completion for every request, in their order.
    """
    completions = [Completion() for _ in requests]
    for start in range(0, len(requests), max_rows):
        wave = slice(start, start + max_rows)
        batch = _start(model, head, requests[wave], completions[wave], sampling, prefill_chunk)
        _finish(model, head, batch, sampling, stops)
    return completions


def _start(
    model: Any,
    head: Head,
    requests: Sequence[Request],
    rows: list[Completion],
    sampling: Sampling,
    chunk: int,
) -> Batch:
    """Prefill the distinct prompts, tile their caches to the rows, and draw every row's first token."""
    prompts = list(dict.fromkeys(request.prompt for request in requests))
    filled = [prefill(model, head, prompt, chunk) for prompt in prompts]
    owners = mx.array([prompts.index(request.prompt) for request in requests])
    caches = [merged(layer) for layer in zip(*(caches for caches, _ in filled), strict=True)]
    for cache in caches:
        cache.filter(owners)
    logits = mx.concatenate([logits for _, logits in filled])[owners]
    keys = mx.stack([request.key for request in requests])
    return Batch(rows, caches, *sample(logits, keys, sampling))


def prefill(model: Any, head: Head, prompt: Sequence[int], chunk: int) -> tuple[list[Any], mx.array]:
    """Caches filled with a prompt, and the logits [1, V] that follow it."""
    from mlx_lm.models.cache import make_prompt_cache

    caches = make_prompt_cache(model)
    hidden = None
    for start in range(0, len(prompt), chunk):
        hidden = head.trunk(mx.array([prompt[start : start + chunk]]), caches)
        mx.eval([cache.state for cache in caches])  # bounds the memory of a long prompt to a chunk's
    assert hidden is not None
    return caches, head.project(hidden[:, -1])


def merged(caches: Sequence[Any]) -> Any:
    """One batched cache of several single ones of the same layer."""
    kind = type(caches[0])
    if not hasattr(kind, "merge"):
        raise ValueError(f"rollout: a {kind.__name__} cannot be batched; this model is not supported")
    return kind.merge(list(caches))


def _finish(model: Any, head: Head, batch: Batch, sampling: Sampling, stops: frozenset[int]) -> None:
    """Decode until every row has stopped."""
    while batch.rows:
        tokens, logprobs = batch.tokens, batch.logprobs
        length = 1 + max(len(row.ids) for row in batch.rows)
        if length < sampling.max_tokens:
            _step(model, head, batch, sampling)
            mx.async_eval(batch.tokens, batch.logprobs, batch.keys)
        _record(batch.rows, tokens.tolist(), logprobs.tolist(), sampling.max_tokens, stops)
        live = batch.live()
        if not live:
            return
        if len(live) <= (1 - DEAD_FRACTION) * len(batch.rows):
            batch.keep(live)


def _step(model: Any, head: Head, batch: Batch, sampling: Sampling) -> None:
    logits = head.project(head.trunk(batch.tokens[:, None], batch.caches)[:, -1])
    batch.tokens, batch.logprobs, batch.keys = sample(logits, batch.keys, sampling)


def _record(
    rows: Sequence[Completion],
    tokens: Sequence[int],
    logprobs: Sequence[float],
    max_tokens: int,
    stops: frozenset[int],
) -> None:
    """Give every live row its token. A row whose logits are not finite ends as an error, its token is not kept."""
    for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
        if row.stop is not None:
            continue
        if not math.isfinite(logprob):
            row.stop = "error"
            continue
        row.ids.append(token)
        row.logprobs.append(logprob)
        if token in stops:
            row.stop = "eos"
        elif len(row.ids) >= max_tokens:
            row.stop = "length"
