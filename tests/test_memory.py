"""The memory of training passes: peaks against depth, passes and vocabulary, and over many steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest

from helpers import (
    a_policy,
    made,
    minibatch,
)
from mlxrl import algo
from mlxrl.algo.terms import (
    KL,
    TeacherTopK,
    TeacherVocabulary,
)
from mlxrl.policy import head as module
from mlxrl.policy.head import Head, score
from mlxrl.policy.logprobs import logprobs
from mlxrl.policy.modes import training
from mlxrl.policy.policy import as_policy
from mlxrl.settings import LoRA, Train
from mlxrl.train.batch import make_batch
from mlxrl.train.gradient import gradient
from mlxrl.train.teacher import Teacher
from mlxrl.train.update import complete, update
from models import dense, hybrid, tokenizer


def peak(run: Callable[[], Any]) -> int:
    """Bytes above what was there."""
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(run())
    return mx.get_peak_memory() - before


def test_the_head_has_a_chunk_of_the_logits_in_memory_and_not_all(monkeypatch):
    """512 positions over 8,192 tokens: 16 MiB for each array of logits, of which a plain head has three."""
    monkeypatch.setattr(module, "CHUNK", 2**18)
    layer = nn.Linear(64, 8_192, bias=False)
    layer.freeze()
    head = Head(lambda tokens: tokens, layer, module=lambda: layer)
    hidden, ids = mx.random.normal((512, 64)), mx.zeros((512,), mx.int32)
    mx.eval(layer.parameters(), hidden)

    def plain(hidden: mx.array) -> mx.array:
        z = layer(hidden)
        return (mx.take_along_axis(z, ids[:, None], axis=-1)[:, 0] - mx.logsumexp(z, axis=-1)).sum()

    def chosen(hidden: mx.array) -> mx.array:
        return score(head, hidden, ids)[0].sum()

    def entropy(hidden: mx.array) -> mx.array:
        return score(head, hidden, ids, entropy=True)[1].sum()

    most = peak(lambda: mx.grad(plain)(hidden))
    assert peak(lambda: mx.grad(chosen)(hidden)) < 0.15 * most
    assert peak(lambda: mx.grad(entropy)(hidden)) < 0.3 * most
    assert peak(lambda: score(head, hidden, ids, gradient=False)[0]) < 0.15 * most


@pytest.mark.parametrize(("make", "prefix"), [(dense, 0), (dense, 40), (hybrid, 0)])
def test_with_recomputation_a_layer_more_costs_its_input_and_little_else(make, prefix):
    """A layer's activations are some twenty times its input, which is what recomputation keeps."""
    batch = minibatch(prefix, 64, 4)

    def cost(layers: int, recompute: bool) -> int:
        model = make(num_hidden_layers=layers) if make is dense else make(layers)
        p = as_policy(model, tokenizer(), lora=LoRA(rank=2))

        def run() -> Any:
            return nn.value_and_grad(p.model, lambda: logprobs(p, batch).token_logprobs.sum())()

        with training(p, recompute):
            return peak(run)

    plain = cost(10, False) - cost(4, False)
    assert cost(10, True) - cost(4, True) < plain / 6


def test_memory_is_flat_over_twenty_steps():
    p, optimizer = as_policy(hybrid(2), tokenizer(), lora=LoRA(rank=2)), optim.AdamW(1e-3)
    algorithm = algo.grpo(terms=[KL(coefficient=0.1)])
    active = []
    for step in range(21):
        batch = make_batch([made([1.0, 0.0, 0.4], prompt=70, seed=step % 7)], algorithm, Train(tokens_per_pass=78))
        update(p, optimizer, batch, algorithm, recompute=bool(step % 2))
        del batch
        active.append(mx.get_active_memory())
    assert active[20] <= 1.001 * active[5]


@pytest.mark.parametrize("make", [dense, hybrid])
def test_memory_of_a_group_in_several_passes_is_that_of_its_prompt_and_one_pass(make):
    """Eight sequences in passes of two: about a quarter of the activations."""
    p, algorithm = a_policy(make), algo.grpo()
    group = made([1.0, 0.0] * 4, prompt=40, lengths=[80] * 8)
    whole, split = (make_batch([group], algorithm, Train(tokens_per_pass=tokens)) for tokens in (10_000, 40 + 160))
    assert (len(whole), len(split)) == (1, 4)
    assert peak(lambda: gradient(p, split, algorithm)[1]) < 0.5 * peak(lambda: gradient(p, whole, algorithm)[1])


@pytest.mark.parametrize("term", [TeacherTopK(k=8), TeacherVocabulary()], ids=lambda term: type(term).__name__)
def test_no_more_than_a_chunk_of_logits_exists(term, monkeypatch):
    """4 sequences of 16 tokens over 40,960 words: all logits are 10 MB, of the teacher and of the student."""
    wide = {"vocab_size": 40960, "tie_word_embeddings": True}
    p = a_policy(lambda: dense(**wide))
    teacher, algorithm = Teacher(as_policy(dense(1, **wide), tokenizer(), lora=None)), algo.opd(teacher=term)
    batch = make_batch([made([0.0, 1.0, 2.0, 3.0], prompt=4, lengths=[16] * 4)], algorithm)
    monkeypatch.setattr(module, "CHUNK", 2**21)  # 8 MB, and 1 MB where distributions are compared

    def run() -> Any:
        return gradient(p, complete(p, batch, algorithm, frozenset({"teacher"}), teacher), algorithm, teacher)[1]

    assert peak(run) < 40e6  # all at once it is 120 MB; a busy CPU runs further ahead
