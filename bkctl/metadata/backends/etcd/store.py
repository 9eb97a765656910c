"""The metadata store on etcd, through etcd3 over gRPC.

etcd keeps keys, not a tree: a node is the key `<root>/<path>`, its parents are keys with empty values, as Apache's own
driver leaves them, and its children are the keys below that have no further "/". Every write is a transaction that
compares first, so one that arrives late, or twice, changes nothing. A node's version is its key's mod revision.

etcd3's client knows one server and no deadline across retries, and its watcher ends with its connection. So here it
gives connections and calls, and what goes on after a lost one is ours: other endpoints, writes whose answer was lost,
leases and watches that outlive a server. Source: EtcdConstants, EtcdUtils, EtcdRegistrationManager, EtcdLedgerManager.
"""

from __future__ import annotations

import contextlib
import os
import queue
import random
import re
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple, TypeVar

# gRPC tells of lost connections on stderr else; our callers hear of them by errors.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc

from bkctl.errors import (
    AlreadyExists,
    BkctlError,
    Conflict,
    IllegalOperation,
    MetadataVersionConflict,
    NotFound,
    TimedOut,
    Unauthorized,
    Unreachable,
    UsageError,
)
from bkctl.ids import LedgerId
from bkctl.metadata.backends.etcd import etcdrpc
from bkctl.metadata.backends.etcd.etcdrpc import kv_pb2
from bkctl.metadata.ledgers import QualifiedNameLedgerManager
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

sys.modules.setdefault("etcd3.etcdrpc", etcdrpc)
import etcd3  # noqa: E402 - it imports etcd3.etcdrpc

T = TypeVar("T")

SESSION_TIMEOUT_S: Final = 10.0  # zkTimeout, which Apache's driver takes for its leases too
PAGE_SIZE: Final = 1000
BATCH_SIZE: Final = 32
DIRECTORY_BATCH_SIZE: Final = 8
#: etcd's own bound (--max-txn-ops) is 128 of each kind.
TRANSACTION_SIZE_MAX: Final = 120
_ANSWER_SIZE_BYTES_MAX: Final = BATCH_SIZE * (VALUE_SIZE_BYTES_MAX + (1 << 16))
_ATTEMPT_S: Final = 5.0
_RETRY_PAUSE_S: Final = 0.05
_POLL_S: Final = 0.1
_EXPIRY_SLACK_S: Final = 3.0
_CLOSE_S: Final = 2.0
_RESTORE_PAUSE_S: Final = 0.5
_UUID: Final = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII)
_BUCKETS: Final = 0x80
_BUCKET_SHIFT: Final = 56
_LEASE_REFRESHES: Final = 3  # within its time to live
_TOKENS_MAX: Final = 3
#: As the holder of an ephemeral: it is gone again.
_NOBODY: Final = -1

_OPTIONS: Final = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 10_000),  # etcd refuses less than 5 s (--grpc-keepalive-min-time)
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),  # Else pings end after two, and a watch would not notice a silent server.
    ("grpc.max_receive_message_length", _ANSWER_SIZE_BYTES_MAX),
)
#: A server without a leader ends such streams, instead of being silent.
_REQUIRE_LEADER: Final = (("hasleader", "true"),)
_STUBS: Final = {
    "Txn": "kvstub",
    "LeaseGrant": "leasestub",
    "LeaseRevoke": "leasestub",
    "LeaseTimeToLive": "leasestub",
}
_Status: Final = grpc.StatusCode
#: The fate of such a request is unknown: it is sent again.
_LOST: Final = (_Status.UNAVAILABLE, _Status.DEADLINE_EXCEEDED, _Status.CANCELLED, _Status.INTERNAL, _Status.UNKNOWN)


class _Compacted(Exception):
    """The revision that was asked for is no longer kept."""


class _LeaseLost(Exception):
    """The lease of a write is no longer there."""


class _Watch(NamedTuple):
    key: bytes
    children: bool
    callback: Callable[[], None]
    #: Set once the server watches, or the watch failed for good.
    answered: threading.Event


