"""A teacher: who judges the student's own tokens, and under which prompt."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal
from weakref import WeakKeyDictionary

import mlx.core as mx
import numpy as np

from mlxrl.policy.adapters import without_adapters
from mlxrl.policy.compare import hidden_at, likeliest
from mlxrl.policy.load import Policy
from mlxrl.policy.logprobs import logprobs, training
from mlxrl.rollout.chat import render
from mlxrl.train.pack import minibatch as packed
from mlxrl.train.rows import first_chosen, row_of, with_prompt
from mlxrl.types import Algorithm, Comparison, Group, MicroBatch, Task, Trajectory


@dataclass(frozen=True, slots=True)
class Teacher:
    """A model that is forced on the student's token ids.

    policy: its model, which may be the student's. base: without its adapters. hint: the column of a task that is put
    behind its prompt, for the teacher alone. thinking: of the hinted prompt, as in `Sampling`.
    """

    policy: Policy
    base: bool = False
    hint: str | None = None
    thinking: bool | None = None

    @contextmanager
    def seated(self) -> Generator[None]:
        """The span of a block in which the model is the teacher."""
        if self.base:
            with without_adapters(self.policy.model):
                yield
        else:
            yield


def teacher_of(
    student: Policy,
    algo: Algorithm,
    teacher: Policy | Teacher | Literal["base"] | None,
    hint: str | None = None,
    thinking: bool | None = None,
) -> Teacher | None:
    """The teacher that is meant, None for an algorithm that needs none.

    Raises:
        ValueError: it is missing, has no effect, is the student itself, or has another vocabulary.
    """
    if isinstance(teacher, Teacher):
        chosen = teacher
    elif teacher is None:
        chosen = None if hint is None else Teacher(student, hint=hint, thinking=thinking)
    elif isinstance(teacher, Policy):
        chosen = Teacher(teacher, hint=hint, thinking=thinking)
    elif teacher == "base":
        chosen = Teacher(student, base=True, hint=hint, thinking=thinking)
    else:
        raise ValueError(f"teacher: wanted a policy, as mlxrl.load({teacher!r}, lora=None) gives, or 'base'")
    if (chosen is not None) != ("teacher" in algo.needs):
        raise ValueError(_mismatch(algo.name, chosen))
    if chosen is not None:
        _check(student, chosen)
    return chosen


def _mismatch(name: str, chosen: Teacher | None) -> str:
    if chosen is None:
        return f"teacher: {name} learns from one; wanted teacher= a policy or 'base', or hint= a column"
    return f"teacher: has no effect, because {name} does not learn from one; leave it out, or use opd"


def _check(student: Policy, teacher: Teacher) -> None:
    if teacher.policy.model is student.model and not teacher.base and teacher.hint is None:
        raise ValueError(
            "teacher: is the student itself, which teaches nothing; wanted a hint, 'base' or another policy"
        )
    ours, theirs = student.tokenizer, teacher.policy.tokenizer
    if ours is not theirs and theirs not in _matching.get(ours, ()):
        check_vocabularies(ours, theirs)
        _matching.setdefault(ours, []).append(theirs)


_matching: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()
"""Tokenizers that were found to have the same vocabulary."""


def check_vocabularies(ours: Any, theirs: Any) -> None:
    """ValueError unless every token id of the student's tokenizer is the same token for the teacher."""
    known = {number: token for token, number in theirs.get_vocab().items()}
    for token, number in sorted(ours.get_vocab().items(), key=lambda item: item[1]):
        if known.get(number) != token:
            other = f"{known[number]!r}" if number in known else "not there"
            raise ValueError(
                f"teacher: its vocabulary is not the student's: token {number} is {token!r} for the student and "
                f"{other} for the teacher; they are compared token by token, so wanted one with the same tokenizer"
            )


