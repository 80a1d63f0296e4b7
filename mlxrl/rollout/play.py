"""Episodes over the batched decode loop: every live row of every environment decodes together.

An action is handed to its environment as soon as it has ended, while others are still being drawn. Answers are gone on
with together: what they say is one forward, with what is new to others, and rows that decode at the same time cost
little more than one. So those that are there wait until nobody draws any more, or until they are a share of the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Integral, Real
from typing import Any, TypedDict

import mlx.core as mx

from mlxrl.policy.policy import Policy
from mlxrl.rewards import earned
from mlxrl.rollout.decode import Loop
from mlxrl.rollout.pool import Call, Pool
from mlxrl.rollout.render import PromptError
from mlxrl.rollout.row import Request, Row
from mlxrl.rollout.rules import Processor, Rules
from mlxrl.rollout.sampling import fold
from mlxrl.rollout.turns import Chat, Opening, go_on, observed, open_chat, turn_of
from mlxrl.rollout.worlds import LARGEST, LONGEST, EpisodeError, Factory, Observation, World, fault_of
from mlxrl.types import Feedback, Group, Stop, Task, Trajectory, Turn

LUMP = 0.25  # share of the rows that have answers at which these are gone on with while others draw
CLOSING = 5.0  # seconds that environments are given to close at the end
HURRIED = 0.2  # the same, while one of an earlier rollout still hangs
EMPTY = Opening(Chat(), ())

_hanging: list[Call] = []  # the last call of close that did not come back in time


class Limits(TypedDict, total=False):
    """See `Bounds`."""

    max_turns: int
    max_episode_tokens: int | None
    timeout: float
    invalid_penalty: float


@dataclass(frozen=True, slots=True)
class Bounds:
    """What an episode may take.

    max_turns: actions; max_episode_tokens: tokens that are sampled, over all turns, None for no limit but that of each
    turn; timeout: seconds of a call of the environment; invalid_penalty: what an invalid action loses.
    """

    max_turns: int = 8
    max_episode_tokens: int | None = None
    timeout: float = 60.0
    invalid_penalty: float = 0.0

    def __post_init__(self) -> None:
        _refuse("max_turns", _whole(self.max_turns), "a whole number of at least 1", self.max_turns)
        most = self.max_episode_tokens
        _refuse("max_episode_tokens", most is None or _whole(most), "a whole number of at least 1, or None", most)
        right = _number(self.timeout) and 0 < self.timeout <= LONGEST
        _refuse("timeout", right, f"more than 0 and at most {LONGEST:g} seconds", self.timeout)
        right = _number(self.invalid_penalty) and 0 <= self.invalid_penalty <= LARGEST
        _refuse("invalid_penalty", right, f"at least 0 and at most {LARGEST:g}", self.invalid_penalty)


def _whole(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= 1


def _number(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, Real)


def _refuse(name: str, right: bool, wanted: str, value: Any) -> None:
    if not right:
        raise ValueError(f"environment: {name}: wanted {wanted}, got {value!r}")


@dataclass(slots=True, eq=False)
class Episode:
    """An episode on its way.

    row: of its present turn; opening: what that row has read; seen: the same as text; state: in which it acts;
    stop, error, close_error: how it ended, see `Trajectory`. closing: the call that closes its environment.
    """

    number: int
    world: World
    turns: list[Turn] = field(default_factory=list[Turn])
    row: Row | None = None
    opening: Opening = EMPTY
    seen: str = ""
    state: Hashable | None = None
    stop: Stop | None = None
    error: str = ""
    close_error: str = ""
    closing: Call | None = None

    @property
    def drawn(self) -> int:
        """Tokens sampled so far."""
        return sum(len(turn.tokens) for turn in self.turns)

    def trajectory(self, rules: Rules) -> Trajectory:
        """The episode once it has ended, its return as a part of the reward."""
        assert self.stop is not None
        bare = Trajectory(
            self.world.task, tuple(self.turns), stop=self.stop, sampling=rules.sampling, error=self.error,
            close_error=self.close_error,
        )  # fmt: skip
        return bare if self.stop == "error" else earned(bare)


class Play:
    """The episodes of a rollout.

    keys: [N, 2], of the first turns; a later turn draws from a key made of its episode's and its number.
    """

    def __init__(
        self,
        policy: Policy,
        tasks: Sequence[Task],
        environment: Factory,
        bounds: Bounds,
        rules: Rules,
        keys: mx.array,
        group_size: int,
        *,
        max_rows: int = 32,
        thinking: bool | None = None,
        processors: Sequence[Processor] = (),
    ) -> None:
        self.policy, self.tokenizer, self.bounds, self.group_size = policy, policy.tokenizer, bounds, group_size
        self.rules = replace(rules, holds=bounds.max_turns > 1)
        self.thinking = thinking
        self.options: dict[str, Any] = {"max_rows": max_rows, "processors": processors, "text": policy.tokenizer.decode}
        worlds = [World(environment, task) for task in tasks for _ in range(group_size)]
        self.episodes = [Episode(number, world) for number, world in enumerate(worlds)]
        self.keys = [keys]
        self.pool, self.closing = Pool(bounds.timeout), Pool(bounds.timeout)
        self._calls: dict[int, tuple[Call, Episode]] = {}
        self._rows: dict[int, Episode] = {}
        self._ready: list[Call] = []
        self._openings: dict[str, Opening] = {}

    def run(self) -> None:
        """Play every episode to its end.

        Raises:
            EpisodeError: the environment failed in every one of them.
        """
        try:
            loop = self._begin()
            with loop.session():
                while True:
                    for row in loop.decode(partial(self._between, loop)):
                        self._ended(row)
                    if not (self.pool.calls or self._ready or loop.queue):
                        break
                    self._ready += self.pool.wait(some=bool(self._ready))
                    self._go_on(loop)
        finally:
            self._close()
        faults = [episode.error for episode in self.episodes if episode.error]
        if faults and len(faults) == len(self.episodes):
            raise EpisodeError(f"environment: failed in each of {len(faults)} episodes: {faults[0]}")

    def groups(self) -> tuple[Group, ...]:
        """The episodes that have ended, group by group."""
        starts = range(0, len(self.episodes), self.group_size)
        members = [self.episodes[start : start + self.group_size] for start in starts]
        return tuple(
            tuple(episode.trajectory(self.rules) for episode in group if episode.stop is not None) for group in members
        )

    def _begin(self) -> Loop:
        """Reset every environment, and line up the rows of their first turns in the order of the episodes."""
        for episode in self.episodes:
            self._call(episode, episode.world.reset)
        begun: list[tuple[Episode, Request]] = []
        for call in self.pool.wait(grace=None):
            episode = self._answer(call, "reset")
            if episode is not None and (request := self._opened(episode, call.value)):
                begun.append((episode, request))
        begun.sort(key=lambda pair: pair[0].number)
        requests = [request for _, request in begun]
        loop = Loop(self.policy.model, self.policy.head, requests, self.rules, **self.options)
        for (episode, _), row in zip(begun, loop.ordered, strict=True):
            self._seat(episode, row)
        return loop

    def _opened(self, episode: Episode, observation: Observation) -> Request | None:
        """The first request of an episode. Attempts at a task begin alike, so what they read is rendered once."""
        tools, key = episode.world.tools, episode.world.key
        try:
            if key not in self._openings:
                self._openings[key] = open_chat(self.tokenizer, observation, self.thinking, tools)
        except PromptError as error:
            self._finish(episode, "error", f"reset: {error}")
            return None
        episode.opening, episode.seen = self._openings[key], observed(observation)
        episode.state = episode.opening.ids
        return self._request(episode, episode.opening.ids)

    def _request(self, episode: Episode, prompt: tuple[int, ...]) -> Request:
        turn, most = len(episode.turns), self.bounds.max_episode_tokens
        while turn >= len(self.keys):
            self.keys.append(fold(self.keys[0], mx.full((len(self.episodes),), len(self.keys))))
        limit = None if most is None else most - episode.drawn
        return Request(prompt, self.keys[turn][episode.number], limit, episode.world.stop)

    def _seat(self, episode: Episode, row: Row) -> None:
        self._rows[id(row)] = episode
        episode.row = row

    def _ended(self, row: Row) -> None:
        """Hand the action of a row that has ended to its environment."""
        episode = self._rows[id(row)]
        turn = turn_of(self.tokenizer, row, self.rules.sampling, episode.opening.ids)
        turn = replace(turn, state=episode.state, observation_text=episode.seen)
        turn = replace(turn, history_rewritten=episode.opening.fresh, new_suffix=episode.opening.new)
        episode.turns.append(turn)
        if row.stop == "error":
            return self._finish(episode, "error")
        if not row.ids:
            return self._finish(episode, "length")
        reply = turn.text
        if episode.world.special_tokens:
            ids = row.ids[:-1] if row.ids[-1] in self.rules.stops else row.ids
            reply = self.tokenizer.decode(ids)
        return self._call(episode, lambda: episode.world.step(reply))

    def _call(self, episode: Episode, function: Callable[[], Any]) -> None:
        call = self.pool.submit(function)
        self._calls[id(call)] = call, episode

    def _answer(self, call: Call, what: str) -> Episode | None:
        """The episode of a call that has come back; None where it failed, and so has ended."""
        _, episode = self._calls.pop(id(call))
        if fault := fault_of(call, what, self.bounds.timeout):
            self._finish(episode, "error", fault)
            return None
        return episode

    def _between(self, loop: Loop) -> None:
        """Go on with answers while others draw, once they are enough; where nobody draws, all are waited for."""
        self._ready += self.pool.finished()
        if loop.batch.live() and len(self._ready) >= LUMP * len(loop.batch.taken()):
            self._go_on(loop)

    def _go_on(self, loop: Loop) -> None:
        """Go on with the episodes whose environments have answered."""
        ready, self._ready = self._ready, []
        for call in ready:
            if (episode := self._answer(call, "step")) is not None:
                self._take(loop, episode, call.value)

    def _take(self, loop: Loop, episode: Episode, feedback: Feedback) -> None:
        """Credit an action with what its environment answered, and let the row go on behind it."""
        row = episode.row
        assert row is not None
        penalty = self.bounds.invalid_penalty if feedback.invalid else 0.0
        reward = feedback.reward - penalty
        episode.turns[-1] = replace(episode.turns[-1], reward=reward, invalid=feedback.invalid)
        most = self.bounds.max_episode_tokens
        if feedback.done:
            return self._finish(episode, "done")
        if len(episode.turns) >= self.bounds.max_turns:
            return self._finish(episode, "length" if row.stop == "length" else "turns")
        if most is not None and episode.drawn >= most:
            return self._finish(episode, "length")
        try:
            opening = go_on(
                self.tokenizer, episode.opening.chat, row.ids, self.rules.stops, feedback.observation, self.thinking
            )
        except PromptError as error:
            return self._finish(episode, "error", f"step: {error}")
        episode.opening, episode.seen, episode.state = opening, observed(feedback.observation), feedback.state
        prompt = opening.ids if opening.fresh else (*row.prompt, *row.ids, *opening.ids)
        new = loop.resume(row, self._request(episode, prompt))
        self._rows.pop(id(row))
        self._seat(episode, new)
        return self._finish(episode, "length") if new.stop is not None else None  # no room for a token is left

    def _finish(self, episode: Episode, stop: Stop, error: str = "") -> None:
        episode.stop, episode.error = stop, error
        if episode.row is not None:
            episode.row.held = False
        self._leave(episode)

    def _leave(self, episode: Episode) -> None:
        if episode.world.closes:
            episode.closing = self.closing.submit(episode.world.close)

    def _close(self) -> None:
        """Close what is still open, and give the environments a little time for it."""
        for episode in self.episodes:
            if episode.stop is None:
                self._leave(episode)
        self.pool.close(0.0)
        patience = min(self.bounds.timeout, HURRIED if any(not call.done for call in _hanging) else CLOSING)
        self.closing.close(patience)
        for episode in self.episodes:
            if episode.closing is not None:
                episode.close_error = fault_of(episode.closing, "close", patience)
                if not episode.closing.done:
                    _hanging[:] = [episode.closing]
