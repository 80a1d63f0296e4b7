"""Conversations as token ids: a prompt rendered through the chat template, and how a conversation continues.

The ids of a sequence are never encoded again. The chat template renders the whole conversation as text; what stands in
it after the model's last reply is encoded and appended to the sequence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeAlias

from mlxrl.errors import UserError, message_of
from mlxrl.messages import is_begun, messages_of, text_messages
from mlxrl.rewards import text_of
from mlxrl.types import Message, Task

Observation: TypeAlias = str | Sequence[Message] | Sequence[int]
SWITCHES = ("enable_thinking", "thinking", "reasoning", "enable_reasoning", "think")
"""Names of a chat template's thinking switch."""


class PromptError(UserError):
    """A prompt that the model cannot be given."""


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation that the model is to answer, and those of its ids that are new to the sequence.

    text: what the template made of the messages, of which there are none where the prompt is token ids.
    thinking: the template's switch, None for its default.
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
    observation: Observation,
    thinking: bool | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> Chat:
    """Begin a conversation with what is read first.

    A string is the user's message in the chat template; a tokenizer without a template gets it as it is. Token ids are
    the prompt. A conversation that ends in the assistant's message is continued there.

    Args:
        thinking, tools: see `Chat`; passed to the template as its thinking switch and `tools`.
    Raises:
        PromptError: messages for a tokenizer without a chat template, or a prompt of no tokens.
    """
    if is_token_ids(observation):
        return Chat(ids=tuple(observation))  # pyright: ignore
    chat = Chat(checked_messages(observation), thinking=thinking, tools=tuple(tools))
    if tokenizer.has_chat_template:
        chat = replace(chat, text=templated(tokenizer, chat))
        ids = encoded(tokenizer, "prompt", chat.text)
    elif isinstance(observation, str):
        begun = tokenizer.bos_token is not None and observation.startswith(tokenizer.bos_token)
        ids = encoded(tokenizer, "prompt", observation, add_special_tokens=not begun)
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
    if not tokenizer.has_chat_template or not chat.messages:
        if not isinstance(observation, str):
            why = "the prompt is token ids" if tokenizer.has_chat_template else "the tokenizer has no chat template"
            raise PromptError("observation", f"{why}; wanted a string, got messages")
        return replace(chat, ids=encoded(tokenizer, "observation", observation))
    new, before = checked_messages(observation), chat.text
    chat = replace(chat, messages=(*answered(chat.messages, reply), *new))
    text = templated(tokenizer, chat)
    if (tail := _after(text, before, reply)) is not None:
        ids = _without_stop(tokenizer, tail, tokens[-1] if stopped else None)
        return replace(chat, ids=ids, text=text, history_rewritten=False, new_suffix=0)
    ids = encoded(tokenizer, "observation", text)
    suffix = _new_suffix(tokenizer, chat, text, ids, len(new))
    return replace(chat, ids=ids, text=text, history_rewritten=True, new_suffix=suffix)


def check_thinking(tokenizer: Any, thinking: bool | None, *where: str) -> None:
    """PromptError for a thinking switch that the chat template does not have."""
    if thinking is not None and _switch(tokenizer) is None:
        raise PromptError(*where, "thinking", "the chat template has no such switch; leave it out")


def is_token_ids(observation: Observation) -> bool:
    """Whether a prompt is token ids."""
    return not isinstance(observation, str) and len(observation) > 0 and type(observation[0]) is int


def too_long(length: int, context: int, what: str = "a prompt") -> str:
    """What is wrong with a prompt after which nothing can be sampled."""
    return f"{what} of {length:,} tokens does not fit the context of {context:,}"


@dataclass(frozen=True, slots=True)
class Fitting:
    """tasks: those whose prompts leave room for an answer; left_out: how many do not; line: that in words."""

    tasks: Sequence[Task]
    left_out: int = 0
    line: str = ""


def fitting(
    tokenizer: Any,
    context: int | None,
    tasks: Sequence[Task],
    thinking: bool | None,
    shown: Callable[[Task], Task] = lambda task: task,
    what: str = "a prompt",
) -> Fitting:
    """Render every prompt, and leave out those that fill the model's context.

    Args:
        shown: a task as the model reads it; what: its name in messages.
    Raises:
        PromptError: one cannot be rendered, or all are left out.
    """
    lengths = [len(_of_task(tokenizer, shown(task), thinking)) for task in tasks]
    kept = tuple(task for task, length in zip(tasks, lengths, strict=True) if context is None or length < context)
    left_out = len(tasks) - len(kept)
    if context is None or not left_out:
        return Fitting(tasks)
    first, length = next((task, length) for task, length in zip(tasks, lengths, strict=True) if length >= context)
    why = f"{first.where}: {too_long(length, context, what)}".removeprefix(": ")
    if not kept:
        raise PromptError(why, f"nor does any other of {len(tasks):,}")
    return Fitting(kept, left_out, f"{why}; {left_out:,} of {len(tasks):,} are left out")


