"""The turns of a conversation: what a row drew as a turn, and what is new to it of the next observation.

The ids of a row are never encoded again. The chat template renders the whole conversation as text; what stands in it
behind the model's last reply is encoded and put behind the row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlxrl.rewards import text_of
from mlxrl.rollout.render import PromptError, render, written
from mlxrl.rollout.row import Row
from mlxrl.settings import Sampling
from mlxrl.types import Message, Task, TokenDetails, Turn


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation that a row is of: its messages, and as text what the template made of them, None until needed.

    tools: schemas of functions that the template tells the model of.
    """

    messages: tuple[Message, ...] = ()
    text: str | None = None
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Opening:
    """How a conversation goes on: the ids that are new to the row; fresh: they are a whole new prompt.

    new: how many of the ids of a fresh one, at their end, begin where the observation does; 0 where that is not seen.
    """

    chat: Chat
    ids: tuple[int, ...]
    fresh: bool = False
    new: int = 0


def open_chat(
    tokenizer: Any,
    observation: str | Sequence[Message],
    thinking: bool | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> Opening:
    """Begin a conversation with what is read first; the ids are those of a task with that prompt."""
    prompt = observation if isinstance(observation, str) else tuple(observation)
    ids = render(tokenizer, Task(prompt), thinking=thinking, tools=tools)
    return Opening(Chat(_messages(observation), tools=tuple(tools)), ids)


def go_on(
    tokenizer: Any,
    chat: Chat,
    action: Sequence[int],
    stops: Sequence[int],
    observation: str | Sequence[Message],
    thinking: bool | None = None,
) -> Opening:
    """Put an observation behind an action.

    The text of the conversation so far, then the reply, white space aside, must begin the new rendering. What stands
    behind them there is appended; the stop token is taken off its front where the action ends with it. Where they do
    not begin it, the template has rewritten the history, and the new rendering is a prompt of its own.

    Raises:
        PromptError: the template refuses the messages, or there is none and they are not a text.
    """
    ended = bool(action) and action[-1] in stops
    reply = tokenizer.decode(list(action[:-1] if ended else action))
    if not tokenizer.has_chat_template:
        if not isinstance(observation, str):
            raise PromptError("observation: the tokenizer has no chat template; wanted a string, got messages")
        return Opening(chat, _encoded(tokenizer, observation))
    before = written(tokenizer, chat.messages, thinking, chat.tools) if chat.text is None else chat.text
    messages = (*chat.messages, {"role": "assistant", "content": reply}, *_messages(observation))
    after = written(tokenizer, messages, thinking, chat.tools)
    now = replace(chat, messages=messages, text=after)
    tail = behind(after, before, reply)
    if tail is None:
        ids = _encoded(tokenizer, after)
        return Opening(now, ids, fresh=True, new=_new(tokenizer, now, ids, len(_messages(observation)), thinking))
    last = action[-1] if ended else None
    return Opening(now, _tail(tokenizer, tail, last))


def _new(tokenizer: Any, chat: Chat, ids: tuple[int, ...], count: int, thinking: bool | None) -> int:
    """How many of a rendering's ids, at its end, are its last `count` messages and what the template puts behind them.

    The text of the first of them begins where the rendering would differ if it were another text.
    """
    front, first, later = chat.messages[:-count], chat.messages[-count], chat.messages[len(chat.messages) - count + 1 :]
    other = {**first, "content": "1" if text_of(first).strip().startswith("0") else "0"}
    text, changed = chat.text or "", written(tokenizer, (*front, other, *later), thinking, chat.tools)
    tail = _encoded(tokenizer, text[_alike(text, changed) :])
    return _alike(ids[:0:-1], tail[::-1])


def _alike(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many items two sequences begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def behind(text: str, before: str, reply: str) -> str | None:
    """What a text holds behind `before` and the reply, white space aside; None where it does not begin with them."""
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


def _tail(tokenizer: Any, tail: str, last: int | None) -> tuple[int, ...]:
    """The ids of what follows a reply, without the stop token where the row holds it already."""
    stop = "" if last is None else tokenizer.decode([last])
    if not stop or not tail.lstrip().startswith(stop):
        return _encoded(tokenizer, tail)
    ids = _encoded(tokenizer, tail.lstrip())
    return ids[1:] if ids[0] == last else _encoded(tokenizer, tail.lstrip().removeprefix(stop))


def _encoded(tokenizer: Any, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(token) for token in tokenizer.encode(text, add_special_tokens=False))
    except TypeError as error:  # the tokenizer's word for text that is not Unicode
        raise PromptError(f"observation {text[-80:]!r}: the tokenizer refuses it: {error}") from error


def _messages(observation: str | Sequence[Message]) -> tuple[Message, ...]:
    return ({"role": "user", "content": observation},) if isinstance(observation, str) else tuple(observation)


def observed(observation: str | Sequence[Message]) -> str:
    """An observation as text for people."""
    if isinstance(observation, str):
        return observation
    return "\n".join(text_of(message) for message in observation)


def turn_of(tokenizer: Any, row: Row, sampling: Sampling, observation: tuple[int, ...] | None = None) -> Turn:
    """What a row has read, its prompt unless something else is said, and drawn."""
    return Turn(
        row.prompt if observation is None else observation,
        tuple(row.ids),
        tuple(row.logprobs),
        tokenizer.decode(row.ids, skip_special_tokens=True),
        details=TokenDetails(
            tuple(row.forced),
            tuple(row.truncated) or None,
            tuple(row.candidates) if sampling.num_top else None,
            tuple(row.candidate_logprobs) if sampling.num_top else None,
        ),
    )
