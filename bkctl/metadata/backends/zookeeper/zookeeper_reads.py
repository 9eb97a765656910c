"""Reads of nodes, one at a time or many: in growing batches, each one request where that pays.

kazoo takes 0.1 ms of Python for each request, and the server takes as long to pass it through its five threads, so many
reads are one `multiRead` (ZooKeeper 3.6). A server that lacks it may end the session of its client: so these requests
have a session of their own, and after a failure each node is a request to the store's for some seconds.

    multiRead, in both directions: type:int32 done:bool error:int32 … for each read; -1, true, -1 ends them

Source: ZooKeeper's zookeeper.jute, ZooDefs.OpCode, KeeperException.Code, MultiOperationRecord, MultiResponse.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice, tee
from typing import Any, Final, NamedTuple, TypeAlias, cast

from kazoo.client import KazooClient
from kazoo.exceptions import KazooException, NoNodeError
from kazoo.handlers.threading import KazooTimeoutError

from bkctl.metadata.backends.sessions import SessionStore
from bkctl.metadata.backends.zookeeper.zookeeper_connection import ZooKeeperConnection, end_client
from bkctl.metadata.store import Versioned

_BATCH_SIZE_MAX: Final = 512
#: With fewer batches, a listing waits for the server.
_UNDER_WAY: Final = 4
#: Fewer reads are not worth a session of their own.
_MULTI_READ_MIN: Final = 8
_CONNECT_S: Final = 2.0
#: After a failure, each node is read by a request of its own for this long.
_PAUSE_S: Final = 5.0
_POLL_S: Final = 0.1
_ERROR: Final = -1
_NO_NODE: Final = -101
_INT = struct.Struct(">i")
_MULTI_HEADER = struct.Struct(">i?i")  # type, done, error
_READ = struct.Struct(">i?ii")  # a multi header, and the length of the path
_MULTI_END: Final = _MULTI_HEADER.pack(-1, True, -1)
_STAT = struct.Struct(">qqqqiiiqiiq")
_TIME_VERSION = struct.Struct(">16xq8xi")  # the first fields of a stat
#: The server gave no answer, or an error other than a missing node: the read is repeated alone.
NO_ANSWER: Final = object()
#: For each path of a batch a Versioned, sorted names or an Origin, None for a missing node, or NO_ANSWER.
_Finish: TypeAlias = Callable[[], list[Any]]


class Origin(NamedTuple):
    """The transaction that created a node, and the session that owns an ephemeral node (0: not ephemeral)."""

    czxid: int
    session_id: int


class MultiRead:
    """A request of kazoo's for many reads of one operation; its result is the answer's bytes, and where they begin."""

    type = 22

    def __init__(self, operation: int, paths: Sequence[str]) -> None:
        self.operation, self.paths = operation, paths

    def serialize(self) -> bytes:
        """Return the body of the request."""
        paths = [path.encode() for path in self.paths]
        # Paths mostly have one length, so all have the same header.
        headers = {size: _READ.pack(self.operation, False, -1, size) for size in set(map(len, paths))}
        return b"".join([*[headers[len(path)] + path + b"\0" for path in paths], _MULTI_END])

    def deserialize(self, data: bytes, offset: int) -> tuple[bytes, int]:
        """Return the answer as it is, for `parse_answers` on the thread that asked."""
        return data, offset


def parse_answers(data: bytes, at: int, operation: str, count: int) -> list[Any]:
    """Return the answers to `count` reads, as `_Finish` has them, which begin at the byte `at`.

    Raises ValueError or struct.error for malformed bytes.
    """
    code, parse = _OPERATIONS[operation][:2]
    answers: list[Any] = []
    for _ in range(count):
        kind, _, error = _MULTI_HEADER.unpack_from(data, at)
        at += _MULTI_HEADER.size
        if kind == _ERROR:
            answers.append(None if error == _NO_NODE else NO_ANSWER)
            at += _INT.size
        elif kind == code:
            answer, at = parse(data, at)
            answers.append(answer)
        else:
            raise ValueError("an answer to another request")
    return answers


def _value(data: bytes, start: int) -> tuple[Versioned[bytes], int]:
    at = _end(data, start)
    ctime_ms, version = _TIME_VERSION.unpack_from(data, at)
    # A call of the class takes twice as long.
    return tuple.__new__(Versioned, (data[start + 4 : at], version, ctime_ms)), at + _STAT.size


def _origin(data: bytes, start: int) -> tuple[Origin, int]:
    at = _end(data, start)
    stat = _STAT.unpack_from(data, at)
    return Origin(stat[0], stat[7]), at + _STAT.size


def _end(data: bytes, start: int) -> int:
    """Return the end of a node's value, which begins with its length; the stat is behind it."""
    return start + 4 + int(max(_INT.unpack_from(data, start)[0], 0))  # -1: null


