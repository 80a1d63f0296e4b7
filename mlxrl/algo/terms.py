"""The terms of an algorithm: frozen values, each a table of [algorithm] in TOML.

`[algorithm.kl] coefficient = 0.04` is `KL(coefficient=0.04)` among the `terms` of a recipe. new, old, sampler,
reference and teacher are log-probs of the sampled tokens, in nats; the gradient flows through `new` alone.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, ClassVar, Literal, TypeAlias

import mlx.core as mx

from mlxrl.algo import divergence
from mlxrl.algo.algorithm import Term, term
from mlxrl.algo.divergence import Estimator, estimate, reward_to_go
from mlxrl.algo.losses import SAFE, ClosedClip, Level, clamp, importance, log_ratio, mean_log_ratio, within
from mlxrl.algo.reduce import token_mean
from mlxrl.checked import Count, Interval, NotNegative, Positive, SettingError, Share, because, checked, says
from mlxrl.types import Comparison, Logprobs, Metrics, MicroBatch, Totals

Coefficient: TypeAlias = Annotated[Positive, because("leave the term out to switch it off")]
_FLAT = "'k1' in the loss has a gradient of mean 0 and teaches nothing; use 'k3' or 'k2'"


def there(values: mx.array | None) -> mx.array:
    """An array that the term's `needs` have provided."""
    assert values is not None
    return values


@checked("algorithm.term")
class Weighted(Term):
    """A term with a coefficient. reports: the metrics' names for the mean of `gap` over tokens, and the coefficient."""

    coefficient: Annotated[Coefficient, says("factor of the term")]
    reports: ClassVar[tuple[str, str]]

    def gap(self, new: Logprobs, batch: MicroBatch) -> mx.array:
        """[B, T]."""
        raise NotImplementedError

    def metrics(self, new: Logprobs, batch: MicroBatch, totals: Totals) -> Metrics:
        mean, coefficient = self.reports
        share = token_mean(mx.ones_like(batch.mask), batch.mask, totals)
        return {mean: token_mean(self.gap(new, batch), batch.mask, totals), coefficient: self.coefficient * share}


@checked("algorithm.reference")
class ReferenceTerm(Weighted):
    """A divergence from the reference; k3 is reported."""

    needs: ClassVar[frozenset[str]] = frozenset({"reference"})

    def gap(self, new: Logprobs, batch: MicroBatch) -> mx.array:
        return estimate(new.token_logprobs, there(batch.reference_logprobs), batch.mask)


@term("kl")
class KL(ReferenceTerm):
    """Divergence of the policy from the reference, in the loss: c KL(new || reference), estimated on sampled tokens.

    k1 = x, k2 = x^2 / 2, k3 = exp(-x) - 1 + x,  x = new - reference   (GRPO, arXiv 2402.03300 eq. 4)
    """

    reports: ClassVar[tuple[str, str]] = ("kl", "kl/coefficient")
    estimator: Annotated[Estimator, says("'k1', 'abs', 'k2' or 'k3'")] = "k3"
    straight: Annotated[Estimator | None, says("the estimator whose gradient is taken; left out, the same")] = None
    log_ratio_clamp: Annotated[Interval | None, says("bounds of x")] = SAFE
    clamp: Annotated[Interval | None, says("bounds of the estimate; OpenRLHF, verl: -10 and 10")] = None
    weighted: Annotated[bool, says("multiply the estimate by the importance ratio new/old (slime, TRL)")] = False

    def check(self) -> None:
        if self.estimator == "k1" and not self.straight and not self.weighted:
            raise SettingError("estimator", _FLAT)

    def loss(self, new: Logprobs, batch: MicroBatch) -> mx.array:
        weight = mx.exp(log_ratio(new.token_logprobs, there(batch.old_logprobs), batch.mask)) if self.weighted else None
        pair = (new.token_logprobs, there(batch.reference_logprobs), batch.mask)
        return estimate(*pair, self.estimator, self.log_ratio_clamp, self.clamp, weight, self.straight)


@term("kl_reward")
class KLReward(ReferenceTerm):
    """Divergence from the reference as a cost in the advantage (k1), of the token and of those that it leads to.

    A_t += -c sum_{s>=t} gamma^(s-t) clip(old - reference)_s   (OpenRLHF)
    """

    reports: ClassVar[tuple[str, str]] = ("kl", "kl_reward/coefficient")
    gamma: Annotated[Share, says("discount of later tokens")] = 1.0
    clamp: Annotated[Interval | None, says("bounds of a token's old - reference; OpenRLHF: -10 and 10")] = None

    def advantage(self, new: Logprobs, batch: MicroBatch) -> mx.array:
        cost = log_ratio(there(batch.old_logprobs), there(batch.reference_logprobs), batch.mask)
        return -self.coefficient * reward_to_go(clamp(cost, self.clamp), self.gamma)


