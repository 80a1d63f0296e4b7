"""The algorithms: compositions of the pieces beside this file, with the literature's defaults.

Every function takes keywords only: those of `arguments.Arguments` that its signature lists, and `convention`, the name
of a library whose defaults fill in what is not given. rho = exp(log pi_new - log pi_old); losses are minimised.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any, TypeVar, Unpack

from mlxrl.algo import advantages, build, credit, steps
from mlxrl.algo.arguments import Arguments, resolve
from mlxrl.algo.compose import Policy, Recipe
from mlxrl.algo.defaults import DEFAULTS
from mlxrl.algo.returns import whiten
from mlxrl.types import Algorithm

RECIPES: dict[str, Callable[..., Algorithm]] = {}

Make = TypeVar("Make", bound=FunctionType)


def _listed(function: Make) -> Make:
    """Enter the function in RECIPES, with a signature that names its arguments and their defaults."""
    keywords: dict[str, Any] = {"convention": None, **DEFAULTS[function.__name__]}
    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(name, kind, default=default) for name, default in keywords.items()]
    function.__dict__["__signature__"] = inspect.Signature(parameters, return_annotation=Recipe)
    RECIPES[function.__name__] = function
    return function


@_listed
def grpo(*, convention: str | None = None, **given: Unpack[Arguments]) -> Recipe:
    """Group relative policy optimisation (DeepSeekMath, arXiv 2402.03300).

    A_i = (r_i - mean_g) / (std_g + eps);  l = -min(rho A, clip(rho, 0.8, 1.2) A);  mean over rows of token means

    The paper adds 0.04 k3 to the reference; here `kl` is 0 unless given. verl averages over tokens and clips twice
    (dual_clip 3), TRL and slime average over rows; eps is 1e-6 (verl, slime), 1e-4 (TRL) or 1e-9 (OpenRLHF).
    """
    return _group_relative("grpo", convention, given)


@_listed
def dr_grpo(*, convention: str | None = None, **given: Unpack[Arguments]) -> Recipe:
    """GRPO done right (arXiv 2503.20783): no division by the standard deviation, none by the length.

    A_i = r_i - mean_g;  the sum of clipped token losses / (rows length), length = the sampling limit

    verl divides by the rows that have tokens, and by `length` (default: the padded width). In OpenRLHF it is the
    advantage only, averaged over tokens.
    """
    return _group_relative("dr_grpo", convention, given)


@_listed
def dapo(*, convention: str | None = None, **given: Unpack[Arguments]) -> Recipe:
    """Decoupled clip (arXiv 2503.14476): GRPO with bounds 0.8 and 1.28, averaged over all tokens of the step.

    verl adds a dual clip at 10. The paper's other parts are `train(max_draws=...)`, which draws further tasks in place
    of those whose attempts are all right or all wrong, and `shaping.shape_overlong`; see [rollout] and [reward].
    """
    return _group_relative("dapo", convention, given)


@_listed
def gspo(*, convention: str | None = None, **given: Unpack[Arguments]) -> Recipe:
    """Group sequence policy optimisation (arXiv 2507.18071): one ratio per completion.

    s_i = exp(mean_t log rho_t);  l = -min(s A, clip(s, 1-3e-4, 1+4e-4) A);  mean over rows

    TRL, slime and OpenRLHF differentiate through the mean; verl carries the gradient on the tokens
    (ratio="sequence_token") and cuts log s at 10.
    """
    return _group_relative("gspo", convention, given)


@_listed
def gspo_token(*, convention: str | None = None, **given: Unpack[Arguments]) -> Recipe:
    """GSPO-token (arXiv 2507.18071 eq. 13): the sequence's ratio in value, the token's gradient and advantage.

    Equal to `gspo` while a row has one advantage; with `kl_reward`, or advantages per token, each token has its own.
    """
    return _group_relative("gspo_token", convention, given)


@_listed
def rloo(*, convention: str | None = None, **given: Unpack[Arguments]) -> Recipe:
    """REINFORCE leave-one-out (arXiv 2402.14740): the baseline of an attempt is the mean of the others.

    A_i = r_i - mean_{j != i} r_j;  l = -min(rho A, clip(rho, 0.8, 1.2) A);  mean over tokens

    TRL takes the ratio of the whole completion (ratio="sequence_sum") and a baseline of rewards less KL; here
    `kl_reward` charges k1 after the baseline, to the tokens that lead there (OpenRLHF).
    """
    a = resolve("rloo", convention, given)
    return _composed("rloo", a, credit.of_rewards(advantages.leave_one_out), build.clipped_policy(a))


@_listed
def reinforce_pp(*, convention: str | None = None, **given: Unpack[Arguments]) -> Recipe:
    """REINFORCE++ (arXiv 2501.03262): discounted returns, whitened over all tokens of the step; no group needed.

    R_t = gamma^(T-1-t) r;  A = (R - mean) / sqrt(var + 1e-8);  clipped token loss;  mean over tokens

    The divisor of the variance is n-1 in verl and slime, n in OpenRLHF (whiten_ddof=0). Libraries charge the KL before
    whitening; `kl_reward` is charged after it.
    """
    return _whitened("reinforce_pp", convention, given)


@_listed
def reinforce_pp_baseline(*, convention: str | None = None, **given: Unpack[Arguments]) -> Recipe:
    """REINFORCE++-baseline (arXiv 2501.03262): rewards less their group's mean, whitened over all tokens."""
    return _whitened("reinforce_pp_baseline", convention, given)


