"""What several test modules make and compare: groups, policies, batches, requests, configs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from mlxrl.policy.modes import decoding
from mlxrl.policy.policy import Policy, as_policy
from mlxrl.policy.prefix import _caches as prefix_caches
from mlxrl.rollout.chat import render
from mlxrl.rollout.draw import key_of, sequence_keys
from mlxrl.rollout.engine import Engine
from mlxrl.rollout.sequence import Request, Sequence
from mlxrl.settings import LoRA, Sampling
from mlxrl.types import (
    Batch,
    Group,
    Logprobs,
    MicroBatch,
    Task,
    TokenDetails,
    Totals,
    Trajectory,
    Turn,
)
from models import dense, tokenizer


def moved(of: Policy | nn.Module, seed: int = 1, scale: float = 0.1) -> None:
    """Make every adapter leaf random, so that the adapters have an effect."""
    model: Any = of.model if isinstance(of, Policy) else of
    leaves: Any = tree_flatten(model.trainable_parameters())
    keys = mx.random.split(mx.random.key(seed), len(leaves))
    pairs = [
        (name, scale * mx.random.normal(leaf.shape, key=key)) for (name, leaf), key in zip(leaves, keys, strict=True)
    ]
    model.load_weights(pairs, strict=False)
    mx.eval(model.parameters())


def minibatch(prefix: int, tokens: int = 7, rows: int = 3, temperature: float = 1.0, prompt: int = 0) -> MicroBatch:
    """Random ids; row b has b tokens of padding, and `prompt` tokens that were not sampled in front."""
    mask = np.ones((rows, tokens), np.float32)
    mask[:, :prompt] = 0
    for row in range(rows):
        mask[row, tokens - row :] = 0
    zeros = mx.zeros((rows, tokens))
    draw = np.random.default_rng(0).integers(9, 300, size=(rows + 1, max(prefix, tokens)))
    return MicroBatch(
        mx.array(draw[0, :prefix], mx.int32), mx.array(draw[1:, :tokens], mx.int32), mx.array(mask), zeros, zeros,
        temperature=temperature,
    )  # fmt: skip


def by_hand(model: nn.Module, batch: MicroBatch) -> mx.array:
    """Log-probs of every row by a plain forward over its whole sequence, with the caches that gemma3n wants."""
    cached = "gemma3n" in type(model).__module__
    rows = []
    for b in range(batch.tokens.shape[0]):
        ids = mx.concatenate([batch.prefix, batch.tokens[b]])
        logits = model(ids[None], cache=prefix_caches(model) if cached else None)[0].astype(mx.float32)
        logits = logits / batch.temperature
        every = mx.take_along_axis(logits[:-1] - mx.logsumexp(logits[:-1], -1, keepdims=True), ids[1:, None], -1)[:, 0]
        rows.append(mx.concatenate([mx.zeros(1), every])[batch.prefix.size :] * batch.mask[b])
    return mx.stack(rows)


def made(rewards: list[float], *, prompt: int = 90, seed: int = 0, lengths: list[int] | None = None) -> Group:
    """A group of random trajectories over one random prompt."""
    draw = np.random.default_rng(seed)
    observation = tuple(draw.integers(9, 300, size=prompt).tolist())
    lengths = lengths or [3 + i for i in range(len(rewards))]
    turns = [
        Turn(observation, tuple(draw.integers(9, 300, size=n).tolist()), tuple((-draw.random(n)).tolist()))
        for n in lengths
    ]
    sampling = Sampling(max_tokens=16)
    return tuple(Trajectory(Task("x"), (turn,), r, sampling=sampling) for turn, r in zip(turns, rewards, strict=True))


def model_folder(path: Path) -> Path:
    """A tiny model on disk, as mlx-lm saves one."""
    from mlx_lm.utils import save_config, save_model

    model = dense()
    save_model(path, model)
    save_config({**vars(model.args), "eos_token_id": 2}, path / "config.json")
    tokenizer()._tokenizer.save_pretrained(path)
    return path


def calls(monkeypatch, module: Any, name: str) -> list[tuple[Any, ...]]:
    """The positional arguments of every call of a module's function from now on."""
    found: list[tuple[Any, ...]] = []
    own = getattr(module, name)

    def recorded(*arguments: Any, **named: Any) -> Any:
        found.append(arguments)
        return own(*arguments, **named)

    monkeypatch.setattr(module, name, recorded)
    return found


