"""A run that is continued from a checkpoint is the run that was never stopped, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from helpers import HINT, a_policy, flat, length
from mlxrl import algo
from mlxrl.algo.terms import KL, TeacherAdvantage
from mlxrl.errors import UserError
from mlxrl.policy.policy import Policy
from mlxrl.settings import EpisodeLimits, Optimizer, Rollout, Sampling, Train
from mlxrl.train import checkpoint
from mlxrl.train.checkpoint import CheckpointError
from mlxrl.train.loop import run
from mlxrl.train.teacher import Teacher
from mlxrl.types import Feedback, Task

TASKS = [Task(text, {"hint": HINT}) for text in ("one", "two", "three", "four", "five")]
MEASURED = ("seconds/", "memory/", "rollout/tokens_per_second")


class Answers:
    """An environment of three turns that rewards short ones."""

    def reset(self, task: Task) -> str:
        return str(task.prompt)

    def step(self, reply: str) -> Feedback:
        return Feedback("next", reward=-0.1 * len(reply), state=len(reply) % 2)


class Counting:
    """GRPO whose learning signal grows with the steps that it has seen: it has a state of its own."""

    def __init__(self) -> None:
        self.own, self.seen = algo.grpo(), 0
        self.name, self.needs, self.loss = "counting", self.own.needs, self.own.loss

    def advantages(self, groups: Any) -> Any:
        self.seen += 1
        return [[self.seen * value for value in group] for group in self.own.advantages(groups)]

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, value: dict[str, int]) -> None:
        self.seen = value["seen"]


def uneven(completions: list[str], prompts: list[str], **_: Any) -> list[float]:
    """Groups of some prompts have no variance."""
    return [float(len(one) % 3) if len(prompt) > 3 else 1.0 for one, prompt in zip(completions, prompts, strict=True)]


EPISODES: dict[str, Any] = {"environment": Answers, "limits": EpisodeLimits(max_turns=3), "reward": None}
KINDS: dict[str, dict[str, Any]] = {
    **{name: {"algorithm": getattr(algo, name)} for name in (
        "grpo", "dr_grpo", "gspo", "gspo_token", "rloo", "cispo", "reinforce_pp", "reinforce_pp_baseline", "gmpo",
        "luspo", "sapo", "dppo")},
    "kl": {"algorithm": lambda: algo.grpo(terms=[KL(coefficient=0.1)])},
    "dapo": {"algorithm": algo.dapo, "reward": uneven, "rollout": Rollout(
        tasks_per_step=2, group_size=2, resampling_rounds=2)},
    "distillation": {"algorithm": algo.opd, "reward": None, "teacher": Teacher(base=True, hint="hint")},
    "teacher and reward": {"algorithm": lambda: algo.grpo(terms=[TeacherAdvantage(coefficient=0.5)]),
                           "teacher": Teacher(base=True, hint="hint")},
    "several updates": {"algorithm": algo.grpo, "train": Train(updates_per_rollout=2, minibatches=2)},
    "dropout": {"algorithm": algo.grpo, "dropout": 0.3, "train": Train(updates_per_rollout=2)},
    "schedule": {"algorithm": algo.grpo, "optimizer": Optimizer(
        name="lion", learning_rate=1e-2, schedule="cosine", warmup_steps=2, weight_decay=0.1)},
    "sgd": {"algorithm": algo.grpo, "optimizer": Optimizer(name="sgd", learning_rate=1e-2, schedule="linear")},
    "episodes": {"algorithm": algo.grpo, **EPISODES},
    "gigpo": {"algorithm": algo.gigpo, **EPISODES},
    "echo": {"algorithm": lambda: algo.grpo(terms=[algo.Echo(weight=0.1, taper=3)]), **EPISODES},
    "own state": {"algorithm": Counting},
}  # fmt: skip


def begun(kind: str, **more: Any) -> tuple[Policy, Any, Any]:
    """A fresh policy and the steps of a run with it."""
    given: dict[str, Any] = {
        "reward": length, "rollout": Rollout(tasks_per_step=2, group_size=3), "sampling": Sampling(max_tokens=6),
        "optimizer": Optimizer(learning_rate=1e-2), "steps": 4, "seed": 3, **KINDS[kind], **more,
    }  # fmt: skip
    algorithm = given.pop("algorithm")()
    policy = a_policy(dropout=given.pop("dropout", 0.0), move=False)
    return policy, run(policy, TASKS, algorithm, **given), algorithm


def result(policy: Policy, steps: Any, taken: list[Any]) -> tuple[dict[str, list[float]], list[Any]]:
    """All arrays that a step changes, and what is told of the steps."""
    arrays = {**flat(policy.model.trainable_parameters()), **flat(steps.state.optimizer.state)}
    told = [
        (one.index, {name: value for name, value in one.metrics.items() if not name.startswith(MEASURED)}, one.warnings,
         [[turn.tokens for turn in row.turns] for group in one.sampled or one.groups for row in group])
        for one in taken
    ]  # fmt: skip
    return {name: array.tolist() for name, array in arrays.items()}, told


ALIKE = ("dr_grpo", "gspo_token", "rloo", "reinforce_pp_baseline", "gmpo", "luspo", "sapo", "dppo")
"""Kinds whose state is that of GRPO."""


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) if kind in ALIKE else kind for kind in KINDS]
)
def test_a_continued_run_is_the_whole_one(kind, tmp_path):
    policy, whole, _ = begun(kind)
    arrays, told = result(policy, whole, list(whole))
    _, first, _ = begun(kind)
    next(first), next(first)
    first.save(tmp_path)
    policy, rest, algorithm = begun(kind, resume=tmp_path)
    assert rest.state.step == 2
    got, of_rest = result(policy, rest, list(rest))
    assert got == arrays
    assert json.dumps(of_rest) == json.dumps(told[2:])
    assert getattr(algorithm, "seen", 4) == 4


def test_a_step_that_was_broken_off_is_taken_back(tmp_path):
    """The third reward raises for good after an update of its step would have been made."""
    policy, steps, _ = begun("several updates")
    next(steps)
    before, moments = flat(policy.model.trainable_parameters()), flat(steps.state.optimizer.state)
    made = steps.state.optimizer.update

    def second(*arguments: Any) -> None:
        made(*arguments)
        raise KeyboardInterrupt

    steps.state.optimizer.update = second
    with pytest.raises(KeyboardInterrupt):
        next(steps)
    assert any(
        not mx.array_equal(value, before[name]) for name, value in flat(policy.model.trainable_parameters()).items()
    )
    del steps.state.optimizer.update
    steps.save(tmp_path)
    for saved, now in ((before, policy.model.trainable_parameters()), (moments, steps.state.optimizer.state)):
        assert all(mx.array_equal(value, saved[name]) for name, value in flat(now).items())
    _, rest, _ = begun("several updates", resume=tmp_path)
    assert [step.number for step in rest] == [2, 3, 4]


def test_a_step_that_was_not_recorded_is_taken_back(tmp_path):
    """With it the algorithm's own state, so that the run goes on as the whole one."""
    policy, whole, _ = begun("own state")
    wanted, _ = result(policy, whole, list(whole))
    policy, steps, algorithm = begun("own state")

    def record(step: Any) -> None:
        if step.number == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(steps.recorded(record))
    assert (steps.state.step, algorithm.seen) == (2, 2)
    assert steps.save(tmp_path).name == "step-000001"
    assert (steps.state.step, algorithm.seen) == (1, 1)
    policy, rest, _ = begun("own state", resume=tmp_path)
    assert result(policy, rest, list(rest))[0] == wanted