class EtcdStore(MetadataStore):
    """`MetadataStore` on the etcd cluster whose `hosts` are (host, port) pairs, below the key `root` (`/ledgers`).

    Raises Unreachable, naming the hosts: at once when each refuses or none resolves, else after `timeout_s`;
    Unauthorized for a wrong user or password; UsageError for TLS files that are none, or what etcd does not have.
    """

    def __init__(
        self,
        hosts: Sequence[tuple[str, int]],
        root: str,
        *,
        timeout_s: float = 30.0,
        session_timeout_s: float = SESSION_TIMEOUT_S,
        security: StoreSecurity = NO_SECURITY,
    ) -> None:
        self.hosts = tuple(hosts)
        self.root = root
        self.timeout_s = timeout_s
        self.session_timeout_s = session_timeout_s
        self.address = ",".join(f"{host}:{port}" for host, port in self.hosts)
        self.name = f"{root} of etcd at {self.address}"
        self._security = security
        self._tls_files = _tls_files(security)
        self._lock = threading.RLock()
        self._lease_lock = threading.Lock()
        self._closed = threading.Event()
        self._answered = False
        self._clients: list[Any] = [None] * len(self.hosts)
        self._current = 0
        self._token: str | None = None
        self._lease_id = 0
        self._lease_ttl_s = session_timeout_s
        self._ephemerals: dict[str, bytes] = {}
        self._watches: dict[int, _Watch] = {}
        self._watch_id = 0
        self._watch_problem = ""
        self._watch_refused: set[int] = set()
        #: What goes to the open watch stream, in the order of which the server answers; None: no stream is open.
        self._watch_requests: queue.SimpleQueue[Any] | None = None
        self._watch_pending: deque[int] = deque()
        self._watch_numbers: dict[int, int] = {}
        self._watch_stream: Any = None
        self._watch_client: Any = None
        self._watch_wanted = threading.Event()
        self._events: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._threads: dict[str, threading.Thread] = {}
        try:
            self._send("Txn", etcdrpc.TxnRequest(success=[_range(self._key(""), count_only=True)]))
        except BaseException:
            self.close()
            raise

    # connection

    @property
    def _attempt_s(self) -> float:
        """How long one endpoint may be silent before another is asked."""
        others = len(self.hosts) - 1
        return min(_ATTEMPT_S, self.timeout_s / (others + 2)) if others else self.timeout_s

    def _client(self) -> Any:
        with self._lock:
            self._check_open()
            client = self._clients[self._current]
            if client is None:
                host, port = self.hosts[self._current]
                client = etcd3.Etcd3Client(host, port, **self._tls_files, grpc_options=_OPTIONS)
                self._clients[self._current] = client
            return client

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise Unreachable(f"The connection to etcd at {self.address} is closed")

    def _fail_over(self, client: Any) -> None:
        """Ask the next endpoint from now on, if `client` is the one that is asked now; watches go there too."""
        with self._lock:
            if self._clients[self._current] is client:
                self._current = (self._current + 1) % len(self.hosts)
            if self._watch_client is client and len(self.hosts) > 1:
                self._watch_stream.cancel()

    def _send(self, method: str, request: Any, deadline: float | None = None) -> tuple[Any, bool]:
        """What etcd answered, and whether the request was sent more than once, so that an earlier one may have counted.

        Raises as every `MetadataStore` method; _Compacted and _LeaseLost.
        """
        if deadline is None:
            deadline = time.monotonic() + self.timeout_s
        attempt_s = self._attempt_s
        pause_s = _RETRY_PAUSE_S
        repeated = False
        tokens = 0
        while True:
            client = self._client()
            limit_s = max(min(deadline - time.monotonic(), attempt_s), 0.001)
            try:
                metadata = self._metadata(client, limit_s)
                answer = getattr(getattr(client, _STUBS[method]), method)(request, timeout=limit_s, metadata=metadata)
            except ValueError:  # The channel was closed.
                self._check_open()
                raise
            except grpc.RpcError as error:
                self._check_open()
                code, details = _status(error)
                if self._security.user is not None and _is_stale_token(code, details) and tokens < _TOKENS_MAX:
                    tokens += 1
                    self._token = None
                    continue
                if not _is_lost(code, details):
                    raise self._refusal(code, details) from error
                repeated = True
                self._fail_over(client)
                if code is _Status.DEADLINE_EXCEEDED:
                    attempt_s *= 2
                if not self._answered:
                    self._check_first(details, deadline)
                if time.monotonic() + pause_s >= deadline:
                    raise self._timed_out(details) from error
                self._closed.wait(pause_s)
                pause_s = min(pause_s * 1.5, 0.5)
            else:
                self._answered = True
                return answer, repeated

    def _metadata(self, client: Any, limit_s: float) -> tuple[tuple[str, str], ...]:
        """What tells etcd who we are. Raises Unauthorized, grpc.RpcError."""
        user, password = self._security.user, self._security.password
        if user is None:
            return ()
        token = self._token
        if token is None:
            request = etcdrpc.AuthenticateRequest(name=user, password=password or "")
            try:
                token = etcdrpc.AuthStub(client.channel).Authenticate(request, timeout=limit_s).token  # type: ignore[attr-defined]
            except grpc.RpcError as error:
                code, details = _status(error)
                if code is _Status.INVALID_ARGUMENT:
                    raise Unauthorized(
                        f"etcd at {self.address} does not let the user {user!r} in: {_short(details)}",
                        hint="check the user and the password",
                    ) from error
                if code is not _Status.FAILED_PRECONDITION:
                    raise
                token = ""  # It asks nobody who they are.
            self._token = token
        return (("token", token),) if token else ()

    def _check_first(self, details: str, deadline: float) -> None:
        """Before anybody ever answered: raise Unreachable where waiting would not help."""
        if "handshake" in details.lower():
            raise Unreachable(
                f"No TLS connection to etcd at {self.address}: {_short(details)}",
                hint="check the TLS files, and whether the server speaks TLS",
            )
        reasons = []
        for host, port in self.hosts:
            try:
                with socket.create_connection((host.strip("[]"), port), timeout=max(deadline - time.monotonic(), 0.01)):
                    return
            except TimeoutError:
                return
            except socket.gaierror:
                reasons.append(f"the name {host} does not resolve")
            except OSError as error:
                reasons.append((error.strerror or str(error)).lower())
        text = ", ".join(dict.fromkeys(reasons))
        raise Unreachable(f"No etcd at {self.address}: {text}", hint="check the metadata URI")

    def _timed_out(self, details: str = "") -> TimedOut:
        more = f" ({_short(details)})" if details else ""
        if not self._answered:
            return TimedOut(
                f"etcd at {self.address} did not answer within {self.timeout_s:g} s{more}",
                hint="check the metadata URI, or give it more time with --timeout",
            )
        return TimedOut(f"etcd at {self.address} did not answer within {self.timeout_s:g} s{more}")

    def _refusal(self, code: Any, details: str) -> Exception:
        if code is _Status.OUT_OF_RANGE and "compacted" in details:
            return _Compacted(details)
        if code is _Status.NOT_FOUND and "lease not found" in details:
            return _LeaseLost(details)
        if code in (_Status.PERMISSION_DENIED, _Status.UNAUTHENTICATED) or "user name is empty" in details:
            hint = "give a user that has access" if self._security.user else "give a user and a password"
            return Unauthorized(f"etcd at {self.address} refuses access to {self.root}: {_short(details)}", hint=hint)
        if code is _Status.RESOURCE_EXHAUSTED and "space exceeded" in details:
            return BkctlError(f"The database of etcd at {self.address} is full", hint="compact and defragment it")
        return BkctlError(f"etcd at {self.address} failed: {code.name}: {_short(details)}")

    def _txn(self, compare: Iterable[Any], success: Iterable[Any], failure: Iterable[Any] = ()) -> tuple[Any, bool]:
        return self._send("Txn", etcdrpc.TxnRequest(compare=compare, success=success, failure=failure))

    def _key(self, path: str) -> bytes:
        return (f"{self.root}/{check_path(path)}" if path else self.root).encode()

    def _above(self, path: str) -> list[bytes]:
        """Keys of the node's parents, from the root down."""
        parts = path.split("/")[:-1] if path else []
        return [self._key("/".join(parts[:count])) for count in range(len(parts) + 1)] if path else []

    def _pipeline(self, items: Iterable[T], size: int, request: Callable[[T], Any]) -> Iterator[tuple[T, Any]]:
        """Each item with the answer to the transaction `request(item)`, which only reads; `size` are under way."""
        waiting: deque[tuple[T, Any]] = deque()
        remaining = iter(items)
        while True:
            for item in islice(remaining, size - len(waiting)):
                waiting.append((item, self._begin(request(item))))
            if not waiting:
                return
            item, future = waiting.popleft()
            deadline = time.monotonic() + self.timeout_s
            try:
                answer = None if future is None else future.result()
            except grpc.RpcError:
                answer = None
            yield item, answer if answer is not None else self._send("Txn", request(item), deadline)[0]

    def _begin(self, request: Any) -> Any:
        """A transaction as a future; None where it cannot be begun now."""
        client = self._client()
        try:
            metadata = self._metadata(client, self._attempt_s)
            return client.kvstub.Txn.future(request, timeout=self._attempt_s, metadata=metadata)
        except (ValueError, grpc.RpcError):
            return None

    # values

    def get(self, path: str) -> Versioned[bytes] | None:
        """See MetadataStore.get."""
        return _versioned(self._read(self._key(path)))

    def _read(self, key: bytes, **options: Any) -> Any:
        """The key and its value, None when there is none."""
        answer, _ = self._txn((), [_range(key, **options)])
        return _first(answer.responses[0])

    def get_many(self, paths: Iterable[str]) -> Iterator[Versioned[bytes] | None]:
        """See MetadataStore.get_many."""

        def request(batch: tuple[bytes, ...]) -> Any:
            return etcdrpc.TxnRequest(success=[_range(key) for key in batch])

        keys = map(self._key, paths)
        batches = iter(lambda: tuple(islice(keys, BATCH_SIZE)), ())
        for _, answer in self._pipeline(batches, 2, request):
            for response in answer.responses:
                yield _versioned(_first(response))

    def put(self, path: str, value: bytes, expected: int | None) -> int:
        """See MetadataStore.put."""
        key = self._key(path)
        _check_size(path, value)
        while True:
            revision = expected
            if revision is None:
                found = self._read(key, keys_only=True)
                revision = NEW if found is None else int(found.mod_revision)
            if revision == NEW:
                try:
                    return self._create(path, value)
                except AlreadyExists:
                    if expected == NEW:
                        raise
                    continue
            answer, repeated = self._txn(
                [_at_revision(key, revision)], [_write(key, value, ignore_lease=True)], [_range(key)]
            )
            if answer.succeeded:
                return int(answer.header.revision)
            found = _first(answer.responses[0])
            unsure = False
            if repeated and found is not None:
                try:
                    change = self._change_after(found, revision)
                except _Compacted:
                    change, unsure = found, True
                if change is not None and change.value == value:
                    return int(change.mod_revision)
            if expected is None:
                continue
            if found is None:
                raise NotFound(f"No {path} in {self.name}")
            raise MetadataVersionConflict(
                f"{path} changed meanwhile: version {found.mod_revision}, expected {expected}", may_be_applied=unsure
            )

    def _change_after(self, found: Any, revision: int) -> Any:
        """The key as its first change after `revision` left it, None where that was a delete.

        `found` is a later one. Raises _Compacted when etcd no longer keeps what was between.
        """
        before, after = revision, found
        upper = int(found.mod_revision)
        while upper - before > 1:
            middle = (before + upper) // 2
            there = self._read(found.key, revision=middle)
            if there is not None and there.mod_revision == revision:
                before = middle
            else:
                after = there
                upper = middle if there is None else int(there.mod_revision)
        return after

    def _create(self, path: str, value: bytes, lease_id: int = 0) -> int:
        """Create the node, with its missing parents in the same step; returns its version. Raises AlreadyExists."""
        key, above = self._key(path), self._above(path)
        deadline = time.monotonic() + self.timeout_s
        repeated = False
        missing: list[bytes] = []
        while True:
            compare = [_is_absent(each) for each in (key, *missing)]
            compare += [_is_present(each) for each in [each for each in above if each not in missing][-1:]]
            answer, again = self._txn(
                compare,
                [*(_write(each, b"") for each in missing), _write(key, value, lease=lease_id)],
                [_range(key), *(_range(each, count_only=True) for each in above)],
            )
            repeated = repeated or again
            if answer.succeeded:
                return int(answer.header.revision)
            found = _first(answer.responses[0])
            if found is not None:
                if repeated and (found.value, found.lease, found.version) == (value, lease_id, 1):
                    return int(found.mod_revision)
                raise AlreadyExists(f"{path or self.root} exists in {self.name}")
            there = [response.response_range.count > 0 for response in answer.responses[1:]]
            missing = [each for each, is_there in zip(above, there, strict=True) if not is_there]
            if missing and missing[0] == above[0]:
                raise NotFound(f"No BookKeeper cluster in {self.name}", hint=NO_CLUSTER_HINT)
            if time.monotonic() > deadline:  # Others create and remove the parents all the time.
                raise self._timed_out()

    def put_all(self, nodes: Sequence[tuple[str, bytes]]) -> None:
        """See MetadataStore.put_all. Raises UsageError for more than TRANSACTION_SIZE_MAX nodes."""
        if len(nodes) > TRANSACTION_SIZE_MAX:
            raise UsageError(f"{len(nodes)} nodes at once: etcd takes {TRANSACTION_SIZE_MAX} in one step")
        for path, value in nodes:
            _check_size(path, value)
        values = {self._key(path): value for path, value in nodes}
        parents = dict.fromkeys(above[-1] for path, _ in nodes if (above := self._above(path)))
        outside = [key for key in parents if key not in values]
        answer, repeated = self._txn(
            [*map(_is_absent, values), *map(_is_present, outside)],
            [_write(key, value) for key, value in values.items()],
            [_range(key) for key in values],
        )
        if answer.succeeded or not nodes:
            return
        found = [kv for response in answer.responses if (kv := _first(response)) is not None]
        if not found:
            raise NotFound(f"{', '.join(key.decode() for key in outside)} is not there in {self.name}")
        ours = {(kv.create_revision, kv.version) for kv in found} == {(found[0].create_revision, 1)}
        if repeated and ours and {kv.key: kv.value for kv in found} == values:
            return
        raise AlreadyExists(f"{found[0].key.decode()} exists in {self.name}")

    def delete(self, path: str, expected: int | None = None, *, prune: int = 0) -> None:
        """See MetadataStore.delete."""
        if not path:
            raise UsageError("The root of the metadata store cannot be deleted")
        self._delete_node(path, expected, prune)

    def delete_root(self) -> None:
        """See MetadataStore.delete_root."""
        self._delete_node("", None, 0)

    def _delete_node(self, path: str, expected: int | None, prune: int) -> None:
        key = self._key(path)
        with self._lock:
            self._ephemerals.pop(path, None)
        answer, repeated = self._txn(
            [_is_present(key) if expected is None else _at_revision(key, expected), _has_no_children(key)],
            [_delete(key)],
            [_range(key, keys_only=True), _range(key + b"/", range_end=key + b"0", count_only=True)],
        )
        if not answer.succeeded:
            found = _first(answer.responses[0])
            if found is None:
                if not repeated:
                    raise NotFound(f"No {path} in {self.name}")
            elif expected not in (None, found.mod_revision):
                raise MetadataVersionConflict(
                    f"{path} changed meanwhile: version {found.mod_revision}, expected {expected}",
                    may_be_applied=repeated,
                )
            elif answer.responses[1].response_range.count:
                raise Conflict(f"{path} has children in {self.name}")
            else:  # It had a child, or was another one, when the transaction looked.
                self._delete_node(path, expected, prune)
                return
        for key in self._above(path)[:0:-1][:prune]:
            try:
                answer, _ = self._txn([_is_present(key), _has_no_children(key)], [_delete(key)])
            except BkctlError:
                break
            if not answer.succeeded:
                break

    def children(self, path: str, *, after: str = "", limit: int | None = None) -> list[str] | None:
        """See MetadataStore.children. The pages are of one revision, as long as etcd keeps it."""
        key = self._key(path)
        request = _page(key, after, limit)
        answer, _ = self._send("Txn", request)
        return self._names(key, answer, limit)

    def children_many(self, paths: Iterable[str]) -> Iterator[list[str] | None]:
        """See MetadataStore.children_many."""

        def request(key: bytes) -> Any:
            return _page(key, "", None)

        for key, answer in self._pipeline(map(self._key, paths), DIRECTORY_BATCH_SIZE, request):
            yield self._names(key, answer, None)

    def _names(self, key: bytes, answer: Any, limit: int | None) -> list[str] | None:
        """Names of the children, from the answer to `_page`, and from what is asked on behind it."""
        node, page = (response.response_range for response in answer.responses)
        if not node.count:
            return None
        if limit == 0:
            return []
        revision = int(answer.header.revision)
        prefix, end = key + b"/", key + b"0"
        names: list[str] = []
        skipped_to = b""
        while True:
            for kv in page.kvs:
                if kv.key < skipped_to:
                    continue
                name, slash, _ = kv.key[len(prefix) :].partition(b"/")
                if slash:
                    skipped_to = prefix + name + b"0"  # what is below a child goes as far as that
                    continue
                with contextlib.suppress(UnicodeDecodeError):  # nothing that we could name
                    names.append(name.decode())
                if len(names) == limit:
                    return names
            if not page.more:
                return names
            start = max(page.kvs[-1].key + b"\0", skipped_to)
            options = {"range_end": end, "limit": PAGE_SIZE, "keys_only": True}
            try:
                answer, _ = self._txn((), [_range(start, revision=revision, **options)])
            except _Compacted:
                answer, _ = self._txn((), [_range(start, **options)])
                revision = int(answer.header.revision)
            page = answer.responses[0].response_range

    def sequence(self, path: str) -> int:
        """See MetadataStore.sequence: how often the node was written. Source: Etcd64bitIdGenerator."""
        key, above = self._key(path), self._above(path)
        while True:
            answer, _ = self._txn([_is_present(each) for each in above[-1:]], [_write(key, b""), _range(key)])
            if answer.succeeded:
                return int(_first(answer.responses[1]).version) - 1
            with contextlib.suppress(AlreadyExists):
                self._create(path.rpartition("/")[0], b"")

    def sequence_position(self, path: str) -> int:
        """See MetadataStore.sequence_position."""
        answer, _ = self._txn([], [_range(self._key(path))])
        found = _first(answer.responses[0])
        return 0 if found is None else int(found.version)

    # ephemerals

    def ephemeral(self, path: str, value: bytes, *, wait_s: float | None = None) -> None:
        """See MetadataStore.ephemeral."""
        _check_size(path, value)
        begin = time.monotonic()
        with self._lock:
            before = self._ephemerals.get(path)
            self._ephemerals[path] = value
        try:
            while (holder := self._put_ephemeral(path, value)) is not None:
                if wait_s is None:
                    wait_s = self._expiry_s(holder)
                if time.monotonic() - begin >= wait_s:
                    raise AlreadyExists(f"{path} is held by another session in {self.name}")
                self._closed.wait(_POLL_S)
        except BaseException:
            if before is None:
                with self._lock:
                    self._ephemerals.pop(path, None)
            raise
        self._start("lease", self._keep_lease)

    def claim(self, path: str, value: bytes, *, numbered: bool = False) -> Claim:
        """See MetadataStore.claim. The number is how often the parent was written, which each claim does once more."""
        _check_size(path, value)
        while True:
            lease_id = self._lease()
            try:
                if numbered:
                    claimed, revision = self._create_numbered(path, value, lease_id)
                else:
                    claimed, revision = path, self._create(path, value, lease_id)
            except _LeaseLost:
                self._forget_lease(lease_id)
                continue
            self._start("lease", self._keep_lease)
            return _EtcdClaim(self, claimed, revision)

    def _create_numbered(self, path: str, value: bytes, lease_id: int) -> tuple[str, int]:
        parent = path.rpartition("/")[0]
        while True:
            found = self._read(self._key(parent))
            if found is None:
                with contextlib.suppress(AlreadyExists):
                    self._create(parent, b"")
                continue
            numbered = f"{path}{int(found.version):010d}"
            key = self._key(numbered)
            answer, _ = self._txn(
                [_at_revision(found.key, found.mod_revision), _is_absent(key)],
                [_write(found.key, b"", ignore_value=True), _write(key, value, lease=lease_id)],
                [_range(key)],
            )
            if answer.succeeded:
                return numbered, int(answer.header.revision)
            # An answer that was lost: the request that was repeated found its own node.
            there = _first(answer.responses[0])
            if there is not None and (there.value, there.lease) == (value, lease_id):
                return numbered, int(there.mod_revision)

    def _expiry_s(self, lease_id: int) -> float:
        """How long after now a lease that nobody keeps alive is over for sure."""
        granted_s = self.session_timeout_s
        if lease_id > 0:
            answer, _ = self._send("LeaseTimeToLive", etcdrpc.LeaseTimeToLiveRequest(ID=lease_id))
            granted_s = max(granted_s, answer.grantedTTL)
        return granted_s + _EXPIRY_SLACK_S

    def _put_ephemeral(self, path: str, value: bytes) -> int | None:
        """Make the node ours. Returns the lease that holds it otherwise; 0: none does, _NOBODY: it is just gone."""
        key = self._key(path)
        lease_id = self._lease()
        try:
            self._create(path, value, lease_id)
        except _LeaseLost:
            self._forget_lease(lease_id)
            return _NOBODY
        except AlreadyExists:
            found = self._read(key)
            if found is None:
                return _NOBODY
            if found.lease != lease_id:
                return int(found.lease)
            if found.value != value:
                self._txn([_at_revision(key, found.mod_revision)], [_write(key, value, ignore_lease=True)])
        return None

    def _lease(self) -> int:
        """The lease of our ephemerals, granted when there is none."""
        with self._lease_lock:
            if not self._lease_id:
                request = etcdrpc.LeaseGrantRequest(TTL=max(1, round(self.session_timeout_s)))
                answer, _ = self._send("LeaseGrant", request)
                self._lease_id, self._lease_ttl_s = int(answer.ID), float(answer.TTL)
            return self._lease_id

    def _forget_lease(self, lease_id: int) -> None:
        with self._lease_lock:
            if self._lease_id == lease_id:
                self._lease_id = 0

    def _keep_lease(self) -> None:
        """Runs on a thread of its own: the lease lives on, and after its end the ephemerals get another."""
        held_by = 0  # the lease that holds all of them
        wait_s = self._lease_ttl_s / _LEASE_REFRESHES
        while not self._closed.wait(wait_s):
            wait_s = self._lease_ttl_s / _LEASE_REFRESHES
            lease_id = self._lease_id
            try:
                if lease_id and not self._refresh(lease_id, wait_s):
                    self._forget_lease(lease_id)
                if held_by == 0 or held_by != self._lease_id:
                    done = self._hold_again()
                    held_by = self._lease_id if done else 0
                    wait_s = wait_s if done else _RESTORE_PAUSE_S
            except (BkctlError, grpc.RpcError, ValueError):
                wait_s = min(wait_s, _RESTORE_PAUSE_S)

    def _refresh(self, lease_id: int, limit_s: float) -> bool:
        """Whether the lease is there; it has its whole time to live again then."""
        client = self._client()
        requests = iter((etcdrpc.LeaseKeepAliveRequest(ID=lease_id),))
        try:
            metadata = (*self._metadata(client, limit_s), *_REQUIRE_LEADER)
            answers = client.leasestub.LeaseKeepAlive(requests, timeout=limit_s, metadata=metadata)
            answer = next(answers, None)
            answers.cancel()
        except grpc.RpcError as error:
            if _is_stale_token(*_status(error)):
                self._token = None
            self._fail_over(client)
            raise
        if answer is None:
            raise Unreachable(f"etcd at {self.address} did not answer")
        return bool(answer.TTL > 0)

    def _hold_again(self) -> bool:
        """Create our ephemerals under a new lease; False when some are to be tried again."""
        done = True
        for path, value in list(self._ephemerals.items()):
            try:
                is_ours = self._put_ephemeral(path, value) is None
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
        watch = _Watch(self._key(path), children, callback, threading.Event())
        with self._lock:
            self._check_open()
            self._watch_id += 1
            watch_id = self._watch_id
            self._watches[watch_id] = watch
            if self._watch_requests is not None:
                self._ask_to_watch(watch_id, watch)

        def cancel() -> None:
            with self._lock:
                if self._watches.pop(watch_id, None) is None or self._watch_requests is None:
                    return
                for number, each in self._watch_numbers.items():
                    if each == watch_id:
                        request = etcdrpc.WatchCancelRequest(watch_id=number)
                        self._watch_requests.put(etcdrpc.WatchRequest(cancel_request=request))

        self._watch_wanted.set()
        self._start("watch", self._keep_watching)
        self._start("events", self._call_back)
        answered = watch.answered.wait(self.timeout_s)
        if not answered or watch_id not in self._watches:
            cancel()
            self._check_open()
            if answered:
                raise Unauthorized(f"etcd at {self.address} refuses to watch {path}: {_short(self._watch_problem)}")
            raise self._timed_out()
        return cancel

    def _ask_to_watch(self, watch_id: int, watch: _Watch) -> None:
        """Send the request on the open stream; the lock is held."""
        assert self._watch_requests is not None
        request = etcdrpc.WatchCreateRequest(key=watch.key)
        if watch.children:
            request = etcdrpc.WatchCreateRequest(key=watch.key + b"/", range_end=watch.key + b"0")
        self._watch_pending.append(watch_id)
        self._watch_requests.put(etcdrpc.WatchRequest(create_request=request))

    def _keep_watching(self) -> None:
        """Runs on a thread of its own: one stream with all watches, opened again whenever it ends.

        Nobody needs to know from which revision on: once a stream watches, its watches are called, and look.
        """
        opened = 0
        while not self._closed.is_set():
            self._watch_wanted.wait()
            requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
            client = None
            try:
                client = self._client()
                metadata = (*self._metadata(client, self.timeout_s), *_REQUIRE_LEADER)
                stub = etcdrpc.WatchStub(client.channel)
                with self._lock:
                    self._check_open()
                    self._watch_requests = requests
                    self._watch_pending.clear()
                    self._watch_numbers.clear()
                    for watch_id, watch in self._watches.items():
                        self._ask_to_watch(watch_id, watch)
                    self._watch_stream = stub.Watch(iter(requests.get, None), metadata=metadata)  # type: ignore[attr-defined]
                    self._watch_client = client
                for answer in self._watch_stream:
                    self._take_watch_answer(answer)
            except (grpc.RpcError, ValueError, BkctlError) as error:
                if isinstance(error, grpc.RpcError) and _is_stale_token(*_status(error)):
                    self._token = None
            with self._lock:
                self._watch_requests = self._watch_client = None
            requests.put(None)  # ends gRPC's thread that takes them
            if client is not None:
                self._fail_over(client)
            opened += 1
            self._closed.wait(min(_RETRY_PAUSE_S * opened, _RESTORE_PAUSE_S))

    def _refused_to_watch(self, watch_id: int, watch: _Watch, reason: str) -> None:
        """The server does not watch; the lock is held. A token that it forgot looks so too: a new one is tried."""
        if self._security.user is not None and (watch.answered.is_set() or watch_id not in self._watch_refused):
            self._watch_refused.add(watch_id)
            self._token = None
            self._watch_stream.cancel()
            return
        self._watch_problem = reason
        del self._watches[watch_id]
        watch.answered.set()

    def _take_watch_answer(self, answer: Any) -> None:
        with self._lock:
            number = answer.watch_id
            if answer.created:
                watch_id = self._watch_pending.popleft()
                watch = self._watches.get(watch_id)
                if watch is None:  # cancelled meanwhile
                    if not answer.canceled and self._watch_requests is not None:
                        request = etcdrpc.WatchCancelRequest(watch_id=number)
                        self._watch_requests.put(etcdrpc.WatchRequest(cancel_request=request))
                    return
                if answer.canceled:
                    self._refused_to_watch(watch_id, watch, answer.cancel_reason)
                    return
                self._watch_numbers[number] = watch_id
                if watch.answered.is_set():  # It was watched before, on a stream that ended.
                    self._events.put(watch_id)
                watch.answered.set()
                return
            if answer.canceled:
                again = self._watch_numbers.pop(number, None)
                watch = None if again is None else self._watches.get(again)
                if again is not None and watch is not None:  # not by us
                    self._ask_to_watch(again, watch)
                return
            watch_id = self._watch_numbers.get(number, 0)
            watch = self._watches.get(watch_id)
            if watch is not None and any(_is_told(watch, event) for event in answer.events):
                self._events.put(watch_id)

    def _call_back(self) -> None:
        """Runs on a thread of its own: one callback at a time."""
        failed: set[int] = set()
        while not self._closed.is_set():
            try:
                called = {self._events.get(timeout=_RESTORE_PAUSE_S if failed else None)}
                with contextlib.suppress(queue.Empty):
                    while True:
                        called.add(self._events.get_nowait())
            except queue.Empty:
                called = set()
            for watch_id in sorted({each for each in called | failed if each is not None}):
                failed.discard(watch_id)
                watch = self._watches.get(watch_id)
                if watch is None or self._closed.is_set():
                    continue
                try:
                    watch.callback()
                except BkctlError:
                    failed.add(watch_id)

    def _start(self, name: str, work: Callable[[], None]) -> None:
        with self._lock:
            if name not in self._threads and not self._closed.is_set():
                self._threads[name] = threading.Thread(target=work, name=f"metadata-store-{name}", daemon=True)
                self._threads[name].start()

    def close(self) -> None:
        """See MetadataStore.close."""
        with self._lock:
            if self._closed.is_set():
                return
            client, lease_id = self._clients[self._current], self._lease_id
            watches = list(self._watches.values())
            self._watches.clear()
            self._ephemerals.clear()
            self._closed.set()
        if lease_id and client is not None:
            with contextlib.suppress(grpc.RpcError, ValueError, Unauthorized):
                metadata = self._metadata(client, _CLOSE_S)
                request = etcdrpc.LeaseRevokeRequest(ID=lease_id)
                client.leasestub.LeaseRevoke(request, timeout=_CLOSE_S, metadata=metadata)
        for watch in watches:
            watch.answered.set()
        self._watch_wanted.set()
        self._events.put(None)
        with contextlib.suppress(grpc.RpcError):
            if self._watch_stream is not None:
                self._watch_stream.cancel()
        for each in self._clients:
            if each is not None:
                each.close()


