"""Policy losses: every variant as a recipe with arguments, its advantages as a piece of `mlxrl.algo`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from mlxrl.algo import advantages, divergence, losses, reduce
from mlxrl.algo.credit import Whiten
from mlxrl.types import Totals
from oracles import extra
from oracles.case import Case, Results, gradient_of, made

Runner = Callable[[Case], Results]


def spread(case: Case, values: np.ndarray) -> np.ndarray:
    """[B] advantages on the sampled tokens, [B, T]."""
    return values[:, None] * case.np("mask")


def to_last(case: Case, values: np.ndarray) -> np.ndarray:
    """[B] rewards at the last sampled token, summed from there to the left (OpenRLHF), [B, T]."""
    return extra.returns(extra.at_last_token(values, case.np("mask")), case.np("mask"))


def relative(case: Case, scale: Any = "group", eps: float = 1e-6, single: Any = "raw") -> np.ndarray:
    rewards, ids = case.np("rewards"), case.ids
    found = advantages.group_relative(rewards, ids, scale, eps)
    return extra.raw_singles(found, rewards, ids, eps if scale == "group" else 0.0) if single == "raw" else found


# What each library reports, from the parts that make it.


def flags(case: Case, low: float | None, high: float | None, level: str = "token", delta: float | None = None) -> Any:
    """Ratio and clip flags, [B, T], at golden advantages."""
    x = losses.LEVELS[level](case["logp_new"], case["logp_old"], case.mask)
    r = mx.broadcast_to(mx.exp(x), case.mask.shape)
    r = r if delta is None else mx.minimum(r, delta)
    below, above = losses.outside(r, case.per_token(case.out("advantages")), low, high)
    return r, below.astype(mx.float32), above.astype(mx.float32)


def drift(case: Case) -> mx.array:
    return -losses.log_ratio(case["logp_new"], case["logp_old"], case.mask)


def verl_metrics(case: Case, metrics: dict[str, mx.array], dual: float | None = None, level: str = "token") -> Results:
    """Clip fractions over tokens, the dual clip's, and the drift."""
    found: Results = {"metric_ppo_kl": metrics["ppo_kl"]}
    if "metric_pg_clipfrac" in case.arrays:
        found["metric_pg_clipfrac"] = metrics["clip_ratio/low_mean"] + metrics["clip_ratio/high_mean"]
        r, _, _ = flags(case, None, None, level)
        held = (r > dual) & (case.per_token(case.out("advantages")) < 0) if dual else mx.zeros_like(r)
        found["metric_pg_clipfrac_lower"] = extra.mean(held.astype(mx.float32), case.mask)
    return found


def openrlhf_metrics(case: Case, metrics: dict[str, mx.array]) -> Results:
    return {
        "metric_clip_ratio": metrics["clip_ratio/low_mean"] + metrics["clip_ratio/high_mean"],
        "metric_ppo_kl": metrics["ppo_kl"],
    }


def trl_metrics(
    case: Case,
    low: float | None = None,
    high: float | None = None,
    level: str = "token",
    delta: float | None = None,
) -> Results:
    """Entropy and clip fractions over tokens, and over rows their extremes."""
    found: Results = {"metric_entropy": extra.mean(case["entropy"], case.mask)}
    if low is None and high is None:
        return found
    _, below, above = flags(case, low, high, level, delta)
    by_row = level.startswith("sequence") and level != "sequence_token"
    over = (lambda x: x[:, 0].mean()) if by_row else (lambda x: extra.mean(x, case.mask))
    rows = (lambda x: x[:, 0]) if by_row else (lambda x: extra.row_means(x, case.mask))
    return found | {
        "metric_clip_ratio.low_mean": over(below),
        "metric_clip_ratio.high_mean": over(above),
        "metric_clip_ratio.region_mean": over(below + above),
        "metric_clip_ratio.low_min": rows(below).min(),
        "metric_clip_ratio.high_max": rows(above).max(),
    }


