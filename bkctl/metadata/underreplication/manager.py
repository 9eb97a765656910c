"""Auto-recovery's whole state behind one object, under Apache's name for it."""

from __future__ import annotations

from bkctl.errors import Conflict, NotFound
from bkctl.metadata.store import MetadataStore
from bkctl.metadata.underreplication.election import AuditorElection
from bkctl.metadata.underreplication.layout import UnderreplicationLayout
from bkctl.metadata.underreplication.locks import LedgerLocks
from bkctl.metadata.underreplication.marks import LedgerMarks
from bkctl.metadata.underreplication.settings import AutoRecoverySettings


class LedgerUnderreplicationManager:
    """Marks, locks, settings and election of one cluster, over one store and one layout check.

    The parts document the operations. Source: LedgerUnderreplicationManager, one interface for all of them.
    """

    def __init__(self, store: MetadataStore) -> None:
        self.store = store
        layout = UnderreplicationLayout(store)
        self.prepare = layout.prepare

        marks = LedgerMarks(store, layout)
        self.list = marks.list
        self.beside = marks.cursor
        self.any = marks.has_marks
        self.marked = marks.ids
        self.get = marks.get
        self.mark = marks.add
        self.unmark = marks.remove
        self.watch = marks.watch_work

        locks = LedgerLocks(store, layout)
        self.locks = locks.list
        self.locked = locks.ledgers
        self.lock_owner = locks.get
        self.lock = locks.lock
        self.lock_many = locks.lock_many
        self.unlock = locks.unlock
        self.unlock_many = locks.unlock_many

        settings = AutoRecoverySettings(store, layout)
        self.is_enabled = settings.is_enabled
        self.disable = settings.disable
        self.enable = settings.enable
        self.lost_bookie_recovery_delay_s = settings.lost_bookie_recovery_delay_s
        self.set_lost_bookie_recovery_delay_s = settings.set_lost_bookie_recovery_delay_s
        self.initialize_lost_bookie_recovery_delay_s = settings.initialize_lost_bookie_recovery_delay_s
        self.delay_version = settings.delay_version
        self.watch_auditing = settings.watch
        self.check_ctime_ms = settings.check_ctime_ms
        self.set_check_ctime_ms = settings.set_check_ctime_ms

        election = AuditorElection(store, layout)
        self.votes = election.votes
        self.auditor = election.auditor
        self.vote = election.vote
        self.vote_paths = election.vote_paths
        self.note_auditor = election.announce
        self.was_elected = election.was_held

    def trigger_audit(self) -> str:
        """Make the auditors look for lost bookies now; return the id of scope 0's auditor, else of the scopes' one.

        Auditors wake at every write of the delay, also of an equal value, as in Apache's shell. Raises Conflict when
        auto-recovery is disabled, NotFound without an auditor. Source: BookKeeperAdmin.triggerAudit.
        """
        if not self.is_enabled():
            raise Conflict("Auto-recovery is disabled", hint="enable it first")
        auditor = self.auditor() or self.auditor(scoped=True)
        if auditor is None:
            raise NotFound("No auditor is elected", hint="start auto-recovery on some bookie")
        self.set_lost_bookie_recovery_delay_s(self.lost_bookie_recovery_delay_s() or 0)
        return auditor