class _EtcdClaim(Claim):
    """`revision` is the one that made the key, and nobody writes it again."""

    def __init__(self, store: EtcdStore, path: str, revision: int) -> None:
        self.path = path
        self._store = store
        self._revision = revision

    def is_held(self) -> bool:
        found = self._store._read(self._store._key(self.path))
        return found is not None and bool(found.mod_revision == self._revision)

    def release(self) -> None:
        key = self._store._key(self.path)
        self._store._txn([_at_revision(key, self._revision)], [_delete(key)])


class EtcdLedgerManager(QualifiedNameLedgerManager):
    """Every ledger at `ledgers/<UUID>`: its 128 bits, the scope first, which is 0 in Apache's. Source: EtcdUtils.

    Ids of scope 0 come from 128 buckets, each a key that counts its writes: bucket << 56 | count. Source:
    Etcd64bitIdGenerator.
    """

    def __init__(self, store: MetadataStore) -> None:
        super().__init__(store)
        self._bucket = random.randrange(_BUCKETS)

    def _name(self, ledger: LedgerId) -> str:
        text = ledger.qualified_name
        return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))

    def _ledger(self, name: str) -> LedgerId | None:
        return LedgerId.from_value(int(name.replace("-", ""), 16)) if _UUID.fullmatch(name) else None

    def _new_default_id(self) -> int:
        for _ in range(_BUCKETS):
            self._bucket = bucket = (self._bucket + 1) % _BUCKETS
            number = self.store.sequence(f"buckets/{bucket:03d}") + 1
            if number < 1 << _BUCKET_SHIFT:
                return bucket << _BUCKET_SHIFT | number
        raise IllegalOperation(f"No ledger ids are left in {self.store.name}")

    def id_position(self) -> int:
        """See LedgerManager.id_position: the highest bucket in use, as far as the fullest one is."""
        counts = {bucket: self.store.sequence_position(f"buckets/{bucket:03d}") for bucket in range(_BUCKETS)}
        highest = max((bucket for bucket, count in counts.items() if count), default=None)
        return 0 if highest is None else highest << _BUCKET_SHIFT | max(counts.values()) + 1

    def skip_ids(self, position: int) -> bool:
        """See LedgerManager.skip_ids."""
        if position <= 1:
            return True
        highest, count = position >> _BUCKET_SHIFT, position & ((1 << _BUCKET_SHIFT) - 1)
        return all(
            self.store.advance_sequence(f"buckets/{bucket:03d}", count - 1)
            for bucket in range(min(highest, _BUCKETS - 1) + 1)
        )


