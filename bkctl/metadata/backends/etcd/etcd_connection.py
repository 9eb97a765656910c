"""Connections to an etcd cluster: one client per endpoint, calls with retries and failover, login and TLS.

etcd3's client knows one server and has no deadline across retries. It gives connections and calls here; retries on
other endpoints and fresh login tokens are this module's.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Final, TypeVar

# Else gRPC logs lost connections to stderr; callers get them as errors.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc

from bkctl.errors import BkctlError, TimedOut, Unauthorized, Unreachable, UsageError
from bkctl.metadata.backends.etcd import etcdrpc
from bkctl.metadata.store import VALUE_SIZE_BYTES_MAX, StoreConnection, StoreSecurity, refusals

sys.modules.setdefault("etcd3.etcdrpc", etcdrpc)
import etcd3  # noqa: E402 - it imports etcd3.etcdrpc

T = TypeVar("T")

#: Nodes that one request of `EtcdStore.get_many` reads.
BATCH_SIZE: Final = 32
RETRY_PAUSE_S: Final = 0.05
CLOSE_S: Final = 2.0
_ATTEMPT_S: Final = 5.0
_RETRY_PAUSE_S_MAX: Final = 0.5
_TOKENS_MAX: Final = 3
_ANSWER_SIZE_BYTES_MAX: Final = BATCH_SIZE * (VALUE_SIZE_BYTES_MAX + (1 << 16))

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
#: Metadata of a stream: a server that loses its leader ends the stream, instead of staying silent.
REQUIRE_LEADER: Final = (("hasleader", "true"),)
_STUBS: Final = {"Txn": "kvstub", "LeaseGrant": "leasestub", "LeaseTimeToLive": "leasestub"}
_Status: Final = grpc.StatusCode
#: Codes that leave open whether etcd executed the request: it is sent again.
_LOST: Final = (_Status.UNAVAILABLE, _Status.DEADLINE_EXCEEDED, _Status.CANCELLED, _Status.INTERNAL, _Status.UNKNOWN)


class RevisionCompacted(Exception):
    """etcd no longer keeps the requested revision."""


class LeaseLost(Exception):
    """The lease named in a write has expired or was revoked."""


class EtcdConnection(StoreConnection):
    """Calls to the etcd cluster whose `hosts` are (host, port) pairs; `root` is named in errors.

    `settings` are StoreConnection's. Raises UsageError for TLS files that cannot be read, and for options that gRPC
    lacks. Any thread may call.
    """

    def __init__(self, hosts: Sequence[tuple[str, int]], root: str, **settings: Any) -> None:
        super().__init__(**settings)
        self.hosts = tuple(hosts)
        self.address = ",".join(f"{host}:{port}" for host, port in self.hosts)
        #: Called with the client that `fail_over` left.
        self.on_fail_over: Callable[[Any], None] = lambda _: None
        self._root = root
        #: Requests carry the token of a user.
        self.has_login = self.security.user is not None
        self._tls_files = _tls_files(self.security)
        self._has_answered = False
        self._clients: list[Any] = [None] * len(self.hosts)
        self._current = 0
        self._token: str | None = None

    @property
    def _attempt_s(self) -> float:
        """The time that one endpoint may stay silent before the next one is asked."""
        further = len(self.hosts) - 1
        return min(_ATTEMPT_S, self._limit_s / (further + 2)) if further else self._limit_s

    @property
    def _limit_s(self) -> float:
        """The longest wait for an answer; for the first one, that for a connection."""
        return self.timeout_s if self._has_answered else self.connect_timeout_s

    def client(self) -> Any:
        """Return etcd3's client of the current endpoint. Raises Unreachable after `close`."""
        with self._lock:
            self.check_open()
            client = self._clients[self._current]
            if client is None:
                host, port = self.hosts[self._current]
                client = etcd3.Etcd3Client(host, port, **self._tls_files, grpc_options=_OPTIONS)
                self._clients[self._current] = client
            return client

    def check_open(self) -> None:
        """Raise Unreachable after `close`."""
        if self.closed.is_set():
            raise Unreachable(f"The connection to etcd at {self.address} is closed")

    def fail_over(self, client: Any) -> None:
        """Move to the next endpoint if `client` is the current one, with the watches."""
        with self._lock:
            if self._clients[self._current] is client:
                self._current = (self._current + 1) % len(self.hosts)
        if len(self.hosts) > 1:
            self.on_fail_over(client)

    # requests

    def send(self, method: str, request: Any, deadline: float | None = None) -> tuple[Any, bool]:
        """Return etcd's answer, and whether the request was sent more than once: an earlier one may have been executed.

        Raises as every `MetadataStore` method; RevisionCompacted and LeaseLost.
        """
        if deadline is None:
            deadline = time.monotonic() + self._limit_s
        attempt_s = self._attempt_s
        pause_s = RETRY_PAUSE_S
        repeated = False
        tokens = 0
        while True:
            client = self.client()
            try:
                answer = self._call(client, method, request, max(min(deadline - time.monotonic(), attempt_s), 0.001))
            except grpc.RpcError as error:
                self.check_open()
                code, details = status_of(error)
                if self.has_login and is_stale_token(code, details) and tokens < _TOKENS_MAX:
                    tokens += 1
                    self.forget_token()
                    continue
                if not _is_lost(code, details):
                    raise self._refusal(code, details, repeated) from error
                repeated = True
                self.fail_over(client)
                if code is _Status.DEADLINE_EXCEEDED:
                    attempt_s *= 2
                if not self._has_answered:
                    self._check_endpoints(details, deadline)
                if time.monotonic() + pause_s >= deadline:
                    raise self.timed_out(details) from error
                self.closed.wait(pause_s)
                pause_s = min(pause_s * 1.5, _RETRY_PAUSE_S_MAX)
            else:
                self._has_answered = True
                return answer, repeated

    def _call(self, client: Any, method: str, request: Any, limit_s: float) -> Any:
        try:
            metadata = self.metadata(client, limit_s)
            return getattr(getattr(client, _STUBS[method]), method)(request, timeout=limit_s, metadata=metadata)
        except ValueError:  # The channel was closed.
            self.check_open()
            raise

    def transact(self, compare: Iterable[Any], success: Iterable[Any], failure: Iterable[Any] = ()) -> tuple[Any, bool]:
        """`send` a transaction: the operations `success` where all of `compare` hold, else `failure`."""
        return self.send("Txn", etcdrpc.TxnRequest(compare=compare, success=success, failure=failure))

    def pipeline(self, items: Iterable[T], size: int, request: Callable[[T], Any]) -> Iterator[tuple[T, Any]]:
        """Yield each item with the answer to the read-only transaction `request(item)`; `size` are under way."""
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
            yield item, answer if answer is not None else self.send("Txn", request(item), deadline)[0]

    def _begin(self, request: Any) -> Any:
        """Return a transaction as a future; None where it cannot start now."""
        client = self.client()
        try:
            metadata = self.metadata(client, self._attempt_s)
            return client.kvstub.Txn.future(request, timeout=self._attempt_s, metadata=metadata)
        except (ValueError, grpc.RpcError):
            return None

    # login

    def metadata(self, client: Any, limit_s: float) -> tuple[tuple[str, str], ...]:
        """Return the metadata that carries the user's token, logging in where needed.

        Raises Unauthorized, grpc.RpcError.
        """
        user, password = self.security.user, self.security.password
        if user is None:
            return ()
        token = self._token
        if token is None:
            request = etcdrpc.AuthenticateRequest(name=user, password=password or "")
            try:
                token = etcdrpc.AuthStub(client.channel).Authenticate(request, timeout=limit_s).token  # type: ignore[attr-defined]
            except grpc.RpcError as error:
                code, details = status_of(error)
                if code is _Status.INVALID_ARGUMENT:
                    raise Unauthorized(
                        f"etcd at {self.address} refuses the user {user!r}: {shorten(details)}",
                        hint="check the user and the password",
                    ) from error
                if code is not _Status.FAILED_PRECONDITION:
                    raise
                token = ""  # Authentication is off.
            self._token = token
        return (("token", token),) if token else ()

    def forget_token(self) -> None:
        """Log in again with the next request."""
        self._token = None

    # errors

    def _check_endpoints(self, details: str, deadline: float) -> None:
        """Before the first answer of any endpoint: raise Unreachable where waiting cannot help."""
        # gRPC says "tcp handshaker shutdown" of a plain connection that is only late: TLS alone says "Ssl handshake".
        if "ssl handshake" in details.lower():
            raise Unreachable(
                f"No TLS connection to etcd at {self.address}: {shorten(details)}",
                hint="check the TLS files, and whether the server speaks TLS",
            )

        if reasons := refusals(self.hosts, deadline, socket.create_connection):
            raise Unreachable(f"No etcd at {self.address}: {reasons}", hint="check the metadata URI")

    def timed_out(self, details: str = "") -> TimedOut:
        """Return the error of a call without an answer in time."""
        more = f" ({shorten(details)})" if details else ""
        hint = None if self._has_answered else "check the metadata URI, or give it more time with --connect-timeout"
        return TimedOut(f"etcd at {self.address} did not answer within {self._limit_s:g} s{more}", hint=hint)

    def _refusal(self, code: Any, details: str, repeated: bool) -> Exception:
        if code is _Status.OUT_OF_RANGE and "compacted" in details:
            return RevisionCompacted(details)
        if code is _Status.NOT_FOUND and "lease not found" in details:
            return LeaseLost(details)
        if code in (_Status.PERMISSION_DENIED, _Status.UNAUTHENTICATED) or "user name is empty" in details:
            hint = "give a user that has access" if self.security.user else "give a user and a password"
            refusal = Unauthorized(
                f"etcd at {self.address} refuses access to {self._root}: {shorten(details)}", hint=hint
            )
            refusal.changed_nothing = not repeated
            return refusal
        if code is _Status.RESOURCE_EXHAUSTED and "space exceeded" in details:
            return BkctlError(f"The database of etcd at {self.address} is full", hint="compact and defragment it")
        return BkctlError(f"etcd at {self.address} failed: {code.name}: {shorten(details)}")

    # life

    def close(self, lease_id: int) -> None:
        """Revoke the lease, if there is one (0: none), best effort, and close every client."""
        client = self._clients[self._current]
        if lease_id and client is not None:
            with contextlib.suppress(grpc.RpcError, ValueError, Unauthorized):
                metadata = self.metadata(client, CLOSE_S)
                client.leasestub.LeaseRevoke(
                    etcdrpc.LeaseRevokeRequest(ID=lease_id), timeout=CLOSE_S, metadata=metadata
                )
        for opened in self._clients:
            if opened is not None:
                opened.close()


