"""Games of TextArena as environments (pip install textarena): one player, or two against an opponent of yours.

    from functools import partial
    from examples.textarena_env import TextArena, game_tasks

    groups = rl.sample(policy, game_tasks("GuessTheNumber-v0", 8), group_size=8, environment=TextArena)

or in TOML, with rows {"prompt": "GuessTheNumber-v0", "seed": 3}:

    [environment]
    factory = "textarena_env.py:TextArena"
    max_turns = 12

The task's prompt names the game, its column `seed` what is drawn in it. The reward is the game's, at its end.
"""

import random
import threading
from contextlib import contextmanager

import textarena as ta

from mlxrl.types import Feedback, Task

_LOCK = threading.Lock()


def game_tasks(game, count, seed=0):
    """So many tasks of a game, which differ in their seeds."""
    return [Task(game, {"seed": seed * 1_000_003 + number}) for number in range(count)]


class TextArena:
    """One game.

    opponent: takes an observation and returns the other player's action, for games of two; the model is player 0.
    settings: of the game, as `max_turns`.
    """

    def __init__(self, opponent=None, **settings):
        self.opponent, self.settings = opponent, settings
        self.random = None

    def reset(self, task):
        """Begin the game that the task names."""
        with self._own_random():
            self.game = ta.make(f"{task.prompt}-raw", **self.settings)
            self.game.reset(num_players=1 if self.opponent is None else 2, seed=int(task.columns["seed"]))
            self._others()
        return self._observed()[0]

    def step(self, reply):
        """Take the model's action, and the opponent's."""
        with self._own_random():
            done, _ = self.game.step(reply)
            invalid = self._invalid()
            done = done or self._others()
        if done:
            rewards, _ = self.game.close()
            return Feedback(reward=float(rewards[0]), done=True, invalid=invalid)
        text, board = self._observed()
        return Feedback(text, state=board, invalid=invalid)

    def _others(self):
        """Let the opponent move while it is its turn; returns whether the game is over."""
        done = False
        while not done and self.opponent is not None and self.game.state.current_player_id == 1:
            done, _ = self.game.step(self.opponent(self._observed()[0]))
        return done

    def _observed(self):
        """What is new to the player whose turn it is, and the board among it, None without one."""
        _, messages = self.game.get_observation()
        read = [(text.strip(), kind) for _, text, kind in messages if kind != ta.ObservationType.PLAYER_ACTION]
        boards = [text for text, kind in read if kind == ta.ObservationType.GAME_BOARD]
        return "\n".join(text for text, _ in read), boards[-1] if boards else None

    def _invalid(self):
        state = self.game.state
        return bool(state.game_info[0]["invalid_move"] or (state.current_player_id == 0 and state.error_count))

    @contextmanager
    def _own_random(self):
        """Games draw from Python's one generator: each has a state of its own, and the others wait."""
        with _LOCK:
            outside = random.getstate()
            if self.random is not None:
                random.setstate(self.random)
            try:
                yield
            finally:
                self.random = random.getstate()
                random.setstate(outside)
