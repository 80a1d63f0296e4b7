"""Advantages, GiGPO's step credit, reward shaping and group filters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from mlxrl.algo import advantages, shaping
from oracles import extra
from oracles.case import Case, Results


def uniform(case: Case) -> Results:
    rewards, ids = case.np("rewards"), case.ids
    stds = extra.group_spread(rewards, ids)

    def relative(scale: Any, eps: float = 0.0) -> np.ndarray:
        return advantages.group_relative(rewards, ids, scale, eps)

    leave_one_out = advantages.leave_one_out(rewards, ids)
    return {
        "out_verl_std": relative("group", 1e-6),
        "out_verl_nostd": relative("none"),
        "out_rloo_verl": leave_one_out,
        "out_passk_verl": extra.pass_at_k(rewards, ids, 1e-6),
        "out_gpg_verl": extra.gpg(rewards, ids),
        "out_opo_verl": optimal(case),
        "out_trl_group": relative("group", 1e-4),
        "out_trl_batch": relative("batch", 1e-4),
        "out_trl_none": relative("none"),
        "out_openrlhf_group_norm": relative("group", 1e-9),
        "out_rloo_openrlhf": leave_one_out,
        "out_slime_std": relative("group", 1e-6),
        "out_tinker": relative("none"),
        "out_primerl_grpo": relative("none"),
        "out_primerl_max_rl": advantages.relative_to_mean(rewards, ids),
        "metric_frac_reward_zero_std": np.isclose(stds, 0).mean(),
        "metric_reward_std": advantages.spread(rewards.astype(np.float64)),
    }


def optimal(case: Case) -> np.ndarray:
    """OPO's advantage where a row has a token; verl broadcasts over tokens, so a row without any shows 0."""
    lengths = case.np("mask").sum(axis=1)
    return extra.optimal_baseline(case.np("rewards"), case.ids, lengths) * (lengths > 0)


def ragged(case: Case) -> Results:
    rewards, ids = case.np("rewards"), case.ids
    scaled = extra.raw_singles(advantages.group_relative(rewards, ids, "group", 1e-6), rewards, ids, 1e-6)
    return {
        "out_verl_std": scaled,
        "out_verl_std_vectorized": scaled,
        "out_verl_nostd": extra.raw_singles(advantages.group_relative(rewards, ids, "none"), rewards, ids),
        "out_rloo_verl": extra.raw_singles(advantages.leave_one_out(rewards, ids), rewards, ids),
        "out_rloo_verl_vectorized": advantages.leave_one_out(rewards, ids),
        "out_tinker": advantages.group_relative(rewards, ids, "none"),
    }


def length_penalty(case: Case) -> Results:
    hyper, out = case.hyper, case.np("output_tokens").astype(np.float64)
    costs = [
        (hyper["num_output_tokens_weight"], out),
        (hyper["num_input_tokens_weight"], case.np("total_tokens") - out),
        (hyper["num_turns_weight"], case.np("turns")),
    ]
    shaped = shaping.length_penalty(case.np("rewards"), case.ids, costs)
    return {"out_advantages": advantages.group_relative(shaped, case.ids, "none")}


