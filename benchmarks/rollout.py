"""Rollouts against mlx-lm's own ways of batching, interleaved in one run.

    LD_PRELOAD=libopenblas.so.0 python benchmarks/rollout.py --model SmolLM2-135M-Instruct.gguf --repeats 3

Cases: (a) the model in float32, 4 prompts x 8 completions, temperature 1, 64 new tokens; (b) a tiny dense model, which
shows what the host costs, 32 sequences; (c) the model and the prompts of (a), 16 completions each in 32 slots, every
one stopped after 8 to 64 tokens; (d) a tiny hybrid model, 16 sequences, and its prefill of 256 tokens. Engines:
`mlxrl`; `batch_generate`, given every sequence's prompt; `BatchGenerator`, given caches of prompts that were prefilled
once, all sequences at a time. No engine stops at a token, so all make the same number of tokens, with log-probs read
back.

Writes benchmarks/results/NAME.json: seconds of every run, tokens a second of the median, and forwards.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from machine import machine

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from mlx_lm.generate import BatchGenerator, batch_generate  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402
from mlx_lm.models.gated_delta import gated_delta_ops  # noqa: E402
from mlx_lm.sample_utils import make_sampler  # noqa: E402

from mlxrl.policy.gated_delta import gated_delta  # noqa: E402
from mlxrl.policy.modes import decoding  # noqa: E402
from mlxrl.policy.policy import Policy, as_policy, load  # noqa: E402
from mlxrl.rollout.compiled_step import DecodeSession, Slots  # noqa: E402
from mlxrl.rollout.draw import Drawn, key_of, sequence_keys  # noqa: E402
from mlxrl.rollout.engine import Engine  # noqa: E402
from mlxrl.rollout.prefill import prefill  # noqa: E402
from mlxrl.rollout.sequence import Request  # noqa: E402
from mlxrl.rollout.stop_rules import advance  # noqa: E402
from mlxrl.settings import LoRA, Sampling  # noqa: E402
from models import dense, hybrid, tokenizer  # noqa: E402

QUESTIONS = (
    "What is 3 + 4?", "Name three colours of the rainbow.", "Write one line about the sea and the wind.", "Why?",
)  # fmt: skip
SLOTS = 32


class Endless:
    """A tokenizer that knows of no stop."""

    eos_token_ids: tuple[int, ...] = ()

    def __init__(self, inner: Any) -> None:
        self.decode = inner.decode


class Work:
    """Sequences to decode: a model, a prompt for every one, and the tokens it makes."""

    def __init__(self, subject: Policy, prompts: list[tuple[int, ...]], copies: int, limits: list[int]) -> None:
        self.subject, self.limits = subject, limits
        self.prompts = [prompt for prompt in prompts for _ in range(copies)]
        keys, sampling = sequence_keys(key_of(0, 0), len(prompts), copies), Sampling(max_tokens=max(limits))
        rows = zip(self.prompts, keys, limits, strict=True)
        self.requests = [Request(prompt, key, sampling, limit, stop_ids=()) for prompt, key, limit in rows]

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(self.limits)

    def short(self) -> Work:
        """The same sequences, of few tokens."""
        few = copy.copy(self)
        few.limits = [min(limit, 8) for limit in self.limits]
        few.requests = [replace(request, limit=8) for request in self.requests]
        return few

    def mlxrl(self) -> int:
        """This library's engine."""
        return self.decoded(self.subject)

    def decoded(self, subject: Policy, **options: Any) -> int:
        """Tokens that the engine has made, with options of it."""
        with decoding(subject) as merged, Engine(merged, **options) as engine:
            for request in self.requests:
                engine.submit(request)
            return sum(len(sequence.tokens) for sequence in engine.run())

    def batch_generate(self) -> int:
        """mlx-lm's function, given the prompt of every sequence."""
        made = batch_generate(
            self.subject.model, Endless(self.subject.tokenizer), [list(prompt) for prompt in self.prompts],
            max_tokens=self.limits, sampler=make_sampler(1.0), return_token_ids=True, return_logprobs=True,
            completion_batch_size=SLOTS,
        )  # fmt: skip
        assert made.token_ids is not None
        return sum(map(len, made.token_ids))

    def prefilled(self) -> int:
        """mlx-lm's BatchGenerator at its best: a prompt prefilled once, its caches copied, all sequences at a time."""
        generator = BatchGenerator(
            self.subject.model, sampler=make_sampler(1.0), completion_batch_size=SLOTS, prefill_batch_size=SLOTS
        )
        filled: dict[tuple[int, ...], Any] = {}
        for prompt in dict.fromkeys(self.prompts):
            filled[prompt] = make_prompt_cache(self.subject.model)
            self.subject.head.trunk(mx.array([prompt[:-1]]), filled[prompt])
            mx.eval([cache.state for cache in filled[prompt]])
        caches = [copy.deepcopy(filled[prompt]) for prompt in self.prompts]
        generator.insert([[prompt[-1]] for prompt in self.prompts], self.limits, caches=caches)
        made = 0
        while responses := generator.next_generated():
            for response in responses:
                response.logprobs[response.token].item()
                made += 1
        generator.close()
        return made


