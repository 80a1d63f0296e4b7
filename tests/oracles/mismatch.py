"""Sampler/trainer mismatch: weights, masks, corrected losses, metrics; and the KL estimators."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from mlxrl.algo import divergence, losses
from mlxrl.algo.terms import Correction, OffPolicyMask, Veto, within
from mlxrl.types import Logprobs
from oracles import extra
from oracles.case import Case, Results, gradient_of, made
from oracles.policy import openrlhf, relative, slime_metrics

LEVELS: dict[str, Any] = {"token": "token", "sequence": "sequence_sum", "geometric": "sequence"}


def weight_of(case: Case, level: str = "token", **bounds: Any) -> mx.array:
    """Importance weight of a case at a level of `Correction`."""
    return losses.importance(*pair(case), LEVELS[level], **bounds)


def gap_of(case: Case) -> mx.array:
    return losses.log_ratio(*pair(case))


def factor(case: Case, term: Any, new: str = "logp_old", **changes: Any) -> mx.array:
    """The factor of a term on a case."""
    batch = replace(case.minibatch(np.zeros(len(case.mask))), old_logprobs=case["logp_old"], **changes)
    return term.factor(Logprobs(case[new]), batch)


def cut(weight: mx.array, bounds: Any) -> mx.array:
    """w where low <= w <= high, else 0."""
    return weight * within(weight, bounds)


def pair(case: Case) -> tuple[mx.array, mx.array, mx.array]:
    return case["logp_old"], case["logp_rollout"], case.mask


# verl


def verl(case: Case) -> Results:
    found: Results = {}
    for level in ("token", "sequence"):
        weight = weight_of(case, level) * case.mask
        kept = {"tis2": (None, 2.0), "icepop": (0.5, 5.0)}
        for name, bounds in kept.items():
            used = losses.clamp(weight, bounds) if name == "tis2" else cut(weight, bounds)
            found[f"out_w_{level}_{name}"] = used
            found |= weight_metrics(case, level, name, weight, used, bounds)
        held = losses.clamp(weight, kept["tis2"])
        found[f"out_w_{level}_tis2_norm"] = extra.batch_normalised(held, case.mask, level == "sequence")
    for name in [name for name in case.goldens if name.startswith("out_mask_")]:
        rule = name.removeprefix("out_mask_")
        keep = rejection(case, rule)
        found[name] = keep * case.mask
        found[f"metric_{rule.split('@')[0]}.masked_fraction"] = extra.mean(1 - keep * case.mask, case.mask)
    return found | offpolicy(case)


def rejection(case: Case, rule: str) -> mx.array:
    """[B, T] keep mask of a rule such as "seq_mean_k1@0.5_2.0"."""
    name, limits = rule.split("@")
    over, estimator = name.rsplit("_", 1)
    values = [float(limit) for limit in limits.split("_")]
    bounds = (math.log(values[0]), math.log(values[1])) if estimator == "k1" else (None, values[0])
    keep = extra.rejection(*pair(case), estimator, over.removeprefix("seq_"), bounds)
    return mx.broadcast_to(keep, case.mask.shape)


def weight_metrics(case: Case, level: str, name: str, weight: mx.array, used: mx.array, bounds: Any) -> Results:
    """verl's summary of the weights used, with the shares of what lay outside; its lower bound is 1/high if none."""
    low, high = bounds[0] or 1 / bounds[1], bounds[1]
    token, row = extra.weight_summary(used, case.mask), extra.row_summary(used, case.mask)
    below, above = extra.fractions(weight, case.mask, low, high)
    if level == "sequence":  # extremes and shares are over rows, before the cut, an empty row having weight 1
        rows = weight_of(case, "sequence")
        token |= {"max": rows.max(), "min": rows.min()}
        below, above = extra.fractions(rows, mx.ones_like(rows), low, high)
    means = extra.row_means(weight, case.mask)[:, None]
    row_below, row_above = extra.fractions(means, mx.ones_like(means), low, high)
    parts = {"eff_sample_size": token.pop("ess"), "ratio_fraction_low": below, "ratio_fraction_high": above}
    parts |= token | {f"seq_{key}": value for key, value in row.items()}
    parts |= {"seq_fraction_low": row_below, "seq_fraction_high": row_above}
    if name == "icepop":
        parts["oob_ratio"] = extra.mean(1 - within(weight, bounds), case.mask)
    return {f"metric_{level}_{name}.rollout_is_{key}": value for key, value in parts.items()}


