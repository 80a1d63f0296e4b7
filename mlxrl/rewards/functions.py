"""What is known of a reward function before it is called: its name, its parameters, its weight."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from mlxrl.data import RESERVED, did_you_mean

Function: TypeAlias = Callable[..., Any]


def name_of(function: Function) -> str:
    """The name under which a reward function is reported."""
    return getattr(function, "__name__", None) or type(function).__name__


def accept(function: Function, columns: Sequence[str]) -> None:
    """Check that a reward function can be called with what the data hold.

    Raises:
        ValueError: a parameter without default that is neither `prompts`, `completions` nor one of the columns.
    """
    offered = [*RESERVED, *columns]
    for parameter in parameters(function):
        name = parameter.name
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ValueError(f"reward {name_of(function)!r}: parameter {name!r} cannot be passed as a keyword")
        if parameter.default is parameter.empty and name not in offered:
            hint = did_you_mean(name, offered)
            raise ValueError(
                f"reward {name_of(function)!r}: wants {name!r}, but the data offer {', '.join(offered)}{hint}"
            )


def parameters(function: Function, *, variadic: bool = False) -> list[inspect.Parameter]:
    """What a function takes; `variadic` with its *args and **kwargs. ValueError where it does not tell."""
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise ValueError(f"reward {name_of(function)!r}: its parameters cannot be read; wrap it in a def") from None
    return [p for p in found if variadic or p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]


def check_weights(count: int, weights: Sequence[float] | None, *, alone: bool = False) -> list[float]:
    """The weights of `count` reward functions; ValueError where they are not one finite number each, or all 0.

    alone: whether there may be none, because an environment gives rewards.
    """
    if count < 1 and alone and not weights:
        return []
    if count < 1:
        raise ValueError("reward: wanted at least one function, got none")
    factors = [1.0] * count if weights is None else [float(weight) for weight in weights]
    if len(factors) != count:
        raise ValueError(f"reward: weights: wanted {count}, one per function, got {len(factors)}")
    if not all(map(math.isfinite, factors)) or not any(factors):
        raise ValueError(f"reward: weights: wanted finite numbers that are not all 0, got {factors}")
    return factors
