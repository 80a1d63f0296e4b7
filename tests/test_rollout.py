from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from models import dense, hybrid, moe, tokenizer

from mlxrl.policy.adapters import LoRA
from mlxrl.policy.load import policy
from mlxrl.rollout.decode import Request, decode
from mlxrl.rollout.episodes import rollout, row_keys
from mlxrl.rollout.render import render
from mlxrl.rollout.sampling import key_of, sample
from mlxrl.types import Minibatch, Sampling, Task

MODELS = [dense, hybrid, moe]
GREEDY = Sampling(max_tokens=12, temperature=0.0)
RAGGED = [tuple(range(20, 20 + n)) for n in (5, 3, 9, 1)]


class Counted:
    """A head whose forwards are counted."""

    def __init__(self, head):
        self.head, self.calls, self.rows = head, 0, []

    def trunk(self, tokens, cache=None):
        self.calls += 1
        self.rows.append(tokens.shape)
        return self.head.trunk(tokens, cache)

    def project(self, hidden):
        return self.head.project(hidden)


def alone(model, prompt: tuple[int, ...], tokens: int) -> list[int]:
    """Greedy decoding by a plain forward over the whole sequence, every time."""
    ids = list(prompt)
    for _ in range(tokens):
        ids.append(int(mx.argmax(model(mx.array([ids]))[0, -1]).item()))
    return ids[len(prompt) :]


def requests(prompts, copies: int = 1) -> list[Request]:
    keys = row_keys(key_of(0, 0), len(prompts), copies)
    return [Request(prompt, keys[i * copies + r]) for i, prompt in enumerate(prompts) for r in range(copies)]


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("max_rows", [32, 3])
@pytest.mark.parametrize("chunk", [2048, 2])
def test_greedy_batch_equals_greedy_alone_for_ragged_prompts(make, max_rows, chunk):
    p = policy(make(), tokenizer(), lora=LoRA())
    out = decode(
        p.model, p.head, requests(RAGGED, 2), GREEDY, frozenset(), max_rows=max_rows, prefill_chunk=chunk
    )  # fmt: skip
    wanted = [alone(p.model, prompt, 12) for prompt in RAGGED for _ in range(2)]
    assert [row.ids for row in out] == wanted


@pytest.mark.parametrize("make", MODELS)
def test_a_rows_tokens_do_not_depend_on_its_neighbours(make):
    p = policy(make(), tokenizer(), lora=LoRA())
    sampling = Sampling(max_tokens=10)
    rows = requests(RAGGED, 3)
    together = decode(p.model, p.head, rows, sampling, frozenset())
    backwards = decode(p.model, p.head, rows[::-1], sampling, frozenset(), max_rows=5)[::-1]
    single = [decode(p.model, p.head, [row], sampling, frozenset())[0] for row in rows]
    assert [row.ids for row in together] == [row.ids for row in single] == [row.ids for row in backwards]
    assert np.allclose([row.logprobs for row in together], [row.logprobs for row in single], atol=1e-5)
    assert len({tuple(row.ids) for row in together}) == len(rows), "rows of one prompt must differ"


def test_every_eos_id_stops_a_row_and_is_kept():
    p = policy(dense(), tokenizer(), lora=LoRA())
    plain = decode(p.model, p.head, requests(RAGGED[:1]), GREEDY, frozenset())[0].ids
    stops = frozenset({plain[2], 319})
    (row,) = decode(p.model, p.head, requests(RAGGED[:1]), GREEDY, stops)
    first = next(i for i, token in enumerate(plain) if token in stops)
    assert row.ids == plain[: first + 1]
    assert (row.stop, len(row.logprobs)) == ("eos", first + 1)
    # A row whose first token is a stop has one id and one log-prob.
    (row,) = decode(p.model, p.head, requests(RAGGED[:1]), GREEDY, frozenset({plain[0]}))
    assert (row.ids, len(row.logprobs), row.stop) == ([plain[0]], 1, "eos")


def test_a_prompt_is_prefilled_once_and_nothing_is_decoded_after_the_last_stop():
    p = policy(dense(), tokenizer(), lora=LoRA())
    counted = Counted(p.head)
    out = decode(p.model, counted, requests(RAGGED, 4), Sampling(max_tokens=20), frozenset(range(0, 320, 16)))
    longest = max(len(row.ids) for row in out)
    prefills = [shape for shape in counted.rows if shape[0] == 1 and shape in [(1, len(prompt)) for prompt in RAGGED]]
    assert len(prefills) >= len(RAGGED)
    assert counted.calls <= len(RAGGED) + longest
    decoded = [shape[0] for shape in counted.rows[len(RAGGED) :]]
    assert decoded == sorted(decoded, reverse=True)
    assert decoded[-1] < 16, "finished rows are dropped"


def test_the_last_token_is_not_run_through_the_model():
    p = policy(dense(), tokenizer(), lora=LoRA())
    counted = Counted(p.head)
    decode(p.model, counted, requests(RAGGED[:1], 2), Sampling(max_tokens=6), frozenset())
    assert counted.rows == [(1, 5)] + [(2, 1)] * 5


