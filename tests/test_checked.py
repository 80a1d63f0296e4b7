"""Arguments of the library's functions: another class, an unknown keyword or a missing one is a line."""

from functools import cache

import pytest

import mlxrl as rl
from helpers import EXAMPLE, a_policy, length
from mlxrl.errors import UserError
from mlxrl.tools import Tools

policy = cache(a_policy)
TASKS = [rl.Task("a"), rl.Task("b")]


def run(**given):
    settings = {"policy": policy(), "tasks": TASKS, "algorithm": rl.grpo(), "reward": length, "steps": 0}
    return rl.run(**{**settings, "rollout": rl.Rollout(tasks_per_step=1), **given})


WRONG = {
    "run: algorithm: wanted Algorithm, got \"<function grpo": lambda: run(algorithm=rl.grpo),
    "run: algorithm: wanted Algorithm, got {\"name\": \"grpo\"}": lambda: run(algorithm={"name": "grpo"}),
    "run: policy: wanted Policy, got nothing (null)": lambda: run(policy=None),
    "run: optimizer: wanted Optimizer(...) or mlx.optimizers.optimizers.Optimizer, got \"adamw\"": (
        lambda: run(optimizer="adamw")
    ),
    "run: rollout: wanted Rollout(...), got {\"group_size\": 2}": lambda: run(rollout={"group_size": 2}),
    "run: resume: wanted str or pathlib.Path or None, got 5": lambda: run(resume=5),
    "run: seed: wanted a whole number of at least 0 and at most 4294967295, got 4294967296": lambda: run(seed=2**32),
    "run: steps: wanted a whole number of at least 0, got 1.5": lambda: run(steps=1.5),
    "run: missing a required argument: 'policy'": lambda: rl.run(),
    "reward: wanted a function, a list of functions or Reward(...), got \"file.py:f\"": (
        lambda: run(reward="file.py:f")
    ),
    "load: lora: wanted LoRA(...) or None, got {\"rank\": 4}": lambda: rl.load(str(EXAMPLE), lora={"rank": 4}),
    "load: adapter: wanted str or pathlib.Path or None, got 5": lambda: rl.load(str(EXAMPLE), adapter=5),
    "load: seed: wanted a whole number of at least 0": lambda: rl.load(str(EXAMPLE), seed=-1),
    "load: too many positional arguments": lambda: rl.load(str(EXAMPLE), 5),
    "sample: sampling: wanted Sampling(...), got 5": lambda: rl.sample(policy(), TASKS, group_size=1, sampling=5),
    "sample: group_size: wanted at most 65,536, got 1,000,000,000": (
        lambda: rl.sample(policy(), TASKS, group_size=10**9)
    ),
    "evaluate: limits: wanted EpisodeLimits(...), got 5": lambda: rl.evaluate(policy(), TASKS, length, limits=5),
    "make_batch: algorithm: wanted Algorithm, got nothing (null)": lambda: rl.make_batch([], None),
    "update: batch: wanted Batch, got []": (
        lambda: rl.update(policy(), rl.make_optimizer(rl.Optimizer()), [], rl.grpo())
    ),
    "Task: prompt: wanted a text, messages or token ids, got \"b'a'\"": lambda: rl.Task(b"a"),
    "Task: columns: wanted a dict with a value for each name, got [1]": lambda: rl.Task("a", [1]),
    "tools: wanted a list of functions, got nothing (null)": lambda: Tools(None),
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_an_argument_of_another_class_is_refused_in_a_line(message):
    with pytest.raises(UserError) as caught:
        WRONG[message]()
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_seed_is_what_a_config_may_have():
    """All 32 bits: a run begins with the same seeds that a config is read with."""
    assert list(run(seed=2**32 - 1)) == []
    assert rl.load(str(EXAMPLE), lora=rl.LoRA(rank=2), seed=2**32 - 1).lora.rank == 2
