"""Processes that share the work of one command: forked before it connects, so that they need nothing but the work."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from io import BufferedRWPair
from itertools import starmap
from typing import Final, Generic, TypeVar

from bkctl.errors import BkctlError

T = TypeVar("T")
R = TypeVar("R")

#: One more than two CPUs need, so that none waits while this process is busy with something else.
_COUNT: Final = 3
#: Objects between two collections of garbage: a batch has thousands, and none of them is garbage.
_COLLECTION: Final = 50_000
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Forks(Generic[T, R]):
    """Three processes that call `work` with what `map` gives them; none where this process is not to be forked.

    They end with this process, whatever ends it. A context manager.
    """

    def __init__(self, work: Callable[[T], R]) -> None:
        self._workers: deque[tuple[int, BufferedRWPair]] = deque()
        # On macOS libraries do not work after a fork; a thread may hold a lock that no one would release.
        if sys.platform == "linux" and len(os.sched_getaffinity(0)) > 1 and threading.active_count() == 1:
            gc.freeze()
            gc.set_threshold(_COLLECTION)
            signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
            try:
                for _ in range(_COUNT):
                    self._start(work)
            except OSError:  # No process, or no memory, is left: the work is done here.
                pass
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)

    def _start(self, work: Callable[[T], R]) -> None:
        import socket

        ours, theirs = socket.socketpair()
        with ours, theirs:
            process = os.fork()
            if process == 0:
                try:
                    ours.close()
                    for _, file in self._workers:
                        file.close()
                    _serve(work, theirs.makefile("rwb"))
                finally:
                    os._exit(0)
            self._workers.append((process, ours.makefile("rwb")))

    def __enter__(self) -> Forks[T, R]:
        return self

    def __exit__(self, *_: object) -> None:
        for process, file in self._workers:
            with contextlib.suppress(OSError):  # Our parent may have had us ignore the ends of our children.
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
            with contextlib.suppress(OSError):
                file.close()
        self._workers.clear()

    def map(self, items: Iterable[T]) -> Iterator[tuple[T, R | None]]:
        """Yield each item with what `work` returns for it, in order; None: it raised, or no process did it.

        A BkctlError of `items` is raised behind the results of those before it.
        """
        if not self._workers:
            yield from ((item, None) for item in items)
        busy = deque[tuple[BufferedRWPair | None, T]]()
        try:
            for item in items:
                if len(busy) == len(self._workers):
                    yield self._result(*busy.popleft())
                busy.append((self._sent(item), item))
        except BkctlError:
            yield from starmap(self._result, busy)
            raise
        yield from starmap(self._result, busy)

    def _sent(self, item: T) -> BufferedRWPair | None:
        """Return the file of the process that has the item now; None: the item refused to be pickled."""
        try:
            data = pickle.dumps(item, pickle.HIGHEST_PROTOCOL)
        except BkctlError:
            return None
        _, file = self._workers[0]
        self._workers.rotate(-1)
        with contextlib.suppress(OSError):  # The process is gone, as `_result` will see.
            file.write(data)
            file.flush()
        return file

    def _result(self, file: BufferedRWPair | None, item: T) -> tuple[T, R | None]:
        try:
            return item, None if file is None else pickle.load(file)
        except (OSError, EOFError, pickle.UnpicklingError):
            return item, None


def _serve(work: Callable[[T], R], file: BufferedRWPair) -> None:
    """Answer the items that come until the other end is closed."""
    signal.set_wakeup_fd(-1)
    for number in _SIGNALS:  # They are for the command, which ends this process.
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)  # Readers of stdout wait until all that have it are gone.
    while True:
        try:
            item = pickle.load(file)
        except (EOFError, OSError):
            return
        result = None
        with contextlib.suppress(BkctlError):
            result = work(item)
        pickle.dump(result, file, pickle.HIGHEST_PROTOCOL)
        file.flush()
