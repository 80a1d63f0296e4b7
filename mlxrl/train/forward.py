"""A pass over a micro-batch that gives everything its loss looks at."""

from __future__ import annotations

from mlxrl.algo.algorithm import comparison_of
from mlxrl.policy.logprobs import divergence_from, logprobs
from mlxrl.policy.policy import Policy
from mlxrl.policy.prefix import PrefixRun
from mlxrl.train.teacher import Teacher
from mlxrl.types import Algorithm, Logprobs, MicroBatch


def forward(
    policy: Policy,
    micro_batch: MicroBatch,
    algo: Algorithm,
    teacher: Teacher | None = None,
    prefix: PrefixRun | None = None,
) -> Logprobs:
    """Log-probs of the tokens and of the top ids, entropy where it is needed, and the divergence from a teacher's."""
    compared, compare = comparison_of(algo), None
    if compared is not None and compared.divergence is not None and teacher is not None:
        compare = divergence_from(teacher.policy, policy, micro_batch, compared.divergence, adapters=not teacher.base)
    return logprobs(
        policy,
        micro_batch,
        entropy="entropy" in algo.needs,
        top_ids=micro_batch.top_ids,
        compare=compare,
        observations="observations" in algo.needs,
        prefix=prefix,
    )
