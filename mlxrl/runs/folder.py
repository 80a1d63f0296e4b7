"""The folder of a run: what is decided before it, what is added while it runs, and how it ended.

config.toml, manifest.json and evaluation.json are replaced in one piece; metrics.jsonl, samples.jsonl and events.jsonl
grow by whole lines. Reading a run needs nothing of this package.
"""

from __future__ import annotations

import errno
import json
import os
import traceback
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from mlxrl.checked import SettingError
from mlxrl.errors import UserError, exception_line
from mlxrl.files import append_line, write_json, write_text

State = Literal["configured", "running", "cancelled", "interrupted", "failed", "succeeded"]
"""cancelled: ended at a step boundary when asked to. interrupted: stopped at once, or killed while running."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A run's folder, through which everything in it but its sinks' files is written."""

    path: Path

    def begin(self, config: str) -> None:
        """Write the resolved config; SettingError where that cannot be."""
        with _named(self.path):
            write_text(self.path / "config.toml", config)
            self.enter("configured")

    @property
    def adapters(self) -> Path:
        """Where the result goes; mlx-lm loads it."""
        return self.path / "adapters"

    @property
    def best(self) -> Path:
        """Where adapters are that are the best on data.validation, as step-000050."""
        return self.path / "best"

    @property
    def accepted(self) -> Path:
        """Where the states are that a rejected adapter is taken back to, as step-000050."""
        return self.path / "accepted"

    def checkpoint(self, step: int) -> Path:
        """The folder of the checkpoint after so many steps."""
        return self.path / "checkpoints" / f"step-{step:06d}"

    def manifest(self) -> dict[str, Any]:
        """The manifest as it stands."""
        path = self.path / "manifest.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def record(self, **facts: Any) -> None:
        """Add facts to the manifest."""
        write_json(self.path / "manifest.json", {**self.manifest(), **facts})

    def enter(self, state: State, **fields: Any) -> None:
        """Change the run's state, in the manifest and as an event; the last ones get the time they ended at."""
        ended = {} if state in ("configured", "running") else {"ended": _now()}
        started = {"started": _now(), "pid": os.getpid()} if state == "running" else {}
        self.record(state=state, **started, **ended)
        self.event(state, **fields)

    def event(self, event: str, **fields: Any) -> None:
        """Append to events.jsonl."""
        append_line(self.path / "events.jsonl", {"time": _now(), "event": event, **fields})

    def failure(self, error: BaseException) -> None:
        """Enter the state "failed" and keep the traceback."""
        lines = "".join(traceback.format_exception(error))
        self.enter("failed", error=exception_line(error), traceback=lines)

    def record_evaluation(self, evaluation: Mapping[str, Any]) -> None:
        """Write evaluation.json."""
        write_json(self.path / "evaluation.json", evaluation)

    def evaluation(self) -> dict[str, Any]:
        """What evaluation.json says; empty where there is none that can be read."""
        try:
            found = json.loads((self.path / "evaluation.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


class Taken(SettingError):
    """A folder with something in it."""


def claim(path: str | Path) -> RunFolder:
    """Make a run's folder. Of two runs that begin at once, one has it.

    Raises:
        SettingError: there is something in it already, or it cannot be written.
    """
    folder = RunFolder(Path(path).absolute())
    refuse_taken(path)
    with _named(path):
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
            (folder.path / "config.toml").touch(exist_ok=False)
        except FileExistsError:
            refuse_taken(path)
            raise
    return folder


def claim_free(path: str | Path) -> RunFolder:
    """Make a run's folder at the first free one of `path`, `path`-2, ..., whoever else does so meanwhile."""
    while True:
        try:
            return claim(free_folder(path))
        except Taken:
            continue


def refuse_taken(path: str | Path) -> None:
    """SettingError unless a run may be written to `path`."""
    folder = Path(path)
    with _named(path):
        with suppress(FileNotFoundError, NotADirectoryError):
            os.lstat(folder)  # raises where there can be nothing of that name
        there = next(one for one in (folder, *folder.absolute().parents) if os.path.lexists(one))
        if there == folder and not folder.is_dir():
            kind = "a link that leads to no folder" if folder.is_symlink() else "a file"
            raise SettingError("run.folder", f"{near(folder)} is {kind}; wanted a folder")
        if not there.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not os.access(there, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if there == folder and any(folder.iterdir()):
            why = f'{near(folder)} is not empty; choose another one, such as run.folder="{near(free_folder(folder))}"'
            raise Taken("run.folder", why)


def free_folder(path: str | Path) -> Path:
    """`path`, or the first of `path`-2, `path`-3, ... that does not exist yet or is empty."""
    path, number = Path(path), 1
    free = path
    while os.path.lexists(free) and (not free.is_dir() or any(free.iterdir())):
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


def near(path: str | Path) -> str:
    """A path as seen from the current directory where it lies below it."""
    with suppress(OSError):  # the current directory has gone
        return str(path).removeprefix(f"{Path.cwd()}/")
    return str(path)


@contextmanager
def _named(path: str | Path) -> Generator[None]:
    """A block whose faults of the file system are those of run.folder."""
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise SettingError("run.folder", f"{near(path)} cannot be written: {why}; choose another one") from None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
