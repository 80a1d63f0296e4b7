"""The batched decode loop: many rows of many prompts, each until its own stop.

A distinct prompt is prefilled once, and its caches are given to all its rows. A row that has ended leaves its
place to the next; when none is left to come, rows are dropped in lumps. The next step is enqueued before
the last one is read back, so the device does not wait for Python.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import isfinite
from typing import Any

import mlx.core as mx

from mlxrl.policy.head import Head
from mlxrl.rollout.batch import Batch
from mlxrl.rollout.common import Continued, beginning, continued
from mlxrl.rollout.engine import Subject
from mlxrl.rollout.equals import Equals
from mlxrl.rollout.fused import fused
from mlxrl.rollout.prefill import Filled, Prompt, batches, context_of
from mlxrl.rollout.row import Request, Row, Text
from mlxrl.rollout.rules import Processor, Rules, State
from mlxrl.rollout.serve import Service, service_of
from mlxrl.rollout.slots import Slots

JOIN = 0.125  # share of slots that are free before others are prefilled


def decode(model: Any, head: Head, requests: Sequence[Request], rules: Rules, **options: Any) -> list[Row]:
    """Decode every request until it stops, with the options of `Loop`; returns a row for each, in their order."""
    loop = Loop(model, head, requests, rules, **options)
    for _ in loop.run():
        pass
    return loop.ordered


class Loop:
    """Rows on their way from the queue through their places.

    ordered: every row, in the order of the requests; queue: those that have not begun, prompt by prompt;
    unread: what was drawn, and for whom, and not read back yet.
    """

    def __init__(
        self,
        model: Any,
        head: Head,
        requests: Sequence[Request],
        rules: Rules,
        *,
        text: Text | None = None,
        processors: Sequence[Processor] = (),
        max_rows: int = 32,
        prefill_chunk: int = 2048,
        compiled: bool = True,
        service: Service | None = None,
    ) -> None:
        """Take requests.

        Args:
            text: makes text of ids, special tokens written out, for stop strings.
            processors: mlx-lm's logits processors, called with a row's tokens [T] and logits [1, V].
            max_rows: rows that decode together.
            prefill_chunk: prompt tokens in one forward.
            compiled: whether a step may be compiled; False saves the compilation where little is decoded.
            service: how the model's rows are held; None finds out.
        """
        if max_rows < 1 or prefill_chunk < 1:
            counts = f"{max_rows} and {prefill_chunk}"
            raise ValueError(f"rollout: max_rows and prefill_chunk: wanted at least 1, got {counts}")
        self.model, self.head, self.compiled = model, head, compiled
        self.rules, self.text, self.processors = rules, text, processors
        self.chunk, self.service = prefill_chunk, service or service_of(model, head)
        self.slots = self.service in ("ragged", "slots")
        self.most = 1 if self.service == "single" else max_rows
        self.ordered = [self._row(request) for request in requests]
        self.hopeless = [row for row in self.ordered if row.stop is not None]
        places = {request.prompt: place for place, request in reversed(list(enumerate(requests)))}
        waiting = [row for row in self.ordered if row.stop is None]
        self.queue = deque(sorted(waiting, key=lambda row: places[row.prompt]))
        self.resumed: list[tuple[Row, Row]] = []
        self.filled: dict[Prompt, Filled | Continued] = {}
        self.common = beginning(row.prompt for row in waiting) if self.service == "ragged" else ()
        self.begun: Filled | None = None
        self.unread: list[tuple[list[Row | None], State]] = []
        self.batch = self._places(0)

    def _row(self, request: Request) -> Row:
        """A row with the tokens it may draw: a prompt that fills the context may draw none, and has ended."""
        limits = [self.rules.sampling.max_tokens, request.limit]
        if (context := context_of(self.model)) is not None:
            limits.append(context - len(request.prompt))
        limit = min(limit for limit in limits if limit is not None)
        held = self.rules.holds and self.slots  # others cannot be gone on with
        return Row(request, limit, stop="length" if limit <= 0 else None, held=held)

    def run(self) -> Generator[Row]:
        """Decode to the end; rows come out as they end."""
        with self.session():
            yield from self.decode()

    @contextmanager
    def session(self) -> Generator[None]:
        """The span in which rows may be decoded, and gone on with: the model's adapters are fused, caches are kept."""
        try:
            with fused(self.model) as products:
                self.subject = Subject(self.model, self.head, products, self.compiled)
                yield
        finally:
            self.batch, self.unread = self._places(0), []
            self.filled.clear()
            self.begun = None
            mx.clear_cache()  # the next pass needs buffers of other sizes

    def decode(self, between: Callable[[], None] | None = None) -> Generator[Row]:
        """Decode inside a session until no row draws; rows come out as they end.

        Rows may be left in the queue, where held rows have all the places.

        Args:
            between: called before each step; it may resume rows.
        """
        yield from self.hopeless
        self.hopeless = []
        while True:
            if between is not None:
                between()
            self.fill()
            launched = self.launch()
            if not launched and not self.unread:
                return
            unread, self.unread = self.unread, launched
            for rows, out in unread:
                yield from self.read(rows, out)
            if not self.queue:  # nobody waits for the places
                self.batch.drop()

    def _places(self, count: int) -> Batch:
        caches = Slots(count) if self.slots else Equals(count)
        return Batch(caches, self.rules, self.rules.looks_back or bool(self.processors))

    def resume(self, row: Row, request: Request) -> Row:
        """Go on behind a held row with a request whose prompt begins with the row's own tokens; returns the new row.

        Only what is new of the prompt is run, in one forward with what is new to others. A prompt that does not begin
        so is prefilled as a whole.
        """
        new = self._row(request)
        known = (*row.prompt, *row.ids)
        more = request.prompt[: len(known)] == known and new.start > row.cached
        if new.stop is None and row.held and row.ids and more:
            self.resumed.append((row, new))
        else:
            row.held = False
            if new.stop is None:
                self.queue.append(new)
        return new

    def fill(self) -> None:
        """Let resumed rows go on; give free places to rows from the queue, when enough are free."""
        if self.resumed:
            self._extend()
        taken = set(self.batch.taken())
        if not self.queue or (taken and not self.batch.caches.joins):
            return
        if not taken:
            self._open()
        free = [place for place in range(len(self.batch.rows)) if place not in taken]
        if not free or (self.batch.live() and len(free) < JOIN * len(self.batch.rows)):
            return
        joining = [self.queue.popleft() for _ in free[: len(self.queue)]]
        self._join(free[: len(joining)], joining)

    def _open(self) -> None:
        """Make places: for as many rows as may be, or for those of one length at the head of the queue."""
        count = min(self.most, len(self.queue))
        if not self.slots:
            length = self.queue[0].start
            chosen = [row for row in self.queue if row.start == length][: self.most]
            self.queue = deque(chosen + [row for row in self.queue if row not in chosen])
            count = len(chosen)
        if not self.slots or len(self.batch.rows) < count:
            self.batch = self._places(count)

    def _extend(self) -> None:
        """Feed resumed rows what is new to them, `chunk` tokens a forward, and let them draw."""
        pairs, self.resumed = self.resumed, []
        places = [self.batch.rows.index(row) for row, _ in pairs]
        rows = [new for _, new in pairs]
        held = [row.cached for row, _ in pairs]
        width = min(max(new.start - length for new, length in zip(rows, held, strict=True)), self.chunk)
        self.batch.room(max(row.start for row in rows) + width + 1)
        logits: dict[int, mx.array] = {}
        assert isinstance(self.batch.caches, Slots)
        while left := [i for i, row in enumerate(rows) if held[i] < row.start]:
            counts = {i: min(rows[i].start - held[i], self.chunk) for i in left}
            left.sort(key=counts.__getitem__)  # of like length together, as many as fill a chunk, padding included
            left = [i for number, i in enumerate(left) if not number or (number + 1) * counts[i] <= self.chunk]
            if self.service != "ragged":  # those that are fed as many tokens as the first
                left = [i for i in left if counts[i] == counts[left[0]]]
            fed = [rows[i].prompt[held[i] : held[i] + self.chunk] for i in left]
            ends = self.subject.extend(self.batch.caches, [places[i] for i in left], [held[i] for i in left], fed)
            for i, tokens, end in zip(left, fed, ends, strict=True):
                held[i] += len(tokens)
                logits[i] = end
        out = self.batch.begin(places, rows, mx.stack([logits[i] for i in range(len(rows))]), self.processors)
        self.unread.append((list(rows), out))

    def _join(self, places: list[int], rows: list[Row]) -> None:
        """Prefill the distinct prompts of rows, give the rows their places, and draw their first tokens."""
        self.batch.room(max(row.start for row in rows) + 2)
        logits: dict[Prompt, mx.array] = {}
        for prompt, filled in self._filled(dict.fromkeys(row.prompt for row in rows)):
            taken = [place for place, row in zip(places, rows, strict=True) if row.prompt == prompt]
            self.batch.caches.place(taken, filled)
            logits[prompt] = filled.logits
        ends = mx.concatenate([logits[row.prompt] for row in rows])
        self.unread.append((list(rows), self.batch.begin(places, rows, ends, self.processors)))

    def _filled(self, prompts: Iterable[Prompt]) -> Iterator[tuple[Prompt, Filled | Continued]]:
        """Prompts that have been run, or are run now; those that others wait for are kept."""
        waiting = {row.prompt for row in self.queue}
        before = [prompt for prompt in prompts if prompt in self.filled]
        fresh = [prompt for prompt in prompts if prompt not in self.filled]
        for prompt in before:
            yield prompt, self.filled[prompt] if prompt in waiting else self.filled.pop(prompt)
        for prompt, filled in self._run(fresh):
            if prompt in waiting:
                self.filled[prompt] = filled
            yield prompt, filled

    def _run(self, prompts: Sequence[Prompt]) -> Iterator[tuple[Prompt, Filled | Continued]]:
        """Run prompts, together where the model can, from behind what they all begin with."""
        known = len(self.common)
        sharing = [prompt for prompt in prompts if known and len(prompt) > known and prompt[:known] == self.common]
        others = [prompt for prompt in prompts if prompt not in set(sharing)]
        for batch in batches(others, self.chunk) if self.service == "ragged" else ([prompt] for prompt in others):
            yield from zip(batch, self.subject.prefill(batch, self.chunk), strict=True)
        for batch in batches(sharing, self.chunk, known):
            if self.begun is None:
                (self.begun,) = self.subject.prefill([self.common], self.chunk)
            yield from zip(batch, continued(self.subject, self.begun, batch, self.chunk), strict=True)

    def launch(self) -> list[tuple[list[Row | None], State]]:
        """Enqueue a step, if a row wants a token."""
        batch, longest = self.batch, 0
        for row in batch.rows:
            if row is not None and row.stop is None and row.drawn < row.limit:
                row.drawn += 1
                longest = max(longest, row.start + row.drawn)
        if not longest:
            return []
        batch.room(longest + 1)  # the history also takes what is drawn
        batch.state, out = self.subject.step(batch.caches, batch.state, self.rules, self.processors)
        mx.async_eval(out, batch.state, batch.caches.arrays)
        return [(list(batch.rows), out)]

    def read(self, rows: Sequence[Row | None], out: State) -> list[Row]:
        """Read back what was drawn; returns the rows that it ended."""
        read: dict[str, Any] = {name: array.tolist() for name, array in out.items()}
        more = len(read) > 2  # than tokens and log-probs
        ended: list[Row] = []
        for place, (row, token, logprob) in enumerate(zip(rows, read["tokens"], read["logprobs"], strict=True)):
            if row is None or row.stop is not None:
                continue
            if more and isfinite(logprob):
                row.note({name: values[place] for name, values in read.items()})
            if row.take(token, logprob, self.rules, self.text):
                ended.append(row)
        if any(row.strings(self.rules) for row in ended):
            self.batch.end()
        return ended
