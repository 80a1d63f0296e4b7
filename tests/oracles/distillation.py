"""On-policy distillation, and log-probs and entropy from logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from mlxrl.algo import divergence, losses, reduce
from mlxrl.algo.losses import Clipped
from mlxrl.algo.terms import TeacherAdvantage, TeacherSurrogate
from mlxrl.types import Logprobs, MicroBatch
from oracles import extra
from oracles.case import Case, Results, gradient_of, made
from oracles.policy import (
    Runner,
    from_losses,
    prime_metrics,
    relative,
    row_mean_of,
    slime_metrics,
    verl_clip,
    verl_metrics,
)

# The sampled token.


def in_advantage(case: Case, recipe: Any, credit: np.ndarray, weight: float, clip: Any, kl_loss: bool) -> Results:
    """A_i plus the teacher's term: the advantage is checked, and the loss is fed A_i and the teacher (slime)."""
    hyper = case.hyper
    base = np.broadcast_to(credit.reshape(len(credit), -1), case.np("mask").shape)
    gap = lead(case, "logp_old")
    run = case.run(recipe, case.totals(), base)
    terms: dict[str, Any] = {}
    if kl_loss:
        x = (case["logp_new"], case["logp_ref"], case.mask)
        terms["kl_loss"] = divergence.estimate(*x, hyper["kl_loss_type"], log_ratio_clamp=None)
    found = run.results() | slime_metrics(case, *clip, **terms)
    found["metric_pg_loss"] = run.loss - hyper.get("kl_loss_coef", 0) * found.get("metric_kl_loss", 0)
    return found | {"out_advantages": base + weight * np.asarray(gap, dtype=np.float64)}


def lead(case: Case, student: str, mask: mx.array | None = None, **settings: Any) -> mx.array:
    """[B, T] what `TeacherAdvantage` adds to the advantages for a student's log-probs."""
    mask = mx.ones_like(case.mask) if mask is None else mask
    batch = replace(case.minibatch(np.zeros(len(case.mask))), mask=mask, old_logprobs=case[student])
    return TeacherAdvantage(**settings).advantage(Logprobs(case[student]), batch)


def slime(case: Case) -> Results:
    hyper = case.hyper
    clip = (hyper["eps_clip"], hyper["eps_clip"])
    recipe = made("opd", "slime", teacher_advantage={"coefficient": hyper["opd_kl_coef"]}, clip=clip)
    credit = relative(case, "group", hyper["adv_eps"], "zero")
    found = in_advantage(case, recipe, credit, hyper["opd_kl_coef"], clip, False)
    return found | {"out_reverse_kl": case.np("logp_old").astype(np.float64) - case.np("logp_teacher")}


def openclaw_combine(case: Case) -> Results:
    hyper = case.hyper
    clip = (hyper["eps_clip"], hyper["eps_clip_high"])
    kl = {"coefficient": hyper["kl_loss_coef"], "estimator": hyper["kl_loss_type"]}
    recipe = made("opd", "openclaw", teacher_advantage={"coefficient": hyper["w_opd"]}, clip=clip, kl=kl)
    credit = hyper["w_rl"] * case.np("grpo_advantages").astype(np.float64)
    return in_advantage(case, recipe, credit, hyper["w_opd"], clip, True)


def prime_ref_kl(case: Case) -> Results:
    """-[kept] sg(teacher - new) rho + 1e-3 (new - old)^2, kept unless p_new - p_old < -0.2; rows with tokens count."""
    dropped = losses.probability_outside(case["logp_new"], case["logp_old"], -mx.ones_like(case.mask), 0.2, 0.2)[0]
    gain = -losses.log_ratio(case["logp_new"], case["logp_teacher"], case.mask)

    def function(new: mx.array, x: mx.array) -> mx.array:
        return mx.where(dropped, 0.0, -mx.exp(x) * gain) + 2e-3 * divergence.ESTIMATORS["k2"](x)

    found = from_losses(case, function, reduce.token_mean, case.totals(tokens=case.hyper["ref_kl_scale"]))
    parts = prime_metrics(case, dropped, filled=True)
    found |= {name.replace("metric_", "metric_ref_kl.", 1): value for name, value in parts.items()}
    found["metric_ref_kl"] = row_mean_of(case, gain, case.mask, filled=True)
    return found | {"out_advantages": np.zeros(len(case.np("mask")))}


