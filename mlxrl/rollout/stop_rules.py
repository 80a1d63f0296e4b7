"""What a sequence may draw, and when it ends: penalties, bans, the thinking budget, stop tokens. Letters: B rows."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import mlx.core as mx

from mlxrl.errors import UserError
from mlxrl.rollout.draw import Drawn, draw
from mlxrl.settings import Sampling

Processor: TypeAlias = abc.Callable[[mx.array, mx.array], mx.array]


@dataclass(frozen=True, slots=True)
class StepRules:
    """Sampling and stop settings that the sequences of a batch share.

    sampling: how they draw, without what each has of its own, as `max_tokens`. stop_ids: ids that end a sequence.
    think_start, think_end: ids around a block of thinking, none where the tokenizer has no such tokens.
    freeze: whether the states of sequences that are done must not change, because they may be extended.
    """

    sampling: Sampling
    stop_ids: tuple[int, ...] = ()
    think_start: tuple[int, ...] = ()
    think_end: tuple[int, ...] = ()
    freeze: bool = False

    def opened_by(self, prompt: tuple[int, ...]) -> bool:
        """Whether a prompt ends inside a block of thinking: one that a reply left open ends with that."""
        for place in reversed(range(len(prompt)) if self.think_end else ()):
            if prompt[place] in self.stop_ids:
                return False
            for ids, opens in ((self.think_end, False), (self.think_start, True)):
                if ids and prompt[place : place + len(ids)] == ids:
                    return opens
        return False


def rules_of(
    tokenizer: Any, sampling: Sampling, stop_ids: tuple[int, ...] | None = None, freeze: bool = False
) -> StepRules:
    """How sequences draw and end with a tokenizer; any of its eos ids is a stop where none are given."""
    ids = tuple(sorted(tokenizer.eos_token_ids)) if stop_ids is None else stop_ids
    rules = StepRules(_shared(sampling), ids, freeze=freeze)
    if not tokenizer.has_thinking:
        if sampling.thinking_budget is None:
            return rules
        why = "the tokenizer has no tokens that begin and end thinking; leave it out"
        raise UserError("sampling", "thinking_budget", why)
    return replace(rules, think_start=tuple(tokenizer.think_start_tokens), think_end=tuple(tokenizer.think_end_tokens))


@lru_cache
def _shared(sampling: Sampling) -> Sampling:
    return replace(sampling, max_tokens=2**31 - 1, stop_strings=(), thinking=None)


class Thinking(NamedTuple):
    """Where thinking has a budget. open: [B] bool, inside a block; spent: [B] int32, tokens of thinking; closing:
    [B] int32, which token of the end of a block is forced next, -1 for none."""

    open: mx.array
    spent: mx.array
    closing: mx.array


class State(NamedTuple):
    """What a step knows of B rows.

    tokens: [B] int32, the last drawn; lengths: [B] int32, tokens in the caches; keys: [B, 2] uint32;
    drawn, left: [B] int32, tokens drawn and still to be drawn; done: [B] bool;
    history: [B, C] int32, prompt and drawn tokens, where something looks back at them.
    """

    tokens: mx.array
    lengths: mx.array
    keys: mx.array
    drawn: mx.array
    left: mx.array
    done: mx.array
    history: mx.array | None = None
    thinking: Thinking | None = None


def advance(
    logits: mx.array, state: State, rules: StepRules, processors: abc.Sequence[Processor] = ()
) -> tuple[State, Drawn]:
    """Draw every row's next token from logits [B, V]; returns the state after it, and what was drawn."""
    thinking, forced = _forced(state.thinking, rules) if state.thinking else (None, None)
    scores = _scores(logits, state, rules, processors)
    drawn, keys = draw(logits, state.keys, rules.sampling, scores=scores, forced=forced)
    if thinking is not None and forced is not None:
        drawn = drawn._replace(forced=forced >= 0)
        thinking = _followed(thinking, state, drawn.tokens, forced >= 0, rules)
    history = state.history
    if history is not None:
        history = mx.put_along_axis(history, state.lengths[:, None], drawn.tokens[:, None], axis=1)
    live = (~state.done).astype(mx.int32)
    left = state.left - live
    over = (left <= 0) | ~mx.isfinite(drawn.logprobs)
    done = state.done | over | _among(drawn.tokens, rules.stop_ids)
    return State(drawn.tokens, state.lengths, keys, state.drawn + live, left, done, history, thinking), drawn


