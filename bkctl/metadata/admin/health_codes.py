"""The codes of health findings, each declared once: severity, meaning, next command, and why that one.

Without imports, so that help can list the codes at once. `docs/health.md` is made of this.
"""

from __future__ import annotations

from enum import StrEnum


class HealthCode(StrEnum):
    """The subject of a health finding; stable, for scripts and mutes.

    `severity`: of most findings of the code. `what`: when there is a finding. `next`: the command to run next, with the
    finding's {subject} and {ledger}. `why`: why that command, as advice.
    """

    severity: str
    what: str
    next: str
    why: str

    def __new__(cls, code: str, severity: str, what: str, next_command: str, why: str) -> HealthCode:
        """Return the member of the value `code`."""
        member = str.__new__(cls, code)
        member._value_ = code
        member.severity, member.what, member.next, member.why = severity, what, next_command, why
        return member

    @classmethod
    def _missing_(cls, value: object) -> HealthCode | None:
        """Accept the former name of a code, in scripts that mute it."""
        return cls.RACKS_VIOLATED if value == "ledgers-in-few-racks" else None

    NO_INSTANCE_ID = (
        "no-instance-id", "error", "The cluster has no instance id.", "bkctl cookie list",
        "bookies will not start; restore the id from a backup of the metadata, or from a cookie",
    )  # fmt: skip
    NO_WRITABLE_BOOKIE = (
        "no-writable-bookie", "error", "No bookie accepts entries.", "bkctl why create",
        "start bookies, or free their disks: nothing can be written",
    )  # fmt: skip
    BOOKIE_DOWN = (
        "bookie-down", "error", "A bookie has a cookie, and is not registered.", "bkctl why bookie {subject}",
        "it shows the end of the bookie's log and what depends on it, for a start or a decommission",
    )  # fmt: skip
    BOOKIE_UNKNOWN = (
        "bookie-unknown", "error", "Ledgers name a bookie without cookie and registration.",
        "bkctl why bookie {subject}", "it shows whether its ledgers have other replicas, before it is given up",
    )  # fmt: skip
    BOOKIE_READ_ONLY = (
        "bookie-read-only", "warning", "A bookie is read-only: by request, or because its disks are full.",
        "bkctl why bookie {subject}", "it says whether its disks are the reason",
    )  # fmt: skip
    BOOKIE_WITHOUT_ADDRESS = (
        "bookie-without-address", "error", "A registration has no address of the bookie.",
        "bkctl bookies show {subject}", "clients cannot reach it: check its advertised address",
    )  # fmt: skip
    BOOKIE_WITHOUT_COOKIE = (
        "bookie-without-cookie", "warning", "A registered bookie has no cookie.", "bkctl why bookie {subject}",
        "another bookie could take its place with empty disks: 'bkctl cookie verify'",
    )  # fmt: skip
    BOOKIE_UNREGISTERED = (
        "bookie-unregistered", "error", "A bookie of ours does not find its registration.",
        "bkctl why bookie {subject}",
        "look at its network and at the metadata store: without registration clients and auto-recovery take it for "
        "lost",
    )  # fmt: skip
    BOOKIE_SILENT = (
        "bookie-silent", "error", "A registered bookie cannot be reached, or answers with an error.",
        "bkctl why bookie {subject}", "check whether it runs, or is behind a firewall",
    )  # fmt: skip
    BOOKIE_HUNG = (
        "bookie-hung", "error", "A registered bookie accepts connections, and does not answer.",
        "bkctl why bookie {subject}", "it shows whether the process is stopped or blocked: adds and reads wait for it",
    )  # fmt: skip
    BOOKIE_SLOW = (
        "bookie-slow", "warning",
        "The p99 of adds or of journal syncs is five times the median of the other bookies, and 50 ms or more.",
        "bkctl why bookie {subject}", "it compares the latencies; a slow disk slows every ledger with a replica there",
    )  # fmt: skip
    METADATA_SLOW = (
        "metadata-slow", "warning", "The median of five small reads of the metadata store takes 250 ms or more.",
        "bkctl metadata layout -v", "creating, opening and closing ledgers wait for it: check its servers and network",
    )  # fmt: skip
    CLOCK_SKEW = (
        "clock-skew", "warning", "The clock of a bookie and the one here differ by more than 5 s.",
        "bkctl why bookie {subject}", "ages, certificates and grace periods are wrong: synchronize the clocks",
    )  # fmt: skip
    VERSIONS_MIXED = (
        "versions-mixed", "warning", "Registered bookies of ours have different versions.",
        "bkctl cluster status --columns bookieId,version", "finish the upgrade, or take it back",
    )  # fmt: skip
    COOKIE_DAMAGED = (
        "cookie-damaged", "error", "A cookie in the metadata store cannot be read.", "bkctl why bookie {subject}",
        "the bookie cannot start again: 'bkctl cookie update' rewrites its cookie from a directory",
    )  # fmt: skip
    COOKIE_OF_ANOTHER_CLUSTER = (
        "cookie-of-another-cluster", "error", "A cookie names another instance id.", "bkctl cookie show {subject}",
        "see 'bkctl cookie verify' before it is started again",
    )  # fmt: skip
    DISK_FULL = (
        "disk-full", "warning", "The ledger disks of a bookie are used above --threshold.",
        "bkctl why space {subject}", "it says what holds the space; add disks or bookies, or delete ledgers",
    )  # fmt: skip
    DISK_FULL_NO_WAY_OUT = (
        "disk-full-no-way-out", "error",
        "A bookie has full disks, and its compaction is suspended: garbage on them is not freed by itself.",
        "bkctl why space {subject}", "it shows the ways out and their cost: the space does not come back by waiting",
    )  # fmt: skip
    LEDGERS_UNAVAILABLE = (
        "ledgers-unavailable", "error",
        "Entries of ledgers have no readable replica: all of their bookies are down, or marked as lacking them.",
        "bkctl why ledger {ledger}", "it names the bookies that have the last replicas",
    )  # fmt: skip
    LEDGERS_ONE_COPY = (
        "ledgers-one-copy", "error", "Entries of ledgers of two replicas or more have one readable replica left.",
        "bkctl why ledger {ledger}", "it shows what keeps replication from restoring them; one more loss loses data",
    )  # fmt: skip
    METADATA_UNREADABLE = (
        "metadata-unreadable", "error", "Metadata of ledgers cannot be read, so nothing else is known of them.",
        "bkctl metadata check", "it names the ledgers, and says whether they are damaged, or refused to this user",
    )  # fmt: skip
    LEDGERS_IN_RECOVERY = (
        "ledgers-in-recovery", "warning", "Ledgers older than --stuck-after stay IN_RECOVERY: their recovery stopped.",
        "bkctl ledger recover {ledger} --yes", "it decides the end of the ledger, for which readers wait",
    )  # fmt: skip
    LEDGERS_DANGLING = (
        "ledgers-dangling", "error", "Ledgers name bookies that have neither a cookie nor a registration.",
        "bkctl why ledger {ledger}",
        "it shows which entries no other bookie has; auto-recovery copies the others",
    )  # fmt: skip
    LEDGERS_SET_ASIDE = (
        "ledgers-set-aside", "error", "A bookie of ours cannot read its state of ledgers, or write their index.",
        "bkctl why bookie {subject}",
        "the bookie's log names them: check its disks, and have others copy them ('bkctl autorecovery mark LEDGER')",
    )  # fmt: skip
    LEDGERS_UNREADABLE = (
        "ledgers-unreadable", "error", "Reads of entries failed on a bookie of ours within the last day.",
        "bkctl why bookie {subject}",
        "the bookie's log names them: check its disks, run 'bkctl bookie check' there, and have others copy them "
        "('bkctl autorecovery mark LEDGER')",
    )  # fmt: skip
    CERTIFICATE_EXPIRES = (
        "certificate-expires", "warning", "A TLS certificate of a bookie of ours expires within 14 days.",
        "bkctl bookie metrics --bookie {subject}",
        "replace its files; a bookie with tlsCertFilesRefreshDurationSeconds loads them, else restart it",
    )  # fmt: skip
    BOOKIE_WITHOUT_RACK = (
        "bookie-without-rack", "warning", "A bookie has no rack, and others have one.", "bkctl bookies racks list",
        "'bkctl bookies racks set BOOKIE --rack RACK': the list shows the racks that there are",
    )  # fmt: skip
    TOO_FEW_RACKS = (
        "too-few-racks", "warning", "Writable bookies are in fewer racks than placement asks for.",
        "bkctl bookies racks list", "start bookies in another rack: new ledgers do not survive the loss of one",
    )  # fmt: skip
    RACKS_VIOLATED = (
        "racks-violated", "warning", "Ledgers have entries with all replicas in too few racks.",
        "bkctl ledger locate {ledger}",
        "it shows the bookies; auto-recovery moves replicas to other racks with "
        "auditorPeriodicPlacementPolicyCheckInterval above 0 and repairedPlacementPolicyNotAdheringBookieEnabled=true",
    )  # fmt: skip
    SCOPES_ORPHANED = (
        "scopes-orphaned", "error", "Scoped ledgers belong to a cluster that was formatted.",
        "bkctl metadata orphans", "it shows the ledgers",
    )  # fmt: skip
    NO_BOOKIE_FOR_SCOPES = (
        "no-bookie-for-scopes", "error", "There are scoped ledgers, and no writable bookie that knows scopes.",
        "bkctl why create", "start bookies that do: scoped ledgers cannot be written",
    )  # fmt: skip
    MARK_DAMAGED = (
        "mark-damaged", "warning", "The mark of an under-replicated ledger cannot be read.",
        "bkctl autorecovery unmark {ledger} --yes",
        "it removes the mark, which no worker can use; 'bkctl autorecovery audit' marks the ledger again",
    )  # fmt: skip
    UNDERREPLICATED = (
        "underreplicated", "warning", "Ledgers lack replicas; an error once one does for an hour.",
        "bkctl autorecovery list", "it shows the ledgers, with the reason of the last failure",
    )  # fmt: skip
    REPLICATION_STUCK = (
        "replication-stuck", "error", "Workers tried to replicate marked ledgers, and failed.",
        "bkctl why ledger {ledger}", "it names the reason: trying again does not help before that is gone",
    )  # fmt: skip
    AUTORECOVERY_DISABLED = (
        "autorecovery-disabled", "warning", "Auto-recovery is disabled; an error while bookies are down.",
        "bkctl autorecovery enable", "it has workers replicate again: run it when the maintenance is over",
    )  # fmt: skip
    VOTE_DAMAGED = (
        "vote-damaged", "error", "A vote of the auditors' election cannot be read.",
        "bkctl autorecovery auditor --all", "restart auto-recovery on the bookie that cast it",
    )  # fmt: skip
    NO_AUDITOR = (
        "no-auditor", "warning", "No auditor is elected; an error while bookies are down.",
        "bkctl autorecovery status", "start auto-recovery on some bookie, or run 'bkctl autorecovery run'",
    )  # fmt: skip
    NO_AUDITOR_OF_SCOPES = (
        "no-auditor-of-scopes", "warning", "No auditor is elected for scopes other than 0.",
        "bkctl autorecovery status",
        "'bkctl autorecovery run' on some hosts: Apache's auto-recovery sees scope 0 only",
    )  # fmt: skip
    NOT_AUDITED = (
        "not-audited", "warning", "An auditor never checked all ledgers, or not within two of its periods.",
        "bkctl autorecovery status", "it shows whether there is an auditor: one that starts runs the check",
    )  # fmt: skip