def slime_metrics(case: Case, low: float | None, high: float | None, level: str = "token", **terms: Any) -> Results:
    """Means over rows of each row's mean over tokens (or, of the whole loss, over tokens)."""
    over = reduce.sequence_mean
    totals = case.totals()
    if case.hyper.get("calculate_per_token_loss"):
        over, totals = reduce.token_mean, case.totals(tokens=at_least_one_each(case))
    _, below, above = flags(case, low, high, level)
    x = losses.LEVELS[level](case["logp_new"], case["logp_old"], case.mask)
    gap = mx.abs(case["logp_old"] - case["logp_rollout"])
    parts = {
        "entropy_loss": case["entropy"],
        "pg_clipfrac": below + above,
        "ppo_kl": mx.broadcast_to(-x, case.mask.shape),
        "train_rollout_logprob_abs_diff": gap,
        **terms,
    }
    return {f"metric_{name}": over(values, case.mask, totals) for name, values in parts.items()}


def at_least_one_each(case: Case) -> int:
    """Tokens, a row without any counting as one (slime)."""
    return int(np.maximum(case.np("mask").sum(axis=1), 1).sum())


def reward_metrics(case: Case) -> Results:
    """Mean and spread of the rewards over the batch, and the share of rows in groups that are all equal (TRL)."""
    stds = extra.group_spread(case.np("rewards"), case.ids)
    return {
        "metric_frac_reward_zero_std": np.isclose(stds, 0).mean(),
        "metric_reward": case.np("rewards").astype(np.float64).mean(),
        "metric_reward_std": advantages.spread(case.np("rewards").astype(np.float64)),
    }


def only_given(case: Case, found: Results) -> Results:
    return {name: value for name, value in found.items() if name in case.arrays}


# GRPO and what differs from it by arguments only.


def verl_clip(hyper: dict[str, Any]) -> tuple[float, float]:
    both = hyper.get("clip_ratio", 0.2)
    return hyper.get("clip_ratio_low", both), hyper.get("clip_ratio_high", both)


VERL_REDUCTIONS: dict[str, dict[str, Any]] = {
    "token-mean": {"reduction": "token_mean"},
    "seq-mean-token-mean": {"reduction": "sequence_mean"},
    "seq-mean-token-sum": {"reduction": 1},
    "seq-mean-token-sum-norm": {"reduction": "constant"},
}


def verl_arguments(case: Case) -> dict[str, Any]:
    hyper = case.hyper
    arguments = {"convention": "verl", "clip": verl_clip(hyper)}
    arguments |= VERL_REDUCTIONS[hyper.get("loss_agg_mode", "token-mean")]
    if "clip_ratio_c" in hyper:
        arguments["dual_clip"] = hyper["clip_ratio_c"]
    if hyper.get("loss_agg_mode") == "seq-mean-token-sum-norm":
        arguments["reduction"] = hyper.get("loss_scale_factor") or case.mask.shape[1]
    if "kl_loss_coef" in hyper:
        arguments["kl"] = {"coefficient": hyper["kl_loss_coef"]}
    return arguments


def verl_grpo(case: Case) -> Results:
    scale = "group" if case.hyper.get("norm_by_std", True) else "none"
    arguments = verl_arguments(case)
    run = case.run(made("grpo", **arguments), case.totals(filled=True))
    found = run.results() | verl_metrics(case, run.metrics, arguments.get("dual_clip"))
    found["out_advantages"] = spread(case, relative(case, scale, case.hyper.get("adv_eps", 1e-6)))
    if "kl_loss_coef" in case.hyper:
        x = (case["logp_new"], case["logp_ref"], case.mask)
        found["metric_kl_loss"] = extra.mean(divergence.estimate(*x, value_clamp=(-10, 10)), case.mask)
    return found


def verl_gspo(case: Case) -> Results:
    run = case.run(made("gspo", "verl", clip=verl_clip(case.hyper)), case.totals(filled=True))
    found = run.results() | verl_metrics(case, run.metrics, None, "sequence")
    return found | {"out_advantages": spread(case, relative(case, "group", case.hyper["adv_eps"]))}


