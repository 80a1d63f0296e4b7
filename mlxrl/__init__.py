"""mlxrl: reinforcement-learning post-training of language models on MLX.

The names below are the library; `examples/loop.py` is a training run written with them. More recipes, and the pieces
that all are made of, are in `mlxrl.algo`. Each name is imported when it is first asked for, so that `mlxrl --help`
loads no numpy and a machine without MLX's backend gets a line that says so.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlxrl import algo, rewards
    from mlxrl.algo.recipes import dapo, dr_grpo, grpo, gspo, opd, rloo
    from mlxrl.data import cycle, tasks
    from mlxrl.policy.adapters import LoRA, without_adapters
    from mlxrl.policy.load import Policy, load
    from mlxrl.policy.logprobs import logprobs
    from mlxrl.rewards import score
    from mlxrl.rollout.sample import sample
    from mlxrl.settings import EpisodeLimits, Sampling
    from mlxrl.train.evaluate import compare, evaluate
    from mlxrl.train.loop import Step, run
    from mlxrl.train.pack import pack
    from mlxrl.train.step import update
    from mlxrl.types import Algorithm, Environment, Feedback, MicroBatch, Task, Trajectory, Turn

__version__ = "0.1.0"

__all__ = [
    "Algorithm",
    "Environment",
    "EpisodeLimits",
    "Feedback",
    "LoRA",
    "MicroBatch",
    "Policy",
    "Sampling",
    "Step",
    "Task",
    "Trajectory",
    "Turn",
    "algo",
    "compare",
    "cycle",
    "dapo",
    "dr_grpo",
    "evaluate",
    "grpo",
    "gspo",
    "load",
    "logprobs",
    "opd",
    "pack",
    "rewards",
    "rloo",
    "run",
    "sample",
    "score",
    "tasks",
    "update",
    "without_adapters",
]

_HOMES = {
    "mlxrl.algo.recipes": ("dapo", "dr_grpo", "grpo", "gspo", "opd", "rloo"),
    "mlxrl.data": ("cycle", "tasks"),
    "mlxrl.policy.adapters": ("LoRA", "without_adapters"),
    "mlxrl.policy.load": ("Policy", "load"),
    "mlxrl.policy.logprobs": ("logprobs",),
    "mlxrl.rewards": ("score",),
    "mlxrl.rollout.sample": ("sample",),
    "mlxrl.settings": ("EpisodeLimits", "Sampling"),
    "mlxrl.train.evaluate": ("compare", "evaluate"),
    "mlxrl.train.loop": ("Step", "run"),
    "mlxrl.train.pack": ("pack",),
    "mlxrl.train.step": ("update",),
    "mlxrl.types": ("Algorithm", "Environment", "Feedback", "MicroBatch", "Task", "Trajectory", "Turn"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in ("algo", "rewards"):
        return import_module(f"mlxrl.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'mlxrl' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)
