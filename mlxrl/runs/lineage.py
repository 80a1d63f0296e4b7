"""The adapters that an adapter came from: each run went on from the one before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mlxrl import store
from mlxrl.errors import UserError
from mlxrl.runs.folder import near
from mlxrl.runs.handoff import Handoff, HandoffError, Parent, below, locate, read
from mlxrl.store import HANDOFF

MOST = 1000
"""Generations at most."""


@dataclass(frozen=True, slots=True)
class Ancestor:
    """An adapter of a lineage: its digest, None where it had none; its handoff.json, None with the reason why."""

    sha256: str | None
    handoff: Handoff | None
    missing: str = ""


def lineage(name: str) -> list[Ancestor]:
    """An adapter and those that it came from, itself first.

    A parent is looked for in the store, beside the adapter that the config named, and in the folders beside that of
    the run and below `runs`.

    Args:
        name: as `handoff.locate` takes it.
    Raises:
        UserError: it names no adapter, or its handoff.json is none.
    """
    path = locate(name)[0]
    known = dict.fromkeys([path.parent.parent, Path("runs").absolute()])
    found = read(path)
    line, seen = [Ancestor(found.adapter.sha256, found)], [found]
    while found is not None and found.parent is not None and len(line) < MOST:
        line.append(_ancestor(found.parent, known, seen))
        found = line[-1].handoff
        seen += [found] if found else []
    return line


def _ancestor(parent: Parent, known: Iterable[Path], seen: Sequence[Handoff]) -> Ancestor:
    """A parent with its handoff.json, where one is found; not those seen: a run that changed nothing has its digest."""
    if parent.sha256 is None:
        return Ancestor(None, None, f"{near(parent.adapter)} had no digest")
    faults: list[str] = []
    for path in _candidates(parent, known):
        try:
            found = read(path)
        except HandoffError as error:
            faults.append(str(error))
            continue
        if found.adapter.sha256 == parent.sha256 and found not in seen:
            return Ancestor(parent.sha256, found)
    return Ancestor(parent.sha256, None, faults[0] if faults else f"no {HANDOFF} of it here")


def _candidates(parent: Parent, known: Iterable[Path]) -> Iterator[Path]:
    """Each handoff.json that may be a parent's."""
    for name in (f"{store.NAME}{parent.sha256}", parent.adapter):
        with suppress(UserError):
            yield locate(name)[0]
    for folder in known:
        yield from below(folder)
