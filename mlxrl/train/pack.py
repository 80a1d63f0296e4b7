"""From scored groups to the minibatches of one optimizer step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

import mlx.core as mx
import numpy as np

from mlxrl.algo.probe import candidates_kept
from mlxrl.types import Algorithm, Group, Minibatch, Pack, Totals, Trajectory, Turn

TOKENS_PER_PASS = 2048
PASS = 48  # tokens that a forward and backward of any size costs beyond its own, as measured
SHARE_FROM = 128  # prompt tokens saved, below which a pass of its own costs more than the repeated prompt


@dataclass(frozen=True, slots=True)
class Row:
    """A trajectory as one line of tokens: [T] ids, for each whether the model chose it, its advantage, its log-prob.

    number: the trajectory's, counted over all groups. candidates: [T, K] ids, None where nothing compares them.
    """

    number: int
    prompt: tuple[int, ...]
    tokens: np.ndarray
    mask: np.ndarray
    advantage: np.ndarray
    rollout: np.ndarray
    temperature: float
    candidates: np.ndarray | None = None

    @property
    def length(self) -> int:
        return len(self.tokens)


def pack(
    groups: Sequence[Group],
    algo: Algorithm,
    *,
    tokens_per_pass: int | None = None,
    max_tokens_per_row: int | None = None,
) -> Pack:
    """Credit the trajectories, drop rows without signal, and lay the others out in minibatches.

    A group's rows share their prompt as the prefix where that saves enough; other rows stand with their prompt,
    and P = 0. Rows of like length go together, where the padding that this saves outweighs a further pass. The
    totals count every row, dropped ones too: neither the size of a pass nor the order of rows changes the gradient.
    A token that was forced on the model is read like an observation: it has no mask and no advantage, and no
    denominator counts it.

    Args:
        tokens_per_pass: padded tokens of a forward at most, the prefix included; one row may exceed it.
        max_tokens_per_row: where a row is cut, its prompt included. Tokens behind it are not trained on and not
            needed; the totals count them, and `Pack.cut` says how many of them the model chose.
    """
    budget = TOKENS_PER_PASS if tokens_per_pass is None else tokens_per_pass
    for name, value in (("tokens_per_pass", budget), ("max_tokens_per_row", max_tokens_per_row)):
        if value is not None and value < 1:
            raise ValueError(f"pack: {name}: wanted at least 1, got {value}")
    advantages = algo.advantages(groups)
    speaks = bool(algo.needs & {"reference", "teacher", "entropy"})
    numbers, kept = count(), candidates_kept(algo)
    rows = [
        [row_of(next(numbers), one, credit, kept) for one, credit in zip(group, credits, strict=True)]
        for group, credits in zip(groups, advantages, strict=True)
    ]
    whole = {row.number: row.mask.sum() for group in rows for row in group}
    if max_tokens_per_row is not None:
        rows = [[first(row, max_tokens_per_row - len(row.prompt)) for row in group] for group in rows]
    cut = {row.number: int(whole[row.number] - row.mask.sum()) for group in rows for row in group}
    heard = [[row for row in group if row.mask.any() and (speaks or row.advantage.any())] for group in rows]
    totals = totals_of(groups, sum(len(group) for group in heard))
    minibatches = tuple(_minibatches(heard, budget))
    return Pack(minibatches, totals, tuple(groups), {number: tokens for number, tokens in cut.items() if tokens})


def first(row: Row, tokens: int) -> Row:
    """A row's first tokens behind its prompt."""
    end = max(tokens, 0)
    names = ("tokens", "mask", "advantage", "rollout")
    candidates = None if row.candidates is None else row.candidates[:end]
    return replace(row, candidates=candidates, **{name: getattr(row, name)[:end] for name in names})


def first_chosen(row: Row, chosen: int) -> Row:
    """A row up to its so manieth token that the model chose."""
    return first(row, int(np.flatnonzero(row.mask)[chosen - 1]) + 1)


def totals_of(groups: Sequence[Group], heard: int) -> Totals:
    """The denominators of groups of which so many rows are computed."""
    trajectories = [trajectory for group in groups for trajectory in group]
    return Totals(
        tokens=sum(trajectory.chosen for trajectory in trajectories),
        rows=len(trajectories),
        groups=len(groups),
        max_tokens=max((trajectory.sampling.max_tokens for trajectory in trajectories), default=1),
        silent=len(trajectories) - heard,
    )


