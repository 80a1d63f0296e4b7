"""Sequences: what is requested, what has been drawn for it, and why it ended."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Literal, TypeAlias

import mlx.core as mx

from mlxrl.errors import UserError
from mlxrl.rollout.stop_rules import StepRules
from mlxrl.settings import Sampling
from mlxrl.types import TokenDetails

Prompt: TypeAlias = tuple[int, ...]
End: TypeAlias = Literal["eos", "length", "error", "cancelled"]


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A sequence to decode.

    prompt: its ids, at least one. key: [2] uint32, from which its draws are made.
    sampling: how it draws, and at most how many tokens; limit: the same where it is fewer.
    stop_ids: ids that end it, None for the tokenizer's; stop_strings: texts that do, besides those of the sampling.
    keep: whether its slot is kept when it has ended, so that it can be extended.
    owner: what the caller knows it by.
    """

    prompt: Prompt
    key: mx.array
    sampling: Sampling
    limit: int | None = None
    stop_ids: tuple[int, ...] | None = None
    stop_strings: tuple[str, ...] = ()
    keep: bool = False
    owner: Any = None

    def __post_init__(self) -> None:
        if not self.prompt:
            raise UserError("request", "prompt", "wanted at least one token, got no tokens")


@dataclass(slots=True, eq=False)
class Sequence:
    """A request under way.

    limit: tokens it may draw; with none it has finished before it started. text: makes text of ids, special tokens
    written out. keeps_slot: whether it keeps its slot when it has ended: then it is parked.
    tokens: those drawn, the stop token included; logprobs: float32, nats; forced, filtered_mass, top_ids,
    top_logprobs: see `TokenDetails`, filled where they apply. stop: why it ended, None while it is under way.
    num_drawn: tokens drawn for it, those not read back yet included. ahead: whether the caches hold its last token
    too, because a stop string, which the compiled step does not see, ended it. thinking: whether it is in a block of
    thinking, where no stop string counts; followed where there are some.
    """

    request: Request
    rules: StepRules
    limit: int
    text: abc.Callable[[abc.Sequence[int]], str]
    keeps_slot: bool
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    forced: list[int] = field(default_factory=list[int])
    filtered_mass: list[float] = field(default_factory=list[float])
    top_ids: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    top_logprobs: list[tuple[float, ...]] = field(default_factory=list[tuple[float, ...]])
    stop: End | None = None
    num_drawn: int = 0
    ahead: bool = False
    stop_strings: tuple[str, ...] = field(init=False)
    thinking: bool = field(init=False)

    def __post_init__(self) -> None:
        self.stop_strings = (*self.request.sampling.stop_strings, *self.request.stop_strings)
        self.thinking = bool(self.stop_strings) and self.rules.opened_by(self.prompt)
        self.stop = "length" if self.limit <= 0 else None

    @property
    def prompt(self) -> Prompt:
        return self.request.prompt

    @property
    def length(self) -> int:
        """Tokens of its prompt, and those drawn for it."""
        return len(self.request.prompt) + self.num_drawn

    @property
    def num_cached(self) -> int:
        """Tokens in its caches, once it has ended: all but the last, which was not fed."""
        return len(self.prompt) + len(self.tokens) - (not self.ahead)

    @property
    def details(self) -> TokenDetails:
        top = (tuple(self.top_ids), tuple(self.top_logprobs)) if self.request.sampling.num_top else (None, None)
        return TokenDetails(tuple(self.forced), tuple(self.filtered_mass) or None, *top)

    def take(self, read: Any, row: int) -> bool:
        """Take the next token, a row of `Drawn` as lists, unless its log-prob is not finite; whether it ended."""
        token, logprob = read.tokens[row], read.logprobs[row]
        if not isfinite(logprob):
            self.stop, self.keeps_slot = "error", False
            return True
        if read.forced is not None and read.forced[row]:
            self.forced.append(len(self.tokens))
        if read.filtered_mass is not None:
            self.filtered_mass.append(read.filtered_mass[row])
        if read.top_ids is not None:
            self.top_ids.append(tuple(read.top_ids[row]))
            self.top_logprobs.append(tuple(read.top_logprobs[row]))
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in self.rules.stop_ids:
            self.stop = "eos"
        elif self.stop_strings and self._completes_stop_string():
            self.stop, self.ahead = "eos", self.num_drawn > len(self.tokens)
        elif len(self.tokens) >= self.limit:
            self.stop = "length"
        return self.stop is not None

    def _completes_stop_string(self) -> bool:
        """Whether a stop string is complete, read from as many last tokens as it can spread over.

        One inside a block of thinking does not count; a mark that begins or ends the block does.
        """
        inside, self.thinking = self.thinking, self._thinks()
        if (inside and self.thinking) or len(self.tokens) <= self.request.sampling.min_tokens:
            return False
        reach = 4 * max(map(len, self.stop_strings)) + 4  # a character has up to four bytes, each perhaps a token
        tail = self.text(self.tokens[-reach:])
        if not any(string in tail for string in self.stop_strings):
            return False
        before = self.text(self.tokens[-reach:-1])  # one that was complete before tokens could end it does not count
        return any(tail.count(string) > before.count(string) for string in self.stop_strings)

    def _thinks(self) -> bool:
        """Whether the last token leaves it inside a block of thinking."""
        for ids, opens in ((self.rules.think_end, False), (self.rules.think_start, True)):
            if ids and tuple(self.tokens[-len(ids) :]) == ids:
                return opens
        return self.thinking