@term("entropy")
class Entropy(Weighted):
    """Entropy bonus: c sum_v p_v log p_v of the policy at every token (A3C, arXiv 1602.01783)."""

    needs: ClassVar[frozenset[str]] = frozenset({"entropy"})
    reports: ClassVar[tuple[str, str]] = ("entropy", "entropy/coefficient")

    def gap(self, new: Logprobs, batch: MicroBatch) -> mx.array:
        return there(new.entropy)

    def loss(self, new: Logprobs, batch: MicroBatch) -> mx.array:
        return -there(new.entropy)


CorrectionLevel: TypeAlias = Literal["token", "sequence", "geometric"]
_LEVELS: dict[CorrectionLevel, Level] = {"token": "token", "sequence": "sequence_sum", "geometric": "sequence"}


@term("correction")
class Correction(Term):
    """Importance weight of the gap between trainer and sampler, w = exp(old - sampler), on the policy loss.

    truncate: clip(w, low, high)  (TIS; verl, slime, TRL);  mask: w inside the bounds, else 0  (IcePop; sequence: MIS;
    w of the token where the geometric mean is inside, `mask_level`: OpenRLHF's seq-mask-tis)
    """

    mode: Annotated[Literal["truncate", "mask"], says("what becomes of a weight outside the bounds")] = "truncate"
    level: Annotated[CorrectionLevel, says("w of a token, the sequence's product, or its geometric mean")] = "token"
    bounds: Annotated[Interval, says("of w")] = (0.0, 2.0)
    mask_level: Annotated[CorrectionLevel | None, says("whose w a mask looks at; left out, that of `level`")] = None
    log_ratio_clamp: Annotated[Interval | None, says("bounds of old - sampler, or of its sum or mean")] = SAFE

    def check(self) -> None:
        if self.mask_level and self.mode != "mask":
            raise SettingError("mask_level", "has no effect, because mode is 'truncate'; leave it out")

    def factor(self, new: Logprobs, batch: MicroBatch) -> mx.array:
        weight = self._weight(batch, self.level)
        if self.mode == "truncate":
            return clamp(weight, self.bounds)
        return mx.where(within(self._weight(batch, self.mask_level or self.level), self.bounds) > 0, weight, 0.0)

    def metrics(self, new: Logprobs, batch: MicroBatch, totals: Totals) -> Metrics:
        if self.level == "token":
            return {}
        computed = mx.maximum(totals.sequences - totals.without_signal, 1)
        return {"sampling/sequence_weight_mean": self.factor(new, batch).sum() / computed}

    def _weight(self, batch: MicroBatch, level: CorrectionLevel) -> mx.array:
        pair = (there(batch.old_logprobs), batch.sampler_logprobs, batch.mask)
        return importance(*pair, _LEVELS[level], self.log_ratio_clamp)


@term("veto")
class Veto(Term):
    """Drops the policy loss of a sequence with a token whose weight exp(old - sampler) is below a threshold (slime)."""

    threshold: Annotated[NotNegative, says("of the weight")]

    def factor(self, new: Logprobs, batch: MicroBatch) -> mx.array:
        pair = (there(batch.old_logprobs), batch.sampler_logprobs, batch.mask)
        low = importance(*pair, bounds=None) < self.threshold
        return 1.0 - mx.any(low & (batch.mask > 0), axis=-1, keepdims=True).astype(mx.float32)


@term("off_policy")
class OffPolicyMask(Term):
    """Drops the policy loss where A < 0 and the sequence has drifted (OPSM, DeepSeek-V3.2, arXiv 2512.02556).

    keep = not (A < 0 and mean_t(sampler - new) > delta)
    """

    delta: Annotated[NotNegative, says("drift that is allowed, in nats a token")]

    def factor(self, new: Logprobs, batch: MicroBatch) -> mx.array:
        drift = -mx.stop_gradient(mean_log_ratio(new.token_logprobs, batch.sampler_logprobs, batch.mask))
        return 1.0 - ((batch.advantages < 0) & (drift > self.delta)).astype(mx.float32)


@checked("algorithm.teacher")
class TeacherTerm(Weighted):
    """Learning from a teacher on the student's own samples; new - teacher of sampled tokens is reported."""

    needs: ClassVar[frozenset[str]] = frozenset({"teacher"})
    reports: ClassVar[tuple[str, str]] = ("teacher/kl", "teacher/coefficient")
    coefficient: Annotated[Coefficient, says("factor of the term")] = 1.0

    def gap(self, new: Logprobs, batch: MicroBatch) -> mx.array:
        return log_ratio(new.token_logprobs, there(batch.teacher_logprobs), batch.mask)


@term("teacher_advantage")
class TeacherAdvantage(TeacherTerm):
    """The teacher's lead in the advantage, the policy gradient of the reverse KL (MiniLLM, arXiv 2306.08543; slime).

    A_t += c sum_{s>=t} gamma^(s-t) clip(teacher - old)_s
    """

    source: Annotated[Literal["old", "new"], says("whose log-probs the lead is over; new as it is in every update")] = (
        "old"
    )
    gamma: Annotated[Share, says("discount of later tokens; 0 credits the token alone (slime, tinker)")] = 0.0
    clamp: Annotated[Interval | None, says("bounds of a token's log-ratio student - teacher")] = None

    def advantage(self, new: Logprobs, batch: MicroBatch) -> mx.array:
        student = new.token_logprobs if self.source == "new" else there(batch.old_logprobs)
        cost = log_ratio(mx.stop_gradient(student), there(batch.teacher_logprobs), batch.mask)
        return self.coefficient * -reward_to_go(clamp(cost, self.clamp), self.gamma)


