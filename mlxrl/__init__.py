"""mlxrl: reinforcement-learning post-training of language models on MLX.

The names below are the library; `examples/loop.py` is a training run written with them. The pieces that algorithms are
made of are in `mlxrl.algo`. Each name is imported when it is first asked for, so that `mlxrl --help`
loads no numpy and a machine without MLX's backend can be told so.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlxrl import algo, rewards
    from mlxrl.algo.algorithm import Algorithm, Term
    from mlxrl.algo.credit import Whiten
    from mlxrl.algo.echo import Echo
    from mlxrl.algo.recipes import (
        cispo,
        dapo,
        dppo,
        dr_grpo,
        gigpo,
        gmpo,
        grpo,
        gspo,
        gspo_token,
        luspo,
        max_rl,
        opd,
        reinforce_pp,
        reinforce_pp_baseline,
        rloo,
        sapo,
    )
    from mlxrl.algo.terms import (
        KL,
        Correction,
        Entropy,
        KLReward,
        OffPolicyMask,
        TeacherAdvantage,
        TeacherKL,
        TeacherSurrogate,
        TeacherTopK,
        TeacherVocabulary,
        Veto,
    )
    from mlxrl.data import cycle, tasks
    from mlxrl.policy.logprobs import logprobs
    from mlxrl.policy.lora import without_adapters
    from mlxrl.policy.policy import Policy, load
    from mlxrl.rewards import score
    from mlxrl.rollout.episodes import rollout
    from mlxrl.settings import LoRA, Sampling
    from mlxrl.train.evaluate import compare, evaluate
    from mlxrl.train.loop import Step, train
    from mlxrl.train.pack import pack
    from mlxrl.train.step import update
    from mlxrl.types import Feedback, MicroBatch, Task, Trajectory, Turn

__version__ = "0.1.0"

__all__ = [
    "Algorithm",
    "Correction",
    "Echo",
    "Entropy",
    "Feedback",
    "KL",
    "KLReward",
    "LoRA",
    "MicroBatch",
    "OffPolicyMask",
    "Policy",
    "Sampling",
    "Step",
    "Task",
    "TeacherAdvantage",
    "TeacherKL",
    "TeacherSurrogate",
    "TeacherTopK",
    "TeacherVocabulary",
    "Term",
    "Trajectory",
    "Turn",
    "Veto",
    "Whiten",
    "algo",
    "cispo",
    "compare",
    "cycle",
    "dapo",
    "dppo",
    "dr_grpo",
    "evaluate",
    "gigpo",
    "gmpo",
    "grpo",
    "gspo",
    "gspo_token",
    "load",
    "logprobs",
    "luspo",
    "max_rl",
    "opd",
    "pack",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "rewards",
    "rloo",
    "rollout",
    "sapo",
    "score",
    "tasks",
    "train",
    "update",
    "without_adapters",
]

_HOMES = {
    "mlxrl.algo.algorithm": ("Algorithm", "Term"),
    "mlxrl.algo.credit": ("Whiten",),
    "mlxrl.algo.echo": ("Echo",),
    "mlxrl.algo.recipes": (
        *("cispo", "dapo", "dppo", "dr_grpo", "gigpo", "gmpo", "grpo", "gspo", "gspo_token", "luspo", "max_rl"),
        *("opd", "reinforce_pp", "reinforce_pp_baseline", "rloo", "sapo"),
    ),
    "mlxrl.algo.terms": (
        *("KL", "Correction", "Entropy", "KLReward", "OffPolicyMask", "TeacherAdvantage"),
        *("TeacherKL", "TeacherSurrogate", "TeacherTopK", "TeacherVocabulary", "Veto"),
    ),
    "mlxrl.data": ("cycle", "tasks"),
    "mlxrl.policy.logprobs": ("logprobs",),
    "mlxrl.policy.lora": ("without_adapters",),
    "mlxrl.policy.policy": ("Policy", "load"),
    "mlxrl.rewards": ("score",),
    "mlxrl.rollout.episodes": ("rollout",),
    "mlxrl.train.evaluate": ("compare", "evaluate"),
    "mlxrl.train.loop": ("Step", "train"),
    "mlxrl.train.pack": ("pack",),
    "mlxrl.train.step": ("update",),
    "mlxrl.settings": ("LoRA", "Sampling"),
    "mlxrl.types": ("Feedback", "MicroBatch", "Task", "Trajectory", "Turn"),
}


class _Public:
    """A name of the library. `train` and `rollout` are functions here although modules have the same names."""

    def __init__(self, home: str, name: str) -> None:
        self.home, self.name = home, name

    def __get__(self, library: Any, kind: Any = None) -> Any:
        return getattr(import_module(self.home), self.name)

    def __set__(self, library: Any, value: Any) -> None:
        if not isinstance(value, ModuleType):  # the import system enters every submodule under its name
            raise AttributeError(f"mlxrl.{self.name} cannot be replaced")


class _Library(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name in ("algo", "rewards"):
            return import_module(f"mlxrl.{name}")
        raise AttributeError(f"module 'mlxrl' has no attribute {name!r}")


for _home, _names in _HOMES.items():
    for _name in _names:
        setattr(_Library, _name, _Public(_home, _name))
sys.modules[__name__].__class__ = _Library
