"""Prompts are run once, together where they can be, and what all begin with is run once for all."""

from __future__ import annotations

import pytest

from helpers import alone, counted, decode, requests
from mlxrl.policy.policy import as_policy
from mlxrl.rollout.prefill import WORTH, shared_prefix
from models import dense, hybrid, moe, tokenizer

SYSTEM = tuple(9 + i % 50 for i in range(90))
PROMPTS = [(*SYSTEM, 100 + n, *range(110, 110 + extra)) for n, extra in enumerate((3, 0, 7, 1, 5))]


def test_the_shared_prefix_leaves_a_token_of_every_prompt():
    assert shared_prefix(PROMPTS) == SYSTEM
    assert shared_prefix([*PROMPTS, SYSTEM]) == SYSTEM[:-1]
    assert shared_prefix([PROMPTS[0]] * 9) == ()
    assert shared_prefix([*PROMPTS, (1, 2, 3)]) == ()
    assert shared_prefix([]) == ()
    few = WORTH // 90
    assert shared_prefix(PROMPTS[: few + 1]) == ()
    assert shared_prefix(PROMPTS[: few + 2]) == SYSTEM


@pytest.mark.parametrize("chunk", [8, 2048])
@pytest.mark.parametrize("make", [dense, hybrid, moe])
def test_sequences_are_those_of_each_alone_and_the_prefix_is_read_once(make, chunk):
    p = as_policy(make(), tokenizer(), lora=None)
    watched, shapes = counted(p)
    out = decode(
        watched, requests(PROMPTS, 2, [5] * 10), max_rows=4, prefill_chunk=chunk, compiled=False, mode="ragged"
    )
    assert [one.tokens for one in out] == [alone(p.model, prompt, 5) for prompt in PROMPTS for _ in range(2)]
    assert sum(rows * width for rows, width in shapes if width > 1 or rows == 1) < 2 * len(SYSTEM)


def test_short_prompts_are_run_together_each_once():
    """As many as fill a chunk, padding included, prompts of like length together."""
    p, shapes = counted(as_policy(dense(), tokenizer(), lora=None))
    prompts = [tuple(range(20, 20 + n)) for n in (5, 3, 9, 2, 4, 30)]
    decode(p, requests(prompts, 3, [2] * 18), prefill_chunk=16, compiled=False, mode="ragged")
    # 2, 3, 4 and 5 would be 20 tokens with their padding; 5 and 9 are 18; 30 is two forwards of one prompt
    assert [shape for shape in shapes if shape[1] > 1] == [(3, 4), (1, 5), (1, 9), (1, 16), (1, 14)]


def test_prompts_that_stand_apart_in_the_queue_are_run_once():
    """Requests of one prompt follow each other once the engine starts."""
    p, shapes = counted(as_policy(dense(), tokenizer(), lora=None))
    first, second = tuple(range(20, 26)), tuple(range(40, 44))
    out = decode(p, requests([first, second, first, second]), max_rows=2, compiled=False, mode="uniform")
    assert [shape for shape in shapes if shape[1] > 1] == [(1, 6), (1, 4)]
    assert out[0].tokens == out[2].tokens == alone(p.model, first, 12)
