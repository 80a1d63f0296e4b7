"""Calls of user code in threads, with a time limit each.

The threads are daemons, and one that hangs is replaced: it keeps neither the others nor the process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Self

from mlxrl.awaiting import Late
from mlxrl.errors import one_line, place_of

MOST = 32
GRACE = 0.1  # seconds that further answers are waited for once there is one, to continue with them together
TICK = 0.05  # seconds between two looks at the time


@dataclass(slots=True, eq=False)
class Call:
    """A call for `owner`, with what it returned or raised once it is over. late: whether its time ran out before."""

    function: Callable[[], Any]
    owner: Any = None
    started: float | None = None
    over: bool = False
    late: bool = False
    value: Any = None
    error: BaseException | None = None

    def fault(self, name: str, timeout: float) -> str:
        """How it failed, in one line; empty where it did not."""
        if self.late or not self.over or isinstance(self.error, Late):
            return f"{name}: no answer in {timeout:g} s"
        if self.error is None:
            return ""
        try:
            text = str(self.error)
        except BaseException:  # noqa: BLE001  (user code too)
            text = "its message cannot be shown"
        return one_line(f"{name}: {type(self.error).__name__}: {text}").removesuffix(":") + place_of(self.error)


class Workers:
    """Up to `most` threads, begun as they are needed. Times are in seconds; a call's runs from when it begins."""

    def __init__(self, timeout: float, name: str = "mlxrl environment", most: int = MOST) -> None:
        self.timeout, self.name, self.most = timeout, name, most
        self.threads: list[threading.Thread] = []
        self._calls: list[Call] = []  # not handed out yet
        self._waiting: SimpleQueue[Call | None] = SimpleQueue()
        self._free = 0  # threads that take further calls: those that hang left out
        self._changed = threading.Condition()

    @property
    def busy(self) -> bool:
        """Whether there are calls that were not handed out yet."""
        return bool(self._calls)

    def submit(self, function: Callable[[], Any], owner: Any = None) -> Call:
        call = Call(function, owner)
        with self._changed:
            self._calls.append(call)
            self._waiting.put(call)
            if self._free < min(self.most, len(self._calls)):
                self._begin()
        return call

    def finished(self, enough: float = 1) -> list[Call]:
        """Calls that are over and were not handed out yet, as they were submitted; none before `enough` are over."""
        with self._changed:
            over = self._over()
            return self._handed_out(over) if len(over) >= enough else []

    def wait(self, grace: float | None = GRACE) -> list[Call]:
        """The same once all are over, or some are and the grace is over; None waits for all."""
        since = time.monotonic()
        with self._changed:
            while len(over := self._over()) < len(self._calls):
                if over and grace is not None and time.monotonic() - since >= grace:
                    break
                self._changed.wait(TICK)
            return self._handed_out(over)

    def close(self, timeout: float = 0.0) -> None:
        """Wait until all calls are over, but no longer than so many seconds, and let the threads end."""
        since = time.monotonic()
        with self._changed:
            while len(self._over()) < len(self._calls) and time.monotonic() - since < timeout:
                self._changed.wait(TICK)
            for _ in range(self._free):
                self._waiting.put(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _begin(self) -> None:
        """One thread more. Where the system has none, and none is left here, the calls that wait for one fail."""
        thread = threading.Thread(target=self._work, daemon=True, name=self.name)
        try:
            thread.start()
        except RuntimeError as error:
            for call in [] if self._free else [call for call in self._calls if call.started is None]:
                call.error, call.over = error, True
        else:
            self.threads.append(thread)
            self._free += 1

    def _work(self) -> None:
        while (call := self._waiting.get()) is not None:
            with self._changed:
                if call.over:
                    continue
                call.started = time.monotonic()
            try:
                call.value = call.function()
            except BaseException as error:  # noqa: BLE001  (user code may raise anything, and ends only its own call)
                call.error = error
            with self._changed:
                call.over = True
                self._changed.notify_all()
            if call.late:
                return  # another thread has its place

    def _over(self) -> list[Call]:
        """Calls that are over; one that is late is, and another thread takes its place."""
        now = time.monotonic()
        for call in self._calls:
            if not call.over and call.started is not None and now - call.started >= self.timeout:
                call.over = call.late = True
                self._free -= 1
                self._begin()
        return [call for call in self._calls if call.over]

    def _handed_out(self, over: list[Call]) -> list[Call]:
        self._calls = [call for call in self._calls if not call.over]
        return over
