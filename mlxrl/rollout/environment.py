"""An episode's environment, as user code that may fail in any way: what it answers is checked, a fault is one line."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from mlxrl.awaiting import begin
from mlxrl.errors import UserError, brief
from mlxrl.messages import checked_text, messages_of
from mlxrl.plugins import check_keywords
from mlxrl.protocols import Environment
from mlxrl.rollout.chat import Observation, is_token_ids
from mlxrl.settings import LARGEST_REWARD, LONGEST
from mlxrl.types import Feedback, Task

Factory: TypeAlias = Callable[[], Environment]


class EpisodeError(UserError):
    """Every environment of a rollout failed, or what makes them is of no use."""


@dataclass(slots=True, eq=False)
class EnvironmentHandle:
    """The environment of one episode; its methods run in threads, one at a time.

    timeout: seconds of a call. stop, special_tokens, tools, close: see `protocols.Environment`. prompt_key: what is
    read first, as text that is the same for episodes that begin alike.
    """

    factory: Factory
    task: Task
    timeout: float = LONGEST
    inner: Any = None
    stop: tuple[str, ...] = ()
    special_tokens: bool = False
    tools: tuple[Mapping[str, Any], ...] = ()
    close: Callable[[], Any] | None = None
    prompt_key: str = ""

    def reset(self) -> Observation:
        """Make the environment and begin, at a copy of the task: the original is what is scored."""
        self.inner = self._awaited(self.factory())
        if not all(callable(getattr(self.inner, name, None)) for name in ("reset", "step")):
            raise TypeError(f"the factory gave {brief(self.inner)}; wanted an object with reset and step")
        close = getattr(self.inner, "close", None)
        self.close = (lambda: self._awaited(close())) if callable(close) else None
        own = replace(self.task, prompt=deepcopy(self.task.prompt), columns=deepcopy(dict(self.task.columns)))
        observation = _observation(self._awaited(self.inner.reset(own)), "reset")
        tools: tuple[Any, ...] = tuple(getattr(self.inner, "tools", None) or ())
        if strange := [tool for tool in tools if not isinstance(tool, Mapping)]:
            raise TypeError(f"tools: wanted schemas of functions, got {brief(strange[0])}")
        self.tools = tools
        self._read()
        self.prompt_key = repr((observation, self.tools))
        return observation

    def step(self, reply: str, thinking: bool = False) -> Feedback:
        """Take an action; thinking: whether it begins inside a block of thinking."""
        if hasattr(self.inner, "thinking"):
            self.inner.thinking = thinking
        feedback = self._awaited(self.inner.step(reply))
        if not isinstance(feedback, Feedback):
            raise TypeError(f"wanted a Feedback, got {brief(feedback)}")
        observation: Any = _observation(feedback.observation, "an observation")
        if is_token_ids(observation):
            raise TypeError(f"wanted a text or a list of messages as an observation, got {brief(observation)}")
        reward: Any = _plain(feedback.reward)
        if not isinstance(reward, int | float) or not -LARGEST_REWARD <= reward <= LARGEST_REWARD:
            bounds = f"from -{LARGEST_REWARD:g} to {LARGEST_REWARD:g}"
            raise TypeError(f"wanted a number {bounds} as reward, got {brief(reward)}")
        flags = {name: _plain(getattr(feedback, name)) for name in ("done", "invalid")}
        for name, flag in flags.items():
            if not isinstance(flag, bool):
                raise TypeError(f"{name}: wanted True or False, got {brief(flag)}")
        fault: Any = feedback.fault
        if not isinstance(fault, str):
            raise TypeError(f"fault: wanted a text, got {brief(fault)}")
        try:
            hash(feedback.state)  # algorithms look states up
        except TypeError:
            kind = type(feedback.state).__name__
            raise TypeError(f"state: wanted a hashable value, such as a tuple, got {kind}") from None
        _ = bool(feedback.state == feedback.state)  # one that raises does so here
        self._read()
        return replace(feedback, observation=observation, reward=float(reward), **flags)

    def _awaited(self, value: Any) -> Any:
        """What a method has returned; where it is async, what that gives in its time."""
        if not inspect.isawaitable(value):
            return value
        found, error = begin(type(self.inner).__name__, lambda: value, self.timeout)()
        if error is not None:
            raise error
        return found

    def _read(self) -> None:
        """What the environment wants of the next action."""
        stop: Any = getattr(self.inner, "stop", None) or ()
        texts: tuple[Any, ...] = (stop,) if isinstance(stop, str) else tuple(stop)
        if not all(isinstance(text, str) and text for text in texts):
            raise TypeError(f"stop: wanted texts that are not empty, got {brief(stop)}")
        self.stop = texts
        self.special_tokens = bool(getattr(self.inner, "special_tokens", False))


def gives_rewards(factory: Factory | None) -> bool:
    """Whether there are environments and they give rewards, which a factory with `earns = False` says they do not."""
    return factory is not None and bool(getattr(_bare(factory), "earns", True))


def prepare(factory: Factory, tokenizer: Any) -> None:
    """Give a factory that is an object with a `prepare` the tokenizer; EpisodeError where it cannot be used."""
    bare = _bare(factory)
    if not isinstance(bare, type) and callable(function := getattr(bare, "prepare", None)):
        try:
            function(tokenizer)
        except ValueError as error:
            raise EpisodeError("environment", str(error)) from error


def _bare(factory: Factory) -> Any:
    return factory.func if isinstance(factory, partial) else factory


def check_factory(factory: Any, arguments: Mapping[str, Any]) -> None:
    """UserError unless a factory can be called with these keywords, and nothing else."""
    if not callable(factory):
        raise EpisodeError(f"wanted a class or a function that makes an environment, got {brief(factory)}")
    check_keywords(factory, arguments)


def _observation(observation: Any, what: str) -> Observation:
    if not isinstance(observation, Sequence) or isinstance(observation, bytes) or observation in ((), []):
        raise TypeError(f"wanted a text or a list of messages as {what}, got {brief(observation)}")
    if is_token_ids(observation):
        return tuple(observation)
    try:
        return checked_text("", observation) if isinstance(observation, str) else messages_of(observation)
    except UserError as error:
        raise TypeError(f"{what}: {error}") from None


def _plain(value: Any) -> Any:
    """A number of NumPy or MLX as one of Python."""
    return value.item() if hasattr(value, "item") else value
