"""How a model's sequences can be batched, checked by its own forward against sequences that decode together."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Literal, TypeAlias

import mlx.core as mx

from mlxrl.policy.policy import Policy
from mlxrl.rollout.kv_cache import EqualLengthCache, SlotCache
from mlxrl.rollout.prefill import PREFILL_CHUNK, prefill

BatchingMode: TypeAlias = Literal["ragged", "uniform", "equal_length", "single"]
"""In slots, and fed different numbers of tokens at once or one number at a time; at equal lengths; one by one."""
SLOTTED: tuple[BatchingMode, ...] = ("ragged", "uniform")

WARNINGS = {
    "equal_length": "different lengths do not decode together correctly; only sequences of equal length are batched",
    "single": "sequences do not decode together correctly; they are decoded one by one",
}
# Ids that every model has.
RAGGED = ((1, 2, 0, 1, 2), (0, 2), (2, 0, 1, 1, 2, 0, 2))
EQUAL = ((1, 2, 0, 1), (2, 0, 0, 2), (0, 1, 1, 2))
FED = ((2, 0, 1, 2), (1, 1, 0, 2), (0, 2, 2, 1))
JOINS = (1, 0, 2, 0, 1)


def mode_of(policy: Policy) -> BatchingMode:
    """The fastest mode that is right for a model, checked once; a slower one is a warning."""
    if (mode := policy.memo.get("batching mode")) is None:
        mode = policy.memo["batching mode"] = check(policy)
        if mode in WARNINGS:
            warnings.warn(f"{type(policy.model).__module__}: {WARNINGS[mode]}", stacklevel=2)
    return mode


def check(policy: Policy) -> BatchingMode:
    """The fastest mode whose logits are those of each sequence alone."""
    modes: tuple[BatchingMode, ...] = (*SLOTTED, "equal_length", "single")
    return next(mode for mode in modes if mode == "single" or _agrees(policy, mode))


def _agrees(policy: Policy, mode: BatchingMode) -> bool:
    """Feed given tokens to three sequences at once, one of which leaves half way, and another joins where it can."""
    prompts = EQUAL if mode == "equal_length" else RAGGED
    wanted = [_alone(policy, prompt, fed) for prompt, fed in zip(prompts, FED, strict=True)]
    wanted[1] = wanted[1][:2] + (_alone(policy, JOINS, FED[1][2:]) if mode in SLOTTED else [])
    try:
        got = _together(policy, mode, prompts)
        return all(_near(mine, own) for pair in zip(got, wanted, strict=True) for mine, own in zip(*pair, strict=True))
    except (ValueError, TypeError, AttributeError, IndexError, NotImplementedError, RuntimeError):
        return False


def _alone(policy: Policy, prompt: tuple[int, ...], fed: Sequence[int]) -> list[mx.array]:
    """Logits [V] after each of the tokens fed after a prompt."""
    head, caches = policy.head, prefill(policy, [prompt], 2)[0].caches
    found: list[mx.array] = []
    for token in fed:
        found.append(head.project(head.trunk(mx.array([[token]]), caches)[:, -1])[0])
        mx.eval(found)  # so that the caches of no two turns are there together
    return found


def _together(policy: Policy, mode: BatchingMode, prompts: Sequence[tuple[int, ...]]) -> list[list[mx.array]]:
    """The same of three rows at once; after two tokens the second is replaced, or dropped."""
    caches = SlotCache(len(prompts)) if mode in SLOTTED else EqualLengthCache(len(prompts))
    lengths = mx.array([len(prompt) for prompt in prompts])
    caches.fit(16)
    together = [list(prompts)] if mode == "ragged" else [[prompt] for prompt in prompts]
    prefilled = [one for batch in together for one in prefill(policy, batch, PREFILL_CHUNK)]
    for row, one in enumerate(prefilled):
        caches.place([row], one)
    rows: list[list[mx.array]] = [[] for _ in prompts]
    live = [0, 1, 2]
    for turn, tokens in enumerate(zip(*FED, strict=True)):
        if turn == 2 and mode in SLOTTED:
            caches.place([1], prefill(policy, [JOINS], PREFILL_CHUNK)[0])
            lengths[1] = len(JOINS)
        elif turn == 2:
            live = [0, 2]
            caches = caches.read(live, 16)
            lengths = lengths[mx.array(live)]
        given = caches.caches(lengths)
        hidden = policy.head.trunk(mx.array([[tokens[row]] for row in live]), given)
        caches.update(given)
        lengths = lengths + 1
        for row, logits in zip(live, policy.head.project(hidden[:, -1]), strict=True):
            rows[row].append(logits)
    return rows


def _near(mine: mx.array, own: mx.array) -> bool:
    """Whether logits differ by rounding only; in 16 bits that is large, and a row that reads another's is larger."""
    tolerance = 1e-3 if own.dtype == mx.float32 else 0.15
    own, mine = own.astype(mx.float32), mine.astype(mx.float32)
    if not mx.isfinite(own).all().item():
        return True  # the model itself is at fault; its rows will end as errors
    spread = mx.sqrt(mx.var(own)) + 1e-6
    error = mx.sqrt(mx.square(mine - own).mean()) / spread
    return bool((error <= tolerance).item())
