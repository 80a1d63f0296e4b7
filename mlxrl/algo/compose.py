"""A recipe: credit assignment, a policy loss per token, weights, a reduction and regularisers, put together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import mlx.core as mx

from mlxrl.algo import metrics as report
from mlxrl.algo.credit import Advantages, Credit
from mlxrl.algo.reduce import Reduction, masked, token_mean
from mlxrl.types import Comparison, Group, Logprobs, Metrics, MicroBatch, Totals


class Surrogate(NamedTuple):
    """A policy loss per token and what is reported of it; each [B, T] or, where a row has one value, [B, 1].

    low, high: flags of the tokens that the lower and the upper bound hold.
    """

    loss: mx.array
    ratio: mx.array
    low: mx.array
    high: mx.array


Policy: TypeAlias = Callable[[mx.array, mx.array, mx.array, mx.array], Surrogate]
PerToken: TypeAlias = Callable[[Logprobs, MicroBatch], mx.array]


class Regulariser(NamedTuple):
    """A term [B, T] that is reduced like the policy loss and added to it, times a coefficient."""

    coefficient: float
    value: PerToken


@dataclass(frozen=True, slots=True)
class Recipe:
    """An algorithm as a composition; see `mlxrl.types.Algorithm`.

    loss = reduce(policy(new, old, A + sum shapes, mask) * prod weights) + sum_k c_k reduce(regulariser_k)

    `old` is the minibatch's, or sg(new) where it has none. Shapes and weights carry no gradient.
    reports: further means over tokens, by the metric's name. coefficients: reported as `policy/{name}_coefficient`.
    arguments: what the recipe was resolved to; its function, called with them, builds the same recipe.
    comparison: with a teacher's distributions, None where at most the sampled tokens are compared.
    """

    name: str
    needs: frozenset[str]
    credit: Credit
    policy: Policy
    reduction: Reduction
    shapes: tuple[PerToken, ...] = ()
    weights: tuple[PerToken, ...] = ()
    regularisers: tuple[Regulariser, ...] = ()
    reports: Mapping[str, PerToken] = field(default_factory=dict[str, PerToken])
    coefficients: Mapping[str, float] = field(default_factory=dict[str, float])
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    comparison: Comparison | None = None

    def advantages(self, groups: Sequence[Group]) -> Advantages:
        """For every trajectory of every group a float, or a list with a float per sampled token."""
        return self.credit(groups)

    def loss(self, new: Logprobs, batch: MicroBatch, totals: Totals) -> tuple[mx.array, Metrics]:
        """The minibatch's share of the step's loss and of its metrics, both to be added up over the minibatches.

        `metrics.finish` turns the sums of the metrics into what is shown.
        """
        batch = self._prepared(new, batch)
        assert batch.old_logprobs is not None
        mask = batch.mask
        surrogate = self.policy(new.token_logprobs, batch.old_logprobs, batch.advantages, mask)
        weight = self._weight(new, batch)
        loss = self.reduction(surrogate.loss * weight, mask, totals)
        for term in self.regularisers:
            loss = loss + term.coefficient * self.reduction(term.value(new, batch), mask, totals)
        found = report.policy_metrics(
            new.token_logprobs, batch.old_logprobs, *surrogate[1:], batch.advantages, mask, totals
        )
        found |= report.mismatch_metrics(batch.old_logprobs, batch.sampler_logprobs, mask, totals)
        found |= {name: token_mean(value(new, batch), mask, totals) for name, value in self.reports.items()}
        found |= report.coefficients(self.coefficients, mask, totals)
        if self.weights:
            found["mismatch/kept"] = token_mean(weight, mask, totals)
        found["policy/loss"] = loss
        # One array, taken apart: mx.compile fails on two outputs that are the same computation twice.
        values = mx.stop_gradient(mx.stack(list(found.values())))
        return loss, {name: values[n] for n, name in enumerate(found)}

    def _prepared(self, new: Logprobs, batch: MicroBatch) -> MicroBatch:
        """The minibatch with `old` filled in, and the advantage with everything that shapes it."""
        batch = replace(
            batch,
            old_logprobs=mx.stop_gradient(new.token_logprobs if batch.old_logprobs is None else batch.old_logprobs),
        )
        advantage = batch.advantages
        for shape in self.shapes:
            advantage = advantage + mx.stop_gradient(shape(new, batch))
        return replace(batch, advantages=masked(advantage, batch.mask))

    def _weight(self, new: Logprobs, batch: MicroBatch) -> mx.array:
        weight = mx.ones_like(batch.mask)
        for factor in self.weights:
            weight = weight * factor(new, batch)
        return mx.stop_gradient(weight)
