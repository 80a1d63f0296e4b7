"""Whether a run's settings go together, and whether its algorithm can learn with them."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import fields
from typing import Any

from mlxrl.checked import SettingError
from mlxrl.errors import brief
from mlxrl.protocols import Algorithm
from mlxrl.settings import Model, Reward, Rollout, Sampling, Train

NEEDS = dict.fromkeys(("reward", "old", "reference", "teacher", "entropy", "top_ids", "observations", "answers")).keys()
"""What an algorithm may need; see `protocols.Algorithm`."""


def check_run(
    algorithm: Algorithm,
    *,
    steps: int,
    rollout: Rollout,
    sampling: Sampling,
    reward: Reward,
    train: Train,
    warmup_steps: int,
    rewarded: bool,
    episodes: bool,
    hinted: bool,
    sampled: bool = True,
) -> None:
    """Check the settings of a run against one another and against its algorithm.

    Args:
        rewarded: whether there are reward functions, or an environment that gives rewards; episodes: whether there is
            an environment; hinted: whether a teacher has a hint; sampled: whether an algorithm that learns from answers
            of the data is evaluated on samples.
    Raises:
        SettingError: nothing could be learned with a setting, or it would have no effect.
    """
    _check_members(algorithm)
    if "answers" in algorithm.needs:
        refuse_sampling(algorithm.name, rollout, sampling, train, sampled)
        for name, given in (("environment", episodes), ("reward", rewarded)):
            if given and not sampled:
                raise SettingError(name, f"has no effect, because {algorithm.name} samples nothing; leave it out")
    equal, parts, tasks = "makes a group's completions all equal and nothing is learned", train.minibatches, rollout
    faults = {
        ("sampling", "temperature"): sampling.temperature == 0 and f"wanted more than 0, got 0, which {equal}",
        ("sampling", "top_k"): sampling.top_k == 1 and f"1 {equal}; 0 is off",
        ("reward", "overlong_buffer"): _overlong(reward.overlong_buffer, sampling.max_tokens, episodes),
        ("teacher", "hint"): hinted and episodes and "an environment writes the prompts; leave the hint out",
        ("train", "minibatches"): parts > tasks.tasks_per_step
        and f"wanted at most the {tasks.tasks_per_step} groups of a step, got {parts}",
        ("optimizer", "warmup_steps"): warmup_steps >= steps > 0
        and f"wanted less than the {steps} steps, got {warmup_steps}",
    }
    for where, why in faults.items():
        if why:
            raise SettingError(*where, str(why))
    compares = getattr(algorithm, "compares", "nothing")
    compared = {"group": rollout.group_size, "step": rollout.group_size * rollout.tasks_per_step}.get(compares, 2)
    if compared < 2:
        why = f"1 cannot learn with {algorithm.name}, which compares a completion with the others of its {compares}"
        raise SettingError("rollout", "group_size", why)
    if "reward" in algorithm.needs and not rewarded:
        raise SettingError("reward", f"wanted at least one function, got none; {algorithm.name} learns from rewards")
    given = {
        ("reward", "overlong_buffer"): reward.overlong_buffer, ("reward", "length_penalty"): reward.length_penalty,
        ("rollout", "resampling_rounds"): rollout.resampling_rounds,
    }  # fmt: skip
    for where, value in given.items():
        if value and "reward" not in algorithm.needs:
            raise SettingError(*where, f"has no effect, because {algorithm.name} does not use rewards")


def _check_members(algorithm: Algorithm) -> None:
    """SettingError for an algorithm whose name is no text, or that needs what there is not."""
    name: Any = algorithm.name
    needs: Any = algorithm.needs
    if not isinstance(name, str):
        raise SettingError("algorithm", "name", f"wanted a text, got {brief(name)}")
    if not isinstance(needs, Set) or not needs <= NEEDS:
        got = sorted(map(str, needs)) if isinstance(needs, Set) else needs
        raise SettingError("algorithm", name, "needs", f"wanted a set of {', '.join(NEEDS)}, got {brief(got)}")


def check_reference(model: Model, algorithm: Algorithm) -> None:
    """SettingError where nothing is compared with the reference that is named."""
    if model.reference is not None and "reference" not in algorithm.needs:
        why = "has no effect, because no term compares with a reference, as [algorithm.kl] does"
        raise SettingError("model", "reference", why)


def refuse_sampling(name: str, rollout: Rollout, sampling: Sampling, train: Train, sampled: bool) -> None:
    """SettingError for what is about samples, where an algorithm learns from the data's answers.

    sampled: whether evaluations sample; they have a temperature of their own, and no filters.
    """
    of_training = {
        "rollout": ("group_size", "resampling_rounds"),
        "sampling": ("temperature", "top_p", "top_k", "min_p", "num_top"),
        "train": ("updates_per_rollout", "minibatches", "max_steps_without_signal"),
    }
    kept = {"rollout": ("tasks_per_step",), "sampling": ("thinking",)}
    for table, given in (("rollout", rollout), ("sampling", sampling), ("train", train)):
        every = [one.name for one in fields(given) if one.name not in kept.get(table, ())]
        for key in of_training[table] if sampled or table == "train" else every:
            if getattr(given, key) != getattr(type(given)(), key):
                raise SettingError(table, key, f"has no effect, because {name} samples nothing; leave it out")


def _overlong(buffer: int, limit: int, episodes: bool) -> str:
    """What is wrong with the overlong buffer, "" where nothing is."""
    if buffer and episodes:
        return "wanted 0 with an environment, whose turns have a limit each"
    return f"wanted at most sampling.max_tokens, {limit}, got {buffer}" if buffer > limit else ""


def check_tasks(count: int, rollout: Rollout, what: str = "tasks there are") -> None:
    """SettingError where a step wants more tasks than there are."""
    if rollout.tasks_per_step > count:
        why = f"wanted at most the {count} {what}, got {rollout.tasks_per_step}"
        raise SettingError("rollout", "tasks_per_step", why)
