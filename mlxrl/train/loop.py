"""The loop: sample, score, update, as an iterator of steps."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim

from mlxrl.algo import shaping
from mlxrl.algo.algorithm import at_step, num_top
from mlxrl.algo.echo import without_special_ids
from mlxrl.checked import Natural, checked_value, keywords
from mlxrl.data import indices_of
from mlxrl.errors import UserError
from mlxrl.policy.differentiate import leaves
from mlxrl.policy.policy import Policy
from mlxrl.rewards.scoring import RewardLike, Rewards, check_columns, require_scores, rewards_of, score
from mlxrl.rollout.environment import Factory, gives_rewards
from mlxrl.rollout.prefill import context_of
from mlxrl.rollout.sample import check_sample, sample
from mlxrl.settings import EpisodeLimits, Optimizer, Reward, Rollout, Sampling, Train
from mlxrl.train.batch import make_batch
from mlxrl.train.check import check_run, check_tasks, check_types
from mlxrl.train.metrics import Clock, Diverged, averaged, describe, require_finite, warnings_of
from mlxrl.train.minibatches import minibatches
from mlxrl.train.optimizer import make_optimizer
from mlxrl.train.resample import Resampled, further_tasks, resample, round_key
from mlxrl.train.teacher import Teacher, TeacherLike, teacher_of
from mlxrl.train.update import complete, optimizer_step
from mlxrl.types import Algorithm, Group, Metrics, Task

SKIPS = 3
"""Updates in a row that may not be finite."""


@dataclass(frozen=True, slots=True, repr=False)
class Step:
    """What a step did: its metrics, the scored groups it learned from, and what went wrong.

    index: from 0, as that from which everything random follows; `number` is what files and people count, from 1.
    sampled: all groups that were sampled for it, where resampling left some out.
    """

    index: int
    metrics: Metrics
    groups: tuple[Group, ...]
    sampled: tuple[Group, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "metrics", {**describe(self.sampled or self.groups), **self.metrics})

    @property
    def number(self) -> int:
        """Which step of the run it is, from 1, as the console and the run's files count."""
        return self.index + 1

    @property
    def warnings(self) -> tuple[str, ...]:
        """What did not go well, a line each."""
        return warnings_of(self.metrics, [one for group in self.sampled or self.groups for one in group])

    def __str__(self) -> str:
        metrics, rate = self.metrics, self.metrics.get("rollout/tokens_per_second")
        parts = [
            f"step {self.number}",
            f"reward {metrics['reward']:.3f}",
            f"zero-variance groups {metrics['groups/zero_variance']:.0f} of {metrics['groups/sampled']:.0f}",
            f"length {metrics['completions/mean_length']:.1f}",
            f"truncated {metrics['completions/clipped_ratio']:.0%}",
        ]
        return "  ".join([*parts, f"{rate:.0f} tokens/s"] if rate is not None else parts)

    __repr__ = __str__


@dataclass(slots=True)
class RunState:
    """What lives from step to step besides the policy's adapters: all that a checkpoint holds.

    step: of the run, the next to be taken; skipped: updates in a row, up to now, that were not finite.
    """

    optimizer: optim.Optimizer
    step: int = 0
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class Training:
    """What every step of a run does, found once from the arguments of `run`."""

    policy: Policy
    tasks: Sequence[Task]
    algorithm: Algorithm
    rewards: Rewards
    shaping: Reward
    environment: Factory | None
    teacher: Teacher | None
    rollout: Rollout
    sampling: Sampling
    limits: EpisodeLimits
    train: Train
    max_grad_norm: float
    seed: int


@keywords
def run(
    policy: Policy,
    tasks: Sequence[Task],
    algorithm: Algorithm,
    *,
    reward: RewardLike = None,
    environment: Factory | None = None,
    teacher: TeacherLike = None,
    steps: int,
    rollout: Rollout = Rollout(),
    sampling: Sampling = Sampling(),
    limits: EpisodeLimits = EpisodeLimits(),
    train: Train = Train(),
    optimizer: Optimizer | optim.Optimizer = Optimizer(),
    seed: int = 0,
    state: RunState | None = None,
) -> Iterator[Step]:
    """Train to step `steps`. Everything random is a function of (seed, step), so a run can be continued.

    Args:
        reward: a function of TRL's signature, several, or `Reward(functions=..., weights=..., overlong_buffer=...)`;
            None where a teacher alone teaches, or the environment gives the rewards.
        environment: makes the environment of an episode; see `sample`.
        teacher: see `update`.
        optimizer: settings, or an optimizer of MLX's.
        state: of a run that is continued; its optimizer is taken, and steps are counted from its step on.
    Raises:
        UserError: an argument is wrong or without effect; raised by the call itself.
        Diverged: three updates in a row were not finite.
    """
    check_types(rollout=rollout, sampling=sampling, limits=limits, train=train)
    steps, seed = checked_value("run", "steps", Natural, steps), checked_value("run", "seed", Natural, seed)
    rewards, shaped = rewards_of(reward), reward if isinstance(reward, Reward) else Reward()
    check_sample(rollout.group_size, environment, limits)
    if not leaves(policy.model.trainable_parameters()):
        why = "was loaded without adapters, so nothing can be trained; wanted load(..., lora=LoRA())"
        raise UserError("run", "policy", why)
    rewarded = bool(rewards.functions) or gives_rewards(environment)
    check_run(
        algorithm, steps=steps, rollout=rollout, sampling=sampling, reward=shaped, train=train, rewarded=rewarded,
        warmup_steps=optimizer.warmup_steps if isinstance(optimizer, Optimizer) else 0,
        episodes=environment is not None,
    )  # fmt: skip
    check_tasks(len(tasks), rollout)
    check_columns(rewards, list(tasks[0].columns))
    found = teacher_of(policy, algorithm, teacher)
    if environment is not None and found is not None and found.hint is not None:
        raise UserError("run", "teacher", "an environment writes the prompts; leave the hint out")
    algorithm = without_special_ids(algorithm, policy.tokenizer.all_special_ids)
    sampling = replace(sampling, num_top=max(sampling.num_top, num_top(algorithm)))
    norm = optimizer.max_grad_norm if isinstance(optimizer, Optimizer) else Optimizer().max_grad_norm
    if isinstance(optimizer, Optimizer):
        optimizer = make_optimizer(optimizer, steps, train.updates_per_rollout * train.minibatches)
    training = Training(
        policy, tasks, algorithm, rewards, shaped, environment, found, rollout, sampling, limits, train, norm, seed
    )
    return Steps(_steps(training, steps, state or RunState(optimizer)))