def offpolicy(case: Case) -> Results:
    parts = extra.perplexity_summary(*pair(case)) | extra.divergence_summary(*pair(case))
    return {f"metric_offpolicy.{key}": value for key, value in parts.items()}


# TRL


def trl(case: Case) -> Results:
    found: Results = {}
    high = case.hyper["clip_max"]
    for name in [name for name in case.goldens if name.startswith("out_ratio_")]:
        level, mode, low = name.removeprefix("out_ratio_").split("_")
        low = None if low == "minNone" else float(low.removeprefix("min"))
        weight = weight_of(case, level, bounds=None)
        limit = losses.clamp if mode == "truncate" else cut
        found[name] = limit(weight, (low, high))
        if low is None:
            found |= trl_metrics(case, f"{level}_{mode}", found[name])
    return found


def trl_metrics(case: Case, name: str, weight: mx.array) -> Results:
    """Differences over tokens; weights over tokens, or over rows where a row has one."""
    gap = mx.abs(gap_of(case))
    mask = case.mask if weight.shape == case.mask.shape else mx.ones_like(weight)
    smallest, largest = extra.extremes(weight, mask)
    return {
        f"metric_{name}.sampling_logp_difference.mean": extra.mean(gap, case.mask),
        f"metric_{name}.sampling_logp_difference.max": extra.extremes(gap, case.mask)[1],
        f"metric_{name}.importance_sampling_ratio.min": smallest,
        f"metric_{name}.importance_sampling_ratio.mean": extra.mean(weight, mask),
        f"metric_{name}.importance_sampling_ratio.max": largest,
    }


# OpenRLHF, slime: whole losses


def corrected_openrlhf(case: Case) -> Results:
    low, high = case.hyper["threshold"]
    clip = (case.hyper["eps_clip"], case.hyper["eps_clip"])

    def corrected(**correction: Any) -> Any:
        return made("grpo", "openrlhf", clip=clip, reduction="token_mean", correction=correction)

    recipes = {
        "tis": corrected(bounds=(low, high)),
        "icepop": corrected(mode="mask", bounds=(low, high)),
        "seq-mask-tis": corrected(mode="mask", mask_level="geometric", bounds=(low, high)),
    }
    found: Results = {"out_advantages": openrlhf(case)["out_advantages"]}
    advantage = np.array(case.per_token(case.out("advantages")))
    for mode in [name.removeprefix("out_loss_") for name in case.goldens if name.startswith("out_loss_")]:
        found |= case.run(recipes[mode], case.totals(), advantage).results(mode)
        found[f"metric_{mode}.vllm_kl"] = extra.mean(-gap_of(case), case.mask)
    return found


def corrected_slime(case: Case) -> Results:
    hyper = case.hyper
    clip = (hyper["eps_clip"], hyper["eps_clip"])
    credit = relative(case, "group", 1e-6, "zero")
    found: Results = {"out_advantages": np.broadcast_to(credit[:, None], case.np("mask").shape)}
    whole = weight_of(case, bounds=None)
    for mode, kind in (("tis", "truncate"), ("icepop", "mask")):
        options = {"mode": kind, "bounds": tuple(hyper[mode])}
        run = case.run(made("grpo", "slime", clip=clip, correction=options), case.totals())
        found |= run.results(mode)
        weight = factor(case, Correction(**options))
        terms = {
            "ois": mx.exp(losses.log_ratio(case["logp_new"], case["logp_old"], case.mask)),
            "tis": whole,
            "tis_clipfrac": (weight != whole).astype(mx.float32),
            "tis_abs": mx.abs(whole - 1),
        }
        parts = slime_metrics(case, *clip, **terms) | {"metric_pg_loss": run.loss}
        found |= {name.replace("metric_", f"metric_{mode}.", 1): value for name, value in parts.items()}
    return found


