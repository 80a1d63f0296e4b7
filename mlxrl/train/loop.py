"""The loop: sample, score, update, as an iterator of steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim

from mlxrl.algo import shaping
from mlxrl.algo.algorithm import at_step, num_top, turns_of
from mlxrl.algo.echo import without_special_ids
from mlxrl.checked import Natural, Seed, checked_value, keywords
from mlxrl.data import Source, as_tasks, fingerprint, indices_of
from mlxrl.policy.policy import Policy
from mlxrl.protocols import Algorithm
from mlxrl.rewards.calls import RewardError, TrainerState
from mlxrl.rewards.scoring import (
    RewardLike,
    Rewards,
    attempt,
    check_columns,
    require_scores,
    rewards_of,
    tell_missing,
)
from mlxrl.rollout.chat import Fitting
from mlxrl.rollout.demonstrations import Rules, demonstration, learnable, rules_for
from mlxrl.rollout.environment import Factory, gives_rewards
from mlxrl.rollout.prefill import context_of
from mlxrl.rollout.sample import check_sample, fitting_prompts, sample
from mlxrl.settings import EpisodeLimits, Optimizer, Reward, Rollout, Sampling, Train
from mlxrl.train.batch import make_batch, tokens_of
from mlxrl.train.check import check_run, check_tasks
from mlxrl.train.metrics import Clock, Diverged, averaged, describe, require_finite
from mlxrl.train.minibatches import minibatches
from mlxrl.train.optimizer import make_optimizer
from mlxrl.train.resample import Resampled, further_tasks, resample, round_key
from mlxrl.train.state import RunState, Snapshot
from mlxrl.train.step import Step, Steps
from mlxrl.train.streaks import Streaks
from mlxrl.train.teacher import Teacher, TeacherLike, fitting_teacher, teacher_of
from mlxrl.train.update import complete, optimizer_step, require_agreement
from mlxrl.types import Group, Metrics, Task, Trajectory

SKIPS = 3
"""Updates in a row that may not be finite."""


@dataclass(frozen=True, slots=True)
class Training:
    """The arguments of `run`, resolved once."""

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
    left_out: int
    steps: int
    demonstrations: Rules | None = None


@keywords
def run(
    policy: Policy,
    tasks: Sequence[Task] | Source,
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
    resume: str | Path | None = None,
) -> Steps:
    """Train to step `steps`: an iterator of steps, whose `save` keeps a checkpoint. All follows from (seed, step).

    Args:
        tasks: those of `mlxrl.tasks`, or what that reads; prompts that fill the model's context are left out.
        reward: a function of TRL's signature, several, or a `Reward`; None where a teacher or an environment gives it.
        environment: see `sample`; teacher: see `update`; optimizer: settings, or an optimizer of MLX's.
        resume: a checkpoint, a folder of them or of a run: the run goes on bit for bit from the newest whole one.
    Raises:
        UserError: an argument is wrong or without effect, by the call itself. Diverged: three updates were not finite.
    """
    steps, seed = checked_value("run", "steps", Natural, steps), checked_value("run", "seed", Seed, seed)
    policy.require_trainable("run: policy")
    rewards, shaped = rewards_of(reward), reward if isinstance(reward, Reward) else Reward()
    check_sample(rollout.group_size, environment, limits)
    settings = optimizer if isinstance(optimizer, Optimizer) else Optimizer()
    check_run(
        algorithm, steps=steps, rollout=rollout, sampling=sampling, reward=shaped, train=train,
        warmup_steps=settings.warmup_steps, rewarded=bool(rewards.functions) or gives_rewards(environment),
        episodes=environment is not None, hinted=isinstance(teacher, Teacher) and teacher.hint is not None,
        sampled=False,
    )  # fmt: skip
    found = teacher_of(policy, algorithm, teacher)
    learned = _rules(policy, algorithm, sampling, train)
    fitted = _fitted(policy, tasks, sampling, environment, rewards, rollout, found, learned)
    algorithm = without_special_ids(algorithm, policy.tokenizer.all_special_ids)
    training = Training(
        policy=policy, tasks=fitted.tasks, algorithm=algorithm, rewards=rewards, shaping=shaped,
        environment=environment, teacher=found, rollout=rollout, limits=limits, train=train, seed=seed, steps=steps,
        sampling=replace(sampling, num_top=max(sampling.num_top, num_top(algorithm))),
        max_grad_norm=settings.max_grad_norm, left_out=fitted.left_out, demonstrations=learned,
    )  # fmt: skip
    begun = _begun(training, optimizer)
    return begun if resume is None else begun.resumed(resume)


def _begun(training: Training, optimizer: Optimizer | optim.Optimizer) -> Steps:
    """The steps of a run from its beginning."""
    train = training.train
    if isinstance(optimizer, Optimizer):
        optimizer = make_optimizer(optimizer, training.steps, train.updates_per_rollout * train.minibatches)
    state, facts = RunState(optimizer), partial(_facts, training)
    return Steps(training.policy, state, training.algorithm, facts, _steps(training, state))


def _rules(policy: Policy, algorithm: Algorithm, sampling: Sampling, train: Train) -> Rules | None:
    """How examples become what an algorithm learns that learns from answers; None for one that samples."""
    turns = turns_of(algorithm)
    return turns and rules_for(policy.model, turns, sampling.thinking, train.max_tokens_per_sequence)


def _facts(training: Training) -> dict[str, Any]:
    """What a run must share that goes on from a checkpoint of this one."""
    return {"algorithm": training.algorithm.name, "seed": training.seed, "tasks": fingerprint(training.tasks)}


def _fitted(
    policy: Policy, tasks: Sequence[Task] | Source, sampling: Sampling, environment: Factory | None, rewards: Rewards,
    rollout: Rollout, teacher: Teacher | None, learned: Rules | None,
) -> Fitting:  # fmt: skip
    """The tasks whose prompts or answers fit, checked against the rewards and the size of a step."""
    tasks = as_tasks(tasks, whole=learned is not None)
    fitted = learnable(policy, tasks, learned) if learned else fitting_prompts(policy, tasks, sampling, environment)
    fitted = fitting_teacher(teacher, fitted)
    check_tasks(len(fitted.tasks), rollout)
    check_columns(rewards, list(fitted.tasks[0].columns))
    tell_missing(rewards, tasks)
    return fitted


def _steps(training: Training, state: RunState) -> Iterator[Step]:
    """A training step an iteration: sample, score, compute advantages, update."""
    rollout, seed, policy = training.rollout, training.seed, training.policy
    while (index := state.step) < training.steps:
        state.start = Snapshot.of(policy, state, training.algorithm)
        streaks = Streaks(training.sampling, training.train, state.streaks)
        mx.reset_peak_memory()
        clock = Clock()
        own = indices_of(len(training.tasks), rollout.tasks_per_step, seed, index)
        further = further_tasks(training.tasks, own, seed, index) if rollout.resampling_rounds else iter(())
        collect = partial(_collect, training, clock, streaks, index)
        found = resample(collect, [training.tasks[i] for i in own], further, rollout.resampling_rounds)
        groups = _shaped(found.groups, training.shaping, training.sampling.max_tokens)
        metrics = averaged(list(_updates(training, state, groups, index)))
        clock.lap("update")
        if training.demonstrations is not None:
            step = Step(index, metrics | _of_parts(training, clock), groups, demonstrated=True)
        else:
            metrics |= _of_step(training, clock, found, groups)
            sampled = [one for group in found.sampled for one in group]
            step = Step(index, metrics, groups, found.sampled, streaks.step(metrics, sampled))
        state.step, state.start = index + 1, None
        yield step
        streaks.require_signal(index + 1)


def _collect(
    training: Training, clock: Clock, streaks: Streaks, index: int, tasks: Sequence[Task], number: int
) -> Sequence[Group]:
    """The groups of a round of a step, scored where there is a reward; of answers that the data hold, one each."""
    if (rules := training.demonstrations) is not None:
        answers = [(demonstration(training.policy.tokenizer, task, rules),) for task in tasks]
        clock.lap("data")
        return answers
    groups = sample(
        training.policy, tasks, group_size=training.rollout.group_size, sampling=training.sampling,
        key=round_key(training.seed, index, number), max_rows=training.rollout.max_rows,
        environment=training.environment, limits=training.limits,
    )  # fmt: skip
    clock.lap("rollout")
    require_finite(groups, f"step {index + 1}")
    if training.rewards.functions or training.environment is not None:
        groups = _scored(training, streaks, groups, index)
    clock.lap("reward")
    return groups


def _scored(training: Training, streaks: Streaks, groups: Sequence[Group], index: int) -> Sequence[Group]:
    """The groups with their rewards. A step without any ends the run at its first or last step, or the third time."""
    scored, fault = attempt(groups, training.rewards, TrainerState(index, training.steps))
    try:
        if fault is not None:
            raise fault
        require_scores(scored)
        streaks.scored()
    except RewardError:
        if streaks.unscorable(last=index + 1 == training.steps):
            raise
    return scored


def _shaped(groups: Sequence[Group], reward: Reward, max_tokens: int) -> tuple[Group, ...]:
    """The groups after reward shaping."""
    if reward.overlong_buffer:
        options = (reward.overlong_buffer, reward.overlong_factor, reward.overlong_cap)
        groups = shaping.shape_overlong(groups, max_tokens, *options)
    if reward.length_penalty:
        groups = shaping.shape_length(groups, reward.length_penalty)
    return tuple(groups)


def _updates(training: Training, state: RunState, groups: Sequence[Group], index: int) -> Iterator[Metrics]:
    """Make the updates of a step; before several, old and other log-probs are computed once."""
    if not groups:
        return
    policy, train, teacher = training.policy, training.train, training.teacher
    algorithm = at_step(training.algorithm, index)
    batch = make_batch(groups, algorithm, train)
    if train.updates_per_rollout * min(train.minibatches, len(groups)) > 1:
        batch = complete(policy, batch, algorithm, algorithm.needs | {"old"}, teacher)
    if training.demonstrations is None:
        require_agreement(policy, batch, f"step {index + 1}")
    for epoch in range(train.updates_per_rollout):
        for part in minibatches(batch, train.minibatches, f"{training.seed}:{index}:{epoch}"):
            metrics = optimizer_step(
                policy, state.optimizer, part, algorithm, teacher, training.max_grad_norm, train.recompute
            )
            state.skipped = state.skipped + 1 if metrics["updates/skipped"] else 0
            if state.skipped >= SKIPS:
                raise Diverged(
                    f"step {index + 1}",
                    f"loss or gradient of {type(policy.model).__module__} was not finite in {SKIPS} updates in a row; "
                    "weights are those before them. "
                    "Lower optimizer.learning_rate, or look at the rewards in samples.jsonl",
                )
            yield metrics if training.demonstrations is None else metrics | tokens_of(part)


def _of_parts(training: Training, clock: Clock) -> Metrics:
    """Timing and memory of a step, and how many examples the run leaves out."""
    return {
        **({"prompts/left_out": float(training.left_out)} if training.left_out else {}),
        **{f"seconds/{part}": seconds for part, seconds in clock.seconds.items()},
        "memory/peak": float(mx.get_peak_memory()),
        "adapter/distance": training.policy.distance,
    }


def _of_step(training: Training, clock: Clock, found: Resampled, groups: Sequence[Group]) -> Metrics:
    """Timing, memory and group metrics of a step."""
    trajectories = [one for group in found.sampled for one in group]
    tokens = sum(one.length for one in trajectories)
    metrics: dict[str, Any] = {
        "groups/used": float(len(groups)),
        "rollout/rounds": float(found.rounds),
        **_of_parts(training, clock),
        "rollout/tokens_per_second": tokens / max(clock.seconds["rollout"], 1e-9),
    }
    if groups and groups != found.groups:
        metrics["reward/shaped"] = describe(groups)["reward"]
    if (context := context_of(training.policy.model)) is not None:
        metrics["rollout/context"] = float(context)
        metrics["completions/context_full"] = float(sum(_fills(one, context) for one in trajectories))
    return metrics


def _fills(trajectory: Trajectory, context: int) -> bool:
    """Whether a trajectory ended because the model's context was full."""
    turns = trajectory.turns
    start = max((n for n, turn in enumerate(turns) if turn.history_rewritten), default=0)
    read = sum(len(turn.observation) + len(turn.tokens) for turn in turns[start:])
    return trajectory.stop == "length" and read >= context
