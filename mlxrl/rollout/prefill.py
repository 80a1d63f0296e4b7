"""Prompts run through the model once, before their sequences decode. Letters: n prompts, V vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain, takewhile
from typing import Any, TypeVar

import mlx.core as mx

from mlxrl.policy.gated_delta import chunked
from mlxrl.policy.policy import Policy
from mlxrl.rollout.kv_cache import PrefilledPrompt, SlotCache, flat
from mlxrl.rollout.sequence import Prompt

PREFILL_CHUNK = 2048  # prompt tokens in one forward pass
WORTH = 256  # tokens that a shared prefix must save to be worth a forward pass more
Item = TypeVar("Item")


def prefill(policy: Policy, prompts: Sequence[Prompt], chunk: int) -> list[PrefilledPrompt]:
    """Run prompts, `chunk` tokens a forward; several together fit in one. Logits are made of last positions only.

    Shorter prompts are padded on the right, where causality hides the padding from attention, and their lengths
    from recurrences.
    """
    from mlx_lm.models.cache import ArraysCache, make_prompt_cache

    caches = make_prompt_cache(policy.model)
    lengths, width = [len(prompt) for prompt in prompts], max(map(len, prompts))
    assert len(prompts) == 1 or len(prompts) * width <= chunk
    for cache in flat(caches):
        if min(lengths) < width and isinstance(cache, ArraysCache):
            cache.lengths = mx.array(lengths)
    tokens = _padded(prompts, width)
    hidden = None
    with chunked():
        for start in range(0, width, chunk):
            hidden = policy.head.trunk(tokens[:, start : start + chunk], caches)
            if start + chunk < width:
                mx.eval([cache.state for cache in caches])  # bounds the memory of a long prompt to a chunk's
    assert hidden is not None
    last = mx.array(lengths if len(prompts) > 1 else [hidden.shape[1]]) - 1
    logits = policy.head.project(mx.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0])
    mx.async_eval(logits, [cache.state for cache in caches])  # and that of many prompts to one forward's
    return [PrefilledPrompt(caches, row, length, logits[row : row + 1]) for row, length in enumerate(lengths)]


class PrefixCache:
    """Prompts that were run: each once for all its sequences, and what all begin with once for all prompts.

    prefix: what the prompts begin with, as a system prompt or worked examples; empty where it is not worth a forward.
    chunk: tokens of a forward pass; ragged: whether its rows may be fed different numbers of tokens.
    """

    def __init__(self, policy: Policy, chunk: int, *, ragged: bool) -> None:
        self.policy, self.chunk, self.ragged = policy, chunk, ragged
        self.prefix: Prompt = ()
        self.clear()

    def clear(self) -> None:
        """Release the prompts that were run."""
        self._prefix: PrefilledPrompt | None = None
        self._kept: dict[Prompt, PrefilledPrompt] = {}

    def prefilled(
        self, prompts: Iterable[Prompt], waited_for: Collection[Prompt]
    ) -> Iterator[tuple[Prompt, PrefilledPrompt]]:
        """Distinct prompts, those not run before are run now; those that other sequences wait for are kept."""
        known = {prompt: self._kept.pop(prompt) for prompt in prompts if prompt in self._kept}
        made = self._run([prompt for prompt in prompts if prompt not in known])
        for prompt, one in chain(known.items(), made):
            if prompt in waited_for:
                self._kept[prompt] = one
            yield prompt, one

    def extended(
        self, caches: SlotCache, slots: Sequence[int], lengths: Sequence[int], prompts: Sequence[Prompt]
    ) -> mx.array:
        """Run what is new of n prompts of which slots hold `lengths` tokens, `chunk` tokens a forward with padding.

        Returns the logits [n, V] after each prompt.
        """
        cached, logits = list(lengths), dict[int, mx.array]()
        while left := [i for i, prompt in enumerate(prompts) if cached[i] < len(prompt)]:
            counts = {i: min(len(prompts[i]) - cached[i], self.chunk) for i in left}
            left = next(_batches(left, counts.__getitem__, self.chunk))
            if not self.ragged:
                left = [i for i in left if counts[i] == counts[left[0]]]
            fed = [prompts[i][cached[i] : cached[i] + counts[i]] for i in left]
            ends = self._fed(caches, [slots[i] for i in left], [cached[i] for i in left], fed)
            for i, end in zip(left, ends, strict=True):
                cached[i] += counts[i]
                logits[i] = end
        return mx.stack([logits[i] for i in range(len(prompts))])

    def _fed(self, caches: SlotCache, slots: list[int], lengths: list[int], fed: Sequence[Prompt]) -> mx.array:
        """Logits [n, V] after tokens that n slots are fed in one forward.

        Shorter ones are padded on the right: attention to what lies after them is masked, and no state sees it.
        """
        part, counts = caches.read(slots), mx.array([len(tokens) for tokens in fed], mx.int32)
        width = max(map(len, fed))
        given = part.caches(mx.array(lengths, mx.int32), counts if min(map(len, fed)) < width else None)
        with chunked():
            hidden = self.policy.head.trunk(_padded(fed, width), given)
        part.update(given)
        caches.write(slots, part.arrays)
        last = mx.take_along_axis(hidden, (counts - 1)[:, None, None], axis=1)
        return self.policy.head.project(last[:, 0])

    def _run(self, prompts: Iterable[Prompt]) -> Iterator[tuple[Prompt, PrefilledPrompt]]:
        """Run prompts, together where the model can, each from the shared prefix on where it has that."""
        known = len(self.prefix)
        sharing, others = list[Prompt](), list[Prompt]()
        for prompt in prompts:
            (sharing if known and len(prompt) > known and prompt[:known] == self.prefix else others).append(prompt)
        for batch in _batches(others, len, self.chunk) if self.ragged else ([prompt] for prompt in others):
            yield from zip(batch, prefill(self.policy, batch, self.chunk), strict=True)
        for batch in _batches(sharing, lambda prompt: len(prompt) - known, self.chunk):
            yield from zip(batch, self._continued(batch), strict=True)

    def _continued(self, prompts: Sequence[Prompt]) -> list[PrefilledPrompt]:
        """Run prompts from the shared prefix on, all of them together."""
        if self._prefix is None:
            (self._prefix,) = prefill(self.policy, [self.prefix], self.chunk)
        caches, slots, lengths = SlotCache(len(prompts)), range(len(prompts)), [len(prompt) for prompt in prompts]
        caches.fit(max(lengths) + 1)
        caches.place(slots, self._prefix)
        logits = self.extended(caches, slots, [len(self.prefix)] * len(prompts), prompts)
        given = caches.caches(mx.array(lengths))
        return [PrefilledPrompt(given, row, length, logits[row : row + 1]) for row, length in enumerate(lengths)]


def shared_prefix(prompts: Iterable[Prompt]) -> Prompt:
    """The tokens that different prompts all begin with, one of each left out; none where they save too little."""
    distinct = set(prompts)
    shortest = min(distinct, key=len, default=())
    alike = takewhile(lambda column: len(set(column)) == 1, zip(*distinct, strict=False))
    prefix = shortest[: min(sum(1 for _ in alike), len(shortest) - 1)]
    return prefix if len(prefix) * (len(distinct) - 1) >= WORTH else ()


def _batches(items: Iterable[Item], size: Callable[[Item], int], chunk: int) -> Iterator[list[Item]]:
    """Items of like size together, as many as fill `chunk` tokens, padding included."""
    batch: list[Item] = []
    for item in sorted(items, key=size):
        if batch and (len(batch) + 1) * size(item) > chunk:
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch


def _padded(prompts: Sequence[Prompt], width: int) -> mx.array:
    """Ids [n, width], padded with zeros on the right."""
    return mx.array([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts])


def context_of(model: Any) -> int | None:
    """Tokens of a sequence that the model was made for, prompt included; None where it does not say."""
    owner = model.language_model if "language_model" in model else model
    arguments = getattr(owner, "args", None)
    limits = [getattr(arguments, name, None) for name in ("max_position_embeddings", "n_positions")]
    return next((int(limit) for limit in limits if limit), None)
