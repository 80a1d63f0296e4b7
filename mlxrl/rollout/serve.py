"""Which caches serve a model, found out by a short check of its own forward against rows that decode together."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import mlx.core as mx

from mlxrl.policy.head import Head
from mlxrl.rollout.equals import Equals
from mlxrl.rollout.prefill import prefill
from mlxrl.rollout.slots import Slots

Service: TypeAlias = Literal["ragged", "slots", "equal", "single"]
"""How rows are held: in slots, and fed different numbers of tokens at once; in slots, and fed one number at a time;
at equal lengths; one by one."""

WARNINGS = {
    "equal": "rows of different lengths do not decode together correctly; only rows of equal length are batched",
    "single": "rows do not decode together correctly; they are decoded one by one",
}
RAGGED = ((1, 2, 3, 4, 5), (6, 7), (3, 8, 1, 9, 2, 4, 7))
EVEN = ((1, 2, 3, 4), (5, 6, 7, 8), (9, 3, 5, 1))
FED = ((5, 3, 8, 2), (7, 1, 4, 6), (2, 9, 9, 3))
JOINS = (4, 6, 2, 8, 1)

_services: dict[int, Service] = {}


def service_of(model: Any, head: Head) -> Service:
    """How the rows of a model are held. A model is checked once; what it cannot do is said once."""
    if id(model) not in _services:
        service = check(model, head)
        if service in WARNINGS:
            warnings.warn(f"{type(model).__module__}: {WARNINGS[service]}", stacklevel=2)
        _services[id(model)] = service
        weakref.finalize(model, _services.pop, id(model), None)
    return _services[id(model)]


def check(model: Any, head: Head) -> Service:
    """The widest service whose logits are those of each row alone."""
    services: tuple[Service, ...] = ("ragged", "slots", "equal")
    for service in services:
        if _agrees(model, head, service):
            return service
    return "single"


def _agrees(model: Any, head: Head, service: Service) -> bool:
    """Feed given tokens to three rows at once, one of which leaves half way, and another joins where it can."""
    prompts = EVEN if service == "equal" else RAGGED
    wanted = [_alone(model, head, prompt, fed) for prompt, fed in zip(prompts, FED, strict=True)]
    try:
        got = _together(model, head, service, prompts)
        if service != "equal":
            wanted[1] = wanted[1][:2] + _alone(model, head, JOINS, FED[1][2:])
        else:
            wanted[1] = wanted[1][:2]
        pairs = [pair for mine, own in zip(got, wanted, strict=True) for pair in zip(mine, own, strict=True)]
        return all(_near(mine, own) for mine, own in pairs)
    except (ValueError, TypeError, AttributeError, IndexError, NotImplementedError, RuntimeError):
        return False


def _alone(model: Any, head: Head, prompt: tuple[int, ...], fed: Sequence[int]) -> list[mx.array]:
    """Logits [V] after each of the tokens fed behind a prompt."""
    caches = prefill(model, head, [prompt], 2)[0].caches
    return [head.project(head.trunk(mx.array([[token]]), caches)[:, -1])[0] for token in fed]


def _together(model: Any, head: Head, service: Service, prompts: Sequence[tuple[int, ...]]) -> list[list[mx.array]]:
    """The same of three rows at once; after two tokens the second is replaced, or dropped."""
    caches = Equals(len(prompts)) if service == "equal" else Slots(len(prompts))
    lengths = mx.array([len(prompt) for prompt in prompts])
    caches.fit(16)
    together = [list(prompts)] if service == "ragged" else [[prompt] for prompt in prompts]
    filled = [one for batch in together for one in prefill(model, head, batch, 2048)]
    for row, one in enumerate(filled):
        caches.place([row], one)
    rows: list[list[mx.array]] = [[] for _ in prompts]
    alive = [0, 1, 2]
    for turn, tokens in enumerate(zip(*FED, strict=True)):
        if turn == 2 and caches.joins:
            caches.place([1], prefill(model, head, [JOINS], 2048)[0])
            lengths[1] = len(JOINS)
        elif turn == 2:
            alive = [0, 2]
            caches.keep(alive, 16)
            lengths = lengths[mx.array(alive)]
        given = caches.caches(lengths)
        hidden = head.trunk(mx.array([[tokens[row]] for row in alive]), given)
        caches.take(given)
        lengths = lengths + 1
        for row, logits in zip(alive, head.project(hidden[:, -1]), strict=True):
            rows[row].append(logits)
    return rows


def _near(mine: mx.array, own: mx.array) -> bool:
    """Whether logits differ by rounding only; in 16 bits that is much, a row out of place more."""
    tolerance = 1e-3 if own.dtype == mx.float32 else 0.15
    own, mine = own.astype(mx.float32), mine.astype(mx.float32)
    if not mx.isfinite(own).all().item():
        return True  # the model itself is at fault; its rows will end as errors
    spread = mx.sqrt(mx.var(own)) + 1e-6
    error = mx.sqrt(mx.square(mine - own).mean()) / spread
    return bool((error <= tolerance).item())
