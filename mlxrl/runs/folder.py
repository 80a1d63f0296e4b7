"""The folder of a run: what is decided before it, what is added while it runs, and how it ended.

config.toml, manifest.json and evaluation.json are replaced in one piece; metrics.jsonl, samples.jsonl and events.jsonl
grow by whole lines. Reading a run needs nothing of this package.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from mlxrl.checked import SettingError
from mlxrl.errors import exception_line
from mlxrl.files import append_line, write_json, write_text

State = Literal["configured", "running", "cancelled", "interrupted", "failed", "succeeded"]
"""cancelled: ended at a step boundary when asked to. interrupted: stopped at once, or killed while running."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A run's folder, through which everything in it but its sinks' files is written."""

    path: Path

    @property
    def adapters(self) -> Path:
        """Where the result goes; mlx-lm loads it."""
        return self.path / "adapters"

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

    def evaluation(self, evaluation: Mapping[str, Any]) -> None:
        """Write evaluation.json: `before` and, once known, `after`, `difference` and `interval`."""
        write_json(self.path / "evaluation.json", evaluation)


def create(path: str | Path, config: str) -> RunFolder:
    """Make a run's folder, with the resolved config in it.

    Raises:
        SettingError: there is something in it already, or it cannot be written.
    """
    folder = RunFolder(Path(path))
    refuse_taken(path)
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        (folder.path / "config.toml").touch(exist_ok=False)  # of two runs that begin at once, one has it
    except FileExistsError:
        refuse_taken(path)
    except OSError as error:
        why = f"{folder.path} cannot be written: {error.strerror}; choose another one"
        raise SettingError("run.folder", why) from None
    write_text(folder.path / "config.toml", config)
    folder.enter("configured")
    return folder


def refuse_taken(path: str | Path) -> None:
    """SettingError unless a run may be written to `path`."""
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise SettingError("run.folder", f"{folder} is a file; wanted a folder")
    if folder.is_dir() and any(folder.iterdir()):
        free = free_folder(folder)
        raise SettingError("run.folder", f'{folder} is not empty; choose another one, such as run.folder="{free}"')


def free_folder(path: str | Path) -> Path:
    """`path`, or the first of `path`-2, `path`-3, ... that does not exist yet or is empty."""
    path, number = Path(path), 1
    free = path
    while free.exists() and (not free.is_dir() or any(free.iterdir())):
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