def _among(tokens: mx.array, ids: abc.Sequence[int]) -> mx.array:
    return (tokens[:, None] == mx.array(list(ids), mx.int32)).any(axis=-1)


def _scores(logits: mx.array, state: State, rules: StepRules, processors: abc.Sequence[Processor]) -> mx.array | None:
    """The logits to draw from where they are not the model's own: mlx-lm's penalties, processors, then bans."""
    bans = rules.sampling.min_tokens and rules.stop_ids
    if not (processors or rules.sampling.penalized or bans):
        return None
    scores = logits.astype(mx.float32)
    if processors:
        scores = _processed(scores, state, processors)
    if rules.sampling.penalized:
        scores = _penalized(scores, state, rules.sampling)
    if bans:
        early = state.drawn < rules.sampling.min_tokens
        banned = _among(mx.arange(logits.shape[-1]), rules.stop_ids)
        scores = mx.where(early[:, None] & banned, -mx.inf, scores)
    return scores


def _processed(scores: mx.array, state: State, processors: abc.Sequence[Processor]) -> mx.array:
    """What processors make of one row's logits [1, V], given its tokens [T]."""
    assert state.history is not None
    rows = [scores[row : row + 1] for row in range(len(scores))]
    lengths: Any = state.lengths.tolist()
    for row, length in enumerate(lengths):
        for processor in processors:
            rows[row] = processor(state.history[row, :length], rows[row])
    return mx.concatenate(rows)


def _penalized(scores: mx.array, state: State, sampling: Sampling) -> mx.array:
    """Repetition (arXiv 1909.05858), presence and frequency penalties on the last `penalty_context` tokens."""
    ids, valid = _recent(state, sampling.penalty_context)
    if (factor := sampling.repetition_penalty) != 1:
        own = mx.take_along_axis(scores, ids, axis=-1)
        scores = mx.put_along_axis(scores, ids, mx.where(own < 0, own * factor, own / factor), axis=-1)
    if sampling.presence_penalty:
        own = mx.take_along_axis(scores, ids, axis=-1) - sampling.presence_penalty
        scores = mx.put_along_axis(scores, ids, own, axis=-1)
    if sampling.frequency_penalty:
        rows = mx.arange(len(scores))[:, None]
        scores = scores.at[rows, ids].subtract(sampling.frequency_penalty * valid)
    return scores


def _recent(state: State, count: int) -> tuple[mx.array, mx.array]:
    """A row's last tokens [B, count], the latest first, and which of them exist; others repeat the first token."""
    assert state.history is not None
    positions = state.lengths[:, None] - 1 - mx.arange(count)
    return mx.take_along_axis(state.history, mx.maximum(positions, 0), axis=1), positions >= 0


def _forced(thinking: Thinking, rules: StepRules) -> tuple[Thinking, mx.array]:
    """The token that each row must take, -1 for none: those that end thinking, once the budget is spent."""
    budget = rules.sampling.thinking_budget
    assert budget is not None
    begins = thinking.open & (thinking.spent >= budget) & (thinking.closing < 0)
    closing = mx.where(begins, 0, thinking.closing)
    ids = mx.array(rules.think_end, mx.int32)[mx.maximum(closing, 0)]
    return thinking._replace(closing=closing), mx.where(closing >= 0, ids, -1)


def _followed(thinking: Thinking, state: State, tokens: mx.array, forced: mx.array, rules: StepRules) -> Thinking:
    """Follow blocks of thinking as they open and close. All blocks of a completion share the budget."""
    spent = thinking.spent + (thinking.open & ~forced).astype(mx.int32)
    closing = mx.where(forced, thinking.closing + 1, -1)
    closes = _ends_with(state, tokens, rules.think_end)
    opens = _ends_with(state, tokens, rules.think_start) if rules.think_start else mx.zeros_like(closes)
    return Thinking((thinking.open & ~closes) | opens, spent, mx.where(closing >= len(rules.think_end), -1, closing))


def _ends_with(state: State, tokens: mx.array, ids: abc.Sequence[int]) -> mx.array:
    """Whether each row's tokens, the one just drawn included, end with `ids`."""
    ends = tokens == ids[-1]
    if len(ids) > 1:
        before, valid = _recent(state, len(ids) - 1)
        ends = ends & (valid & (before == mx.array(list(ids[-2::-1]), mx.int32))).all(axis=-1)
    return ends
