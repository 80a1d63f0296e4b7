"""What goes wrong in a rollout, and what must not stay behind."""

from __future__ import annotations

import random
import signal
import threading

import mlx.core as mx
import pytest

from helpers import BARE, GREEDY, RAGGED, Counted, requests
from mlxrl.policy.policy import as_policy
from mlxrl.rollout.decode import Loop, decode
from mlxrl.rollout.episodes import Interrupted, rollout
from mlxrl.rollout.fused import FusedLinear
from mlxrl.rollout.memory import limits
from mlxrl.rollout.render import render
from mlxrl.rollout.row import Request
from mlxrl.rollout.rules import Rules
from mlxrl.rollout.sampling import key_of
from mlxrl.settings import LoRA, Sampling
from mlxrl.types import Task
from models import dense, hybrid, tokenizer


@pytest.mark.parametrize("compiled", [True, False])
def test_a_row_with_logits_that_are_not_finite_ends_and_the_others_go_on(compiled):
    """A token spoils what reads it. Rows that drew it end, and their places serve others as if nothing had been."""
    p = as_policy(dense(tie_word_embeddings=False), tokenizer(), lora=None)
    rules = Rules(Sampling(max_tokens=20))
    whole = decode(p.model, p.head, requests(RAGGED[:1], 40), rules, compiled=compiled)
    bad = whole[3].ids[4]
    p.model.model.embed_tokens.weight[bad] = mx.nan
    rows = decode(p.model, p.head, requests(RAGGED[:1], 40), rules, max_rows=6, compiled=compiled)
    spoiled = [bad in row.ids[:-1] for row in whole]
    assert 0 < sum(spoiled) < 40
    for row, fine, ends in zip(rows, whole, spoiled, strict=True):
        assert row.stop == ("error" if ends else "length")
        assert row.ids == (fine.ids[: fine.ids.index(bad) + 1] if ends else fine.ids)
        assert len(row.logprobs) == len(row.ids)


def test_a_prompt_that_spoils_its_row_gives_an_error_without_tokens():
    p = as_policy(dense(tie_word_embeddings=False), tokenizer(), lora=None)
    p.model.model.embed_tokens.weight[7] = mx.nan
    rows = decode(p.model, p.head, requests([(7, 8), *RAGGED[:3]]), GREEDY, max_rows=1)
    assert [(row.stop, len(row.ids)) for row in rows] == [("error", 0)] + [("length", 12)] * 3


def test_prompts_at_the_context_limit():
    """16 tokens of context: 14 leave room for two, 16 and 20 for none; the others are not touched by it."""
    p = as_policy(dense(max_position_embeddings=16), tokenizer(), lora=None)
    prompts = [tuple(range(20, 20 + n)) for n in (14, 16, 20, 3)]
    rows = decode(p.model, p.head, requests(prompts), GREEDY)
    assert [(len(row.ids), row.stop) for row in rows] == [(2, "length"), (0, "length"), (0, "length"), (12, "length")]
    assert rows[3].ids == decode(p.model, p.head, requests(prompts)[3:], GREEDY)[0].ids
    (group,) = rollout(p, [Task("a prompt of more than sixteen bytes")], group_size=2)
    assert [(t.stop, t.length, t.text) for t in group] == [("length", 0, "")] * 2


def test_empty_prompts_and_no_tasks():
    p = as_policy(dense(), tokenizer(), lora=LoRA())
    with pytest.raises(ValueError, match="no tokens"):
        Request((), key_of(0, 0))
    bare = tokenizer()
    bare.has_chat_template = False
    with pytest.raises(ValueError, match="has no tokens"):
        render(bare, Task(""))
    assert rollout(p, [], group_size=4) == ()
    with pytest.raises(ValueError, match="max_rows"):
        Loop(p.model, p.head, [], GREEDY, max_rows=0)


@pytest.mark.parametrize("rules", [Rules(Sampling(max_tokens=1)), Rules(Sampling(max_tokens=9), tuple(range(320)))])
def test_completions_of_one_token(rules):
    p = as_policy(dense(), tokenizer(), lora=LoRA())
    counted = Counted(p.head)
    rows = decode(p.model, counted, requests(RAGGED[:1], 3), rules, max_rows=2, **BARE)
    assert [(len(row.ids), len(row.logprobs)) for row in rows] == [(1, 1)] * 3
    assert {row.stop for row in rows} == {"eos" if rules.stops else "length"}
    assert len(counted.decoded) == (2 if rules.stops else 0), "only a step that was ahead of a stop"


