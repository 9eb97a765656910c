"""Disk space of bookies, as they report it. Source: BookieInfoReader."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Collection, Iterable
from typing import Final, NamedTuple

from bkctl.client.ledger import BookKeeper
from bkctl.errors import BkctlError, ProtocolError, TimedOut
from bkctl.ids import I64_MAX
from bkctl.metadata.admin.health import HealthFinding, health_finding, read_only_finding
from bkctl.metadata.admin.health_codes import HealthCode
from bkctl.metadata.cluster import RegisteredBookie
from bkctl.protocol.messages import BookieInfoFlags, BookieInfoRequest, BookieInfoResponse, Protocol, Status, error_for
from bkctl.tasks import in_order

#: Bookies that are asked at once. A dead one keeps its place for the timeout.
ASKED_AT_ONCE: Final = 256
#: A bookie that takes longer for an answer from memory hangs.
WAIT_S: Final = 5.0
_REQUEST: Final = BookieInfoRequest(BookieInfoFlags.TOTAL_DISK_CAPACITY | BookieInfoFlags.FREE_DISK_SPACE)


class BookieSpace(NamedTuple):
    """A bookie's report on the disks of its ledger directories, in bytes, or the error in place of it."""

    bookie: RegisteredBookie
    total: int | None
    free: int | None
    error: BkctlError | None
    #: Of one request on an open connection, where it was measured.
    latency_ms: float | None = None
    #: It accepted a connection, and did not answer.
    hangs: bool = False

    @property
    def used(self) -> int | None:
        return None if self.total is None or self.free is None else self.total - self.free

    @property
    def used_percent(self) -> float | None:
        """Used part in percent, rounded to one decimal."""
        return round(100 * self.used / self.total, 1) if self.total and self.used is not None else None


async def disk_space(
    bookkeeper: BookKeeper, bookies: Iterable[RegisteredBookie], wait_s: float | None = None
) -> AsyncGenerator[BookieSpace]:
    """Ask bookies for their disk space, ASKED_AT_ONCE at a time, and yield the answers in the order of `bookies`.

    A bookie has `wait_s` to answer, and no more than the timeout of `bookkeeper`. Source: BookieInfoReader.
    """
    answers = in_order(bookies, lambda bookie: _ask(bookkeeper, bookie, wait_s), lambda: ASKED_AT_ONCE)
    async with contextlib.aclosing(answers):
        async for _, space in answers:
            yield space


async def _ask(bookkeeper: BookKeeper, bookie: RegisteredBookie, wait_s: float | None = None) -> BookieSpace:
    try:
        async with asyncio.timeout(wait_s):
            response = await bookkeeper.pool.channel(bookie.bookie_id, Protocol.V3).send(_REQUEST)
    except (BkctlError, TimeoutError) as error:
        if not isinstance(error, BkctlError):
            error = TimedOut(f"Bookie {bookie.bookie_id} did not answer within {wait_s:g} s")
        return BookieSpace(bookie, None, None, error, hangs=isinstance(error, TimedOut) and await _accepts(bookie))
    if response.status is Status.EOK and isinstance(response, BookieInfoResponse):
        total, free = response.total_disk_capacity, response.free_disk_space
        if 0 <= (free or 0) <= (I64_MAX if total is None else total):
            return BookieSpace(bookie, total, free, None)
        text = f"Bookie {bookie.bookie_id} reports impossible disks: {free} of {total} bytes free"
        return BookieSpace(bookie, None, None, ProtocolError(text))
    text = f"Bookie {bookie.bookie_id} answered {response.status.name}"
    problem = ProtocolError(text) if response.status is Status.EOK else error_for(response.status, text)
    return BookieSpace(bookie, None, None, problem)


async def _accepts(bookie: RegisteredBookie) -> bool:
    """Return whether the bookie's address accepts a connection at once."""
    if bookie.address is None:
        return False
    try:
        async with asyncio.timeout(1.0):
            _, writer = await asyncio.open_connection(*bookie.address)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


async def member_space(bookkeeper: BookKeeper, bookies: Iterable[RegisteredBookie]) -> list[BookieSpace]:
    """Return the disk space and the latency of bookies in their order, without numbers for those that are down.

    A bookie has WAIT_S to answer.
    """

    async def ask(bookie: RegisteredBookie) -> BookieSpace:
        if bookie.state == "down":
            return BookieSpace(bookie, None, None, None)
        space = await _ask(bookkeeper, bookie, WAIT_S)
        if space.error is not None:
            return space
        began = time.perf_counter()
        space = await _ask(bookkeeper, bookie, WAIT_S)
        return space._replace(latency_ms=round(1000 * (time.perf_counter() - began), 1))

    return [space async for _, space in in_order(bookies, ask, lambda: ASKED_AT_ONCE)]


async def disk_findings(
    bookkeeper: BookKeeper,
    bookies: Iterable[RegisteredBookie],
    percent_max: float,
    full: Collection[str] = (),
) -> list[HealthFinding]:
    """Return findings: bookies that do not answer, are read-only, or use more than `percent_max` of their disks.

    `full` bookies say that their disks are, by limits of their own. A bookie has WAIT_S to answer. Findings of
    read-only bookies replace the ones of the metadata, which do not know the reason.
    """
    findings = []
    async for space in disk_space(bookkeeper, bookies, WAIT_S):
        bookie_id = space.bookie.bookie_id
        if space.hangs:
            problem = f"It accepts connections, but does not answer within {WAIT_S:g} s"
            findings.append(health_finding(HealthCode.BOOKIE_HUNG, bookie_id, problem))
        elif space.error is not None:
            problem = f"It is registered, but does not answer: {space.error}"
            findings.append(health_finding(HealthCode.BOOKIE_SILENT, bookie_id, problem))
        elif space.bookie.state == "ro":
            findings.append(read_only_finding(bookie_id, space.used_percent, 0 if bookie_id in full else percent_max))
        elif space.used_percent is not None and space.used_percent > percent_max:
            problem = f"{space.used_percent}% of its ledger disks are used"
            findings.append(health_finding(HealthCode.DISK_FULL, bookie_id, problem))
    return findings
