"""Standard streams whose reader may go away, that may be full or closed, and that may not hold every character."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any


class Tolerant(io.FileIO):
    """A file that drops what cannot be written: neither a command nor user code that prints ends for its sake."""

    def write(self, data: Any, /) -> int:
        """Write bytes, or nothing."""
        try:
            return super().write(data)
        except OSError:
            return len(data)


class Open(io.TextIOWrapper):
    """A stream that user code cannot close."""

    def close(self) -> None:
        """Write what is held back."""
        self.flush()


@contextmanager
def tolerant() -> Generator[None]:
    """A block in which standard output and standard error are tolerant, and write signs they do not have as escapes."""
    _occupy()
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(_tolerant, before, (1, 2))
    try:
        yield
    finally:
        for stream, own in zip((sys.stdout, sys.stderr), before, strict=True):
            if stream is not own:
                stream.flush()
        sys.stdout, sys.stderr = before


def _occupy() -> None:
    """Open what was closed of the standard descriptors, so that no file of a run becomes one of them."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest one that is free


def _tolerant(stream: Any, descriptor: int) -> Any:
    try:
        descriptor = descriptor if stream is None else stream.fileno()
        if stream is not None:
            stream.flush()
    except (OSError, ValueError):  # captured in memory, or of no use already
        return stream
    encoding = getattr(stream, "encoding", None) or "utf-8"
    raw = io.BufferedWriter(Tolerant(descriptor, "w", closefd=False))
    return Open(raw, encoding, "backslashreplace", line_buffering=raw.isatty() or descriptor == 2)
