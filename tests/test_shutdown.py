"""How a run is asked to end."""

import signal
import threading

import pytest

from mlxrl.runs.shutdown import Shutdown


def test_the_first_signal_is_a_request_and_the_second_an_end():
    with Shutdown().listening(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        with Shutdown().listening() as shutdown, shutdown.graceful():
            signal.raise_signal(number)
            assert (shutdown.requested, shutdown.reason) == (True, number.name)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            for _ in range(5):
                signal.raise_signal(signal.SIGINT)  # of an impatient person: it is stopping already
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_signals_have_no_effect_while_work_is_saved():
    with Shutdown().listening() as shutdown, shutdown.held():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
    assert not shutdown.requested


def test_a_hang_up_that_is_ignored_stays_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Shutdown().listening() as shutdown, shutdown.graceful():
            signal.raise_signal(signal.SIGHUP)
            assert not shutdown.requested
    finally:
        signal.signal(signal.SIGHUP, before)


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
