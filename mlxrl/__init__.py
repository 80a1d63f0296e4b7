"""mlxrl: reinforcement-learning post-training of language models on MLX.

The names below are the library; `examples/loop.py` is a training run written with them. The pieces that algorithms are
made of are in `mlxrl.algo`. Each name is imported when it is first asked for, so that `mlxrl --help` loads no numpy and
a machine without MLX's backend gets a line that says so.
"""
# ruff: noqa: I001
# fmt: off

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlxrl import algo, rewards
    from mlxrl.algo import (
        KL, Algorithm, Correction, Echo, Entropy, KLReward, OffPolicyMask, TeacherAdvantage, TeacherKL,
        TeacherSurrogate, TeacherTopK, TeacherVocabulary, Term, Veto, Whiten, cispo, dapo, dppo, dr_grpo, gigpo, gmpo,
        grpo, gspo, gspo_token, luspo, max_rl, opd, reinforce_pp, reinforce_pp_baseline, rloo, sapo, sft,
    )
    from mlxrl.data import cycle, tasks
    from mlxrl.policy.logprobs import logprobs
    from mlxrl.policy.lora import without_adapters
    from mlxrl.policy.policy import Policy, load
    from mlxrl.rewards import score
    from mlxrl.rollout.sample import sample
    from mlxrl.runs.sinks import Sink
    from mlxrl.settings import EpisodeLimits, LoRA, Optimizer, Reward, Rollout, Sampling, Train
    from mlxrl.train.batch import make_batch
    from mlxrl.train.comparison import compare
    from mlxrl.train.evaluate import evaluate
    from mlxrl.train.loop import run
    from mlxrl.train.step import Step
    from mlxrl.train.optimizer import make_optimizer
    from mlxrl.train.teacher import Teacher
    from mlxrl.train.update import update
    from mlxrl.types import Feedback, MicroBatch, Task, Trajectory, Turn
    from mlxrl.protocols import Environment

__version__ = "0.1.0"

__all__ = [
    "Algorithm", "Correction", "Echo", "Entropy", "Environment", "EpisodeLimits", "Feedback", "KL", "KLReward", "LoRA",
    "MicroBatch", "OffPolicyMask", "Optimizer", "Policy", "Reward", "Rollout", "Sampling", "Sink", "Step",
    "Task", "Teacher", "TeacherAdvantage", "TeacherKL", "TeacherSurrogate", "TeacherTopK", "TeacherVocabulary", "Term",
    "Train", "Trajectory", "Turn", "Veto", "Whiten", "algo", "cispo", "compare", "cycle", "dapo", "dppo", "dr_grpo",
    "evaluate", "gigpo", "gmpo", "grpo", "gspo", "gspo_token", "load", "logprobs", "luspo", "make_batch",
    "make_optimizer", "max_rl", "opd", "reinforce_pp", "reinforce_pp_baseline", "rewards", "rloo", "run", "sample",
    "sapo", "score", "sft", "tasks", "update", "without_adapters",
]

_HOMES = {
    "data": ("cycle", "tasks"),
    "policy.logprobs": ("logprobs",),
    "policy.lora": ("without_adapters",),
    "policy.policy": ("Policy", "load"),
    "rewards": ("score",),
    "rollout.sample": ("sample",),
    "runs.sinks": ("Sink",),
    "settings": ("EpisodeLimits", "LoRA", "Optimizer", "Reward", "Rollout", "Sampling", "Train"),
    "train.batch": ("make_batch",),
    "train.comparison": ("compare",),
    "train.evaluate": ("evaluate",),
    "train.loop": ("run",),
    "train.step": ("Step",),
    "train.optimizer": ("make_optimizer",),
    "train.teacher": ("Teacher",),
    "train.update": ("update",),
    "protocols": ("Environment",),
    "types": ("Feedback", "MicroBatch", "Task", "Trajectory", "Turn"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in ("algo", "rewards"):
        return import_module(f"mlxrl.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'mlxrl' has no attribute {name!r}")
    return getattr(import_module(f"mlxrl.{_HOME_OF.get(name, 'algo')}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
