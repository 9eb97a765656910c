"""Auto-recovery's whole state in one store."""

from __future__ import annotations

from datetime import UTC, datetime

from bkctl.errors import Conflict, NotFound
from bkctl.metadata.store import MetadataStore
from bkctl.metadata.underreplication.election import AuditorElection
from bkctl.metadata.underreplication.layout import UnderreplicationLayout
from bkctl.metadata.underreplication.locks import LedgerLocks
from bkctl.metadata.underreplication.marks import LedgerMarks
from bkctl.metadata.underreplication.settings import AuditorCheck, AutoRecoverySettings


class AutoRecoveryState:
    """Marks, locks, settings and elections of one cluster; the parts share one check of the layout.

    Source: LedgerUnderreplicationManager, one interface for all of them.
    """

    def __init__(self, store: MetadataStore) -> None:
        layout = UnderreplicationLayout(store)
        self.marks = LedgerMarks(store, layout)
        self.locks = LedgerLocks(store, layout)
        self.settings = AutoRecoverySettings(store, layout)
        self.election = AuditorElection(store, layout)

    def why_not_audited(self) -> str | None:
        """Return in words that no auditor looks for lost replicas, and since when at the latest; None while one does.

        Without an auditor the lack of marks proves nothing. Raises Corrupt if the auditor's vote is damaged.
        """
        if self.settings.is_enabled() and (self.election.auditor() or self.election.auditor(scoped=True)):
            return None
        last_ms = max(filter(None, map(self.settings.check_ctime_ms, AuditorCheck)), default=None)
        if last_ms is None:
            return "never audited"
        return f"not audited since {datetime.fromtimestamp(last_ms / 1000, UTC):%Y-%m-%dT%H:%M:%SZ}"

    def trigger_audit(self, *, dry_run: bool = False) -> str:
        """Make the auditors look for lost bookies now; return the id of scope 0's auditor, else of the scopes' one.

        Auditors wake at every write of the delay, also of an equal value, as in Apache's shell; with `dry_run` nothing
        is written. Raises Conflict when auto-recovery is disabled, NotFound without an auditor.
        Source: BookKeeperAdmin.triggerAudit.
        """
        if not self.settings.is_enabled():
            raise Conflict("Auto-recovery is disabled", hint="enable it first")
        auditor = self.election.auditor() or self.election.auditor(scoped=True)
        if auditor is None:
            raise NotFound("No auditor is elected", hint="'bkctl autorecovery run' starts auto-recovery")
        if dry_run:
            return auditor
        self.settings.set_lost_bookie_recovery_delay_s(self.settings.lost_bookie_recovery_delay_s() or 0)
        return auditor
