"""The engine by its doors: what is submitted, extended and cancelled, and what comes out of its steps."""

from __future__ import annotations

import random
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from helpers import BARE, GREEDY, RAGGED, alone, counted, decode, decoded, guarded, moved, requests
from mlxrl.errors import UserError
from mlxrl.policy.lora import without_adapters
from mlxrl.policy.modes import decoding
from mlxrl.policy.policy import as_policy
from mlxrl.rollout.batching_mode import mode_of
from mlxrl.rollout.draw import key_of
from mlxrl.rollout.engine import Engine
from mlxrl.rollout.kv_cache import SlotCache
from mlxrl.rollout.sequence import Request, Sequence
from mlxrl.settings import LoRA, Sampling
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
    """However sequences are batched, chunked and compiled; a slot is taken over while others are under way."""
    p = as_policy(make(), tokenizer(), lora=LoRA())
    moved(p)
    assert mode_of(p) == "ragged"
    limits = [12, 4, 7, 12, 12, 9, 2, 12]
    wanted = [alone(p.model, prompt, limits[2 * i + r]) for i, prompt in enumerate(RAGGED) for r in range(2)]
    for options in (
        {}, {"max_rows": 3}, {"compiled": False}, {"compiled": False, "max_rows": 3, "prefill_chunk": 2},
        {"max_rows": 5, "prefill_chunk": 3}, {"mode": "uniform"}, {"mode": "equal_length"},
        {"mode": "equal_length", "max_rows": 3}, {"mode": "single"},
    ):  # fmt: skip
        out = decode(p, requests(RAGGED, 2, limits), **options)
        assert [one.tokens for one in out] == wanted, options
        assert {one.stop for one in out} == {"length"}


@pytest.mark.parametrize("make", MODELS)
def test_a_sequences_tokens_do_not_depend_on_its_neighbours(make):
    p = as_policy(make(), tokenizer(), lora=LoRA())
    submitted = requests(RAGGED, 3, sampling=Sampling(max_tokens=8), stop_ids=tuple(range(9)))
    together = decode(p, submitted)
    backwards = decode(p, submitted[::-1], max_rows=5)[::-1]
    single = [decode(p, [request])[0] for request in submitted]
    tokens = [one.tokens for one in together]
    assert tokens == [one.tokens for one in single] == [one.tokens for one in backwards]
    for one, other in zip(together, single, strict=True):
        assert np.allclose(one.logprobs, other.logprobs, atol=1e-5)
    assert len(set(map(tuple, tokens))) == len(submitted), "sequences of one prompt must differ"


def test_hundreds_of_sequences_are_the_same_alone_in_any_batch_and_in_any_order():
    p = as_policy(dense(hidden_size=32, num_hidden_layers=1), tokenizer(), lora=None)
    prompts = [tuple(range(20 + i, 30 + 2 * i)) for i in range(10)]
    submitted = requests(prompts, 30, sampling=Sampling(max_tokens=4), stop_ids=tuple(range(0, 320, 8)))
    order = random.Random(0).sample(range(300), 300)
    single = decode(p, submitted, max_rows=1)
    batched = decode(p, submitted, max_rows=64)
    shuffled = decode(p, [submitted[i] for i in order], max_rows=29)
    back = sorted(zip(order, shuffled, strict=True), key=lambda pair: pair[0])
    for one, other, (_, third) in zip(single, batched, back, strict=True):
        assert one.tokens == other.tokens == third.tokens
        assert np.allclose(one.logprobs, other.logprobs, atol=1e-5)
        assert np.allclose(one.logprobs, third.logprobs, atol=1e-5)
    assert len({len(one.tokens) for one in single}) == 4, "sequences must end at different times"


def test_sequences_come_out_as_they_end():
    p = as_policy(dense(), tokenizer(), lora=LoRA())
    with Engine(p) as engine:
        sequences = [engine.submit(request) for request in requests(RAGGED[:1], 3, [9, 2, 5])]
        assert [len(one.tokens) for one in engine.run()] == [2, 5, 9]
        assert not engine.busy
        assert engine.step() == []
    assert [len(one.tokens) for one in sequences] == [9, 2, 5]


