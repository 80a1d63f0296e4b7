"""A teacher: a model that scores the student's own tokens, under the student's prompt or one with a hint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias

import mlx.core as mx
import numpy as np

from mlxrl.algo.algorithm import comparison_of
from mlxrl.errors import UserError, brief
from mlxrl.messages import is_begun, messages_of
from mlxrl.policy.logprobs import hidden_at, logprobs, top_k
from mlxrl.policy.modes import scoring
from mlxrl.policy.policy import Policy
from mlxrl.policy.prefix import PrefixRun, with_prefix_runs
from mlxrl.protocols import Algorithm
from mlxrl.rollout.chat import Fitting, check_thinking, fitting, render
from mlxrl.rollout.prefill import context_of
from mlxrl.rollout.sample import found_once
from mlxrl.train.batch import micro_batch as batched
from mlxrl.train.minibatches import of_rows
from mlxrl.train.sequences import sequence_of, up_to_sampled, with_prompt
from mlxrl.types import Batch, Comparison, MicroBatch, Task, Trajectory


@dataclass(frozen=True, slots=True)
class Teacher:
    """A model that is teacher-forced on the student's token ids.

    policy: its model, None for the student's own. base: without its adapters. hint: the column of a task that is put
    after its prompt for the teacher alone. thinking: the thinking switch of the hinted prompt.
    """

    policy: Policy | None = None
    base: bool = False
    hint: str | None = None
    thinking: bool | None = None

    @property
    def model(self) -> Policy:
        """The policy of a teacher that `teacher_of` has found."""
        assert self.policy is not None
        return self.policy


TeacherLike: TypeAlias = Policy | Teacher | Literal["base"] | None


def teacher_of(student: Policy, algorithm: Algorithm, given: TeacherLike) -> Teacher | None:
    """The teacher that is meant, with its policy; None for an algorithm that needs none.

    Raises:
        UserError: it is missing, has no effect, is the student itself, or has another vocabulary.
    """
    if not isinstance(given, Teacher | Policy) and given not in (None, "base"):
        raise UserError("teacher", f"wanted a policy, as mlxrl.load({brief(given)}, lora=None) gives, or 'base'")
    needed = "teacher" in algorithm.needs
    if given is None and needed:
        raise UserError("teacher", f"{algorithm.name} learns from one; wanted a policy, 'base', or Teacher(hint=...)")
    if given is not None and not needed:
        why = f"has no effect, because {algorithm.name} does not learn from one; leave it out, or use opd"
        raise UserError("teacher", why)
    if given is None:
        return None
    teacher = given if isinstance(given, Teacher) else Teacher(base=True) if given == "base" else Teacher(given)
    teacher = replace(teacher, policy=teacher.policy or student)
    if teacher.model.model is student.model and not teacher.base and teacher.hint is None:
        why = "is the student itself, which teaches nothing; wanted a hint, 'base' or another policy"
        raise UserError("teacher", why)
    refuse_other_vocabulary(student.tokenizer, teacher.model.tokenizer)
    if teacher.thinking is not None and teacher.hint is None:
        raise UserError("teacher", "thinking", "has no effect without a hint")
    check_thinking(teacher.model.tokenizer, teacher.thinking, "teacher")
    return teacher


def refuse_other_vocabulary(student: Any, teacher: Any) -> None:
    """UserError unless every token id of the student's tokenizer is the same token for the teacher's."""
    ours, theirs = student.get_vocab(), teacher.get_vocab()
    if student is teacher or ours.items() <= theirs.items():
        return
    known = {number: token for token, number in theirs.items()}
    number, token = min((number, token) for token, number in ours.items() if known.get(number) != token)
    other = f"{known[number]!r}" if number in known else "not there"
    raise UserError(
        "teacher",
        f"its vocabulary is not the student's: token {number} is {token!r} for the student and {other} for the "
        "teacher; they are compared token by token, so wanted one with the same tokenizer",
    )


def fitting_teacher(teacher: Teacher | None, fitted: Fitting) -> Fitting:
    """The tasks that fit, without those whose hinted prompts fill the teacher's context, with a warning."""
    if teacher is None or teacher.hint is None:
        return fitted
    policy, hint, thinking = teacher.model, teacher.hint, teacher.thinking
    find = partial(fitting_hints, policy.tokenizer, context_of(policy.model), fitted.tasks, hint, thinking)
    found = found_once(policy, fitted.tasks, (hint, thinking), find)
    return replace(found, left_out=fitted.left_out + found.left_out)


