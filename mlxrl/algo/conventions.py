"""What other libraries do, and the names that keys of [algorithm] once had: data.

`build` puts a convention's values below those that are given; its tables hold for terms that are there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Table = Mapping[str, Any]

TEN = (-10.0, 10.0)
VERL: Table = {"dual_clip": 3.0, "kl": {"clamp": TEN}}
TRL: Table = {"log_ratio_clamp": None, "kl": {"log_ratio_clamp": None}}
TRL_STD: Table = {**TRL, "eps": 1e-4}
OPENRLHF: Table = {
    "reduction": "token_mean",
    "kl": {"clamp": TEN},
    "whiten": {"ddof": 0, "eps": 0.0, "floor": 1e-8},
}
SLIME: Table = {"log_ratio_clamp": None, "kl": {"clamp": TEN}, "reduction": "sequence_mean"}

CONVENTIONS: Mapping[str, Mapping[str, Table]] = {
    "verl": {
        "grpo": {**VERL, "reduction": "token_mean"},
        "dr_grpo": VERL,
        "dapo": {**VERL, "dual_clip": 10.0},
        "gspo": {"ratio": "sequence_token", "log_ratio_clamp": (None, 10.0), "kl": {"clamp": TEN}},
        "rloo": VERL,
        "reinforce_pp": VERL,
        "reinforce_pp_baseline": VERL,
        "cispo": {"clip": (0.2, 0.2), "kl": {"clamp": TEN}},
        "opd": {**VERL, "teacher_advantage": {"clamp": TEN}, "teacher_kl": {"clamp": TEN}},
        "sapo": {"kl": {"clamp": TEN}},
        "gmpo": {"kl": {"clamp": TEN}},
        "dppo": {"kl": {"clamp": TEN}},
    },
    "trl": {
        "grpo": TRL_STD,
        "dr_grpo": TRL,
        "dapo": TRL_STD,
        "gspo": TRL_STD,
        "gspo_token": TRL_STD,
        "rloo": {**TRL, "ratio": "sequence_sum", "reduction": "sequence_mean"},
        "cispo": TRL_STD,
        "sapo": TRL_STD,
        "luspo": TRL_STD,
    },
    "openrlhf": {
        "grpo": {**OPENRLHF, "eps": 1e-9},
        "dr_grpo": OPENRLHF,
        "gspo": {**OPENRLHF, "eps": 1e-9, "reduction": "sequence_mean"},
        "rloo": OPENRLHF,
        "reinforce_pp": OPENRLHF,
        "reinforce_pp_baseline": OPENRLHF,
    },
    "slime": {
        "grpo": SLIME,
        "gspo": SLIME,
        "cispo": {**SLIME, "clip": (None, 0.2)},
        "reinforce_pp": SLIME,
        "reinforce_pp_baseline": SLIME,
        "opd": {**SLIME, "reward": 1.0, "teacher_surrogate": {"log_ratio_clamp": None}},
    },
    "openclaw": {
        "opd": {
            **TRL,
            "clip": (0.2, 0.28),
            "reward": 1.0,
            "reduction": "sequence_mean",
            "teacher_surrogate": {"clip": (0.2, 0.28), "log_ratio_clamp": None},
        },
    },
    "verl_agent": {"gigpo": {"dual_clip": 3.0, "episode_over": "step"}},
    "prime_rl": {"max_rl": {}},
}

_TEACHER = "[algorithm.teacher_top_k] or [algorithm.teacher_vocabulary]"
MOVED: Mapping[str, str] = {
    "kl": "algorithm.kl.coefficient",
    "kl_estimator": "algorithm.kl.estimator",
    "kl_straight": "algorithm.kl.straight",
    "kl_log_ratio_clamp": "algorithm.kl.log_ratio_clamp",
    "kl_clamp": "algorithm.kl.clamp",
    "kl_weighted": "algorithm.kl.weighted",
    "kl_reward": "algorithm.kl_reward.coefficient",
    "kl_gamma": "algorithm.kl_reward.gamma",
    "entropy": "algorithm.entropy.coefficient",
    "correction": "algorithm.correction.mode",
    "correction_level": "algorithm.correction.level",
    "correction_bounds": "algorithm.correction.bounds",
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
    "teacher_support": "algorithm.teacher_top_k.support",
    "teacher_k": "k in [algorithm.teacher_top_k] or [algorithm.teacher_surrogate]",
    "teacher_tail": "algorithm.teacher_top_k.tail",
    "combine": "algorithm.scale = 'function' for 'normalise', and no key for 'sum'",
    "whiten": "the table [algorithm.whiten]",
    "whiten_ddof": "algorithm.whiten.ddof",
    "whiten_eps": "algorithm.whiten.eps",
    "whiten_floor": "algorithm.whiten.floor",
    "length": "algorithm.reduction = LENGTH",
    "echo": "the table [algorithm.echo], with the steps over which it tapers in `taper`",
}
"""Where a key of [algorithm], or the table [echo], is now."""
