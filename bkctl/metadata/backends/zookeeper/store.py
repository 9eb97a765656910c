"""The metadata store on ZooKeeper, through kazoo.

kazoo keeps the connection and the session. What it leaves to its caller is here: operations that go on after a lost
connection and recognise a write whose answer was lost, ephemerals and watches that outlive a session, pipelines.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import re
import socket
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, TypeVar, cast

from kazoo.client import KazooClient
from kazoo.exceptions import (
    AuthFailedError,
    BadVersionError,
    ConnectionClosedError,
    ConnectionLoss,
    InvalidACLError,
    KazooException,
    NoAuthError,
    NoChildrenForEphemeralsError,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    OperationTimeoutError,
    RolledBackError,
    RuntimeInconsistency,
    SessionExpiredError,
    SessionMovedError,
)
from kazoo.handlers.threading import KazooTimeoutError, SequentialThreadingHandler
from kazoo.protocol.states import KazooState
from kazoo.retry import KazooRetry
from kazoo.security import CREATOR_ALL_ACL

from bkctl.errors import (
    AlreadyExists,
    BkctlError,
    Conflict,
    MetadataVersionConflict,
    NotFound,
    TimedOut,
    Unauthorized,
    Unreachable,
    UsageError,
)
from bkctl.metadata.backends.zookeeper.reader import AGAIN, Batch, Origin, Reader, ReaderLost
from bkctl.metadata.store import (
    NEW,
    NO_CLUSTER_HINT,
    NO_SECURITY,
    VALUE_SIZE_BYTES_MAX,
    Claim,
    MetadataStore,
    StoreSecurity,
    Versioned,
    check_path,
)

if TYPE_CHECKING:
    import ssl

T = TypeVar("T")
R = TypeVar("R")

SESSION_TIMEOUT_S: Final = 10.0  # zkTimeout
_BATCH_SIZE_MAX: Final = 256
#: Operation → reads in the first batch; the sum of names or bytes below which a batch grows, above which it shrinks.
_BATCHES: Final = {"get": (64, 1 << 18, 1 << 21), "children": (4, 4_000, 40_000), "origin": (256, 0, 1)}
#: Fewer reads than these are not worth a connection of their own.
_READER_COUNT_MIN: Final = 8
#: Changes in one request; the server takes no request above 1 MiB (jute.maxbuffer).
_CHANGES_MAX: Final = 256
_CHANGES_SIZE_BYTES_MAX: Final = 1 << 19
_KNOWN_MAX: Final = 16_384
#: How long kazoo does the reading after a connection for it could not be had.
_READER_PAUSE_S: Final = 5.0
_READER_CONNECT_S: Final = 2.0
_FIRST_ANSWER_S: Final = 0.3
_RETRY_PAUSE_S: Final = 0.02
_POLL_S: Final = 0.1
#: A server ends a session at a tick after its timeout, and may have granted a longer timeout than was asked for.
_EXPIRY_SLACK_S: Final = 5.0
_CLOSE_S: Final = 2.0
_RESTORE_PAUSE_S: Final = 0.5
#: ZooKeeper tells the fate of such a request to nobody: it is sent again.
_LOST: Final = (
    ConnectionLoss,
    ConnectionClosedError,
    OperationTimeoutError,
    SessionExpiredError,
    SessionMovedError,
)
#: What the methods below turn into their own errors.
_ANSWERS: Final = (BadVersionError, NoChildrenForEphemeralsError, NodeExistsError, NoNodeError, NotEmptyError)
_REFUSED: Final = (NoAuthError, AuthFailedError, InvalidACLError)


_SLASH: Final = re.compile("/")


class _Call:
    """One operation, which may take several requests; `repeated`: an earlier one may have been applied.

    With `once` a request whose answer is lost is not sent again: the caller gets kazoo's error (one of _LOST).
    """

    def __init__(
        self, store: ZooKeeperStore, request: Callable[[], Any], *, repeated: bool = False, once: bool = False
    ) -> None:
        self.store = store
        self.request = request
        self.repeated = repeated
        self.once = once

    def answer(self) -> Any:
        """What ZooKeeper answered. Raises its refusals as kazoo's errors, else as every `MetadataStore` method."""
        return self.store._answer(self)


#: A full path, and whether its children are watched.
_Place: TypeAlias = tuple[str, bool]


class _Batch(ABC):
    """Reads under way, one for each of `paths`; `waited_s`: how long nobody answered, when that is over."""

    paths: list[str]
    waited_s: float = 0.0

    @abstractmethod
    def finish(self) -> list[Any]:
        """An answer for each path (a Versioned, names in order, or a transaction); None for no node, else AGAIN."""