@term("teacher_kl")
class TeacherKL(TeacherTerm):
    """Divergence from the teacher on sampled tokens, in the loss: c k3(new, teacher)  (verl); estimators as in `KL`."""

    estimator: Annotated[Estimator, says("'abs', 'k2' or 'k3'")] = "k3"
    clamp: Annotated[Interval | None, says("bounds of the estimate")] = None

    def check(self) -> None:
        if self.estimator == "k1":
            raise SettingError("estimator", _FLAT)

    def loss(self, new: Logprobs, batch: MicroBatch) -> mx.array:
        pair = (new.token_logprobs, there(batch.teacher_logprobs), batch.mask)
        return estimate(*pair, self.estimator, SAFE, self.clamp)


@term("teacher_top_k")
class TeacherTopK(TeacherTerm):
    """Divergence from the teacher over K top ids and what is left of the mass (GKD, arXiv 2306.13649, cut to K).

    c JSD_beta(new, teacher): beta 0 the forward KL(teacher || new), 1 the reverse KL, between them Jensen-Shannon
    """

    k: Annotated[Count, says("ids of a token")] = 16
    beta: Annotated[Share, says("0 forward KL, 1 reverse KL, between them Jensen-Shannon")] = 1.0
    support: Annotated[
        Literal["teacher", "student"], says("whose most likely ids: the teacher's, or the student's as it sampled")
    ] = "teacher"
    tail: Annotated[bool, says("the remaining mass as one more id; false renormalises over the ids")] = True

    @property
    def comparison(self) -> Comparison:
        return Comparison(self.support, self.k)

    def loss(self, new: Logprobs, batch: MicroBatch) -> mx.array:
        close = divergence.with_tail if self.tail else divergence.renormalised
        student, teacher = divergence.shared(there(new.top_logprobs), there(batch.teacher_top_logprobs))
        return divergence.jsd(close(student), close(teacher), self.beta)

    gap = loss


@term("teacher_surrogate")
class TeacherSurrogate(TeacherTerm):
    """Clipped policy gradient on the student's own K top ids (OpenClaw-RL's hint distillation).

    A_k = w_k clip(teacher - old)_k,  w = softmax of old over the ids
    l = sum_k max(-A r, -A clip(r, 1-low, 1+high)),  r = exp(new - old);  reported: sum_k w |teacher - old|
    """

    k: Annotated[Count, says("ids of a token")] = 16
    clip: Annotated[ClosedClip, says("distances of the ratio's bounds from 1")] = (0.2, 0.2)
    log_ratio_clamp: Annotated[Interval | None, says("bounds of new - old")] = SAFE
    gap_clamp: Annotated[Interval | None, says("bounds of teacher - old in the advantage")] = None

    @property
    def comparison(self) -> Comparison:
        return Comparison("student", self.k)

    def loss(self, new: Logprobs, batch: MicroBatch) -> mx.array:
        old, weight, gap = self._old(new, batch)
        advantages = mx.stop_gradient(clamp(gap, self.gap_clamp) * weight)
        student, old = divergence.shared(there(new.top_logprobs), old)
        ratio = mx.exp(clamp(student - old, self.log_ratio_clamp))
        bounds = (1 - self.clip[0], 1 + self.clip[1])
        return mx.maximum(-advantages * ratio, -advantages * clamp(ratio, bounds)).sum(axis=-1)

    def gap(self, new: Logprobs, batch: MicroBatch) -> mx.array:
        _, weight, gap = self._old(new, batch)
        return (weight * mx.abs(gap)).sum(axis=-1)

    def _old(self, new: Logprobs, batch: MicroBatch) -> tuple[mx.array, mx.array, mx.array]:
        """[B, T, K] log-probs at sampling time, or sg(new); their softmax over the ids; and teacher - old."""
        old = mx.stop_gradient(there(new.top_logprobs) if batch.old_top_logprobs is None else batch.old_top_logprobs)
        old, teacher = divergence.shared(old, there(batch.teacher_top_logprobs))
        return old, mx.softmax(old, axis=-1), teacher - old


@term("teacher_vocabulary")
class TeacherVocabulary(TeacherTerm):
    """Divergence from the teacher over the whole vocabulary (GKD, arXiv 2306.13649 eq. 3): c JSD_beta(new, teacher)."""

    beta: Annotated[Share, says("0 forward KL, 1 reverse KL, between them Jensen-Shannon")] = 1.0

    @property
    def comparison(self) -> Comparison:
        return Comparison("vocabulary", divergence=partial(divergence.jsd, beta=self.beta))

    def loss(self, new: Logprobs, batch: MicroBatch) -> mx.array:
        return there(new.divergence)

    gap = loss
