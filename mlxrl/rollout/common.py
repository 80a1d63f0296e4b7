"""What all prompts of a rollout begin with, as a system prompt or worked examples: run once, and gone on from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import mlx.core as mx

from mlxrl.rollout.engine import Subject
from mlxrl.rollout.layers import Layer
from mlxrl.rollout.prefill import Filled, Prompt
from mlxrl.rollout.slots import Slots

WORTH = 256  # tokens that must be saved for a forward more


def beginning(prompts: Iterable[Prompt]) -> Prompt:
    """The tokens that different prompts all begin with, one of each left out; none where they save too little."""
    distinct = list(dict.fromkeys(prompts))
    shortest = min(distinct, key=len, default=())
    columns = zip(*(prompt[: len(shortest) - 1] for prompt in distinct), strict=True)
    common = shortest[: sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))]
    return common if len(common) * (len(distinct) - 1) >= WORTH else ()


@dataclass(frozen=True, slots=True)
class Continued:
    """A prompt whose beginning was run before: like `Filled`, with its caches in a slot among others."""

    slots: Slots
    number: int
    length: int
    logits: mx.array

    def layers(self) -> tuple[Layer, ...]:
        """What each layer keeps."""
        return self.slots.layers

    def arrays(self, layers: Iterable[Layer]) -> list[mx.array]:
        """Its arrays in a row, [1, ...] each."""
        grown = zip(self.slots.arrays, (grows for layer in layers for grows in layer.grows()), strict=True)
        rows = [(array[self.number : self.number + 1], grows) for array, grows in grown]
        return [row[:, :, : self.length] if grows else row for row, grows in rows]


def continued(subject: Subject, begun: Filled, prompts: Sequence[Prompt], chunk: int) -> list[Continued]:
    """Run prompts from behind the beginning that they share, all of them together, `chunk` tokens a forward."""
    slots, places = Slots(len(prompts)), range(len(prompts))
    slots.fit(max(map(len, prompts)) + 1)
    slots.place(places, begun)
    held, ends = [begun.length for _ in prompts], {}
    while left := [i for i in places if held[i] < len(prompts[i])]:
        width = max(1, chunk // len(left))
        fed = [prompts[i][held[i] : held[i] + width] for i in left]
        for i, tokens, end in zip(left, fed, subject.extend(slots, left, [held[i] for i in left], fed), strict=True):
            held[i] += len(tokens)
            ends[i] = end[None]
    return [Continued(slots, i, len(prompt), ends[i]) for i, prompt in enumerate(prompts)]
