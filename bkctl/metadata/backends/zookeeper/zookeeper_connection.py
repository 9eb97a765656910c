"""The connection to a ZooKeeper ensemble through kazoo: sockets, TLS, login, calls that outlive a lost connection.

kazoo keeps the connection and the session. It leaves a request whose connection broke to its caller: here the request
is sent again, and `ZooKeeperCall.repeated` says that an earlier one may have been executed.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

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
    SessionExpiredError,
    SessionMovedError,
)
from kazoo.handlers.threading import KazooTimeoutError, SequentialThreadingHandler
from kazoo.protocol.states import KazooState, KeeperState
from kazoo.retry import KazooRetry
from kazoo.security import CREATOR_ALL_ACL

from bkctl.errors import BkctlError, TimedOut, Unauthorized, Unreachable
from bkctl.metadata.store import TLS_REFRESH_S, StoreConnection, failure_reason, full_path, refusals

if TYPE_CHECKING:
    import ssl

    from bkctl.metadata.refreshed_tls import RefreshedContext

_FIRST_ANSWER_S: Final = 0.3
_RETRY_PAUSE_S: Final = 0.02
_CLOSE_S: Final = 2.0
#: Its level keeps kazoo from formatting a message for each request; callers get lost connections as errors.
_SILENT_LOGGER: Final = logging.Logger(__name__, logging.CRITICAL + 1)
#: Errors that leave open whether ZooKeeper executed the request: it is sent again.
LOST: Final = (ConnectionLoss, ConnectionClosedError, OperationTimeoutError, SessionExpiredError, SessionMovedError)
#: Refusals that callers translate, each with its own words.
_ANSWERS: Final = (BadVersionError, NoChildrenForEphemeralsError, NodeExistsError, NoNodeError, NotEmptyError)
UNAUTHORIZED: Final = (NoAuthError, AuthFailedError, InvalidACLError)


@dataclass
class ZooKeeperCall:
    """One operation, which may take several requests; `repeated`: an earlier one may have been executed.

    `full` is the full path of its node, for messages. With `once` a request whose answer is lost is not sent again: the
    caller gets kazoo's error (one of LOST).
    """

    request: Callable[[], Any]
    full: str
    repeated: bool = field(default=False, kw_only=True)
    once: bool = field(default=False, kw_only=True)


class _Bell:
    """Both ends of kazoo's socket pair, which gets a byte for each request and gives it when the request is sent.

    A pair of sockets has room for some hundreds. Without a connection none is sent, and one more would wait for ever.
    """

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._lock = threading.Lock()
        #: Bytes given and not taken yet; the sockets hold one of them.
        self._count = 0

    def send(self, data: bytes) -> int:
        """Take one byte. Raises OSError after `close`."""
        with self._lock:
            if not self._count or self._writer.fileno() < 0:
                self._writer.send(data)
            self._count += 1
        return 1

    def recv(self, size: int) -> bytes:
        """Give one byte. The caller knows that there is one: `fileno` can be read."""
        with self._lock:
            self._count -= 1
            return b"\0" if self._count else self._reader.recv(size)

    def fileno(self) -> int:
        """Return the descriptor that can be read while there is a byte."""
        return self._reader.fileno()

    def close(self) -> None:
        """Close both ends."""
        with self._lock:
            self._reader.close()
            self._writer.close()


class _Handler(SequentialThreadingHandler):  # type: ignore[misc]
    """kazoo's threads, with our own sockets: one TLS context for all, and the reason of the last failed connection."""

    def __init__(self, tls: ssl.SSLContext | None) -> None:
        super().__init__()
        self.tls = tls
        #: The reason of the last failed connection; "" after a successful one.
        self.problem = ""

    def create_socket_pair(self) -> tuple[_Bell, _Bell]:
        bell = _Bell()
        return bell, bell

    def create_connection(self, *, address: tuple[str, int], hostname: str, timeout: float, **_: Any) -> socket.socket:
        """Source: kazoo.handlers.utils.create_tcp_connection."""
        try:
            connection = _connect(address, timeout, self.tls, hostname)
        except OSError as error:
            self.problem = failure_reason(error)
            raise
        self.problem = ""
        return connection


