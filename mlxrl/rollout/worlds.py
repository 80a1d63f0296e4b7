"""An episode's environment, as user code that may fail in any way: what it answers is checked, a fault is one line."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from mlxrl.errors import did_you_mean
from mlxrl.rollout.pool import Call
from mlxrl.types import Environment, Feedback, Message, Task

Factory: TypeAlias = Callable[[], Environment]
Observation: TypeAlias = str | Sequence[Message]
LARGEST = 1e30  # of a reward or a penalty: sums over turns, and their squares, stay finite
LONGEST = 1e6  # seconds of a call


class EpisodeError(ValueError):
    """Every environment of a rollout failed."""


class Copying(partial[Any]):
    """A factory with arguments, of which each environment gets copies: what it does to them reaches no other."""

    def __call__(self, /) -> Any:
        """Make an environment."""
        return self.func(**deepcopy(self.keywords))


@dataclass(slots=True, eq=False)
class World:
    """The environment of one episode; its methods run in threads, one at a time.

    stop: texts that end the next action; special_tokens: whether it reads them; tools: schemas of functions that the
    chat template tells the model of. closes: whether there is something to close. key: what is read first, as text
    that is the same for attempts that begin alike.
    """

    factory: Factory
    task: Task
    inner: Any = None
    stop: tuple[str, ...] = ()
    special_tokens: bool = False
    tools: tuple[Mapping[str, Any], ...] = ()
    closes: bool = False
    key: str = ""

    def reset(self) -> Observation:
        """Make the environment and begin, at a copy of the task: the original is what is scored."""
        self.inner = self.factory()
        if not all(callable(getattr(self.inner, name, None)) for name in ("reset", "step")):
            raise TypeError(f"the factory gave {_kind(self.inner)}; wanted an object with reset and step")
        self.closes = callable(getattr(self.inner, "close", None))
        own = replace(self.task, prompt=deepcopy(self.task.prompt), columns=deepcopy(dict(self.task.columns)))
        observation = _checked(self.inner.reset(own), "reset")
        tools: tuple[Any, ...] = tuple(getattr(self.inner, "tools", None) or ())
        if strange := [tool for tool in tools if not isinstance(tool, Mapping)]:
            raise TypeError(f"tools: wanted schemas of functions, got {_shown(strange[0])}")
        self.tools = tools
        self._look()
        self.key = repr((observation, self.tools))
        return observation

    def step(self, reply: str) -> Feedback:
        """Take an action."""
        feedback = self.inner.step(reply)
        if not isinstance(feedback, Feedback):
            raise TypeError(f"wanted a Feedback, got {_shown(feedback)}")
        _checked(feedback.observation, "an observation")
        reward: Any = feedback.reward
        reward = reward.item() if hasattr(reward, "item") else reward
        if not isinstance(reward, int | float) or not -LARGEST <= reward <= LARGEST:
            raise TypeError(f"wanted a number from -{LARGEST:g} to {LARGEST:g} as reward, got {_shown(reward)}")
        flags = {name: _flag(name, getattr(feedback, name)) for name in ("done", "invalid")}
        _refuse_state(feedback.state)
        self._look()
        return replace(feedback, reward=float(reward), **flags)

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


def earns(factory: Factory | None) -> bool:
    """Whether there are environments and they give rewards, which a factory with `earns = False` says they do not."""
    return factory is not None and bool(getattr(_bare(factory), "earns", True))


def prepare(factory: Factory, tokenizer: Any) -> None:
    """Show a factory the tokenizer, where it is an object with a `prepare` to look at it.

    Raises:
        EpisodeError: it cannot do with the tokenizer.
    """
    made = _bare(factory)
    if not isinstance(made, type) and callable(look := getattr(made, "prepare", None)):
        try:
            look(tokenizer)
        except ValueError as error:
            raise EpisodeError(f"environment: {error}") from error


def _bare(factory: Factory) -> Any:
    """A factory without its arguments."""
    return factory.func if isinstance(factory, partial) else factory


def fault_of(call: Call, what: str, timeout: float) -> str:
    """How a call failed, in one line; empty where it did not."""
    if call.late or not call.done:
        return f"{what}: no answer in {timeout:g} s"
    return "" if call.error is None else f"{what}: {line_of(call.error)}"


def line_of(error: BaseException) -> str:
    """An exception as one line."""
    try:
        text = str(error)
    except (Exception, SystemExit):  # noqa: BLE001  (user code too)
        text = "its message cannot be shown"
    return " ".join(f"{type(error).__name__}: {text}".split()).removesuffix(":")


def accept(factory: Any, arguments: Mapping[str, Any]) -> None:
    """ValueError unless a factory can be called with these keywords, and nothing else."""
    if not callable(factory):
        raise ValueError(f"wanted a class or a function that makes an environment, got {_shown(factory)}")
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        return  # it does not tell
    parameters = signature.parameters.values()
    named = [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    takes = f"; it takes {', '.join(named) or 'none'}"
    wrong = [name for name in arguments if name not in named]
    if wrong and not any(p.kind is p.VAR_KEYWORD for p in parameters):
        hint = did_you_mean(wrong[0], named) or takes
        raise ValueError(f"arguments: got an unexpected keyword argument {wrong[0]!r}{hint}")
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise ValueError(f"arguments: {error}{takes}") from None


def _checked(observation: Any, what: str) -> Any:
    if isinstance(observation, str):
        return observation
    if isinstance(observation, Sequence) and observation and all(map(_is_message, observation)):
        for message in observation:
            str(message.get("content"))  # one that cannot be shown raises here
        return tuple(observation)
    raise TypeError(f"wanted a text or a list of messages as {what}, got {_shown(observation)}")


def _flag(name: str, value: Any) -> bool:
    value = value.item() if hasattr(value, "item") else value
    if not isinstance(value, bool):
        raise TypeError(f"{name}: wanted True or False, got {_shown(value)}")
    return value


def _refuse_state(state: Any) -> None:
    """TypeError for a state that cannot be compared, as algorithms do that look states up."""
    try:
        hash(state)
    except TypeError:
        raise TypeError(f"state: wanted a hashable value, such as a tuple, got {type(state).__name__}") from None
    _ = bool(state == state)  # one that raises does so here


def _kind(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def _is_message(message: Any) -> bool:
    return isinstance(message, Mapping) and isinstance(message.get("role"), str)


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {repr(value)[:60]}"
