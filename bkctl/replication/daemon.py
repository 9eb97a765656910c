"""Auto-recovery in one process: a vote in each election of auditors, and a replication worker.

If the metadata store is unreachable, or our session ends, votes and locks are given up, and the work restarts when the
store is back (Apache's process exits instead). Source: AutoRecoveryMain, AutoRecoveryService.
"""

from __future__ import annotations

import asyncio
import logging
import math
import ssl
import threading
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from bkctl.client.ledger import TIMEOUT_S, BookKeeper
from bkctl.config import BookieConfig
from bkctl.errors import BkctlError
from bkctl.ids import check_bookie_id
from bkctl.metadata.cluster import Cluster, open_cluster
from bkctl.metadata.store import NO_SECURITY, StoreSecurity
from bkctl.metadata.underreplication import AuditorElection, UnderreplicationLayout
from bkctl.replication.auditor import Auditor, AuditorElector
from bkctl.replication.signals import Signal, opened
from bkctl.replication.stats import AuditorStats, Sample, WorkerStats, auditor_samples, worker_samples
from bkctl.replication.worker import ReplicationWorker
from bkctl.tasks import cancel_and_wait, ended_by_signals, run_together

log: Final = logging.getLogger("bkctl.replication")

BOTH: Final = (False, True)
#: Pauses before a restart; beside a bookie they double.
_RESTART_PAUSE_S: Final = 2.0
_RESTART_PAUSE_S_MAX: Final = 60.0
#: A stop beside a bookie waits this long for requests to a metadata store that does not answer.
STOP_TIMEOUT_S: Final = 60.0


@dataclass(eq=False)
class AutoRecovery:
    """Auto-recovery of one cluster. The caller closes the cluster after `run`, so that no lock remains.

    `bookie_id` identifies this process in votes and locks. `scopes` has False for scope 0, True for the other scopes.
    `tls` and `addresses` are as for `BookKeeper`.
    """

    cluster: Cluster
    config: BookieConfig
    bookie_id: str
    scopes: Collection[bool] = BOTH
    tls: ssl.SSLContext | None = None
    addresses: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    timeout_s: float = TIMEOUT_S

    def __post_init__(self) -> None:
        check_bookie_id(self.bookie_id)
        self.auditor_stats = {scoped: AuditorStats() for scoped in sorted(set(self.scopes))}
        self.worker_stats = WorkerStats()
        self._electors: dict[bool, AuditorElector] = {}

    async def run(self) -> None:
        """Work until cancelled. Raise Unsupported or Corrupt if the cluster's marks cannot be used.

        Raise as `PlacementRules.of`.
        """
        await asyncio.to_thread(UnderreplicationLayout(self.cluster.store).prepare)
        async with BookKeeper(
            self.cluster, tls=self.tls, timeout_s=self.timeout_s, addresses=self.addresses,
            config=self.config,
        ) as bookkeeper:  # fmt: skip
            parts: list[Coroutine[Any, Any, None]] = [self._work(bookkeeper)]
            for scoped in self.auditor_stats:
                election = AuditorElection(self.cluster.store)
                audit = partial(self._audit, bookkeeper, scoped)
                self._electors[scoped] = AuditorElector(election, self.bookie_id, audit, scoped=scoped)
                parts.append(self._electors[scoped].run())
            await run_together(parts)  # No part ends by itself; a failed one ends the others.

    async def _audit(self, bookkeeper: BookKeeper, scoped: bool) -> None:
        await Auditor(bookkeeper, self.config, scoped=scoped, stats=self.auditor_stats[scoped]).run()

    async def _work(self, bookkeeper: BookKeeper) -> None:
        while True:
            worker = ReplicationWorker(
                bookkeeper, self.config, self.bookie_id,
                scopes=self.auditor_stats.keys(), stats=self.worker_stats,
            )  # fmt: skip
            try:
                await worker.run()
            except BkctlError as error:
                log.warning("Replication is interrupted: %s", error)
            await asyncio.sleep(_RESTART_PAUSE_S)

    def samples(self) -> Iterator[Sample]:
        """Yield the counters of the auditors and the worker."""
        for scoped, stats in self.auditor_stats.items():
            elector = self._electors.get(scoped)
            count, elected = (elector.attempt_count, elector.elected) if elector is not None else (0, False)
            yield from auditor_samples(stats, scoped=scoped, attempt_count=count, elected=elected)
        yield from worker_samples(self.worker_stats)


