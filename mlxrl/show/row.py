"""A step as a row of a table 80 columns wide."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxrl.show.text import number, safe, shorten, size

HEADING = "    step   reward   silent  length  cut    tok/s  rollout   update     peak"
TREND_STEPS = 5
TREND_SHARE = 0.05
"""A reward is up or down when it leaves the mean of the last TREND_STEPS by this share of the range seen so far."""

ERROR_WIDTH = 160
"""Characters of an environment's fault that are shown."""

MARKS = {"+": "▲", "-": "▼", "=": "·"}


@dataclass(frozen=True, slots=True)
class Row:
    """The cells before and after the trend mark; direction: "+", "-", "=" or "" for the first; warnings: own lines."""

    before: str
    trend: str
    direction: str
    after: str
    warnings: tuple[str, ...]


def row(metrics: Mapping[str, Any], done: int, steps: int, rewards: Sequence[float], unicode: bool = True) -> Row:
    """The row after `done` of `steps` steps; rewards: those of the steps before.

    Columns: mean reward, groups whose rewards are all equal, mean tokens of a completion, share that ran into the
    limit, sampled tokens per second, seconds of rollout and update, peak memory.
    """

    def value(name: str, form: str) -> str:
        return number(float(metrics.get(name, math.nan)), form)

    reward = float(metrics.get("reward", math.nan))
    found = direction(reward, rewards)
    silent = f"{value('groups/zero_variance', '.0f')}/{value('groups/sampled', '.0f')}"
    after = (
        f"{silent:>7}{value('completions/mean_length', '.1f'):>8}{value('completions/clipped_ratio', '.0%'):>5}"
        f"{value('rollout/tokens_per_second', '.0f'):>9}{value('seconds/rollout', '.2f'):>7} s"
        f"{value('seconds/update', '.2f'):>7} s{size(float(metrics.get('memory/peak', math.nan))):>9}"
    )
    mark = MARKS.get(found, " ") if unicode else (found or " ")
    return Row(f"{f'{done}/{steps}':>8} {number(reward):>7} ", mark, found, after, _warnings(metrics))


def direction(reward: float, rewards: Sequence[float]) -> str:
    """ "+", "-" or "=" against the mean of the last steps, "" where there is nothing to compare."""
    known = [value for value in rewards if math.isfinite(value)]
    if not known or not math.isfinite(reward):
        return ""
    last = known[-TREND_STEPS:]
    change = reward - sum(last) / len(last)
    threshold = TREND_SHARE * (max(*known, reward) - min(*known, reward))
    return "=" if abs(change) <= threshold else "+" if change > 0 else "-"


def _warnings(metrics: Mapping[str, Any]) -> tuple[str, ...]:
    failed, skipped = metrics.get("rewards/unscored", 0), metrics.get("updates/skipped", 0)
    found: list[str] = []
    if errors := metrics.get("episodes/errors", 0):
        reason = shorten(safe(str(metrics.get("episodes/error"))), ERROR_WIDTH)
        found.append(f"{errors:.0f} episodes ended because their environment failed, the first: {reason}")
    if unclosed := metrics.get("episodes/close_errors", 0):
        reason = shorten(safe(str(metrics.get("episodes/close_error"))), ERROR_WIDTH)
        found.append(f"{unclosed:.0f} environments could not be closed, the first: {reason}")
    if context := metrics.get("rollout/context"):
        found.append(f"nothing was sampled: the prompt fills the context of {context:.0f} tokens")
    if cut := metrics.get("sequences/dropped_tokens"):
        found.append(f"{cut:.0f} sampled tokens lie behind train.max_tokens_per_row and were not trained on")
    if failed:
        found.append(f"{failed:.0f} completions could not be scored and are left out")
    if skipped:
        found.append("loss or gradient was not finite; the update was skipped")
    elif metrics.get("updates") == 0:
        drawn, draws = metrics["groups/sampled"], metrics["rollout/rounds"]
        found.append(f"none of {drawn:.0f} groups has a signal, draws: {draws:.0f}; nothing was updated")
    return tuple(found)
