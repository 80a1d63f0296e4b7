"""The loop: steps that follow from their seed and number, their optimizer steps, and what ends a run or is refused."""

from __future__ import annotations

import asyncio
import math
import re
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest

from helpers import HINT, a_policy, flat, length
from mlxrl.algo.credit import Whiten
from mlxrl.algo.recipes import dapo, grpo, opd, reinforce_pp
from mlxrl.algo.terms import TeacherAdvantage, TeacherSurrogate, TeacherVocabulary
from mlxrl.errors import UserError
from mlxrl.policy.policy import as_policy
from mlxrl.rewards import RewardError
from mlxrl.settings import LoRA, Reward, Rollout, Sampling, Train
from mlxrl.train.loop import run
from mlxrl.train.metrics import Diverged
from mlxrl.train.step import Step, Steps
from mlxrl.train.teacher import Teacher
from mlxrl.types import Task
from models import dense, tokenizer

TASKS = [Task(text, {"hint": HINT}) for text in ("one", "two", "three", "four", "five")]
PAIRS = Rollout(tasks_per_step=2, group_size=2)


def begun(algorithm: Any = grpo(), start: int = 0, **options: Any) -> Steps:
    """The steps, from `start` on, of a short run: one of four groups of four, unless the options say otherwise."""
    given = {
        "reward": length, "steps": 1, "rollout": Rollout(tasks_per_step=4, group_size=4),
        "sampling": Sampling(max_tokens=6), **options,
    }  # fmt: skip
    found = run(a_policy(), TASKS, algorithm, **given)
    found.state.step = start
    return found


def steps(algorithm: Any = grpo(), **options: Any) -> list[Step]:
    return list(begun(algorithm, **options))


class Watched:
    """GRPO that notes of each of its losses whether it had old log-probs to compare with."""

    def __init__(self) -> None:
        self.own, self.seen = grpo(), list[bool]()
        self.name, self.needs = self.own.name, self.own.needs
        self.advantages = self.own.advantages

    def loss(self, new: Any, batch: Any, totals: Any) -> Any:
        self.seen.append(batch.old_logprobs is not None)
        return self.own.loss(new, batch, totals)


class Exploding:
    """An algorithm whose loss is never finite."""

    name, needs = "exploding", frozenset[str]()

    def advantages(self, groups: Any) -> list[list[float]]:
        return [[1.0] * len(group) for group in groups]

    def loss(self, new: Any, batch: Any, totals: Any) -> Any:
        return new.token_logprobs.sum() * mx.nan, {"loss": mx.array(mx.nan)}


def test_a_run_ends_after_three_updates_that_are_not_finite():
    found = run(a_policy(), TASKS, Exploding(), steps=9, rollout=PAIRS, sampling=Sampling(max_tokens=4))
    assert [next(found).metrics["updates/skipped"] for _ in range(2)] == [1.0, 1.0]
    with pytest.raises(Diverged, match=r"step 3: .* in 3 updates in a row"):
        next(found)


def test_updates_that_were_not_finite_count_across_a_continued_run():
    found = begun(Exploding(), start=5, steps=6)
    found.state.skipped = 2
    with pytest.raises(Diverged, match=r"step 6: .* in 3 updates in a row"):
        next(found)


def test_the_loop_is_a_function_of_the_seed_and_can_start_anywhere():
    def actions(start: int, seed: int) -> list[Any]:
        pairs, still = Rollout(tasks_per_step=2, group_size=3), optim.SGD(0.0)
        iterator = begun(start=start, optimizer=still, steps=4, seed=seed, rollout=pairs)
        found = list(iterator)
        assert [step.index for step in found] == list(range(start, 4))
        assert iterator.state.step == 4
        return [[one.turns[0].tokens for group in step.groups for one in group] for step in found]

    whole = actions(0, seed=1)
    assert actions(0, seed=1) == whole
    assert actions(2, seed=1) == whole[2:]
    assert actions(0, seed=2) != whole


def test_a_policy_without_adapters_is_refused_by_the_call():
    with pytest.raises(ValueError, match="run: policy: this policy was loaded without adapters"):
        run(as_policy(dense(), tokenizer(), lora=None), TASKS, grpo(), reward=length, steps=1)