def verl_k1(case: Case) -> Results:
    """The advantage follows the live policy; the ratio is against the old one."""
    bound = case.hyper["loss_max_clamp"]
    credit = lead(case, "logp_new", clamp=(-bound, bound))
    options = {"clip": verl_clip(case.hyper), "dual_clip": case.hyper["clip_ratio_c"]}
    run = case.run(made("grpo", "verl", **options), case.totals(), np.array(credit))
    return run.results() | verl_metrics(case, run.metrics, options["dual_clip"]) | {"out_advantages": credit}


def verl_k3(case: Case) -> Results:
    bound = case.hyper["loss_max_clamp"]
    recipe = made("opd", teacher_kl={"clamp": (-min(bound, 10), min(bound, 10))})
    nothing = np.zeros(len(case.np("mask")))
    return case.run(recipe, case.totals(), nothing).results() | {"out_advantages": nothing}


def discounted_gain(case: Case, values: mx.array, key: str, name: str) -> Results:
    """A0 plus a coefficient times the (discounted) divergence in the advantage (tinker)."""
    hyper = case.hyper
    base = case.np("advantages0").astype(np.float64)[:, None] * case.np("mask")
    cost = extra.mean(losses.log_ratio(case["logp_old"], case[key], case.mask), case.mask)
    return {
        "out_advantages": base + hyper["kl_penalty_coef"] * np.asarray(values, dtype=np.float64),
        name: cost,
    }


def tinker(case: Case) -> Results:
    gain = lead(case, "logp_old", case.mask, gamma=case.hyper["kl_discount_factor"])
    found = discounted_gain(case, gain, "logp_teacher", "metric_teacher_kl")
    return found | {"metric_teacher_kl.dataset_0": found["metric_teacher_kl"]}


def tinker_centred(case: Case) -> Results:
    pair = (case["logp_old"], case["logp_ref"], case.mask)
    gain = extra.centred_kl_advantage(*pair, case.hyper["kl_discount_factor"])
    return discounted_gain(case, gain, "logp_ref", "metric_kl_policy_base")


def minillm(case: Case) -> Results:
    options = (case.hyper["gamma"], case.hyper["length_normalization"])
    pair = (case["logp_old"], case["logp_teacher"], case.mask)
    return {"out_advantages": extra.minillm_advantage(*pair, *options)}


# Distributions: losses of the student's logits.


def from_logits(
    case: Case,
    function: Callable[[mx.array], mx.array],
    reduction: Any = reduce.token_mean,
    totals: Any = None,
) -> tuple[mx.array, mx.array]:
    """Value and gradient at the student's logits of function(log-probs [B, T, V]) -> [B, T], reduced."""
    temperature = case.hyper.get("temperature", case.hyper.get("rollout_temperature", 1.0))
    totals = totals or case.totals()

    def loss(logits: mx.array) -> mx.array:
        return reduction(function(extra.log_softmax(logits, temperature)), case.mask, totals)

    return gradient_of(loss, case["student_logits"])


def teacher_logprobs(case: Case) -> mx.array:
    return extra.log_softmax(case["teacher_logits"], case.hyper.get("temperature", 1.0))


