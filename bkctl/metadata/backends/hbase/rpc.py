"""HBase's RPC over TCP: protobuf messages without cell blocks, one call at a time on each connection of a pool.

Source: RPC.proto, HBase's reference guide ("RPC"), NettyRpcConnection.
"""

from __future__ import annotations

import contextlib
import getpass
import io
import os
import socket
import struct
import threading
import time
from typing import Final, NamedTuple, TypeVar

from google.protobuf import proto
from google.protobuf.message import DecodeError, Message

from bkctl.errors import Unreachable
from bkctl.metadata.backends.hbase import hbase_pb2 as pb

M = TypeVar("M", bound=Message)

CLIENT_SERVICE: Final = "ClientService"
MASTER_SERVICE: Final = "MasterService"
#: "HBas", version 0, no authentication (AuthMethod.SIMPLE).
_PREAMBLE: Final = b"HBas\x00\x50"
#: HBase's own bound of an answer to many requests is 100 MB, behind which it gives errors (MultiActionResultTooLarge).
_ANSWER_SIZE_BYTES_MAX: Final = 256 << 20
_IDLE_MAX: Final = 16
#: Characters of an exception of a server that messages have.
REFUSAL_LENGTH_MAX: Final = 500
#: The longest pause between two attempts; the first is a hundredth of it.
_PAUSE_MAX_S: Final = 1.0


