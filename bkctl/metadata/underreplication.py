"""Auto-recovery's state in the metadata store: marked ledgers, locks of workers, settings, the auditor's election.

    underreplication/LAYOUT                                            type and version of the nodes below
    underreplication/ledgers/<id: 4 hex>/<4>/<4>/<4>/urL<10+ digits>   marks; the value names the missing replicas
    underreplication/locks/urL<10+ digits>                             ephemeral: a worker replicates this ledger
    underreplication/bkctlFailures/urL<10+ digits>                     failed attempts of our workers, as JSON
    underreplication/auditorelection/V_<sequence>                      ephemeral: a vote; the lowest one is the auditor
    underreplication/disable, lostBookieRecoveryDelay, …ctime          settings and clocks, for every scope
    underreplication/scopes/ledgers/<32 hex as 4/4/…>/urL<32 hex>      marks of the scopes ≠ 0, and beside them
    underreplication/scopes/locks/urL<32 hex>, …/auditorelection/      their locks, votes and clocks: Apache's
    underreplication/scopes/…ctime                                     auditor and workers do not look there

Every byte in scope 0 is Apache's. Source: ZkLedgerUnderreplicationManager, ZkLedgerAuditorManager, DataFormats.proto.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from enum import Enum
from itertools import chain, tee
from typing import Any, Final, NamedTuple

from bkctl.errors import (
    AlreadyExists,
    BkctlError,
    Conflict,
    Corrupt,
    MetadataVersionConflict,
    NotFound,
    Unsupported,
    UsageError,
)
from bkctl.formats.metadata import parse_message, parse_text, print_text
from bkctl.ids import I64_MAX, LedgerId, check_bookie_id
from bkctl.metadata.store import (
    NEW,
    Claim,
    MetadataStore,
    Versioned,
    attempt,
    create_if_missing,
    delete_if_present,
    renamed_errors,
    value_of,
    walk_levels,
    watch_all,
)

UNDERREPLICATION: Final = "underreplication"
SCOPED: Final = f"{UNDERREPLICATION}/scopes"
DISABLE: Final = f"{UNDERREPLICATION}/disable"
LAYOUT_TYPE: Final = "BASIC"
LAYOUT_VERSION: Final = 1
_LAYOUT: Final = f"{UNDERREPLICATION}/LAYOUT"


class UnderreplicationLayout:
    """The nodes below `underreplication` in one store: their version, and their creation before the first write.

    Methods of its parts raise Unreachable, as `MetadataStore`.
    """

    def __init__(self, store: MetadataStore) -> None:
        self.store = store
        self._prepared = False

    def check(self) -> bool:
        """Return whether LAYOUT exists. Raises Unsupported for a layout other than Apache's, Corrupt for bad bytes."""
        found = self.store.get(_LAYOUT)
        if found is None:
            return False
        message: Any = parse_text("LedgerRereplicationLayoutFormat", found.value, f"{_LAYOUT} in {self.store.name}")
        if (message.type, message.version) != (LAYOUT_TYPE, LAYOUT_VERSION):
            raise Unsupported(
                f"{_LAYOUT} in {self.store.name} is {message.type!r} version {message.version}; "
                f"{LAYOUT_TYPE!r} version {LAYOUT_VERSION} is known"
            )
        return True

    def prepare(self) -> None:
        """Create LAYOUT and the directories of marks and locks, as Apache's auditor does when it starts.

        Raises Unsupported for a later layout, Corrupt for bad bytes in LAYOUT. Source: checkLayout.
        """
        if self._prepared:
            return
        from bkctl.formats.data_formats_pb2 import LedgerRereplicationLayoutFormat

        if not self.check():
            layout = print_text(LedgerRereplicationLayoutFormat(type=LAYOUT_TYPE, version=LAYOUT_VERSION))
            create_if_missing(self.store, _LAYOUT, layout.encode("ascii"))
            self.check()
        for path in (f"{UNDERREPLICATION}/ledgers", f"{UNDERREPLICATION}/locks"):
            create_if_missing(self.store, path, b"")
        self._prepared = True


