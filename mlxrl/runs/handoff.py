"""handoff.json: what an adapter is and where it came from, so that who gets it can check it.

It lies in the folder of a run, and in that of an adapter in the store. It is a checksum and not a signature: who can
write the adapter can write it too.
"""

from __future__ import annotations

import os
import re
import warnings
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from mlxrl import store
from mlxrl.errors import UserError, one_line
from mlxrl.files import StrictError, expanded, strict_json, write_json
from mlxrl.runs.folder import RunFolder, near
from mlxrl.store import HANDOFF, RULE, File, digest_of, files_of

FORMAT = "mlxrl-handoff-1"

Name = Annotated[str, Meta(min_length=1, pattern=r"\A[^\x00]*\Z")]
Digest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
FileDigest = Annotated[str, Meta(pattern=r"\A(head:[0-9]+:)?[0-9a-f]{64}\Z")]
Count = Annotated[int, Meta(ge=0)]


class HandoffError(UserError):
    """A handoff.json that is missing, or is none."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """The digest of an adapter folder, the rule that makes it, and the folder's files."""

    sha256: Digest
    rule: Literal["mlxrl-tree-1"]
    files: tuple[File, ...]


@dataclass(frozen=True, slots=True)
class Parent:
    """The adapter that training went on from: its name in the config, and its digest, null where it has none."""

    adapter: Name
    sha256: Digest | None


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model: its id, the revision of a snapshot of the Hub, and its files' digests as `facts.digest` makes them."""

    id: Name
    revision: Name | None
    files: Mapping[str, FileDigest]


@dataclass(frozen=True, slots=True)
class DataFile:
    """A source of examples: how many were taken, a SHA-256 over them, and the digest of the file."""

    source: Name
    examples: Count
    sha256: Digest
    file: FileDigest | None


@dataclass(frozen=True, slots=True)
class Handoff:
    """What handoff.json holds.

    config: the resolved config, as config.toml has it. evaluation: as evaluation.json has it, without the scores of
    each example.
    """

    format: Literal["mlxrl-handoff-1"]
    created: str
    adapter: Adapter
    parent: Parent | None
    model: ModelFiles
    teacher: ModelFiles | None
    data: tuple[DataFile, ...]
    config: str
    algorithm: str
    steps: Count
    versions: Mapping[str, str]
    evaluation: Mapping[str, Any]


def write(folder: RunFolder, algorithm: str, steps: int) -> Path:
    """Write the handoff.json of a run whose adapter is final, out of what its folder holds.

    steps: how many the run has taken. The adapters that a run goes on from are those of its beginning.
    """
    manifest = folder.manifest()
    files = files_of(folder.adapters)
    write_json(path := folder.path / HANDOFF, {
        "format": FORMAT,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "adapter": {"sha256": digest_of(files), "rule": RULE, "files": [asdict(file) for file in files]},
        "parent": manifest["parent"],
        "model": manifest["model"],
        "teacher": manifest.get("teacher"),
        "data": manifest["data"],
        "config": read_text(folder.path / "config.toml"),
        "algorithm": algorithm,
        "steps": steps,
        "versions": manifest["versions"],
        "evaluation": evaluation_of(folder.path / "evaluation.json"),
    })  # fmt: skip
    return path


def evaluation_of(path: Path) -> Any:
    """What an evaluation.json says, without the scores of each example."""
    found = read_json(path)
    return {name: value for name, value in found.items() if name != "scores"} if isinstance(found, Mapping) else found


def keep(folder: RunFolder) -> str:
    """Put a run's adapter into the store; its name there, "" where that could not be, of which a warning tells."""
    try:
        return f"{store.NAME}{store.keep(folder.adapters, folder.path / HANDOFF).name}"
    except store.StoreError as error:
        warnings.warn(f"the adapter is not in the store: {error}", stacklevel=2)
        return ""


