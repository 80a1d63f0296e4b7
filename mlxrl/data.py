"""Examples of a dataset as tasks, and the endless, seeded order in which a run takes them."""

from __future__ import annotations

import hashlib
import importlib
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import count, islice
from pathlib import Path
from typing import Any, TypeAlias

from mlxrl.errors import UserError, brief, did_you_mean, one_line
from mlxrl.files import StrictError, expanded, is_deep, strict_json
from mlxrl.messages import checked_text, messages_of, text_messages
from mlxrl.names import same_column
from mlxrl.types import Message, Task

Source: TypeAlias = str | Path | Iterable[Mapping[str, Any] | Task]
COMPLETION = "completion"
"""The column with the answer that supervised fine-tuning learns."""
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
    whole: bool = False,
    **columns: str,
) -> list[Task]:
    """Read a dataset as tasks.

    Args:
        source: a .jsonl file, a .json file (a list of objects), a folder with train.jsonl, or
            "hf:NAME", "hf:NAME:CONFIG", "hf:NAME:CONFIG:SPLIT" of the `datasets` package (split "train" if left out);
            dicts in a list, a generator or a data frame. Tasks among them stay as they are.
        prompt: column that holds a text, a list of chat messages, or a list of token ids.
        system: a system message put before every prompt. It turns text prompts into messages, so completions
            reach the rewards as messages too.
        limit: the first so many examples; None for all.
        whole: messages are conversations to be learned from, and not continued: the last may call a tool.
        columns: renames: `answer="solution"` hands the column `solution` to the rewards as `answer`. All other
            columns keep their names, the one of the prompt too, and that of a `completion`, the answer that is learned.
    Raises:
        DataError: one line with the file, the line, what was wanted and what was got.
    """
    if limit is not None and limit < 1:
        raise DataError("data", "limit", f"wanted at least 1 example, got {limit}")
    checked_text("data: system", system or "")
    examples = islice(_examples(source), limit)
    found = [_task(where, example, prompt, columns, system, whole) for where, example in examples]
    if not found:
        where = str(source) if isinstance(source, str | Path) else "data"
        raise DataError(where, "wanted at least one example, got none")
    return found


def as_tasks(given: Sequence[Task] | Source, whole: bool = False) -> Sequence[Task]:
    """Tasks as they are; anything else as `tasks` reads it, with its prompts in the column "prompt"."""
    made: Any = given
    is_read = isinstance(given, list | tuple) and all(isinstance(one, Task) for one in made)
    return made if is_read else tasks(made, whole=whole)


def fingerprint(tasks: Iterable[Task]) -> str:
    """SHA-256 over examples as they were understood: their prompts and columns, in their order."""
    total = hashlib.sha256()
    for task in tasks:
        total.update(_line(task).encode("utf-8", "backslashreplace") + b"\n")
    return total.hexdigest()


def _line(task: Task) -> str:
    content = [task.prompt, dict(task.columns)]
    try:
        return json.dumps(content, sort_keys=True, default=str)
    except (TypeError, ValueError):  # keys of several types, or a value inside itself
        return repr(content)


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
        return _file(expanded(source))
    rows: Any = source  # whatever its hint says
    for name in ("to_dicts", "to_pylist"):  # polars, pyarrow
        rows = getattr(rows, name)() if hasattr(rows, name) else rows
    if hasattr(rows, "itertuples"):  # pandas
        rows = rows.to_dict("records")
    if isinstance(rows, Mapping) or not isinstance(rows, Iterable):
        got = f"a {type(source).__name__}"
        raise DataError("data", f"wanted the name of a file, or a list of dicts, one for each example, got {got}")
    return ((f"example {number}", example) for number, example in enumerate(rows, 1))


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
        return strict_json(text.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(where, f"wanted UTF-8, got byte 0x{text[error.start]:02x}") from None
    except StrictError as error:
        raise DataError(where, str(error)) from None
    except ValueError as error:
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


def _task(where: str, example: Any, prompt: str, columns: Mapping[str, str], system: str | None, whole: bool) -> Task:
    if isinstance(example, Task):
        return example
    if not isinstance(example, Mapping):
        raise DataError(where, f"wanted an object with a column {prompt!r}, got {brief(example)}")
    if is_deep(example):
        raise DataError(where, "wanted an object, got one nested too deeply")
    values: dict[str, Any] = {str(name): _plain(value) for name, value in example.items()}
    for name, wanted_by in {prompt: "the prompt", **{old: f"{new!r}" for new, old in columns.items()}}.items():
        if name not in values:
            there_are = f"{', '.join(values) or 'none'}{_near(name, values)}"
            raise DataError(where, f"no column {name!r}, wanted as {wanted_by}; there are: {there_are}")
    renamed = {old for new, old in columns.items() if new != COMPLETION}
    moved = {*renamed, *({prompt} if prompt in RESERVED else ())}  # functions get it as `prompts` anyway
    kept = {name: value for name, value in values.items() if name not in moved}
    kept |= {new: values[old] for new, old in columns.items()}
    if taken := next((name for name in RESERVED if name in kept), None):
        raise DataError(where, f"column {taken!r} has the name of a keyword of rewards; rename it in data.columns")
    try:
        return Task(_prompt(values[prompt], system, whole), kept, where)
    except UserError as error:
        raise DataError(where, prompt, *error.parts) from None


def _near(name: str, columns: Mapping[str, Any]) -> str:
    """The column that may be meant where one is missing."""
    other = same_column(name, columns)
    return f"; did you mean {other!r}?" if other else did_you_mean(name, columns)


def _plain(value: Any) -> Any:
    """A value with the numbers and arrays of NumPy in it as those of Python."""
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _prompt(value: Any, system: str | None, whole: bool) -> str | tuple[Message, ...] | tuple[int, ...]:
    if isinstance(value, str):
        if not value.strip():
            raise DataError("wanted a text, got an empty one")
        checked_text("", value)
        return value if system is None else text_messages(value, system)
    if not isinstance(value, Sequence) or isinstance(value, bytes):
        raise DataError(f"wanted a text or a list of messages, got {brief(value)}")
    if value and all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in value):
        if system is not None:
            raise DataError("the prompt is token ids, which take no system message; leave data.system out")
        return tuple(value)
    messages = messages_of(value, whole)
    if not any(one["content"].strip() or "tool_calls" in one for one in messages):
        raise DataError("wanted a message with a text, got only empty ones")
    if system is not None and messages[0]["role"] == "system":
        raise DataError("the example has a system message of its own; leave data.system out")
    return messages if system is None else ({"role": "system", "content": system}, *messages)
