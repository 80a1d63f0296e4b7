"""A guessing game: find a number by hints, in few turns. `factory = "guess.py:GuessingGame"`

guess 1-16          8
higher              12
lower               11        the number: reward 1 - 2/8
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from mlxrl.types import Feedback, Message, Task


def guessing_tasks(count: int, seed: int = 0, *, low: int = 1, high: int = 16) -> list[Task]:
    """So many tasks, each with its number in the column `secret`; they follow from the seed."""
    draw = random.Random(seed)
    return [
        Task(f"guess {low}-{high}", {"secret": draw.randint(low, high), "low": low, "high": high}) for _ in range(count)
    ]


class GuessingGame:
    """The game of one task, of `guesses` guesses at most.

    A guess is the last number of the reply. The n-th guess that is right earns 1 - (n - 1) / guesses, others nothing.
    A reply without a number of the range is invalid, and a guess spent. The state is the range that the hints leave, so
    that episodes which know the same meet again.
    """

    def __init__(self, guesses: int = 8) -> None:
        if guesses < 1:
            raise ValueError(f"guessing game: guesses: wanted at least 1, got {guesses}")
        self.guesses = guesses

    def reset(self, task: Task) -> str | Sequence[Message]:
        """Begin; the task's columns are those of `guessing_tasks`."""
        self.low, self.high = int(task.columns["low"]), int(task.columns["high"])
        self.range = (self.low, self.high)
        self.secret = int(task.columns["secret"])
        self.taken = 0
        return task.prompt

    def step(self, reply: str) -> Feedback:
        """Take a guess."""
        self.taken += 1
        guess = self._guess(reply)
        if guess == self.secret:
            return Feedback("right", 1 - (self.taken - 1) / self.guesses, done=True)
        hint = f"a number {self.low}-{self.high}"
        if guess is not None:
            hint = self._compared(guess)
        return Feedback(hint, done=self.taken == self.guesses, state=self.range, invalid=guess is None)

    def _guess(self, reply: str) -> int | None:
        found = re.findall(r"-?\d+", reply)
        number = int(found[-1]) if found and len(found[-1]) < 10 else None
        return number if number is not None and self.low <= number <= self.high else None

    def _compared(self, guess: int) -> str:
        low, high = self.range
        if guess < self.secret:
            self.range = (max(low, guess + 1), high)
            return "higher"
        self.range = (low, min(high, guess - 1))
        return "lower"
