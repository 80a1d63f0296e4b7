"""A graceful-shutdown request: how a run is asked to end."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any

NOTE = b"\nmlxrl: the run ends after this step and saves its adapter; once more to stop at once\n"
IMPATIENT = 2.0
"""Seconds after a KeyboardInterrupt in which further signals are taken for the same wish."""


class Shutdown:
    """Ctrl-C, SIGTERM and SIGHUP as a request that the loop reads. A second one, or one outside it, stops at once.

    A hang-up that is ignored, as under nohup, stays so. reason: the name of the signal that made the request.
    """

    def __init__(self) -> None:
        self.requested = False
        self.reason = ""
        self._graceful = self._held = False
        self._raised = -IMPATIENT

    @contextmanager
    def listening(self) -> Generator[Shutdown]:
        """Take the signals over for the span of a block. Only the main thread can; elsewhere nothing changes."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        taken = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._handle) for number in taken}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def graceful(self) -> Generator[None]:
        """The span in which the first signal only makes the request."""
        self._graceful = True
        try:
            yield
        finally:
            self._graceful = False

    @contextmanager
    def held(self) -> Generator[None]:
        """The span in which signals have no effect: what was learned is being saved."""
        self._held = True
        try:
            yield
        finally:
            self._held = False

    def ask(self, wanted: bool, reason: str = "mlxrl cancel") -> None:
        """Make the request in another way than by a signal, where that is wanted."""
        if wanted and not self.requested:
            self.requested, self.reason = True, reason

    def _handle(self, number: int, frame: Any) -> None:
        """Make the request, or raise KeyboardInterrupt: once for signals that come together, so that nothing that is
        put in order on its way out is broken off by the next one."""
        self.reason = self.reason or signal.Signals(number).name
        if self._held or time.monotonic() - self._raised < IMPATIENT:
            return
        if self.requested or not self._graceful:
            self._raised = time.monotonic()
            raise KeyboardInterrupt
        self.requested = True
        with suppress(OSError):
            os.write(2, NOTE)  # a stream's own write may be the one that the signal came into