def interleaved(work: Work, engines: tuple[str, ...], repeats: int) -> dict[str, Any]:
    """Run every engine in turn, `repeats` times over, after a short run of each that does not count."""
    runs: dict[str, list[tuple[float, float]]] = {engine: [] for engine in engines}
    for engine in engines:
        getattr(work.short(), engine)()
    for _ in range(repeats):
        for engine in engines:
            wall, processor = time.perf_counter(), time.process_time()
            made = getattr(work, engine)()
            spent = time.perf_counter() - wall, time.process_time() - processor
            assert made == work.tokens, f"{engine} made {made} tokens, not {work.tokens}"
            print(f"  {engine:15s} {spent[0]:7.2f} s  {spent[1]:7.2f} s of processors", file=sys.stderr)
            runs[engine].append(spent)
    result: dict[str, Any] = {"rows": len(work.limits), "tokens": work.tokens, "engines": {}}
    for engine, spent in runs.items():
        seconds = [wall for wall, _ in spent]
        result["engines"][engine] = {
            "seconds": [round(value, 3) for value in seconds],
            "processor_seconds": [round(value, 3) for _, value in spent],
            "tokens_per_second": round(work.tokens / statistics.median(seconds), 1),
        }
    mine = result["engines"]["mlxrl"]
    result["times"] = {  # medians of the ratios of neighbouring runs: what disturbs the machine disturbs both
        engine: {
            name: round(statistics.median(b / a for a, b in zip(mine[name], other[name], strict=True)), 2)
            for name in ("seconds", "processor_seconds")
        }
        for engine, other in result["engines"].items()
        if engine != "mlxrl"
    }
    return result


def forwards(work: Work) -> dict[str, Any]:
    """Forwards of this library's engine and of `batch_generate`, by their shapes [rows, tokens]."""
    counts: dict[str, Any] = {}
    for engine in ("mlxrl", "batch_generate"):
        shapes: list[list[int]] = []
        with counted(work.subject.model, shapes):
            if engine == "mlxrl":
                work.decoded(work.subject, compiled=False)
            else:
                work.batch_generate()
        steps = [rows for rows, tokens in shapes if tokens == 1]
        counts[engine] = {
            "prefills": len(shapes) - len(steps),
            "prefilled_tokens": sum(rows * tokens for rows, tokens in shapes if tokens > 1),
            "steps": len(steps),
            "decoded_tokens": sum(steps),
        }
    return {"distinct_prompts": len(set(work.prompts)), "needed_tokens": work.tokens, **counts}


@contextmanager
def counted(model: Any, shapes: list[list[int]]) -> Generator[None]:
    """Note the shape of every forward of a model's body."""
    body = getattr(model, "language_model", model).model
    kind = type(body)
    original = kind.__call__

    def call(self: Any, inputs: mx.array, *arguments: Any, **options: Any) -> mx.array:
        if self is body:
            shapes.append(list(inputs.shape))
        return original(self, inputs, *arguments, **options)

    kind.__call__ = call
    try:
        yield
    finally:
        kind.__call__ = original


VIEWS = ("Broadcast", "Unflatten", "Flatten", "ExpandDims", "Squeeze", "Transpose", "Reshape", "Slice", "Split")


