"""ECHO: the policy learns to predict what its actions bring about, beside what its algorithm teaches."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from mlxrl.algo.credit import Advantages
from mlxrl.algo.probe import comparison_of
from mlxrl.algo.reduce import total
from mlxrl.types import Algorithm, Comparison, Group, Logprobs, Metrics, MicroBatch, Totals


@dataclass(frozen=True, slots=True)
class Echo:
    """An algorithm with the loss of `with_echo` added; see there. step: of the run, from 0, which tapers the weight."""

    algorithm: Algorithm
    weight: float
    steps: int | None = None
    skip: frozenset[int] = frozenset()
    step: int = 0

    @property
    def name(self) -> str:
        return self.algorithm.name

    @property
    def needs(self) -> frozenset[str]:
        return self.algorithm.needs | ({"observations"} if self.coefficient else frozenset())

    @property
    def comparison(self) -> Comparison | None:
        return comparison_of(self.algorithm)

    @property
    def arguments(self) -> Mapping[str, Any]:
        return getattr(self.algorithm, "arguments", {})

    @property
    def coefficient(self) -> float:
        """What the loss counts at this step: weight, or weight (1 - step / steps), 0 from there on."""
        left = 1.0 if self.steps is None else max(1 - self.step / self.steps, 0.0)
        return self.weight * left

    def at(self, step: int) -> Echo:
        """The algorithm at a step of the run."""
        return replace(self, step=step)

    def advantages(self, groups: Sequence[Group]) -> Advantages:
        """Those of the algorithm."""
        return self.algorithm.advantages(groups)

    def loss(self, new: Logprobs, batch: MicroBatch, totals: Totals) -> tuple[mx.array, Metrics]:
        """The minibatch's share; with a coefficient of 0 it is the algorithm's own, bit for bit."""
        loss, metrics = self.algorithm.loss(new, batch, totals)
        if not self.coefficient:
            return loss, metrics
        assert new.observation_logprobs is not None
        assert batch.observation_mask is not None
        count = max(totals.observation_tokens, 1)
        missed = total(-new.observation_logprobs, batch.observation_mask) / count
        loss = loss + self.coefficient * missed
        # One array, taken apart: mx.compile fails on two outputs that are the same computation twice.
        shown = mx.stop_gradient(mx.stack([loss, missed, self.coefficient * batch.observation_mask.sum() / count]))
        names = ("policy/loss", "policy/echo_loss", "policy/echo_coefficient")
        return loss, {**metrics, **{name: shown[n] for n, name in enumerate(names)}}


def with_echo(
    algorithm: Algorithm, weight: float = 0.1, *, steps: int | None = None, skip: Collection[int] = ()
) -> Echo:
    """Add the cross-entropy of what environments answered (ECHO, arXiv 2605.24517).

    L = L_algorithm + c sum_{observed tokens} -log pi(token | what stands before it) / (observed tokens of the step)

    Observed are the tokens that an environment returned, those of the first prompt and forced ones not, over all
    trajectories of the step but those that ended in an error: an attempt without advantage teaches here too. The
    denominator is theirs alone, so that the weight of the algorithm's loss stays what it was. Log-probs are taken at
    the temperature of the sampling. Where a chat template has rewritten the history, the answer in the new prompt is
    told apart by `Turn.new`.

    Args:
        weight: c, 0 or more; 0 is the algorithm itself.
        steps: taper c linearly over so many steps of the run, c = weight (1 - step / steps); None keeps it.
            `train` goes along; in a loop of one's own, `algo.at(step)` is the algorithm of a step.
        skip: token ids that are not predicted, as the marks of a chat template (`tokenizer.all_special_ids`).
    Returns:
        an algorithm. It reports `policy/echo_loss`, nats per observed token, and `policy/echo_coefficient`.
    """
    if not 0 <= weight < math.inf:
        raise ValueError(f"echo: weight: wanted 0 or more, got {weight}")
    if steps is not None and steps < 1:
        raise ValueError(f"echo: steps: wanted at least 1, got {steps}; leave it out for a constant weight")
    return Echo(algorithm, weight, steps, frozenset(skip))


def at_step(algorithm: Algorithm, step: int) -> Algorithm:
    """The algorithm at a step of the run; most are the same at every one."""
    at = getattr(algorithm, "at", None)
    return algorithm if at is None else at(step)


def not_predicted(algorithm: Algorithm) -> frozenset[int] | None:
    """The token ids among observations that an algorithm does not predict; None where it predicts no observations."""
    return getattr(algorithm, "skip", frozenset[int]()) if "observations" in algorithm.needs else None