def base_path(scoped: bool) -> str:
    """Return the directory of scope 0, or with `scoped` of all other scopes."""
    return SCOPED if scoped else UNDERREPLICATION


def mark_path(ledger: LedgerId) -> str:
    """Return the path of the ledger's mark, below the root. Raises UsageError for an id of scope 0 above 2^63 − 1."""
    digits = ledger.qualified_name if ledger.is_scoped else f"{ledger.ledger_id:016x}"
    parts = "/".join(digits[at : at + 4] for at in range(0, len(digits), 4))
    return f"{base_path(ledger.is_scoped)}/ledgers/{parts}/{_node_name(ledger)}"


def lock_path(ledger: LedgerId) -> str:
    """Return the path of the ledger's lock, below the root. Raises as `mark_path`."""
    return f"{base_path(ledger.is_scoped)}/locks/{_node_name(ledger)}"


def _node_name(ledger: LedgerId) -> str:
    if ledger.is_scoped:
        return f"urL{ledger.qualified_name}"
    if ledger.ledger_id > I64_MAX:
        raise UsageError(f"Ledger id {ledger.ledger_id} is 2^63 or more, which no ledger of scope 0 can have")
    return f"urL{ledger.ledger_id:010d}"


class LedgerLock(NamedTuple):
    """A ledger under replication.

    `owner` is the name that the worker gave: Apache's workers give their host name, not their bookie id; None where the
    worker gave none, or one that cannot be read. `ctime_ms` is the time of the lock, in ms since 1970.
    """

    ledger: LedgerId
    owner: str | None
    ctime_ms: int | None


class LedgerLocks(UnderreplicationLayout):
    """The locks of one cluster, in all scopes."""

    def __init__(self, store: MetadataStore) -> None:
        super().__init__(store)
        self._claims: dict[LedgerId, Claim] = {}
        self._claims_lock = threading.Lock()

    def list(self, scope_id: int | None = None) -> Iterator[LedgerLock]:
        """Yield the locks of the scope's ledgers (None: of any scope), by ascending ledger id."""
        places = _ledgers_in(self.store, "locks", scope_id)
        for (ledger, _), found in zip(places, self.store.get_many(path for _, path in places), strict=True):
            if found is not None:
                yield LedgerLock(ledger, _owner(found), found.ctime_ms)

    def ledgers(self) -> set[LedgerId]:
        """Return the ids of all locked ledgers of all scopes, without their owners."""
        return {ledger for ledger, _ in _ledgers_in(self.store, "locks")}

    def get(self, ledger: LedgerId) -> LedgerLock | None:
        """Return the lock of the ledger, None for an unlocked ledger."""
        found = self.store.get(lock_path(ledger))
        return None if found is None else LedgerLock(ledger, _owner(found), found.ctime_ms)

    def lock(self, ledger: LedgerId, owner: str) -> Claim:
        """Lock the ledger against other workers, until `unlock` or the end of the store's session.

        The session may end during the replication: the returned claim says whether the lock is still held. Raises
        Conflict, naming the owner, for a locked ledger. Source: acquireUnderreplicatedLedger.
        """
        return value_of(self.lock_many([ledger], owner)[0])

    def lock_many(self, ledgers: Sequence[LedgerId], owner: str) -> Sequence[Claim | BkctlError]:
        """`lock` each ledger on its own; a ledger that fails has its error in its place. Raises only Unreachable."""
        from bkctl.formats.data_formats_pb2 import LockDataFormat

        self.prepare()
        value = print_text(LockDataFormat(bookieId=owner)).encode("ascii")
        claimed = self.store.claim_many([lock_path(ledger) for ledger in ledgers], value)
        results: list[Claim | BkctlError] = []
        for ledger, found in zip(ledgers, claimed, strict=True):
            if isinstance(found, AlreadyExists):
                present = self.get(ledger)
                by = f" by {present.owner}" if present is not None and present.owner else ""
                conflict = Conflict(f"Ledger {ledger} is being replicated{by}")
                conflict.__cause__ = found
                results.append(conflict)
                continue
            if not isinstance(found, BkctlError):
                with self._claims_lock:
                    self._claims[ledger] = found
            results.append(found)
        return results

    def unlock(self, ledger: LedgerId) -> None:
        """Release the lock that this object took, unless it was lost since, or taken by another worker.

        Source: releaseUnderreplicatedLedger.
        """
        self.unlock_many([ledger])

    def unlock_all(self) -> None:
        """`unlock` each ledger that this object has locked. Raises Unreachable, as `unlock_many`."""
        self.unlock_many(list(self._claims))

    def unlock_many(self, ledgers: Collection[LedgerId]) -> None:
        """`unlock` each ledger. Raises Unreachable: some may stay locked until the next call."""
        with self._claims_lock:
            claims = {ledger: self._claims[ledger] for ledger in ledgers if ledger in self._claims}
        self.store.release_many(list(claims.values()))
        with self._claims_lock:
            for ledger, claim in claims.items():
                if self._claims.get(ledger) is claim:
                    del self._claims[ledger]


