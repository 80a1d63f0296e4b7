"""What is drawn, from what, and when a row ends."""

from __future__ import annotations

import math
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.sample_utils import make_logits_processors

from helpers import GREEDY, RAGGED, requests
from mlxrl.policy.policy import as_policy
from mlxrl.rollout.decode import decode
from mlxrl.rollout.episodes import rollout, rules_of
from mlxrl.rollout.rules import Rules, blank, draw
from mlxrl.rollout.sampling import fold, key_of, sample
from mlxrl.settings import LoRA, Sampling
from mlxrl.types import Task
from models import dense, tokenizer


def keys(count: int, seed: int = 0) -> mx.array:
    return fold(key_of(seed, 0)[None], mx.arange(count))


@pytest.mark.parametrize("vocabulary", [3, 13, 40, 64])
def test_draws_follow_the_tempered_distribution(vocabulary):
    """chi^2 of 20,000 draws; 13 has no blocks of equal size."""
    count = 20_000
    one = 1.5 * mx.random.normal((vocabulary,), key=mx.random.key(1))
    wanted = np.array(mx.softmax(one / 0.7), np.float64)
    drawn = sample(mx.broadcast_to(one, (count, vocabulary)), keys(count), Sampling(temperature=0.7))
    seen = np.bincount(np.array(drawn.tokens), minlength=vocabulary)
    chi = ((seen - count * wanted) ** 2 / (count * wanted)).sum()
    assert chi < vocabulary - 1 + 4 * math.sqrt(2 * vocabulary)
    assert np.allclose(drawn.logprobs, np.log(wanted)[np.array(drawn.tokens)], atol=1e-5)


def test_log_probs_by_hand():
    logits = mx.broadcast_to(mx.log(mx.array([0.5, 0.25, 0.25])), (20_000, 3))
    drawn = sample(logits, keys(20_000), Sampling(temperature=0.5))
    # p ^ (1 / 0.5) = 1/4, 1/16, 1/16, which sums to 3/8: probabilities 2/3, 1/6, 1/6
    assert abs((drawn.tokens == 0).mean().item() - 2 / 3) < 0.01
    assert abs(drawn.logprobs.max().item() - math.log(2 / 3)) < 1e-5
    # Greedy decoding reports log-probs at temperature 1.
    assert abs(sample(logits[:1], keys(1), Sampling(temperature=0.0)).logprobs.item() - math.log(0.5)) < 1e-6


def test_draws_of_a_row_over_time_are_independent():
    """The next token's noise has nothing to do with this one's: pairs of fair coins are uniform."""
    logits = mx.zeros((20_000, 2))
    first = sample(logits, keys(20_000), Sampling())
    second = sample(logits, first.keys, Sampling())
    pairs = np.bincount(2 * np.array(first.tokens) + np.array(second.tokens), minlength=4)
    assert np.abs(pairs / 20_000 - 0.25).max() < 0.015


def test_a_token_without_probability_is_never_drawn():
    """Half of the vocabulary is ruled out, the first and last tokens of blocks among it, from peaked to flat."""
    allowed = mx.arange(320) % 2 == 1
    for scale in (0.0, 3.0, 30.0, 300.0):
        logits = mx.where(allowed, scale * mx.random.normal((4000, 320), key=mx.random.key(3)), -mx.inf)
        drawn = sample(logits, keys(4000), Sampling())
        assert (drawn.tokens % 2 == 1).all().item()
        assert mx.isfinite(drawn.logprobs).all().item()


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 2.0])
@pytest.mark.parametrize("top_p", [0.01, 0.5, 1.0])
@pytest.mark.parametrize("top_k", [0, 1, 5, 320, 1000])
@pytest.mark.parametrize("min_p", [0.0, 0.5, 1.0])
def test_filters_keep_the_likeliest_and_what_they_promise(temperature, top_p, top_k, min_p):
    logits = 4 * mx.random.normal((64, 320), key=mx.random.key(0))
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    drawn = sample(logits, keys(64, 1), sampling)
    probabilities = np.array(mx.softmax(logits / sampling.softmax_temperature, axis=-1), np.float64)
    chosen = np.take_along_axis(probabilities, np.array(drawn.tokens)[:, None], 1)
    assert np.allclose(drawn.logprobs, np.log(chosen[:, 0]), atol=1e-4), "log-probs are those before the filters"
    larger = np.where(probabilities > chosen, probabilities, 0)
    if temperature == 0:
        assert (larger == 0).all()
    if top_k:
        assert ((larger > 0).sum(1) < top_k).all()
    assert (larger.sum(1) < top_p + 1e-6).all(), "no more than top_p lies above what is drawn"
    assert (chosen[:, 0] >= min_p * probabilities.max(1) * (1 - 1e-5)).all()
    if drawn.truncated is None:
        assert top_p == 1
        assert top_k == 0
        assert min_p == 0
    else:
        assert (drawn.truncated < 1 - probabilities.max(1) + 1e-5).all().item(), "the likeliest is kept"


