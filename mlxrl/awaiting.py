"""User code that is slow or async: limited in time, awaited in a loop of its own, named while it is waited for."""

from __future__ import annotations

import asyncio
import inspect
import threading
import warnings
from collections.abc import Awaitable, Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

WAIT = 30.0
"""Seconds after which a line says what is waited for."""
GRACE = 1.0
"""Seconds that a loop is given to end what is late."""

Outcome: TypeAlias = tuple[Any, BaseException | None]
"""What a call returned, and what it raised."""
_running: list[tuple[asyncio.AbstractEventLoop, threading.Thread]] = []
_starting = threading.Lock()


class Late(Exception):
    """A call gave no answer in its time."""

    def __init__(self, timeout: float) -> None:
        super().__init__(f"no answer in {timeout:g} s")


def begin(name: str, call: Callable[[], Any], timeout: float | None = None) -> Callable[[], Outcome]:
    """Call user code, and return what waits for its outcome.

    What is awaitable, or a list with awaitables, is awaited in a loop in a thread of its own, together with all else
    that was begun; in a list each fails alone, and an exception stands in the place of its value. Other code is over
    when this returns; with a time limit, in seconds, it runs in a thread of its own.

    Raises:
        KeyboardInterrupt: the code did; any other exception is an outcome.
    """
    with announced(name):
        value, error = _called(call) if timeout is None else _in_thread(call, timeout)
    if error is not None or not _awaitables(value):
        return lambda: (value, error)
    future = asyncio.run_coroutine_threadsafe(_settled(value, timeout), _loop())
    return partial(_waited, name, future, timeout)


def is_async(function: Any) -> bool:
    """Whether a function, what a partial calls, or an object's call is declared async."""
    while isinstance(function, partial):
        function = function.func
    function = inspect.unwrap(function)
    return any(map(inspect.iscoroutinefunction, (function, getattr(function, "__call__", None))))  # noqa: B004


@contextmanager
def announced(name: str) -> Generator[None]:
    """The span of a call; one that takes long is named in a warning."""
    line = f"{name}: no answer for {WAIT:g} s; still waiting"
    timer = threading.Timer(WAIT, partial(warnings.warn, line, stacklevel=2))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _called(call: Callable[[], Any]) -> Outcome:
    try:
        return call(), None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  (user code may raise anything)
        return None, error


def _in_thread(call: Callable[[], Any], timeout: float) -> Outcome:
    answer: Future[Outcome] = Future()

    def answered() -> None:
        try:
            answer.set_result(_called(call))
        except KeyboardInterrupt as error:
            answer.set_exception(error)

    threading.Thread(target=answered, daemon=True, name="mlxrl reward").start()
    try:
        return answer.result(timeout)
    except TimeoutError:
        return None, Late(timeout)


def _awaitables(value: Any) -> bool:
    values: list[Any] = list(value) if isinstance(value, list | tuple) else [value]
    return any(map(inspect.isawaitable, values))


async def _settled(value: Any, timeout: float | None) -> Outcome:
    """The outcome of an awaitable, or of those in a list."""
    value, error = await _awaited(value, timeout) if inspect.isawaitable(value) else (value, None)
    if error is not None or not _awaitables(value):
        return value, error
    waiting = [_awaited(one, timeout) if inspect.isawaitable(one) else _known(one) for one in value]
    return [one if raised is None else raised for one, raised in await asyncio.gather(*waiting)], None


async def _known(value: Any) -> Outcome:
    return value, None


async def _awaited(value: Awaitable[Any], timeout: float | None) -> Outcome:
    """An outcome, whatever is raised: what is raised in a loop may end it."""
    limit = asyncio.timeout(timeout)
    try:
        async with limit:
            return await value, None
    except BaseException as error:  # noqa: BLE001  (user code may raise anything)
        late = timeout is not None and isinstance(error, TimeoutError) and limit.expired()
        return None, Late(timeout) if late and timeout is not None else error


def _waited(name: str, future: Future[Outcome], timeout: float | None) -> Outcome:
    try:
        with announced(name):
            value, error = future.result(None if timeout is None else timeout + GRACE)
    except TimeoutError:
        assert timeout is not None
        _running.clear()  # code in it does not let it go on
        return None, Late(timeout)
    except KeyboardInterrupt:
        future.cancel()
        raise
    if isinstance(error, KeyboardInterrupt):
        raise error
    return value, error


def _loop() -> asyncio.AbstractEventLoop:
    """The loop that user code is awaited in, the same from call to call: clients keep to the loop they began in."""
    with _starting:
        current = _running[0] if _running else None
        if current is None or not current[1].is_alive():
            loop = asyncio.new_event_loop()
            current = loop, threading.Thread(target=loop.run_forever, daemon=True, name="mlxrl loop")
            current[1].start()
            _running[:] = [current]
        return current[0]
