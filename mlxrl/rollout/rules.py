"""What a row may draw, and when it ends: penalties, bans, the thinking budget, stop tokens.

The state of B rows is a dict of arrays, so that a step can be compiled:
    tokens [B] int32, the last drawn; lengths [B] int32, tokens in the caches; keys [B, 2] uint32;
    drawn, left [B] int32, tokens drawn and still to be drawn; done [B] bool.
    history [B, C] int32, prompt and drawn tokens, where something looks back at them;
    open [B] bool, spent, closing [B] int32, where thinking has a budget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import mlx.core as mx

from mlxrl.rollout.sampling import sample
from mlxrl.settings import Sampling

State: TypeAlias = dict[str, mx.array]
Processor: TypeAlias = Callable[[mx.array, mx.array], mx.array]


@dataclass(frozen=True, slots=True)
class Rules:
    """How rows draw and end.

    stops: ids that end a row; opening, closing: the ids that begin and end a block of thinking;
    holds: whether rows that have ended may be gone on with, so that their caches must not change.
    """

    sampling: Sampling
    stops: tuple[int, ...] = ()
    opening: tuple[int, ...] = ()
    closing: tuple[int, ...] = ()
    holds: bool = False

    @property
    def thinks(self) -> bool:
        """Whether thinking has a budget."""
        return self.sampling.thinking_budget is not None and bool(self.closing)

    @property
    def looks_back(self) -> bool:
        """Whether something needs the history."""
        return self.sampling.penalized or self.thinks

    def opened_by(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt ends inside a block of thinking."""
        return bool(self.opening) and _last(prompt, self.opening) > _last(prompt, self.closing)


def _last(ids: Sequence[int], wanted: Sequence[int]) -> int:
    """Where `wanted` stands last, -1 where it does not."""
    places = range(len(ids) - len(wanted), -1, -1)
    return next((place for place in places if tuple(ids[place : place + len(wanted)]) == tuple(wanted)), -1)


def blank(rows: int, rules: Rules, history: int | None) -> State:
    """The state of rows that have nothing to do; `history` is its room in tokens, None for none."""
    state = {name: mx.zeros((rows,), mx.int32) for name in ("tokens", "lengths", "drawn", "left")}
    state["keys"] = mx.zeros((rows, 2), mx.uint32)
    state["done"] = mx.ones((rows,), mx.bool_)
    if history is not None:
        state["history"] = mx.zeros((rows, history), mx.int32)
    if rules.thinks:
        state |= {"open": mx.zeros((rows,), mx.bool_), "spent": mx.zeros((rows,), mx.int32)}
        state["closing"] = mx.full((rows,), -1, mx.int32)
    return state


def draw(logits: mx.array, state: State, rules: Rules, processors: Sequence[Processor] = ()) -> tuple[State, State]:
    """Draw every row's next token from logits [B, V].

    Returns:
        the state after it, and what the host reads: tokens, logprobs [B]; truncated [B] with filters on; forced [B]
        with a thinking budget; ids, candidates [B, K] where the likeliest tokens were asked for.
    """
    state = dict(state)
    forced = _forced(state, rules) if rules.thinks else None
    scores = _scores(logits, state, rules, processors)
    sampled = sample(logits, state["keys"], rules.sampling, scores=scores, forced=forced)
    out = {"tokens": sampled.tokens, "logprobs": sampled.logprobs}
    if sampled.truncated is not None:
        out["truncated"] = sampled.truncated
    if sampled.candidates is not None:
        out["ids"], out["candidates"] = sampled.candidates
    if forced is not None:
        out["forced"] = forced >= 0
        _think(state, sampled.tokens, out["forced"], rules)
    if "history" in state:
        place = state["lengths"][:, None]
        state["history"] = mx.put_along_axis(state["history"], place, sampled.tokens[:, None], axis=1)
    live = (~state["done"]).astype(mx.int32)
    state |= {"tokens": sampled.tokens, "keys": sampled.keys}
    state |= {"drawn": state["drawn"] + live, "left": state["left"] - live}
    over = (state["left"] <= 0) | ~mx.isfinite(sampled.logprobs)
    state["done"] = state["done"] | over | _among(sampled.tokens, rules.stops)
    return state, out


