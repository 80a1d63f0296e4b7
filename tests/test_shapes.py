"""Shapes that annotations name are checked in every test, of types, algo and policy; here, that faults are found."""

import mlx.core as mx
import pytest
from jaxtyping import TypeCheckError

from mlxrl.algo import losses, reduce
from mlxrl.algo.losses import Clipped
from mlxrl.types import Logprobs, MicroBatch, Totals

WIDE, ROWS, ONE = mx.zeros((2, 3)), mx.zeros((3, 3)), mx.zeros((2, 1))


def test_a_wrong_shape_is_found() -> None:
    assert losses.log_ratio(WIDE, WIDE, WIDE).shape == (2, 3)
    with pytest.raises(TypeCheckError, match="log_ratio"):
        losses.log_ratio(WIDE, ROWS, WIDE)
    with pytest.raises(TypeCheckError, match="importance"):
        losses.importance(WIDE, WIDE, ONE)
    with pytest.raises(TypeCheckError, match="token_mean"):
        reduce.token_mean(ROWS, WIDE, Totals(1, 1, 1, 1))


def test_one_value_a_sequence_is_a_value_for_all_of_its_tokens() -> None:
    assert Clipped()(WIDE, WIDE, ONE, WIDE).loss.shape == (2, 3)
    with pytest.raises(TypeCheckError, match="__call__"):
        Clipped()(WIDE, WIDE, WIDE, ONE)


def test_another_type_is_found() -> None:
    with pytest.raises(TypeCheckError):
        losses.lengths(mx.zeros((2, 3), mx.int32))


def test_the_fields_of_what_travels_are_found_too() -> None:
    ids = mx.zeros((2, 3), mx.int32)
    assert MicroBatch(ids[0, :0], ids, WIDE, WIDE, WIDE).mask.shape == (2, 3)
    with pytest.raises(TypeCheckError, match="advantages"):
        MicroBatch(ids[0, :0], ids, WIDE, ROWS, WIDE)
    with pytest.raises(TypeCheckError, match="tokens"):
        MicroBatch(ids[0, :0], WIDE, WIDE, WIDE, WIDE)
    with pytest.raises(TypeCheckError, match="top_logprobs"):
        Logprobs(WIDE, top_logprobs=WIDE)
