"""One step of many sequences: the last token of each is fed, the next is drawn. Compiled where it can be."""

from __future__ import annotations

import warnings
from collections import abc
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from mlxrl.policy.head import Head
from mlxrl.policy.policy import Policy
from mlxrl.rollout.draw import Drawn
from mlxrl.rollout.kv_cache import EqualLengthCache, KVCache, Layers, SlotCache, capacity_for
from mlxrl.rollout.sequence import Sequence
from mlxrl.rollout.stop_rules import Processor, State, StepRules, Thinking, advance

KEPT = 4  # steps that are kept with a policy for later sessions: training and evaluation draw by different rules
DROP = 0.25  # share of slots that are free before they are dropped


def decode_step(
    head: Head, caches: KVCache, state: State, rules: StepRules, processors: abc.Sequence[Processor] = ()
) -> tuple[State, Drawn]:
    """Feed every row its last token and draw the next; the caches are written to.

    Rows that are done are fed too, but do not grow: what they write lies after their last token.
    """
    given = caches.caches(state.lengths)
    hidden = head.trunk(state.tokens[:, None], given)
    caches.update(given, state.done if rules.freeze else None)
    state = state._replace(lengths=state.lengths + (~state.done).astype(mx.int32))
    return advance(head.project(hidden[:, -1]), state, rules, processors)


class CompiledStep:
    """`decode_step` traced once for calls of the same shapes. Weights are arguments, so training may change them.

    refused: whether it could not be compiled.
    """

    def __init__(self, rules: StepRules, layers: Layers) -> None:
        self.rules, self.layers, self.refused = rules, layers, False
        self._session: DecodeSession | None = None
        self._call = mx.compile(self._trace)

    def __call__(self, session: DecodeSession, caches: SlotCache, state: State) -> tuple[State, Drawn]:
        self._session = session  # for the span of the call: a compiled step outlives the session
        try:
            caches.arrays, state, drawn = self._call(session.weights, caches.arrays, state)
        finally:
            self._session = None
        return state, drawn

    def _trace(self, weights: list[mx.array], arrays: list[mx.array], state: State) -> Any:
        assert self._session is not None
        policy, own = self._session.policy, self._session.policy.model.parameters()
        caches = SlotCache(len(state.tokens), layers=self.layers, arrays=arrays)
        policy.model.update(tree_unflatten(list(zip(self._session.names, weights, strict=True))))
        try:
            state, drawn = decode_step(policy.head, caches, state, self.rules)
        finally:
            policy.model.update(own)
        return caches.arrays, state, drawn


class DecodeSession:
    """A policy with its weights as they are now, and the steps that are compiled for it."""

    def __init__(self, policy: Policy, processors: abc.Sequence[Processor] = (), *, compiled: bool = True) -> None:
        self.policy, self.processors, self.compiled = policy, tuple(processors), compiled and not processors
        leaves: Any = tree_flatten(policy.model.parameters())
        self.names, self.weights = [name for name, _ in leaves], [weight for _, weight in leaves]
        self._steps: dict[tuple[StepRules, Layers], CompiledStep] = policy.memo.setdefault("compiled steps", {})
        for key in [*self._steps][:-KEPT]:
            del self._steps[key]

    def step(self, caches: KVCache, state: State, rules: StepRules) -> tuple[State, Drawn]:
        """`decode_step`, compiled where it can be."""
        if self.compiled and isinstance(caches, SlotCache):
            key = rules, caches.layers
            step = self._steps[key] = self._steps.pop(key, None) or CompiledStep(*key)  # the last used is the last
            try:
                if not step.refused:
                    return step(self, caches, state)
            except (ValueError, RuntimeError) as error:
                step.refused = True
                module = type(self.policy.model).__module__
                warnings.warn(f"{module}: decoding is not compiled: {error}", stacklevel=2)
        return decode_step(self.policy.head, caches, state, rules, self.processors)


