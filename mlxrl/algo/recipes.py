"""The algorithms: compositions of credit, policy loss, reduction and terms, with the literature's defaults.

Each is declared: its decorator names the credit and the policy loss, its signature the settings of both that it takes;
rho = exp(new - old), losses are minimised. Other libraries' values are in `conventions`. Settings that many take:
    clip, dual_clip, delta: bounds of the ratio, clip as distances from 1; see `losses.Clipped`.
    ratio, log_ratio_clamp: whose ratio it is, and the bounds of its logarithm; see `losses.Ratio`.
    scale, eps, whiten, mask_truncated: what becomes of the group's rewards; see `credit`.
    reduction: "token_mean", "sequence_mean", "sum", or the sum over tokens divided by a "constant" for each sequence,
        the sampling limit, or by a number; see `reduce`.
    terms: what is added, as `[KL(coefficient=0.04)]`; see `terms`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from mlxrl.algo import losses
from mlxrl.algo.advantages import Scale, leave_one_out
from mlxrl.algo.algorithm import Term
from mlxrl.algo.credit import (
    Demonstrated,
    GiGPO,
    GroupBaseline,
    GroupRelative,
    MeanRelative,
    Over,
    Returns,
    Turns,
    Whiten,
)
from mlxrl.algo.losses import SAFE, Clip, Clipped, ClosedClip, Level
from mlxrl.algo.reduce import Name
from mlxrl.algo.table import recipe
from mlxrl.algo.terms import TeacherAdvantage, TeacherTerm
from mlxrl.checked import Interval

Above: TypeAlias = float | None
Clamp: TypeAlias = Interval | None
GroupScale: TypeAlias = Literal["group", "batch", "function", "none", "raw"]
Reduce: TypeAlias = Name | float
Terms: TypeAlias = Sequence[Term]


@recipe(GroupRelative(), Clipped())
def grpo(
    *, clip: Clip | None = (0.2, 0.2), dual_clip: Above = None, delta: Above = None, ratio: Level = "token",
    log_ratio_clamp: Clamp = SAFE, scale: GroupScale = "group", eps: float = 1e-6, whiten: Whiten | None = None,
    mask_truncated: bool = False, reduction: Reduce = "sequence_mean", terms: Terms = (),
) -> None:  # fmt: skip
    """Group relative policy optimisation (DeepSeekMath, arXiv 2402.03300).

    A_i = (r_i - mean_g) / (std_g + eps);  l = -min(rho A, clip(rho, 0.8, 1.2) A);  mean over sequences of token means

    The paper adds `KL(coefficient=0.04)`. verl averages over tokens and clips twice (dual_clip 3), TRL and slime
    average over sequences; eps is 1e-6 (verl, slime), 1e-4 (TRL) or 1e-9 (OpenRLHF).
    """


@recipe(GroupRelative(scale="none"), Clipped())
def dr_grpo(
    *, clip: Clip | None = (0.2, 0.2), dual_clip: Above = None, delta: Above = None, ratio: Level = "token",
    log_ratio_clamp: Clamp = SAFE, whiten: Whiten | None = None, mask_truncated: bool = False,
    reduction: Reduce = "constant", terms: Terms = (),
) -> None:  # fmt: skip
    """GRPO done right (arXiv 2503.20783): no division by the standard deviation, none by the length.

    A_i = r_i - mean_g;  the sum of clipped token losses / (sequences x the sampling limit)

    verl divides by the sequences that have tokens, and by a constant (default: the padded width). In OpenRLHF it is the
    advantage only, averaged over tokens.
    """


@recipe(GroupRelative(), Clipped())
def dapo(
    *, clip: Clip | None = (0.2, 0.28), dual_clip: Above = None, delta: Above = None, ratio: Level = "token",
    log_ratio_clamp: Clamp = SAFE, scale: GroupScale = "group", eps: float = 1e-6, whiten: Whiten | None = None,
    mask_truncated: bool = False, reduction: Reduce = "token_mean", terms: Terms = (),
) -> None:  # fmt: skip
    """Decoupled clip (arXiv 2503.14476): GRPO with bounds 0.8 and 1.28, averaged over all tokens of the step.

    verl adds a dual clip at 10. The paper's other parts are dynamic sampling, `rollout.resampling_rounds`, and the soft
    punishment of overlong completions, `reward.overlong_buffer`.
    """


@recipe(GroupRelative(), Clipped())
def gspo(
    *, clip: Clip | None = (3e-4, 4e-4), dual_clip: Above = None, delta: Above = None, ratio: Level = "sequence",
    log_ratio_clamp: Clamp = SAFE, scale: GroupScale = "group", eps: float = 1e-6, whiten: Whiten | None = None,
    mask_truncated: bool = False, reduction: Reduce = "sequence_mean", terms: Terms = (),
) -> None:  # fmt: skip
    """Group sequence policy optimisation (arXiv 2507.18071): one ratio per completion.

    s_i = exp(mean_t log rho_t);  l = -min(s A, clip(s, 1-3e-4, 1+4e-4) A);  mean over sequences;  A as in `grpo`

    TRL, slime and OpenRLHF differentiate through the mean; verl carries the gradient on the tokens
    (ratio="sequence_token") and cuts log s at 10.
    """


@recipe(GroupRelative(), Clipped(ratio="sequence_token"))
def gspo_token(
    *, clip: Clip | None = (3e-4, 4e-4), dual_clip: Above = None, delta: Above = None, log_ratio_clamp: Clamp = SAFE,
    scale: GroupScale = "group", eps: float = 1e-6, whiten: Whiten | None = None, mask_truncated: bool = False,
    reduction: Reduce = "sequence_mean", terms: Terms = (),
) -> None:  # fmt: skip
    """GSPO-token (arXiv 2507.18071 eq. 13): the sequence's ratio in value, the token's gradient and advantage.

    Equal to `gspo` while a sequence has one advantage; with `KLReward`, or advantages per token, tokens have their own.
    """


@recipe(GroupRelative(), Clipped())
def luspo(
    *, clip: Clip | None = (2e-3, 2.5e-3), dual_clip: Above = None, delta: Above = None, ratio: Level = "sequence",
    log_ratio_clamp: Clamp = SAFE, scale: GroupScale = "group", eps: float = 1e-6, whiten: Whiten | None = None,
    mask_truncated: bool = False, reduction: Reduce = 1.0, terms: Terms = (),
) -> None:  # fmt: skip
    """Length-unbiased sequence policy optimisation (arXiv 2602.05261): GSPO with each sequence times its length.

    l = -min(s A, clip(s, 1-2e-3, 1+2.5e-3) A);  sum over tokens, mean over sequences
    """


@recipe(GroupBaseline(baseline=leave_one_out), Clipped())
def rloo(
    *, clip: Clip | None = (0.2, 0.2), dual_clip: Above = None, delta: Above = None, ratio: Level = "token",
    log_ratio_clamp: Clamp = SAFE, whiten: Whiten | None = None, mask_truncated: bool = False,
    reduction: Reduce = "token_mean", terms: Terms = (),
) -> None:  # fmt: skip
    """REINFORCE leave-one-out (arXiv 2402.14740): the baseline of a completion is the mean of the others.

    A_i = r_i - mean_{j != i} r_j;  l = -min(rho A, clip(rho, 0.8, 1.2) A);  mean over tokens

    TRL takes the ratio of the whole completion (ratio="sequence_sum") and a baseline of rewards less KL; here
    `KLReward` charges k1 after the baseline, to the tokens that lead there (OpenRLHF).
    """


@recipe(MeanRelative(), Clipped())
def max_rl(
    *, clip: Clip | None = (0.2, 0.2), dual_clip: Above = None, delta: Above = None, ratio: Level = "token",
    log_ratio_clamp: Clamp = SAFE, whiten: Whiten | None = None, mask_truncated: bool = False,
    reduction: Reduce = "token_mean", terms: Terms = (),
) -> None:  # fmt: skip
    """Maximum-likelihood RL for rewards in [0, 1] (prime-rl): advantages against the mean, relative to it.

    A_i = (r_i - mean_g) / mean_g where the mean is positive;  clipped token loss;  mean over tokens

    A reward below 0 is refused: near a mean of 0 its advantages have no bound, and below it none.
    """


@recipe(Returns(), Clipped())
def reinforce_pp(
    *, gamma: float = 1.0, whiten: Whiten = Whiten(), clip: Clip | None = (0.2, 0.2), dual_clip: Above = None,
    delta: Above = None, ratio: Level = "token", log_ratio_clamp: Clamp = SAFE, mask_truncated: bool = False,
    reduction: Reduce = "token_mean", terms: Terms = (),
) -> None:  # fmt: skip
    """REINFORCE++ (arXiv 2501.03262): discounted returns, whitened over all tokens of the step; no group needed.

    R_t = gamma^(T-1-t) r;  A = (R - mean) / sqrt(var + 1e-8);  clipped token loss;  mean over tokens

    The divisor of the variance is n-1 in verl and slime, n in OpenRLHF. Libraries charge the KL before whitening;
    `KLReward` is charged after it.
    """


@recipe(Returns(centred=True), Clipped())
def reinforce_pp_baseline(
    *, whiten: Whiten = Whiten(), clip: Clip | None = (0.2, 0.2), dual_clip: Above = None, delta: Above = None,
    ratio: Level = "token", log_ratio_clamp: Clamp = SAFE, mask_truncated: bool = False,
    reduction: Reduce = "token_mean", terms: Terms = (),
) -> None:  # fmt: skip
    """REINFORCE++-baseline (arXiv 2501.03262): rewards less their group's mean, whitened over all tokens."""