# requests and answers


def _range(key: bytes, **options: Any) -> Any:
    return etcdrpc.RequestOp(request_range=etcdrpc.RangeRequest(key=key, **options))


def _page(key: bytes, after: str, limit: int | None) -> Any:
    """Whether the node is there, and the first page of what is below it, behind the child `after`."""
    start = key + b"/" + (after.encode("utf-8", "surrogatepass") + b"\0" if after else b"")
    count = PAGE_SIZE if limit is None else min(max(limit, 1), PAGE_SIZE)
    return etcdrpc.TxnRequest(
        success=[_range(key, count_only=True), _range(start, range_end=key + b"0", limit=count, keys_only=True)]
    )


def _write(key: bytes, value: bytes, **options: Any) -> Any:
    return etcdrpc.RequestOp(request_put=etcdrpc.PutRequest(key=key, value=value, **options))


def _delete(key: bytes) -> Any:
    return etcdrpc.RequestOp(request_delete_range=etcdrpc.DeleteRangeRequest(key=key))


def _is_absent(key: bytes) -> Any:
    return etcdrpc.Compare(key=key, target=etcdrpc.Compare.CREATE, result=etcdrpc.Compare.EQUAL, create_revision=0)


def _is_present(key: bytes) -> Any:
    return etcdrpc.Compare(key=key, target=etcdrpc.Compare.CREATE, result=etcdrpc.Compare.GREATER, create_revision=0)


