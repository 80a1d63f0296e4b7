"""From groups to advantages: baselines and credits on numbers worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from helpers import close, group, trajectory
from mlxrl import algo
from mlxrl.algo import advantages
from mlxrl.algo.credit import Whiten
from mlxrl.algo.terms import reward_to_go
from mlxrl.checked import SettingError
from mlxrl.types import TokenDetails, Trajectory, Turn
from oracles import extra

NAN = float("nan")


def test_group_relative() -> None:
    # mean 0.5, std sqrt(4 * 0.25 / 3) = 0.5773503: 0.5 / (0.5773503 + 1e-6) = 0.8660239
    # the second group: mean 2, no std; NaN is out of it
    rewards, ids = [1.0, 3.0, 0.0, NAN, 0.0, 1.0, 1.0], [0, 1, 0, 1, 0, 0, 1]
    close(advantages.group_relative(rewards, ids)[[0, 2, 4, 5]], [0.8660239, -0.8660239, -0.8660239, 0.8660239])
    close(advantages.group_relative(rewards, ids, "none"), [0.5, 1.0, -0.5, 0.0, -0.5, 0.5, -1.0])


@pytest.mark.parametrize("eps", [0.0, 1e-9, 1e-6])
def test_equal_rewards_have_no_advantage(eps: float) -> None:
    """0.1 is no binary fraction: the mean of eight differs from it, and that noise over a small eps is of order 10."""
    rewards, ids = [0.1] * 7, [0] * 7
    assert np.mean(rewards) != 0.1
    for found in (
        advantages.group_relative(rewards, ids, "group", eps),
        advantages.group_relative(rewards, ids, "batch", eps),
        advantages.leave_one_out(rewards, ids),
        advantages.relative_to_mean(rewards, ids),
        extra.pass_at_k(rewards, ids),
        extra.gpg(rewards, ids),
        extra.optimal_baseline(rewards, ids, [1, 2, 3, 4, 5, 6, 7]),
        Whiten()([0.1] * 7),
    ):
        assert (found == 0).all()


def test_leave_one_out() -> None:
    # others' means: 1 - (0+2)/2 = 0; 0 - 3/2 = -1.5; 2 - 1/2 = 1.5
    close(advantages.leave_one_out([1.0, 0.0, 2.0], [0, 0, 0]), [0.0, -1.5, 1.5])


def test_other_baselines() -> None:
    # mean 0.5: max_rl (1-0.5)/0.5 = 1; pass@k: lead 1 over std sqrt(0.5) = 1.4142, none for the loser
    # lengths 3 and 1: baseline 3/4; gpg: 2 trajectories, 1 of them rewarded: 2 * 0.5
    pair, ids = [1.0, 0.0], [0, 0]
    close(advantages.relative_to_mean(pair, ids), [1.0, -1.0])
    close(extra.pass_at_k(pair, ids, 0.0), [math.sqrt(2), 0.0])
    close(extra.optimal_baseline(pair, ids, [3, 1]), [0.25, -0.75])
    close(extra.gpg(pair, ids), [1.0, -1.0])


def test_max_rl_refuses_what_it_is_not_defined_for() -> None:
    close(algo.max_rl().advantages([group(1.0, 0.0, NAN)])[0], [1.0, -1.0, 0.0])
    for rewards in ((1.0, -1.0, -1.0, -1.0), (1.0, -0.99), (-0.25, 0.5)):
        with pytest.raises(SettingError, match=rf"max_rl: reward: .* at least 0, .* got {min(rewards):.6g};"):
            algo.max_rl().advantages([group(1.0, 0.0), group(*rewards)])


def test_a_reward_without_a_baseline_is_its_advantage() -> None:
    """OpenClaw's are -1, 0 and 1, of single completions."""
    recipe = algo.build({"name": "opd", "convention": "openclaw", "teacher_surrogate": {}})
    assert recipe.compares == "nothing"
    assert recipe.advantages([group(-1.0), group(1.0), group(0.0), group(NAN), group(1.0, 1.0)]) == [
        [-1.0], [1.0], [0.0], [0.0], [1.0, 1.0],
    ]  # fmt: skip
    (term,) = recipe.terms
    assert (term.gap_clamp, term.log_ratio_clamp, term.clip) == ((-1.0, 1.0), (-20.0, 20.0), (0.2, 0.28))
    with pytest.raises(SettingError, match=r"eps: has no effect, because scale is 'raw'"):
        algo.grpo(scale="raw", eps=1e-4)