def test_log_probs_are_those_of_the_tempered_distribution():
    """The trainer's log-probs of the same tokens, at the same temperature, are the sampler's."""
    from mlxrl.policy.logprobs import logprobs

    for make in MODELS:
        p = policy(make(), tokenizer(), lora=LoRA())
        (group,) = rollout(p, [Task("hello")], group_size=3, sampling=Sampling(max_tokens=9, temperature=0.7), key=1)
        for trajectory in group:
            (turn,) = trajectory.turns
            ids, ones = mx.array([turn.action]), mx.ones((1, len(turn.action)))
            batch = Minibatch(mx.array(turn.observation), ids, ones, ones, ones, temperature=0.7)
            assert np.allclose(logprobs(p, batch).chosen.tolist()[0], turn.logprobs, atol=1e-4)


def test_sampling_follows_the_tempered_distribution():
    logits = mx.broadcast_to(mx.log(mx.array([0.5, 0.25, 0.25])), (20_000, 3))
    keys = mx.random.split(mx.random.key(0), 20_000)
    tokens, logprobs, _ = sample(logits, keys, Sampling(temperature=0.5))
    # p ^ (1 / 0.5) = 1/4, 1/16, 1/16, which sums to 3/8: probabilities 2/3, 1/6, 1/6
    assert abs((tokens == 0).mean().item() - 2 / 3) < 0.01
    assert abs(logprobs.max().item() - np.log(2 / 3)) < 1e-5


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 2.0])
@pytest.mark.parametrize("top_p", [0.01, 0.5, 1.0])
@pytest.mark.parametrize("top_k", [0, 1, 5, 320, 1000])
@pytest.mark.parametrize("min_p", [0.0, 0.5, 1.0])
def test_a_candidate_always_survives_the_filters(temperature, top_p, top_k, min_p):
    logits = 8 * mx.random.normal((16, 320), key=mx.random.key(0))
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    tokens, logprobs, _ = sample(logits, mx.random.split(mx.random.key(1), 16), sampling)
    assert np.isfinite(logprobs).all()
    if top_k == 1 or top_p == 0.01 or min_p == 1.0 or temperature == 0:
        assert mx.array_equal(tokens, mx.argmax(logits, -1).astype(mx.int32))


def test_a_row_with_logits_that_are_not_finite_ends_and_the_others_go_on():
    p = policy(dense(), tokenizer(), lora=LoRA())

    class Broken(Counted):
        def project(self, hidden):
            logits = self.head.project(hidden)
            if self.calls < 4:
                return logits
            return mx.where((mx.arange(logits.shape[0]) == 1)[:, None], mx.nan, logits)

    out = decode(p.model, Broken(p.head), requests(RAGGED[:1], 5), Sampling(max_tokens=8), frozenset())
    assert [row.stop for row in out] == ["length", "error", "length", "length", "length"]
    assert len(out[1].ids) == 3
    whole = decode(p.model, p.head, requests(RAGGED[:1], 5), Sampling(max_tokens=8), frozenset())
    assert [out[i].ids for i in (0, 2, 3, 4)] == [whole[i].ids for i in (0, 2, 3, 4)]


def test_the_cache_graph_of_a_hybrid_model_does_not_grow(tmp_path):
    from mlxrl.rollout.decode import _start, _step

    p = policy(hybrid(8), tokenizer(), lora=LoRA())
    sampling = Sampling(max_tokens=100)
    batch = _start(p.model, p.head, requests([RAGGED[0]] * 3), [None] * 3, sampling, 2048)
    for _ in range(50):
        _step(p.model, p.head, batch, sampling)
        mx.eval(batch.tokens, batch.logprobs, batch.keys)
    arrays = [a for cache in batch.caches for a in _arrays(cache.state)]
    assert arrays
    for index, array in enumerate(arrays):
        path = tmp_path / f"{index}.dot"
        mx.export_to_dot(str(path), array)
        assert path.read_text().count("label") < 10


def _arrays(state):
    if isinstance(state, mx.array):
        yield state
    elif isinstance(state, (list, tuple)):
        for part in state:
            yield from _arrays(part)


def test_a_task_that_stands_twice_is_two_groups():
    p = policy(dense(), tokenizer(), lora=LoRA())
    first, second = rollout(p, [Task("hi"), Task("hi")], group_size=2, sampling=Sampling(max_tokens=8), key=0)
    assert len(first) == len(second) == 2
    assert len({t.turns[0].action for t in first + second}) == 4


def test_rendering_uses_the_template_and_its_thinking_switch():
    words = tokenizer()
    open_, closed = render(words, Task("hi")), render(words, Task("hi"), thinking=False)
    assert words.decode(open_) == "<user>hi<end><assistant><think>"
    assert words.decode(closed) == "<user>hi<end><assistant><think></think>"
    chat = Task(({"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}))
    assert words.decode(render(words, chat)).startswith("<system>be brief<end><user>hi<end>")


def test_the_wired_limit_is_left_alone(monkeypatch):
    monkeypatch.setattr(mx, "set_wired_limit", lambda *_: pytest.fail("the wired limit was set"))
    p = policy(dense(), tokenizer(), lora=LoRA())
    rollout(p, [Task("hi")], group_size=2, sampling=Sampling(max_tokens=4))


@pytest.mark.parametrize(
    ("setting", "value"), [("max_tokens", 0), ("temperature", -1.0), ("top_p", 0.0), ("top_k", -1), ("min_p", 1.5)]
)
def test_settings_out_of_range_are_refused_by_name(setting, value):
    with pytest.raises(ValueError, match=f"sampling: {setting}: wanted"):
        Sampling(**{setting: value})
