"""Calls of user code in threads, with a time limit each.

The threads are daemons, and one that hangs is given up and replaced: it keeps neither the others nor the process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

WORKERS = 32
GRACE = 0.1  # seconds that answers are waited for, to go on together, once there is one


class Call:
    """A call: what it returned, or what it raised; late: whether its time ran out."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.started: float | None = None
        self.done = self.late = False
        self.value: Any = None
        self.error: BaseException | None = None


class Pool:
    """Up to so many threads, begun as they are needed. Times are in seconds; a call's runs from when it begins."""

    def __init__(self, timeout: float, workers: int = WORKERS) -> None:
        self.timeout, self.workers = timeout, workers
        self.calls: list[Call] = []
        self._threads = 0
        self._waiting: SimpleQueue[Call | None] = SimpleQueue()
        self._changed = threading.Condition()

    def submit(self, function: Callable[[], Any]) -> Call:
        """Have a function called."""
        call = Call(function)
        with self._changed:
            self.calls.append(call)
            self._waiting.put(call)
            if self._threads < min(self.workers, len(self.calls)):
                self._begin()
        return call

    def finished(self) -> list[Call]:
        """Calls that have come to their end and were not told of yet, in the order in which they were submitted."""
        with self._changed:
            return self._told(self._ended())

    def wait(self, grace: float | None = GRACE, some: bool = False) -> list[Call]:
        """The same once all have ended, or some have and the grace is over; None waits for all.

        some: whether the caller has some already, and waits for no more than the grace.
        """
        begun = time.monotonic()
        with self._changed:
            while True:
                ended = self._ended()
                over = grace is not None and time.monotonic() - begun >= grace
                if len(ended) == len(self.calls) or ((ended or some) and over):
                    return self._told(ended)
                self._changed.wait(self._until(begun + grace if grace is not None and (ended or some) else None))

    def close(self, patience: float) -> None:
        """Wait so long for calls that are under way, and let the threads end."""
        end = time.monotonic() + patience
        with self._changed:
            while len(self._ended()) < len(self.calls) and (left := end - time.monotonic()) > 0:
                self._changed.wait(min(left, self._until(None)))
            for _ in range(self._threads):
                self._waiting.put(None)

    def _begin(self) -> None:
        """One thread more. Where the system has none and none is left here, the calls that wait for one fail."""
        try:
            threading.Thread(target=self._work, daemon=True, name="mlxrl environment").start()
        except RuntimeError as error:
            for call in [] if self._threads else [call for call in self.calls if call.started is None]:
                call.error, call.done = error, True
        else:
            self._threads += 1

    def _work(self) -> None:
        while (call := self._waiting.get()) is not None:
            with self._changed:
                if call.done:
                    continue
                call.started = time.monotonic()
                self._changed.notify_all()  # its time begins to count
            try:
                call.value = call.function()
            except BaseException as error:  # noqa: BLE001  (user code may raise anything, and ends only its own call)
                call.error = error
            with self._changed:
                call.done = True
                if call.late:
                    return  # another thread stands in its place
                self._changed.notify_all()

    def _ended(self) -> list[Call]:
        now = time.monotonic()
        for call in self.calls:
            if not call.done and not call.late and call.started is not None and now - call.started >= self.timeout:
                call.late = True
                self._threads -= 1
                self._begin()
        return [call for call in self.calls if call.done or call.late]

    def _told(self, ended: list[Call]) -> list[Call]:
        told = set(map(id, ended))
        self.calls = [call for call in self.calls if id(call) not in told]
        return ended

    def _until(self, end: float | None) -> float:
        """Seconds until the next call is late, or until `end`."""
        open_ = [call.started for call in self.calls if call.started is not None and not call.done and not call.late]
        ends = [started + self.timeout for started in open_] + ([end] if end is not None else [])
        return max(min(ends, default=time.monotonic() + self.timeout) - time.monotonic(), 0.0) + 1e-3
