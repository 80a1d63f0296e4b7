"""What a user gives as reward, and the scoring of groups."""

import math

import numpy as np
import pytest

from helpers import a_policy
from mlxrl import rewards
from mlxrl.checked import SettingError
from mlxrl.plugins import PluginError
from mlxrl.rewards import RewardError, Rewards, best_and_worst, require_scores, rewards_of, score
from mlxrl.rewards.scoring import check_columns
from mlxrl.settings import Reward, Sampling
from mlxrl.train.evaluate import evaluate
from mlxrl.types import Task, Trajectory, Turn


def completion(text, prompt="1+1", **columns):
    return Trajectory(Task(prompt, columns), (Turn((1,), (2,), (0.0,), text),))


def group(*texts, **columns):
    return tuple(completion(text, **columns) for text in texts)


def test_a_function_is_called_once_with_all_completions_in_order():
    calls = []

    def reward(prompts, completions, answer, **rest):
        calls.append((prompts, completions, answer, rest))
        return [float(c == a) for c, a in zip(completions, answer, strict=True)]

    scored = score([group("a", "b", answer="a"), group("c", answer="d", level=1)], reward)
    assert calls == [(["1+1"] * 3, ["a", "b", "c"], ["a", "a", "d"], {"level": [None, None, 1]})]
    assert [[one.reward for one in own] for own in scored] == [[1.0, 0.0], [0.0]]
    assert scored[0][0].rewards == {"reward": 1.0}


def test_messages_reach_a_function_as_messages_that_it_may_change():
    prompt = ({"role": "user", "content": "hi"},)
    seen = []

    def spoil(prompts, completions):
        seen.append((str(prompts), str(completions)))
        prompts[0][0]["content"] = completions[0][0]["content"] = "spoilt"
        return [0.0]

    scored = score([(completion("yes", prompt),)], [spoil, lambda **given: spoil(**given)])
    assert seen == [("[[{'role': 'user', 'content': 'hi'}]]", "[[{'role': 'assistant', 'content': 'yes'}]]")] * 2
    assert scored[0][0].task.prompt == prompt


def test_the_reward_is_the_weighted_sum_and_the_parts_are_kept():
    def short(completions):
        return np.array([len(text) for text in completions], dtype=np.float32)

    def is_b(completions):
        return [text == "b" for text in completions]

    one, two = score([group("b", "long")], Reward(functions=(short, is_b), weights=(0.5, 2)))[0]
    assert one.weights == {"short": 0.5, "is_b": 2.0}
    assert (one.reward, dict(one.rewards)) == (0.5 * 1 + 2 * 1, {"short": 1.0, "is_b": 1.0})
    assert (two.reward, dict(two.rewards)) == (0.5 * 4, {"short": 4.0, "is_b": 0.0})


def test_none_is_left_out_of_the_sum_and_nan_and_infinity_fail():
    def mixed(completions):
        return [None, float("nan"), float("inf"), 1]

    def two(completions):
        return [2.0] * 4

    together = [one.reward for one in score([group(*"abcd")], [mixed, two])[0]]
    alone = [one.reward for one in score([group(*"abcd")], mixed)[0]]
    np.testing.assert_equal(together, [2.0, math.nan, math.nan, 3.0])
    np.testing.assert_equal(alone, [math.nan, math.nan, math.nan, 1.0])


def test_only_the_completions_that_raise_are_lost():
    sizes = []

    def fragile(completions, answer):
        sizes.append(len(completions))
        return [1 / int(text) for text in completions]

    scored = score([group("2", "x", answer=1), group("0", "4")], fragile)
    np.testing.assert_equal([one.reward for own in scored for one in own], [0.5, math.nan, math.nan, 0.25])
    assert sizes == [4, 1, 1, 1, 1]


def test_a_function_that_always_raises_ends_the_run_with_its_name():
    def broken(completions):
        raise KeyError("total\nmess")

    for texts in (("a", "b"), ("a",)):
        with pytest.raises(
            RewardError, match=r"'broken' raised for each of \d completions: KeyError: 'total"
        ) as caught:
            score([group(*texts)], broken)
        assert "\n" not in str(caught.value)


