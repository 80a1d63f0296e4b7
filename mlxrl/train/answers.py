"""The loss on the answers that held-out data hold."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlxrl.algo.recipes import sft
from mlxrl.data import fingerprint
from mlxrl.policy.logprobs import logprobs
from mlxrl.policy.modes import scoring
from mlxrl.policy.policy import Policy
from mlxrl.policy.prefix import with_prefix_runs
from mlxrl.rollout.demonstrations import Rules, demonstration
from mlxrl.settings import Train
from mlxrl.train.batch import make_batch
from mlxrl.train.comparison import AnswerLosses
from mlxrl.types import Task


def answer_losses(policy: Policy, tasks: Sequence[Task], rules: Rules, train: Train = Train()) -> AnswerLosses:
    """Score the answers of every task, with the passes that training takes, without dropout."""
    groups = [(demonstration(policy.tokenizer, task, rules),) for task in tasks]
    batch, losses = make_batch(groups, sft(), train), np.zeros(len(tasks))
    with scoring(policy):
        for one, run in with_prefix_runs(policy, batch.micro_batches):
            found = logprobs(policy, one, gradient=False, prefix=run).token_logprobs
            mx.eval(found)  # the pass's activations end here
            np.subtract.at(losses, list(one.trajectories), np.array(found, np.float64).sum(axis=1))
    tokens = tuple(trajectory.num_sampled for (trajectory,) in groups)
    return AnswerLosses(fingerprint(tasks), tuple(losses.tolist()), tokens)