class _KazooBatch(_Batch):
    def __init__(self, store: ZooKeeperStore, operation: str, paths: list[str]) -> None:
        self.store = store
        self.operation = operation
        request = store._children_async if operation == "children" else store._get_async
        self.results = [request(path) for path in paths]
        self.paths = paths

    def finish(self) -> list[Any]:
        # Waiting for the last answer instead of for each takes one change of threads, not one an answer.
        self.results[-1].wait(self.store.timeout_s)
        answers: list[Any] = []
        for result in self.results:
            try:
                found = result.get(timeout=_POLL_S)
            except KazooTimeoutError as error:
                raise self.store._timed_out() from error
            except KazooException:
                answers.append(AGAIN)
            else:
                answers.append(_ANSWER_OF[self.operation](found))
        return answers


class _ReaderBatch(_Batch):
    def __init__(self, store: ZooKeeperStore, reader: Reader, asked: Batch, paths: list[str]) -> None:
        self.store = store
        self.reader = reader
        self.asked = asked
        self.paths = paths

    def finish(self) -> list[Any]:
        try:
            return self.reader.answers(self.asked)
        except ReaderLost as error:
            self.store._drop_reader(self.reader)
            self.waited_s = error.waited_s
            return [AGAIN] * len(self.paths)


class _Watch(NamedTuple):
    path: str
    children: bool
    callback: Callable[[], None]


class _Handler(SequentialThreadingHandler):  # type: ignore[misc]
    """kazoo's threads, with our own sockets: one TLS context for all, and the reason why one could not be had."""

    def __init__(self, tls: ssl.SSLContext | None) -> None:
        super().__init__()
        self.tls = tls
        #: Why the last connection failed, in words; "" when it was made.
        self.problem = ""
        #: Host and port of the last connection that was made.
        self.peer: tuple[str, int] | None = None

    def create_connection(self, *, address: tuple[str, int], hostname: str, timeout: float, **_: Any) -> socket.socket:
        """Source: kazoo.handlers.utils.create_tcp_connection."""
        try:
            connection = socket.create_connection(address, timeout)
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self.tls is not None:
                    connection = self.tls.wrap_socket(connection, server_hostname=hostname.strip("[]"))
            except BaseException:
                connection.close()
                raise
        except OSError as error:
            self.problem = _connection_problem(error)
            raise
        self.problem = ""
        self.peer = hostname, address[1]
        return connection