def test_ctrl_c_in_a_function_is_not_a_failed_sample():
    def slow(completions):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score([group("a", "b")], slow)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0], "'odd': wanted 2 numbers, one per completion, got 1"),
        (1.0, "'odd': wanted a list of 2 numbers, got 1.0"),
        ("ab", "reward 'odd': wanted a list of 2 numbers, got .ab."),
        ({0: 1.0, 1: 2.0}, "'odd': wanted a list of 2 numbers, got {.0.: 1.0, .1.: 2.0}"),
        ([[1.0], [2.0]], r"'odd': wanted a number per completion, got \[1.0\]"),
        (["1", "2"], "'odd': wanted a number per completion, got .1."),
        (np.ones((2, 1)), r"'odd': wanted a number per completion, got \[1.0\]"),
    ],
)
def test_what_is_not_a_number_per_completion_is_refused(returned, message):
    def odd(completions):
        return returned

    with pytest.raises(RewardError, match=message):
        score([group("a", "b")], odd)


def zero(completions, **_):
    return [0.0] * len(completions)


def also_zero(completions, **_):
    return zero(completions)


def test_a_reward_is_a_function_several_or_settings():
    both = Rewards((zero, also_zero), (1.0, 1.0))
    assert rewards_of(None) == rewards_of(()) == Rewards()
    assert rewards_of(zero) == rewards_of([zero]) == rewards_of(Reward(functions=(zero,))) == Rewards((zero,), (1.0,))
    assert rewards_of([zero, also_zero]) == rewards_of(both) == both
    assert rewards_of(Reward(functions=(zero, "mlxrl.rewards:contains"), weights=(0, -2))) == Rewards(
        (zero, rewards.contains), (0.0, -2.0)
    )


def test_functions_of_one_name_are_numbered():
    class Length:
        def __call__(self, completions):
            return [float(len(text)) for text in completions]

    def f_2(completions):
        return [2.0]

    def f(value):
        def f(completions):
            return [value]

        return f

    functions = [f(1.0), f_2, f(3.0), Length(), Length()]
    (one,) = score([group("b")], functions)[0]
    assert dict(one.rewards) == {"f": 1.0, "f_2": 2.0, "f_3": 3.0, "Length": 1.0, "Length_2": 1.0}
    assert list(one.weights) == list(one.rewards)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"functions": (zero,), "weights": (1, 2)}, "reward: weights: wanted 1, one per function, got 2"),
        ({"weights": (1,)}, "reward: weights: wanted 0, one per function, got 1"),
        ({"functions": (zero,), "weights": (0,)}, "reward: weights: wanted numbers that are not all 0, got [0.0]"),
        ({"functions": (zero,), "weights": (math.nan,)}, "reward: weights: wanted a list, each a number, got [NaN]"),
        ({"functions": (zero, zero)}, "reward: functions: <function zero"),
    ],
)
def test_weights_are_one_finite_number_each_and_not_all_zero(settings, message):
    with pytest.raises(SettingError) as found:
        Reward(**settings)
    assert str(found.value).startswith(message)


def test_what_is_no_function_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kinds.py").write_text("limit = 3\nclass Box: ...\n")
    for name, kind in (("limit", "int"), ("Box", "type")):
        with pytest.raises(RewardError) as found:
            rewards_of(Reward(functions=(f"kinds.py:{name}",)))
        assert str(found.value) == f"reward: functions: 'kinds.py:{name}': wanted a function, got a {kind}"
    with pytest.raises(PluginError, match=r"reward: functions: 'kinds\.py:limt': kinds\.py has no 'limt'; did"):
        rewards_of(Reward(functions=("kinds.py:limt",)))
    with pytest.raises(RewardError, match="reward: functions: 'Task': wanted a function, got a type"):
        rewards_of(Task)
    with pytest.raises(SettingError, match="reward: functions: wanted functions, or their names, got 3"):
        rewards_of([3])  # pyright: ignore
    with pytest.raises(RewardError, match="reward: wanted at least one function, got none"):
        score([group("a")])


