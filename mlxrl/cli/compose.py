"""The pieces of a run, made as a config says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxrl import config
from mlxrl.config import Config
from mlxrl.data import read_tasks
from mlxrl.settings import EpisodeLimits
from mlxrl.types import Algorithm, Group, Task

RENDERED = 1000
"""Rows that are put through the chat template before training, so that a bad one does not end it half way."""

if TYPE_CHECKING:
    import mlx.optimizers as optim

    from mlxrl.policy.adapters import LoRA
    from mlxrl.policy.load import Policy
    from mlxrl.train.evaluate import Evaluation
    from mlxrl.train.loop import Step
    from mlxrl.train.teacher import Teacher


def training_rows(settings: Config) -> list[Task]:
    """The rows to train on; ValueError where one is wrong or has no hint, or a step asks more than there are."""
    data, wanted = settings.data, settings.rollout.tasks_per_step
    rows = read_tasks(data.train, data.prompt, data.columns, data.system)
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
    return read_tasks(data.evaluation, data.prompt, data.columns, data.system, settings.evaluation.rows)


def policy(settings: Config, rows: Sequence[Task], *, trained: bool, adapter: str | None = None) -> Policy:
    """The model with fresh adapters to be trained, with saved ones, or as it is.

    Raises:
        ValueError: it cannot be had, its template does not take one of the first rows, or it cannot be sampled so.
    """
    from mlxrl.policy.load import load
    from mlxrl.rollout.chat import render
    from mlxrl.rollout.stop_rules import rules_of

    lora = adapters(settings) if trained else None
    loaded = load(settings.model.id, lora=lora, dtype=settings.model.dtype, adapter=adapter, seed=settings.seed)
    rules_of(loaded.tokenizer, settings.sampling)
    for row in rows[:RENDERED] if settings.environment.factory is None else ():
        render(loaded.tokenizer, row, thinking=settings.sampling.thinking)
    return loaded


def adapters(settings: Config) -> LoRA:
    """The adapters to train."""
    from mlxrl.policy.adapters import LoRA

    return LoRA(settings.lora.rank, settings.lora.scale, settings.lora.dropout, settings.lora.keys)


def judge(settings: Config, policy: Policy, heldout: Sequence[Task]) -> Callable[[], Evaluation]:
    """What evaluates the policy on the held-out rows, as it is when called."""
    from mlxrl.train.evaluate import evaluate

    plain = replace(settings.sampling, temperature=settings.evaluation.temperature, top_p=1.0, top_k=0, min_p=0.0)
    return partial(
        evaluate,
        policy,
        heldout,
        config.reward_functions(settings),
        sampling=plain,
        weights=settings.reward.weights,
        max_rows=settings.rollout.max_rows,
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
        shapes.append(lambda groups: shaping.shape_overlong(groups, settings.sampling.max_tokens, *options))
    if reward.length_penalty:
        shapes.append(partial(shaping.shape_length, weight=reward.length_penalty))
    return (lambda groups: reduce(lambda shaped, one: one(shaped), shapes, groups)) if shapes else None


def teacher(settings: Config, policy: Policy) -> Teacher | None:
    """The teacher of the policy, None for an algorithm without one.

    Raises:
        ValueError: it cannot be had, or has another vocabulary.
    """
    from mlxrl.policy.load import load
    from mlxrl.train.teacher import teacher_of

    judge = settings.teacher
    found = None if judge.id is None else "base"
    if judge.id not in (None, "base"):
        found = load(judge.id, lora=None, dtype=judge.dtype, adapter=judge.adapter)
    return teacher_of(policy, config.algorithm(settings), found, judge.hint, settings.sampling.thinking)


def algorithm(settings: Config, policy: Policy) -> Algorithm:
    """What is learned by: the algorithm and, where it is asked for, the prediction of what the environment answers.

    The tokenizer's special tokens, with which a template sets an answer off, are not predicted.
    """
    from mlxrl.algo.echo import with_echo

    built, echo = config.algorithm(settings), settings.echo
    if not echo.weight:
        return built
    marks = policy.tokenizer.all_special_ids
    return with_echo(built, echo.weight, steps=settings.steps if echo.taper else None, skip=marks)


def steps(
    settings: Config, policy: Policy, rows: Sequence[Task], optimizer: optim.Optimizer, teacher: Teacher | None = None
) -> Iterator[Step]:
    """The steps of training, each taken when it is asked for."""
    from mlxrl.train.loop import run

    rollout = settings.rollout
    return run(
        policy,
        rows,
        algorithm(settings, policy),
        reward=config.reward_functions(settings) or None,
        steps=settings.steps,
        tasks_per_step=rollout.tasks_per_step,
        group_size=rollout.group_size,
        sampling=settings.sampling,
        optimizer=optimizer,
        seed=settings.seed,
        weights=settings.reward.weights,
        shape=shape(settings),
        max_draws=rollout.max_draws,
        teacher=teacher,
        max_rows=rollout.max_rows,
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
    limits = EpisodeLimits(
        max_turns=world.max_turns, max_episode_tokens=world.max_episode_tokens, timeout=world.timeout,
        invalid_penalty=world.invalid_penalty,
    )  # fmt: skip
    return {"environment": made, "limits": limits}


def outlined(settings: Config, training: Sequence[Task], heldout: Sequence[Task]) -> list[tuple[str, str]]:
    """What a run is and does, as labelled lines for people."""
    rollout, train = settings.rollout, settings.train
    named = config.algorithm(settings)
    arguments = ", ".join(f"{name}={value!r}" for name, value in named.arguments.items() if value is not None)
    held = f"; held out {len(heldout):,} of {near(settings.data.evaluation)}" if settings.data.evaluation else ""
    rows = rollout.tasks_per_step * rollout.group_size
    return [
        ("model", f"{near(settings.model.id)}{f' ({settings.model.dtype})' if settings.model.dtype else ''}"),
        ("data", f"{len(training):,} rows of {near(settings.data.train)}{held}"),
        *([("environment", _world(settings))] if settings.environment.factory else []),
        ("reward", ", ".join(near(spec) for spec in settings.reward.functions) or "none"),
        ("algorithm", f"{named.name}({arguments})"),
        *([("teacher", _judge(settings))] if "teacher" in named.needs else []),
        *([("echo", _echo(settings))] if settings.echo.weight else []),
        (
            "a step",
            f"{rollout.tasks_per_step} prompts x {rollout.group_size} completions = {rows} rows of at most "
            f"{settings.sampling.max_tokens} tokens{_turns(settings)}{_draws(rollout.max_draws)}, "
            f"{_times(train.updates_per_rollout * train.minibatches, 'update')}",
        ),
        ("a run", f"{settings.steps} steps{_evaluations(settings, heldout)}, in {settings.run.folder}"),
    ]


def _judge(settings: Config) -> str:
    judge = settings.teacher
    name = {None: "the model itself", "base": "the model without adapters"}.get(judge.id, near(judge.id or ""))
    adapter = f" with {near(judge.adapter)}" if judge.adapter else ""
    return f"{name}{adapter}{f', shown {judge.hint}' if judge.hint else ''}"


def _echo(settings: Config) -> str:
    taper = f", tapered over {settings.steps} steps" if settings.echo.taper else ""
    return f"{settings.echo.weight:g} x the cross-entropy of what the environment answers{taper}"


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
