"""Usage of entry logs: the bytes of live ledgers against all bytes.

`bkctl.metadata.liveness` knows which ledgers are alive; here it is one function. Source: GarbageCollectorThread,
EntryLogMetadata, ListActiveLedgersCommand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from bkctl.errors import BkctlError, Corrupt, NotFound, Unsupported
from bkctl.files.entry_log import EntryLogReader
from bkctl.files.listing import log_contents
from bkctl.formats.entry_log import content_id_of
from bkctl.ids import LedgerId
from bkctl.model import LedgerLiveness, LivenessLookup


class Compaction(StrEnum):
    """The action of a bookie on a log's garbage; the values are the words of every output."""

    #: No ledger is alive: garbage collection deletes the log.
    DELETE = "delete"
    #: Minor compaction rewrites the live entries, and so does major compaction.
    MINOR = "minor"
    MAJOR = "major"


class Thresholds(NamedTuple):
    """The usage below which a log is compacted every hour (minor) or every day (major); 0 or less: never.

    Source: ServerConfiguration.
    """

    minor: float = 0.2
    major: float = 0.8


class LedgerUse(NamedTuple):
    """A ledger's bytes in one log, and whether it is alive."""

    ledger: LedgerId
    size_bytes: int
    state: LedgerLiveness


class LogUse(NamedTuple):
    """The ledgers of one log, in order. `log_id` comes from the file's name (None for another name).

    `error` is the damage of the log. If it is not `complete`, only the records before the damage are counted.
    """

    path: Path
    log_id: int | None
    ledgers: list[LedgerUse]
    from_map: bool
    complete: bool
    error: BkctlError | None

    def size_of(self, *states: LedgerLiveness) -> int:
        """Return the bytes of the ledgers in these states."""
        return sum(use.size_bytes for use in self.ledgers if use.state in states)

    @property
    def total_size_bytes(self) -> int:
        """Return the bytes of all entries with their size fields, as a bookie counts them: no header, no map."""
        return sum(use.size_bytes for use in self.ledgers)

    @property
    def remaining_size_bytes(self) -> int:
        """Return the bytes that a bookie keeps: of live ledgers, and of ledgers in an unknown state."""
        return self.size_of(LedgerLiveness.ALIVE, LedgerLiveness.UNKNOWN)

    @property
    def garbage_size_bytes(self) -> int:
        """Return the bytes of dead ledgers."""
        return self.size_of(LedgerLiveness.DEAD)

    @property
    def usage(self) -> float | None:
        """Return remaining bytes by total bytes; None for a log without entries. Source: EntryLogMetadata.getUsage."""
        total = self.total_size_bytes
        return self.remaining_size_bytes / total if total else None

    def compaction(self, thresholds: Thresholds) -> Compaction | None:
        """Return the action of garbage collection on the log; None for no action, or if its content is uncertain.

        A bookie spares the log that it writes until the log is finished. Source: GarbageCollectorThread.
        """
        usage = self.usage
        if usage is None or not self.complete or not self.garbage_size_bytes:
            return None
        if self.remaining_size_bytes == 0:
            return Compaction.DELETE
        if usage < thresholds.minor:
            return Compaction.MINOR
        return Compaction.MAJOR if usage < thresholds.major else None

    def reclaimable_size_bytes(self, thresholds: Thresholds) -> int:
        """Return the bytes that garbage collection frees."""
        return self.garbage_size_bytes if self.compaction(thresholds) else 0


def log_uses(paths: Iterable[Path], states: LivenessLookup) -> Iterator[LogUse]:
    """Yield the use of each log in the order given. Each log is read before its ledgers are looked up.

    Logs are read one by one, so memory does not grow with their number. Skips a log that a running bookie deletes;
    yields an unreadable log with its error.
    """
    for path in paths:
        log_id = content_id_of(path.name)
        try:
            with EntryLogReader.open(path) as reader:
                contents = log_contents(reader)
        except (Corrupt, Unsupported) as error:
            yield LogUse(path, log_id, [], from_map=False, complete=False, error=error)
            continue
        except NotFound:
            continue
        found = states(contents.sizes.keys())
        ledgers = [LedgerUse(ledger, size, found[ledger]) for ledger, size in contents.sizes.items()]
        yield LogUse(path, log_id, ledgers, contents.from_map, contents.complete, contents.error)
