"""Several optimizer steps out of one rollout: the groups of a batch split into minibatches."""

from __future__ import annotations

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_map

from helpers import a_policy, assert_same_gradient, made, rows
from mlxrl.algo.credit import Whiten
from mlxrl.algo.recipes import dapo, grpo
from mlxrl.policy.logprobs import logprobs
from mlxrl.train.batch import make_batch
from mlxrl.train.gradient import gradient
from mlxrl.train.minibatches import minibatches
from mlxrl.train.update import complete, update
from mlxrl.types import Batch, Group

ARRAYS = ("tokens", "mask", "advantages", "sampler_logprobs")


def some_groups() -> list[Group]:
    """Five groups, two of which share their prompt in a pass of their own, and one of which has no signal."""
    return [
        made([1.0, 0.0, 0.5], prompt=90, seed=0, lengths=[3, 5, 4]),
        made([0.0, 1.0, 1.0], prompt=6, seed=1, lengths=[2, 2, 7]),
        made([0.5, 0.5, 0.5], prompt=6, seed=2, lengths=[3, 3, 3]),
        made([0.0, 0.0, 1.0], prompt=80, seed=3, lengths=[2, 3, 2]),
        made([1.0, 0.0, 0.0], prompt=5, seed=4, lengths=[4, 2, 1]),
    ]


def by_trajectory(batch: Batch, name: str) -> dict[int, list[float]]:
    """By the number of a trajectory, the values of the tokens that the model chose."""
    return {number: values.tolist() for number, values in rows(batch, name).items()}


def test_minibatches_are_the_groups_split_with_all_that_was_computed_for_them():
    p, algorithm = a_policy(), grpo()
    whole = complete(p, make_batch(some_groups(), algorithm), algorithm, frozenset({"old"}))
    for count in (2, 3, 5, 9):
        split = minibatches(whole, count, "0:0:0")
        assert sorted(len(part.groups) for part in split) == sorted(
            len(own) for own in np.array_split(range(5), min(count, 5))
        )
        for name in (*ARRAYS, "old_logprobs"):
            seen: dict[int, list[float]] = {}
            for part in split:
                found = by_trajectory(part, name)
                assert not seen.keys() & found.keys()
                seen |= found
            assert seen == by_trajectory(whole, name)
        assert sum(part.totals.tokens for part in split) == whole.totals.tokens
        assert sum(part.totals.sequences for part in split) == 15
        # Three of the group without signal, and the reward of 0.5 that is the mean of its group.
        assert sum(part.totals.without_signal for part in split) == whole.totals.without_signal == 4
        largest = max(m.tokens.size + m.prefix.size for m in whole)
        assert all(m.tokens.size + m.prefix.size <= largest for part in split for m in part)
    assert minibatches(whole, 1, "0:0:0") == [whole]


def test_how_groups_are_split_follows_from_the_key():
    whole = make_batch(some_groups(), grpo())

    def order(key: str) -> str:
        return str([[group[0].prompt for group in part.groups] for part in minibatches(whole, 2, key)])

    assert order("0") == order("0")
    assert len({order(str(key)) for key in range(6)}) > 1


def test_gradients_of_minibatches_are_those_of_their_groups_alone():
    """Each optimizer step divides by the tokens of its own groups: weighted by them, they add up to the whole."""
    p, algorithm = a_policy(), dapo(scale="none")
    whole = make_batch(some_groups(), algorithm)
    wanted = gradient(p, whole, algorithm)[1]
    split = minibatches(whole, 2, "0")
    shares = [part.totals.tokens / whole.totals.tokens for part in split]
    found = [gradient(p, part, algorithm)[1] for part in split]
    scaled = [tree_map(lambda leaf, share=share: leaf * share, tree) for tree, share in zip(found, shares, strict=True)]
    assert_same_gradient(tree_map(mx.add, *scaled), wanted)
    # Statistics of the batch are those of the whole batch, and go with the sequences.
    whitened = make_batch(some_groups(), dapo(whiten=Whiten()))
    values = np.concatenate(list(by_trajectory(whitened, "advantages").values()))
    assert abs(values.mean()) < 1e-6
    part = minibatches(whitened, 2, "0")[0]
    assert by_trajectory(part, "advantages").items() <= by_trajectory(whitened, "advantages").items()


def test_old_logprobs_are_those_from_before_the_first_update_in_every_minibatch_of_every_epoch():
    p, algorithm, optimizer = a_policy(), grpo(), optim.SGD(0.5)
    whole = complete(p, make_batch(some_groups(), algorithm), algorithm, frozenset({"old"}))
    old = by_trajectory(whole, "old_logprobs")
    for epoch in range(2):
        for number, part in enumerate(minibatches(whole, 2, f"0:0:{epoch}")):
            for m in part:
                new = logprobs(p, m).token_logprobs
                drift = mx.abs(new - m.old_logprobs).max().item()
                assert drift < 1e-5 if (epoch, number) == (0, 0) else drift > 1e-3
            assert by_trajectory(part, "old_logprobs").items() <= old.items()
            metrics = update(p, optimizer, part, algorithm, max_grad_norm=1e9)
            if (epoch, number) != (0, 0):
                assert metrics["ratio/max"] > 1.01
