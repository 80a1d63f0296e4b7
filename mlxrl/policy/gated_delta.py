"""The gated delta rule of linear attention, by chunks and differentiable, instead of mlx-lm's loop over tokens.

Letters: B sequences, T tokens, Hk key heads, Hv value heads (a multiple of Hk), Dk and Dv their widths; inside a chunk
N chunks of C tokens, heads as [Hk, R] with R = Hv / Hk.
"""

from __future__ import annotations

import io
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import mlx.core as mx

from mlxrl.policy.differentiate import replaced

CHUNK = 64
SEGMENT = 256  # tokens recomputed together in the backward pass: only the states between segments are kept
SMALLEST = 1e-37  # of a decay, so that its logarithm is finite


def gated_delta(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
    **_: Any,
) -> tuple[mx.array, mx.array]:
    """What `mlx_lm.models.gated_delta.gated_delta_ops` computes, in time and memory linear in T.

    S_t = S_{t-1} diag(g_t) + d_t k_t^T,   d_t = beta_t (v_t - S_{t-1} diag(g_t) k_t),   y_t = S_t q_t

    Gated DeltaNet, arXiv 2412.06464; decays per key: Kimi Delta Attention, arXiv 2510.26692.

    Args:
        q, k: [B, T, Hk, Dk], q already scaled; v: [B, T, Hv, Dv]; beta: [B, T, Hv].
        g: decay in [0, 1], one a head [B, T, Hv] or one a key [B, T, Hv, Dk].
        state: [B, Hv, Dv, Dk] float32, zero where None.
        mask: [B, T]; a token that is masked leaves the state alone, and its y is 0.
    Returns:
        y [B, T, Hv, Dv] in the dtype of q, and the last state, float32.
    """
    if state is None:
        state = mx.zeros((q.shape[0], v.shape[2], v.shape[3], q.shape[3]), mx.float32)
    if mask is not None:
        g = mx.where(mask.reshape(*mask.shape, *[1] * (g.ndim - 2)), g, 1)
        beta = mx.where(mask[..., None], beta, 0)
    fused = mask is None and g.ndim == 3 and kernel_agrees(*q.shape[2:], *v.shape[2:])
    y, state = (by_kernel if fused else by_chunks)(q, k, v, g, beta, state.astype(mx.float32))
    return y if mask is None else mx.where(mask[..., None, None], y, 0), state


@contextmanager
def chunked() -> Generator[None]:
    """A block in which mlx-lm's models use `gated_delta`. Blocks may be nested, or end in any order."""
    from mlx_lm.models import gated_delta as module

    with replaced(module, "gated_delta_ops", gated_delta):
        yield


