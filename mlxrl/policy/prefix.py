"""Shared prefixes: a prompt runs once at batch 1, in KV caches that keep their graph.

The sequences of a micro-batch run against those caches, broadcast to B, and their gradient reaches the prompt through
the broadcast. Attention keeps its fused backward only without an array mask, so sequences are padded on the right,
where causality hides the padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

from mlxrl.errors import UserError
from mlxrl.policy.differentiate import mapped

if TYPE_CHECKING:
    from mlxrl.policy.policy import Policy
    from mlxrl.types import MicroBatch


@dataclass(frozen=True, slots=True)
class PrefixRun:
    """A prefix that was run: last [D], the hidden state of its last token, and its caches, one a layer.

    It is valid for the weights, and the adapters on or off, that it was made with.
    """

    last: mx.array
    caches: list[Any]


def shares_prefix(model: nn.Module) -> bool:
    """Whether every cache of a model can carry a prefix."""
    try:
        _caches(model)
    except NotImplementedError:
        return False
    return True


def needs_caches(model: Any) -> bool:
    """Whether a pass without caches is another function: gemma3n's later layers find earlier ones' keys there alone.

    model: one that shares prefixes.
    Raises:
        UserError: a pass reads later tokens, as mlx-lm's phi3small does, whose mask is added as a number.
    """
    probe = mx.array([[0, 1, 2], [0, 1, 3]])
    plain, cached = (model(probe, cache=caches).astype(mx.float32) for caches in (None, _caches(model)))
    early = mx.where(mx.isinf(plain), 0.0, plain)[:, :2]
    if (mx.abs(early[0] - early[1]).max() > 0.01 * mx.abs(early).max()).item():
        raise UserError(type(model).__module__, "what mlx-lm computes for a token depends on later ones")
    return mx.any(mx.abs(plain - cached) > 0.1 * (1 + mx.abs(cached).max())).item() is True


def run_prefix(policy: Policy, prefix: mx.array) -> PrefixRun:
    """Run a prefix [P], P at least 1, at batch 1. The policy has to be one that shares prefixes."""
    policy.require_ids("batch: prompt", prefix)
    caches = _caches(policy.model)
    return PrefixRun(policy.head.trunk(prefix[None], caches)[0, -1], caches)


def hidden_states(policy: Policy, batch: MicroBatch, run: PrefixRun | None = None) -> tuple[mx.array | None, mx.array]:
    """Hidden states: the last of the prefix, [D] (None where P is 0), and the sequences' but the last, [B, T-1, D].

    Nothing is predicted from the last. run: of the micro-batch's prefix, where it has run already.
    """
    prefix, trunk = batch.prefix, policy.head.trunk
    policy.require_ids("batch", batch.tokens)
    rows, read = batch.tokens.shape[0], batch.tokens[:, :-1]
    if prefix.size == 0:
        return None, trunk(read, _caches(policy.model)) if policy.needs_caches else trunk(read)
    if not policy.shares_prefix:  # every sequence reads the prefix
        whole = trunk(mx.concatenate([mx.broadcast_to(prefix, (rows, prefix.size)), read], axis=1))
        return whole[0, prefix.size - 1], whole[:, prefix.size :]
    if run is None:
        run = run_prefix(policy, prefix)
    if read.shape[1] == 0:
        return run.last, mx.zeros((rows, 0, run.last.shape[-1]), run.last.dtype)
    return run.last, trunk(read, mapped(lambda array: mx.broadcast_to(array, (rows, *array.shape[1:])), run.caches))


def _caches(model: nn.Module) -> list[Any]:
    """New caches for a prefix, one a layer; NotImplementedError where one cannot carry it."""
    from mlx_lm.models.cache import make_prompt_cache

    return [_differentiable(cache) for cache in make_prompt_cache(model)]


def _differentiable(cache: Any) -> Any:
    """The cache of the same contents that never writes in place. A sliding window becomes a matter of the mask."""
    from mlx_lm.models.cache import ArraysCache, CacheList, ConcatenateKVCache, KVCache, RotatingKVCache

    if type(cache) in (KVCache, RotatingKVCache):
        return ConcatenateKVCache()
    if type(cache) is ArraysCache:
        return cache
    if type(cache) is CacheList:
        return CacheList(*(_differentiable(part) for part in cache.caches))
    raise NotImplementedError(f"a {type(cache).__name__} cannot carry a prefix")


def by_prefix(micro_batches: Sequence[MicroBatch], sharing: bool = True) -> Iterator[list[MicroBatch]]:
    """Neighbours that carry the same prefix together, others alone; all alone where the model cannot share."""

    def prefix_of(micro_batch: MicroBatch) -> object:
        return micro_batch.prefix_id if sharing and micro_batch.prefix_id is not None else object()  # equal to no other

    return (list(together) for _, together in groupby(micro_batches, prefix_of))


def with_prefix_runs(
    policy: Policy, micro_batches: Sequence[MicroBatch]
) -> Iterator[tuple[MicroBatch, PrefixRun | None]]:
    """Each micro-batch and the run of its prefix, for passes without gradient: neighbours that carry one share it."""
    for together in by_prefix(micro_batches, policy.shares_prefix):
        run = None
        if policy.shares_prefix and together[0].prefix.size:
            run = run_prefix(policy, together[0].prefix)
            mx.eval(run.last, [cache.state for cache in run.caches])  # its activations end here
        for micro_batch in together:
            yield micro_batch, run
