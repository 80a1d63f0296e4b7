"""A model in two parts: the trunk that makes hidden states, and the head that makes logits of them, by chunks.

Letters: N positions, D width of a hidden state, V vocabulary, K candidates, n positions of a chunk.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from mlxrl.policy.adapters import leaves
from mlxrl.policy.recompute import bound, dropout_key

Values: TypeAlias = Callable[[mx.array, mx.array], tuple[mx.array, ...]]

CHUNK = 2**25  # logits made at a time: 128 MiB of float32
IN_FLIGHT = 100  # operations that MLX's CPU stream takes in, and allocates for, before the first of them has run

_engaged = 0


@dataclass(frozen=True, slots=True)
class Head:
    """trunk(tokens [B, T], cache) -> hidden [B, T, D]; project(hidden [..., D]) -> logits [..., V].

    module() is the layer whose parameters `project` uses, None where it uses none. All three look their modules up
    when they are called, so swapped adapters are seen.
    """

    trunk: Callable[..., mx.array]
    project: Callable[[mx.array], mx.array]
    understood: bool = True
    module: Callable[[], nn.Module | None] = lambda: None


def split(model: nn.Module) -> Head:
    """Split an mlx-lm model; one whose head is not understood keeps it in the trunk, and says so once.

    The split is believed only where it gives the model's own logits on a probe.
    """
    head = Head(
        lambda tokens, cache=None: _body(_owner(model))(tokens, cache),
        lambda hidden: _project(model, hidden),
        module=lambda: _module(_owner(model)),
    )
    if _agrees(model, head):
        return head
    warnings.warn(
        f"{type(model).__module__}: the output head is not understood; every pass makes the logits of all positions",
        stacklevel=2,
    )
    return Head(lambda tokens, cache=None: model(tokens, cache=cache), lambda logits: logits, understood=False)


def _owner(model: Any) -> Any:
    return model.language_model if "language_model" in model else model


def _body(owner: Any) -> Any:
    return owner.backbone if "backbone" in owner else owner.model


def _module(owner: Any) -> nn.Module:
    if "lm_head" in owner:
        return owner.lm_head
    body = _body(owner)
    return body.embeddings if "embeddings" in body else body.embed_tokens


def _project(model: nn.Module, hidden: mx.array) -> mx.array:
    owner = _owner(model)
    module: Any = _module(owner)
    tied = "lm_head" not in owner
    logits = module.as_linear(hidden) if tied else module(hidden)
    return _adjusted(logits, getattr(owner, "args", None) or _body(owner).args, tied)


def _adjusted(logits: mx.array, arguments: Any, tied: bool) -> mx.array:
    """Scales and caps by the names that mlx-lm's models give them."""
    if (scale := getattr(arguments, "logit_scale", None)) is not None:
        logits = logits * scale
    if (divisor := getattr(arguments, "logits_scaling", None)) is not None:
        logits = logits / divisor
    if tied and (factor := getattr(arguments, "lm_head_multiplier", None)) is not None:
        logits = logits * (factor / arguments.embedding_multiplier)
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
    return bool(mx.all(mx.abs(mine - wanted) <= 1e-3 * (1 + mx.abs(wanted).max())).item())