def a_policy(make=dense, move: bool = True, **settings: Any) -> Policy:
    p = as_policy(make(), tokenizer(), lora=LoRA(rank=4, **settings))
    if move:
        moved(p.model)
    return p


def guarded(model: Any) -> Any:
    """A model whose embedding is the first rows of an array, behind which lie NaNs: what reads there shows it."""
    rows = model.model.embed_tokens.weight
    whole = mx.concatenate([rows, mx.full(rows.shape, mx.nan)])
    mx.eval(whole)
    model.model.embed_tokens.weight = whole[: len(rows)]
    mx.eval(model.parameters())
    return model


def flat(tree: Any) -> dict[str, mx.array]:
    return dict(tree_flatten(tree))


def assert_same_gradient(got: Any, wanted: Any, tolerance: float = 1e-5) -> None:
    got, wanted = flat(got), flat(wanted)
    for name, value in wanted.items():
        assert mx.linalg.norm(value).item() > 0, name
        assert (mx.linalg.norm(got[name] - value) / mx.linalg.norm(value)).item() < tolerance, name


def length(completions, **_):
    return [float(len(c) % 3) for c in completions]


ROOT = Path(__file__).parents[1]


EXAMPLE = ROOT / "examples" / "arithmetic"
MAZE = ROOT / "examples" / "environments" / "maze.py"


TRAINED = f"""
[model]
id = "{EXAMPLE}"
[data]
train = "{EXAMPLE}/train.jsonl"
prompt = "question"
"""
"""The tables [model] and [data] of a config on the tiny adder; the second is the last, so that keys can follow."""
EVALUATED = f'{TRAINED}evaluation = "{EXAMPLE}/test.jsonl"\n'
CONFIG = f"""
steps = 2
{EVALUATED}[reward]
functions = ["judge.py:judge"]
[sampling]
max_tokens = 12
[rollout]
tasks_per_step = 2
group_size = 4
[optimizer]
learning_rate = 1e-3
[evaluation]
examples = 8
[run]
folder = "out/run"
checkpoint_every = 1
samples_every = 2
"""


JUDGE = """
import signal
import mlxrl.rewards
calls = 0

def judge(completions, answer, **_):
    global calls
    calls += 1
    if len(set(answer)) <= 2:  # a step of 2 tasks, not an evaluation of 8 rows
        on_step()
    return [float(len(text) % 3) for text in completions]

def on_step():
    {on_step}
"""


HINT = "the answer is 42, says the hint"


def with_tasks(group: Group, seed: int = 0, k: int = 8) -> Group:
    """The group as it comes from a rollout: a prompt rendered from its task, a hint, and random candidates."""
    task = Task("what is 6 x 7", {"hint": HINT, "none": ""})
    prompt = render(tokenizer(), task)
    draw = np.random.default_rng(seed)

    def own(one: Any) -> Any:
        (turn,) = one.turns
        kept = tuple(tuple(draw.permutation(300)[:k].tolist()) for _ in turn.tokens)
        return dataclasses.replace(
            one, task=task, turns=(dataclasses.replace(turn, observation=prompt, details=TokenDetails(top_ids=kept)),)
        )

    return tuple(own(one) for one in group)


def rows(batch: Batch, name: str) -> dict[int, np.ndarray]:
    """By row, the values at its chosen tokens."""
    found: dict[int, np.ndarray] = {}
    for m in batch:
        for place, row in enumerate(m.trajectories):
            found[row] = np.array(getattr(m, name))[place][np.array(m.mask)[place] > 0]
    return found


GREEDY = Sampling(max_tokens=12, temperature=0.0)


RAGGED = [tuple(range(20, 20 + n)) for n in (5, 3, 9, 1)]


