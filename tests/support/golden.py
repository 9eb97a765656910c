"""The golden files in `tests/data/<version>/`: what Apache's bookies wrote, and what Apache's programs say of it."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

DATA: Final = Path(__file__).resolve().parents[1] / "data"
VERSIONS: Final = sorted(path.name for path in DATA.iterdir() if path.is_dir() and path.name[0].isdigit())


@dataclass(frozen=True)
class GoldenBookie:
    """The files of one stopped Apache bookie, and the answers of Apache's shell about them.

    `journal_dir` and `ledger_dir` are what a configuration names (the files are in their `current/`): read only.
    """

    version: str
    name: str

    @property
    def directory(self) -> Path:
        return DATA / self.version / self.name

    @property
    def journal_dir(self) -> Path:
        return self.directory / "journal"

    @property
    def ledger_dir(self) -> Path:
        return self.directory / "ledgers"

    @functools.cached_property
    def _shell(self) -> dict[str, Any]:
        answers: dict[str, Any] = json.loads((self.directory / "shell.json").read_text())
        return answers

    @property
    def bookie_id(self) -> str:
        return str(self._shell["bookieId"])

    @property
    def storage_class(self) -> str:
        return str(self._shell["storageClass"])

    @property
    def last_mark(self) -> tuple[int, int]:
        """`lastmark`: journal id, offset."""
        journal_id, offset = self._shell["lastMark"]
        return journal_id, offset

    @property
    def journals(self) -> dict[Path, tuple[int | None, list[dict[str, Any]]]]:
        """`readjournal` of each journal: its path → version (None: no record) and rows as `apache_shell.records`."""
        return {
            self.journal_dir / "current" / name: (answer["version"], _expand(answer["records"]))
            for name, answer in self._shell["journals"].items()
        }

    @property
    def entry_logs(self) -> dict[Path, tuple[list[dict[str, Any]], dict[str, int]]]:
        """`readlog` and `readlogmetadata` of each entry log: its path → rows, and unsigned ledger id → bytes."""
        return {
            self.ledger_dir / "current" / name: (_expand(answer["records"]), answer["ledgers"])
            for name, answer in self._shell["entryLogs"].items()
        }

    @property
    def indexes(self) -> dict[str, dict[str, Any]]:
        """`ledger -m` of each ledger: unsigned ledger id → {locations: {entry id: (log id, position)}, and for index
        files masterKey (hex), fenced}."""
        return {
            ledger_id: answer | {"locations": {entry: (log, position) for entry, log, position in answer["locations"]}}
            for ledger_id, answer in self._shell["indexes"].items()
        }


@dataclass(frozen=True)
class GoldenJournals:
    """Journals and last marks alone, in every version and of unusual settings; see `make_journals.py`. Read only."""

    version: str
    name: str

    def __str__(self) -> str:
        return f"{self.version}-{self.name}"

    @property
    def directory(self) -> Path:
        return DATA / "journals" / self.version / self.name

    @property
    def journal_dirs(self) -> list[Path]:
        return sorted(self.directory.glob("journal-*"))

    @property
    def ledger_dirs(self) -> list[Path]:
        return sorted(self.directory.glob("ledgers-*"))

    @functools.cached_property
    def _shell(self) -> dict[str, Any]:
        answers: dict[str, Any] = json.loads((self.directory / "shell.json").read_text())
        return answers

    @property
    def last_marks(self) -> list[tuple[int, int]]:
        """`lastmark`: journal id and offset of each journal directory."""
        return [(journal_id, offset) for journal_id, offset in self._shell["lastMarks"]]

    @property
    def journals(self) -> dict[Path, tuple[int | None, list[dict[str, Any]]]]:
        """`readjournal` of each journal, as in `GoldenBookie`."""
        return {
            self.directory / name: (answer["version"], _expand(answer["records"]))
            for name, answer in self._shell["journals"].items()
        }


def _expand(rows: list[list[Any]]) -> list[dict[str, Any]]:
    records = []
    for kind, ledger_id, entry_id, offset, size, detail in rows:
        record = {"type": kind, "ledgerId": ledger_id, "entryId": entry_id, "offset": offset, "recordSize": size}
        if kind == "entry":
            record["lastAddConfirmed"] = detail
        elif kind == "ledgerKey":
            record["masterKey"] = detail
        records.append(record)
    return records


def bookies() -> list[GoldenBookie]:
    """Every golden bookie of every version."""
    return [
        GoldenBookie(version, path.name)
        for version in VERSIONS
        for path in sorted((DATA / version).iterdir())
        if path.is_dir()
    ]


def journals() -> list[GoldenJournals]:
    """Every set of golden journals."""
    found = sorted((DATA / "journals").glob("*/*/shell.json"))
    return [GoldenJournals(path.parent.parent.name, path.parent.name) for path in found]


def _read(version: str, name: str) -> Any:
    return json.loads((DATA / version / f"{name}.json").read_text())


def ledgers(version: str) -> list[dict[str, Any]]:
    """The ledgers in the golden bookies, as WriteLedgers.java printed them."""
    found: list[dict[str, Any]] = _read(version, "ledgers")["ledgers"]
    return found


def ledger_metadata(version: str) -> list[dict[str, Any]]:
    """Ledger metadata as Apache serializes it, by MetadataBytes.java: formatVersion, digestType, state, bytes (base64),
    and readBack (what Apache parses from them)."""
    found: list[dict[str, Any]] = _read(version, "metadata")["ledgerMetadata"]
    return found


def zookeeper_nodes(version: str) -> dict[str, str]:
    """Every ZooKeeper node of the golden cluster: path below its root → value in base64."""
    found: dict[str, str] = _read(version, "zookeeper")["nodes"]
    return found
