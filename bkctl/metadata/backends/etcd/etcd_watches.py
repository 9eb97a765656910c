"""Watches on etcd: one stream for all of them, opened again whenever it ends, and one thread that calls back.

A watch needs no start revision: when a new stream watches, every watch is called, and its owner reads again.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import grpc

from bkctl.errors import BkctlError, Unauthorized
from bkctl.metadata.backends.etcd import etcdrpc
from bkctl.metadata.backends.etcd.etcd_connection import (
    REQUIRE_LEADER,
    RETRY_PAUSE_S,
    EtcdConnection,
    is_stale_token,
    shorten,
    status_of,
)

RESTORE_PAUSE_S: Final = 0.5


@dataclass(eq=False)
class _Watch:
    key: bytes
    children: bool
    callback: Callable[[], None]
    #: Set once the server watches, or the watch failed for good.
    answered: threading.Event = field(default_factory=threading.Event)
    #: The server refused it once; a forgotten login token looks the same.
    is_refused: bool = False

    def concerns(self, event: Any) -> bool:
        """Return whether to call back; for children: only when one is created or deleted, not for nodes below it."""
        if not self.children:
            return True
        below = b"/" in event.kv.key[len(self.key) + 1 :]
        return not below and (event.type == etcdrpc.Event.DELETE or event.kv.version == 1)


class EtcdWatches:
    """The watches of one store."""

    def __init__(self, connection: EtcdConnection) -> None:
        self._connection = connection
        connection.on_fail_over = self._leave
        self._lock = threading.RLock()
        self._watches: dict[_Watch, None] = {}  # in their order
        self._problem = ""
        #: Requests on the open stream; None: no stream is open.
        self._requests: queue.SimpleQueue[Any] | None = None
        #: Watches requested on the stream and not answered yet; the server answers in order.
        self._pending: deque[_Watch] = deque()
        #: The server's number of a watch → the watch.
        self._numbers: dict[int, _Watch] = {}
        self._stream: Any = None
        self._client: Any = None
        self._wanted = threading.Event()
        #: Watches to call back; None: the store was closed.
        self._events: queue.Queue[_Watch | None] = queue.Queue()

    def add(self, path: str, key: bytes, callback: Callable[[], None], children: bool) -> Callable[[], None]:
        """See MetadataStore.watch."""
        watch = _Watch(key, children, callback)
        with self._lock:
            self._connection.check_open()
            self._watches[watch] = None
            if self._requests is not None:
                self._request(watch)

        def cancel() -> None:
            with self._lock:
                if watch in self._watches:
                    del self._watches[watch]
                    for number, known in self._numbers.items():
                        if known is watch:
                            self._cancel_on_server(number)

        self._wanted.set()
        self._connection.start_thread("watch", self._keep_stream)
        self._connection.start_thread("events", self._call_back)
        is_answered = watch.answered.wait(self._connection.timeout_s)
        if not is_answered or watch not in self._watches:
            cancel()
            self._connection.check_open()
            if is_answered:
                raise Unauthorized(
                    f"etcd at {self._connection.address} refuses to watch {path}: {shorten(self._problem)}"
                )
            raise self._connection.timed_out()
        return cancel

    def _cancel_on_server(self, number: int) -> None:
        if self._requests is not None:
            request = etcdrpc.WatchCancelRequest(watch_id=number)
            self._requests.put(etcdrpc.WatchRequest(cancel_request=request))

    def _request(self, watch: _Watch) -> None:
        """Send the watch on the open stream; the lock is held."""
        assert self._requests is not None
        request = etcdrpc.WatchCreateRequest(key=watch.key)
        if watch.children:
            request = etcdrpc.WatchCreateRequest(key=watch.key + b"/", range_end=watch.key + b"0")
        self._pending.append(watch)
        self._requests.put(etcdrpc.WatchRequest(create_request=request))

    # the stream

    def _keep_stream(self) -> None:
        """Read the stream, and open it again whenever it ends (thread `metadata-store-watch`)."""
        opened = 0
        connection = self._connection
        while not connection.closed.is_set():
            self._wanted.wait()
            requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
            client = None
            try:
                client = connection.client()
                self._open(client, requests)
                for answer in self._stream:
                    with self._lock:
                        self._handle(answer)
            except (grpc.RpcError, ValueError, BkctlError) as error:
                if isinstance(error, grpc.RpcError) and is_stale_token(*status_of(error)):
                    connection.forget_token()
            with self._lock:
                self._requests = self._client = None
            requests.put(None)  # ends gRPC's thread that takes them
            if client is not None:
                connection.fail_over(client)
            opened += 1
            connection.closed.wait(min(RETRY_PAUSE_S * opened, RESTORE_PAUSE_S))

    def _open(self, client: Any, requests: queue.SimpleQueue[Any]) -> None:
        metadata = (*self._connection.metadata(client, self._connection.timeout_s), *REQUIRE_LEADER)
        stub = etcdrpc.WatchStub(client.channel)
        with self._lock:
            self._connection.check_open()
            self._requests = requests
            self._pending.clear()
            self._numbers.clear()
            for watch in self._watches:
                self._request(watch)
            self._stream = stub.Watch(iter(requests.get, None), metadata=metadata)  # type: ignore[attr-defined]
            self._client = client

    def _leave(self, client: Any) -> None:
        """End the stream on this client, whose server failed or no longer answers."""
        with self._lock:
            if self._client is client and client is not None:
                self._stream.cancel()

    def _handle(self, answer: Any) -> None:
        """Handle one answer of the stream. The caller holds the lock."""
        if answer.created:
            self._handle_created(answer)
            return
        watch = self._numbers.get(answer.watch_id)
        if answer.canceled:
            self._numbers.pop(answer.watch_id, None)
            if watch in self._watches:  # The server cancelled it.
                self._request(watch)
        elif watch in self._watches and any(watch.concerns(event) for event in answer.events):
            self._events.put(watch)

    def _handle_created(self, answer: Any) -> None:
        watch = self._pending.popleft()
        if watch not in self._watches:  # cancelled meanwhile
            if not answer.canceled:
                self._cancel_on_server(answer.watch_id)
        elif not answer.canceled:
            self._numbers[answer.watch_id] = watch
            if watch.answered.is_set():  # A former stream had it: changes may have been missed.
                self._events.put(watch)
            watch.answered.set()
        elif self._connection.has_login and (watch.answered.is_set() or not watch.is_refused):
            # A forgotten login token may be the cause: log in again.
            watch.is_refused = True
            self._connection.forget_token()
            self._stream.cancel()
        else:
            self._problem = answer.cancel_reason
            del self._watches[watch]
            watch.answered.set()

    def _call_back(self) -> None:
        """Call the callbacks of watches that changed, one at a time (thread `metadata-store-events`)."""
        failed: list[_Watch] = []
        while not self._connection.closed.is_set():
            changed: list[_Watch | None] = []
            with contextlib.suppress(queue.Empty):
                changed.append(self._events.get(timeout=RESTORE_PAUSE_S if failed else None))
                while True:
                    changed.append(self._events.get_nowait())
            watches, failed = dict.fromkeys((*failed, *changed)), []
            for watch in watches:
                if watch is None or watch not in self._watches or self._connection.closed.is_set():
                    continue
                try:
                    watch.callback()
                except BkctlError:
                    failed.append(watch)

    def close(self) -> None:
        """End every watch, after the connection's `closed` is set."""
        with self._lock:
            watches = list(self._watches)
            self._watches.clear()
            stream = self._stream
        for watch in watches:
            watch.answered.set()
        self._wanted.set()
        self._events.put(None)
        with contextlib.suppress(grpc.RpcError):
            if stream is not None:
                stream.cancel()
