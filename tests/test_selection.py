"""Which adapter is chosen by data.validation, with scores worked out by hand."""

from __future__ import annotations

import json
import math

import pytest

from mlxrl.runs.selection import Selection
from mlxrl.train.comparison import AnswerLosses, Scores

NOTHING = Selection()


def scores(*rewards: float) -> Scores:
    return Scores("of these examples", rewards)


def after(*evaluations: Scores, margin: float | None = None) -> Selection:
    """The selection after an evaluation every five steps, the first before training."""
    selection = NOTHING
    for number, found in enumerate(evaluations):
        selection, _ = selection.judged(5 * number, found, margin)
    return selection


def test_the_best_is_the_first_with_the_highest_mean_on_the_same_examples():
    low, high = scores(0, 0, 1, 0), scores(0, 1, 1, 0)
    assert after(low) == Selection(low, step=0, since=0, accepted=0, evaluated=0)
    assert after(low, high) == Selection(high, step=5, since=0, accepted=5, evaluated=5)
    assert after(low, high, low, scores(1, 0, 0, 1)) == Selection(high, step=5, since=2, accepted=15, evaluated=15)
    assert after(high, low, low, low).since == 3


def test_what_is_higher_by_rounding_is_no_improvement():
    selection = after(scores(0.7 + 0.2 + 0.1, 0), scores(1.0, 0), scores(1.0, 1e-13))
    assert (selection.step, selection.since) == (0, 2)


def test_an_example_that_could_not_be_scored_gives_no_improvement():
    """The mean of what was scored is 0.5 and then 1, over examples of which one has become worse."""
    before, now = scores(1.0, 0.0, 1.0, 0.0), scores(1.0, math.nan, 0.9, math.nan)
    assert after(before, now).step == 0


def test_an_adapter_is_rejected_where_the_whole_interval_lies_below_the_margin():
    """20 examples of which 10 become worse: difference -0.5, an interval of about -0.7 to -0.25."""
    best, worse = scores(*[1.0] * 20), scores(*[1.0] * 10, *[0.0] * 10)
    selection, verdict = after(best, margin=0.1).judged(5, worse, 0.1)
    assert (verdict["decision"], verdict["difference"], verdict["margin"]) == ("rejected", -0.5, 0.1)
    assert -0.75 < verdict["interval"][0] < verdict["interval"][1] < -0.2
    assert selection == Selection(best, step=0, since=1, accepted=0, evaluated=5)
    selection, verdict = after(best, margin=0.4).judged(5, worse, 0.4)  # may be -0.25 by chance
    assert verdict["decision"] == "accepted"
    assert selection == Selection(best, step=0, since=1, accepted=5, evaluated=5)
    assert "decision" not in after(best).judged(5, worse)[1]


def test_small_losses_are_held_against_the_best_and_not_the_last():
    """Each step loses 0.1 on every example, within the margin of 0.15; the second is 0.2 below the best."""
    first, second, third = (scores(*[1.0 - loss] * 8) for loss in (0.0, 0.1, 0.2))
    assert after(first, second, margin=0.15).accepted == 5
    selection, verdict = after(first, second, margin=0.15).judged(10, third, 0.15)
    assert verdict["decision"] == "rejected"
    assert (selection.accepted, selection.step) == (5, 0)


def test_an_improvement_is_accepted_at_a_margin_of_nothing():
    selection = after(scores(0, 0), scores(0, 1), margin=0.0)
    assert (selection.step, selection.accepted) == (5, 5)


def test_other_examples_are_refused():
    with pytest.raises(ValueError, match="not of the same examples"):
        after(scores(1.0), Scores("of others", (1.0,)))


def test_a_selection_comes_back_from_strict_json():
    selection = after(scores(0.1, math.nan), scores(0.1 + 0.2, 0.5), scores(0, 0), margin=0.1)
    again = Selection.of_json(json.loads(json.dumps(selection.as_json(), allow_nan=False)))
    assert again == selection
    assert Selection.of_json({}) == Selection.of_json(json.loads(json.dumps(NOTHING.as_json()))) == NOTHING


def test_without_rewards_the_lower_loss_is_the_better_one():
    """Losses of two answers, of 2 and 6 tokens: means 1.5, 1.0 and 2.0 over the 8 tokens."""
    first, better, worse = (Scores("x", (), (), AnswerLosses("x", losses, (2, 6)))
                            for losses in ((4.0, 8.0), (2.0, 6.0), (4.0, 12.0)))  # fmt: skip
    begun, _ = Selection().judged(0, first, margin=0.1)
    after, verdict = begun.judged(5, better, margin=0.1)
    assert (after.step, after.since, verdict["decision"]) == (5, 0, "accepted")
    assert verdict["loss_difference"] == -0.5
    # -2 nats in 2 tokens, -2 in 6: resamples are between -1 and -1/3
    assert verdict["loss_interval"] == [-1.0, pytest.approx(-1 / 3)]
    again, verdict = after.judged(10, worse, margin=0.1)
    assert (again.step, again.since, again.accepted, verdict["decision"]) == (5, 1, 5, "rejected")
    assert Selection.of_json(again.as_json()) == again
    assert again.best is not None
    assert again.best.measure == {"loss": 1.0}
