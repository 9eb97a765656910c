"""SIGINT and SIGTERM: a command at work gets KeyboardInterrupt; before and after it the process ends, with 130 or 143.

Before its work a command has changed nothing, so there is nothing to put in order, and an exception raised in the
middle of an import can be printed or swallowed by whoever is imported. Nothing here imports more than it needs: it is
in place before anything else of bkctl is.
"""

from __future__ import annotations

import _thread
import atexit
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Final

#: The parser's code, too.
EXIT_CODE: Final = 130
#: `timeout` sends SIGTERM twice, to the process and to its group: within this time it counts once.
REPEAT_S: Final = 1.0

_is_interrupted = False
#: Our parent did not have SIGINT ignored.
_takes_sigint = False
#: What an interrupt does now; None in a process that did not call `end_at_once`.
_handler: Any = None
#: When the first SIGTERM came, by the monotonic clock.
_terminated_at: float | None = None


def end_at_once() -> None:
    """Let SIGINT and SIGTERM end the process, unless the parent had them ignored (`nohup`, a background job)."""
    global _handler, _takes_sigint
    _handler = _end
    _takes_sigint = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if _takes_sigint:
        signal.signal(signal.SIGINT, _end)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate)
    sys.unraisablehook = _raise_again
    # The first to be registered is the last to run.
    atexit.register(_exit_if_interrupted)


def exit_code() -> int:
    """Return the exit code of an interrupted command: 143 after SIGTERM, else 130."""
    return EXIT_CODE if _terminated_at is None else 143


def _end(*_: object) -> None:
    try:
        os.write(2, b"bkctl: Interrupted\n")
    finally:
        os._exit(exit_code())


def _terminate(number: int, frame: object) -> None:
    """Interrupt as SIGINT does, by the handler that asyncio or a library put there; a second SIGTERM ends at once."""
    global _terminated_at
    now, before = time.monotonic(), _terminated_at
    if before is None:
        _terminated_at = now
        handler: Any = signal.getsignal(signal.SIGINT) if _takes_sigint else _handler
        if callable(handler):
            handler(signal.SIGINT, frame)
    elif now - before > REPEAT_S:
        _end()


def note_interrupt() -> None:
    """Make the process end with `exit_code` rather than by the signal, as the command was interrupted.

    Python ends by it wherever a KeyboardInterrupt passed through `exec`, as of dataclasses, whoever handled it then.
    """
    global _is_interrupted
    _is_interrupted = True


def _exit_if_interrupted() -> None:
    if _is_interrupted:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(exit_code())


def raised() -> AbstractContextManager[None]:
    """Raise KeyboardInterrupt for a signal in the block, in a process that called `end_at_once`."""
    return _handled_by(signal.default_int_handler)


def ignored() -> AbstractContextManager[None]:
    """Ignore signals in the block, which must be short, in a process that called `end_at_once`."""
    return _handled_by(signal.SIG_IGN)


@contextmanager
def _handled_by(handler: Any) -> Iterator[None]:
    global _handler
    if _handler is not _end:
        yield
        return
    _set_handler(handler)
    try:
        yield
    finally:
        _set_handler(_end)


def _set_handler(handler: Any) -> None:
    global _handler
    _handler = handler
    if _takes_sigint:
        signal.signal(signal.SIGINT, handler)


def _raise_again(unraisable: sys.UnraisableHookArgs) -> None:
    """Raise KeyboardInterrupt again, after a finalizer or a callback from C swallowed it."""
    if unraisable.exc_type is KeyboardInterrupt:
        global _terminated_at
        number, _terminated_at = (signal.SIGINT if _terminated_at is None else signal.SIGTERM), None
        # From another thread: here it would only be swallowed once more. This is the main thread.
        _thread.start_new_thread(signal.pthread_kill, (_thread.get_ident(), number))
    else:
        sys.__unraisablehook__(unraisable)
