"""Log-probs of a policy against a plain forward over every sequence."""

from __future__ import annotations

import dataclasses

import mlx.core as mx
import numpy as np
import pytest

from helpers import a_policy, by_hand, guarded, minibatch, moved
from mlxrl.errors import UserError
from mlxrl.policy import head
from mlxrl.policy.logprobs import divergence_from, hidden_at, log_softmax, logprobs, top_k
from mlxrl.policy.lora import without_adapters
from mlxrl.policy.modes import scoring, training
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


@pytest.mark.parametrize("strange", [-1, 320])
@pytest.mark.parametrize("place", ["prefix", "tokens", "last"])
def test_token_ids_that_the_model_does_not_have_are_refused(place, strange):
    p, batch = as_policy(guarded(dense()), tokenizer(), lora=None), minibatch(5)
    ids = np.array(batch.prefix if place == "prefix" else batch.tokens)
    ids[(2,) if place == "prefix" else (1, -1 if place == "last" else 0)] = strange
    batch = dataclasses.replace(batch, **{"prefix" if place == "prefix" else "tokens": mx.array(ids)})
    for score in (logprobs, hidden_at, lambda p, b: top_k(p, b, 3)):
        with pytest.raises(UserError, match=rf"batch.*: wanted token ids that the model has, 0 to 319, got {strange}"):
            score(p, batch)


def test_top_ids_that_the_model_does_not_have_have_no_probability():
    p, batch = as_policy(guarded(dense()), tokenizer(), lora=None), minibatch(5)
    known = logprobs(p, batch, top_ids=mx.full((3, 7, 1), 319)).top_logprobs[..., 0]
    got = np.array(logprobs(p, batch, top_ids=mx.broadcast_to(mx.array([319, 320, -1]), (3, 7, 3))).top_logprobs)
    mask = np.array(batch.mask) > 0
    assert np.array_equal(got[..., 0], np.array(known))
    assert np.isneginf(got[mask][:, 1:]).all()


def test_entropy_of_a_uniform_head_is_log_vocabulary():
    model = dense()
    model.model.embed_tokens.weight = mx.zeros_like(model.model.embed_tokens.weight)
    p = as_policy(model, tokenizer(), lora=LoRA())
    out = logprobs(p, minibatch(2), entropy=True)
    # 320 equally likely tokens: H = ln 320 = 5.768321, log p = -5.768321
    assert abs(out.entropy[0, 0].item() - 5.768321) < 1e-5
    assert abs(out.token_logprobs[0, 0].item() + 5.768321) < 1e-5
    assert out.entropy[2, 6].item() == 0.0  # padding


def every(model, batch) -> mx.array:
    """[B, T, V] log-probs that predict every token, all logits at once."""
    rows, prompt = batch.tokens.shape[0], batch.prefix.size
    ids = mx.concatenate([mx.broadcast_to(batch.prefix, (rows, prompt)), batch.tokens], axis=1)
    return log_softmax(model(ids)[:, prompt - 1 : -1].astype(mx.float32) / batch.temperature)


def test_one_pass_gives_the_tokens_the_top_ids_the_entropy_and_what_an_environment_wrote():
    p, batch = a_policy(), minibatch(5, temperature=0.7)
    written = 1 - batch.mask
    batch = dataclasses.replace(batch, observation_mask=written)
    top_ids = mx.array(np.random.default_rng(1).integers(0, 320, size=(*batch.tokens.shape, 4)), mx.int32)
    found = logprobs(p, batch, entropy=True, top_ids=top_ids, observations=True)
    wanted = every(p.model, batch)
    of_tokens = mx.take_along_axis(wanted, batch.tokens[..., None], axis=-1)[..., 0]
    assert mx.allclose(found.token_logprobs, of_tokens * batch.mask, atol=2e-5)
    assert mx.allclose(found.observation_logprobs, of_tokens * written, atol=2e-5)
    of_ids = mx.take_along_axis(wanted, top_ids, axis=-1)
    assert mx.allclose(found.top_logprobs, of_ids * batch.mask[..., None], atol=2e-5)
    entropy = -(mx.exp(wanted) * wanted).sum(axis=-1)
    assert mx.allclose(found.entropy, entropy * batch.mask, atol=2e-5)
    alone = logprobs(p, batch)
    assert (alone.entropy, alone.top_logprobs, alone.divergence, alone.observation_logprobs) == (None,) * 4


def test_top_k_are_the_most_likely():
    p, batch = a_policy(), minibatch(5, temperature=0.7)
    ids, values = top_k(p, batch, 3)
    wanted = every(p.model, batch)
    assert ids.shape == values.shape == (*batch.tokens.shape, 3)
    for b, t in zip(*np.nonzero(np.array(batch.mask)), strict=True):
        best = np.argsort(-np.array(wanted[b, t]))[:3]
        assert set(ids[b, t].tolist()) == set(best.tolist())
        assert mx.allclose(values[b, t], wanted[b, t][ids[b, t]], atol=2e-5)
    assert not ids[2, 6].any()  # padding


@pytest.mark.parametrize("adapters", [True, False])
def test_a_divergence_is_that_from_the_teacher_with_or_without_its_adapters(adapters, monkeypatch):
    """The head is a tied embedding with an adapter of its own; chunks of three positions cut through sequences."""
    monkeypatch.setattr(head, "CHUNK", 8 * 3 * 320)
    keys = ("self_attn.q_proj", "model.embed_tokens")
    p, teacher = a_policy(keys=keys), a_policy(lambda: dense(1), keys=keys)
    batch = minibatch(5, temperature=0.7)
    with scoring(teacher, adapters=adapters):
        batch = dataclasses.replace(batch, teacher_hidden=hidden_at(teacher, batch))
        theirs = every(teacher.model, batch)

    def reverse_kl(student: mx.array, teacher: mx.array) -> mx.array:
        return (mx.exp(student) * (student - teacher)).sum(axis=-1)

    compare = divergence_from(teacher, p, batch, reverse_kl, adapters=adapters)
    found = logprobs(p, batch, compare=compare).divergence
    assert mx.allclose(found, reverse_kl(every(p.model, batch), theirs) * batch.mask, atol=1e-4)
    with without_adapters(teacher):
        other = reverse_kl(every(p.model, batch), every(teacher.model, batch)) * batch.mask
    assert bool(mx.allclose(found, other, atol=1e-4).item()) == (not adapters)