@recipe(GiGPO(), Clipped())
def gigpo(
    *, gamma: float = 0.95, omega: float = 1.0, similarity: float | None = None, episode_over: Over = "trajectory",
    scale: Scale = "none", eps: float = 1e-6, mask_truncated: bool = False, clip: Clip | None = (0.2, 0.2),
    dual_clip: Above = None, delta: Above = None, ratio: Level = "token", log_ratio_clamp: Clamp = SAFE,
    reduction: Reduce = "token_mean", terms: Terms = (),
) -> None:  # fmt: skip
    """Group-in-group policy optimisation for multi-turn episodes (arXiv 2505.10978); `Turn.state` is the anchor.

    A = A_E + omega A_S: the episode against its group, each step against the group's steps from the same state

    scale "none" is the paper's mean_norm, "group" its mean_std_norm. verl-agent counts every step in the episode's
    statistics (episode_over="step"). With omega 0 and scale "group" it is `grpo` averaged over tokens. similarity: the
    difflib ratio from which on two states are the same; left out, they must be equal.
    """


@recipe(GroupRelative(), losses.ClippedWeight())
def cispo(
    *, clip: Clip | None = (None, 4.0), ratio: Level = "token", log_ratio_clamp: Clamp = SAFE,
    scale: GroupScale = "group", eps: float = 1e-6, whiten: Whiten | None = None, mask_truncated: bool = False,
    reduction: Reduce = "token_mean", terms: Terms = (),
) -> None:  # fmt: skip
    """Clipped importance weight (MiniMax-M1, arXiv 2506.13585): no token's gradient is dropped.

    l = -sg(clip(rho, 1-low, 1+high)) A log pi;  A as in `grpo`;  mean over tokens

    Bounds are distances from 1: TRL's epsilon_high is the absolute cap 1+high. clip=(None, 4) is ScaleRL's (arXiv
    2510.13786); verl bounds both sides at 0.2.
    """


