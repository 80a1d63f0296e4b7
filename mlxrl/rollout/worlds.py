"""An episode's environment, as user code that may fail in any way: what it answers is checked, a fault is one line."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from mlxrl.data import did_you_mean
from mlxrl.rollout.pool import Call
from mlxrl.types import Environment, Feedback, Message, Task

Factory: TypeAlias = Callable[[], Environment]
Observation: TypeAlias = str | Sequence[Message]


class EpisodeError(ValueError):
    """Every environment of a rollout failed."""


@dataclass(slots=True, eq=False)
class World:
    """The environment of one episode; its methods run in threads, one at a time.

    stop: texts that end the next action; special_tokens: whether it reads them; tools: schemas of functions that the
    chat template tells the model of.
    """

    factory: Factory
    task: Task
    inner: Any = None
    stop: tuple[str, ...] = ()
    special_tokens: bool = False
    tools: tuple[Mapping[str, Any], ...] = ()

    def reset(self) -> Observation:
        """Make the environment and begin."""
        self.inner = self.factory()
        observation = _checked(self.inner.reset(self.task), "reset")
        self.tools = tuple(getattr(self.inner, "tools", None) or ())
        self._look()
        return observation

    def step(self, reply: str) -> Feedback:
        """Take an action."""
        feedback = self.inner.step(reply)
        if not isinstance(feedback, Feedback):
            raise TypeError(f"wanted a Feedback, got {_shown(feedback)}")
        _checked(feedback.observation, "an observation")
        reward: Any = feedback.reward
        reward = reward.item() if hasattr(reward, "item") else reward
        if not isinstance(reward, int | float) or not math.isfinite(reward):
            raise TypeError(f"wanted a finite number as reward, got {_shown(reward)}")
        hash(feedback.state)
        self._look()
        return replace(feedback, reward=float(reward))

    @property
    def closes(self) -> bool:
        """Whether there is something to close."""
        return callable(getattr(self.inner, "close", None))

    def close(self) -> None:
        """The episode is over."""
        self.inner.close()

    def _look(self) -> None:
        stop: Any = getattr(self.inner, "stop", None) or ()
        texts: list[Any] = [stop] if isinstance(stop, str) else list(stop)
        if not all(isinstance(text, str) and text for text in texts):
            raise TypeError(f"stop: wanted texts that are not empty, got {_shown(stop)}")
        self.stop = tuple(texts)
        self.special_tokens = bool(getattr(self.inner, "special_tokens", False))


def prepare(factory: Factory, tokenizer: Any) -> None:
    """Show a factory the tokenizer, where it is an object with a `prepare` to look at it.

    Raises:
        EpisodeError: it cannot do with the tokenizer.
    """
    made: Any = factory.func if isinstance(factory, partial) else factory
    if not isinstance(made, type) and callable(look := getattr(made, "prepare", None)):
        try:
            look(tokenizer)
        except ValueError as error:
            raise EpisodeError(f"environment: {error}") from error


def fault_of(call: Call, what: str, timeout: float) -> str:
    """How a call failed, in one line; empty where it did not."""
    if call.late:
        return f"{what}: no answer in {timeout:g} s"
    return "" if call.error is None else f"{what}: {line_of(call.error)}"


def line_of(error: BaseException) -> str:
    """An exception as one line."""
    return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")


def accept(factory: Any, arguments: Mapping[str, Any]) -> None:
    """ValueError unless a factory can be called with these keywords, and nothing else."""
    if not callable(factory):
        raise ValueError(f"wanted a class or a function that makes an environment, got {_shown(factory)}")
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        return  # it does not tell
    try:
        signature.bind(**arguments)
    except TypeError as error:
        named = [p.name for p in signature.parameters.values() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        wrong = [name for name in arguments if name not in named]
        hint = (did_you_mean(wrong[0], named) if wrong else "") or f"; it takes {', '.join(named) or 'none'}"
        raise ValueError(f"arguments: {error}{hint}") from None


def _checked(observation: Any, what: str) -> Any:
    if isinstance(observation, str):
        return observation
    if isinstance(observation, Sequence) and observation and all(map(_is_message, observation)):
        return tuple(observation)
    raise TypeError(f"wanted a text or a list of messages as {what}, got {_shown(observation)}")


def _is_message(message: Any) -> bool:
    return isinstance(message, Mapping) and isinstance(message.get("role"), str)


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {repr(value)[:60]}"
