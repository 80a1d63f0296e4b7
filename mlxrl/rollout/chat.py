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
    """A conversation: its messages, and as text what the template made of them, None until it is needed.

    thinking: the template's switch, None for its default. tools: schemas of functions that the template describes.
    """

    messages: tuple[Message, ...] = ()
    text: str | None = None
    thinking: bool | None = None
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class ChatInput:
    """What a model reads before its next reply: a conversation, and those of its ids that are new to the sequence.

    history_rewritten, new_suffix: see `Turn`.
    """

    chat: Chat
    ids: tuple[int, ...]
    history_rewritten: bool = False
    new_suffix: int = 0


def render(
    tokenizer: Any, task: Task, *, thinking: bool | None = None, tools: Sequence[Mapping[str, Any]] = ()
) -> tuple[int, ...]:
    """The ids of a task's prompt, ready for the model to answer.

    A string is asked as the user's message through the chat template; a tokenizer without one gets it as it is.

    Args:
        thinking: passed to the template as `enable_thinking`; None leaves the template's default.
        tools: schemas of functions that the template describes to the model.
    Raises:
        PromptError: messages for a tokenizer without a chat template, or a prompt of no tokens.
    """
    if tokenizer.has_chat_template:
        ids = _templated(tokenizer, Chat(_messages(task.prompt), None, thinking, tuple(tools)), task.prompt)
    elif isinstance(task.prompt, str):
        ids = _encoded(tokenizer, "prompt", task.prompt, add_special_tokens=True)
    else:
        raise PromptError("prompt", "the tokenizer has no chat template; wanted a string, got messages")
    if not ids:
        raise PromptError("prompt", f"{task.prompt!r} has no tokens")
    return tuple(int(token) for token in ids)


def start_chat(
    tokenizer: Any,
    observation: str | Sequence[Message],
    thinking: bool | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> ChatInput:
    """Begin a conversation with what is read first; the ids are those of a task with that prompt."""
    prompt = observation if isinstance(observation, str) else tuple(observation)
    ids = render(tokenizer, Task(prompt), thinking=thinking, tools=tools)
    return ChatInput(Chat(_messages(prompt), None, thinking, tuple(tools)), ids)


def continue_chat(
    tokenizer: Any, chat: Chat, tokens: Sequence[int], stop_ids: Sequence[int], observation: str | Sequence[Message]
) -> ChatInput:
    """Put an observation after a reply.

    The text of the conversation so far, then the reply, white space aside, must begin the new rendering. What stands
    after them there is appended; the stop token is taken off its front where the reply ends with it. Where they do
    not begin it, the template has rewritten the history, and the new rendering is a prompt of its own.

    Raises:
        PromptError: the template refuses the messages, or there is none and they are not a text.
    """
    stopped = bool(tokens) and tokens[-1] in stop_ids
    reply = tokenizer.decode(list(tokens[:-1] if stopped else tokens))
    if not tokenizer.has_chat_template:
        if not isinstance(observation, str):
            raise PromptError("observation", "the tokenizer has no chat template; wanted a string, got messages")
        return ChatInput(chat, _encoded(tokenizer, "observation", observation))
    new = _messages(observation)
    before = _written(tokenizer, chat) if chat.text is None else chat.text
    now = replace(chat, messages=(*chat.messages, {"role": "assistant", "content": reply}, *new))
    now = replace(now, text=(after := _written(tokenizer, now)))
    tail = _after(after, before, reply)
    if tail is None:
        ids = _encoded(tokenizer, "observation", after)
        return ChatInput(now, ids, True, _new_suffix(tokenizer, now, ids, len(new)))
    return ChatInput(now, _tail(tokenizer, tail, tokens[-1] if stopped else None))


def observed(observation: str | Sequence[Message]) -> str:
    """An observation as text for people."""
    return observation if isinstance(observation, str) else "\n".join(map(text_of, observation))


def _new_suffix(tokenizer: Any, chat: Chat, ids: tuple[int, ...], count: int) -> int:
    """How many of a rendering's ids, at its end, are its last `count` messages and what the template puts after them.

    The text of the first of them begins where the rendering would differ if it were another text.
    """
    front, first, later = chat.messages[:-count], chat.messages[-count], chat.messages[len(chat.messages) - count + 1 :]
    other = {**first, "content": "1" if text_of(first).strip().startswith("0") else "0"}
    text, changed = chat.text or "", _written(tokenizer, replace(chat, messages=(*front, other, *later)))
    tail = _encoded(tokenizer, "observation", text[_common_start(text, changed) :])
    return _common_start(ids[:0:-1], tail[::-1])


def _common_start(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many items two sequences begin with alike."""
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


def _tail(tokenizer: Any, tail: str, stop_id: int | None) -> tuple[int, ...]:
    """The ids of what follows a reply, without the stop token where the sequence holds it already."""
    stop = "" if stop_id is None else tokenizer.decode([stop_id])
    if not stop or not tail.lstrip().startswith(stop):
        return _encoded(tokenizer, "observation", tail)
    ids = _encoded(tokenizer, "observation", tail.lstrip())
    return ids[1:] if ids[0] == stop_id else _encoded(tokenizer, "observation", tail.lstrip().removeprefix(stop))


def _messages(observation: str | Sequence[Message]) -> tuple[Message, ...]:
    return ({"role": "user", "content": observation},) if isinstance(observation, str) else tuple(observation)


def _written(tokenizer: Any, chat: Chat) -> str:
    return _templated(tokenizer, chat, chat.messages[-1].get("content"), tokenize=False)


def _templated(tokenizer: Any, chat: Chat, shown: Any, tokenize: bool = True) -> Any:
    """What the chat template makes of a conversation, ready for the model to answer: ids, or the text."""
    switch = {} if chat.thinking is None else {"enable_thinking": chat.thinking}
    tools = {"tools": [dict(tool) for tool in chat.tools]} if chat.tools else {}
    try:
        return tokenizer.apply_chat_template(
            list(chat.messages), add_generation_prompt=True, tokenize=tokenize, **switch, **tools
        )
    except Exception as error:  # a template is a program of the model's, and may raise anything
        raise PromptError(f"prompt {str(shown)[:80]!r}", f"the chat template refuses it: {error}") from error


def _encoded(tokenizer: Any, what: str, text: str, add_special_tokens: bool = False) -> tuple[int, ...]:
    try:
        return tuple(int(token) for token in tokenizer.encode(text, add_special_tokens=add_special_tokens))
    except TypeError as error:  # the tokenizer's word for text that is not Unicode
        shown = text[:80] if what == "prompt" else text[-80:]
        raise PromptError(f"{what} {shown!r}", f"the tokenizer refuses it: {error}") from error