def _of_task(tokenizer: Any, task: Task, thinking: bool | None) -> tuple[int, ...]:
    try:
        return render(tokenizer, task, thinking=thinking)
    except PromptError as error:
        raise error.within(task.where) from error.__cause__


def observed(observation: Observation) -> str:
    """An observation as text for people."""
    return observation if isinstance(observation, str) else "\n".join(map(text_of, observation))


def answered(messages: tuple[Message, ...], reply: str) -> tuple[Message, ...]:
    """The messages with a reply, which continues the last one where that is the assistant's."""
    if not is_begun(messages):
        return (*messages, {"role": "assistant", "content": reply})
    return (*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + reply})


def _new_suffix(tokenizer: Any, chat: Chat, text: str, ids: tuple[int, ...], count: int) -> int:
    """How many of a rendering's ids, at its end, are its last `count` messages and what the template puts after them.

    The text of the first of them begins where the rendering would differ if it were another text.
    """
    messages = list(chat.messages)
    other = "1" if text_of(messages[-count]).strip().startswith("0") else "0"
    messages[-count] = {**messages[-count], "content": other}
    changed = templated(tokenizer, replace(chat, messages=tuple(messages)))
    tail = encoded(tokenizer, "observation", text[_common_start(text, changed) :])
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
        return encoded(tokenizer, "observation", tail)
    ids = encoded(tokenizer, "observation", tail.lstrip())
    return ids[1:] if ids[0] == stop_id else encoded(tokenizer, "observation", tail.lstrip().removeprefix(stop))


def checked_messages(observation: Any) -> tuple[Message, ...]:
    try:
        return text_messages(observation) if isinstance(observation, str) else messages_of(observation)
    except UserError as error:
        raise PromptError("prompt", *error.parts) from None


def templated(tokenizer: Any, chat: Chat) -> str:
    """The text that the chat template makes of a conversation, ready for the model to answer or to continue."""
    messages, begun = chat.messages, is_begun(chat.messages)
    if begun and not messages[-1]["content"].strip():
        messages, begun = messages[:-1], False  # nothing to be continued
    return written(tokenizer, replace(chat, messages=messages), answering=not begun, continuing=begun)


def written(tokenizer: Any, chat: Chat, *, answering: bool = False, continuing: bool = False) -> str:
    """The text that the chat template makes of a conversation, as a whole where neither is so.

    answering: the beginning of the assistant's next message stands at its end; continuing: its last message is open.
    """
    check_thinking(tokenizer, chat.thinking)
    switch = {} if chat.thinking is None else {str(_switch(tokenizer)): chat.thinking}
    tools = {"tools": [dict(tool) for tool in chat.tools]} if chat.tools else {}
    try:
        return _rendered(
            tokenizer, chat.messages, add_generation_prompt=answering, continue_final_message=continuing, **switch,
            **tools,
        )  # fmt: skip
    except Exception as error:  # a template is a program of the model's, and may raise anything
        content = str(chat.messages[-1].get("content"))[:80] if chat.messages else ""
        raise PromptError(f"prompt {content!r}", f"the chat template refuses it: {message_of(error)}") from error


def _rendered(tokenizer: Any, messages: Sequence[Message], **options: Any) -> str:
    """What the template makes of messages. mlx-lm's wrapper is passed by, because it turns thinking on by itself."""
    if (own := getattr(tokenizer, "_chat_template", None)) is not None:
        return own(list(messages), **options)
    inner = getattr(tokenizer, "_tokenizer", tokenizer)
    return inner.apply_chat_template(list(messages), tokenize=False, **options)


def _switch(tokenizer: Any) -> str | None:
    return _switch_of(tokenizer, str(getattr(tokenizer, "chat_template", "")))


@lru_cache(maxsize=8)
def _switch_of(tokenizer: Any, template: str) -> str | None:
    """The name of the template's thinking switch: one that changes what it makes of a prompt."""
    if not tokenizer.has_chat_template:
        return None

    def renders(name: str, value: bool) -> str:
        try:
            return _rendered(tokenizer, text_messages("hi"), add_generation_prompt=True, **{name: value})
        except Exception:  # noqa: BLE001  (the template may want other messages; then its name must be enough)
            return str(value) if re.search(rf"{{[{{%][^}}]*\b{name}\b", template) else ""

    return next((name for name in SWITCHES if renders(name, True) != renders(name, False)), None)


def encoded(tokenizer: Any, what: str, text: str, add_special_tokens: bool = False) -> tuple[int, ...]:
    try:
        return tuple(int(token) for token in tokenizer.encode(text, add_special_tokens=add_special_tokens))
    except TypeError as error:  # the tokenizer's word for text that is not Unicode
        raise PromptError(f"{what} {text[-80:]!r}", f"the tokenizer refuses it: {error}") from error
