"""The data that travel between the modules; the protocols of what users plug in are in `protocols`.

Shapes: B rows, G group size, T tokens, P prefix tokens, V vocabulary. Log-probs are in nats and float32.
Entry [b, t] of every [B, T] array is about `tokens[b, t]`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

import mlx.core as mx

from mlxrl.errors import UserError, brief
from mlxrl.settings import Sampling

Message: TypeAlias = Mapping[str, Any]
Metrics: TypeAlias = dict[str, Any]
Stop = Literal["eos", "length", "done", "turns", "error"]

PerToken: TypeAlias = Annotated[mx.array, "B T"]
"""A number for each token; shapes are checked while the tests run, see `tests/shapes.py`."""
PerTopId: TypeAlias = Annotated[mx.array, "B T K"]
Ids: TypeAlias = Annotated[mx.array, "int B T"]
TopIds: TypeAlias = Annotated[mx.array, "int B T K"]


@dataclass(frozen=True, slots=True)
class Task:
    """An example of a dataset: the prompt, and the columns that reach the rewards by name.

    prompt: a text, messages, or token ids. where: what it was read from, as a file and line.
    """

    prompt: str | tuple[Message, ...] | tuple[int, ...]
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])
    where: str = field(default="", compare=False, repr=False)

    def __post_init__(self) -> None:
        prompt: Any = self.prompt
        columns: Any = self.columns
        if not isinstance(prompt, str | tuple | list):
            raise UserError("Task", "prompt", f"wanted a text, messages or token ids, got {brief(prompt)}")
        if not isinstance(columns, Mapping):
            raise UserError("Task", "columns", f"wanted a dict with a value for each name, got {brief(columns)}")

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages of a prompt that has some."""
        return tuple(one for one in self.prompt if isinstance(one, Mapping))


@dataclass(frozen=True, slots=True)
class TokenDetails:
    """What belongs to the sampled tokens of a turn besides their log-probs, each where it applies.

    forced: positions in `Turn.tokens` of tokens that the model did not choose, as those that close a thinking block
        whose budget is spent. They are read like an observation and are no part of the loss.
    filtered_mass: where filters were on, the probability that they removed at each token: it was drawn with its
        log-prob less log(1 - filtered_mass), where no penalty or processor changed the rest.
    top_ids, top_logprobs: ids and log-probs of the most likely tokens at each position, the most likely first.
    """

    forced: tuple[int, ...] = ()
    filtered_mass: tuple[float, ...] | None = None
    top_ids: tuple[tuple[int, ...], ...] | None = None
    top_logprobs: tuple[tuple[float, ...], ...] | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """What the model read since its last action, what it sampled, and what came back.

    observation: token ids that are new to the model in this turn (the whole prompt in the first turn).
    tokens: token ids sampled, the stop token included.
    logprobs: float32 log-prob of each of them, of softmax(logits / temperature).
    text: the tokens as text, special tokens left out. It is for rewards and people, never encoded again.
    special_text: the same with special tokens written out, but for the stop token.
    details: what else belongs to the tokens.
    state: names the situation in which the action was taken.
    reward: of the action, less what an invalid one costs; invalid, fault: see `Feedback`.
    observation_text: what an environment answered before the action, as text for people.
    history_rewritten: whether the observation is a whole new prompt, because the chat template has rewritten earlier
        messages: the turns from here on are a sequence of their own.
    new_suffix: how many tokens, at the end of such an observation, are the environment's answer and what follows it; 0
        where that cannot be told.
    """

    observation: tuple[int, ...] = field(repr=False)
    tokens: tuple[int, ...] = field(repr=False)
    logprobs: tuple[float, ...] = field(repr=False)
    text: str = ""
    reward: float = 0.0
    state: Hashable | None = None
    details: TokenDetails = field(default=TokenDetails(), repr=False)
    observation_text: str = ""
    invalid: bool = False
    history_rewritten: bool = False
    new_suffix: int = 0
    fault: str = ""
    special_text: str = ""

    @property
    def num_sampled(self) -> int:
        """Tokens that the model chose itself: those that are credited and in the loss."""
        return len(self.tokens) - len(self.details.forced)


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One completion of a task, or one episode. `reward` is NaN until it is scored, and where every function failed.

    rewards, weights: the parts of the reward by the name of their function, and what each counts in the sum. An
    environment's part is the sum over its turns, under the name "environment", with weight 1.
    stop: "eos" or "length" as the last turn ended; "done" where the environment ended the episode, "turns" where
    that was the last turn it may have; "error" where the model's logits were not finite, or the environment failed.
    error: how the environment failed, in one line; close_error: how closing it did.
    failures: why a reward function gave no number, by its name; "sum" where their sum is none.
    """

    task: Task
    turns: tuple[Turn, ...]
    reward: float = float("nan")
    stop: Stop = "eos"
    sampling: Sampling = field(default_factory=Sampling)
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    weights: Mapping[str, float] = field(default_factory=dict[str, float])
    error: str = ""
    close_error: str = ""
    failures: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def prompt(self) -> tuple[int, ...]:
        """Token ids of the first observation."""
        return self.turns[0].observation

    @property
    def length(self) -> int:
        """Tokens sampled over all turns, forced ones included: what the sampling limit counts."""
        return sum(len(turn.tokens) for turn in self.turns)

    @property
    def num_sampled(self) -> int:
        """Tokens that the model chose itself, over all turns: what the denominators of a loss count."""
        return sum(turn.num_sampled for turn in self.turns)

    @property
    def text(self) -> str:
        """What the model said, its turns on lines of their own."""
        return "\n".join(turn.text for turn in self.turns)


Group: TypeAlias = tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass: a shared prefix of P tokens (P may be 0) and B right-padded continuations.

    prefix: [P] int32; tokens: [B, T] int32; mask: [B, T] float32, 1 where the model chose the token itself.
    advantages, sampler_logprobs, old_logprobs, reference_logprobs, teacher_logprobs: [B, T] float32, None where nothing
        needs them. Sampler: as they were when the tokens were drawn; old: of the weights before the update.
    top_ids: [B, T, K] int32, the ids at which a teacher's distribution is compared; teacher_top_logprobs and
        old_top_logprobs: [B, T, K], of those ids.
    teacher_hidden: [B, T, D] hidden states that the teacher predicts each token from.
    trajectories: B numbers, of the trajectory that a sequence is of, counted over the groups of the step.
    observation_mask: [B, T] float32, 1 where an environment wrote the token and it is predicted; None where none is.
    prefix_id: the same for neighbours that carry one prefix, which then runs once; None where the prefix is its own.
    """

    prefix: Annotated[mx.array, "int P"]
    tokens: Ids
    mask: PerToken
    advantages: PerToken
    sampler_logprobs: PerToken
    old_logprobs: PerToken | None = None
    reference_logprobs: PerToken | None = None
    teacher_logprobs: PerToken | None = None
    temperature: float = 1.0
    top_ids: TopIds | None = None
    teacher_top_logprobs: PerTopId | None = None
    old_top_logprobs: PerTopId | None = None
    teacher_hidden: Annotated[mx.array, "B T D"] | None = None
    trajectories: tuple[int, ...] = ()
    observation_mask: PerToken | None = None
    prefix_id: int | None = None


