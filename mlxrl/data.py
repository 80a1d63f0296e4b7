"""Examples of a dataset as tasks, and the endless, seeded order in which a run takes them."""

from __future__ import annotations

import importlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import count, islice
from pathlib import Path
from typing import Any, TypeAlias

from mlxrl.errors import UserError, brief, did_you_mean, one_line
from mlxrl.types import Message, Task

Source: TypeAlias = str | Path | Sequence[Mapping[str, Any]]
RESERVED = ("prompts", "completions", "completion_ids", "trainer_state")
"""Keywords that every reward function gets; a column of that name could not reach it."""


class DataError(UserError):
    """Data that cannot be read, or an example that is no task."""


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
        limit: the first so many examples; None for all.
        columns: renames: `answer="solution"` hands the column `solution` to the rewards as `answer`. All other
            columns keep their names, the one of the prompt too.
    Raises:
        DataError: one line with the file, the line, what was wanted and what was got.
    """
    if limit is not None and limit < 1:
        raise DataError("data", "limit", f"wanted at least 1 example, got {limit}")
    found = [_task(where, example, prompt, columns, system) for where, example in islice(_examples(source), limit)]
    if not found:
        where = str(source) if isinstance(source, str | Path) else "the list"
        raise DataError(where, "wanted at least one example, got none")
    return found


def is_missing(value: Any) -> bool:
    """Whether a value is none: null, an empty text, NaN."""
    if isinstance(value, str):
        return not value.strip()
    return value is None or (isinstance(value, float) and value != value)


def cycle(tasks: Sequence[Task], n: int, seed: int = 0, start: int = 0) -> Iterator[list[Task]]:
    """Endless batches of n tasks. Every task comes once an epoch, in an order made from (seed, epoch) alone.

    Step s is a pure function of (seed, s): `start=s` continues where a run of s steps ended. A batch may reach over
    the end of an epoch.

    Raises:
        DataError: n is less than 1 or more than there are tasks.
    """
    if not 1 <= n <= len(tasks):
        raise DataError("cycle", "n", f"wanted between 1 and the {len(tasks)} tasks there are, got {n}")
    return ([tasks[index] for index in indices_of(len(tasks), n, seed, step)] for step in count(start))


def indices_of(size: int, n: int, seed: int, step: int) -> list[int]:
    """Which n of so many tasks `cycle` yields at a step."""
    places = [divmod(position, size) for position in range(step * n, (step + 1) * n)]
    return [_order(size, seed, epoch)[index] for epoch, index in places]


@lru_cache(maxsize=2)
def _order(size: int, seed: int, epoch: int) -> list[int]:
    order = list(range(size))
    random.Random(f"{seed}:{epoch}").shuffle(order)
    return order


def _examples(source: Source) -> Iterator[tuple[str, Any]]:
    """(where, example) of every example, read as they are taken."""
    if isinstance(source, str) and source.startswith("hf:"):
        return _hugging_face(source)
    if isinstance(source, str | Path):
        return _file(Path(source).expanduser())
    return ((f"example {number}", example) for number, example in enumerate(source, 1))


def _file(path: Path) -> Iterator[tuple[str, Any]]:
    if path.is_dir():
        path = path / "train.jsonl"
    if path.suffix not in (".jsonl", ".json"):
        raise DataError(str(path), "wanted a .jsonl or .json file, a folder with train.jsonl, or hf:NAME")
    if not path.is_file():
        raise DataError(str(path), "no such file")
    return _json(path) if path.suffix == ".json" else _jsonl(path)


def _jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    # Lines are split on b"\n" only: JSON texts may hold the other characters that str.splitlines splits on.
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}: line {number}"
            if line.strip():
                yield where, _parsed(where, line)


def _json(path: Path) -> Iterator[tuple[str, Any]]:
    examples = _parsed(str(path), path.read_bytes())
    if not isinstance(examples, list):
        raise DataError(str(path), f"wanted a list of objects, got {brief(examples)}")
    for number, example in enumerate(examples, 1):
        yield f"{path}: example {number}", example


def _parsed(where: str, text: bytes) -> Any:
    try:
        return json.loads(text.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(where, f"wanted UTF-8, got byte 0x{text[error.start]:02x}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(where, f"wanted JSON, got {one_line(text.decode(), 60)!r} ({error})") from None


def _hugging_face(source: str) -> Iterator[tuple[str, Any]]:
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError:
        raise DataError(source, "needs the 'datasets' package; pip install datasets") from None
    name, config, split, *rest = [*source.removeprefix("hf:").split(":"), "", ""]
    if not name or any(rest):
        raise DataError(source, "wanted hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT")
    try:
        examples = datasets.load_dataset(name, config or None, split=split or "train")
    except (OSError, ValueError) as error:
        raise DataError(source, f"could not be loaded: {one_line(error, 200)}") from error
    return ((f"{source}: example {number}", example) for number, example in enumerate(examples, 1))


def _task(where: str, example: Any, prompt: str, columns: Mapping[str, str], system: str | None) -> Task:
    if not isinstance(example, Mapping):
        raise DataError(where, f"wanted an object with a column {prompt!r}, got {brief(example)}")
    values: dict[str, Any] = {str(name): value for name, value in example.items()}
    for name, wanted_by in {prompt: "the prompt", **{old: f"{new!r}" for new, old in columns.items()}}.items():
        if name not in values:
            there_are = f"{', '.join(values) or 'none'}{did_you_mean(name, values)}"
            raise DataError(where, f"no column {name!r}, wanted as {wanted_by}; there are: {there_are}")
    moved = {*columns.values(), *({prompt} if prompt in RESERVED else ())}  # functions get it as `prompts` anyway
    kept = {name: value for name, value in values.items() if name not in moved}
    kept |= {new: values[old] for new, old in columns.items()}
    if taken := next((name for name in RESERVED if name in kept), None):
        raise DataError(where, f"column {taken!r} has the name of a keyword of rewards; rename it in data.columns")
    return Task(_prompt(f"{where}: {prompt}", values[prompt], system), kept, where)


def _prompt(where: str, value: Any, system: str | None) -> str | tuple[Message, ...]:
    if isinstance(value, str):
        if not value.strip():
            raise DataError(where, "wanted a text, got an empty one")
        if system is None:
            return value
        return ({"role": "system", "content": system}, {"role": "user", "content": value})
    if not isinstance(value, Sequence) or isinstance(value, bytes):
        raise DataError(where, f"wanted a text or a list of messages, got {brief(value)}")
    return _with_system(where, tuple(_message(where, message) for message in value), system)


def _message(where: str, message: Any) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
        raise DataError(where, f"wanted messages with 'role' and 'content', got {brief(message)}")
    return dict(message)


def _with_system(where: str, messages: tuple[Message, ...], system: str | None) -> tuple[Message, ...]:
    if not messages:
        raise DataError(where, "wanted at least one message, got an empty list")
    if system is None:
        return messages
    if messages[0]["role"] == "system":
        raise DataError(where, "the example has a system message of its own; leave data.system out")
    return ({"role": "system", "content": system}, *messages)
