"""From a recipe's resolved arguments to the callables it is composed of."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import mlx.core as mx

from mlxrl.algo import correction, distill, kl, losses, reduce
from mlxrl.algo import ratio as ratios
from mlxrl.algo.arguments import live
from mlxrl.algo.compose import PerToken, Policy, Recipe, Regulariser, Surrogate
from mlxrl.algo.credit import Credit
from mlxrl.algo.reduce import Reduction
from mlxrl.algo.returns import reward_to_go
from mlxrl.types import Comparison, Logprobs, MicroBatch

Resolved = Mapping[str, Any]


def recipe(name: str, a: Resolved, credit: Credit, policy: Policy) -> Recipe:
    """The recipe of these arguments, which all recipes share but for their credit and policy loss."""
    return Recipe(
        name=name,
        needs=needs(a),
        credit=credit,
        policy=policy,
        reduction=reduction(a),
        shapes=shapes(a),
        weights=weights(a),
        regularisers=regularisers(a),
        reports=reports(a),
        coefficients={name: a[name] for name in ("kl", "kl_reward", "entropy", "teacher") if a.get(name)},
        arguments=live(a),
        comparison=comparison(a),
    )


def needs(a: Resolved) -> frozenset[str]:
    """What has to be computed before the loss."""
    compared = comparison(a)
    uses = {
        "old": True,
        "reference": a["kl"] or a["kl_reward"],
        "entropy": a["entropy"],
        "teacher": a.get("teacher"),
        "candidates": compared is not None and compared.support == "student",
    }
    return frozenset(name for name, used in uses.items() if used)


def comparison(a: Resolved) -> Comparison | None:
    """Where distributions are compared with a teacher's, and how; None where only sampled tokens are."""
    if a.get("teacher_term") == "vocabulary":
        return Comparison("vocabulary", divergence=_divergence(a))
    if a.get("teacher_term") == "candidates":
        own = a["teacher_divergence"] == "surrogate" or a["teacher_support"] == "student"
        return Comparison("student" if own else "teacher", a["teacher_k"])
    return None


def reduction(a: Resolved) -> Reduction:
    """The reduction, with its constant where it has one."""
    if a["reduction"] == "constant":
        return partial(reduce.constant, length=a["length"])
    return reduce.REDUCTIONS[a["reduction"]]


def log_ratio(a: Resolved) -> ratios.LogRatio:
    """(new, old, mask) -> log-ratio at the chosen level, held within its bounds."""
    level = ratios.LEVELS[a.get("ratio", "token")]
    return lambda new, old, mask: ratios.clamp(level(new, old, mask), a["log_ratio_clamp"])


def closed(clip: ratios.Bounds | None) -> tuple[float, float]:
    """Bounds of which neither is open."""
    low, high = clip or (None, None)
    if low is None or high is None:
        raise ValueError(f"clip: wanted two numbers, because both sides bound this loss, got {clip}")
    return low, high


def clipped_policy(a: Resolved) -> Policy:
    """`losses.clipped`."""
    log_r, (low, high) = log_ratio(a), a["clip"] or (None, None)

    def policy(new: mx.array, old: mx.array, advantage: mx.array, mask: mx.array) -> Surrogate:
        ratio = mx.exp(log_r(new, old, mask))
        loss = losses.clipped(ratio, advantage, low, high, a["dual_clip"], a["delta"])
        return Surrogate(loss, ratio, *losses.outside(ratio, advantage, low, high))

    return policy


def cispo_policy(a: Resolved) -> Policy:
    """`losses.cispo`; the flags are of the weights that the bounds hold, whatever the advantage."""
    log_r, (low, high) = log_ratio(a), a["clip"] or (None, None)

    def policy(new: mx.array, old: mx.array, advantage: mx.array, mask: mx.array) -> Surrogate:
        ratio = mx.exp(log_r(new, old, mask))
        loss = losses.cispo(new, ratio, advantage, low, high)
        below, _ = losses.outside(ratio, mx.array(-1.0), low, None)
        _, above = losses.outside(ratio, mx.array(1.0), None, high)
        return Surrogate(loss, ratio, below, above)

    return policy


