"""Calls of user code in threads: what comes back when, and what a call that hangs keeps."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from mlxrl.rollout.workers import Workers


def test_calls_come_back_as_they_were_submitted_for_their_owners():
    workers, gates = Workers(30.0), [threading.Event() for _ in range(3)]
    calls = [workers.submit(gate.wait, owner=number) for number, gate in enumerate(gates)]
    assert workers.busy
    for gate in gates[::-1]:
        gate.set()
    assert workers.wait(grace=None) == calls
    assert [(call.owner, call.value, call.fault("step", 30.0)) for call in calls] == [(n, True, "") for n in range(3)]
    assert not workers.busy
    assert workers.wait() == workers.finished() == []


def test_those_that_are_over_are_not_kept_by_one_that_is_not():
    workers, gate = Workers(30.0), threading.Event()
    slow, quick = workers.submit(gate.wait), workers.submit(lambda: 7)
    assert workers.wait() == [quick]
    assert workers.finished() == []
    gate.set()
    assert workers.wait() == [slow]


def test_enough_are_handed_out_together():
    workers, gate = Workers(30.0), threading.Event()
    first, second = workers.submit(lambda: 1), workers.submit(gate.wait)
    until_over(first)
    assert workers.finished(enough=2) == []
    gate.set()
    until_over(second)
    assert workers.finished(enough=2) == [first, second]


def until_over(call):
    while not call.over:
        time.sleep(0.001)


def test_threads_end_with_their_workers():
    with Workers(30.0, name="ours", most=3) as workers:
        for number in range(9):
            workers.submit(lambda number=number: number)
        assert [call.value for call in workers.wait(grace=None)] == list(range(9))
        assert 0 < sum(thread.name == "ours" for thread in threading.enumerate()) <= 3
    while any(thread.name == "ours" for thread in threading.enumerate()):
        time.sleep(0.001)


def test_a_call_that_hangs_is_late_and_keeps_no_other():
    """Its thread is replaced, so that the others run although there is only one at a time."""
    workers, gate = Workers(0.1, most=1), threading.Event()
    hangs, others = workers.submit(gate.wait), [workers.submit(lambda: 7) for _ in range(3)]
    assert workers.wait(grace=None) == [hangs, *others]
    assert [call.value for call in others] == [7] * 3
    assert hangs.fault("step", 0.1) == "step: no answer in 0.1 s"
    gate.set()


def test_what_a_call_raises_is_its_fault_in_a_line():
    class Mute(Exception):
        def __str__(self):
            raise KeyError

    def mute():
        raise Mute

    def torn():
        raise OSError("no\nworld")

    workers = Workers(5.0)
    for function in (torn, sys.exit, mute):
        workers.submit(function)
    assert [call.fault("step", 5.0).partition(" (tests")[0] for call in workers.wait(grace=None)] == [
        "step: OSError: no world", "step: SystemExit", "step: Mute: its message cannot be shown",
    ]  # fmt: skip


def test_no_more_threads_than_may_be():
    workers, lock, gate = Workers(30.0, most=4), threading.Lock(), threading.Barrier(4)
    running, most = 0, 0

    def work():
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        gate.wait(30)
        with lock:
            running -= 1

    for _ in range(12):
        workers.submit(work)
    assert [call.fault("work", 30.0) for call in workers.wait(grace=None)] == [""] * 12
    assert most == 4


def test_a_system_without_threads_fails_calls_and_not_the_run(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    workers = Workers(5.0, most=2)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        call = workers.submit(lambda: 7)
        assert workers.wait(grace=None) == [call]
        assert call.fault("reset", 5.0).startswith("reset: RuntimeError: can't start new thread")
    later = workers.submit(lambda: 8)
    assert workers.wait(grace=None) == [later]
    assert (call.value, later.value) == (None, 8)


def test_a_thread_that_hangs_does_not_keep_the_process():
    code = (
        "import time; from mlxrl.rollout.workers import Workers; workers = Workers(0.2, most=2)\n"
        "for seconds in (600, 600, 600, 600, 0): workers.submit(lambda seconds=seconds: time.sleep(seconds))\n"
        "calls = workers.wait(grace=None); print([call.late for call in calls])"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[True, True, True, True, False]", done.stderr