def verl_cispo(case: Case) -> Results:
    arguments = {"convention": "verl", "clip": verl_clip(case.hyper)}
    run = case.run(made("cispo", **arguments), case.totals())
    found = run.results() | verl_metrics(case, run.metrics)
    return found | {"out_advantages": spread(case, relative(case, "group", case.hyper["adv_eps"]))}


def verl_rloo(case: Case) -> Results:
    arguments = verl_arguments(case)
    run = case.run(made("rloo", **arguments), case.totals())
    rewards = case.np("rewards")
    credit = advantages.leave_one_out(rewards, case.ids)
    return {
        **run.results(),
        **verl_metrics(case, run.metrics, arguments["dual_clip"]),
        "out_advantages": spread(case, extra.raw_singles(credit, rewards, case.ids)),
        "out_advantages_vectorized": spread(case, credit),
    }


def openrlhf(case: Case, recipe: str = "grpo", scale: Any = "group", **arguments: Any) -> Results:
    """Clip bounds and dual clip from the case; a reward on the last token, summed to the left."""
    hyper = case.hyper
    clip = (
        hyper.get("clip_eps_low", hyper.get("eps_clip")),
        hyper.get("clip_eps_high", hyper.get("eps_clip")),
    )
    if hyper.get("dual_clip"):
        arguments["dual_clip"] = hyper["dual_clip"]
    if hyper.get("token_level") is False:
        arguments["reduction"] = "sequence_mean"
    run = case.run(made(recipe, "openrlhf", clip=clip, **arguments), case.totals(filled=True))
    found = run.results() | openrlhf_metrics(case, run.metrics)
    found["out_advantages"] = to_last(case, relative(case, scale, hyper.get("adv_eps", 0), "zero"))
    if "out_group_reward_std" in case.arrays:
        found["out_group_reward_std"] = extra.group_spread(case.np("rewards"), case.ids)
    return found


TRL_RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("grpo", {}),
    "bnpo": ("grpo", {"reduction": "token_mean"}),
    "dr_grpo": ("dr_grpo", {}),
    "dapo": ("dapo", {}),
    "luspo": ("luspo", {}),
}


def trl(case: Case) -> Results:
    """TRL's family: reduction, ratio level, delta, KL and scale all from the case."""
    hyper = case.hyper
    recipe, arguments = TRL_RECIPES[hyper.get("loss_type", "luspo" if case.variant.startswith("luspo") else "grpo")]
    level = hyper.get("importance_sampling_level", "token")
    low, high = hyper["epsilon"], hyper.get("epsilon_high", hyper["epsilon"])
    arguments = {**arguments, "convention": "trl", "clip": (low, high), "ratio": level}
    arguments |= {"delta": hyper["delta"]} if hyper.get("delta") else {}
    arguments |= {"kl": {"coefficient": hyper["beta"]}} if hyper.get("beta") else {}
    totals = case.totals(tokens=hyper.get("num_items"), max_tokens=hyper.get("max_completion_length", 1))
    run = case.run(made(recipe, **arguments), totals)
    found = run.results() | trl_metrics(case, low, high, level, hyper.get("delta"))
    if "token_advantages" in case:
        found["out_advantages"] = case.np("token_advantages")
    else:
        found["out_advantages"] = relative(
            case, hyper.get("scale_rewards", "group"), hyper.get("adv_eps", 1e-4), "zero"
        )
    if hyper.get("beta"):
        found["metric_kl"] = run.metrics["kl"]
    return only_given(case, found | reward_metrics(case))


def trl_cispo(case: Case) -> Results:
    cap = case.hyper["epsilon_high"]
    run = case.run(made("cispo", "trl", clip=(None, cap - 1)), case.totals(tokens=case.hyper["num_items"]))
    _, _, above = flags(case, None, cap - 1)
    return {
        **run.results(),
        **trl_metrics(case),
        "metric_cispo_clip_ratio": extra.mean(above, case.mask),
        "out_advantages": relative(case, "group", case.hyper["adv_eps"], "zero"),
    }


