"""Reads of nodes, one at a time or many: in growing batches, over a `Reader` where that pays, else through kazoo."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any, Final, TypeAlias, cast

from kazoo.exceptions import AuthFailedError, KazooException, NoNodeError
from kazoo.handlers.threading import KazooTimeoutError

from bkctl.metadata.backends.zookeeper.zookeeper_connection import ZooKeeperConnection
from bkctl.metadata.backends.zookeeper.zookeeper_reader import NO_ANSWER, Origin, ReadBatch, Reader, ReaderLost
from bkctl.metadata.store import Versioned

_BATCH_SIZE_MAX: Final = 256
#: Operation → reads in the first batch; the sum of names or bytes below which a batch grows, above which it shrinks.
_BATCHES: Final = {"get": (64, 1 << 18, 1 << 21), "children": (4, 4_000, 40_000), "origin": (256, 0, 1)}
#: Fewer reads are not worth a connection of their own.
_READER_COUNT_MIN: Final = 8
#: After a failed connection of a Reader, kazoo reads for this long.
_READER_PAUSE_S: Final = 5.0
_POLL_S: Final = 0.1
#: For each path of a batch a Versioned, sorted names or an Origin, None for a missing node, or NO_ANSWER; and the time
#: without an answer, after which the batch was given up.
_Finish: TypeAlias = Callable[[], tuple[list[Any], float]]


class ZooKeeperReads:
    """Values, children and origins of nodes on one connection."""

    def __init__(self, connection: ZooKeeperConnection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self.reader: Reader | None = None
        self.no_reader_until_s = float("-inf")

    def get(self, path: str) -> Versioned[bytes] | None:
        """See MetadataStore.get."""
        return cast(Versioned[bytes] | None, self._read_one("get", path))

    def children(self, path: str) -> list[str] | None:
        """Return the names of the node's children, ascending; None for a missing node."""
        return cast(list[str] | None, self._read_one("children", path))

    def get_many(self, paths: Iterable[str]) -> Iterator[Versioned[bytes] | None]:
        """See MetadataStore.get_many."""
        return self._pipeline("get", paths)

    def children_many(self, paths: Iterable[str]) -> Iterator[list[str] | None]:
        """See MetadataStore.children_many."""
        return self._pipeline("children", paths)

    def origins(self, paths: Iterable[str]) -> Iterator[Origin | None]:
        """Yield the Origin of each node, None for a missing node, in the order given."""
        return self._pipeline("origin", paths)

    def close(self) -> None:
        """End the Reader's session, after the connection is closed."""
        with self._lock:
            reader, self.reader = self.reader, None
        if reader is not None:
            reader.close()

    def _read_one(self, operation: str, path: str, timeout_s: float | None = None) -> Any:
        try:
            full = self._connection.full(path)
            return _CONVERTED[operation](self._connection.run(partial(self._request, operation), full, timeout_s))
        except NoNodeError:
            return None

    def _request(self, operation: str, full: str) -> Any:
        """Send a read through kazoo, and return its result; children include earlier acknowledged changes."""
        client = self._connection.client
        if operation != "children":
            return client.get_async(full)
        client.sync_async(full)  # Answered in order, so the answer to the next request implies it.
        return client.get_children_async(full)

    def _pipeline(self, operation: str, paths: Iterable[str]) -> Iterator[Any]:
        """Yield the answers in order. A read that gave no answer is repeated alone, and raises its error.

        Two batches are under way. A batch grows while its answers are small, and shrinks when they are large.
        """
        size, grow_below, shrink_above = _BATCHES[operation]
        remaining = iter(paths)
        paths, finish = self._begin(operation, list(islice(remaining, size)), size)
        while paths:
            ahead = self._begin(operation, list(islice(remaining, size)), size)
            weight = 0
            answers, waited_s = finish()
            for path, answer in zip(paths, answers, strict=True):
                if answer is NO_ANSWER:
                    found = self._read_one(operation, path, self._connection.timeout_s - waited_s)
                    waited_s = 0.0
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
            paths, finish = ahead

    def _begin(self, operation: str, paths: list[str], size: int) -> tuple[list[str], _Finish]:
        """Ask for the nodes at `paths`; return these, and the function that waits for the answers."""
        # A full batch promises more to come, which is worth a connection of its own.
        is_full = len(paths) == size
        if (is_full or len(paths) >= _READER_COUNT_MIN) and (reader := self._open_reader(is_full)) is not None:
            full_paths = [self._connection.full(path) for path in paths]
            try:
                asked = getattr(reader, operation)(full_paths)
            except ReaderLost:
                self._drop_reader(reader)
            else:
                return paths, partial(self._finish_in_reader, reader, asked)
        return paths, partial(
            self._finish_in_kazoo, operation, [self._request(operation, self._connection.full(path)) for path in paths]
        )

    def _finish_in_reader(self, reader: Reader, asked: ReadBatch) -> tuple[list[Any], float]:
        try:
            return reader.answers(asked), 0.0
        except ReaderLost as error:
            self._drop_reader(reader)
            return [NO_ANSWER] * asked.count, error.waited_s

    def _finish_in_kazoo(self, operation: str, results: list[Any]) -> tuple[list[Any], float]:
        # Waiting for the last answer instead of for each takes one change of threads, not one an answer.
        results[-1].wait(self._connection.timeout_s)
        answers: list[Any] = []
        for result in results:
            try:
                found = result.get(timeout=_POLL_S)
            except KazooTimeoutError as error:
                raise self._connection.timed_out() from error
            except KazooException:
                answers.append(NO_ANSWER)
            else:
                answers.append(_CONVERTED[operation](found))
        return answers, 0.0

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


def _versioned(answer: tuple[bytes, Any]) -> Versioned[bytes]:
    value, stat = answer
    return Versioned(value, stat.version, stat.ctime)


def _origin(answer: tuple[bytes, Any]) -> Origin:
    return Origin(answer[1].czxid, answer[1].ephemeralOwner)


#: Operation → its result from kazoo's answer.
_CONVERTED: Final[dict[str, Callable[[Any], Any]]] = {"get": _versioned, "children": sorted, "origin": _origin}
