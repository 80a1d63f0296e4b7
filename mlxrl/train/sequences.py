"""A trajectory as sequences of tokens, each with what the loss needs to know of every token."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from mlxrl.errors import UserError
from mlxrl.types import Trajectory, Turn

PER_TOKEN = ("tokens", "mask", "advantages", "sampler_logprobs", "top_ids", "observation_mask")


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """The T tokens after a prompt: ids, whether the model chose each, its advantage, its log-prob when it was drawn.

    A trajectory is one sequence; one whose history was rewritten on the way is several, of the same number.

    number: the trajectory's, counted over all groups. top_ids: [T, K], None where nothing is compared at them.
    observation_mask: [T] whether an environment wrote the token and it is predicted, None where none is.
    """

    number: int
    prompt: tuple[int, ...]
    tokens: np.ndarray
    mask: np.ndarray
    advantages: np.ndarray
    sampler_logprobs: np.ndarray
    temperature: float
    top_ids: np.ndarray | None = None
    observation_mask: np.ndarray | None = None

    @property
    def observation_tokens(self) -> int:
        return 0 if self.observation_mask is None else int(self.observation_mask.sum())

    @property
    def length(self) -> int:
        return len(self.tokens)

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays with an entry for every token, those that are there."""
        found = {name: getattr(self, name) for name in PER_TOKEN}
        return {name: array for name, array in found.items() if array is not None}


def shortened(sequence: TokenSequence, tokens: int) -> TokenSequence:
    """The first tokens after the prompt."""
    end = max(tokens, 0)
    return replace(sequence, **{name: array[:end] for name, array in sequence.arrays().items()})


def up_to_sampled(sequence: TokenSequence, count: int) -> TokenSequence:
    """A sequence up to its n-th token that the model chose."""
    return shortened(sequence, int(np.flatnonzero(sequence.mask)[count - 1]) + 1)


def with_prompt(sequence: TokenSequence) -> TokenSequence:
    """The sequence with its prompt in front, where no shared prefix carries it."""
    prompt = np.array(sequence.prompt, np.int32)
    whole = {
        name: np.concatenate([np.zeros((len(prompt), *array.shape[1:]), array.dtype), array])
        for name, array in sequence.arrays().items()
    }
    whole["tokens"][: len(prompt)] = prompt
    return replace(sequence, prompt=(), **whole)


def sequences_of(
    number: int,
    trajectory: Trajectory,
    credit: float | Sequence[float],
    num_top: int = 0,
    not_predicted: Collection[int] | None = None,
) -> list[TokenSequence]:
    """The sequences of a trajectory: one, and a further one from each turn on whose history was rewritten."""
    turns = trajectory.turns
    starts = [index for index, turn in enumerate(turns) if not index or turn.history_rewritten]
    parts = [turns[a:b] for a, b in pairwise([*starts, len(turns)])] if starts else []
    ends = np.cumsum([sum(turn.num_sampled for turn in part) for part in parts]).tolist()
    credits = [credit[a:b] if isinstance(credit, Sequence) else credit for a, b in pairwise([0, *ends])]
    if not_predicted is not None:
        parts = [_answer_apart(part) for part in parts]
    return [
        sequence_of(number, replace(trajectory, turns=part), own, num_top, not_predicted)
        for part, own in zip(parts, credits, strict=True)
    ]


def _answer_apart(turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
    """Turns after a rewritten history, whose whole new prompt is taken apart where the environment's answer begins."""
    first, *later = turns
    if not (first.history_rewritten and first.new_suffix):
        return turns
    place = len(first.observation) - first.new_suffix
    answer = replace(first, observation=first.observation[place:], history_rewritten=False)
    return (Turn(first.observation[:place], (), ()), answer, *later)


def sequence_of(
    number: int,
    trajectory: Trajectory,
    credit: float | Sequence[float],
    num_top: int = 0,
    not_predicted: Collection[int] | None = None,
) -> TokenSequence:
    """Lay a trajectory's turns out after its first observation.

    Args:
        num_top: top ids that are kept of each token.
        not_predicted: token ids that are not predicted where observations are; None where they are not.
    """
    tokens: list[int] = []
    mask: list[float] = []
    logprobs: list[float] = []
    predicted: list[float] = []
    for index, turn in enumerate(trajectory.turns):
        read = turn.observation if index else ()
        tokens += [*read, *turn.tokens]
        mask += [0.0] * len(read) + [float(place not in turn.details.forced) for place in range(len(turn.tokens))]
        logprobs += [0.0] * len(read) + list(turn.logprobs)
        predicted += [float(token not in (not_predicted or ())) for token in read] + [0.0] * len(turn.tokens)
    sampled = np.array(mask, np.float32)
    advantages = np.zeros(len(tokens), np.float32)
    advantages[sampled > 0] = credit
    observation_mask = np.array(predicted, np.float32) * (trajectory.stop != "error")
    return TokenSequence(
        number, trajectory.prompt, np.array(tokens, np.int32), sampled, advantages, np.array(logprobs, np.float32),
        trajectory.sampling.softmax_temperature, _top_ids(trajectory, num_top) if num_top else None,
        None if not_predicted is None else observation_mask,
    )  # fmt: skip


def _top_ids(trajectory: Trajectory, num_top: int) -> np.ndarray:
    """[T, K] the most likely ids as they were kept while sampling, 0 where the model read."""
    found: list[tuple[int, ...]] = []
    for index, turn in enumerate(trajectory.turns):
        kept = turn.details.top_ids or ()
        there = min((len(ids) for ids in kept), default=0)
        if turn.tokens and there < num_top:
            raise UserError(
                "batch",
                f"the algorithm compares the sampler's {num_top} most likely tokens with a teacher's, and {there} were "
                f"kept; sample with Sampling(num_top={num_top})",
            )
        found += [(0,) * num_top] * (len(turn.observation) if index else 0) + [ids[:num_top] for ids in kept]
    return np.array(found, np.int32).reshape(-1, num_top)