def test_ctrl_c_keeps_the_rows_that_had_ended_and_restores_the_adapters():
    p = as_policy(dense(), tokenizer(("<eos>", "<end>", "<bos>", "<pad>", "<user>")), lora=LoRA())
    sampling = Sampling(max_tokens=100)
    calls = 0

    def interrupts(tokens, logits):
        nonlocal calls
        calls += 1
        if calls == 150:
            signal.raise_signal(signal.SIGINT)
        return logits

    tasks = [Task("one"), Task("two")]
    whole = rollout(p, tasks, group_size=8, sampling=sampling, key=5)
    with pytest.raises(KeyboardInterrupt) as caught:
        rollout(p, tasks, group_size=8, sampling=sampling, key=5, processors=[interrupts])
    assert isinstance(caught.value, Interrupted)
    kept = [t for group in caught.value.groups for t in group]
    assert len(caught.value.groups) == 2
    assert 0 < len(kept) < 16
    full = {t.turns[0].tokens for group in whole for t in group}
    assert all(t.turns[0].tokens in full and t.stop in ("eos", "length") for t in kept)
    assert not any(isinstance(module, FusedLinear) for _, module in p.model.named_modules())
    assert rollout(p, tasks, group_size=8, sampling=sampling, key=5) == whole


def test_a_rollout_in_a_worker_thread():
    """The model was made, and a step compiled, in another thread."""
    p = as_policy(hybrid(), tokenizer(), lora=LoRA())
    here = rollout(p, [Task("hi")], group_size=3, sampling=Sampling(max_tokens=12), key=2)
    there = []
    for _ in range(2):
        work = lambda: there.append(rollout(p, [Task("hi")], group_size=3, sampling=Sampling(max_tokens=12), key=2))  # noqa: E731
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert [[t.turns for t in group] for (group,) in there] == [[t.turns for t in here[0]]] * 2


@pytest.mark.parametrize("compiled", [True, False])
def test_the_graph_of_a_hybrid_models_caches_does_not_grow(tmp_path, compiled):
    """Equal prompts, 300 steps, 100 where they are slow: nothing is deferred from one step to the next."""
    layers, steps = 4, 300 if compiled else 100
    p = as_policy(hybrid(layers), tokenizer(), lora=None)
    loop = Loop(
        p.model,
        p.head,
        requests(RAGGED[:1], 3, [steps, steps + 3, steps + 3]),
        Rules(Sampling(max_tokens=400)),
        compiled=compiled,
    )
    rows = loop.run()
    next(rows)
    arrays = [*loop.batch.caches.arrays, *loop.batch.state.values()]
    assert len(arrays) == 2 * layers + len(loop.batch.state)
    for index, array in enumerate(arrays):
        mx.export_to_dot(str(tmp_path / f"{index}.dot"), array)
        assert (tmp_path / f"{index}.dot").read_text().count("label") < 10
    rows.close()


def test_memory_comes_back_and_does_not_grow():
    """50 rollouts of random sizes. Results that are kept hold no buffer; what is added is constants of new traces."""
    p = as_policy(hybrid(2), tokenizer(), lora=LoRA())
    draw = random.Random(0)

    def one(seed):
        tasks = [Task("x" * draw.randint(1, 40)) for _ in range(draw.randint(1, 3))]
        sampling = Sampling(max_tokens=draw.randint(1, 20))
        return rollout(p, tasks, group_size=draw.randint(1, 4), sampling=sampling, key=seed)

    mx.synchronize()
    before = mx.get_active_memory()
    kept = [one(seed) for seed in range(50)]
    assert len(kept) == 50
    assert mx.get_active_memory() - before < 100 * 320, "320 bytes a trace at most, no cache of a row"
    assert mx.get_cache_memory() < 2**20, "buffers are given back"


def test_the_buffer_cache_is_bounded_and_the_wired_limit_left_alone(monkeypatch):
    wired = []
    monkeypatch.setattr(mx, "set_wired_limit", lambda limit: wired.append(limit) or 7)
    p = as_policy(dense(), tokenizer(), lora=LoRA())
    with limits(cache=100_000):
        for seed in range(3):
            rollout(p, [Task("hi")], group_size=2, sampling=Sampling(max_tokens=4), key=seed)
            assert mx.get_cache_memory() <= 100_000
    assert mx.set_cache_limit(mx.set_cache_limit(2**30)) == 2**30
    assert wired == []
    with limits(wired=1234):
        assert wired == [1234]
    assert wired == [1234, 7]
