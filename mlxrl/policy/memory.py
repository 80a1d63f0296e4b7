"""How much memory the parts of a step need, from the sizes of a model and of the work alone. All in bytes.

The update is a tape of allocations (`tape.py`) over every layer, forward and backward; a rollout is its caches and what
a forward has in flight. On the CPU this is what MLX does, and measured; on a GPU attention makes no matrix of
scores, less is in flight, and the numbers are estimates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mlxrl.policy.gated_delta import SEGMENT
from mlxrl.policy.room import capacity_for
from mlxrl.policy.shapes import Attention, GatedDelta, Layer, Model
from mlxrl.policy.tape import AHEAD, FLOAT, HEAD_ARRAYS, LOGITS, METAL, Kept, Pass, Passed, Rows, Tape

MOMENTS = {"adamw": 2, "adam": 2, "lion": 1, "sgd": 1}
PREFILL = 2048  # prompt tokens in one forward of a rollout
SAMPLER_ARRAYS, FIRST_ARRAYS = 2, 3  # of the size of a step's logits, in float32; of the first's, which are joined
KEYS_GRAIN = 256  # tokens by which a prompt's cache grows
PLACED = 13  # arrays that are there twice while prompts' caches are given to rows; one layer's while their room grows


@dataclass(frozen=True, slots=True)
class Work:
    """What a step does, as far as memory is concerned.

    size: bytes of a number of the weights and activations. weights: bytes of all weights. loading: bytes more that are
    there while they are loaded. rows: that decode together; prompts: distinct ones of a step.
    prefix: tokens that a pass's rows share; pass_rows, pass_tokens: of one pass; chunked: whether it is one of several
    against the same prefix; units: passes of a step, those against one prefix as one. learned: tokens of a row that the
    loss is about.
    """

    size: int
    weights: int
    loading: int
    rank: int
    keys: tuple[str, ...] | None
    optimizer: str
    rows: int
    prompts: int
    prompt: int
    completion: int
    prefix: int
    pass_rows: int
    pass_tokens: int
    chunked: bool
    units: int
    learned: int
    recompute: bool
    entropy: bool = False
    gpu: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a step: what it is made of, by name; `peak` is their sum."""

    name: str
    terms: Mapping[str, int]

    @property
    def peak(self) -> int:
        """Bytes at its highest."""
        return sum(self.terms.values())


def parts(model: Model, work: Work) -> list[Part]:
    """The parts of a step and what each needs: load, rollout, update."""
    adapters = FLOAT * sum(linear.adapter(work.rank) for linear in model.adapted(work.keys))
    moments = MOMENTS[work.optimizer] * adapters
    always = {"weights": work.weights, "adapters": adapters}
    return [
        Part("load", {**always, "files": work.loading}),
        Part("rollout", {**always, "optimizer": moments, **_rollout(model, work)}),
        Part("update", {**always, "optimizer": moments, **_update(model, work, adapters)}),
    ]