def _owner(found: Versioned[bytes]) -> str | None:
    try:
        message = parse_text("LockDataFormat", found.value, "Lock")
    except Corrupt:  # The ledger is locked all the same.
        return None
    return message.bookieId if message.HasField("bookieId") else None


_HEX_4: Final = re.compile("[0-9a-f]{4}", re.ASCII)
#: Names of marks, and of locks.
_DEFAULT_NODE: Final = re.compile("urL([0-9]{10,19})", re.ASCII)
_SCOPED_NODE: Final = re.compile("urL([0-9a-f]{32})", re.ASCII)


def _ledgers_in(store: MetadataStore, directory: str, scope_id: int | None = None) -> list[tuple[LedgerId, str]]:
    """Return the ledgers (of a scope) that have a node in a flat directory beside the marks, with the node's path."""
    found: list[tuple[LedgerId, str]] = []
    for scoped, pattern, radix in ((False, _DEFAULT_NODE, 10), (True, _SCOPED_NODE, 16)):
        base = f"{base_path(scoped)}/{directory}"
        matches = map(pattern.fullmatch, store.children(base) or ())
        found += [(LedgerId.from_value(int(match[1], radix)), f"{base}/{match[0]}") for match in matches if match]
    return sorted(each for each in found if scope_id in (None, each[0].scope_id))


class UnderreplicatedLedger(NamedTuple):
    """A marked ledger.

    `missing_replicas` are the bookies that lack entries of it, in the order in which the auditor found them missing;
    `ctime_ms` is the time of the last mark, in ms since 1970 (from the mark, else from the store, else None).
    `suspects` are the missing replicas whose every entry a worker verifies, if they answer: the mark names them twice,
    which Apache's workers and auditors ignore and keep.
    """

    ledger: LedgerId
    missing_replicas: tuple[str, ...]
    ctime_ms: int | None
    version: int
    suspects: tuple[str, ...] = ()


class MarkChange(NamedTuple):
    """A ledger and the bookies of its mark; `changed` is False if the mark was as requested."""

    ledger: LedgerId
    missing_replicas: tuple[str, ...]
    changed: bool


