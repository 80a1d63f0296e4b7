"""The loss on answers that held-out data hold, and its paired difference between two evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlxrl.algo.recipes import sft
from mlxrl.algo.reduce import perplexity
from mlxrl.policy.logprobs import logprobs
from mlxrl.policy.modes import scoring
from mlxrl.policy.policy import Policy
from mlxrl.policy.prefix import with_prefix_runs
from mlxrl.rollout.demonstrations import Rules, demonstration
from mlxrl.settings import Train
from mlxrl.train.batch import make_batch
from mlxrl.types import Task

RESAMPLES = 10_000


@dataclass(frozen=True, slots=True)
class AnswerLosses:
    """losses: the cross-entropy in nats of each example's answers, summed over their tokens; tokens: how many."""

    losses: tuple[float, ...]
    tokens: tuple[int, ...]

    def summary(self) -> dict[str, Any]:
        """loss: the mean over all tokens; perplexity: its exponential; answer_tokens: how many."""
        loss = sum(self.losses) / sum(self.tokens)
        return {"loss": loss, "perplexity": perplexity(loss), "answer_tokens": sum(self.tokens)}


def answer_losses(policy: Policy, tasks: Sequence[Task], rules: Rules, train: Train = Train()) -> AnswerLosses:
    """Score the answers of every task, with the passes that training takes, without dropout."""
    groups = [(demonstration(policy.tokenizer, task, rules),) for task in tasks]
    batch, losses = make_batch(groups, sft(), train), np.zeros(len(tasks))
    with scoring(policy):
        for one, run in with_prefix_runs(policy, batch.micro_batches):
            found = logprobs(policy, one, gradient=False, prefix=run).token_logprobs
            mx.eval(found)  # the pass's activations end here
            np.subtract.at(losses, list(one.trajectories), np.array(found, np.float64).sum(axis=1))
    return AnswerLosses(tuple(losses.tolist()), tuple(trajectory.num_sampled for (trajectory,) in groups))


def loss_difference(before: AnswerLosses, after: AnswerLosses, seed: int = 0) -> Mapping[str, Any]:
    """Loss after minus before on the same answers, with the 95 % interval of a bootstrap over the examples."""
    changes, tokens = np.subtract(after.losses, before.losses), np.array(before.tokens)
    draws = np.random.default_rng(seed).integers(len(tokens), size=(RESAMPLES, len(tokens)))
    low, high = np.percentile(changes[draws].sum(axis=1) / tokens[draws].sum(axis=1), [2.5, 97.5])
    return {"loss_difference": changes.sum() / tokens.sum(), "loss_interval": [float(low), float(high)]}
