"""What a training pass has in memory, as its operations come one after the other: a tape of allocations.

Every operation is named by what it allocates, in the order in which the layer computes it; what the backward pass needs
is held until then, all else is let go. MLX runs ahead of the device: it has allocated for operations that have not run,
and an array that is let go is freed only when they have. So what is in flight is a part of the peak.

Letters: B rows, T tokens of a row, P tokens before them that are in caches, N = B T, D width, F width inside, H heads.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TypeAlias

from mlxrl.policy.gated_delta import CHUNK, SEGMENT
from mlxrl.policy.head import CHUNK as LOGITS
from mlxrl.policy.shapes import Attention, Dense, Experts, GatedDelta, Layer, Linear, Model

AHEAD = 100  # dispatches that MLX's CPU stream takes in before the first has run; an operation is two of them
METAL = 10 * 50 * 2**20  # bytes in flight on a GPU: ten command buffers of 50 MiB
FLOAT = 4
HEAD_ARRAYS, ENTROPY_ARRAYS = 2, 6  # as large as a chunk of logits: they and their softmax; with entropy, thrice
FORWARD, BACKWARD = (6, 6.5, 3.5), (17.5, 8.5, 11)
"""Arrays that a segment of the gated delta rule holds, for every head: as wide as a key, as a value, and as a chunk is
long. As measured on the rule alone."""
LATER = 0.6
"""Part of a further segment that MLX has begun before the first is done; forward of no more than one."""


class Tape:
    """Bytes that are held while operations come; `peak` is the most there has been.

    ahead: dispatches after which what was let go is freed; most: bytes that may wait for that.
    """

    def __init__(self, held: int = 0, ahead: int = AHEAD, most: int | None = None) -> None:
        self.held = self.peak = held
        self.waiting = 0
        self._now, self.ahead, self._most = 0, ahead, most
        self._freed: deque[tuple[int, int]] = deque()

    def step(self, dispatches: int = 1) -> None:
        """Operations that allocate nothing, as views are."""
        self._now += dispatches
        while self._freed and (
            self._freed[0][0] <= self._now or (self._most is not None and self.waiting > self._most)
        ):
            size = self._freed.popleft()[1]
            self.held -= size
            self.waiting -= size

    def keep(self, *sizes: int) -> int:
        """Operations whose results stay; returns their bytes."""
        for size in sizes:
            self.step(2)
            self.held += size
            self.peak = max(self.peak, self.held)
        return sum(sizes)

    def free(self, size: int) -> None:
        """Let go of what was kept."""
        self._freed.append((self._now + self.ahead, size))
        self.waiting += size

    def use(self, *sizes: int) -> None:
        """Operations whose results are read by the next and let go."""
        for size in sizes:
            self.keep(size)
            self.free(size)


@dataclass(frozen=True, slots=True)
class Rows:
    """B rows of T tokens, behind P that are in caches."""

    rows: int
    tokens: int
    before: int = 0

    @property
    def count(self) -> int:
        """N, the tokens that are run."""
        return self.rows * self.tokens


@dataclass(frozen=True, slots=True)
class Pass:
    """How layers are run: size of an activation in bytes, rank of adapters, the names of those adapted (None for all);
    fused: attention without a matrix of scores; keeping: the sigmoid of gates is kept."""

    size: int
    rank: int
    keys: tuple[str, ...] | None = None
    fused: bool = False
    keeping: bool = True


Kept: TypeAlias = tuple[int, int]


class Passed:
    """The operations of a model's layers on a tape."""

    def __init__(self, model: Model, how: Pass, tape: Tape) -> None:
        self.model, self.how, self.tape = model, how, tape
        self._again = False

    def head(self, count: int, entropy: bool = False) -> None:
        """Log-probs of `count` tokens: their hidden states and slopes, and the logits of a chunk in so many arrays."""
        tape, hidden = self.tape, count * self.model.hidden * self.how.size
        chunk = min(count, max(1, LOGITS // self.model.vocabulary)) * self.model.vocabulary * FLOAT
        kept = tape.keep(hidden, hidden)
        first, *others = [chunk] * (ENTROPY_ARRAYS if entropy else HEAD_ARRAYS)
        tape.step(12)  # the last norm, and which tokens are learned
        tape.use(*([chunk // 2] if self.how.size < FLOAT else []), first, *others[:-1])
        tape.step(24)  # normalisers, the place of each token
        tape.use(others[-1], hidden)
        tape.step(tape.ahead)  # the loss and its metrics
        tape.free(kept)
        tape.use(hidden, hidden)

    def forward(self, layer: Layer, at: Rows, again: bool = False) -> Kept:
        """A layer forward; returns the bytes that its two halves keep for the way back.

        again: for that alone, so that its result is not made.
        """
        self._again = again
        mixer, inner = layer.mixer, layer.inner
        first = self._attention(mixer, at) if isinstance(mixer, Attention) else self._gated_delta(mixer, at)
        return first, self._dense(inner, at) if isinstance(inner, Dense) else self._experts(inner, at)

    def backward(self, layer: Layer, at: Rows, kept: Kept) -> None:
        """A layer's gradient, which lets go of what it kept; the adapters' own gradients stay."""
        mixer, inner = layer.mixer, layer.inner
        if isinstance(inner, Dense):
            self._dense_back(inner, at)
        else:
            self._experts_back(inner, at)
        self.tape.free(kept[1])
        if isinstance(mixer, Attention):
            self._attention_back(mixer, at)
        else:
            self._gated_delta_back(mixer, at)
        self.tape.free(kept[0])

    def _adapted(self, linear: Linear) -> bool:
        return self.how.keys is None or linear.name in self.how.keys

    def _linear(self, linear: Linear, count: int, kept: bool) -> int:
        """y = W x + scale (x A) B for N tokens: y, x A, (x A) B; x once more where it is not in float32."""
        tape, how = self.tape, self.how
        out = count * linear.outputs
        held = tape.keep(out * how.size)
        if not kept:
            tape.free(held)
            held = 0
        if self._adapted(linear):
            if how.size < FLOAT:
                held += tape.keep(count * linear.inputs * FLOAT)
                tape.use(out * how.size)
            held += tape.keep(count * how.rank * FLOAT)
            tape.use(out * FLOAT)
            tape.step(4)
        tape.step(2)
        return held

    def _linear_back(self, linear: Linear, count: int) -> None:
        """scale dy, its products with B and A, those with x A and x, which are the gradients; dy W, and the sum."""
        tape, how = self.tape, self.how
        if self._adapted(linear):
            tape.use(count * linear.outputs * FLOAT, count * how.rank * FLOAT)
            tape.keep(linear.adapter(how.rank) * FLOAT)
            tape.use(count * linear.inputs * FLOAT)
            if how.size < FLOAT:
                tape.use(count * linear.outputs * how.size, count * linear.inputs * how.size)
            tape.step(8)
        tape.use(count * linear.inputs * how.size)
        tape.step(2)

    def _attention(self, mixer: Attention, at: Rows) -> int:
        tape, n, size, hidden = self.tape, at.count, self.how.size, self.model.hidden
        query, key = n * mixer.heads * mixer.width * size, n * mixer.key_heads * mixer.width * size
        q, k, v, o = mixer.linears(hidden)
        kept = tape.keep(n * hidden * size)
        kept += self._linear(q, n, mixer.normed or mixer.gated)
        kept += self._linear(k, n, mixer.normed) + self._linear(v, n, not at.before)
        if mixer.normed:
            tape.use(query, key)
        kept += tape.keep(query)
        if at.before:  # the caches' keys and values, and these behind them
            tape.use(key)
            kept += tape.keep(*[at.rows * (at.before + at.tokens) * mixer.key_heads * mixer.width * size] * 2)
        else:
            kept += tape.keep(key)
        if not self.how.fused:
            kept += tape.keep(self._scores(mixer, at))
            tape.use(query)
        kept += tape.keep(query)
        if mixer.gated:
            kept += tape.keep(query, query)
        tape.step(8)
        kept += self._linear(o, n, False) + tape.keep(n * hidden * size)
        return kept

    def _scores(self, mixer: Attention, at: Rows) -> int:
        return at.count * (at.before + at.tokens) * mixer.heads * self.how.size

    def _attention_back(self, mixer: Attention, at: Rows) -> None:
        tape, n, size, hidden = self.tape, at.count, self.how.size, self.model.hidden
        query, key = n * mixer.heads * mixer.width * size, n * mixer.key_heads * mixer.width * size
        q, k, v, o = mixer.linears(hidden)
        self._linear_back(o, n)
        if mixer.gated:
            tape.use(query, query, query)
        if self.how.fused:
            tape.use(query)
        else:
            tape.use(query, *[self._scores(mixer, at)] * 2, query, query)
        seen = at.rows * (at.before + at.tokens) * mixer.key_heads * mixer.width * size
        tape.use(query, seen, seen)
        tape.use(query, key, *([query, key] if mixer.normed else []))
        tape.step(20)
        for linear in (v, k, q):
            self._linear_back(linear, n)
        tape.use(n * hidden * size, n * hidden * size)

    def _dense(self, inner: Dense, at: Rows, prefix: str = "mlp") -> int:
        tape, n, size, hidden = self.tape, at.count, self.how.size, self.model.hidden
        gate, up, down = inner.linears(hidden, prefix)
        kept = tape.keep(n * hidden * size) if prefix == "mlp" else 0
        kept += self._linear(gate, n, True) + self._linear(up, n, True)
        kept += tape.keep(*[n * inner.inside * size] * (2 if self.how.keeping else 1))
        if self._again and prefix == "mlp":
            return kept + (tape.keep(n * self.how.rank * FLOAT) if self._adapted(down) else 0)
        kept += self._linear(down, n, False)
        return kept + (tape.keep(n * hidden * size) if prefix == "mlp" else 0)

    def _dense_back(self, inner: Dense, at: Rows, prefix: str = "mlp") -> None:
        tape, n, size, hidden = self.tape, at.count, self.how.size, self.model.hidden
        gate, up, down = inner.linears(hidden, prefix)
        self._linear_back(down, n)
        tape.use(*[n * inner.inside * size] * 3)
        tape.step(10)
        self._linear_back(gate, n)
        self._linear_back(up, n)
        if prefix == "mlp":
            tape.use(n * hidden * size, n * hidden * size)

    def _experts(self, inner: Experts, at: Rows) -> int:
        tape, n, size, hidden = self.tape, at.count, self.how.size, self.model.hidden
        gate, up, down, *_ = inner.linears(hidden)
        many = n * inner.chosen
        kept = tape.keep(n * hidden * size, n * inner.count * FLOAT, many * FLOAT * 4)
        kept += tape.keep(many * hidden * size)
        kept += self._linear(up, many, True) + self._linear(gate, many, True)
        kept += tape.keep(*[many * inner.inside * size] * (2 if self.how.keeping else 1))
        kept += self._linear(down, many, False)
        kept += tape.keep(many * hidden * size)
        tape.use(many * hidden * size)
        if inner.shared:
            kept += self._dense(Dense(inner.shared), at, "mlp.shared_expert") + tape.keep(n * hidden * size)
        return kept if self._again else kept + tape.keep(n * hidden * size)

    def _experts_back(self, inner: Experts, at: Rows) -> None:
        tape, n, size, hidden = self.tape, at.count, self.how.size, self.model.hidden
        gate, up, down, *_ = inner.linears(hidden)
        many = n * inner.chosen
        if inner.shared:
            tape.use(n * hidden * size, n * hidden * size)
            self._dense_back(Dense(inner.shared), at, "mlp.shared_expert")
        tape.use(*[many * hidden * size] * 3)
        self._linear_back(down, many)
        tape.use(*[many * inner.inside * size] * 3)
        tape.step(10)
        self._linear_back(gate, many)
        self._linear_back(up, many)
        tape.use(many * hidden * size, n * hidden * size, n * hidden * size)

    def _gated_delta(self, mixer: GatedDelta, at: Rows) -> int:
        tape, n, size, hidden = self.tape, at.count, self.how.size, self.model.hidden
        *ins, out = mixer.linears(hidden)
        kept = tape.keep(n * hidden * size)
        for linear in ins:
            kept += self._linear(linear, n, linear.outputs == mixer.values)
        mixed, values = n * mixer.mixed * size, n * mixer.values * size
        tape.use(mixed)
        kept += tape.keep(mixed, mixed, mixed)
        kept += tape.keep(2 * n * mixer.keys * size, 2 * n * mixer.value_heads * FLOAT)
        self._segments(mixer, at, FORWARD, LATER * min(max(at.tokens / SEGMENT - 1, 0), 1))
        kept += tape.keep(at.rows * mixer.state * FLOAT)
        kept += tape.keep(values, values, values)
        kept += self._linear(out, n, False) + tape.keep(n * hidden * size)
        return kept

    def _gated_delta_back(self, mixer: GatedDelta, at: Rows) -> None:
        tape, n, size, hidden = self.tape, at.count, self.how.size, self.model.hidden
        *ins, out = mixer.linears(hidden)
        self._linear_back(out, n)
        mixed, values = n * mixer.mixed * size, n * mixer.values * size
        tape.use(values, values, values)
        self._segments(mixer, at, BACKWARD, LATER * max(at.tokens / SEGMENT - 1, 0))
        tape.use(mixed, mixed)
        for linear in ins:
            self._linear_back(linear, n)
        tape.use(n * hidden * size, n * hidden * size)

    def _segments(self, mixer: GatedDelta, at: Rows, arrays: tuple[float, float, float], others: float) -> None:
        """The rule by chunks, in float32. It has many operations: when it is widest, what came before is freed."""
        keys, values, chunks = arrays
        width = keys * mixer.key_width + values * mixer.value_width + chunks * CHUNK
        length = min(-(-at.tokens // CHUNK) * CHUNK, SEGMENT)  # chunks are padded
        self.tape.step(self.tape.ahead)
        self.tape.use(round(FLOAT * mixer.value_heads * width * at.rows * length * (1 + others)))
        self.tape.step(self.tape.ahead)
