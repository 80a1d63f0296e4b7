"""What a user gives as reward, and the scoring of groups."""

import asyncio
import functools
import math
import re
import threading

import numpy as np
import pytest

from helpers import a_policy
from mlxrl import awaiting, rewards
from mlxrl.awaiting import is_async
from mlxrl.checked import SettingError
from mlxrl.plugins import PluginError
from mlxrl.rewards import RewardError, Rewards, TrainerState, best_and_worst, require_scores, rewards_of, score
from mlxrl.rewards.scoring import attempt, check_columns, failure_line, failures_of, tell_missing
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
    rest = {"level": [None, None, 1], "completion_ids": [[2], [2], [2]], "trainer_state": TrainerState()}
    assert calls == [(["1+1"] * 3, ["a", "b", "c"], ["a", "a", "d"], rest)]
    assert [[one.reward for one in own] for own in scored] == [[1.0, 0.0], [0.0]]
    assert scored[0][0].rewards == {"reward": 1.0}


def test_messages_reach_a_function_as_messages_that_it_may_change():
    prompt = ({"role": "user", "content": "hi"},)
    seen = []

    def spoil(prompts, completions, **_):
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


def test_only_the_completions_that_raise_are_lost_where_each_is_tried_again():
    sizes = []

    def fragile(completions, answer):
        sizes.append(len(completions))
        return [1 / int(text) for text in completions]

    groups = [group("2", "x", answer=1), group("0", "4")]
    scored = score(groups, Reward(functions=(fragile,), retry_each=True))
    np.testing.assert_equal([one.reward for own in scored for one in own], [0.5, math.nan, math.nan, 0.25])
    assert sizes == [4, 1, 1, 1, 1]
    with pytest.raises(RewardError, match=r"4 completions: ValueError: .* line \d+\); reward.retry_each = true calls"):
        score(groups, fragile)
    assert sizes == [4, 1, 1, 1, 1, 4]


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


def test_what_a_function_raises_costs_its_completions_whatever_its_class():
    for error in (asyncio.CancelledError("judge timed out"), SystemExit(3), GeneratorExit(), MemoryError("no text")):

        def fails(completions, error=error):
            if "b" in completions:
                raise error
            return [1.0] * len(completions)

        ((one, other),) = score([group("a", "b")], Reward(functions=(fails,), retry_each=True))
        assert (one.reward, dict(one.failures)) == (1.0, {})
        assert math.isnan(other.reward)
        assert re.fullmatch(rf"{type(error).__name__}.* \(.*test_scoring.py, line \d+\)", other.failures["fails"])


def test_numbers_beyond_all_bounds_fail_and_sums_are_exact():
    values = {"a": 10**400, "b": -math.inf, "c": 1e31, "d": 1e30, "e": True}

    def given(completions):
        return [values[text] for text in completions]

    a, b, c, d, e = score([group(*values)], given)[0]
    assert [one.reward for one in (d, e)] == [1e30, 1.0]
    assert [one.failures["given"] for one in (b, c)] == ["returned -Infinity", "returned 1e+31, beyond 1e+30"]
    assert a.failures["given"].startswith("returned 1000000")
    (twice,) = score([group("d")], Rewards((given, lambda completions: [1.0]), (2.0, 1.0)))[0]
    assert (math.isnan(twice.reward), dict(twice.failures)) == (True, {"sum": "the weighted sum is beyond 1e+30"})
    ones = [lambda completions, _=n: [1.0] * len(completions) for n in range(3)]
    assert score([group("a")], Rewards(tuple(ones), (0.7, 0.2, 0.1)))[0][0].reward == 1.0


def test_a_failure_names_the_example_and_what_its_columns_hold():
    task = Task("1+1", {"answer": None}, where="data.jsonl: line 7")
    one = Trajectory(task, (Turn((1,), (2,), (0.0,), "2"),))
    scored = score([(one, completion("2", answer="2"))], rewards.contains)
    assert [one.reward for one in scored[0]][1:] == [1.0]
    assert failure_line(scored[0]) == (
        "'contains' failed for 1; the first: data.jsonl: line 7: returned NaN; answer is nothing (null)"
    )
    (failed,) = failures_of(scored[0])
    assert (failed.function, failed.completions, failed.example) == ("contains", 1, "data.jsonl: line 7")
    with pytest.warns(
        UserWarning, match="1 of 2 examples have no 'answer', which reward 'contains' wants; the first is d"
    ):
        tell_missing(rewards_of(rewards.contains), [Task("1+1", {"answer": 0}), task])


