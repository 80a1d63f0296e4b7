"""Reward functions that compare a completion with the answer in the data."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

_NUMBER = re.compile(
    r"(?:(?<![\w.)])[-\u2212])?\$?"  # a sign, where no number or name stands before it
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?:[eE][-+]?[0-9]+)?"
)


def last_number(text: Any) -> float | None:
    """The last number in a text, a number or chat messages, of which the last one counts; None where there is none.

    Reads "1,234", "-3.5", "$12", "1e3" and a number before a full stop. A minus between two numbers is not a sign.
    """
    if isinstance(text, int | float):
        return float(text)
    found = [match.group() for match in _NUMBER.finditer(text_of(text))]
    if not found:
        return None
    plain = found[-1].translate({ord(","): None, ord("$"): None, 0x2212: "-"})
    return value if math.isfinite(value := float(plain)) else None


def last_number_matches(completions: list[Any], answer: list[Any], **_: Any) -> list[float]:
    """1 where the last number of the completion is the last number of the answer, else 0."""
    return [float(last_number(c) == _number(a)) for c, a in zip(completions, answer, strict=True)]


def exact_match(completions: list[Any], answer: list[Any], **_: Any) -> list[float]:
    """1 where completion and answer are the same text, white space at the ends aside, else 0."""
    return [float(text_of(c).strip() == text_of(a).strip()) for c, a in zip(completions, answer, strict=True)]


def contains(completions: list[Any], answer: list[Any], **_: Any) -> list[float]:
    """1 where the answer stands somewhere in the completion, else 0."""
    return [float(text_of(a).strip() in text_of(c)) for c, a in zip(completions, answer, strict=True)]


def text_of(value: Any) -> str:
    """The text of a completion or an answer: a string as it is, the last of a list of messages, a number as written."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return text_of(value.get("text", value.get("content", "")))
    if isinstance(value, Sequence) and value:
        parts = [part for part in value if isinstance(part, Mapping) and "role" not in part]
        return "".join(map(text_of, parts)) if parts else text_of(value[-1])
    return "" if value is None else str(value)


def _number(answer: Any) -> float:
    if (value := last_number(answer)) is None:
        raise ValueError(f"the answer {answer!r} holds no number")
    return value
