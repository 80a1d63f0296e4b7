"""An algorithm of one's own: what it answers wrongly is one line."""

import sys

import mlx.core as mx
import pytest

import mlxrl as rl
from helpers import a_policy, made
from mlxrl.errors import UserError
from mlxrl.train.batch import make_batch
from mlxrl.train.gradient import gradient


class Own:
    name = "mine"
    needs = frozenset({"reward"})

    def __init__(self, advantages=None, loss=None):
        self.given = advantages, loss

    def advantages(self, groups):
        own = self.given[0]
        return [[1.0 for _ in group] for group in groups] if own is None else own(groups)

    def loss(self, new, batch, totals):
        own = self.given[1]
        return (new.token_logprobs.sum(), {}) if own is None else own(new, batch, totals)


GROUPS = (made([0.0, 1.0]), made([1.0, 0.0, 2.0], seed=1))
TOKENS = [[[0.5] * one.num_sampled for one in group] for group in GROUPS]
WANTED = (
    "mine: advantages: wanted for every trajectory of every group a number, or a list with one for each token that "
)


@pytest.mark.parametrize("found", [[[1.0, 2], [0.0, mx.array(1.0), 3.0]], TOKENS, ((1.0, 2.0), (1.0, 2.0, 3.0))])
def test_a_number_or_one_for_each_token_will_do(found):
    assert len(make_batch(GROUPS, Own(lambda groups: found))) > 0  # pyright: ignore


@pytest.mark.parametrize(
    ("found", "got"),
    [
        ([1.0, 2.0], "got 1.0 for group 0 of 2 trajectories"),
        ([1.0] * 5, "got [1.0, 1.0, 1.0, 1.0, 1.0] for 2 groups"),
        (None, "got nothing (null) for 2 groups"),
        ([[1.0, 2.0], [1.0]], "got [1.0] for group 1 of 3 trajectories"),
        ([[1.0, [2.0]], [1.0, 2.0, 3.0]], "got [1.0, [2.0]] for group 0 of 2 trajectories"),
        ([[1.0, "2"], [1.0, 2.0, 3.0]], 'got [1.0, "2"] for group 0 of 2 trajectories'),
        ([[1.0, None], [1.0, 2.0, 3.0]], "got [1.0, null] for group 0 of 2 trajectories"),
    ],
)
def test_advantages_of_another_shape_are_refused(found, got):
    with pytest.raises(UserError) as error:
        make_batch(GROUPS, Own(lambda groups: found))  # pyright: ignore
    assert str(error.value).startswith(WANTED)
    assert str(error.value).endswith(got)


def raising(*arguments):
    return arguments[0] * 2


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda new, *_: new.token_logprobs.sum(), "mine: loss: wanted a scalar array and a dict of metrics, got "),
        (
            lambda new, *_: (new.token_logprobs, {}),
            "mine: loss: wanted a scalar array and a dict of metrics, got an arr",
        ),
        (lambda *_: (0.0, {}), "mine: loss: wanted a scalar array and a dict of metrics, got [0.0, {}]"),
        (raising, "mine: loss: test_own.py, line "),
        (lambda new, *_: (mx.array(1.0) * new, {}), "mine: loss: test_own.py, line "),
        (lambda new, *_: (new.token_logprobs.sum(), {"a": "b"}), "mine: loss: metric 'a': wanted a number, got \"b\""),
        (lambda new, *_: (new.token_logprobs.sum(), {"a": mx.ones(2)}), "mine: loss: metric 'a': wanted a number, got"),
        (lambda *_: sys.exit(3), "mine: loss: test_own.py, line "),
    ],
)
def test_a_loss_of_another_shape_or_that_raises_is_refused(loss, message):
    policy = a_policy()
    batch = make_batch(GROUPS, own := Own(loss=loss))  # pyright: ignore
    with pytest.raises(UserError) as error:
        gradient(policy, batch, own)  # pyright: ignore
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)
    if loss is raising:
        assert str(error.value).endswith("; the log-probs are new.token_logprobs")


def test_a_part_of_a_composed_algorithm_that_raises_is_named_with_its_line():
    broken = rl.Algorithm("broken", rl.algo.credit.GroupRelative(), rl.algo.losses.Clipped(), lambda *_: 1 / 0)
    with pytest.raises(UserError, match=r"broken: loss: test_own\.py, line \d+: ZeroDivisionError"):
        gradient(a_policy(), make_batch(GROUPS, broken), broken)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        (
            {"needs": 5},
            "algorithm: mine: needs: wanted a set of reward, old, reference, teacher, entropy, top_ids, obs",
        ),
        ({"needs": {"rewards"}}, 'observations, got ["rewards"]'),
        ({"name": 5}, "algorithm: name: wanted a text, got 5"),
    ],
)
def test_members_that_say_nothing_are_refused(members, message):
    changed = type("Changed", (Own,), members)()
    with pytest.raises(UserError) as caught:
        rl.run(a_policy(), [rl.Task("a")], changed, steps=1, rollout=rl.Rollout(tasks_per_step=1))
    assert message in str(caught.value)