def _update(model: Model, work: Work, adapters: int) -> dict[str, int]:
    """The gradient pass, and its terms: what a pass without scores, and without what is in flight, would hold."""
    peak, kept = _pass_peak(model, work, adapters, fused=work.gpu)
    unscored = kept if work.gpu else _pass_peak(model, work, adapters, fused=True)[1]
    chunk = HEAD_ARRAYS * FLOAT * model.vocabulary * min(work.pass_rows * work.learned, LOGITS // model.vocabulary)
    chunk = min(chunk, peak - kept)
    before = adapters if work.units > 1 else 0
    found = {
        "gradients": before,
        "activations": unscored,
        "attention scores": kept - unscored,
        "head": chunk,
        "in flight": peak - kept - chunk,
    }
    stepping = (MOMENTS[work.optimizer] + 3) * adapters  # new moments, and the gradient, scaled, and as new weights
    return found if sum(found.values()) > stepping else {"gradients": stepping}


def _pass_peak(model: Model, work: Work, adapters: int, fused: bool) -> tuple[int, int]:
    """The highest point of a pass, and what of it is kept for the way back when the head is reached."""
    tape = Tape(0, AHEAD, METAL if work.gpu else None)
    run = Passed(model, Pass(work.size, work.rank, work.keys, fused, keeping=not work.gpu), tape)
    rows = Rows(work.pass_rows, work.pass_tokens - 1, work.prefix)
    prefix = Rows(1, work.prefix) if work.prefix else None
    passage = _Passage(run, model, work.recompute, prefix)
    if prefix is not None:
        passage.forward(prefix)
    if work.chunked and prefix is not None:
        sums = 2 * work.size * work.prefix * _key_numbers(model) + adapters
        tape.keep(sums)
    passage.forward(rows)
    kept = passage.kept
    run.head(work.pass_rows * work.learned, work.entropy)
    passage.backward(rows)
    if prefix is not None:
        passage.backward(prefix)
    return tape.peak, kept


class _Passage:
    """Every layer of a model forward, and back."""

    def __init__(self, run: Passed, model: Model, recompute: bool, prefix: Rows | None) -> None:
        self.run, self.model, self.recompute, self.prefix, self.kept = run, model, recompute, prefix, 0
        self._held: dict[Rows, list[Kept]] = {}

    def forward(self, at: Rows) -> None:
        tape, held = self.run.tape, list[Kept]()
        self.kept += tape.keep(at.count * self.model.hidden * self.run.how.size)  # the embedded tokens
        for layer in self.model.layers:
            kept = self.run.forward(layer, at)
            if self.recompute:
                tape.free(sum(kept))
                kept = tape.keep(self._inputs(layer, at)), 0
            held.append(kept)
        self._held[at] = held
        self.kept += sum(map(sum, held))

    def _inputs(self, layer: Layer, at: Rows) -> int:
        """What a recomputed layer keeps: its result, and a prefix's keys and values, which rows are run against."""
        size, mixer = self.run.how.size, layer.mixer
        own = at.count * self.model.hidden * size
        if isinstance(mixer, Attention) and at is self.prefix:
            return own + 2 * at.count * mixer.key_heads * mixer.width * size
        return own

    def backward(self, at: Rows) -> None:
        for layer, kept in reversed(list(zip(self.model.layers, self._held.pop(at), strict=True))):
            if self.recompute:
                self.run.backward(layer, at, self.run.forward(layer, at, again=True))
                self.run.tape.free(sum(kept))
            else:
                self.run.backward(layer, at, kept)


def _key_numbers(model: Model) -> int:
    """Numbers of the keys of a token in all layers; of its values there are as many."""
    mixers = [layer.mixer for layer in model.layers]
    return sum(mixer.key_heads * mixer.width for mixer in mixers if isinstance(mixer, Attention))


def _states(model: Model, work: Work) -> int:
    """Bytes of a row's recurrent states and of the ends of its convolutions."""
    mixers = [layer.mixer for layer in model.layers]
    return sum(
        mixer.state * FLOAT + (mixer.kernel - 1) * mixer.mixed * work.size
        for mixer in mixers
        if isinstance(mixer, GatedDelta)
    )


def _rollout(model: Model, work: Work) -> dict[str, int]:
    """The highest of three: prompts as they are run, their caches as they are given to rows, rows at their longest."""
    keys, states = 2 * work.size * _key_numbers(model), _states(model, work)
    arrays, attending = 2 * len(model.layers), sum(isinstance(layer.mixer, Attention) for layer in model.layers)
    prompts = work.prompts * (-(-work.prompt // KEYS_GRAIN) * KEYS_GRAIN * keys + states)
    begun, full = (
        work.rows * capacity_for(tokens) * keys for tokens in (work.prompt + 2, work.prompt + work.completion + 1)
    )
    logits = work.rows * model.vocabulary * FLOAT
    together = max(1, min(work.prompts, PREFILL // work.prompt))
    forward = _forward_peak(model, work, Rows(together, min(work.prompt, PREFILL)))
    prefilling = {"prompts": prompts, "in flight": forward, "head": work.prompts * model.vocabulary * FLOAT}
    placing = {
        "prompts": prompts,
        "keys and values": begun,
        "in flight": round((begun + work.rows * states) * min(work.prompts, PLACED / arrays)),
        "states": work.rows * states,
        "head": FIRST_ARRAYS * logits,
    }
    decoding = {
        "keys and values": full,
        "in flight": full // max(attending, 1),
        "states": 2 * work.rows * states,  # as they were and as they are
        "head": SAMPLER_ARRAYS * logits,
    }
    fused = FLOAT * sum(linear.adapter(work.rank) for linear in model.adapted(work.keys) if not linear.experts)
    return {"fused": fused, **max(prefilling, placing, decoding, key=lambda terms: sum(terms.values()))}


def _forward_peak(model: Model, work: Work, at: Rows) -> int:
    """What a forward without a gradient has in flight."""
    tape = Tape(0, AHEAD, METAL if work.gpu else None)
    run = Passed(model, Pass(work.size, work.rank, work.keys, fused=True, keeping=False), tape)
    for layer in model.layers:
        tape.free(sum(run.forward(layer, at)))
    return tape.peak + sum(_deferred(layer, work, at) for layer in model.layers)


def _deferred(layer: Layer, work: Work, at: Rows) -> int:
    """What the last states of a recurrent layer are made of: logits do not wait for them, so they come at the end."""
    mixer = layer.mixer
    if isinstance(mixer, Attention):
        return 0
    segment = at.rows * min(at.tokens, SEGMENT) * mixer.value_heads * (mixer.key_width + mixer.value_width)
    return at.count * mixer.mixed * work.size + FLOAT * segment