class Raising(Counting):
    def state_dict(self) -> Any:
        raise OSError("no state today")


class Infinite(Counting):
    def state_dict(self) -> Any:
        return {"best": float("-inf")}


@pytest.mark.parametrize(
    ("kind", "words"),
    [(Infinite, "wanted strict JSON: finite numbers, texts, lists and objects of them; got"),
     (Raising, r"test_resume\.py, line \d+: OSError: no state today")],
)  # fmt: skip
def test_a_state_that_no_checkpoint_can_hold_is_one_line_before_the_first_step(kind, words):
    _, steps, _ = begun("own state", algorithm=kind)
    with pytest.raises(UserError, match=rf"^counting: state_dict: {words}"):
        next(steps)


def test_checkpoints_of_later_steps_take_no_place_of_earlier_ones(tmp_path):
    """They are damaged, or of another run; what was just saved stays. Other things in the folder are none."""
    (tmp_path / "step-000009").mkdir()
    (tmp_path / "step-000001.bak").mkdir()
    (tmp_path / "step-000008").symlink_to(tmp_path / "step-000009")
    _, steps, _ = begun("grpo")
    for _ in range(2):
        next(steps)
        assert steps.save(tmp_path, keep=1).is_dir()
    assert [path.name for path in checkpoint.found(tmp_path)] == ["step-000002", "step-000009"]
    with pytest.warns(UserWarning, match="step-000009: no state"):
        assert begun("grpo", resume=tmp_path)[1].state.step == 2


