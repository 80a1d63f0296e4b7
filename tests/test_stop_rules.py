"""What a sequence may draw, and when it ends."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.sample_utils import make_logits_processors

from helpers import GREEDY, RAGGED, decode, requests
from mlxrl.errors import UserError
from mlxrl.policy.policy import as_policy
from mlxrl.rollout.sample import sample
from mlxrl.rollout.sequence import Sequence
from mlxrl.rollout.stop_rules import State, StepRules, advance, rules_of
from mlxrl.settings import LoRA, Sampling
from mlxrl.types import Task
from models import dense, tokenizer

PENALTIES = [
    {"repetition_penalty": 1.7}, {"presence_penalty": 2.0}, {"frequency_penalty": 0.9},
    {"repetition_penalty": 1.2, "presence_penalty": -0.5, "frequency_penalty": 0.3},
]  # fmt: skip


@pytest.mark.parametrize("penalties", PENALTIES)
def test_penalties_and_processors_are_those_of_mlx_lm(penalties):
    """The built-in penalties, mlx-lm's processors, and mlx-lm's applied by hand draw the same tokens."""
    p = as_policy(dense(), tokenizer(), lora=None)
    prompts = [(20, 21, 20, 22, 20), (30,), tuple(range(40, 56))]
    context = {name.replace("penalty", "context_size"): 6 for name in penalties}
    processors = make_logits_processors(**penalties, **context)
    plain = Sampling(max_tokens=10, temperature=0.0)
    ours = decode(p, requests(prompts, sampling=replace(plain, penalty_context=6, **penalties)))
    hooked = decode(p, requests(prompts, sampling=plain), processors=processors)
    for prompt, one, other in zip(prompts, ours, hooked, strict=True):
        ids = list(prompt)
        for _ in range(10):
            logits = p.model(mx.array([ids]))[:, -1]
            for processor in processors:
                logits = processor(mx.array(ids), logits)
            ids.append(mx.argmax(logits).item())
        assert one.tokens == other.tokens == ids[len(prompt) :]
        model = p.model(mx.array([ids]))[0, len(prompt) - 1 : -1]
        own = mx.take_along_axis(model, mx.array(one.tokens)[:, None], 1)[:, 0] - mx.logsumexp(model, axis=-1)
        assert np.allclose(one.logprobs, own, atol=1e-5), "log-probs are the model's"
    free = decode(p, requests(prompts, sampling=plain))
    assert [one.tokens for one in free] != [one.tokens for one in ours]


def test_no_stop_ends_a_sequence_before_the_minimum():
    p = as_policy(dense(), tokenizer(), lora=None)
    stop_ids = tuple(range(0, 320, 2))
    free = decode(p, requests(RAGGED, 8, None, Sampling(max_tokens=20), stop_ids))
    late = decode(p, requests(RAGGED, 8, None, Sampling(max_tokens=20, min_tokens=5), stop_ids))
    assert min(len(one.tokens) for one in free) == 1
    assert min(len(one.tokens) for one in late) == 6  # five that are no stops, and the stop
    assert all(token % 2 for one in late for token in one.tokens[:5])
    lost = [mass for one in late for mass in one.filtered_mass[:5]]
    assert 0.3 < np.mean(lost) < 0.7, "about half of the probability was banned"
    assert all(mass == 0 for one in late for mass in one.filtered_mass[5:])


def test_every_eos_of_the_tokenizer_stops_and_the_one_sampled_is_kept():
    p = as_policy(dense(), tokenizer(("<eos>", "<end>")), lora=LoRA())
    ids = {p.tokenizer.encode(word, add_special_tokens=False)[0] for word in ("<eos>", "<end>")}
    assert set(rules_of(p.tokenizer, Sampling()).stop_ids) == ids
    groups = sample(p, [Task("hi")] * 4, group_size=32, sampling=Sampling(max_tokens=40), key=3)
    ended = [t.turns[0].tokens for group in groups for t in group if t.stop == "eos"]
    assert {tokens[-1] for tokens in ended} == ids
    assert all(not ids & set(tokens[:-1]) for tokens in ended)


def test_stop_strings_end_a_sequence_across_token_borders_and_ids_are_kept():
    """A byte-level tokenizer: every string of two letters lies over a border."""
    p = as_policy(dense(), tokenizer(), lora=None)
    plain = decode(p, requests(RAGGED))
    letters = [[p.tokenizer.decode([token]) for token in one.tokens] for one in plain]
    string = letters[0][3] + letters[0][4]
    assert len(string) >= 2
    stopped = decode(p, requests(RAGGED, sampling=replace(GREEDY, stop_strings=("nowhere in it", string))))
    for one, free in zip(stopped, plain, strict=True):
        texts = [p.tokenizer.decode(free.tokens[: n + 1]) for n in range(len(free.tokens))]
        first = next((n for n, text in enumerate(texts) if string in text), None)
        assert one.tokens == (free.tokens if first is None else free.tokens[: first + 1])
        assert one.stop == ("length" if first is None else "eos")
    assert stopped[0].stop == "eos"
    assert len(stopped[0].logprobs) == len(stopped[0].tokens) <= 5
    own = decode(p, requests(RAGGED, stop_strings=(string,)))
    assert [one.tokens for one in own] == [one.tokens for one in stopped], "those of a request are the same"


def test_stop_strings_see_special_tokens_and_characters_of_several_tokens():
    p = as_policy(dense(), tokenizer(), lora=None)
    out = decode(
        p, requests([(20,), (21,)], sampling=Sampling(max_tokens=9, stop_strings=("é</think>",))),
        processors=[written(p.tokenizer.encode("aéé</think>", add_special_tokens=False))],
    )  # fmt: skip
    assert [p.tokenizer.decode(one.tokens) for one in out] == ["aéé</think>"] * 2
    assert [(one.stop, len(one.tokens)) for one in out] == [("eos", 6)] * 2  # a, two bytes for each é, and the tag


def test_no_stop_string_counts_inside_a_block_of_thinking():
    """What begins or ends the block does; a prompt may have opened it, and one of an earlier reply is over."""
    p = as_policy(dense(), tokenizer(), lora=None)
    tok, end = p.tokenizer, p.tokenizer.eos_token_id
    think = tok.convert_tokens_to_ids("<think>")

    def says(text, prompt, *strings):
        said = written(tok.encode(text, add_special_tokens=False), len(prompt))
        sampling = Sampling(max_tokens=6, stop_strings=strings)
        (one,) = decode(p, requests([prompt], sampling=sampling), processors=[said])
        return tok.decode(one.tokens)

    assert says("axb</think>xc", (20, think), "x") == "axb</think>x"
    assert says("axb</think>xc", (20, 21), "x") == "ax"
    assert says("a<think>x</think>x", (20, 21), "x") == "a<think>x</think>x"
    assert says("axb</think>xc", (20, think), "</think>", "x") == "axb</think>"
    assert says("ab<think>xc", (20, 21), "<think>") == "ab<think>"
    rules = rules_of(tok, Sampling())
    assert [rules.opened_by(ids) for ids in ((20, think), (20, think, 21), (20, think, end, 21))] == [True, True, False]


def written(ids, start: int = 1):
    """A processor that makes every sequence write `ids` after a prompt of `start` tokens."""

    def processor(tokens, logits):
        wanted = ids[(len(tokens) - start) % len(ids)]
        return mx.where(mx.arange(logits.shape[-1]) == wanted, logits, -mx.inf)

    return processor


class Marked:
    """A tokenizer with marks of thinking of its own."""

    has_thinking, eos_token_ids = True, (2,)

    def __init__(self, start: tuple[int, ...], end: tuple[int, ...]) -> None:
        self.think_start_tokens, self.think_end_tokens = start, end

    def decode(self, ids: Any) -> str:
        return ""


class TestThinking:
    def drawn(self, budget, *, prompt, ids, tokens=10, start=(7,), end=(8,)) -> Sequence:
        p = replace(as_policy(dense(), tokenizer(), lora=None), tokenizer=Marked(start, end))
        submitted = requests([prompt], sampling=Sampling(max_tokens=tokens, thinking_budget=budget), stop_ids=(2,))
        (one,) = decode(p, submitted, processors=[written(ids, len(prompt))])
        return one

    def test_a_block_that_the_prompt_opened_is_closed_when_the_budget_is_spent(self):
        one = self.drawn(3, prompt=(20, 7), ids=[30, 31, 32, 33, 34, 35])
        assert one.tokens == [30, 31, 32, 8, 34, 35, 30, 31, 32, 33]
        assert one.forced == [3]
        assert len(one.logprobs) == 10

    def test_a_block_that_closes_in_time_is_left_alone(self):
        one = self.drawn(3, prompt=(20, 7), ids=[30, 8, 32, 33, 34])
        assert (one.tokens[:5], one.forced) == ([30, 8, 32, 33, 34], [])

    def test_a_block_that_the_model_opens_counts_from_there_and_all_blocks_share_the_budget(self):
        one = self.drawn(3, prompt=(20,), ids=[30, 7, 31, 8, 7, 32, 33, 34, 35, 36])
        # thought: 31 and the 8 that ends it, then 32: three tokens, and the block is closed
        assert one.tokens == [30, 7, 31, 8, 7, 32, 8, 34, 35, 36]
        assert one.forced == [6]

    def test_a_closed_prompt_and_no_budget_force_nothing(self):
        assert self.drawn(1, prompt=(7, 20, 8), ids=[30, 31, 32]).forced == []
        assert self.drawn(None, prompt=(20, 7), ids=[30, 31, 32]).forced == []

    def test_a_budget_of_nothing_closes_at_once(self):
        one = self.drawn(0, prompt=(20, 7), ids=[30, 31, 32])
        assert (one.tokens[0], one.forced) == (8, [0])

    def test_marks_of_several_tokens(self):
        marks = {"start": (50, 51), "end": (60, 61, 62)}
        one = self.drawn(2, prompt=(20, 50, 51), ids=[30, 31, 32, 33, 34, 35], **marks)
        assert one.tokens[:6] == [30, 31, 60, 61, 62, 35]
        assert one.forced == [2, 3, 4]
        one = self.drawn(9, prompt=(20, 50, 51), ids=[30, 60, 61, 62, 31], **marks)
        assert one.forced == []

    def test_forced_tokens_reach_the_turn_and_a_tokenizer_without_thinking_is_refused(self):
        """The prompt's template opens a block. Tokens of the tokenizer: </think> is 8."""
        p = as_policy(dense(), tokenizer(), lora=None)
        sampling = Sampling(max_tokens=12, thinking_budget=4)
        (group,) = sample(p, [Task("hi")], group_size=8, sampling=sampling)
        for trajectory in group:
            (turn,) = trajectory.turns
            if len(turn.tokens) > 4 and 8 not in turn.tokens[:4]:
                assert turn.details.forced == (4,)
                assert turn.tokens[4] == 8
        assert any(trajectory.turns[0].details.forced for trajectory in group)

        class Plain:
            has_thinking, eos_token_ids = False, (2,)

        with pytest.raises(UserError, match="sampling: thinking_budget: the tokenizer has no tokens that begin and"):
            rules_of(Plain(), sampling)


def test_rows_that_are_done_do_not_change():
    zeros, left, done = mx.zeros((2,), mx.int32), mx.array([5, 1]), mx.array([True, False])
    state = State(zeros, zeros, mx.zeros((2, 2), mx.uint32), zeros, left, done)
    state, _ = advance(mx.zeros((2, 10)), state, StepRules(Sampling()))
    assert state.drawn.tolist() == [0, 1]
    assert state.left.tolist() == [5, 0]
    assert state.done.tolist() == [True, True]


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("max_tokens", 0), ("temperature", -1.0), ("temperature", math.nan), ("top_p", 0.0), ("top_k", -1),
        ("min_p", 1.5),
        ("min_tokens", 300), ("thinking_budget", -1), ("repetition_penalty", 0.0), ("presence_penalty", math.nan),
        ("frequency_penalty", math.inf), ("penalty_context", 0), ("num_top", -1), ("stop_strings", ("",)),
        ("stop_strings", "abc"),
    ],
)  # fmt: skip
def test_settings_out_of_range_are_refused_by_name(setting, value):
    with pytest.raises(ValueError, match=f"sampling: {setting}: wanted"):
        Sampling(**{setting: value})