@_listed
def cispo(*, convention: str | None = None, **given: Unpack[Arguments]) -> Recipe:
    """Clipped importance weight (MiniMax-M1, arXiv 2506.13585): no token's gradient is dropped.

    l = -sg(clip(rho, 1-low, 1+high)) A log pi;  A as in `grpo`;  mean over tokens

    Bounds are distances from 1: TRL's epsilon_high is the absolute cap 1+high. clip=(None, 4) is ScaleRL's (arXiv
    2510.13786); verl bounds both sides at 0.2.
    """
    a = resolve("cispo", convention, given)
    return _composed("cispo", a, _relative(a), build.cispo_policy(a))


@_listed
def gigpo(*, convention: str | None = None, **given: Unpack[Arguments]) -> Recipe:
    """Group-in-group policy optimisation for multi-turn episodes (arXiv 2505.10978); `Turn.state` is the anchor.

    A = A_E + omega A_S: the episode against its group, each step against the group's steps from the same state

    scale "none" is the paper's mean_norm, "group" its mean_std_norm. verl-agent counts every step in the episode's
    statistics (episode_over="step"). With omega 0 and scale "group" it is `grpo` averaged over tokens.
    """
    a = resolve("gigpo", convention, given)
    episode = partial(steps.episode_advantages, scale=a["scale"], over=a["episode_over"], eps=a["eps"], single="zero")
    step = partial(steps.step_advantages, scale=a["scale"], eps=a["eps"])
    chosen = credit.gigpo_credit(a["gamma"], a["omega"], a["similarity"], episode, step, a["mask_truncated"])
    return build.recipe("gigpo", a, chosen, build.clipped_policy(a))


@_listed
def opd(*, convention: str | None = None, **given: Unpack[Arguments]) -> Recipe:
    """On-policy distillation: the student's own samples, judged token by token by a teacher; no reward needed.

    teacher_term "advantage":  A_t = reward A_i + teacher (log pi_teacher - log pi_old)_t, in the clipped loss;
                               teacher_from "new" takes the lead over log pi_new instead, without gradient
    teacher_term "loss":       teacher k3(new || teacher) of the sampled token, differentiated
    teacher_term "candidates": teacher D(new, teacher) over top-K candidates, with a tail or renormalised
    teacher_term "vocabulary": teacher D(new, teacher) over the whole vocabulary

    The first is the policy gradient of the reverse KL (slime, OpenClaw-RL, tinker; MiniLLM, arXiv 2306.08543), the
    last that of GKD (arXiv 2306.13649), the third that cut to K. `reward` adds the advantage of `grpo`.
    """
    a = resolve("opd", convention, given)
    if not a["reward"]:
        return build.recipe("opd", a, credit.no_credit, build.clipped_policy(a))
    relative = _relative(a)
    return _composed("opd", a, lambda rows, ids: a["reward"] * relative(rows, ids), build.clipped_policy(a))