def sapo_policy(a: Resolved) -> Policy:
    """`losses.sapo`."""
    log_r = log_ratio(a)

    def policy(new: mx.array, old: mx.array, advantage: mx.array, mask: mx.array) -> Surrogate:
        ratio = mx.exp(log_r(new, old, mask))
        never = mx.zeros_like(ratio)
        return Surrogate(losses.sapo(ratio, advantage, a["tau_pos"], a["tau_neg"]), ratio, never, never)

    return policy


def gmpo_policy(a: Resolved) -> Policy:
    """`losses.gmpo`; the flags are of the log-ratios held."""
    log_r, (low, high) = log_ratio(a), closed(a["clip"])

    def policy(new: mx.array, old: mx.array, advantage: mx.array, mask: mx.array) -> Surrogate:
        x = log_r(new, old, mask)
        loss, ratio = losses.gmpo(x, advantage, mask, low, high)
        return Surrogate(loss, ratio, (x < -low) & (advantage < 0), (x > high) & (advantage > 0))

    return policy


def dppo_policy(a: Resolved) -> Policy:
    """`losses.dppo` inside the region that `losses.probability_outside` leaves."""
    log_r, (low, high) = log_ratio(a), closed(a["clip"])

    def policy(new: mx.array, old: mx.array, advantage: mx.array, mask: mx.array) -> Surrogate:
        ratio = mx.exp(log_r(new, old, mask))
        below, above = losses.probability_outside(new, old, advantage, low, high)
        return Surrogate(losses.dppo(new, ratio, advantage, ~(below | above), a["cap"]), ratio, below, above)

    return policy


def regularisers(a: Resolved) -> tuple[Regulariser, ...]:
    """Divergence from the reference, entropy bonus, and distillation where it is a loss."""
    terms: list[Regulariser] = []
    if a["kl"]:
        terms.append(Regulariser(a["kl"], partial(_kl_loss, a)))
    if a["entropy"]:
        terms.append(Regulariser(a["entropy"], lambda new, batch: -_known(new.entropy)))
    if a.get("teacher") and a["teacher_term"] == "loss":
        terms.append(Regulariser(a["teacher"], partial(_teacher_loss, a)))
    if a.get("teacher") and a["teacher_term"] == "candidates":
        terms.append(Regulariser(a["teacher"], partial(_candidate_loss, a)))
    if a.get("teacher") and a["teacher_term"] == "vocabulary":
        terms.append(Regulariser(a["teacher"], lambda new, batch: _known(new.divergence)))
    return tuple(terms)


def weights(a: Resolved) -> tuple[PerToken, ...]:
    """Factors of the policy loss: mismatch correction, veto, off-policy mask."""
    factors: list[PerToken] = []
    if a["correction"] is not None:
        factors.append(partial(_correction, a))
    if a["veto"] is not None:
        factors.append(
            lambda new, batch: correction.veto(
                _known(batch.old_logprobs), batch.sampler_logprobs, batch.mask, a["veto"]
            )
        )
    if a["off_policy"] is not None:
        factors.append(partial(_off_policy, a))
    return tuple(factors)


def shapes(a: Resolved) -> tuple[PerToken, ...]:
    """What is added to the advantage of every token: divergence from the reference and from the teacher, as costs."""
    costs: list[PerToken] = []
    if a["kl_reward"]:
        costs.append(partial(_kl_cost, a))
    if a.get("teacher") and a["teacher_term"] == "advantage":
        costs.append(partial(_teacher_gain, a))
    return tuple(costs)


