"""Log-probs of a policy against a plain forward over every sequence."""

from __future__ import annotations

import mlx.core as mx
import pytest
from helpers import by_hand, minibatch, moved

from mlxrl.policy.logprobs import logprobs
from mlxrl.policy.modes import training
from mlxrl.policy.policy import as_policy
from mlxrl.settings import LoRA
from models import dense, hybrid, moe, tokenizer


@pytest.mark.parametrize("make", [dense, hybrid, moe])
@pytest.mark.parametrize(("prefix", "tokens", "prompt"), [(5, 7, 0), (0, 7, 2), (1, 1, 0), (4, 2, 0)])
def test_logprobs_equal_those_of_a_plain_forward(make, prefix, tokens, prompt):
    p = as_policy(make(), tokenizer(), lora=LoRA())
    moved(p.model)
    batch = minibatch(prefix, tokens, rows=min(3, tokens), temperature=0.7, prompt=prompt)
    with training(p):
        assert mx.abs(logprobs(p, batch).token_logprobs - by_hand(p.model, batch)).max().item() < 2e-5


def test_entropy_of_a_uniform_head_is_log_vocabulary():
    model = dense()
    model.model.embed_tokens.weight = mx.zeros_like(model.model.embed_tokens.weight)
    p = as_policy(model, tokenizer(), lora=LoRA())
    out = logprobs(p, minibatch(2), entropy=True)
    # 320 equally likely tokens: H = ln 320 = 5.768321, log p = -5.768321
    assert abs(out.entropy[0, 0].item() - 5.768321) < 1e-5
    assert abs(out.token_logprobs[0, 0].item() + 5.768321) < 1e-5
    assert out.entropy[2, 6].item() == 0.0  # padding
