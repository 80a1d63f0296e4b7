"""From scored groups to the minibatches of one optimizer step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlxrl.types import Algorithm, Group, Minibatch, Pack, Totals, Trajectory

TOKENS_PER_PASS = 2048
SHARE_FROM = 128  # prompt tokens saved, below which a pass of its own costs more than the repeated prompt


@dataclass(frozen=True, slots=True)
class Row:
    """A trajectory as one line of tokens: [T] ids, and for each whether it was sampled, its advantage, its log-prob."""

    prompt: tuple[int, ...]
    tokens: np.ndarray
    mask: np.ndarray
    advantage: np.ndarray
    rollout: np.ndarray
    temperature: float

    @property
    def length(self) -> int:
        return len(self.tokens)


def pack(groups: Sequence[Group], algo: Algorithm, *, tokens_per_pass: int | None = None) -> Pack:
    """Credit the trajectories, drop rows without signal, and lay the others out in minibatches.

    A group's rows share their prompt as the prefix where that saves enough; other rows stand with their prompt,
    and P = 0. Rows are sorted by length, so that little is padded. The totals count every row, dropped ones too:
    neither the size of a pass nor the order of rows changes the gradient.

    Args:
        tokens_per_pass: padded tokens of a forward at most, the prefix included; one row may exceed it.
    """
    budget = tokens_per_pass or TOKENS_PER_PASS
    if budget < 1:
        raise ValueError(f"pack: tokens_per_pass: wanted at least 1, got {budget}")
    advantages = algo.advantages(groups)
    speaks = bool(algo.needs & {"reference", "teacher", "entropy"})
    rows = [
        [_row(trajectory, credit) for trajectory, credit in zip(group, credits, strict=True) if trajectory.length]
        for group, credits in zip(groups, advantages, strict=True)
    ]
    heard = [[row for row in group if speaks or row.advantage.any()] for group in rows]
    totals = _totals(groups, sum(len(group) for group in heard))
    return Pack(tuple(_minibatches(heard, budget)), totals)


def _totals(groups: Sequence[Group], heard: int) -> Totals:
    trajectories = [trajectory for group in groups for trajectory in group]
    return Totals(
        tokens=sum(trajectory.length for trajectory in trajectories),
        rows=len(trajectories),
        groups=len(groups),
        max_tokens=max((trajectory.sampling.max_tokens for trajectory in trajectories), default=1),
        silent=len(trajectories) - heard,
    )


def _row(trajectory: Trajectory, credit: float | Sequence[float]) -> Row:
    """Lay a trajectory's turns out behind its first observation."""
    tokens: list[int] = []
    sampled: list[bool] = []
    logprobs: list[float] = []
    for index, turn in enumerate(trajectory.turns):
        read = () if index == 0 else turn.observation
        tokens += [*read, *turn.action]
        sampled += [False] * len(read) + [True] * len(turn.action)
        logprobs += [0.0] * len(read) + list(turn.logprobs)
    mask = np.array(sampled)
    advantage = np.zeros(len(tokens), np.float32)
    advantage[mask] = credit
    return Row(
        trajectory.prompt,
        np.array(tokens, np.int32),
        mask.astype(np.float32),
        advantage,
        np.array(logprobs, np.float32),
        trajectory.sampling.softmax_temperature,
    )


def _minibatches(groups: Sequence[Sequence[Row]], budget: int) -> Iterator[Minibatch]:
    alone: list[Row] = []
    for group in groups:
        if group and len(group[0].prompt) * (len(group) - 1) >= SHARE_FROM:
            yield from _batches(group, len(group[0].prompt), budget)
        else:
            alone += [_with_prompt(row) for row in group]
    for temperature in sorted({row.temperature for row in alone}):
        yield from _batches([row for row in alone if row.temperature == temperature], 0, budget)


def _with_prompt(row: Row) -> Row:
    """The row with its prompt in front, where no shared prefix carries it."""
    zeros = np.zeros(len(row.prompt), np.float32)
    return Row(
        (),
        np.concatenate([np.array(row.prompt, np.int32), row.tokens]),
        np.concatenate([zeros, row.mask]),
        np.concatenate([zeros, row.advantage]),
        np.concatenate([zeros, row.rollout]),
        row.temperature,
    )


def _batches(rows: Sequence[Row], prefix: int, budget: int) -> Iterator[Minibatch]:
    """Fill passes with rows of like length, the shortest first."""
    batch: list[Row] = []
    for row in sorted(rows, key=lambda row: row.length):
        if batch and prefix + (len(batch) + 1) * row.length > budget:
            yield _minibatch(batch)
            batch = []
        batch.append(row)
    if batch:
        yield _minibatch(batch)


def _minibatch(rows: Sequence[Row]) -> Minibatch:
    width = max(row.length for row in rows)

    def stacked(name: str) -> mx.array:
        return mx.array(np.stack([np.pad(getattr(row, name), (0, width - row.length)) for row in rows]))

    return Minibatch(
        prefix=mx.array(rows[0].prompt, mx.int32),
        tokens=stacked("tokens"),
        mask=stacked("mask"),
        advantage=stacked("advantage"),
        rollout=stacked("rollout"),
        temperature=rows[0].temperature,
    )