def test_a_checkpoint_of_another_run_at_the_same_step_gives_way(tmp_path):
    """A run that goes on from step 1 with another learning rate saves its own step 2."""
    _, steps, _ = begun("grpo")
    first = [(next(steps), steps.save(tmp_path))[1] for _ in range(2)]
    policy, other, _ = begun("grpo", resume=first[0], optimizer=Optimizer(learning_rate=0.1))
    next(other)
    saved = mx.load(str(other.save(tmp_path) / "adapters.safetensors"))
    now = flat(policy.model.trainable_parameters())
    assert all(mx.array_equal(saved[name], value) for name, value in now.items())


def test_steps_that_are_taken_back_are_not_taken_again(tmp_path):
    """Step 3 is undone: weights, optimizer and the algorithm's state are those after step 2, and step 4 comes next."""
    policy, steps, algorithm = begun("own state")
    next(steps), next(steps)
    path = steps.save(tmp_path)
    before, moments = flat(policy.model.trainable_parameters()), flat(steps.state.optimizer.state)
    steps.state.values = {"kept": 1}
    next(steps)
    steps.take_back(path, best=2)
    for saved, now in ((before, policy.model.trainable_parameters()), (moments, steps.state.optimizer.state)):
        assert all(mx.array_equal(value, saved[name]) for name, value in flat(now).items())
    assert (steps.state.step, steps.state.values, algorithm.seen) == (3, {"kept": 1, "best": 2}, 2)
    assert [step.number for step in steps] == [4]


def test_a_taking_back_that_is_broken_off_is_undone(tmp_path, monkeypatch):
    policy, steps, _ = begun("grpo")
    next(steps)
    path = steps.save(tmp_path)
    next(steps)
    before, moments = flat(policy.model.trainable_parameters()), flat(steps.state.optimizer.state)
    restore = checkpoint.restore

    def late(*arguments: Any) -> None:
        restore(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "restore", late)
    with pytest.raises(KeyboardInterrupt):
        steps.take_back(path, best=1)
    steps.rewind()
    for saved, now in ((before, policy.model.trainable_parameters()), (moments, steps.state.optimizer.state)):
        assert all(mx.array_equal(value, saved[name]) for name, value in flat(now).items())
    assert (steps.state.step, steps.state.values) == (2, {})


def test_the_newest_checkpoints_stay_and_a_damaged_one_gives_way(tmp_path):
    _, steps, _ = begun("grpo")
    for _ in steps:
        steps.save(tmp_path, keep=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000003", "step-000004"]
    damage(tmp_path / "step-000004" / "optimizer.safetensors")
    (tmp_path / "step-000003" / "state.json").unlink()
    with pytest.warns(UserWarning, match="step-00000") as told:
        _, rest, _ = begun("grpo", resume=tmp_path)
    assert rest.state.step == 2
    assert [str(one.message).removeprefix(f"{tmp_path}/") for one in told] == [
        "step-000004: optimizer.safetensors is damaged: it is not as it was saved",
        "step-000003: no state.json; wanted a checkpoint that a run has saved",
    ]
    for _ in rest:
        rest.save(tmp_path)
    assert [checkpoint.read(path).step for path in checkpoint.found(tmp_path)] == [3, 4]


def damage(path: Path) -> None:
    """Change a byte."""
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(bytes(raw))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": 4}, "of a run with seed 3, wanted 4"),
        ({"optimizer": Optimizer(name="sgd")}, "its optimizer is AdamW, wanted the state of SGD"),
        ({"algorithm": algo.rloo}, "of a run with algorithm grpo, wanted rloo"),
    ],
)
def test_another_run_is_refused(change, words, tmp_path):
    _, steps, _ = begun("grpo")
    next(steps)
    steps.save(tmp_path)
    with pytest.raises(CheckpointError, match=words):
        begun("grpo", resume=tmp_path, **change)
    with pytest.raises(CheckpointError, match="no whole checkpoint; wanted one that a run has saved"):
        begun("grpo", resume=tmp_path / "nothing")