def score(
    head: Head,
    hidden: mx.array,
    ids: mx.array,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    gradient: bool = True,
) -> tuple[mx.array, mx.array | None]:
    """Log-probs of chosen ids, and entropy, of which no more than a chunk's logits exist at any time.

    chosen[i, k] = z[i, ids[i, k]] - logsumexp_v z[i],   z = project(hidden) / temperature, in float32
    entropy[i] = logsumexp_v z[i] - sum_v softmax(z[i])_v z[i, v]

    The backward pass makes the logits of a chunk again, except for one id a position under a head that is not
    trained: d chosen / d hidden = project^T (e_id - softmax z) is then made with the logits, once.

    Args:
        hidden: [N, D]; ids: [N] or [N, K], constants.
        gradient: whether a backward pass will follow. A wrong answer costs time and nothing else.
    Returns:
        chosen, shaped like `ids`, and entropy [N], None unless it is asked for; float32, nats.
    """
    global _engaged
    _engaged += 1
    logits, trained, rows = _logits(head, hidden, temperature)
    candidates = mx.stop_gradient(ids.reshape(ids.shape[0], -1))
    if not trained and not entropy and candidates.shape[1] == 1:
        chosen, spread = (_with_slopes if gradient else _alone)(logits, rows)(hidden, candidates)[0], None
    else:
        values = partial(_values, entropy=entropy)
        chosen, spread = _made_again(logits, rows, values)(hidden, candidates, *trained)
    return chosen.reshape(ids.shape), spread[:, 0] if entropy and spread is not None else None