def test_credit_of_groups() -> None:
    """Groups keep their shape; a truncated row can be masked; the same prompt twice stays two groups."""
    groups = [group(1.0, 0.0), group(3.0, 3.0), (trajectory(0.0, stop="length"), trajectory(2.0), trajectory(NAN))]
    close(np.concatenate(algo.dr_grpo().advantages(groups)), [0.5, -0.5, 0.0, 0.0, -1.0, 1.0, 0.0])
    masked = algo.dr_grpo(mask_truncated=True).advantages(groups)
    assert masked == [[0.5, -0.5], [0.0, 0.0], [0.0, 1.0, 0.0]]


def test_reward_functions_on_their_own_scales() -> None:
    # f: 0 100 | 100 100, g: 1 0 | 0 None, weights 1 and 2. Pairs that differ are -+ 1/sqrt(2) = 0.7071068, others 0:
    # z = (-s + 2 s, s - 2 s, 0, 0) = (s, -s, 0, 0), mean 0, std sqrt(2 s^2 / 3) = 0.5773503: A = 1.2247449
    # The sum is all about f: rewards 2 and 100.
    def scored(f: float, g: float) -> Trajectory:
        reward = f + 2 * (0.0 if math.isnan(g) else g)
        return replace(trajectory(reward), rewards={"f": f, "g": g}, weights={"f": 1.0, "g": 2.0})

    groups = [(scored(0.0, 1.0), scored(100.0, 0.0)), (scored(100.0, 0.0), scored(100.0, NAN))]
    found = algo.grpo(scale="function", eps=0.0).advantages(groups)
    close(np.concatenate(found), [1.2247449, -1.2247449, 0.0, 0.0])
    assert algo.grpo().advantages(groups)[0][0] < 0
    # a trajectory that could not be scored is out of every part
    failed = [(*groups[0], replace(scored(50.0, 0.5), reward=NAN)), groups[1]]
    close(np.concatenate(algo.grpo(scale="function", eps=0.0).advantages(failed))[:3], [1.2247449, -1.2247449, 0.0])
    with pytest.raises(ValueError, match="wants the parts of the rewards"):
        algo.grpo(scale="function").advantages([group(1.0, 0.0)])


def test_advantages_whitened_over_tokens() -> None:
    # advantages 0.5 on 1 token and -0.5 on 3, the unscored one's 2 tokens left out: mean -0.25,
    # variance (0.5625 + 3 * 0.0625) / 3 = 0.25: 1.5 and -0.5
    groups = [(trajectory(1.0, tokens=1), trajectory(0.0, tokens=3), trajectory(NAN))]
    close(algo.dr_grpo(whiten=Whiten(eps=0.0)).advantages(groups), [[1.5, -0.5, 0.0]])
    close(algo.rloo(whiten=Whiten(eps=0.0)).advantages(groups), [[1.5, -0.5, 0.0]])
    # divided by n: variance 0.1875
    found = algo.dr_grpo(whiten=Whiten(eps=0.0, ddof=0)).advantages(groups)
    close(found[0][:2], [0.75 / 0.1875**0.5, -0.25 / 0.1875**0.5])
    # tokens that were forced on the model are not counted
    turn = Turn((1,), (2,) * 5, (-1.0,) * 5, details=TokenDetails(forced=(0, 4)))
    forced = [(groups[0][0], replace(groups[0][1], turns=(turn,)), groups[0][2])]
    close(algo.dr_grpo(whiten=Whiten(eps=0.0)).advantages(forced), [[1.5, -0.5, 0.0]])


def test_batch_scale() -> None:
    # rewards 0 1 | 0 3: centred -.5 .5 -1.5 1.5; std of 0 1 0 3 over n-1: mean 1, (1 + 0 + 1 + 4) / 3 = 2
    found = algo.grpo(scale="batch", eps=0.0).advantages([group(0.0, 1.0), group(0.0, 3.0)])
    close(found, np.array([[-0.5, 0.5], [-1.5, 1.5]]) / math.sqrt(2))


def test_reinforce_pp_credits_tokens() -> None:
    # rewards 1 and -1 on the last of 2 tokens, gamma 0.5: returns 0.5 1 | -0.5 -1
    # mean 0, variance (0.25+1+0.25+1)/3 = 0.8333, 1/sqrt = 1.0954451
    found = algo.reinforce_pp(gamma=0.5).advantages([(trajectory(1.0), trajectory(-1.0))])
    close(found[0][0], [0.5477226, 1.0954451])
    close(found[0][1], [-0.5477226, -1.0954451])