@dataclass(frozen=True, slots=True)
class Totals:
    """Denominators of a whole optimizer step, counted before a sequence is dropped or the batch is split.

    tokens: those the model chose; sequences: trajectories, one more for each rewritten history; groups: tasks;
    max_tokens: the sampling limit of a completion; without_signal: sequences that are counted above and not computed;
    observation_tokens: tokens of environments that are predicted.
    """

    tokens: int
    sequences: int
    groups: int
    max_tokens: int
    without_signal: int = 0
    observation_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """The micro-batches of one optimizer step, the denominators they share, and the groups that they are made of.

    dropped_tokens: by the number of a trajectory, how many tokens that the model chose lie beyond the longest sequence,
        or after one that a teacher does not have.
    observation_tokens: by the number of a trajectory, its predicted tokens of an environment, where there are any.
    dropout_seed: from which follows what adapters drop in the passes of the step.
    """

    micro_batches: tuple[MicroBatch, ...]
    totals: Totals
    groups: tuple[Group, ...] = ()
    dropped_tokens: Mapping[int, int] = field(default_factory=dict[int, int])
    observation_tokens: Mapping[int, int] = field(default_factory=dict[int, int])
    dropout_seed: int = 0

    def __iter__(self) -> Iterator[MicroBatch]:
        return iter(self.micro_batches)

    def __len__(self) -> int:
        return len(self.micro_batches)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """What a policy pass returns: [B, T] log-prob of each token; [B, T] entropy where it was asked for.

    top_logprobs: [B, T, K] log-probs of the micro-batch's top ids, where it has them.
    divergence: [B, T] from the teacher over the whole vocabulary, where that is compared.
    observation_logprobs: [B, T] log-prob of each predicted token of an environment, where that was asked for.
    """

    token_logprobs: PerToken
    entropy: PerToken | None = None
    top_logprobs: PerTopId | None = None
    divergence: PerToken | None = None
    observation_logprobs: PerToken | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Where an algorithm compares more of a distribution with a teacher's than the token that was sampled.

    support: the K most likely tokens of the "teacher", those of the "student" as they were kept while it sampled
    (`TokenDetails.top_ids`), or the whole "vocabulary".
    divergence: of the whole vocabulary: log-probs of student and teacher, [..., V] each, to [...].
    """

    support: Literal["teacher", "student", "vocabulary"]
    num_top: int = 0
    divergence: Callable[[mx.array, mx.array], mx.array] | None = None


@dataclass(frozen=True, slots=True)
class Feedback:
    """What an environment answers to an action.

    observation: what the model reads before its next action: the text of a user message, or messages.
    reward: of the action that was just taken. done: whether the episode ends with it.
    state: names the situation in which the next action is taken: equal states of a task's trajectories are compared.
    invalid: whether the action could not be taken, as a tool call that cannot be read.
    fault: what failed besides the model, as a tool that raised, in one line for people; it is counted.
    """

    observation: str | tuple[Message, ...] = ""
    reward: float = 0.0
    done: bool = False
    state: Hashable | None = None
    invalid: bool = False
    fault: str = ""
