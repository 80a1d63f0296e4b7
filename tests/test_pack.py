"""How rows are laid out in passes."""

from __future__ import annotations

from itertools import pairwise

import mlx.optimizers as optim
import numpy as np
import pytest

from helpers import a_policy, assert_same_gradient, made, with_tasks
from helpers import rows as chosen
from mlxrl.algo.recipes import grpo, opd
from mlxrl.train.pack import PASS, SHARE_FROM, _cuts, pack
from mlxrl.train.step import fill, gradient, update
from mlxrl.train.teacher import Teacher
from mlxrl.train.units import units
from mlxrl.types import Batch
from models import dense


def drawn(rows: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, 65, size=rows).tolist()


def spent(batch: Batch) -> int:
    return sum(m.tokens.size for m in batch) + sum(unit[0].prefix.size for unit in units(batch.micro_batches))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("prompt", [1, 100])
def test_less_than_a_fifth_is_padding_where_lengths_differ_as_much_as_they_can(prompt, seed):
    """Four groups of eight rows of 1 to 64 tokens, with the prompt in front and behind a shared prompt."""
    groups = [
        made([1.0, 0.0] * 4, prompt=prompt, seed=group, lengths=drawn(8, 10 * seed + group)) for group in range(4)
    ]
    batch = pack(groups, grpo())
    shares = prompt * 7 >= SHARE_FROM
    repeated = sum(0 if shares else prompt for group in groups for _ in group)
    real = sum(t.length for group in groups for t in group) + (4 * prompt if shares else repeated)
    assert all((m.prefix.size > 0) == shares for m in batch)
    assert 1 - real / spent(batch) < 0.2


@pytest.mark.parametrize("seed", range(5))
def test_no_other_cut_costs_less(seed):
    """Against all 2^7 ways to cut eight sorted rows."""
    lengths = sorted(drawn(8, seed))

    def cost(cuts: list[tuple[int, int]]) -> int:
        return sum((end - start) * lengths[end - 1] + PASS for start, end in cuts)

    every = []
    for code in range(2**7):
        ends = [0, *[place for place in range(1, 8) if code >> (place - 1) & 1], 8]
        cuts = list(pairwise(ends))
        if all(end - start == 1 or (end - start) * lengths[end - 1] <= 150 for start, end in cuts):
            every.append(cost(cuts))
    got = _cuts(lengths, 150)
    assert cost(got) == min(every)
    assert [start for start, _ in got] == [0, *[end for _, end in got[:-1]]]


def test_a_group_is_split_only_when_it_must_be_or_when_that_saves_more_than_it_costs():
    even = [made([1.0, 0.0] * 4, lengths=[30] * 8)]
    assert len(pack(even, grpo())) == 1
    assert len(pack(even, grpo(), tokens_per_pass=90 + 8 * 30)) == 1
    assert len(pack(even, grpo(), tokens_per_pass=90 + 8 * 30 - 1)) == 2
    # Seven rows of 4 tokens and one of 60: 8 * 60 = 480 padded tokens, or 7 * 4 + 60 + a pass.
    assert len(pack([made([1.0, 0.0] * 4, lengths=[4] * 7 + [60])], grpo())) == 2
    # Of 10 and 16 tokens: six saved by each of seven rows are fewer than a pass costs.
    assert len(pack([made([1.0, 0.0] * 4, lengths=[10] * 7 + [16])], grpo())) == 1


def test_a_pass_stays_within_its_budget_and_a_single_row_may_exceed_it():
    groups = [made([1.0, 0.0] * 4, prompt=5, seed=g, lengths=drawn(8, g)) for g in range(3)]
    for budget in (20, 70, 200, 1000):
        for m in pack(groups, grpo(), tokens_per_pass=budget):
            assert m.tokens.size <= budget or m.tokens.shape[0] == 1


def test_every_row_is_there_once_in_passes_of_any_size():
    groups = [made([1.0, 0.0] * 4, prompt=prompt, seed=g, lengths=drawn(8, g)) for g, prompt in enumerate((5, 90))]
    for budget in (1, 150, 10_000):
        rows = [row for m in pack(groups, grpo(), tokens_per_pass=budget) for row in m.trajectories]
        assert sorted(rows) == list(range(16))


def test_the_layout_does_not_change_the_gradient():
    p, algo = a_policy(dense), grpo()
    groups = [made([1.0, 0.0] * 4, prompt=prompt, seed=g, lengths=drawn(8, g)) for g, prompt in enumerate((5, 90))]
    wanted = gradient(p, pack(groups, algo, tokens_per_pass=10_000), algo)[1]
    for budget in (1, 200):
        assert_same_gradient(gradient(p, pack(groups, algo, tokens_per_pass=budget), algo)[1], wanted)


def test_a_row_that_is_too_long_is_cut_and_says_what_was_lost():
    """Prompts of 90 tokens and rows of 4, 10 and 30: at 100 tokens the last loses 20, at 92 they lose 2, 8 and 28."""
    p, algo = a_policy(dense), grpo()
    group = [made([1.0, 0.0, 0.3], lengths=[4, 10, 30])]
    whole, some, most = (pack(group, algo, max_tokens_per_row=limit) for limit in (120, 100, 92))
    assert (whole.dropped_tokens, some.dropped_tokens, most.dropped_tokens) == ({}, {2: 20}, {0: 2, 1: 8, 2: 28})
    assert some.totals == whole.totals
    assert sum(m.mask.sum().item() for m in some) == 24
    assert {m.prefix.size + m.tokens.shape[1] for m in most} == {92}
    none = pack(group, algo, max_tokens_per_row=90)
    assert (len(none), none.totals.without_signal, none.dropped_tokens) == (0, 3, {0: 4, 1: 10, 2: 30})
    metrics = update(p, optim.SGD(0.0), some, algo)
    assert metrics["policy/cut_tokens"] == 20
    assert "policy/cut_tokens" not in update(p, optim.SGD(0.0), whole, algo)


@pytest.mark.parametrize("name", ["tokens_per_pass", "max_tokens_per_row"])
def test_a_bound_of_nothing_is_refused(name):
    with pytest.raises(ValueError, match=f"pack: {name}: wanted at least 1, got 0"):
        pack([made([1.0, 0.0])], grpo(), **{name: 0})


@pytest.mark.parametrize("hint", [None, "hint"])
@pytest.mark.parametrize("size", [2, 9])
def test_a_teacher_judges_what_is_left_of_a_cut_row(size, hint):
    """Under a hinted prompt rows are laid out anew, and cut after the same token."""
    p, algo = a_policy(dense), opd()
    group = with_tasks(made([float(n) for n in range(size)], lengths=list(range(3, 3 + size))))
    judge = Teacher(p, hint=hint)
    whole, cut = (
        pack([group], algo, max_tokens_per_row=None if limit is None else len(group[0].prompt) + limit)
        for limit in (None, 4)
    )
    assert sum(cut.dropped_tokens.values()) == sum(max(n - 4, 0) for n in range(3, 3 + size))
    wanted, got = (
        chosen(fill(p, batch, frozenset({"teacher"}), algo=algo, teacher=judge), "teacher_logprobs")
        for batch in (whole, cut)
    )
    for row, values in got.items():
        assert len(values) == min(3 + row, 4)
        np.testing.assert_allclose(values, wanted[row][: len(values)], rtol=1e-5, atol=2e-5)