def _has_no_children(key: bytes) -> Any:
    return etcdrpc.Compare(
        key=key + b"/",
        range_end=key + b"0",
        target=etcdrpc.Compare.CREATE,
        result=etcdrpc.Compare.EQUAL,
        create_revision=0,
    )


def _at_revision(key: bytes, revision: int) -> Any:
    # A key that is not there has mod revision 0, so that one is never asked for.
    return etcdrpc.Compare(
        key=key,
        target=etcdrpc.Compare.MOD,
        result=etcdrpc.Compare.EQUAL,
        mod_revision=revision if revision > 0 else -1,
    )


def _first(response: Any) -> Any:
    kvs = response.response_range.kvs
    return kvs[0] if kvs else None


def _versioned(kv: Any) -> Versioned[bytes] | None:
    return None if kv is None else Versioned(kv.value, kv.mod_revision, None)


def _is_told(watch: _Watch, event: Any) -> bool:
    """Whether the event is one of the watch: children are told of when they come and go, without what is below them."""
    if not watch.children:
        return True
    below = b"/" in event.kv.key[len(watch.key) + 1 :]
    return not below and (event.type == kv_pb2.Event.DELETE or event.kv.version == 1)


def _check_size(path: str, value: bytes) -> None:
    if len(value) > VALUE_SIZE_BYTES_MAX:
        raise UsageError(f"{path}: a value of {len(value)} bytes is above etcd's {VALUE_SIZE_BYTES_MAX}")