def test_a_model_whose_passes_are_not_what_it_samples_from_is_refused():
    p = a_policy()
    decode = p.head.trunk
    other = replace(p, head=replace(p.head, trunk=lambda tokens, cache=None: decode(tokens, cache) * (
        1.0 if cache else 0.7)))  # fmt: skip
    options: Any = {"reward": length, "steps": 1, "rollout": PAIRS, "sampling": Sampling(max_tokens=6)}
    before = flat(p.model.trainable_parameters())
    with pytest.raises(
        ValueError, match=r"step 1: fresh samples of .*qwen3 differ by 0\.\d+ nats .* 0\.002 that float32"
    ):
        list(run(other, TASKS, grpo(), **options))
    now = flat(p.model.trainable_parameters())
    assert all(mx.array_equal(now[name], value) for name, value in before.items())
    assert len(list(run(a_policy(), TASKS, grpo(), **options))) == 1


LONG = Task("a prompt that is long enough for its completions to share it in one pass, and some more words, and more")


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("train", [Train(), Train(updates_per_rollout=2), Train(minibatches=2)])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_every_pass_of_the_first_step_is_compared(shared, train, dropout):
    """One kind of pass is another function than decoding, that of one or other of the two prompts."""
    p, off = a_policy(move=dropout == 0, dropout=dropout), list[int]()

    def trunk(tokens: mx.array, cache: Any = None) -> mx.array:
        wrong = p.model.training and tokens.shape[0] > 1 and (cache is not None) == shared
        off.append(wrong)
        return p.head.trunk(tokens, cache) * (0.7 if wrong else 1.0)

    other = replace(p, head=replace(p.head, trunk=trunk))
    options: Any = {"reward": length, "steps": 1, "rollout": Rollout(tasks_per_step=2, group_size=4)}
    options |= {"sampling": Sampling(max_tokens=6), "train": train}
    before = {name: mx.array(value) for name, value in flat(p.model.trainable_parameters()).items()}
    with pytest.raises(ValueError, match=r"step 1: fresh samples of .* differ by 0\.\d+ nats"):
        list(run(other, [LONG, Task("hi")], grpo(), **options))
    assert off.count(True) == 1 + (dropout > 0 and train != Train())  # old log-probs are under dropout
    assert all(mx.array_equal(value, before[name]) for name, value in flat(p.model.trainable_parameters()).items())


@pytest.mark.parametrize("moves", [False, True])
def test_passes_agree_under_dropout_too(moves):
    p = a_policy(move=moves, dropout=0.5)
    assert len(list(run(p, TASKS, grpo(), reward=length, steps=1, rollout=PAIRS, sampling=Sampling(max_tokens=6)))) == 1


def test_dropout_follows_from_the_seed_and_old_and_new_drop_the_same():
    def trained(seed: int, noise: int, start: int = 0, **train: Any) -> tuple[list[Any], Any]:
        mx.random.seed(noise)
        iterator = run(
            a_policy(dropout=0.5), TASKS, grpo(), reward=length, steps=3, rollout=PAIRS, seed=seed,
            sampling=Sampling(max_tokens=6), optimizer=optim.SGD(1e-9), train=Train(updates_per_rollout=2, **train),
        )  # fmt: skip
        iterator.state.step = start
        found = list(iterator)
        return [step.metrics["grad_norm"] for step in found], found

    norms, found = trained(1, 0)
    assert trained(1, 5)[0] == trained(1, 5, recompute=True)[0] == norms
    assert trained(1, 9, start=1)[0] == pytest.approx(norms[1:], rel=1e-5)
    assert trained(2, 0)[0] != norms
    for step in found:
        assert step.metrics["ratio/max"] == pytest.approx(1.0, abs=1e-4)
        assert step.metrics["clip_ratio/low_mean"] == step.metrics["clip_ratio/high_mean"] == 0.0


def test_a_step_as_text_says_its_reward_and_length():
    (step,) = steps(rollout=Rollout(tasks_per_step=1, group_size=4))
    assert str(step).startswith(f"step 1  reward {step.metrics['reward']:.3f}  zero-variance groups ")
    assert f"length {step.metrics['completions/mean_length']:.1f}" in str(step)
    assert "tokens/s" in str(step)
    (taught,) = steps(opd(), teacher=Teacher(hint="hint"), reward=None)
    assert str(taught).startswith(f"step 1  teacher/kl {taught.metrics['teacher/kl']:.3f}  zero-variance groups ")
    assert step.metrics["rollout/tokens"] == sum(one.length for one in step.groups[0])


def test_the_loop_makes_epochs_times_minibatches_optimizer_steps():
    falling = optim.SGD(lambda step: 0.3 / (step + 1))
    (step,) = steps(
        dapo(clip=(0.05, 0.05)), optimizer=falling, train=Train(updates_per_rollout=3, minibatches=2)
    )  # fmt: skip
    assert int(falling.step) == 6
    assert step.metrics["updates"] == 6
    assert step.metrics["ratio/max"] > 1.05
    assert step.metrics["clip_ratio/high_mean"] > 0
    assert step.metrics["clip_ratio/low_mean"] > 0
    assert step.metrics["ppo_kl"] != 0


