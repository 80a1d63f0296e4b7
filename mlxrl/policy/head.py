"""A model in two parts: the trunk computes hidden states, the head their logits, by chunks.

Letters: N positions, D width of a hidden state, V vocabulary, K ids of a position, n positions of a chunk.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import mlx.core as mx
import mlx.nn as nn

from mlxrl.errors import UserError, exception_line
from mlxrl.policy.differentiate import after, bound, own_gradient, precomputed, trainable, vjp

Values: TypeAlias = Callable[[mx.array, mx.array], tuple[mx.array, ...]]
Logits: TypeAlias = Callable[..., mx.array]

CHUNK = 2**25  # logits of a chunk: 128 MiB of float32


@dataclass(frozen=True, slots=True)
class Head:
    """trunk(tokens [B, T], cache) -> hidden [B, T, D]; project(hidden [..., D]) -> logits [..., V].

    module() is the layer whose parameters `project` uses, empty where it uses none; project(hidden, layer) uses another
    in its place. All three look their modules up when they are called, so swapped adapters are seen. vocabulary: V, 0
    where it is not known: token ids from there on are in no array of the model's.
    """

    trunk: Callable[..., mx.array]
    project: Callable[..., mx.array]
    module: Callable[[], nn.Module] = nn.Module
    vocabulary: int = 0


def split(model: nn.Module) -> Head:
    """Split an mlx-lm model; where the parts do not give its logits on a probe, the trunk keeps the head: a warning."""
    owner = model.language_model if "language_model" in model else model
    probe = mx.array([[0, 1, 2]])
    try:
        wanted = model(probe).astype(mx.float32)
        mx.eval(wanted)  # what MLX refuses it refuses here
    except Exception as error:  # a model's own code, with a config that its authors have not seen
        raise UserError(type(model).__module__, f"a forward pass fails: {exception_line(error)}") from error
    head = Head(
        lambda tokens, cache=None: _body(owner)(tokens, cache=cache),  # second comes a mask in some
        lambda hidden, layer=None: _project(owner, hidden, layer),
        module=lambda: _module(owner),
        vocabulary=wanted.shape[-1],
    )
    with suppress(AttributeError, TypeError, KeyError, ValueError):
        got = head.project(head.trunk(probe)).astype(mx.float32)
        finite = mx.isfinite(wanted)
        most = mx.abs(mx.where(finite, wanted, 0)).max()
        if got.shape == wanted.shape and mx.all((mx.abs(got - wanted) <= 1e-3 * (1 + most)) | ~finite).item():
            return head
    warnings.warn(
        f"{type(model).__module__}: the output head is not understood; every pass makes the logits of all positions",
        stacklevel=2,
    )
    return Head(
        lambda tokens, cache=None: model(tokens, cache=cache), lambda logits, _=None: logits,
        vocabulary=wanted.shape[-1],
    )  # fmt: skip


def _body(owner: Any) -> Any:
    return owner.backbone if "backbone" in owner else owner.model


def _module(owner: Any) -> nn.Module:
    if "lm_head" in owner:
        return owner.lm_head
    body = _body(owner)
    return body.embeddings if "embeddings" in body else body.embed_tokens


def _project(owner: Any, hidden: mx.array, layer: Any = None) -> mx.array:
    """Logits, with the scales and caps of mlx-lm's models, by their names there."""
    layer, tied = _module(owner) if layer is None else layer, "lm_head" not in owner
    logits = layer.as_linear(hidden) if tied else layer(hidden)
    arguments = getattr(owner, "args", None) or _body(owner).args
    if (scale := getattr(arguments, "logit_scale", None)) is not None:
        logits = logits * scale
    if (divisor := getattr(arguments, "logits_scaling", None)) is not None:
        logits = logits / divisor
    if tied and (factor := getattr(arguments, "lm_head_multiplier", None)) is not None:
        logits = logits * (factor / arguments.embedding_multiplier)
    if (cap := getattr(arguments, "final_logit_softcapping", None)) is not None:
        logits = mx.tanh(logits / cap) * cap
    return logits


def score(
    head: Head,
    hidden: mx.array,
    ids: mx.array,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    gradient: bool = True,
) -> tuple[mx.array, mx.array | None]:
    """Log-probs of ids, and entropy; no more than a chunk's logits exist at any time.

    logprobs[i, k] = z[i, ids[i, k]] - logsumexp_v z[i],   z = project(hidden) / temperature, in float32
    entropy[i] = logsumexp_v z[i] - sum_v softmax(z[i])_v z[i, v]

    The backward pass recomputes the logits of a chunk, except for one id a position under a head that is not trained:
    d logprob / d hidden = project^T (e_id - softmax z) is then computed with the logits, once.

    Args:
        hidden: [N, D]; ids: [N] or [N, K], constants. Of K ids, one that the head does not have has log-prob -inf.
        gradient: whether a backward pass will follow. A wrong answer costs time and nothing else.
    Returns:
        log-probs, shaped like `ids`, and entropy [N], None unless requested; float32, nats.
    """
    logits, trained, size = _logits(head, hidden, temperature)
    columns = mx.stop_gradient(ids.reshape(ids.shape[0], -1))
    if trained or entropy or columns.shape[1] > 1:
        values = partial(_logprobs_and_entropy, entropy=entropy)
        logprobs, spread = _recomputed(logits, size, values)(hidden, columns, *trained)
        return logprobs.reshape(ids.shape), spread[:, 0] if entropy else None
    if gradient:
        return _with_gradient(logits, size)(hidden, columns).reshape(ids.shape), None
    (logprobs,) = _by_chunks(lambda part, ids: _logprobs_and_softmax(logits(part), ids)[:1], size, hidden, columns)
    return logprobs.reshape(ids.shape), None