def test_truncated_mass_by_hand():
    logits = mx.log(mx.array([[0.4, 0.3, 0.2, 0.1]]))
    for sampling, lost in (
        (Sampling(top_k=3), 0.1),
        (Sampling(top_p=0.5), 0.3),  # 0.4 lies above the second token, 0.7 above the third
        (Sampling(min_p=0.5), 0.1),  # at least half of 0.4
        (Sampling(top_k=2, top_p=0.5), 0.6),  # of 4/7 and 3/7, the second has more than half above it
        (Sampling(temperature=0.5, top_k=1), 1 - 16 / 30),  # squares: 16, 9, 4, 1 of 30
    ):
        drawn = sample(logits, keys(1), sampling)
        assert abs(drawn.truncated.item() - lost) < 1e-6
    assert sample(logits, keys(1), Sampling()).truncated is None


def test_the_truncated_mass_makes_a_filtered_draws_log_prob():
    """log-prob less log(1 - truncated) is that of the distribution the token came from."""
    sampling = Sampling(top_k=2)
    logits = mx.broadcast_to(mx.log(mx.array([0.4, 0.3, 0.2, 0.1])), (20_000, 4))
    drawn = sample(logits, keys(20_000), sampling)
    share = (drawn.tokens == 0).mean().item()
    own = mx.exp(drawn.logprobs - mx.log(1 - drawn.truncated))
    assert abs(own.max().item() - 4 / 7) < 1e-5
    assert abs(share - 4 / 7) < 0.015


PENALTIES = [
    {"repetition_penalty": 1.7}, {"presence_penalty": 2.0}, {"frequency_penalty": 0.9},
    {"repetition_penalty": 1.2, "presence_penalty": -0.5, "frequency_penalty": 0.3},
]  # fmt: skip


@pytest.mark.parametrize("penalties", PENALTIES)
def test_penalties_and_hooks_are_those_of_mlx_lm(penalties):
    """The built-in penalties, mlx-lm's processors as hooks, and mlx-lm's applied by hand draw the same tokens."""
    p = as_policy(dense(), tokenizer(), lora=None)
    prompts = [(20, 21, 20, 22, 20), (30,), tuple(range(40, 56))]
    context = {name.replace("penalty", "context_size"): 6 for name in penalties}
    processors = make_logits_processors(**penalties, **context)
    plain = Sampling(max_tokens=10, temperature=0.0)
    ours = decode(p.model, p.head, requests(prompts), Rules(replace(plain, penalty_context=6, **penalties)))
    hooked = decode(p.model, p.head, requests(prompts), Rules(plain), processors=processors)
    for prompt, row, other in zip(prompts, ours, hooked, strict=True):
        ids = list(prompt)
        for _ in range(10):
            logits = p.model(mx.array([ids]))[:, -1]
            for processor in processors:
                logits = processor(mx.array(ids), logits)
            ids.append(mx.argmax(logits).item())
        assert row.ids == other.ids == ids[len(prompt) :]
        model = p.model(mx.array([ids]))[0, len(prompt) - 1 : -1]
        own = mx.take_along_axis(model, mx.array(row.ids)[:, None], 1)[:, 0] - mx.logsumexp(model, axis=-1)
        assert np.allclose(row.logprobs, own, atol=1e-5), "log-probs are the model's"
    free = decode(p.model, p.head, requests(prompts), Rules(plain))
    assert [row.ids for row in free] != [row.ids for row in ours]