def parent_of(adapter: str | None) -> dict[str, Any] | None:
    """What the manifest of a run says of the adapter that it goes on from; a warning where that has no digest."""
    if adapter is None:
        return None
    try:
        return {"adapter": adapter, "sha256": digest_of(files_of(store.resolve(adapter)))}
    except store.StoreError as error:
        warnings.warn(f"the adapter that this run goes on from has no digest: {error}", stacklevel=2)
        return {"adapter": adapter, "sha256": None}


def locate(name: str) -> tuple[Path, Path]:
    """The handoff.json that a name leads to, and the folder of its adapter.

    Args:
        name: a run's folder; an adapter's folder, with handoff.json in it or beside it; or the digest of an adapter in
            the store or of a run below `runs`, or its first digits, with or without `sha256:`.
    Raises:
        UserError: there is none.
    """
    named = store.is_digest(name) or (store.DIGITS.fullmatch(name) and not os.path.exists(name))
    folder = _of_digest(name) if named else expanded(name).absolute()
    adapter = folder if os.path.isfile(folder / "adapter_config.json") else folder / "adapters"
    for place in (adapter, adapter.parent):
        if os.path.isfile(place / HANDOFF):
            return place / HANDOFF, adapter
    there = f"no {HANDOFF}" if os.path.isdir(folder) else "no such folder"
    raise HandoffError(near(folder), f"{there}; wanted the folder of a run that has ended, or of its adapter")


def _of_digest(name: str) -> Path:
    """The folder of an adapter in the store, or that of a run below `runs`."""
    digits = name.removeprefix(store.NAME).lower()
    try:
        return store.entry(name)
    except store.StoreError:
        for path in below(Path("runs")):
            with suppress(HandoffError):
                if read(path).adapter.sha256.startswith(digits):
                    return path.parent
        raise


def below(folder: Path) -> list[Path]:
    """The handoff.json of every run whose folder lies in a folder."""
    return sorted(folder.absolute().glob(f"*/{HANDOFF}"))


def read(path: Path) -> Handoff:
    """A handoff.json.

    Raises:
        HandoffError: it cannot be read, is of another form, or contradicts itself.
    """
    try:
        found = msgspec.convert(read_json(path), Handoff)
        _check(near(path), found.adapter)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$")
        raise HandoffError(near(path), place.strip(".`"), what[:1].lower() + what[1:]) from None
    return found


def _check(path: str, adapter: Adapter) -> None:
    """HandoffError for files outside the adapter's folder, that stand twice, or that do not give its digest."""
    names = [file.path for file in adapter.files]
    if outside := [name for name in names if not _is_inside(name)]:
        raise HandoffError(path, "adapter", "files", f"wanted paths in the adapter's folder, got {outside[0]!a}")
    if twice := next((name for name, times in Counter(names).items() if times > 1), None):
        raise HandoffError(path, "adapter", "files", f"{twice!r} stands twice")
    if (got := digest_of(adapter.files)) != adapter.sha256:
        raise HandoffError(path, "adapter", f"sha256: its files give {got}, not {adapter.sha256}")


def _is_inside(name: str) -> bool:
    """Whether a name is that of a file below a folder, written in one way only."""
    parts = PurePosixPath(name).parts
    return bool(parts) and "/".join(parts) == name and ".." not in parts and not re.search("[\0\ud800-\udfff]", name)


def read_json(path: Path) -> Any:
    """The JSON of a run's file; HandoffError where it is none."""
    text = read_text(path)
    try:
        return strict_json(text)
    except StrictError as error:
        raise HandoffError(near(path), str(error)) from None
    except ValueError as error:
        raise HandoffError(near(path), f"wanted JSON: {one_line(error, 100)}") from None


def read_text(path: Path) -> str:
    """The text of a run's file, its line ends as they are; HandoffError where it is none."""
    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise HandoffError(near(path), f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise HandoffError(near(path), f"wanted UTF-8: {error.reason} at byte {error.start}") from None
