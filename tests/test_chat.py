"""Conversations as token ids: prompts through the template, and what a turn adds to a sequence."""

from __future__ import annotations

import pytest
from tokenizers import processors

from mlxrl.errors import UserError
from mlxrl.rollout.chat import Chat, PromptError, check_thinking, continue_chat, fitting, render, start_chat
from mlxrl.types import Task
from models import TEMPLATE, tokenizer
from worlds import NEWLINE, TRIMMED, words


def ids_of(tok, text, *end):
    return (*tok.encode(text, add_special_tokens=False), *(tok.convert_tokens_to_ids(token) for token in end))


def added(tok, reply, *, observation="more", stop_ids=None, thinking=None):
    start = start_chat(tok, "hi", thinking)
    stop_ids = sorted(tok.eos_token_ids) if stop_ids is None else stop_ids
    return start.ids, continue_chat(tok, start, reply, stop_ids, observation)


def test_rendering_uses_the_template_and_its_thinking_switch():
    tok = tokenizer()
    open_, closed = render(tok, Task("hi")), render(tok, Task("hi"), thinking=False)
    assert tok.decode(open_) == "<user>hi<end><assistant><think>"
    assert tok.decode(closed) == "<user>hi<end><assistant><think></think>"
    chat = Task(({"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}))
    assert tok.decode(render(tok, chat)).startswith("<system>be brief<end><user>hi<end>")


def test_prompts_that_cannot_be_rendered_are_a_line():
    bare = tokenizer()
    bare.has_chat_template = False
    with pytest.raises(UserError, match=r"^prompt: '' has no tokens$"):
        render(bare, Task(""))
    with pytest.raises(
        PromptError, match=r"^prompt: the tokenizer has no chat template; wanted a string, got messages$"
    ):
        render(bare, Task(({"role": "user", "content": "hi"},)))
    refusing = words("{{ raise_exception('no\nsystem') }}")
    with pytest.raises(PromptError, match=r"^prompt 'hi': the chat template refuses it: no system$"):
        render(refusing, Task("hi"))


def test_a_sampled_stop_token_of_the_template_is_not_written_twice():
    """And what a template writes after it is: then the sequence is the rendering of the whole conversation."""
    tok = words()
    prompt, turn = added(tok, ids_of(tok, "yes", "<end>"))
    assert tok.decode(turn.ids) == "\n<user>more<end>\n<assistant>"
    chat = [{"role": r, "content": c} for r, c in (("user", "hi"), ("assistant", "yes"), ("user", "more"))]
    assert (*prompt, *ids_of(tok, "yes", "<end>"), *turn.ids) == render(tok, Task(tuple(chat)))
    assert not turn.history_rewritten
    again = continue_chat(tok, turn, ids_of(tok, "no", "<end>"), sorted(tok.eos_token_ids), "last")
    assert tok.decode(again.ids) == "\n<user>last<end>\n<assistant>"
    assert again.messages[3]["content"] == "no"


@pytest.mark.parametrize(
    ("template", "reply", "end", "wanted"),
    [
        (NEWLINE, "yes", (), "<end>\n<user>more<end>\n<assistant>"),  # cut, or ended by a stop string
        (NEWLINE, "yes", ("<eos>",), "<end>\n<user>more<end>\n<assistant>"),  # a stop that the template does not write
        (NEWLINE, "", ("<end>",), "\n<user>more<end>\n<assistant>"),
        (NEWLINE, " yes \n", ("<end>",), "\n<user>more<end>\n<assistant>"),
        (NEWLINE, " yes \n", (), "<end>\n<user>more<end>\n<assistant>"),
        (TRIMMED, " yes \n", ("<end>",), "<user>more <end><assistant>"),
        (TRIMMED, "yes", (), " <end><user>more <end><assistant>"),
        (NEWLINE, "a<think>b", ("<end>",), "\n<user>more<end>\n<assistant>"),
    ],
)
def test_what_stands_after_a_reply_is_appended(template, reply, end, wanted):
    tok = words(template, ("<end>", "<eos>"))
    _, turn = added(tok, ids_of(tok, reply, *end))
    assert (tok.decode(turn.ids), turn.history_rewritten) == (wanted, False)


@pytest.mark.parametrize("thinking", [None, True, False])
def test_a_rewritten_history_is_a_whole_new_prompt(thinking):
    """The prompt opens a block of thinking, or closes it, which is dropped once there is a further message."""
    tok = words(TEMPLATE)
    _, turn = added(tok, ids_of(tok, "hm</think>yes", "<end>"), thinking=thinking)
    chat = [{"role": r, "content": c} for r, c in (("user", "hi"), ("assistant", "hm</think>yes"), ("user", "more"))]
    assert turn.history_rewritten
    assert turn.ids == render(tok, Task(tuple(chat)), thinking=thinking)


def test_a_rewritten_history_ends_in_the_answer_and_its_marks():
    """The template drops what was thought, so the second prompt is a new one; it ends in the answer and its marks."""
    tok = tokenizer()
    start = start_chat(tok, "one?")
    reply = ids_of(tok, "<think>so</think>1")
    turn = continue_chat(tok, start, reply, (), "two?")
    assert turn.history_rewritten
    assert tok.decode(turn.ids[-turn.new_suffix :]) == "two?<end><assistant><think>"
    messages = [{"role": "tool", "content": "a"}, {"role": "tool", "content": "b"}]
    turn = continue_chat(tok, start, reply, (), messages)
    assert tok.decode(turn.ids[-turn.new_suffix :]) == "a<end><tool>b<end><assistant><think>"


def test_observations_may_be_messages():
    tok = words()
    messages = [{"role": "system", "content": "result"}, {"role": "user", "content": "go on"}]
    _, turn = added(tok, ids_of(tok, "yes", "<end>"), observation=messages)
    assert tok.decode(turn.ids) == "\n<system>result<end>\n<user>go on<end>\n<assistant>"


def test_without_a_template_the_text_is_appended():
    tok = words(None)
    turn = continue_chat(tok, Chat(), ids_of(tok, "yes", "<eos>"), [2], "more")
    assert (tok.decode(turn.ids), turn.history_rewritten) == ("more", False)
    with pytest.raises(PromptError, match="no chat template; wanted a string, got messages"):
        continue_chat(tok, Chat(), ids_of(tok, "yes"), [2], [{"role": "user", "content": "more"}])


USER = {"role": "user", "content": "2+2"}


@pytest.mark.parametrize("begun", ["Let me", "Let me "])
def test_a_begun_answer_is_continued(begun):
    tok = words()
    start = start_chat(tok, [USER, {"role": "assistant", "content": begun}])
    assert tok.decode(start.ids) == f"<user>2+2<end>\n<assistant>{begun}"
    turn = continue_chat(tok, start, ids_of(tok, " see", "<end>"), sorted(tok.eos_token_ids), "and?")
    assert (tok.decode(turn.ids), turn.history_rewritten) == ("\n<user>and?<end>\n<assistant>", False)
    assert turn.messages[1]["content"] == f"{begun} see"
    turn = continue_chat(tok, turn, ids_of(tok, "4", "<end>"), sorted(tok.eos_token_ids), [
        USER, {"role": "assistant", "content": "It is"},
    ])  # fmt: skip
    assert tok.decode(turn.ids) == "\n<user>2+2<end>\n<assistant>It is"


def test_a_begun_answer_without_a_text_is_the_header_alone():
    tok = words()
    assert (
        tok.decode(start_chat(tok, [USER, {"role": "assistant", "content": " "}]).ids) == "<user>2+2<end>\n<assistant>"
    )


def test_parts_of_a_content_are_joined_wherever_a_message_comes_from():
    tok, parts = words(), [{"type": "text", "text": "2+"}, {"type": "text", "text": "2"}]
    assert render(tok, Task(({"role": "user", "content": parts},))) == render(tok, Task("2+2"))
    turn = continue_chat(tok, start_chat(tok, "hi"), ids_of(tok, "yes", "<end>"), sorted(tok.eos_token_ids), [
        {"role": "tool", "content": parts},
    ])  # fmt: skip
    assert tok.decode(turn.ids) == "\n<tool>2+2<end>\n<assistant>"
    with pytest.raises(
        PromptError, match=r"^prompt: message 1: content: part 1: wanted a part with a text, got {\"type"
    ):
        render(tok, Task(({"role": "user", "content": [{"type": "image"}]},)))


@pytest.mark.parametrize(
    ("template", "texts"),
    [
        ("{% if enable_thinking %}T{% endif %}x", ("x", "Tx", "x")),
        ("{% if enable_thinking is defined and not enable_thinking %}F{% endif %}x", ("x", "x", "Fx")),
        ("{% if thinking %}T{% endif %}x", ("x", "Tx", "x")),
        ("{{ messages[1].content }}{% if thinking %}T{% endif %}", ("a", "aT", "a")),
    ],
)
def test_the_thinking_switch_is_the_templates_own(template, texts):
    """Left out it is not there, though the tokenizer has tokens for thinking; its name is the template's."""
    tok, chat = words(template), Task((USER, {"role": "user", "content": "a"}))
    assert tok.has_thinking
    assert tuple(tok.decode(render(tok, chat, thinking=value)) for value in (None, True, False)) == texts


def test_a_thinking_switch_that_changes_nothing_is_refused():
    for tok in (words(), words(None), words("{% if enable_thinking is defined %}x{% endif %}y")):
        with pytest.raises(
            PromptError, match=r"^teacher: thinking: the chat template has no such switch; leave it out$"
        ):
            check_thinking(tok, False, "teacher")
        check_thinking(tok, None)


def test_a_prompt_has_one_bos():
    tok = words(None)
    tok._tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 1)]
    )
    assert [tok.decode(render(tok, Task(text))) for text in ("hello", "<bos>hello")] == ["<bos>hello"] * 2


