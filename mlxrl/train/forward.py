"""A pass over a minibatch that gives everything its loss looks at."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx

from mlxrl.algo.algorithm import comparison_of
from mlxrl.policy.compare import divergence_from
from mlxrl.policy.load import Policy
from mlxrl.policy.logprobs import logprobs
from mlxrl.train.teacher import Teacher
from mlxrl.types import Algorithm, Logprobs, MicroBatch


def with_tokens(minibatch: MicroBatch) -> mx.array:
    """[B, T, 1+K] the tokens and, behind each, its candidates."""
    assert minibatch.top_ids is not None
    return mx.concatenate([minibatch.tokens[..., None], minibatch.top_ids], axis=-1)


def forward(policy: Policy, minibatch: MicroBatch, algo: Algorithm, teacher: Teacher | None = None) -> Logprobs:
    """Log-probs of the tokens and of the candidates, entropy where it is needed, and the divergence from a teacher's.

    One pass of the model: all of it is computed from the same hidden states.
    """
    compared, compare, ids = comparison_of(algo), None, None
    if compared is not None and compared.divergence is not None and teacher is not None:
        compare = divergence_from(teacher.policy, teacher.seated, policy, minibatch, compared.divergence)
    if minibatch.top_ids is not None:
        ids = with_tokens(minibatch)
    observed = "observations" in algo.needs
    new = logprobs(
        policy, minibatch, entropy="entropy" in algo.needs, candidates=ids, compare=compare, observed=observed
    )
    return (
        new
        if ids is None
        else replace(new, token_logprobs=new.token_logprobs[..., 0], top_logprobs=new.token_logprobs[..., 1:])
    )
