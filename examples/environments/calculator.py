"""A calculator as a tool: `factory = "calculator.py:calculator"`, or `environment=calculator` in Python.

Its arithmetic has a parser of its own: numbers, + - * /, signs and brackets, and nothing else.
"""

from __future__ import annotations

import re
from fractions import Fraction

from mlxrl.tools import Tools

LONGEST, DEEPEST = 200, 40
_TOKEN = re.compile(r"\s*(?:(\d{1,40}(?:\.\d{1,40})?|\.\d{1,40})|([-+*/()]))")


def calculate(expression: str) -> str:
    """Compute an arithmetic expression of numbers, + - * / and brackets.

    Args:
        expression: for example (2 + 3) * 4.
    """
    if len(expression) > LONGEST:
        raise ValueError(f"wanted at most {LONGEST} characters, got {len(expression)}")
    return written(Reader(expression.replace("×", "*").replace("÷", "/")).all())


def written(value: Fraction) -> str:
    """A number as text: whole where it is, else to 12 digits."""
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.12g}"


class Reader:
    """Recursive descent over an expression, exact.

    sum = product (("+" | "-") product)*;  product = factor (("*" | "/") factor)*;
    factor = ("+" | "-") factor | "(" sum ")" | number
    """

    def __init__(self, text: str) -> None:
        self.text, self.place, self.depth = text, 0, 0
        self.token = ""
        self._next()

    def all(self) -> Fraction:
        """The value of the whole text."""
        value = self._sum()
        if self.token:
            raise ValueError(f"did not expect {self.token!r}")
        return value

    def _next(self) -> str:
        """Take the next token; returns the present one."""
        taken, rest = self.token, self.text[self.place :]
        found = _TOKEN.match(rest)
        if found is None and rest.strip():
            raise ValueError(f"did not expect {rest.strip()[0]!r}")
        self.token = "" if found is None else found[1] or found[2]
        self.place += 0 if found is None else found.end()
        return taken

    def _sum(self) -> Fraction:
        value = self._product()
        while self.token in ("+", "-"):
            value = value + self._product() if self._next() == "+" else value - self._product()
        return value

    def _product(self) -> Fraction:
        value = self._factor()
        while self.token in ("*", "/"):
            times, other = self._next() == "*", self._factor()
            if not times and not other:
                raise ValueError("division by zero")
            value = value * other if times else value / other
        return value

    def _factor(self) -> Fraction:
        self.depth += 1
        if self.depth > DEEPEST:
            raise ValueError(f"wanted at most {DEEPEST} signs and brackets inside each other")
        token = self._next()
        if token in ("+", "-"):
            value = self._factor() * (-1 if token == "-" else 1)
        elif token == "(":
            value = self._sum()
            if self._next() != ")":
                raise ValueError("a bracket is not closed")
        elif token and token[0] in ".0123456789":
            value = Fraction(token)
        else:
            raise ValueError(f"wanted a number, got {token or 'nothing'}")
        self.depth -= 1
        return value


calculator = Tools([calculate])
