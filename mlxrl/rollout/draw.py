"""Drawing a token for every row, and the log-prob of what was drawn. Letters: B rows, V vocabulary, K top ids."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx

from mlxrl.settings import Sampling


def fold(keys: mx.array, numbers: mx.array) -> mx.array:
    """A key [N, 2] for every (key, number), from [..., 2] uint32 and [N]. It depends on nothing else."""
    lane = mx.stack([mx.zeros_like(numbers), numbers], axis=-1).astype(mx.uint32)
    return mx.vmap(mx.random.split)(keys + lane)[:, 0]


def key_of(seed: int, step: int) -> mx.array:
    """The key of a step of a run, [2] uint32."""
    return mx.random.split(mx.array([seed % 2**32, step % 2**32], mx.uint32))[0]


def sequence_keys(base: mx.array, tasks: int, group_size: int) -> mx.array:
    """[tasks * group_size, 2] keys, task by task: that of a task is made of the base's, that of a sequence of it."""
    if not tasks:
        return mx.zeros((0, 2), mx.uint32)
    of_tasks = fold(base[None], mx.arange(tasks))
    return fold(mx.repeat(of_tasks, group_size, axis=0), mx.tile(mx.arange(group_size), tasks))


class Drawn(NamedTuple):
    """What was drawn for B rows. Log-probs are of softmax(logits / temperature) before any filter, float32, nats.

    tokens: [B] int32; logprobs: [B]; filtered_mass: [B] float32, the probability that filters removed;
    top_ids, top_logprobs: [B, K], of the K most likely tokens; forced: [B] bool, whether the row had no choice. Each is
    None where it does not apply.
    """

    tokens: mx.array
    logprobs: mx.array
    filtered_mass: mx.array | None = None
    top_ids: mx.array | None = None
    top_logprobs: mx.array | None = None
    forced: mx.array | None = None


def draw(
    logits: mx.array,
    keys: mx.array,
    sampling: Sampling,
    *,
    scores: mx.array | None = None,
    forced: mx.array | None = None,
) -> tuple[Drawn, mx.array]:
    """Draw a token for every row with a key of its own; returns it with the keys [B, 2] of the next step.

    Args:
        logits: [B, V], any dtype; keys: [B, 2] uint32.
        scores: [B, V], the logits that penalties or bans have made of them, to draw from; None for the same.
        forced: [B] int32, the token that a row must take, below 0 where it may choose.
    """
    logits = _tempered(logits, sampling)
    masses, peak = _masses(logits)
    total = masses.sum(axis=-1).sum(axis=-1)
    filtered_mass, drawable = None, masses
    if scores is not None or sampling.filters:
        scores = _filtered(logits if scores is None else _tempered(scores, sampling), sampling)
        drawable = _masses(scores)[0]
        kept = mx.where(_blocks(scores) > -mx.inf, masses, 0)
        filtered_mass = mx.maximum(1 - kept.sum(axis=-1).sum(axis=-1) / total, 0)
    if sampling.temperature == 0:
        tokens = mx.argmax(logits if scores is None else scores, axis=-1)
    else:
        tokens, keys = _drawn(drawable, keys)
    tokens = tokens.astype(mx.int32)
    if forced is not None:
        tokens = mx.where(forced >= 0, forced, tokens)
    normaliser = peak + mx.log(total)[:, None]
    logprobs = (mx.take_along_axis(logits, tokens[:, None], axis=-1) - normaliser)[:, 0]
    ids = top_logprobs = None
    if sampling.num_top:
        ids = _top(logits, sampling.num_top)
        top_logprobs = mx.take_along_axis(logits, ids, axis=-1) - normaliser
    return Drawn(tokens, logprobs, filtered_mass, ids, top_logprobs), keys


def _tempered(logits: mx.array, sampling: Sampling) -> mx.array:
    logits = logits.astype(mx.float32)
    return logits if sampling.softmax_temperature == 1 else logits / sampling.softmax_temperature


def _masses(logits: mx.array) -> tuple[mx.array, mx.array]:
    """exp(logits - peak) in blocks, [B, V / K, K], and the peak [B, 1].

    As a power of two, because MLX's `exp` takes three times as long on x86.
    """
    peak = logits.max(axis=-1, keepdims=True)
    return _blocks(mx.power(2.0, (logits - peak) * math.log2(math.e)), fill=0.0), peak


def _blocks(values: mx.array, fill: float = -math.inf) -> mx.array:
    """[B, V] as [B, V / K, K]."""
    size = _block(values.shape[-1])
    if rest := -values.shape[-1] % size:
        values = mx.pad(values, [(0, 0), (0, rest)], constant_values=fill)
    return values.reshape(values.shape[0], -1, size)


@lru_cache
def _block(vocabulary: int) -> int:
    """The size of a block: the divisor of the vocabulary that is nearest its root, where there is one about it."""
    root = math.isqrt(vocabulary)
    near = sorted(range(max(root // 4, 1), 4 * root + 1), key=lambda size: abs(math.log(size / root)))
    return next((size for size in near if vocabulary % size == 0), root)


def _drawn(masses: mx.array, keys: mx.array) -> tuple[mx.array, mx.array]:
    """Draw a block, then a token of it, with a uniform number each: exact, and two numbers a row instead of V."""
    split = mx.vmap(mx.random.split)(keys)
    uniform = (split[:, 1] >> 8).astype(mx.float32) * 2.0**-24
    block = _pick(masses.sum(axis=-1), uniform[:, :1])
    token = _pick(mx.take_along_axis(masses, block[:, None, None], axis=1)[:, 0], uniform[:, 1:])
    return block * masses.shape[-1] + token, split[:, 0]


def _pick(masses: mx.array, uniform: mx.array) -> mx.array:
    """The first place whose running sum exceeds the share `uniform` [B, 1] of the whole; never one without mass."""
    running = mx.cumsum(masses, axis=-1)
    beyond = running > uniform * running[:, -1:]
    return mx.argmax(mx.where(masses > 0, 1 + beyond.astype(mx.int32), 0), axis=-1)


def _filtered(logits: mx.array, sampling: Sampling) -> mx.array:
    """Drop unlikely tokens: top-k, then top-p of what is left, then min-p. The most likely always stays; so do ties."""
    if 0 < sampling.top_k < logits.shape[-1]:
        least = mx.topk(logits, sampling.top_k, axis=-1).min(axis=-1, keepdims=True)
        logits = mx.where(logits < least, -mx.inf, logits)
    if sampling.top_p < 1:
        rising = mx.sort(logits, axis=-1)
        above = mx.cumsum(mx.softmax(rising, axis=-1), axis=-1, reverse=True, inclusive=False)
        dropped = (above >= sampling.top_p).sum(axis=-1, keepdims=True)
        logits = mx.where(logits < mx.take_along_axis(rising, dropped, axis=-1), -mx.inf, logits)
    if sampling.min_p > 0:
        least = logits.max(axis=-1, keepdims=True) + math.log(sampling.min_p)
        logits = mx.where(logits < least, -mx.inf, logits)
    return logits


def _top(logits: mx.array, count: int) -> mx.array:
    """Ids [B, K] of the most likely tokens, the most likely first."""
    count = min(count, logits.shape[-1])
    ids = mx.argpartition(-logits, kth=count - 1, axis=-1)[:, :count]
    order = mx.argsort(-mx.take_along_axis(logits, ids, axis=-1), axis=-1)
    return mx.take_along_axis(ids, order, axis=-1).astype(mx.int32)