def test_every_stop_id_ends_a_sequence_and_is_kept():
    p = as_policy(dense(), tokenizer(), lora=LoRA())
    plain = decode(p, requests(RAGGED[:1]))[0].tokens
    stop_ids = (plain[2], 319)
    (one,) = decode(p, requests(RAGGED[:1], stop_ids=stop_ids))
    first = next(i for i, token in enumerate(plain) if token in stop_ids)
    assert one.tokens == plain[: first + 1]
    assert (one.stop, len(one.logprobs)) == ("eos", first + 1)


def test_a_compiled_step_uses_the_weights_as_they_are():
    """Weights that training has moved, and layers that were swapped, are seen by the next engine."""
    p = as_policy(dense(), tokenizer(), lora=LoRA())

    def tokens(**options):
        return [one.tokens for one in decode(p, requests(RAGGED, 2), **options)]

    base = tokens()
    moved(p)
    after = tokens()
    assert after != base
    assert after == tokens(compiled=False)
    with without_adapters(p.model):
        assert tokens() == base
    assert tokens() == after


# What is computed


def test_forwards_are_those_that_are_needed():
    """One prefill a prompt and chunk, a step for each token but the last of the longest; slots dropped at a quarter."""
    p, shapes = counted(as_policy(dense(), tokenizer(), lora=LoRA()))
    ends = [3, 7, 12, 20]
    prompts = [prompt for prompt in RAGGED if len(prompt) > 1] + [tuple(range(60, 64))]
    decode(p, requests(prompts, 4, ends * 4, Sampling(max_tokens=20)), prefill_chunk=4, **BARE)
    chunks = [shape for shape in shapes if shape[0] == 1 and shape[1] > 1]
    assert sorted(chunks) == sorted([(1, 4), (1, 3), (1, 4), (1, 4), (1, 4)])  # 5 = 4 + 1, 3, 9 = 4 + 4 + 1, 4
    steps = decoded(shapes)[2:]  # the chunks of one token
    # 16 rows until 3 tokens are read, one step ahead; then 12 of 16 live: a quarter is free. The same at 7 and 12.
    assert steps == [16] * 3 + [12] * 4 + [9] * 5 + [4] * 7
    assert len(steps) == max(ends) - 1


def test_nothing_is_decoded_after_the_last_stop_but_the_step_that_was_ahead():
    p, shapes = counted(as_policy(dense(), tokenizer(), lora=LoRA()))
    out = decode(p, requests(RAGGED[:3], 4, None, Sampling(max_tokens=100), tuple(range(0, 320, 5))), **BARE)
    longest = max(len(one.tokens) for one in out)
    assert {one.stop for one in out} == {"eos"}
    assert len(decoded(shapes)) == longest
    for step, rows in enumerate(decoded(shapes)):  # launched when `step` tokens of every sequence were read
        assert rows * 0.75 < sum(len(one.tokens) > step for one in out), "a quarter is free"


def test_free_slots_are_taken_while_others_are_under_way(monkeypatch):
    """64 sequences of 2 to 17 tokens in 8 slots: as many steps as 8 full slots would take, and little more.

    Their caches are copied where slots are dropped, to 6, 4, 3, 2 and 1, and never else.
    """
    copies, read = [], SlotCache.read
    monkeypatch.setattr(SlotCache, "read", lambda self, slots, *rest: copies.append(slots) or read(self, slots, *rest))
    p, shapes = counted(as_policy(dense(), tokenizer(), lora=LoRA()))
    limits = [2 + (5 * i) % 16 for i in range(64)]
    out = decode(p, requests(RAGGED[:2], 32, limits, Sampling(max_tokens=32)), max_rows=8, **BARE)
    assert [len(one.tokens) for one in out] == limits
    assert [shape for shape in shapes if shape[1] > 1] == [(1, 5), (1, 3)]
    steps = (sum(limits) - 64) / 8
    assert steps <= len(decoded(shapes)) <= 1.25 * steps + 16
    assert set(decoded(shapes)) <= {8, 6, 4, 3, 2, 1}
    assert len(copies) <= 5