class LedgerMarks(UnderreplicationLayout):
    """The marks of one cluster, in all scopes."""

    def list(self, scope_id: int | None = 0) -> Iterator[tuple[LedgerId, UnderreplicatedLedger | BkctlError]]:
        """Yield the marked ledgers of the scope (None: of every scope) in ascending order.

        A damaged or refused mark is yielded as its error. Marks written or removed meanwhile may be included. Raises
        Unsupported for a later layout.
        """
        self.check()
        places, asked = tee(self.places(scope_id))
        values = chain.from_iterable(self.store.get_batches(path for path, _ in asked))
        for (path, ledger), found in zip(places, values, strict=True):
            if found is not None:
                yield ledger, found if isinstance(found, BkctlError) else attempt(self._parse, ledger, path, found)

    def cursor(self) -> Callable[[LedgerId], UnderreplicatedLedger | None]:
        """Return a function that gives a ledger's mark, or None; callers ask for ledgers in ascending order.

        A damaged mark counts as none. The cursor holds one mark at a time. Raises as `list`.
        """
        marks = (mark for _, mark in self.list(None) if not isinstance(mark, BkctlError))
        present = next(marks, None)

        def mark_of(ledger: LedgerId) -> UnderreplicatedLedger | None:
            nonlocal present
            while present is not None and present.ledger < ledger:
                present = next(marks, None)
            return present if present is not None and present.ledger == ledger else None

        return mark_of

    def has_marks(self, scope_id: int | None = None) -> bool:
        """Return whether a ledger of the scope (None: of any scope) is marked."""
        return next(self.places(scope_id), None) is not None

    def ids(self, *, scoped: bool) -> Iterator[LedgerId]:
        """Yield the ids of marked ledgers of scope 0, or with `scoped` of all other scopes, ascending.

        The marks themselves are not read.
        """
        return (ledger for _, ledger in self.places(None if scoped else 0) if ledger.is_scoped == scoped)

    def get(self, ledger: LedgerId) -> UnderreplicatedLedger | None:
        """Return the ledger's mark, None for an unmarked ledger. Raises Corrupt, naming the node."""
        path = mark_path(ledger)
        found = self.store.get(path)
        return None if found is None else self._parse(ledger, path, found)

    def add(
        self, ledger: LedgerId, missing_replicas: Collection[str], *, suspect: bool = False, now_ms: int | None = None
    ) -> bool:
        """`mark` the ledger; return False when the mark says all of that already."""
        return self.mark(ledger, missing_replicas, suspect=suspect, now_ms=now_ms).changed

    def mark(
        self,
        ledger: LedgerId,
        missing_replicas: Collection[str],
        *,
        suspect: bool = False,
        now_ms: int | None = None,
        dry_run: bool = False,
    ) -> MarkChange:
        """Mark the ledger as lacking entries on the bookies `missing_replicas`, in addition to those already marked.

        `suspect`: workers verify every entry of these. With `dry_run` nothing is written. Raises UsageError for an
        invalid bookie id, Corrupt when the present mark is damaged. Source: markLedgerUnderreplicatedAsync.
        """
        from bkctl.formats.data_formats_pb2 import UnderreplicatedLedgerFormat

        for bookie_id in missing_replicas:
            check_bookie_id(bookie_id)
        if not dry_run:
            self.prepare()
        path = mark_path(ledger)
        ctime_ms = time.time_ns() // 1_000_000 if now_ms is None else now_ms
        while True:
            found = self.store.get(path)
            mark = None if found is None else self._parse(ledger, path, found)
            present, suspects = ((), ()) if mark is None else (mark.missing_replicas, mark.suspects)
            every = tuple(dict.fromkeys((*present, *missing_replicas)))
            twice = tuple(dict.fromkeys((*suspects, *missing_replicas))) if suspect else suspects
            change = MarkChange(ledger, every, mark is None or (every, twice) != (present, suspects))
            if dry_run or not change.changed:
                return change
            message = UnderreplicatedLedgerFormat(replica=[*every, *twice], ctime=ctime_ms)
            try:
                self.store.put(path, print_text(message).encode("ascii"), NEW if found is None else found.version)
            except (AlreadyExists, NotFound, MetadataVersionConflict):
                continue  # Another process marked or unmarked the ledger since the read.
            return change

    def remove(self, ledger: LedgerId, version: int | None = None) -> None:
        """Delete the ledger's mark (with `version`: only in that version), and the parents left empty.

        Raises NotFound for an unmarked ledger; MetadataVersionConflict when the ledger was marked again since: the mark
        stays.
        """
        path = mark_path(ledger)
        missing, changed = "is not marked underreplicated", "was marked underreplicated again meanwhile"
        with renamed_errors(f"Ledger {ledger} {missing}", f"Ledger {ledger} {changed}"):
            self.store.delete(path, version, prune=8 if ledger.is_scoped else 4)

    def watch_work(self, callback: Callable[[], None], *, scoped: bool) -> Callable[[], None]:
        """Call `callback()` when workers on scope 0, or with `scoped` on the other scopes, may have new work.

        New work: the first mark, a released lock, auto-recovery switched on or off. Further marks beside existing ones
        cause no call. Returns a function that cancels. See MetadataStore.watch.
        """
        base = base_path(scoped)
        places = ((f"{base}/ledgers", True), (f"{base}/locks", True), (DISABLE, False))
        return watch_all(self.store.watch(path, callback, children=children) for path, children in places)

    def places(self, scope_id: int | None) -> Iterator[tuple[str, LedgerId]]:
        """Yield the path and ledger of each mark, by ascending ledger id."""
        if scope_id in (None, 0):
            for directory, _, names in walk_levels(self.store, f"{UNDERREPLICATION}/ledgers", (_HEX_4,) * 4):
                numbers = [(int(match[1]), name) for name in names if (match := _DEFAULT_NODE.fullmatch(name))]
                for number, name in sorted(numbers):
                    if number <= I64_MAX:
                        yield f"{directory}/{name}", LedgerId(0, number)
        if scope_id == 0:
            return
        first = "" if scope_id is None else f"{scope_id:016x}"
        for directory, _, names in walk_levels(self.store, f"{SCOPED}/ledgers", (_HEX_4,) * 8, first):
            for name in names:
                if match := _SCOPED_NODE.fullmatch(name):
                    ledger = LedgerId.from_value(int(match[1], 16))
                    if scope_id is not None and ledger.scope_id != scope_id:
                        return
                    yield f"{directory}/{name}", ledger

    def _parse(self, ledger: LedgerId, path: str, found: Versioned[bytes]) -> UnderreplicatedLedger:
        return parse_mark(ledger, found, f"{path} in {self.store.name}: Mark")


