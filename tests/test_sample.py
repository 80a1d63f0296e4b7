"""From tasks to groups: the one path of single turns and of episodes."""

from __future__ import annotations

import math
import random
import signal
import threading
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from helpers import a_policy, moved
from mlxrl import algo
from mlxrl.errors import UserError
from mlxrl.policy.logprobs import logprobs
from mlxrl.policy.lora import MergedLinear
from mlxrl.policy.policy import as_policy
from mlxrl.rewards import score
from mlxrl.rollout.sample import Interrupted, sample
from mlxrl.settings import EpisodeLimits, LoRA, Reward, Sampling
from mlxrl.train.batch import make_batch
from mlxrl.train.gradient import gradient
from mlxrl.types import MicroBatch, Task
from models import dense, hybrid, moe, tokenizer
from worlds import SHORT, TASKS, Counting, brief_policy, every, play

MODELS = [dense, hybrid, moe]


@pytest.mark.parametrize("make", MODELS)
def test_an_episode_of_one_turn_is_a_single_turn_bit_for_bit(make):
    """Tokens, log-probs, micro-batches, loss and gradient, whether it may continue or not."""
    p, recipe = brief_policy(make), algo.grpo()
    tasks = [replace(task, columns={"turns": 1}) for task in TASKS]
    plain = sample(p, tasks, group_size=3, sampling=SHORT, key=3)
    assert {(one.turns[0].state, one.turns[0].observation_text, one.stop) for one in every(plain)} <= {
        (None, "", "eos"), (None, "", "length")
    }  # fmt: skip
    plain = score(plain, lambda completions, **_: [float(len(text)) for text in completions])
    for turns in (1, 4):
        played = play(p, tasks=tasks, group_size=3, key=3, max_turns=turns)
        assert [one.stop for one in every(played)] == ["done"] * 9
        for one, other in zip(every(plain), every(played), strict=True):
            assert (one.turns[0].observation, one.turns[0].tokens) == (other.prompt, other.turns[0].tokens)
            assert one.turns[0].logprobs == other.turns[0].logprobs
            assert one.reward == other.reward
        batches = [make_batch(groups, recipe) for groups in (plain, played)]
        for mine, own in zip(*batches, strict=True):
            assert all(mx.array_equal(getattr(mine, n), getattr(own, n)) for n in ("tokens", "mask", "advantages"))
        (metrics, grads), (others, more) = (gradient(p, batch, recipe) for batch in batches)
        assert metrics["loss"] == others["loss"]
        leaves = [tree_flatten(tree) for tree in (grads, more)]
        assert all(mx.array_equal(a, b) for (_, a), (_, b) in zip(*leaves, strict=True))


@pytest.mark.parametrize("make", MODELS)
def test_log_probs_are_those_of_the_tempered_distribution(make):
    """The trainer's log-probs of the same tokens, at the same temperature, are the sampler's."""
    p = as_policy(make(), tokenizer(), lora=LoRA())
    moved(p)
    (group,) = sample(p, [Task("hello")], group_size=3, sampling=Sampling(max_tokens=9, temperature=0.7), key=1)
    for trajectory in group:
        (turn,) = trajectory.turns
        ids, ones = mx.array([turn.tokens]), mx.ones((1, len(turn.tokens)))
        batch = MicroBatch(mx.array(turn.observation), ids, ones, ones, ones, temperature=0.7)
        assert np.allclose(logprobs(p, batch).token_logprobs.tolist()[0], turn.logprobs, atol=1e-4)


def test_a_task_that_stands_twice_is_two_groups():
    p = as_policy(dense(), tokenizer(), lora=LoRA())
    first, second = sample(p, [Task("hi"), Task("hi")], group_size=2, sampling=Sampling(max_tokens=8), key=0)
    assert len(first) == len(second) == 2
    assert len({t.turns[0].tokens for t in first + second}) == 4
    assert sample(p, [], group_size=4) == ()


def test_the_thinking_switch_is_a_setting_of_the_sampling():
    p = as_policy(dense(), tokenizer(), lora=None)
    for thinking, end in ((None, "<think>"), (True, "<think>"), (False, "<think></think>")):
        sampling = Sampling(max_tokens=2, thinking=thinking)
        ((one,),) = sample(p, [Task("hi")], group_size=1, sampling=sampling)
        assert p.tokenizer.decode(one.prompt) == f"<user>hi<end><assistant>{end}"


