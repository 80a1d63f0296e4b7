"""Chat messages as a chat template is given them: known roles, texts as contents, arguments of calls as objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlxrl.errors import UserError, brief, did_you_mean
from mlxrl.files import strict_json
from mlxrl.types import Message

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "observation")


def messages_of(given: Sequence[Any], whole: bool = False) -> tuple[Message, ...]:
    """Messages with a text as content each: parts of a text are joined, and one that only calls tools says nothing.

    whole: nothing is to follow, so that the last may call tools.

    Raises:
        UserError: one line with the number of the message, what was wanted and what was got.
    """
    if not given:
        raise UserError("wanted at least one message, got an empty list")
    made = tuple(_message(f"message {number}", message) for number, message in enumerate(given, 1))
    if made[-1].get("tool_calls") and not whole:
        raise UserError(f"message {len(made)}", "wanted the answers of its tool_calls after it, got the last message")
    return made


def text_messages(text: str, system: str | None = None) -> tuple[Message, ...]:
    """A text as the user's message, after a system message where there is one."""
    user: Message = {"role": "user", "content": text}
    return (user,) if system is None else ({"role": "system", "content": system}, user)


def is_begun(messages: Sequence[Message]) -> bool:
    """Whether a conversation ends in an answer that is to be continued."""
    return bool(messages) and messages[-1].get("role") == "assistant"


def checked_text(where: str, text: str) -> str:
    """A text that a tokenizer can read; UserError for a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(where, f"wanted Unicode, got the lone surrogate {text[error.start]!r}") from None
    return text


def arguments_of(given: Any) -> Mapping[str, Any]:
    """The arguments of a call: an object, one as a text of JSON, or nothing; UserError for anything else."""
    try:
        value = (strict_json(given) if given.strip() else None) if isinstance(given, str) else given
    except ValueError:
        value = given
    if value is not None and not isinstance(value, Mapping):
        raise UserError("arguments", f"wanted an object, got {brief(given)}")
    return value or {}


def _message(where: str, message: Any) -> Message:
    if not isinstance(message, Mapping):
        raise UserError(where, f"wanted an object with 'role' and 'content', got {brief(message)}")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        near = did_you_mean(role, ROLES) if isinstance(role, str) else ""
        raise UserError(where, "role", f"wanted system, user, assistant or tool, got {brief(role)}{near}")
    made = {str(name): value for name, value in message.items() if value is not None}
    calls = made.pop("tool_calls", None)
    if calls:
        made["tool_calls"] = _calls(f"{where}: tool_calls", calls)
    made["content"] = "" if calls and "content" not in made else _content(f"{where}: content", made.get("content"))
    return made


def _content(where: str, content: Any) -> str:
    """The text of a content: itself, or its parts joined, as mlx-lm's server does."""
    if isinstance(content, str):
        return checked_text(where, content)
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise UserError(where, f"wanted a text or a list of text parts, got {brief(content)}")
    texts: list[Any] = [part.get("text") if isinstance(part, Mapping) else part for part in content]
    for number, (part, text) in enumerate(zip(content, texts, strict=True), 1):
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        if kind != "text" or not isinstance(text, str):
            raise UserError(where, f"part {number}: wanted a part with a text, got {brief(part)}")
    return checked_text(where, "".join(texts))


def _calls(where: str, calls: Any) -> list[Mapping[str, Any]]:
    if not isinstance(calls, Sequence) or not all(isinstance(call, Mapping) for call in calls):
        raise UserError(where, f"wanted a list of calls, got {brief(calls)}")
    return [_call(where, call) for call in calls]


def _call(where: str, call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function", call)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UserError(where, f"wanted a function's name and arguments, got {brief(call)}")
    try:
        made = {**function, "arguments": dict(arguments_of(function.get("arguments")))}
    except UserError as error:
        raise error.within(where) from None
    return {**call, "function": made} if "function" in call else made