def test_one_update_has_no_old_log_probs_and_several_have():
    watched = Watched()
    (step,) = steps(watched)
    assert watched.seen
    assert not any(watched.seen)
    assert step.metrics["ratio/max"] == 1.0
    for train in (Train(minibatches=2), Train(updates_per_rollout=2)):
        watched.seen.clear()
        steps(watched, train=train)
        assert watched.seen
        assert all(watched.seen)


def test_a_run_of_several_updates_can_start_anywhere():
    def of(start: int) -> Step:
        train = Train(updates_per_rollout=2, minibatches=2)
        return steps(start=start, optimizer=optim.SGD(0.0), steps=3, train=train)[-1]

    whole, last = of(0).metrics, of(2).metrics
    measured = [name for name in whole if name.startswith(("seconds/", "memory/")) or name.endswith("per_second")]
    assert {name: whole[name] for name in whole if name not in measured} == {
        name: last[name] for name in last if name not in measured
    }


def test_rewards_that_fail_cost_their_trajectories_and_nothing_else():
    """None from every function and NaN from any are left out; None from one leaves the other's."""

    def first(completions: list[str], **_: Any) -> list[float | None]:
        return [1.0, None, None, math.nan] * (len(completions) // 4)

    def second(completions: list[str], **_: Any) -> list[float | None]:
        return [0.5, 0.25, None, 1.0] * (len(completions) // 4)

    for algorithm in (grpo(), grpo(scale="function"), dapo(whiten=Whiten()), reinforce_pp()):
        (step,) = steps(
            algorithm, reward=Reward(functions=(first, second), weights=(1.0, 2.0)),
            rollout=Rollout(tasks_per_step=4, group_size=4, resampling_rounds=1),
        )  # fmt: skip
        for group in step.groups:
            np.testing.assert_allclose([one.reward for one in group], [2.0, 0.5, math.nan, math.nan])
        assert step.metrics["rewards/unscored"] == 8
        assert step.metrics["reward"] == 1.25
        assert (step.metrics["updates"], step.metrics["updates/skipped"]) == (1, 0)
        credit = algorithm.advantages(step.groups)
        assert all(np.all(np.array(own[0]) > 0) for own in credit)
        assert not any(np.any(own[place]) for own in credit for place in (2, 3))


def test_a_run_lives_over_a_step_without_scores_but_not_over_its_first_a_few_or_its_last():
    def failing_at(*numbers):
        calls = []

        def judge(completions, **_):
            calls.append(1)
            if len(calls) in numbers:
                raise asyncio.CancelledError("judge timed out")
            return length(completions)

        return judge

    short = {"rollout": PAIRS, "steps": 5}
    found = steps(reward=failing_at(2, 3), **short)
    assert [step.metrics["rewards/unscored"] for step in found] == [0, 4, 4, 0, 0]
    assert [step.metrics["rewards/judge/unscored"] for step in found] == [0, 4, 4, 0, 0]
    assert math.isnan(found[1].metrics["reward"])
    (line,) = [line for line in found[1].warnings if "could not be scored" in line]
    assert re.search(r"'judge' failed for 4; .*CancelledError: judge timed out \(.*test_loop.py, line \d+\)", line)
    assert line in str(found[1])
    for numbers in ((1,), (2, 3, 4), (5,)):
        with pytest.raises(RewardError, match="reward 'judge' raised for each of 4 completions: CancelledError: judge"):
            steps(reward=failing_at(*numbers), **short)


def test_a_few_steps_without_a_signal_say_why_and_what_to_change():
    def lines(**options: Any) -> list[list[str]]:
        found = steps(**{"steps": 5, "rollout": PAIRS, **options})
        return [[line for line in step.warnings if line.startswith("for 3 steps")] for step in found]

    long = {"sampling": Sampling(max_tokens=2, min_tokens=2)}
    free = {"sampling": Sampling(max_tokens=300)}
    assert lines(reward=lambda completions: [1.0] * len(completions), **free)[2][0].startswith(
        "for 3 steps no learning signal: all rewards are 1; look at the completions, and try "
    )
    told = "every completion ran into the limit of 2 tokens; raise sampling.max_tokens"
    zero = lines(reward=lambda completions: [0.0] * len(completions), **long)
    assert zero == [[], [], [f"for 3 steps no learning signal: {told}"], [], []]
    ranked = lines(reward=lambda completions: [float(n) for n in range(len(completions))], **long)
    assert ranked == [[], [], [f"for 3 steps {told}"], [], []]


def test_a_run_can_end_after_steps_without_a_signal():
    seen = run(
        a_policy(), TASKS, grpo(), reward=lambda completions: [1.0] * len(completions), steps=9, rollout=PAIRS,
        sampling=Sampling(max_tokens=2), train=Train(max_steps_without_signal=4),
    )  # fmt: skip
    assert [next(seen).index for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(UserError, match=r"step 4: train\.max_steps_without_signal: the last 4 steps had no learning"):
        next(seen)


def test_groups_that_differ_by_rounding_are_not_learned_from():
    def a(completions, **_):
        return [0.1 if n % 2 else 0.3 for n in range(len(completions))]

    def b(completions, **_):
        return [0.2 for _ in completions]

    def c(completions, **_):
        return [0.3 if n % 2 else 0.1 for n in range(len(completions))]

    rollout = Rollout(tasks_per_step=2, group_size=4, resampling_rounds=1)
    (step,) = steps(reward=[a, b, c], rollout=rollout)
    assert step.metrics["groups/zero_variance"] == step.metrics["groups/sampled"] == 4
    assert (step.metrics["rollout/rounds"], step.metrics["updates"]) == (2, 0)


FORMS = [TeacherAdvantage(), TeacherSurrogate(k=8), TeacherVocabulary()]


@pytest.mark.parametrize("term", FORMS, ids=lambda term: type(term).__name__)
def test_a_teacher_teaches_without_a_reward_and_beside_one(term):
    algorithm, short = opd(teacher=term), {"steps": 2, "rollout": PAIRS, "sampling": Sampling(max_tokens=5)}
    other = as_policy(dense(1), tokenizer(), lora=None)
    for step in steps(algorithm, reward=None, teacher=other, train=Train(minibatches=2), **short):
        assert math.isnan(step.metrics["reward"])
        assert step.metrics["rewards/unscored"] == step.metrics["groups/zero_variance"] == 0
        assert step.metrics["updates"] == 2
        assert step.metrics["teacher/kl"] != 0
    for step in steps(algorithm, teacher=Teacher(hint="hint"), **short):
        assert step.metrics["updates"] == 1
        assert math.isfinite(step.metrics["reward"])


@pytest.mark.parametrize(
    ("algorithm", "options", "message"),
    [
        (grpo(), {"reward": None}, "reward: wanted at least one function, got none; grpo learns"),
        (grpo(), {"rollout": Rollout(tasks_per_step=6)}, "tasks_per_step: wanted at most the 5 tasks there are, got 6"),
        (grpo(), {"teacher": "base"}, "teacher: has no effect, because grpo does not learn from one"),
        (opd(), {}, "teacher: opd learns from one"),
        (
            opd(), {"teacher": "base", "rollout": Rollout(tasks_per_step=2, resampling_rounds=1)},
            "rollout: resampling_rounds: has no effect, because opd does not use rewards",
        ),
        (
            opd(), {"teacher": "base", "reward": Reward(functions=(length,), overlong_buffer=2)},
            "reward: overlong_buffer: has no effect, because opd does not use rewards",
        ),
        (
            opd(), {"teacher": "base", "reward": Reward(functions=(length,), length_penalty=0.5)},
            "reward: length_penalty: has no effect, because opd does not use rewards",
        ),
    ],
)  # fmt: skip
def test_what_is_missing_or_without_effect_is_refused_by_the_call_itself(algorithm, options, message):
    with pytest.raises(ValueError, match=message):
        run(a_policy(), TASKS, algorithm, **{"reward": length, "steps": 1, **options})


def test_tasks_may_be_rows_or_a_generator_and_prompts_that_fill_the_context_are_left_out():
    p = as_policy(dense(max_position_embeddings=32), tokenizer(), lora=LoRA(rank=2))
    rows = [{"prompt": "1+1"}, {"prompt": "1+" * 40}, {"prompt": "2+2"}]
    rollout, sampling = Rollout(tasks_per_step=2, group_size=2), Sampling(max_tokens=2)
    for tasks in (rows, (row for row in rows)):
        with pytest.warns(
            UserWarning, match=r"example 2: a prompt of \d+ tokens .* context of 32; 1 of 3 are left out"
        ):
            steps = run(p, tasks, grpo(), reward=length, steps=1, rollout=rollout, sampling=sampling)
        (step,) = steps
        assert step.metrics["prompts/left_out"] == 1
        assert sorted(group[0].task.prompt for group in step.groups) == ["1+1", "2+2"]
    with pytest.raises(
        UserError, match="example 2: prompt: message 1: wanted an object with 'role' and 'content', got 5"
    ):
        run(p, [rows[0], {"prompt": [5, ""]}], grpo(), reward=length, steps=1, rollout=rollout)
    with pytest.raises(UserError, match="nor does any other of 1"):
        run(p, rows[1:2], grpo(), reward=length, steps=1, rollout=rollout)


def test_hints_that_fill_the_teachers_context_are_left_out_and_counted():
    p = as_policy(dense(max_position_embeddings=64), tokenizer(), lora=LoRA(rank=2))
    rows = [{"prompt": text, "hint": hint} for text, hint in (("1+1", "2"), ("1+2", "3" * 60), ("2+2", "4"))]
    options: Any = {"steps": 1, "rollout": Rollout(tasks_per_step=2, group_size=2), "teacher": Teacher(hint="hint")}
    with pytest.warns(
        UserWarning, match=r"example 2: the teacher's prompt, with 'hint', of 69 tokens .* 1 of 3 are le"
    ):
        (step,) = run(p, rows, opd(), sampling=Sampling(max_tokens=2), **options)
    assert step.metrics["prompts/left_out"] == 1
    assert sorted(group[0].task.prompt for group in step.groups) == ["1+1", "2+2"]
    with pytest.raises(UserError, match="tasks_per_step: wanted at most the 1 tasks there are, got 2"), pytest.warns():
        run(p, rows[:2], opd(), **options)
    with pytest.raises(UserError, match=r"the teacher's prompt, with 'hint', of 69 tokens .* nor does any other of 1"):
        run(p, rows[1:2], opd(), **options)


def test_a_hint_is_refused_where_an_environment_writes_the_prompts():
    options: Any = {"environment": lambda: None, "teacher": Teacher(hint="hint"), "steps": 1}
    with pytest.raises(UserError, match=r"^teacher: hint: an environment writes the prompts; leave the hint out$"):
        run(a_policy(), TASKS, opd(), **options)


def test_token_ids_are_trained_on_and_reach_rewards():
    seen = []

    def reward(prompts, completions, **_):
        seen.append((prompts[0], type(completions[0])))
        return [float(n) for n in range(len(completions))]

    rollout = Rollout(tasks_per_step=1, group_size=2)
    (step,) = run(a_policy(), [{"prompt": [40, 41]}], grpo(), reward=reward, steps=1, rollout=rollout)
    assert (step.groups[0][0].prompt, seen) == ((40, 41), [([40, 41], str)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rollout": {"group_size": 2}}, "run: rollout: wanted Rollout(...), got "),
        ({"sampling": 3}, "run: sampling: wanted Sampling(...), got 3"),
        ({"limits": None}, "run: limits: wanted EpisodeLimits(...), got nothing"),
        ({"train": Sampling()}, "run: train: wanted Train(...), got "),
        ({"steps": 2.5}, "run: steps: wanted a whole number"),
        ({"steps": -1}, "run: steps: wanted a whole number of at least 0, got -1"),
        ({"seed": "a"}, "run: seed: wanted a whole number"),
        ({"environment": 3}, "sample: environment: wanted a class or a function"),
        (
            {"reward": lambda completions, gold: [0.0] * len(completions)},
            "reward '<lambda>': wants 'gold', but the data",
        ),
    ],
)
def test_what_is_wrong_is_told_at_the_call_and_not_at_the_first_step(arguments, message):
    with pytest.raises(UserError) as found:
        run(a_policy(), [Task("a")] * 4, grpo(), **{"reward": length, "steps": 1, **arguments})
    assert str(found.value).startswith(message)


def test_a_run_that_is_dropped_says_that_nothing_was_trained():
    with pytest.warns(UserWarning, match="run: nothing was trained, because no step was asked for"):
        run(a_policy(), [Task("a")] * 4, grpo(), reward=length, steps=1)


def test_what_is_printed_is_short_and_counts_as_the_files_do():
    policy = a_policy()
    (step,) = run(policy, [Task("a" * 300)] * 4, grpo(), reward=length, steps=1, sampling=Sampling(max_tokens=8))
    assert repr(step) == str(step)
    assert (step.index, step.number, repr(step).split("  ")[0]) == (0, 1, "step 1")
    assert repr(policy).startswith("Policy(")
    assert len(repr(policy)) < 200
    assert len(repr(step.groups[0][0].turns[0])) < 300
