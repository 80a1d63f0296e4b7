"""mlxrl: reinforcement-learning post-training of language models on MLX.

The names below are the library; `examples/loop.py` is a training run written with them.
"""

from mlxrl import algo, rewards
from mlxrl.algo.recipes import dr_grpo, grpo, rloo
from mlxrl.data import cycle, tasks
from mlxrl.policy.adapters import LoRA, without_adapters
from mlxrl.policy.load import Policy, load
from mlxrl.policy.logprobs import logprobs
from mlxrl.rewards import score
from mlxrl.rollout.episodes import rollout
from mlxrl.train.evaluate import compare, evaluate
from mlxrl.train.loop import Step, train
from mlxrl.train.pack import pack
from mlxrl.train.step import update
from mlxrl.types import Algorithm, Minibatch, Sampling, Task, Trajectory, Turn

__version__ = "0.1.0"

__all__ = [
    "Algorithm",
    "LoRA",
    "Minibatch",
    "Policy",
    "Sampling",
    "Step",
    "Task",
    "Trajectory",
    "Turn",
    "algo",
    "compare",
    "cycle",
    "dr_grpo",
    "evaluate",
    "grpo",
    "load",
    "logprobs",
    "pack",
    "rewards",
    "rloo",
    "rollout",
    "score",
    "tasks",
    "train",
    "update",
    "without_adapters",
]