def parse_mark(ledger: LedgerId, found: Versioned[bytes], where: str = "Mark") -> UnderreplicatedLedger:
    """Return the mark that a node holds. Raises Corrupt, naming `where`."""
    message = parse_text("UnderreplicatedLedgerFormat", found.value, where)
    ctime_ms = message.ctime if message.HasField("ctime") else found.ctime_ms
    replicas = Counter(message.replica)
    suspects = tuple(bookie_id for bookie_id, count in replicas.items() if count > 1)
    return UnderreplicatedLedger(ledger, tuple(replicas), ctime_ms, found.version, suspects)


REASON_CHARACTERS_MAX: Final = 1000
_FAILURES: Final = "bkctlFailures"


class ReplicationFailure(NamedTuple):
    """The last failure of a ledger, the number of attempts, and the worker; times in ms since 1970."""

    ledger: LedgerId
    attempts: int
    reason: str
    worker: str
    at_ms: int
    retry_at_ms: int | None


class ReplicationFailures:
    """The published failures of one cluster: one node a ledger, as JSON. Methods raise Unreachable, as `MetadataStore`.

    Apache's processes read only the nodes that they know there, and remove the tree with the cluster.
    """

    def __init__(self, store: MetadataStore) -> None:
        self._store = store

    def publish(self, failure: ReplicationFailure) -> None:
        """Store the failure in place of the ledger's former one."""
        document = {
            "attempts": failure.attempts,
            "reason": failure.reason[:REASON_CHARACTERS_MAX],
            "worker": failure.worker,
            "time": failure.at_ms,
            "retryAt": failure.retry_at_ms,
        }
        self._store.put(_failure_path(failure.ledger), json.dumps(document).encode(), None)

    def remove(self, ledger: LedgerId) -> None:
        """Remove the failure of a ledger that is replicated, if there is one."""
        delete_if_present(self._store, _failure_path(ledger))

    def list(self, scope_id: int | None = None) -> Iterator[ReplicationFailure]:
        """Yield the failures of a scope's marked ledgers (None: of all) by ledger id, without unreadable ones."""
        wanted = [ledger for ledger, _ in _ledgers_in(self._store, _FAILURES, scope_id)]
        values = self._store.get_many(map(_failure_path, wanted))
        marks = self._store.get_many(map(mark_path, wanted))
        for ledger, found, mark in zip(wanted, values, marks, strict=True):
            failure = None if found is None or mark is None else _parse_failure(ledger, found.value)
            if failure is not None:
                yield failure

    def prune(self) -> None:
        """Remove the failures of ledgers that are not marked any more: a worker of Apache's replicated them."""
        ledgers = [ledger for ledger, _ in _ledgers_in(self._store, _FAILURES)]
        for ledger, mark in zip(ledgers, self._store.get_many(map(mark_path, ledgers)), strict=True):
            if mark is None:
                self.remove(ledger)

    def get(self, ledger: LedgerId) -> ReplicationFailure | None:
        """Return the ledger's failure, None without one."""
        found = self._store.get(_failure_path(ledger))
        return None if found is None else _parse_failure(ledger, found.value)


