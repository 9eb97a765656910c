"""Connections to bookies: one channel per bookie and protocol, opened at first use and again after a failure.

A channel sends a scoped request only after the connection lock of scopes opened (`BookieConnection.supports_scopes`). A
bookie that does not serve scopes is unavailable to a scoped ledger, whatever it would have answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import socket
import ssl
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import count
from typing import Final, TypeVar
from typing import Protocol as Interface
from weakref import WeakSet

from bkctl.client.placement import Placement, PlacementRules, PolicyKind, capped_weights, region_of
from bkctl.config import ClientConfig
from bkctl.errors import BkctlError, BookieUnavailable
from bkctl.ids import LedgerId
from bkctl.metadata.admin.health import DISABLE_HEALTH_CHECK
from bkctl.metadata.cluster import Cluster, RegisteredBookie
from bkctl.metadata.racks import KnownRacks
from bkctl.protocol.connection import Answered, BookieConnection, FutureAnswer, is_abandoned
from bkctl.protocol.messages import (
    BookieInfoFlags,
    BookieInfoRequest,
    BookieInfoResponse,
    Protocol,
    Request,
    Response,
    Status,
    error_for,
)
from bkctl.tasks import cancel_and_wait

T = TypeVar("T")
R = TypeVar("R")

BACK_OFF_S_MIN: Final = 0.1
BACK_OFF_S_MAX: Final = 5.0
#: Bytes of entries that all recoveries of a client have read ahead.
RECOVERY_BYTES_MAX: Final = 256 << 20
#: Time for which reads and placement prefer other bookies after a failure.
SUSPECT_S: Final = 30.0
DEFAULT_CONFIG: Final = ClientConfig()
#: The longest wait for bookies to tell their free space, before they are taken for as full as the fullest.
WEIGH_S: Final = 2.0
#: Bookies of the client's own region that are read from before one of another region. Source:
#: RegionAwareEnsemblePlacementPolicy.REMOTE_NODE_IN_REORDER_SEQUENCE.
_NEAR_COUNT: Final = 2


class WaitingBytes:
    """Counts bytes of entries that wait to be used, up to `bytes_max`."""

    __slots__ = ("_bytes", "_bytes_max")

    def __init__(self, bytes_max: int) -> None:
        self._bytes, self._bytes_max = 0, bytes_max

    def admit(self, size_bytes: int) -> bool:
        """Count an entry of that size; return False, without counting it, if it is too much."""
        if self._bytes + size_bytes > self._bytes_max:
            return False
        self._bytes += size_bytes
        return True

    def free(self, size_bytes: int) -> None:
        """Count an entry no longer."""
        self._bytes -= size_bytes


class BookieChannel:
    """Requests to one bookie over one protocol. `send` works at any time; the channel connects as needed.

    While the bookie cannot be reached, attempts to connect are at least 0.1 s apart, doubling to 5 s, and requests in
    between fail at once with the last attempt's error.
    """

    __slots__ = ("_attempt", "_connection", "_error", "_failures", "_pool", "_retry_at", "_scoped", "_waiting",
                 "bookie_id", "losses", "protocol", "suspect_until")  # fmt: skip

    def __init__(self, pool: BookiePool, bookie_id: str, protocol: Protocol) -> None:
        self.bookie_id = bookie_id
        self.protocol = protocol
        #: `time.monotonic()` until which other bookies are preferred, because this one failed.
        self.suspect_until = 0.0
        #: Connections that were found closed.
        self.losses = 0
        self._pool = pool
        self._connection: BookieConnection | None = None
        self._scoped: bool | None = None
        self._attempt: asyncio.Task[None] | None = None
        self._waiting: list[tuple[Sequence[Request], bool, Answered]] = []
        self._failures = 0
        self._retry_at = 0.0
        self._error: BkctlError | None = None

    def send(self, request: Request, scoped: bool = False) -> asyncio.Future[Response]:
        """Send `request` (now, or once connected) and return the future of its answer; never blocks.

        The future fails with BookieUnavailable (unreachable, or no scopes for a `scoped` request), TimedOut,
        ProtocolError, IllegalOperation. Its exception needs no retrieval.
        """
        answer = FutureAnswer()
        self.send_run((request,), answer, scoped)
        return answer.future

    def send_run(self, requests: Sequence[Request], answered: Answered, scoped: bool = False) -> None:
        """Send requests of one kind about one ledger, now or once connected; `answered` gets each with its outcome.

        Outcomes come in any order, and the ones known at once before this returns: the responses of `send`, or the
        errors of its future.
        """
        connection = self._connection
        if connection is not None and not connection.closed and (not scoped or self._scoped is not None):
            # The hot path.
            self._forward(connection, requests, scoped, answered)
            return
        if self._pool.closed:
            closed = BookieUnavailable(f"The client is closed, so bookie {self.bookie_id} is not asked")
            _refuse(requests, answered, closed)
            return
        if self._attempt is None:
            if connection is not None and connection.closed:
                self._connection = self._scoped = None
                self.losses += 1
            if self._error is not None and time.monotonic() < self._retry_at:
                _refuse(requests, answered, BookieUnavailable(self._error.message, hint=self._error.hint))
                return
            self._attempt = asyncio.create_task(self._connect())
        self._waiting.append((requests, scoped, answered))

    def failed(self, *, connecting: bool = False) -> None:
        """Prefer other bookies for a while, because this one did not serve a request, or did not connect."""
        self.suspect_until = time.monotonic() + SUSPECT_S
        if not connecting or self._pool.config.bookie_connection_error_quarantine_enabled:
            self._pool.count_error(self.bookie_id)

    async def close(self) -> None:
        """Close the connection; requests that wait for it fail with BookieUnavailable."""
        if self._attempt is not None:
            await cancel_and_wait(self._attempt)
            self._attempt = None
        self._fail_waiting(BookieUnavailable(f"Connection to bookie {self.bookie_id} was closed"))
        if self._connection is not None:
            self._connection.close()
            await self._connection.wait_closed()
            self._connection = None

    async def _connect(self) -> None:
        """Connect once for all waiting requests; ask for the connection lock when a scoped one waits."""
        try:
            connection = self._connection
            if connection is None:
                host, port = await self._pool.address(self.bookie_id)
                connection = await BookieConnection.open(
                    host, port, bookie_id=self.bookie_id, protocol=self.protocol, tls=self._pool.tls,
                    timeout_s=self._pool.timeout_s, connect_timeout_s=self._pool.connect_timeout_s,
                )  # fmt: skip
                self._connection, self._scoped = connection, None
                self._failures, self._error = 0, None
            while self._waiting:
                if self._scoped is None and any(scoped for _, scoped, _ in self._waiting):
                    self._scoped = await connection.supports_scopes()
                waiting, self._waiting = self._waiting, []
                for requests, scoped, answered in waiting:
                    if not is_abandoned(answered):
                        self._forward(connection, requests, scoped, answered)
        except Exception as unexpected:  # noqa: BLE001 - given to the requests that wait
            error = unexpected
            if not isinstance(error, BkctlError):
                error = BookieUnavailable(f"Cannot connect to bookie {self.bookie_id}: {unexpected!r}")
                error.__cause__ = unexpected
            self._failures += 1
            back_off_s = min(BACK_OFF_S_MIN * 2 ** min(self._failures - 1, 10), BACK_OFF_S_MAX)
            self._retry_at = time.monotonic() + back_off_s
            self._error = error
            self._pool.forget_address(self.bookie_id)
            if self._connection is not None:
                self._connection.close()  # `send_run` counts the loss.
            self.failed(connecting=True)
            self._fail_waiting(error)
        finally:
            attempt, self._attempt = self._attempt, None
            waiting, self._waiting = self._waiting, []
            cancelled = BookieUnavailable(f"Connecting to bookie {self.bookie_id} was cancelled")
            for requests, _, answered in waiting:  # no request may wait for ever
                # Later, because a taker may start a task, and this one may be cancelled because its loop ends.
                assert attempt is not None
                attempt.get_loop().call_soon(_refuse, requests, answered, cancelled)

    def _forward(
        self, connection: BookieConnection, requests: Sequence[Request], scoped: bool, answered: Answered
    ) -> None:
        if scoped and not self._scoped:
            problem = f"Bookie {self.bookie_id} does not serve ledger scopes"
            hint = "it needs a bookie that implements BP-35"
            _refuse(requests, answered, BookieUnavailable(problem, hint=hint))
            return
        try:
            connection.send_run(requests, answered)
        except BkctlError as error:
            _refuse(requests, answered, error)

    def _fail_waiting(self, error: BkctlError) -> None:
        waiting, self._waiting = self._waiting, []
        for requests, _, answered in waiting:
            _refuse(requests, answered, error)


class PoolUser(Interface):
    """An object that must know that its pool was closed."""

    def client_closed(self) -> None: ...


class BookiePool:
    """The channels of one client, and the addresses of its bookies.

    `addresses` overrides registered ones. `config` has the settings of placement and reads. Not thread-safe: a pool
    belongs to one event loop.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        protocol: Protocol,
        tls: ssl.SSLContext | None,
        timeout_s: float,
        addresses: Mapping[str, tuple[str, int]],
        connect_timeout_s: float | None = None,
        only: Collection[str] | None = None,
        config: ClientConfig = DEFAULT_CONFIG,
    ) -> None:
        self.cluster = cluster
        self.protocol = protocol
        self.tls = tls
        self.timeout_s, self.connect_timeout_s = timeout_s, connect_timeout_s
        #: Set by `close`: the pool does not connect any more.
        self.closed = False
        #: Pipelines that `close` tells, while they live.
        self.users: WeakSet[PoolUser] = WeakSet()
        #: Entries that recoveries read ahead, of all ledgers together.
        self.recovery_bytes = WaitingBytes(RECOVERY_BYTES_MAX)
        self._overrides = dict(addresses)
        self._only = only
        self.config = config
        self._racks: KnownRacks | None = None
        #: Free bytes by bookie id, and the `time.monotonic()` of the next question.
        self._free_bytes: dict[str, int] = {}
        self._weigh_at_s: dict[str, float] = {}
        #: Errors of bookies in the interval that ends then, and the end of each quarantine.
        self._errors, self._errors_until_s = Counter[str](), 0.0
        self._quarantined_until_s: dict[str, float] = {}
        #: Writable bookies, and when they were registered last; the ones that left lately.
        self._seen: dict[str, tuple[RegisteredBookie, float]] = {}
        self._left: frozenset[str] = frozenset()
        #: As `placement` returned it last, with the racks of all bookies before.
        self._placement = Placement()
        #: Bookies of other regions than the client's.
        self._far: frozenset[str] = frozenset()
        self._addresses: dict[str, tuple[str, int]] = {}
        self._channels: dict[tuple[str, Protocol], BookieChannel] = {}
        #: Ids for batch reads, unique among the requests of this client.
        self.request_ids = count(1)

    def channel(self, bookie_id: str, protocol: Protocol | None = None) -> BookieChannel:
        """Return the channel to a bookie over `protocol` (None: the client's)."""
        key = (bookie_id, protocol or self.protocol)
        channel = self._channels.get(key)
        if channel is None:
            channel = self._channels[key] = BookieChannel(self, *key)
        return channel

    def suspects(self) -> set[str]:
        """Return the bookies that failed within the last SUSPECT_S, are in quarantine, or left lately."""
        now = time.monotonic()
        failed = {bookie_id for (bookie_id, _), channel in list(self._channels.items()) if channel.suspect_until > now}
        quarantined = (bookie_id for bookie_id, until_s in list(self._quarantined_until_s.items()) if until_s > now)
        return failed.union(quarantined, self._left)

    def count_error(self, bookie_id: str) -> None:
        """Count an error of a bookie; with too many in an interval, put it in quarantine.

        Source: BookKeeper.checkForFaultyBookies.
        """
        config, now = self.config, time.monotonic()
        if not config.bookie_health_check_enabled:
            return
        if now >= self._errors_until_s:
            self._errors.clear()
            self._errors_until_s = now + config.bookie_health_check_interval_seconds
        self._errors[bookie_id] += 1
        is_faulty = self._errors[bookie_id] == config.bookie_error_threshold_per_interval
        if is_faulty and random.random() <= config.bookie_quarantine_ratio:
            self._quarantined_until_s[bookie_id] = now + config.bookie_quarantine_time_seconds

    async def address(self, bookie_id: str) -> tuple[str, int]:
        """Return host and port: the override, else the registered `bookie-rpc` endpoint, else the id's own.

        Raises BookieUnavailable when none of them exists.
        """
        found = self._overrides.get(bookie_id) or self._addresses.get(bookie_id)
        if found is None:
            registered = await asyncio.to_thread(self.cluster.bookies.get, bookie_id)
            found = (registered or RegisteredBookie(bookie_id, "down", None)).address
            if found is None:
                raise BookieUnavailable(
                    f"Bookie {bookie_id} is not registered, and its id is not HOST:PORT",
                    hint=f"start it, or say where it is with --bookie-address {bookie_id}=HOST:PORT",
                )
            self._addresses[bookie_id] = found
        return found

    def forget_address(self, bookie_id: str) -> None:
        """Look up the bookie's registration again before the next attempt."""
        self._addresses.pop(bookie_id, None)

    def registered(self) -> list[RegisteredBookie]:
        """Return the bookies that are up and may get new entries, and those that left lately. Blocks.

        The latter (networkTopologyStabilizePeriodSeconds) are among the `suspects`. While the store disables health
        checks, no bookie is in quarantine.
        """
        if self._quarantined_until_s and self.cluster.store.get(DISABLE_HEALTH_CHECK) is not None:
            self._quarantined_until_s.clear()
        bookies = self.cluster.bookies.list(include_down=False)
        if (stable_s := self.config.network_topology_stabilize_period_seconds) > 0:
            now, up = time.monotonic(), {bookie.bookie_id for bookie in bookies}
            self._seen |= {bookie.bookie_id: (bookie, now) for bookie in bookies if bookie.state == "rw"}
            left = [bookie for bookie, seen_s in list(self._seen.values()) if seen_s > now - stable_s]
            left = [bookie for bookie in left if bookie.bookie_id not in up]
            self._left = frozenset(bookie.bookie_id for bookie in left)
            bookies = [*bookies, *left]
        return bookies if self._only is None else [bookie for bookie in bookies if bookie.bookie_id in self._only]

    async def weigh(self) -> None:
        """Ask the bookies for their free space, if placement goes by it and they were not asked lately.

        Source: BookieInfoReader.
        """
        if not self.config.disk_weight_based_placement_enabled or self._only is not None:
            return
        now = time.monotonic()
        registered = {bookie.bookie_id for bookie in await asyncio.to_thread(self.registered)}
        due = {
            self.channel(bookie_id, Protocol.V3).send(BookieInfoRequest(BookieInfoFlags.FREE_DISK_SPACE)): bookie_id
            for bookie_id in registered
            if self._weigh_at_s.get(bookie_id, 0.0) <= now
        }
        self._weigh_at_s |= dict.fromkeys(due.values(), now + self.config.get_bookie_info_retry_interval_seconds)
        done = (await asyncio.wait(due, timeout=WEIGH_S))[0] if due else ()
        for answer in done:
            with contextlib.suppress(BkctlError):
                found = answer.result()
                if isinstance(found, BookieInfoResponse) and found.status is Status.EOK:
                    self._free_bytes[due[answer]] = max(found.free_disk_space or 0, 0)
                    self._weigh_at_s[due[answer]] = now + self.config.get_bookie_info_interval_seconds

    def placement(self, bookies: Iterable[RegisteredBookie], *ensembles: Iterable[str]) -> Placement:
        """Return the racks of `bookies` and of the bookies of `ensembles`, which may be down, and the rules. Blocks.

        Raises as `KnownRacks.racks` and `PlacementRules.of`.
        """
        if self._only is not None:
            return Placement()
        config = self.config
        rules = PlacementRules.of(config)
        if self._racks is None:
            script = config.network_topology_script_file_name
            self._racks = KnownRacks(self.cluster.store, script, must_be_known=rules.refuses(new=True))
        known = {bookie.bookie_id: bookie for bookie in bookies}
        for bookie_id in {bookie_id for ensemble in ensembles for bookie_id in ensemble} - known.keys():
            known[bookie_id] = RegisteredBookie(bookie_id, "down", None)
        racks, local = self._racks.racks(known.values()), None
        if racks and not config.ignore_local_node_in_placement_policy:
            here = _local_id(by_name=config.use_hostname_resolve_local_node_placement_policy)
            local = self._racks.racks([RegisteredBookie(here, "down", None)]).get(here) if here else None
        weights = None
        if config.disk_weight_based_placement_enabled:
            free = {bookie_id: self._free_bytes.get(bookie_id, 0) for bookie_id in known}
            weights = capped_weights(free, config.bookie_max_weight_multiple_for_weight_based_placement)
        found = Placement(racks, rules, weights, self._racks.groups(), local)
        self._placement = found._replace(racks={**self._placement.racks, **racks})
        return found

    def acks_domains(self, ensemble: Sequence[str], write_quorum_size: int) -> tuple[list[str], int]:
        """Return what `Placement.acks_domains` does, ([], 0) without enforceMinNumFaultDomainsForWrite.

        The racks are as `placement` found them last: it was called for the ensemble.
        """
        if self._only is not None or not self.config.enforce_min_num_fault_domains_for_write:
            return [], 0
        return self._placement.acks_domains(ensemble, write_quorum_size)

    async def find_near(self, ensembles: Iterable[Iterable[str]]) -> None:
        """Find the bookies of the ensembles that are in other regions, if the placement policy goes by regions.

        Errors are dropped: reads then go to the first bookie of a write set.
        """
        if not self.config.reorder_read_sequence_enabled:
            return
        with contextlib.suppress(BkctlError):
            if PlacementRules.of(self.config).kind is PolicyKind.REGIONS:
                found = await asyncio.to_thread(lambda: self.placement(self.cluster.bookies.list(), *ensembles))
                if found.local is not None:
                    near = region_of(found.local)
                    self._far = frozenset(name for name, rack in found.racks.items() if region_of(rack) != near)

    def reading_order(self, bookies: Sequence[str], write_set: Sequence[int]) -> Sequence[int]:
        """Return the indexes of a write set in the order of asking: two of the own region, another one, the others.

        Source: reorderReadSequenceWithRegion.
        """
        if self._far.isdisjoint(bookies):
            return write_set
        near = [index for index in write_set if bookies[index] not in self._far]
        far = [index for index in write_set if bookies[index] in self._far]
        return [*near[:_NEAR_COUNT], *far[:1], *near[_NEAR_COUNT:], *far[1:]]

    async def close(self) -> None:
        """Close every connection; requests fail from now on."""
        self.closed = True
        channels = list(self._channels.values())
        self._channels.clear()
        await asyncio.gather(*(channel.close() for channel in channels))
        for user in list(self.users):
            user.client_closed()


