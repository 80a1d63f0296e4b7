"""What evaluations say of a policy: pass@k, and the paired comparison of two evaluations of the same examples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Protocol

import numpy as np

from mlxrl.algo.advantages import equal
from mlxrl.algo.reduce import perplexity
from mlxrl.errors import UserError

RESAMPLES = 10_000
DRAWN_AT_ONCE = 1 << 22
"""Indices of a bootstrap that are in memory together."""


@dataclass(frozen=True, slots=True)
class AnswerLosses:
    """What a policy makes of answers that the data hold.

    examples: SHA-256 of the examples; losses: the cross-entropy in nats of the answers of each, summed over their
    tokens; tokens: how many.
    """

    examples: str
    losses: tuple[float, ...]
    tokens: tuple[int, ...]

    @property
    def loss(self) -> float:
        """The mean over all tokens."""
        return sum(self.losses) / sum(self.tokens)

    def summary(self) -> dict[str, Any]:
        """loss; perplexity: its exponential; answer_tokens: how many."""
        return {"loss": self.loss, "perplexity": perplexity(self.loss), "answer_tokens": sum(self.tokens)}


class Scored(Protocol):
    """What can be compared: an evaluation, or its `Scores`. Rewards are NaN where an example could not be scored."""

    @property
    def examples(self) -> str:
        """SHA-256 of the examples, in their order."""
        ...

    @property
    def rewards(self) -> Sequence[float]:
        """The reward of every example."""
        ...

    @property
    def answers(self) -> AnswerLosses | None:
        """The losses on the answers of the data, where they were scored; without rewards these alone."""
        ...


@dataclass(frozen=True, slots=True)
class Scores:
    """The rewards of an evaluation, example by example, as evaluation.json keeps them.

    examples: SHA-256 of the examples; rewards: of each, NaN where it could not be scored; samples: of its k samples.
    """

    examples: str
    rewards: tuple[float, ...]
    samples: tuple[tuple[float, ...], ...] = ()
    answers: AnswerLosses | None = None

    @property
    def measure(self) -> dict[str, float]:
        """What adapters are chosen by: the mean reward, or without rewards the loss on the answers of the data."""
        if self.answers is not None and not self.rewards:
            return {"loss": self.answers.loss}
        return {"mean_reward": self.mean}

    @property
    def mean(self) -> float:
        """The mean reward of the examples that could be scored, NaN where there are none."""
        known = [reward for reward in self.rewards if not math.isnan(reward)]
        return fmean(known) if known else math.nan

    def as_json(self) -> dict[str, Any]:
        """The scores as strict JSON, in which NaN is null."""
        samples = {"samples": [_nulls(one) for one in self.samples]} if self.samples else {}
        answers = {"losses": list(self.answers.losses), "tokens": list(self.answers.tokens)} if self.answers else {}
        return {"examples": self.examples, "rewards": _nulls(self.rewards), **samples, **answers}

    @classmethod
    def of_json(cls, value: Mapping[str, Any]) -> Scores:
        """The scores that `as_json` made the value of."""
        samples = tuple(_numbers(one) for one in value.get("samples", ()))
        examples, answers = str(value["examples"]), None
        if "losses" in value:
            answers = AnswerLosses(examples, _numbers(value["losses"]), tuple(map(int, value["tokens"])))
        return cls(examples, _numbers(value["rewards"]), samples, answers)


def _nulls(values: Sequence[float]) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values]


def _numbers(values: Sequence[float | None]) -> tuple[float, ...]:
    return tuple(math.nan if value is None else float(value) for value in values)


def succeeds(reward: float, success: float) -> bool:
    """Whether a reward is at least `success`; one that falls short by rounding is."""
    return reward >= success or equal(reward, success)


def pass_at(k: int, samples: Sequence[Sequence[float]], success: float) -> float:
    """The mean of pass@k over the examples with at least k scored samples; NaN where there are none."""
    known = [[reward for reward in one if not math.isnan(reward)] for one in samples]
    found = [pass_at_k(len(one), sum(succeeds(r, success) for r in one), k) for one in known if len(one) >= k]
    return fmean(found) if found else math.nan


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k samples is correct (Codex, arXiv 2107.03374, eq. 1).

    pass@k = 1 - C(n - c, k) / C(n, k) for n >= k samples of which c are correct.
    """
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def compare(before: Scored, after: Scored, seed: int = 0) -> dict[str, Any]:
    """Mean reward after minus before on the same examples, with its 95 % interval.

    The interval is that of a bootstrap over the pairs (percentiles 2.5 and 97.5 of the resampled means). improved,
    worsened, equal: how many examples. mcnemar_p: where every reward is 0 or 1, the p of McNemar's exact test. Examples
    that could not be scored in both are left out; then `pairs` says how many there are. Where answers of the data were
    scored, loss_difference and loss_interval are those of their loss; without rewards these alone.
    """
    if before.examples != after.examples or len(before.rewards) != len(after.rewards):
        raise UserError("compare", "the two evaluations are not of the same examples")
    one, other = before.answers, after.answers
    answers = loss_difference(one, other, seed) if one is not None and other is not None else {}
    if answers and not before.rewards:
        return answers
    both = zip(before.rewards, after.rewards, strict=True)
    known = [(one, other) for one, other in both if not math.isnan(one + other)]
    left_out = {} if len(known) == len(before.rewards) else {"pairs": len(known)}
    counts = {"improved": 0, "worsened": 0, "equal": 0}
    if not known:
        return {"difference": math.nan, "interval": [math.nan, math.nan], **counts, **left_out, **answers}
    pairs = np.array([0.0 if equal(one, other) else other - one for one, other in known])
    counts = {"improved": int((pairs > 0).sum()), "worsened": int((pairs < 0).sum()), "equal": int((pairs == 0).sum())}
    binary = all(equal(value, 0) or equal(value, 1) for pair in known for value in pair)
    p = {"mcnemar_p": mcnemar(counts["improved"], counts["worsened"])} if binary else {}
    return {"difference": fmean(pairs), "interval": _interval(pairs, seed), **counts, **p, **left_out, **answers}


