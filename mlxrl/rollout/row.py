"""A row: what it was asked, what it has drawn, and why it ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, TypeAlias

import mlx.core as mx

from mlxrl.rollout.rules import Rules
from mlxrl.types import Stop

Text: TypeAlias = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Request:
    """A row to decode: the ids of its prompt, its key [2] uint32, and the tokens it may draw, None for the rules'.

    stop_strings: texts that end it besides those of the rules.
    """

    prompt: tuple[int, ...]
    key: mx.array
    limit: int | None = None
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("rollout: a prompt has no tokens")


@dataclass(slots=True, eq=False)
class Row:
    """What a request was given: ids with the stop token, float32 log-probs in nats, and why it ended.

    forced, truncated, candidates, candidate_logprobs: see `Turn`, filled where they apply.
    limit: tokens it may draw; drawn: tokens drawn for it, those included that are not read back yet;
    start: tokens of its prompt; held: whether it keeps its place when it has ended;
    ahead: whether its caches have taken the last token, because the graph did not know that it ended the row.
    """

    request: Request
    limit: int
    ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    stop: Stop | None = None
    forced: list[int] = field(default_factory=list[int])
    truncated: list[float] = field(default_factory=list[float])
    candidates: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    candidate_logprobs: list[tuple[float, ...]] = field(default_factory=list[tuple[float, ...]])
    drawn: int = 0
    held: bool = False
    ahead: bool = False
    start: int = field(init=False)

    def __post_init__(self) -> None:
        self.start = len(self.request.prompt)

    @property
    def prompt(self) -> tuple[int, ...]:
        """Ids of the prompt."""
        return self.request.prompt

    @property
    def cached(self) -> int:
        """Tokens in its caches, once it has ended: all but the last, which was not fed."""
        return self.start + len(self.ids) - (not self.ahead)

    def take(self, token: int, logprob: float, rules: Rules, text: Text | None) -> bool:
        """Take the next token; returns whether it ends the row. One of a log-prob that is not finite is not kept."""
        if not isfinite(logprob):
            self.stop = "error"
            return True
        self.ids.append(token)
        self.logprobs.append(logprob)
        if token in rules.stops:
            self.stop = "eos"
        elif (strings := self.strings(rules)) and self._says_stop(strings, rules, text):
            self.stop, self.ahead = "eos", self.drawn > len(self.ids)
        elif len(self.ids) >= self.limit:
            self.stop = "length"
        return self.stop is not None

    def note(self, read: Mapping[str, Any]) -> None:
        """Keep what else was read of the token that is taken next."""
        if read.get("forced"):
            self.forced.append(len(self.ids))
        if "truncated" in read:
            self.truncated.append(read["truncated"])
        if "ids" in read:
            self.candidates.append(tuple(read["ids"]))
            self.candidate_logprobs.append(tuple(read["candidates"]))

    def strings(self, rules: Rules) -> tuple[str, ...]:
        """The texts that end it."""
        return (*rules.sampling.stop_strings, *self.request.stop_strings)

    def _says_stop(self, strings: Sequence[str], rules: Rules, text: Text | None) -> bool:
        """Whether a stop string is complete, read from as many last tokens as it can spread over."""
        if len(self.ids) <= rules.sampling.min_tokens:
            return False
        assert text is not None, "stop strings need a text of the ids"
        reach = 4 * max(map(len, strings)) + 4  # a character has up to four bytes, each perhaps a token
        tail = text(self.ids[-reach:])
        if not any(string in tail for string in strings):
            return False
        before = text(self.ids[-reach:-1])  # one that was complete before tokens could end the row does not count
        return any(tail.count(string) > before.count(string) for string in strings)
