"""Episodes in one batch against episodes one at a time, interleaved in one run.

    python benchmarks/episodes.py --repeats 5
    LD_PRELOAD=libopenblas.so.0 python benchmarks/episodes.py --model SmolLM2-135M-Instruct.gguf --name episodes-smollm2

8 tasks x 4 trajectories x 4 turns of up to 32 tokens, by a tiny dense model or the one that is given. `together` is
`sample` with an environment. `alone` is a loop over trajectories on the same model: a cache for each, kept from turn
to turn, with mlx-lm's sampler and the log-prob of every token. Both read the same prompts and observations, and no
token but the limit of a turn ends it, so both make the same number of tokens.

Writes benchmarks/results/NAME.json: seconds of every run, tokens a second of the median, forwards.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from machine import machine

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from mlx_lm.models.cache import make_prompt_cache  # noqa: E402
from mlx_lm.sample_utils import make_sampler  # noqa: E402

from mlxrl.policy.policy import Policy, as_policy, load  # noqa: E402
from mlxrl.rollout.chat import continue_chat, start_chat  # noqa: E402
from mlxrl.rollout.sample import sample  # noqa: E402
from mlxrl.settings import EpisodeLimits, Sampling  # noqa: E402
from mlxrl.types import Feedback, Task  # noqa: E402
from models import dense, tokenizer  # noqa: E402

TASKS, GROUP_SIZE, TURNS = 8, 4, 4
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


class Tower:
    """Answers at once, and never ends."""

    def reset(self, task: Task) -> str:
        """The question."""
        return str(task.prompt)

    def step(self, reply: str) -> Feedback:
        """A line of some words."""
        return Feedback("The door stays shut.", reward=float(len(reply)))


def subject(name: str | None) -> Policy:
    """The model, which no token but the limit stops."""
    if name is not None:
        made = load(name, lora=None, dtype="float32")
    else:
        words = tokenizer(("<end>",))
        words._tokenizer.chat_template = TEMPLATE
        made = as_policy(dense(), words, lora=None)
    made.tokenizer._eos_token_ids = set()
    return made


def questions() -> list[Task]:
    """Prompts of different lengths."""
    return [Task(f"A door with {number} locks." + " Which is the key?" * (number % 3)) for number in range(TASKS)]


def together(made: Policy, tokens: int) -> int:
    """All episodes in one batch."""
    groups = sample(
        made, questions(), group_size=GROUP_SIZE, sampling=Sampling(max_tokens=tokens), environment=Tower,
        limits=EpisodeLimits(max_turns=TURNS),
    )  # fmt: skip
    return sum(one.length for group in groups for one in group)


def alone(made: Policy, tokens: int) -> int:
    """One episode after the other."""
    sampler: Callable[[mx.array], mx.array] = make_sampler(1.0)
    return sum(episode(made, task, tokens, sampler) for task in questions() for _ in range(GROUP_SIZE))


def episode(made: Policy, task: Task, tokens: int, sampler: Callable[[mx.array], mx.array]) -> int:
    """One episode over a cache of its own; the next step is enqueued before the last one is read back."""
    world, caches, count = Tower(), make_prompt_cache(made.model), 0
    chat = start_chat(made.tokenizer, world.reset(task))
    left: list[int] = []
    for turn in range(TURNS):
        fed = mx.array([[*left, *chat.ids]])
        action: list[int] = []
        drawn = draw(made, fed, caches, sampler)
        for place in range(tokens):
            following = draw(made, drawn[0][:, None], caches, sampler) if place + 1 < tokens else None
            action.append(int(drawn[0].item()))
            float(drawn[1].item())
            drawn = following or drawn
        count, left = count + len(action), action[-1:]
        feedback = world.step(made.tokenizer.decode(action))
        if turn + 1 < TURNS:
            chat = continue_chat(made.tokenizer, chat, action, (), feedback.observation)
            assert not chat.history_rewritten, "the template rewrites the history"
    return count


def draw(
    made: Policy, ids: mx.array, caches: Any, sampler: Callable[[mx.array], mx.array]
) -> tuple[mx.array, mx.array]:
    """Feed ids [1, N] and draw the next token [1], with its log-prob [1]; enqueued, and not waited for."""
    logits = made.head.project(made.head.trunk(ids, caches)[:, -1]).astype(mx.float32)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    token = sampler(logprobs)
    chosen = mx.take_along_axis(logprobs, token[:, None], axis=-1)[:, 0]
    mx.async_eval(token, chosen)
    return token, chosen


def forwards(made: Policy, tokens: int) -> dict[str, int]:
    """Forwards of a run of `together`, whose steps are not compiled for it."""
    shapes: list[tuple[int, ...]] = []

    def trunk(ids: mx.array, cache: Any = None) -> mx.array:
        shapes.append(tuple(ids.shape))
        return made.head.trunk(ids, cache)

    mx.disable_compile()
    try:
        together(replace(made, head=replace(made.head, trunk=trunk)), tokens)
    finally:
        mx.enable_compile()
    steps = sum(width == 1 for _, width in shapes)
    return {"prefills": len(shapes) - steps, "steps": steps}


def measure(made: Policy, tokens: int, repeats: int) -> dict[str, Any]:
    """Both in turn, `repeats` times over, after a short run of each that does not count."""
    engines: dict[str, Callable[[Policy, int], int]] = {"together": together, "alone": alone}
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    wanted = TASKS * GROUP_SIZE * TURNS * tokens
    for run in engines.values():
        run(made, 2)
    for _ in range(repeats):
        for name, run in engines.items():
            wall, processor = time.perf_counter(), time.process_time()
            assert run(made, tokens) == wanted
            runs[name].append((time.perf_counter() - wall, time.process_time() - processor))
            print(f"  {name:10s} {runs[name][-1][0]:7.2f} s  {runs[name][-1][1]:7.2f} s of processors", file=sys.stderr)
    result: dict[str, Any] = {"tokens": wanted, "tokens_a_turn": tokens, "forwards": forwards(made, tokens)}
    for name, spent in runs.items():
        seconds = [wall for wall, _ in spent]
        result[name] = {
            "seconds": [round(value, 3) for value in seconds],
            "processor_seconds": [round(value, 3) for _, value in spent],
            "tokens_per_second": round(wanted / statistics.median(seconds), 1),
        }
    pairs = zip(runs["together"], runs["alone"], strict=True)
    ratios = [(b[0] / a[0], b[1] / a[1]) for a, b in pairs]
    result["times"] = round(statistics.median(ratio for ratio, _ in ratios), 2)
    result["times_processor"] = round(statistics.median(ratio for _, ratio in ratios), 2)
    return result


def main() -> None:
    """Measure, write the result and print it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="a .gguf file, a folder or an id; a tiny random model without it")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--name", default="episodes")
    options = parser.parse_args()
    made = subject(options.model)
    name = Path(options.model).name if options.model else "tiny dense"
    result = {
        "machine": machine(),
        "model": name,
        "rows": f"{TASKS} tasks x {GROUP_SIZE} trajectories x {TURNS} turns",
        **measure(made, options.tokens, options.repeats),
    }
    path = ROOT / "benchmarks" / "results" / f"{options.name}.json"
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps({key: result[key] for key in ("times", "times_processor", "forwards")}))


if __name__ == "__main__":
    main()
