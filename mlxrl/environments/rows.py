"""Tasks as the rows of a data file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from mlxrl.types import Task


def write(path: str | Path, tasks: Iterable[Task]) -> None:
    """Write tasks to a .jsonl that `mlxrl.tasks` and [data] read: a prompt and the columns in each row."""
    rows = [json.dumps({"prompt": task.prompt, **task.columns}) + "\n" for task in tasks]
    Path(path).write_text("".join(rows), encoding="utf-8")
