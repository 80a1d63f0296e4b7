"""Answers that the data hold, as trajectories: what supervised fine-tuning learns from.

An example is learned from in one of three ways:

1. It has a column `completion`: a text, messages, or token ids, which answer the prompt.
2. Its prompt is messages: a conversation, of which the answers are what the assistant says.
3. Its prompt is the column `text`, all of which is learned but for the first token.

The ids are those of the whole conversation as the chat template writes it. An answer begins where the template's
beginning of the assistant's message ends, and it ends with the last token there that ends a completion, as a sampled
one does. A token that reaches over its beginning is the answer's. Without a template an answer is followed by the
end-of-sequence token, and so is a text.

Where the template writes an earlier part of the conversation otherwise once more follows, as one that strips
reasoning does, the later turns are a further sequence, as in a rollout (`Turn.history_rewritten`): each turn is learned
as the model will meet it. Where it writes an answer otherwise than it begins one, the example is refused.

What lies beyond the longest sequence is cut off. An example of which no token of an answer is left is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal

from mlxrl.data import COMPLETION, Source, as_tasks
from mlxrl.errors import UserError, brief
from mlxrl.files import strict_json
from mlxrl.messages import messages_of, text_messages
from mlxrl.policy.policy import Policy
from mlxrl.rewards.scoring import example_of
from mlxrl.rollout.chat import (
    Chat,
    Fitting,
    PromptError,
    answered,
    check_thinking,
    encoded,
    is_token_ids,
    start_chat,
    templated,
    written,
)
from mlxrl.rollout.prefill import context_of
from mlxrl.rollout.sample import found_once
from mlxrl.settings import Sampling
from mlxrl.types import Message, Task, Trajectory, Turn

TEXT, TOOLS = "text", "tools"
"""Columns with a text that is learned as a whole, and with schemas of tools."""
Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rules:
    """How examples become demonstrations.

    turns: of a conversation, "all" of the assistant's, or the "last"; thinking: see `Chat`; longest: tokens of a
    sequence at most, None for no limit.
    """

    turns: Literal["all", "last"] = "all"
    thinking: bool | None = None
    longest: int | None = None


def demonstration(tokenizer: Any, task: Task, rules: Rules = Rules()) -> Trajectory:
    """The trajectory of an example; without turns where no token of an answer is left.

    Its log-probs are 0, because nothing was sampled. `stop` is "length" where it was cut.

    Raises:
        PromptError: the example is of none of the three kinds, or the chat template does not take it.
    """
    try:
        sequences = _sequences(tokenizer, task, rules)
    except UserError as error:
        raise PromptError(*((task.where,) if task.where else ()), *error.parts) from error.__cause__
    kept = [_up_to(rules.longest, turns) for turns in sequences]
    turns = tuple(
        replace(
            turn,
            history_rewritten=number > 0 and place == 0,
            text=tokenizer.decode(list(turn.tokens), skip_special_tokens=True),
        )
        for number, some in enumerate(filter(None, kept))
        for place, turn in enumerate(some)
    )
    tokens = sum(len(turn.tokens) for turn in turns)
    whole = tokens == sum(len(turn.tokens) for some in sequences for turn in some)
    sampling = _sampling(max(tokens, 1), rules.thinking)
    return Trajectory(task, turns, stop="eos" if whole else "length", sampling=sampling)


@lru_cache(maxsize=1024)
def _sampling(tokens: int, thinking: bool | None) -> Sampling:
    """The settings of a trajectory of so many tokens; checking them costs more than the rest of it."""
    return Sampling(max_tokens=tokens, thinking=thinking)


def rules_for(model: Any, turns: Literal["all", "last"], thinking: bool | None, longest: int | None) -> Rules:
    """The rules for a model, whose context bounds a sequence too."""
    return Rules(turns, thinking, min((most for most in (longest, context_of(model)) if most), default=None))


def learnable(policy: Policy, tasks: Sequence[Task] | Source, rules: Rules) -> Fitting:
    """The tasks that a policy can learn from, with a warning where some are left out or cut."""
    tasks = as_tasks(tasks, whole=True)
    check_thinking(policy.tokenizer, rules.thinking, "sampling")
    return found_once(policy, tasks, rules, lambda: demonstrable(policy.tokenizer, tasks, rules))


def demonstrable(tokenizer: Any, tasks: Sequence[Task], rules: Rules) -> Fitting:
    """The tasks of which an answer is left, and how many are not or are cut.

    Raises:
        PromptError: an example cannot be learned from, or none is left.
    """
    made = ((task, demonstration(tokenizer, task, rules)) for task in tasks)
    found = [(task, len(one.turns) > 0, one.stop == "length") for task, one in made]
    kept = [task for task, left, _ in found if left]
    first = next((task for task, _, cut in found if cut), None)
    if first is None:
        return Fitting(tasks)
    cut, left_out = sum(cut for _, left, cut in found if left), len(tasks) - len(kept)
    why = f"{example_of(first)}: has more than {rules.longest:,} tokens"
    if not kept:
        raise PromptError(why, f"no token of an answer is left in any of {len(tasks):,} examples")
    return Fitting(kept, left_out, f"{why}; {cut:,} of {len(tasks):,} are cut there, and {left_out:,} left out")


def all_asked(tasks: Sequence[Task]) -> Sequence[Task]:
    """The examples as they are asked of the model, the same sequence where they are as they are."""
    found = tuple(map(asked, tasks))
    return tasks if all(one is task for one, task in zip(found, tasks, strict=True)) else found


def asked(task: Task) -> Task:
    """The example as it is asked of the model: a conversation without its last answer; PromptError for a text."""
    if task.columns.get(COMPLETION) is not None:
        return task
    if not task.messages:
        why = "a text has no prompt that could be answered; leave reward.functions out"
        raise PromptError(*((task.where,) if task.where else ()), why if TEXT in task.columns else _without(task))
    return replace(task, prompt=task.messages[: _answers(task.messages, "last")[0]])


def _sequences(tokenizer: Any, task: Task, rules: Rules) -> list[list[Turn]]:
    """The turns of an example, in lists whose turns follow one another in one sequence."""
    answer, prompt = task.columns.get(COMPLETION), task.prompt
    if answer is None and TEXT in task.columns and not task.messages:
        return [_text(tokenizer, task.prompt)]
    if answer is None and not task.messages:
        raise PromptError(_without(task))
    texts = not (_is_messages(prompt) or _is_messages(answer))
    if is_token_ids(prompt) or is_token_ids(answer or "") or (texts and not tokenizer.has_chat_template):
        return [_plain(tokenizer, prompt, answer)]
    if not tokenizer.has_chat_template:
        raise PromptError("prompt", "the tokenizer has no chat template; wanted texts, got messages")
    before = text_messages(prompt) if isinstance(prompt, str) else messages_of(task.messages, whole=True)
    tools = _tools(task.columns.get(TOOLS))
    chat = Chat(before, thinking=rules.thinking, tools=tools)
    if isinstance(answer, str):
        pairs = [(templated(tokenizer, chat), written(tokenizer, replace(chat, messages=answered(before, answer))))]
        return [_laid_out(tokenizer, pairs)]
    if answer is not None and not _is_messages(answer):
        raise PromptError(COMPLETION, f"wanted a text or messages, got {brief(answer)}")
    after = () if answer is None else messages_of(answer, whole=True)
    places = _answers((*before, *after), rules.turns, len(before) if after else 0)
    chats = [replace(chat, messages=(*before, *after)[: place + 1]) for place in places]
    return [_laid_out(tokenizer, pairs) for pairs in _runs([_pair(tokenizer, one) for one in chats])]


def _without(task: Task) -> str:
    """What is wrong with an example without an answer."""
    why = f"no column {COMPLETION!r}, wanted as the answer; there are: {', '.join(task.columns) or 'none'}"
    return f"{why}. Of a text, all of which is learned, data.prompt is {TEXT!r}"


def _is_messages(value: Any) -> bool:
    return isinstance(value, Sequence) and bool(value) and isinstance(value[0], Mapping)


def _answers(messages: Sequence[Message], turns: str, start: int = 0) -> list[int]:
    """The places of the assistant's messages from a place on, all or the last."""
    places = [place for place in range(start, len(messages)) if messages[place]["role"] == "assistant"]
    if not places:
        raise PromptError("messages", "wanted one of the assistant's, got none")
    if places[0] == 0:
        raise PromptError("message 1", "role", "wanted a message that the assistant answers, got the assistant's")
    return places if turns == "all" else places[-1:]


