"""What a dry run tries: everything is built and called once, so that what a run would meet is told before it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from mlxrl.errors import UserError, brief, exception_line, one_line
from mlxrl.files import expanded
from mlxrl.policy import adapter_folder
from mlxrl.policy.lora import Adapted
from mlxrl.policy.skeleton import NotHere, Skeleton, outline, skeleton
from mlxrl.rewards import score
from mlxrl.rollout.chat import Fitting, check_thinking, fitting
from mlxrl.rollout.demonstrations import demonstrable
from mlxrl.rollout.environment import EnvironmentHandle, prepare
from mlxrl.rollout.prefill import context_of
from mlxrl.rollout.stop_rules import rules_of
from mlxrl.rollout.workers import Workers
from mlxrl.runs.experiment import Experiment
from mlxrl.text import number
from mlxrl.train.teacher import fitting_hints, refuse_other_vocabulary
from mlxrl.types import Task, Trajectory, Turn

PATIENCE = 10  # seconds for an answer about a model that is not here
MADE_UP = "The answer is 1."


@dataclass(frozen=True, slots=True)
class Trial:
    """The layers that are adapted, none where the model is not here, and what was found, a line each."""

    adapted: list[Adapted]
    found: list[str]


def trial(experiment: Experiment) -> Trial:
    """Try what an experiment needs.

    Raises:
        UserError: something that a run needs cannot be had or called.
    """
    config = experiment.config
    found: list[str] = []
    model = _model(config.model.id, config.model.dtype, "model", found)
    tokenizer = None if model is None else model.tokenizer
    teacher = _teacher(experiment, model, found)
    if model is not None:
        _prompts(experiment, model, teacher)
    found += [*_environment(experiment, tokenizer), *_rewards(experiment)]
    return Trial([] if model is None else outline(model, config.lora, config.model.adapter), found)


def _model(id: str, dtype: str | None, table: str, found: list[str]) -> Skeleton | None:
    """A model without its weights, None for one that is not here, of which is told whether it can be fetched."""
    try:
        return skeleton(id, dtype)
    except NotHere:
        found.append(f"{table} {_fetched(id, table)}")
        return None


def _fetched(id: str, table: str) -> str:
    """Whether a model that is not here can be fetched, where that is known; UserError where it cannot."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    if expanded(id).is_absolute() or id.count("/") != 1:
        why = f"no model {id} here; wanted a Hugging Face id as ORG/NAME, a model folder or a .gguf file"
        raise UserError(table, "id", why)
    try:
        get_hf_file_metadata(hf_hub_url(id, "config.json"), timeout=PATIENCE)
    except Exception as error:  # whatever the network does
        why = f"is not on this machine and cannot be fetched: {one_line(exception_line(error), 200)}"
        if isinstance(error, HfHubHTTPError) and error.response.status_code < 500:  # it was asked, and has none
            raise UserError(table, "id", f"{id} {why}") from error
        return f"{id} {why}"
    return f"{id} is not on this machine, and can be fetched"


def _prompts(experiment: Experiment, model: Skeleton, teacher: Skeleton | None) -> None:
    """UserError where a tokenizer or its template does not take the sampling or the prompts."""
    sampling = experiment.config.sampling
    rules_of(model.tokenizer, sampling)
    check_thinking(model.tokenizer, sampling.thinking, "sampling")
    if (learned := experiment.learned(model.model)) is not None:
        experiment.require_tasks(demonstrable(model.tokenizer, experiment.tasks, learned))
        for some in (experiment.held_out, experiment.validation):
            demonstrable(model.tokenizer, some, learned)
        return
    if experiment.environment is not None:
        return
    experiment.require_tasks(fitting_examples(experiment, model, teacher))
    for some in filter(None, (experiment.held_out, experiment.validation)):
        fitting(model.tokenizer, context_of(model.model), some, sampling.thinking)


def _teacher(experiment: Experiment, student: Skeleton | None, found: list[str]) -> Skeleton | None:
    """The model of a teacher, None where it is not here; UserError for one of another vocabulary."""
    given = experiment.config.teacher
    if "teacher" not in experiment.algorithm.needs:
        return None
    if given.id in (None, "base"):
        return student
    teacher = _model(given.id, given.dtype, "teacher", found)
    if given.adapter is not None:
        adapter_folder.read(given.adapter)
    if teacher is not None and student is not None:
        refuse_other_vocabulary(student.tokenizer, teacher.tokenizer)
    return teacher


def fitting_examples(experiment: Experiment, model: Skeleton, teacher: Skeleton | None) -> Fitting:
    """The examples to train on that fit a model, and with their hints a teacher, where there is one."""
    given, thinking = experiment.config.teacher, experiment.config.sampling.thinking
    fitted = fitting(model.tokenizer, context_of(model.model), experiment.tasks, thinking)
    if teacher is None or given.hint is None:
        return fitted
    context = context_of(teacher.model)
    hints = fitting_hints(teacher.tokenizer, context, fitted.tasks, given.hint, given.thinking)
    line = "; ".join(one.line for one in (fitted, hints) if one.line)
    return Fitting(hints.tasks, fitted.left_out + hints.left_out, line)


def _environment(experiment: Experiment, tokenizer: Any) -> Iterator[str]:
    """An environment is made, and reset with the first example; one that wants a tokenizer waits for it."""
    factory, limits = experiment.environment, experiment.limits()
    if factory is None:
        return
    if tokenizer is not None:
        prepare(factory, tokenizer)
    elif hasattr(getattr(factory, "func", factory), "prepare"):
        yield "the environment: tried once the model is on this machine"
        return
    handle = EnvironmentHandle(factory, experiment.completed[0])
    with Workers(limits.timeout) as workers:
        call = workers.submit(handle.reset, handle)
        workers.wait(grace=None)
        if fault := call.fault("reset", limits.timeout):
            raise UserError("environment", fault)
        if handle.close is not None:
            workers.submit(handle.close)
            workers.wait(grace=None)
    yield f"the environment begins with {brief(call.value)}"


def _rewards(experiment: Experiment) -> Iterator[str]:
    """Each reward function is called with an example, and completions that may be right and that are made up.

    A function may raise for a completion that it cannot read. One that raises for all of them is a fault.
    """
    rewards = experiment.rewards
    if not rewards.functions:
        return
    task = experiment.completed[0]
    for name, function in zip(rewards.names, rewards.functions, strict=True):
        group = tuple(_completed(task, text) for text in _completions(task))
        try:
            (scored,) = score([group], replace(rewards, functions=(function,), weights=(1.0,)))
        except UserError as error:
            raise error.within("a trial with made-up completions") from error.__cause__
        given = ", ".join(f"{number(one.reward)} for {brief(one.text, 30)}" for one in (scored[0], scored[-1]))
        yield f"reward {name} gives {given}"


def _completions(task: Task) -> list[str]:
    texts = [value for value in task.columns.values() if isinstance(value, str) and value.strip()]
    return [MADE_UP, *texts]


def _completed(task: Task, text: str) -> Trajectory:
    return Trajectory(task, (Turn((0,), (0,), (0.0,), text),))