def _names(data: bytes, start: int) -> tuple[list[str], int]:
    count = _INT.unpack_from(data, start)[0]
    at = start + 4
    if count <= 0:
        return [], at
    # Names mostly have one length. Then the length before each name is one separator, and no name contains its zeros.
    end = at + count * (4 + _INT.unpack_from(data, at)[0])
    if at < end <= len(data) and (block := data[at:end]).isascii():
        text = block.decode("ascii")
        names = text.split(text[:4])
        if len(names) == count + 1 and text.count("\0") == count * text.count("\0", 0, 4):
            del names[0]
            return sorted(names), end
    names = []
    for _ in range(count):
        size = _INT.unpack_from(data, at)[0]
        if not 0 <= size <= len(data) - at - 4:
            raise ValueError("a malformed answer")
        names.append(data[at + 4 : at + 4 + size].decode())
        at += 4 + size
    return sorted(names), at


class _Operation(NamedTuple):
    """A kind of read: its code and parser in a multiRead, the conversion of kazoo's answer, and sizes of batches.

    The first batch has `first_size` reads; a batch grows where the sum of names or bytes is below `grow_below`, and
    shrinks above `shrink_above`.
    """

    code: int
    parse: Callable[[bytes, int], tuple[Any, int]]
    convert: Callable[[Any], Any]
    first_size: int
    grow_below: int
    shrink_above: int


_OPERATIONS: Final = {
    "get": _Operation(
        4, _value, lambda found: Versioned(found[0], found[1].version, found[1].ctime), 64, 1 << 18, 1 << 21
    ),
    "children": _Operation(8, _names, sorted, 4, 4_000, 40_000),
    "origin": _Operation(4, _origin, lambda found: Origin(found[1].czxid, found[1].ephemeralOwner), 256, 0, 1),
}


