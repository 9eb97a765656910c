"""A read-only connection to ZooKeeper with many requests in one packet: for listings of hundreds of thousands.

kazoo takes 0.1 ms of Python for each request, most of it to hand the answer from one thread to another; here the
thread that asks reads the answers itself, in the order of its requests. The server takes as long to pass a request
through its five threads, so many reads are one `multiRead` (ZooKeeper 3.6). Any failure ends the connection with
`ReaderLost`: the caller repeats its reads through kazoo, which waits for a server that is down.

    frame: length:int32 | request: xid:int32 type:int32 … | answer: xid:int32 zxid:int64 error:int32 …
    multiRead, in both directions: type:int32 done:bool error:int32 … for each read; -1, true, -1 ends them

Source: ZooKeeper's zookeeper.jute, ZooDefs.OpCode, KeeperException.Code, MultiOperationRecord, MultiResponse.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

from bkctl.metadata.store import Versioned

FRAME_SIZE_BYTES_MAX: Final = 256 << 20
_READ_SIZE_BYTES: Final = 1 << 18
_GET_DATA: Final = 4
_GET_CHILDREN: Final = 8
_SYNC: Final = 9
_MULTI_READ: Final = 22
_ERROR: Final = -1
_AUTH: Final = 100
_SASL: Final = 102
_CLOSE: Final = -11
_AUTH_XID: Final = -4
_NO_NODE: Final = -101
_SESSION_SLACK: Final = 3

_INT = struct.Struct(">i")
_HEADER = struct.Struct(">iiqi")  # length, xid, zxid, error
_REQUEST = struct.Struct(">iiii")  # length, xid, type, length of the path
_MULTI_HEADER = struct.Struct(">i?i")  # type, done, error
_READ = struct.Struct(">i?ii")  # a multi header, and the length of the path
_MULTI_END: Final = _MULTI_HEADER.pack(-1, True, -1)
_STAT = struct.Struct(">qqqqiiiqiiq")
_CONNECT = struct.Struct(">iiqiqi16s?")  # length, version, last zxid, timeout in ms, session id, password, read-only


#: From the buffer, an offset in it, and its end: an answer, and the offset of the next one.
_Parse: TypeAlias = Callable[[bytearray, int, int], tuple[Any, int]]


class Origin(NamedTuple):
    """The transaction that created a node, and the session that owns an ephemeral node (0: not ephemeral)."""

    czxid: int
    session_id: int


class ReaderLost(Exception):
    """The connection cannot be used any more; `waited_s`: the time without an answer, where that is the reason."""

    def __init__(self, problem: str, waited_s: float = 0.0) -> None:
        super().__init__(problem)
        self.waited_s = waited_s


#: The server answered this read with an error other than a missing node: read it through kazoo.
NO_ANSWER: Final = object()


@dataclass(slots=True)
class ReadBatch:
    """Requests sent together, and their answers."""

    operation: int
    parse: _Parse
    first_xid: int
    count: int
    answers: list[Any] = field(default_factory=list)


class Reader:
    """One session on one server. All methods may be called from any thread."""

    def __init__(
        self,
        connect: Callable[[], socket.socket],
        *,
        timeout_s: float,
        session_timeout_s: float,
        last_zxid: int,
        digest_login: str | None,
        sasl_client: Any | None,
    ) -> None:
        """Open a session. `last_zxid`: the server must know at least this change. Raises ReaderLost, OSError."""
        self._lock = threading.RLock()
        self._under_way: deque[ReadBatch] = deque()
        self._buffer = bytearray()
        self._at = 0
        self._xid = 0
        self._used_at = time.monotonic()
        self._timeout_s = timeout_s
        self._lost = False
        self._start = 0
        self._socket = connect()
        try:
            self._socket.settimeout(timeout_s)
            session_ms = int(session_timeout_s * 1000)
            self._socket.sendall(_CONNECT.pack(_CONNECT.size - 4, 0, last_zxid, session_ms, 0, 16, bytes(16), False))
            start, end = self._frame()
            if end - start < 8 or (granted_ms := _INT.unpack_from(self._buffer, start + 4)[0]) <= 0:
                raise ReaderLost("no session")
            #: After a longer idle time the server may have ended the session.
            self._idle_s_max = granted_ms / 1000 / _SESSION_SLACK
            if sasl_client is not None:
                self._log_in_by_sasl(sasl_client)
            if digest_login is not None:
                self._log_in(digest_login)
        except BaseException:
            self._socket.close()
            raise

    def _log_in(self, login: str) -> None:
        scheme, data = b"digest", login.encode()
        body = struct.pack(">iiii", _AUTH_XID, _AUTH, 0, len(scheme)) + scheme + _INT.pack(len(data)) + data
        self._socket.sendall(_INT.pack(len(body)) + body)
        self._answer_to(_AUTH_XID)

    def _log_in_by_sasl(self, client: Any) -> None:
        """Source: kazoo's ConnectionHandler._authenticate_with_sasl, ZooKeeperSaslClient."""
        challenge: bytes | None = None
        while not client.complete:
            token = client.process(challenge=challenge)
            if client.complete and not token:
                break
            self._xid += 1
            body = struct.pack(">iii", self._xid, _SASL, len(token or b"")) + (token or b"")
            self._socket.sendall(_INT.pack(len(body)) + body)
            start, end = self._answer_to(self._xid)
            size = _INT.unpack_from(self._buffer, start)[0] if end - start >= 4 else -1
            if size > end - start - 4:
                raise ReaderLost("malformed answer")
            challenge = bytes(self._buffer[start + 4 : start + 4 + max(size, 0)])
        client.dispose()

    def _answer_to(self, xid: int) -> tuple[int, int]:
        start, end = self._frame()
        if end - start < 16 or _HEADER.unpack_from(self._buffer, start - 4)[1::2] != (xid, 0):
            raise ReaderLost("refused")
        return start + 16, end

    # requests

    def get(self, paths: Sequence[str]) -> ReadBatch:
        """Ask for the values of nodes: each becomes a Versioned, None for a missing node, or NO_ANSWER."""
        return self._ask(_GET_DATA, _value, paths)

    def origin(self, paths: Sequence[str]) -> ReadBatch:
        """Ask for the Origin of each node, else as `get`; earlier acknowledged changes are included."""
        return self._ask(_GET_DATA, _origin, paths)

    def children(self, paths: Sequence[str]) -> ReadBatch:
        """Ask for the sorted names of nodes' children, else as `get`; earlier acknowledged changes are included."""
        return self._ask(_GET_CHILDREN, _names, paths)

    def _ask(self, operation: int, parse: _Parse, paths: Sequence[str]) -> ReadBatch:
        with self._lock:
            if self._lost:
                raise ReaderLost("the connection broke")
            if self.has_idled:
                raise ReaderLost("unused for too long")
            first_xid = self._xid + 1
            self._xid += 2
            if self._xid >= 1 << 31:
                raise ReaderLost("no more numbers")
            # The server answers in order, so reads after the `sync` see all changes acknowledged before it.
            root = paths[0].encode()
            reads = [_INT.pack(first_xid + 1), _INT.pack(_MULTI_READ)]
            for path in paths:
                data = path.encode()
                reads += (_READ.pack(operation, False, -1, len(data)), data, b"\0")
            reads.append(_MULTI_END)
            body = b"".join(reads)
            parts = [_REQUEST.pack(12 + len(root), first_xid, _SYNC, len(root)), root, _INT.pack(len(body)), body]
            batch = ReadBatch(operation, parse, first_xid, len(paths))
            self._under_way.append(batch)
            try:
                self._socket.sendall(b"".join(parts))
            except OSError as error:
                self._lose()
                raise ReaderLost("the connection broke") from error
            return batch

    @property
    def has_idled(self) -> bool:
        """True after so long a time without a request that the server may have ended the session."""
        return not self._under_way and time.monotonic() - self._used_at > self._idle_s_max

    def answers(self, batch: ReadBatch) -> list[Any]:
        """Return the batch's answers, in the order of its paths. Raises ReaderLost."""
        with self._lock:
            try:
                while len(batch.answers) < batch.count:
                    if not self._under_way:
                        raise ReaderLost("the batch was lost")
                    self._read(self._under_way.popleft())
            except TimeoutError as error:
                self._lose()
                raise ReaderLost("no answer", self._timeout_s) from error
            except (OSError, struct.error, UnicodeDecodeError) as error:
                self._lose()
                raise ReaderLost("the connection broke") from error
            except ReaderLost:
                self._lose()
                raise
            self._used_at = time.monotonic()
            return batch.answers

    def _lose(self) -> None:
        self._lost = True
        self._under_way.clear()
        self._socket.close()

    def _read(self, batch: ReadBatch) -> None:
        parse = batch.parse
        self._frame()  # of the `sync`
        self._check(batch.first_xid)
        at, end = self._frame()
        if self._check(batch.first_xid + 1) != 0:
            raise ReaderLost("no multiRead")
        at += 16
        buffer = self._buffer
        answers: list[Any] = []
        for _ in range(batch.count):
            kind, _, error = _MULTI_HEADER.unpack_from(buffer, at)
            at += 9
            if kind == _ERROR:
                answers.append(None if error == _NO_NODE else NO_ANSWER)
                at += 4
            elif kind == batch.operation:
                answer, at = parse(buffer, at, end)
                answers.append(answer)
            else:
                raise ReaderLost("an answer to another request")
        batch.answers = answers

    def _check(self, xid: int) -> int:
        """Return the error code in the last frame, which must answer the request `xid`."""
        _, found, _, error = _HEADER.unpack_from(self._buffer, self._start - 4)
        if found != xid:
            raise ReaderLost("an answer to another request")
        return int(error)

    def _frame(self) -> tuple[int, int]:
        """Read the next frame; return its start and end in the buffer, valid until the next call."""
        buffer, at = self._buffer, self._at
        if len(buffer) - at < 4:
            self._fill(4)
            buffer, at = self._buffer, self._at
        size = _INT.unpack_from(buffer, at)[0]
        if not 0 <= size <= FRAME_SIZE_BYTES_MAX:
            raise ReaderLost(f"a frame of {size} bytes")
        if len(buffer) - at < 4 + size:
            self._fill(4 + size)
            at = self._at
        self._start = at + 4
        self._at = at + 4 + size
        return at + 4, at + 4 + size

    def _fill(self, needed: int) -> None:
        """Read until the buffer holds `needed` bytes from `_at` on."""
        rest = self._buffer[self._at :]
        parts: list[bytes | bytearray] = [rest]
        have = len(rest)
        while have < needed:
            data = self._socket.recv(max(_READ_SIZE_BYTES, needed - have))
            if not data:
                raise ReaderLost("the server closed the connection")
            parts.append(data)
            have += len(data)
        self._buffer = bytearray().join(parts)
        self._at = 0

    def close(self) -> None:
        """End the session."""
        with contextlib.suppress(OSError):
            self._socket.settimeout(0.1)
            self._socket.sendall(struct.pack(">iii", 8, self._xid + 1, _CLOSE))
        with contextlib.suppress(OSError):
            self._socket.close()