async def serve(auto_recovery: AutoRecovery, *, started: Callable[[], None] = lambda: None) -> None:
    """Run until SIGTERM, SIGINT or SIGHUP; call `started` at the beginning. Raise as `AutoRecovery.run`."""
    stop = Signal()
    for warning in auto_recovery.config.warnings:
        log.warning("%s", warning)
    with ended_by_signals(stop.set):
        running = asyncio.ensure_future(auto_recovery.run())
        started()
        await _until(stop, running)


async def _until(stop: Signal, running: asyncio.Future[None]) -> None:
    """Wait for `stop`, and cancel `running` then; raise the error of `running` if it fails first."""
    try:
        await stop.wait(math.inf, running)
        if running.done():
            running.result()
    finally:
        await cancel_and_wait(running)


@dataclass(eq=False)
class AutoRecoveryThread:
    """Auto-recovery beside a bookie, in its own thread and store session: neither waits for the other.

    After an error it restarts; the bookie is not affected. Source: autoRecoveryDaemonEnabled.
    """

    config: BookieConfig
    bookie_id: str
    security: StoreSecurity = NO_SECURITY
    tls: ssl.SSLContext | None = None
    _is_stopping: threading.Event = field(default_factory=threading.Event, init=False)
    _stop: Signal | None = field(default=None, init=False)
    _auto_recovery: AutoRecovery | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._persist, name="auto-recovery", daemon=True)

    def start(self) -> None:
        """Start the thread; return at once."""
        self._thread.start()

    def stop(self) -> None:
        """Give up votes and locks, and wait up to STOP_TIMEOUT_S for the end of the thread.

        A second call does nothing.
        """
        if self._thread.ident is None:
            return
        self._is_stopping.set()
        if self._stop is not None:
            self._stop.set()
        self._thread.join(STOP_TIMEOUT_S)
        if self._thread.is_alive():
            log.error("Auto-recovery does not stop: its votes and locks end with its session")

    def samples(self) -> Iterator[Sample]:
        """Yield samples, as AutoRecovery.samples; none before the first session."""
        return iter(()) if self._auto_recovery is None else self._auto_recovery.samples()

    def _persist(self) -> None:
        pause_s = _RESTART_PAUSE_S
        while not self._is_stopping.is_set():
            try:
                with asyncio.Runner() as runner:
                    runner.run(self._serve())
            except Exception as error:
                unexpected = None if isinstance(error, BkctlError) else error
                log.warning(
                    "Auto-recovery is interrupted, and restarts in %g s: %s", pause_s, error, exc_info=unexpected
                )
            self._is_stopping.wait(pause_s)
            pause_s = min(pause_s * 2, _RESTART_PAUSE_S_MAX)

    async def _serve(self) -> None:
        self._stop = Signal()
        if not self._is_stopping.is_set():
            await _until(self._stop, asyncio.ensure_future(self._session()))

    async def _session(self) -> None:
        uri, session_s = self.config.metadata_service_uri or "", self.config.zk_timeout / 1000
        connect = partial(
            open_cluster, uri, timeout_s=session_s * 3, session_timeout_s=session_s, security=self.security
        )  # fmt: skip
        async with opened(connect, lambda cluster: cluster.close()) as cluster:
            self._auto_recovery = AutoRecovery(cluster, self.config, self.bookie_id, tls=self.tls)
            await self._auto_recovery.run()
