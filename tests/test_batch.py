"""How the sequences of a step are laid out in passes, and what is counted of them."""

from __future__ import annotations

from itertools import pairwise

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest

from helpers import a_policy, assert_same_gradient, flat, made
from mlxrl.algo.recipes import grpo
from mlxrl.policy.prefix import by_prefix
from mlxrl.settings import Train
from mlxrl.train.batch import PASS, SHARE_FROM, make_batch
from mlxrl.train.gradient import gradient
from mlxrl.train.update import update
from mlxrl.types import Batch
from models import dense


def lengths_of(sequences: int, seed: int) -> list[int]:
    """Lengths from 1 to 64 tokens."""
    return np.random.default_rng(seed).integers(1, 65, size=sequences).tolist()


def computed(batch: Batch) -> int:
    """Tokens of all passes, padding included; a shared prefix counts once."""
    prefixes = sum(together[0].prefix.size for together in by_prefix(batch.micro_batches))
    return sum(m.tokens.size for m in batch) + prefixes


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("prompt", [1, 100])
def test_less_than_a_fifth_is_padding_where_lengths_differ_as_much_as_they_can(prompt, seed):
    """Four groups of eight sequences of 1 to 64 tokens, with the prompt in front and after a shared prompt."""
    groups = [
        made([1.0, 0.0] * 4, prompt=prompt, seed=group, lengths=lengths_of(8, 10 * seed + group)) for group in range(4)
    ]
    batch = make_batch(groups, grpo())
    shares = prompt * 7 >= SHARE_FROM
    repeated = sum(0 if shares else prompt for group in groups for _ in group)
    real = sum(t.length for group in groups for t in group) + (4 * prompt if shares else repeated)
    assert all((m.prefix.size > 0) == shares for m in batch)
    assert 1 - real / computed(batch) < 0.2


@pytest.mark.parametrize("seed", range(5))
def test_no_other_cut_costs_less(seed):
    """Against all 2^7 ways to cut eight sorted sequences into passes of at most 150 padded tokens."""
    lengths = sorted(lengths_of(8, seed))

    def cost(cuts: list[tuple[int, int]]) -> int:
        return sum((end - start) * lengths[end - 1] + PASS for start, end in cuts)

    every = []
    for code in range(2**7):
        ends = [0, *[place for place in range(1, 8) if code >> (place - 1) & 1], 8]
        cuts = list(pairwise(ends))
        if all(end - start == 1 or (end - start) * lengths[end - 1] <= 150 for start, end in cuts):
            every.append(cost(cuts))
    group = made([1.0, 0.0] * 4, prompt=90, lengths=lengths)
    batch = make_batch([group], grpo(), Train(tokens_per_pass=90 + 150))
    assert sum(m.tokens.size + PASS for m in batch) == min(every)
    assert [number for m in batch for number in m.trajectories] == list(range(8))


def test_a_group_is_split_only_when_it_must_be_or_when_that_saves_more_than_it_costs():
    even = [made([1.0, 0.0] * 4, lengths=[30] * 8)]
    assert len(make_batch(even, grpo())) == 1
    assert len(make_batch(even, grpo(), Train(tokens_per_pass=90 + 8 * 30))) == 1
    assert len(make_batch(even, grpo(), Train(tokens_per_pass=90 + 8 * 30 - 1))) == 2
    # Seven sequences of 4 tokens and one of 60: 8 * 60 = 480 padded tokens, or 7 * 4 + 60 + a pass.
    assert len(make_batch([made([1.0, 0.0] * 4, lengths=[4] * 7 + [60])], grpo())) == 2
    # Of 10 and 16 tokens: six saved by each of seven sequences are fewer than a pass costs.
    assert len(make_batch([made([1.0, 0.0] * 4, lengths=[10] * 7 + [16])], grpo())) == 1


def test_a_pass_stays_within_its_budget_and_a_single_sequence_may_exceed_it():
    groups = [made([1.0, 0.0] * 4, prompt=5, seed=g, lengths=lengths_of(8, g)) for g in range(3)]
    for budget in (20, 70, 200, 1000):
        for m in make_batch(groups, grpo(), Train(tokens_per_pass=budget)):
            assert m.tokens.size <= budget or m.tokens.shape[0] == 1


