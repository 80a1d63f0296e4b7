"""The numbers that a recipe's arguments may be."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

_NOT_NEGATIVE = (
    "eps", "whiten_ddof", "whiten_eps", "whiten_floor", "omega", "kl_reward", "veto", "off_policy", "reward",
    "kl", "entropy",
)  # fmt: skip
_SHARES = ("gamma", "kl_gamma", "teacher_gamma", "teacher_beta")
_POSITIVE = ("length", "cap", "tau_pos", "tau_neg")
_ABOVE_ONE = ("dual_clip", "delta")
_ORDERED = ("log_ratio_clamp", "kl_log_ratio_clamp", "kl_clamp", "teacher_clamp", "correction_bounds")


def refuse_number(name: str, key: str, value: Any) -> None:
    """ValueError for a number of recipe `name` that no equation of it takes; None and what is no number pass."""
    wanted = _wanted(key, value)
    if wanted is not None:
        raise ValueError(f"{name}: {key}: wanted {wanted}, got {value}")


def _wanted(key: str, value: Any) -> str | None:
    """What the value should be, None where it is that."""
    if key == "clip" or key in _ORDERED:
        return _pair(key, value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if math.isnan(value) or (math.isinf(value) and key not in ("cap", *_ABOVE_ONE)):
        return "a finite number"
    bounds: Mapping[Sequence[str], tuple[bool, str]] = {
        _NOT_NEGATIVE: (value >= 0, "at least 0"),
        _SHARES: (0 <= value <= 1, "between 0 and 1"),
        _POSITIVE: (value > 0, "more than 0"),
        _ABOVE_ONE: (value > 1, "more than 1, or none"),
    }
    return next((words for keys, (right, words) in bounds.items() if key in keys and not right), None)


def _pair(key: str, value: Any) -> str | None:
    """None for a pair of bounds, either of which may be missing."""
    if value is None or not isinstance(value, Sequence) or len(value) != 2:
        return None
    low, high = (bound if isinstance(bound, int | float) else None for bound in value)
    if any(bound is not None and math.isnan(bound) for bound in (low, high)):
        return "numbers"
    if key == "clip":
        inside = (low is None or 0 <= low <= 1) and (high is None or high >= 0)
        return None if inside else "distances from 1, the lower between 0 and 1, the upper at least 0"
    return "a lower bound below the upper one" if low is not None and high is not None and low >= high else None