def test_the_last_token_is_not_run_through_the_model():
    p, shapes = counted(as_policy(dense(), tokenizer(), lora=LoRA()))
    decode(p, requests(RAGGED[:1], 2, None, Sampling(max_tokens=6)), **BARE)
    assert shapes == [(1, 5)] + [(2, 1)] * 5


@pytest.mark.parametrize("stop_ids", [(), tuple(range(320))])
def test_completions_of_one_token(stop_ids):
    p, shapes = counted(as_policy(dense(), tokenizer(), lora=LoRA()))
    sampling = Sampling(max_tokens=9 if stop_ids else 1)
    out = decode(p, requests(RAGGED[:1], 3, None, sampling, stop_ids), max_rows=2, **BARE)
    assert [(len(one.tokens), len(one.logprobs)) for one in out] == [(1, 1)] * 3
    assert {one.stop for one in out} == {"eos" if stop_ids else "length"}
    assert len(decoded(shapes)) == (2 if stop_ids else 0), "only a step that was ahead of a stop"


# Between steps


@pytest.mark.parametrize("make", MODELS)
def test_requests_may_come_between_steps(make):
    """Each is drawn as it would be alone, and slots are added as requests come: 1, then 2, then 4 of at most 5."""
    p = as_policy(make(), tokenizer(), lora=None)
    submitted = requests([*RAGGED, *RAGGED], limits=[12, 9, 12, 7, 3, 12, 5, 8])
    merged, shapes = counted(p)
    with Engine(merged, max_rows=5, compiled=False, mode="ragged") as engine:
        sequences = []
        for request in submitted:
            sequences.append(engine.submit(request))
            engine.step()
        list(engine.run())
    assert [one.tokens for one in sequences] == [alone(p.model, r.prompt, r.limit or 0) for r in submitted]
    steps = [rows for rows in decoded(shapes) if rows > 1]
    assert (steps[:3], max(steps)) == ([2, 4, 5], 5)


def test_an_engine_is_idle_and_busy_again():
    p = as_policy(dense(), tokenizer(), lora=None)
    wanted = [alone(p.model, prompt, 12) for prompt in RAGGED]
    with Engine(p) as engine:
        for prompt, tokens in zip(RAGGED, wanted, strict=True):
            assert not engine.busy
            sequence = engine.submit(Request(prompt, key_of(0, 0), GREEDY, stop_ids=()))
            assert engine.busy
            assert list(engine.run()) == [sequence]
            assert sequence.tokens == tokens


def test_a_cancelled_sequence_frees_its_slot_and_changes_nobody_else():
    """In a slot, in the queue, and one that has ended; the two that wait take the slots of those that are given up."""
    p = as_policy(dense(), tokenizer(), lora=None)
    submitted = requests(RAGGED, limits=[12, 12, 4, 12])
    with Engine(p, max_rows=2) as engine:
        first, second, third, fourth = (engine.submit(request) for request in submitted)
        for _ in range(3):
            assert engine.step() == []
        assert (engine.occupied, len(third.tokens)) == (2, 0)
        engine.cancel(first)
        engine.cancel(fourth)
        assert engine.occupied == 1
        assert list(engine.run()) == [third, second]
        engine.cancel(third)
    assert [one.stop for one in (first, second, third, fourth)] == ["cancelled", "length", "length", "cancelled"]
    assert (len(first.tokens), fourth.tokens) == (3, [])
    for one, request in ((second, submitted[1]), (third, submitted[2])):
        assert one.tokens == alone(p.model, one.prompt, request.limit or 0)


def test_all_may_be_cancelled():
    p = as_policy(hybrid(), tokenizer(), lora=None)
    with Engine(p) as engine:
        for one in [engine.submit(request) for request in requests(RAGGED)]:
            engine.step()
            engine.cancel(one)
        assert list(engine.run()) == []
        assert (engine.busy, engine.occupied) == (False, 0)
        (again,) = (engine.submit(request) for request in requests(RAGGED[:1]))
        assert list(engine.run()) == [again]
        assert again.tokens == alone(p.model, RAGGED[0], 12)


