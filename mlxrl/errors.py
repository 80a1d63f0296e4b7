"""What the user can put right: one base class, and the parts of its one-line messages."""

from __future__ import annotations

import difflib
import json
import os
import resource
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from traceback import walk_tb
from typing import Any, ClassVar, Self

OPEN_FILES = 4096


WIDEST = 1000
"""Characters of a part of a message at most: a name or a value may be a whole file by mistake."""


class UserError(ValueError):
    """Something the user can put right. Its text is one line: where, what was wanted, what was got, what to do.

    parts: of the line, from the outermost place inwards; the last one is the message.
    exit_code: of the command line that ends with it.
    """

    exit_code: ClassVar[int] = 2

    def __init__(self, *parts: str) -> None:
        self.parts = tuple(one_line(part, WIDEST) for part in parts if part)
        super().__init__(": ".join(self.parts))

    def within(self, *outer: str) -> Self:
        """The same error with the places around it in front."""
        return type(self)(*outer, *self.parts)


def require_open_files() -> None:
    """UserError where a process may not open as many files as mlx-lm asks for when it is imported."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY or most >= OPEN_FILES:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (now, OPEN_FILES))
    except (OSError, ValueError):
        why = f"wanted at least {OPEN_FILES} open files, as mlx-lm asks for, got {most}; raise the limit"
        raise UserError("ulimit -n", why) from None


def one_line(text: object, width: int | None = None) -> str:
    """A text on one line, cut to so many characters."""
    line = " ".join(str(text).split())
    return line if width is None or len(line) <= width else line[: max(width - 3, 0)] + "..."


def message_of(error: BaseException) -> str:
    """What an exception says, or its class where it says nothing or fails to say it."""
    try:
        return str(error) or type(error).__name__
    except BaseException:  # noqa: BLE001  (the class may be a user's own)
        return type(error).__name__


def exception_line(error: BaseException) -> str:
    """An exception as one line, its class first."""
    name, message = type(error).__name__, message_of(error)
    return one_line(name if message == name else f"{name}: {message}")


def place_of(error: BaseException) -> str:
    """Where a user's code raised, " (file.py, line 3)"; empty where that is not known."""
    package, library = str(Path(__file__).parent), str(Path(os.__file__).parent)
    for frame, line in reversed(list(walk_tb(error.__traceback__))):
        name = frame.f_code.co_filename
        if not name.startswith((package, library, "<frozen")) and "site-packages" not in name:
            with suppress(OSError):  # the current directory has gone
                name = name.removeprefix(f"{Path.cwd()}/")
            return f" ({name}, line {line})"
    return ""


def brief(value: Any, width: int = 60) -> str:
    """A value for a message, as JSON writes it."""
    if value is None:
        return "nothing (null)"
    try:
        text = json.dumps(value, default=repr, ensure_ascii=False)
    except BaseException:  # noqa: BLE001  (the value may be a user's own)
        text = f"a {type(value).__name__} that cannot be written out"
    return one_line(text, width)


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """ "; did you mean 'x'?" where one of `names` is close to `name`, else nothing."""
    near = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