def trl_rloo(case: Case) -> Results:
    hyper = case.hyper
    mask = case.np("mask").astype(np.float64)
    gap = case.np("logp_old").astype(np.float64) - case.np("logp_ref")
    cost = (gap * mask).sum(axis=1)
    charged = case.np("rewards") - hyper["beta"] * cost
    credit = advantages.leave_one_out(charged, case.ids)
    if hyper["normalize_advantages"]:
        credit = advantages.group_relative(credit, [0] * len(credit), "group", 1e-4)
    clip = (hyper["epsilon"], hyper["epsilon_high"])
    run = case.run(made("rloo", "trl", clip=clip), case.totals())
    # A row without a token has ratio 1 there, so its loss is -A, without a gradient.
    empty = -case.out("advantages")[mask.sum(axis=1) == 0].sum() / len(mask)
    return {
        "out_loss": run.loss + float(empty),
        "out_grad_logp_new": run.gradient,
        "out_advantages": credit,
        "out_old_logps": (case.np("logp_old") * mask).sum(axis=1),
        "metric_kl": (gap * mask).sum() / max(mask.sum(), 1),
        "metric_frac_reward_zero_std": np.isclose(extra.group_spread(charged, case.ids), 0).mean(),
        **trl_metrics(case, *clip, "sequence_sum"),
    }


def slime(case: Case, recipe: str = "grpo", level: str = "token") -> Results:
    hyper = case.hyper
    clip = (hyper["eps_clip"], hyper.get("eps_clip_high", hyper["eps_clip"]))
    arguments: dict[str, Any] = {"clip": clip}
    totals = case.totals()
    if hyper.get("eps_clip_c"):
        arguments["dual_clip"] = hyper["eps_clip_c"]
    if hyper.get("kl_loss_coef"):
        arguments["kl"] = {"coefficient": hyper["kl_loss_coef"]}
    if hyper.get("calculate_per_token_loss"):
        arguments["reduction"] = "token_mean"
        totals = case.totals(tokens=at_least_one_each(case))
    run = case.run(made(recipe, "slime", **arguments), totals)
    found = run.results()
    terms: dict[str, Any] = {}
    if hyper.get("kl_loss_coef"):
        x = (case["logp_new"], case["logp_ref"], case.mask)
        terms["kl_loss"] = divergence.estimate(*x, log_ratio_clamp=None, value_clamp=(-10, 10))
    found |= slime_metrics(case, *clip, level, **terms)
    found["metric_pg_loss"] = run.loss - hyper.get("kl_loss_coef", 0) * found.get("metric_kl_loss", 0)
    credit = relative(case, "group", hyper.get("adv_eps", 1e-6), "zero")
    return found | {"out_advantages": np.broadcast_to(credit[:, None], case.np("mask").shape)}


def slime_cispo(case: Case) -> Results:
    found = slime(case, "cispo")
    low, high = case.hyper["eps_clip"], case.hyper["eps_clip_high"]
    r, _, _ = flags(case, None, None)
    held = (r < 1 - low) | (r > 1 + high)
    clipped = reduce.sequence_mean(held.astype(mx.float32), case.mask, case.totals())
    return found | {"metric_pg_clipfrac": clipped}


# REINFORCE++: returns and whitening.


def reinforce_pp(case: Case, whitening: dict[str, Any], centre: bool = False, skip: bool = False) -> Results:
    """Rewards (less the group's mean), clipped, on the last token; less the KL of every token; summed; whitened."""
    hyper, mask = case.hyper, case.np("mask")
    rewards = relative(case, "none", single="raw") if centre else case.np("rewards")
    if "reward_clip_range" in hyper:
        rewards = np.clip(rewards, *hyper["reward_clip_range"])
    token_rewards = extra.at_last_token(rewards, mask)
    if "kl_coef" in hyper:
        gap = case.np("logp_old").astype(np.float64) - case.np("logp_ref")
        token_rewards = token_rewards - hyper["kl_coef"] * gap * mask
    summed = extra.returns(token_rewards, mask, hyper.get("gamma", 1.0), skip)
    return {"out_advantages": Whiten(**whitening)(summed, mask), "out_returns": summed}