def row_of(number: int, trajectory: Trajectory, credit: float | Sequence[float], kept: int = 0) -> Row:
    """Lay a trajectory's turns out behind its first observation, with so many candidates of each token."""
    tokens: list[int] = []
    sampled: list[bool] = []
    logprobs: list[float] = []
    for index, turn in enumerate(trajectory.turns):
        read = () if index == 0 else turn.observation
        tokens += [*read, *turn.action]
        sampled += [False] * len(read) + _chosen(turn)
        logprobs += [0.0] * len(read) + list(turn.logprobs)
    mask = np.array(sampled, bool)
    advantage = np.zeros(len(tokens), np.float32)
    advantage[mask] = credit
    return Row(
        number,
        trajectory.prompt,
        np.array(tokens, np.int32),
        mask.astype(np.float32),
        advantage,
        np.array(logprobs, np.float32),
        trajectory.sampling.softmax_temperature,
        _candidates(trajectory, kept) if kept else None,
    )


def _chosen(turn: Turn) -> list[bool]:
    forced = set(turn.forced)
    return [place not in forced for place in range(len(turn.action))]


def _candidates(trajectory: Trajectory, kept: int) -> np.ndarray:
    """[T, K] the likeliest ids as they were kept while sampling, 0 where the model read."""
    found: list[list[tuple[int, ...]]] = []
    for index, turn in enumerate(trajectory.turns):
        got = min((len(ids) for ids in turn.candidates or ((),)), default=0)
        if turn.action and got < kept:
            raise ValueError(
                f"pack: the algorithm compares the sampler's {kept} likeliest tokens with a teacher's, and {got} were "
                f"kept; sample with Sampling(candidates={kept})"
            )
        found.append([(0,) * kept] * (len(turn.observation) if index else 0))
        found.append([ids[:kept] for ids in turn.candidates or ()])
    return np.array([ids for part in found for ids in part], np.int32).reshape(-1, kept)


def _minibatches(groups: Sequence[Sequence[Row]], budget: int) -> Iterator[Minibatch]:
    alone: list[Row] = []
    for group in groups:
        if group and len(group[0].prompt) * (len(group) - 1) >= SHARE_FROM:
            yield from _batches(group, len(group[0].prompt), budget)
        else:
            alone += [with_prompt(row) for row in group]
    for temperature in sorted({row.temperature for row in alone}):
        yield from _batches([row for row in alone if row.temperature == temperature], 0, budget)


def with_prompt(row: Row) -> Row:
    """The row with its prompt in front, where no shared prefix carries it."""

    def behind(array: np.ndarray) -> np.ndarray:
        return np.concatenate([np.zeros((len(row.prompt), *array.shape[1:]), array.dtype), array])

    return replace(
        row,
        prompt=(),
        tokens=np.concatenate([np.array(row.prompt, np.int32), row.tokens]),
        **{name: behind(getattr(row, name)) for name in ("mask", "advantage", "rollout")},
        candidates=None if row.candidates is None else behind(row.candidates),
    )


def _batches(rows: Sequence[Row], prefix: int, budget: int) -> Iterator[Minibatch]:
    """Passes over rows of like length, the shortest first."""
    ordered = sorted(rows, key=lambda row: row.length)
    shared = mx.array(rows[0].prompt, mx.int32) if rows else None
    for start, end in _cuts([row.length for row in ordered], budget - prefix):
        yield minibatch(ordered[start:end], shared)


def _cuts(lengths: Sequence[int], budget: int) -> list[tuple[int, int]]:
    """Where sorted rows are cut into passes of at most `budget` padded tokens, so that the whole costs least.

    A pass of n rows costs n times the length of the last, and PASS; best[i] is the least for the first i rows.
    A single row is a pass of any size.
    """
    best, come_from = [0], [0]
    for end in range(1, len(lengths) + 1):
        choices = [(best[end - 1] + lengths[end - 1] + PASS, end - 1)]
        for start in range(end - 2, -1, -1):
            padded = (end - start) * lengths[end - 1]
            if padded > budget:
                break
            choices.append((best[start] + padded + PASS, start))
        cost, start = min(choices)
        best.append(cost)
        come_from.append(start)
    cuts: list[tuple[int, int]] = []
    end = len(lengths)
    while end:
        cuts.append((come_from[end], end))
        end = come_from[end]
    return cuts[::-1]


def minibatch(rows: Sequence[Row], prefix: mx.array | None = None) -> Minibatch:
    """Rows of one prefix, padded to the same length; those that are given one array as prefix run it once."""
    width = max(row.length for row in rows)

    def stacked(name: str) -> mx.array:
        return mx.array(np.stack([_padded(getattr(row, name), width) for row in rows]))

    return Minibatch(
        prefix=mx.array(rows[0].prompt, mx.int32) if prefix is None else prefix,
        tokens=stacked("tokens"),
        mask=stacked("mask"),
        advantage=stacked("advantage"),
        rollout=stacked("rollout"),
        temperature=rows[0].temperature,
        candidates=None if rows[0].candidates is None else stacked("candidates"),
        rows=tuple(row.number for row in rows),
    )


def _padded(array: np.ndarray, width: int) -> np.ndarray:
    return np.pad(array, [(0, width - len(array)), *[(0, 0)] * (array.ndim - 1)])
