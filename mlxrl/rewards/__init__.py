"""Reward functions of TRL's signature: those of the library, and how they score a step's groups.

A reward function is called with keywords: `prompts`, `completions`, `completion_ids` (the ids that were sampled, the
stop token included) and every column of the tasks, each a list with an entry per completion, and `trainer_state`, which
has `global_step` and `max_steps`. A completion is a string where the task's prompt is one, else a list of one message.
It returns a float per completion; None means "does not apply here". It may be async, or return a list of awaitables.
"""

from mlxrl.rewards.calls import RewardError, TrainerState
from mlxrl.rewards.functions import contains, exact_match, last_number, last_number_matches, text_of
from mlxrl.rewards.scoring import Rewards, best_and_worst, earned, require_scores, rewards_of, score

__all__ = [
    "RewardError", "Rewards", "TrainerState", "best_and_worst", "contains", "earned", "exact_match", "last_number",
    "last_number_matches", "require_scores", "rewards_of", "score", "text_of",
]  # fmt: skip