def compared(
    head: Head, hidden: mx.array, others: mx.array, values: Values, temperature: float = 1.0
) -> tuple[mx.array, ...]:
    """What `values(logits [n, V], others [n, ...])` makes of every chunk, arrays of n rows each, as arrays of N.

    The gradient flows through the logits, which the backward pass makes again. hidden: [N, D]; others: [N, ...].
    Chunks are an eighth of the usual: a comparison makes several arrays of the size of the logits.
    """
    logits, trained, rows = _logits(head, hidden, temperature)
    return _made_again(logits, max(1, rows // 8), values)(hidden, mx.stop_gradient(others), *trained)


def _logits(head: Head, hidden: mx.array, temperature: float) -> tuple[Callable[..., mx.array], list[mx.array], int]:
    """(hidden, trained leaves of the head) -> logits in float32, those leaves, and the rows of a chunk."""
    module = head.module()
    trained = [] if module is None else leaves(module.trainable_parameters())
    key = None if module is None else dropout_key(module)

    def logits(hidden: mx.array, *own: mx.array) -> mx.array:
        parameters = tree_unflatten([(name, leaf) for (name, _), leaf in zip(trained, own, strict=True)])
        with bound(module, parameters, key):
            return head.project(hidden).astype(mx.float32) / temperature

    return logits, [leaf for _, leaf in trained], max(1, CHUNK // head.project(hidden[:1]).shape[-1])


def scored() -> int:
    """How often `score` has been called, or traced, since the start."""
    return _engaged


def _values(z: mx.array, ids: mx.array, entropy: bool) -> tuple[mx.array, mx.array]:
    """chosen [n, K] and entropy [n, 1] (0 unless asked for) of logits [n, V]."""
    normaliser = mx.logsumexp(z, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(z, ids, axis=-1) - normaliser
    if not entropy:
        return chosen, mx.zeros_like(normaliser)
    return chosen, normaliser - (mx.softmax(z, axis=-1) * z).sum(axis=-1, keepdims=True)


def _chosen(z: mx.array, ids: mx.array) -> tuple[mx.array, mx.array]:
    """chosen [n, 1] and softmax z [n, V], each exponential computed once.

    logsumexp z = max z - log max softmax z, and the likeliest token's probability, at least 1/V, has a logarithm.
    """
    p = mx.softmax(z, axis=-1)
    normaliser = z.max(axis=-1, keepdims=True) - mx.log(p.max(axis=-1, keepdims=True))
    return mx.take_along_axis(z, ids, axis=-1) - normaliser, p


def _alone(logits: Callable[..., mx.array], rows: int) -> Callable[..., tuple[mx.array, ...]]:
    """(hidden [N, D], ids [N, 1]) -> chosen [N, 1], without a gradient."""

    def chunk(hidden: mx.array, ids: mx.array) -> tuple[mx.array, ...]:
        return (_chosen(logits(hidden), ids)[0],)

    return lambda hidden, ids: _stacked(_one_by_one(chunk, rows, hidden, ids))


def _with_slopes(logits: Callable[..., mx.array], rows: int) -> Callable[..., tuple[mx.array, ...]]:
    """(hidden [N, D], ids [N, 1]) -> chosen [N, 1] and d chosen / d hidden [N, D]."""

    def chunk(hidden: mx.array, ids: mx.array) -> tuple[mx.array, ...]:
        z = logits(hidden)
        chosen, p = _chosen(z, ids)
        if z.size >= CHUNK // 64:  # the logits are gone by then, and the next line writes over p
            (p,) = mx.depends([p], [_reached((chosen,))])
        missed = p.at[mx.arange(len(z)), ids[:, 0]].add(-1)
        (slope,) = mx.vjp(logits, [hidden], [missed])[1]
        (chosen,) = mx.depends([chosen], [slope])  # together, or the logits would wait for the backward pass
        return chosen, -slope

    def forward(hidden: mx.array, ids: mx.array) -> tuple[mx.array, ...]:
        return _stacked(_one_by_one(chunk, rows, hidden, ids))

    def backward(primals: Any, cotangents: Any, outputs: Any) -> tuple[mx.array, mx.array]:
        return (cotangents[0] * outputs[1]).astype(primals[0].dtype), mx.zeros_like(primals[1])

    return _differentiated(forward, backward)


def _made_again(logits: Callable[..., mx.array], rows: int, values: Values) -> Callable[..., tuple[mx.array, ...]]:
    """(hidden [N, D], others [N, ...], leaves of the head) -> values(logits, others), each [N, ...]."""

    def forward(hidden: mx.array, others: mx.array, *leaves: mx.array) -> tuple[mx.array, ...]:
        return _stacked(_one_by_one(lambda h, o: values(logits(h, *leaves), o), rows, hidden, others))

    def backward(primals: Any, cotangents: Any, outputs: Any) -> tuple[mx.array, ...]:
        hidden, others, *leaves = primals
        totals = [mx.zeros_like(leaf) for leaf in leaves]

        def chunk(hidden: mx.array, others: mx.array, *cotangents: mx.array) -> tuple[mx.array, ...]:
            def again(hidden: mx.array, *leaves: mx.array) -> list[mx.array]:
                return list(values(logits(hidden, *leaves), others))

            slope, *more = mx.vjp(again, [hidden, *leaves], list(cotangents))[1]
            totals[:] = [total + extra for total, extra in zip(totals, more, strict=True)]
            return slope, *totals

        parts = _one_by_one(chunk, rows, hidden, others, *cotangents)
        return mx.concatenate([part[0] for part in parts]), mx.zeros_like(others), *totals

    return _differentiated(forward, backward)


def _differentiated(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """A function with a gradient of its own, backward(arguments, cotangents, outputs)."""
    function: Any = mx.custom_function(forward)
    function.vjp(backward)
    return function


def _stacked(parts: list[tuple[mx.array, ...]]) -> tuple[mx.array, ...]:
    return tuple(mx.concatenate(list(column)) for column in zip(*parts, strict=True))


def _one_by_one(chunk: Callable[..., tuple[mx.array, ...]], rows: int, *arrays: mx.array) -> list[tuple[mx.array, ...]]:
    """Results of chunks of `rows` rows, none of which is begun before the one before it is there.

    MLX would evaluate independent chunks side by side, and hold the logits of all.
    """
    results: list[tuple[mx.array, ...]] = []
    for first, *others in zip(*(mx.split(a, list(range(rows, len(a), rows))) for a in arrays), strict=True):
        if results:
            (first,) = mx.depends([first], [_reached(results[-1])])
        results.append(chunk(first, *others))
    return results


def _reached(arrays: tuple[mx.array, ...]) -> mx.array:
    """A scalar that exists after some arrays do; on the CPU also after so many operations that they have run."""
    (mark,) = mx.depends([mx.zeros(1)], list(arrays))
    for _ in range(IN_FLIGHT if mx.default_device() == mx.cpu else 0):
        mark = mark + 0
    return mark