def verl_reinforce_pp(case: Case) -> Results:
    found = reinforce_pp(case, {"ddof": 1, "eps": 1e-8}, skip=True)
    masked = {name: values * case.np("mask") for name, values in found.items()}
    return masked | verl_ppo(case, "reinforce_pp")


def verl_reinforce_pp_baseline(case: Case) -> Results:
    centred = relative(case, "none")[:, None] * np.ones(case.np("mask").shape)
    whitened = Whiten()(centred, case.np("mask")) * case.np("mask")
    return {"out_advantages": whitened, **verl_ppo(case, "reinforce_pp_baseline")}


def verl_ppo(case: Case, recipe: str) -> Results:
    arguments = verl_arguments(case)
    run = case.run(made(recipe, **arguments), case.totals())
    return run.results() | verl_metrics(case, run.metrics, arguments["dual_clip"])


def openrlhf_ppo(case: Case, recipe: str) -> Results:
    clip = (case.hyper["eps_clip"], case.hyper["eps_clip"])
    run = case.run(made(recipe, "openrlhf", clip=clip), case.totals())
    return run.results() | openrlhf_metrics(case, run.metrics)


def openrlhf_reinforce_pp(case: Case, centre: bool = False) -> Results:
    found = reinforce_pp(case, {"ddof": 0, "eps": 0.0, "floor": 1e-8}, centre)
    return found | openrlhf_ppo(case, "reinforce_pp")


def openrlhf_rloo(case: Case) -> Results:
    hyper, mask = case.hyper, case.np("mask")
    credit = np.clip(advantages.leave_one_out(case.np("rewards"), case.ids), *hyper["reward_clip_range"])
    gap = case.np("logp_old").astype(np.float64) - case.np("logp_ref")
    token_rewards = extra.at_last_token(credit, mask) - hyper["kl_coef"] * gap * mask
    return {"out_advantages": extra.returns(token_rewards, mask), **openrlhf_ppo(case, "rloo")}


def slime_reinforce_pp(case: Case) -> Results:
    whitening = {"ddof": 1, "eps": 1e-8}
    found = reinforce_pp(case, whitening)
    return slime(case, "reinforce_pp") | {"out_advantages": found["out_advantages"]}


def slime_reinforce_pp_baseline(case: Case) -> Results:
    mask = case.np("mask")
    gap = case.np("logp_old").astype(np.float64) - case.np("logp_ref")
    credit = relative(case, "none", single="zero")[:, None] - case.hyper["kl_coef"] * gap
    whitened = Whiten()(credit, mask)
    return slime(case, "reinforce_pp_baseline") | {"out_advantages": whitened}


# Relatives.


def sapo(case: Case, convention: str, filled: bool) -> Results:
    taus = {"tau_pos": case.hyper["tau_pos"], "tau_neg": case.hyper["tau_neg"]}
    run = case.run(made("sapo", convention, **taus), case.totals(filled=filled))
    return run.results() | (verl_metrics(case, run.metrics) if convention == "verl" else trl_metrics(case))


def sapo_verl(case: Case) -> Results:
    return sapo(case, "verl", True) | {"out_advantages": spread(case, relative(case))}


def sapo_trl(case: Case) -> Results:
    return sapo(case, "trl", False) | {"out_advantages": relative(case, "group", 1e-4, "zero")}


