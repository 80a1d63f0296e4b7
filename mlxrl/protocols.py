"""The protocols of what users plug in: environments and algorithms. No base class is needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import mlx.core as mx

from mlxrl.types import Feedback, Group, Logprobs, Message, Metrics, MicroBatch, Task, Totals


class Environment(Protocol):
    """What answers the model in one trajectory: a factory makes one for each, and no base class is needed.

    Its methods run in threads, one call at a time, and its task is a copy of its own. They may be async: then they are
    awaited in a loop of mlxrl's own. What it may have besides:

        stop = ()               texts that end an action where they are complete, looked at before each action
        tools = ()              schemas of functions that the chat template describes to the model, read after `reset`
        special_tokens = False  whether a reply has its special tokens written out
        thinking = False        where it is there, set before each action: whether that begins in a block of thinking
        close()                 called once its episode has ended, however it ended

    What a factory that is an object may have:

        prepare(tokenizer)      called before the episodes of a rollout; a ValueError ends that
        earns = True            whether its environments give rewards
    """

    def reset(self, task: Task) -> str | Sequence[Message] | Sequence[int]:
        """Begin at a task; returns what the model reads first: the text of a user message, messages, or token ids."""
        ...

    def step(self, reply: str) -> Feedback:
        """Take the model's action, the text of a turn without its stop token."""
        ...


@runtime_checkable
class Algorithm(Protocol):
    """Credit assignment plus a loss, both pure.

    Any object with these four members will do; `mlxrl.algo.Algorithm` composes one. `needs` names what must be there:
    a "reward", "old" and "reference" log-probs, "teacher", "entropy", the "top_ids" that were kept while sampling, the
    "observations" of environments, and the "answers" that the data hold, which then are the trajectories. It may have
    further members:

        comparison: a `Comparison`, of distributions with a teacher's. None if it does not say.
        at(step): the algorithm at a step of the run, from 0. The same at every step if it does not say.
        compares: the "group" or the "step" that a trajectory's reward is compared with, which then needs two, or
            "nothing", if it does not say.
        turns: which of the assistant's turns of the data's conversations are answers, "all", if it does not say, or the
            "last".
        skip: ids of tokens among observations that are not predicted. None of them if it does not say.
        state_dict() and load_state_dict(value): what it keeps from step to step, as strict JSON, for checkpoints.
    """

    @property
    def name(self) -> str: ...

    @property
    def needs(self) -> frozenset[str]: ...

    def advantages(self, groups: Sequence[Group]) -> list[list[float | list[float]]]:
        """For every trajectory of every group a float, or a list with a float per sampled token."""
        ...

    def loss(self, new: Logprobs, batch: MicroBatch, totals: Totals) -> tuple[mx.array, Metrics]:
        """A scalar to be summed over the step's micro-batches, and metrics.

        Metrics are scalars already divided by the step's totals, so that those of the micro-batches add up;
        those whose last part is `max` or `min` are combined by maximum and minimum instead.
        """
        ...