@pytest.mark.parametrize("make", MODELS)
def test_different_sampling_settings_in_one_engine(make):
    """Each sequence draws what it draws in an engine of its own settings, whose limits may differ within a batch."""
    p = as_policy(make(), tokenizer(), lora=None)
    settings = [
        GREEDY, Sampling(max_tokens=9), Sampling(max_tokens=5), Sampling(max_tokens=9, temperature=0.7),
        Sampling(max_tokens=9, top_k=5), Sampling(max_tokens=7, top_p=0.5, num_top=3),
        Sampling(max_tokens=9, repetition_penalty=1.5), Sampling(max_tokens=9, min_tokens=4, stop_strings=("a",)),
    ]  # fmt: skip
    stop_ids = tuple(range(0, 320, 30))
    submitted = [request for one in settings for request in requests(RAGGED, 2, None, one, stop_ids)]
    apart = [one for sampling in settings for one in decode(p, [r for r in submitted if r.sampling is sampling])]
    order = random.Random(0).sample(range(len(submitted)), len(submitted))
    shuffled = decode(p, [submitted[i] for i in order], max_rows=5)
    for one, other in zip(apart, (shuffled[order.index(i)] for i in range(len(submitted))), strict=True):
        assert (one.tokens, one.stop) == (other.tokens, other.stop)
        assert np.allclose(one.logprobs, other.logprobs, atol=1e-5)
        assert one.details.top_ids == other.details.top_ids
    assert len({tuple(one.tokens) for one in apart}) > 40, "settings draw differently"


def test_limits_of_one_setting_decode_together():
    """A batch of two, not two batches of one."""
    p, shapes = counted(as_policy(dense(), tokenizer(), lora=None))
    submitted = [*requests(RAGGED[:1], sampling=Sampling(max_tokens=4)), *requests(RAGGED[1:2], sampling=Sampling())]
    decode(p, submitted, compiled=False, mode="ragged")
    assert decoded(shapes)[:3] == [2, 2, 2]


def test_slots_of_settings_that_are_not_used_are_given_back():
    p = as_policy(dense(), tokenizer(), lora=None)
    with Engine(p) as engine:
        for request in requests(RAGGED, 8):
            engine.submit(request)
        list(engine.run())
        mx.synchronize()
        before = mx.get_active_memory()
        (one,) = (engine.submit(request) for request in requests(RAGGED[:1], sampling=Sampling()))
        list(engine.run())
        mx.synchronize()
        assert len(one.tokens) == 256
        assert mx.get_active_memory() < before


# Extended sequences


class Talk:
    """Sequences that are extended for some turns, each with observations of lengths of its own."""

    def __init__(self, engine: Engine, submitted: list[Request], turns: int) -> None:
        self.engine, self.turns = engine, turns
        self.history: list[list[Sequence]] = [[] for _ in submitted]
        for number, request in enumerate(submitted):
            engine.submit(replace(request, owner=(number, 1)))

    def run(self) -> list[list[Sequence]]:
        waiting: list[Sequence] = []
        while self.engine.busy or waiting:
            for one in self.engine.step():
                number, turn = one.request.owner
                self.history[number].append(one)
                if turn == self.turns:
                    self.engine.cancel(one)
                elif number % 3:
                    self.extend(one)  # at once, while others are under way
                else:
                    waiting.append(one)  # when nobody draws any more
            if not self.engine.busy:
                for one in waiting:
                    self.extend(one)
                waiting = []
        return self.history

    def extend(self, one: Sequence) -> None:
        number, turn = one.request.owner
        observation = range(100 + 7 * number, 100 + 7 * number + (number * turn) % 6)
        self.engine.extend(one, observation, owner=(number, turn + 1))


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize(("compiled", "mode"), [(True, "ragged"), (False, "ragged"), (True, "uniform")])
def test_parked_sequences_that_are_extended_are_those_of_a_fresh_prompt(make, compiled, mode):
    """Three turns over kept caches, ragged and by chunks, while others wait for a slot; nothing is run twice."""
    p = as_policy(make(), tokenizer(), lora=LoRA())
    moved(p)
    limits, stop_ids = [5, 3, 8, 1, 6, 2, 7, 4], tuple(range(0, 320, 7))
    submitted = requests([*RAGGED, *RAGGED], limits=limits, stop_ids=stop_ids, keep=True)
    watched, shapes = counted(p)
    with decoding(watched) as merged, Engine(merged, max_rows=5, prefill_chunk=4, compiled=compiled, mode=mode) as one:
        history = Talk(one, submitted, 3).run()
    assert [len(turns) for turns in history] == [3] * 8
    for limit, turns in zip(limits, history, strict=True):
        for turn in turns:
            (fresh,) = decode(p, [Request(turn.prompt, submitted[0].key, GREEDY, limit, stop_ids)])
            assert fresh.tokens == turn.tokens
            assert np.allclose(fresh.logprobs, turn.logprobs, atol=1e-4)
    assert not [tokens for rows, tokens in shapes if rows == 1 and tokens > 4], "no history is run as a whole"