def _status(error: grpc.RpcError) -> tuple[Any, str]:
    """Code and details of a failed call, which gRPC's exceptions carry without saying so in their type."""
    call: Any = error
    return call.code(), call.details() or ""


def _is_lost(code: Any, details: str) -> bool:
    return code in _LOST or (code is _Status.RESOURCE_EXHAUSTED and "too many requests" in details)


def _is_stale_token(code: Any, details: str) -> bool:
    """etcd forgets tokens after some minutes, and with a restart; each change of users makes them old."""
    return code is _Status.UNAUTHENTICATED or "auth store is old" in details


def _short(details: str) -> str:
    text = " ".join(details.removeprefix("etcdserver: ").split())
    return text if len(text) <= 200 else f"{text[:200]}…"


def _tls_files(security: StoreSecurity) -> dict[str, str | None]:
    """Arguments for etcd3's client. Raises UsageError for what gRPC cannot do, and for files that are no PEM."""
    if security.sasl:
        raise UsageError("etcd has no SASL", hint="give a user and a password alone")
    if not security.tls:
        return {}
    if security.key_password is not None:
        raise UsageError("gRPC reads no TLS key that has a password", hint="give a key without one")
    if not security.verify_hostname:
        raise UsageError("gRPC always checks the host name in an etcd server's certificate")
    security.tls_context()
    authorities = security.ca
    if authorities is None:
        import ssl

        authorities = ssl.get_default_verify_paths().cafile
        if authorities is None:
            raise UsageError("This system has no file of certificate authorities", hint="name one for etcd's")
    certificate = security.certificate
    return {
        "ca_cert": authorities,
        "cert_cert": certificate,
        "cert_key": None if certificate is None else security.key or certificate,
    }