def test_gigpo_credits_steps() -> None:
    # rewards 1 and 0: A_E = 0.5 and -0.5. gamma 0.5: returns of the first 0.5, 1, of the second 0, 0.
    # state "a" is shared: (0.5, 0) around 0.25 gives A_S = 0.25 and -0.25; "b" and "c" are alone: 0
    first = trajectory(1.0, turns=[("a", 0.0, 1), ("b", 1.0, 2)])
    second = trajectory(0.0, turns=[("a", 0.0, 2), ("c", 0.0, 1)])
    found = algo.gigpo(gamma=0.5).advantages([(first, second)])
    close(found[0][0], [0.75, 0.5, 0.5])
    close(found[0][1], [-0.75, -0.75, -0.5])
    # a token that was forced on the model gets nothing
    forced = replace(second, turns=(replace(second.turns[0], details=TokenDetails(forced=(1,))), second.turns[1]))
    close(algo.gigpo(gamma=0.5).advantages([(first, forced)])[0][1], [-0.75, -0.5])
    # the reward of the whole trajectory comes with its last turn where the turns do not have it
    late = replace(first, turns=tuple(replace(turn, reward=0.0) for turn in first.turns))
    assert algo.gigpo(gamma=0.5).advantages([(late, second)]) == found


def test_returns() -> None:
    # R_t = r_t + 0.5 R_{t+1}: 1 + 0.5 (2 + 0.5 * 4) = 3
    close(reward_to_go(mx.array([[1.0, 2.0, 4.0]]), 0.5), [[3.0, 4.0, 4.0]])
    close(reward_to_go(mx.ones((1, 5))), [[5.0, 4.0, 3.0, 2.0, 1.0]])
    # a token of a tool's output, masked, costs a factor or not
    close(extra.returns([[0, 9, 1]], [[1, 0, 1]], 0.5)[0, 0], 0.25)
    close(extra.returns([[0, 9, 1]], [[1, 0, 1]], 0.5, skip_masked=True)[0, 0], 0.5)


@pytest.mark.parametrize("name", [name for name in algo.RECIPES if name not in ("reinforce_pp", "opd", "sft")])
def test_a_group_of_one_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: group 1: wanted at least 2 .* got 1; raise group_size"):
        algo.RECIPES[name]().advantages([group(1.0, 0.0), group(1.0)])


def test_reinforce_pp_needs_no_group() -> None:
    # returns 1 1 | 0 0 of two tokens each: mean 0.5, variance 4 * 0.25 / 3 = 1/3
    found = algo.reinforce_pp(whiten=Whiten(eps=0.0)).advantages([group(1.0), group(0.0)])
    close(found, np.array([[[0.5, 0.5]], [[-0.5, -0.5]]]) * math.sqrt(3))


@pytest.mark.parametrize("name", [name for name in algo.RECIPES if name != "sft"])
def test_unscorable_trajectories_are_left_out(name: str) -> None:
    """NaN rewards change nobody else's advantage and have 0; groups that cannot be scored at all have 0 too."""
    known = algo.RECIPES[name]().advantages([group(1.0, 0.0, 0.5)])[0]
    found = algo.RECIPES[name]().advantages([group(1.0, 0.0, 0.5, NAN), group(NAN, NAN)])
    for got, want in zip(found[0], [*known, 0.0], strict=True):
        close(got, want if isinstance(got, float) else np.broadcast_to(want, np.shape(got)))
    assert not np.any(found[1])


@pytest.mark.parametrize(
    ("algorithm", "uses", "compares"),
    [
        (algo.grpo(), True, "group"), (algo.gigpo(), True, "group"), (algo.reinforce_pp(), True, "step"),
        (algo.reinforce_pp_baseline(), True, "group"), (algo.opd(), False, "nothing"),
        (algo.opd(reward=0.5), True, "group"),
    ],
)  # fmt: skip
def test_a_credit_declares_what_it_looks_at(algorithm, uses, compares) -> None:
    assert ("reward" in algorithm.needs, algorithm.compares) == (uses, compares)


def test_rewards_are_equal_up_to_rounding() -> None:
    for noise in ([0.6, 0.1 + 0.2 + 0.3], [0.0, 0.1 + 0.2 - 0.3], [1e20, 1e20 + 1e5], [-0.3, -(0.1 + 0.2)]):
        assert advantages.all_equal(noise)
        for name in ("grpo", "dr_grpo", "rloo", "reinforce_pp", "gigpo", *(["max_rl"] if min(noise) >= 0 else [])):
            (found,) = getattr(algo, name)().advantages([group(*noise)])
            assert not any(np.any(one) for one in found)
        assert advantages.spread(np.array(noise)) == 0.0
    for different in ([1e-6, 2e-6], [1000.0, 1000.001], [0.0, 1e-9]):
        assert not advantages.all_equal(different)
        assert np.all(advantages.leave_one_out(different, [0, 0]))
    assert advantages.weighted_sum([[1.0, 1.0, 1.0]], [0.7, 0.2, 0.1]).tolist() == [1.0]
