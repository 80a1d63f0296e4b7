"""Tasks as token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlxrl.types import Message, Task


class PromptError(ValueError):
    """A prompt that cannot be put to the model."""


def render(
    tokenizer: Any, task: Task, *, thinking: bool | None = None, tools: Sequence[Mapping[str, Any]] = ()
) -> tuple[int, ...]:
    """The ids of a task's prompt, ready for the model to answer.

    A string is asked as the user's message through the chat template; a tokenizer without one gets it as it is.

    Args:
        thinking: passed to the template as `enable_thinking`; None leaves the template's default.
        tools: schemas of functions that the template tells the model of.
    Raises:
        PromptError: messages for a tokenizer without a chat template, or a prompt of no tokens.
    """
    if tokenizer.has_chat_template:
        ids = _templated(tokenizer, task, thinking, tools)
    elif isinstance(task.prompt, str):
        try:
            ids = tokenizer.encode(task.prompt)
        except TypeError as error:  # the tokenizer's word for text that is not Unicode
            raise PromptError(f"prompt {task.prompt[:80]!r}: the tokenizer refuses it: {error}") from error
    else:
        raise PromptError("prompt: the tokenizer has no chat template; wanted a string, got messages")
    if not ids:
        raise PromptError(f"prompt: {task.prompt!r} has no tokens")
    return tuple(int(token) for token in ids)


def written(
    tokenizer: Any,
    messages: Sequence[Message],
    thinking: bool | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The text that the chat template makes of messages, ready for the model to answer."""
    options = options_of(thinking, tools)
    return _applied(tokenizer, list(messages), options, str(messages[-1].get("content")), tokenize=False)


def options_of(thinking: bool | None, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a chat template is given beside the messages."""
    switch = {} if thinking is None else {"enable_thinking": thinking}
    return {**switch, "tools": [dict(tool) for tool in tools]} if tools else switch


def _templated(tokenizer: Any, task: Task, thinking: bool | None, tools: Sequence[Mapping[str, Any]]) -> list[int]:
    messages: list[Message] = (
        [{"role": "user", "content": task.prompt}] if isinstance(task.prompt, str) else list(task.prompt)
    )
    return _applied(tokenizer, messages, options_of(thinking, tools), str(task.prompt), tokenize=True)


def _applied(tokenizer: Any, messages: list[Message], options: Mapping[str, Any], shown: str, *, tokenize: bool) -> Any:
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=tokenize, **options)
    except Exception as error:  # a template is a program of the model's, and may raise anything
        raise PromptError(f"prompt {shown[:80]!r}: the chat template refuses it: {error}") from error
