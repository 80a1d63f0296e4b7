"""Training passes against a plain full-sequence pass, interleaved in one run.

    LD_PRELOAD=libopenblas.so.0 python benchmarks/update.py --model SmolLM2-135M-Instruct.gguf --cases head,pass,step

Cases:
  head   log-probs of 2,048 positions over 151,936 tokens at width 1,024, forward and backward, against all logits
         at once
  gated  the gated delta rule at 512, 1,024 and 2,048 tokens, forward and backward, against mlx-lm's loop over tokens
  pass   the gradient of a group of 8 x 64 tokens after prompts of 150, 400 and 1,000 tokens: every row with its prompt
         and all its logits; ours in one pass, with recomputation, and with two rows at a time against one prompt
  step   steps of 2 prompts x 4 completions x 64 tokens, everything included; the same where every second group has
         zero variance; active memory over the steps
  depth  peaks against tokens and against layers, with and without recomputation
  long   one row of up to 16,384 tokens of a small dense and a small hybrid model, with recomputation

`pass` and `step` need --model. On a machine that others use, set OPENBLAS_NUM_THREADS=1 and read the processor seconds.
Writes benchmarks/results/NAME.json. Peaks are bytes above what was active before, except where `peak` says total.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np

from machine import machine

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from mlx_lm.models import qwen3_5  # noqa: E402
from mlx_lm.models.gated_delta import gated_delta_ops  # noqa: E402

from mlxrl.algo.recipes import dr_grpo  # noqa: E402
from mlxrl.policy.gated_delta import gated_delta  # noqa: E402
from mlxrl.policy.head import Head, score  # noqa: E402
from mlxrl.policy.logprobs import logprobs  # noqa: E402
from mlxrl.policy.modes import training  # noqa: E402
from mlxrl.policy.policy import Policy, as_policy, load  # noqa: E402
from mlxrl.settings import LoRA, Rollout, Sampling, Train  # noqa: E402
from mlxrl.train.batch import make_batch  # noqa: E402
from mlxrl.train.gradient import gradient  # noqa: E402
from mlxrl.train.loop import run  # noqa: E402
from mlxrl.types import Group, Logprobs, MicroBatch, Task, Trajectory, Turn  # noqa: E402
from models import dense, ready, tokenizer  # noqa: E402

Way = Callable[[], Any]


def cost(way: Way) -> dict[str, float]:
    """Seconds, processor seconds, the peak of it all and what of that is above what was there."""
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    wall, processor = time.perf_counter(), time.process_time()
    mx.eval(way())
    seconds = time.perf_counter() - wall, time.process_time() - processor
    peak = mx.get_peak_memory()
    return {"seconds": seconds[0], "processor_seconds": seconds[1], "peak": peak, "extra": peak - before}


def interleaved(ways: dict[str, Way], repeats: int, warm: bool = True) -> dict[str, Any]:
    """Every way in turn, `repeats` times over, after a run of each that does not count.

    `times` compares medians of the ratios of neighbouring runs to the first way, so that what disturbs the machine
    disturbs both.
    """
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for repeat in range(-int(warm), repeats):
        for name, way in ways.items():
            spent = cost(way)
            print(f"  {name:24s}", *(f"{spent[k]:.2f}" for k in ("seconds", "processor_seconds")),
                  f"{spent['peak'] / 1e9:.3f} GB", file=sys.stderr, flush=True)  # fmt: skip
            if repeat >= 0:
                runs[name].append(spent)
    first = next(iter(ways))
    return {name: _summary(runs[name], runs[first]) for name in ways}


def _summary(own: Sequence[dict[str, float]], first: Sequence[dict[str, float]]) -> dict[str, Any]:
    def ratio(what: str) -> float:
        return round(statistics.median(b[what] / a[what] for a, b in zip(own, first, strict=True)), 3)

    return {
        "seconds": [round(run["seconds"], 4) for run in own],
        "processor_seconds": [round(run["processor_seconds"], 4) for run in own],
        "peak": round(statistics.median(run["peak"] for run in own)),
        "extra": round(statistics.median(run["extra"] for run in own)),
        "times_faster": {"seconds": ratio("seconds"), "processor_seconds": ratio("processor_seconds")},
        "share_of_peak": round(1 / ratio("peak"), 4),
        "share_of_extra": round(1 / ratio("extra"), 4),
    }


def head_case(repeats: int, positions: int = 2048, vocabulary: int = 151_936, width: int = 1024) -> dict[str, Any]:
    """A frozen head, and one with an adapter, whose logits the backward pass recomputes."""
    layer = nn.Linear(width, vocabulary, bias=False)
    layer.weight = 0.03 * mx.random.normal((vocabulary, width), key=mx.random.key(0))
    layer.freeze()
    head = Head(lambda tokens: tokens, layer, module=lambda: layer)
    hidden, weigh = (mx.random.normal(s, key=mx.random.key(1)) for s in ((positions, width), (positions,)))
    ids = mx.random.randint(0, vocabulary, (positions,), key=mx.random.key(2))
    mx.eval(layer.parameters(), hidden, weigh, ids)

    def plain(hidden: mx.array) -> mx.array:
        z = layer(hidden)
        chosen = mx.take_along_axis(z, ids[:, None], axis=-1)[:, 0] - mx.logsumexp(z, axis=-1)
        return (chosen * weigh).sum()

    def ours(hidden: mx.array) -> mx.array:
        return (score(head, hidden, ids)[0] * weigh).sum()

    def with_entropy(hidden: mx.array) -> mx.array:
        chosen, entropy = score(head, hidden, ids, entropy=True)
        assert entropy is not None
        return ((chosen + 0.01 * entropy) * weigh).sum()

    ways: dict[str, Way] = {
        "all logits": lambda: mx.grad(plain)(hidden),
        "by chunks": lambda: mx.grad(ours)(hidden),
        "by chunks, with entropy": lambda: mx.grad(with_entropy)(hidden),
    }
    return {"positions": positions, "vocabulary": vocabulary, "width": width, **interleaved(ways, repeats, False)}


def gated_case(repeats: int) -> list[dict[str, Any]]:
    return [_gated(tokens, heads, repeats) for tokens, heads in
            ((512, (2, 4)), (512, (4, 8)), (1024, (2, 4)), (2048, (2, 4)))]  # fmt: skip


def _gated(tokens: int, heads: tuple[int, int], repeats: int, width: int = 64) -> dict[str, Any]:
    keys = mx.random.split(mx.random.key(0), 6)
    q, k = (mx.random.normal((1, tokens, heads[0], width), key=key) for key in keys[:2])
    q, k = (x / mx.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = mx.random.normal((1, tokens, heads[1], width), key=keys[2])
    g, beta = (mx.sigmoid(mx.random.normal((1, tokens, heads[1]), key=key) + 1) for key in keys[3:5])
    state = mx.random.normal((1, heads[1], width, width), key=keys[5])
    arguments = [q * width**-0.5, k, v, g, beta, state]
    mx.eval(arguments)

    def backward(rule: Any) -> Any:
        def loss(*arguments: mx.array) -> mx.array:
            y, last = rule(*arguments)
            return mx.square(y).sum() + mx.square(last).sum()

        return mx.grad(loss, argnums=list(range(6)))(*arguments)

    ways: dict[str, Way] = {"loop": lambda: backward(gated_delta_ops), "chunks": lambda: backward(gated_delta)}
    return {"tokens": tokens, "heads": heads, "width": width, **interleaved(ways, repeats)}


def group_of(prompt: int, rows: int = 8, tokens: int = 64) -> Group:
    """Random ids, rewards 0 and 1 in turn."""
    draw = np.random.default_rng(0)
    seen = tuple(draw.integers(100, 40_000, size=prompt).tolist())
    turns = [Turn(seen, tuple(draw.integers(100, 40_000, size=tokens).tolist()), (-1.0,) * tokens) for _ in range(rows)]
    sampling = Sampling(max_tokens=tokens)
    return tuple(Trajectory(Task("x"), (t,), float(i % 2), sampling=sampling) for i, t in enumerate(turns))


def pass_case(model: str, prompts: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    subject = load(model, dtype="float32", lora=LoRA(rank=8))
    return [_passes(subject, prompt, repeats) for prompt in prompts]


def _passes(subject: Policy, prompt: int, repeats: int, plain_up_to: int = 400) -> dict[str, Any]:
    algo, group = dr_grpo(), group_of(prompt)
    whole = make_batch([group], algo, Train(tokens_per_pass=10**6))
    (batch,) = whole
    pairs = make_batch([group], algo, Train(tokens_per_pass=prompt + 2 * 64))
    fours = make_batch([group], algo, Train(tokens_per_pass=prompt + 4 * 64))

    def plain() -> Any:
        subject.model.train()
        value = nn.value_and_grad(
            subject.model, lambda: algo.loss(_every_logit(subject, batch), batch, whole.totals)[0]
        )
        found = value()
        subject.model.eval()
        return found

    ways: dict[str, Way] = {"every row with its prompt": plain} if prompt <= plain_up_to else {}
    ways |= {
        "one pass": lambda: gradient(subject, whole, algo)[1],
        "four rows at a time": lambda: gradient(subject, fours, algo)[1],
        "two rows at a time": lambda: gradient(subject, pairs, algo)[1],
        "recomputed": lambda: gradient(subject, whole, algo, recompute=True)[1],
        "recomputed, two rows": lambda: gradient(subject, pairs, algo, recompute=True)[1],
    }
    return {"prompt": prompt, "rows": 8, "tokens": 64, **interleaved(ways, repeats)}


def _every_logit(subject: Policy, batch: MicroBatch) -> Logprobs:
    """The pass of a trainer that knows nothing of prefixes: prompts repeated, logits of every position."""
    prompt = batch.prefix.size
    ids = mx.concatenate([mx.broadcast_to(batch.prefix, (batch.tokens.shape[0], prompt)), batch.tokens], axis=1)
    z = subject.model(ids)[:, :-1].astype(mx.float32)
    chosen = mx.take_along_axis(z, ids[:, 1:, None], axis=-1)[..., 0] - mx.logsumexp(z, axis=-1)
    return Logprobs(chosen[:, prompt - 1 :])


def step_case(model: str, steps: int) -> dict[str, Any]:
    """Whole steps; rewards by the order of completions, so that what is learned does not change what is run."""
    subject = load(model, dtype="float32", lora=LoRA(rank=8))
    text = "Tell me, in a few words, what one sees on a walk along the river on a clear day in early spring."
    tasks = [Task(f"{text} Begin with the number {number}.") for number in range(16)]
    sampling = Sampling(max_tokens=64)

    def all_vary(completions: list[str], **_: Any) -> list[float]:
        return [float(i % 2) for i in range(len(completions))]

    def half_vary(completions: list[str], **_: Any) -> list[float]:
        return [float(i % 2 and i < 4) for i in range(len(completions))]

    out: dict[str, Any] = {"prompts": 2, "completions": 4, "tokens": 64}
    for name, reward in (("every group varies", all_vary), ("every second group has zero variance", half_vary)):
        spent, active, made = [], [], []
        since = time.perf_counter(), time.process_time()
        for step in run(subject, tasks, dr_grpo(), reward=reward, steps=steps, sampling=sampling,
                        rollout=Rollout(tasks_per_step=2, group_size=4), optimizer=optim.AdamW(1e-5)):  # fmt: skip
            now = time.perf_counter(), time.process_time()
            spent.append([round(b - a, 3) for a, b in zip(since, now, strict=True)])
            parts = {k: round(v, 3) for k, v in step.metrics.items() if k.startswith("seconds/")}
            made.append({"tokens": step.metrics["rollout/tokens"], **parts})
            active.append(mx.get_active_memory())
            print(f"  {name}: step {step.index}", spent[-1], made[-1], file=sys.stderr, flush=True)
            since = time.perf_counter(), time.process_time()
        median = [statistics.median(column) for column in zip(*spent[1:], strict=True)]
        out[name] = {
            "seconds": [s for s, _ in spent], "processor_seconds": [p for _, p in spent], "parts": made,
            "samples_per_second": round(8 / median[0], 3), "samples_per_processor_second": round(8 / median[1], 3),
            "active": active,
        }  # fmt: skip
    return out


def depth_case() -> dict[str, Any]:
    """Peaks of the gradient of rows of 64 tokens, in bytes."""
    out: dict[str, Any] = {"by tokens, 8 layers": [], "by layers, 512 tokens": []}
    for layers, rows in [(8, r) for r in (4, 8, 16, 32)] + [(n, 8) for n in (2, 4, 8, 16, 28)]:
        model = dense(num_hidden_layers=layers, hidden_size=256, intermediate_size=768, head_dim=64)
        subject = as_policy(model, tokenizer(), lora=LoRA())
        peaks = {name: _peak_of_rows(subject, 64, rows, name == "recomputed") for name in ("plain", "recomputed")}
        where = "by tokens, 8 layers" if len(out["by tokens, 8 layers"]) < 4 else "by layers, 512 tokens"
        out[where].append({"layers": layers, "tokens": 64 * rows, **peaks})
    return out


def _peak_of_rows(subject: Policy, tokens: int, rows: int, recompute: bool, weight: float = 1.0) -> int:
    draw = np.random.default_rng(0).integers(9, 300, size=(rows, tokens))
    ones = mx.ones((rows, tokens))
    mask = mx.where(mx.arange(tokens) > 0, ones, 0)
    batch = MicroBatch(mx.array([], mx.int32), mx.array(draw, mx.int32), mask, ones, ones)

    def way() -> Any:
        with training(subject, recompute):
            return nn.value_and_grad(subject.model, lambda: weight * logprobs(subject, batch).token_logprobs.sum())()

    return int(cost(way)["extra"])


def long_case(lengths: Sequence[int] = (2048, 4096, 8192, 16_384)) -> list[dict[str, Any]]:
    """One row, all but its first token trained on. One head of attention: outside of Metal each holds T^2 numbers."""
    out: list[dict[str, Any]] = []
    for name, make in (("dense", _small_dense), ("hybrid", _small_hybrid)):
        subject = as_policy(make(), tokenizer(), lora=LoRA())
        for tokens in lengths:
            since = time.process_time()
            extra = _peak_of_rows(subject, tokens, 1, True)
            spent = round(time.process_time() - since, 1)
            out.append({"model": name, "tokens": tokens, "extra": extra, "processor_seconds": spent})
            print(" ", out[-1], file=sys.stderr, flush=True)
    return out


def _small_dense() -> Any:
    return dense(num_hidden_layers=4, num_attention_heads=1, num_key_value_heads=1, head_dim=32)


def _small_hybrid() -> Any:
    """Three layers of linear attention and one of attention."""
    text = {
        "model_type": "qwen3_5", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
        "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 320,
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 32,
        "linear_value_head_dim": 32, "full_attention_interval": 4, "tie_word_embeddings": True,
    }  # fmt: skip
    return ready(qwen3_5.Model(qwen3_5.ModelArgs(model_type="qwen3_5", text_config=text)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a .gguf file, for the cases pass and step")
    parser.add_argument("--cases", default="head,gated,depth")
    parser.add_argument("--prompts", default="150,400,1000", help="tokens of the prompts of case pass")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--name", default="update")
    given = parser.parse_args()
    known: dict[str, Callable[[], Any]] = {
        "head": lambda: head_case(given.repeats),
        "gated": lambda: gated_case(given.repeats),
        "pass": lambda: pass_case(given.model, [int(prompt) for prompt in given.prompts.split(",")], given.repeats),
        "step": lambda: step_case(given.model, given.steps),
        "depth": depth_case,
        "long": long_case,
    }
    path = Path(__file__).parent / "results" / f"{given.name}.json"
    path.parent.mkdir(exist_ok=True)
    report: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    for name in given.cases.split(","):
        if name in ("pass", "step") and given.model is None:
            raise SystemExit(f"case {name}: wanted --model, the path of a .gguf file")
        report[name] = {"machine": machine(), "measured": known[name]()}
        path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