def test_no_stop_ends_a_row_before_the_minimum():
    p = as_policy(dense(), tokenizer(), lora=None)
    stops = tuple(range(0, 320, 2))
    free = decode(p.model, p.head, requests(RAGGED, 8), Rules(Sampling(max_tokens=20), stops))
    held = decode(p.model, p.head, requests(RAGGED, 8), Rules(Sampling(max_tokens=20, min_tokens=5), stops))
    assert min(len(row.ids) for row in free) == 1
    assert min(len(row.ids) for row in held) == 6  # five that are no stops, and the stop
    assert all(token % 2 for row in held for token in row.ids[:5])
    lost = [mass for row in held for mass in row.truncated[:5]]
    assert 0.3 < np.mean(lost) < 0.7, "about half of the probability was banned"
    assert all(mass == 0 for row in held for mass in row.truncated[5:])


def test_every_eos_of_the_tokenizer_stops_and_the_one_sampled_is_kept():
    p = as_policy(dense(), tokenizer(("<eos>", "<end>")), lora=LoRA())
    ids = {p.tokenizer.encode(word, add_special_tokens=False)[0] for word in ("<eos>", "<end>")}
    assert set(rules_of(p.tokenizer, Sampling()).stops) == ids
    groups = rollout(p, [Task("hi")] * 4, group_size=32, sampling=Sampling(max_tokens=40), key=3)
    ended = [t.turns[0].tokens for group in groups for t in group if t.stop == "eos"]
    assert {action[-1] for action in ended} == ids
    assert all(not ids & set(action[:-1]) for action in ended)


def greedy_text(p, prompts, sampling: Sampling = GREEDY.sampling):
    return decode(p.model, p.head, requests(prompts), Rules(sampling), text=p.tokenizer.decode)


def test_stop_strings_end_a_row_across_token_borders_and_ids_are_kept():
    """A byte-level tokenizer: every string of two letters lies over a border."""
    p = as_policy(dense(), tokenizer(), lora=None)
    plain = greedy_text(p, RAGGED)
    letters = [[p.tokenizer.decode([token]) for token in row.ids] for row in plain]
    string = letters[0][3] + letters[0][4]
    assert len(string) >= 2
    stopped = greedy_text(p, RAGGED, replace(GREEDY.sampling, stop_strings=("nowhere in it", string)))
    for row, free in zip(stopped, plain, strict=True):
        texts = [p.tokenizer.decode(free.ids[: n + 1]) for n in range(len(free.ids))]
        first = next((n for n, text in enumerate(texts) if string in text), None)
        assert row.ids == (free.ids if first is None else free.ids[: first + 1])
        assert row.stop == ("length" if first is None else "eos")
    assert stopped[0].stop == "eos"
    assert len(stopped[0].logprobs) == len(stopped[0].ids) <= 5


def test_stop_strings_see_special_tokens_and_characters_of_several_tokens():
    p = as_policy(dense(), tokenizer(), lora=None)
    rows = decode(
        p.model, p.head, requests([(20,), (21,)]), Rules(Sampling(max_tokens=9, stop_strings=("é</think>",))),
        text=p.tokenizer.decode, processors=[written(p.tokenizer.encode("aéé</think>", add_special_tokens=False))],
    )  # fmt: skip
    assert [p.tokenizer.decode(row.ids) for row in rows] == ["aéé</think>"] * 2
    assert [(row.stop, len(row.ids)) for row in rows] == [("eos", 6)] * 2  # a, two bytes for each é, and the tag


def written(ids, start: int = 1):
    """A hook that makes every row write `ids` behind a prompt of `start` tokens."""

    def processor(tokens, logits):
        wanted = ids[(len(tokens) - start) % len(ids)]
        return mx.where(mx.arange(logits.shape[-1]) == wanted, logits, -mx.inf)

    return processor