def _parse_failure(ledger: LedgerId, value: bytes) -> ReplicationFailure | None:
    try:
        each = json.loads(value)
        retry_at_ms = None if each["retryAt"] is None else int(each["retryAt"])
        return ReplicationFailure(
            ledger, int(each["attempts"]), str(each["reason"]), str(each["worker"]), int(each["time"]), retry_at_ms
        )
    except (ValueError, OverflowError, TypeError, KeyError, RecursionError):
        return None


def _failure_path(ledger: LedgerId) -> str:
    return f"{base_path(ledger.is_scoped)}/{_FAILURES}/{lock_path(ledger).rpartition('/')[2]}"


_DELAY: Final = f"{UNDERREPLICATION}/lostBookieRecoveryDelay"
_DELAY_S_MAX: Final = (1 << 31) - 1
_NUMBER: Final = re.compile(rb"[+-]?[0-9]{1,10}")


class AuditorCheck(Enum):
    """The auditor's periodic checks; the value is the name of the node that keeps the time of the last run."""

    ALL_LEDGERS = "checkallledgersctime"
    PLACEMENT_POLICY = "placementpolicycheckctime"
    REPLICAS = "replicascheckctime"


class AutoRecoverySettings(UnderreplicationLayout):
    """The settings of one cluster's auto-recovery."""

    def is_enabled(self) -> bool:
        """Return whether auto-recovery is on."""
        return self.store.get(DISABLE) is None

    def disable(self) -> None:
        """Switch auto-recovery off. Raises AlreadyExists when it is off."""
        self.prepare()
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
        self.prepare()
        self.store.put(_DELAY, b"%d" % seconds, None)

    def initialize_lost_bookie_recovery_delay_s(self, seconds: int) -> int:
        """Store the delay where none is stored; return the stored one. Source: initializeLostBookieRecoveryDelay."""
        self.prepare()
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

        self.prepare()
        value = CheckClockFormat(ctime=ctime_ms).SerializeToString()
        self.store.put(f"{base_path(scoped)}/{check.value}", value, None)


_VOTE: Final = re.compile("V_(-?[0-9]{9,10})", re.ASCII)


class AuditorElection(UnderreplicationLayout):
    """The elections of one cluster: one for scope 0, shared with Apache's auditors; with `scoped` ours for the rest."""

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
        self.prepare()
        create_if_missing(self.store, _election_path(scoped), b"")
        return self.store.claim(f"{_election_path(scoped)}/V_", _vote_value(bookie_id), numbered=True)

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
    """Marks, locks, settings and elections of one cluster.

    Source: LedgerUnderreplicationManager, one interface for all of them.
    """

    def __init__(self, store: MetadataStore) -> None:
        self.marks, self.locks = LedgerMarks(store), LedgerLocks(store)
        self.settings, self.election = AutoRecoverySettings(store), AuditorElection(store)

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