class Slots:
    """Sequences that decode together, each in a slot, with their caches and one state.

    sequences: by slot, None where it is free; one that has ended frees its slot unless it is parked.
    slotted: whether they may be of different lengths.
    """

    def __init__(self, session: DecodeSession, rules: StepRules, count: int, *, slotted: bool) -> None:
        self.session, self.rules = session, rules
        self.sequences: list[Sequence | None] = [None] * count
        self.caches: KVCache = SlotCache(count) if slotted else EqualLengthCache(count)
        self.state: State | None = None
        self._budget = rules.sampling.thinking_budget is not None
        looks_back = rules.sampling.penalized or self._budget or session.processors
        self._history: int | None = 0 if looks_back else None  # its capacity

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def live(self) -> list[int]:
        """Slots of sequences that are being drawn."""
        return [slot for slot, one in enumerate(self.sequences) if one and one.stop is None]

    @property
    def occupied(self) -> list[int]:
        """Slots of sequences that are being drawn or parked."""
        return [slot for slot, one in enumerate(self.sequences) if one and (one.stop is None or one.keeps_slot)]

    @property
    def free(self) -> list[int]:
        return sorted({*range(len(self))}.difference(self.occupied))

    def fit(self, tokens: int) -> None:
        """Raise the capacity to that of sequences of so many tokens, what is drawn next included."""
        self.caches.fit(tokens)
        if self._history is not None and (more := capacity_for(tokens) - self._history) > 0:
            self._history += more
            if self.state is not None and self.state.history is not None:
                self.state = self.state._replace(history=mx.pad(self.state.history, [(0, 0), (0, more)]))

    def begin(self, slots: abc.Sequence[int], sequences: abc.Sequence[Sequence], logits: mx.array) -> Drawn:
        """Let sequences whose prompts are in the caches draw first tokens, from logits [n, V]."""
        for slot, sequence in zip(slots, sequences, strict=True):
            self.sequences[slot], sequence.num_drawn = sequence, 1
        new, drawn = advance(logits, self._initial(sequences), self.rules, self.session.processors)
        if self.state is None:
            assert list(slots) == list(range(len(self))), "the first fill all slots"
            self.state = new
        else:
            order = list(range(len(self)))
            for number, slot in enumerate(slots):
                order[slot] = len(self) + number
            self.state = _rows(order, self.state, new)
        mx.async_eval(drawn, self.state)
        return drawn

    def step(self) -> Drawn | None:
        """Enqueue a step, None where no sequence wants a token."""
        wanting = [one for one in self.sequences if one and one.stop is None and one.num_drawn < one.limit]
        if not wanting or self.state is None:
            return None
        for one in wanting:
            one.num_drawn += 1
        self.fit(max(one.length for one in wanting) + 1)
        self.state, drawn = self.session.step(self.caches, self.state, self.rules)
        mx.async_eval(drawn, self.state, self.caches.arrays)
        return drawn

    def mark_done(self) -> None:
        """Mark sequences in the state that have ended for a reason that a step does not see."""
        if self.state is not None:
            over = mx.array([one is None or one.stop is not None for one in self.sequences])
            self.state = self.state._replace(done=self.state.done | over)

    def grow(self, missing: int, most: int) -> None:
        """Add free slots, as many as there are at least, so that few sizes are compiled, but no more than `most`."""
        if (more := min(max(missing, len(self)), most - len(self))) > 0:
            self._select([*range(len(self)), *[0] * more], len(self), None)

    def drop(self) -> None:
        """Drop free slots, once they are a quarter; sizes follow one ladder, so that shapes come back."""
        occupied, size = self.occupied, len(self)
        while (smaller := int(size * (1 - DROP))) >= max(len(occupied), 1):
            size = smaller
        if occupied and size < len(self):
            longest = max(one.length for slot in occupied if (one := self.sequences[slot]))
            self._select([*occupied, *self.free[: size - len(occupied)]], len(occupied), longest + 1)

    def _select(self, slots: abc.Sequence[int], count: int, tokens: int | None) -> None:
        """Have these slots, with the sequences of the first `count`, without capacity beyond so many tokens."""
        assert self.state is not None
        self.sequences = [*(self.sequences[slot] for slot in slots[:count]), *[None] * (len(slots) - count)]
        self.caches = self.caches.read(slots, tokens)
        state, used = _rows(slots, self.state), mx.arange(len(slots)) < count
        lengths = mx.where(used, state.lengths, 0)  # within the capacity that is left
        self.state = state._replace(lengths=lengths, done=state.done | ~used)

    def _initial(self, sequences: abc.Sequence[Sequence]) -> State:
        """The state of sequences whose prompts are in the caches."""
        prompts, zeros = [sequence.prompt for sequence in sequences], mx.zeros((len(sequences),), mx.int32)
        state = State(
            zeros,
            lengths=mx.array([len(prompt) for prompt in prompts], mx.int32),
            keys=mx.stack([sequence.request.key for sequence in sequences]),
            drawn=zeros,
            left=mx.array([sequence.limit for sequence in sequences], mx.int32),
            done=mx.zeros((len(sequences),), mx.bool_),
        )
        if self._history is not None:
            padded = [[*prompt, *[0] * (self._history - len(prompt))] for prompt in prompts]
            state = state._replace(history=mx.array(padded, mx.int32))
        if self._budget:
            opened = mx.array([self.rules.opened_by(prompt) for prompt in prompts])
            state = state._replace(thinking=Thinking(opened, zeros, zeros - 1))
        return state


def _rows(rows: abc.Sequence[int], *states: State) -> State:
    """Some rows of states, counted over all of them."""
    index = mx.array(list(rows))
    return tree_map(lambda *arrays: None if arrays[0] is None else mx.concatenate(list(arrays))[index], *states)