@_listed
def max_rl(*, convention: str | None = None, **given: Unpack[Arguments]) -> Recipe:
    """Maximum-likelihood RL for rewards in [0, 1] (prime-rl): advantages against the mean, relative to it.

    A_i = (r_i - mean_g) / mean_g where the mean is positive;  clipped token loss;  mean over tokens
    """
    a = resolve("max_rl", convention, given)
    return _composed("max_rl", a, credit.of_rewards(advantages.max_rl), build.clipped_policy(a))


@_listed
def sapo(*, convention: str | None = None, **given: Unpack[Arguments]) -> Recipe:
    """Soft adaptive policy optimisation (arXiv 2511.20347): a sigmoid gate of the ratio in place of the clip.

    l = -A (4/tau) sigmoid(tau (rho - 1)), tau 1 where A > 0, else 1.05;  A as in `grpo`;  mean over rows
    """
    a = resolve("sapo", convention, given)
    return _composed("sapo", a, _relative(a), build.sapo_policy(a))


@_listed
def gmpo(*, convention: str | None = None, **given: Unpack[Arguments]) -> Recipe:
    """Geometric-mean policy optimisation (arXiv 2507.20673): log-ratios clipped per token, averaged per row.

    l = -A exp(mean_t clip(log rho_t, -0.4, 0.4)), the clip on the pessimistic side only;  mean over rows
    """
    a = resolve("gmpo", convention, given)
    return _composed("gmpo", a, _relative(a), build.gmpo_policy(a))


@_listed
def dppo(*, convention: str | None = None, **given: Unpack[Arguments]) -> Recipe:
    """Divergence PPO, binary total variation (arXiv 2602.04879): a trust region on probabilities, not ratios.

    l = -A sg(min(rho, 20)) log pi, dropped where p_new - p_old > high (A > 0) or < -low (A <= 0);  mean over tokens
    """
    a = resolve("dppo", convention, given)
    return _composed("dppo", a, _relative(a), build.dppo_policy(a))


@_listed
def luspo(*, convention: str | None = None, **given: Unpack[Arguments]) -> Recipe:
    """Length-unbiased sequence policy optimisation (arXiv 2602.05261): GSPO with each row times its length.

    l = -min(s A, clip(s, 1-2e-3, 1+2.5e-3) A);  sum over tokens, mean over rows
    """
    return _group_relative("luspo", convention, given)


def _relative(a: dict[str, Any]) -> credit.Baseline:
    if a["combine"] == "normalise":
        return credit.of_parts(a["eps"])
    return credit.of_rewards(partial(advantages.group_relative, scale=a["scale"], eps=a["eps"]))


def _composed(name: str, a: dict[str, Any], baseline: credit.Baseline, policy: Policy) -> Recipe:
    whitening = _whitening(a) if a["whiten"] else None
    return build.recipe(name, a, credit.group_credit(name, baseline, a["mask_truncated"], whitening), policy)


def _whitening(a: dict[str, Any]) -> credit.Whitening:
    return partial(whiten, ddof=a["whiten_ddof"], eps=a["whiten_eps"], floor=a["whiten_floor"])


def _group_relative(name: str, convention: str | None, given: Arguments) -> Recipe:
    a = resolve(name, convention, given)
    return _composed(name, a, _relative(a), build.clipped_policy(a))


def _whitened(name: str, convention: str | None, given: Arguments) -> Recipe:
    a = resolve(name, convention, given)
    centre = "gamma" not in a
    chosen = credit.whitened_credit(a.get("gamma", 1.0), _whitening(a), centre, name, a["mask_truncated"])
    return build.recipe(name, a, chosen, build.clipped_policy(a))
