"""Whether an algorithm can learn under a run's settings, and whether it uses all of them."""

from __future__ import annotations

from mlxrl.checked import SettingError
from mlxrl.settings import Reward, Rollout
from mlxrl.types import Algorithm


def refuse_unusable(algorithm: Algorithm, reward: Reward, rollout: Rollout, *, rewarded: bool) -> None:
    """Check an algorithm against the settings of its run.

    Args:
        rewarded: whether there are reward functions, or an environment that gives rewards.
    Raises:
        SettingError: it lacks rewards or another completion to compare with, or a setting has no effect.
    """
    compares = getattr(algorithm, "compares", "nothing")
    compared = {"group": rollout.group_size, "step": rollout.group_size * rollout.tasks_per_step}.get(compares, 2)
    if compared < 2:
        why = f"1 cannot learn with {algorithm.name}, which compares a completion with the others of its {compares}"
        raise SettingError("rollout", "group_size", why)
    if "reward" in algorithm.needs:
        if not rewarded:
            raise SettingError(
                "reward", f"{algorithm.name} learns from rewards; wanted at least one function, got none"
            )
        return
    given = {
        ("reward", "overlong_buffer"): reward.overlong_buffer, ("reward", "length_penalty"): reward.length_penalty,
        ("rollout", "resampling_rounds"): rollout.resampling_rounds,
    }  # fmt: skip
    for where, value in given.items():
        if value:
            raise SettingError(*where, f"has no effect, because {algorithm.name} does not use rewards")


def refuse_few(tasks: int, rollout: Rollout) -> None:
    """SettingError where a step wants more tasks than there are."""
    if rollout.tasks_per_step > tasks:
        why = f"wanted at most the {tasks} tasks there are, got {rollout.tasks_per_step}"
        raise SettingError("rollout", "tasks_per_step", why)