def _among(tokens: mx.array, ids: Sequence[int]) -> mx.array:
    return (tokens[:, None] == mx.array(list(ids), mx.int32)).any(axis=-1)


def _scores(logits: mx.array, state: State, rules: Rules, processors: Sequence[Processor]) -> mx.array | None:
    """The logits to draw from where they are not the model's own: mlx-lm's penalties, hooks, then bans."""
    scores = logits.astype(mx.float32)
    if processors:
        scores = _processed(scores, state, processors)
    if rules.sampling.penalized:
        scores = _penalised(scores, state, rules.sampling)
    if rules.sampling.min_tokens and rules.stops:
        early = state["drawn"] < rules.sampling.min_tokens
        banned = _among(mx.arange(logits.shape[-1]), rules.stops)
        scores = mx.where(early[:, None] & banned, -mx.inf, scores)
    elif not processors and not rules.sampling.penalized:
        return None
    return scores


def _processed(scores: mx.array, state: State, processors: Sequence[Processor]) -> mx.array:
    """Call mlx-lm's processors as mlx-lm does, with one row's tokens [T] and its logits [1, V]."""
    rows = [scores[row : row + 1] for row in range(len(scores))]
    lengths: Any = state["lengths"].tolist()
    for row, length in enumerate(lengths):
        for processor in processors:
            rows[row] = processor(state["history"][row, :length], rows[row])
    return mx.concatenate(rows)


def _penalised(scores: mx.array, state: State, sampling: Sampling) -> mx.array:
    """Penalties on the tokens among the last `penalty_context`, the prompt's included.

    repetition (arXiv 1909.05858): a logit above 0 is divided, one below 0 multiplied; presence: subtracted once;
    frequency: subtracted once for every time.
    """
    ids, valid = recent(state, sampling.penalty_context)
    if (factor := sampling.repetition_penalty) != 1:
        chosen = mx.take_along_axis(scores, ids, axis=-1)
        scores = mx.put_along_axis(scores, ids, mx.where(chosen < 0, chosen * factor, chosen / factor), axis=-1)
    if sampling.presence_penalty:
        chosen = mx.take_along_axis(scores, ids, axis=-1) - sampling.presence_penalty
        scores = mx.put_along_axis(scores, ids, chosen, axis=-1)
    if sampling.frequency_penalty:
        rows = mx.arange(len(scores))[:, None]
        scores = scores.at[rows, ids].subtract(sampling.frequency_penalty * valid)
    return scores


def recent(state: State, count: int) -> tuple[mx.array, mx.array]:
    """A row's last tokens [B, count], the latest first, and which of them exist; others repeat the first token."""
    places = state["lengths"][:, None] - 1 - mx.arange(count)
    return mx.take_along_axis(state["history"], mx.maximum(places, 0), axis=1), places >= 0


def _forced(state: State, rules: Rules) -> mx.array:
    """The token that each row must take, -1 for none: the closing ids, once the budget is spent."""
    budget = rules.sampling.thinking_budget
    assert budget is not None
    begins = state["open"] & (state["spent"] >= budget) & (state["closing"] < 0)
    state["closing"] = mx.where(begins, 0, state["closing"])
    ids = mx.array(rules.closing, mx.int32)[mx.maximum(state["closing"], 0)]
    return mx.where(state["closing"] >= 0, ids, -1)


def _think(state: State, tokens: mx.array, forced: mx.array, rules: Rules) -> None:
    """Follow blocks of thinking as they open and close. All blocks of a completion share the budget."""
    state["spent"] = state["spent"] + (state["open"] & ~forced).astype(mx.int32)
    closing = mx.where(forced, state["closing"] + 1, -1)
    closes = _ends_with(state, tokens, rules.closing)
    opens = _ends_with(state, tokens, rules.opening) if rules.opening else mx.zeros_like(closes)
    state["closing"] = mx.where(closing >= len(rules.closing), -1, closing)
    state["open"] = (state["open"] & ~closes) | opens


def _ends_with(state: State, tokens: mx.array, ids: Sequence[int]) -> mx.array:
    """Whether each row's tokens, the one just drawn included, end with `ids`."""
    ends = tokens == ids[-1]
    if len(ids) > 1:
        before, valid = recent(state, len(ids) - 1)
        ends = ends & (valid & (before == mx.array(list(ids[-2::-1]), mx.int32))).all(axis=-1)
    return ends
