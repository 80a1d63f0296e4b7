"""How a run is asked to end."""

import signal
import threading

import pytest

from mlxrl.runs.shutdown import Shutdown


def test_the_first_signal_is_a_request_and_the_second_an_end():
    with Shutdown().listening() as shutdown:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with shutdown.graceful():
            signal.raise_signal(signal.SIGTERM)
            assert shutdown.requested
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_outside_the_main_thread_nothing_is_taken_over():
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def listen():
        with Shutdown().listening() as shutdown:
            seen.append((signal.getsignal(signal.SIGINT), shutdown.requested))

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert seen == [(before, False)]
