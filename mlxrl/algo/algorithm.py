"""An algorithm as a value: credit, a policy loss per token, a reduction, and terms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self, TypeAlias, TypeVar, dataclass_transform

import mlx.core as mx

from mlxrl import protocols
from mlxrl.algo.credit import Advantages, Compares, Credit, Turns
from mlxrl.algo.losses import Ratio, Surrogate, log_ratio
from mlxrl.algo.reduce import Reduction, masked, of_answers, of_mismatch, of_policy, token_mean
from mlxrl.checked import SettingError, checked
from mlxrl.errors import brief
from mlxrl.types import Comparison, Group, Logprobs, Metrics, MicroBatch, Totals

T = TypeVar("T", bound="Term")
PolicyLoss: TypeAlias = Callable[[mx.array, mx.array, mx.array, mx.array], Surrogate | mx.array]


class Term:
    """A frozen value that adds to the advantages, weighs the policy loss or adds to the loss.

    Each takes the log-probs `new` of a micro-batch, and the micro-batch with its `old_logprobs`, and returns [B, T], or
    [B, 1] where a sequence has one value. needs: see `protocols.Algorithm`.
    """

    __slots__ = ()
    table: ClassVar[str] = ""
    needs: ClassVar[frozenset[str]] = frozenset()

    @property
    def comparison(self) -> Comparison | None:
        """How distributions are compared with a teacher's; None where at most the sampled tokens are."""
        return None

    def at(self, step: int) -> Self | None:
        """The term at a step of the run, from 0; None from where on it has no effect."""
        return self

    def advantage(self, new: Logprobs, batch: MicroBatch) -> mx.array | None:
        """Added to the advantages, without gradient."""

    def factor(self, new: Logprobs, batch: MicroBatch) -> mx.array | None:
        """Multiplies the policy loss, without gradient. Denominators stay what they are."""

    def loss(self, new: Logprobs, batch: MicroBatch) -> mx.array | None:
        """Reduced as the policy loss is, and added to it times the term's `coefficient`."""

    def share(self, new: Logprobs, batch: MicroBatch, totals: Totals, reduction: Reduction) -> mx.array | None:
        """The term's reduced contribution to the loss."""
        values = self.loss(new, batch)
        return None if values is None else getattr(self, "coefficient", 1.0) * reduction(values, batch.mask, totals)

    def metrics(self, new: Logprobs, batch: MicroBatch, totals: Totals) -> Metrics:
        """What is reported: scalars already divided by the step's totals."""
        return {}