def gmpo_verl(case: Case) -> Results:
    low, high = verl_clip(case.hyper)
    run = case.run(made("gmpo", "verl", clip=(low, high)), case.totals())
    x, credit = -drift(case), case.per_token(case.out("advantages"))
    held = (x > high) | (x < -low)
    return {
        **run.results(),
        "metric_ppo_kl": run.metrics["ppo_kl"],
        "metric_pg_clipfrac": extra.mean((held & (credit > 0)).astype(mx.float32), case.mask),
        "metric_pg_clipfrac_lower": extra.mean((held & (credit < 0)).astype(mx.float32), case.mask),
        "out_advantages": spread(case, relative(case)),
    }


def dppo_tv_verl(case: Case) -> Results:
    arguments = {"clip": verl_clip(case.hyper), "cap": case.hyper["clip_ratio_c"]}
    run = case.run(made("dppo", "verl", **arguments), case.totals())
    found = run.results() | verl_metrics(case, run.metrics)
    return found | {"out_advantages": spread(case, relative(case))}


def from_losses(case: Case, function: Callable[[mx.array, mx.array], mx.array], reduction: Any, totals: Any) -> Results:
    """A loss per token that no recipe has: function(new, log-ratio) -> [B, T], reduced."""

    def loss(new: mx.array) -> mx.array:
        values = function(new, losses.log_ratio(new, case["logp_old"], case.mask))
        return reduction(values, case.mask, totals)

    value, gradient = gradient_of(loss, case["logp_new"])
    return {"out_loss": value, "out_grad_logp_new": gradient}


def dro_verl(case: Case) -> Results:
    credit, beta = case.per_token(case.out("advantages")), case.hyper["dro_beta"]
    found = from_losses(case, lambda new, x: extra.dro(new, x, credit, beta), reduce.token_mean, case.totals())
    found["metric_ppo_kl"] = extra.mean(drift(case), case.mask)
    return found | {"out_advantages": spread(case, relative(case))}


def reinforce_verl(case: Case) -> Results:
    credit, weight = case.per_token(case.out("advantages")), case["is_weights"]

    def per_row(values: mx.array, mask: mx.array, totals: Any) -> mx.array:
        return reduce.Constant(length=1)(values, mask, totals)

    found = from_losses(case, lambda new, x: extra.reinforce(new, credit) * weight, per_row, case.totals(filled=True))
    found["metric_ppo_kl"] = extra.mean(case["logp_rollout"] - case["logp_new"], case.mask)
    return found | {"out_advantages": spread(case, relative(case))}


def vespo_trl(case: Case) -> Results:
    hyper, credit = case.hyper, case.per_token(case.out("advantages"))
    shape = ((hyper["k_pos"], hyper["lambda_pos"]), (hyper["k_neg"], hyper["lambda_neg"]))

    def function(new: mx.array, x: mx.array) -> mx.array:
        return extra.vespo(new, case["logp_old"], credit, case.mask, *shape)[0]

    found = from_losses(case, function, reduce.token_mean, case.totals(tokens=hyper["num_items"]))
    phi = extra.vespo(case["logp_new"], case["logp_old"], credit, case.mask, *shape)[1]
    found |= trl_metrics(case) | {"metric_vespo.phi_seq_mean": phi[:, 0].mean()}
    return found | {"out_advantages": relative(case, "group", 1e-4, "zero")}


def row_mean_of(case: Case, values: mx.array, mask: mx.array, filled: bool = False) -> mx.array:
    """Mean over rows (all, or those with tokens) of the row's mean over the tokens of another mask."""
    return extra.row_means(values, mask).sum() / case.totals(filled=filled).sequences


def prime_metrics(case: Case, dropped: mx.array, filled: bool = False) -> Results:
    """Mismatch on dropped and kept tokens, and the dropped share, each a mean over rows of the row's mean."""
    x = losses.log_ratio(case["logp_new"], case["logp_old"], case.mask)
    gap, flag = mx.exp(x) - x - 1, dropped.astype(mx.float32)
    return {
        "metric_masked_mismatch_kl": row_mean_of(case, gap, case.mask * flag, filled),
        "metric_unmasked_mismatch_kl": row_mean_of(case, gap, case.mask * (1 - flag), filled),
        "metric_is_masked": row_mean_of(case, flag, case.mask, filled),
    }


