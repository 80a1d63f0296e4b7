"""Reward functions that compare a completion with the answer in the data.

One comparison for answers of every type. A text that is a number as a whole is that number: 4, 4.0, "4" and "$4.00" are
the same answer. Whole numbers are compared exactly, others up to 1e-9 of their size. True and False are the words
"true" and "false" in any case, and no numbers. Other texts are the same where their characters are, white space at the
ends aside. An answer that is missing, null, empty, blank or NaN is none: its completion gets NaN, which is no score.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any, TypeAlias

_NUMBER = re.compile(
    r"(?:(?<![\w.)])[-\u2212])?\$?"  # a sign, where no number or name stands before it
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?:[eE][-+]?[0-9]+)?"
)
Plain: TypeAlias = bool | Decimal | str
"""An answer as it is compared: true or false, a number, or a text."""
NEAR = 1e-9
"""The share of their size by which numbers that are not whole may differ."""


def last_number(text: Any) -> float | None:
    """The last number in a text, a number or chat messages, of which the last one counts; None where there is none.

    Reads "1,234", "-3.5", "$12", "1e3" and a number before a full stop. A minus between two numbers is not a sign.
    """
    found = _last(text)
    return None if found is None or not math.isfinite(value := float(found)) else value


def last_number_matches(completions: list[Any], answer: list[Any], **_: Any) -> list[float]:
    """1 where the last number of the completion is the last number of the answer, else 0; NaN where that has none."""
    return _compared(completions, answer, _last, lambda said, gold: _same(_last(said), gold))


def exact_match(completions: list[Any], answer: list[Any], **_: Any) -> list[float]:
    """1 where completion and answer are the same, else 0; NaN without an answer."""
    return _compared(completions, answer, _plain, lambda said, gold: _same(_plain(said), gold))


def contains(completions: list[Any], answer: list[Any], **_: Any) -> list[float]:
    """1 where the answer stands in the completion, a number, true and false as a whole, else 0; NaN without one."""
    return _compared(completions, answer, _plain, _stands_in)


def text_of(value: Any) -> str:
    """The text of a completion or an answer: a string as it is, the last of a list of messages, a number as written."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return text_of(value.get("text", value.get("content", "")))
    if isinstance(value, Sequence):
        parts = [part for part in value if isinstance(part, Mapping) and "role" not in part]
        return "".join(map(text_of, parts)) if parts or not value else text_of(value[-1])
    return "" if value is None else str(value)


def _compared(
    completions: Sequence[Any],
    answers: Sequence[Any],
    read: Callable[[Any], Plain | None],
    right: Callable[[Any, Any], bool],
) -> list[float]:
    golds = [read(answer) for answer in answers]
    return [math.nan if g is None else float(right(c, g)) for c, g in zip(completions, golds, strict=True)]


def _plain(value: Any) -> Plain | None:
    """A value as it is compared, None where it is none."""
    value = value.item() if getattr(value, "ndim", 1) == 0 else value  # a number of numpy's
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return Decimal(repr(value) if isinstance(value, float) else value) if Decimal(value).is_finite() else None
    if isinstance(value, list | tuple) and value and not isinstance(value[-1], str | Mapping):
        return _plain(value[-1])
    text = text_of(value).strip()
    if text.casefold() in ("true", "false"):
        return text.casefold() == "true"
    number = _number(text) if _NUMBER.fullmatch(text) else None
    return number if number is not None else text or None


def _last(value: Any) -> Decimal | None:
    """The last number of a value; none of true and false."""
    plain = _plain(value)
    if not isinstance(plain, str):
        return plain if isinstance(plain, Decimal) else None
    found = [match.group() for match in _NUMBER.finditer(plain)]
    return _number(found[-1]) if found else None


def _number(text: str) -> Decimal | None:
    try:
        number = Decimal(text.translate({ord(","): None, ord("$"): None, 0x2212: "-"}))
    except InvalidOperation:  # its exponent is beyond all bounds
        return None
    return number if number.is_finite() else None


def _same(said: Plain | None, gold: Plain) -> bool:
    if isinstance(said, Decimal) and isinstance(gold, Decimal):
        whole = said == said.to_integral_value() and gold == gold.to_integral_value()
        return said == gold or (not whole and math.isclose(float(said), float(gold), rel_tol=NEAR))
    return type(said) is type(gold) and said == gold


def _stands_in(said: Any, gold: Plain) -> bool:
    text = text_of(said)
    if isinstance(gold, Decimal):
        return any(_same(_number(match.group()), gold) for match in _NUMBER.finditer(text))
    if isinstance(gold, bool):
        return re.search(rf"\b{gold}\b", text, re.IGNORECASE) is not None
    return gold in text