def _pair(tokenizer: Any, chat: Chat) -> tuple[str, str]:
    """What the template makes of a conversation before its last message, which is the assistant's, and with it."""
    before = written(tokenizer, replace(chat, messages=chat.messages[:-1]), answering=True)
    return before, written(tokenizer, chat)


def _runs(pairs: Sequence[tuple[str, str]]) -> list[list[tuple[str, str]]]:
    """The pairs in lists whose texts go on from one another."""
    starts = [0, *(n for n, (one, other) in enumerate(pairwise(pairs), 1) if not other[0].startswith(one[1]))]
    return [list(pairs[a:b]) for a, b in pairwise([*starts, len(pairs)])]


def _laid_out(tokenizer: Any, pairs: Sequence[tuple[str, str]]) -> list[Turn]:
    """The turns of texts that go on from one another, each without and with its answer."""
    ids = encoded(tokenizer, "answer", pairs[-1][1])
    turns, read = list[Turn](), 0
    for before, text in pairs:
        if not text.startswith(before):
            beginning, answer = brief(before[-40:]), brief(text[-80:])
            why = f"the chat template begins an answer with {beginning}, and writes one as {answer}"
            raise PromptError("answer", f"{why}; sampling.thinking may change that")
        start = _common(ids, encoded(tokenizer, "answer", before))
        end = len(ids) if text is pairs[-1][1] else _common(ids, encoded(tokenizer, "answer", text))
        stops = [place for place in range(start, end) if ids[place] in tokenizer.eos_token_ids]
        end = stops[-1] + 1 if stops else end
        turns.append(_turn(ids[read:start], ids[start:end]))
        read = end
    return turns