def test_without_completions_no_function_is_called():
    assert score([(), ()], lambda completions: 1 / 0) == ((), ())


def test_numbers_that_are_no_floats_and_errors_that_cannot_be_shown():
    class Mute(Exception):
        def __str__(self):
            raise ValueError

    def mute(completions):
        raise Mute

    scored = score([group("a", "b", "c")], lambda completions: [10**400, 0, True])[0]
    np.testing.assert_equal([one.reward for one in scored], [math.nan, 0.0, 1.0])
    with pytest.raises(RewardError, match="reward 'mute' raised for each of 2 completions: Mute"):
        score([group("a", "b")], mute)
    with pytest.raises(RewardError, match="reward 'type': its parameters cannot be read; wrap it in a def"):
        score([group("a")], rewards_of([Unreadable()]))


class Unreadable:
    __signature__ = "none"
    __name__ = "type"

    def __call__(self, completions):
        return [1.0]


def test_what_a_function_does_to_columns_reaches_no_other_call_and_no_task():
    """Each completion has tests of its own, 3 of them, in every call and for every function."""
    columns = {"tests": ["a", "bb", "ccc"], "nested": ({"deep": [1]},), "number": 3}
    task = Task("q", columns)
    one = Trajectory(task, (Turn((1,), (2,), (0.0,), "x"),))

    def eats(completions, tests, nested, number):
        found = [float(len(own)) for own in tests]
        for own, deep in zip(tests, nested, strict=True):
            own.clear()
            deep[0]["deep"].append(2)
        assert all(len(deep[0]["deep"]) == 2 for deep in nested)
        return [value + more for value, more in zip(found, number, strict=True)]

    def also_eats(completions, **given):
        return eats(completions, **{name: given[name] for name in columns})

    for _ in range(2):
        scored = score([(one, one), (one,)], [eats, also_eats])
        assert [dict(row.rewards) for own in scored for row in own] == [{"eats": 6.0, "also_eats": 6.0}] * 3
    assert columns == {"tests": ["a", "bb", "ccc"], "nested": ({"deep": [1]},), "number": 3}
    assert scored[0][0].task is task


def test_evaluations_of_one_policy_are_alike_although_the_reward_changes_its_columns():
    def passed(completions, tests, **_):
        return [float(len(own.pop())) if own else 0.0 for own in tests]

    p, tasks = a_policy(), [Task(f"q{number}", {"tests": ["a", "bb", "ccc"]}) for number in range(2)]
    sampling = Sampling(max_tokens=2, temperature=0.0)
    assert [evaluate(p, tasks, passed, sampling=sampling).rewards for _ in range(2)] == [(3.0, 3.0)] * 2
    assert tasks[0].columns == {"tests": ["a", "bb", "ccc"]}


def test_a_step_needs_one_finite_reward():
    failed = score([group("a", "b")], lambda completions: [None, math.nan])
    with pytest.raises(RewardError, match="wanted a finite number for at least one of 2 completions, got None, NaN"):
        require_scores(failed)
    some = score([group("a", "b")], lambda completions: [None, 1.0])
    assert require_scores(some) is some


def test_best_and_worst_put_failed_ones_last():
    texts = dict(zip("abc", (0.5, math.nan, 1.0), strict=True))
    scored = score([group(*texts)], lambda completions: [texts[text] for text in completions])[0]
    assert [one.text for one in best_and_worst(scored)] == ["c", "b"]
    assert [one.text for one in best_and_worst(scored[:1])] == ["a"]


def test_a_function_is_checked_against_the_columns():
    def fine(completions, answer, level=1, **rest): ...
    def no_rest(completions): ...
    def wrong(completions, anser): ...
    def positional(completions, /): ...

    check_columns(rewards_of([fine, no_rest]), ["answer"])
    with pytest.raises(
        ValueError,
        match="'wrong': wants 'anser', but the data offer prompts, completions, answer; did you mean 'answer'",
    ):
        check_columns(rewards_of([fine, wrong]), ["answer"])
    with pytest.raises(ValueError, match="'completions' cannot be passed as a keyword"):
        check_columns(rewards_of(positional), [])
