"""Checkpoints: adapters, optimizer state and counters, from which a run goes on bit for bit.

A checkpoint is a folder `step-000050` that appears whole: it is written beside its place, synced and renamed. Its
`state.json` has the digest of every other file and of what it says itself, so that a damaged one is known.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from mlxrl.errors import UserError, one_line
from mlxrl.files import plain, replacing_all, sha256, write_json
from mlxrl.policy import adapter_folder
from mlxrl.policy.policy import Policy
from mlxrl.protocols import Algorithm
from mlxrl.train.own import state_of, take_state
from mlxrl.train.state import RunState

STATE, OPTIMIZER = "state.json", "optimizer.safetensors"
NAME = re.compile("step-[0-9]+")
ARRAYS = (adapter_folder.WEIGHTS, adapter_folder.CONFIG, OPTIMIZER)


class CheckpointError(UserError):
    """A checkpoint that is none, is damaged, or is of another run."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint: its folder, and what its `state.json` says."""

    folder: Path
    saved: Mapping[str, Any]

    @property
    def step(self) -> int:
        """Steps taken when it was saved."""
        return self.saved["step"]


def save(
    folder: Path, policy: Policy, state: RunState, algorithm: Algorithm | None = None, facts: Mapping[str, Any] = {}
) -> None:
    """Save what the next step needs in a folder, which appears whole.

    Args:
        algorithm: one with a state of its own, as `protocols.Algorithm` says; facts: of the run, that one which goes
            on from here must share.
    """
    with replacing_all(folder, (*ARRAYS, STATE)) as temporary:
        policy.save(temporary)
        mx.save_safetensors(str(temporary / OPTIMIZER), dict(tree_flatten(state.optimizer.state)))
        saved = plain({
            "step": state.step, "skipped": state.skipped, "streaks": state.streaks, "values": state.values,
            "optimizer": type(state.optimizer).__name__, "algorithm": state_of(algorithm), "run": facts,
            "files": {name: sha256(temporary / name) for name in ARRAYS},
        })  # fmt: skip
        write_json(temporary / STATE, {**saved, "sha256": _digest(saved)})


def _digest(saved: Mapping[str, Any]) -> str:
    """SHA-256, in hex, of what a `state.json` says besides it."""
    return hashlib.sha256(json.dumps(saved, sort_keys=True).encode()).hexdigest()


def save_rolling(
    folder: Path,
    keep: int,
    policy: Policy,
    state: RunState,
    algorithm: Algorithm | None,
    facts: Mapping[str, Any],
    own: Container[Path],
) -> Path:
    """Save a checkpoint in a folder of some, and then remove all but the newest `keep` of those that are not later.

    own: checkpoints of this run; one of another run at the same step gives way.
    """
    path = folder / f"step-{state.step:06d}"
    if path.exists() and not (path.absolute() in own and is_whole(path)):
        remove([path])
    if not path.exists():
        save(path, policy, state, algorithm, facts)
    remove([one for one in found(folder) if step_of(one) <= state.step][:-keep])
    return path


def remove(folders: Iterable[Path]) -> None:
    """Remove checkpoints, or what else is a folder; none is ever seen half removed."""
    for old in folders:
        hidden = old.with_name(f".{old.name}")
        old.rename(hidden)
        shutil.rmtree(hidden)


def step_of(folder: Path) -> int:
    """The number of steps in the name of a folder such as step-000050."""
    return int(folder.name.removeprefix("step-"))


def found(folder: Path) -> list[Path]:
    """The checkpoints in a folder, whole or not, the earliest first; what else lies there is none."""
    there = [path for path in folder.glob("step-*") if NAME.fullmatch(path.name)]
    return sorted((path for path in there if path.is_dir() and not path.is_symlink()), key=step_of)


def newest(path: str | Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint of a run's folder, a folder of checkpoints, or that folder itself.

    Returns:
        it, None where there is none, and a line for each newer one that is damaged.
    """
    damaged: list[str] = []
    for one in _candidates(Path(path)):
        try:
            return read(one), damaged
        except CheckpointError as error:
            damaged.append(str(error))
    return None, damaged


def _candidates(path: Path) -> Iterator[Path]:
    if (path / STATE).is_file():
        yield path
        return
    yield from reversed(found(path / "checkpoints" if (path / "checkpoints").is_dir() else path))


def read(folder: Path) -> Checkpoint:
    """A checkpoint whose files are as they were saved.

    Raises:
        CheckpointError: they are not.
    """
    if not (folder / STATE).is_file():
        raise CheckpointError(str(folder), f"no {STATE}; wanted a checkpoint that a run has saved")
    try:
        saved = json.loads((folder / STATE).read_text(encoding="utf-8"))
        if saved.pop("sha256") != _digest(saved):
            raise CheckpointError(str(folder), f"{STATE} is damaged: it is not as it was saved")
        for name, value in saved["files"].items():
            if sha256(folder / name) != value:
                raise CheckpointError(str(folder), f"{name} is damaged: it is not as it was saved")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(str(folder), f"damaged: {one_line(error)}") from error
    return Checkpoint(folder, saved)


def is_whole(folder: Path) -> bool:
    """Whether a folder is a checkpoint whose files are as they were saved."""
    with suppress(CheckpointError):
        return bool(read(folder))
    return False


def restore(
    checkpoint: Checkpoint,
    policy: Policy,
    state: RunState,
    algorithm: Algorithm | None = None,
    facts: Mapping[str, Any] = {},
) -> None:
    """Take adapters, optimizer state and counters over; a constant learning rate stays as it is.

    Raises:
        CheckpointError: it is of another optimizer, policy, or run; nothing has been taken over then.
    """
    saved, where = checkpoint.saved, str(checkpoint.folder)
    kind = type(state.optimizer).__name__
    if saved["optimizer"] != kind:
        why = f"its optimizer is {saved['optimizer']}, wanted the state of {kind}, with which the run goes on"
        raise CheckpointError(where, why)
    for name, value in facts.items():
        if saved["run"].get(name, value) != value:
            raise CheckpointError(where, f"it is of a run with {name} {saved['run'][name]}, wanted {value}")
    adapter_folder.load_weights(policy.model, checkpoint.folder)
    arrays: Any = mx.load(str(checkpoint.folder / OPTIMIZER))
    if "learning_rate" in arrays and "learning_rate" not in state.optimizer._schedulers:  # pyright: ignore
        arrays["learning_rate"] = state.optimizer.learning_rate
    state.optimizer.state = tree_unflatten(list(arrays.items()))
    state.step, state.skipped, state.streaks = saved["step"], saved["skipped"], dict(saved["streaks"])
    state.values = dict(saved["values"])
    take_state(algorithm, saved["algorithm"])
