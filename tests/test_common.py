"""What all prompts begin with is run once, and nobody's tokens change."""

from __future__ import annotations

import pytest

from helpers import alone
from mlxrl.policy.policy import as_policy
from mlxrl.rollout.common import WORTH, beginning
from mlxrl.rollout.decode import Loop
from mlxrl.rollout.row import Request
from mlxrl.rollout.rules import Rules
from mlxrl.rollout.sampling import key_of
from mlxrl.settings import Sampling
from models import dense, hybrid, moe, tokenizer

SYSTEM = tuple(9 + i % 50 for i in range(90))
PROMPTS = [(*SYSTEM, 100 + n, *range(110, 110 + extra)) for n, extra in enumerate((3, 0, 7, 1, 5))]


def test_the_beginning_leaves_a_token_of_every_prompt():
    assert beginning(PROMPTS) == SYSTEM
    assert beginning([*PROMPTS, SYSTEM]) == SYSTEM[:-1]
    assert beginning([PROMPTS[0]] * 9) == ()
    assert beginning([*PROMPTS, (1, 2, 3)]) == ()
    assert beginning([]) == ()
    few = WORTH // 90
    assert beginning(PROMPTS[: few + 1]) == ()
    assert beginning(PROMPTS[: few + 2]) == SYSTEM


@pytest.mark.parametrize("chunk", [8, 2048])
@pytest.mark.parametrize("make", [dense, hybrid, moe])
def test_rows_are_those_of_each_alone_and_the_beginning_is_read_once(make, chunk):
    p = as_policy(make(), tokenizer(), lora=None)
    wanted = [alone(p.model, prompt, 5) for prompt in PROMPTS]
    read = []
    trunk = p.head.trunk
    head = p.head.__class__(**{
        **{name: getattr(p.head, name) for name in p.head.__dataclass_fields__},
        "trunk": lambda tokens, cache=None: read.append(tokens.shape) or trunk(tokens, cache),
    })  # fmt: skip
    requests = [Request(prompt, key_of(0, 0), 5) for prompt in PROMPTS for _ in range(2)]
    rules = Rules(Sampling(temperature=0.0))
    loop = Loop(p.model, head, requests, rules, max_rows=4, prefill_chunk=chunk, compiled=False, service="ragged")
    for _ in loop.run():
        pass
    assert [row.ids for row in loop.ordered] == [ids for ids in wanted for _ in range(2)]
    tokens = sum(rows * width for rows, width in read if width > 1 or rows == 1)
    assert tokens < 2 * len(SYSTEM)
