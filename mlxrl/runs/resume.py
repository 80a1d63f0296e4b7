"""How a run is gone on with: what must be as it was, what may have changed, and where it stood."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxrl.config import resolved
from mlxrl.errors import UserError, brief
from mlxrl.files import keep_lines, write_text
from mlxrl.runs import facts, handoff
from mlxrl.runs.experiment import Experiment
from mlxrl.runs.folder import RunFolder, near
from mlxrl.store import HANDOFF
from mlxrl.toml import parsed
from mlxrl.train import checkpoint
from mlxrl.train.checkpoint import Checkpoint

FIXED = ("seed", "model", "lora", "data", "optimizer.name", "algorithm.name", "environment.factory", "teacher.id",
         "evaluation")  # fmt: skip
"""Tables and keys without which a run would be another one."""


@dataclass(frozen=True, slots=True)
class Resumption:
    """Where a run goes on: from its newest whole checkpoint, or from its beginning where there is none.

    damaged: a line for each newer checkpoint that is not whole; changed: keys by what they were and what they are.
    """

    checkpoint: Checkpoint | None
    damaged: Sequence[str] = ()
    changed: Sequence[str] = ()

    @property
    def step(self) -> int:
        """Steps that are not taken again."""
        return 0 if self.checkpoint is None else self.checkpoint.step

    def lines(self) -> list[tuple[str, str]]:
        """What is said of it, as labelled lines for people."""
        place = "its beginning; it has no whole checkpoint" if self.checkpoint is None else f"step {self.step}"
        damaged = [("damaged", near(line)) for line in self.damaged]
        return [("resumed", f"from {place}"), *damaged, *(("changed", line) for line in self.changed)]


def resumption(folder: RunFolder, experiment: Experiment) -> Resumption:
    """Where a run goes on under an experiment.

    Raises:
        UserError: it has ended, all its checkpoints are damaged, or the experiment is of another model, other data or
            another optimizer.
    """
    found, damaged = checkpoint.newest(folder.checkpoints)
    done, config = 0 if found is None else found.step, experiment.config
    if done >= config.steps and folder.manifest().get("state") == "succeeded":
        raise UserError(
            str(near(folder.path)), f"the run has taken its {done} steps; steps=N with more of them goes on"
        )
    if found is None and damaged:
        why = "none of its checkpoints is whole; copy one back, or begin another run from its adapters"
        raise UserError(near(damaged[0]), why)
    now = _digests(experiment)
    changed = [*_changed(folder, experiment, now), *_changed_code(folder, experiment)]
    _refuse_other_files(folder, experiment, now)
    return Resumption(found, damaged, changed)


def begin(folder: RunFolder, experiment: Experiment, found: Resumption) -> None:
    """Take back what was written of steps that are taken again, and write the config that the run has now."""
    with folder.writing():
        folder.clear_temporary()
        for name in ("metrics.jsonl", "samples.jsonl"):
            keep_lines(folder.path / name, lambda record: record.get("step") in range(1, found.step + 1))
        keep_lines(folder.path / "events.jsonl", lambda record: True)
        write_text(folder.path / "config.toml", experiment.toml())
        (folder.path / HANDOFF).unlink(missing_ok=True)
    folder.cancel_asked()
    folder.event("resumed", step=found.step, damaged=found.damaged, changed=found.changed)


def _digests(experiment: Experiment) -> dict[str, Any]:
    """The files of an experiment's models, and its data, by digest: what a manifest has under the same names."""
    config = experiment.config
    sources = {"model": config.model.id, "teacher": config.teacher.id}
    models = {part: facts.model(source) for part, source in sources.items() if source not in (None, "base")}
    return {**models, "data": facts.data_digests(experiment)}


def _changed(folder: RunFolder, experiment: Experiment, digests: Mapping[str, Any]) -> list[str]:
    """The keys that differ from the run's config; UserError for one that must not."""
    saved, moved = parsed(folder.path / "config.toml"), _moved(folder.manifest(), digests)
    wanted, own = experiment.config.run.folder, saved.get("run", {}).get("folder")
    if wanted not in (own, str(folder.path)):
        raise UserError(near(folder.path), "run.folder", f"got {near(wanted or '')}; a run goes on in its own folder")
    before, now = _flat(saved), _flat(resolved(experiment.config, experiment.table))
    lines: list[str] = []
    for key in sorted(key for key in {*before, *now} - {"run.folder"} if before.get(key) != now.get(key)):
        old, new = brief(before.get(key)), brief(now.get(key))
        if key not in moved and any(f"{key}.".startswith(f"{fixed}.") for fixed in FIXED):
            start = f'model.adapter="{near(folder.adapters)}"'
            why = f"the run has {old}, got {new}; a run goes on with its own model, adapters, data and optimizer"
            raise UserError(near(folder.path), key, f"{why}; another one begins from its adapter with {start}")
        lines.append(f"{key} was {old}, is {new}")
    return lines


def _moved(manifest: Mapping[str, Any], digests: Mapping[str, Any]) -> set[str]:
    """The keys that name a place of what is the same there as where the run began."""
    same = {f"{part}.id" for part in ("model", "teacher") if part in digests
            and (old := manifest.get(part, {}).get("files")) and old == digests[part]["files"]}  # fmt: skip
    before = [(one["examples"], one["sha256"]) for one in manifest.get("data", ())]
    now = [(one["examples"], one["sha256"]) for one in digests["data"]]
    return same | ({"data.train", "data.evaluation", "data.validation"} if before == now else set())


def _changed_code(folder: RunFolder, experiment: Experiment) -> list[str]:
    """The files of the user's code that are others than the run began with, which is their wish."""
    before, now = folder.manifest().get("code", {}), facts.code_digests(experiment.config)
    return [f"{near(path)} is another file than the run began with" for path in now
            if before.get(path, now[path]) != now[path]]  # fmt: skip


def _refuse_other_files(folder: RunFolder, experiment: Experiment, digests: Mapping[str, Any]) -> None:
    """UserError where the model's files or the data are others than the run began with."""
    manifest, config = folder.manifest(), experiment.config
    for part in ("model", "teacher"):
        old, new = manifest.get(part, {}).get("files"), digests.get(part, {}).get("files")
        if old and new is not None and old != new:
            name = next(name for name in sorted({*old, *new}) if old.get(name) != new.get(name))
            raise UserError(near(folder.path), part, f"{name} is another file than the run began with")
    if (start := manifest.get("parent")) and start != handoff.parent_of(config.model.adapter):
        why = f"{near(start['adapter'])} is another adapter than the run began with"
        raise UserError(near(folder.path), "model", why)
    before = {one["source"]: one["sha256"] for one in manifest.get("data", ())}
    for now in digests["data"]:
        if before.get(now["source"], now["sha256"]) != now["sha256"]:
            why = f"{near(now['source'])} has other examples than the run began with"
            raise UserError(near(folder.path), "data", why)


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A table's values by their dotted keys."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, Mapping) and value:
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found
