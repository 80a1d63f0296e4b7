"""How a run is asked to end."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

NOTE = b"\nmlxrl: the run ends after this step and saves its adapter; once more to stop at once\n"


class Stop:
    """Ctrl-C and SIGTERM as a wish that the loop looks at. A second one, or one outside it, is a KeyboardInterrupt."""

    def __init__(self) -> None:
        self.asked = False
        self._patient = False

    @contextmanager
    def listening(self) -> Generator[Stop]:
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
    def patiently(self) -> Generator[None]:
        """The span in which the first signal only sets `asked`."""
        self._patient = True
        try:
            yield
        finally:
            self._patient = False

    def _handle(self, number: int, frame: Any) -> None:
        if self.asked or not self._patient:
            raise KeyboardInterrupt
        self.asked = True
        os.write(2, NOTE)  # a stream's own write may be the one that the signal came into
