"""The data that travel between the modules, and the protocols of what users plug in.

Shapes: B rows, G group size, T tokens, P prefix tokens, V vocabulary. Log-probs are in nats and float32.
Entry [b, t] of every [B, T] array is about `tokens[b, t]`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
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
    forced: places in `action` of tokens that the model did not choose, as those that close a block of thinking
        whose budget is spent: they are read like an observation, and are no part of the loss.
    truncated: where filters were on, the probability they took away at each token: it was drawn with its log-prob
        less log(1 - truncated), where no penalty or hook changed the rest.
    candidates, candidate_logprobs: ids and log-probs of the likeliest tokens at each place, the likeliest first.
    state: names the situation in which the action was taken.
    reward: of the action, less what an invalid one costs; invalid: see `Feedback`.
    seen: what an environment answered before the action, as text for people.
    fresh: whether the observation is a whole new prompt, because the chat template has rewritten what stood before:
        the turns from here on are a row of their own. new: how many of its tokens, at its end, begin where the
        environment's answer does, 0 where that cannot be told.
    """

    observation: tuple[int, ...]
    action: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str = ""
    reward: float = 0.0
    state: Hashable | None = None
    forced: tuple[int, ...] = ()
    truncated: tuple[float, ...] | None = None
    candidates: tuple[tuple[int, ...], ...] | None = None
    candidate_logprobs: tuple[tuple[float, ...], ...] | None = None
    seen: str = ""
    invalid: bool = False
    fresh: bool = False
    new: int = 0

    @property
    def chosen(self) -> int:
        """Tokens that the model chose itself: those that are credited and in the loss."""
        return len(self.action) - len(self.forced)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. Temperature comes first, the filters act on the tempered distribution.

    A temperature of 0 is greedy; its log-probs are those of temperature 1. top_p 1, top_k 0 and min_p 0 are off.

    stop_strings: texts that end a row where they are complete, special tokens written out.
    min_tokens: tokens before which no stop ends a row.
    thinking_budget: tokens that may be thought; then the end of thinking is forced. None for no limit.
    repetition_penalty, presence_penalty, frequency_penalty: mlx-lm's, on the logits before the temperature, for
        tokens among the last `penalty_context`, the prompt's included; 1, 0 and 0 are off.
    candidates: how many of the likeliest tokens are kept at each place, with their log-probs.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_strings: tuple[str, ...] = ()
    min_tokens: int = 0
    thinking_budget: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_context: int = 20
    candidates: int = 0

    @property
    def filters(self) -> bool:
        """Whether unlikely tokens are left out."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def penalised(self) -> bool:
        """Whether earlier tokens change the logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def softmax_temperature(self) -> float:
        """The temperature that log-probs are taken at: 1 for greedy decoding."""
        return self.temperature or 1.0

    def __post_init__(self) -> None:
        _within("max_tokens", self.max_tokens, 1, None)
        _within("temperature", self.temperature, 0, None)
        _within("top_k", self.top_k, 0, None)
        _within("min_p", self.min_p, 0, 1)
        _within("min_tokens", self.min_tokens, 0, self.max_tokens)
        _within("thinking_budget", self.thinking_budget or 0, 0, None)
        _within("penalty_context", self.penalty_context, 1, None)
        _within("candidates", self.candidates, 0, None)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"sampling: top_p: wanted more than 0 and at most 1, got {self.top_p}")
        for name in ("presence_penalty", "frequency_penalty"):
            if not abs(getattr(self, name)) < float("inf"):
                raise ValueError(f"sampling: {name}: wanted a finite number, got {getattr(self, name)}")
        if not 0 < self.repetition_penalty < float("inf"):
            raise ValueError(f"sampling: repetition_penalty: wanted more than 0, got {self.repetition_penalty}")
        if isinstance(self.stop_strings, str) or not all(self.stop_strings):
            raise ValueError(f"sampling: stop_strings: wanted texts that are not empty, got {self.stop_strings!r}")