def mis(case: Case) -> Results:
    """slime's masked importance sampling: three levels, three modes, with and without rejection and veto."""
    low, high = case.hyper["tis_bounds"]
    veto = float(re.search(r"veto ([\d.]*\d)", case.hyper["rs"])[1])
    found: Results = {}
    for name in [name for name in case.goldens if name.startswith("out_w_")]:
        level, mode, rejecting = name.removeprefix("out_w_").split("_")
        weight = weight_of(case, level)
        keep = mx.ones_like(case.mask)
        if mode == "mask":
            keep = keep * within(weight, (low, high))
        else:
            weight = losses.clamp(weight, (0.0 if mode == "truncate" else low, high))
        if rejecting == "rs1":
            other = "geometric" if level == "sequence" else "sequence"
            keep = keep * within(weight_of(case, other), (low, high))
            keep = keep * factor(case, Veto(threshold=veto))
        found[name] = weight * case.mask
        found[name.replace("out_w_", "out_mask_", 1)] = keep * case.mask
    return found


def opsm(case: Case) -> Results:
    term, credit = OffPolicyMask(delta=0.0), case["advantages"][:, None]
    object.__setattr__(term, "delta", case.hyper["delta"])  # below 0, which it cannot be in a run
    tokens = mx.broadcast_to(credit, case.mask.shape)
    keep = factor(case, term, "logp_new", advantages=tokens, sampler_logprobs=case["logp_old"])
    # slime divides the padded width of a dropped row by the row's tokens.
    dropped = ((1 - keep).sum(axis=-1, keepdims=True) / losses.lengths(case.mask)).sum()
    return {
        "out_keep_trl": factor(case, term, "logp_new", advantages=tokens)[:, :1],
        "out_keep_slime": keep,
        "metric_slime_clipfrac_sum": dropped,
    }


# KL estimators: name of the case -> arguments of `divergence.estimate`

SAFE, TEN = (-20.0, 20.0), (-10.0, 10.0)
ESTIMATES: dict[str, dict[str, Any]] = {
    "verl_k1": {"estimator": "k1", "log_ratio_clamp": None},
    "verl_abs": {"estimator": "abs", "log_ratio_clamp": None},
    "verl_k2": {"estimator": "k2", "log_ratio_clamp": None},
    "verl_k3": {"estimator": "k3", "log_ratio_clamp": SAFE, "value_clamp": TEN},
    "verl_k1+": {"estimator": "k1", "log_ratio_clamp": None, "straight": "k2"},
    "verl_k3+": {"estimator": "k3", "log_ratio_clamp": SAFE, "value_clamp": TEN, "straight": "k2"},
    "slime_k1": {"estimator": "k1", "log_ratio_clamp": None},
    "slime_k2": {"estimator": "k2", "log_ratio_clamp": None},
    "slime_k3": {"estimator": "k3", "log_ratio_clamp": None},
    "slime_low_var_kl": {"estimator": "k3", "log_ratio_clamp": None, "value_clamp": TEN},
    "openrlhf_k1": {"estimator": "k1", "log_ratio_clamp": None, "value_clamp": TEN},
    "openrlhf_k2": {"estimator": "k2", "log_ratio_clamp": None, "value_clamp": TEN},
    "openrlhf_k3": {"estimator": "k3", "log_ratio_clamp": None, "value_clamp": TEN},
    "trl": {"estimator": "k3", "log_ratio_clamp": None},
    "trl_k3": {"estimator": "k3", "log_ratio_clamp": None},
    "trl_bias_corrected": {"estimator": "k3", "log_ratio_clamp": None},
}


def estimators(case: Case) -> Results:
    found: Results = {}
    everywhere = mx.ones_like(case["logp_new"])
    for name in [name for name in case.goldens if not name.startswith("out_grad")]:
        key = name.removeprefix("out_")
        weighted = key.endswith("_is") or key == "trl_bias_corrected"
        options = ESTIMATES[key.removesuffix("_is")]

        def values(new: mx.array, options: Any = options, weighted: bool = weighted) -> mx.array:
            weight = mx.exp(new - case["logp_old"]) if weighted else None
            return divergence.estimate(new, case["logp_ref"], everywhere, weight=weight, **options)

        found[name] = values(case["logp_new"])
        found[f"out_grad_{key}"] = gradient_of(lambda new, f=values: f(new).sum(), case["logp_new"])[1]
    return found


RUNNERS: dict[tuple[str, str], Callable[[Case], Results]] = {
    ("mismatch", "verl"): verl,
    ("mismatch", "trl"): trl,
    ("mismatch", "openrlhf"): corrected_openrlhf,
    ("mismatch", "slime"): corrected_slime,
    ("mismatch", "slime_mis"): mis,
    ("mismatch", "opsm"): opsm,
    ("kl", "estimators"): estimators,
}