def test_token_ids_are_a_prompt_and_go_on_without_the_template():
    tok = words()
    start = start_chat(tok, (40, 41))
    assert (start.ids, render(tok, Task((40, 41)))) == ((40, 41), (40, 41))
    turn = continue_chat(tok, start, ids_of(tok, "yes", "<end>"), sorted(tok.eos_token_ids), "more")
    assert tok.decode(turn.ids) == "more"
    with pytest.raises(PromptError, match="observation: the prompt is token ids; wanted a string, got messages"):
        continue_chat(tok, start, ids_of(tok, "yes"), [2], [USER])


def test_prompts_that_fill_the_context_are_left_out_and_counted():
    tok, tasks = words(None), [Task("a" * n, where=f"a.jsonl: line {n}") for n in (3, 4, 5)]
    fitted = fitting(tok, 4, tasks, None)
    assert ([len(task.prompt) for task in fitted.tasks], fitted.left_out) == ([3], 2)
    assert fitted.line == ("a.jsonl: line 4: a prompt of 4 tokens does not fit the context of 4; 2 of 3 are left out")
    assert fitting(tok, 6, tasks, None).tasks is fitting(tok, None, tasks, None).tasks is tasks
    with pytest.raises(
        PromptError, match="line 3: a prompt of 3 tokens does not fit the context of 3: nor does any other"
    ):
        fitting(tok, 3, tasks, None)
    with pytest.raises(PromptError, match=r"^b: prompt 'hi': the chat template refuses it: no$"):
        fitting(words("{{ raise_exception('no') }}"), 9, [Task("hi", where="b")], None)
