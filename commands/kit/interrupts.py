"""SIGINT: a command at work gets KeyboardInterrupt; before and after its work the process ends at once, with 130.

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
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Final

EXIT_CODE: Final = 130

_is_interrupted = False


def end_at_once() -> None:
    """Let SIGINT end the process, unless the parent had it ignored (`nohup`, a shell's background job)."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
        sys.unraisablehook = _raise_again
        # The first to be registered is the last to run.
        atexit.register(_exit_if_interrupted)


def _end(*_: object) -> None:
    try:
        os.write(2, b"bkctl: Interrupted\n")
    finally:
        os._exit(EXIT_CODE)


def note_interrupt() -> None:
    """Make the process end with EXIT_CODE rather than by the signal, as the command was interrupted.

    Python ends by it wherever a KeyboardInterrupt passed through `exec`, as of dataclasses, whoever handled it then.
    """
    global _is_interrupted
    _is_interrupted = True


def _exit_if_interrupted() -> None:
    if _is_interrupted:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(EXIT_CODE)


def raised() -> AbstractContextManager[None]:
    """Raise KeyboardInterrupt for a SIGINT in the block, in a process that called `end_at_once`."""
    return _handled_by(signal.default_int_handler)


def ignored() -> AbstractContextManager[None]:
    """Ignore SIGINT in the block, which must be short, in a process that called `end_at_once`."""
    return _handled_by(signal.SIG_IGN)


@contextmanager
def _handled_by(handler: Any) -> Iterator[None]:
    if signal.getsignal(signal.SIGINT) is not _end:
        yield
        return
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, _end)


def _raise_again(unraisable: sys.UnraisableHookArgs) -> None:
    """Raise KeyboardInterrupt again, after a finalizer or a callback from C swallowed it."""
    if unraisable.exc_type is KeyboardInterrupt:
        # From another thread: here it would only be swallowed once more. This is the main thread.
        _thread.start_new_thread(signal.pthread_kill, (_thread.get_ident(), signal.SIGINT))
    else:
        sys.__unraisablehook__(unraisable)