def test_every_sequence_is_there_once_in_passes_of_any_size():
    groups = [made([1.0, 0.0] * 4, prompt=prompt, seed=g, lengths=lengths_of(8, g)) for g, prompt in enumerate((5, 90))]
    for budget in (1, 150, 10_000):
        batch = make_batch(groups, grpo(), Train(tokens_per_pass=budget))
        assert sorted(number for m in batch for number in m.trajectories) == list(range(16))


def test_the_layout_does_not_change_the_gradient():
    p, algorithm = a_policy(dense), grpo()
    groups = [made([1.0, 0.0] * 4, prompt=prompt, seed=g, lengths=lengths_of(8, g)) for g, prompt in enumerate((5, 90))]
    wanted = gradient(p, make_batch(groups, algorithm, Train(tokens_per_pass=10_000)), algorithm)[1]
    for budget in (1, 200):
        batch = make_batch(groups, algorithm, Train(tokens_per_pass=budget))
        assert_same_gradient(gradient(p, batch, algorithm)[1], wanted)


def test_a_sequence_that_is_too_long_is_shortened_and_counts_what_was_dropped():
    """Prompts of 90 tokens, then 4, 10 and 30: at 100 tokens the last loses 20, at 92 they lose 2, 8 and 28."""
    p, algorithm = a_policy(dense), grpo()
    group = [made([1.0, 0.0, 0.3], lengths=[4, 10, 30])]
    whole, some, most = (make_batch(group, algorithm, Train(max_tokens_per_sequence=limit)) for limit in (120, 100, 92))
    assert (whole.dropped_tokens, some.dropped_tokens, most.dropped_tokens) == ({}, {2: 20}, {0: 2, 1: 8, 2: 28})
    assert some.totals == whole.totals
    assert sum(m.mask.sum().item() for m in some) == 24
    assert {m.prefix.size + m.tokens.shape[1] for m in most} == {92}
    none = make_batch(group, algorithm, Train(max_tokens_per_sequence=90))
    assert (len(none), none.totals.without_signal, none.dropped_tokens) == (0, 3, {0: 4, 1: 10, 2: 30})
    metrics = update(p, optim.SGD(0.0), some, algorithm)
    assert metrics["sequences/dropped_tokens"] == 20
    assert "sequences/dropped_tokens" not in update(p, optim.SGD(0.0), whole, algorithm)


@pytest.mark.parametrize("name", ["tokens_per_pass", "max_tokens_per_sequence"])
def test_a_bound_of_nothing_is_refused(name):
    with pytest.raises(ValueError, match=f"train: {name}: wanted a whole number of at least 1, got 0"):
        make_batch([made([1.0, 0.0])], grpo(), Train(**{name: 0}))


def test_sequences_without_signal_are_counted_and_not_computed():
    p, algorithm = a_policy(), grpo()
    flat_group, mixed = made([0.1, 0.1, 0.1], seed=1), made([1.0, 0.0, 0.0], seed=2)
    batch = make_batch([flat_group, mixed], algorithm)
    assert (batch.totals.sequences, batch.totals.without_signal, batch.totals.tokens) == (6, 3, 24)
    assert sum(m.tokens.shape[0] for m in batch) == 3
    # The mean over sequences is over 6 of them: half of what the mixed group gives alone.
    alone = gradient(p, make_batch([mixed], algorithm), algorithm)[1]
    got = gradient(p, batch, algorithm)[1]
    for name, value in flat(alone).items():
        assert mx.allclose(2 * flat(got)[name], value, rtol=1e-4, atol=1e-8), name


def test_prompt_tokens_are_not_trained_on():
    algorithm = grpo()
    batch = make_batch([made([1.0, 0.0], prompt=5)], algorithm)
    (m,) = batch.micro_batches
    assert m.prefix.size == 0
    assert m.mask[:, :5].sum().item() == 0
    assert m.mask.sum().item() == batch.totals.tokens == 7
    assert mx.abs(m.advantages[:, :5]).max().item() == 0


def test_group_of_one_is_refused_where_the_baseline_is_the_group():
    with pytest.raises(ValueError, match="group"):
        make_batch([made([1.0])], grpo())
