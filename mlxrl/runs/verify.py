"""What a handoff.json says, made anew from what is on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mlxrl import store
from mlxrl.errors import UserError
from mlxrl.runs import facts
from mlxrl.runs.folder import near
from mlxrl.runs.handoff import DataFile, Handoff, ModelFiles, evaluation_of, locate, read, read_json, read_text
from mlxrl.store import File, digest_of, files_of

Outcome = Literal["equal", "differs", "not checkable here"]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a handoff.json, how it compares with what is here, and what that is, on one line."""

    name: str
    outcome: Outcome
    detail: str


def verify(name: str) -> list[Part]:
    """Compare a handoff.json with the files that it is about.

    Args:
        name: as `handoff.locate` takes it.
    Raises:
        UserError: there is no handoff.json, or it is none.
    """
    path, adapter = locate(name)
    found = read(path)
    parts = [_adapter(found, adapter), _parent(found), _model("model", found.model)]
    if found.teacher is not None:
        parts.append(_model("teacher", found.teacher))
    parts += [_data(data) for data in found.data]
    return [*parts, *_beside(found, path.parent)]


def _adapter(found: Handoff, folder: Path) -> Part:
    try:
        files = files_of(folder)
    except UserError as error:
        return Part("adapter", "differs", str(error))
    if difference := _difference(_listed(found.adapter.files), _listed(files)):
        return Part("adapter", "differs", f"{near(folder)}: {difference}")
    return Part("adapter", "equal", f"{store.NAME}{found.adapter.sha256}, {_count(files, 'file')}")


def _listed(files: Iterable[File]) -> dict[str, str]:
    return {file.path: f"{file.size} bytes, {file.sha256}" for file in files}


def _parent(found: Handoff) -> Part:
    """The adapter that training went on from, in the store or where the config has it."""
    parent = found.parent
    if parent is None:
        return Part("parent", "equal", "none: training began from the model")
    if parent.sha256 is None:
        return Part("parent", "not checkable here", f"{near(parent.adapter)} had no digest")
    for name in (f"{store.NAME}{parent.sha256}", parent.adapter):
        try:
            got = digest_of(files_of(store.resolve(name)))
        except UserError:
            continue
        outcome: Outcome = "equal" if got == parent.sha256 else "differs"
        detail = "" if got == parent.sha256 else f": wanted {parent.sha256}, got {got}"
        return Part("parent", outcome, f"{near(name)}{detail}")
    return Part("parent", "not checkable here", f"{near(parent.adapter)} is neither there nor in the store")


def _model(part: str, given: ModelFiles) -> Part:
    try:
        got = facts.model(given.id, given.revision)["files"]
    except OSError as error:
        return Part(part, "not checkable here", f"{near(given.id)}: {error.strerror}")
    name = f"{near(given.id)}{f' at {given.revision}' if given.revision else ''}"
    if not got or not given.files:
        why = "is not on this machine" if given.files else "had no files that could be read"
        return Part(part, "not checkable here", f"{name} {why}")
    if difference := _difference(given.files, got):
        return Part(part, "differs", f"{name}: {difference}")
    heads = sum(value.startswith("head:") for value in got.values())
    begun = f", of {heads} of them the size and the first {facts.HEAD >> 20} MiB" if heads else ""
    return Part(part, "equal", f"{name}, {_count(got, 'file')}{begun}")


def _data(given: DataFile) -> Part:
    name = near(given.source)
    try:
        got = facts.source_digest(given.source)
    except OSError as error:
        return Part("data", "not checkable here", f"{name}: {error.strerror}")
    if got is None or given.file is None:
        why = "is no file" if given.file is None else "is not on this machine"
        return Part("data", "not checkable here", f"{name} {why}")
    if got != given.file:
        return Part("data", "differs", f"{name}: wanted {given.file}, got {got}")
    return Part("data", "equal", f"{name}, {_count(range(given.examples), 'example')}")


def _beside(found: Handoff, folder: Path) -> Iterator[Part]:
    """What a run's folder has in files of their own; the store has none of them."""
    yield _compared("config", folder / "config.toml", found.config, read_text)
    yield _compared("evaluation", folder / "evaluation.json", found.evaluation, evaluation_of)
    yield _compared("versions", folder / "manifest.json", found.versions, _versions)


def _compared(part: str, path: Path, wanted: Any, reader: Callable[[Path], Any]) -> Part:
    if not path.exists():
        return Part(part, "not checkable here", f"no {path.name} beside handoff.json")
    try:
        got = reader(path)
    except UserError as error:
        return Part(part, "differs", str(error))
    same = got == wanted
    return Part(part, "equal" if same else "differs", f"{near(path)}{'' if same else ' has other contents'}")


def _versions(path: Path) -> Any:
    manifest = read_json(path)
    return manifest.get("versions") if isinstance(manifest, Mapping) else None


def _difference(wanted: Mapping[str, str], got: Mapping[str, str]) -> str:
    """The first file that is missing, added or another one, and how many more there are; "" for none."""
    names = sorted(name for name in wanted.keys() | got.keys() if wanted.get(name) != got.get(name))
    if not names:
        return ""
    first = names[0]
    what = "is missing" if first not in got else "was added" if first not in wanted else (
        f"wanted {wanted[first]}, got {got[first]}"
    )  # fmt: skip
    return f"{first}: {what}{f'; {len(names) - 1} more differ' if len(names) > 1 else ''}"


def _count(things: Sized, noun: str) -> str:
    return f"{len(things):,} {noun}{'' if len(things) == 1 else 's'}"
