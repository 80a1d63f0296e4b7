"""What an algorithm answers, whose parts may be a user's own: a wrong shape or an exception is one line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from traceback import extract_tb
from typing import Any, TypeVar

import mlx.core as mx

from mlxrl.errors import UserError, brief, exception_line
from mlxrl.files import strict_json
from mlxrl.protocols import Algorithm
from mlxrl.types import Group, Logprobs, Metrics, MicroBatch, Totals, Trajectory

T = TypeVar("T")
PACKAGE = str(Path(__file__).parents[1])
LIBRARY = (str(Path(os.__file__).parent), "<frozen")
SHAPE = "for every trajectory of every group a number, or a list with one for each token that the model chose"


def advantages_of(algorithm: Algorithm, groups: Sequence[Group]) -> Sequence[Sequence[Any]]:
    """The advantages of groups.

    Raises:
        UserError: they are of another shape than `protocols.Algorithm` says, or a user's code raises.
    """
    found: Any = _called(algorithm, "advantages", lambda: algorithm.advantages(groups))
    if not _listed(found, len(groups)):
        raise UserError(algorithm.name, "advantages", f"wanted {SHAPE}; got {brief(found)} for {len(groups)} groups")
    for number, (group, credits) in enumerate(zip(groups, found, strict=True)):
        fits = _listed(credits, len(group)) and all(map(_fits, credits, group))
        if not fits:
            where = f"group {number} of {len(group)} trajectories"
            raise UserError(algorithm.name, "advantages", f"wanted {SHAPE}; got {brief(credits)} for {where}")
    return found


def state_of(algorithm: Algorithm | None) -> Any:
    """A copy of what an algorithm keeps from step to step, as JSON has it; None for one without such.

    Raises:
        UserError: it is no strict JSON, or a user's code raises.
    """
    if algorithm is None or (own := getattr(algorithm, "state_dict", None)) is None:
        return None
    found: Any = _called(algorithm, "state_dict", own)
    try:
        return strict_json(json.dumps(found, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        why = f"wanted strict JSON: finite numbers, texts, lists and objects of them; got {brief(found)}"
        raise UserError(algorithm.name, "state_dict", why) from None


def take_state(algorithm: Algorithm | None, value: Any) -> None:
    """Hand an algorithm what `state_of` has found; UserError where a user's code raises."""
    if algorithm is not None and (own := getattr(algorithm, "load_state_dict", None)) is not None:
        _called(algorithm, "load_state_dict", lambda: own(value))


def loss_of(algorithm: Algorithm, new: Logprobs, batch: MicroBatch, totals: Totals) -> tuple[mx.array, Metrics]:
    """The loss of a micro-batch and its metrics; errors as of `advantages_of`."""
    found: Any = _called(algorithm, "loss", lambda: algorithm.loss(new, batch, totals))
    pair = isinstance(found, tuple) and len(found) == 2
    if not pair or not isinstance(found[0], mx.array) or found[0].size != 1 or not isinstance(found[1], Mapping):
        wanted = "wanted a scalar array and a dict of metrics"
        got = f"an array of shape {found[0].shape}" if pair and isinstance(found[0], mx.array) else brief(found)
        raise UserError(algorithm.name, "loss", f"{wanted}, got {got}")
    for name, value in found[1].items():
        if not isinstance(value, int | float) and getattr(value, "size", 0) != 1:
            raise UserError(algorithm.name, "loss", f"metric {name!r}: wanted a number, got {brief(value)}")
    return found


def _called(algorithm: Algorithm, method: str, function: Callable[[], T]) -> T:
    """What a method returns; what a user's code in it raises as one line with its place."""
    try:
        return function()
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:
        frames = [frame for frame in extract_tb(error.__traceback__) if not frame.filename.startswith(LIBRARY)]
        frames = [frame for frame in frames if "site-packages" not in frame.filename]
        if frames[-1].filename.startswith(PACKAGE):
            raise
        place = f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}"
        hint = "; the log-probs are new.token_logprobs" if "Logprobs" in str(error) else ""
        raise UserError(algorithm.name, method, f"{place}: {exception_line(error)}{hint}") from error


def _listed(found: Any, count: int) -> bool:
    return isinstance(found, Sequence) and not isinstance(found, str) and len(found) == count


def _fits(credit: Any, trajectory: Trajectory) -> bool:
    """Whether a trajectory's advantage is a number, or one for each token that it chose."""
    if getattr(credit, "ndim", 0) == 1:
        credit = credit.tolist()
    numbers: Sequence[Any] = credit if isinstance(credit, Sequence) else [credit]
    right = all(isinstance(one, int | float) or getattr(one, "ndim", 1) == 0 for one in numbers)
    return right and (not isinstance(credit, Sequence) or len(credit) == trajectory.num_sampled)
