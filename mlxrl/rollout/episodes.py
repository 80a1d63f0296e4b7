"""Episodes: the turns of trajectories, from what each reads first to its end.

Without an environment an episode has one turn. With one, an action goes to its environment as soon as it has ended,
while others are still being drawn, and the answer is what the model reads before its next action.
"""

from __future__ import annotations

import threading
from collections import abc
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import mlx.core as mx

from mlxrl.errors import one_line
from mlxrl.policy.policy import TokenError
from mlxrl.rewards import earned
from mlxrl.rollout.chat import Chat, Observation, PromptError, continue_chat, observed, start_chat, too_long
from mlxrl.rollout.draw import fold
from mlxrl.rollout.engine import Engine
from mlxrl.rollout.environment import EnvironmentHandle, EpisodeError, Factory
from mlxrl.rollout.sequence import Request, Sequence
from mlxrl.rollout.workers import Call, Workers
from mlxrl.settings import EpisodeLimits, Sampling
from mlxrl.types import Feedback, Group, Stop, Task, Trajectory, Turn

CLOSING = "mlxrl close"  # name of the threads that close environments
CLOSE_TIMEOUT = 5.0  # seconds that environments are given to close at the end
LINE = 300  # characters of a fault that are kept
SHORT_CLOSE_TIMEOUT = 0.2  # the same, where one of an earlier rollout still hangs


@dataclass(slots=True, eq=False)
class Episode:
    """A trajectory under way.

    environment: None for a single turn. sequence: of its present turn; chat: what that has read; observation_text,
    state: see `Turn`; stop, error: see `Trajectory`. closing: the call that closes the environment.
    """

    number: int
    task: Task
    environment: EnvironmentHandle | None
    turns: list[Turn] = field(default_factory=list[Turn])
    sequence: Sequence | None = None
    chat: Chat = field(default_factory=Chat)
    observation_text: str = ""
    state: abc.Hashable | None = None
    stop: Stop | None = None
    error: str = ""
    closing: Call | None = None

    @property
    def num_tokens(self) -> int:
        return sum(len(turn.tokens) for turn in self.turns)