def status_of(error: grpc.RpcError) -> tuple[Any, str]:
    """Return the code and details of a failed call; gRPC's exceptions carry both without declaring them."""
    call: Any = error
    return call.code(), call.details() or ""


def is_stale_token(code: Any, details: str) -> bool:
    """Return whether etcd forgot the login token: after some minutes, a restart, or a change of users."""
    return code is _Status.UNAUTHENTICATED or "auth store is old" in details


def _is_lost(code: Any, details: str) -> bool:
    return code in _LOST or (code is _Status.RESOURCE_EXHAUSTED and "too many requests" in details)


def shorten(details: str) -> str:
    """Return etcd's explanation on one line of up to 200 characters."""
    text = " ".join(details.removeprefix("etcdserver: ").split())
    return text if len(text) <= 200 else f"{text[:200]}…"


def _tls_files(security: StoreSecurity) -> dict[str, str | None]:
    """Return TLS arguments for etcd3's client. Raises UsageError for unreadable files, and options that gRPC lacks."""
    if security.sasl:
        raise UsageError("etcd has no SASL", hint="give a user and a password alone")
    if not security.tls:
        return {}
    if security.key_password is not None:
        raise UsageError("gRPC cannot read a TLS key that has a password", hint="give a key without a password")
    if not security.verify_hostname:
        raise UsageError(
            "The check of host names cannot be turned off for etcd: gRPC always checks them",
            hint="give the server a certificate with its host name",
        )
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
