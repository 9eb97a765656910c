"""Reads of nodes, one at a time or many: in growing batches, each one request where that pays.

kazoo takes 0.1 ms of Python for each request, and the server takes as long to pass it through its five threads, so many
reads are one `multiRead` (ZooKeeper 3.6). A server that lacks it may end the session of its client: so these requests
have a session of their own, and after a failure each node is a request to the store's for some seconds.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from itertools import chain, islice, tee
from typing import Any, Final, TypeAlias, cast

from kazoo.client import KazooClient
from kazoo.exceptions import KazooException, NoNodeError
from kazoo.handlers.threading import KazooTimeoutError

from bkctl.metadata.backends.sessions import SessionStore
from bkctl.metadata.backends.zookeeper.multi_read import (
    NO_ANSWER,
    OPERATIONS,
    Answers,
    MultiRead,
    Origin,
    parse_answers,
)
from bkctl.metadata.backends.zookeeper.zookeeper_connection import ZooKeeperConnection, end_client
from bkctl.metadata.store import StoredValue, Versioned, attempt, full_paths

_BATCH_SIZE_MAX: Final = 1024
#: With fewer batches, a listing waits for the server.
_UNDER_WAY: Final = 4
#: Fewer reads are not worth a session of their own.
_MULTI_READ_MIN: Final = 8
_CONNECT_S: Final = 2.0
#: After a failure, each node is read by a request of its own for this long.
_PAUSE_S: Final = 5.0
_POLL_S: Final = 0.1
#: Waits for the answers to a batch.
_Finish: TypeAlias = Callable[[], Answers]


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
        return chain.from_iterable(self._pipeline("get", paths))

    def get_batches(self, paths: Iterable[str]) -> Iterator[Collection[StoredValue]]:
        return self._pipeline("get", paths, in_place=True)

    def children(self, path: str, *, after: str = "", limit: int | None = None) -> list[str] | None:
        names = self._read_one("children", path)
        if names is None:
            return None
        names = self._valid_names(path, names)
        return [name for name in names if name > after][:limit] if after or limit is not None else names

    def children_many(self, paths: Iterable[str]) -> Iterator[list[str] | None]:
        paths, asked = tee(paths)
        for path, names in zip(paths, chain.from_iterable(self._pipeline("children", asked)), strict=True):
            yield None if names is None else self._valid_names(path, names)

    def _origins(self, paths: Iterable[str]) -> Iterator[Origin | None]:
        """Yield the Origin of each node, None for a missing node, in the order given."""
        return chain.from_iterable(self._pipeline("origin", paths))

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
            return OPERATIONS[operation].convert(answer)
        except NoNodeError:
            return None

    def _request(self, operation: str, full: str) -> Any:
        """Send a read, and return its result; children include earlier acknowledged changes."""
        client = self._connection.client
        if operation != "children":
            return client.get_async(full)
        client.sync_async(full)  # Answered in order, so the answer to the next request implies it.
        return client.get_children_async(full)

    def _pipeline(self, operation: str, paths: Iterable[str], *, in_place: bool = False) -> Iterator[Answers]:
        """Yield the answers in order. A read that gave no answer is repeated alone, and raises its error.

        With `in_place` the error of a node is its answer, and only Unreachable is raised.

        _UNDER_WAY batches are asked for at once. They grow while answers are small, and shrink when these are large.
        """
        _, _, _, size, grow_below, shrink_above = OPERATIONS[operation]
        remaining = iter(paths)
        under_way = deque[tuple[list[str], _Finish]]()
        while True:
            while len(under_way) < _UNDER_WAY and (batch := list(islice(remaining, size))):
                under_way.append(self._begin(operation, batch, size))
            if not under_way:
                return
            batch, finish = under_way.popleft()
            began_s = time.monotonic()
            answers = finish()
            answers.waited_s = time.monotonic() - began_s
            repeat = partial(self._repeat, operation, batch)
            answers.repeat = partial(attempt, repeat) if in_place else repeat
            size_bytes = answers.size_bytes()
            yield answers
            if size_bytes > shrink_above:
                size = max(size // 2, 1)
            elif size_bytes < grow_below and size < _BATCH_SIZE_MAX:
                size *= 2

    def _repeat(self, operation: str, paths: list[str], index: int, waited_s: float) -> Any:
        return self._read_one(operation, paths[index], max(self._connection.timeout_s - waited_s, _POLL_S))

    def _begin(self, operation: str, paths: list[str], size: int) -> tuple[list[str], _Finish]:
        """Ask for the nodes at `paths`; return these, and the function that waits for the answers."""
        nodes = full_paths(self.root, paths)
        # A full batch promises more to come, which is worth a session of its own.
        is_full = len(paths) == size
        if (is_full or len(paths) >= _MULTI_READ_MIN) and (client := self._client_of_many(is_full)) is not None:
            # The server answers in order, so reads after the `sync` see all changes acknowledged before it.
            client.sync_async(nodes[0])
            result = client.handler.async_result()
            client._call(MultiRead(OPERATIONS[operation].code, nodes), result)
            return paths, partial(self._finish_many, operation, len(paths), result)
        return paths, partial(self._finish_each, operation, [self._request(operation, full) for full in nodes])

    def _finish_many(self, operation: str, count: int, result: Any) -> Answers:
        connection = self._connection
        try:
            # kazoo leaves a silent server after the same time.
            found = result.get(timeout=min(connection.timeout_s, connection.session_timeout_s * 2 / 3))
        except (KazooException, KazooTimeoutError):
            self._close_many(pause_s=_PAUSE_S)
            found = [NO_ANSWER] * count
        return Answers(operation, count, found)

    def _finish_each(self, operation: str, results: list[Any]) -> Answers:
        # Waiting for the last answer instead of for each takes one change of threads, not one an answer.
        results[-1].wait(self._connection.timeout_s)
        answers: list[Any] = []
        for result in results:
            try:
                answers.append(OPERATIONS[operation].convert(result.get(timeout=_POLL_S)))
            except KazooTimeoutError as error:
                raise self._connection.timed_out() from error
            except KazooException:
                answers.append(NO_ANSWER)
        return Answers(operation, len(answers), answers)

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
        client._call(MultiRead(OPERATIONS["get"].code, [self._connection.root or "/"]), result)
        try:
            data, at = result.get(timeout=timeout_s)
            parse_answers(data, at, "get", 1)
        except (KazooException, KazooTimeoutError, struct.error, ValueError):
            return False
        return True
