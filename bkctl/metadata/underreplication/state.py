"""Auto-recovery's state in one store: its settings, the election of its auditor, and the marked ledgers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from enum import Enum
from typing import Final

from bkctl.errors import AlreadyExists, BkctlError, Conflict, Corrupt, NotFound, UsageError
from bkctl.formats.metadata import parse_message, parse_text, print_text
from bkctl.metadata.store import (
    Claim,
    MetadataStore,
    attempt,
    create_if_missing,
    delete_if_present,
    value_of,
    watch_all,
)
from bkctl.metadata.underreplication.marks import (
    DISABLE,
    UNDERREPLICATION,
    LedgerLocks,
    LedgerMarks,
    UnderreplicationLayout,
    base_path,
)

_DELAY: Final = f"{UNDERREPLICATION}/lostBookieRecoveryDelay"
_DELAY_S_MAX: Final = (1 << 31) - 1
_NUMBER: Final = re.compile(rb"[+-]?[0-9]{1,10}")


class AuditorCheck(Enum):
    """The auditor's periodic checks; the value is the name of the node that keeps the time of the last run."""

    ALL_LEDGERS = "checkallledgersctime"
    PLACEMENT_POLICY = "placementpolicycheckctime"
    REPLICAS = "replicascheckctime"


class AutoRecoverySettings:
    """The settings of one cluster's auto-recovery. Methods raise Unreachable, as `MetadataStore`."""

    def __init__(self, store: MetadataStore, layout: UnderreplicationLayout | None = None) -> None:
        self.store = store
        self._layout = layout or UnderreplicationLayout(store)

    def is_enabled(self) -> bool:
        """Return whether auto-recovery is on."""
        return self.store.get(DISABLE) is None

    def disable(self) -> None:
        """Switch auto-recovery off. Raises AlreadyExists when it is off."""
        self._layout.prepare()
        if not create_if_missing(self.store, DISABLE, b""):
            raise AlreadyExists("Auto-recovery is disabled already")

    def enable(self) -> None:
        """Switch auto-recovery on. Raises AlreadyExists when it is on."""
        if not delete_if_present(self.store, DISABLE):
            raise AlreadyExists("Auto-recovery is enabled already")

    def lost_bookie_recovery_delay_s(self) -> int | None:
        """Return the seconds that the auditor waits before a missing bookie counts as lost.

        None: no delay is stored, and the auditor uses its default, 0. Raises Corrupt for a value that is not a number.
        """
        found = self.store.get(_DELAY)
        if found is None:
            return None
        if not _NUMBER.fullmatch(found.value):
            raise Corrupt(f"{_DELAY} in {self.store.name} is {found.value[:40]!r}, not a number of seconds")
        return int(found.value)

    def set_lost_bookie_recovery_delay_s(self, seconds: int) -> None:
        """Store the delay, 0 too: the write alone makes auditors start an audit. Raises UsageError."""
        if not 0 <= seconds <= _DELAY_S_MAX:
            raise UsageError(f"A recovery delay of {seconds} s is not between 0 and {_DELAY_S_MAX}")
        self._layout.prepare()
        self.store.put(_DELAY, b"%d" % seconds, None)

    def initialize_lost_bookie_recovery_delay_s(self, seconds: int) -> int:
        """Store the delay where none is stored; return the stored one. Source: initializeLostBookieRecoveryDelay."""
        self._layout.prepare()
        create_if_missing(self.store, _DELAY, b"%d" % seconds)
        return self.lost_bookie_recovery_delay_s() or 0

    def delay_version(self) -> int | None:
        """Return the version of the stored delay, None without one; every write gives another, equal values too."""
        found = self.store.get(_DELAY)
        return None if found is None else found.version

    def watch(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback()` when the delay is written or auto-recovery is switched; see MetadataStore.watch."""
        return watch_all(self.store.watch(path, callback) for path in (_DELAY, DISABLE))

    def check_ctime_ms(self, check: AuditorCheck, *, scoped: bool = False) -> int | None:
        """Return the time of the check's last run in ms since 1970, None before the first run.

        `scoped`: by the auditor of the scopes ≠ 0. Raises Corrupt.
        """
        from bkctl.formats.data_formats_pb2 import CheckClockFormat

        path = f"{base_path(scoped)}/{check.value}"
        found = self.store.get(path)
        if found is None:
            return None
        message = parse_message(CheckClockFormat, found.value, f"{path} in {self.store.name}: Clock")
        return message.ctime if message.HasField("ctime") and message.ctime >= 0 else None

    def set_check_ctime_ms(self, check: AuditorCheck, ctime_ms: int, *, scoped: bool = False) -> None:
        """Store the time of the check's last run (-1: never); the next auditor waits for the interval from then.

        Source: setCheckAllLedgersCTime, setPlacementPolicyCheckCTime, setReplicasCheckCTime.
        """
        from bkctl.formats.data_formats_pb2 import CheckClockFormat

        self._layout.prepare()
        value = CheckClockFormat(ctime=ctime_ms).SerializeToString()
        self.store.put(f"{base_path(scoped)}/{check.value}", value, None)


_VOTE: Final = re.compile("V_(-?[0-9]{9,10})", re.ASCII)


class AuditorElection:
    """The elections of one cluster: one for scope 0, shared with Apache's auditors; with `scoped` ours for the rest.

    Methods raise Unreachable, as `MetadataStore`.
    """

    def __init__(self, store: MetadataStore, layout: UnderreplicationLayout | None = None) -> None:
        self.store = store
        self._layout = layout or UnderreplicationLayout(store)

    def votes(self, *, scoped: bool = False) -> tuple[str | BkctlError, ...]:
        """Return the ids of the voting bookies in the order of their votes; the first one is the auditor.

        A damaged vote is returned as its error.
        """
        return tuple(self._voters(self.vote_paths(scoped=scoped)))

    def auditor(self, *, scoped: bool = False) -> str | None:
        """Return the id of the bookie that is auditor now, None without one.

        Raises Corrupt if its vote is damaged; later votes are not parsed. Source: getCurrentAuditor.
        """
        found = next(self._voters(self.vote_paths(scoped=scoped)), None)
        return None if found is None else value_of(found)

    def _voters(self, paths: Sequence[str]) -> Iterator[str | BkctlError]:
        for path, vote in zip(paths, self.store.get_many(paths), strict=True):
            if vote is not None:
                where = f"{path} in {self.store.name}: Vote"
                found = attempt(parse_text, "AuditorVoteFormat", vote.value, where)
                yield found if isinstance(found, BkctlError) else str(found.bookieId)

    def vote(self, bookie_id: str, *, scoped: bool = False) -> Claim:
        """Cast a vote for `bookie_id`, which counts until its release or the session's end. Source: createMyVote."""
        self._layout.prepare()
        election = _election_path(scoped)
        create_if_missing(self.store, election, b"")
        return self.store.claim(f"{election}/V_", _vote_value(bookie_id), numbered=True)

    def vote_paths(self, *, scoped: bool = False) -> tuple[str, ...]:
        """Return the paths of the votes in their order: the owner of the first one is the auditor."""
        election = _election_path(scoped)
        matches = [match for match in map(_VOTE.fullmatch, self.store.children(election) or ()) if match]
        # By number, as Apache does: after 2^31 elections they are negative.
        matches.sort(key=lambda match: int(match[1]))
        return tuple(f"{election}/{match[0]}" for match in matches)

    def announce(self, bookie_id: str, *, scoped: bool = False) -> None:
        """Write the winner into the election's own node, as Apache's auditors do for people who look there."""
        self.store.put(_election_path(scoped), _vote_value(bookie_id), None)

    def was_held(self) -> bool:
        """Return whether this cluster ever had an election of either auditor."""
        return any(self.store.get(_election_path(scoped)) is not None for scoped in (False, True))


def _vote_value(bookie_id: str) -> bytes:
    from bkctl.formats.data_formats_pb2 import AuditorVoteFormat

    return print_text(AuditorVoteFormat(bookieId=bookie_id)).encode("ascii")


def _election_path(scoped: bool) -> str:
    return f"{base_path(scoped)}/auditorelection"


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