def _common(ids: Ids, other: Ids) -> int:
    """How many ids two sequences have in common at their beginning."""
    pairs = enumerate(zip(ids, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(ids), len(other)))


def _plain(tokenizer: Any, prompt: Any, answer: Any) -> list[Turn]:
    """The turn of a prompt and an answer without a chat template; token ids are taken as they are."""
    if is_token_ids(answer):
        observation = start_chat(tokenizer, prompt).ids
        return [_turn(observation, tuple(answer))]
    if not isinstance(answer, str):
        raise PromptError(COMPLETION, f"wanted a text or token ids, got {brief(answer)}")
    if is_token_ids(prompt):
        return [_turn(tuple(prompt), _ended(tokenizer, encoded(tokenizer, COMPLETION, answer)))]
    observation, ids = start_chat(tokenizer, prompt).ids, start_chat(tokenizer, prompt + answer).ids
    start = _common(ids, observation)
    return [_turn(ids[:start], _ended(tokenizer, ids[start:]))]


def _text(tokenizer: Any, text: Any) -> list[Turn]:
    """The turn of a text, all of which is learned but for its first token."""
    ids = tuple(text)
    if isinstance(text, str):
        begun = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
        ids = _ended(tokenizer, encoded(tokenizer, TEXT, text, add_special_tokens=not begun))
    return [_turn(ids[:1], ids[1:])]


def _ended(tokenizer: Any, ids: Ids) -> Ids:
    """Ids with the end-of-sequence token after them."""
    return ids if ids and ids[-1] in tokenizer.eos_token_ids else (*ids, tokenizer.eos_token_id)


def _turn(observation: Ids, tokens: Ids) -> Turn:
    if not observation or not tokens:
        raise PromptError("answer", f"wanted tokens to read and to learn, got {len(observation)} and {len(tokens)}")
    return Turn(observation, tokens, (0.0,) * len(tokens))


def _up_to(longest: int | None, turns: Sequence[Turn]) -> list[Turn]:
    """The turns of a sequence, without what lies beyond its longest."""
    kept, place = list[Turn](), 0
    for turn in turns:
        place += len(turn.observation)
        room = len(turn.tokens) if longest is None else max(longest - place, 0)
        if not room:
            break
        kept.append(replace(turn, tokens=turn.tokens[:room], logprobs=turn.logprobs[:room]))
        place += len(turn.tokens)
    return kept


def _tools(given: Any) -> tuple[Mapping[str, Any], ...]:
    """The schemas of a column `tools`: a list, or one as a text of JSON."""
    try:
        value = strict_json(given) if isinstance(given, str) and given.strip() else given or ()
    except ValueError as error:
        raise PromptError(TOOLS, f"wanted a list of schemas, got {brief(given)}") from error
    if not isinstance(value, Sequence) or not all(isinstance(one, Mapping) for one in value):
        raise PromptError(TOOLS, f"wanted a list of schemas, got {brief(given)}")
    return tuple(value)
