"""The rows that decode together: who they are, their caches, and their state."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlxrl.policy.room import capacity_for
from mlxrl.rollout.engine import Caches
from mlxrl.rollout.row import Row
from mlxrl.rollout.rules import Processor, Rules, State, blank, draw

DEAD = 0.25  # share of dead rows at which they are dropped


class Batch:
    """A place for each row that decodes: rows [B], None for nobody; caches; state, see `rules`.

    A row that has ended leaves its place to others, unless it is held, to be gone on with.
    """

    def __init__(self, caches: Caches, rules: Rules, looks_back: bool) -> None:
        self.rules, self.caches = rules, caches
        self.rows: list[Row | None] = [None] * caches.rows
        self.state = blank(caches.rows, rules, 0 if looks_back else None)

    def live(self) -> list[int]:
        """Places of rows that draw."""
        return [place for place, row in enumerate(self.rows) if row is not None and row.stop is None]

    def taken(self) -> list[int]:
        """Places of rows that draw or are held."""
        return [place for place, row in enumerate(self.rows) if row is not None and (row.stop is None or row.held)]

    def room(self, tokens: int) -> None:
        """Make room for rows of so many tokens."""
        self.caches.fit(tokens)
        if "history" in self.state and (more := capacity_for(tokens) - self.state["history"].shape[1]) > 0:
            self.state["history"] = mx.pad(self.state["history"], [(0, 0), (0, more)])

    def begin(
        self, places: Sequence[int], rows: Sequence[Row], logits: mx.array, processors: Sequence[Processor]
    ) -> State:
        """Let rows whose prompts are in the caches draw first tokens, from logits [n, V]; returns what is read."""
        fresh, out = draw(logits, self._fresh(rows), self.rules, processors)
        order = list(range(len(self.rows)))
        for number, (place, row) in enumerate(zip(places, rows, strict=True)):
            order[place] = len(order) + number
            self.rows[place] = row
            row.drawn = 1
        index = mx.array(order)
        self.state = {name: mx.concatenate([self.state[name], fresh[name]])[index] for name in self.state}
        mx.async_eval(out, self.state)
        return out

    def _fresh(self, rows: Sequence[Row]) -> State:
        history = self.state["history"].shape[1] if "history" in self.state else None
        state = blank(len(rows), self.rules, history)
        state |= {"lengths": mx.array([row.start for row in rows], mx.int32), "done": ~state["done"]}
        state |= {"left": mx.array([row.limit for row in rows], mx.int32)}
        state["keys"] = mx.stack([row.request.key for row in rows])
        if history is not None:
            state["history"] = mx.array([[*row.prompt, *[0] * (history - row.start)] for row in rows], mx.int32)
        if self.rules.thinks:
            state["open"] = mx.array([self.rules.opened_by(row.prompt) for row in rows])
        return state

    def end(self) -> None:
        """Tell the graph of rows that have ended for a reason it does not see."""
        over = mx.array([row is None or row.stop is not None for row in self.rows])
        self.state = {**self.state, "done": self.state["done"] | over}

    def drop(self) -> None:
        """Drop dead rows, once they are a quarter; sizes follow one ladder, so that shapes come back."""
        taken, size = self.taken(), len(self.rows)
        while (smaller := int(size * (1 - DEAD))) >= max(len(taken), 1):
            size = smaller
        if not taken or size == len(self.rows):
            return
        dead = [place for place in range(len(self.rows)) if place not in taken]
        rows = [self.rows[place] for place in taken]
        places = taken + dead[: size - len(taken)]
        self.rows = [*rows, *[None] * (size - len(taken))]
        self.caches.keep(places, max(row.start + row.drawn for row in rows if row is not None) + 1)
        index = mx.array(places)
        self.state = {name: array[index] for name, array in self.state.items()}
        kept = mx.arange(size) < len(taken)
        self.state["lengths"] = mx.where(kept, self.state["lengths"], 0)  # within the room that is left
