"""Reads of nodes, one at a time or many: in growing batches, over a `Reader` where that pays, else through kazoo."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Final

from kazoo.exceptions import AuthFailedError, KazooException, NoNodeError
from kazoo.handlers.threading import KazooTimeoutError

from bkctl.metadata.backends.zookeeper.connection import ZooKeeperConnection
from bkctl.metadata.backends.zookeeper.reader import NO_ANSWER, Origin, ReadBatch, Reader, ReaderLost
from bkctl.metadata.store import Versioned

_BATCH_SIZE_MAX: Final = 256
#: Operation → reads in the first batch; the sum of names or bytes below which a batch grows, above which it shrinks.
_BATCHES: Final = {"get": (64, 1 << 18, 1 << 21), "children": (4, 4_000, 40_000), "origin": (256, 0, 1)}
#: Fewer reads are not worth a connection of their own.
_READER_COUNT_MIN: Final = 8
#: After a failed connection of a Reader, kazoo reads for this long.
_READER_PAUSE_S: Final = 5.0
_POLL_S: Final = 0.1


class ZooKeeperReads:
    """Values, children and origins of nodes on one connection."""

    def __init__(self, connection: ZooKeeperConnection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self.reader: Reader | None = None
        self.no_reader_until_s = float("-inf")

    def get(self, path: str, timeout_s: float | None = None) -> Versioned[bytes] | None:
        """See MetadataStore.get."""
        try:
            return _versioned(self._connection.run(lambda: self._connection.get_async(path), timeout_s))
        except NoNodeError:
            return None

    def children(self, path: str, timeout_s: float | None = None) -> list[str] | None:
        """Return the names of the node's children, ascending; None for a missing node."""
        try:
            return sorted(self._connection.run(lambda: self._connection.children_async(path), timeout_s))
        except NoNodeError:
            return None

    def origin(self, path: str, timeout_s: float | None = None) -> Origin | None:
        """Return the origin of the node, None for a missing node."""
        try:
            return _origin(self._connection.run(lambda: self._connection.get_async(path), timeout_s))
        except NoNodeError:
            return None

    def get_many(self, paths: Iterable[str]) -> Iterator[Versioned[bytes] | None]:
        """See MetadataStore.get_many."""
        return self._pipeline("get", paths, self.get)

    def children_many(self, paths: Iterable[str]) -> Iterator[list[str] | None]:
        """See MetadataStore.children_many."""
        return self._pipeline("children", paths, self.children)

    def origins(self, paths: Iterable[str]) -> Iterator[Origin | None]:
        """Yield the `origin` of each node, in the order given."""
        return self._pipeline("origin", paths, self.origin)

    def close(self) -> None:
        """End the Reader's session, after the connection is closed."""
        with self._lock:
            reader, self.reader = self.reader, None
        if reader is not None:
            reader.close()

    def _pipeline(self, operation: str, paths: Iterable[str], read_one: Callable[[str, float], Any]) -> Iterator[Any]:
        """Yield the answers in order; `read_one` repeats a read that gave no answer, and raises its error.

        Two batches are under way. A batch grows while its answers are small, and shrinks when they are large.
        """
        size, grow_below, shrink_above = _BATCHES[operation]
        remaining = iter(paths)
        batch = self._begin(operation, list(islice(remaining, size)), size)
        while batch.paths:
            ahead = self._begin(operation, list(islice(remaining, size)), size)
            weight = 0
            for path, answer in zip(batch.paths, batch.finish(), strict=True):
                if answer is NO_ANSWER:
                    found = read_one(path, self._connection.timeout_s - batch.waited_s)
                    batch.waited_s = 0.0
                else:
                    found = answer
                if isinstance(found, Versioned):
                    weight += len(found.value)
                elif isinstance(found, list):
                    weight += len(found)
                yield found
            if weight > shrink_above:
                size = max(size // 2, 1)
            elif weight < grow_below and size < _BATCH_SIZE_MAX:
                size *= 2
            batch = ahead

    def _begin(self, operation: str, paths: list[str], size: int) -> _Batch:
        # A full batch promises more to come, which is worth a connection of its own.
        is_full = len(paths) == size
        if (is_full or len(paths) >= _READER_COUNT_MIN) and (reader := self._open_reader(is_full)) is not None:
            full_paths = [self._connection.full(path) for path in paths]
            try:
                asked = getattr(reader, operation)(full_paths)
            except ReaderLost:
                self._drop_reader(reader)
            else:
                return _ReaderBatch(self._drop_reader, reader, asked, paths)
        return _KazooBatch(self._connection, operation, paths)

    def _open_reader(self, connect: bool) -> Reader | None:
        with self._lock:
            if self.reader is not None and self.reader.has_idled:  # No failure: another one may be opened at once.
                self.reader.close()
                self.reader = None
            may_connect = connect and self.reader is None and time.monotonic() >= self.no_reader_until_s
            if may_connect and not self._connection.is_closed:
                try:
                    self.reader = self._connection.connect_reader()
                except (ReaderLost, OSError, AuthFailedError):
                    self.no_reader_until_s = time.monotonic() + _READER_PAUSE_S
            return self.reader

    def _drop_reader(self, reader: Reader) -> None:
        with self._lock:
            if self.reader is reader:
                self.reader = None
                self.no_reader_until_s = time.monotonic() + _READER_PAUSE_S
        reader.close()


class _Batch(ABC):
    """Reads under way, one for each of `paths`; `waited_s`: the time without an answer, after which it gave up."""

    paths: list[str]
    waited_s: float = 0.0

    @abstractmethod
    def finish(self) -> list[Any]:
        """Return for each path a Versioned, sorted names or an Origin; None for a missing node; else NO_ANSWER."""


class _KazooBatch(_Batch):
    def __init__(self, connection: ZooKeeperConnection, operation: str, paths: list[str]) -> None:
        self.paths = paths
        self._connection = connection
        self._operation = operation
        request = connection.children_async if operation == "children" else connection.get_async
        self._results = [request(path) for path in paths]

    def finish(self) -> list[Any]:
        # Waiting for the last answer instead of for each takes one change of threads, not one an answer.
        self._results[-1].wait(self._connection.timeout_s)
        answers: list[Any] = []
        for result in self._results:
            try:
                found = result.get(timeout=_POLL_S)
            except KazooTimeoutError as error:
                raise self._connection.timed_out() from error
            except KazooException:
                answers.append(NO_ANSWER)
            else:
                answers.append(_CONVERTED[self._operation](found))
        return answers


class _ReaderBatch(_Batch):
    def __init__(self, drop: Callable[[Reader], None], reader: Reader, asked: ReadBatch, paths: list[str]) -> None:
        self.paths = paths
        self._drop = drop
        self._reader = reader
        self._asked = asked

    def finish(self) -> list[Any]:
        try:
            return self._reader.answers(self._asked)
        except ReaderLost as error:
            self._drop(self._reader)
            self.waited_s = error.waited_s
            return [NO_ANSWER] * len(self.paths)


def _versioned(answer: tuple[bytes, Any]) -> Versioned[bytes]:
    value, stat = answer
    return Versioned(value, stat.version, stat.ctime)


def _origin(answer: tuple[bytes, Any]) -> Origin:
    return Origin(answer[1].czxid, answer[1].ephemeralOwner)


#: Operation → its result from kazoo's answer.
_CONVERTED: Final[dict[str, Callable[[Any], Any]]] = {"get": _versioned, "children": sorted, "origin": _origin}