class RegionServer(NamedTuple):
    """One of HBase's servers."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class CallLost(Exception):
    """No answer came, or one that cannot be used: the server is down, or may still execute the call."""


class CallRefused(Exception):
    """The server answered by an exception of this Java class; `is_final`: it asks not to try again."""

    def __init__(self, java_class: str, text: str, is_final: bool) -> None:
        self.kind = java_class[:REFUSAL_LENGTH_MAX].rpartition(".")[2]
        self.is_final = is_final
        first_line = text.partition("\n")[0].removeprefix(f"{java_class}: ").strip()[:REFUSAL_LENGTH_MAX]
        super().__init__(f"{self.kind}: {first_line}" if first_line else self.kind)


class Retries:
    """The attempts at one operation, from now until `timeout_s` are over."""

    def __init__(self, timeout_s: float) -> None:
        self.deadline = time.monotonic() + timeout_s
        self._pause_s = _PAUSE_MAX_S / 100

    @property
    def remaining_s(self) -> float:
        """The seconds that are left; never 0, which means no timeout to sockets."""
        return max(self.deadline - time.monotonic(), 0.001)

    def pause(self) -> bool:
        """Wait before the next attempt; return False if the time is over then."""
        time.sleep(min(self._pause_s, self.remaining_s))
        self._pause_s = min(2 * self._pause_s, _PAUSE_MAX_S)
        return time.monotonic() < self.deadline


class Rpc:
    """Calls to any server, over connections that are kept. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[tuple[RegionServer, str], list[_Connection]] = {}
        self._busy: set[_Connection] = set()
        self.is_closed = False

    def call(
        self, server: RegionServer, service: str, method: str, request: Message, answer: type[M], timeout_s: float
    ) -> M:
        """Return the server's answer. Raises CallLost, CallRefused; Unreachable after `close`."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._check_open(server)
            idle = self._idle.setdefault((server, service), [])
            connection = idle.pop() if idle else None
        if connection is None:
            connection = _Connection(server, service, deadline)
        # A late answer would be taken for the next one, and a server drops calls of a closed connection.
        is_in_step = False
        try:
            with self._lock:
                self._check_open(server)
                self._busy.add(connection)
            found = connection.call(method, request, answer, deadline)
            is_in_step = True
            return found
        except CallRefused:
            is_in_step = True
            raise
        finally:
            with self._lock:
                self._busy.discard(connection)
                if is_kept := is_in_step and not self.is_closed and len(idle) < _IDLE_MAX:
                    idle.append(connection)
            if not is_kept:
                connection.close()

    def _check_open(self, server: RegionServer) -> None:
        if self.is_closed:
            raise Unreachable(f"The connection to HBase's server {server} is closed")

    def close(self) -> None:
        """Close all connections: calls under way raise CallLost."""
        with self._lock:
            self.is_closed = True
            connections = [connection for idle in self._idle.values() for connection in idle]
            self._idle.clear()
            for connection in self._busy:
                connection.interrupt()
        for connection in connections:
            connection.close()


class _Connection:
    def __init__(self, server: RegionServer, service: str, deadline: float) -> None:
        self._server = server
        self._call_id = 0
        try:
            self._socket = socket.create_connection((server.host.strip("[]"), server.port), _remaining_s(deadline))
        except OSError as error:
            raise self._lost(error) from error
        except (ValueError, OverflowError) as error:  # ZooKeeper or a table's directory names what no host can be
            raise CallLost(f"{server}: not an address: {error}"[:REFUSAL_LENGTH_MAX]) from error
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            header = pb.ConnectionHeader(
                user_info=pb.UserInformation(effective_user=_user_name()), service_name=service
            ).SerializeToString()
            self._socket.sendall(_PREAMBLE + struct.pack(">I", len(header)) + header)
        except OSError as error:
            self.close()
            raise self._lost(error) from error

    def call(self, method: str, request: Message, answer: type[M], deadline: float) -> M:
        self._call_id += 1
        try:
            header = pb.RequestHeader(
                call_id=self._call_id,
                method_name=method,
                request_param=True,
                timeout=max(int(_remaining_s(deadline) * 1000), 1),
            )
            body = io.BytesIO()
            proto.serialize_length_prefixed(header, body)
            proto.serialize_length_prefixed(request, body)
            self._socket.settimeout(_remaining_s(deadline))
            self._socket.sendall(struct.pack(">I", body.tell()) + body.getvalue())
            (size,) = struct.unpack(">I", self._read(4, deadline))
            if size > _ANSWER_SIZE_BYTES_MAX:
                raise CallLost(f"{self._server} announced an answer of {size:,} bytes to {method}")
            data = io.BytesIO(self._read(size, deadline))
        except OSError as error:
            raise self._lost(error) from error
        try:
            response = proto.parse_length_prefixed(pb.ResponseHeader, data)
            if response is not None and response.HasField("exception"):
                # A refused connection has no call's id, and the server closes it.
                refusal = response.exception
                raise CallRefused(refusal.exception_class_name, refusal.stack_trace, refusal.do_not_retry)
            if response is None or response.call_id != self._call_id:
                raise CallLost(f"{self._server} gave another answer than the one to {method}")
            found = proto.parse_length_prefixed(answer, data)
        except (DecodeError, ValueError) as error:
            raise CallLost(f"{self._server} gave an answer to {method} that cannot be read: {error}") from error
        return answer() if found is None else found

    def _read(self, size: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            self._socket.settimeout(_remaining_s(deadline))
            part = self._socket.recv(min(size - len(data), 1 << 20))
            if not part:
                raise ConnectionResetError("connection closed")
            data += part
        return bytes(data)

    def _lost(self, error: OSError) -> CallLost:
        return CallLost(f"{self._server}: {(error.strerror or str(error)).lower()}")

    def interrupt(self) -> None:
        """End the call that another thread waits for."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()


def _remaining_s(deadline: float) -> float:
    """Return the seconds that are left. Raises TimeoutError at the end: 0 means no timeout to sockets."""
    if (remaining_s := deadline - time.monotonic()) <= 0:
        raise TimeoutError("timed out")
    return remaining_s


def _user_name() -> str:
    """Return the name that HBase's own clients would give, as the system has it; HBase checks it only by its ACLs."""
    with contextlib.suppress(OSError, KeyError):
        return getpass.getuser()
    return f"uid-{os.getuid()}"
