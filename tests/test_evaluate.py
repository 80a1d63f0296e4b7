"""Evaluations, and the comparison of two of the same examples."""

from __future__ import annotations

import math

import pytest

from helpers import a_policy, length
from mlxrl.settings import Sampling
from mlxrl.train.evaluate import Evaluation, compare, evaluate
from mlxrl.types import Task, Trajectory


def evaluation(rewards: list[float]) -> Evaluation:
    """An evaluation of so many examples, with these rewards."""
    return Evaluation(tuple(Trajectory(Task(str(number)), (), reward) for number, reward in enumerate(rewards)))


def test_greedy_evaluation_is_the_same_twice_and_pairs_compare():
    p = a_policy()
    tasks = [Task(text) for text in ("one", "two", "three")]
    first, second = (evaluate(p, tasks, length, sampling=Sampling(max_tokens=5, temperature=0.0)) for _ in range(2))
    assert first.rewards == second.rewards
    assert [one.task for one in first.trajectories] == tasks
    assert compare(first, second) == {"difference": 0.0, "interval": [0.0, 0.0]}


def test_a_summary_counts_rewards_that_failed_as_nothing():
    assert evaluation([1.0, 0.5, math.nan, 0.0]).summary() == {"accuracy": 0.25, "mean_reward": 0.375, "n": 4}
    assert evaluation([1.0, 0.5, math.nan, 0.0]).summary(success=0.5)["accuracy"] == 0.5


def test_the_interval_of_a_paired_difference():
    """100 pairs of which 40 go from 0 to 1: mean 0.4, standard error sqrt(0.4 * 0.6 / 100) = 0.049."""
    result = compare(evaluation([0.0] * 100), evaluation([1.0] * 40 + [0.0] * 60))
    assert result["difference"] == pytest.approx(0.4)
    assert result["interval"][0] == pytest.approx(0.4 - 1.96 * 0.049, abs=0.015)
    assert result["interval"][1] == pytest.approx(0.4 + 1.96 * 0.049, abs=0.015)


def test_what_cannot_be_evaluated_or_compared_is_refused():
    with pytest.raises(ValueError, match="evaluate: wanted at least one task, got none"):
        evaluate(a_policy(), [], length)
    with pytest.raises(ValueError, match="compare: the two evaluations are not of the same examples"):
        compare(evaluation([1.0]), evaluation([1.0, 0.0]))


def test_an_evaluation_is_printed_in_a_line():
    assert repr(evaluation([1.0, 0.0, 1.0])) == "Evaluation(accuracy 0.6667, mean_reward 0.6667, n 3)"
    assert repr(Evaluation(())) == "Evaluation()"
