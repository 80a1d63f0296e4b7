"""What is drawn, from what, and with what log-prob."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest

from mlxrl.policy.policy import as_policy
from mlxrl.rollout.draw import draw, fold, key_of, sequence_keys
from mlxrl.rollout.sample import sample
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
    drawn, _ = draw(mx.broadcast_to(one, (count, vocabulary)), keys(count), Sampling(temperature=0.7))
    seen = np.bincount(np.array(drawn.tokens), minlength=vocabulary)
    chi = ((seen - count * wanted) ** 2 / (count * wanted)).sum()
    assert chi < vocabulary - 1 + 4 * math.sqrt(2 * vocabulary)
    assert np.allclose(drawn.logprobs, np.log(wanted)[np.array(drawn.tokens)], atol=1e-5)


def test_log_probs_by_hand():
    logits = mx.broadcast_to(mx.log(mx.array([0.5, 0.25, 0.25])), (20_000, 3))
    drawn, _ = draw(logits, keys(20_000), Sampling(temperature=0.5))
    # p ^ (1 / 0.5) = 1/4, 1/16, 1/16, which sums to 3/8: probabilities 2/3, 1/6, 1/6
    assert abs((drawn.tokens == 0).mean().item() - 2 / 3) < 0.01
    assert abs(drawn.logprobs.max().item() - math.log(2 / 3)) < 1e-5
    # Greedy decoding reports log-probs at temperature 1.
    assert abs(draw(logits[:1], keys(1), Sampling(temperature=0.0))[0].logprobs.item() - math.log(0.5)) < 1e-6


def test_draws_of_a_row_over_time_are_independent():
    """The next token's noise has nothing to do with this one's: pairs of fair coins are uniform."""
    logits = mx.zeros((20_000, 2))
    first, following = draw(logits, keys(20_000), Sampling())
    second, _ = draw(logits, following, Sampling())
    pairs = np.bincount(2 * np.array(first.tokens) + np.array(second.tokens), minlength=4)
    assert np.abs(pairs / 20_000 - 0.25).max() < 0.015


def test_a_token_without_probability_is_never_drawn():
    """Half of the vocabulary is ruled out, the first and last tokens of blocks among it, from peaked to flat."""
    allowed = mx.arange(320) % 2 == 1
    for scale in (0.0, 3.0, 30.0, 300.0):
        logits = mx.where(allowed, scale * mx.random.normal((4000, 320), key=mx.random.key(3)), -mx.inf)
        drawn, _ = draw(logits, keys(4000), Sampling())
        assert (drawn.tokens % 2 == 1).all().item()
        assert mx.isfinite(drawn.logprobs).all().item()


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 2.0])
@pytest.mark.parametrize("top_p", [0.01, 0.5, 1.0])
@pytest.mark.parametrize("top_k", [0, 1, 5, 320, 1000])
@pytest.mark.parametrize("min_p", [0.0, 0.5, 1.0])
def test_filters_keep_the_most_likely_and_what_they_promise(temperature, top_p, top_k, min_p):
    logits = 4 * mx.random.normal((64, 320), key=mx.random.key(0))
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    drawn, _ = draw(logits, keys(64, 1), sampling)
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
    if drawn.filtered_mass is None:
        assert top_p == 1
        assert top_k == 0
        assert min_p == 0
    else:
        assert (drawn.filtered_mass < 1 - probabilities.max(1) + 1e-5).all().item(), "the most likely is kept"


def test_filtered_mass_by_hand():
    logits = mx.log(mx.array([[0.4, 0.3, 0.2, 0.1]]))
    for sampling, lost in (
        (Sampling(top_k=3), 0.1),
        (Sampling(top_p=0.5), 0.3),  # 0.4 lies above the second token, 0.7 above the third
        (Sampling(min_p=0.5), 0.1),  # at least half of 0.4
        (Sampling(top_k=2, top_p=0.5), 0.6),  # of 4/7 and 3/7, the second has more than half above it
        (Sampling(temperature=0.5, top_k=1), 1 - 16 / 30),  # squares: 16, 9, 4, 1 of 30
    ):
        drawn, _ = draw(logits, keys(1), sampling)
        assert abs(drawn.filtered_mass.item() - lost) < 1e-6
    assert draw(logits, keys(1), Sampling())[0].filtered_mass is None


def test_the_filtered_mass_makes_a_filtered_draws_log_prob():
    """log-prob less log(1 - filtered_mass) is that of the distribution the token came from."""
    sampling = Sampling(top_k=2)
    logits = mx.broadcast_to(mx.log(mx.array([0.4, 0.3, 0.2, 0.1])), (20_000, 4))
    drawn, _ = draw(logits, keys(20_000), sampling)
    share = (drawn.tokens == 0).mean().item()
    own = mx.exp(drawn.logprobs - mx.log(1 - drawn.filtered_mass))
    assert abs(own.max().item() - 4 / 7) < 1e-5
    assert abs(share - 4 / 7) < 0.015


def test_top_ids_are_the_most_likely_with_their_log_probs():
    p = as_policy(dense(), tokenizer(), lora=LoRA())
    sampling = Sampling(max_tokens=6, temperature=0.8, num_top=5, top_k=3)
    (group,) = sample(p, [Task("hello")], group_size=3, sampling=sampling, key=2)
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
    assert draw(mx.zeros((2, 3)), keys(2), Sampling(num_top=9))[0].top_ids.shape == (2, 3)
    (turn,) = sample(p, [Task("hello")], group_size=1, sampling=Sampling(max_tokens=2))[0][0].turns
    assert turn.details.top_ids is None
    assert turn.details.filtered_mass is None


def test_keys_of_sequences_depend_on_nothing_else():
    """Sequence r of task i: made of (base, i, r) alone, so more tasks or larger groups change nobody's."""
    few, many = sequence_keys(key_of(3, 1), 2, 3), sequence_keys(key_of(3, 1), 5, 7)
    for task in range(2):
        for row in range(3):
            assert few[3 * task + row].tolist() == many[7 * task + row].tolist()
    assert len({tuple(key) for key in many.tolist()}) == 35
    assert sequence_keys(key_of(0, 0), 0, 4).shape == (0, 2)
