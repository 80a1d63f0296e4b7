"""What the recipes can be told: every argument, and how it is resolved.

An argument is what the caller gives, else what the named convention says, else the recipe's default. One that has no
effect beside the others is refused by name, so that no setting is silently ignored. The values are in `defaults.py`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypedDict, get_args, get_origin, get_type_hints

from mlxrl.algo.advantages import Scale
from mlxrl.algo.correction import Level
from mlxrl.algo.defaults import CONVENTIONS, DEFAULTS
from mlxrl.algo.numbers import refuse_number
from mlxrl.algo.ratio import Bounds
from mlxrl.algo.steps import Over

Estimator = Literal["k1", "abs", "k2", "k3"]


class Arguments(TypedDict, total=False):
    """Keyword arguments of the recipes; a recipe takes those that its signature lists.

    Credit.
        scale, eps: the standard deviation that divides the advantage, and what is added to it.
        combine: what becomes of several reward functions, the "sum" of weighted rewards, or each is made a
            group-relative advantage of its own first and these are added, see `advantages.normalise_then_sum`.
        whiten: advantages to mean 0 and variance 1 over all tokens of the step. whiten_ddof, whiten_eps,
            whiten_floor: see `returns.whiten`. gamma: discount of later rewards.
        omega, similarity, episode_over: weight of the step's advantage, likeness that makes two states the same
            (None: they must be equal), and what the episode's statistics count; see `steps`.
        mask_truncated: a row that ran into the token limit gets advantage 0, and stays in every denominator.
    Policy loss.
        ratio: what is exponentiated, the log-ratio of the "token", of the "sequence" (the row's mean), of the
            "sequence_token" (the same in value, the token's own in gradient) or "sequence_sum" (the row's sum).
        log_ratio_clamp: bounds of the log-ratio. clip: distance of the ratio's bounds from 1, low and high.
        dual_clip, delta: see `losses.clipped`. cap: see `losses.dppo`. tau_pos, tau_neg: see `losses.sapo`.
        reduction, length: a name of `reduce.REDUCTIONS`, and the constant per row of "constant" (None: the limit).
    Regularisers.
        kl, kl_estimator, kl_straight, kl_log_ratio_clamp, kl_clamp, kl_weighted: divergence from the reference in
            the loss, see `kl.divergence`; weighted: by new/old.
        kl_reward, kl_gamma: the k1 divergence from the reference as a cost in the advantage, summed over later tokens.
        entropy: coefficient of the entropy bonus.
    Mismatch between sampler and trainer.
        correction, correction_level, correction_bounds: see `correction.weights`. veto: see `correction.veto`.
        off_policy: the delta of `correction.off_policy_mask`, against the sampler.
    Distillation.
        teacher, teacher_term: coefficient of the divergence from the teacher, and whether it shapes the "advantage",
            is a "loss" on sampled tokens, or one on top-K "candidates" or on the whole "vocabulary".
        teacher_from: whether the advantage is the teacher's lead over the "old" log-probs, or over the "new" ones, as
            they are in every update.
        teacher_gamma, teacher_clamp: discount of later tokens, and bounds of a token's term.
        teacher_estimator: of the "loss". teacher_divergence: of candidates and vocabulary, "forward", "reverse" or
            "jsd", the last with teacher_beta; of candidates also "surrogate", which the recipe's clip bounds.
        teacher_support, teacher_k: whose K likeliest tokens the candidates are, the "teacher"'s or the "student"'s as
            it sampled; the surrogate's are always the student's. teacher_tail: with a tail or renormalised.
        reward: weight of the group-relative advantage beside the teacher; 0 ignores rewards.
    """

    scale: Scale
    eps: float
    combine: Literal["sum", "normalise"]
    whiten: bool
    whiten_ddof: int
    whiten_eps: float
    whiten_floor: float
    gamma: float
    omega: float
    similarity: float | None
    episode_over: Over
    mask_truncated: bool
    ratio: Literal["token", "sequence", "sequence_token", "sequence_sum"]
    log_ratio_clamp: Bounds | None
    clip: Bounds | None
    dual_clip: float | None
    delta: float | None
    cap: float
    tau_pos: float
    tau_neg: float
    reduction: Literal["token_mean", "sequence_mean", "constant", "sum"]
    length: float | None
    kl: float
    kl_estimator: Estimator
    kl_straight: Estimator | None
    kl_log_ratio_clamp: Bounds | None
    kl_clamp: Bounds | None
    kl_weighted: bool
    kl_reward: float
    kl_gamma: float
    entropy: float
    correction: Literal["truncate", "mask"] | None
    correction_level: Level
    correction_bounds: Bounds
    veto: float | None
    off_policy: float | None
    teacher: float
    teacher_term: Literal["advantage", "loss", "candidates", "vocabulary"]
    teacher_from: Literal["old", "new"]
    teacher_gamma: float
    teacher_clamp: Bounds | None
    teacher_estimator: Estimator
    teacher_divergence: Literal["forward", "reverse", "jsd", "surrogate"]
    teacher_beta: float
    teacher_support: Literal["teacher", "student"]
    teacher_k: int
    teacher_tail: bool
    reward: float


_HINTS = get_type_hints(Arguments)
_Off = Callable[[Mapping[str, Any]], bool]
_KL = ("kl_estimator", "kl_straight", "kl_log_ratio_clamp", "kl_clamp", "kl_weighted")
_POLICY = ("ratio", "dual_clip", "delta", "correction", "veto", "off_policy")
_BOUNDS = ("log_ratio_clamp", "clip")
_WHITEN = ("whiten_ddof", "whiten_eps", "whiten_floor")
_CREDIT = ("scale", "eps", "combine", "whiten", *_WHITEN, "mask_truncated")
_NO_POLICY = "reward is 0 and the teacher is not in the advantage"


def _no_policy(a: Mapping[str, Any]) -> bool:
    return a.get("reward") == 0 and a["teacher_term"] != "advantage" and not a["kl_reward"]


def _surrogate(a: Mapping[str, Any]) -> bool:
    return a.get("teacher_term") == "candidates" and a["teacher_divergence"] == "surrogate"


_DEAD: tuple[tuple[tuple[str, ...], _Off, str], ...] = (
    (("scale",), lambda a: a.get("combine") == "normalise", "combine is 'normalise'"),
    (("eps",), lambda a: a["scale"] == "none" and a.get("combine") != "normalise", "scale is 'none'"),
    (_WHITEN, lambda a: not a.get("whiten", True), "whiten is false"),
    (("length",), lambda a: a["reduction"] != "constant", "reduction is not 'constant'"),
    (_KL, lambda a: not a["kl"], "kl is 0"),
    (("kl_gamma",), lambda a: not a["kl_reward"], "kl_reward is 0"),
    (("dual_clip", "delta"), lambda a: a["clip"] is None, "clip is None"),
    (("correction_level", "correction_bounds"), lambda a: a["correction"] is None, "correction is None"),
    (("similarity", "gamma"), lambda a: a.get("omega") == 0, "omega is 0"),
    (_CREDIT, lambda a: a.get("reward") == 0, "reward is 0"),
    (("teacher_from", "teacher_gamma"), lambda a: a["teacher_term"] != "advantage", "teacher_term is not 'advantage'"),
    (
        ("teacher_clamp",),
        lambda a: a["teacher_term"] in ("candidates", "vocabulary"),
        "teacher_term is neither 'advantage' nor 'loss'",
    ),
    (("teacher_estimator",), lambda a: a["teacher_term"] != "loss", "teacher_term is not 'loss'"),
    (
        ("teacher_divergence", "teacher_beta"),
        lambda a: a["teacher_term"] not in ("candidates", "vocabulary"),
        "teacher_term is neither 'candidates' nor 'vocabulary'",
    ),
    (
        ("teacher_support", "teacher_k", "teacher_tail"),
        lambda a: a["teacher_term"] != "candidates",
        "teacher_term is not 'candidates'",
    ),
    (("teacher_support", "teacher_tail"), _surrogate, "teacher_divergence is 'surrogate'"),
    (("teacher_beta",), lambda a: a["teacher_divergence"] != "jsd", "teacher_divergence is not 'jsd'"),
    (_POLICY, _no_policy, _NO_POLICY),
    (_BOUNDS, lambda a: _no_policy(a) and not _surrogate(a), _NO_POLICY),
)


def resolve(name: str, convention: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of recipe `name`; ValueError for a given one that is unknown, dead, or cannot teach."""
    known = DEFAULTS[name]
    for key in given:
        if key not in known:
            raise ValueError(f"{name}: {_unknown(key, known)}")
        _refuse_choice(name, key, given[key])
        refuse_number(name, key, given[key])
    resolved = {**known, **_convention(name, convention), **given}
    for key, why in dead(resolved).items():
        if key in given:
            raise ValueError(f"{name}: {key} has no effect, because {why}; leave it out")
    _refuse_flat("kl", resolved["kl_estimator"], resolved["kl_straight"] or resolved["kl_weighted"])
    _refuse_flat("teacher", resolved.get("teacher_estimator"), None)
    _refuse_teacher(name, resolved)
    _refuse_similarity(name, resolved.get("similarity"))
    return resolved


def dead(resolved: Mapping[str, Any]) -> dict[str, str]:
    """The arguments that have no effect beside the others, and why."""
    return {key: why for keys, off, why in _DEAD for key in keys if key in resolved and off(resolved)}


def live(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that have an effect; a recipe built with them is the same recipe."""
    without = dead(resolved)
    return {key: value for key, value in resolved.items() if key not in without}


def _refuse_choice(name: str, key: str, value: Any) -> None:
    hint = _HINTS[key]
    choices = [choice for part in (hint, *get_args(hint)) if get_origin(part) is Literal for choice in get_args(part)]
    optional = type(None) in get_args(hint)
    if choices and value not in choices and not (optional and value is None):
        raise ValueError(f"{name}: {key}: wanted one of {', '.join(choices)}, got {value!r}")


def _refuse_flat(term: str, estimator: str | None, rescued: Any) -> None:
    if estimator == "k1" and not rescued:
        raise ValueError(
            f"{term}_estimator: 'k1' in the loss has a gradient of mean 0 and teaches nothing; use 'k3' or 'k2'"
        )


def _refuse_teacher(name: str, resolved: Mapping[str, Any]) -> None:
    if resolved.get("teacher") == 0:
        raise ValueError(f"{name}: teacher: wanted a coefficient that is not 0, got 0; without a teacher use grpo")
    if resolved.get("teacher_term") == "vocabulary" and resolved["teacher_divergence"] == "surrogate":
        raise ValueError(f"{name}: teacher_divergence: 'surrogate' is of candidates; teacher_term is 'vocabulary'")
    if resolved.get("teacher_k", 1) < 1:
        raise ValueError(f"{name}: teacher_k: wanted at least 1, got {resolved['teacher_k']}")


def _refuse_similarity(name: str, similarity: float | None) -> None:
    if similarity is not None and not 0 < similarity <= 1:
        raise ValueError(
            f"{name}: similarity: wanted more than 0 and at most 1, got {similarity}; leave it out for equal states"
        )


def _convention(name: str, convention: str | None) -> Mapping[str, Any]:
    if convention is None:
        return {}
    table = {family: recipes[name] for family, recipes in CONVENTIONS.items() if name in recipes}
    if convention not in table:
        raise ValueError(f"{name}: convention: wanted one of {', '.join(sorted(table))}, got {convention!r}")
    return table[convention]


def _unknown(key: str, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(known)}"
    return f"unknown argument {key!r}; {hint}"