def test_a_prompt_that_fills_the_context_ends_in_an_error_and_is_not_scored():
    p = as_policy(dense(max_position_embeddings=16), tokenizer(), lora=None)
    groups = sample(p, [Task("a prompt of more than sixteen bytes")], group_size=2)
    line = "a prompt of 39 tokens does not fit the context of 16"
    assert [(t.stop, t.error) for t in groups[0]] == [("error", line)] * 2
    assert all(math.isnan(t.reward) for t in score(groups, lambda completions, **_: [0.0] * len(completions))[0])


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"group_size": 0}, "sample: group_size: wanted a whole number of at least 1, got 0"),
        ({"environment": Counting()}, "sample: environment: wanted a class or a function that makes an environment"),
        (
            {"environment": "m:Maze"},
            'sample: environment: wanted a class or a function that makes an environment, got "m:',
        ),
        ({"environment": lambda size: Counting()}, "missing a required argument: 'size'; it takes size"),
        ({"limits": EpisodeLimits(max_turns=3)}, "sample: max_turns has no effect without an environment"),
        ({"limits": EpisodeLimits(timeout=3)}, "sample: timeout has no effect without an environment"),
    ],
)
def test_what_cannot_be_sampled_is_refused_in_a_line(given, error):
    with pytest.raises(UserError) as caught:
        sample(brief_policy(), TASKS, **{"group_size": 1, **given})
    assert error in str(caught.value)


# What ends it early, and what it must restore


def test_ctrl_c_keeps_the_trajectories_that_had_ended_and_restores_the_adapters():
    p = as_policy(dense(), tokenizer(("<eos>", "<end>", "<bos>", "<pad>", "<user>")), lora=LoRA())
    sampling = Sampling(max_tokens=100)
    calls = 0

    def interrupts(tokens, logits):
        nonlocal calls
        calls += 1
        if calls == 150:
            signal.raise_signal(signal.SIGINT)
        return logits

    tasks = [Task("one"), Task("two")]
    whole = sample(p, tasks, group_size=8, sampling=sampling, key=5)
    with pytest.raises(KeyboardInterrupt) as caught:
        sample(p, tasks, group_size=8, sampling=sampling, key=5, processors=[interrupts])
    assert isinstance(caught.value, Interrupted)
    kept = every(caught.value.groups)
    assert len(caught.value.groups) == 2
    assert 0 < len(kept) < 16
    full = {t.turns[0].tokens for group in whole for t in group}
    assert all(t.turns[0].tokens in full and t.stop in ("eos", "length") for t in kept)
    assert not any(isinstance(module, MergedLinear) for _, module in p.model.named_modules())
    assert sample(p, tasks, group_size=8, sampling=sampling, key=5) == whole


def test_an_interrupted_rollout_has_the_episodes_that_had_ended():
    p = brief_policy()
    steps = iter(range(1000))

    def interrupt(tokens, logits):
        if next(steps) > 60:
            raise KeyboardInterrupt
        return logits

    with pytest.raises(Interrupted) as caught:
        play(p, max_turns=4, processors=[interrupt])
    assert all(one.stop in ("done", "length", "turns") for one in every(caught.value.groups))
    assert len(every(caught.value.groups)) < 6


def test_a_rollout_in_a_worker_thread():
    """The model was made, and a step compiled, in another thread."""
    p = as_policy(hybrid(), tokenizer(), lora=LoRA())
    here = sample(p, [Task("hi")], group_size=3, sampling=Sampling(max_tokens=12), key=2)
    there = []
    for _ in range(2):
        work = lambda: there.append(sample(p, [Task("hi")], group_size=3, sampling=Sampling(max_tokens=12), key=2))  # noqa: E731
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert [[t.turns for t in group] for (group,) in there] == [[t.turns for t in here[0]]] * 2


def test_memory_comes_back_and_does_not_grow():
    """50 rollouts of random sizes. Results that are kept hold no buffer; what is added is constants of new traces."""
    p = as_policy(hybrid(2), tokenizer(), lora=LoRA())
    draw = random.Random(0)

    def one(seed):
        tasks = [Task("x" * draw.randint(1, 40)) for _ in range(draw.randint(1, 3))]
        sampling = Sampling(max_tokens=draw.randint(1, 20))
        return sample(p, tasks, group_size=draw.randint(1, 4), sampling=sampling, key=seed)

    mx.synchronize()
    before = mx.get_active_memory()
    kept = [one(seed) for seed in range(50)]
    assert len(kept) == 50
    assert mx.get_active_memory() - before < 100 * 320, "320 bytes a trace at most, no cache of a row"
    assert mx.get_cache_memory() < 2**20, "buffers are given back"


def test_functions_can_see_special_tokens():
    p = a_policy()
    end = p.tokenizer.convert_tokens_to_ids("</think>")

    def ends(tokens: mx.array, logits: mx.array) -> mx.array:
        return logits + (mx.arange(logits.shape[-1]) == end) * 1000.0

    def tagged(completions: list[str], **_: Any) -> list[float]:
        return [float("</think>" in said) for said in completions]

    groups = sample(p, [Task("q")], group_size=2, sampling=Sampling(max_tokens=3), processors=[ends])
    for special, reward in ((False, 0.0), (True, 1.0)):
        scored = score(groups, Reward(functions=(tagged,), special_tokens=special))
        assert [one.reward for one in scored[0]] == [reward] * 2