class ZooKeeperReads(SessionStore):
    """The reads of a store: values, children and origins of nodes, over `connection`."""

    def __init__(self, connection: ZooKeeperConnection) -> None:
        super().__init__()
        self._connection = connection
        self._lock = threading.Lock()
        #: The session of requests for many nodes; None until there is one.
        self.many: KazooClient | None = None
        self.paused_until_s = float("-inf")

    @property
    def root(self) -> str:
        """The path of the cluster's root."""
        return self._connection.root

    def get(self, path: str) -> Versioned[bytes] | None:
        return cast(Versioned[bytes] | None, self._read_one("get", path))

    def get_many(self, paths: Iterable[str]) -> Iterator[Versioned[bytes] | None]:
        return self._pipeline("get", paths)

    def children(self, path: str, *, after: str = "", limit: int | None = None) -> list[str] | None:
        names = self._read_one("children", path)
        if names is None:
            return None
        names = self._valid_names(path, names)
        return [name for name in names if name > after][:limit] if after or limit is not None else names

    def children_many(self, paths: Iterable[str]) -> Iterator[list[str] | None]:
        paths, asked = tee(paths)
        for path, names in zip(paths, self._pipeline("children", asked), strict=True):
            yield None if names is None else self._valid_names(path, names)

    def _origins(self, paths: Iterable[str]) -> Iterator[Origin | None]:
        """Yield the Origin of each node, None for a missing node, in the order given."""
        return self._pipeline("origin", paths)

    def _close_many(self, *, pause_s: float = 0.0) -> None:
        """End the session of many reads; with a pause, each node is read by a request of its own for that long."""
        with self._lock:
            client, self.many = self.many, None
            self.paused_until_s = time.monotonic() + pause_s
        if client is not None:
            end_client(client, wait=client.connected)

    def _read_one(self, operation: str, path: str, timeout_s: float | None = None) -> Any:
        try:
            full = self._connection.full(path)
            answer = self._connection.run(partial(self._request, operation), full, timeout_s)
            return _OPERATIONS[operation].convert(answer)
        except NoNodeError:
            return None

    def _request(self, operation: str, full: str) -> Any:
        """Send a read, and return its result; children include earlier acknowledged changes."""
        client = self._connection.client
        if operation != "children":
            return client.get_async(full)
        client.sync_async(full)  # Answered in order, so the answer to the next request implies it.
        return client.get_children_async(full)

    def _pipeline(self, operation: str, paths: Iterable[str]) -> Iterator[Any]:
        """Yield the answers in order. A read that gave no answer is repeated alone, and raises its error.

        _UNDER_WAY batches are asked for at once. They grow while answers are small, and shrink when these are large.
        """
        _, _, _, size, grow_below, shrink_above = _OPERATIONS[operation]
        remaining = iter(paths)
        under_way = deque[tuple[list[str], _Finish]]()
        while True:
            while len(under_way) < _UNDER_WAY and (batch := list(islice(remaining, size))):
                under_way.append(self._begin(operation, batch, size))
            if not under_way:
                return
            paths, finish = under_way.popleft()
            weight = 0
            began_s = time.monotonic()
            answers = finish()
            waited_s = time.monotonic() - began_s
            for path, found in zip(paths, answers, strict=True):
                if found is NO_ANSWER:
                    found = self._read_one(operation, path, max(self._connection.timeout_s - waited_s, _POLL_S))
                    waited_s = 0.0
                if isinstance(found, Versioned):
                    weight += len(found.value)
                elif isinstance(found, list):
                    weight += len(found)
                yield found
            if weight > shrink_above:
                size = max(size // 2, 1)
            elif weight < grow_below and size < _BATCH_SIZE_MAX:
                size *= 2

    def _begin(self, operation: str, paths: list[str], size: int) -> tuple[list[str], _Finish]:
        """Ask for the nodes at `paths`; return these, and the function that waits for the answers."""
        full_paths = [self._connection.full(path) for path in paths]
        # A full batch promises more to come, which is worth a session of its own.
        is_full = len(paths) == size
        if (is_full or len(paths) >= _MULTI_READ_MIN) and (client := self._client_of_many(is_full)) is not None:
            # The server answers in order, so reads after the `sync` see all changes acknowledged before it.
            client.sync_async(full_paths[0])
            result = client.handler.async_result()
            client._call(MultiRead(_OPERATIONS[operation].code, full_paths), result)
            return paths, partial(self._finish_many, operation, len(paths), result)
        return paths, partial(self._finish_each, operation, [self._request(operation, full) for full in full_paths])

    def _finish_many(self, operation: str, count: int, result: Any) -> list[Any]:
        connection = self._connection
        try:
            # kazoo leaves a silent server after the same time.
            data, at = result.get(timeout=min(connection.timeout_s, connection.session_timeout_s * 2 / 3))
            return parse_answers(data, at, operation, count)
        except (KazooException, KazooTimeoutError, struct.error, ValueError):
            self._close_many(pause_s=_PAUSE_S)
            return [NO_ANSWER] * count

    def _finish_each(self, operation: str, results: list[Any]) -> list[Any]:
        # Waiting for the last answer instead of for each takes one change of threads, not one an answer.
        results[-1].wait(self._connection.timeout_s)
        answers: list[Any] = []
        for result in results:
            try:
                answers.append(_OPERATIONS[operation].convert(result.get(timeout=_POLL_S)))
            except KazooTimeoutError as error:
                raise self._connection.timed_out() from error
            except KazooException:
                answers.append(NO_ANSWER)
        return answers

    def _client_of_many(self, connect: bool) -> KazooClient | None:
        """Return the session of many reads, opened where `connect`; None where there is none now."""
        with self._lock:
            if self._connection.closed.is_set() or time.monotonic() < self.paused_until_s:
                return None
            if self.many is None and connect:
                client = self._connection.new_client()
                if not self._serves_many(client, min(self._connection.timeout_s, _CONNECT_S)):
                    self.paused_until_s = time.monotonic() + _PAUSE_S
                    end_client(client, wait=client.connected)
                    return None
                self.many = client
            return self.many if self.many is not None and self.many.connected else None

    def _serves_many(self, client: KazooClient, timeout_s: float) -> bool:
        """Start `client`, and return whether its server answers a multiRead.

        A server that lacks it refuses it before it answers earlier requests, which kazoo does not survive.
        """
        if not client.start_async().wait(timeout_s):
            return False
        result = client.handler.async_result()
        client._call(MultiRead(_OPERATIONS["get"].code, [self._connection.root or "/"]), result)
        try:
            data, at = result.get(timeout=timeout_s)
            parse_answers(data, at, "get", 1)
        except (KazooException, KazooTimeoutError, struct.error, ValueError):
            return False
        return True