class TestThinking:
    """Tokens of the tokenizer: <think> is 7, </think> is 8."""

    def decoded(self, budget, *, prompt, ids, tokens=10, opening=(7,), closing=(8,)):
        p = as_policy(dense(), tokenizer(), lora=None)
        rules = Rules(Sampling(max_tokens=tokens, thinking_budget=budget), (2,), opening, closing)
        (row,) = decode(p.model, p.head, requests([prompt]), rules, processors=[written(ids, len(prompt))])
        return row

    def test_a_block_that_the_prompt_opened_is_closed_when_the_budget_is_spent(self):
        row = self.decoded(3, prompt=(20, 7), ids=[30, 31, 32, 33, 34, 35])
        assert row.ids == [30, 31, 32, 8, 34, 35, 30, 31, 32, 33]
        assert row.forced == [3]
        assert len(row.logprobs) == 10

    def test_a_block_that_closes_in_time_is_left_alone(self):
        row = self.decoded(3, prompt=(20, 7), ids=[30, 8, 32, 33, 34])
        assert (row.ids[:5], row.forced) == ([30, 8, 32, 33, 34], [])

    def test_a_block_that_the_model_opens_counts_from_there_and_all_blocks_share_the_budget(self):
        row = self.decoded(3, prompt=(20,), ids=[30, 7, 31, 8, 7, 32, 33, 34, 35, 36])
        # thought: 31 and the 8 that ends it, then 32: three tokens, and the block is closed
        assert row.ids == [30, 7, 31, 8, 7, 32, 8, 34, 35, 36]
        assert row.forced == [6]

    def test_a_closed_prompt_and_no_budget_force_nothing(self):
        assert self.decoded(1, prompt=(7, 20, 8), ids=[30, 31, 32]).forced == []
        assert self.decoded(None, prompt=(20, 7), ids=[30, 31, 32]).forced == []

    def test_a_budget_of_nothing_closes_at_once(self):
        row = self.decoded(0, prompt=(20, 7), ids=[30, 31, 32])
        assert (row.ids[0], row.forced) == (8, [0])

    def test_marks_of_several_tokens(self):
        marks = {"opening": (50, 51), "closing": (60, 61, 62)}
        row = self.decoded(2, prompt=(20, 50, 51), ids=[30, 31, 32, 33, 34, 35], **marks)
        assert row.ids[:6] == [30, 31, 60, 61, 62, 35]
        assert row.forced == [2, 3, 4]
        row = self.decoded(9, prompt=(20, 50, 51), ids=[30, 60, 61, 62, 31], **marks)
        assert row.forced == []

    def test_forced_tokens_reach_the_turn_and_a_tokenizer_without_thinking_is_refused(self):
        p = as_policy(dense(), tokenizer(), lora=None)
        sampling = Sampling(max_tokens=12, thinking_budget=4)
        (group,) = rollout(p, [Task("hi")], group_size=8, sampling=sampling)  # the template opens a block
        for trajectory in group:
            (turn,) = trajectory.turns
            if len(turn.tokens) > 4 and 8 not in turn.tokens[:4]:
                assert turn.details.forced == (4,)
                assert turn.tokens[4] == 8
        assert any(trajectory.turns[0].details.forced for trajectory in group)

        class Plain:
            has_thinking, eos_token_ids = False, (2,)

        with pytest.raises(ValueError, match="thinking_budget"):
            rules_of(Plain(), sampling)


def test_candidates_are_the_likeliest_with_their_log_probs():
    p = as_policy(dense(), tokenizer(), lora=LoRA())
    sampling = Sampling(max_tokens=6, temperature=0.8, num_top=5, top_k=3)
    (group,) = rollout(p, [Task("hello")], group_size=3, sampling=sampling, key=2)
    for trajectory in group:
        (turn,) = trajectory.turns
        ids = mx.array([[*turn.observation, *turn.tokens]])
        logits = p.model(ids)[0, len(turn.observation) - 1 : -1] / 0.8
        own = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        for place, row in enumerate(own):
            order = np.argsort(-row)[:5]
            assert turn.details.top_ids[place] == tuple(order)
            assert np.allclose(turn.details.top_logprobs[place], row[order], atol=1e-4)
            assert turn.tokens[place] in order[:3]
    assert sample(mx.zeros((2, 3)), keys(2), Sampling(num_top=9)).candidates[0].shape == (2, 3)
    (turn,) = rollout(p, [Task("hello")], group_size=1, sampling=Sampling(max_tokens=2))[0][0].turns
    assert turn.details.top_ids is None
    assert turn.details.filtered_mass is None


def test_rows_that_are_done_do_not_change():
    state = blank(2, Rules(Sampling()), None)
    state |= {"left": mx.array([5, 1]), "done": mx.array([True, False])}
    state, _ = draw(mx.zeros((2, 10)), state, Rules(Sampling()))
    assert state["drawn"].tolist() == [0, 1]
    assert state["left"].tolist() == [5, 0]
    assert state["done"].tolist() == [True, True]


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