def counted(of: Policy) -> tuple[Policy, list[tuple[int, int]]]:
    """A policy, and the shapes [rows, tokens] of its forwards; a compiled step is one only where it is traced."""
    shapes: list[tuple[int, int]] = []

    def trunk(tokens: mx.array, cache: Any = None) -> mx.array:
        shapes.append(tuple(tokens.shape))
        return of.head.trunk(tokens, cache)

    return dataclasses.replace(of, head=dataclasses.replace(of.head, trunk=trunk)), shapes


def decoded(shapes: list[tuple[int, int]]) -> list[int]:
    """Rows of every decode step; tests prefill prompts of more than one token."""
    return [rows for rows, tokens in shapes if tokens == 1]


BARE: dict[str, Any] = {"compiled": False, "mode": "uniform"}


def decode(of: Policy, requests: list[Request], **options: Any) -> list[Sequence]:
    """Decode requests to the end, with options of the engine; a sequence for each, in their order."""
    with decoding(of) as merged, Engine(merged, **options) as engine:
        sequences = [engine.submit(request) for request in requests]
        assert set(engine.run()) == set(sequences)
    return sequences


def alone(model: Any, prompt: tuple[int, ...], tokens: int, cached: bool = False) -> list[int]:
    """Greedy decoding by a plain forward over the whole sequence, every time.

    cached: with new caches, for a model that is another function without them.
    """
    from mlx_lm.models.cache import make_prompt_cache

    ids = list(prompt)
    for _ in range(tokens):
        caches = {"cache": make_prompt_cache(model)} if cached else {}
        ids.append(int(mx.argmax(model(mx.array([ids]), **caches)[0, -1]).item()))
    return ids[len(prompt) :]


def requests(
    prompts: list[tuple[int, ...]],
    copies: int = 1,
    limits: list[int] | None = None,
    sampling: Sampling = GREEDY,
    stop_ids: tuple[int, ...] | None = (),
    **fields: Any,
) -> list[Request]:
    """A request for every copy of every prompt; without `stop_ids` no token ends it."""
    keys = sequence_keys(key_of(0, 0), len(prompts), copies)
    asked = [prompt for prompt in prompts for _ in range(copies)]
    return [
        Request(prompt, keys[i], sampling, limits[i] if limits else None, stop_ids, **fields)
        for i, prompt in enumerate(asked)
    ]


MINIMAL = """
[model]
id = "org/model"
[data]
train = "train.jsonl"
evaluation = "test.jsonl"
prompt = "question"
[reward]
functions = ["mlxrl.rewards:last_number_matches"]
"""


def trajectory(reward: float, tokens: int = 2, stop: Any = "eos", turns: Any = None) -> Trajectory:
    """A trajectory of one turn, or of turns given as (state, reward, tokens)."""
    made = [(None, 0.0, tokens)] if turns is None else turns
    parts = tuple(Turn((1,), (2,) * n, (-1.0,) * n, reward=r, state=state) for state, r, n in made)
    return Trajectory(Task("ask"), parts, reward=reward, stop=stop)


def close(got: Any, want: Any) -> None:
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=2e-6, atol=1e-7)


def group(*rewards: float) -> Group:
    """Trajectories of two tokens each with these rewards."""
    return tuple(trajectory(reward) for reward in rewards)


def micro_batch(mask: Any, advantages: Any, **changes: Any) -> MicroBatch:
    """A micro-batch without a prefix, whose tokens the sampler found at a log-prob of -1."""
    m = mx.array(mask, dtype=mx.float32)
    tokens = mx.zeros(m.shape, dtype=mx.int32)
    fields = {"sampler_logprobs": mx.full(m.shape, -1.0), **changes}
    return MicroBatch(tokens[0, :0], tokens, m, mx.array(advantages) * mx.ones_like(m), **fields)


def eager_and_compiled(function: Callable[..., Any]) -> list[Callable[..., Any]]:
    return [function, mx.compile(function)]


def value_and_gradient(algorithm: Any, new: Logprobs, batch: MicroBatch, totals: Totals) -> tuple[mx.array, mx.array]:
    """Loss of an algorithm, and its gradient with respect to the new log-probs."""

    def loss(chosen: mx.array) -> mx.array:
        return algorithm.loss(Logprobs(chosen, new.entropy), batch, totals)[0]

    return mx.value_and_grad(loss)(new.token_logprobs)
