from __future__ import annotations

import contextlib
import random
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.tuner.lora import LoRALinear

from helpers import BARE, GREEDY, RAGGED, Counted, alone, moved, requests
from mlxrl.policy.policy import as_policy
from mlxrl.policy.room import capacity_for
from mlxrl.rollout.decode import Loop, decode
from mlxrl.rollout.episodes import rollout
from mlxrl.rollout.fused import FusedLinear, fused
from mlxrl.rollout.prefill import prefill
from mlxrl.rollout.render import render
from mlxrl.rollout.row import Request
from mlxrl.rollout.rules import Rules
from mlxrl.rollout.serve import service_of
from mlxrl.rollout.slots import Slots
from mlxrl.settings import LoRA, Sampling
from mlxrl.types import MicroBatch, Task
from models import dense, hybrid, moe, tokenizer

pytestmark = pytest.mark.filterwarnings("error:.*(is not compiled|decode together|one by one)")
MODELS = [dense, hybrid, moe]


def quantised():
    """4-bit weights under float32 adapters."""
    model = dense()
    nn.quantize(model, group_size=32, bits=4)
    return model


@pytest.mark.parametrize("make", [*MODELS, quantised])
def test_greedy_batch_equals_greedy_alone_for_ragged_prompts(make):
    """However rows are held, batched, chunked and compiled; a place is taken over while others are under way."""
    p = as_policy(make(), tokenizer(), lora=LoRA())
    moved(p)
    assert service_of(p.model, p.head) == "ragged"
    limits = [12, 4, 7, 12, 12, 9, 2, 12]
    wanted = [alone(p.model, prompt, limits[2 * i + r]) for i, prompt in enumerate(RAGGED) for r in range(2)]
    for options in (
        {}, {"max_rows": 3}, {"compiled": False}, {"compiled": False, "max_rows": 3, "prefill_chunk": 2},
        {"max_rows": 5, "prefill_chunk": 3}, {"service": "slots"}, {"service": "equal"},
        {"service": "equal", "max_rows": 3}, {"service": "single"},
    ):  # fmt: skip
        out = decode(p.model, p.head, requests(RAGGED, 2, limits), GREEDY, **options)
        assert [row.ids for row in out] == wanted, options
        assert {row.stop for row in out} == {"length"}


@pytest.mark.parametrize("make", MODELS)
def test_a_rows_tokens_do_not_depend_on_its_neighbours(make):
    p = as_policy(make(), tokenizer(), lora=LoRA())
    rules = Rules(Sampling(max_tokens=8), stops=tuple(range(9)))
    rows = requests(RAGGED, 3)
    together = decode(p.model, p.head, rows, rules)
    backwards = decode(p.model, p.head, rows[::-1], rules, max_rows=5)[::-1]
    single = [decode(p.model, p.head, [row], rules)[0] for row in rows]
    assert [row.ids for row in together] == [row.ids for row in single] == [row.ids for row in backwards]
    for one, other in zip(together, single, strict=True):
        assert np.allclose(one.logprobs, other.logprobs, atol=1e-5)
    assert len({tuple(row.ids) for row in together}) == len(rows), "rows of one prompt must differ"


def test_a_thousand_rows_are_the_same_alone_in_any_batch_and_in_any_order():
    p = as_policy(dense(hidden_size=32, num_hidden_layers=1), tokenizer(), lora=None)
    rules = Rules(Sampling(max_tokens=4), stops=tuple(range(0, 320, 8)))
    rows = requests([tuple(range(20 + i, 30 + 2 * i)) for i in range(10)], 100)
    order = random.Random(0).sample(range(1000), 1000)
    alone_ = decode(p.model, p.head, rows, rules, max_rows=1)
    batched = decode(p.model, p.head, rows, rules, max_rows=64)
    shuffled = decode(p.model, p.head, [rows[i] for i in order], rules, max_rows=29)
    back = sorted(zip(order, shuffled, strict=True), key=lambda pair: pair[0])
    for one, other, (_, third) in zip(alone_, batched, back, strict=True):
        assert one.ids == other.ids == third.ids
        assert np.allclose(one.logprobs, other.logprobs, atol=1e-5)
        assert np.allclose(one.logprobs, third.logprobs, atol=1e-5)
    assert len({len(row.ids) for row in alone_}) == 4, "rows must end at different times"


