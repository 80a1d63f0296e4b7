"""Rows of a dataset as tasks, and the endless, seeded order in which a run meets them."""

from __future__ import annotations

import difflib
import importlib
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

from mlxrl.types import Message, Task

Source: TypeAlias = str | Path | Sequence[Mapping[str, Any]]
RESERVED = ("prompts", "completions")
"""Keywords that every reward function gets; a column of that name could not reach it."""


def tasks(
    source: Source,
    prompt: str = "prompt",
    *,
    system: str | None = None,
    limit: int | None = None,
    **columns: str,
) -> list[Task]:
    """Read a dataset as tasks.

    Args:
        source: a .jsonl file, a .json file (a list of objects), a folder with train.jsonl, a list of dicts, or
            "hf:NAME", "hf:NAME:CONFIG", "hf:NAME:CONFIG:SPLIT" of the `datasets` package (split "train" if left out).
        prompt: column that holds a text, or a list of chat messages.
        system: a system message put before every prompt. It turns text prompts into messages, so completions
            reach the rewards as messages too.
        limit: the first so many rows; None for all.
        columns: renames: `answer="solution"` hands the column `solution` to the rewards as `answer`. All other
            columns keep their names.
    Raises:
        ValueError: one line with the file, the line, what was wanted and what was got.
    """
    return read_tasks(source, prompt, columns, system, limit)


def read_tasks(
    source: Source, prompt: str, columns: Mapping[str, str], system: str | None = None, limit: int | None = None
) -> list[Task]:
    """`tasks` with the renames as a mapping, for names that are not keywords."""
    if limit is not None and limit < 1:
        raise ValueError(f"data: limit: wanted at least 1 row, got {limit}")
    found = [_task(where, row, prompt, columns, system) for where, row in islice(_rows(source), limit)]
    if not found:
        name = source if isinstance(source, str | Path) else "the list"
        raise ValueError(f"{name}: wanted at least one row, got none")
    return found


def cycle(tasks: Sequence[Task], n: int, seed: int = 0, start: int = 0) -> Iterator[list[Task]]:
    """Endless batches of n tasks. Every task comes once an epoch, in an order made from (seed, epoch) alone.

    Step s is a pure function of (seed, s): `start=s` goes on where a run of s steps ended. A batch may reach over
    the end of an epoch.

    Raises:
        ValueError: n is less than 1 or more than there are tasks.
    """
    if not 1 <= n <= len(tasks):
        raise ValueError(f"cycle: n: wanted between 1 and the {len(tasks)} tasks there are, got {n}")
    return _batches(tasks, n, seed, start)


def _batches(tasks: Sequence[Task], n: int, seed: int, step: int) -> Iterator[list[Task]]:
    current, order = -1, list[int]()
    while True:
        batch: list[Task] = []
        for position in range(step * n, (step + 1) * n):
            epoch, place = divmod(position, len(tasks))
            if epoch != current:
                current, order = epoch, _order(len(tasks), seed, epoch)
            batch.append(tasks[order[place]])
        yield batch
        step += 1


def _order(size: int, seed: int, epoch: int) -> list[int]:
    order = list(range(size))
    random.Random(f"{seed}:{epoch}").shuffle(order)
    return order


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """ "; did you mean 'x'?" where one of `names` is close to `name`, else nothing."""
    near = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _rows(source: Source) -> Iterator[tuple[str, Any]]:
    """(where, row) of every row, read as they are asked for."""
    if isinstance(source, str) and source.startswith("hf:"):
        return _hugging_face(source)
    if isinstance(source, str | Path):
        return _file(Path(source).expanduser())
    return ((f"row {number}", row) for number, row in enumerate(source, 1))


def _file(path: Path) -> Iterator[tuple[str, Any]]:
    if path.is_dir():
        path = path / "train.jsonl"
    if path.suffix not in (".jsonl", ".json"):
        raise ValueError(f"{path}: wanted a .jsonl or .json file, a folder with train.jsonl, or hf:NAME")
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    return _json(path) if path.suffix == ".json" else _jsonl(path)