def _value(buffer: bytearray, start: int, end: int) -> tuple[Versioned[bytes], int]:
    at, stat = _stat(buffer, start, end)
    return Versioned(bytes(buffer[start + 4 : at]), stat[4], stat[2]), at + _STAT.size


def _origin(buffer: bytearray, start: int, end: int) -> tuple[Origin, int]:
    at, stat = _stat(buffer, start, end)
    return Origin(stat[0], stat[7]), at + _STAT.size


def _stat(buffer: bytearray, start: int, end: int) -> tuple[int, tuple[int, ...]]:
    """Return the end of a node's value, and the stat behind it."""
    size = max(_INT.unpack_from(buffer, start)[0], 0)  # -1: null
    at = start + 4 + size
    if at + _STAT.size > end:
        raise ReaderLost("a malformed answer")
    return at, _STAT.unpack_from(buffer, at)


def _names(buffer: bytearray, start: int, end: int) -> tuple[list[str], int]:
    count = _INT.unpack_from(buffer, start)[0]
    start += 4
    if count <= 0:
        return [], start
    # Names mostly have one length. Then the length before each name is one separator, and no name contains its zeros.
    at = start + count * (4 + _INT.unpack_from(buffer, start)[0])
    if start < at <= end and (data := buffer[start:at]).isascii():
        text = data.decode("ascii")
        names = text.split(text[:4])
        if len(names) == count + 1 and text.count("\0") == count * text.count("\0", 0, 4):
            del names[0]
            names.sort()
            return names, at
    names = []
    at = start
    for _ in range(count):
        size = _INT.unpack_from(buffer, at)[0]
        if not 0 <= size <= end - at - 4:
            raise ReaderLost("a malformed answer")
        names.append(buffer[at + 4 : at + 4 + size].decode())
        at += 4 + size
    names.sort()
    return names, at
