"""Checkpoints: what the next step of a run needs."""

from __future__ import annotations

import json

import mlx.core as mx
import mlx.optimizers as optim
import pytest

from helpers import a_policy, flat, made
from mlxrl.algo.recipes import grpo
from mlxrl.train import checkpoint
from mlxrl.train.batch import make_batch
from mlxrl.train.state import RunState
from mlxrl.train.update import update


def test_a_checkpoint_brings_back_adapters_optimizer_and_counters(tmp_path):
    algorithm, batch = grpo(), make_batch([made([1.0, 0.0])], grpo())
    p, state = a_policy(), RunState(optim.AdamW(optim.cosine_decay(1e-2, 10)), step=1, skipped=2)
    update(p, state.optimizer, batch, algorithm)
    checkpoint.save(tmp_path / "one", p, state)
    other, restored = a_policy(move=False), RunState(optim.AdamW(optim.cosine_decay(1e-2, 10)))
    checkpoint.restore(checkpoint.read(tmp_path / "one"), other, restored)
    assert (restored.step, restored.skipped) == (1, 2)
    for one, of in ((p, state), (other, restored)):
        update(one, of.optimizer, batch, algorithm)
    wanted, got = flat(p.model.trainable_parameters()), flat(other.model.trainable_parameters())
    assert all(mx.array_equal(got[name], value) for name, value in wanted.items())


def test_another_optimizers_state_is_refused_and_the_rate_asked_for_is_kept(tmp_path):
    algorithm, batch = grpo(), make_batch([made([1.0, 0.0])], grpo())
    p, state = a_policy(), RunState(optim.AdamW(2e-3))
    update(p, state.optimizer, batch, algorithm)
    checkpoint.save(tmp_path / "one", p, state)
    for make in (optim.SGD, optim.Lion, optim.Adam):
        other, fresh = a_policy(move=False), RunState(make(7e-3))
        before = flat(other.model.trainable_parameters())
        with pytest.raises(
            ValueError, match=f"its optimizer is AdamW, wanted the state of {make.__name__}, with which"
        ):
            checkpoint.restore(checkpoint.read(tmp_path / "one"), other, fresh)
        assert fresh.step == 0
        now = flat(other.model.trainable_parameters())
        assert all(mx.array_equal(now[name], value) for name, value in before.items())
    restored = RunState(optim.AdamW(7e-3))
    checkpoint.restore(checkpoint.read(tmp_path / "one"), p, restored)
    assert update(p, restored.optimizer, batch, algorithm)["learning_rate"] == pytest.approx(7e-3)
    scheduled = RunState(optim.AdamW(optim.linear_schedule(1.0, 0.0, 10)))
    checkpoint.restore(checkpoint.read(tmp_path / "one"), p, scheduled)
    assert update(p, scheduled.optimizer, batch, algorithm)["learning_rate"] == pytest.approx(0.9)  # of its step 1


@pytest.mark.parametrize(
    "change",
    [lambda saved: saved.pop("streaks"), lambda saved: saved.update(step=-2), lambda saved: saved.update(values=[1]),
     lambda saved: saved.pop("sha256"), lambda saved: saved.update(files={}), None],
)  # fmt: skip
def test_a_state_that_is_not_as_it_was_saved_is_a_damaged_checkpoint(tmp_path, change):
    checkpoint.save(tmp_path / "one", a_policy(), RunState(optim.AdamW(1e-3), step=1, values={"best": 0.1}))
    path = tmp_path / "one" / "state.json"
    saved = json.loads(path.read_text())
    assert checkpoint.read(tmp_path / "one").step == 1
    if change:
        change(saved)
    path.write_text(json.dumps(saved) if change else "[" * 100_000)
    with pytest.raises(checkpoint.CheckpointError, match="damaged"):
        checkpoint.read(tmp_path / "one")


def test_a_folder_without_the_last_file_is_not_a_checkpoint(tmp_path):
    p, state = a_policy(), RunState(optim.SGD(1e-2))
    checkpoint.save(tmp_path / "one", p, state)
    (tmp_path / "one" / "state.json").unlink()
    with pytest.raises(ValueError, match=r"no state\.json; wanted a checkpoint that a run has saved"):
        checkpoint.restore(checkpoint.read(tmp_path / "one"), p, state)
