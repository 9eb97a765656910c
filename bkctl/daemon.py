"""The process of a bookie: the bookie, its HTTP server and auto-recovery, until a signal ends them.

Source: BookieServer's Main, AutoRecoveryService, HttpService.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from bkctl.bookie.bookie import Bookie
from bkctl.bookie.network import allow_open_files, client_tls_context
from bkctl.config import BookieConfig
from bkctl.disk import restrict_new_files
from bkctl.errors import BkctlError, Unsupported, UsageError
from bkctl.metadata.store import NO_SECURITY, StoreSecurity
from bkctl.tasks import ended_by_signals

if TYPE_CHECKING:
    from bkctl.http.server import BookieHttpServer
    from bkctl.replication.daemon import AutoRecovery, AutoRecoveryThread

log: Final = logging.getLogger("bkctl")

#: Threads of a busy bookie take turns this often: Python's default of 5 ms is longer than a sync.
SWITCH_INTERVAL_S: Final = 0.0005
#: Python looks for cycles this seldom: entries wait in memory by the ten thousands, and none is part of a cycle.
GC_THRESHOLDS: Final = (20_000, 20, 50)


class BookieDaemon:
    """A bookie as `config` describes it, with HTTP server and auto-recovery where they are enabled.

    Creating one listens on the HTTP port, so that the bookie can register it. Raises UsageError, Unsupported (packages
    of the HTTP server are missing), BkctlError (the address is taken).
    """

    def __init__(self, config: BookieConfig, security: StoreSecurity = NO_SECURITY) -> None:
        self._security = security
        self._config = config
        self._http: BookieHttpServer | None = None
        self._recovery: AutoRecoveryThread | None = None
        if config.http_server_enabled:
            from bkctl.http import load_server

            self._http = load_server().BookieHttpServer(config)
            self._config = self._http.config

    async def run(self, started: Callable[[Bookie], None] = lambda _: None) -> None:
        """Serve until SIGTERM, SIGINT or SIGHUP, then stop cleanly; `started` is called once the bookie is registered.

        Raises the errors of `Bookie.start`, of the TLS files of auto-recovery and of `started`, and the failure that
        made the bookie give up.
        """
        bookie = Bookie(self._config, security=self._security)
        loop = asyncio.get_running_loop()
        with ended_by_signals(lambda: loop.call_soon_threadsafe(bookie.stopped.set)):
            await bookie.start()
            try:
                gc.freeze()
                self._start_services(bookie)
                started(bookie)
                await bookie.stopped.wait()
            finally:
                await bookie.stop()
        if bookie.is_stuck:
            # Python would wait at its exit for threads that a disk holds.
            logging.shutdown()
            os._exit(1)
        if bookie.failure is not None:
            raise bookie.failure

    def _start_services(self, bookie: Bookie) -> None:
        config = self._config
        if config.auto_recovery_daemon_enabled:
            from bkctl.replication.daemon import AutoRecoveryThread

            self._recovery = AutoRecoveryThread(
                config, bookie.bookie_id, security=self._security, tls=client_tls_context(config)
            )
            bookie.metrics.auto_recovery = self._recovery.samples
            self._recovery.start()
        if self._http is not None:
            self._http.serve(bookie, self._security)

    def close(self) -> None:
        """Stop auto-recovery and the HTTP server, which answer until the bookie has stopped."""
        if self._recovery is not None:
            self._recovery.stop()
        if self._http is not None:
            self._http.stop()


@contextlib.contextmanager
def recovery_server(auto_recovery: AutoRecovery) -> Iterator[None]:
    """Serve `/heartbeat` and `/metrics` of an auto-recovery in a process of its own, if its settings enable it.

    Where a bookie on this machine has the port, auto-recovery works without. Raises UsageError, Unsupported.
    """
    server = None
    if auto_recovery.config.http_server_enabled:
        from bkctl.http import load_server

        try:
            server = load_server().serve_recovery(auto_recovery.config, lambda: [*auto_recovery.samples()])
        except (UsageError, Unsupported):
            raise
        except BkctlError as error:
            log.warning("%s; auto-recovery works without /metrics", error)
    try:
        yield
    finally:
        if server is not None:
            server.stop()


def prepare_process() -> None:
    """Set up this process for a bookie: file modes, open files, Python's thread switches and garbage collection."""
    restrict_new_files()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.set_threshold(*GC_THRESHOLDS)
    allow_open_files()
