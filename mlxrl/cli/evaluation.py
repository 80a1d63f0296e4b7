"""`mlxrl eval`."""

from __future__ import annotations

from mlxrl.cli import compose
from mlxrl.config import Config
from mlxrl.rewards import RewardError
from mlxrl.rollout.chat import PromptError
from mlxrl.rollout.environment import EpisodeError


def command(settings: Config, file: str, adapter: str | None) -> int:
    """Evaluate a model, with an adapter or as it is, and print what came out. file: the config's."""
    if settings.data.evaluation is None:
        raise ValueError(f"{file}: data: missing key 'evaluation'; wanted the rows to evaluate on")
    heldout = compose.heldout_rows(settings)
    policy = compose.policy(settings, heldout, trained=False, adapter=adapter)
    try:
        found = compose.judge(settings, policy, heldout)().summary(settings.evaluation.success)
    except (RewardError, PromptError, EpisodeError):
        raise
    except ValueError as error:  # not the user's to put right, so its traceback is wanted
        raise RuntimeError("the evaluation failed") from error
    name = adapter or "without adapter"
    print(f"{name}: accuracy {found['accuracy']:.4f}, mean reward {found['mean_reward']:.4f}, {found['n']} rows")
    return 0