def trust_region(case: Case, dropped: mx.array) -> Results:
    """-[kept] A rho + kl_tau (new - old)^2, summed and scaled (prime-rl)."""
    hyper, credit = case.hyper, case.per_token(case.out("advantages"))

    def function(new: mx.array, x: mx.array) -> mx.array:
        kept = mx.where(dropped, 0.0, -mx.exp(x) * hyper["adv_tau"] * credit)
        return kept + 2 * hyper["kl_tau"] * divergence.ESTIMATORS["k2"](x)

    totals = case.totals(tokens=hyper["rl_scale"])
    return from_losses(case, function, reduce.token_mean, totals) | prime_metrics(case, dropped)


def dppo_kl_prime(case: Case) -> Results:
    credit = case.per_token(case.out("advantages"))
    bounds = (case.hyper["dppo_mask_low"], case.hyper["dppo_mask_high"])
    low, high = losses.probability_outside(case["logp_new"], case["logp_old"], credit, *bounds)
    dropped = low | high
    found = trust_region(case, dropped)
    for name, flag in {"low": low & (credit < 0), "high": high}.items():
        found[f"metric_is_masked_{name}"] = row_mean_of(case, flag.astype(mx.float32), case.mask)
    for name, flag in {"positive": credit > 0, "negative": credit < 0}.items():
        among = row_mean_of(case, flag.astype(mx.float32), case.mask * dropped)
        found[f"metric_masked_advantage_{name}"] = among
    return found | {"out_advantages": spread(case, relative(case))}


def ipo_prime(case: Case) -> Results:
    threshold = case.hyper["ipo_threshold"]
    pair = (case["logp_new"], case["logp_old"])
    one = mx.ones_like(case.mask)
    up = losses.probability_outside(*pair, one, threshold, threshold)[1]
    down = losses.probability_outside(*pair, -one, threshold, threshold)[0]
    found = trust_region(case, up | down)
    return found | {"out_advantages": spread(case, relative(case))}


# Gradient accumulation: the sum over micro batches is the step.


def accumulated(case: Case, recipe: Any, totals: Callable[[np.ndarray], Any], scale: float = 1.0) -> Results:
    """Loss and gradient summed over the rows of each micro batch, with `totals(rows)` of it."""
    loss, gradient = mx.array(0.0), mx.zeros(case.mask.shape)
    for micro in np.unique(case.np("micro")):
        rows = np.flatnonzero(case.np("micro") == micro)
        part = Case(
            case.family,
            case.variant,
            case.hyper,
            {name: _rows(case, v, rows) for name, v in case.arrays.items()},
        )
        run = part.run(recipe, totals(rows))
        loss = loss + scale * run.loss
        gradient = gradient.at[mx.array(rows)].add(scale * run.gradient)
    return {"loss": loss, "grad": gradient}


def _rows(case: Case, values: np.ndarray, rows: np.ndarray) -> np.ndarray:
    return values[rows] if values.ndim and len(values) == len(case.np("mask")) else values


def accumulated_trl(case: Case) -> Results:
    hyper = case.hyper
    clip = (hyper["epsilon"], hyper["epsilon"])
    whole = case.totals(max_tokens=hyper["max_completion_length"])
    recipes = {
        "grpo": made("grpo", "trl", clip=clip),
        "bnpo": made("grpo", "trl", clip=clip, reduction="token_mean"),
        "dr_grpo": made("dr_grpo", "trl", clip=clip),
        "dapo": made("dapo", "trl", clip=clip),
        "cispo": made("cispo", "trl", clip=(None, hyper["cispo_epsilon_high"] - 1)),
    }
    found: Results = {"out_advantages": relative(case, "group", 1e-4, "zero")}
    for name, recipe in recipes.items():
        if name == "bnpo":  # averaged within each micro batch, then over them: not the loss of the whole batch
            part = accumulated(case, recipe, lambda rows: _tokens_of(case, rows), 1 / hyper["n_micro"])
        else:
            part = accumulated(case, recipe, lambda rows: whole)
        found |= {f"out_loss_{name}": part["loss"], f"out_grad_{name}": part["grad"]}
        found[f"out_loss_{name}_full"] = case.run(recipe, whole).loss
    return found


