"""Rewards shaped before they are credited, and groups that teach nothing."""

from __future__ import annotations

import numpy as np
import pytest

from helpers import close, group, trajectory
from mlxrl import algo
from mlxrl.algo import shaping

NAN = float("nan")


def test_overlong_penalty() -> None:
    # limit 10, buffer 4: free up to 6, then 1/4 a token, 1 at 10; beyond, only a cap stops it
    assert [shaping.overlong_penalty(n, 10, 4) for n in (3, 6, 7, 10, 12)] == [0, 0, -0.25, -1, -1.5]
    assert shaping.overlong_penalty(12, 10, 4, cap=1.0) == -1
    shaped = shaping.shape_overlong([(trajectory(1.0, tokens=7), trajectory(0.0, tokens=2))], 10, 4)
    assert [row.reward for row in shaped[0]] == [0.75, 0.0]
    assert shaped[0][0].rewards == {"shaping/overlong": -0.25}
    # parts of a reward, those of shaping included, are each on a scale of their own
    close(np.concatenate(algo.grpo(scale="function", eps=0.0).advantages(shaped)), [-(0.5**0.5), 0.5**0.5])


def test_length_penalty() -> None:
    # mean 0.5, longest 4: less 0.5 * 0.2 * (4/4, 2/4); a group of mean 0 loses nothing
    groups = [(trajectory(1.0, tokens=4), trajectory(0.0)), (trajectory(0.0, tokens=4), trajectory(0.0))]
    shaped = shaping.shape_length(groups, 0.2)
    close([row.reward for group in shaped for row in group], [0.9, -0.05, 0.0, 0.0])
    assert shaped[0][1].rewards == {"shaping/length": pytest.approx(-0.05)}
    assert shaped[0][1].weights == {"shaping/length": 1.0}


def test_a_length_penalty_never_pays_for_length() -> None:
    for rewards in ([-1.0, -1.0, -1.0], [1.0, -1.0, -1.0], [1.0, 1.0, -1.0], [-0.5, 0.0, 0.5]):
        made = tuple(trajectory(reward, tokens=n) for reward, n in zip(rewards, (1, 9, 4), strict=True))
        (shaped,) = shaping.shape_length([made], 0.5)
        lost = [reward - one.reward for reward, one in zip(rewards, shaped, strict=True)]
        assert min(lost) >= 0
        assert max(lost) == lost[1]


def test_keep_varied() -> None:
    groups = [group(0.1, 0.1, 0.1), group(0.0, 1.0), group(NAN, 1.0), group(0.6, 0.1 + 0.2 + 0.3)]
    assert shaping.keep_varied(groups) == [groups[1]]
