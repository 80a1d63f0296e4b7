"""GiGPO on episodes of several turns, through credit, loss and gradient."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from helpers import a_policy, assert_same_gradient, close, made, trajectory
from mlxrl import algo
from mlxrl.train.batch import make_batch
from mlxrl.train.gradient import gradient
from mlxrl.types import Group, Trajectory, Turn


def episodes(seed: int, rewards: list[float], turns: int = 3) -> Group:
    """Episodes over one prompt, each of so many turns with random tokens, rewards and states."""
    draw = np.random.default_rng(seed)

    def longer(one: Trajectory) -> Trajectory:
        more = [
            Turn(tuple(draw.integers(9, 300, 3).tolist()), tuple(draw.integers(9, 300, 4).tolist()), (-1.0,) * 4)
            for _ in range(turns - 1)
        ]
        states = draw.integers(0, 3, turns).tolist()
        whole = (*one.turns, *more)
        return dataclasses.replace(
            one, turns=tuple(dataclasses.replace(t, state=s, reward=0.1) for t, s in zip(whole, states, strict=True))
        )

    return tuple(longer(one) for one in made(rewards, seed=seed))


def test_without_omega_it_is_grpo_averaged_over_tokens_to_the_gradient() -> None:
    p, groups = a_policy(), [episodes(1, [1.0, 0.0, 0.3]), episodes(2, [0.0, 1.0, math.nan], turns=2)]
    ours, plain = algo.gigpo(omega=0.0, scale="group"), algo.grpo(reduction="token_mean")
    for steps, whole in zip(
        [one for group in ours.advantages(groups) for one in group],
        [one for group in plain.advantages(groups) for one in group],
        strict=True,
    ):
        assert set(steps) == {whole}
    got, wanted = (gradient(p, make_batch(groups, a), a) for a in (ours, plain))
    assert got[0] == wanted[0]
    assert_same_gradient(got[1], wanted[1], 1e-9)


def test_equal_states_of_two_tasks_are_not_compared() -> None:
    """Rewards 1, 0 and 5, 3, all from state "s", gamma 1: A_E = A_S = +-0.5 and +-1. Over both tasks the mean of the
    returns would be 2.25."""
    groups = [
        (trajectory(1.0, turns=[("s", 1.0, 1)]), trajectory(0.0, turns=[("s", 0.0, 1)])),
        (trajectory(5.0, turns=[("s", 5.0, 1)]), trajectory(3.0, turns=[("s", 3.0, 1)])),
    ]
    for similarity in (None, 0.9):
        found = algo.gigpo(gamma=1.0, similarity=similarity).advantages(groups)
        close(found, [[[1.0], [-1.0]], [[2.0], [-2.0]]])


def test_rewards_of_turns_make_the_returns() -> None:
    """gamma 0.5. The first has rewards 0.2, 1 and 0.3 more at its end: returns 0.2 + 0.65 = 0.85 and 1.3. The second
    has 0 and 0: both meet in "a", (0.85, 0) around 0.425. A_E = 1.5 and 0 around 0.75."""
    first = trajectory(1.5, turns=[("a", 0.2, 1), ("b", 1.0, 1)])
    second = trajectory(0.0, turns=[("a", 0.0, 1), ("c", 0.0, 1)])
    found = algo.gigpo(gamma=0.5, omega=2.0).advantages([(first, second)])
    close(found, [[[0.75 + 0.85, 0.75], [-0.75 - 0.85, -0.75]]])


def test_a_state_met_twice_counts_twice() -> None:
    """One trajectory walks in a circle: a, a, then the reward 1, gamma 0.5: 0.5 and 1; the other gives up: 0. Mean 0.5.
    Without a standard deviation A_S = 0, 0.5, -0.5; with it over 0.5: 0, 1, -1."""
    circle, quits = trajectory(1.0, turns=[("a", 0.0, 1), ("a", 1.0, 1)]), trajectory(0.0, turns=[("a", 0.0, 1)])
    close(
        [x for one in algo.gigpo(gamma=0.5).advantages([(circle, quits)])[0] for x in one],
        [0.5, 0.5 + 0.5, -0.5 - 0.5],
    )
    # With it the episode's is over the std of (1, 0), sqrt(0.5).
    root = math.sqrt(0.5)
    close(
        [x for one in algo.gigpo(gamma=0.5, scale="group", eps=0.0).advantages([(circle, quits)])[0] for x in one],
        [0.5 / root, 0.5 / root + 1, -0.5 / root - 1],
    )


def test_statistics_over_trajectories_or_over_steps() -> None:
    """Rewards 1 of three turns and 0 of one: mean 0.5 over trajectories, 0.75 over steps."""
    long = trajectory(1.0, turns=[(None, 0.0, 1)] * 2 + [(None, 1.0, 1)])
    short = trajectory(0.0, turns=[(None, 0.0, 1)])
    close(algo.gigpo().advantages([(long, short)])[0][0], [0.5] * 3)
    found = algo.gigpo(episode_over="step").advantages([(long, short)])[0]
    close(found[0], [0.25] * 3)
    close(found[1], [-0.75])


def test_states_that_are_alike() -> None:
    """Of "you see a door" and "you see a dog": 12 of 14 and 13 letters match in order, 2 * 12 / 27 = 0.89."""
    first, second = (
        trajectory(1.0, turns=[("you see a door", 1.0, 1)]),
        trajectory(0.0, turns=[("you see a dog", 0.0, 1)]),
    )
    for similarity, credit in ((None, 0.5), (0.95, 0.5), (0.85, 1.0)):
        found = algo.gigpo(similarity=similarity).advantages([(first, second)])[0]
        close(found, [[credit], [-credit]])
    for wrong in (0.0, 1.5):
        with pytest.raises(ValueError, match="gigpo: similarity: wanted more than 0 and at most 1"):
            algo.gigpo(similarity=wrong)


@pytest.mark.parametrize("lost", [{"reward": math.nan}, {"stop": "error"}])
def test_a_trajectory_that_failed_changes_nothing(lost: dict[str, Any]) -> None:
    first = trajectory(1.0, turns=[("a", 0.0, 1), ("b", 1.0, 1)])
    second = trajectory(0.0, turns=[("a", 0.0, 1)])
    failed = dataclasses.replace(trajectory(9.0, turns=[("a", 4.0, 2), ("b", 5.0, 1)]), **lost)
    for settings in ({}, {"scale": "group"}, {"episode_over": "step"}, {"similarity": 0.9}):
        wanted = algo.gigpo(**settings).advantages([(first, second)])[0]
        assert algo.gigpo(**settings).advantages([(first, failed, second)])[0] == [wanted[0], [0.0] * 3, wanted[1]]
    # Alone beside failures there is nothing to compare with.
    assert algo.gigpo().advantages([(first, failed)])[0] == [[0.0, 0.0], [0.0] * 3]


def test_advantages_stand_on_the_tokens_of_their_turns() -> None:
    """Turns of 1 and 2 tokens with an observation of 1 token between: nothing stands on what was read."""
    first = trajectory(1.0, turns=[("a", 0.0, 1), ("b", 1.0, 2)])
    second = trajectory(0.0, turns=[("a", 0.0, 1), ("b", 0.0, 2)])
    (m,) = make_batch([(first, second)], algo.gigpo(gamma=0.5))
    assert m.trajectories == (0, 1)
    # A_E 0.5; in "a" (0.5, 0) gives 0.25, in "b" (1, 0) gives 0.5. The prompt of one token stands in front.
    close(m.advantages, np.array([[0, 0.75, 0, 1.0, 1.0], [0, -0.75, 0, -1.0, -1.0]]))
    assert mx.array_equal(m.mask, mx.array([[0, 1, 0, 1, 1]] * 2))
