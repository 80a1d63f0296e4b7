"""Small reference environments, deterministic, with tasks made from a seed."""

from mlxrl.environments.guess import GuessingGame, guessing_tasks
from mlxrl.environments.maze import Maze, maze_tasks
from mlxrl.environments.rows import write

__all__ = ["GuessingGame", "Maze", "guessing_tasks", "maze_tasks", "write"]
