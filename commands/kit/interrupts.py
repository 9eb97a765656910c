"""SIGINT, SIGTERM and SIGHUP: they interrupt a command at work; before and after it they end the process.

Before its work a command has changed nothing, so there is nothing to put in order, and an exception raised in the
middle of an import can be printed or swallowed by whoever is imported. The exit code is 128 plus the number of the
first signal. Nothing here imports more than it needs: it is in place before anything else of bkctl is.
"""

from __future__ import annotations

import _thread
import atexit
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, TypeVar

T = TypeVar("T")

#: The code of SIGINT, and of a question without an answer; the parser's code, too.
EXIT_CODE: Final = 130
#: `timeout` signals the process and its group, and a terminal that closes does so by its shell, too: signals that
#: follow the first within this time are part of it.
REPEAT_S: Final = 1.0

_is_interrupted = False
#: The signals that are handled here; our parent did not have them ignored.
_taken: list[int] = []
#: The action of the first signal; None in a process that did not call `end_at_once`.
_act: Callable[[], object] | None = None
#: The first signal, and when it came by the monotonic clock.
_first: tuple[int, float] | None = None


def end_at_once() -> None:
    """Let signals end the process, unless the parent had them ignored (`nohup`, a background job)."""
    global _act
    _act = _end
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL):
            signal.signal(number, _interrupt)
            _taken.append(number)
    sys.unraisablehook = _raise_again
    # The first to be registered is the last to run.
    atexit.register(_exit_if_interrupted)


def has_come() -> bool:
    """Return True after the first signal."""
    return _first is not None


def exit_code() -> int:
    """Return the exit code of an interrupted command: 128 plus the number of the first signal, else 130."""
    return EXIT_CODE if _first is None else 128 + _first[0]


def _interrupt(number: int, frame: object) -> None:
    """Act on the first signal. Of the later ones SIGINT interrupts the work again; the others end the process."""
    global _first
    now = time.monotonic()
    if _first is None:
        _first = number, now
        if _act is not None:
            _act()
    elif now - _first[1] > REPEAT_S:
        if _act is _end or number != signal.SIGINT:
            _end()
        _raise()


def _end() -> None:
    try:
        os.write(2, b"bkctl: Interrupted\n")
    finally:
        os._exit(exit_code())


def _raise() -> None:
    raise KeyboardInterrupt


def note_interrupt() -> None:
    """Make the process end with `exit_code`, also where Python itself would end it by SIGINT.

    Python does that after a KeyboardInterrupt has passed through `exec` (dataclasses use it), even if it was handled.
    """
    global _is_interrupted
    _is_interrupted = True


def _exit_if_interrupted() -> None:
    if _is_interrupted:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(exit_code())


def begin_work() -> None:
    """Raise KeyboardInterrupt for a signal from now on until `ignored`, in a process that called `end_at_once`."""
    global _act
    if _act is not None:
        _act = _raise


async def cancelled(work: Awaitable[T]) -> T:
    """Return the result of `work`; the first signal cancels this task, in a process that called `end_at_once`."""
    global _act
    if _act is None:
        return await work
    from asyncio import current_task, get_running_loop

    task, loop = current_task(), get_running_loop()
    assert task is not None

    def cancel() -> None:
        task.cancel()
        loop.call_soon_threadsafe(int)  # This wakes the loop.

    before, _act = _act, cancel
    try:
        return await work
    finally:
        _act = before


@contextmanager
def ignored() -> Iterator[None]:
    """Ignore signals in the block, which must be short, and let them end the process from then on."""
    global _act
    for number in _taken:
        signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        if _act is not None:
            _act = _end
        for number in _taken:
            signal.signal(number, _interrupt)


def _raise_again(unraisable: sys.UnraisableHookArgs) -> None:
    """Raise KeyboardInterrupt again, after a finalizer or a callback from C swallowed it."""
    if unraisable.exc_type is KeyboardInterrupt:
        global _first
        number, _first = (signal.SIGINT if _first is None else _first[0]), None
        # From another thread: here it would only be swallowed once more. This is the main thread.
        _thread.start_new_thread(signal.pthread_kill, (_thread.get_ident(), number))
    else:
        sys.__unraisablehook__(unraisable)