def fitting_hints(
    tokenizer: Any, context: int | None, tasks: Sequence[Task], hint: str, thinking: bool | None
) -> Fitting:
    """`fitting` for the prompts that a teacher with a hint reads."""
    shown = partial(hinted, hint=hint)
    return fitting(tokenizer, context, tasks, thinking, shown, f"the teacher's prompt, with {hint!r},")


def with_teacher(student: Policy, teacher: Teacher | None, batch: Batch, algorithm: Algorithm) -> Batch:
    """A batch with what its loss compares with: log-probs of the tokens, of top ids, or hidden states.

    One that has it already stays as it is. Ids are compared that both models have. The rest of a sequence from a token
    on that the teacher does not have is dropped, and counted.
    """
    if all(map(_has_teacher, batch)):
        return batch
    assert teacher is not None
    batch = _readable(batch, teacher.model.head.vocabulary)
    micro_batches, comparison = batch.micro_batches, comparison_of(algorithm)
    trajectories = [trajectory for group in batch.groups for trajectory in group]
    views = [one if teacher.hint is None else _hinted(teacher, one, trajectories) for one in micro_batches]
    found: list[MicroBatch] = []
    with scoring(teacher.model, adapters=not teacher.base):
        runs = with_prefix_runs(teacher.model, views)
        for micro_batch, (view, run) in zip(micro_batches, runs, strict=True):
            scored = _scored(teacher.model, micro_batch, view, run, comparison, student.head.vocabulary)
            scored = {name: mx.stop_gradient(array) for name, array in scored.items()}
            mx.eval(scored)  # the pass's activations end here
            found.append(replace(micro_batch, **scored))
    return replace(batch, micro_batches=tuple(found))


def _readable(batch: Batch, vocabulary: int) -> Batch:
    """The batch without what a model of fewer token ids cannot read: sequences end before the first that it lacks."""
    kept, dropped = list[MicroBatch](), Counter(batch.dropped_tokens)
    for one in batch:
        read = mx.cumsum(one.tokens >= vocabulary, axis=1) + (one.prefix >= vocabulary).sum() == 0
        if read.all().item():
            kept.append(one)
            continue
        lost: list[float] = (one.mask * ~read).sum(axis=1).tolist()  # pyright: ignore
        dropped.update({number: int(tokens) for number, tokens in zip(one.trajectories, lost, strict=True)})
        observed = None if one.observation_mask is None else one.observation_mask * read
        part = replace(one, tokens=mx.where(read, one.tokens, 0), mask=one.mask * read, observation_mask=observed)
        if rows := np.flatnonzero(np.array(part.mask).any(axis=1)).tolist():
            kept.append(of_rows(part, rows))
    return replace(batch, micro_batches=tuple(kept), dropped_tokens=dict(+dropped))


def _has_teacher(micro_batch: MicroBatch) -> bool:
    found = (micro_batch.teacher_logprobs, micro_batch.teacher_top_logprobs, micro_batch.teacher_hidden)
    return any(array is not None for array in found)


