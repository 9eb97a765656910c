"""Auto-recovery's state in the metadata store: marked ledgers, who works on them, switches, clocks, the auditor.

    underreplication/LAYOUT                                            type and version of what follows
    underreplication/ledgers/<id: 4 hex>/<4>/<4>/<4>/urL<10+ digits>   the marks; their value names the missing replicas
    underreplication/locks/urL<10+ digits>                             ephemeral: a worker replicates this ledger
    underreplication/auditorelection/V_<sequence>                      ephemeral: a vote; the lowest one is the auditor
    underreplication/disable, lostBookieRecoveryDelay, …ctime          switches and clocks, for every scope
    underreplication/scopes/ledgers/<32 hex as 4/4/…>/urL<32 hex>      marks, locks and votes of the scopes ≠ 0,
    underreplication/scopes/locks/urL<32 hex>, …/auditorelection/      where Apache's auditor and workers do not look,
    underreplication/scopes/…ctime                                     and when their auditor checked them

Every byte in scope 0 is Apache's. Source: ZkLedgerUnderreplicationManager, ZkLedgerAuditorManager, DataFormats.proto.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from enum import Enum
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
from bkctl.metadata.store import NEW, Claim, MetadataStore, Versioned, walk_levels

UNDERREPLICATION: Final = "underreplication"
LAYOUT_TYPE: Final = "BASIC"
LAYOUT_VERSION: Final = 1
_LAYOUT: Final = f"{UNDERREPLICATION}/LAYOUT"
_DISABLE: Final = f"{UNDERREPLICATION}/disable"
_DELAY: Final = f"{UNDERREPLICATION}/lostBookieRecoveryDelay"
_DELAY_S_MAX: Final = (1 << 31) - 1
_HEX_4: Final = re.compile("[0-9a-f]{4}", re.ASCII)
_MARK: Final = re.compile("urL([0-9]{10,19})", re.ASCII)
_SCOPED_MARK: Final = re.compile("urL([0-9a-f]{32})", re.ASCII)
_VOTE: Final = re.compile("V_(-?[0-9]{9,10})", re.ASCII)
_NUMBER: Final = re.compile(rb"[+-]?[0-9]{1,10}")


class AuditorCheck(Enum):
    """The auditor's periodic checks, by the node that keeps when each ran last."""

    ALL_LEDGERS = "checkallledgersctime"
    PLACEMENT_POLICY = "placementpolicycheckctime"
    REPLICAS = "replicascheckctime"


class UnderreplicatedLedger(NamedTuple):
    """A ledger that was marked.

    `missing_replicas` are the bookies that lack entries of it, in the order in which they were found missing;
    `ctime_ms` is when it was marked last (as the mark says, else the store, else None).
    """

    ledger: LedgerId
    missing_replicas: tuple[str, ...]
    ctime_ms: int | None
    version: int


class LedgerLock(NamedTuple):
    """A ledger that is being replicated. `owner` is what the worker says of itself: Apache's its host name, not its
    bookie id; None where it says nothing. `ctime_ms` is since when."""

    ledger: LedgerId
    owner: str | None
    ctime_ms: int | None


