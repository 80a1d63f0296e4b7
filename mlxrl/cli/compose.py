"""The pieces of a run, made as a config says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxrl import config
from mlxrl.config import Config
from mlxrl.data import tasks
from mlxrl.settings import LoRA, Sampling
from mlxrl.types import Group, Task

RENDERED = 1000
"""Rows that are put through the chat template before training, so that a bad one does not end it half way."""

if TYPE_CHECKING:
    import mlx.optimizers as optim

    from mlxrl.policy.policy import Policy
    from mlxrl.train.evaluate import Evaluation
    from mlxrl.train.loop import Step
    from mlxrl.train.teacher import Teacher


def training_rows(settings: Config) -> list[Task]:
    """The rows to train on; ValueError where one is wrong or has no hint, or a step asks more than there are."""
    data, wanted = settings.data, settings.rollout.tasks_per_step
    rows = tasks(data.train, data.prompt, system=data.system, limit=None, **data.columns)
    if wanted > len(rows):
        raise ValueError(f"rollout: tasks_per_step: wanted at most the {len(rows)} rows of {data.train}, got {wanted}")
    if settings.teacher.hint is not None:
        from mlxrl.train.teacher import hinted

        for row in rows:
            hinted(row, settings.teacher.hint)
    return rows


def heldout_rows(settings: Config) -> list[Task]:
    """The rows to evaluate on, none without data.evaluation."""
    data = settings.data
    if data.evaluation is None:
        return []
    limit = settings.evaluation.rows
    return tasks(data.evaluation, data.prompt, system=data.system, limit=limit, **data.columns)


def policy(settings: Config, rows: Sequence[Task], *, trained: bool, adapter: str | None = None) -> Policy:
    """The model with fresh adapters to be trained, with saved ones, or as it is.

    Raises:
        ValueError: it cannot be had, its template does not take one of the first rows, or it cannot be sampled so.
    """
    from mlxrl.policy.policy import load
    from mlxrl.rollout.episodes import rules_of
    from mlxrl.rollout.render import render

    lora = adapters(settings) if trained else None
    loaded = load(settings.model.id, lora=lora, dtype=settings.model.dtype, adapter=adapter, seed=settings.seed)
    rules_of(loaded.tokenizer, sampling(settings))
    for row in rows[:RENDERED] if settings.environment.factory is None else ():
        render(loaded.tokenizer, row, thinking=settings.data.thinking)
    return loaded


def adapters(settings: Config) -> LoRA:
    """The adapters to train."""
    lora = settings.lora
    return LoRA(rank=lora.rank, scale=lora.scale, dropout=lora.dropout, keys=lora.keys)


def sampling(settings: Config) -> Sampling:
    """How training samples."""
    rollout = settings.rollout
    return Sampling(
        max_tokens=rollout.max_tokens, temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k,
        min_p=rollout.min_p, stop_strings=rollout.stop_strings, min_tokens=rollout.min_tokens,
        thinking_budget=rollout.thinking_budget, repetition_penalty=rollout.repetition_penalty,
        presence_penalty=rollout.presence_penalty, frequency_penalty=rollout.frequency_penalty,
        penalty_context=rollout.penalty_context,
    )  # fmt: skip


def judge(settings: Config, policy: Policy, heldout: Sequence[Task]) -> Callable[[], Evaluation]:
    """What evaluates the policy on the held-out rows, as it is when called."""
    from mlxrl.train.evaluate import evaluate

    plain = replace(sampling(settings), temperature=settings.evaluation.temperature, top_p=1.0, top_k=0, min_p=0.0)
    return partial(
        evaluate,
        policy,
        heldout,
        config.rewards(settings),
        sampling=plain,
        max_rows=settings.rollout.max_rows,
        thinking=settings.data.thinking,
        seed=settings.seed,
        **episodes(settings),
    )


def optimizer(settings: Config) -> optim.Optimizer:
    """The optimizer with its schedule, which counts optimizer steps where the config counts those of the run."""
    from mlxrl.train.optimizer import optimizer

    chosen, updates = settings.optimizer, settings.train.updates_per_rollout * settings.train.minibatches
    betas = {} if chosen.betas is None else {"betas": chosen.betas}
    return optimizer(
        chosen.name,
        chosen.learning_rate,
        schedule_name=chosen.schedule,
        warmup_steps=chosen.warmup_steps * updates,
        steps=settings.steps * updates,
        weight_decay=chosen.weight_decay,
        **betas,
    )


def shape(settings: Config) -> Callable[[Sequence[Group]], Sequence[Group]] | None:
    """What is made of scored groups before they are credited, None for nothing."""
    from mlxrl.algo import shaping

    reward, shapes = settings.reward, list[Callable[[Sequence[Group]], Sequence[Group]]]()
    if reward.overlong_buffer:
        options = (reward.overlong_buffer, reward.overlong_factor, reward.overlong_cap)
        shapes.append(lambda groups: shaping.shape_overlong(groups, settings.rollout.max_tokens, *options))
    if reward.length_penalty:
        shapes.append(partial(shaping.shape_length, weight=reward.length_penalty))
    return (lambda groups: reduce(lambda shaped, one: one(shaped), shapes, groups)) if shapes else None


def teacher(settings: Config, policy: Policy) -> Teacher | None:
    """The teacher of the policy, None for an algorithm without one.

    Raises:
        ValueError: it cannot be had, or has another vocabulary.
    """
    from mlxrl.policy.policy import load
    from mlxrl.train.teacher import teacher_of

    judge = settings.teacher
    found = None if judge.id is None else "base"
    if judge.id not in (None, "base"):
        found = load(judge.id, lora=None, dtype=judge.dtype, adapter=judge.adapter)
    return teacher_of(policy, config.algorithm(settings), found, judge.hint, settings.data.thinking)


def steps(
    settings: Config, policy: Policy, rows: Sequence[Task], optimizer: optim.Optimizer, teacher: Teacher | None = None
) -> Iterator[Step]:
    """The steps of training, each taken when it is asked for."""
    from mlxrl.train.loop import train

    rollout = settings.rollout
    return train(
        policy,
        rows,
        config.algorithm(settings),
        reward=config.rewards(settings),
        steps=settings.steps,
        tasks_per_step=rollout.tasks_per_step,
        group_size=rollout.group_size,
        sampling=sampling(settings),
        optimizer=optimizer,
        seed=settings.seed,
        shape=shape(settings),
        max_draws=rollout.max_draws,
        teacher=teacher,
        max_rows=rollout.max_rows,
        thinking=settings.data.thinking,
        tokens_per_pass=settings.train.tokens_per_pass,
        max_tokens_per_row=settings.train.max_tokens_per_row,
        recompute=settings.train.recompute,
        updates_per_rollout=settings.train.updates_per_rollout,
        minibatches=settings.train.minibatches,
        max_grad_norm=settings.optimizer.max_grad_norm,
        **episodes(settings),
    )


def episodes(settings: Config) -> dict[str, Any]:
    """What is said of environments and their episodes, nothing where there are none."""
    made, world = config.environment(settings), settings.environment
    if made is None:
        return {}
    return {
        "environment": made, "max_turns": world.max_turns, "max_episode_tokens": world.max_episode_tokens,
        "timeout": world.timeout, "invalid_penalty": world.invalid_penalty,
    }  # fmt: skip


def outlined(settings: Config, training: Sequence[Task], heldout: Sequence[Task]) -> list[tuple[str, str]]:
    """What a run is and does, as labelled lines for people."""
    rollout, train = settings.rollout, settings.train
    named = config.algorithm(settings)
    keys = config.resolved(settings)["algorithm"].items()
    arguments = ", ".join(f"{key}={value!r}" for key, value in keys if key != "name")
    held = f"; held out {len(heldout):,} of {near(settings.data.evaluation)}" if settings.data.evaluation else ""
    rows = rollout.tasks_per_step * rollout.group_size
    return [
        ("model", f"{near(settings.model.id)}{f' ({settings.model.dtype})' if settings.model.dtype else ''}"),
        ("data", f"{len(training):,} rows of {near(settings.data.train)}{held}"),
        *([("environment", _world(settings))] if settings.environment.factory else []),
        ("reward", ", ".join(near(spec) for spec in settings.reward.functions) or "none"),
        ("algorithm", f"{named.name}({arguments})"),
        *([("teacher", _judge(settings))] if "teacher" in named.needs else []),
        (
            "a step",
            f"{rollout.tasks_per_step} prompts x {rollout.group_size} completions = {rows} rows of at most "
            f"{rollout.max_tokens} tokens{_turns(settings)}{_draws(rollout.max_draws)}, "
            f"{_times(train.updates_per_rollout * train.minibatches, 'update')}",
        ),
        ("a run", f"{settings.steps} steps{_evaluations(settings, heldout)}, in {settings.run.folder}"),
    ]


def _judge(settings: Config) -> str:
    judge = settings.teacher
    name = {None: "the model itself", "base": "the model without adapters"}.get(judge.id, near(judge.id or ""))
    adapter = f" with {near(judge.adapter)}" if judge.adapter else ""
    return f"{name}{adapter}{f', shown {judge.hint}' if judge.hint else ''}"


def _turns(settings: Config) -> str:
    return " a turn" if settings.environment.factory else ""


def _world(settings: Config) -> str:
    world = settings.environment
    arguments = ", ".join(f"{name}={value!r}" for name, value in world.arguments.items())
    most = "" if world.max_episode_tokens is None else f", at most {world.max_episode_tokens} tokens an episode"
    return f"{near(world.factory or '')}({arguments}), at most {_times(world.max_turns, 'turn')}{most}"


def _draws(most: int) -> str:
    return f", at most {most} draws" if most > 1 else ""


def _evaluations(settings: Config, heldout: Sequence[Task]) -> str:
    if not heldout:
        return ", no evaluation"
    every = settings.run.evaluate_every
    between = (settings.steps - 1) // every if every else 0
    return f", {2 + between} evaluations of {_times(len(heldout), 'row')}"


def _times(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def near(path: str) -> str:
    """A path as seen from the current directory where it lies below it."""
    here = f"{Path.cwd()}/"
    return path.removeprefix(here)