@recipe(GroupRelative(), losses.SoftGate())
def sapo(
    *, tau_pos: float = 1.0, tau_neg: float = 1.05, ratio: Level = "token", log_ratio_clamp: Clamp = SAFE,
    scale: GroupScale = "group", eps: float = 1e-6, whiten: Whiten | None = None, mask_truncated: bool = False,
    reduction: Reduce = "sequence_mean", terms: Terms = (),
) -> None:  # fmt: skip
    """Soft adaptive policy optimisation (arXiv 2511.20347): a sigmoid gate of the ratio in place of the clip.

    l = -A (4/tau) sigmoid(tau (rho - 1)), tau tau_pos where A > 0, else tau_neg;  A as in `grpo`;  mean over sequences
    """


@recipe(GroupRelative(), losses.GeometricMean())
def gmpo(
    *, clip: ClosedClip = (0.4, 0.4), log_ratio_clamp: Clamp = SAFE, scale: GroupScale = "group", eps: float = 1e-6,
    whiten: Whiten | None = None, mask_truncated: bool = False, reduction: Reduce = "sequence_mean", terms: Terms = (),
) -> None:  # fmt: skip
    """Geometric-mean policy optimisation (arXiv 2507.20673): log-ratios clipped per token, averaged per sequence.

    l = -A exp(mean_t clip(log rho_t, -0.4, 0.4)), the clip on the pessimistic side only;  mean over sequences
    """