TERMS: dict[str, type[Term]] = {}
"""The terms that can be written in TOML, by the name of their table, in the order in which they are added up."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
def term(table: str) -> Callable[[type[T]], type[T]]:
    """Make a class a term that is checked, and a table of [algorithm]."""

    def decorate(cls: type[T]) -> type[T]:
        TERMS[table] = made = checked(f"algorithm.{table}")(cls)
        return made

    return decorate


@dataclass(frozen=True, slots=True)
class Algorithm:
    """Credit, a policy loss, a reduction and terms. Shapes: B sequences, T tokens.

    loss = reduction(policy_loss(new, old, A + sum of advantage terms, mask) * product of factors) + sum of loss terms

    Args:
        name: of the algorithm in errors and on the console.
        credit: from the step's groups of trajectories to advantages A, of their shape: for every trajectory a float, or
            a list with a float for every token sampled. See `credit`.
        policy_loss: (new, old, advantages, mask), [B, T] each, to losses [B, T], as `-advantages * mx.exp(new - old)`,
            or to a `losses.Surrogate`, which reports its ratio and flags too. `old` are the log-probs at the weights
            before the step's first update; the gradient flows through `new` alone. See `losses`.
        reduction: (values [B, T], mask [B, T], totals of the step) to a scalar; the results of micro-batches add up.
            See `reduce`.
        terms: of `terms`, or one's own; one of a kind, and one that learns from a teacher.
    """

    name: str
    credit: Credit
    policy_loss: PolicyLoss
    reduction: Reduction
    terms: tuple[Term, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "terms", tuple(self.terms))
        for term in self.terms:
            if not isinstance(term, Term):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise SettingError(self.name, "terms", f"wanted terms such as KL(...), got {brief(term)}")
        kinds = [type(term) for term in self.terms]
        if twice := next((kind for kind in kinds if kinds.count(kind) > 1), None):
            raise SettingError(self.name, "terms", f"wanted one {twice.__name__}, got {kinds.count(twice)}")
        taught = [type(term).__name__ for term in self.terms if "teacher" in term.needs]
        if len(taught) > 1:
            raise SettingError(self.name, "terms", f"wanted one that learns from a teacher, got {', '.join(taught)}")

    @property
    def needs(self) -> frozenset[str]:
        """What the loss needs; see `protocols.Algorithm`."""
        own = {"old"} if self.turns is None else {"answers"}
        own |= {"reward"} if getattr(self.credit, "uses_rewards", True) else set()
        kept = {"top_ids"} if self.comparison is not None and self.comparison.support == "student" else set[str]()
        return frozenset().union(own, kept, *(term.needs for term in self.terms))

    @property
    def comparison(self) -> Comparison | None:
        """How distributions are compared with a teacher's; None where at most the sampled tokens are."""
        return next((term.comparison for term in self.terms if term.comparison is not None), None)

    @property
    def compares(self) -> Compares:
        """What a trajectory's reward is compared with: the others of its "group" or of the "step", or "nothing"."""
        return getattr(self.credit, "compares", "nothing")

    @property
    def turns(self) -> Turns | None:
        """Which turns of the data's conversations are learned; None where trajectories are sampled."""
        return getattr(self.credit, "turns", None)

    @property
    def skip(self) -> frozenset[int]:
        """The token ids among observations that are not predicted, where observations are."""
        return frozenset[int]().union(*(getattr(term, "skip", None) or () for term in self.terms))

    def at(self, step: int) -> Algorithm:
        """The algorithm at a step of the run, from 0."""
        terms = tuple(now for term in self.terms if (now := term.at(step)) is not None)
        return self if terms == self.terms else replace(self, terms=terms)

    def advantages(self, groups: Sequence[Group]) -> Advantages:
        """For every trajectory of every group a float, or a list with a float per sampled token."""
        for index, group in enumerate(groups if self.compares == "group" else ()):
            if len(group) < 2:
                raise SettingError(
                    f"{self.name}: group {index}: wanted at least 2 trajectories, because the baseline is made of the "
                    f"group's own rewards, got {len(group)}; raise group_size, or use reinforce_pp, whose baseline is "
                    "the batch"
                )
        return self.credit(groups)

    def loss(self, new: Logprobs, batch: MicroBatch, totals: Totals) -> tuple[mx.array, Metrics]:
        """The micro-batch's share of the step's loss, and of its metrics, which `reduce.finish` completes."""
        batch = self._prepared(new, batch)
        assert batch.old_logprobs is not None
        old, mask = batch.old_logprobs, batch.mask
        found = self.policy_loss(new.token_logprobs, old, batch.advantages, mask)
        if isinstance(found, Surrogate):
            surrogate = found
        else:
            ratio = mx.exp(log_ratio(new.token_logprobs, old, mask))
            surrogate = Surrogate(found, ratio, mx.zeros_like(ratio), mx.zeros_like(ratio))
        factors = [value for term in self.terms if (value := term.factor(new, batch)) is not None]
        weight = mx.ones_like(mask)
        for factor in factors:
            weight = weight * factor
        weight = mx.stop_gradient(weight)
        loss = self.reduction(surrogate.loss * weight, mask, totals)
        for term in self.terms:
            share = term.share(new, batch, totals, self.reduction)
            loss = loss if share is None else loss + share
        metrics = self._metrics(new, batch, surrogate, totals)
        for term in self.terms:
            metrics |= term.metrics(new, batch, totals)
        if factors:
            metrics["sampling/weight_mean"] = token_mean(weight, mask, totals)
        metrics["loss"] = loss
        # One array, taken apart: mx.compile fails on two outputs that are the same computation twice.
        values = mx.stop_gradient(mx.stack(list(metrics.values())))
        return loss, {name: values[n] for n, name in enumerate(metrics)}

    def _metrics(self, new: Logprobs, batch: MicroBatch, surrogate: Surrogate, totals: Totals) -> Metrics:
        """What is reported of the policy loss."""
        mask, old, own = batch.mask, batch.old_logprobs, self.policy_loss
        if self.turns is not None:
            return of_answers(new.token_logprobs, mask, totals)
        assert old is not None
        of_token = own.log_ratio if isinstance(own, Ratio) and own.ratio == "token" else log_ratio
        drift = of_token(new.token_logprobs, old, mask)
        metrics = of_policy(surrogate, drift, batch.advantages, mask, totals)
        return metrics | of_mismatch(old, batch.sampler_logprobs, mask, totals)

    def _prepared(self, new: Logprobs, batch: MicroBatch) -> MicroBatch:
        """The micro-batch with `old_logprobs`, sg(new) where it has none, and all that is added to the advantages."""
        old = new.token_logprobs if batch.old_logprobs is None else batch.old_logprobs
        batch = replace(batch, old_logprobs=mx.stop_gradient(old))
        advantages = batch.advantages
        for term in self.terms:
            extra = term.advantage(new, batch)
            advantages = advantages if extra is None else advantages + mx.stop_gradient(extra)
        return replace(batch, advantages=masked(advantages, batch.mask))


def comparison_of(algorithm: protocols.Algorithm) -> Comparison | None:
    """How an algorithm compares distributions with a teacher's; None without the member."""
    return getattr(algorithm, "comparison", None)


def num_top(algorithm: protocols.Algorithm) -> int:
    """How many of its most likely tokens the sampler has to keep for an algorithm."""
    compared = comparison_of(algorithm)
    return compared.num_top if compared is not None and compared.support == "student" else 0


def at_step(algorithm: protocols.Algorithm, step: int) -> protocols.Algorithm:
    """An algorithm at a step of the run; the same at every step without the member."""
    at = getattr(algorithm, "at", None)
    return algorithm if at is None else at(step)


def turns_of(algorithm: protocols.Algorithm) -> Turns | None:
    """Which turns of the data's conversations an algorithm learns; None for one that learns from samples."""
    return getattr(algorithm, "turns", "all") if "answers" in algorithm.needs else None


def not_predicted(algorithm: protocols.Algorithm) -> frozenset[int] | None:
    """The token ids among observations that an algorithm does not predict; None where it predicts no observations."""
    if "observations" not in algorithm.needs:
        return None
    return frozenset(getattr(algorithm, "skip", ()))
