"""A client's TCP connection to a bookie: correlation, timeouts, START_TLS, what a bookie without scopes never gets.

Its framing serves both ends; the bookie's is `server.py`. Both are asyncio protocols that receive straight into their
own buffer (no streams) and write once a loop tick.
A decoded body is a view of that buffer and keeps it alive; a new buffer is taken instead of reusing one in view.
Source: PerChannelBookieClient, LengthFieldBasedFrameDecoder.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import ssl
from collections import deque
from collections.abc import Coroutine
from typing import Any, Final, TypeAlias, TypeVar, cast

from bkctl.errors import BkctlError, BookieUnavailable, ProtocolError, TimedOut, UsageError
from bkctl.ids import I64_MAX, LedgerId
from bkctl.protocol import v2, v3
from bkctl.protocol.framing import WRITE_BUFFER_BYTES_MAX, FramedProtocol
from bkctl.protocol.messages import (
    FRAME_SIZE_BYTES_MAX,
    LAST_ENTRY,
    LEDGER_REQUESTS,
    LEDGER_RESPONSES,
    AddRequest,
    BatchReadRequest,
    Protocol,
    ReadLacRequest,
    ReadLacResponse,
    ReadRequest,
    ReadResponse,
    Request,
    Response,
    StartTlsRequest,
    Status,
    scope_of,
)

_T = TypeVar("_T")

#: The ledger that only a bookie with scopes answers with its scope (design: lock 2). Nothing is ever stored there.
SCOPE_PROBE: Final = LedgerId(1, I64_MAX)
_PROBE: Final = ReadLacRequest(SCOPE_PROBE)

#: Answers still to come that nobody waits for, above which the connection is given up.
OWED_MAX: Final = 10_000

#: How long a client that closes waits for the bookie to say so too: Apache's never does.
TLS_FAREWELL_S: Final = 0.5


def run(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run `coroutine` to its end on a new event loop, uvloop's where it is installed; returns its result."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(coroutine)
    return uvloop.run(coroutine)


#: What waits for an answer: its future, its request, and the tick at which it has failed.
_Waiting: TypeAlias = tuple["asyncio.Future[Response]", Request, int]
_TICKS_PER_TIMEOUT: Final = 8


class BookieConnection(FramedProtocol):
    """A client's connection to one bookie; made by `open`. All of it belongs to the event loop's thread.

    Any number of requests may be in flight. v3 answers are matched by transaction id, v2's by operation, ledger and
    entry (equal requests: first in, first out; batch reads by request id). An answer nobody waits for is dropped.

    v2 answers do not tell a fencing read from a plain one, or a recovery add from another; taken for the answer of a
    fencing read, a plain one's would prove a fence that never was. So of two such requests for one entry the second
    waits here until the first is answered; when that does not come in time, the connection is given up.
    """

    def __init__(self, bookie_id: str, protocol: Protocol, timeout_s: float, frame_size_bytes_max: int) -> None:
        super().__init__(frame_size_bytes_max)
        self.bookie_id = bookie_id
        self.protocol = protocol
        self._is_v2 = False  # also with Protocol.V2 the TLS request before is v3
        self._upgrading = False
        self._frame_size_max = frame_size_bytes_max
        self._timeout_s = timeout_s
        self._tick_s = timeout_s / _TICKS_PER_TIMEOUT
        self._tick = 0
        self._ticker: asyncio.TimerHandle | None = None
        self._txn_id = 0
        self._calls: dict[int, _Waiting] = {}
        self._packets: dict[v2.Key, _Waiting | deque[_Waiting]] = {}
        self._held: dict[v2.Key, deque[_Waiting]] = {}  # not sent yet
        self._owed: dict[v2.Key, int] = {}  # answers to come that nobody waits for any more
        self._scopes: bool | None = None
        self._probe: asyncio.Future[Response] | None = None
        self._failure: BkctlError | None = None
        self._writable: asyncio.Future[None] | None = None

    @classmethod
    async def open(
        cls,
        host: str,
        port: int,
        *,
        bookie_id: str,
        protocol: Protocol = Protocol.V3,
        tls: ssl.SSLContext | None = None,
        timeout_s: float = 5.0,
        frame_size_bytes_max: int = FRAME_SIZE_BYTES_MAX,
    ) -> BookieConnection:
        """Connect to the bookie at `host`:`port`, with START_TLS when `tls` is given.

        `timeout_s` bounds connecting, and each request after it (a long poll: beside its own wait). `bookie_id` is the
        name in errors. Raises BookieUnavailable when the bookie cannot be reached or refuses TLS, ProtocolError when
        it answers START_TLS with something else.
        """
        loop = asyncio.get_running_loop()
        where = f"Bookie {bookie_id}" if bookie_id == f"{host}:{port}" else f"Bookie {bookie_id} at {host}:{port}"
        made: list[BookieConnection] = []

        def factory() -> BookieConnection:
            made.append(cls(bookie_id, protocol, timeout_s, frame_size_bytes_max))
            return made[-1]

        try:
            async with asyncio.timeout(timeout_s):
                _, connection = await loop.create_connection(factory, host, port)
                if tls is not None:
                    await connection._start_tls(tls, host)
        except TimeoutError as error:
            raise BookieUnavailable(f"{where} cannot be reached: no answer within {timeout_s:g} s") from error
        except OSError as error:
            is_tls = isinstance(error, ssl.SSLError)
            reason = error.strerror or str(error) or "the connection was closed"
            if error.errno is not None and error.errno > 0 and not is_tls:
                reason = os.strerror(error.errno)  # asyncio says `Connect call failed ('127.0.0.1', 3181)`
            what = "and this client do not agree on TLS" if is_tls else "cannot be reached"
            raise BookieUnavailable(f"{where} {what}: {reason}") from error
        except (ValueError, OverflowError) as error:  # what was registered is no host name, or no port
            raise BookieUnavailable(f"{where} cannot be reached: {error}") from error
        else:
            connection._is_v2 = protocol is Protocol.V2
            made.clear()
            return connection
        finally:
            for failed in made:
                failed._abort()

    async def _start_tls(self, context: ssl.SSLContext, host: str) -> None:
        self._upgrading = True
        answer = await self.send(StartTlsRequest())
        if answer.status is not Status.EOK:
            raise BookieUnavailable(f"Bookie {self.bookie_id} refuses TLS ({answer.status.name})")
        if self._start != self._end:
            raise BookieUnavailable(f"Bookie {self.bookie_id} sent more in clear after it had agreed on TLS")
        assert self._transport is not None
        server_name = host if context.check_hostname else None
        transport = await self._loop.start_tls(
            self._transport, self, context, server_hostname=server_name, ssl_shutdown_timeout=TLS_FAREWELL_S
        )
        if transport is None:
            raise BookieUnavailable(f"Bookie {self.bookie_id} closed the connection in the TLS handshake")
        self._use(transport)
        self._upgrading = self._halted = False

    # Requests.

    @property
    def closed(self) -> bool:
        """Whether no request can be sent any more."""
        return self._failure is not None

    def send(self, request: Request) -> asyncio.Future[Response]:
        """Send `request`; the future gives the bookie's answer, whatever its status. Never blocks.

        Raises at once, before a byte is sent: IllegalOperation for what the protocol cannot carry (v2: a scope other
        than 0, and all but plain adds, reads and batch reads; v3: batch reads); UsageError for a master key of the
        wrong size or an entry larger than a frame. The future fails with TimedOut; with BookieUnavailable when the
        connection is lost or closed, or for a scope other than 0 unless `supports_scopes` gave True; with
        ProtocolError when the bookie's answer makes no sense.
        """
        future: asyncio.Future[Response] = self._loop.create_future()
        out = self._out
        count = len(out)
        expiry = self._tick + _TICKS_PER_TIMEOUT + 1
        if self._is_v2:
            key, size = v2.encode_request(request, out)
            if self._refused(future, size, count):
                return future
            waiting = (future, request, expiry)
            if (key in self._packets or self._owed) and self._has_to_wait(key, request):
                del out[count:]
                size = 0
                self._held.setdefault(key, deque()).append(waiting)
            else:
                self._expect(key, waiting)
        else:
            if not self._scopes and scope_of(request) and request is not _PROBE:
                ledger = cast("ReadRequest", request).ledger
                message = f"Bookie {self.bookie_id} cannot serve scopes, so not ledger {ledger}"
                _fail(future, BookieUnavailable(message))
                return future
            txn_id = self._txn_id + 1
            size = v3.encode_request(txn_id, request, out)
            if self._refused(future, size, count):
                return future
            self._txn_id = txn_id
            if type(request) is ReadRequest and request.timeout_ms is not None:
                expiry += math.ceil(request.timeout_ms / 1000 / self._tick_s)
            self._calls[txn_id] = (future, request, expiry)
        if self._ticker is None:
            self._ticker = self._loop.call_later(self._tick_s, self._expire)
        self._queued(size)
        return future

    def _expect(self, key: v2.Key, waiting: _Waiting) -> None:
        earlier = self._packets.setdefault(key, waiting)
        if earlier is not waiting:
            if isinstance(earlier, deque):
                earlier.append(waiting)
            else:
                self._packets[key] = deque((earlier, waiting))

    def _has_to_wait(self, key: v2.Key, request: Request) -> bool:
        """Whether an answer is still to come for `key` that must not be taken for the answer to `request`."""
        if key in self._held:
            return True
        forces = _forces(request)
        earlier = self._packets.get(key)
        if earlier is not None and _forces((earlier[0] if isinstance(earlier, deque) else earlier)[1]) != forces:
            return True
        return forces and key in self._owed

    def _send_held(self, key: v2.Key) -> None:
        """Send what was held back for `key`, up to the first request that still has to wait."""
        held = self._held.pop(key)
        while held:
            waiting = held[0]
            if not waiting[0].done():
                if self._has_to_wait(key, waiting[1]):
                    self._held[key] = held
                    return
                self._expect(key, waiting)
                self._queued(v2.encode_request(waiting[1], self._out)[1])
            held.popleft()

    def _tend_held(self, tick: int) -> bool:
        """Send what need not wait any more; False when a request failed that waited too long."""
        for key in list(self._held):
            self._send_held(key)
            for waiting in self._held.get(key, ()):
                if waiting[2] <= tick and not waiting[0].done():
                    self._time_out(waiting)
                    return False
        return True

    def _refused(self, future: asyncio.Future[Response], size: int, count: int) -> bool:
        """Whether the frame just appended behind `count` pieces must not leave; takes it back then."""
        if size <= self._frame_size_max and self._failure is None:
            return False
        del self._out[count:]
        if self._failure is None:
            raise UsageError(f"A request of {size} bytes does not fit in a frame of {self._frame_size_max}")
        _fail(future, _copy(self._failure))
        return True

    async def drain(self) -> None:
        """Wait while more is queued than the bookie takes. Raises BookieUnavailable when the connection is lost."""
        if self._out_size > WRITE_BUFFER_BYTES_MAX // 2:
            self._flush()
        while self._write_paused and self._failure is None:
            if self._writable is None:
                self._writable = self._loop.create_future()
            await asyncio.shield(self._writable)
        if self._failure is not None:
            raise _copy(self._failure)

    async def supports_scopes(self) -> bool:
        """Whether the bookie serves scopes other than 0; asked once a connection (READ_LAC of SCOPE_PROBE).

        Only an answer that echoes the scope is True; a bare status or none in time is False for this connection, and
        so is v2. Raises BookieUnavailable when the connection is lost. Source: BP-35, lock 2.
        """
        if self._scopes is None and self._is_v2:
            self._scopes = False
        if self._scopes is None:
            if self._probe is None:
                self._probe = self.send(_PROBE)
            try:
                answer = await asyncio.shield(self._probe)
            except (TimedOut, ProtocolError):
                self._scopes = False
            else:
                if self._scopes is None:
                    # An answer with another ledger or scope than SCOPE_PROBE was a ProtocolError.
                    self._scopes = isinstance(answer, ReadLacResponse)
        if self._failure is not None:
            raise BookieUnavailable(self._failure.message)
        return self._scopes

    # Answers.

    def _frame(self, buffer: memoryview, at: int, end: int) -> None:
        if self._is_v2:
            key, response = v2.decode_response(buffer, at, end)
            waiting = self._packets.pop(key, None)
            if isinstance(waiting, deque):
                queue, waiting = waiting, waiting.popleft()
                if queue:
                    self._packets[key] = queue
            if waiting is not None:
                future = waiting[0]
                if not future.done():
                    future.set_result(response)
            elif key in self._owed:
                self._owed[key] -= 1
                if not self._owed[key]:
                    del self._owed[key]
            if key in self._held:
                self._send_held(key)
            return
        txn_id, operation, answer, problem = v3.decode_response(buffer, at, end)
        call = self._calls.pop(txn_id, None)
        if call is None:
            return
        future, request, _ = call
        if self._upgrading:
            # What follows in clear is not the bookie's word.
            self._halted = True
        if future.done():
            return
        if operation != v3.OPERATIONS[type(request)]:
            problem = f"operation {operation} in answer to {type(request).__name__}"
        elif answer is None:
            problem = f"an answer to {type(request).__name__} that makes no sense: {problem}"
        elif type(answer) in LEDGER_RESPONSES and answer[1] != request[0]:  # type: ignore[misc]
            asked, told = cast("ReadRequest", request).ledger, cast("ReadResponse", answer).ledger
            problem = f"an answer for ledger {told!r} to {type(request).__name__} of {asked!r}"
            if told[0] != asked[0]:
                self._scopes = False
        else:
            future.set_result(answer)
            return
        _fail(future, ProtocolError(f"Bookie {self.bookie_id} sent {problem}"))

    def _expire(self) -> None:
        self._tick = tick = self._tick + 1
        for txn_id in [txn_id for txn_id, call in self._calls.items() if call[2] <= tick]:
            self._time_out(self._calls.pop(txn_id))
        if self._packets:
            for key, waiting in list(self._packets.items()):
                if isinstance(waiting, deque):
                    while waiting and waiting[0][2] <= tick:
                        self._time_out(waiting.popleft())
                        self._owed[key] = self._owed.get(key, 0) + 1
                    if not waiting:
                        del self._packets[key]
                elif waiting[2] <= tick:
                    del self._packets[key]
                    self._time_out(waiting)
                    self._owed[key] = self._owed.get(key, 0) + 1
        if len(self._owed) > OWED_MAX or not self._tend_held(tick):
            self._fail(BookieUnavailable(f"Bookie {self.bookie_id} left too much without an answer"))
            self._abort()
            return
        more = self._calls or self._packets or self._held
        self._ticker = self._loop.call_later(self._tick_s, self._expire) if more else None

    def _time_out(self, waiting: _Waiting) -> None:
        future, request, _ = waiting
        if not future.done():
            message = f"Bookie {self.bookie_id} gave no answer within {self._timeout_s:g} s to {_described(request)}"
            _fail(future, TimedOut(message, hint="it may be overloaded or cut off; --timeout sets how long to wait"))

    # Life.

    def resume_writing(self) -> None:
        super().resume_writing()
        self._wake_writers()

    def _wake_writers(self) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._writable = None

    def _broken(self, problem: str) -> None:
        self._fail(ProtocolError(f"Bookie {self.bookie_id} sent {problem}"))
        self._abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        reason = f": {exc}" if exc is not None and str(exc) else ""
        self._fail(BookieUnavailable(f"Bookie {self.bookie_id} is unavailable, the connection is lost{reason}"))

    def _fail(self, failure: BkctlError) -> None:
        if self._failure is not None:
            return
        self._failure = failure
        if self._ticker is not None:
            self._ticker.cancel()
            self._ticker = None
        waiting = list(self._calls.values())
        for packet in self._packets.values():
            if isinstance(packet, deque):
                waiting.extend(packet)
            else:
                waiting.append(packet)
        for held in self._held.values():
            waiting.extend(held)
        self._calls.clear()
        self._packets.clear()
        self._held.clear()
        self._owed.clear()
        for future, _, _ in waiting:
            if not future.done():
                _fail(future, _copy(failure))
        self._wake_writers()

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Close once what is queued was sent; requests in flight fail with BookieUnavailable."""
        self._halted = True
        self._fail(BookieUnavailable(f"The connection to bookie {self.bookie_id} is closed"))
        self._flush()
        if self._transport is not None:
            self._transport.close()

    async def wait_closed(self) -> None:
        """Wait until the socket is closed."""
        await asyncio.shield(self._gone)


def _forces(request: Request) -> bool:
    """Whether it is a fencing read or a recovery add."""
    if isinstance(request, ReadRequest):
        return request.fence
    return isinstance(request, AddRequest) and request.recovery_add


def _described(request: Request) -> str:
    """`request` in an operator's words."""
    name = type(request).__name__.removesuffix("Request")
    what = "a request (" + re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower() + ")"
    if type(request) in LEDGER_REQUESTS:
        what += f" of ledger {cast('ReadRequest', request).ledger}"
    if isinstance(request, AddRequest | ReadRequest | BatchReadRequest):
        what += ", the last entry" if request.entry_id == LAST_ENTRY else f", entry {request.entry_id}"
    return what


def _fail(future: asyncio.Future[Response], error: BkctlError) -> None:
    """Fail `future`; a caller that has its answer elsewhere by now need not look (asyncio would complain)."""
    future.set_exception(error)
    future.exception()


def _copy(error: BkctlError) -> BkctlError:
    """The same error anew, since each raise adds to an error's traceback."""
    return type(error)(error.message, hint=error.hint)