class LedgerUnderreplicationManager:
    """Auto-recovery's state in one cluster, all scopes. Methods raise Unreachable, as `MetadataStore`."""

    def __init__(self, store: MetadataStore) -> None:
        self.store = store
        self._prepared = False
        self._claims: dict[LedgerId, Claim] = {}
        self._claims_lock = threading.Lock()

    # marks

    def list(self, scope_id: int | None = 0) -> Iterator[tuple[LedgerId, UnderreplicatedLedger | BkctlError]]:
        """The marked ledgers of the scope (None: of every scope) in ascending order; a damaged mark comes as its error.

        Streams. A mark that goes or comes meanwhile may be in it. Raises Unsupported for a later layout.
        """
        self._check_layout()
        waiting: deque[tuple[LedgerId, str]] = deque()

        def paths() -> Iterator[str]:
            for path, ledger in self._marks(scope_id):
                waiting.append((ledger, path))
                yield path

        for found in self.store.get_many(paths()):
            ledger, path = waiting.popleft()
            if found is not None:
                try:
                    mark = self._parse_mark(ledger, path, found)
                except BkctlError as error:
                    yield ledger, error
                else:
                    yield ledger, mark

    def beside(self) -> Callable[[LedgerId], UnderreplicatedLedger | None]:
        """A function that gives the marks of ledgers, which it is asked for in ascending order; None where there is
        none, or a damaged one. Streams: no mark is held that is not asked for. Raises as `list`."""
        marks = (each for each in self.list(None) if not isinstance(each[1], BkctlError))
        present = next(marks, None)

        def mark_of(ledger: LedgerId) -> UnderreplicatedLedger | None:
            nonlocal present
            while present is not None and present[0] < ledger:
                present = next(marks, None)
            found = None if present is None or present[0] != ledger else present[1]
            return found if isinstance(found, UnderreplicatedLedger) else None

        return mark_of

    def any(self, scope_id: int | None = None) -> bool:
        """Whether a ledger of the scope (None: of any) is marked."""
        return next(self._marks(scope_id), None) is not None

    def marked(self, *, scoped: bool) -> Iterator[LedgerId]:
        """Ids of the marked ledgers of scope 0, or with `scoped` of all others, in ascending order; without values."""
        return (ledger for _, ledger in self._marks(None if scoped else 0) if ledger.is_scoped == scoped)

    def get(self, ledger: LedgerId) -> UnderreplicatedLedger | None:
        """The ledger's mark; None when it has none. Raises Corrupt, naming it."""
        path = mark_path(ledger)
        found = self.store.get(path)
        return None if found is None else self._parse_mark(ledger, path, found)

    def mark(self, ledger: LedgerId, missing_replicas: Collection[str], *, now_ms: int | None = None) -> bool:
        """Mark the ledger as lacking entries on the bookies `missing_replicas`, beside those it is marked for.

        Returns False when it was marked for all of them. Raises UsageError for what is no bookie id, Corrupt when its
        present mark is damaged. Source: markLedgerUnderreplicatedAsync.
        """
        from bkctl.formats.data_formats_pb2 import UnderreplicatedLedgerFormat

        for bookie_id in missing_replicas:
            check_bookie_id(bookie_id)
        self.prepare()
        path = mark_path(ledger)
        ctime_ms = time.time_ns() // 1_000_000 if now_ms is None else now_ms
        while True:
            found = self.store.get(path)
            present = () if found is None else self._parse_mark(ledger, path, found).missing_replicas
            added = [each for each in dict.fromkeys(missing_replicas) if each not in present]
            if found is not None and not added:
                return False
            message = UnderreplicatedLedgerFormat(replica=[*present, *added], ctime=ctime_ms)
            try:
                self.store.put(path, print_text(message).encode("ascii"), NEW if found is None else found.version)
            except (AlreadyExists, NotFound, MetadataVersionConflict):
                continue  # Somebody marked or unmarked it just now.
            return True

    def unmark(self, ledger: LedgerId, version: int | None = None) -> None:
        """Take the ledger's mark away (only in `version`, if given), and the parents left empty.

        Raises NotFound when it is not marked; MetadataVersionConflict when it was marked again, and stays so.
        """
        path = mark_path(ledger)
        try:
            self.store.delete(path, version, prune=8 if ledger.is_scoped else 4)
        except MetadataVersionConflict as error:
            raise MetadataVersionConflict(
                f"Ledger {ledger} was marked underreplicated again meanwhile", may_be_applied=error.may_be_applied
            ) from error
        except NotFound as error:
            raise NotFound(f"Ledger {ledger} is not marked underreplicated") from error

    def watch(self, callback: Callable[[], None], *, scoped: bool) -> Callable[[], None]:
        """Call `callback()` when there may be work for workers on scope 0, or with `scoped` on the others.

        That is when a first mark comes, a lock goes, or auto-recovery is switched; not for each mark among others.
        As MetadataStore.watch; returns the cancel.
        """
        base = f"{UNDERREPLICATION}/scopes" if scoped else UNDERREPLICATION
        cancels = [
            self.store.watch(f"{base}/ledgers", callback, children=True),
            self.store.watch(f"{base}/locks", callback, children=True),
            self.store.watch(_DISABLE, callback),
        ]
        return _cancel_all(cancels)

    def _marks(self, scope_id: int | None) -> Iterator[tuple[str, LedgerId]]:
        if scope_id in (None, 0):
            for directory, _, names in walk_levels(self.store, f"{UNDERREPLICATION}/ledgers", (_HEX_4,) * 4):
                numbers = ((name, int(match[1])) for name in names if (match := _MARK.fullmatch(name)))
                for name, number in sorted(numbers, key=lambda each: each[1]):
                    if number <= I64_MAX:
                        yield f"{directory}/{name}", LedgerId(0, number)
        if scope_id == 0:
            return
        first = "" if scope_id is None else f"{scope_id:016x}"
        base = f"{UNDERREPLICATION}/scopes/ledgers"
        for directory, _, names in walk_levels(self.store, base, (_HEX_4,) * 8, first):
            for name in names:
                match = _SCOPED_MARK.fullmatch(name)
                if match:
                    ledger = LedgerId.from_value(int(match[1], 16))
                    if scope_id is not None and ledger.scope_id != scope_id:
                        return
                    yield f"{directory}/{name}", ledger

    def _parse_mark(self, ledger: LedgerId, path: str, found: Versioned[bytes]) -> UnderreplicatedLedger:
        return parse_mark(ledger, found, f"{path} in {self.store.name}: Mark")

    # locks

    def locks(self, scope_id: int | None = None) -> Iterator[LedgerLock]:
        """The ledgers of the scope (None: of any) that a worker has locked, in ascending order."""
        places = sorted(self._locks(scope_id))
        for (ledger, path), found in zip(places, self.store.get_many(path for _, path in places), strict=True):
            if found is not None:
                yield LedgerLock(ledger, self._owner(path, found), found.ctime_ms)

    def _locks(self, scope_id: int | None) -> Iterator[tuple[LedgerId, str]]:
        for base, pattern, radix in (
            (f"{UNDERREPLICATION}/locks", _MARK, 10),
            (f"{UNDERREPLICATION}/scopes/locks", _SCOPED_MARK, 16),
        ):
            for name in self.store.children(base) or ():
                match = pattern.fullmatch(name)
                if match:
                    ledger = LedgerId.from_value(int(match[1], radix))
                    if scope_id is None or ledger.scope_id == scope_id:
                        yield ledger, f"{base}/{name}"

    def locked(self) -> set[LedgerId]:
        """Ids of the ledgers that somebody has locked, in any scope; their owners are not read."""
        return {ledger for ledger, _ in self._locks(None)}

    def lock_owner(self, ledger: LedgerId) -> LedgerLock | None:
        """Who has the ledger locked; None when nobody has."""
        path = _lock_path(ledger)
        found = self.store.get(path)
        return None if found is None else LedgerLock(ledger, self._owner(path, found), found.ctime_ms)

    def lock(self, ledger: LedgerId, owner: str) -> Claim:
        """Lock the ledger against other workers, until `unlock` or the end of the store's session.

        A session may end while we work: the claim says whether the lock is still ours. Raises Conflict, naming the
        owner, when somebody has it. Source: acquireUnderreplicatedLedger.
        """
        found = self.lock_many([ledger], owner)[0]
        if isinstance(found, BkctlError):
            raise found
        return found

    def lock_many(self, ledgers: Sequence[LedgerId], owner: str) -> Sequence[Claim | BkctlError]:
        """`lock` of each, for itself; a ledger's error comes in its place. Raises only Unreachable."""
        from bkctl.formats.data_formats_pb2 import LockDataFormat

        self.prepare()
        value = print_text(LockDataFormat(bookieId=owner)).encode("ascii")
        results: list[Claim | BkctlError] = []
        for ledger, found in zip(
            ledgers, self.store.claim_many([_lock_path(each) for each in ledgers], value), strict=True
        ):
            if isinstance(found, AlreadyExists):
                results.append(self._locked_by_others(ledger, found))
                continue
            if not isinstance(found, BkctlError):
                with self._claims_lock:
                    self._claims[ledger] = found
            results.append(found)
        return results

    def _locked_by_others(self, ledger: LedgerId, cause: AlreadyExists) -> BkctlError:
        try:
            theirs = self.lock_owner(ledger)
        except Corrupt as error:
            return error
        by = f" by {theirs.owner}" if theirs is not None and theirs.owner else ""
        conflict = Conflict(f"Ledger {ledger} is being replicated{by}")
        conflict.__cause__ = cause
        return conflict

    def unlock(self, ledger: LedgerId) -> None:
        """Release the lock that `lock` took here, unless it was lost, and maybe taken by another, meanwhile.

        Nothing happens where there is none. Source: releaseUnderreplicatedLedger.
        """
        self.unlock_many([ledger])

    def unlock_many(self, ledgers: Collection[LedgerId]) -> None:
        """`unlock` of each. Raises Unreachable: some may be left then, until it is called again."""
        with self._claims_lock:
            claims = {ledger: self._claims[ledger] for ledger in ledgers if ledger in self._claims}
        self.store.release_many(list(claims.values()))
        with self._claims_lock:
            for ledger, claim in claims.items():
                if self._claims.get(ledger) is claim:
                    del self._claims[ledger]

    def _owner(self, path: str, found: Versioned[bytes]) -> str | None:
        message = parse_text("LockDataFormat", found.value, f"{path} in {self.store.name}: Lock")
        return message.bookieId if message.HasField("bookieId") else None

    # switches and clocks

    def is_enabled(self) -> bool:
        """Whether auto-recovery is on."""
        return self.store.get(_DISABLE) is None

    def disable(self) -> None:
        """Switch auto-recovery off. Raises AlreadyExists when it is off."""
        self.prepare()
        try:
            self.store.put(_DISABLE, b"", NEW)
        except AlreadyExists as error:
            raise AlreadyExists("Auto-recovery is disabled already") from error

    def enable(self) -> None:
        """Switch auto-recovery on. Raises AlreadyExists when it is on."""
        try:
            self.store.delete(_DISABLE)
        except NotFound as error:
            raise AlreadyExists("Auto-recovery is enabled already") from error

    def lost_bookie_recovery_delay_s(self) -> int | None:
        """Seconds that the auditor waits before it takes a bookie for lost; None where none is stored: its default, 0.

        Raises Corrupt for what is no number.
        """
        found = self.store.get(_DELAY)
        if found is None:
            return None
        if not _NUMBER.fullmatch(found.value):
            raise Corrupt(f"{_DELAY} in {self.store.name} is {found.value[:40]!r}, no number of seconds")
        return int(found.value)

    def set_lost_bookie_recovery_delay_s(self, seconds: int) -> None:
        """Store the delay, 0 too; an auditor hears of it at once, and begins an audit. Raises UsageError."""
        if not 0 <= seconds <= _DELAY_S_MAX:
            raise UsageError(f"A recovery delay of {seconds} s is not between 0 and {_DELAY_S_MAX}")
        self.prepare()
        self.store.put(_DELAY, b"%d" % seconds, None)

    def initialize_lost_bookie_recovery_delay_s(self, seconds: int) -> int:
        """Store the delay where none is stored; returns the one that is. Source: initializeLostBookieRecoveryDelay."""
        self.prepare()
        self._create(_DELAY, b"%d" % seconds)
        return self.lost_bookie_recovery_delay_s() or 0

    def watch_auditing(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback()` when the delay is written or auto-recovery is switched, as MetadataStore.watch."""
        cancels = [self.store.watch(path, callback) for path in (_DELAY, _DISABLE)]
        return _cancel_all(cancels)

    def delay_version(self) -> int | None:
        """Another number after each time that somebody wrote the delay, the same one too; None: none is stored."""
        found = self.store.get(_DELAY)
        return None if found is None else found.version

    def trigger_audit(self) -> str:
        """Have the auditors look for lost bookies now; returns the id of that of scope 0, else of the scopes.

        It is woken by writing the delay anew, as Apache's shell does. Raises Conflict when auto-recovery is disabled,
        NotFound when there is no auditor. Source: TriggerAuditCommand, BookKeeperAdmin.triggerAudit.
        """
        if not self.is_enabled():
            raise Conflict("Auto-recovery is disabled", hint="enable it first")
        auditor = self.auditor() or self.auditor(scoped=True)
        if auditor is None:
            raise NotFound("No auditor is elected", hint="start auto-recovery on some bookie")
        self.set_lost_bookie_recovery_delay_s(self.lost_bookie_recovery_delay_s() or 0)
        return auditor

    def check_ctime_ms(self, check: AuditorCheck, *, scoped: bool = False) -> int | None:
        """When the auditor (`scoped`: that of the scopes) ran this check last, in ms since 1970; None when never.

        Raises Corrupt.
        """
        from bkctl.formats.data_formats_pb2 import CheckClockFormat

        path = _clock_path(check, scoped)
        found = self.store.get(path)
        if found is None:
            return None
        message = parse_message(CheckClockFormat, found.value, f"{path} in {self.store.name}: Clock")
        return message.ctime if message.HasField("ctime") and message.ctime >= 0 else None

    def set_check_ctime_ms(self, check: AuditorCheck, ctime_ms: int, *, scoped: bool = False) -> None:
        """Store when the check ran last; an auditor that starts later runs it once its interval after that is over.

        -1: never. Source: setCheckAllLedgersCTime, setPlacementPolicyCheckCTime, setReplicasCheckCTime.
        """
        from bkctl.formats.data_formats_pb2 import CheckClockFormat

        self.prepare()
        self.store.put(_clock_path(check, scoped), CheckClockFormat(ctime=ctime_ms).SerializeToString(), None)

    # the auditor

    def votes(self, *, scoped: bool = False) -> tuple[str, ...]:
        """Ids of the bookies that would be auditor, in the order of their votes: the first one is.

        `scoped`: the auditor of the scopes ≠ 0. Raises Corrupt for a damaged vote.
        """
        paths = self.vote_paths(scoped=scoped)
        found = zip(paths, self.store.get_many(paths), strict=True)
        return tuple(self._voter(path, each.value) for path, each in found if each is not None)

    def auditor(self, *, scoped: bool = False) -> str | None:
        """Id of the bookie that is auditor now; None when there is none. Source: getCurrentAuditor."""
        return next(iter(self.votes(scoped=scoped)), None)

    def vote(self, bookie_id: str, *, scoped: bool = False) -> Claim:
        """Cast a vote for `bookie_id`, which counts until it is released or the session ends. Source: createMyVote."""
        from bkctl.formats.data_formats_pb2 import AuditorVoteFormat

        self.prepare()
        value = print_text(AuditorVoteFormat(bookieId=bookie_id)).encode("ascii")
        self._create(_election_path(scoped), b"")
        return self.store.claim(f"{_election_path(scoped)}/V_", value, numbered=True)

    def vote_paths(self, *, scoped: bool = False) -> tuple[str, ...]:
        """The votes that there are, in their order: whose is the first is the auditor."""
        election = _election_path(scoped)
        matches = [match for match in map(_VOTE.fullmatch, self.store.children(election) or ()) if match]
        # By number, as Apache does: after 2^31 elections they are negative.
        matches.sort(key=lambda match: int(match[1]))
        return tuple(f"{election}/{match[0]}" for match in matches)

    def note_auditor(self, bookie_id: str, *, scoped: bool = False) -> None:
        """Say in the election's own node who won, as Apache's auditors do for people who look there."""
        from bkctl.formats.data_formats_pb2 import AuditorVoteFormat

        value = print_text(AuditorVoteFormat(bookieId=bookie_id)).encode("ascii")
        self.store.put(_election_path(scoped), value, None)

    def was_elected(self) -> bool:
        """Whether there has ever been an election in this cluster, of either auditor."""
        return any(self.store.get(_election_path(scoped)) is not None for scoped in (False, True))

    def _voter(self, path: str, value: bytes) -> str:
        message = parse_text("AuditorVoteFormat", value, f"{path} in {self.store.name}: Vote")
        return str(message.bookieId)

    # layout

    def _check_layout(self) -> bool:
        """Whether the layout is there. Raises Unsupported for another than Apache's, Corrupt for none at all."""
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
        """Make sure that marks can be kept, as Apache's auditor does when it starts.

        Raises Unsupported for a later layout, Corrupt for none. Source: checkLayout.
        """
        if self._prepared:
            return
        from bkctl.formats.data_formats_pb2 import LedgerRereplicationLayoutFormat

        if not self._check_layout():
            layout = print_text(LedgerRereplicationLayoutFormat(type=LAYOUT_TYPE, version=LAYOUT_VERSION))
            self._create(_LAYOUT, layout.encode("ascii"))
            self._check_layout()
        for path in (f"{UNDERREPLICATION}/ledgers", f"{UNDERREPLICATION}/locks"):
            self._create(path, b"")
        self._prepared = True

    def _create(self, path: str, value: bytes) -> None:
        try:
            self.store.put(path, value, NEW)
        except AlreadyExists:
            return


def parse_mark(ledger: LedgerId, found: Versioned[bytes], where: str = "Mark") -> UnderreplicatedLedger:
    """The mark that a node holds. Raises Corrupt, naming `where`."""
    message = parse_text("UnderreplicatedLedgerFormat", found.value, where)
    ctime_ms = message.ctime if message.HasField("ctime") else found.ctime_ms
    return UnderreplicatedLedger(ledger, tuple(message.replica), ctime_ms, found.version)


def mark_path(ledger: LedgerId) -> str:
    """Where the ledger's mark is kept, below the root. Raises UsageError for an id that no ledger can have."""
    if ledger.is_scoped:
        name = ledger.qualified_name
        parts = "/".join(name[at : at + 4] for at in range(0, 32, 4))
        return f"{UNDERREPLICATION}/scopes/ledgers/{parts}/urL{name}"
    _check_default_id(ledger)
    digits = f"{ledger.ledger_id:016x}"
    parts = "/".join(digits[at : at + 4] for at in range(0, 16, 4))
    return f"{UNDERREPLICATION}/ledgers/{parts}/urL{ledger.ledger_id:010d}"


def _cancel_all(cancels: Collection[Callable[[], None]]) -> Callable[[], None]:
    def cancel() -> None:
        for each in cancels:
            each()

    return cancel


def _clock_path(check: AuditorCheck, scoped: bool) -> str:
    return f"{UNDERREPLICATION}/{'scopes/' if scoped else ''}{check.value}"


def _election_path(scoped: bool) -> str:
    return f"{UNDERREPLICATION}/{'scopes/' if scoped else ''}auditorelection"


def _lock_path(ledger: LedgerId) -> str:
    if ledger.is_scoped:
        return f"{UNDERREPLICATION}/scopes/locks/urL{ledger.qualified_name}"
    _check_default_id(ledger)
    return f"{UNDERREPLICATION}/locks/urL{ledger.ledger_id:010d}"


def _check_default_id(ledger: LedgerId) -> None:
    if ledger.ledger_id > I64_MAX:
        raise UsageError(f"Ledger id {ledger.ledger_id} is 2^63 or more, which no ledger of scope 0 can have")
