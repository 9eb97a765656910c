"""Auto-recovery's state in the metadata store: marked ledgers, locks of workers, settings, the auditor's election.

    underreplication/LAYOUT                                            type and version of the nodes below
    underreplication/ledgers/<id: 4 hex>/<4>/<4>/<4>/urL<10+ digits>   marks; the value names the missing replicas
    underreplication/locks/urL<10+ digits>                             ephemeral: a worker replicates this ledger
    underreplication/auditorelection/V_<sequence>                      ephemeral: a vote; the lowest one is the auditor
    underreplication/disable, lostBookieRecoveryDelay, …ctime          settings and clocks, for every scope
    underreplication/scopes/ledgers/<32 hex as 4/4/…>/urL<32 hex>      marks of the scopes ≠ 0, and beside them
    underreplication/scopes/locks/urL<32 hex>, …/auditorelection/      their locks, votes and clocks: Apache's
    underreplication/scopes/…ctime                                     auditor and workers do not look there

Every byte in scope 0 is Apache's. Source: ZkLedgerUnderreplicationManager, ZkLedgerAuditorManager, DataFormats.proto.
"""

from __future__ import annotations

from bkctl.metadata.underreplication.marks import (
    UNDERREPLICATION,
    LedgerLocks,
    LedgerMarks,
    UnderreplicatedLedger,
    UnderreplicationLayout,
    mark_path,
    parse_mark,
)
from bkctl.metadata.underreplication.state import AuditorCheck, AuditorElection, AutoRecoverySettings, AutoRecoveryState

__all__ = [
    "UNDERREPLICATION",
    "AuditorCheck",
    "AuditorElection",
    "AutoRecoverySettings",
    "LedgerLocks",
    "LedgerMarks",
    "AutoRecoveryState",
    "UnderreplicatedLedger",
    "UnderreplicationLayout",
    "mark_path",
    "parse_mark",
]
