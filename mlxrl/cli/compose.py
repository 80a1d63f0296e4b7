"""The pieces of a run, made as a config says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mlxrl import config
from mlxrl.config import Config
from mlxrl.data import read_tasks
from mlxrl.types import Sampling, Task

if TYPE_CHECKING:
    import mlx.optimizers as optim

    from mlxrl.policy.adapters import LoRA
    from mlxrl.policy.load import Policy
    from mlxrl.train.evaluate import Evaluation
    from mlxrl.train.loop import Step


def training_rows(settings: Config) -> list[Task]:
    """The rows to train on; ValueError where one is wrong, or a step asks more tasks than there are."""
    data, wanted = settings.data, settings.rollout.tasks_per_step
    rows = read_tasks(data.train, data.prompt, data.columns, data.system)
    if wanted > len(rows):
        raise ValueError(f"rollout: tasks_per_step: wanted at most the {len(rows)} rows of {data.train}, got {wanted}")
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
        ValueError: it cannot be had, or its template does not take the first of the rows.
    """
    from mlxrl.policy.load import load
    from mlxrl.rollout.render import render

    lora = adapters(settings) if trained else None
    loaded = load(settings.model.id, lora=lora, dtype=settings.model.dtype, adapter=adapter, seed=settings.seed)
    render(loaded.tokenizer, rows[0], thinking=settings.data.thinking)
    return loaded


def adapters(settings: Config) -> LoRA:
    """The adapters to train."""
    from mlxrl.policy.adapters import LoRA

    return LoRA(settings.lora.rank, settings.lora.scale, settings.lora.dropout, settings.lora.keys)


def sampling(settings: Config) -> Sampling:
    """How training samples."""
    rollout = settings.rollout
    return Sampling(rollout.max_tokens, rollout.temperature, rollout.top_p, rollout.top_k, rollout.min_p)


def judge(settings: Config, policy: Policy, heldout: Sequence[Task]) -> Callable[[], Evaluation]:
    """What evaluates the policy on the held-out rows, as it is when called."""
    from mlxrl.train.evaluate import evaluate

    return partial(
        evaluate,
        policy,
        heldout,
        config.reward_functions(settings),
        sampling=Sampling(settings.rollout.max_tokens, settings.evaluation.temperature),
        weights=settings.reward.weights,
        max_rows=settings.rollout.max_rows,
        thinking=settings.data.thinking,
        seed=settings.seed,
    )


def optimizer(settings: Config) -> optim.Optimizer:
    """The optimizer with its schedule, which counts updates where the config counts steps."""
    from mlxrl.train.optimizer import optimizer

    chosen, updates = settings.optimizer, settings.train.updates_per_rollout
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


def steps(settings: Config, policy: Policy, rows: Sequence[Task], optimizer: optim.Optimizer) -> Iterator[Step]:
    """The steps of training, each taken when it is asked for."""
    from mlxrl.train.loop import train

    rollout = settings.rollout
    return train(
        policy,
        rows,
        config.algorithm(settings),
        reward=config.reward_functions(settings),
        steps=settings.steps,
        tasks_per_step=rollout.tasks_per_step,
        group_size=rollout.group_size,
        sampling=sampling(settings),
        optimizer=optimizer,
        seed=settings.seed,
        weights=settings.reward.weights,
        max_rows=rollout.max_rows,
        thinking=settings.data.thinking,
        tokens_per_pass=settings.train.tokens_per_pass,
        updates_per_rollout=settings.train.updates_per_rollout,
        max_grad_norm=settings.optimizer.max_grad_norm,
    )


def outlined(settings: Config, training: Sequence[Task], heldout: Sequence[Task]) -> list[tuple[str, str]]:
    """What a run is and does, as labelled lines for people."""
    rollout, train = settings.rollout, settings.train
    algorithm = config.algorithm(settings)
    arguments = ", ".join(f"{name}={value!r}" for name, value in algorithm.arguments.items() if value is not None)
    held = f"; held out {len(heldout):,} of {near(settings.data.evaluation)}" if settings.data.evaluation else ""
    rows = rollout.tasks_per_step * rollout.group_size
    return [
        ("model", f"{near(settings.model.id)}{f' ({settings.model.dtype})' if settings.model.dtype else ''}"),
        ("data", f"{len(training):,} rows of {near(settings.data.train)}{held}"),
        ("reward", ", ".join(near(spec) for spec in settings.reward.functions)),
        ("algorithm", f"{algorithm.name}({arguments})"),
        (
            "a step",
            f"{rollout.tasks_per_step} prompts x {rollout.group_size} completions = {rows} rows of at most "
            f"{rollout.max_tokens} tokens, {_times(train.updates_per_rollout, 'update')}",
        ),
        ("a run", f"{settings.steps} steps{_evaluations(settings, heldout)}, in {settings.run.folder}"),
    ]


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