def multi_reward(case: Case) -> Results:
    rewards, weights = case.np("rewards_per_func").astype(np.float64), case.np("reward_weights")
    ids = [row // int(case.np("group_size")) for row in range(len(rewards))]
    eps = case.hyper["adv_eps"]
    total = advantages.weighted_sum(rewards, weights)
    scored = total[~np.isnan(total)]
    found: Results = {
        f"out_sum_then_normalize_{scale}": advantages.group_relative(total, ids, scale, eps)
        for scale in ("group", "batch", "none")
    }
    found["out_normalize_then_sum_group"] = advantages.normalise_then_sum(rewards, weights, ids, eps)
    for n, column in enumerate(rewards.T):
        found[f"metric_rewards.r{n}.mean"] = column[~np.isnan(column)].mean()
        found[f"metric_rewards.r{n}.std"] = advantages.spread(column)
    found["metric_reward"] = scored.mean()
    found["metric_reward_std"] = advantages.spread(total)
    found["metric_frac_reward_zero_std"] = np.isclose(extra.group_spread(total, ids), 0).mean()
    return found


def gigpo(case: Case, over: str) -> Results:
    hyper = case.hyper
    groups, owners = case.np("uid").tolist(), case.np("traj_uid").tolist()
    summed = step_returns(case.np("step_rewards"), owners, case.np("step"), hyper["gamma"])
    found: Results = {"out_step_returns": summed}
    for name, scale in (("mean_norm", "none"), ("mean_std_norm", "group")):
        relative = partial(advantages.group_relative, scale=scale, eps=hyper["eps"])
        rewards = case.np("episode_rewards")
        if over == "step":
            eps = hyper["eps"] if scale == "group" else 0.0
            episode = extra.raw_singles(relative(rewards, groups), rewards, groups, eps)
        else:
            episode = extra.episode_advantages(rewards, groups, owners, relative)
        step = relative(summed, list(zip(groups, case.np("anchor").tolist(), strict=True)))
        total = episode + hyper["omega"] * step
        found[f"out_episode_adv_{name}"] = episode
        found[f"out_step_adv_{name}"] = step
        found[f"out_advantages_{name}"] = total[:, None] * case.np("mask")
    return found


def step_returns(rewards: np.ndarray, owners: list[Any], steps: np.ndarray, gamma: float) -> np.ndarray:
    """[N] returns of each trajectory's steps, which stand in any order."""
    out = np.zeros(len(rewards))
    for own in advantages.members(owners):
        inside = own[np.argsort(steps[own], kind="stable")]
        out[inside] = advantages.discounted(rewards[inside].astype(np.float64).tolist(), gamma)
    return out


def similarity(case: Case) -> Results:
    groups = case.np("uid").tolist()
    alike = advantages.clusters(case.np("anchor_text").tolist(), groups, case.hyper["similarity_thresh"])
    anchors = list(zip(groups, alike, strict=True))
    credit = advantages.group_relative(case.np("step_returns"), anchors, "none")
    return {"out_cluster": np.array(alike), "out_step_adv_mean_norm": credit}


def shaping_faults(stored: dict[str, Any]) -> list[str]:
    """The entries of the shaping and filtering case, which is a json file, that we compute differently."""
    found: list[str] = []
    for n, entry in enumerate(stored["overlong"]):
        for name, got in overlong(entry).items():
            wrong = ~np.isclose(got, entry[name], rtol=1e-12, atol=1e-12)
            found += [f"overlong {n} {name}[{row}]" for row in np.flatnonzero(wrong)]
    for n, entry in enumerate(stored["dynamic_sampling"]):
        found += [f"dynamic {n} {name}" for name, got in filters(entry["rewards"]).items() if got != entry[name]]
    return found


def overlong(entry: dict[str, Any]) -> dict[str, list[float]]:
    limit = (entry["max_len"], entry["buffer_len"], entry["penalty_factor"])
    rows = list(zip(entry["scores"], entry["lengths"], entry["truncated"], strict=True))
    return {
        "verl_dapo": [r + shaping.overlong_penalty(n, *limit) for r, n, _ in rows],
        "openrlhf_overlong": [r + shaping.overlong_penalty(n, *limit, cap=limit[2]) for r, n, _ in rows],
        "openrlhf_stop_properly_0_3": [extra.truncated_reward(r, cut, 0.3) for r, _, cut in rows],
        "openrlhf_stop_properly_neg": [extra.truncated_reward(r, cut, -0.5) for r, _, cut in rows],
    }


def filters(rewards: list[float]) -> dict[str, bool]:
    return {
        "slime_keep": extra.varied(rewards, 1e-6),
        "verl_drop": len(rewards) > 1 and not extra.varied(rewards),
        "openrlhf_keep": extra.mean_between(rewards),
        "tinker_keep": extra.varied(rewards),
    }


RUNNERS: dict[tuple[str, str], Callable[[Case], Results]] = {
    ("advantages", "uniform"): uniform,
    ("advantages", "ragged"): ragged,
    ("advantages", "length_penalty_primerl"): length_penalty,
    ("advantages", "multi_reward_trl"): multi_reward,
    ("gigpo", "verl_agent"): lambda case: gigpo(case, "step"),
    ("gigpo", "drmas"): lambda case: gigpo(case, "trajectory"),
    ("gigpo", "similarity"): similarity,
}