class Episodes:
    """The episodes of a rollout, `group_size` for every task. A context, after which their environments are closed.

    keys: [N, 2], of the first turns; a later turn draws from a key made of its episode's and its number.
    """

    def __init__(
        self,
        tokenizer: Any,
        tasks: abc.Sequence[Task],
        group_size: int,
        sampling: Sampling,
        environment: Factory | None,
        limits: EpisodeLimits,
        keys: mx.array,
    ) -> None:
        self.tokenizer, self.group_size, self.sampling, self.limits = tokenizer, group_size, sampling, limits
        self.keeps, self.keys = environment is not None and limits.max_turns > 1, [keys]
        self.episodes = [
            Episode(number, task, EnvironmentHandle(environment, task, limits.timeout) if environment else None)
            for number, task in enumerate(task for task in tasks for _ in range(group_size))
        ]
        self.closing, self.close_timeout = Workers(limits.timeout, CLOSING), 0.0
        self._firsts: dict[str, Chat] = {}

    def begin(self, engine: Engine, workers: Workers) -> None:
        """Submit the first turns. Environments are reset before, and waited for, so that equal prompts are run once."""
        self.engine, self.workers = engine, workers
        for episode in self.episodes:
            if episode.environment is None:
                self._first(episode, episode.task.prompt)
            else:
                workers.submit(episode.environment.reset, episode)
        for answer in workers.wait(grace=None):
            self.observed(answer)

    def acted(self, sequence: Sequence) -> None:
        """Note a turn that has ended, and hand its action to the environment; without one the episode is over."""
        episode: Episode = sequence.request.owner
        if sequence.limit <= 0:
            if episode.turns:
                return self._finish(episode, "length")  # the observation has filled the context
            length = len(sequence.prompt)
            name = "reset: " if episode.environment else ""
            return self._finish(episode, "error", name + too_long(length, length + sequence.limit))
        chat, stopped = episode.chat, sequence.tokens[-1:] and sequence.tokens[-1] in sequence.rules.stop_ids
        special = self.tokenizer.decode(sequence.tokens[:-1] if stopped else sequence.tokens)
        episode.turns.append(Turn(
            chat.ids, tuple(sequence.tokens), tuple(sequence.logprobs),
            self.tokenizer.decode(sequence.tokens, skip_special_tokens=True), details=sequence.details,
            state=episode.state, observation_text=episode.observation_text,
            history_rewritten=chat.history_rewritten, new_suffix=chat.new_suffix, special_text=special,
        ))  # fmt: skip
        if (handle := episode.environment) is None or sequence.stop == "error":
            return self._finish(episode, sequence.stop)
        if not sequence.tokens:
            return self._finish(episode, "length")
        reply = special if handle.special_tokens else episode.turns[-1].text
        thinking = sequence.rules.opened_by(sequence.prompt)
        self.workers.submit(partial(handle.step, reply, thinking), episode)

    def observed(self, answer: Call) -> None:
        """Continue with what an environment has answered."""
        episode: Episode = answer.owner
        name = "step" if episode.turns else "reset"
        if fault := answer.fault(name, self.limits.timeout):
            return self._finish(episode, "error", fault)
        try:
            if episode.turns:
                self._next(episode, answer.value)
            else:
                self._first(episode, answer.value)
        except (PromptError, TokenError) as error:
            self._finish(episode, "error", f"{name}: {error}")

    def groups(self) -> tuple[Group, ...]:
        """The trajectories of episodes that have ended, group by group."""
        starts = range(0, len(self.episodes), self.group_size)
        groups = [self.episodes[start : start + self.group_size] for start in starts]
        return tuple(tuple(self._trajectory(one, one.stop) for one in group if one.stop) for group in groups)

    def require_one(self) -> None:
        """EpisodeError where the environment failed in every episode."""
        faults = [episode.error for episode in self.episodes if episode.error and episode.environment]
        if faults and len(faults) == len(self.episodes):
            raise EpisodeError("environment", f"failed in each of {len(faults)} episodes: {faults[0]}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Close what is still open, and give the environments a little time for it."""
        for episode in self.episodes:
            if episode.stop is None:
                self._close(episode)
        hangs = any(one.name == CLOSING and one not in self.closing.threads for one in threading.enumerate())
        self.close_timeout = min(self.limits.timeout, SHORT_CLOSE_TIMEOUT if hangs else CLOSE_TIMEOUT)
        self.closing.close(self.close_timeout)

    def _first(self, episode: Episode, observation: Observation) -> None:
        """Submit the first turn. Episodes of a task begin alike, so what they read is rendered once."""
        handle = episode.environment
        key, tools = (handle.prompt_key, handle.tools) if handle else (repr(observation), ())
        if key not in self._firsts:
            self._firsts[key] = start_chat(self.tokenizer, observation, self.sampling.thinking, tools)
        episode.chat = self._firsts[key]
        if handle:
            episode.observation_text, episode.state = observed(observation), episode.chat.ids
        self._submit(episode)

    def _next(self, episode: Episode, feedback: Feedback) -> None:
        """Credit an action with what its environment answered, and submit the next turn."""
        sequence = episode.sequence
        assert sequence is not None
        reward = feedback.reward - (self.limits.invalid_penalty if feedback.invalid else 0.0)
        episode.turns[-1] = replace(
            episode.turns[-1], reward=reward, invalid=feedback.invalid, fault=one_line(feedback.fault, LINE)
        )
        if (stop := self._limit(episode, sequence, feedback.done)) is not None:
            return self._finish(episode, stop)
        stop_ids, observation = sequence.rules.stop_ids, feedback.observation
        episode.chat = continue_chat(self.tokenizer, episode.chat, sequence.tokens, stop_ids, observation)
        episode.observation_text, episode.state = observed(observation), feedback.state
        self._submit(episode)

    def _limit(self, episode: Episode, sequence: Sequence, done: bool) -> Stop | None:
        """Why an episode ends after a turn, None where it does not."""
        most = self.limits.max_episode_tokens
        if done:
            return "done"
        if len(episode.turns) >= self.limits.max_turns:
            return "length" if sequence.stop == "length" else "turns"
        return "length" if most is not None and episode.num_tokens >= most else None

    def _submit(self, episode: Episode) -> None:
        """Submit the next turn: it continues the sequence of the last one, unless that is not a part of its prompt."""
        turn, most, sequence = len(episode.turns), self.limits.max_episode_tokens, episode.sequence
        while turn >= len(self.keys):
            self.keys.append(fold(self.keys[0], mx.full((len(self.episodes),), len(self.keys))))
        key, limit = self.keys[turn][episode.number], None if most is None else most - episode.num_tokens
        strings = episode.environment.stop if episode.environment else ()
        if sequence is not None and not episode.chat.history_rewritten:
            ids = episode.chat.ids
            episode.sequence = self.engine.extend(sequence, ids, key=key, limit=limit, stop_strings=strings)
            return
        if sequence is not None:
            self.engine.cancel(sequence)
        request = Request(
            episode.chat.ids, key, self.sampling, limit, stop_strings=strings, keep=self.keeps, owner=episode
        )
        episode.sequence = self.engine.submit(request)

    def _trajectory(self, episode: Episode, stop: Stop) -> Trajectory:
        """An episode that has ended, what its environment gave as a part of the reward."""
        made = Trajectory(
            episode.task, tuple(episode.turns), stop=stop, sampling=self.sampling, error=episode.error,
            close_error=episode.closing.fault("close", self.close_timeout) if episode.closing else "",
        )  # fmt: skip
        return made if episode.environment is None or stop == "error" else earned(made)

    def _finish(self, episode: Episode, stop: Any, error: str = "") -> None:
        episode.stop, episode.error = stop, error
        if episode.sequence is not None:
            self.engine.cancel(episode.sequence)
        self._close(episode)

    def _close(self, episode: Episode) -> None:
        if episode.environment is not None and episode.environment.close is not None:
            episode.closing = self.closing.submit(episode.environment.close)
