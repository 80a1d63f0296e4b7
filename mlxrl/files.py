"""Atomic writes, and append-only files of JSON lines."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DEPTH = 100
"""Lists and objects inside one another at most: what copies or writes a value calls itself for each."""


SMALL = 1 << 20
"""Bytes: a disk with less than that is full."""


class StrictError(ValueError):
    """JSON that is not strict, or nested too deeply. Its text is what is wrong with it."""


def expanded(path: str | Path) -> Path:
    """A path whose `~` is the user's folder; that of a user who does not exist stays as it is."""
    return Path(os.path.expanduser(path))


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def replacing(path: Path) -> Generator[Path]:
    """Yield a temporary path beside `path`; on success it takes the place of `path`, on an error it is removed.

    The suffix is kept, because MLX chooses a file format by it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        with written_by_mlx(path):
            yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def written_by_mlx(path: Path) -> Generator[None]:
    """A block in which MLX writes a file: where it cannot, an OSError as of other writes, though not with its cause."""
    try:
        yield
    except RuntimeError as error:
        if "[write]" not in str(error) and "[save" not in str(error):
            raise
        full = shutil.disk_usage(path.parent).free < SMALL
        number = errno.ENOSPC if full else errno.EIO
        raise OSError(number, os.strerror(number), str(path)) from error


@contextmanager
def replacing_all(folder: Path, names: Sequence[str]) -> Generator[Path]:
    """Yield a temporary folder beside `folder` for files of these names, which are moved to it on success.

    Where `folder` is new or empty all of them appear at once; else they are replaced in their order.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        with written_by_mlx(folder):
            yield temporary
        for name in names:
            with open(temporary / name, "rb") as file:
                os.fsync(file.fileno())
        if not folder.exists() or not any(folder.iterdir()):
            os.replace(temporary, folder)
        else:
            for name in names:
                os.replace(temporary / name, folder / name)
            sync(folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file in one piece."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write strict JSON in one piece; numbers that are not finite are null."""
    write_text(path, json.dumps(plain(value), indent=2, allow_nan=False, default=str) + "\n")


def append_lines(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Append records as lines, in one write that is synced.

    A line torn before is ended first, so that it takes no other with it. OSError where not all could be written.
    """
    lines = b"".join(map(_line, records))
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        lines = b"\n" + lines if torn else lines
        if (written := os.write(descriptor, lines)) < len(lines):
            os.write(descriptor, lines[written:])  # says why not all of it was
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def extend_last_line(path: Path, record: Mapping[str, Any]) -> bool:
    """Add to the last record of a file of JSON lines, in one piece; whether there is one."""
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    last = _record(lines[-1]) if lines else None
    if last is None:
        return False
    with replacing(path) as temporary:
        temporary.write_bytes(b"".join(lines[:-1]) + _line({**last, **record}))
    return True


def keep_lines(path: Path, kept: Callable[[dict[str, Any]], bool]) -> None:
    """Leave out of a file of JSON lines the records that are not kept, and lines that a kill has torn, in one piece."""
    if not path.is_file():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    left = [line for line in lines if line.endswith(b"\n") and (record := _record(line)) is not None and kept(record)]
    if left != lines:
        with replacing(path) as temporary:
            temporary.write_bytes(b"".join(left))


def read_lines(path: str | Path) -> list[dict[str, Any]]:
    """The records of a file of JSON lines; those that a kill has torn are left out, a missing file is empty."""
    try:
        raw = Path(path).read_bytes()
    except FileNotFoundError:
        return []
    return [record for line in raw.split(b"\n") if (record := _record(line)) is not None]


def strict_json(text: str) -> Any:
    """A value of JSON; ValueError where it is none.

    Raises:
        StrictError: a key stands twice in an object, a number is not finite, or it is nested deeper than DEPTH.
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_not_finite, parse_float=_finite)
    except RecursionError:
        raise StrictError("wanted JSON, got one nested too deeply") from None
    if is_deep(value):
        raise StrictError("wanted JSON, got one nested too deeply")
    return value


def is_deep(value: Any) -> bool:
    """Whether a value is nested deeper than DEPTH."""
    level = {id(value): value}
    for _ in range(DEPTH):
        if not level:
            return False
        inner = (one.values() if isinstance(one, Mapping) else one for one in level.values()
                 if isinstance(one, Mapping | list | tuple))  # fmt: skip
        level = {id(item): item for items in inner for item in items}
    return bool(level)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise StrictError(f"{next(name for name in names if names.count(name) > 1)!r} stands twice")
    return made


def _not_finite(text: str) -> Any:
    raise StrictError(f"wanted JSON, got {text}")


def _finite(text: str) -> float:
    return value if math.isfinite(value := float(text)) else _not_finite(text)


def plain(value: Any) -> Any:
    """A value as JSON can hold it: numbers that are not finite become null, tuples lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def _line(record: Mapping[str, Any]) -> bytes:
    text = json.dumps(plain(record), ensure_ascii=False, allow_nan=False, default=str)
    return text.encode("utf-8", "backslashreplace") + b"\n"


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def sync(folder: Path) -> None:
    """Have the names in a folder on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