@functools.cache
def _local_id(*, by_name: bool) -> str | None:
    """Return this host's address or name as the id of a bookie on it would have it, None if it is unknown. Blocks."""
    try:
        return f"{socket.getfqdn() if by_name else socket.gethostbyname(socket.gethostname())}:0"
    except OSError:
        return None


def _refuse(requests: Sequence[Request], answered: Answered, error: BkctlError) -> None:
    answered(requests, [error] * len(requests))


def failure(
    future: asyncio.Future[Response], ledger: LedgerId, entry_id: int | None, bookie_id: str
) -> BkctlError | None:
    """Return the error of the request whose `future` is done; None when its status is EOK."""
    if future.cancelled():
        return BookieUnavailable(f"Request to bookie {bookie_id} was cancelled")
    error = future.exception()
    if error is not None and not isinstance(error, BkctlError):
        raise error
    return error_of(future.result() if error is None else error, ledger, entry_id, bookie_id)


def error_of(
    outcome: Response | BkctlError, ledger: LedgerId, entry_id: int | None, bookie_id: str
) -> BkctlError | None:
    """Return the error that the outcome of a request is; None when its status is EOK."""
    if isinstance(outcome, BkctlError):
        return outcome
    status = outcome.status
    if status is Status.EOK:
        return None
    what = f"Ledger {ledger}" if entry_id is None or entry_id < 0 else f"Entry {entry_id} of ledger {ledger}"
    return error_for(status, f"{what}: bookie {bookie_id} answered {status.name}")