def step_costs(work: Work, steps: int = 10) -> dict[str, Any]:
    """What a step of all sequences costs: kernels in its graph, milliseconds of the host's thread, and of its parts."""
    costs: dict[str, Any] = {"rows": len(work.requests), "mlx_lm": {"kernels": _kernels(_mlx_lm_step(work))}}
    for name in ("compiled", "eager"):
        with decoding(work.subject) as merged, Engine(merged) as engine:
            sequences = [engine.submit(request) for request in work.requests]
            slots = Slots(DecodeSession(merged, compiled=name == "compiled"), sequences[0].rules, len(sequences),
                          slotted=True)  # fmt: skip
            slots.fit(max(map(len, work.prompts)) + 2)
            made = {prompt: prefill(merged, [prompt], 2048)[0] for prompt in set(work.prompts)}
            for slot, prompt in enumerate(work.prompts):
                slots.caches.place([slot], made[prompt])
            slots.begin(range(len(sequences)), sequences, mx.concatenate([made[p].logits for p in work.prompts]))
            host = [_advance(slots) for _ in range(steps)]
            drawn, state = slots.session.step(slots.caches, slots.state, slots.rules)[::-1]
            kernels = _kernels([*_arrays(drawn), *_arrays(state), *slots.caches.arrays])
            costs[name] = {"kernels": kernels, "host_milliseconds": round(1e3 * min(host), 2)}
            costs["parts"] = _parts(slots)
    return costs


def _mlx_lm_step(work: Work) -> list[mx.array]:
    """What BatchGenerator computes in a step: the forward, log-probs of the vocabulary for every row, the draw."""
    model = work.subject.model
    filled = {prompt: prefill(work.subject, [prompt], 2048)[0].caches for prompt in set(work.prompts)}
    layers = zip(*(filled[prompt] for prompt in work.prompts), strict=True)
    merged = [type(layer[0]).merge(list(layer)) for layer in layers]
    mx.eval([cache.state for cache in merged])
    logits = model(mx.zeros((len(work.prompts), 1), mx.int32), cache=merged)[:, -1]
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return [
        make_sampler(1.0)(logprobs),
        *list(logprobs),
        *(array for cache in merged for array in _arrays(cache.state)),
    ]


def _arrays(state: Any) -> list[mx.array]:
    if isinstance(state, mx.array):
        return [state]
    return [array for part in state for array in _arrays(part)] if isinstance(state, list | tuple) else []


def _advance(slots: Slots) -> float:
    """A step; seconds of this thread for enqueueing it."""
    since = time.thread_time()
    drawn = slots.step()
    spent = time.thread_time() - since
    assert isinstance(drawn, Drawn)
    mx.eval(drawn)
    return spent


def _parts(slots: Slots) -> dict[str, float]:
    """Milliseconds of the trunk, the head and the draw, each waited for; the best of five."""
    head, best = slots.session.policy.head, {"trunk": math.inf, "head": math.inf, "draw": math.inf}
    for _ in range(5):
        clock = time.perf_counter()
        given = slots.caches.caches(slots.state.lengths)
        hidden = head.trunk(slots.state.tokens[:, None], given)
        mx.eval(hidden)
        trunk = time.perf_counter()
        logits = head.project(hidden[:, -1])
        mx.eval(logits)
        projected = time.perf_counter()
        mx.eval(advance(logits, slots.state, slots.rules))
        spent = {"trunk": trunk - clock, "head": projected - trunk, "draw": time.perf_counter() - projected}
        best = {part: min(best[part], seconds) for part, seconds in spent.items()}
    return {part: round(1e3 * seconds, 1) for part, seconds in best.items()}


