"""Tasks as token ids."""

from __future__ import annotations

from typing import Any

from mlxrl.types import Message, Task


def render(tokenizer: Any, task: Task, *, thinking: bool | None = None) -> tuple[int, ...]:
    """The ids of a task's prompt, ready for the model to answer.

    A string is asked as the user's message through the chat template; a tokenizer without one gets it as it is.

    Args:
        thinking: passed to the template as `enable_thinking`; None leaves the template's default.
    Raises:
        ValueError: messages for a tokenizer without a chat template, or a prompt of no tokens.
    """
    if tokenizer.has_chat_template:
        ids = _templated(tokenizer, task, thinking)
    elif isinstance(task.prompt, str):
        ids = tokenizer.encode(task.prompt)
    else:
        raise ValueError("prompt: the tokenizer has no chat template; wanted a string, got messages")
    if not ids:
        raise ValueError(f"prompt: {task.prompt!r} has no tokens")
    return tuple(int(token) for token in ids)


def _templated(tokenizer: Any, task: Task, thinking: bool | None) -> list[int]:
    messages: list[Message] = (
        [{"role": "user", "content": task.prompt}] if isinstance(task.prompt, str) else list(task.prompt)
    )
    switch = {} if thinking is None else {"enable_thinking": thinking}
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, **switch)
