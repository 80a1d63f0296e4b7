"""What other libraries do, and the names that keys of [algorithm] once had: data.

`build` puts a convention's values below those that are given; its tables hold for terms that are there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Table = Mapping[str, Any]

TEN = (-10.0, 10.0)
KL_TEN: Table = {"kl": {"clamp": TEN}}
VERL: Table = {**KL_TEN, "dual_clip": 3.0}
OPEN: Table = {"log_ratio_clamp": None}
SEQUENCE_MASK: Table = {**OPEN, "mode": "mask", "level": "sequence", "bounds": (None, 3.0)}
TRL: Table = {**OPEN, "kl": OPEN, "correction": SEQUENCE_MASK}
TRL_STD: Table = {**TRL, "eps": 1e-4}
OPENRLHF: Table = {
    **KL_TEN, "kl_reward": {"clamp": TEN}, "correction": {**OPEN, "bounds": (0.5, 5.0)}, "reduction": "token_mean",
    "whiten": {"ddof": 0, "eps": 0.0, "floor": 1e-8},
}  # fmt: skip
SLIME: Table = {**OPEN, "kl": {"clamp": TEN, **OPEN}, "correction": OPEN, "reduction": "sequence_mean"}

CONVENTIONS: Mapping[str, Mapping[str, Table]] = {
    "verl": {
        **dict.fromkeys(("dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"), VERL),
        **dict.fromkeys(("sapo", "dppo"), KL_TEN),
        "gmpo": {**KL_TEN, "log_ratio_clamp": None},
        "grpo": {**VERL, "reduction": "token_mean"},
        "dapo": {**VERL, "dual_clip": 10.0},
        "gspo": {**KL_TEN, "ratio": "sequence_token", "log_ratio_clamp": (None, 10.0)},
        "cispo": {**KL_TEN, "clip": (0.2, 0.2)},
        "opd": {**VERL, "teacher_advantage": {"clamp": TEN}, "teacher_kl": {"clamp": TEN}},
    },
    "trl": {
        **dict.fromkeys(("grpo", "dapo", "gspo", "gspo_token", "cispo", "sapo", "luspo"), TRL_STD),
        "dr_grpo": TRL,
        "rloo": {**TRL, "ratio": "sequence_sum", "reduction": "sequence_mean"},
    },
    "openrlhf": {
        **dict.fromkeys(("dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"), OPENRLHF),
        "grpo": {**OPENRLHF, "eps": 1e-9},
        "gspo": {**OPENRLHF, "eps": 1e-9, "reduction": "sequence_mean", "log_ratio_clamp": None},
    },
    "slime": {
        **dict.fromkeys(("grpo", "gspo", "reinforce_pp", "reinforce_pp_baseline"), SLIME),
        "cispo": {**SLIME, "clip": (None, 0.2)},
        "opd": {**SLIME, "reward": 1.0, "teacher_surrogate": OPEN},
    },
    "openclaw": {
        "opd": {
            **TRL, "clip": (0.2, 0.28), "reward": 1.0, "scale": "raw", "reduction": "sequence_mean",
            "teacher_surrogate": {"clip": (0.2, 0.28), "gap_clamp": (-1.0, 1.0)},
        },
    },
    "verl_agent": {"gigpo": {"dual_clip": 3.0, "episode_over": "step"}},
    "prime_rl": {"max_rl": {}},
}  # fmt: skip


def _same(table: str, *keys: str) -> dict[str, str]:
    """Keys that were called `table_key` and are `key` in the table now."""
    return {f"{table}_{key}": f"algorithm.{table}.{key}" for key in keys}


_TEACHER = "[algorithm.teacher_top_k] or [algorithm.teacher_vocabulary]"
MOVED: Mapping[str, str] = {
    **_same("kl", "estimator", "straight", "log_ratio_clamp", "clamp", "weighted"),
    **_same("correction", "level", "bounds"),
    **_same("whiten", "ddof", "eps", "floor"),
    "kl": "algorithm.kl.coefficient",
    "kl_reward": "algorithm.kl_reward.coefficient",
    "kl_gamma": "algorithm.kl_reward.gamma",
    "entropy": "algorithm.entropy.coefficient",
    "correction": "algorithm.correction.mode",
    "veto": "algorithm.veto.threshold",
    "off_policy": "algorithm.off_policy.delta",
    "teacher": "algorithm.teacher_advantage.coefficient, or that of another table teacher_...",
    "teacher_term": "the table [algorithm.teacher_advantage], [.teacher_kl], [.teacher_top_k] or [.teacher_vocabulary]",
    "teacher_from": "algorithm.teacher_advantage.source",
    "teacher_gamma": "algorithm.teacher_advantage.gamma",
    "teacher_clamp": "clamp in [algorithm.teacher_advantage] or [algorithm.teacher_kl]",
    "teacher_estimator": "algorithm.teacher_kl.estimator",
    "teacher_divergence": f"beta in {_TEACHER}, 0 forward and 1 reverse, or the table [algorithm.teacher_surrogate]",
    "teacher_beta": f"beta in {_TEACHER}",
    "teacher_k": "k in [algorithm.teacher_top_k] or [algorithm.teacher_surrogate]",
    "teacher_support": "algorithm.teacher_top_k.support",
    "teacher_tail": "algorithm.teacher_top_k.tail",
    "combine": "algorithm.scale = 'function' for 'normalise', and no key for 'sum'",
    "whiten": "the table [algorithm.whiten]",
    "length": "algorithm.reduction = LENGTH",
    "echo": "the table [algorithm.echo], with the steps over which it tapers in `taper`",
}
"""Where a key of [algorithm], or the table [echo], is now."""
