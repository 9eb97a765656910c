"""A client's TCP connection to a bookie: correlation, timeouts, START_TLS, and the connection lock of scopes.

A bookie without scopes ignores the scope of a request and acts on scope 0. Two locks keep scoped requests from it (see
"Scopes beside Apache's bookies" in docs/architecture.md); `BookieConnection.supports_scopes` is the second one.
Source: PerChannelBookieClient.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import math
import os
import re
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, Final, TypeAlias, TypeVar, cast

from bkctl.errors import BkctlError, BookieUnavailable, ProtocolError, TimedOut, UsageError, restated
from bkctl.ids import I64_MAX, LedgerId
from bkctl.protocol import v2, v3
from bkctl.protocol.framing import FramedProtocol
from bkctl.protocol.messages import (
    FRAME_SIZE_BYTES_MAX,
    LAST_ENTRY,
    LEDGER_REQUESTS,
    LEDGER_RESPONSES,
    AddRequest,
    AddResponse,
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
from bkctl.protocol.runs import RESPONSES, V2_OPCODES, encode_run, take_answers
from bkctl.protocol.v2 import Key
from bkctl.tasks import fail

#: A bookie's response, whatever its status, or the error without one.
Outcome: TypeAlias = Response | BkctlError
#: Called with requests and the outcome of each, until each one of a run has had its own, in any order.
Answered: TypeAlias = Callable[[Sequence[Request], Sequence[Outcome]], None]


class FutureAnswer:
    """Gives the outcome of one request to a future; an exception of the future needs no retrieval."""

    __slots__ = ("future",)

    def __init__(self) -> None:
        self.future: asyncio.Future[Response] = asyncio.get_running_loop().create_future()

    def __call__(self, requests: Sequence[Request], outcomes: Sequence[Outcome]) -> None:
        if self.future.done():
            return
        (outcome,) = outcomes
        if isinstance(outcome, BkctlError):
            self.future.set_exception(outcome)
            self.future.exception()
        else:
            self.future.set_result(outcome)


#: A request that waits for its answer: the taker of its outcome, itself, and the tick at which it times out.
PendingRequest: TypeAlias = tuple[Answered, Request, int]


class PendingPackets:
    """The requests of one v2 connection: sent, held back, and given up while their answers are still to come.

    v2 has no transaction id. Its answers repeat operation, ledger and entry, so equal requests are answered first in,
    first out. An answer does not distinguish a fencing read from a plain one, or a recovery add from another: a plain
    read's answer, taken for a fencing read's, would prove a fence that never was. So of two such requests for one
    entry, the second is held back until the first is answered.
    """

    __slots__ = ("_send", "held", "owed", "sent")

    def __init__(self, send: Callable[[Request], None]) -> None:
        self._send = send
        self.sent: dict[Key, PendingRequest | deque[PendingRequest]] = {}
        #: Requests that `must_hold`, until they may be sent.
        self.held: dict[Key, deque[PendingRequest]] = {}
        #: Number of answers to come to requests that timed out.
        self.owed: dict[Key, int] = {}

    def expect(self, key: Key, pending: PendingRequest) -> None:
        """Expect an answer to a request that was sent."""
        earlier = self.sent.setdefault(key, pending)
        if earlier is not pending:
            if isinstance(earlier, deque):
                earlier.append(pending)
            else:
                self.sent[key] = deque((earlier, pending))

    def must_hold(self, key: Key, request: Request) -> bool:
        """Return True if an answer is still to come for `key` that could be mistaken for the answer to `request`."""
        if key in self.held:
            return True
        forces = _forces(request)
        earlier = self.sent.get(key)
        if earlier is not None and _forces((earlier[0] if isinstance(earlier, deque) else earlier)[1]) != forces:
            return True
        return forces and key in self.owed

    def first_of(self, key: Key, queue: deque[PendingRequest] | None) -> PendingRequest | None:
        """Return the request of an answer for `key`, from a `queue` taken out of `sent`; None without one."""
        if queue is not None:
            pending = queue.popleft()
            if queue:
                self.sent[key] = queue
            return pending
        if key in self.owed:
            self.owed[key] -= 1
            if not self.owed[key]:
                del self.owed[key]
        return None

    def send_held(self, key: Key) -> None:
        """Send the requests held back for `key`, up to the first one that still has to wait."""
        held = self.held.pop(key)
        while held:
            pending = held[0]
            if not is_abandoned(pending[0]):
                if self.must_hold(key, pending[1]):
                    self.held[key] = held
                    return
                self.expect(key, pending)
                self._send(pending[1])
            held.popleft()

    def expire(self, tick: int) -> Iterator[PendingRequest]:
        """Take out the sent requests that time out at `tick`; their answers are owed from now on."""
        for key, pending in list(self.sent.items()):
            queue = pending if isinstance(pending, deque) else deque((pending,))
            while queue and queue[0][2] <= tick:
                self.owed[key] = self.owed.get(key, 0) + 1
                late = queue.popleft()
                if not queue:
                    del self.sent[key]
                yield late

    def expire_held(self, tick: int) -> PendingRequest | None:
        """Send the held requests that need not wait any more; return the first other one that times out at `tick`."""
        for key in list(self.held):
            self.send_held(key)
            for pending in self.held.get(key, ()):
                if pending[2] <= tick and not is_abandoned(pending[0]):
                    return pending
        return None

    def clear(self) -> Iterator[PendingRequest]:
        """Take out all requests."""
        for pending in self.sent.values():
            yield from pending if isinstance(pending, deque) else (pending,)
        for held in self.held.values():
            yield from held
        self.sent.clear()
        self.held.clear()
        self.owed.clear()


def is_abandoned(answered: Answered) -> bool:
    """Return True if the caller of a request cancelled its future."""
    return isinstance(answered, FutureAnswer) and answered.future.done()


def _forces(request: Request) -> bool:
    """Return True for a fencing read or a recovery add."""
    if isinstance(request, ReadRequest):
        return request.fence
    return isinstance(request, AddRequest) and request.recovery_add


_T = TypeVar("_T")

#: The ledger that the connection lock asks about: only a bookie with scopes echoes its scope. It never has entries.
SCOPE_PROBE: Final = LedgerId(1, I64_MAX)
_PROBE: Final = ReadLacRequest(SCOPE_PROBE)

#: Keys of timed-out v2 requests with answers still to come, above which the connection is given up.
OWED_MAX: Final = 10_000

#: Time that a closing client waits until the bookie has received what is queued, and for the bookie's own TLS closure,
#: which Apache's never sends.
FAREWELL_S: Final = 0.5


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop, uvloop's where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def run(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run `coroutine` on a `new_event_loop`, and return its result."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(coroutine)


async def _addresses(host: str, port: int) -> list[str]:
    """Return the addresses of a host, at least one. Raises OSError, UnicodeError.

    A thread looks the name up: the few threads of an event loop would let look-ups wait for each other, and the end of
    the loop for all of them.
    """
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        return [host]
    loop = asyncio.get_running_loop()
    found: asyncio.Future[list[str]] = loop.create_future()

    def settle(addresses: list[str], error: Exception | None) -> None:
        if error is not None:
            fail(found, error)
        elif not found.done():
            found.set_result(addresses)

    def look_up() -> None:
        addresses: list[str] = []
        problem: Exception | None = None
        try:
            rows = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            addresses = list(dict.fromkeys(str(address[0]) for *_, address in rows))
        except Exception as error:  # noqa: BLE001 - raised where the addresses are awaited
            problem = error
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, addresses, problem)

    threading.Thread(target=look_up, name="look-up", daemon=True).start()
    return await found


_TICKS_PER_TIMEOUT: Final = 8


class BookieConnection(FramedProtocol):
    """A client's connection to one bookie, created by `open`. Use it from the event loop's thread only.

    Any number of requests may be in flight. v3 answers are matched by transaction id, v2's by operation, ledger and
    entry (batch reads by request id; see PendingPackets). Late answers are dropped.
    """

    def __init__(self, bookie_id: str, timeout_s: float) -> None:
        super().__init__(FRAME_SIZE_BYTES_MAX)
        self.bookie_id = bookie_id
        self._is_v2 = False  # until START_TLS, which is v3 even with Protocol.V2, is over
        self._upgrading = False
        self._timeout_s = timeout_s
        self._tick_s = timeout_s / _TICKS_PER_TIMEOUT
        self._tick = 0
        #: Since when the bookie reads too slowly, in ticks.
        self._congested_ticks = 0
        #: Runs the next `_expire`, or after `close` the `_abort`.
        self._ticker: asyncio.TimerHandle | None = None
        self._txn_id = 0
        self._calls: dict[int, PendingRequest] = {}
        self._packets = PendingPackets(lambda request: self._queued(v2.encode_request(request, self._out)[1]))
        self._scopes: bool | None = None
        self._probe: asyncio.Future[Response] | None = None
        self._failure: BkctlError | None = None

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
        connect_timeout_s: float | None = None,
    ) -> BookieConnection:
        """Connect to the bookie at `host`:`port`, with START_TLS when `tls` is given.

        `timeout_s` bounds each request (a long poll: beside its own wait), and connecting where `connect_timeout_s` is
        None. `bookie_id` is the name in errors. Raises BookieUnavailable when the bookie cannot be reached or refuses
        TLS, ProtocolError when it answers START_TLS with another kind of response.
        """
        loop = asyncio.get_running_loop()
        where = f"Bookie {bookie_id}" if bookie_id == f"{host}:{port}" else f"Bookie {bookie_id} at {host}:{port}"
        made: list[BookieConnection] = []
        limit_s = timeout_s if connect_timeout_s is None else connect_timeout_s

        def factory() -> BookieConnection:
            made.append(cls(bookie_id, timeout_s))
            return made[-1]

        try:
            async with asyncio.timeout(limit_s):
                *others, last = await _addresses(host, port)
                for address in others:
                    with contextlib.suppress(OSError):
                        _, connection = await loop.create_connection(factory, address, port)
                        break
                else:
                    _, connection = await loop.create_connection(factory, last, port)
                if tls is not None:
                    await connection._start_tls(tls, host)
        except TimeoutError as error:
            raise BookieUnavailable(f"{where} cannot be reached: no answer within {limit_s:g} s") from error
        except OSError as error:
            is_tls = isinstance(error, ssl.SSLError)
            reason = error.strerror or str(error) or "the connection was closed"
            if error.errno is not None and error.errno > 0 and not is_tls:
                reason = os.strerror(error.errno)  # asyncio says `Connect call failed ('127.0.0.1', 3181)`
            what = "and this client do not agree on TLS" if is_tls else "cannot be reached"
            raise BookieUnavailable(f"{where} {what}: {reason}") from error
        except (ValueError, OverflowError) as error:  # the registered address is not a host name and port
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
        server_name = host if context.check_hostname else None
        transport = self._transport and await self._loop.start_tls(
            self._transport, self, context, server_hostname=server_name, ssl_shutdown_timeout=FAREWELL_S
        )
        if transport is None:
            raise BookieUnavailable(f"Bookie {self.bookie_id} closed the connection in the TLS handshake")
        self._use(transport)
        self._upgrading = self._halted = False

    # Requests.

    @property
    def closed(self) -> bool:
        """True once no request can be sent any more."""
        return self._failure is not None

    def send(self, request: Request) -> asyncio.Future[Response]:
        """Send `request`; the future gives the bookie's answer, whatever its status. Never blocks.

        Raises at once, before a byte is sent: IllegalOperation for what the protocol cannot carry (v2: a scope other
        than 0, and all but plain adds, reads and batch reads; v3: batch reads); UsageError for a master key of the
        wrong size or an entry larger than a frame. The future fails with TimedOut; with BookieUnavailable when the
        connection is lost or closed, or for a scope other than 0 unless `supports_scopes` gave True; with
        ProtocolError when the bookie's answer makes no sense.
        """
        answer = FutureAnswer()
        self.send_run((request,), answer)
        return answer.future

    def send_run(self, requests: Sequence[Request], answered: Answered) -> None:
        """Send requests of one kind about one ledger in one write; `answered` gets each of them with its outcome.

        Outcomes come in any order: the responses of `send`, or the errors of its future. Raises as `send` does if the
        first request cannot be carried; the error of a later one is its outcome.
        """
        problem = self._failure
        if problem is None and not self._is_v2 and not self._scopes and scope_of(requests[0]):
            ledger = cast("ReadRequest", requests[0]).ledger
            message = f"Bookie {self.bookie_id} cannot serve scopes, so not ledger {ledger}"
            problem = None if requests[0] is _PROBE else BookieUnavailable(message)
        if problem is not None:
            answered(requests, [restated(problem) for _ in requests])
            return
        is_idle = not (self._calls or self._packets.sent or self._out)
        if not self._queue_run(requests, answered):
            unsent = iter(requests)
            try:
                self._queue(unsent, answered)
            except BkctlError as error:
                sent_count = len(requests) - 1 - len(list(unsent))
                if not sent_count:
                    raise
                unsent_ones = requests[sent_count:]
                answered(unsent_ones, [restated(error) for _ in unsent_ones])
        if self._ticker is None:
            self._ticker = self._loop.call_later(self._tick_s, self._expire)
        if is_idle:  # nothing that comes in this turn is worth the wait of a caller who waits for each answer
            self._flush()
        else:
            self._queued(0)

    def _queue_run(self, requests: Sequence[Request], answered: Answered) -> bool:
        """Queue plain adds or reads as one piece; return False, with nothing queued, for other requests."""
        opcode = V2_OPCODES.get(type(requests[0]))
        if opcode is None:
            return False
        expiry = self._tick + _TICKS_PER_TIMEOUT + 1
        waiting = [(answered, request, expiry) for request in requests]
        packets, txn_id = self._packets, self._txn_id + 1
        fresh: dict[v2.Key, PendingRequest] = {}
        if self._is_v2:
            keys = [(opcode, request[0][1], request[1]) for request in cast("Sequence[ReadRequest]", requests)]
            fresh = dict(zip(keys, waiting, strict=True))
            if len(fresh) < len(waiting) or packets.owed or not packets.sent.keys().isdisjoint(fresh):
                return False
        frames = encode_run(self._is_v2, txn_id, requests, self._body_size_max)
        if frames is None:
            return False
        if self._is_v2:
            packets.sent.update(fresh)
        else:
            self._calls.update(enumerate(waiting, txn_id))
            self._txn_id += len(waiting)
        self._out.append(frames)
        self._out_size += len(frames)
        return True

    def _queue(self, requests: Iterable[Request], answered: Answered) -> None:
        """Queue requests frame by frame."""
        out, packets, is_v2, expiry = self._out, self._packets, self._is_v2, self._tick + _TICKS_PER_TIMEOUT + 1
        for request in requests:
            count, txn_id = len(out), self._txn_id + 1
            key, size = v2.encode_request(request, out) if is_v2 else (None, v3.encode_request(txn_id, request, out))
            if size > FRAME_SIZE_BYTES_MAX:
                del out[count:]
                raise UsageError(f"A request of {size} bytes does not fit in a frame of {FRAME_SIZE_BYTES_MAX}")
            pending = answered, request, expiry
            if type(request) is ReadRequest and request.timeout_ms is not None:
                pending = answered, request, expiry + math.ceil(request.timeout_ms / 1000 / self._tick_s)
            if key is None:
                self._txn_id = txn_id
                self._calls[txn_id] = pending
            elif (key in packets.sent or packets.owed) and packets.must_hold(key, request):
                del out[count:]
                packets.held.setdefault(key, deque()).append(pending)
                continue
            else:
                packets.expect(key, pending)
            self._out_size += size

    async def supports_scopes(self) -> bool:
        """Return True if the bookie serves scopes other than 0; asked once per connection (READ_LAC of SCOPE_PROBE).

        This is the connection lock of scopes. Only an answer that echoes the scope opens it; a bare status, no answer
        in time, and v2 leave it shut for this connection. Raises BookieUnavailable when the connection is lost.
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

    def _take_frames(self, buffer: memoryview, at: int, end: int) -> int:
        found = take_answers(self._is_v2, buffer, at, end, self._body_size_max)
        if found is None:
            return at
        stop, keys, responses = found
        (self._deliver_v2 if self._is_v2 else self._deliver_v3)(keys, responses)
        return stop

    def _deliver_v3(self, txn_ids: Sequence[int], responses: Sequence[AddResponse | ReadResponse]) -> None:
        take_call, calls, outcomes = self._calls.pop, list[PendingRequest](), list[Outcome]()
        for txn_id, response in zip(txn_ids, responses, strict=True):
            call = take_call(txn_id, None)
            if call is not None:
                request, kind, outcome = call[1], type(response), cast("Outcome", response)
                if RESPONSES.get(type(request)) is not kind or response[1] != request[0]:  # type: ignore[misc]
                    operation = v3.OPERATIONS[AddRequest if kind is AddResponse else ReadRequest]
                    outcome = self._checked(request, operation, response, "")
                calls.append(call)
                outcomes.append(outcome)
        _give(calls, outcomes)

    def _deliver_v2(self, keys: Sequence[v2.Key], responses: Sequence[Response]) -> None:
        packets, calls, outcomes = self._packets, list[PendingRequest](), list[Response]()
        take = packets.sent.pop
        for key, response in zip(keys, responses, strict=True):
            sent = take(key, None)
            pending = sent if type(sent) is tuple else packets.first_of(key, sent)  # type: ignore[arg-type]
            if pending is not None:
                calls.append(pending)
                outcomes.append(response)
        _give(calls, outcomes)
        if packets.held:
            for key in keys:
                if key in packets.held:
                    packets.send_held(key)

    def _frame(self, buffer: memoryview, at: int, end: int) -> None:
        if self._is_v2:
            key, response = v2.decode_response(buffer, at, end)
            self._deliver_v2((key,), (response,))
            return
        txn_id, operation, answer, problem = v3.decode_response(buffer, at, end)
        call = self._calls.pop(txn_id, None)
        if call is None:
            return
        if self._upgrading:
            # Anything may have sent what follows in clear text.
            self._halted = True
        _give((call,), (self._checked(call[1], operation, answer, problem),))

    def _checked(self, request: Request, operation: int, answer: Response | None, problem: str) -> Outcome:
        """Return an answer, or the error that it does not fit its request."""
        if operation != v3.OPERATIONS[type(request)]:
            problem = f"operation {operation} in answer to {type(request).__name__}"
        elif answer is None:
            problem = f"an answer to {type(request).__name__} that makes no sense: {problem}"
        elif type(answer) in LEDGER_RESPONSES and answer[1] != request[0]:  # type: ignore[misc]
            asked, found = cast("ReadRequest", request).ledger, cast("ReadResponse", answer).ledger
            problem = f"an answer for ledger {found!r} to {type(request).__name__} of {asked!r}"
            if found[0] != asked[0]:
                self._scopes = False
        else:
            return answer
        return ProtocolError(f"Bookie {self.bookie_id} sent {problem}")

    def _expire(self) -> None:
        packets = self._packets
        if not (self._calls or packets.sent or packets.held):
            self._ticker = None
            return
        self._ticker = self._loop.call_later(self._tick_s, self._expire)
        self._tick = tick = self._tick + 1
        self._congested_ticks = self._congested_ticks + 1 if self.is_congested else 0
        is_late = False
        for txn_id in [txn_id for txn_id, call in self._calls.items() if call[2] <= tick]:
            is_late = True
            self._time_out(self._calls.pop(txn_id))
        for pending in packets.expire(tick):
            is_late = True
            self._time_out(pending)
        if is_late and self._congested_ticks > _TICKS_PER_TIMEOUT:
            # Unread frames would stay in memory.
            self._fail(
                BookieUnavailable(f"Bookie {self.bookie_id} did not read its requests for {self._timeout_s:g} s")
            )
            self._abort()
            return
        late = None if len(packets.owed) > OWED_MAX else packets.expire_held(tick)
        if late is not None:
            self._time_out(late)
        if late is not None or len(packets.owed) > OWED_MAX:
            self._fail(BookieUnavailable(f"Bookie {self.bookie_id} left too many requests without an answer"))
            self._abort()

    def _time_out(self, pending: PendingRequest) -> None:
        message = f"Bookie {self.bookie_id} gave no answer within {self._timeout_s:g} s to {_described(pending[1])}"
        error = TimedOut(message, hint="it may be overloaded or cut off; --timeout sets how long to wait")
        _give((pending,), (error,))

    # Life.

    def _broken(self, problem: str) -> None:
        self._fail(ProtocolError(f"Bookie {self.bookie_id} sent {problem}"))
        self._abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        reason = f": {exc}" if exc is not None and str(exc) else ""
        self._fail(BookieUnavailable(f"Bookie {self.bookie_id} is unavailable, the connection is lost{reason}"))

    def _fail(self, failure: BkctlError) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
            self._ticker = None
        if self._failure is not None:
            return
        self._failure = failure
        unanswered = [*self._calls.values(), *self._packets.clear()]
        self._calls.clear()
        _give(unanswered, [restated(failure) for _ in unanswered])

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Close once what is queued was sent, or after FAREWELL_S; requests in flight fail with BookieUnavailable."""
        self._halted = True
        self._fail(BookieUnavailable(f"The connection to bookie {self.bookie_id} is closed"))
        self._flush()
        if self._transport is not None:
            self._transport.close()
            self._ticker = self._loop.call_later(FAREWELL_S, self._abort)


def _give(calls: Sequence[PendingRequest], outcomes: Sequence[Outcome]) -> None:
    """Give requests their outcomes, neighbours of one taker together."""
    first, count = 0, len(calls)
    while first < count:
        answered, end = calls[first][0], first + 1
        while end < count and calls[end][0] is answered:
            end += 1
        try:
            answered([call[1] for call in calls[first:end]], outcomes[first:end])
        except Exception:  # a defect of this taker is none of the others
            if end < count:
                asyncio.get_running_loop().call_soon(_give, calls[end:], outcomes[end:])
            raise
        first = end


def _described(request: Request) -> str:
    """Return `request` in an operator's words."""
    name = type(request).__name__.removesuffix("Request")
    what = "a request (" + re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower() + ")"
    if type(request) in LEDGER_REQUESTS:
        what += f" of ledger {cast('ReadRequest', request).ledger}"
    if isinstance(request, AddRequest | ReadRequest | BatchReadRequest):
        what += ", the last entry" if request.entry_id == LAST_ENTRY else f", entry {request.entry_id}"
    return what
