"""A text maze, in which places are met again: `factory = "environments/maze.py:Maze"` beside `examples/maze.toml`.

to C2. at A1: es          e
at B1: esw                s
at B2: n                  e
wall. at B2: n            n          invalid
...                                  the reward 1 at C2
"""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from mlxrl.types import Feedback, Message, Task

Place = tuple[int, int]
Doors = dict[Place, set[str]]

MOVES: Mapping[str, Place] = {"n": (0, -1), "e": (1, 0), "s": (0, 1), "w": (-1, 0)}
BACK: Mapping[str, str] = {"n": "s", "e": "w", "s": "n", "w": "e"}
WORDS: Mapping[str, str] = {"north": "n", "east": "e", "south": "s", "west": "w"}


def maze_tasks(count: int, seed: int = 0, *, size: int = 3, loops: int = 1) -> list[Task]:
    """So many mazes of size x size places; they follow from the seed.

    Every place can be reached. loops: walls that are taken out of a maze without circles. Columns: `doors`, the ways
    that are open at each place, `start`, `goal`, and `shortest`, the moves of the shortest way.
    """
    if not 2 <= size <= 26:
        raise ValueError(f"maze: size: wanted 2 to 26, got {size}")
    draw = random.Random(seed)
    return [_task(draw, size, loops) for _ in range(count)]


def write(path: str | Path, tasks: Iterable[Task]) -> None:
    """Write tasks to a .jsonl that `mlxrl.tasks` and [data] read: a prompt and the columns in each line."""
    lines = [json.dumps({"prompt": task.prompt, **task.columns}) + "\n" for task in tasks]
    Path(path).write_text("".join(lines), encoding="utf-8")


def _task(draw: random.Random, size: int, loops: int) -> Task:
    doors = _tree(draw, size)
    _open(draw, doors, loops)
    start, goal = draw.sample(sorted(doors), 2)
    ways = {named(place): "".join(move for move in MOVES if move in open) for place, open in doors.items()}
    here, there = named(start), named(goal)
    columns = {"doors": ways, "start": here, "goal": there, "shortest": distance(doors, start, goal)}
    return Task(f"to {there}. at {here}: {ways[here]}", columns)


def _tree(draw: random.Random, size: int) -> Doors:
    """A maze without circles, dug from a corner by a walk that turns back where everything around is dug."""
    doors: Doors = {(x, y): set() for y in range(size) for x in range(size)}
    path: list[Place] = [(0, 0)]
    dug = {path[0]}
    while path:
        ways = [(move, there) for move in MOVES if (there := beyond(path[-1], move)) in doors and there not in dug]
        if not ways:
            path.pop()
            continue
        move, there = draw.choice(ways)
        doors[path[-1]].add(move)
        doors[there].add(BACK[move])
        dug.add(there)
        path.append(there)
    return doors


def _open(draw: random.Random, doors: Doors, loops: int) -> None:
    walls = [
        (place, move) for place in doors for move in "es" if beyond(place, move) in doors and move not in doors[place]
    ]
    for place, move in draw.sample(walls, min(loops, len(walls))):
        doors[place].add(move)
        doors[beyond(place, move)].add(BACK[move])


def distance(doors: Doors, start: Place, goal: Place) -> int:
    """The moves of the shortest way."""
    far, waiting = {start: 0}, deque([start])
    while waiting:
        place = waiting.popleft()
        for move in doors[place]:
            if (there := beyond(place, move)) not in far:
                far[there] = far[place] + 1
                waiting.append(there)
    return far[goal]


def beyond(place: Place, move: str) -> Place:
    """The place next to another one."""
    return place[0] + MOVES[move][0], place[1] + MOVES[move][1]


def named(place: Place) -> str:
    """A place as text: its column as a letter, its row as a number."""
    return f"{chr(ord('A') + place[0])}{place[1] + 1}"


def placed(name: str) -> Place:
    """The place that a text names."""
    return ord(name[0]) - ord("A"), int(name[1:]) - 1


class Maze:
    """The maze of one task.

    A move is n, e, s or w, or its word. Into a wall and other replies are invalid, and leave the place as it was. The
    goal earns 1, every move before it costs `cost`. The state is the place.
    """

    def __init__(self, cost: float = 0.0) -> None:
        if not 0 <= cost < 1:
            raise ValueError(f"maze: cost: wanted at least 0 and less than 1, got {cost}")
        self.cost = cost

    def reset(self, task: Task) -> str | Sequence[Message]:
        """Begin; the task's columns are those of `maze_tasks`."""
        self.doors: Mapping[str, str] = task.columns["doors"]
        self.place, self.goal = str(task.columns["start"]), str(task.columns["goal"])
        return task.prompt

    def step(self, reply: str) -> Feedback:
        """Take a move."""
        word = reply.strip().lower().rstrip(".!")
        move = WORDS.get(word, word)
        if move not in MOVES or move not in self.doors[self.place]:
            fault = "wall" if move in MOVES else "n, e, s or w"
            return Feedback(f"{fault}. {self._seen()}", -self.cost, state=self.place, invalid=True)
        self.place = named(beyond(placed(self.place), move))
        if self.place == self.goal:
            return Feedback(f"at {self.place}", 1.0, done=True)
        return Feedback(self._seen(), -self.cost, state=self.place)

    def _seen(self) -> str:
        return f"at {self.place}: {self.doors[self.place]}"