def test_a_sequence_that_a_string_ended_is_extended():
    """Its last token was fed before the host saw the string."""
    p = as_policy(hybrid(), tokenizer(), lora=None)
    plain = decode(p, requests(RAGGED))
    letters = {p.tokenizer.decode([token]) for one in plain for token in one.tokens[2:6]}
    sampling = replace(GREEDY, stop_strings=tuple(letter for letter in letters if letter.isascii() and letter))
    submitted = requests(RAGGED, sampling=sampling, keep=True)
    with Engine(p) as engine:
        history = Talk(engine, submitted, 2).run()
    assert any(one.ahead for turns in history for one in turns)
    for turns in history:
        for one in turns:
            assert one.tokens == decode(p, [Request(one.prompt, submitted[0].key, sampling, stop_ids=())])[0].tokens


def test_what_cannot_be_continued_is_prefilled_and_a_full_context_ends():
    """Not parked, other settings, cancelled: prefilled as a whole. A context without place for a token: at once."""
    p = as_policy(dense(max_position_embeddings=24), tokenizer(), lora=None)
    ids = (50, 51)

    def following(sequence: Sequence) -> list[int]:
        return alone(p.model, sequence.prompt, 6)

    for fields, changes in (({}, {}), ({"keep": True}, {"sampling": replace(GREEDY, num_top=1)}), ({"keep": True}, {})):
        with Engine(p) as engine:
            (first,) = (engine.submit(request) for request in requests(RAGGED[:1], limits=[4], **fields))
            list(engine.run())
            if fields and not changes:
                engine.cancel(first)
            new = engine.extend(first, ids, limit=6, **changes)
            assert engine.occupied == 0
            assert list(engine.run()) == [new]
            assert new.prompt == (*RAGGED[0], *first.tokens, *ids)
            assert new.tokens == following(new)
    with Engine(p) as engine:
        (first,) = (engine.submit(request) for request in requests(RAGGED[:1], limits=[4], keep=True))
        list(engine.run())
        full = engine.extend(first, range(60, 80), limit=None)
        assert (full.stop, full.tokens, engine.occupied) == ("length", [], 0)
        assert list(engine.run()) == [full]


def test_an_extension_may_be_cancelled_before_it_begins():
    p = as_policy(dense(), tokenizer(), lora=None)
    with Engine(p) as engine:
        (first,) = (engine.submit(request) for request in requests(RAGGED[:1], limits=[4], keep=True))
        list(engine.run())
        assert engine.occupied == 1
        engine.cancel(engine.extend(first, (50, 51)))
        assert engine.occupied == 0
        assert list(engine.run()) == []


def test_sequences_wait_while_parked_ones_have_all_the_slots():
    p = as_policy(dense(), tokenizer(), lora=None)
    limits = [2, 3, 2, 2]
    with Engine(p, max_rows=2) as engine:
        sequences = [engine.submit(request) for request in requests(RAGGED, limits=limits, keep=True)]
        first, second = engine.run()
        assert (engine.busy, engine.occupied) == (False, 2)
        assert engine.step() == []
        engine.cancel(first)
        assert len(list(engine.run())) == 1
        engine.cancel(second)
        assert len(list(engine.run())) == 1
    assert [one.tokens for one in sequences] == [
        alone(p.model, prompt, limit) for prompt, limit in zip(RAGGED, limits, strict=True)
    ]


# What goes wrong


