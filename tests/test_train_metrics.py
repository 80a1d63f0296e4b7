"""What a step reports of its groups and updates, and what went wrong in words."""

from __future__ import annotations

import dataclasses
import math

import pytest

from helpers import made
from mlxrl.train.metrics import Diverged, averaged, describe, require_finite, warnings_of
from mlxrl.types import Group


def scored(rewards: list[float]) -> Group:
    """A group of which a function "f" gave the rewards; completions of 3, 4, ... tokens."""
    return tuple(dataclasses.replace(one, rewards={"f": one.reward}) for one in made(rewards))


def test_metrics_of_groups():
    """Rewards 1, 0, 0.5 and 0.25, 0.25, none: deviations (n-1) of 0.5 and 0 in the groups."""
    found = describe([scored([1.0, 0.0, 0.5]), scored([0.25, 0.25, math.nan])])
    assert found["reward"] == pytest.approx(2.0 / 5)
    assert found["reward_std"] == pytest.approx(0.25)
    assert found["rewards/f/mean"] == pytest.approx(2.0 / 5)
    assert (found["rewards/unscored"], found["groups/sampled"], found["groups/zero_variance"]) == (1, 2, 1)
    assert found["frac_reward_zero_std"] == 0.5
    assert (found["completions/mean_length"], found["rollout/tokens"]) == (4, 24)
    assert "episodes/turns" not in found


def test_metrics_of_several_updates():
    one = {"ratio/mean": 1.0, "ratio/max": 1.0, "grad_norm": 2.0, "updates/skipped": 0.0}
    two = {"ratio/mean": 3.0, "ratio/max": 5.0, "grad_norm": math.nan, "updates/skipped": 1.0}
    idle = {"grad_norm": 0.0, "updates/skipped": 0.0}
    got = averaged([one, two, idle])
    assert (got["ratio/mean"], got["ratio/max"]) == (2.0, 5.0)
    assert (got["updates"], got["updates/skipped"]) == (1.0, 1.0)
    assert averaged([])["updates"] == 0


def test_warnings_say_what_was_not_trained_on():
    failed = dataclasses.replace(made([1.0])[0], stop="error", error="KeyError: 'x'", close_error="OSError: gone")
    metrics = {
        "rewards/unscored": 2.0, "sequences/dropped_tokens": 20.0, "updates": 0.0, "updates/skipped": 0.0,
        "rollout/rounds": 3.0, "groups/sampled": 12.0,
    }  # fmt: skip
    assert warnings_of(metrics, [failed]) == (
        "1 episodes ended because their environment failed, the first: KeyError: 'x'",
        "1 environments could not be closed, the first: OSError: gone",
        "20 sampled tokens were not trained on: they are beyond train.max_tokens_per_sequence, or come from a token on "
        "that the teacher does not have",
        "2 completions could not be scored and are left out",
        "none of 12 groups in 3 rounds has a learning signal; no update",
    )
    assert warnings_of({**metrics, "updates/skipped": 1.0}, [])[-1] == (
        "loss or gradient was not finite; the update was skipped"
    )
    assert warnings_of({"updates": 1.0}, made([1.0])) == ()


def test_logits_that_are_not_finite_anywhere_end_the_run():
    group = made([0.0, 0.0])
    broken = tuple(dataclasses.replace(one, stop="error") for one in group)
    require_finite([(group[0], broken[1])], "step 3")
    with pytest.raises(Diverged, match="step 3: the model's logits were not finite in any of 2 completions"):
        require_finite([broken], "step 3")
