"""The folder of a run: what is decided before it, what is added while it runs, and how it ended.

config.toml, manifest.json and evaluation.json are replaced in one piece; metrics.jsonl, samples.jsonl and events.jsonl
grow by whole lines. Reading a run needs nothing of this package.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shlex
import shutil
import traceback
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from mlxrl.checked import SettingError
from mlxrl.errors import UserError, exception_line
from mlxrl.files import append_lines, write_json, write_text

State = Literal["configured", "running", "cancelled", "interrupted", "failed", "succeeded"]
"""cancelled: ended at a step boundary when asked to. interrupted: stopped at once, or killed while running."""
KINDS = {"model": dict, "teacher": dict, "versions": dict, "device": dict, "data": list, "code": dict}
"""What the facts in a manifest are, where it is read again."""
TEMPORARY = re.compile(r"\.(.+\.[0-9]+(\.[a-z]+)?|step-[0-9]+)")
"""The names that `files` and `checkpoint.remove` give what is not whole."""
LOCK, CANCEL = "lock", "cancel"
"""The file that the process of a run locks, and the one that asks it to end."""


class FolderError(UserError):
    """The folder of a run under way has gone or cannot be written."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A run's folder, through which everything in it but its sinks' files is written."""

    path: Path

    @property
    def adapters(self) -> Path:
        """Where the result goes; mlx-lm loads it."""
        return self.path / "adapters"

    @property
    def checkpoints(self) -> Path:
        """Where the checkpoints are."""
        return self.path / "checkpoints"

    @property
    def best(self) -> Path:
        """Where adapters are that are the best on data.validation, as step-000050."""
        return self.path / "best"

    @property
    def accepted(self) -> Path:
        """Where checkpoints are that a rejected adapter is taken back to."""
        return self.path / "accepted"

    @property
    def resume_command(self) -> str:
        """The command that goes on with the run."""
        return shlex.join(["mlxrl", "train", "--resume", near(self.path)])

    def manifest(self) -> dict[str, Any]:
        """The manifest as it stands, what cannot be read of it left out."""
        try:
            found = json.loads((self.path / "manifest.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        known: dict[str, Any] = found if isinstance(found, dict) else {}
        return {name: value for name, value in known.items() if isinstance(value, KINDS.get(name, object))}

    def state(self) -> str:
        """The run's state. One whose process is gone is interrupted, whatever it could not write down."""
        found = str(self.manifest().get("state", "configured"))
        return "interrupted" if found in ("configured", "running") and not self.is_locked() else found

    def is_locked(self) -> bool:
        """Whether the process of a run holds the folder; for another process to ask."""
        try:
            with (self.path / LOCK).open("rb") as file:
                fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return False

    @contextmanager
    def locked(self) -> Generator[None]:
        """The span in which this process alone runs in the folder; the lock ends with the process, however it does.

        Raises:
            SettingError: another process has it.
        """
        with _named(self.path):
            file = (self.path / LOCK).open("ab")
        with file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                why = f"{near(self.path)} is that of a run under way (process {self.manifest().get('pid')})"
                raise SettingError("run.folder", f"{why}; mlxrl cancel {near(self.path)} ends it") from None
            yield

    @contextmanager
    def writing(self) -> Generator[None]:
        """A block that writes into the folder; FolderError where it has gone or cannot be written."""
        try:
            if not (self.path / "manifest.json").exists():
                raise FolderError("run.folder", f"{near(self.path)} has gone")
            yield
        except OSError as error:
            if not self.path.is_dir():
                raise FolderError("run.folder", f"{near(self.path)} has gone") from error
            why = f"{near(self.path)} cannot be written: {error.strerror or error}"
            raise FolderError("run.folder", why) from error

    def clear_temporary(self) -> None:
        """Remove what a kill has left half written or half removed; for the process that has the lock."""
        for folder in (self.path, self.checkpoints, self.best, self.accepted):
            for one in folder.glob(".*"):
                if TEMPORARY.fullmatch(one.name):
                    shutil.rmtree(one) if one.is_dir() else one.unlink()

    def ask_to_cancel(self) -> None:
        """Ask the run to end at the next boundary of a step."""
        (self.path / CANCEL).touch()

    def cancel_asked(self) -> bool:
        """Whether that was asked; it is asked no more then."""
        with suppress(FileNotFoundError):
            (self.path / CANCEL).unlink()
            return True
        return False

    def record(self, **facts: Any) -> None:
        """Add facts to the manifest."""
        write_json(self.path / "manifest.json", {**self.manifest(), **facts})

    def enter(self, state: State, **fields: Any) -> None:
        """Change the run's state, in the manifest and as an event; the last ones get the time they ended at."""
        ended = {} if state in ("configured", "running") else {"ended": _now()}
        started = {"started": _now(), "pid": os.getpid()} if state == "running" else {}
        with self.writing():
            self.record(state=state, **started, **ended)
        self.event(state, **fields)

    def event(self, event: str, **fields: Any) -> None:
        """Append to events.jsonl."""
        with self.writing():
            append_lines(self.path / "events.jsonl", [{"time": _now(), "event": event, **fields}])

    def failure(self, error: BaseException) -> None:
        """Enter the state "failed" and keep the traceback."""
        lines = "".join(traceback.format_exception(error))
        self.enter("failed", error=exception_line(error), traceback=lines)

    def record_evaluation(self, evaluation: Mapping[str, Any]) -> None:
        """Write evaluation.json."""
        with self.writing():
            write_json(self.path / "evaluation.json", evaluation)

    def evaluation(self) -> dict[str, Any]:
        """What evaluation.json says; empty where there is none that can be read."""
        try:
            found = json.loads((self.path / "evaluation.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


def run_folder(path: str | Path) -> RunFolder:
    """The folder of a run.

    Raises:
        UserError: it is none.
    """
    folder = RunFolder(Path(path).absolute())
    if not (folder.path / "config.toml").is_file():
        raise UserError(near(folder.path), "no config.toml; wanted the folder of a run")
    return folder


class Taken(SettingError):
    """A folder with something in it."""


def claim(path: str | Path, config: Callable[[Path], str]) -> RunFolder:
    """Make a run's folder with its state and its config. Of two runs that begin at once, one has it.

    Args:
        config: from the folder's path to the resolved config.
    Raises:
        SettingError: there is something in it already, or it cannot be written.
    """
    folder = RunFolder(Path(path).absolute())
    refuse_taken(path)
    with _named(path):
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
            with (folder.path / "manifest.json").open("x", encoding="utf-8") as file:
                file.write('{"state": "configured"}\n')
        except FileExistsError:
            refuse_taken(path)
            raise
        write_text(folder.path / "config.toml", config(folder.path))
        append_lines(folder.path / "events.jsonl", [{"time": _now(), "event": "configured"}])
    return folder


def claim_free(path: str | Path, config: Callable[[Path], str]) -> RunFolder:
    """Make a run's folder at the first free one of `path`, `path`-2, ..., whoever else does so meanwhile."""
    while True:
        try:
            return claim(free_folder(path), config)
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
