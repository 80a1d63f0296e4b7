"""The maths of RL post-training: groups and log-probs in, advantages, losses and metrics out.

`recipes` are the algorithms. Each is an `Algorithm`, a value made of a credit, a policy loss, a reduction and terms.
"""
# ruff: noqa: I001
# fmt: off

from mlxrl.algo import advantages, credit, divergence, losses, reduce, shaping
from mlxrl.algo.algorithm import Algorithm, Term
from mlxrl.algo.credit import Whiten
from mlxrl.algo.echo import Echo
from mlxrl.algo.losses import Surrogate
from mlxrl.algo.recipes import (
    cispo, dapo, dppo, dr_grpo, gigpo, gmpo, grpo, gspo, gspo_token, luspo, max_rl, opd,
    reinforce_pp, reinforce_pp_baseline, rloo, sapo, sft,
)
from mlxrl.algo.reduce import finish
from mlxrl.algo.table import RECIPES, arguments_of, build
from mlxrl.algo.terms import (
    KL, Correction, Entropy, KLReward, OffPolicyMask, TeacherAdvantage, TeacherKL, TeacherSurrogate, TeacherTopK,
    TeacherVocabulary, Veto,
)

__all__ = [
    "RECIPES", "Algorithm", "Surrogate", "Term", "Whiten", "arguments_of", "build", "finish",
    "KL", "Correction", "Echo", "Entropy", "KLReward", "OffPolicyMask", "TeacherAdvantage", "TeacherKL",
    "TeacherSurrogate", "TeacherTopK", "TeacherVocabulary", "Veto",
    "cispo", "dapo", "dppo", "dr_grpo", "gigpo", "gmpo", "grpo", "gspo", "gspo_token", "luspo", "max_rl", "opd",
    "reinforce_pp", "reinforce_pp_baseline", "rloo", "sapo", "sft",
    "advantages", "credit", "divergence", "losses", "reduce", "shaping",
]