@recipe(GroupRelative(), losses.TrustRegion())
def dppo(
    *, clip: ClosedClip = (0.2, 0.2), cap: float = 20.0, ratio: Level = "token", log_ratio_clamp: Clamp = SAFE,
    scale: GroupScale = "group", eps: float = 1e-6, whiten: Whiten | None = None, mask_truncated: bool = False,
    reduction: Reduce = "token_mean", terms: Terms = (),
) -> None:  # fmt: skip
    """Divergence PPO, binary total variation (arXiv 2602.04879): a trust region on probabilities, not ratios.

    l = -A sg(min(rho, cap)) log pi, dropped where p_new - p_old > high (A > 0) or < -low (A <= 0);  mean over tokens
    """


@recipe(GroupRelative(), Clipped())
def opd(
    *, teacher: TeacherTerm = TeacherAdvantage(), reward: float = 0.0, scale: GroupScale = "group", eps: float = 1e-6,
    whiten: Whiten | None = None, mask_truncated: bool = False, clip: Clip | None = (0.2, 0.2),
    dual_clip: Above = None, delta: Above = None, ratio: Level = "token", log_ratio_clamp: Clamp = SAFE,
    reduction: Reduce = "token_mean", terms: Terms = (),
) -> None:  # fmt: skip
    """On-policy distillation: the student's own samples, scored token by token by a teacher; no reward needed.

    teacher: `TeacherAdvantage`, A_t = reward A_i + c (teacher - old)_t in the clipped loss, the policy gradient of the
        reverse KL (slime, OpenClaw-RL, tinker; MiniLLM, arXiv 2306.08543), or a loss: `TeacherKL` on sampled tokens,
        `TeacherTopK` and `TeacherSurrogate` over top ids, `TeacherVocabulary` over all (GKD, arXiv 2306.13649).
    reward: weight of the advantage of `grpo` beside the teacher; 0 ignores rewards. OpenClaw-RL takes scale "raw".
    """


@recipe(Demonstrated(), losses.CrossEntropy())
def sft(*, turns: Turns = "all", reduction: Reduce = "token_mean", terms: Terms = ()) -> None:
    """Supervised fine-tuning on the answers that the data hold (InstructGPT, arXiv 2203.02155); no reward is needed.

    l = -log pi;  mean over the tokens of the step's answers

    An answer is the column `completion` of an example, or what the assistant says in a conversation, of which `turns`
    names "all" or the "last"; of an example that is a text it is all but the first token. See
    `rollout.demonstrations`. Terms that add to the loss go with it: `KL`, `Entropy`, `TeacherKL`.
    """