def test_every_stop_id_ends_a_row_and_is_kept():
    p = as_policy(dense(), tokenizer(), lora=LoRA())
    plain = decode(p.model, p.head, requests(RAGGED[:1]), GREEDY)[0].ids
    stops = (plain[2], 319)
    (row,) = decode(p.model, p.head, requests(RAGGED[:1]), Rules(GREEDY.sampling, stops))
    first = next(i for i, token in enumerate(plain) if token in stops)
    assert row.ids == plain[: first + 1]
    assert (row.stop, len(row.logprobs)) == ("eos", first + 1)


def test_forwards_are_those_that_are_needed():
    """One prefill a prompt and chunk, a step for each token but the last of the longest row, rows dropped in lumps."""
    p = as_policy(dense(), tokenizer(), lora=LoRA())
    counted, ends = Counted(p.head), [3, 7, 12, 20]
    prompts = [prompt for prompt in RAGGED if len(prompt) > 1] + [tuple(range(60, 64))]
    decode(p.model, counted, requests(prompts, 4, ends * 4), Rules(Sampling(max_tokens=20)), prefill_chunk=4, **BARE)
    chunks = [shape for shape in counted.shapes if shape[0] == 1 and shape[1] > 1]
    assert sorted(chunks) == sorted([(1, 4), (1, 3), (1, 4), (1, 4), (1, 4)])  # 5 = 4 + 1, 3, 9 = 4 + 4 + 1, 4
    decoded = counted.decoded[2:]  # the chunks of one token
    # 16 rows until 3 tokens are read, one step ahead; then 12 of 16 live: a quarter is dead. The same at 7 and 12.
    assert decoded == [16] * 3 + [12] * 4 + [9] * 5 + [4] * 7
    assert len(decoded) == max(ends) - 1


def test_short_prompts_are_run_together_each_once():
    """As many as fill a chunk, padding included, prompts of like length together."""
    p = as_policy(dense(), tokenizer(), lora=None)
    counted = Counted(p.head)
    prompts = [tuple(range(20, 20 + n)) for n in (5, 3, 9, 2, 4, 30)]
    rows = requests(prompts, 3, [2] * 18)
    decode(p.model, counted, rows, GREEDY, prefill_chunk=16, compiled=False, service="ragged")
    # 2, 3, 4 and 5 would be 20 tokens with their padding; 5 and 9 are 18; 30 is two forwards of one prompt
    assert [shape for shape in counted.shapes if shape[1] > 1] == [(3, 4), (1, 5), (1, 9), (1, 16), (1, 14)]


def test_nothing_is_decoded_behind_the_last_stop_but_the_step_that_was_ahead():
    p = as_policy(dense(), tokenizer(), lora=LoRA())
    counted = Counted(p.head)
    rules = Rules(Sampling(max_tokens=100), tuple(range(0, 320, 5)))
    out = decode(p.model, counted, requests(RAGGED[:3], 4), rules, **BARE)
    longest = max(len(row.ids) for row in out)
    assert {row.stop for row in out} == {"eos"}
    assert len(counted.decoded) == longest
    for step, rows in enumerate(counted.decoded):  # launched when `step` tokens of every row were read
        assert rows * 0.75 < sum(len(row.ids) > step for row in out), "a quarter is dead"


