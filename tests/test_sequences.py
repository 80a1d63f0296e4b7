"""Trajectories as sequences of tokens, each with what the loss needs to know of every token."""

from __future__ import annotations

import dataclasses

import mlx.core as mx
import pytest

from helpers import made
from mlxrl.algo.recipes import gigpo, grpo, opd, reinforce_pp
from mlxrl.algo.terms import KL, TeacherSurrogate, TeacherTopK
from mlxrl.train.batch import make_batch
from mlxrl.types import Batch, TokenDetails, Trajectory, Turn

ARRAYS = ("tokens", "mask", "advantages", "sampler_logprobs")


def assert_same(first: Batch, second: Batch) -> None:
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert all(mx.array_equal(getattr(one, name), getattr(other, name)) for name in ARRAYS)


@pytest.mark.parametrize("prompt", [4, 90])
@pytest.mark.parametrize("recipe", [grpo, reinforce_pp, gigpo])
def test_a_forced_token_is_laid_out_like_one_that_was_read(recipe, prompt):
    group = made([1.0, 0.0], prompt=prompt, lengths=[4, 5])

    def split(one: Trajectory) -> Trajectory:
        (turn,) = one.turns
        head = dataclasses.replace(turn, tokens=turn.tokens[:1], logprobs=turn.logprobs[:1])
        return dataclasses.replace(one, turns=(head, Turn(turn.tokens[1:2], turn.tokens[2:], turn.logprobs[2:])))

    def forced(one: Trajectory) -> Trajectory:
        (turn,) = one.turns
        logprobs = (turn.logprobs[0], 0.0, *turn.logprobs[2:])
        return dataclasses.replace(
            one, turns=(dataclasses.replace(turn, details=TokenDetails(forced=(1,)), logprobs=logprobs),)
        )

    read, taken = (make_batch([tuple(map(change, group))], recipe()) for change in (split, forced))
    assert_same(read, taken)
    assert taken.totals == read.totals
    assert taken.totals.tokens == 3 + 4
    assert sum(float(m.mask.sum()) for m in taken) == 7
    assert forced(group[0]).length == 4


@pytest.mark.parametrize("prompt", [2, 90])
def test_top_ids_stand_beside_their_tokens(prompt):
    group = made([0.0, 0.0], prompt=prompt, lengths=[2, 1])
    kept = [((7, 8, 9), (5, 6, 4)), ((3, 2, 1),)]
    second = Turn((11, 12), (13,), (-1.0,), details=TokenDetails(top_ids=((20, 21, 22),)))
    first = dataclasses.replace(group[0].turns[0], details=TokenDetails(top_ids=kept[0]))
    long = dataclasses.replace(group[0], turns=(first, second))
    short = dataclasses.replace(
        group[1], turns=(dataclasses.replace(group[1].turns[0], details=TokenDetails(top_ids=kept[1])),)
    )
    algorithm = opd(teacher=TeacherSurrogate(k=2))
    (m,) = make_batch([(long, short)], algorithm)
    front = 0 if m.prefix.size else prompt
    assert m.trajectories == (1, 0)
    blank = [[0, 0]]
    assert m.top_ids[0].tolist() == blank * front + [[3, 2]] + blank * 4
    assert m.top_ids[1].tolist() == blank * front + [[7, 8], [5, 6]] + blank * 2 + [[20, 21]]
    assert next(iter(make_batch([(long, short)], grpo(terms=[KL(coefficient=0.1)])))).top_ids is None
    with pytest.raises(ValueError, match=r"4 most likely .* and 3 were kept; sample with Sampling\(num_top=4\)"):
        make_batch([(long, short)], opd(teacher=TeacherTopK(support="student", k=4)))
    with pytest.raises(ValueError, match="and 0 were kept"):
        make_batch([group], algorithm)