def _within(name: str, value: float, low: float, high: float | None) -> None:
    if not (value >= low and (high is None or value <= high) and value != float("inf")):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ValueError(f"sampling: {name}: wanted {bounds}, got {value}")


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One attempt at a task. `reward` is NaN until it is scored, and where every reward function failed.

    rewards, weights: the parts of the reward by the name of their function, and what each counts in the sum. An
    environment's part is the sum over its turns, under the name "environment", with weight 1.
    stop: "eos" or "length" as the last action ended; "done" where the environment ended the episode, "turns" where
    that was the last turn it may have; "error" where the model's logits were not finite, or the environment failed.
    error: how the environment failed, in one line; close_error: how closing it did.
    """

    task: Task
    turns: tuple[Turn, ...]
    reward: float = float("nan")
    stop: Stop = "eos"
    sampling: Sampling = Sampling()
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    weights: Mapping[str, float] = field(default_factory=dict[str, float])
    error: str = ""
    close_error: str = ""

    @property
    def prompt(self) -> tuple[int, ...]:
        """Token ids of the first observation."""
        return self.turns[0].observation

    @property
    def length(self) -> int:
        """Tokens of the completion, over all turns, forced ones included: what the sampling limit counts."""
        return sum(len(turn.action) for turn in self.turns)

    @property
    def chosen(self) -> int:
        """Tokens that the model chose itself, over all turns: what the denominators of a loss count."""
        return sum(turn.chosen for turn in self.turns)

    @property
    def text(self) -> str:
        """What the model answered, its turns on lines of their own."""
        return "\n".join(turn.text for turn in self.turns)


Group: TypeAlias = tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True)
class Minibatch:
    """One forward pass: a shared prefix of P tokens (P may be 0) and B right-padded continuations.

    prefix: [P] int32; tokens: [B, T] int32; mask: [B, T] float32, 1 where the model chose the token itself;
    advantage, old, reference, rollout, teacher: [B, T] float32, None where nothing needs them.
    candidates: [B, T, K] int32 ids a teacher is compared at; teacher_candidates, old_candidates: [B, T, K] log-probs
    of them, the teacher's and those of the weights that sampled. teacher_hidden: [B, T, D] hidden states that the
    teacher predicts each token from, for a comparison over the whole vocabulary.
    rows: B numbers, of the trajectory that a row is of, counted over the groups of the step.
    observed: [B, T] float32, 1 where an environment wrote the token and it is to be predicted; None where none is.
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
    candidates: mx.array | None = None
    teacher_candidates: mx.array | None = None
    old_candidates: mx.array | None = None
    teacher_hidden: mx.array | None = None
    rows: tuple[int, ...] = ()
    observed: mx.array | None = None


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts of a whole optimizer step, made before a row is dropped or the batch is split.

    tokens: those the model chose; rows: trajectories; groups: tasks; max_tokens: the sampling limit of a completion;
    silent: rows without signal, counted above and not computed. observations: tokens to be predicted that
    environments wrote.
    """

    tokens: int
    rows: int
    groups: int
    max_tokens: int
    silent: int = 0
    observations: int = 0


@dataclass(frozen=True, slots=True)
class Pack:
    """The minibatches of one optimizer step, the denominators they share, and the groups that they are made of.

    cut: by the number of a row, how many tokens that the model chose were left off its end, being too many.
    observations: by the number of a row, its tokens to be predicted that an environment wrote, where there are any.
    """

    minibatches: tuple[Minibatch, ...]
    totals: Totals
    groups: tuple[Group, ...] = ()
    cut: Mapping[int, int] = field(default_factory=dict[int, int])
    observations: Mapping[int, int] = field(default_factory=dict[int, int])

    def __iter__(self) -> Iterator[Minibatch]:
        return iter(self.minibatches)

    def __len__(self) -> int:
        return len(self.minibatches)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """What a policy pass returns: chosen [B, T] log-prob of each token; entropy [B, T] where it was asked for.

    candidates: [B, T, K] log-probs of the minibatch's candidate ids, where it has them.
    divergence: [B, T] from the teacher over the whole vocabulary, where that is compared.
    observed: [B, T] log-prob of each token to be predicted that an environment wrote, where that was asked for.
    """

    chosen: mx.array
    entropy: mx.array | None = None
    candidates: mx.array | None = None
    divergence: mx.array | None = None
    observed: mx.array | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Where an algorithm compares more of a distribution with a teacher's than the token that was sampled.

    support: the K likeliest tokens of the "teacher", those of the "student" as they were kept while it sampled
    (`Turn.candidates`), or the whole "vocabulary".
    divergence: of the whole vocabulary: log-probs of student and teacher, [..., V] each, to [...].
    """

    support: Literal["teacher", "student", "vocabulary"]
    k: int = 0
    divergence: Callable[[mx.array, mx.array], mx.array] | None = None


@dataclass(frozen=True, slots=True)
class Feedback:
    """What an environment answers to an action.

    observation: what the model reads before its next action: the text of a user message, or messages.
    reward: of the action that was just taken. done: whether the episode ends with it.
    state: names the situation in which the next action is taken: equal states of a task's attempts are compared.
    invalid: whether the action could not be taken, as a tool call that cannot be read.
    """

    observation: str | tuple[Message, ...] = ""
    reward: float = 0.0
    done: bool = False
    state: Hashable | None = None
    invalid: bool = False


class Environment(Protocol):
    """The world of one trajectory: a factory makes one for each, and no base class is needed.

    It may have `stop`, texts that end an action where they are complete (as the closing tag of a tool call),
    `tools`, schemas of functions that the chat template tells the model of,
    `special_tokens = True`, with which a reply has them written out, and `close()`, which is called once its episode
    has ended, however it ended. Its methods run in threads of a pool, one call at a time. A factory that is an object
    may have `prepare(tokenizer)`, which a rollout calls before its episodes, and `earns = False`, where its
    environments give no rewards. The task is a copy of the environment's own.
    """

    def reset(self, task: Task) -> str | Sequence[Message]:
        """Begin at a task; returns what the model reads first: the text of a user message, or messages."""
        ...

    def step(self, reply: str) -> Feedback:
        """Take the model's action, the text of a turn without its stop token."""
        ...


@runtime_checkable
class Algorithm(Protocol):
    """Credit assignment plus a loss, both pure.

    `needs` names what must be there before the loss: "old" and "reference" log-probs, "teacher", "entropy",
    the "candidates" that were kept while sampling, and the "observations" of environments. One that compares
    distributions has a `comparison` besides, and one that changes over a run an `at(step)`.
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
