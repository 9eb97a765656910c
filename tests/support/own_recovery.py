"""Auto-recovery as child processes: ours (`bkctl autorecovery run`) and Apache's (AutoRecoveryMain)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from support.servers import SORTED, Java, Server, apache_settings, free_port, write_conf

#: Settings that shorten minutes to moments.
SETTINGS: Final[dict[str, object]] = {
    "openLedgerRereplicationGracePeriod": 500,
    "lockReleaseOfFailedLedgerGracePeriod": 2000,
    "rwRereplicateBackoffMs": 200,
    "auditorPeriodicCheckInterval": 0,
}


class _AutoRecovery(Server):
    """`command` is given the configuration file; it serves once its log has `sign`; `voter` is what its votes say."""

    def __init__(
        self, name: str, metadata_uri: str, directory: Path, settings: Mapping[str, object],
        command: Callable[[Path], list[str]], sign: str,
    ) -> None:  # fmt: skip
        own = apache_settings(metadata_uri, free_port(), directory, SORTED, {**SETTINGS, **settings})
        conf = write_conf(directory / "bk_server.conf", own)
        self.voter = f"127.0.0.1:{own['bookiePort']}"
        self._sign = sign
        self._log_size = 0
        super().__init__(name, directory / "auto-recovery.log", lambda: command(conf), self._serves)

    def launch(self) -> None:
        self._log_size = self.log.stat().st_size if self.log.exists() else 0
        super().launch()

    def _serves(self) -> bool:
        return self._sign in self.log_tail(self._log_size, 1 << 20)


class OwnAutoRecovery(_AutoRecovery):
    """`bkctl autorecovery run`, with more `options`."""

    def __init__(self, metadata_uri: str, directory: Path, *options: str, settings: Mapping[str, object] = {}) -> None:
        def command(conf: Path) -> list[str]:
            return [sys.executable, "-m", "bkctl", "autorecovery", "run", "--conf", str(conf), *options]

        super().__init__("own-autorecovery", metadata_uri, directory, settings, command, "PID")


class ApacheAutoRecovery(_AutoRecovery):
    """Apache's AutoRecoveryMain."""

    def __init__(self, java: Java, metadata_uri: str, directory: Path, settings: Mapping[str, object] = {}) -> None:
        def command(conf: Path) -> list[str]:
            return java.command("org.apache.bookkeeper.replication.AutoRecoveryMain", "-c", conf, log4j="server")

        super().__init__("apache-autorecovery", metadata_uri, directory, settings, command, "Started component")


def start_auto_recovery(*servers: Any) -> None:
    """Start them side by side."""
    for server in servers:
        server.launch()
    for server in servers:
        server.wait_ready()
