"""Files that are whole or not there, and lines of JSON that survive a kill."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def expanded(path: str | Path) -> Path:
    """A path whose `~` is the user's folder; that of a user who does not exist stays as it is."""
    return Path(os.path.expanduser(path))


@contextmanager
def replacing(path: Path) -> Generator[Path]:
    """Yield a temporary path beside `path`; on success it takes the place of `path`, on an error it is removed.

    The suffix is kept, because MLX chooses a file format by it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file in one piece."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write strict JSON in one piece; numbers that are not finite are null."""
    write_text(path, json.dumps(plain(value), indent=2, allow_nan=False, default=str) + "\n")


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Append a record as a line, in one write. A line torn before is ended first, so that it takes no other with it."""
    text = json.dumps(plain(record), ensure_ascii=False, allow_nan=False, default=str)
    line = text.encode("utf-8", "backslashreplace") + b"\n"
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        os.write(descriptor, b"\n" + line if torn else line)
    finally:
        os.close(descriptor)


def extend_last_line(path: Path, record: Mapping[str, Any]) -> bool:
    """Add to the last record of a file of JSON lines, in one piece; whether there is one."""
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    last = _record(lines[-1]) if lines else None
    if last is None:
        return False
    text = json.dumps(plain({**last, **record}), ensure_ascii=False, allow_nan=False, default=str)
    with replacing(path) as temporary:
        temporary.write_bytes(b"".join(lines[:-1]) + text.encode("utf-8", "backslashreplace") + b"\n")
    return True


def read_lines(path: str | Path) -> list[dict[str, Any]]:
    """The records of a file of JSON lines; those that a kill has torn are left out, a missing file is empty."""
    try:
        raw = Path(path).read_bytes()
    except FileNotFoundError:
        return []
    return [record for line in raw.split(b"\n") if (record := _record(line)) is not None]


def plain(value: Any) -> Any:
    """A value as JSON can hold it: numbers that are not finite become null, tuples lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