@pytest.mark.parametrize("compiled", [True, False])
def test_a_sequence_with_logits_that_are_not_finite_ends_and_the_others_do_not(compiled):
    """A token spoils what reads it. Sequences that drew it end, and their slots serve others as if nothing had been."""
    p = as_policy(dense(tie_word_embeddings=False), tokenizer(), lora=None)
    submitted = requests(RAGGED[:1], 40, None, Sampling(max_tokens=20))
    whole = decode(p, submitted, compiled=compiled)
    bad = whole[3].tokens[4]
    p.model.model.embed_tokens.weight[bad] = mx.nan
    out = decode(p, submitted, max_rows=6, compiled=compiled)
    spoiled = [bad in one.tokens[:-1] for one in whole]
    assert 0 < sum(spoiled) < 40
    for one, fine, ends in zip(out, whole, spoiled, strict=True):
        assert one.stop == ("error" if ends else "length")
        assert one.tokens == (fine.tokens[: fine.tokens.index(bad) + 1] if ends else fine.tokens)
        assert len(one.logprobs) == len(one.tokens)


def test_a_prompt_that_spoils_its_sequence_gives_an_error_without_tokens():
    p = as_policy(dense(tie_word_embeddings=False), tokenizer(), lora=None)
    p.model.model.embed_tokens.weight[7] = mx.nan
    with Engine(p, max_rows=1) as engine:
        out = [engine.submit(request) for request in requests([(7, 8), *RAGGED[:3]], keep=True)]
        assert next(engine.run()) is out[0]
        assert engine.occupied == 0, "an error is not kept"
        for one in engine.run():
            engine.cancel(one)
    assert [(one.stop, len(one.tokens)) for one in out] == [("error", 0)] + [("length", 12)] * 3


def test_token_ids_that_the_model_does_not_have_are_refused():
    p = as_policy(guarded(dense(vocab_size=80)), tokenizer(), lora=None)
    line = "wanted token ids that the model has, 0 to 79, got"
    with Engine(p) as engine:
        for prompt in ((3, 80), (-1, 3)):
            with pytest.raises(UserError, match=f"prompt: {line} {max(prompt, key=abs) if 80 in prompt else -1}"):
                engine.submit(Request(prompt, mx.random.key(0), GREEDY))
        with pytest.raises(UserError, match=f"sampling: stop ids: {line} 5000"):
            engine.submit(Request((1, 2), mx.random.key(0), GREEDY, stop_ids=(2, 5000)))
        (sequence,) = [engine.submit(Request((1, 2), mx.random.key(0), GREEDY, keep=True))]
        list(engine.run())
        with pytest.raises(UserError, match=f"prompt: {line} 99"):
            engine.extend(sequence, [99])


def test_tokens_that_close_thinking_are_those_of_the_model():
    thinker = tokenizer()
    p = as_policy(guarded(dense(vocab_size=8)), thinker, lora=None)  # <think> is 7, </think> is 8
    with Engine(p) as engine, pytest.raises(UserError, match=r"the end of thinking: .* 0 to 7, got 8"):
        engine.submit(Request((1, 2), mx.random.key(0), Sampling(max_tokens=4, thinking_budget=1)))


def test_prompts_at_the_context_limit():
    """16 tokens of context: after 14 there are two, after 16 and 20 none; the others are not touched by it."""
    p = as_policy(dense(max_position_embeddings=16), tokenizer(), lora=None)
    prompts = [tuple(range(20, 20 + n)) for n in (14, 16, 20, 3)]
    out = decode(p, requests(prompts))
    assert [(len(one.tokens), one.stop) for one in out] == [(2, "length"), (0, "length"), (0, "length"), (12, "length")]
    assert out[3].tokens == decode(p, requests(prompts)[3:])[0].tokens


def test_empty_prompts_and_limits_are_refused_in_a_line():
    with pytest.raises(UserError, match="request: prompt: wanted at least one token, got no tokens"):
        Request((), key_of(0, 0), GREEDY)
    with pytest.raises(UserError, match="engine: max_rows and prefill_chunk: wanted at least 1, got 0"):
        Engine(as_policy(dense(), tokenizer(), lora=None), max_rows=0)