def test_free_places_are_taken_while_others_are_under_way():
    """64 rows of 2 to 17 tokens in 8 places: as many steps as 8 full places would take, and little more."""
    p = as_policy(dense(), tokenizer(), lora=LoRA())
    counted = Counted(p.head)
    limits = [2 + (5 * i) % 16 for i in range(64)]
    rows = requests(RAGGED[:2], 32, limits)
    out = decode(p.model, counted, rows, Rules(Sampling(max_tokens=32)), max_rows=8, **BARE)
    assert [len(row.ids) for row in out] == limits
    assert [shape for shape in counted.shapes if shape[1] > 1] == [(1, 5), (1, 3)]
    steps = (sum(limits) - 64) / 8
    assert steps <= len(counted.decoded) <= 1.25 * steps + 16
    assert set(counted.decoded) <= {8, 6, 4, 3, 2, 1}


def test_the_last_token_is_not_run_through_the_model():
    p = as_policy(dense(), tokenizer(), lora=LoRA())
    counted = Counted(p.head)
    decode(p.model, counted, requests(RAGGED[:1], 2), Rules(Sampling(max_tokens=6)), **BARE)
    assert counted.shapes == [(1, 5)] + [(2, 1)] * 5


def test_log_probs_are_those_of_the_tempered_distribution():
    """The trainer's log-probs of the same tokens, at the same temperature, are the sampler's."""
    from mlxrl.policy.logprobs import logprobs

    for make in MODELS:
        p = as_policy(make(), tokenizer(), lora=LoRA())
        moved(p)
        (group,) = rollout(p, [Task("hello")], group_size=3, sampling=Sampling(max_tokens=9, temperature=0.7), key=1)
        for trajectory in group:
            (turn,) = trajectory.turns
            ids, ones = mx.array([turn.tokens]), mx.ones((1, len(turn.tokens)))
            batch = MicroBatch(mx.array(turn.observation), ids, ones, ones, ones, temperature=0.7)
            assert np.allclose(logprobs(p, batch).token_logprobs.tolist()[0], turn.logprobs, atol=1e-4)


def test_a_compiled_step_uses_the_weights_as_they_are():
    """Weights that training has moved, and layers that were swapped, are seen by the next rollout."""
    from mlxrl.policy.lora import without_adapters

    p = as_policy(dense(), tokenizer(), lora=LoRA())
    rows = requests(RAGGED, 2)
    base = decode(p.model, p.head, rows, GREEDY)
    moved(p)
    after = decode(p.model, p.head, rows, GREEDY)
    assert [row.ids for row in after] != [row.ids for row in base]
    assert [row.ids for row in after] == [row.ids for row in decode(p.model, p.head, rows, GREEDY, compiled=False)]
    with without_adapters(p.model):
        assert [row.ids for row in decode(p.model, p.head, rows, GREEDY)] == [row.ids for row in base]
    assert [row.ids for row in decode(p.model, p.head, rows, GREEDY)] == [row.ids for row in after]


@pytest.mark.parametrize("make", MODELS)
def test_fused_adapters_give_the_logits_of_the_plain_ones_and_leave_no_trace(make):
    p = as_policy(make(), tokenizer(), lora=LoRA())
    moved(p, scale=0.05)
    ids = mx.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    layers = {name: layer for name, layer in p.model.named_modules() if isinstance(layer, LoRALinear)}
    plain = p.model(ids)
    with contextlib.suppress(KeyboardInterrupt), fused(p.model):
        assert sum(isinstance(layer, FusedLinear) for _, layer in p.model.named_modules()) == len(layers) > 0
        assert mx.abs(p.model(ids) - plain).max().item() < 1e-5
        raise KeyboardInterrupt
    now = {name: layer for name, layer in p.model.named_modules() if isinstance(layer, LoRALinear)}
    assert all(now[name] is layer for name, layer in layers.items())
    assert mx.array_equal(p.model(ids), plain)


