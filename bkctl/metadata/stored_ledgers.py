"""A bookie's ledgers in its cluster's metadata, for checks and repairs: liveness, master key, fence, digest."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from bkctl.errors import BkctlError, Unreachable
from bkctl.formats.entry import DigestType, master_key
from bkctl.formats.metadata import LedgerState
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import Cluster
from bkctl.metadata.liveness import Liveness, check_instance
from bkctl.metadata.store import attempt
from bkctl.model import LedgerFacts, LedgerLiveness


class StoredDigests:
    """Digest types and passwords of ledgers in a cluster's metadata, one ledger at a time; for DigestChecker.

    Raises Conflict where the cookies beside `files` name another cluster, Unreachable where the store does not answer.
    A ledger without readable metadata has neither digest type nor password.
    """

    def __init__(self, cluster: Cluster, files: Iterable[Path]) -> None:
        check_instance(cluster, files)
        self._cluster = cluster
        self._last: tuple[LedgerId, DigestType | None, bytes | None] | None = None

    def digest_of(self, ledger: LedgerId) -> DigestType | None:
        """Return the ledger's digest type, None if unknown."""
        return self._read(ledger)[1]

    def password_of(self, ledger: LedgerId) -> bytes | None:
        """Return the ledger's password, None if unknown."""
        return self._read(ledger)[2]

    def _read(self, ledger: LedgerId) -> tuple[LedgerId, DigestType | None, bytes | None]:
        if self._last is None or self._last[0] != ledger:
            found = attempt(self._cluster.ledgers.read, ledger)
            if isinstance(found, BkctlError):
                self._last = ledger, None, None
            else:
                self._last = ledger, found.metadata.digest_type, found.metadata.password
        return self._last


class StoredLedgers:
    """Facts about the ledgers that a bookie has in `directories` (each `current`), from its cluster; callable.

    Raises Conflict where the directories' cookies name another cluster, in which every ledger would look dead.
    """

    def __init__(self, cluster: Cluster, directories: Iterable[Path]) -> None:
        check_instance(cluster, [directory / "VERSION" for directory in directories])
        self._cluster = cluster
        self._liveness = Liveness(cluster.ledgers)

    @property
    def problems(self) -> list[BkctlError]:
        """Errors that left the liveness of ledgers unknown."""
        return self._liveness.problems

    def __call__(self, ledgers: Collection[LedgerId]) -> Mapping[LedgerId, LedgerFacts]:
        """Return the facts about each ledger. Raises Unreachable where the store does not answer."""
        found = {ledger: LedgerFacts(state) for ledger, state in self._liveness.states(ledgers).items()}
        for problem in self.problems:
            if isinstance(problem, Unreachable):
                raise problem
        alive = sorted(ledger for ledger, facts in found.items() if facts.liveness is LedgerLiveness.ALIVE)
        for ledger, answer in self._cluster.ledgers.read_many(alive):
            if isinstance(answer, BkctlError):
                found[ledger] = LedgerFacts(LedgerLiveness.UNKNOWN)
                continue
            metadata = answer.metadata
            key = None if metadata.password is None else master_key(metadata.password)
            found[ledger] = LedgerFacts(LedgerLiveness.ALIVE, key, metadata.state is not LedgerState.OPEN)
        return found
