"""A step of many rows: nothing of it is deferred, and what is compiled is kept with the policy."""

from __future__ import annotations

import gc
import weakref

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from helpers import GREEDY, RAGGED, counted, decode, requests
from mlxrl.policy.policy import as_policy
from mlxrl.rollout.batching_mode import mode_of
from mlxrl.rollout.compiled_step import DecodeSession, Slots
from mlxrl.rollout.engine import Engine
from mlxrl.rollout.prefill import prefill
from mlxrl.settings import Sampling
from models import dense, hybrid, tokenizer


@pytest.mark.parametrize("compiled", [True, False])
def test_the_graph_of_a_hybrid_models_caches_does_not_grow(tmp_path, compiled):
    """Equal prompts, 300 steps, 100 where they are slow: nothing is deferred from one step to the next."""
    layers, steps = 4, 300 if compiled else 100
    p = as_policy(hybrid(layers), tokenizer(), lora=None)
    with Engine(p) as engine:
        sequences = [engine.submit(request) for request in requests(RAGGED[:1], 3, None, Sampling(max_tokens=400))]
    rows = Slots(DecodeSession(p, compiled=compiled), sequences[0].rules, 3, slotted=True)
    (prompt,) = prefill(p, RAGGED[:1], 2048)
    rows.fit(len(RAGGED[0]) + 2)
    rows.caches.place([0, 1, 2], prompt)
    rows.begin([0, 1, 2], sequences, mx.concatenate([prompt.logits] * 3))
    for step in range(steps):
        rows.fit(len(RAGGED[0]) + step + 2)
        drawn = rows.step()
    arrays = [*rows.caches.arrays, *(array for _, array in tree_flatten(rows.state) if array is not None)]
    assert len(arrays) == 2 * layers + 6
    for index, array in enumerate(arrays):
        mx.export_to_dot(str(tmp_path / f"{index}.dot"), array)
        assert (tmp_path / f"{index}.dot").read_text().count("label") < 10
    assert rows.state is not None
    assert rows.state.lengths.tolist() == [len(RAGGED[0]) + steps] * 3
    assert mx.isfinite(drawn.logprobs).all().item()


def test_a_step_is_traced_once_for_all_rollouts_of_its_settings():
    """The trunk of a compiled step is called where it is traced; the second rollout calls that of its prefill alone."""
    p, shapes = counted(as_policy(dense(), tokenizer(), lora=None))
    mode_of(p)
    shapes.clear()
    decode(p, requests(RAGGED[:2]))
    assert 0 < len([shape for shape in shapes if shape[1] == 1]) < 12
    shapes.clear()
    decode(p, requests(RAGGED[:2]))
    assert [shape for shape in shapes if shape[1] == 1] == []
    decode(p, requests(RAGGED[:2], sampling=Sampling(max_tokens=9, temperature=0.0)))
    assert [shape for shape in shapes if shape[1] == 1] == [], "the limit is no part of a step"


def test_a_step_that_cannot_be_compiled_is_not(monkeypatch):
    p = as_policy(dense(), tokenizer(), lora=None)
    wanted = [one.tokens for one in decode(p, requests(RAGGED), compiled=False)]

    def refuse(*arguments):
        raise ValueError("no graph")

    with monkeypatch.context() as patched:
        patched.setattr(mx, "compile", lambda function: refuse)
        with pytest.warns(UserWarning, match="decoding is not compiled: no graph"):
            assert [one.tokens for one in decode(p, requests(RAGGED))] == wanted
    assert [one.tokens for one in decode(p, requests(RAGGED))] == wanted  # warned once


def test_a_policy_that_is_dropped_takes_its_steps_with_it():
    p = as_policy(dense(), tokenizer(), lora=None)
    decode(p, requests(RAGGED, sampling=GREEDY))
    model = weakref.ref(p.model)
    del p
    gc.collect()
    assert model() is None