def test_fused_adapters_keep_the_dtype_of_16_bit_weights():
    model = dense()
    model.set_dtype(mx.bfloat16)
    p = as_policy(model, tokenizer(), lora=LoRA())
    moved(p, scale=0.02)
    assert p.model.layers[0].self_attn.q_proj.lora_a.dtype == mx.float32
    ids = mx.array([[3, 1, 4]])
    plain = p.model(ids)
    with fused(p.model):
        assert p.model(ids).dtype == plain.dtype == mx.bfloat16
        assert mx.abs(p.model(ids) - plain).max().item() < 0.02 * mx.abs(plain).max().item()


@pytest.mark.parametrize("make", MODELS)
def test_slots_hold_after_ragged_prefill_what_each_row_alone_holds(make):
    """States of recurrent layers included: no padding reaches them."""
    p = as_policy(make(), tokenizer(), lora=None)
    slots = Slots(len(RAGGED))
    slots.fit(10)
    for row, filled in enumerate(prefill(p.model, p.head, RAGGED, 2048)):
        slots.place([row], filled)
    for row, prompt in enumerate(RAGGED):
        single = prefill(p.model, p.head, [prompt], 2048)[0].arrays(slots.layers)
        for held, array in zip(slots.arrays, single, strict=True):
            mine = held[row : row + 1]
            if mine.shape != array.shape:
                assert not mine[:, :, len(prompt) :].any(), "room behind a row is zero"
                mine = mine[:, :, : len(prompt)]
            assert mx.allclose(mine, array, rtol=1e-4, atol=1e-5)


def test_room_grows_by_a_quarter_at_most():
    assert [capacity_for(n) for n in (1, 32, 33, 255, 257, 513, 1025)] == [32, 32, 64, 256, 320, 640, 1280]
    assert all(n <= capacity_for(n) <= max(1.25 * n, n + 31) for n in range(1, 5000))


def test_a_task_that_stands_twice_is_two_groups():
    p = as_policy(dense(), tokenizer(), lora=LoRA())
    first, second = rollout(p, [Task("hi"), Task("hi")], group_size=2, sampling=Sampling(max_tokens=8), key=0)
    assert len(first) == len(second) == 2
    assert len({t.turns[0].tokens for t in first + second}) == 4


