"""Reward functions of TRL's shape: those that come with the library, found by name, and called on a step's groups.

A reward function is called with keywords: `prompts`, `completions` and every column of the tasks, each a list with
an entry per completion. A completion is a string where the task's prompt is one, else a list of one message. It
returns a float per completion; None means "does not apply here".
"""

from mlxrl.rewards.answers import contains, exact_match, last_number, last_number_matches, text_of
from mlxrl.rewards.find import find, located, resolve
from mlxrl.rewards.functions import Function, accept, check_weights
from mlxrl.rewards.scoring import RewardError, best_and_worst, earned, require_scores, score

__all__ = [
    "Function",
    "RewardError",
    "accept",
    "best_and_worst",
    "check_weights",
    "contains",
    "earned",
    "exact_match",
    "find",
    "last_number",
    "last_number_matches",
    "located",
    "resolve",
    "require_scores",
    "score",
    "text_of",
]
