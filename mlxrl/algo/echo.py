"""ECHO: the policy also learns to predict what its actions bring about."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Annotated, ClassVar

import mlx.core as mx

from mlxrl import protocols
from mlxrl.algo.algorithm import Algorithm, Term, term
from mlxrl.algo.reduce import Reduction, total
from mlxrl.algo.terms import Coefficient, there
from mlxrl.checked import Natural, says
from mlxrl.types import Logprobs, Metrics, MicroBatch, Totals


@term("echo")
class Echo(Term):
    """Prediction of what environments return (ECHO, arXiv 2605.24517), besides what the algorithm learns.

    c sum_{observed tokens} -log pi(token | its past) / (observed tokens of the step)

    Observed are the tokens that an environment returned, not those of the first prompt nor forced ones, in every
    trajectory that did not end in an error: one without advantage counts too. The denominator is theirs alone, so that
    the weight of the algorithm's own loss stays what it was.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"observations"})
    weight: Annotated[Coefficient, says("factor of the term")] = 0.1
    taper: Annotated[Natural, says("steps of the run over which the weight falls linearly to 0; 0 keeps it")] = 0
    skip: Annotated[
        frozenset[Natural] | None, says("token ids that are not predicted; left out, the tokenizer's special ones")
    ] = None

    def at(self, step: int) -> Echo | None:
        left = max(1 - step / self.taper, 0.0) if self.taper else 1.0
        return replace(self, weight=self.weight * left, taper=0) if left else None

    def share(self, new: Logprobs, batch: MicroBatch, totals: Totals, reduction: Reduction) -> mx.array:
        return self.weight * self._cross_entropy(new, batch, totals)

    def metrics(self, new: Logprobs, batch: MicroBatch, totals: Totals) -> Metrics:
        factor = self.weight * there(batch.observation_mask).sum() / max(totals.observation_tokens, 1)
        return {"echo/loss": self._cross_entropy(new, batch, totals), "echo/coefficient": factor}

    def _cross_entropy(self, new: Logprobs, batch: MicroBatch, totals: Totals) -> mx.array:
        """In nats per observed token of the step."""
        logprobs, observed = there(new.observation_logprobs), there(batch.observation_mask)
        return total(-logprobs, observed) / max(totals.observation_tokens, 1)


def without_special_ids(algorithm: protocols.Algorithm, ids: Collection[int]) -> protocols.Algorithm:
    """The algorithm, of which an `Echo` that names no ids of its own does not predict these."""
    if not isinstance(algorithm, Algorithm):
        return algorithm
    terms = [
        replace(term, skip=frozenset(ids)) if isinstance(term, Echo) and term.skip is None else term
        for term in algorithm.terms
    ]
    return replace(algorithm, terms=tuple(terms))
