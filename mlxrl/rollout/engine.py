"""Continuous batching: sequences of many prompts decode together, each to its own end.

A sequence waits in a queue for a slot in its batch. A distinct prompt is prefilled once, and its caches are given to
all its sequences. The slot of a sequence that has ended goes to one that waits; when none waits, free slots are dropped
several at a time. The next step is enqueued before the last one is read back, so the device does not wait for Python.
"""

from __future__ import annotations

from collections import abc, deque
from dataclasses import replace
from typing import Any, Self

import mlx.core as mx

from mlxrl.errors import UserError
from mlxrl.policy.policy import Policy
from mlxrl.rollout.batching_mode import SLOTTED, BatchingMode, mode_of
from mlxrl.rollout.compiled_step import DecodeSession, Slots
from mlxrl.rollout.draw import Drawn
from mlxrl.rollout.kv_cache import SlotCache
from mlxrl.rollout.prefill import PREFILL_CHUNK, PrefixCache, context_of, shared_prefix
from mlxrl.rollout.sequence import Prompt, Request, Sequence
from mlxrl.rollout.stop_rules import Processor, StepRules, rules_of

JOIN = 0.125  # share of slots that are free before waiting sequences are prefilled


class Engine:
    """Decodes sequences of one policy, on one thread. It knows nothing of tasks, rewards or environments.

    Sequences that draw and stop by the same rules share a batch of at most `max_rows`; each other set of sampling
    settings has a batch of its own, and a step is one step of every batch. Limits, keys and stop strings may differ
    within a batch. Every sequence that is not cancelled comes out of `step` once, when it has ended.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        max_rows: int = 32,
        processors: abc.Sequence[Processor] = (),
        prefill_chunk: int = PREFILL_CHUNK,
        compiled: bool = True,
        mode: BatchingMode | None = None,
    ) -> None:
        """Take a policy's weights as they are now; `modes.decoding` makes it faster.

        Args:
            max_rows: sequences of one set of rules that decode together.
            processors: mlx-lm's logits processors, called with a sequence's tokens [T] and logits [1, V].
            prefill_chunk: prompt tokens in one forward pass.
            compiled: whether a step may be compiled; False saves the compilation where little is decoded.
            mode: how sequences are batched; None finds out what the model can do.
        """
        if max_rows < 1 or prefill_chunk < 1:
            raise UserError("engine", f"max_rows and prefill_chunk: wanted at least 1, got {max_rows}, {prefill_chunk}")
        self.policy, self.session = policy, DecodeSession(policy, processors, compiled=compiled)
        mode = mode or mode_of(policy)
        self.slotted = mode in SLOTTED
        self.max_rows = 1 if mode == "single" else max_rows
        self.prefixes = PrefixCache(policy, prefill_chunk, ragged=mode == "ragged")
        self._batches: dict[StepRules, Batch] = {}
        self._ended: list[Sequence] = []  # before they started
        self._started = False

    def submit(self, request: Request) -> Sequence:
        """Let a request wait for a slot. One whose prompt fills the context ends at once with no tokens."""
        sequence = self._sequence(request)
        if sequence.stop is not None:
            self._ended.append(sequence)
            return sequence
        if sequence.rules not in self._batches:
            self._batches[sequence.rules] = Batch(self, sequence.rules)
        self._batches[sequence.rules].queue.append(sequence)
        return sequence

    def extend(self, sequence: Sequence, ids: abc.Sequence[int], **changes: Any) -> Sequence:
        """Continue after a sequence that has ended with ids that follow its tokens, as the next turn of a conversation.

        Where it is parked and draws by the same rules, only what is new is run, in one forward pass with what is new to
        others; else all of it is prefilled. `changes` are the fields of its request that differ, such as `key`.
        """
        assert sequence.stop is not None, "a sequence under way cannot be extended"
        prompt = (*sequence.prompt, *sequence.tokens, *ids)
        following = self._sequence(replace(sequence.request, prompt=prompt, **changes))
        continues = sequence.keeps_slot and sequence.tokens and len(prompt) > sequence.num_cached
        if following.stop is None and continues and following.rules == sequence.rules:
            self._batches[sequence.rules].extended.append((sequence, following))
            return following
        self.cancel(sequence)
        return self.submit(following.request)

    def cancel(self, sequence: Sequence) -> None:
        """Give up a sequence: one under way ends as "cancelled" and does not come out, a parked one frees its slot."""
        sequence.keeps_slot = False
        if sequence.stop is None:
            sequence.stop = "cancelled"
            self._batches[sequence.rules].cancelled(sequence)

    def step(self) -> list[Sequence]:
        """Draw a token for every sequence in a slot; returns those that have ended."""
        if not self._started:
            self._start()
        ended, self._ended = self._ended, []
        for batch in self._batches.values():
            ended += batch.step()
        if len(self._batches) > 1:  # slots of settings that nobody uses now are given back
            self._batches = {rules: batch for rules, batch in self._batches.items() if batch.used}
        return ended

    def run(self) -> abc.Iterator[Sequence]:
        """Step until nothing is left to do; sequences come out as they end."""
        while self.busy:
            yield from self.step()

    @property
    def busy(self) -> bool:
        """Whether a step has something to do. Parked sequences, and those that wait for their slots, do not count."""
        return bool(self._ended) or any(batch.busy for batch in self._batches.values())

    @property
    def drawing(self) -> bool:
        return any(batch.slots.live for batch in self._batches.values())

    @property
    def occupied(self) -> int:
        """Slots of sequences that are being drawn or parked."""
        return sum(len(batch.slots.occupied) for batch in self._batches.values())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._batches, self._ended = {}, []
        self.prefixes.clear()
        mx.clear_cache()  # what comes next needs buffers of other sizes

    def _sequence(self, request: Request) -> Sequence:
        """A sequence with the tokens that it may draw: a prompt that fills the context may draw none."""
        self.policy.require_ids("prompt", request.prompt)
        limits = [request.sampling.max_tokens, request.limit]
        if (context := context_of(self.policy.model)) is not None:
            limits.append(context - len(request.prompt))
        limit = min(limit for limit in limits if limit is not None)
        rules = rules_of(self.policy.tokenizer, request.sampling, request.stop_ids, request.keep)
        self.policy.require_ids("sampling: the end of thinking", rules.think_end)
        self.policy.require_ids("sampling: stop ids", rules.stop_ids)
        return Sequence(request, rules, limit, self.policy.tokenizer.decode, request.keep and self.slotted)

    def _start(self) -> None:
        """Before the first step, bring sequences of one prompt together, and find what all prompts begin with."""
        prompts: list[Prompt] = []
        for batch in self._batches.values():
            first = {sequence.prompt: number for number, sequence in reversed([*enumerate(batch.queue)])}
            batch.queue = deque(sorted(batch.queue, key=lambda sequence: first[sequence.prompt]))
            prompts += first
            self._started = True
        if self.prefixes.ragged:
            self.prefixes.prefix = shared_prefix(prompts)


class Batch:
    """Sequences of one set of rules: those in slots, which decode together, and those that wait for a slot.

    extended: parked sequences and those that continue them; unread: what was drawn, and for which sequences.
    """

    def __init__(self, engine: Engine, rules: StepRules) -> None:
        self.engine, self.rules = engine, rules
        self.queue: deque[Sequence] = deque()
        self.extended: list[tuple[Sequence, Sequence]] = []
        self.unread: list[tuple[list[Sequence | None], Drawn]] = []
        self._open(0)

    def _open(self, count: int) -> None:
        self.slots = Slots(self.engine.session, self.rules, count, slotted=self.engine.slotted)

    @property
    def busy(self) -> bool:
        return bool(self.unread or self.extended or self.slots.live) or self._can_join()

    @property
    def used(self) -> bool:
        """Whether a sequence is drawn, waits or is parked."""
        return bool(self.queue or self.unread or self.slots.occupied)

    def cancelled(self, sequence: Sequence) -> None:
        if sequence in self.queue:
            self.queue.remove(sequence)
        for parked, following in self.extended:
            parked.keeps_slot = following is not sequence
        self.extended = [pair for pair in self.extended if pair[0].keeps_slot]
        self.slots.mark_done()

    def step(self) -> list[Sequence]:
        """Fill free slots, enqueue a step, and read the one before; returns the sequences that have ended."""
        if self.extended:
            self._extend()
        if self._can_join():
            self._fill()
        unread, self.unread = self.unread, []
        if (drawn := self.slots.step()) is not None:
            self.unread.append((list(self.slots.sequences), drawn))
        ended = [sequence for sequences, drawn in unread for sequence in self._read(sequences, drawn)]
        if (self.unread or unread) and not self.queue:
            self.slots.drop()
        return ended

    def _can_join(self) -> bool:
        """Whether a waiting sequence could have a slot."""
        if not self.queue:
            return False
        occupied = len(self.slots.occupied)
        return not occupied or (self.engine.slotted and occupied < self.engine.max_rows)

    def _fill(self) -> None:
        """Give free slots to waiting sequences when enough are free."""
        if not self.slots.occupied:
            self._open_for_queue()
        elif len(self.queue) > len(self.slots.free):
            self.slots.grow(len(self.queue) - len(self.slots.free), self.engine.max_rows)
        free = self.slots.free
        if not self.slots.live or len(free) >= JOIN * len(self.slots):
            joining = [self.queue.popleft() for _ in free[: len(self.queue)]]
            self._join(free[: len(joining)], joining)

    def _open_for_queue(self) -> None:
        """Make slots for as many as may be, or for those of one length with the first where none can join later."""
        count = min(self.engine.max_rows, len(self.queue))
        if self.engine.slotted:
            if len(self.slots) < count:
                self._open(count)
            return
        length = len(self.queue[0].prompt)
        chosen = [one for one in self.queue if len(one.prompt) == length][: self.engine.max_rows]
        self.queue = deque(chosen + [one for one in self.queue if one not in chosen])
        self._open(len(chosen))

    def _join(self, slots: list[int], sequences: list[Sequence]) -> None:
        """Prefill the distinct prompts of sequences, give these their slots, and let them draw."""
        self.slots.fit(max(len(sequence.prompt) for sequence in sequences) + 2)
        ends: dict[Prompt, mx.array] = {}
        prompts, waited_for = dict.fromkeys(one.prompt for one in sequences), {one.prompt for one in self.queue}
        for prompt, prefilled in self.engine.prefixes.prefilled(prompts, waited_for):
            own = [slot for slot, one in zip(slots, sequences, strict=True) if one.prompt == prompt]
            self.slots.caches.place(own, prefilled)
            ends[prompt] = prefilled.logits
        logits = mx.concatenate([ends[one.prompt] for one in sequences])
        self.unread.append((list(sequences), self.slots.begin(slots, sequences, logits)))

    def _extend(self) -> None:
        """Feed extended sequences what is new to them, and let them draw."""
        assert isinstance(self.slots.caches, SlotCache)
        pairs, self.extended = self.extended, []
        slots = [self.slots.sequences.index(parked) for parked, _ in pairs]
        cached, prompts = [parked.num_cached for parked, _ in pairs], [following.prompt for _, following in pairs]
        width = max(len(prompt) - length for prompt, length in zip(prompts, cached, strict=True))
        self.slots.fit(max(map(len, prompts)) + min(width, self.engine.prefixes.chunk) + 1)
        logits = self.engine.prefixes.extended(self.slots.caches, slots, cached, prompts)
        sequences = [following for _, following in pairs]
        self.unread.append((list(sequences), self.slots.begin(slots, sequences, logits)))

    def _read(self, sequences: list[Sequence | None], drawn: Drawn) -> list[Sequence]:
        """Read back what was drawn; returns the sequences that it ended."""
        read: Any = Drawn._make(None if array is None else array.tolist() for array in drawn)
        pairs = [(row, one) for row, one in enumerate(sequences) if one and one.stop is None]
        ended = [one for row, one in pairs if one.take(read, row)]
        if any(sequence.stop_strings for sequence in ended):
            self.slots.mark_done()
        return ended