def _tokens_of(case: Case, rows: np.ndarray) -> Any:
    return Totals(int(case.np("mask")[rows].sum()), len(rows), 1, 1)


def accumulated_verl(case: Case) -> Results:
    hyper = case.hyper
    found: Results = {"out_advantages": spread(case, relative(case))}
    totals = Totals(int(case.np("mask").sum()), hyper["global_batch_size"], 1, 1)
    for mode in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum"):
        clip = {"clip": verl_clip(hyper), "dual_clip": hyper["clip_ratio_c"]}
        part = accumulated(case, made("grpo", "verl", **clip, **VERL_REDUCTIONS[mode]), lambda rows: totals)
        found |= {f"out_loss_{mode}": part["loss"], f"out_grad_{mode}": part["grad"]}
    return found


RUNNERS: dict[tuple[str, str], Runner] = {
    ("grpo", "verl_token_mean_kl"): verl_grpo,
    ("grpo", "verl_seq_mean_token_mean"): verl_grpo,
    ("grpo", "trl_grpo"): trl,
    ("grpo", "trl_bnpo_delta"): trl,
    ("grpo", "openrlhf_group_norm"): openrlhf,
    ("grpo", "openrlhf_sample_dualclip"): openrlhf,
    ("grpo", "slime_grpo_kl"): slime,
    ("grpo", "slime_per_token"): slime,
    ("dr_grpo", "trl"): trl,
    ("dr_grpo", "openrlhf"): lambda case: openrlhf(case, "dr_grpo", "none"),
    ("dr_grpo", "verl"): verl_grpo,
    ("dapo", "trl"): trl,
    ("dapo", "verl"): verl_grpo,
    ("gspo", "verl"): verl_gspo,
    ("gspo", "trl_sequence"): trl,
    ("gspo", "slime"): lambda case: slime(case, "gspo", "sequence"),
    ("gspo", "openrlhf"): lambda case: openrlhf(case, "gspo"),
    ("gspo_token", "trl_sequence_token"): trl,
    ("cispo", "verl"): verl_cispo,
    ("cispo", "trl"): trl_cispo,
    ("cispo", "slime"): slime_cispo,
    ("rloo", "trl"): trl_rloo,
    ("rloo", "openrlhf"): openrlhf_rloo,
    ("rloo", "verl"): verl_rloo,
    ("reinforce_pp", "verl"): verl_reinforce_pp,
    ("reinforce_pp", "verl_baseline"): verl_reinforce_pp_baseline,
    ("reinforce_pp", "openrlhf"): openrlhf_reinforce_pp,
    ("reinforce_pp", "openrlhf_baseline"): lambda case: openrlhf_reinforce_pp(case, True),
    ("reinforce_pp", "slime"): slime_reinforce_pp,
    ("reinforce_pp", "slime_baseline"): slime_reinforce_pp_baseline,
    ("relatives", "sapo_verl"): sapo_verl,
    ("relatives", "sapo_trl"): sapo_trl,
    ("relatives", "gmpo_verl"): gmpo_verl,
    ("relatives", "dppo_tv_verl"): dppo_tv_verl,
    ("relatives", "dro_verl"): dro_verl,
    ("relatives", "luspo_trl"): trl,
    ("relatives", "vespo_trl"): vespo_trl,
    ("relatives", "clip_none_reinforce_verl"): reinforce_verl,
    ("relatives", "dppo_kl_prime"): dppo_kl_prime,
    ("relatives", "ipo_prime"): ipo_prime,
    ("grad_accum", "trl"): accumulated_trl,
    ("grad_accum", "verl"): accumulated_verl,
}