def compare(
    head: Head, hidden: mx.array, others: mx.array, values: Values, temperature: float = 1.0
) -> tuple[mx.array, ...]:
    """values(logits [n, V], others [n, ...]) of every chunk, arrays [n, ...] each, as arrays [N, ...].

    The gradient flows through the logits, which the backward pass recomputes. hidden: [N, D]; others: [N, ...].
    Chunks are an eighth of the usual: a comparison makes several arrays of the size of the logits.
    """
    logits, trained, size = _logits(head, hidden, temperature)
    return tuple(_recomputed(logits, max(1, size // 8), values)(hidden, mx.stop_gradient(others), *trained))


def _logits(head: Head, hidden: mx.array, temperature: float) -> tuple[Logits, list[mx.array], int]:
    """(hidden, trained leaves of the head) -> logits in float32, those leaves, and the positions of a chunk."""
    module = head.module()
    names, trained = trainable(module)

    def logits(hidden: mx.array, *own: mx.array) -> mx.array:
        with bound(module, names, own):
            return head.project(hidden).astype(mx.float32) / temperature

    return logits, trained, max(1, CHUNK // head.project(hidden[:1]).shape[-1])


def _logprobs_and_entropy(z: mx.array, ids: mx.array, entropy: bool) -> tuple[mx.array, mx.array]:
    """Log-probs [n, K] and entropy [n, 1] (0 unless requested) of logits [n, V]."""
    normaliser = mx.logsumexp(z, axis=-1, keepdims=True)
    known = (ids >= 0) & (ids < z.shape[-1])
    logprobs = mx.take_along_axis(z, mx.where(known, ids, 0), axis=-1) - normaliser
    logprobs = mx.where(known, logprobs, -mx.inf)
    if not entropy:
        return logprobs, mx.zeros_like(normaliser)
    return logprobs, normaliser - (mx.softmax(z, axis=-1) * z).sum(axis=-1, keepdims=True)


def _logprobs_and_softmax(z: mx.array, ids: mx.array) -> tuple[mx.array, mx.array]:
    """Log-probs [n, 1] and softmax z [n, V], each exponential computed once.

    logsumexp z = max z - log max softmax z, and the largest probability, at least 1/V, has a logarithm.
    """
    p = mx.softmax(z, axis=-1)
    normaliser = z.max(axis=-1, keepdims=True) - mx.log(p.max(axis=-1, keepdims=True))
    return mx.take_along_axis(z, ids, axis=-1) - normaliser, p


def _with_gradient(logits: Logits, size: int) -> Callable[..., mx.array]:
    """(hidden [N, D], ids [N, 1]) -> log-probs [N, 1], and d logprobs / d hidden [N, D] computed with them."""

    def chunk(hidden: mx.array, ids: mx.array) -> tuple[mx.array, ...]:
        z = logits(hidden)
        logprobs, p = _logprobs_and_softmax(z, ids)
        if z.size >= CHUNK // 64:  # the logits are freed by then, and the next line writes over p
            p = after([logprobs], p)
        missed = p.at[mx.arange(len(z)), ids[:, 0]].add(-1)
        (gradient,) = vjp(lambda hidden: [logits(hidden)], [hidden], [missed])
        (logprobs,) = mx.depends([logprobs], [gradient])  # together, or the logits would wait for the backward pass
        return logprobs, -gradient

    return precomputed(partial(_by_chunks, chunk, size))


def _recomputed(logits: Logits, size: int, values: Values) -> Callable[..., list[mx.array]]:
    """(hidden [N, D], others [N, ...], leaves of the head) -> values(logits, others), each [N, ...]."""

    def forward(hidden: mx.array, others: mx.array, *leaves: mx.array) -> list[mx.array]:
        return _by_chunks(lambda part, other: values(logits(part, *leaves), other), size, hidden, others)

    def backward(primals: list[mx.array], cotangents: list[mx.array], _: Any) -> list[mx.array]:
        hidden, others, *leaves = primals
        gradients, totals = list[mx.array](), [mx.zeros_like(leaf) for leaf in leaves]
        for part, other, *given in _chunks(size, hidden, others, *cotangents):

            def chunk(part: mx.array, *leaves: mx.array, other: mx.array = other) -> tuple[mx.array, ...]:
                return values(logits(part, *leaves), other)

            part = after([gradients[-1], *totals], part) if gradients else part
            gradient, *more = vjp(chunk, [part, *leaves], given)
            gradients.append(gradient)
            totals = [total + extra for total, extra in zip(totals, more, strict=True)]
        return [mx.concatenate(gradients), mx.zeros_like(others), *totals]

    return own_gradient(forward, backward)


def _by_chunks(chunk: Callable[..., tuple[mx.array, ...]], size: int, *arrays: mx.array) -> list[mx.array]:
    """The results of chunks, concatenated; each chunk begins after the results of the one before."""
    results: list[tuple[mx.array, ...]] = []
    for first, *others in _chunks(size, *arrays):
        results.append(chunk(after(results[-1], first) if results else first, *others))
    return [mx.concatenate(list(column)) for column in zip(*results, strict=True)]


def _chunks(size: int, *arrays: mx.array) -> Iterator[tuple[mx.array, ...]]:
    """Arrays cut along their first axis, `size` rows at a time."""
    return zip(*(mx.split(array, list(range(size, len(array), size))) for array in arrays), strict=True)
