"""Conversations as token ids: a prompt rendered through the chat template, and how a conversation continues.

The ids of a sequence are never encoded again. The chat template renders the whole conversation as text; what stands in
it after the model's last reply is encoded and appended to the sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlxrl.errors import UserError
from mlxrl.rewards import text_of
from mlxrl.types import Message, Task


class PromptError(UserError):
    """A prompt that the model cannot be given."""


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation that the model is to answer, and those of its ids that are new to the sequence.

    text: what the template made of the messages. thinking: the template's switch, None for its default.
    tools: schemas of functions that the template describes. history_rewritten, new_suffix: see `Turn`.
    """

    messages: tuple[Message, ...] = ()
    ids: tuple[int, ...] = ()
    text: str = ""
    thinking: bool | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    history_rewritten: bool = False
    new_suffix: int = 0


def render(
    tokenizer: Any, task: Task, *, thinking: bool | None = None, tools: Sequence[Mapping[str, Any]] = ()
) -> tuple[int, ...]:
    """The ids of a task's prompt, ready for the model to answer; see `start_chat`."""
    return start_chat(tokenizer, task.prompt, thinking, tools).ids


def start_chat(
    tokenizer: Any,
    observation: str | Sequence[Message],
    thinking: bool | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> Chat:
    """Begin a conversation with what is read first.

    A string is the user's message in the chat template; a tokenizer without a template gets it as it is.

    Args:
        thinking, tools: see `Chat`; passed to the template as `enable_thinking` and `tools`.
    Raises:
        PromptError: messages for a tokenizer without a chat template, or a prompt of no tokens.
    """
    chat = Chat(_messages(observation), thinking=thinking, tools=tuple(tools))
    if tokenizer.has_chat_template:
        chat = replace(chat, text=_templated(tokenizer, chat))
        ids = _encoded(tokenizer, "prompt", chat.text)
    elif isinstance(observation, str):
        ids = _encoded(tokenizer, "prompt", observation, add_special_tokens=True)
    else:
        raise PromptError("prompt", "the tokenizer has no chat template; wanted a string, got messages")
    if not ids:
        raise PromptError("prompt", f"{observation!r} has no tokens")
    return replace(chat, ids=ids)


def continue_chat(
    tokenizer: Any, chat: Chat, tokens: Sequence[int], stop_ids: Sequence[int], observation: str | Sequence[Message]
) -> Chat:
    """Put an observation after a reply; PromptError where the template refuses it, or there is none for messages.

    The text of the conversation so far, then the reply, white space aside, must begin the new rendering. What stands
    after them there is appended; the stop token is taken off its front where the reply ends with it. Where they do
    not begin it, the template has rewritten the history, and the new rendering is a prompt of its own.
    """
    stopped = bool(tokens) and tokens[-1] in stop_ids
    reply = tokenizer.decode(list(tokens[:-1] if stopped else tokens))
    if not tokenizer.has_chat_template:
        if not isinstance(observation, str):
            raise PromptError("observation", "the tokenizer has no chat template; wanted a string, got messages")
        return replace(chat, ids=_encoded(tokenizer, "observation", observation))
    new, before = _messages(observation), chat.text
    chat = replace(chat, messages=(*chat.messages, {"role": "assistant", "content": reply}, *new))
    text = _templated(tokenizer, chat)
    if (tail := _after(text, before, reply)) is not None:
        ids = _without_stop(tokenizer, tail, tokens[-1] if stopped else None)
        return replace(chat, ids=ids, text=text, history_rewritten=False, new_suffix=0)
    ids = _encoded(tokenizer, "observation", text)
    suffix = _new_suffix(tokenizer, chat, text, ids, len(new))
    return replace(chat, ids=ids, text=text, history_rewritten=True, new_suffix=suffix)


def observed(observation: str | Sequence[Message]) -> str:
    """An observation as text for people."""
    return observation if isinstance(observation, str) else "\n".join(map(text_of, observation))


def _new_suffix(tokenizer: Any, chat: Chat, text: str, ids: tuple[int, ...], count: int) -> int:
    """How many of a rendering's ids, at its end, are its last `count` messages and what the template puts after them.

    The text of the first of them begins where the rendering would differ if it were another text.
    """
    messages = list(chat.messages)
    other = "1" if text_of(messages[-count]).strip().startswith("0") else "0"
    messages[-count] = {**messages[-count], "content": other}
    changed = _templated(tokenizer, replace(chat, messages=tuple(messages)))
    tail = _encoded(tokenizer, "observation", text[_common_start(text, changed) :])
    return _common_start(ids[:0:-1], tail[::-1])


def _common_start(one: Sequence[Any], other: Sequence[Any]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _after(text: str, before: str, reply: str) -> str | None:
    """What a text holds after `before` and the reply, white space aside; None where it does not begin with them."""
    if not text.startswith(before):
        return None
    place = len(before)
    for letter in "".join(reply.split()):
        while place < len(text) and text[place].isspace():
            place += 1
        if text[place : place + 1] != letter:
            return None
        place += 1
    for letter in reply[len(reply.rstrip()) :]:  # white space at its end, where the template has kept it
        place += text[place : place + 1] == letter
    return text[place:]


def _without_stop(tokenizer: Any, tail: str, stop_id: int | None) -> tuple[int, ...]:
    """The ids of what follows a reply, without the stop token where the sequence holds it already."""
    stop = "" if stop_id is None else tokenizer.decode([stop_id])
    if not stop or not tail.lstrip().startswith(stop):
        return _encoded(tokenizer, "observation", tail)
    ids = _encoded(tokenizer, "observation", tail.lstrip())
    return ids[1:] if ids[0] == stop_id else _encoded(tokenizer, "observation", tail.lstrip().removeprefix(stop))


def _messages(observation: str | Sequence[Message]) -> tuple[Message, ...]:
    return ({"role": "user", "content": observation},) if isinstance(observation, str) else tuple(observation)


def _templated(tokenizer: Any, chat: Chat) -> str:
    """The text that the chat template makes of a conversation, ready for the model to answer."""
    switch = {} if chat.thinking is None else {"enable_thinking": chat.thinking}
    tools = {"tools": [dict(tool) for tool in chat.tools]} if chat.tools else {}
    try:
        return tokenizer.apply_chat_template(
            list(chat.messages), add_generation_prompt=True, tokenize=False, **switch, **tools
        )
    except Exception as error:  # a template is a program of the model's, and may raise anything
        content = str(chat.messages[-1].get("content"))[:80]
        raise PromptError(f"prompt {content!r}", f"the chat template refuses it: {error}") from error


def _encoded(tokenizer: Any, what: str, text: str, add_special_tokens: bool = False) -> tuple[int, ...]:
    try:
        return tuple(int(token) for token in tokenizer.encode(text, add_special_tokens=add_special_tokens))
    except TypeError as error:  # the tokenizer's word for text that is not Unicode
        raise PromptError(f"{what} {text[-80:]!r}", f"the tokenizer refuses it: {error}") from error
