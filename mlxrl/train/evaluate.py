"""Evaluation on held-out examples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import fmean
from typing import Annotated, Any

from mlxrl.algo.credit import Turns
from mlxrl.checked import Natural, at_most, checked_value, keywords
from mlxrl.data import Source, as_tasks, fingerprint
from mlxrl.errors import UserError
from mlxrl.policy.policy import Policy
from mlxrl.rewards.calls import TrainerState
from mlxrl.rewards.scoring import (
    RewardLike,
    Rewards,
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
from mlxrl.settings import EpisodeLimits, Sampling, Train, Warm
from mlxrl.train.answers import answer_losses
from mlxrl.train.comparison import AnswerLosses, Scores, pass_at, succeeds
from mlxrl.train.metrics import require_finite
from mlxrl.types import Group, Task, Trajectory

Samples = Annotated[Natural, at_most(1000)]


@dataclass(frozen=True, slots=True, repr=False)
class Evaluation:
    """One trajectory a task, in the order of the tasks, and the k samples of each where there are some.

    left_out: how many prompts fill the model's context.
    answers: the losses on the answers of the data, where they were asked for; without rewards there are no
    trajectories then.
    """

    trajectories: tuple[Trajectory, ...]
    left_out: int = 0
    samples: tuple[Group, ...] = ()
    answers: AnswerLosses | None = None

    @property
    def rewards(self) -> tuple[float, ...]:
        """The reward of every example, NaN where it could not be scored."""
        return _rewards(self.trajectories)

    @property
    def examples(self) -> str:
        """SHA-256 of the examples, in their order."""
        if self.answers is not None:
            return self.answers.examples
        return fingerprint(one.task for one in self.trajectories)

    @property
    def scores(self) -> Scores:
        """The rewards alone, which `compare` takes as well."""
        return Scores(self.examples, self.rewards, tuple(map(_rewards, self.samples)), self.answers)

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

        A reward that falls short of `success` by rounding is there. pass@k: of the samples, for k = 1, 2, 4, ... and
        their number. unscored: how many examples could not be scored; where there are some, failures: which function
        failed how often for which reason, and warning: that in words.
        Where answers of the data were scored, loss, perplexity and answer_tokens; without rewards these alone.
        """
        if self.answers is not None and not self.trajectories:
            left_out = {"left_out": self.left_out} if self.left_out else {}
            return {**self.answers.summary(), "n": len(self.answers.losses), **left_out}
        rewards = [reward for reward in self.rewards if not math.isnan(reward)]
        found: dict[str, Any] = {
            "accuracy": fmean(succeeds(reward, success) for reward in rewards) if rewards else math.nan,
            "mean_reward": fmean(rewards) if rewards else math.nan,
            **self._passes(success),
            "n": len(rewards),
            "unscored": len(self.rewards) - len(rewards),
            **(self.answers.summary() if self.answers else {}),
            **({"left_out": self.left_out} if self.left_out else {}),
        }
        if self.warning:
            failures = [asdict(one) for one in failures_of(self.trajectories)]
            found |= {"failures": failures, "warning": self.warning}
        return found

    def _passes(self, success: float) -> dict[str, Any]:
        """pass@k by its name, and how many samples could not be scored where there are some."""
        if not self.samples:
            return {}
        samples, most = self.scores.samples, len(self.samples[0])
        unscored = sum(math.isnan(reward) for one in samples for reward in one)
        counts = [k for power in range(most.bit_length()) if (k := 2**power) < most] + [most]
        passes = {f"pass@{k}": pass_at(k, samples, success) for k in counts}
        return {**passes, **({"samples_unscored": unscored} if unscored else {})}


def _rewards(trajectories: Sequence[Trajectory]) -> tuple[float, ...]:
    return tuple(one.reward if math.isfinite(one.reward) else math.nan for one in trajectories)


@keywords
def evaluate(
    policy: Policy,
    tasks: Sequence[Task] | Source,
    reward: RewardLike = None,
    *,
    sampling: Sampling = Sampling(temperature=0.0),
    samples: int = 0,
    samples_temperature: float = 1.0,
    environment: Factory | None = None,
    limits: EpisodeLimits = EpisodeLimits(),
    max_rows: int = 32,
    seed: int = 0,
    state: TrainerState = TrainerState(),
    turns: Turns | None = None,
    train: Train = Train(),
) -> Evaluation:
    """Complete every task once, greedily by default, and score the completions; then sample each k times more.

    Args:
        tasks: those of `mlxrl.tasks`, or what that reads; prompts that fill the model's context are left out.
        reward: may be left out where an environment gives the rewards; what its settings shape is not shaped here.
        samples: k, of each task, for pass@k; 0 for none. samples_temperature: at which they are drawn.
        environment, limits, max_rows: see `sample`.
        seed: from which everything random follows: two evaluations draw with the same keys.
        state: what functions learn of a run.
        turns: also the loss on the answers of the data, as `sft` has it; then completions are for a reward alone.
        train: `max_tokens_per_sequence` and `tokens_per_pass` for that.
    """
    if tasks in ([], ()):
        raise UserError("evaluate", "wanted at least one task, got none")
    samples = checked_value("evaluate", "samples", Samples, samples)
    samples_temperature = checked_value("evaluate", "samples_temperature", Warm, samples_temperature)
    tasks, rewards, answers = as_tasks(tasks, whole=turns is not None), rewards_of(reward), None
    if turns is not None:
        rules = rules_for(policy.model, turns, sampling.thinking, train.max_tokens_per_sequence)
        learned = learnable(policy, tasks, rules)
        answers = answer_losses(policy, learned.tasks, rules, train)
        if not rewards.functions and environment is None:
            return Evaluation((), learned.left_out, answers=answers)
        tasks = all_asked(tasks)
    fitted = fitting_prompts(policy, tasks, sampling, environment)
    if environment is not None and not rewards.functions and not gives_rewards(environment):
        why = "wanted at least one function, got none; the environment gives no rewards"
        raise UserError("evaluate", "reward", why)
    tell_missing(rewards, tasks)
    draw = partial(sample, policy, fitted.tasks, max_rows=max_rows, environment=environment, limits=limits)
    once = _scored(draw(group_size=1, sampling=sampling, key=key_of(seed, 0)), rewards, state)
    further: Sequence[Group] = ()
    if samples:
        warm = replace(sampling, temperature=samples_temperature)
        further = _scored(draw(group_size=samples, sampling=warm, key=key_of(seed, 1)), rewards, state)
    return Evaluation(tuple(group[0] for group in once), fitted.left_out, tuple(further), answers)


def _scored(groups: Sequence[Group], rewards: Rewards, state: TrainerState) -> Sequence[Group]:
    require_finite(groups, "evaluation")
    scored, fault = attempt(groups, rewards, state)
    if fault is not None:
        raise fault
    return require_scores(scored)