class ZooKeeperConnection(StoreConnection):
    """One session on the ensemble `hosts` (`HOST:PORT,HOST:PORT`), with paths below the node `root`.

    `settings` are StoreConnection's. Raises Unreachable, naming the hosts: at once when each refuses or none resolves,
    else after `connect_timeout_s`.
    """

    def __init__(self, hosts: str, root: str, **settings: Any) -> None:
        super().__init__(**settings)
        self.hosts = hosts
        self.root = root
        self.connected = threading.Event()
        #: ZooKeeper refused the login: kazoo tries no more.
        self._is_refused = False
        #: None between the end of a session and the start of the next one.
        self.session_id: int | None = None
        #: Called on kazoo's thread once a new session replaces a lost one: must only note and wake.
        self.on_new_session: Callable[[], None] = lambda: None
        self._session_lost = False
        self.tls = cast("RefreshedContext | None", self.security.tls_context(TLS_REFRESH_S))
        self.client = self.new_client()
        self.client.add_listener(self._on_state)

    def new_client(self) -> KazooClient:
        """Return a client for a session of its own, not started."""
        security = self.security
        has_digest = security.user is not None and not security.sasl
        sasl = {"mechanism": "DIGEST-MD5", "username": security.user, "password": security.password}
        return KazooClient(
            self.hosts,
            timeout=self.session_timeout_s,
            handler=_Handler(self.tls),
            connection_retry=KazooRetry(max_tries=-1, delay=0.05, backoff=2, max_jitter=0.4, max_delay=1.0),
            default_acl=list(CREATOR_ALL_ACL) if security.creator_acl else None,
            auth_data=[("digest", f"{security.user}:{security.password}")] if has_digest else None,
            sasl_options=sasl if security.sasl else None,
            logger=_SILENT_LOGGER,
        )

    @property
    def name(self) -> str:
        """The root and the hosts, for messages."""
        return f"{self.root} of ZooKeeper at {self.hosts}"

    def open(self) -> None:
        """Wait for the session. Raises Unreachable, TimedOut."""
        timeout_s = self.connect_timeout_s
        deadline = time.monotonic() + timeout_s
        self.client.start_async()
        if self.connected.wait(min(_FIRST_ANSWER_S, timeout_s)):
            return

        connect = partial(_connect, tls=self.tls)
        if reasons := refusals(self.client.hosts, deadline, connect):
            raise Unreachable(f"No ZooKeeper at {self.hosts}: {reasons}", hint="check the metadata URI")
        if not self.connected.wait(max(deadline - time.monotonic(), 0)):
            why = f": {self.client.handler.problem}" if self.client.handler.problem else ""
            raise TimedOut(
                f"ZooKeeper at {self.hosts} gave no session within {timeout_s:g} s{why}",
                hint="check the metadata URI, or give it more time with --connect-timeout",
            )

    def _on_state(self, state: str) -> None:
        """Note the state of the session; on kazoo's connection thread, so this never blocks."""
        if state == KazooState.CONNECTED:
            self.session_id = self.client.client_id[0]
            self.connected.set()
            if self._session_lost:
                self.on_new_session()
            self._session_lost = False
        else:
            self.connected.clear()
            if state == KazooState.LOST:
                self._session_lost = True
                self.session_id = None
            if self.client.client_state == KeeperState.AUTH_FAILED:
                self._is_refused = True
                self.connected.set()  # Wake the calls that wait for the connection.

    # calls

    def run(self, request: Callable[[str], Any], full: str, timeout_s: float | None = None) -> Any:
        """Return the answer to the idempotent `request(full)`, about the node at a full path. See `answer`.

        `request` sends it and returns kazoo's result.
        """
        return self.answer(ZooKeeperCall(partial(request, full), full), timeout_s)

    def answer(self, call: ZooKeeperCall, timeout_s: float | None = None) -> Any:
        """Return ZooKeeper's answer. Raises its refusals as kazoo's errors, else as every `MetadataStore` method."""
        deadline = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        while not self.closed.is_set():
            try:
                return call.request().get(timeout=max(deadline - time.monotonic(), 0.001))
            except LOST as error:
                if self._is_refused:
                    raise Unauthorized(
                        f"ZooKeeper at {self.hosts} refuses access to {self.root}",
                        hint="check the user and the password",
                    ) from error
                call.repeated = True
                if call.once:
                    raise
                time.sleep(_RETRY_PAUSE_S)
                if not self.closed.is_set() and not self.connected.wait(max(deadline - time.monotonic(), 0)):
                    raise self.timed_out() from error
                if time.monotonic() >= deadline:
                    raise self.timed_out() from error
            except KazooTimeoutError as error:
                raise self.timed_out() from error
            except UNAUTHORIZED as error:
                raise self.unauthorized(call.full, repeated=call.repeated) from error
            except _ANSWERS:
                raise
            except KazooException as error:
                raise BkctlError(f"ZooKeeper at {self.hosts} failed: {error!r}") from error
        raise Unreachable(f"The connection to ZooKeeper at {self.hosts} is closed")

    def unauthorized(self, full: str, *, repeated: bool) -> Unauthorized:
        """Return the error of a refused request about the node at a full path."""
        error = Unauthorized(
            f"ZooKeeper at {self.hosts} refuses access to {full}",
            hint="give a --metadata-user that its ACL admits (to create and delete it, the ACL of its parent)",
        )
        error.changed_nothing = not repeated
        return error

    def timed_out(self) -> TimedOut:
        """Return the error of a call without an answer in time."""
        return TimedOut(f"ZooKeeper at {self.hosts} did not answer within {self.timeout_s:g} s")

    def full(self, path: str) -> str:
        """Return the full path of the node at `path` below the root."""
        return full_path(self.root, path)

    # end

    def close(self) -> None:
        """End the session, waiting a bounded time for it, and not at all without a connection."""
        was_connected = self.connected.is_set()
        self.connected.set()  # Wake the calls that wait for the connection: they see `closed`.
        end_client(self.client, wait=was_connected)


def end_client(client: KazooClient, *, wait: bool) -> None:
    """End a client's session, with `wait` waiting a bounded time for it."""

    def stop() -> None:
        with contextlib.suppress(KazooException, OSError):
            client.stop()
        with contextlib.suppress(KazooException, OSError):
            client.close()

    # kazoo's stop waits for a connection in progress, up to the session timeout; a thread takes that wait.
    stopping = threading.Thread(target=stop, name="metadata-store-close", daemon=True)
    stopping.start()
    stopping.join(_CLOSE_S if wait else 0)


def _connect(
    address: tuple[str, int], timeout_s: float, tls: ssl.SSLContext | None, hostname: str = ""
) -> socket.socket:
    connection = socket.create_connection(address, timeout_s)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            connection = tls.wrap_socket(connection, server_hostname=(hostname or address[0]).strip("[]"))
    except BaseException:
        connection.close()
        raise
    return connection
