"""What is not needed is not computed.

A training pass over a group reads its prompt once and every sequence but its last token, P + sum_b (T_b - 1) tokens,
and makes the logits of the sampled tokens alone. A step needs one pass for each update, one more for the reference
where a term needs it, and one more for old log-probs where there are several updates. Sequences without signal need
none.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import pytest

from helpers import a_policy, counted, made
from mlxrl.algo.recipes import grpo
from mlxrl.algo.terms import KL
from mlxrl.policy import logprobs as module
from mlxrl.policy.policy import Policy
from mlxrl.policy.prefix import by_prefix
from mlxrl.settings import Rollout, Sampling, Train
from mlxrl.train.batch import make_batch
from mlxrl.train.loop import run
from mlxrl.train.update import update
from mlxrl.types import Batch, Task
from models import dense

LONG = "a prompt that is long enough for its completions to share it in one pass, and some more words"


@pytest.fixture
def counting(monkeypatch) -> tuple[Policy, list[int], list[int]]:
    """A policy, the tokens that each of its forwards read in training passes, and the positions scored in each."""
    p = a_policy(dense)
    read: list[int] = []
    positions: list[int] = []
    score = module.score

    def trunk(tokens: mx.array, cache: Any = None) -> mx.array:
        if p.model.training:
            read.append(tokens.size)
        return p.head.trunk(tokens, cache)

    def scoring(head: Any, hidden: mx.array, *rest: Any, **settings: Any) -> Any:
        positions.append(hidden.shape[0])
        return score(head, hidden, *rest, **settings)

    monkeypatch.setattr(module, "score", scoring)
    return dataclasses.replace(p, head=dataclasses.replace(p.head, trunk=trunk)), read, positions


def least(batch: Batch) -> int:
    """Tokens of one pass over a batch, its padding included."""
    prefixes = sum(together[0].prefix.size for together in by_prefix(batch.micro_batches))
    return prefixes + sum(m.tokens.shape[0] * (m.tokens.shape[1] - 1) for m in batch)


@pytest.mark.parametrize(("kl", "passes"), [(0.0, 1), (0.1, 2)])
@pytest.mark.parametrize("tokens_per_pass", [None, 105, 100])
def test_an_update_runs_one_pass_and_one_for_a_reference(counting, kl, passes, tokens_per_pass):
    p, read, positions = counting
    algorithm = grpo(terms=[KL(coefficient=kl)] if kl else [])
    batch = make_batch([made([1.0, 0.0, 0.4], lengths=[5, 5, 5])], algorithm, Train(tokens_per_pass=tokens_per_pass))
    update(p, optim.SGD(1e-3), batch, algorithm)
    # 90 tokens of the prompt and four of each sequence; logits of the 15 sampled tokens.
    assert least(batch) == 102
    assert sum(read) == passes * 102
    assert sum(positions) == passes * 15


@pytest.mark.parametrize(("kl", "updates", "passes"), [(0.0, 1, 1), (0.0, 2, 3), (0.1, 1, 2), (0.1, 3, 5)])
def test_old_logprobs_are_computed_once_where_there_are_several_updates(counting, kl, updates, passes):
    p, read, positions = counting
    algorithm = grpo(terms=[KL(coefficient=kl)] if kl else [])
    (step,) = run(
        p, [Task(LONG)], algorithm, reward=lambda completions, **_: [float(i % 2) for i, _ in enumerate(completions)],
        steps=1, rollout=Rollout(tasks_per_step=1, group_size=4), sampling=Sampling(max_tokens=6),
        train=Train(updates_per_rollout=updates), optimizer=optim.SGD(0.0),
    )  # fmt: skip
    # A policy's first samples are compared once, with the old log-probs where they are there.
    batch, passes = make_batch(step.groups, algorithm), passes + (updates == 1)
    assert sum(read) == passes * least(batch)
    assert sum(positions) == passes * batch.totals.tokens


def test_sequences_without_signal_are_not_run_and_still_counted(counting):
    p, read, _ = counting
    algorithm = grpo()
    flat, mixed = made([0.3] * 4, seed=1), made([1.0, 0.0, 0.0, 0.0], seed=2)
    batch = make_batch([flat, mixed], algorithm)
    update(p, optim.SGD(1e-3), batch, algorithm)
    assert batch.totals.sequences == 8
    assert sum(read) == least(make_batch([mixed], algorithm))
    read.clear()
    metrics = update(p, optim.SGD(1e-3), make_batch([flat], algorithm), algorithm)
    assert read == []
    assert metrics["grad_norm"] == 0.0


def test_a_split_group_reads_its_prompt_once(counting):
    p, read, positions = counting
    algorithm = grpo(terms=[KL(coefficient=0.1)])
    batch = make_batch([made([1.0, 0.0, 0.4, 0.0], lengths=[5] * 4)], algorithm, Train(tokens_per_pass=95))
    assert len(batch) == 4
    update(p, optim.SGD(1e-3), batch, algorithm)
    assert sum(read) == 2 * (90 + 4 * 4)
    assert sum(positions) == 2 * 20


def test_an_update_runs_one_forward_of_each_token():
    """No pass for old log-probs or a reference where nothing needs them; the prefix runs once."""
    (p, shapes), batch = counted(a_policy()), make_batch([made([1.0, 0.0, 0.4])], grpo())
    update(p, optim.SGD(1e-3), batch, grpo())
    assert shapes == [(1, 90), (3, 4)]  # three sequences of up to 5 tokens, the last of which predicts nothing
    shapes.clear()
    update(p, optim.SGD(1e-3), batch, grpo(terms=[KL(coefficient=0.1)]))
    assert shapes == [(1, 90), (3, 4)] * 2