def openclaw(case: Case) -> Results:
    """Reverse KL on the teacher's top-K and a tail, less an entropy bonus of the same bins."""
    ids, teacher = case["teacher_topk_ids"], divergence.with_tail(case["teacher_topk_logp"])

    def bins(logp: mx.array) -> mx.array:
        return divergence.with_tail(extra.gather(logp, ids))

    def loss(logp: mx.array) -> mx.array:
        student = bins(logp)
        return divergence.reverse_kl(student, teacher) - case.hyper["entropy_coef"] * extra.entropy(student)

    value, gradient = from_logits(case, loss, reduce.sequence_mean)
    student = bins(extra.log_softmax(case["student_logits"], case.hyper["rollout_temperature"]))
    tokens, entropy = divergence.reverse_kl(student, teacher), extra.entropy(student)
    entropy = entropy if case.hyper["entropy_coef"] else mx.zeros_like(entropy)  # not computed without a bonus
    return {
        "out_loss": value,
        "out_grad_student_logits": gradient,
        "out_kl_tokens": tokens,
        "metric_kl_loss": reduce.sequence_mean(tokens, case.mask, case.totals()),
        "metric_entropy": reduce.sequence_mean(entropy, case.mask, case.totals()),
    }


def surrogate(case: Case) -> Results:
    """The top-K surrogate on the student's support beside the one-token surrogate with the reward as advantage.

    The loss is the recipe's, of which the term's own are compared too.
    """
    hyper = case.hyper
    clip = (hyper["eps_low"], hyper["eps_high"])
    held = (-hyper["log_ratio_clamp"], hyper["log_ratio_clamp"])
    bound = hyper["diff_clip"] or None
    teacher = extra.gather(teacher_logprobs(case), case["support_ids"])

    gap_clamp = None if bound is None else (-bound, bound)
    term = TeacherSurrogate(clip=clip, gap_clamp=gap_clamp, log_ratio_clamp=held)
    zeros = mx.zeros_like(case.mask)
    ids = zeros.astype(mx.int32)
    batch = MicroBatch(ids[0, :0], ids, case.mask, zeros, zeros, teacher_top_logprobs=teacher)

    def parts(logp: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        student = Logprobs(case.mask, top_logprobs=extra.gather(logp, case["support_ids"]))
        new = extra.gather(logp, case["token_ids"])
        rl = Clipped(clip=clip, log_ratio_clamp=held)(new, new, case["rewards"][:, None], case.mask).loss
        return term.loss(student, batch), rl, term.gap(student, batch)

    own = {"k": hyper["K"], "coefficient": hyper["w_opd"], "clip": clip, "gap_clamp": gap_clamp}
    recipe = made("opd", "openclaw", clip=clip, log_ratio_clamp=held, teacher_surrogate=own)

    def loss(logits: mx.array) -> mx.array:
        logp = extra.log_softmax(logits)
        new = Logprobs(extra.gather(logp, case["token_ids"]), top_logprobs=extra.gather(logp, case["support_ids"]))
        rewarded = replace(batch, advantages=hyper["w_rl"] * case["rewards"][:, None] + zeros)
        return recipe.loss(new, rewarded, case.totals())[0]

    value, gradient = gradient_of(loss, case["student_logits"])
    opd, rl, gap = parts(extra.log_softmax(case["student_logits"]))
    return {
        "out_loss": value,
        "out_grad_student_logits": gradient,
        "out_row_opd": extra.row_means(opd, case.mask),
        "out_row_rl": extra.row_means(rl, case.mask),
        "metric_teacher_gap": extra.mean(gap, case.mask),
    }


def gkd(case: Case) -> Results:
    teacher = teacher_logprobs(case)
    found: Results = {}
    for name in [name for name in case.goldens if name.startswith("out_loss_beta")]:
        beta, _, scaled = name.removeprefix("out_loss_beta").partition("_")
        totals = case.totals(tokens=case.hyper["num_items"] if scaled else None)
        value, gradient = from_logits(case, lambda logp, b=float(beta): divergence.jsd(logp, teacher, b), totals=totals)
        found[name] = value
        if not scaled:
            found[f"out_grad_beta{beta}"] = gradient
    return found


def topk_jsd(case: Case) -> Results:
    """Support: the teacher's top K for beta 0, the student's for beta 1, else both."""
    teacher, k = teacher_logprobs(case), case.hyper["K"]
    found: Results = {}
    for name in [name for name in case.goldens if name.startswith("out_loss_beta")]:
        key = name.removeprefix("out_loss_")
        beta, mode = key.removeprefix("beta").split("_")
        close = divergence.with_tail if mode == "tail" else divergence.renormalised

        def loss(logp: mx.array, beta: float = float(beta), close: Any = close) -> mx.array:
            ids, valid = support(logp, teacher, k, beta)
            pair = (mx.where(valid, extra.gather(p, ids), divergence.ABSENT) for p in (logp, teacher))
            return divergence.jsd(*(close(p) for p in pair), beta)

        found[name], found[f"out_grad_{key}"] = from_logits(case, loss)
    return found


def support(student: mx.array, teacher: mx.array, k: int, beta: float) -> tuple[mx.array, mx.array]:
    ids = [extra.top_ids(p, k) for p in (student, teacher)]
    if 0 < beta < 1:
        return extra.union(*ids)
    chosen = ids[0] if beta == 1 else ids[1]
    return chosen, mx.ones_like(chosen) > 0


def server_forward(case: Case) -> Results:
    """Forward KL on what the teacher's server sent: K candidates, some absent."""
    sent = case["teacher_topk_logp"]
    found: Results = {}
    for name in [name for name in case.goldens if name.startswith("out_loss_")]:
        mode = name.removeprefix("out_loss_")
        close = divergence.with_tail if mode == "tail" else divergence.renormalised

        def loss(logp: mx.array, close: Any = close) -> mx.array:
            student = extra.gather(logp, case["teacher_topk_ids"])
            student = mx.where(divergence.present(sent), student, divergence.ABSENT)
            return divergence.forward_kl(close(student), close(sent))

        found[name], found[f"out_grad_{mode}"] = from_logits(case, loss)
    return found


def verl_forward(case: Case) -> Results:
    hyper, teacher, ids = case.hyper, case["teacher_topk_logp"], case["teacher_topk_ids"]

    def tokens(logp: mx.array) -> mx.array:
        return extra.truncated_forward_kl(extra.gather(logp, ids), teacher, hyper["log_prob_min_clamp"])

    def loss(logp: mx.array) -> mx.array:
        return losses.clamp(tokens(logp), (0.0, hyper["loss_max_clamp"]))

    value, gradient = from_logits(case, loss)
    logp = extra.log_softmax(case["student_logits"])
    own = extra.top_ids(logp, ids.shape[-1])
    return {
        "out_loss": value,
        "out_grad_student_logits": gradient,
        "out_kl_tokens": tokens(logp),
        "out_overlap_count": (own[..., None] == ids[..., None, :]).sum(axis=(-1, -2)),
        "metric_student_mass": extra.mean(mx.exp(extra.gather(logp, ids)).sum(axis=-1), case.mask),
        "metric_teacher_mass": extra.mean(mx.exp(teacher).sum(axis=-1), case.mask),
    }


def tinker_reverse(case: Case) -> Results:
    """Score-function reverse KL against a renormalised top-K; weight 0 is a slot that is not there."""
    weights = case["weights"]
    valid = weights > 0
    teacher = mx.where(valid, mx.log(mx.where(valid, weights, 1.0)), divergence.ABSENT)

    def renormalised(student: mx.array) -> mx.array:
        return divergence.renormalised(mx.where(valid, student, divergence.ABSENT))

    def loss(student: mx.array) -> mx.array:
        return reduce.total(divergence.score_reverse_kl(renormalised(student), teacher), case.mask)

    value, gradient = gradient_of(loss, case["student_logp_k"])
    used = case.mask * mx.any(valid, axis=-1)
    entropy = extra.entropy(renormalised(case["student_logp_k"]))
    return {
        "out_loss": value,
        "out_grad_student_logp_k": gradient,
        "metric_sdft.reverse_kl_loss": value,
        "metric_sdft.reverse_kl_mean": value / mx.maximum(used.sum(), 1),
        "metric_sdft.student_entropy_mean": extra.mean(entropy, used),
        "metric_sdft.reverse_kl_positions": used.sum(),
    }


def iw_opd(case: Case) -> Results:
    options = (case.hyper["gamma"], case.hyper["eps"])
    gain, weight = extra.weighted_advantage(case["teacher_logp"], case["rollout_logp"], case.mask, *options)

    def loss(logp: mx.array) -> mx.array:
        return extra.reinforce(extra.gather(logp, case["tokens"]), weight * gain)

    value, gradient = from_logits(case, loss)
    smallest, largest = extra.extremes(weight, case.mask)
    return {
        "out_loss": value,
        "out_grad_student_logits": gradient,
        "metric_iw_opd.mean_advantage": extra.mean(weight * gain, case.mask),
        "metric_iw_opd.mean_abs_advantage": extra.mean(mx.abs(gain), case.mask),
        "metric_iw_opd.mean_weight": extra.mean(weight, case.mask),
        "metric_iw_opd.min_weight": smallest,
        "metric_iw_opd.max_weight": largest,
    }


def logprobs(case: Case) -> Results:
    temperature = case.hyper["temperature"]

    def parts(logits: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        logp = extra.log_softmax(logits, temperature)
        return extra.gather(logp, case["tokens"]), extra.entropy(logp), logp

    def weighted(logits: mx.array) -> mx.array:
        chosen, entropy, _ = parts(logits)
        return (case["cot"] * chosen).sum() + (case["cot2"] * entropy).sum()

    chosen, entropy, logp = parts(case["logits"])
    sampled = mx.array(case.out("sampling_logp_for_tinker").astype(np.float32))
    gap = losses.log_ratio(sampled, chosen, case.mask)
    found: Results = {
        "out_logp": chosen,
        "out_entropy": entropy,
        "out_grad_logits": gradient_of(weighted, case["logits"])[1],
        "out_sum_pi_squared": extra.sum_squares(logp),
        "out_sampling_logp_for_tinker": sampled,
        "metric_tinker.kl_sample_train_v1": extra.mean(divergence.ESTIMATORS["k1"](gap), case.mask),
        "metric_tinker.kl_sample_train_v2": extra.mean(divergence.ESTIMATORS["k2"](gap), case.mask),
        "metric_tinker.entropy": extra.mean(-sampled, case.mask),
    }
    for name in [name for name in case.goldens if name.startswith("out_high_entropy_mask_")]:
        share = float(name.removeprefix("out_high_entropy_mask_"))
        found[name] = extra.high_entropy(entropy, case.mask, share)
    return found


RUNNERS: dict[tuple[str, str], Runner] = {
    ("opd", "slime"): slime,
    ("opd", "openclaw_combine"): openclaw_combine,
    ("opd", "prime_ref_kl"): prime_ref_kl,
    ("opd", "verl_k1_pg"): verl_k1,
    ("opd", "verl_k3_direct"): verl_k3,
    ("opd", "tinker_adv"): tinker,
    ("opd", "tinker_rl_kl_adv"): tinker_centred,
    ("opd", "trl_minillm_adv"): minillm,
    ("opd_topk", "openclaw"): openclaw,
    ("opd_topk", "openclaw_surrogate"): surrogate,
    ("opd_topk", "trl_gkd_jsd"): gkd,
    ("opd_topk", "trl_topk_jsd"): topk_jsd,
    ("opd_topk", "trl_server_forward"): server_forward,
    ("opd_topk", "verl_forward_topk"): verl_forward,
    ("opd_topk", "tinker_reverse_topk"): tinker_reverse,
    ("opd_topk", "trl_iw_opd"): iw_opd,
    ("logprobs", "from_logits"): logprobs,
}
