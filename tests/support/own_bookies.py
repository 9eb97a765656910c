"""Our bookie as a child process, beside Apache's in `servers`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from support.servers import SORTED, Server, apache_settings, free_port, write_conf


class OwnBookie(Server):
    """`bkctl bookie start` with a Java configuration below `directory`, like ApacheBookie: the same settings.

    `settings` that name directories and a port of another bookie take its place. `prefix` goes before the command.
    """

    def __init__(
        self, metadata_uri: str, directory: Path, *, port: int | None = None, storage: str = SORTED,
        settings: Mapping[str, object] = {}, prefix: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.directory = directory
        self.port = port or free_port()
        self.prefix = list(prefix)
        self.settings = apache_settings(metadata_uri, self.port, directory, storage, settings)
        self.journal_dir = Path(str(self.settings["journalDirectory"]))
        self.ledger_dir = Path(str(self.settings["ledgerDirectories"]))
        self.conf = write_conf(directory / "bk_server.conf", self.settings)
        super().__init__(f"own-bookie:{self.port}", directory / "bookie.log", self._arguments, self._serves)

    @property
    def bookie_id(self) -> str:
        return str(self.settings.get("bookieId", f"127.0.0.1:{self.port}"))

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    def _arguments(self) -> list[str]:
        return [*self.prefix, sys.executable, "-m", "bkctl", "bookie", "start", "--conf", str(self.conf)]

    def launch(self) -> None:
        self._log_size = self.log.stat().st_size if self.log.exists() else 0
        super().launch()

    def _serves(self) -> bool:
        return f"serves on port {self.port}" in self.log_tail(self._log_size, 1 << 20)
