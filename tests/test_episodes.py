"""Episodes: several turns with an environment, through the engine, the batches and the trainer."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from helpers import counted
from mlxrl import algo
from mlxrl.policy.logprobs import logprobs
from mlxrl.rewards import score
from mlxrl.rollout import sample as module
from mlxrl.rollout.sample import sample
from mlxrl.settings import EpisodeLimits, Reward, Rollout, Sampling, Train
from mlxrl.train import loop
from mlxrl.train.batch import make_batch, micro_batch
from mlxrl.train.evaluate import evaluate
from mlxrl.train.gradient import gradient
from mlxrl.train.sequences import sequences_of, with_prompt
from mlxrl.types import Feedback, Task
from models import TEMPLATE, dense, hybrid, moe
from worlds import NEWLINE, SHORT, TASKS, Counting, brief_policy, every, play

MODELS = [dense, hybrid, moe]


def ids_of(groups):
    return [[[(turn.observation, turn.tokens) for turn in one.turns] for one in group] for group in groups]


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("template", [NEWLINE, TEMPLATE])
def test_tokens_and_log_probs_are_those_of_a_fresh_forward(make, template):
    """Over kept caches, and where every turn is a sequence of its own."""
    p = brief_policy(make, template, more=60)
    groups = play(
        p,
        sampling=Sampling(max_tokens=6, temperature=0.0, thinking=None if template is NEWLINE else False),
        max_turns=4,
    )
    for one in every(groups):
        sequences = sequences_of(0, one, 0.0)
        assert len(sequences) == (len(one.turns) if template is TEMPLATE else 1)
        for whole in map(with_prompt, sequences):
            own = mx.argmax(p.model(mx.array(whole.tokens[None]))[0], axis=-1)
            places = np.flatnonzero(whole.mask)
            assert np.array(own)[places - 1].tolist() == whole.tokens[places].tolist()
            found = np.array(logprobs(p, micro_batch([whole])).token_logprobs)[0]
            assert np.allclose(found[places], whole.sampler_logprobs[places], atol=1e-4)
    assert {len(one.turns) for one in every(groups)} == {1, 3, 4}
    lasts = {turn.tokens[-1] in p.tokenizer.eos_token_ids for one in every(groups) for turn in one.turns}
    assert lasts == {True, False}


@pytest.mark.parametrize("make", [dense, *(pytest.param(make, marks=pytest.mark.slow) for make in (hybrid, moe))])
def test_nobodys_tokens_depend_on_the_others(make, monkeypatch):
    """Slots, refills, slow environments, and when answers are continued with."""
    p = brief_policy(make)
    wanted = ids_of(play(p, group_size=2, max_turns=4))
    assert len({tokens for group in wanted for one in group for _, tokens in one}) == 2 * (3 + 1 + 4)

    class Slow(Counting):
        def step(self, reply):
            time.sleep(0.12 if len(reply) % 3 == 0 else 0.0)
            return super().step(reply)

    for rows, fraction in ((1, 0.1), (2, 2.0), (5, 0.1), (32, 0.1), (32, 2.0)):
        assert ids_of(play(p, group_size=2, max_turns=4, max_rows=rows)) == wanted
        monkeypatch.setattr(module, "MIN_BATCH_FRACTION", fraction)
        assert ids_of(play(p, Slow, group_size=2, max_turns=4, max_rows=rows)) == wanted
        monkeypatch.undo()
    first = sample(p, TASKS, group_size=2, sampling=SHORT)
    assert [one.turns[0].tokens for one in every(first)] == [one[0][1] for group in wanted for one in group]


def test_forwards_are_those_that_are_needed():
    """8 x 4 sequences of 4 turns: a prefill a turn, and as many steps as the longest has tokens, less the first."""
    p, shapes = counted(brief_policy(more=0))
    play(p, tasks=TASKS[:1])  # finds out how the model is batched
    shapes.clear()
    tasks = [Task(f"question {number}" + "?" * number) for number in range(8)]
    mx.disable_compile()
    try:
        groups = play(p, tasks=tasks, group_size=4, sampling=Sampling(max_tokens=9), max_turns=4)
    finally:
        mx.enable_compile()
    assert {len(one.turns) for one in every(groups)} == {4}
    assert [rows if tokens > 1 else (rows, tokens) for rows, tokens in shapes] == [
        *[8, *[(32, 1)] * 8], *[32, *[(32, 1)] * 8] * 3
    ]  # fmt: skip


# What an episode is


def test_a_turns_state_is_the_one_it_was_taken_in():
    """Not the one it led to; and tasks have no state in common."""

    class Walk:
        def reset(self, task):
            self.place = 0
            return task.prompt

        def step(self, reply):
            self.place += 1 + len(reply) % 2
            return Feedback(f"at {self.place}", reward=-1.0, state=self.place, done=self.place > 4)

    groups = play(brief_policy(), Walk, tasks=[Task("go"), Task("run")], group_size=4, max_turns=6)
    for one in every(groups):
        places = [0]
        for turn in one.turns:
            places.append(places[-1] + 1 + len(turn.text) % 2)
        assert [turn.state for turn in one.turns] == [one.prompt, *places[1:-1]]
        assert [turn.observation_text for turn in one.turns[1:]] == [f"at {place}" for place in places[1:-1]]
        assert (one.stop, one.reward) == ("done", -float(len(one.turns)))
        assert (one.rewards, one.weights) == ({"environment": one.reward}, {"environment": 1.0})
    first, second = ({one.turns[0].state for one in group} for group in groups)
    assert len(first) == len(second) == 1
    assert first != second


def test_episodes_end_at_their_limits():
    p = brief_policy(more=0, max_position_embeddings=64)
    tasks = [Task("hello")]
    (group,) = play(p, tasks=tasks, max_turns=2)
    assert [(one.stop, len(one.turns), one.length) for one in group] == [("length", 2, 12)] * 2  # the last was cut
    (group,) = play(p, tasks=tasks, max_turns=8, max_episode_tokens=15)
    assert [[len(turn.tokens) for turn in one.turns] for one in group] == [[6, 6, 3]] * 2
    assert {one.stop for one in group} == {"length"}
    (group,) = play(p, tasks=tasks, max_turns=8)
    for one in group:
        assert one.stop == "length"
        assert 64 - 20 < sum(len(turn.observation) + len(turn.tokens) for turn in one.turns) <= 64
    _, group = play(p, tasks=[*tasks, Task("x" * 70)], max_turns=8)
    line = "reset: a prompt of 74 tokens does not fit the context of 64"
    assert [(one.stop, one.length, one.error) for one in group] == [("error", 0, line)] * 2
    (group,) = play(brief_policy(), tasks=tasks, sampling=Sampling(max_tokens=90), max_turns=2)
    assert {one.stop for one in group} == {"turns"}


def test_texts_of_an_environment_end_its_actions_and_special_tokens_reach_it_where_it_wants_them():
    p, replies = brief_policy(more=0), []
    plain = play(p, tasks=[Task("hello")], sampling=Sampling(max_tokens=30), max_turns=1)[0]
    letters = [next(x for x in one.turns[0].text[3:] if x.isascii() and x.isalnum()) for one in plain]

    class Stops(Counting):
        special_tokens = True
        stop = tuple(letters)

        def step(self, reply):
            replies.append(reply)
            return super().step(reply)

    (group,) = play(p, Stops, tasks=[Task("hello")], sampling=Sampling(max_tokens=30), max_turns=3)
    firsts = [one.turns[0].text for one in group]
    assert [sum(text.count(letter) for letter in set(letters)) for text in firsts] == [1, 1]
    assert all(text.endswith(tuple(letters)) for text in firsts)
    assert all(len(text) < len(one.turns[0].text) for text, one in zip(firsts, plain, strict=True))
    eos = p.tokenizer.eos_token_ids
    made = [p.tokenizer.decode([i for i in turn.tokens if i not in eos]) for one in group for turn in one.turns]
    assert sorted(replies) == sorted(made)
    for one in group:  # a text has no stop token after it, so the template's follows
        assert p.tokenizer.decode(one.turns[1].observation).startswith("<end>\n<user>turn !")


def test_an_invalid_action_costs_its_turn():
    class Picky(Counting):
        def step(self, reply):
            return replace(super().step(reply), reward=2.0, invalid=self.turn == 2)

    (group,) = play(brief_policy(), Picky, tasks=TASKS[:1], max_turns=4, invalid_penalty=0.5)
    assert [[(turn.reward, turn.invalid) for turn in one.turns] for one in group] == [
        [(2.0, False), (1.5, True), (2.0, False)]
    ] * 2
    assert [one.reward for one in group] == [5.5] * 2


def test_reward_functions_come_on_top():
    groups = play(brief_policy(), max_turns=2)
    reward = Reward(functions=(lambda completions, **_: [1.0] * len(completions),), weights=(0.5,))
    scored = score(groups, reward)
    for one, before in zip(every(scored), every(groups), strict=True):
        assert one.rewards == {"environment": before.reward, "<lambda>": 1.0}
        assert one.reward == before.reward + 0.5
    assert score(scored) == groups  # and without a function the return is all
    assert [one.reward for one in every(score(score(groups)))] == [one.reward for one in every(groups)]


@pytest.mark.parametrize("fraction", [0.1, 2.0])
def test_nobody_waits_for_a_slow_environment(monkeypatch, fraction):
    """It thinks until the other has come to its end, with few answers to a batch or many."""
    monkeypatch.setattr(module, "MIN_BATCH_FRACTION", fraction)
    ended = threading.Event()

    class Thinks(Counting):
        def step(self, reply):
            if self.task.prompt == "slow":
                assert ended.wait(60), "the quick one has to wait for the slow one"
            elif self.turn == 2:
                ended.set()
            return super().step(reply)

    groups = play(brief_policy(), Thinks, tasks=[Task("slow"), Task("quick")], group_size=1, max_turns=3)
    assert [(len(one.turns), one.error) for one in every(groups)] == [(3, "")] * 2


# Training


def test_a_rewritten_history_is_several_sequences_of_one_trajectory():
    p = brief_policy(template=TEMPLATE)
    groups = score(play(p, tasks=[Task("hi", {"turns": 3})], group_size=2, max_turns=3))
    recipe = algo.rloo()
    batch = make_batch(groups, recipe)
    assert (batch.totals.sequences, batch.totals.without_signal) == (6, 0)
    assert batch.totals.tokens == sum(one.length for one in groups[0])
    assert sorted(row for part in batch for row in part.trajectories) == [0, 0, 0, 1, 1, 1]
    credits = recipe.advantages(groups)[0]
    for part in batch:
        for place, row in enumerate(part.trajectories):
            mask = np.array(part.mask[place]) > 0
            assert np.allclose(np.array(part.advantages[place])[mask], credits[row])
            assert np.allclose(
                np.array(logprobs(p, part).token_logprobs[place])[mask],
                np.array(part.sampler_logprobs[place])[mask],
                atol=1e-4,
            )
    first = groups[0][0]
    per_token = [float(place) for place in range(first.num_sampled)]
    sequences = sequences_of(0, first, per_token)
    assert np.concatenate([one.advantages[one.mask > 0] for one in sequences]).tolist() == per_token
    split = make_batch(groups, recipe, Train(tokens_per_pass=1))
    grads = [dict(tree_flatten(gradient(p, one, recipe)[1])) for one in (batch, split)]
    assert all(mx.allclose(grads[0][name], grads[1][name], rtol=1e-4, atol=1e-6) for name in grads[0])


def test_trajectories_that_begin_differently_do_not_share_a_prompt():
    """Those of one group that begin alike do, from 128 saved tokens on."""
    letters, prizes = iter("aabab"), iter([0.0, 1.0, 2.0, 4.0, 8.0])  # none is the mean of the others

    class Lettered(Counting):
        def reset(self, task):
            super().reset(task)
            return next(letters) * 150

        def step(self, reply):
            feedback = super().step(reply)
            return replace(feedback, reward=next(prizes) if feedback.done else 0.0)

    groups = play(brief_policy(), Lettered, tasks=[Task("?", {"turns": 2})], group_size=5)
    batch = make_batch(groups, algo.rloo())
    ids = [[*one.prompt, *one.turns[0].tokens, *one.turns[1].observation, *one.turns[1].tokens] for one in groups[0]]
    found = {}
    for part in batch:
        for row, tokens in zip(part.trajectories, part.tokens.tolist(), strict=True):
            found[row] = [*part.prefix.tolist(), *tokens][: len(ids[row])]
    assert found == dict(enumerate(ids))
    assert sorted(part.prefix.size > 0 for part in batch) == [True, True]


class Longer(Counting):
    """Wants long answers."""

    def reset(self, task):
        return [{"role": "system", "content": "be long"}, {"role": "user", "content": super().reset(task)}]


@pytest.mark.parametrize("recipe", [algo.grpo, algo.gigpo])
@pytest.mark.parametrize("template", [NEWLINE, TEMPLATE])
def test_training_needs_no_reward_function(recipe, template):
    p = brief_policy(template=template)
    tasks = [Task(text, {"turns": 2}) for text in ("one", "two", "three")]
    steps = loop.run(
        p, tasks, recipe(), environment=Longer, steps=2, rollout=Rollout(tasks_per_step=2, group_size=3),
        sampling=SHORT, limits=EpisodeLimits(max_turns=3), train=Train(minibatches=2),
    )  # fmt: skip
    for step in steps:
        assert step.metrics["updates"] > 0
        assert step.metrics["episodes/turns"] == 2
        assert step.metrics["episodes/rewritten"] == (6 if template is TEMPLATE else 0)
        assert (step.metrics["stops/done"], step.metrics["episodes/errors"]) == (1.0, 0.0)
    found = evaluate(p, tasks, sampling=replace(SHORT, temperature=0.0), environment=Longer)
    assert found.rewards == tuple(sum(len(turn.text) for turn in one.turns) for one in found.trajectories)


def test_what_a_run_cannot_learn_from_is_refused():
    p = brief_policy()
    with pytest.raises(ValueError, match="sample: timeout has no effect without an environment"):
        next(
            loop.run(
                p, TASKS, algo.grpo(), reward=len, steps=1, rollout=Rollout(tasks_per_step=2),
                limits=EpisodeLimits(timeout=3),
            )
        )  # fmt: skip
    with pytest.raises(ValueError, match="grpo learns from rewards"):
        next(loop.run(p, TASKS, algo.grpo(), steps=1))