def by_chunks(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """Segment after segment, each of which is recomputed in the backward pass."""
    return _in_turn(mx.checkpoint(_segment), SEGMENT, (q, k, v, g, beta), state)


def _in_turn(rule: Any, size: int, arrays: Sequence[mx.array], state: mx.array) -> tuple[mx.array, mx.array]:
    """A rule on `size` tokens at a time: y of all tokens, and the last state."""
    outputs: list[mx.array] = []
    cuts = list(range(size, arrays[0].shape[1], size))
    # Slices would each get a gradient as long as the whole sequence; those of a split are concatenated.
    for parts in zip(*(mx.split(array, cuts, axis=1) for array in arrays), strict=True):
        y, state = rule(*parts, state)
        outputs.append(y)
    return mx.concatenate(outputs, axis=1), state


def _segment(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """The WY form: inside a chunk the rule is a triangular system, between chunks a recurrence of its state.

    With L_t the log decay accumulated from the start of the chunk, S the state before it and i <= t:

    (I + A) D = beta (V - (e^L K) S^T),   A[t, i] = beta_t (k_t e^(L_t - L_i)) . k_i  for i < t
    Y = (e^L Q) S^T + P D,                P[t, i] = (q_t e^(L_t - L_i)) . k_i
    S' = S diag(e^L_C) + D^T (e^(L_C - L) K)

    The system is solved for V and for e^L K once, before S is known (arXiv 2412.06464, section 3.3).
    """
    dtype, (rows, length, key_heads, _), (value_heads, width) = q.dtype, q.shape, v.shape[2:]
    size = min(CHUNK, 1 << (length - 1).bit_length())
    log = mx.log(mx.maximum(g.astype(mx.float32), SMALLEST)).reshape(rows, length, value_heads, -1)
    q, k, v, beta, log = (_chunks(x, size, key_heads) for x in (q, k, v, beta[..., None], log))
    since = mx.exp(mx.cumsum(log, axis=-2))
    keys, inside = _decayed(mx.stack([k, q]), k, log)
    solve = _inverse(mx.tril(keys, -1) * beta)
    weighted, read = solve @ (v * beta), solve @ (k * since * beta)
    query, write = q * since, (k * mx.exp(_following(log))).swapaxes(-1, -2)
    memory = state.reshape(rows, 1, key_heads, -1, *state.shape[2:]).swapaxes(-1, -2)
    outputs: list[mx.array] = []
    by_chunk = (mx.split(x, x.shape[1], axis=1) for x in (weighted, read, inside, query, write, since[..., -1:, :]))
    for u, w, p, r, kept, decay in zip(*by_chunk, strict=True):
        delta = u - w @ memory
        outputs.append(r @ memory + p @ delta)
        memory = decay.swapaxes(-1, -2) * memory + kept @ delta
    y = mx.concatenate(outputs, axis=1).transpose(0, 1, 4, 2, 3, 5).reshape(rows, -1, value_heads, width)
    return y[:, :length].astype(dtype), memory.swapaxes(-1, -2).reshape(state.shape)


def _chunks(x: mx.array, size: int, key_heads: int) -> mx.array:
    """[B, T, H, D] to [B, N, Hk, H / Hk, C, D], float32. Padding neither decays the state (log 0) nor writes to it."""
    rows, length, heads, width = x.shape
    x = mx.pad(x.astype(mx.float32), [(0, 0), (0, -length % size), (0, 0), (0, 0)])
    return x.reshape(rows, -1, size, key_heads, heads // key_heads, width).transpose(0, 1, 3, 4, 2, 5)


def _following(log: mx.array) -> mx.array:
    """What decays a token's write until the end: the sum over the tokens after it, [..., C, D]."""
    return mx.cumsum(log, axis=-2, reverse=True, inclusive=False)


def _decayed(x: mx.array, y: mx.array, log: mx.array) -> mx.array:
    """M[t, i] = sum_d x[t, d] y[i, d] exp(log[i+1, d] + ... + log[t, d]) for i <= t, else 0: [..., C, C].

    Sums run from i to t and are never differences of longer ones, so nothing above 0 is exponentiated and a
    strong decay costs no digits.
    """
    size, half = x.shape[-2], 1
    if log.shape[-1] == 1:
        between = mx.cumsum(log * mx.tri(size, k=-1), axis=-2)
        return mx.tril(mx.exp(between) * (x @ y.swapaxes(-1, -2)))
    blocks = ((x * y).sum(axis=-1, keepdims=True) + mx.zeros_like(log[..., :1]))[..., None]
    while half < size:
        late_x, early_y = _alternate(x, half)[1], _alternate(y, half)[0]
        early, late = _alternate(log, half)
        lower = (late_x * mx.exp(mx.cumsum(late, axis=-2))) @ (early_y * mx.exp(_following(early))).swapaxes(-1, -2)
        blocks = _joined(*_alternate(blocks), lower)
        half *= 2
    return blocks[..., 0, :, :]


def _inverse(a: mx.array) -> mx.array:
    """(I + a)^-1 of strictly lower triangular a, [..., C, C], by forward substitution.

    Row by row in blocks of 8, then twice the size at a time:  [[P, 0], [L, Q]]^-1 = [[P', 0], [-Q' L P', Q']].
    """
    size = a.shape[-1]
    half = min(size, 8)
    corner = mx.stack([a[..., i : i + half, i : i + half] for i in range(0, size, half)], axis=-3)
    identity = mx.eye(half)
    solved = mx.broadcast_to(identity[:1], (*corner.shape[:-2], 1, half))
    for row in range(1, half):
        solved = mx.concatenate([solved, identity[row] - corner[..., row : row + 1, :row] @ solved], axis=-2)
    while half < size:
        starts = range(0, size, 2 * half)
        lower = mx.stack([a[..., i + half : i + 2 * half, i : i + half] for i in starts], axis=-3)
        early, late = _alternate(solved)
        solved = _joined(early, late, -(late @ lower @ early))
        half *= 2
    return solved[..., 0, :, :]


def _alternate(x: mx.array, stretch: int | None = None) -> tuple[mx.array, mx.array]:
    """Every first and every second of [..., M, n, D]; of [..., C, D] cut into stretches of n tokens."""
    if stretch is not None:
        x = x.reshape(*x.shape[:-2], -1, stretch, x.shape[-1])
    return x[..., ::2, :, :], x[..., 1::2, :, :]


def _joined(early: mx.array, late: mx.array, lower: mx.array) -> mx.array:
    """[[early, 0], [lower, late]] of blocks [..., M, n, n]: [..., M, 2n, 2n]."""
    top = mx.concatenate([early, mx.zeros_like(early)], axis=-1)
    return mx.concatenate([top, mx.concatenate([lower, late], axis=-1)], axis=-2)


def by_kernel(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """MLX's own kernel, chunk after chunk, as its backward pass may keep a state for every token of its input."""
    arrays = [array.astype(mx.float32) for array in (q, k, v, g, beta)]
    y, state = _in_turn(mx.fast.gated_delta_update, CHUNK, arrays, state)
    return y.astype(q.dtype), state


@cache
def kernel_agrees(key_heads: int, key_width: int, value_heads: int, value_width: int) -> bool:
    """Whether MLX has a kernel with a backward pass of its own for these heads, and it agrees with the chunks.

    Its presence is read off the graph of a gradient, because without one MLX falls back to a loop over tokens.
    """
    if mx.default_device() != mx.gpu or not mx.metal.is_available() or not hasattr(mx.fast, "gated_delta_update"):
        return False
    shapes = [(key_heads, key_width)] * 2 + [(value_heads, value_width)] + [(value_heads,)] * 2
    keys = mx.random.split(mx.random.key(0), 6)
    q, k, v, g, beta = (mx.random.normal((1, 19, *s), key=key) for s, key in zip(shapes, keys, strict=False))
    state = mx.random.normal((1, value_heads, value_width, key_width), key=keys[5])
    q, k = (x / mx.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    probe = [q, k, v, mx.sigmoid(g + 2), mx.sigmoid(beta), state]
    wanted, got = (_gradients(rule, probe) for rule in (by_chunks, by_kernel))
    graph = io.StringIO()
    mx.export_to_dot(graph, *got)
    if "GatedDeltaUpdateVJP" not in graph.getvalue():
        return False
    try:
        return all(mx.allclose(a, b, rtol=1e-3, atol=1e-4).item() for a, b in zip(got, wanted, strict=True))
    except RuntimeError:
        return False


def _gradients(rule: Any, arguments: list[mx.array]) -> list[mx.array]:
    def loss(*arguments: mx.array) -> mx.array:
        y, state = rule(*arguments)
        return mx.square(y).sum() + mx.square(state).sum()

    return list(mx.grad(loss, argnums=list(range(6)))(*arguments))