def test_values_that_are_no_plain_data_are_copied_and_those_that_cannot_be_are_handed_over():
    def takes(completions, lock, numbers):
        numbers[0] += 1
        return [float(lock[0] is columns["lock"] and not columns["numbers"].any())]

    columns = {"lock": threading.Lock(), "numbers": np.zeros(2)}
    assert score([group("a", **columns)], takes)[0][0].reward == 1.0
    assert not columns["numbers"].any()


def test_functions_get_ids_special_tokens_and_the_state_of_the_run():
    turns = (Turn((1,), (7, 2), (0.0, 0.0), "so", special_text="<t>so"), Turn((3,), (5,), (0.0,), "it"))
    one = Trajectory(Task("q"), turns)
    seen = []

    def sees(completions, completion_ids, trainer_state):
        seen.append((completions, completion_ids, trainer_state))
        return [0.0]

    score([(one,)], sees)
    attempt([(one,)], rewards_of(Reward(functions=(sees,), special_tokens=True)), TrainerState(3, 9))
    assert seen == [(["so\nit"], [[7, 2, 5]], TrainerState()), (["<t>so\nit"], [[7, 2, 5]], TrainerState(3, 9))]


async def awaited(completions, answer, **_):
    await asyncio.sleep(0)
    return [float(a in c) for c, a in zip(completions, answer, strict=True)]


class Judge:
    async def __call__(self, completions, answer):
        return await awaited(completions, answer)


@functools.wraps(awaited)
def wrapped(*arguments, **named):
    return awaited(*arguments, **named)


def one_by_one(completions, answer):
    async def each(said, gold):
        if said == "x":
            raise asyncio.CancelledError
        return float(gold in said)

    return [each(c, a) for c, a in zip(completions, answer, strict=True)]


@pytest.mark.parametrize("function", [awaited, Judge(), functools.partial(awaited), wrapped, one_by_one], ids=range(5))
def test_async_functions_are_awaited(function):
    scored = score([group("a", "b", answer="a")], function)[0]
    assert [one.reward for one in scored] == [1.0, 0.0]
    assert is_async(function) == (function is not one_by_one)


def test_in_a_list_of_awaitables_each_fails_alone():
    a, x = score([group("a", "x", answer="a")], one_by_one)[0]
    assert (a.reward, dict(x.failures)) == (1.0, {"one_by_one": x.failures["one_by_one"]})
    assert x.failures["one_by_one"].startswith("CancelledError")


def test_async_functions_run_together_in_one_loop_that_stays():
    loops, met = [], []

    async def meets(completions, mine, other):
        loops.append(asyncio.get_running_loop())
        met.append(mine)
        while other not in met:
            await asyncio.sleep(0)
        return [1.0]

    pair = [functools.partial(meets, mine="a", other="b"), functools.partial(meets, mine="b", other="a")]
    for _ in range(2):
        met.clear()
        (one,) = score([group("x")], [pair[0], pair[1]])[0]
        assert dict(one.rewards) == {"meets": 1.0, "meets_2": 1.0}
    assert len(set(map(id, loops))) == 1


def test_a_function_that_hangs_is_named_and_ends_with_its_time(monkeypatch):
    release = threading.Event()

    def hangs(completions):
        release.wait()
        return [1.0]

    async def blocks(completions):
        release.wait()
        return [1.0]

    async def sleeps(completions):
        await asyncio.sleep(60)
        return [1.0]

    monkeypatch.setattr(awaiting, "WAIT", 0.01)
    monkeypatch.setattr(awaiting, "GRACE", 0.05)
    for function in (hangs, sleeps, blocks):
        name = function.__name__
        with (
            pytest.raises(
                RewardError, match=f"reward '{name}' raised for each of 1 completions: Late: no answer in 0.1 s"
            ),
            pytest.warns(UserWarning, match=f"reward '{name}': no answer for 0.01 s; still waiting"),
        ):
            score([group("a")], Reward(functions=(function,), timeout=0.1))
    release.set()
    assert score([group("a", answer="a")], Reward(functions=(awaited,), timeout=60.0))[0][0].reward == 1.0


def test_values_that_cannot_be_read_or_shown_are_one_line():
    class Mute:
        def __repr__(self):
            raise asyncio.CancelledError

    for returned in ([np.ones(2)], [Mute()], Mute(), [1j], ["nan"]):

        def odd(completions, returned=returned):
            return returned

        with pytest.raises(RewardError, match="reward 'odd': wanted a"):
            score([group("a")], odd)