def reports(a: Resolved) -> dict[str, PerToken]:
    """Means over tokens: k3 to the reference, the divergence from the teacher (k1 of sampled tokens), entropy."""
    found: dict[str, PerToken] = {}
    if "reference" in needs(a):
        found["policy/kl"] = lambda new, batch: kl.divergence(
            new.token_logprobs, _known(batch.reference_logprobs), batch.mask
        )
    if "teacher" in needs(a) and a["teacher_term"] == "candidates":
        found["policy/teacher_kl"] = partial(_candidate_gap, a)
    elif "teacher" in needs(a) and a["teacher_term"] == "vocabulary":
        found["policy/teacher_kl"] = lambda new, batch: _known(new.divergence)
    elif "teacher" in needs(a):
        found["policy/teacher_kl"] = lambda new, batch: ratios.token(
            new.token_logprobs, _known(batch.teacher_logprobs), batch.mask
        )
    if a["entropy"]:
        found["policy/entropy"] = lambda new, batch: _known(new.entropy)
    return found


def _known(values: mx.array | None) -> mx.array:
    assert values is not None
    return values


def _kl_loss(a: Resolved, new: Logprobs, batch: MicroBatch) -> mx.array:
    weight = (
        mx.exp(ratios.token(new.token_logprobs, _known(batch.old_logprobs), batch.mask)) if a["kl_weighted"] else None
    )
    options = (a["kl_estimator"], a["kl_log_ratio_clamp"], a["kl_clamp"], weight, a["kl_straight"])
    return kl.divergence(new.token_logprobs, _known(batch.reference_logprobs), batch.mask, *options)


def _kl_cost(a: Resolved, new: Logprobs, batch: MicroBatch) -> mx.array:
    cost = ratios.token(_known(batch.old_logprobs), _known(batch.reference_logprobs), batch.mask)
    return -a["kl_reward"] * reward_to_go(cost, a["kl_gamma"])


def _correction(a: Resolved, new: Logprobs, batch: MicroBatch) -> mx.array:
    options = (a["correction"], a["correction_level"], a["correction_bounds"])
    return correction.weights(_known(batch.old_logprobs), batch.sampler_logprobs, batch.mask, *options)


def _off_policy(a: Resolved, new: Logprobs, batch: MicroBatch) -> mx.array:
    return correction.off_policy_mask(
        new.token_logprobs, batch.sampler_logprobs, batch.advantages, batch.mask, a["off_policy"]
    )


def _teacher_gain(a: Resolved, new: Logprobs, batch: MicroBatch) -> mx.array:
    options = (a["teacher_gamma"], a["teacher_clamp"])
    student = new.token_logprobs if a["teacher_from"] == "new" else _known(batch.old_logprobs)
    return a["teacher"] * distill.reverse_kl_advantage(student, _known(batch.teacher_logprobs), batch.mask, *options)


def _teacher_loss(a: Resolved, new: Logprobs, batch: MicroBatch) -> mx.array:
    options = (a["teacher_estimator"], (-20.0, 20.0), a["teacher_clamp"])
    return kl.divergence(new.token_logprobs, _known(batch.teacher_logprobs), batch.mask, *options)


def _candidate_gap(a: Resolved, new: Logprobs, batch: MicroBatch) -> mx.array:
    return _surrogate(a, new, batch)[1] if a["teacher_divergence"] == "surrogate" else _candidate_loss(a, new, batch)


def _candidate_loss(a: Resolved, new: Logprobs, batch: MicroBatch) -> mx.array:
    if a["teacher_divergence"] == "surrogate":
        return _surrogate(a, new, batch)[0]
    close = distill.with_tail if a["teacher_tail"] else distill.renormalised
    return _divergence(a)(close(_known(new.top_logprobs)), close(_known(batch.teacher_top_logprobs)))


def _surrogate(a: Resolved, new: Logprobs, batch: MicroBatch) -> tuple[mx.array, mx.array]:
    options = (closed(a["clip"]), None, a["log_ratio_clamp"], batch.old_top_logprobs)
    return distill.surrogate(_known(new.top_logprobs), _known(batch.teacher_top_logprobs), *options)


def _divergence(a: Resolved) -> distill.Divergence:
    chosen = distill.DIVERGENCES[a["teacher_divergence"]]
    return partial(chosen, beta=a["teacher_beta"]) if a["teacher_divergence"] == "jsd" else chosen
