"""pass@k, and the paired comparison of two evaluations, with numbers worked out by hand."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from mlxrl.train import comparison
from mlxrl.train.comparison import Scores, compare, mcnemar, pass_at, pass_at_k

SAME = {"difference": 0.0, "interval": [0.0, 0.0]}


def scores(*rewards: float) -> Scores:
    return Scores("of these examples", rewards)


def test_pass_at_k_is_the_unbiased_estimate():
    """Of 5 samples 2 are right: 10 pairs, of which C(3, 2) = 3 have none that is."""
    assert [pass_at_k(5, 2, k) for k in (1, 2, 3, 4)] == pytest.approx([0.4, 0.7, 0.9, 1.0])
    assert (pass_at_k(3, 0, 3), pass_at_k(3, 1, 3)) == (0.0, 1.0)


def test_pass_at_k_is_the_mean_over_examples_with_k_scored_samples():
    samples = [[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, math.nan], [math.nan] * 4]
    assert pass_at(1, samples, 1.0) == pytest.approx((0.5 + 0) / 2)
    assert pass_at(2, samples, 1.0) == pytest.approx((5 / 6 + 0) / 2)  # C(2, 2) / C(4, 2) = 1 / 6 have none
    assert pass_at(4, samples, 1.0) == 1.0  # of the first alone
    assert pass_at(2, samples, 0.0) == 1.0
    assert math.isnan(pass_at(5, samples, 1.0))


def test_mcnemars_p_is_that_of_a_fair_coin():
    """6 discordant pairs, 1 of them worsened: 2 (C(6, 0) + C(6, 1)) / 64 = 14 / 64."""
    assert mcnemar(5, 1) == mcnemar(1, 5) == pytest.approx(14 / 64)
    assert mcnemar(0, 5) == pytest.approx(2 / 32)
    assert mcnemar(0, 0) == mcnemar(3, 3) == 1.0
    assert 0 < mcnemar(900, 600) < 1e-13  # integers of thousands of bits


def test_counts_and_p_stand_beside_the_difference():
    found = compare(scores(0, 0, 0, 0, 0, 1, 1, 1), scores(1, 1, 1, 1, 1, 0, 1, 1))
    assert {**found, "interval": None} == {
        "difference": 0.5, "interval": None, "improved": 5, "worsened": 1, "equal": 2, "mcnemar_p": 14 / 64,
    }  # fmt: skip
    assert found["interval"][0] < 0.5 < found["interval"][1]


def test_without_zeros_and_ones_alone_there_is_no_p():
    found = compare(scores(0.5, 1.0), scores(0.75, 1.0))
    assert (found["improved"], found["worsened"], found["equal"]) == (1, 0, 1)
    assert "mcnemar_p" not in found


def test_what_falls_short_by_rounding_does_not_differ():
    rounded = scores(0.7 + 0.2 + 0.1, 1.0 - 1e-15)
    counts = {"improved": 0, "worsened": 0, "equal": 2, "mcnemar_p": 1.0}
    assert compare(rounded, scores(1.0, 1.0)) == {**SAME, **counts}


def test_pairs_are_of_what_was_scored_in_both():
    before, after = scores(0.0, math.nan, 0.0), scores(1.0, 1.0, math.nan)
    counts = {"improved": 1, "worsened": 0, "equal": 0, "mcnemar_p": 1.0}
    assert compare(before, after) == {"difference": 1.0, "interval": [1.0, 1.0], **counts, "pairs": 1}
    nothing = compare(scores(math.nan), scores(1.0))
    assert (nothing["pairs"], nothing["improved"], math.isnan(nothing["difference"])) == (0, 0, True)


def test_the_interval_of_a_paired_difference(monkeypatch):
    """100 pairs of which 40 go from 0 to 1: mean 0.4, standard error sqrt(0.4 * 0.6 / 100) = 0.049."""
    pair = scores(*[0.0] * 100), scores(*[1.0] * 40, *[0.0] * 60)
    result = compare(*pair)
    assert result["difference"] == pytest.approx(0.4)
    assert result["interval"][0] == pytest.approx(0.4 - 1.96 * 0.049, abs=0.015)
    assert result["interval"][1] == pytest.approx(0.4 + 1.96 * 0.049, abs=0.015)
    monkeypatch.setattr(comparison, "DRAWN_AT_ONCE", 70_000)  # in pieces of 700 resamples, the last a smaller one
    assert compare(*pair) == result


def test_another_order_of_pairs_is_another_comparison():
    """The difference of each example counts, and not only that of the means."""
    paired = compare(scores(0, 1, 0, 1), scores(0.1, 1.1, 0.1, 1.1))
    crossed = compare(scores(0, 1, 0, 1), scores(1.1, 0.1, 1.1, 0.1))
    assert paired["interval"] == pytest.approx([0.1, 0.1])
    assert crossed["difference"] == pytest.approx(0.1)
    assert crossed["interval"][0] < 0 < crossed["interval"][1]


def test_other_examples_are_refused():
    message = "compare: the two evaluations are not of the same examples"
    for other in (Scores("of others", (1.0,)), scores(1.0, 0.0)):
        with pytest.raises(ValueError, match=message):
            compare(scores(1.0), other)


def test_scores_come_back_from_strict_json():
    one = Scores("digest", (1.0, math.nan, 0.1 + 0.2), ((1.0, 0.0), (math.nan, 0.25), (0.0, 0.0)))
    text = json.dumps(one.as_json(), allow_nan=False)
    assert json.loads(text)["rewards"] == [1.0, None, 0.1 + 0.2]
    again = Scores.of_json(json.loads(text))
    np.testing.assert_array_equal(again.rewards, one.rewards)  # the same bits, NaN in the same places
    np.testing.assert_array_equal(again.samples, one.samples)
    assert (again.examples, again.mean) == ("digest", pytest.approx(0.65))
    assert "samples" not in scores(1.0).as_json()