def _jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    # Lines are split on b"\n" only: JSON texts may hold the other characters that str.splitlines splits on.
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}: line {number}"
            if line.strip():
                yield where, _parsed(where, line)


def _json(path: Path) -> Iterator[tuple[str, Any]]:
    rows = _parsed(str(path), path.read_bytes())
    if not isinstance(rows, list):
        raise ValueError(f"{path}: wanted a list of objects, got {_kind(rows)}")
    for number, row in enumerate(rows, 1):
        yield f"{path}: row {number}", row


def _parsed(where: str, text: bytes) -> Any:
    try:
        return json.loads(text.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: wanted UTF-8, got byte 0x{text[error.start]:02x}") from None
    except ValueError as error:
        raise ValueError(f"{where}: wanted JSON, got {_short(text.decode())!r} ({error})") from None


def _hugging_face(source: str) -> Iterator[tuple[str, Any]]:
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError:
        raise ValueError(f"{source}: needs the 'datasets' package; pip install datasets") from None
    name, config, split, *rest = [*source.removeprefix("hf:").split(":"), "", ""]
    if not name or any(rest):
        raise ValueError(f"{source}: wanted hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT")
    try:
        rows = datasets.load_dataset(name, config or None, split=split or "train")
    except (OSError, ValueError) as error:
        raise ValueError(f"{source}: could not be loaded: {_short(str(error), 200)}") from error
    return ((f"{source}: row {number}", row) for number, row in enumerate(rows, 1))


def _task(where: str, row: Any, prompt: str, columns: Mapping[str, str], system: str | None) -> Task:
    if not isinstance(row, Mapping):
        raise ValueError(f"{where}: wanted an object with a column {prompt!r}, got {_kind(row)}")
    values: dict[str, Any] = {str(name): value for name, value in row.items()}
    for name, wanted_by in {prompt: "the prompt", **{old: f"{new!r}" for new, old in columns.items()}}.items():
        if name not in values:
            have = ", ".join(values) or "none"
            hint = did_you_mean(name, values)
            raise ValueError(f"{where}: no column {name!r}, wanted as {wanted_by}; there are: {have}{hint}")
    moved = {prompt, *columns.values()}
    kept = {name: value for name, value in values.items() if name not in moved}
    kept |= {new: values[old] for new, old in columns.items()}
    for name in RESERVED:
        if name in kept:
            raise ValueError(
                f"{where}: column {name!r} has the name of a keyword of reward functions; rename it in data.columns"
            )
    return Task(_prompt(f"{where}: {prompt}", values[prompt], system), kept)


def _prompt(where: str, value: Any, system: str | None) -> str | tuple[Message, ...]:
    if isinstance(value, str):
        if not value.strip():
            raise ValueError(f"{where}: wanted a text, got an empty one")
        if system is None:
            return value
        return ({"role": "system", "content": system}, {"role": "user", "content": value})
    if not isinstance(value, Sequence) or isinstance(value, bytes):
        raise ValueError(f"{where}: wanted a text or a list of messages, got {_kind(value)}")
    return _with_system(where, tuple(_message(where, message) for message in value), system)


def _message(where: str, message: Any) -> Message:
    role_and_content = isinstance(message, Mapping) and isinstance(message.get("role"), str) and "content" in message
    if not role_and_content:
        raise ValueError(f"{where}: wanted messages with 'role' and 'content', got {_short(repr(message))}")
    return dict(message)


def _with_system(where: str, messages: tuple[Message, ...], system: str | None) -> tuple[Message, ...]:
    if not messages:
        raise ValueError(f"{where}: wanted at least one message, got an empty list")
    if system is None:
        return messages
    if messages[0]["role"] == "system":
        raise ValueError(f"{where}: the row has a system message of its own; leave data.system out")
    return ({"role": "system", "content": system}, *messages)


def _kind(value: Any) -> str:
    return "nothing (null)" if value is None else f"{type(value).__name__} {_short(repr(value))}"


def _short(text: str, width: int = 60) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 3] + "..."