def test_rendering_uses_the_template_and_its_thinking_switch():
    words = tokenizer()
    open_, closed = render(words, Task("hi")), render(words, Task("hi"), thinking=False)
    assert words.decode(open_) == "<user>hi<end><assistant><think>"
    assert words.decode(closed) == "<user>hi<end><assistant><think></think>"
    chat = Task(({"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}))
    assert words.decode(render(words, chat)).startswith("<system>be brief<end><user>hi<end>")


def test_rows_come_out_as_they_end():
    p = as_policy(dense(), tokenizer(), lora=LoRA())
    loop = Loop(p.model, p.head, requests(RAGGED[:1], 3, [9, 2, 5]), GREEDY)
    assert [len(row.ids) for row in loop.run()] == [2, 5, 9]
    assert [len(row.ids) for row in loop.ordered] == [9, 2, 5]


class Talk:
    """Rows that are gone on with for some turns, each with an observation of a length of its own."""

    def __init__(self, loop, turns: int):
        self.loop, self.turns = loop, turns
        self.said = {id(row): (number, 1) for number, row in enumerate(loop.ordered)}
        self.history = [[] for _ in loop.ordered]

    def run(self):
        with self.loop.session():
            waiting = []
            while True:
                for row in self.loop.decode():
                    number, turn = self.said[id(row)]
                    self.history[number].append((row.prompt, row.ids, row.logprobs))
                    if turn == self.turns:
                        row.held = False
                    elif number % 3:
                        self.go_on(row, number, turn)  # at once, while others are under way
                    else:
                        waiting.append((row, number, turn))  # when nobody draws any more
                if not waiting:
                    return self.history
                for item in waiting:
                    self.go_on(*item)
                waiting = []

    def go_on(self, row, number, turn):
        observation = tuple(range(100 + 7 * number, 100 + 7 * number + (number * turn) % 6))
        request = Request((*row.prompt, *row.ids, *observation), row.request.key, row.request.limit)
        self.said[id(self.loop.resume(row, request))] = (number, turn + 1)


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize(("compiled", "service"), [(True, "ragged"), (False, "ragged"), (True, "slots")])
def test_rows_that_are_gone_on_with_are_those_of_a_fresh_prompt(make, compiled, service):
    """Three turns over kept caches, ragged and by chunks, while others wait for a place; nothing is run twice."""
    p = as_policy(make(), tokenizer(), lora=LoRA())
    moved(p)
    limits = [5, 3, 8, 1, 6, 2, 7, 4]
    rules = replace(GREEDY, stops=tuple(range(0, 320, 7)), holds=True)
    counted = Counted(p.head)
    rows = requests([*RAGGED, *RAGGED], limits=limits)
    loop = Loop(p.model, counted, rows, rules, max_rows=5, prefill_chunk=4, compiled=compiled, service=service)
    history = Talk(loop, 3).run()
    assert [len(turns) for turns in history] == [3] * 8
    for limit, turns in zip(limits, history, strict=True):
        for prompt, ids, logprobs in turns:
            (fresh,) = decode(p.model, p.head, [Request(prompt, rows[0].key, limit)], replace(rules, holds=False))
            assert fresh.ids == ids
            assert np.allclose(fresh.logprobs, logprobs, atol=1e-4)
    prefills = [tokens for number, tokens in counted.shapes if number == 1 and tokens > 4]
    assert not prefills, "no history is run as a whole"


def test_a_row_that_a_string_ended_is_gone_on_with():
    """Its last token was fed before the host saw the string."""
    p = as_policy(hybrid(), tokenizer(), lora=None)
    plain = decode(p.model, p.head, requests(RAGGED), GREEDY)
    letters = {p.tokenizer.decode([token]) for row in plain for token in row.ids[2:6]}
    strings = tuple(letter for letter in letters if letter.isascii() and letter)
    rules = replace(GREEDY, sampling=replace(GREEDY.sampling, stop_strings=strings), holds=True)
    loop = Loop(p.model, p.head, requests(RAGGED), rules, text=p.tokenizer.decode)
    history = Talk(loop, 2).run()
    assert any(row.ahead for row in loop.ordered)
    for turns in history:
        for prompt, ids, _ in turns:
            assert ids == decode(p.model, p.head, [Request(prompt, requests(RAGGED)[0].key)], rules,
                                 text=p.tokenizer.decode)[0].ids  # fmt: skip


def test_a_history_that_was_rewritten_is_prefilled_anew_and_a_full_context_ends():
    p = as_policy(dense(max_position_embeddings=24), tokenizer(), lora=None)
    loop = Loop(p.model, p.head, requests(RAGGED[:2], limits=[4, 4]), replace(GREEDY, holds=True))
    with loop.session():
        first, second = loop.decode()
        new = loop.resume(first, Request((50, 51, *first.ids), first.request.key, 6))
        full = loop.resume(second, Request((*second.prompt, *second.ids, *range(60, 80)), second.request.key))
        assert (full.stop, full.ids, second.held) == ("length", [], False)
        assert list(loop.decode()) == [new]
        assert new.ids == alone(p.model, new.prompt, 6)


def test_rows_wait_while_held_ones_have_all_the_places():
    p = as_policy(dense(), tokenizer(), lora=None)
    loop = Loop(p.model, p.head, requests(RAGGED, limits=[2, 3, 2, 2]), replace(GREEDY, holds=True), max_rows=2)
    with loop.session():
        first, second = loop.decode()
        assert list(loop.decode()) == []
        first.held = False
        assert len(list(loop.decode())) == 1
        second.held = False
        assert len(list(loop.decode())) == 1
    assert [row.ids for row in loop.ordered] == [
        alone(p.model, prompt, limit) for prompt, limit in zip(RAGGED, [2, 3, 2, 2], strict=True)
    ]