class Steps(Iterator[Step]):
    """The steps of a run, each taken when it is asked for. A run that is dropped before its first step says so."""

    def __init__(self, steps: Iterator[Step]) -> None:
        self._steps, self._begun = steps, False

    def __next__(self) -> Step:
        self._begun = True
        return next(self._steps)

    def __del__(self) -> None:
        if not self._begun:
            why = "run: nothing was trained, because no step was asked for; write `for step in run(...): ...`"
            warnings.warn(why, stacklevel=2)


def _steps(training: Training, steps: int, state: RunState) -> Iterator[Step]:
    """The algorithm box: sample, score, credit, update."""
    rollout, seed = training.rollout, training.seed
    for index in range(state.step, steps):
        mx.reset_peak_memory()
        clock = Clock()
        own = indices_of(len(training.tasks), rollout.tasks_per_step, seed, index)
        further = further_tasks(training.tasks, own, seed, index)
        collect = partial(_collect, training, clock, index)
        found = resample(collect, [training.tasks[i] for i in own], further, rollout.resampling_rounds)
        groups = _shaped(found.groups, training.shaping, training.sampling.max_tokens)
        metrics = averaged(list(_updates(training, state, groups, index)))
        state.step = index + 1
        clock.lap("update")
        metrics |= _of_step(training, clock, found, groups)
        yield Step(index, metrics, groups, found.sampled)


def _collect(training: Training, clock: Clock, index: int, tasks: Sequence[Task], number: int) -> Sequence[Group]:
    """The groups of a round of a step, scored where there is a reward."""
    groups = sample(
        training.policy, tasks, group_size=training.rollout.group_size, sampling=training.sampling,
        key=round_key(training.seed, index, number), max_rows=training.rollout.max_rows,
        environment=training.environment, limits=training.limits,
    )  # fmt: skip
    clock.lap("rollout")
    require_finite(groups, f"step {index + 1}")
    if training.rewards.functions or training.environment is not None:
        groups = require_scores(score(groups, training.rewards))
    clock.lap("reward")
    return groups


def _shaped(groups: Sequence[Group], reward: Reward, max_tokens: int) -> tuple[Group, ...]:
    """The groups with what the settings take off their rewards."""
    if reward.overlong_buffer:
        options = (reward.overlong_buffer, reward.overlong_factor, reward.overlong_cap)
        groups = shaping.shape_overlong(groups, max_tokens, *options)
    if reward.length_penalty:
        groups = shaping.shape_length(groups, reward.length_penalty)
    return tuple(groups)


def _updates(training: Training, state: RunState, groups: Sequence[Group], index: int) -> Iterator[Metrics]:
    """Make the optimizer steps of a step. Before several, what they compare with is computed."""
    if not groups:
        return
    policy, train, teacher = training.policy, training.train, training.teacher
    algorithm = at_step(training.algorithm, index)
    batch = make_batch(groups, algorithm, train)
    if train.updates_per_rollout * min(train.minibatches, len(groups)) > 1:
        batch = complete(policy, batch, algorithm, algorithm.needs | {"old"}, teacher)
    for epoch in range(train.updates_per_rollout):
        for part in minibatches(batch, train.minibatches, f"{training.seed}:{index}:{epoch}"):
            metrics = optimizer_step(
                policy, state.optimizer, part, algorithm, teacher, training.max_grad_norm, train.recompute
            )
            state.skipped = state.skipped + 1 if metrics["updates/skipped"] else 0
            if state.skipped >= SKIPS:
                raise Diverged(
                    f"step {index + 1}",
                    f"loss or gradient was not finite in {SKIPS} updates in a row; weights are those before them. "
                    "Lower optimizer.learning_rate, or look at the rewards in samples.jsonl",
                )
            yield metrics


def _of_step(training: Training, clock: Clock, found: Resampled, groups: Sequence[Group]) -> Metrics:
    """What a step cost, and what was made of what it sampled."""
    trajectories = [one for group in found.sampled for one in group]
    tokens = sum(one.length for one in trajectories)
    metrics: dict[str, Any] = {
        "groups/used": float(len(groups)),
        "rollout/rounds": float(found.rounds),
        **{f"seconds/{part}": seconds for part, seconds in clock.seconds.items()},
        "rollout/tokens_per_second": tokens / max(clock.seconds["rollout"], 1e-9),
        "memory/peak": float(mx.get_peak_memory()),
    }
    if groups and groups != found.groups:
        metrics["reward/shaped"] = describe(groups)["reward"]
    context = context_of(training.policy.model)
    if context is not None and tokens == 0 and any(one.stop == "length" for one in trajectories):
        metrics["rollout/context"] = float(context)
    return metrics