def loss_difference(before: AnswerLosses, after: AnswerLosses, seed: int = 0) -> dict[str, Any]:
    """Loss after minus before on the same answers, with the 95 % interval of a bootstrap over the examples."""
    if before.tokens != after.tokens:
        raise UserError("compare", "the two evaluations are not of the same answers")
    changes, tokens = np.subtract(after.losses, before.losses), np.array(before.tokens)
    shares = np.column_stack([changes, tokens])
    found = {"loss_difference": float(changes.sum() / tokens.sum())}
    return {**found, "loss_interval": _interval(shares, seed, lambda means: means[:, 0] / means[:, 1])}


def gain(found: Mapping[str, Any]) -> float:
    """How much better the second evaluation of a comparison is: the reward that it has more, or the loss less."""
    return found["difference"] if "difference" in found else -found["loss_difference"]


def gain_interval(found: Mapping[str, Any]) -> tuple[float, float]:
    """The 95 % interval of the gain."""
    low, high = found["interval"] if "interval" in found else (-one for one in reversed(found["loss_interval"]))
    return low, high


def _interval(
    differences: np.ndarray[Any, Any],
    seed: int,
    of: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]] = np.asarray,
) -> list[float]:
    """The 95 % interval of a mean: percentiles of the means of 10,000 resamples, or of what is made `of` them."""
    n, draw = len(differences), np.random.default_rng(seed)
    rows = max(1, min(RESAMPLES, DRAWN_AT_ONCE // n))
    sizes = [min(rows, RESAMPLES - first) for first in range(0, RESAMPLES, rows)]
    means = [differences[draw.integers(n, size=(size, n))].mean(axis=1) for size in sizes]
    low, high = np.percentile(of(np.concatenate(means)), [2.5, 97.5])
    return [float(low), float(high)]


def mcnemar(improved: int, worsened: int) -> float:
    """p of McNemar's exact test: two-sided, of a fair coin thrown once for each discordant pair.

    p = min(1, 2 sum_(i <= min(b, c)) C(b + c, i) / 2^(b + c))
    """
    pairs, fewer = improved + worsened, min(improved, worsened)
    return min(1.0, 2 * sum(math.comb(pairs, i) for i in range(fewer + 1)) / 2**pairs)
