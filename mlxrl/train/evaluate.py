"""Evaluation on held-out examples, and the comparison of two evaluations of the same examples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import numpy as np

from mlxrl.algo.advantages import equal
from mlxrl.algo.credit import Turns
from mlxrl.checked import keywords
from mlxrl.data import Source, as_tasks
from mlxrl.errors import UserError
from mlxrl.policy.policy import Policy
from mlxrl.rewards.calls import TrainerState
from mlxrl.rewards.scoring import (
    RewardLike,
    attempt,
    failure_line,
    failures_of,
    require_scores,
    rewards_of,
    tell_missing,
)
from mlxrl.rollout.demonstrations import all_asked, learnable, rules_for
from mlxrl.rollout.draw import key_of
from mlxrl.rollout.environment import Factory, gives_rewards
from mlxrl.rollout.sample import fitting_prompts, sample
from mlxrl.settings import EpisodeLimits, Sampling, Train
from mlxrl.train.answers import AnswerLosses, answer_losses, loss_difference
from mlxrl.train.metrics import require_finite
from mlxrl.types import Task, Trajectory

RESAMPLES = 10_000


@dataclass(frozen=True, slots=True, repr=False)
class Evaluation:
    """One trajectory a task, in the order of the tasks. left_out: how many prompts fill the model's context.

    answers: the losses on the answers of the data, where they were asked for; without rewards there are no
    trajectories then.
    """

    trajectories: tuple[Trajectory, ...]
    left_out: int = 0
    answers: AnswerLosses | None = None

    @property
    def rewards(self) -> tuple[float, ...]:
        """The reward of every example, NaN where it could not be scored."""
        return tuple(t.reward if math.isfinite(t.reward) else math.nan for t in self.trajectories)

    def __repr__(self) -> str:
        found = self.summary() if self.trajectories or self.answers else {}
        numbers = [f"{name} {value:.4g}" for name, value in found.items() if isinstance(value, int | float)]
        return f"Evaluation({', '.join(numbers)})"

    @property
    def warning(self) -> str:
        """How many examples could not be scored, by which function, and the first reason; empty where all could."""
        unscored = sum(map(math.isnan, self.rewards))
        lines = [failure_line(self.trajectories), next((one.error for one in self.trajectories if one.error), "")]
        why = "; ".join(line for line in lines if line)
        what = f"{unscored} of {len(self.rewards)} examples could not be scored and are left out"
        return f"{what}{f': {why}' if why else ''}" if unscored else ""

    def summary(self, success: float = 1.0) -> dict[str, Any]:
        """accuracy, the share of rewards of at least `success`, and mean_reward of the n examples that could be scored.

        A reward that falls short of `success` by rounding is there. unscored: how many examples could not be scored;
        where there are some, failures: which function failed how often for which reason, and warning: that in words.
        Where answers of the data were scored, loss, perplexity and answer_tokens; without rewards these alone.
        """
        if self.answers is not None and not self.trajectories:
            left_out = {"left_out": self.left_out} if self.left_out else {}
            return {**self.answers.summary(), "n": len(self.answers.losses), **left_out}
        rewards = [reward for reward in self.rewards if not math.isnan(reward)]
        found: dict[str, Any] = {
            "accuracy": fmean(r >= success or equal(r, success) for r in rewards) if rewards else math.nan,
            "mean_reward": fmean(rewards) if rewards else math.nan,
            "n": len(rewards),
            "unscored": len(self.rewards) - len(rewards),
            **(self.answers.summary() if self.answers else {}),
            **({"left_out": self.left_out} if self.left_out else {}),
        }
        if self.warning:
            failures = [asdict(one) for one in failures_of(self.trajectories)]
            found |= {"failures": failures, "warning": self.warning}
        return found


@keywords
def evaluate(
    policy: Policy,
    tasks: Sequence[Task] | Source,
    reward: RewardLike = None,
    *,
    sampling: Sampling = Sampling(temperature=0.0),
    environment: Factory | None = None,
    limits: EpisodeLimits = EpisodeLimits(),
    max_rows: int = 32,
    seed: int = 0,
    state: TrainerState = TrainerState(),
    turns: Turns | None = None,
    train: Train = Train(),
) -> Evaluation:
    """Complete every task once, greedily by default, and score the completions; or score answers of the data.

    Args:
        tasks: those of `mlxrl.tasks`, or what that reads; prompts that fill the model's context are left out.
        reward: may be left out where an environment gives the rewards; what its settings shape is not shaped here.
        environment, limits, max_rows: see `sample`.
        state: what functions learn of a run.
        turns: also the loss on the answers of the data, as `sft` has it; then completions are for a reward alone.
        train: `max_tokens_per_sequence` and `tokens_per_pass` for that.
    """
    if tasks in ([], ()):
        raise UserError("evaluate", "wanted at least one task, got none")
    tasks, rewards, answers = as_tasks(tasks, whole=turns is not None), rewards_of(reward), None
    if turns is not None:
        rules = rules_for(policy.model, turns, sampling.thinking, train.max_tokens_per_sequence)
        learned = learnable(policy, tasks, rules)
        answers = answer_losses(policy, learned.tasks, rules, train)
        if not rewards.functions and environment is None:
            return Evaluation((), learned.left_out, answers)
        tasks = all_asked(tasks)
    fitted = fitting_prompts(policy, tasks, sampling, environment)
    if environment is not None and not rewards.functions and not gives_rewards(environment):
        why = "wanted at least one function, got none; the environment gives no rewards"
        raise UserError("evaluate", "reward", why)
    tell_missing(rewards, tasks)
    groups = sample(
        policy, fitted.tasks, group_size=1, sampling=sampling, key=key_of(seed, 0), max_rows=max_rows,
        environment=environment, limits=limits,
    )  # fmt: skip
    require_finite(groups, "evaluation")
    scored, fault = attempt(groups, rewards, state)
    if fault is not None:
        raise fault
    return Evaluation(tuple(group[0] for group in require_scores(scored)), fitted.left_out, answers)


def compare(before: Evaluation, after: Evaluation, seed: int = 0) -> dict[str, Any]:
    """Mean reward after minus before on the same examples, with its 95 % interval.

    Examples that could not be scored in both are left out; then `pairs` says how many there are. The interval is that
    of a bootstrap over the pairs (percentiles 2.5 and 97.5 of the resampled means). Where answers of the data were
    scored, loss_difference and loss_interval are those of their loss.
    """
    tokens = [one.answers.tokens if one.answers else () for one in (before, after)]
    prompts = [[trajectory.task.prompt for trajectory in one.trajectories] for one in (before, after)]
    if tokens[0] != tokens[1] or prompts[0] != prompts[1]:
        raise UserError("compare", "the two evaluations are not of the same examples")
    both_answers = before.answers and after.answers and (before.answers, after.answers)
    answers = loss_difference(*both_answers, seed) if both_answers else {}
    if answers and not before.trajectories:
        return dict(answers)
    both = zip(before.rewards, after.rewards, strict=True)
    known = [(one, other) for one, other in both if not math.isnan(one + other)]
    if not known:
        return {"difference": math.nan, "interval": [math.nan, math.nan], "pairs": 0, **answers}
    pairs = np.array([0.0 if equal(one, other) else other - one for one, other in known])
    left_out = {} if len(pairs) == len(before.rewards) else {"pairs": len(pairs)}
    draws = np.random.default_rng(seed).integers(len(pairs), size=(RESAMPLES, len(pairs)))
    low, high = np.percentile(pairs[draws].mean(axis=1), [2.5, 97.5])
    return {"difference": fmean(pairs), "interval": [float(low), float(high)], **left_out, **answers}
