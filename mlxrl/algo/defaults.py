"""The recipes' defaults, and other libraries' conventions, as data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Table = Mapping[str, Any]

_WHITENED: Table = {"whiten_ddof": 1, "whiten_eps": 1e-8, "whiten_floor": 0.0}
_WHITEN: Table = {"whiten": False, **_WHITENED}
_SCALED: Table = {"scale": "group", "eps": 1e-6}
_GROUP: Table = {**_SCALED, "combine": "sum", **_WHITEN}
_RATIO: Table = {"ratio": "token", "log_ratio_clamp": (-20.0, 20.0)}
_CLIPPED: Table = {**_RATIO, "clip": (0.2, 0.2), "dual_clip": None, "delta": None}
_REGULARISERS: Table = {
    "reduction": "token_mean",
    "length": None,
    "kl": 0.0,
    "kl_estimator": "k3",
    "kl_straight": None,
    "kl_log_ratio_clamp": (-20.0, 20.0),
    "kl_clamp": None,
    "kl_weighted": False,
    "kl_reward": 0.0,
    "kl_gamma": 1.0,
    "entropy": 0.0,
    "correction": None,
    "correction_level": "token",
    "correction_bounds": (0.0, 2.0),
    "veto": None,
    "off_policy": None,
    "mask_truncated": False,
}
_PPO: Table = {**_CLIPPED, **_REGULARISERS}

DEFAULTS: Mapping[str, Table] = {
    "grpo": {**_GROUP, **_PPO, "reduction": "sequence_mean"},
    "dr_grpo": {**_GROUP, **_PPO, "scale": "none", "reduction": "constant"},
    "dapo": {**_GROUP, **_PPO, "clip": (0.2, 0.28)},
    "gspo": {**_GROUP, **_PPO, "ratio": "sequence", "clip": (3e-4, 4e-4), "reduction": "sequence_mean"},
    "gspo_token": {
        **_GROUP,
        **_PPO,
        "ratio": "sequence_token",
        "clip": (3e-4, 4e-4),
        "reduction": "sequence_mean",
    },
    "rloo": {**_WHITEN, **_PPO},
    "reinforce_pp": {"gamma": 1.0, **_WHITENED, **_PPO},
    "reinforce_pp_baseline": {**_WHITENED, **_PPO},
    "cispo": {**_GROUP, **_RATIO, "clip": (None, 4.0), **_REGULARISERS},
    "gigpo": {
        **_SCALED,
        "scale": "none",
        "gamma": 0.95,
        "omega": 1.0,
        "similarity": None,
        "episode_over": "trajectory",
        **_PPO,
    },
    "opd": {
        "teacher": 1.0,
        "teacher_term": "advantage",
        "teacher_from": "old",
        "teacher_gamma": 0.0,
        "teacher_clamp": None,
        "teacher_estimator": "k3",
        "teacher_divergence": "reverse",
        "teacher_beta": 0.5,
        "teacher_support": "teacher",
        "teacher_k": 16,
        "teacher_tail": True,
        "reward": 0.0,
        **_GROUP,
        **_PPO,
    },
    "max_rl": {**_WHITEN, **_PPO},
    "sapo": {
        **_GROUP,
        **_RATIO,
        "tau_pos": 1.0,
        "tau_neg": 1.05,
        **_REGULARISERS,
        "reduction": "sequence_mean",
    },
    "gmpo": {
        **_GROUP,
        "log_ratio_clamp": (-20.0, 20.0),
        "clip": (0.4, 0.4),
        **_REGULARISERS,
        "reduction": "sequence_mean",
    },
    "dppo": {**_GROUP, **_RATIO, "clip": (0.2, 0.2), "cap": 20.0, **_REGULARISERS},
    "luspo": {
        **_GROUP,
        **_PPO,
        "ratio": "sequence",
        "clip": (2e-3, 2.5e-3),
        "reduction": "constant",
        "length": 1.0,
    },
}


def _everywhere(common: Table, special: Mapping[str, Table]) -> Mapping[str, Table]:
    """What a library does in all its recipes, where they have the argument, and in single ones."""
    return {
        name: {**{key: value for key, value in common.items() if key in DEFAULTS[name]}, **own}
        for name, own in special.items()
    }


CONVENTIONS: Mapping[str, Mapping[str, Table]] = {
    "verl": _everywhere(
        {"eps": 1e-6, "dual_clip": 3.0, "kl_clamp": (-10.0, 10.0), "log_ratio_clamp": (-20.0, 20.0)},
        {
            "grpo": {"reduction": "token_mean"},
            "dr_grpo": {},
            "dapo": {"dual_clip": 10.0},
            "gspo": {"ratio": "sequence_token", "log_ratio_clamp": (None, 10.0), "dual_clip": None},
            "rloo": {},
            "reinforce_pp": {},
            "reinforce_pp_baseline": {},
            "cispo": {"clip": (0.2, 0.2)},
            "opd": {"teacher_clamp": (-10.0, 10.0)},
            "sapo": {},
            "gmpo": {},
            "dppo": {},
        },
    ),
    "trl": _everywhere(
        {"eps": 1e-4, "log_ratio_clamp": None, "kl_log_ratio_clamp": None},
        {
            "grpo": {},
            "dr_grpo": {},
            "dapo": {},
            "gspo": {},
            "gspo_token": {},
            "rloo": {"ratio": "sequence_sum", "reduction": "sequence_mean"},
            "cispo": {},
            "sapo": {},
            "luspo": {},
        },
    ),
    "openrlhf": _everywhere(
        {
            "eps": 1e-9,
            "kl_clamp": (-10.0, 10.0),
            "whiten_ddof": 0,
            "whiten_eps": 0.0,
            "whiten_floor": 1e-8,
            "reduction": "token_mean",
        },
        {
            "grpo": {},
            "dr_grpo": {},
            "gspo": {"reduction": "sequence_mean"},
            "rloo": {},
            "reinforce_pp": {},
            "reinforce_pp_baseline": {},
        },
    ),
    "slime": _everywhere(
        {"eps": 1e-6, "log_ratio_clamp": None, "kl_clamp": (-10.0, 10.0), "reduction": "sequence_mean"},
        {
            "grpo": {},
            "gspo": {},
            "cispo": {"clip": (None, 0.2)},
            "reinforce_pp": {},
            "reinforce_pp_baseline": {},
            "opd": {"reward": 1.0},
        },
    ),
    "openclaw": _everywhere(
        {"log_ratio_clamp": None, "kl_log_ratio_clamp": None, "reduction": "sequence_mean"},
        {"opd": {"clip": (0.2, 0.28), "reward": 1.0}},
    ),
    "verl_agent": _everywhere({"dual_clip": 3.0}, {"gigpo": {"episode_over": "step"}}),
    "prime_rl": _everywhere({"reduction": "token_mean"}, {"max_rl": {}}),
}