def _scored(
    policy: Policy, micro_batch: MicroBatch, view: MicroBatch, run: PrefixRun | None, comparison: Comparison | None,
    vocabulary: int,
) -> dict[str, mx.array]:  # fmt: skip
    """What a teacher computes for the sampled tokens of a micro-batch, of which `view` is what it reads; vocabulary:
    the student's."""

    def moved(array: mx.array, source: MicroBatch = view, target: MicroBatch = micro_batch) -> mx.array:
        return array if source is target else _moved(array, source, target)

    if comparison is None:
        return {"teacher_logprobs": moved(logprobs(policy, view, gradient=False, prefix=run).token_logprobs)}
    if comparison.support == "vocabulary":
        return {"teacher_hidden": moved(hidden_at(policy, view, run))}
    if comparison.support == "teacher":
        ids, values = top_k(policy, view, comparison.num_top, run, vocabulary)
        return {"top_ids": moved(ids), "teacher_top_logprobs": moved(values)}
    assert micro_batch.top_ids is not None
    ids = moved(micro_batch.top_ids, micro_batch, view)
    values = logprobs(policy, view, top_ids=ids, gradient=False, prefix=run).top_logprobs
    assert values is not None
    return {"teacher_top_logprobs": moved(values)}


def _hinted(teacher: Teacher, micro_batch: MicroBatch, trajectories: Sequence[Trajectory]) -> MicroBatch:
    """The same completions under the teacher's prompts."""
    counts = np.count_nonzero(np.array(micro_batch.mask), axis=1).tolist()
    sequences = [
        up_to_sampled(sequence_of(number, _with_hint(teacher, trajectories[number]), 0.0), count)
        for number, count in zip(micro_batch.trajectories, counts, strict=True)
    ]
    if micro_batch.prefix.size == 0:
        sequences = list(map(with_prompt, sequences))
    return batched(sequences, prefix_id=micro_batch.prefix_id)


def _with_hint(teacher: Teacher, trajectory: Trajectory) -> Trajectory:
    assert teacher.hint is not None
    if any(turn.history_rewritten for turn in trajectory.turns):
        why = "wanted trajectories of one sequence, got one whose history was rewritten"
        raise UserError("teacher", "hint", why)
    prompt = render(teacher.model.tokenizer, hinted(trajectory.task, teacher.hint), thinking=teacher.thinking)
    first, *later = trajectory.turns
    return replace(trajectory, turns=(replace(first, observation=prompt), *later))


def hinted(task: Task, hint: str) -> Task:
    """The task with the text of a column after its last message that is not the begun answer, and an empty line.

    Raises:
        UserError: the task has no such column, or no text in it.
    """
    text = task.columns.get(hint)
    if not isinstance(text, str) or not text.strip():
        there = ", ".join(task.columns) or "none"
        why = f"wanted a text in column {hint!r} of every task, got {brief(text)}; there are {there}"
        raise UserError("teacher", "hint", why)
    if isinstance(task.prompt, str):
        return replace(task, prompt=f"{task.prompt}\n\n{text}")
    if not task.messages:
        raise UserError("teacher", "hint", "wanted a text or messages as prompt, got token ids")
    messages = messages_of(task.messages)
    end = len(messages) - is_begun(messages)  # an answer that is continued stays the last message
    if not end:
        raise UserError("teacher", "hint", "wanted a message before the answer that is continued, got none")
    last = {**messages[end - 1], "content": f"{messages[end - 1]['content']}\n\n{text}"}
    return replace(task, prompt=(*messages[: end - 1], last, *messages[end:]))


def _moved(array: mx.array, source: MicroBatch, target: MicroBatch) -> mx.array:
    """Values [B, T, ...] of sampled tokens at the positions that the same tokens have in another layout."""
    sampled = [np.array(batch.mask).reshape(-1) > 0 for batch in (source, target)]
    values = array.reshape(-1, *array.shape[2:])[mx.array(np.flatnonzero(sampled[0]))]
    number = np.where(sampled[1], np.cumsum(sampled[1]) - 1, len(values))
    zero = mx.zeros((1, *values.shape[1:]), values.dtype)
    moved = mx.concatenate([values, zero])[mx.array(number)]
    return moved.reshape(*target.mask.shape, *values.shape[1:])
