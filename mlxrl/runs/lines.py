"""JSON lines that survive a kill: a line is one write, and what a kill has torn is passed over by the reader."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Append a record as a line, in one write. A line torn before is ended first, so that it takes no other with it."""
    line = (
        json.dumps(plain(record), ensure_ascii=False, allow_nan=False, default=str).encode("utf-8", "backslashreplace")
        + b"\n"
    )
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        os.write(descriptor, b"\n" + line if torn else line)
    finally:
        os.close(descriptor)


def read_lines(path: str | Path) -> list[dict[str, Any]]:
    """The records of a file of JSON lines; those that a kill has torn are left out, a missing file is empty."""
    try:
        raw = Path(path).read_bytes()
    except FileNotFoundError:
        return []
    return [record for line in raw.split(b"\n") if (record := _record(line)) is not None]


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def plain(value: Any) -> Any:
    """A value as JSON can hold it: numbers that are not finite become null, tuples lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value
