"""Evaluations, and the comparison of two of the same examples."""

from __future__ import annotations

import math

import pytest

from helpers import a_policy, calls, length
from mlxrl.policy.policy import as_policy
from mlxrl.rollout import chat
from mlxrl.settings import Sampling
from mlxrl.train.comparison import compare
from mlxrl.train.evaluate import Evaluation, evaluate
from mlxrl.types import Task, Trajectory
from models import dense, tokenizer


def evaluation(rewards: list[float]) -> Evaluation:
    """An evaluation of so many examples, with these rewards."""
    return Evaluation(tuple(Trajectory(Task(str(number)), (), reward) for number, reward in enumerate(rewards)))


def test_greedy_evaluation_is_the_same_twice_and_pairs_compare():
    p = a_policy()
    tasks = [Task(text) for text in ("one", "two", "three")]
    first, second = (evaluate(p, tasks, length, sampling=Sampling(max_tokens=5, temperature=0.0)) for _ in range(2))
    assert first.rewards == second.rewards
    assert [one.task for one in first.trajectories] == tasks
    same = {"difference": 0.0, "interval": [0.0, 0.0], "improved": 0, "worsened": 0, "equal": 3}
    assert compare(first, second).items() >= same.items()
    assert compare(first.scores, second.scores) == compare(first, second)


def test_a_summary_is_over_what_could_be_scored_and_says_what_could_not():
    tasks = [Task(text, {"answer": answer}, where=f"line {answer}") for answer, text in enumerate("abcd")]

    def odd(completions, answer):
        return [float(one) if one < 2 else ZeroDivisionError("by nothing") if one == 2 else math.nan for one in answer]

    got = evaluate(a_policy(), tasks, odd, sampling=Sampling(max_tokens=2)).summary()
    failures = [
        {"function": "odd", "error": "ZeroDivisionError: by nothing", "completions": 1, "example": "line 2"},
        {"function": "odd", "error": "returned NaN; answer is 3", "completions": 1, "example": "line 3"},
    ]
    warning = (
        "2 of 4 examples could not be scored and are left out: 'odd' failed for 2; "
        "the first: line 2: ZeroDivisionError: by nothing"
    )
    assert got == {
        "accuracy": 0.5, "mean_reward": 0.5, "n": 2, "unscored": 2, "failures": failures, "warning": warning,
    }  # fmt: skip
    assert evaluation([1.0, 0.5]).summary(success=0.5) == {"accuracy": 1.0, "mean_reward": 0.75, "n": 2, "unscored": 0}


def test_what_falls_short_by_rounding_succeeds():
    assert evaluation([0.7 + 0.2 + 0.1, 1.0 - 1e-15, 1.0 - 1e-6]).summary()["accuracy"] == pytest.approx(2 / 3)


def test_what_cannot_be_evaluated_or_compared_is_refused():
    with pytest.raises(ValueError, match="evaluate: wanted at least one task, got none"):
        evaluate(a_policy(), [], length)
    with pytest.raises(ValueError, match="evaluate: samples: wanted a whole number of at least 0, got -1"):
        evaluate(a_policy(), [Task("one")], length, samples=-1)
    with pytest.raises(ValueError, match="evaluate: samples_temperature: wanted at least 1e-06, got 0"):
        evaluate(a_policy(), [Task("one")], length, samples=2, samples_temperature=0)
    other = Evaluation((Trajectory(Task("0", {"answer": 1}), (), 1.0),))  # of the same prompt
    for strange in (evaluation([1.0, 0.0]), other):
        with pytest.raises(ValueError, match="compare: the two evaluations are not of the same examples"):
            compare(evaluation([1.0]), strange)


def test_samples_are_drawn_beside_the_greedy_completion_and_by_the_same_keys_again():
    p, tasks = a_policy(), [Task(text) for text in ("one", "two", "three")]
    alone = evaluate(p, tasks, length, sampling=Sampling(max_tokens=5, temperature=0.0))
    first, second = (
        evaluate(p, tasks, length, sampling=Sampling(max_tokens=5, temperature=0.0), samples=5, samples_temperature=0.5)
        for _ in range(2)
    )
    assert [one.turns for one in first.trajectories] == [one.turns for one in alone.trajectories]
    assert [len(group) for group in first.samples] == [5, 5, 5]
    assert len({one.text for group in first.samples for one in group}) > 3
    assert {one.sampling.temperature for group in first.samples for one in group} == {0.5}
    assert first.scores == second.scores
    assert first.scores.samples == tuple(tuple(one.reward for one in group) for group in first.samples)
    assert "samples" not in alone.scores.as_json()


def test_a_summary_of_samples_has_pass_at_powers_of_two_and_at_their_number():
    def group(*rewards):
        return tuple(Trajectory(Task("0"), (), reward) for reward in rewards)

    found = Evaluation(evaluation([1.0]).trajectories, 0, (group(1.0, 0.0, 0.0, 0.0, 1.0),)).summary()
    passes = {"pass@1": 0.4, "pass@2": 0.7, "pass@4": 1.0, "pass@5": 1.0}
    assert found == pytest.approx({"accuracy": 1.0, "mean_reward": 1.0, **passes, "n": 1, "unscored": 0})
    failed = Evaluation(evaluation([1.0]).trajectories, 0, (group(1.0, math.nan),)).summary()
    assert (failed["pass@1"], failed["samples_unscored"]) == (1.0, 1)
    assert math.isnan(failed["pass@2"])


def test_prompts_that_fill_the_context_are_left_out_and_not_wrong():
    p = as_policy(dense(max_position_embeddings=32), tokenizer(), lora=None)
    tasks = [{"prompt": "1+1"}, {"prompt": "1+" * 40}]

    def ones(completions, **_):
        return [1.0] * len(completions)

    with pytest.warns(UserWarning, match="1 of 2 are left out"):
        found = evaluate(p, tasks, ones, sampling=Sampling(max_tokens=2))
    assert {name: found.summary()[name] for name in ("accuracy", "n", "left_out")} == {
        "accuracy": 1.0, "n": 1, "left_out": 1,
    }  # fmt: skip


def test_an_evaluation_is_printed_in_a_line():
    assert repr(evaluation([1.0, 0.0, 1.0])) == "Evaluation(accuracy 0.6667, mean_reward 0.6667, n 3, unscored 0)"
    assert repr(Evaluation(())) == "Evaluation()"


def test_prompts_of_the_same_tasks_are_rendered_for_their_length_once(monkeypatch):
    rendered = calls(monkeypatch, chat, "render")
    p, tasks = a_policy(), (Task("1+1"), Task("2+2"))
    for _ in range(3):
        evaluate(p, tasks, length, sampling=Sampling(max_tokens=2, temperature=0.0))
    assert len(rendered) == len(tasks)
    evaluate(p, list(tasks), length, sampling=Sampling(max_tokens=2, temperature=0.0))
    assert len(rendered) == 2 * len(tasks)  # a list may have changed