def _kernels(arrays: list[mx.array]) -> int:
    """Primitives in a graph that is not evaluated yet, those that only view an array left out."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.dot"
        mx.export_to_dot(str(path), *arrays)
        names = re.findall(r'label ="([A-Za-z]+)', path.read_text(encoding="utf-8"))
    return sum(name not in VIEWS for name in names)


def hybrid_prefill(subject: Policy, tokens: int, repeats: int) -> dict[str, Any]:
    """Prefill of a long prompt, by chunks as here and by mlx-lm's loop over tokens: the model, and the rule alone.

    The rule is that of one layer with 4 heads of width 128.
    """
    prompt = tuple(9 + i % 300 for i in range(tokens))
    keys = mx.random.split(mx.random.key(0), 5)
    q, k, v = (0.1 * mx.random.normal((1, tokens, 4, 128), key=key) for key in keys[:3])
    g, beta = (mx.random.uniform(0.5, 1, (1, tokens, 4), key=key) for key in keys[3:])
    state = mx.zeros((1, 4, 128, 128))

    def loop() -> None:
        caches = make_prompt_cache(subject.model)
        hidden = subject.head.trunk(mx.array([prompt]), caches)[:, -1]
        mx.eval(subject.head.project(hidden), [cache.state for cache in caches])

    return {
        "tokens": tokens,
        "model": compared(lambda: mx.eval(prefill(subject, [prompt], 2048)[0].logits), loop, 3 * repeats),
        "rule": compared(
            lambda: mx.eval(gated_delta(q, k, v, g, beta, state)),
            lambda: mx.eval(gated_delta_ops(q, k, v, g, beta, state)),
            3 * repeats,
        ),
    }


def compared(mine: Callable[[], None], loop: Callable[[], None], repeats: int) -> dict[str, Any]:
    """Seconds of two ways in turn, and how many times the first is faster, in wall clock and processor time."""
    spent: dict[str, list[tuple[float, float]]] = {"chunks": [], "loop": []}
    for repeat in range(repeats + 1):
        for name, way in (("chunks", mine), ("loop", loop)):
            wall, processor = time.perf_counter(), time.process_time()
            way()
            if repeat:
                spent[name].append((time.perf_counter() - wall, time.process_time() - processor))
    pairs = list(zip(spent["chunks"], spent["loop"], strict=True))
    ratios = [round(statistics.median(b[i] / a[i] for a, b in pairs), 2) for i in (0, 1)]
    seconds = {name: [round(wall, 4) for wall, _ in values] for name, values in spent.items()}
    return {"seconds": seconds, "times": {"seconds": ratios[0], "processor_seconds": ratios[1]}}


def spread(low: int, high: int, count: int) -> list[int]:
    """So many lengths from low to high, all equally likely, in an order without pattern."""
    return [low + (37 * i) % (high - low + 1) for i in range(count)]


def cases(model: str | None, names: list[str], repeats: int, tokens: int) -> dict[str, Any]:
    """Run the cases of these names."""
    made: dict[str, Any] = {}
    if {"a", "c"} & set(names):
        if model is None:
            raise SystemExit("cases a and c: wanted --model or MLXRL_SMOLLM2, the path of a .gguf file")
        subject = load(model, dtype="float32", lora=LoRA())
        chat = [[{"role": "user", "content": question}] for question in QUESTIONS]
        prompts = [tuple(subject.tokenizer.apply_chat_template(m, add_generation_prompt=True)) for m in chat]
        if "a" in names:
            work = Work(subject, prompts, 8, [tokens] * 32)
            made["a"] = interleaved(work, ("mlxrl", "prefilled", "batch_generate"), repeats)
            made["a"] |= {"step": step_costs(work, min(10, tokens - 1))}
        if "c" in names:
            work = Work(subject, prompts, 16, spread(8, tokens, 64))
            made["c"] = interleaved(work, ("mlxrl", "prefilled"), repeats)
    short = [tuple(range(20, 20 + n)) for n in (12, 9, 15, 7)]
    for name, maker, copies in (("b", dense, 8), ("d", hybrid, 4)):
        if name in names:
            work = Work(as_policy(maker(), tokenizer(), lora=LoRA()), short, copies, [64] * (4 * copies))
            made[name] = interleaved(work, ("mlxrl", "prefilled"), 3 * repeats)
            made[name] |= {"forwards": forwards(work), "step": step_costs(work)}
    if "d" in names:
        subject = as_policy(hybrid(), tokenizer(), lora=LoRA())
        made["d"]["prefill"] = hybrid_prefill(subject, 256, repeats)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=os.environ.get("MLXRL_SMOLLM2"), help="the .gguf file of cases a and c")
    parser.add_argument("--cases", nargs="+", default=["a", "b", "c", "d"], choices=["a", "b", "c", "d"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of a sequence of cases a and c, at most")
    parser.add_argument("--name", default="rollout")
    arguments = parser.parse_args()
    made = cases(arguments.model, arguments.cases, arguments.repeats, arguments.tokens)
    results = {"machine": machine(), "repeats": arguments.repeats, "cases": made}
    path = ROOT / "benchmarks" / "results" / f"{arguments.name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(table(made))


def table(made: dict[str, Any]) -> str:
    """Tokens a second, and how many times those of the others, as Markdown."""
    lines = ["| case | engine | tokens/s | mlxrl is faster, wall clock | processor time |", "|---|---|---|---|---|"]
    for name, case in made.items():
        for engine, numbers in case["engines"].items():
            times = case["times"].get(engine, {"seconds": "", "processor_seconds": ""})
            lines.append(
                f"| {name} | {engine} | {numbers['tokens_per_second']} | {times['seconds']} "
                f"| {times['processor_seconds']} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
