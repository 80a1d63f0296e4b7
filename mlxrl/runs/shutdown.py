"""A graceful-shutdown request: how a run is asked to end."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any

NOTE = b"\nmlxrl: the run ends after this step and saves its adapter; once more to stop at once\n"


class Shutdown:
    """Ctrl-C and SIGTERM as a request that the loop reads. A second one, or one outside it, is a KeyboardInterrupt."""

    def __init__(self) -> None:
        self.requested = False
        self._graceful = False

    @contextmanager
    def listening(self) -> Generator[Shutdown]:
        """Take the signals over for the span of a block. Only the main thread can; elsewhere nothing changes."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
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

    def _handle(self, number: int, frame: Any) -> None:
        if self.requested or not self._graceful:
            raise KeyboardInterrupt
        self.requested = True
        with suppress(OSError):
            os.write(2, NOTE)  # a stream's own write may be the one that the signal came into
