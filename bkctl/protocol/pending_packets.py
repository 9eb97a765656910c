"""Requests on a client's connection that wait for their answers; in protocol v2, by what its answers repeat of them.

v2 has no transaction id. Its answers repeat operation, ledger and entry, so equal requests are answered first in, first
out. An answer does not distinguish a fencing read from a plain one, or a recovery add from another: a plain read's
answer, taken for a fencing read's, would prove a fence that never was. So of two such requests for one entry, the
second is held back until the first is answered.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from bkctl.errors import BkctlError
from bkctl.protocol.messages import AddRequest, ReadRequest, Request, Response
from bkctl.protocol.v2 import Key

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
    """The requests of one v2 connection: sent, held back, and given up while their answers are still to come."""

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
