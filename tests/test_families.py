"""Families of mlx-lm: rows that decode together give what each gives alone, or are found out and served otherwise."""

from __future__ import annotations

import warnings
from collections import deque
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest

from families import FAMILIES, family, table
from helpers import RAGGED, alone, requests
from mlxrl.policy.policy import as_policy
from mlxrl.rollout.decode import Loop, decode
from mlxrl.rollout.row import Request
from mlxrl.rollout.rules import Rules
from mlxrl.rollout.sampling import key_of
from mlxrl.rollout.serve import check, service_of
from mlxrl.settings import Sampling
from models import dense, tokenizer

FALLBACKS = {"gemma2": "equal", "llama4": "equal", "nemotron_h": "slots"}
LIMITS = [6, 3, 5, 6]
RULES = Rules(Sampling(max_tokens=8, temperature=0.0))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.filterwarnings("ignore:.*(output head|batched)")
def test_greedy_batch_equals_greedy_alone(name):
    """Ragged, chunked by 2, 3 and whole, and with a row that joins two under way; then gone on with, ragged again."""
    p = as_policy(family(name), tokenizer(), lora=None)
    wanted = [alone(p.model, prompt, limit) for prompt, limit in zip(RAGGED, LIMITS, strict=True)]
    for chunk, rows in ((2, 3), (3, 4), (2048, 3)):
        got = decode(
            p.model, p.head, requests(RAGGED, limits=LIMITS), RULES, prefill_chunk=chunk, max_rows=rows, compiled=False
        )
        assert [row.ids for row in got] == wanted
    assert check(p.model, p.head) == FALLBACKS.get(name, "ragged")
    loop = Loop(p.model, p.head, requests(RAGGED, limits=LIMITS), replace(RULES, holds=True), compiled=False)
    with loop.session():
        deque(loop.decode(), maxlen=0)
        prompts = [
            (*row.prompt, *row.ids, *range(90, 90 + n)) for row, n in zip(loop.ordered, (3, 0, 5, 1), strict=True)
        ]
        asked = [Request(prompt, key_of(0, 0), 2) for prompt in prompts]
        rows = [loop.resume(row, request) for row, request in zip(loop.ordered, asked, strict=True)]
        deque(loop.decode(), maxlen=0)
    assert [row.ids for row in rows] == [alone(p.model, prompt, 2) for prompt in prompts]


def test_enough_families_are_batched():
    assert len(FAMILIES) - list(FALLBACKS.values()).count("equal") >= 16
    assert "| gemma2 | fallback: equal lengths |\n| llama | batched |" in table({"llama": "ragged", "gemma2": "equal"})


def test_the_design_has_the_table():
    """What each is served as is checked above; the number of others depends on mlx-lm's version."""
    *lines, _ = table({name: FALLBACKS.get(name, "ragged") for name in FAMILIES}).splitlines()
    assert "\n".join(lines) in (Path(__file__).parent.parent / "DESIGN.md").read_text(encoding="utf-8")


class Blind(nn.Module):
    """A model that ignores which tokens of its cache are a row's own."""

    def __init__(self, model, sees_own: bool):
        super().__init__()
        self.model, self._sees_own = model, sees_own

    @property
    def layers(self):
        return self.model.layers

    def __call__(self, tokens, cache=None):
        if cache is None:
            return self.model(tokens)
        if not self._sees_own and tokens.shape[0] > 1:
            tokens = mx.roll(tokens, 1, axis=0)  # rows read their neighbour's token
        return self.model(tokens, [Unmasked(part) if hasattr(part, "window") else part for part in cache])


class Unmasked:
    """A cache in slots whose mask is left out."""

    def __init__(self, cache):
        self.__dict__["cache"] = cache

    def make_mask(self, *_, **__):
        return None

    def __getattr__(self, name):
        return getattr(self.cache, name)


@pytest.mark.filterwarnings("ignore:.*output head")
@pytest.mark.parametrize(
    ("sees_own", "service", "words"), [(True, "equal", "equal length"), (False, "single", "one by one")]
)
def test_a_model_that_cannot_be_batched_is_found_out_and_served_otherwise(sees_own, service, words):
    model = dense()
    wanted = [alone(model, prompt, 8) for prompt in [*RAGGED, *RAGGED]]
    p = as_policy(Blind(model, sees_own), tokenizer(), lora=None)
    with pytest.warns(UserWarning, match=words):
        got = decode(p.model, p.head, requests([*RAGGED, *RAGGED]), RULES)
    assert [row.ids for row in got] == wanted
    with warnings.catch_warnings():  # said once
        warnings.simplefilter("error")
        assert [row.ids for row in decode(p.model, p.head, requests([*RAGGED, *RAGGED]), RULES)] == wanted
    assert service_of(p.model, p.head) == service
    unchecked = decode(p.model, p.head, requests(RAGGED), RULES, service="ragged")
    assert [row.ids for row in unchecked] != wanted[:4], "it would have been wrong"
