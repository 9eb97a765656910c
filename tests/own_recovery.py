"""Auto-recovery as child processes: ours (`bkctl autorecovery run`) and Apache's (AutoRecoveryMain)."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from servers import SORTED, Java, Server, apache_settings, free_port, write_conf

#: What waits for minutes by default waits for moments.
SETTINGS: Final[dict[str, object]] = {
    "openLedgerRereplicationGracePeriod": 500,
    "lockReleaseOfFailedLedgerGracePeriod": 2000,
    "rwRereplicateBackoffMs": 200,
    "auditorPeriodicCheckInterval": 0,
}


class _AutoRecovery(Server):
    def __init__(self, name: str, metadata_uri: str, directory: Path, settings: Mapping[str, object]) -> None:
        own = apache_settings(metadata_uri, free_port(), directory, SORTED, {**SETTINGS, **settings})
        self.conf = write_conf(directory / "bk_server.conf", own)
        self.voter = f"127.0.0.1:{own['bookiePort']}"
        super().__init__(name, directory / "auto-recovery.log", self.arguments, self._serves)

    def arguments(self) -> list[str]:
        raise NotImplementedError

    def launch(self) -> None:
        self._log_size = self.log.stat().st_size if self.log.exists() else 0
        super().launch()

    def _serves(self) -> bool:
        raise NotImplementedError


class OwnAutoRecovery(_AutoRecovery):
    """`bkctl autorecovery run`, with more `options`; `voter` is what its votes say."""

    def __init__(
        self, metadata_uri: str, directory: Path, *options: str, settings: Mapping[str, object] = {}
    ) -> None:  # fmt: skip
        self._options = options
        super().__init__("own-autorecovery", metadata_uri, directory, settings)

    def arguments(self) -> list[str]:
        return [sys.executable, "-m", "bkctl", "autorecovery", "run", "--conf", str(self.conf), *self._options]

    def _serves(self) -> bool:
        return "PID" in self.log_tail(self._log_size)


class ApacheAutoRecovery(_AutoRecovery):
    """Apache's AutoRecoveryMain."""

    def __init__(self, java: Java, metadata_uri: str, directory: Path, settings: Mapping[str, object] = {}) -> None:
        self._java = java
        super().__init__("apache-autorecovery", metadata_uri, directory, settings)

    def arguments(self) -> list[str]:
        main_class = "org.apache.bookkeeper.replication.AutoRecoveryMain"
        return self._java.command(main_class, "-c", self.conf, log4j="server")

    def _serves(self) -> bool:
        return "Started component" in self.log_tail(self._log_size, 1 << 20)


def start_auto_recovery(*servers: Any) -> None:
    """Start them side by side."""
    for server in servers:
        server.launch()
    for server in servers:
        server.wait_ready()
