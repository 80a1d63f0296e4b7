"""Numbers and untrusted texts as short pieces of a line."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

BARS = "▁▂▃▄▅▆▇█"
ASCII_BARS = "_.-=+*%@"
TREND_STEPS = 5
TREND_SHARE = 0.05
"""A reward is up or down when it leaves the mean of the last TREND_STEPS by this share of the range seen so far."""


def safe(text: str) -> str:
    """A model's text on one line that a terminal shows and does not obey.

    Control and format characters (escape sequences, changes of writing direction), line ends and lone surrogates are
    written as their escapes. Marks that only combine with a letter are kept.
    """
    return "".join(_shown(character) for character in text)


def _shown(character: str) -> str:
    if character == "\n":
        return "\\n"
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Cn", "Zl", "Zp"):
        return character.encode("unicode_escape").decode("ascii")
    return character


def shorten(text: str, width: int) -> str:
    """A text of at most `width` characters, the middle left out where it is longer."""
    if len(text) <= width:
        return text
    head = (width - 3) // 2
    return f"{text[:head]}...{text[len(text) - (width - 3 - head) :]}"


def sparkline(values: Sequence[float], width: int = 40, bars: str = BARS) -> str:
    """At most `width` bars, from the lowest to the highest value; each is the mean of the values it stands for.

    Values that are not finite are left out.
    """
    finite = [value for value in values if math.isfinite(value)]
    count = min(width, len(finite))
    cuts = [len(finite) * place // count for place in range(count + 1)] if count else []
    means = [sum(finite[a:b]) / (b - a) for a, b in pairwise(cuts)]
    if not means:
        return ""
    low, span = min(means), max(means) - min(means)
    top = len(bars) - 1
    return "".join(bars[round((mean - low) / span * top) if span else 0] for mean in means)


def duration(seconds: float) -> str:
    """ "42 s", "3:05" or "2:03:05"."""
    if not math.isfinite(seconds):
        return "-"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}:{rest:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def number(value: float, form: str = ".3f") -> str:
    """A number, "-" where there is none."""
    return format(value, form) if math.isfinite(value) else "-"


def size(count: float) -> str:
    """Bytes as "1.24 GB" (10^9) or "12 MB" (10^6)."""
    if not math.isfinite(count):
        return "-"
    return f"{count / 1e6:.0f} MB" if count < 1e8 else f"{count / 1e9:.2f} GB"


def trend(reward: float, rewards: Sequence[float]) -> str:
    """ "+", "-" or "=" against the mean of the last steps, "" where there is nothing to compare."""
    known = [value for value in rewards if math.isfinite(value)]
    if not known or not math.isfinite(reward):
        return ""
    last = known[-TREND_STEPS:]
    change = reward - sum(last) / len(last)
    threshold = TREND_SHARE * (max(*known, reward) - min(*known, reward))
    return "=" if abs(change) <= threshold else "+" if change > 0 else "-"


def evaluated(summary: Mapping[str, Any], digits: int = 3) -> str:
    """The numbers of an evaluation that it has, as a text."""
    parts = [f"accuracy {summary['accuracy']:.{digits}f}"] if "accuracy" in summary else []
    parts += [f"mean reward {summary['mean_reward']:.{digits}f}"] if "mean_reward" in summary else []
    parts += [f"{name} {value:.{digits}f}" for name, value in summary.items() if name.startswith("pass@")]
    parts += [f"loss {summary['loss']:.4f}", f"perplexity {summary['perplexity']:.4g}"] if "loss" in summary else []
    return ", ".join([*parts, f"{summary['n']} examples"])


def times(count: int, noun: str) -> str:
    """A count with its noun."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