class ZooKeeperStore(MetadataStore):
    """`MetadataStore` on the ZooKeeper ensemble `hosts` (`HOST:PORT,HOST:PORT`) below the node `root` (`/ledgers`).

    Raises Unreachable, naming the hosts: at once when each refuses or none resolves, else after `timeout_s`.
    """

    def __init__(
        self,
        hosts: str,
        root: str,
        *,
        timeout_s: float = 30.0,
        session_timeout_s: float = SESSION_TIMEOUT_S,
        security: StoreSecurity = NO_SECURITY,
    ) -> None:
        self.hosts = hosts
        self.security = security
        self.timeout_s = timeout_s
        self.session_timeout_s = session_timeout_s
        self.change_root(root)
        self._closed = False
        self._lock = threading.RLock()
        self._connected = threading.Event()
        self._session_lost = False
        #: None once a session is over, and until the next one is there.
        self._session_id: int | None = None
        self._ephemerals: dict[str, bytes] = {}
        self._watches: dict[int, _Watch] = {}
        self._watch_id = 0
        #: What was called; None: hold ephemerals again.
        self._events: queue.SimpleQueue[_Place | None] = queue.SimpleQueue()
        #: kazoo keeps each callback until its node changes, also of watches that were cancelled, but equal ones once.
        self._callbacks: weakref.WeakValueDictionary[_Place, Callable[[object], None]] = weakref.WeakValueDictionary()
        self._thread: threading.Thread | None = None
        #: Full paths of some nodes that exist, or did: parents of what was created.
        self._known: set[str] = set()
        self._reader: Reader | None = None
        self._no_reader_until = float("-inf")
        self._handler = _Handler(security.tls_context())
        digest_login = security.user is not None and not security.sasl
        self._client = KazooClient(
            hosts,
            timeout=session_timeout_s,
            handler=self._handler,
            connection_retry=KazooRetry(max_tries=-1, delay=0.05, backoff=2, max_jitter=0.4, max_delay=1.0),
            default_acl=list(CREATOR_ALL_ACL) if security.creator_acl else None,
            auth_data=[("digest", f"{security.user}:{security.password}")] if digest_login else None,
            sasl_options=_sasl_options(security),
            logger=_silent_logger(),
        )
        self._client.add_listener(self._on_state)
        self._connect()

    def change_root(self, root: str) -> None:
        """Look at the tree below the node `root` from now on."""
        self.root = root
        self.name = f"{root} of ZooKeeper at {self.hosts}"

    # connection

    def _connect(self) -> None:
        deadline = time.monotonic() + self.timeout_s
        self._client.start_async()
        try:
            if self._connected.wait(min(_FIRST_ANSWER_S, self.timeout_s)):
                return
            if reasons := self._refusals(deadline):
                raise Unreachable(f"No ZooKeeper at {self.hosts}: {reasons}", hint="check the metadata URI")
            if not self._connected.wait(max(deadline - time.monotonic(), 0)):
                why = f": {self._handler.problem}" if self._handler.problem else ""
                raise TimedOut(
                    f"ZooKeeper at {self.hosts} gave no session within {self.timeout_s:g} s{why}",
                    hint="check the metadata URI, or give it more time with --timeout",
                )
        except BaseException:
            self.close()
            raise

    def _refusals(self, deadline: float) -> str:
        """Why no host can be connected to; "" when one can, or might."""
        reasons = []
        for host, port in self._client.hosts:
            remaining_s = max(deadline - time.monotonic(), 0.01)
            try:
                # A handler of its own: kazoo's tells of kazoo's connections.
                _Handler(self._handler.tls).create_connection(
                    address=(host.strip("[]"), port), hostname=host, timeout=remaining_s
                ).close()
            except TimeoutError:
                return ""
            except socket.gaierror:
                reasons.append(f"the name {host} does not resolve")
            except OSError as error:
                reasons.append(_connection_problem(error))
            else:
                return ""
        return ", ".join(dict.fromkeys(reasons))

    def _on_state(self, state: str) -> None:
        """Runs on kazoo's connection thread, so it only notes and wakes."""
        if state == KazooState.CONNECTED:
            self._session_id = self._client.client_id[0]
            self._connected.set()
            if self._session_lost and self._ephemerals:
                self._events.put(None)
            self._session_lost = False
        else:
            self._connected.clear()
            if state == KazooState.LOST:
                self._session_lost = True
                self._session_id = None

    def _run(self, request: Callable[[], Any], timeout_s: float | None = None) -> Any:
        return self._answer(_Call(self, request), timeout_s)

    def _answer(self, call: _Call, timeout_s: float | None = None) -> Any:
        deadline = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        while not self._closed:
            try:
                return call.request().get(timeout=max(deadline - time.monotonic(), 0.001))
            except _LOST as error:
                call.repeated = True
                if call.once:
                    raise
                time.sleep(_RETRY_PAUSE_S)
                if not self._closed and not self._connected.wait(max(deadline - time.monotonic(), 0)):
                    raise self._timed_out() from error
                if time.monotonic() >= deadline:
                    raise self._timed_out() from error
            except KazooTimeoutError as error:
                raise self._timed_out() from error
            except _REFUSED as error:
                raise Unauthorized(f"ZooKeeper at {self.hosts} refuses access to {self.root}") from error
            except _ANSWERS:
                raise
            except KazooException as error:
                raise BkctlError(f"ZooKeeper at {self.hosts} failed: {error!r}") from error
        raise Unreachable(f"The connection to ZooKeeper at {self.hosts} is closed")

    def _timed_out(self) -> TimedOut:
        return TimedOut(f"ZooKeeper at {self.hosts} did not answer within {self.timeout_s:g} s")

    def _full(self, path: str) -> str:
        return f"{self.root}/{check_path(path)}" if path else self.root

    # many reads

    def _pipeline(self, operation: str, paths: Iterable[str], again: Callable[[str, float], Any]) -> Iterator[Any]:
        """Answers in order; `again` asks for one that was lost, or refused, and says what is missing.

        Two batches are under way. A batch grows while its answers are small, so that what is held stays bounded.
        """
        size, grow_below, shrink_above = _BATCHES[operation]
        remaining = iter(paths)
        batch = self._begin(operation, list(islice(remaining, size)), size)
        while batch.paths:
            ahead = self._begin(operation, list(islice(remaining, size)), size)
            weight = 0
            for path, answer in zip(batch.paths, batch.finish(), strict=True):
                if answer is AGAIN:
                    found = again(path, self.timeout_s - batch.waited_s)
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
        full_batch = len(paths) == size
        if (full_batch or len(paths) >= _READER_COUNT_MIN) and (reader := self._open_reader(full_batch)) is not None:
            full = [self._full(path) for path in paths]
            try:
                asked = getattr(reader, operation)(full)
            except ReaderLost:
                self._drop_reader(reader)
            else:
                return _ReaderBatch(self, reader, asked, paths)
        return _KazooBatch(self, operation, paths)

    def _open_reader(self, connect: bool) -> Reader | None:
        with self._lock:
            if connect and self._reader is None and time.monotonic() >= self._no_reader_until and not self._closed:
                try:
                    self._reader = self._connect_reader()
                except (ReaderLost, OSError, AuthFailedError):
                    self._no_reader_until = time.monotonic() + _READER_PAUSE_S
            return self._reader

    def _connect_reader(self) -> Reader:
        security = self.security
        sasl_client = None
        if security.sasl:
            from puresasl.client import SASLClient  # type: ignore[import-untyped]

            sasl_client = SASLClient("zk-sasl-md5", service="zookeeper", **(_sasl_options(security) or {}))
        host, port = self._handler.peer or self._client.hosts[0]

        def connect() -> socket.socket:
            return _Handler(self._handler.tls).create_connection(
                address=(host.strip("[]"), port), hostname=host, timeout=min(self.timeout_s, _READER_CONNECT_S)
            )

        return Reader(
            connect,
            # Where a server hangs, kazoo goes to another one after so long.
            timeout_s=min(self.timeout_s, self.session_timeout_s * 2 / 3),
            session_timeout_s=self.session_timeout_s,
            last_zxid=self._client.last_zxid,
            digest_login=None if security.user is None or security.sasl else f"{security.user}:{security.password}",
            sasl_client=sasl_client,
        )

    def _drop_reader(self, reader: Reader) -> None:
        with self._lock:
            if self._reader is reader:
                self._reader = None
                self._no_reader_until = time.monotonic() + _READER_PAUSE_S
        reader.close()

    # values

    def get(self, path: str) -> Versioned[bytes] | None:
        """See MetadataStore.get."""
        return self._get(path, self.timeout_s)

    def _get(self, path: str, timeout_s: float) -> Versioned[bytes] | None:
        try:
            return _versioned(self._run(lambda: self._get_async(path), timeout_s))
        except NoNodeError:
            return None

    def get_many(self, paths: Iterable[str]) -> Iterator[Versioned[bytes] | None]:
        """See MetadataStore.get_many."""
        return self._pipeline("get", paths, self._get)

    def _get_async(self, path: str) -> Any:
        return self._client.get_async(self._full(path))

    def put(self, path: str, value: bytes, expected: int | None) -> int:
        """See MetadataStore.put."""
        return self._put(path, value, expected)

    def _put(self, path: str, value: bytes, expected: int | None, *, repeated: bool = False) -> int:
        """`repeated`: a request of ours that would have done it may have been applied."""
        full = self._full(path)
        if len(value) > VALUE_SIZE_BYTES_MAX:
            raise UsageError(f"{path}: a value of {len(value)} bytes is above ZooKeeper's {VALUE_SIZE_BYTES_MAX}")
        while True:
            if expected == NEW:
                self._create(path, value)
                return 0
            call = _Call(
                self,
                lambda: self._client.set_async(full, value, -1 if expected is None else expected),
                repeated=repeated,
            )
            try:
                return int(call.answer().version)
            except NoNodeError as error:
                if expected is not None:
                    raise NotFound(f"No {path} in {self.name}") from error
            except BadVersionError as error:
                found = self.get(path) if call.repeated else None
                next_one = -1 if expected is None else expected + 1
                if found is not None and found[:2] == (value, next_one):
                    return found.version
                unsure = call.repeated and (found is None or found.version != next_one)
                raise MetadataVersionConflict(
                    f"{path} changed meanwhile, expected version {expected}", may_be_applied=unsure
                ) from error
            with contextlib.suppress(AlreadyExists):  # expected is None: somebody created it just now
                self._create(path, value)
                return 0

    def put_many(self, nodes: Sequence[tuple[str, bytes, int]]) -> list[int | BkctlError]:
        """See MetadataStore.put_many."""
        return self._change_many(
            nodes,
            lambda transaction, node: transaction.set_data(self._full(node[0]), node[1], node[2]),
            lambda answer: int(answer.version),
            lambda node, repeated: self._put(*node, repeated=repeated),
            lambda node: len(node[1]),
        )

    def _change_many(
        self,
        items: Sequence[T],
        add: Callable[[Any, T], object],
        result: Callable[[Any], R],
        one: Callable[[T, bool], R],
        size: Callable[[T], int] = lambda _: 0,
        *,
        once: bool = False,
    ) -> list[R | BkctlError]:
        """Change something for each item, in one request: all of it is done, or nothing. Then one by one.

        `add` adds the item to a transaction, and `result` makes of the answer what `one` returns, which does it alone;
        its second argument says whether the transaction may have been applied. With `once` a transaction whose answer
        is lost is not sent again.
        """
        results: list[R | BkctlError] = []
        waiting = deque(items)
        while waiting:
            some = [waiting.popleft()]
            size_bytes = size(some[0])
            while waiting and len(some) < _CHANGES_MAX and size_bytes + size(waiting[0]) <= _CHANGES_SIZE_BYTES_MAX:
                size_bytes += size(waiting[0])
                some.append(waiting.popleft())
            repeated = False
            if len(some) > 1:

                def request(some: list[T] = some) -> Any:
                    transaction = self._client.transaction()
                    for item in some:
                        add(transaction, item)
                    return transaction.commit_async()

                call = _Call(self, request, once=once)
                try:
                    answers = call.answer()
                except _LOST:
                    pass
                else:
                    if not any(isinstance(each, Exception) for each in answers):
                        results += map(result, answers)
                        continue
                repeated = call.repeated
            for item in some:
                try:
                    results.append(one(item, repeated))
                except Unreachable:
                    raise
                except BkctlError as error:
                    results.append(error)
        return results

    def _create(
        self, path: str, value: bytes, *, ephemeral: bool = False, sequence: bool = False, repeated: bool = False
    ) -> str:
        """Create the node, with its missing parents in the same step; returns its full path. Raises AlreadyExists.

        `repeated` as `_put`'s.
        """
        full = self._full(path)
        deadline = time.monotonic() + self.timeout_s
        while True:
            call = _Call(
                self,
                lambda: self._client.create_async(full, value, ephemeral=ephemeral, sequence=sequence),
                repeated=repeated,
            )
            try:
                return str(call.answer())
            except NodeExistsError as error:
                if call.repeated and self._is_ours(full, value, ephemeral):
                    return full
                raise AlreadyExists(f"{path or self.root} exists in {self.name}") from error
            except NoChildrenForEphemeralsError as error:
                raise Conflict(f"The parent of {path} is ephemeral and cannot have children") from error
            except NoNodeError:
                creates = [(parent, b"", False, False) for parent in self._missing_parents(path)]
            call = self._transaction([*creates, (full, value, ephemeral, sequence)])
            results = call.answer()
            problem = next((each for each in results if _is_problem(each)), None)
            if problem is None:
                return str(results[-1])
            if call.repeated and self._is_ours(full, value, ephemeral):
                return full
            if problem is results[-1] and isinstance(problem, NodeExistsError):
                raise AlreadyExists(f"{path or self.root} exists in {self.name}") from problem
            self._known.difference_update(full[: match.start()] for match in _SLASH.finditer(full, 1))
            if not isinstance(problem, NodeExistsError | NoNodeError):
                raise BkctlError(f"{path} cannot be created in {self.name}: {problem!r}") from problem
            if time.monotonic() > deadline:  # Others create and remove the parents all the time.
                raise self._timed_out() from problem

    def _transaction(self, creates: Sequence[tuple[str, bytes, bool, bool]]) -> _Call:
        def request() -> Any:
            transaction = self._client.transaction()
            for full, value, ephemeral, sequence in creates:
                transaction.create(full, value, ephemeral=ephemeral, sequence=sequence)
            return transaction.commit_async()

        return _Call(self, request)

    def _is_ours(self, full: str, value: bytes, ephemeral: bool) -> bool:
        """Whether the node is the one that a request of ours created, whose answer was lost."""
        try:
            found, stat = self._run(lambda: self._client.get_async(full))
        except NoNodeError:
            return False
        if ephemeral:
            return bool(stat.ephemeralOwner == self._session_id)
        return bool(found == value and stat.version == 0)

    def _missing_parents(self, path: str) -> list[str]:
        """Full paths of the node's parents that do not exist, from the top."""
        parts = self._full(path)[1:].split("/")[:-1]
        parents = ["/" + "/".join(parts[:count]) for count in range(1, len(parts) + 1)]
        known = max((index for index, parent in enumerate(parents) if parent in self._known), default=-1)
        for index in range(known + 1, len(parents)):
            if self._stat(parents[index]) is None:
                if path and self.root in parents[index:]:
                    raise NotFound(f"No BookKeeper cluster in {self.name}", hint=NO_CLUSTER_HINT)
                return parents[index:]
            if len(self._known) >= _KNOWN_MAX:
                self._known.clear()
            self._known.add(parents[index])
        # One of them went away since it was seen: look at all of them the next time.
        self._known.difference_update(parents)
        return []

    def _stat(self, full: str) -> Any:
        return self._run(lambda: self._client.exists_async(full))

    def put_all(self, nodes: Sequence[tuple[str, bytes]]) -> None:
        """See MetadataStore.put_all."""
        creates = [(self._full(path), value, False, False) for path, value in nodes]
        if any(not path for path, _ in nodes):
            above = [(parent, b"", False, False) for parent in self._missing_parents("")]
            creates = above + creates
        results = self._transaction(creates).answer()
        for (full, *_), result in zip(creates, results, strict=True):
            if _is_problem(result):
                if isinstance(result, NodeExistsError):
                    raise AlreadyExists(f"{full} exists in {self.name}") from result
                if isinstance(result, NoNodeError):
                    raise NotFound(f"{full} has no parent in {self.name}") from result
                raise BkctlError(f"{full} cannot be created in {self.name}: {result!r}") from result

    def delete(self, path: str, expected: int | None = None, *, prune: int = 0) -> None:
        """See MetadataStore.delete."""
        if not path:
            raise UsageError("The root of the metadata store cannot be deleted")
        self._delete_node(path, expected, prune)

    def delete_root(self) -> None:
        """See MetadataStore.delete_root."""
        self._delete_node("", None, 0)

    def _delete_node(self, path: str, expected: int | None, prune: int) -> None:
        full = self._full(path)
        with self._lock:
            self._ephemerals.pop(path, None)
        call = _Call(self, lambda: self._client.delete_async(full, -1 if expected is None else expected))
        try:
            call.answer()
        except NoNodeError as error:
            if not call.repeated:
                raise NotFound(f"No {path} in {self.name}") from error
        except BadVersionError as error:
            raise MetadataVersionConflict(
                f"{path} changed meanwhile, expected version {expected}", may_be_applied=call.repeated
            ) from error
        except NotEmptyError as error:
            raise Conflict(f"{path} has children in {self.name}") from error
        for _ in range(prune):
            path = path.rpartition("/")[0]
            if not path:
                break
            try:
                self._client.delete_async(self._full(path)).get(timeout=self.timeout_s)
            except (KazooException, KazooTimeoutError):
                break

    def children(self, path: str, *, after: str = "", limit: int | None = None) -> list[str] | None:
        """See MetadataStore.children."""
        names = self._children(path, self.timeout_s)
        if names is None or (not after and limit is None):
            return names
        names = [name for name in names if name > after]
        return names if limit is None else names[:limit]

    def _children(self, path: str, timeout_s: float) -> list[str] | None:
        try:
            return sorted(self._run(lambda: self._children_async(path), timeout_s))
        except NoNodeError:
            return None

    def children_many(self, paths: Iterable[str]) -> Iterator[list[str] | None]:
        """See MetadataStore.children_many."""
        return self._pipeline("children", paths, self._children)

    def _children_async(self, path: str) -> Any:
        full = self._full(path)
        self._client.sync_async(full)  # Answered in order, so nobody needs to wait for it.
        return self._client.get_children_async(full)

    def sequence(self, path: str) -> int:
        """See MetadataStore.sequence. Source: ZkLedgerIdGenerator."""
        prefix = f"{path}/ID-" if path else "ID-"
        created = self._create(prefix, b"", ephemeral=True, sequence=True)
        number = created[len(self._full(prefix)) :]
        self._client.delete_async(created)  # Ephemeral: what is not deleted goes with the session.
        try:
            return int(number)
        except ValueError as error:
            raise BkctlError(f"ZooKeeper at {self.hosts} gave the sequence number {number!r}") from error

    def sequence_position(self, path: str) -> int:
        """See MetadataStore.sequence_position. ZooKeeper numbers by the creations below a node, which `cversion` tells
        with the deletions. Source: DataNode.copyStat, PrepRequestProcessor."""
        try:
            _, stat = self._run(lambda: self._get_async(path), self.timeout_s)
        except NoNodeError:
            return 0
        # `cversion` is 32 bits wide, and twice the creations less the children that are left.
        return ((int(stat.cversion) + int(stat.numChildren)) & 0xFFFFFFFF) >> 1

    # ephemerals

    def ephemeral(self, path: str, value: bytes, *, wait_s: float | None = None) -> None:
        """See MetadataStore.ephemeral."""
        deadline = time.monotonic() + (self.session_timeout_s + _EXPIRY_SLACK_S if wait_s is None else wait_s)
        with self._lock:
            before = self._ephemerals.get(path)
            self._ephemerals[path] = value
        self._start_thread()
        try:
            while not self._put_ephemeral(path, value):
                if time.monotonic() >= deadline:
                    raise AlreadyExists(f"{path} is held by another session in {self.name}")
                time.sleep(_POLL_S)
        except BaseException:
            if before is None:
                with self._lock:
                    self._ephemerals.pop(path, None)
            raise

    def claim(self, path: str, value: bytes, *, numbered: bool = False) -> Claim:
        """See MetadataStore.claim."""
        full = self._create(path, value, ephemeral=True, sequence=numbered)
        stat = self._stat(full)
        claim = self._claim_of(full, None if stat is None else Origin(stat.czxid, stat.ephemeralOwner))
        if numbered and claim.origin is not None:
            self._drop_twins(full, value)
        return claim

    def claim_many(self, paths: Sequence[str], value: bytes) -> list[Claim | BkctlError]:
        """See MetadataStore.claim_many."""
        made = self._change_many(
            paths,
            lambda transaction, path: transaction.create(self._full(path), value, ephemeral=True),
            str,
            lambda path, repeated: self._create(path, value, ephemeral=True, repeated=repeated),
        )
        origins = self._origins(
            [path for path, each in zip(paths, made, strict=True) if not isinstance(each, BkctlError)]
        )
        return [each if isinstance(each, BkctlError) else self._claim_of(each, next(origins)) for each in made]

    def _claim_of(self, full: str, found: Origin | None) -> _ZooKeeperClaim:
        """The claim on the node that we created at `full`, where `found` is now.

        Between the two our session may have ended, and another may have taken the place: that node is not ours.
        """
        origin = found if found is not None and found.session_id == self._session_id else None
        return _ZooKeeperClaim(self, full[len(self.root) + 1 :], full, origin)

    def held_many(self, claims: Sequence[Claim]) -> list[bool]:
        """See MetadataStore.held_many."""
        found = self._origins([claim.path for claim in claims])
        return [
            origin is not None and origin == cast(_ZooKeeperClaim, claim).origin
            for claim, origin in zip(claims, found, strict=True)
        ]

    def release_many(self, claims: Sequence[Claim]) -> None:
        """See MetadataStore.release_many."""
        held = [claim for claim, is_held in zip(claims, self.held_many(claims), strict=True) if is_held]
        left = self._change_many(
            held,
            lambda transaction, claim: transaction.delete(self._full(claim.path)),
            lambda _: None,
            lambda claim, _: claim.release(),
            once=True,
        )
        for error in left:
            if error is not None:
                raise error

    def _origins(self, paths: Sequence[str]) -> Iterator[Origin | None]:
        """Yield the origin of the node at each path; None where there is no node."""
        return self._pipeline("origin", paths, self._origin)

    def _origin(self, path: str, timeout_s: float) -> Origin | None:
        try:
            return _origin_of(self._run(lambda: self._get_async(path), timeout_s))
        except NoNodeError:
            return None

    def _drop_twins(self, full: str, value: bytes) -> None:
        """Delete what requests made whose answers were lost: each attempt gets a number of its own."""
        parent, _, name = full.rpartition("/")
        for other in self._run(lambda: self._client.get_children_async(parent)):
            if other != name and other[:-10] == name[:-10]:
                twin = f"{parent}/{other}"
                with contextlib.suppress(NoNodeError):
                    found, stat = self._run(partial(self._client.get_async, twin))
                    if (stat.ephemeralOwner, found) == (self._session_id, value):
                        self._run(partial(self._client.delete_async, twin))

    def _put_ephemeral(self, path: str, value: bytes) -> bool:
        full = self._full(path)
        try:
            self._create(path, value, ephemeral=True)
        except AlreadyExists:
            try:
                found, stat = self._run(lambda: self._client.get_async(full))
                if stat.ephemeralOwner != self._session_id:
                    return False
                if found != value:
                    self._run(lambda: self._client.set_async(full, value))
            except NoNodeError:
                return False
        return True

    def _hold_again(self) -> bool:
        """Create our ephemerals in a new session; False when some are to be tried again."""
        done = True
        for path, value in list(self._ephemerals.items()):
            try:
                is_ours = self._put_ephemeral(path, value)
                self._note_owner(path, is_ours=is_ours)
                done = is_ours and done
                if path not in self._ephemerals:  # Deleted meanwhile: it must not come back.
                    self.delete(path)
            except NotFound:
                continue
            except BkctlError:
                done = False
        return done

    # watches

    def watch(self, path: str, callback: Callable[[], None], *, children: bool = False) -> Callable[[], None]:
        """See MetadataStore.watch."""
        with self._lock:
            self._watch_id += 1
            watch_id = self._watch_id
            self._watches[watch_id] = _Watch(check_path(path), children, callback)
        self._start_thread()

        def cancel() -> None:
            with self._lock:
                self._watches.pop(watch_id, None)

        try:
            self._arm(watch_id)
        except BaseException:
            cancel()
            raise
        return cancel

    def _arm(self, watch_id: int) -> None:
        watch = self._watches.get(watch_id)
        if watch is None:
            return
        full = self._full(watch.path)
        changed = self._callback(self._place(watch))
        if watch.children:
            with contextlib.suppress(NoNodeError):
                self._run(lambda: self._client.get_children_async(full, watch=changed))
                return
        self._run(lambda: self._client.exists_async(full, watch=changed))

    def _place(self, watch: _Watch) -> _Place:
        return self._full(watch.path), watch.children

    def _callback(self, place: _Place) -> Callable[[object], None]:
        """The one callback for all watches of `place`."""

        def changed(_: object) -> None:
            self._events.put(place)

        with self._lock:
            return self._callbacks.setdefault(place, changed)

    def _start_thread(self) -> None:
        with self._lock:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._serve, name="metadata-store", daemon=True)
                self._thread.start()

    def _serve(self) -> None:
        holding = True
        unarmed: set[int] = set()
        while not self._closed:
            try:
                event = self._events.get(timeout=None if holding and not unarmed else _RESTORE_PAUSE_S)
            except queue.Empty:
                event = ("", False)
            if self._closed:
                return
            if event is None or not holding:
                holding = self._hold_again()
            with self._lock:
                called = {each for each, watch in self._watches.items() if self._place(watch) == event}
            for watch_id in called | unarmed:
                unarmed.discard(watch_id)
                try:
                    self._arm(watch_id)
                    if watch := self._watches.get(watch_id):
                        watch.callback()
                except BkctlError:
                    unarmed.add(watch_id)

    def close(self) -> None:
        """See MetadataStore.close."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._watches.clear()
            self._ephemerals.clear()
            reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()
        self._events.put(None)
        # kazoo's stop waits for a connection that is being made, up to the session timeout; nobody needs that wait.
        stopping = threading.Thread(target=self._stop, name="metadata-store-close", daemon=True)
        connected = self._connected.is_set()
        stopping.start()
        self._connected.set()  # Whoever waits for the connection sees that it is closed.
        stopping.join(_CLOSE_S if connected else 0)

    def _stop(self) -> None:
        with contextlib.suppress(KazooException, OSError):
            self._client.stop()
        with contextlib.suppress(KazooException, OSError):
            self._client.close()


class _ZooKeeperClaim(Claim):
    """`origin` is that of the node we created; None: it was gone before we could ask for it."""

    def __init__(self, store: ZooKeeperStore, path: str, full: str, origin: Origin | None) -> None:
        self.path = path
        self._store = store
        self._full = full
        self.origin = origin

    def is_held(self) -> bool:
        stat = self._store._stat(self._full)
        return stat is not None and Origin(stat.czxid, stat.ephemeralOwner) == self.origin

    def release(self) -> None:
        def delete() -> Any:
            # Asked before each attempt: an earlier one may have been applied, and another may have the place now.
            if not self.is_held():
                raise NoNodeError
            return self._store._client.delete_async(self._full)

        with contextlib.suppress(NoNodeError):
            self._store._run(delete)


def _versioned(answer: tuple[bytes, Any]) -> Versioned[bytes]:
    value, stat = answer
    return Versioned(value, stat.version, stat.ctime)


def _origin_of(answer: tuple[bytes, Any]) -> Origin:
    return Origin(answer[1].czxid, answer[1].ephemeralOwner)


#: What `_pipeline` makes of kazoo's answers.
_ANSWER_OF: Final[dict[str, Callable[[Any], Any]]] = {
    "get": _versioned,
    "children": sorted,
    "origin": _origin_of,
}


def _sasl_options(security: StoreSecurity) -> dict[str, Any] | None:
    if not security.sasl:
        return None
    return {"mechanism": "DIGEST-MD5", "username": security.user, "password": security.password}


def _connection_problem(error: OSError) -> str:
    reason = getattr(error, "verify_message", "") or getattr(error, "reason", "")
    if reason:
        return f"TLS failed: {reason}"
    return (error.strerror or str(error)).lower()


def _is_problem(result: object) -> bool:
    return isinstance(result, Exception) and not isinstance(result, RolledBackError | RuntimeInconsistency)


def _silent_logger() -> logging.Logger:
    """kazoo tells of each lost connection in its log; our callers hear of it by an error. It tells of each request too,
    and a logger with a level keeps it from making words of them."""
    logger = logging.Logger("bkctl.metadata.backends.zookeeper.store", logging.CRITICAL + 1)
    logger.addHandler(logging.NullHandler())
    return logger
