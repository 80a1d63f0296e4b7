"""Adapters by their content: the digest of an adapter folder, and a read-only store of adapters by their digests.

The digest of a folder is the SHA-256 of the line `RULE` and a line for each of its files, in the order of the bytes of
their paths, each ended by a newline:

    {bytes of the path} {path} {bytes of the file} {SHA-256 of the file in hex}

A path is relative to the folder, in UTF-8, "/" between its parts. The length in front says where it ends, so that no
two lists of files have the same lines. handoff.json at the top, and names that begin with a dot, do not count.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlxrl.errors import UserError
from mlxrl.files import expanded, sha256, sync

RULE = "mlxrl-tree-1"
NAME = "sha256:"
"""What begins the name of an adapter in the store; a digest or the first digits of one follow."""
SHORTEST = 8
"""Hex digits of a digest at least."""
DIGITS = re.compile(f"[0-9a-fA-F]{{{SHORTEST},64}}")
HANDOFF = "handoff.json"
VARIABLE, PLACE = "MLXRL_STORE", "~/.mlxrl/adapters"


class StoreError(UserError):
    """An adapter that has no digest, or that the store does not have."""


@dataclass(frozen=True, slots=True)
class File:
    """A file of an adapter folder: its path there, its size in bytes, its SHA-256 in hex."""

    path: str
    size: int
    sha256: str


def files_of(folder: Path) -> tuple[File, ...]:
    """The files of an adapter folder that count.

    Raises:
        StoreError: something in it is no regular file, has a name that is not UTF-8, or cannot be read.
    """
    try:
        return tuple(_file(folder, path) for path in sorted(_paths(folder), key=os.fsencode))
    except OSError as error:
        raise StoreError(str(error.filename or folder), f"cannot be read: {error.strerror}") from None


def digest_of(files: Sequence[File]) -> str:
    """The digest of an adapter folder, in hex, by the rule of this module."""
    total = hashlib.sha256(f"{RULE}\n".encode())
    for file in sorted(files, key=lambda one: one.path.encode()):
        total.update(f"{len(file.path.encode())} {file.path} {file.size} {file.sha256}\n".encode())
    return total.hexdigest()


def _paths(folder: Path) -> Iterator[str]:
    left = [""]
    while left:
        within = left.pop()
        for entry in os.scandir(folder / within):
            path = f"{within}/{entry.name}" if within else entry.name
            if entry.name.startswith(".") or path == HANDOFF:
                continue
            if entry.is_symlink():
                raise StoreError(entry.path, "a symbolic link; wanted a file; copy the folder with cp -RL")
            if entry.is_dir():
                left.append(path)
            elif entry.is_file():
                yield path
            else:
                raise StoreError(entry.path, "wanted a file, got something that is neither file nor folder")


def _file(folder: Path, path: str) -> File:
    try:
        path.encode()
    except UnicodeEncodeError:
        raise StoreError(str(folder), f"wanted names in UTF-8, got {os.fsencode(path)!r}") from None
    return File(path, (folder / path).stat().st_size, sha256(folder / path))


def place() -> Path:
    """Where the store is: $MLXRL_STORE, or ~/.mlxrl/adapters."""
    given = os.environ.get(VARIABLE) or PLACE
    if not (path := expanded(given)).is_absolute():
        raise StoreError(VARIABLE, f"wanted an absolute path, got {given!r}")
    return path


def is_digest(name: object) -> bool:
    """Whether an adapter is named by its digest, `sha256:...`, and not by a path."""
    return str(name).startswith(NAME)


def located(name: str, directory: Path) -> str:
    """An adapter's name that means the same in every directory: its whole digest, or its path made absolute."""
    return full_name(name) if is_digest(name) else str(directory / expanded(name))


def full_name(name: str) -> str:
    """The name of an adapter with its whole digest; StoreError where the store has none, or several that begin so."""
    return f"{NAME}{entry(name).name}"


def entry(name: str) -> Path:
    """An adapter's folder in the store, its bytes not looked at.

    Args:
        name: its digest or the first digits of it, with or without `sha256:`.
    """
    digits = name.removeprefix(NAME)
    if not DIGITS.fullmatch(digits):
        raise StoreError(name, f"wanted {NAME} and {SHORTEST} to 64 hex digits")
    found = sorted(path for path in place().glob(f"{digits.lower()}*") if len(path.name) == 64 and path.is_dir())
    if not found:
        raise StoreError(name, f"no adapter of this digest in the store, {place()}")
    if len(found) > 1:
        raise StoreError(name, f"{len(found)} adapters in the store begin so; give more digits")
    return found[0]


def resolve(name: str | Path) -> Path:
    """The folder of an adapter: a path as it is, `sha256:DIGEST` from the store.

    Raises:
        StoreError: the store has none of this digest, or its bytes give another one.
    """
    if not is_digest(name):
        return Path(name)
    folder = entry(str(name))
    if (got := digest_of(files_of(folder))) != folder.name:
        why = f"damaged: its bytes give {got}; remove it: chmod -R u+w {folder} && rm -r {folder}"
        raise StoreError(str(folder), why)
    return folder


def keep(folder: Path, handoff: Path) -> Path:
    """Put an adapter folder with its handoff.json into the store; one that is there stays as it is.

    It appears whole, by one rename: files with the mode 0444, folders with 0555.

    Returns:
        its folder in the store.
    Raises:
        StoreError: it cannot be read or copied, or what the store has of its digest is damaged.
    """
    digest = digest_of(files := files_of(folder))
    target = place() / digest
    if target.is_dir():
        return resolve(f"{NAME}{digest}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{digest[:SHORTEST]}.", dir=target.parent))
        try:
            _copy([(folder / file.path, temporary / file.path) for file in files] + [(handoff, temporary / HANDOFF)])
            if files_of(temporary) != files:
                raise StoreError(str(folder), "changed while it was copied to the store")
            _chmod(temporary, 0o444, 0o555)
            os.rename(temporary, target)
            sync(target.parent)
        finally:
            _remove(temporary)
    except OSError as error:
        if not target.is_dir():  # else another process was first
            raise StoreError(str(target.parent), f"cannot be written: {error.strerror}") from None
    return target


def _copy(pairs: Sequence[tuple[Path, Path]]) -> None:
    for source, target in pairs:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        with target.open("rb") as file:
            os.fsync(file.fileno())


def _chmod(folder: Path, files: int, folders: int) -> None:
    for path in [*folder.rglob("*"), folder]:
        path.chmod(folders if path.is_dir() else files)


def _remove(folder: Path) -> None:
    if folder.is_dir():
        _chmod(folder, 0o644, 0o755)
        shutil.rmtree(folder)
