"""The data that travel between the modules, and the protocols of what users plug in.

Shapes: B rows, G group size, T tokens, P prefix tokens, V vocabulary. Log-probs are in nats and float32.
Entry [b, t] of every [B, T] array is about `tokens[b, t]`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import mlx.core as mx

Message: TypeAlias = Mapping[str, Any]
Metrics: TypeAlias = dict[str, Any]
Stop = Literal["eos", "length", "done", "turns", "error"]


@dataclass(frozen=True, slots=True)
class Task:
    """One dataset row: what to ask, and the columns that reach the rewards by name."""

    prompt: str | tuple[Message, ...]
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Turn:
    """What the model read since its last action, and what it answered.

    observation: token ids that are new to the model in this turn (the whole prompt in the first turn).
    action: token ids sampled, the stop token included.
    logprobs: float32 log-prob of each action token, of softmax(logits / temperature).
    text: the action as text, special tokens left out. It is for rewards and people, never re-encoded.
    """

    observation: tuple[int, ...]
    action: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str = ""
    reward: float = 0.0
    state: Hashable | None = None


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. Temperature comes first, the filters act on the tempered distribution.

    A temperature of 0 is greedy; its log-probs are those of temperature 1. top_p 1, top_k 0 and min_p 0 are off.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @property
    def softmax_temperature(self) -> float:
        """The temperature that log-probs are taken at: 1 for greedy decoding."""
        return self.temperature or 1.0

    def __post_init__(self) -> None:
        _within("max_tokens", self.max_tokens, 1, None)
        _within("temperature", self.temperature, 0, None)
        _within("top_k", self.top_k, 0, None)
        _within("min_p", self.min_p, 0, 1)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"sampling: top_p: wanted more than 0 and at most 1, got {self.top_p}")


def _within(name: str, value: float, low: float, high: float | None) -> None:
    if not (value >= low and (high is None or value <= high) and value != float("inf")):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ValueError(f"sampling: {name}: wanted {bounds}, got {value}")


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One attempt at a task. `reward` is NaN until it is scored, and where every reward function failed."""

    task: Task
    turns: tuple[Turn, ...]
    reward: float = float("nan")
    stop: Stop = "eos"
    sampling: Sampling = Sampling()
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def prompt(self) -> tuple[int, ...]:
        """Token ids of the first observation."""
        return self.turns[0].observation

    @property
    def length(self) -> int:
        """Tokens the model sampled, over all turns."""
        return sum(len(turn.action) for turn in self.turns)

    @property
    def text(self) -> str:
        """What the model answered, its turns on lines of their own."""
        return "\n".join(turn.text for turn in self.turns)


Group: TypeAlias = tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True)
class Minibatch:
    """One forward pass: a shared prefix of P tokens (P may be 0) and B right-padded continuations.

    prefix: [P] int32; tokens: [B, T] int32; mask: [B, T] float32, 1 where a token was sampled by the model;
    advantage, old, reference, rollout, teacher: [B, T] float32, None where nothing needs them.
    """

    prefix: mx.array
    tokens: mx.array
    mask: mx.array
    advantage: mx.array
    rollout: mx.array
    old: mx.array | None = None
    reference: mx.array | None = None
    teacher: mx.array | None = None
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts of a whole optimizer step, made before a row is dropped or the batch is split.

    tokens: sampled tokens; rows: trajectories; groups: tasks; max_tokens: the sampling limit of a completion;
    silent: rows without signal, counted above and not computed.
    """

    tokens: int
    rows: int
    groups: int
    max_tokens: int
    silent: int = 0


@dataclass(frozen=True, slots=True)
class Pack:
    """The minibatches of one optimizer step and the denominators they share."""

    minibatches: tuple[Minibatch, ...]
    totals: Totals

    def __iter__(self) -> Iterator[Minibatch]:
        return iter(self.minibatches)

    def __len__(self) -> int:
        return len(self.minibatches)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """What a policy pass returns: chosen [B, T] log-prob of each token; entropy [B, T] where it was asked for."""

    chosen: mx.array
    entropy: mx.array | None = None


@runtime_checkable
class Algorithm(Protocol):
    """Credit assignment plus a loss, both pure.

    `needs` names what must be computed before the loss: "old" and "reference" log-probs, "teacher", "entropy".
    """

    @property
    def name(self) -> str: ...

    @property
    def needs(self) -> frozenset[str]: ...

    def advantages(self, groups: Sequence[Group]) -> list[list[float | list[float]]]:
        """For every trajectory of every group a float, or a list with a float per sampled token."""
        ...

    def loss(self, new: Logprobs, batch: Minibatch, totals: Totals) -> tuple[mx.array, Metrics]:
        """A scalar to be summed over the step's minibatches, and metrics.

        Metrics are scalars already divided by the step's totals, so that those of the minibatches add up;
        names that end in `_max` or `_min` are combined by maximum and minimum instead.
        """
        ...


class Reward(Protocol):
    """A reward function of TRL's shape: completions and the columns of their tasks in, a float each out.

    Called with keywords: `prompts`, `completions`, and every column as a list. None means "cannot be scored".
    """

    def __call__(self, *, completions: list[Any], **columns: Any) -> Sequence[float | None]: ...
