"""One step of many rows, as a graph that is compiled where it can be; and which caches serve a model."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from typing import Any, TypeAlias

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from mlxrl.policy.gated_delta import chunked
from mlxrl.policy.head import Head
from mlxrl.rollout.equals import Equals
from mlxrl.rollout.fused import Product, forget
from mlxrl.rollout.layers import Layer
from mlxrl.rollout.prefill import Filled, Prompt, prefill
from mlxrl.rollout.rules import Processor, Rules, State, draw
from mlxrl.rollout.slots import Slots

Caches: TypeAlias = Slots | Equals

GRAPHS = 4  # kept for a model: training and evaluation draw by different rules


def step(
    head: Head, caches: Caches, state: State, rules: Rules, processors: Sequence[Processor] = ()
) -> tuple[State, State]:
    """Feed every row its last token and draw the next; the caches are written to.

    Rows that are done are fed too, but do not grow: what they write lies behind their last token.
    Returns the state after it, and what the host reads, see `rules.draw`.
    """
    given = caches.caches(state["lengths"])
    hidden = head.trunk(state["tokens"][:, None], given)
    caches.take(given, state["done"] if rules.holds else None)
    state = {**state, "lengths": state["lengths"] + (~state["done"]).astype(mx.int32)}
    return draw(head.project(hidden[:, -1]), state, rules, processors)


def extend(
    head: Head, slots: Slots, places: Sequence[int], lengths: Sequence[int], fed: Sequence[Sequence[int]]
) -> mx.array:
    """Feed n rows that hold `lengths` tokens several each, in one forward; returns the logits [n, V] behind the last.

    Shorter ones are padded on the right: attention to what lies behind is masked, and no state sees it.
    """
    part, counts = slots.part(places), mx.array([len(tokens) for tokens in fed], mx.int32)
    width = max(map(len, fed))
    tokens = mx.array([[*tokens, *[0] * (width - len(tokens))] for tokens in fed])
    ragged = min(map(len, fed)) < width
    given = part.caches(mx.array(list(lengths), mx.int32), counts if ragged else None)
    hidden = head.trunk(tokens, given)
    part.take(given)
    slots.put(places, part)
    last = mx.take_along_axis(hidden, (counts - 1)[:, None, None], axis=1)
    return head.project(last[:, 0])


class Graph:
    """A step traced once for all calls of the same shapes. Weights are arguments of it, so training may change them."""

    def __init__(self, rules: Rules, layers: tuple[Layer, ...]) -> None:
        self.rules, self.layers = rules, layers
        self._subject: Subject | None = None
        self._call = mx.compile(self._trace)

    def __call__(self, subject: Subject, slots: Slots, state: State) -> tuple[State, State]:
        """What `step` does."""
        self._subject = subject  # for the span of the call: a graph outlives models that are dropped
        try:
            slots.arrays, state, out = self._call(subject.weights, slots.arrays, state)
        finally:
            self._subject = None
        return state, out

    def _trace(
        self, weights: list[mx.array], arrays: list[mx.array], state: State
    ) -> tuple[list[mx.array], State, State]:
        assert self._subject is not None
        model, own = self._subject.model, self._subject.model.parameters()
        slots = Slots(len(state["tokens"]))
        slots.layers, slots.arrays = self.layers, arrays
        model.update(tree_unflatten(list(zip(self._subject.names, weights, strict=True))))
        try:
            state, out = step(self._subject.head, slots, state, self.rules)
        finally:
            model.update(own)
        return slots.arrays, state, out


class Subject:
    """A model as one rollout sees it, its adapters fused and its weights as they are."""

    def __init__(self, model: Any, head: Head, products: Sequence[Product], compiled: bool) -> None:
        self.model, self.head, self.products = model, head, products
        leaves: Any = tree_flatten(model.parameters())
        self.names, self.weights = [name for name, _ in leaves], [weight for _, weight in leaves]
        self._graphs = _graphs(model) if compiled else None

    def extend(
        self, slots: Slots, places: Sequence[int], lengths: Sequence[int], fed: Sequence[Sequence[int]]
    ) -> mx.array:
        """`extend`, with recurrences by chunks."""
        try:
            with chunked():
                return extend(self.head, slots, places, lengths, fed)
        finally:
            forget(self.products)

    def prefill(self, prompts: Sequence[Prompt], chunk: int) -> list[Filled]:
        """Run prompts."""
        try:
            return prefill(self.model, self.head, prompts, chunk)
        finally:
            forget(self.products)

    def step(
        self, caches: Caches, state: State, rules: Rules, processors: Sequence[Processor] = ()
    ) -> tuple[State, State]:
        """`step`, compiled where it can be."""
        try:
            return self._step(caches, state, rules, processors)
        finally:
            forget(self.products)

    def _step(self, caches: Caches, state: State, rules: Rules, processors: Sequence[Processor]) -> tuple[State, State]:
        if self._graphs is not None and not processors and isinstance(caches, Slots):
            key = rules, caches.layers
            if key not in self._graphs:
                self._graphs[key] = Graph(rules, caches.layers)
                self._graphs.pop(next(iter(self._graphs))) if len(self._graphs) > GRAPHS else None
            if (graph := self._graphs[key]) is not None:
                try:
                    return graph(self, caches, state)
                except (ValueError, RuntimeError) as error:
                    self._graphs[key] = None
                    warnings.warn(f"{type(self.model).__module__}: decoding is not compiled: {error}", stacklevel=2)
        return step(self.head, caches, state, rules, processors)


_graphs_of: dict[int, dict[tuple[Rules, tuple[Layer, ...]], Graph | None]] = {}


def _graphs(model: Any) -> dict[tuple[Rules, tuple[Layer, ...]], Graph | None]:
    """The graphs of a model, kept from one rollout to the next and forgotten with it."""
    if id(model) not in _graphs_of:
        _graphs_of[id(model)] = {}
        weakref.finalize(model, _graphs_of.pop, id(model), None)
    return _graphs_of[id(model)]
