"""The shapes that the annotations of `mlxrl.algo` say are checked in every test; here, that the check finds faults."""

import mlx.core as mx
import pytest
from jaxtyping import TypeCheckError

from mlxrl.algo import losses, reduce
from mlxrl.algo.losses import Clipped
from mlxrl.types import Totals

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