def taught(
    teacher: Teacher, minibatch: MicroBatch, comparison: Comparison | None, groups: Sequence[Group]
) -> MicroBatch:
    """A minibatch with what its loss compares with: log-probs of the tokens, of candidates, or hidden states.

    groups: those of the step, of whose trajectories the rows are.
    """
    rows = [trajectory for group in groups for trajectory in group]
    view = minibatch if teacher.hint is None else _hinted(teacher, minibatch, rows)

    def placed(array: mx.array, source: MicroBatch = view, target: MicroBatch = minibatch) -> mx.array:
        return array if source is target else _moved(array, source, target)

    with training(teacher.policy.model), teacher.seated():
        if comparison is None:
            found = {"teacher_logprobs": placed(logprobs(teacher.policy, view, gradient=False).token_logprobs)}
        elif comparison.support == "vocabulary":
            found = {"teacher_hidden": placed(hidden_at(teacher.policy, view))}
        elif comparison.support == "teacher":
            ids, values = likeliest(teacher.policy, view, comparison.num_top)
            found = {"top_ids": placed(ids), "teacher_top_logprobs": placed(values)}
        else:
            assert minibatch.top_ids is not None
            ids = placed(minibatch.top_ids, minibatch, view)
            values = logprobs(teacher.policy, view, candidates=ids, gradient=False).token_logprobs
            found = {"teacher_top_logprobs": placed(values)}
        found = {name: mx.stop_gradient(array) for name, array in found.items()}
        mx.eval(found)  # the pass's activations end here
    return replace(minibatch, **found)


def _hinted(teacher: Teacher, minibatch: MicroBatch, rows: Sequence[Trajectory]) -> MicroBatch:
    """The same completions under the teacher's prompts."""
    chosen = np.count_nonzero(np.array(minibatch.mask), axis=1).tolist()
    shown = [
        first_chosen(row_of(number, _with_hint(teacher, rows[number]), 0.0), count)
        for number, count in zip(minibatch.trajectories, chosen, strict=True)
    ]
    return packed(shown if minibatch.prefix.size else [with_prompt(row) for row in shown])


def _with_hint(teacher: Teacher, row: Trajectory) -> Trajectory:
    assert teacher.hint is not None
    if any(turn.history_rewritten for turn in row.turns):
        raise ValueError("teacher: hint: wanted trajectories of one row, got one whose history was rewritten")
    prompt = render(teacher.policy.tokenizer, hinted(row.task, teacher.hint), thinking=teacher.thinking)
    return replace(row, turns=(replace(row.turns[0], observation=prompt), *row.turns[1:]))


def hinted(task: Task, hint: str) -> Task:
    """The task with the text of a column behind its last message, after an empty line.

    Raises:
        ValueError: the task has no such column, or no text in it.
    """
    text = task.columns.get(hint)
    if not isinstance(text, str) or not text.strip():
        there = ", ".join(task.columns) or "none"
        raise ValueError(
            f"teacher: hint: wanted a text in column {hint!r} of every task, got {text!r}; there are {there}"
        )
    if isinstance(task.prompt, str):
        return replace(task, prompt=f"{task.prompt}\n\n{text}")
    last = task.prompt[-1]
    return replace(task, prompt=(*task.prompt[:-1], {**last, "content": f"{last['content']}\n\n{text}"}))


def _moved(array: mx.array, source: MicroBatch, target: MicroBatch) -> mx.array:
    """Values [B, T, ...] of sampled tokens in the places that the same tokens have in another layout of the rows."""
    places = [np.array(batch.mask).reshape(-1) > 0 for batch in (source, target)]
    values = array.reshape(-1, *array.shape[2:])[mx.array(np.flatnonzero(places[0]))]
    number = np.where(places[1], np.cumsum(places[1]) - 1, len(values))
    zero = mx.zeros((1, *values.shape[1:]), values.dtype)
    moved = mx.concatenate([values, zero])[mx.array(number)]
    return moved.reshape(*target.mask.shape, *values.shape[1:])
