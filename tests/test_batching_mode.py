"""Families of mlx-lm: sequences that decode together give what each gives alone, or are batched otherwise."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest

from families import FAMILIES, family, table
from helpers import RAGGED, alone, decode, requests
from mlxrl.policy.policy import as_policy
from mlxrl.rollout.batching_mode import check, mode_of
from mlxrl.rollout.engine import Engine
from mlxrl.settings import Sampling
from models import dense, tokenizer

FALLBACKS = {"gemma2": "equal_length", "llama4": "equal_length", "nemotron_h": "uniform"}
LIMITS = [6, 3, 5, 6]
SHORT = Sampling(max_tokens=8, temperature=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.filterwarnings("ignore:.*(output head|batched)")
def test_greedy_batch_equals_greedy_alone(name):
    """Ragged, chunked by 2, 3 and whole, with a sequence that joins two under way; then extended, ragged again."""
    p = as_policy(family(name), tokenizer(), lora=None)
    single = partial(alone, p.model, cached=p.needs_caches)
    wanted = [single(prompt, limit) for prompt, limit in zip(RAGGED, LIMITS, strict=True)]
    submitted = requests(RAGGED, limits=LIMITS, sampling=SHORT)
    for chunk, rows in ((2, 3), (3, 4), (2048, 3)):
        got = decode(p, submitted, prefill_chunk=chunk, max_rows=rows, compiled=False)
        assert [one.tokens for one in got] == wanted
    assert check(p) == FALLBACKS.get(name, "ragged")
    with Engine(p, compiled=False) as engine:
        firsts = [engine.submit(replace(request, keep=True)) for request in submitted]
        list(engine.run())
        seconds = [engine.extend(one, range(90, 90 + n), limit=2) for one, n in zip(firsts, (3, 0, 5, 1), strict=True)]
        list(engine.run())
    assert [one.tokens for one in seconds] == [single(one.prompt, 2) for one in seconds]


def test_enough_families_are_batched():
    assert len(FAMILIES) - list(FALLBACKS.values()).count("equal_length") >= 16
    lines = "| gemma2 | fallback: equal lengths |\n| llama | batched |"
    assert lines in table({"llama": "ragged", "gemma2": "equal_length"})


def test_the_measurements_have_the_table():
    """How each is batched is checked above; the number of others depends on mlx-lm's version."""
    *lines, _ = table({name: FALLBACKS.get(name, "ragged") for name in FAMILIES}).splitlines()
    assert "\n".join(lines) in (Path(__file__).parent.parent / "benchmarks" / "README.md").read_text(encoding="utf-8")


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
    ("sees_own", "mode", "words"), [(True, "equal_length", "equal length"), (False, "single", "one by one")]
)
def test_a_model_that_cannot_be_batched_is_found_out_and_decoded_otherwise(sees_own, mode, words):
    model = dense()
    wanted = [alone(model, prompt, 8) for prompt in [*RAGGED, *RAGGED]]
    p, submitted = (
        as_policy(Blind(model, sees_own), tokenizer(), lora=None),
        requests([*RAGGED, *RAGGED], sampling=SHORT),
    )
    with pytest.warns(UserWarning, match=words):
        got = decode(p, submitted)
    assert [one.tokens for one in got] == wanted
    with warnings.catch_warnings():  # warned once
        warnings.simplefilter("error")
        assert [one.tokens for one in decode(p, submitted)] == wanted
    assert mode_of(p) == mode
    unchecked = decode(p, submitted[:4], mode="ragged")
    assert [one.tokens for one in unchecked] != wanted[:4], "it would have been wrong"


@pytest.mark.filterwarnings("ignore:.*output head")
@pytest.mark.parametrize("mode", ["equal_length", "single"])
def test_models_without_slots_take_requests_between_steps_and_extensions(mode):
    """A request waits until all that decode have ended; an extension is prefilled as a whole."""
    p = as_policy(dense(), tokenizer(), lora=None)
    first, second, third = requests([(20, 21, 22), (30, 31, 32), (20, 21, 22)], limits=[4, 6, 5], keep=True)
    with Engine(p, mode=mode) as engine:
        sequences = [engine.submit(first), engine.submit(second)]
        engine.step()
        sequences.append(engine.submit(third))
        ended = list(engine.run())
        assert ended[-1] is sequences[2] or mode == "single"
        assert engine.occupied == 0
        following = [engine.extend(one, (50,), limit=3) for one in sequences]
        list(engine.run())
    for one, limit in zip([*sequences, *following], [4, 6, 5, 3, 3, 3], strict=True):
        assert one.tokens == alone(p.model, one.prompt, limit)
