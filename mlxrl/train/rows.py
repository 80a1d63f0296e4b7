"""A trajectory as rows of tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from mlxrl.types import Trajectory, Turn


@dataclass(frozen=True, slots=True)
class Row:
    """A trajectory as one line of tokens: [T] ids, for each whether the model chose it, its advantage, its log-prob.

    One whose history was rewritten on the way is several rows, of the same number.

    number: the trajectory's, counted over all groups. candidates: [T, K] ids, None where nothing compares them.
    observed: [T] whether an environment wrote the token and it is to be predicted, None where none is.
    """

    number: int
    prompt: tuple[int, ...]
    tokens: np.ndarray
    mask: np.ndarray
    advantage: np.ndarray
    rollout: np.ndarray
    temperature: float
    candidates: np.ndarray | None = None
    observed: np.ndarray | None = None

    @property
    def observations(self) -> int:
        return 0 if self.observed is None else int(self.observed.sum())

    @property
    def length(self) -> int:
        return len(self.tokens)


def first(row: Row, tokens: int) -> Row:
    """A row's first tokens behind its prompt."""
    end = max(tokens, 0)
    names = ("tokens", "mask", "advantage", "rollout")
    options = {"candidates": row.candidates, "observed": row.observed}
    return replace(
        row,
        **{name: getattr(row, name)[:end] for name in names},
        **{name: None if array is None else array[:end] for name, array in options.items()},
    )


def first_chosen(row: Row, chosen: int) -> Row:
    """A row up to its so manieth token that the model chose."""
    return first(row, int(np.flatnonzero(row.mask)[chosen - 1]) + 1)


def rows_of(
    number: int,
    trajectory: Trajectory,
    credit: float | Sequence[float],
    kept: int = 0,
    skip: Collection[int] | None = None,
) -> list[Row]:
    """The rows of a trajectory: one, and a further one from each turn on whose observation is a whole new prompt."""
    starts = [index for index, turn in enumerate(trajectory.turns) if not index or turn.history_rewritten]
    parts = [trajectory.turns[a:b] for a, b in pairwise([*starts, len(trajectory.turns)])] if starts else []
    ends = np.cumsum([sum(turn.num_sampled for turn in part) for part in parts]).tolist()
    credits = [credit[a:b] if isinstance(credit, Sequence) else credit for a, b in pairwise([0, *ends])]
    return [
        row_of(number, replace(trajectory, turns=part if skip is None else _apart(part)), own, kept, skip)
        for part, own in zip(parts, credits, strict=True)
    ]


def _apart(turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
    """Turns of a row whose first observation is a whole new prompt: it ends where the environment's answer begins."""
    first, *later = turns
    place = len(first.observation) - first.new_suffix
    if not (first.history_rewritten and first.new_suffix):
        return turns
    answer = replace(first, observation=first.observation[place:], history_rewritten=False)
    return (Turn(first.observation[:place], (), ()), answer, *later)


def row_of(
    number: int,
    trajectory: Trajectory,
    credit: float | Sequence[float],
    kept: int = 0,
    skip: Collection[int] | None = None,
) -> Row:
    """Lay a trajectory's turns out behind its first observation, with so many candidates of each token.

    skip: token ids that are not predicted where observations are; None where they are not.
    """
    tokens: list[int] = []
    sampled: list[bool] = []
    logprobs: list[float] = []
    for index, turn in enumerate(trajectory.turns):
        read = () if index == 0 else turn.observation
        tokens += [*read, *turn.tokens]
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
        None if skip is None else _observed(trajectory, skip),
    )


def _chosen(turn: Turn) -> list[bool]:
    forced = set(turn.details.forced)
    return [place not in forced for place in range(len(turn.tokens))]


def _observed(trajectory: Trajectory, skip: Collection[int]) -> np.ndarray:
    """[T] 1 on the tokens to be predicted; none of a trajectory that ended in an error."""
    found: list[float] = []
    for index, turn in enumerate(trajectory.turns):
        read = turn.observation if index else ()
        found += [float(token not in skip) for token in read] + [0.0] * len(turn.tokens)
    return np.array(found, np.float32) * (trajectory.stop != "error")


def _candidates(trajectory: Trajectory, kept: int) -> np.ndarray:
    """[T, K] the likeliest ids as they were kept while sampling, 0 where the model read."""
    found: list[list[tuple[int, ...]]] = []
    for index, turn in enumerate(trajectory.turns):
        got = min((len(ids) for ids in turn.details.top_ids or ((),)), default=0)
        if turn.tokens and got < kept:
            raise ValueError(
                f"pack: the algorithm compares the sampler's {kept} likeliest tokens with a teacher's, and {got} were "
                f"kept; sample with Sampling(num_top={kept})"
            )
        found.append([(0,) * kept] * (len(turn.observation) if index else 0))
        found.append([ids[:kept] for ids in turn.details.top_ids or ()])
    return np.array([ids for part in found for ids in part], np.int32).reshape(-1, kept)


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
        observed=None if row.observed is None else behind(row.observed),
    )
