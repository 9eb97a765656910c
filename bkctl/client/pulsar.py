"""Pulsar's topics against the cluster's ledgers: what topics hold, what they miss, and ledgers that no topic needs.

A pass first lists the ledgers, then reads the topics, so that a ledger that was created and named meanwhile is never
taken for an orphan. What a pass finds is read again, after a pause, before it is a finding: brokers create a ledger
before they name it, and name it no longer before they delete it. Memory does not grow with ledgers or topics: the
ledgers are in a temporary SQLite file. Pulsar's ledgers are all of scope 0.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from bkctl.client.ledger_survey import fewest_replicas
from bkctl.disk import Closing
from bkctl.errors import BkctlError, Conflict, Corrupt, EntryNotFound, LedgerNotFound, NotFound, UsageError
from bkctl.formats.managed_ledger import parse_message
from bkctl.ids import LedgerId
from bkctl.metadata.admin.overview import list_ledgers
from bkctl.metadata.cluster import Cluster
from bkctl.metadata.pulsar_nodes import (
    COMPACTED_PROPERTY,
    COMPACTION_CURSOR,
    MANAGED_LEDGERS,
    CursorNode,
    PulsarNodes,
    TopicNode,
    schema_ledgers,
    schema_of,
)
from bkctl.metadata.pulsar_topics import Owner, owner_of
from bkctl.metadata.store import attempt
from bkctl.metadata.underreplication import LedgerMarks

if TYPE_CHECKING:
    from bkctl.client.ledger import BookKeeper
    from bkctl.formats.managed_ledger_pb2 import OffloadContext, PositionInfo
    from bkctl.formats.metadata import LedgerMetadata

#: Ledgers whose ends are read at once.
_CONCURRENCY: Final = 64
_BATCH_COUNT: Final = 1000
_CREATE: Final = """CREATE TABLE ledger(
    id INTEGER PRIMARY KEY, size INTEGER, last INTEGER, ctime_ms INTEGER, is_closed INTEGER, risk TEXT, marked INTEGER,
    kind TEXT, owner TEXT, part TEXT, named INTEGER DEFAULT 0)"""
_INDEX: Final = "CREATE INDEX compacted ON ledger(owner) WHERE kind = 'compacted-ledger'"
#: A broker names the ledger of a compaction in a position that it may keep in memory (for
#: managedLedgerCursorPositionFlushSeconds, 60 s); until then the store names the one before, which is deleted already.
_COMPACTION_MS: Final = 600_000
#: As long may a compaction take, whose ledger is open until it ends.
_COMPACTING_MS: Final = 86_400_000
#: The difference that clocks of brokers and store may have.
_SKEW_MS: Final = 5_000


class KnownLedger(NamedTuple):
    """An existing ledger. `risk` is that of its least covered entries: `unavailable`, `one-copy` or None."""

    size_bytes: int
    last_entry_id: int
    ctime_ms: int | None
    is_closed: bool
    risk: str | None
    marked: bool


class Named(NamedTuple):
    """A ledger that a topic names, with its role there: what Pulsar calls the component; `part` is the cursor's name.

    `facts` is None for a ledger that does not exist. `size_bytes` and `entry_count` are by the topic, or by the ledger.
    `offload` is None before a broker began to copy the ledger to tiered storage.
    """

    ledger_id: int
    role: str
    part: str | None
    entry_count: int | None
    size_bytes: int
    ctime_ms: int | None
    offload: OffloadContext | None
    facts: KnownLedger | None

    @property
    def ledger(self) -> LedgerId:
        return LedgerId(0, self.ledger_id)

    @property
    def is_offloaded(self) -> bool:
        """True if tiered storage has all of the ledger."""
        return self.offload is not None and self.offload.complete

    @property
    def bookkeeper_copy(self) -> str | None:
        """BookKeeper's copy of an offloaded ledger in a word, None for other ledgers.

        `kept` until its deletion is due, `deleted`, `left` by a broker that died before it deleted it, or `lost`.
        """
        if self.offload is None or not self.offload.complete:
            return None
        if self.offload.bookkeeperDeleted:
            return "deleted" if self.facts is None else "left"
        return "lost" if self.facts is None else "kept"

    @property
    def is_missing(self) -> bool:
        """True if the ledger should be there: tiered storage does not have it."""
        return self.facts is None and not self.is_offloaded

    @property
    def state(self) -> str:
        """The worst that is known of the ledger, in a word; `offloaded` if only tiered storage has all of it."""
        if self.is_offloaded and (self.facts is None or self.facts.risk):
            return "offloaded"
        if self.facts is None:
            return "missing"
        return self.facts.risk or ("under-replicated" if self.facts.marked else "ok")


class CursorState(NamedTuple):
    """A cursor with its position (None: unknown, since no bookie was asked or `error`), and its backlog in entries."""

    node: CursorNode
    position: tuple[int, int] | None
    backlog: int | None
    compacted_ledger_id: int | None
    error: BkctlError | None = None

    @property
    def name(self) -> str:
        return self.node.subscription

    @property
    def position_text(self) -> str | None:
        return None if self.position is None else "{}:{}".format(*self.position)


class Total(NamedTuple):
    """The numbers of a topic, or of all topics of a tenant or namespace.

    `slowest` is the cursor with the largest backlog, and that; `backlog` is None if no cursor's is known.
    """

    name: str
    slowest: tuple[str | None, int] = (None, 0)
    oldest_ms: int | None = None
    backlog: int | None = 0
    topics: int = 0
    ledgers: int = 0
    entries: int = 0
    size_bytes: int = 0
    offloaded_bytes: int = 0
    cursors: int = 0
    underreplicated: int = 0
    unavailable: int = 0
    missing: int = 0

    @property
    def held_by(self) -> str | None:
        """The cursor with the largest backlog, with its topic where there are several topics."""
        return self.slowest[0]

    def plus(self, topic: Total) -> Total:
        """Return the sums with one more topic, under this name."""
        cursor, backlog = topic.slowest
        slowest = max(self.slowest, (f"{topic.name} {cursor}", backlog), key=itemgetter(1))
        oldest_ms = min((each for each in (self.oldest_ms, topic.oldest_ms) if each is not None), default=None)
        sums = [(one or 0) + (two or 0) for one, two in zip(self[3:], topic[3:], strict=True)]
        return Total(self.name, slowest, oldest_ms, *sums)


class TopicState(NamedTuple):
    """A topic with all that it names."""

    node: TopicNode
    ledgers: tuple[Named, ...]
    cursors: tuple[CursorState, ...]
    schema_ledger_ids: tuple[int, ...] = ()

    @property
    def messages(self) -> list[Named]:
        return [each for each in self.ledgers if each.role == "managed-ledger"]

    @property
    def total(self) -> Total:
        """The numbers of the topic."""
        known = [(each.backlog, each.name) for each in self.cursors if each.backlog is not None]
        backlog, held_by = max(known, key=itemgetter(0), default=(None if self.cursors else 0, None))
        return Total(
            self.node.topic,
            (held_by if backlog else None, backlog or 0),
            min((each.ctime_ms for each in self.messages if each.ctime_ms is not None), default=None),
            backlog,
            1,
            len(self.ledgers),
            sum(each.entry_count or 0 for each in self.messages),
            sum(each.size_bytes for each in self.messages),
            sum(each.size_bytes for each in self.messages if each.is_offloaded),
            len(self.cursors),
            sum(each.facts is not None and each.facts.marked for each in self.ledgers),
            sum(each.state == "unavailable" for each in self.ledgers),
            sum(each.is_missing for each in self.ledgers),
        )

    @property
    def schema(self) -> str | None:
        return schema_of(self.node.name)


class PulsarFinding(NamedTuple):
    """A fault in what topics and ledgers say of each other; `name` is the topic or schema."""

    code: str
    name: str | None
    ledger_id: int | None
    message: str
    advice: str
    size_bytes: int | None = None
    ctime_ms: int | None = None
    part: str | None = None
    kind: str | None = None

    @property
    def ledger(self) -> LedgerId | None:
        return None if self.ledger_id is None else LedgerId(0, self.ledger_id)

    @property
    def age_s(self) -> int | None:
        return None if self.ctime_ms is None else max(0, int(time.time() - self.ctime_ms / 1000))


class End(NamedTuple):
    """The last entry of a ledger that can be read, -1 in an empty one, with its payload."""

    entry_id: int
    payload: bytes


class Inventory(Closing):
    """One pass over ledgers, topics and schemas of a cluster; a context manager.

    `ends` reads the ends of cursors' and open ledgers, as `read_ends` (None: no bookie is asked, so positions that are
    only in cursors' ledgers stay unknown). `progress` gets the number of ledgers read.
    """

    def __init__(
        self,
        cluster: Cluster,
        root: str | None = None,
        *,
        ends: Callable[[set[int]], Mapping[int, End | BkctlError]] | None = None,
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        import sqlite3

        self.cluster = cluster
        self.nodes = PulsarNodes(cluster.store, root)
        self._read_ends, self._progress = ends, progress
        self.errors: list[BkctlError] = []
        #: Topics whose compacted ledger is not known, so that none of theirs is an orphan.
        self._uncertain: set[str] = set()
        self._brokers_since_ms: int | None = None
        self._database = sqlite3.connect("", check_same_thread=False)  # A temporary file, gone with the connection.
        self._database.execute(_CREATE)
        self._database.execute(_INDEX)

    def close(self) -> None:
        self._database.close()

    def list_ledgers(self, only: Iterable[int] | None = None) -> None:
        """List all ledgers of scope 0 with what they risk, or `only` these, ascending. The first half of a pass."""
        self._brokers_since_ms = self.nodes.brokers_since_ms()
        live = {each.bookie_id for each in self.cluster.bookies.list(include_down=False)}
        mark_of = LedgerMarks(self.cluster.store).cursor()

        def rows() -> Iterator[tuple[Any, ...]]:
            ids = None if only is None else (LedgerId(0, each) for each in only)
            found = list_ledgers(self.cluster, 0, ids=ids, unreadable=self._unreadable, progress=self._progress)
            for ledger, (metadata, _, ctime_ms) in found:
                owner = owner_of(metadata.custom_metadata) or Owner(None, None, None)
                yield (
                    ledger.ledger_id, metadata.length, metadata.last_entry_id, ctime_ms, metadata.is_closed,
                    _risk(metadata, live), mark_of(ledger) is not None, *owner,
                )  # fmt: skip

        self._database.executemany("INSERT OR REPLACE INTO ledger VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0)", rows())

    def _unreadable(self, ledger: LedgerId, error: BkctlError) -> None:
        self.errors.append(error)
        # The ledger exists, and its owner is unknown: it is never an orphan.
        self._database.execute("INSERT INTO ledger(id, size, last, named) VALUES(?, 0, -1, 1)", (ledger.ledger_id,))

    def facts(self, ledger_id: int) -> KnownLedger | None:
        """Return what is known of a ledger, None where the pass met none. Each ledger asked for counts as named."""
        row = self._database.execute(
            "UPDATE ledger SET named = 1 WHERE id = ? RETURNING size, last, ctime_ms, is_closed, risk, marked",
            (ledger_id,),
        ).fetchone()
        if row is None:
            return None
        size_bytes, last, ctime_ms, is_closed, risk, marked = row
        return KnownLedger(size_bytes, last, ctime_ms, bool(is_closed), risk, bool(marked))

    def topics(self, below: str = "") -> Iterator[TopicState]:
        """Yield all topics with their ledgers and cursors. The second half of a pass."""
        found = self.nodes.topics(below)
        while batch := list(islice(found, _BATCH_COUNT)):
            topics = []
            for each in batch:
                if isinstance(each, TopicNode):
                    topics.append(each)
                    self.errors += each.errors
                    if each.errors:
                        self._uncertain.add(each.name)
                else:
                    self.errors.append(each)
            ends = self._ends(topics)
            for topic in topics:
                yield self._state(topic, ends)

    def look_up(self, name: str) -> TopicState | None:
        """Return a topic by its managed ledger's name, None for a missing one; reads only what it names."""
        topic = self.nodes.topic(name)
        if topic is None:
            return None
        self.errors += topic.errors
        self.list_ledgers(sorted(topic.named))
        ends = self._ends([topic])
        cursors = (each for each in topic.cursors if each.name == COMPACTION_CURSOR)
        compacted = next((self._cursor(each, [], ends).compacted_ledger_id for each in cursors), None)
        if compacted is not None and compacted not in topic.named:
            self.list_ledgers([compacted])
        return self._state(topic, ends)

    def _ends(self, topics: Iterable[TopicNode]) -> Mapping[int, End | BkctlError]:
        """Read the ends of ledgers that hold positions, and of the ledgers that the topics write."""
        wanted = set()
        for topic in topics:
            wanted |= {each.ledger_id for each in topic.cursors if each.ledger_id is not None}
            if topic.cursors and topic.info.ledgerInfo:
                last = topic.info.ledgerInfo[-1].ledgerId
                facts = self.facts(last)
                if facts is not None and not facts.is_closed:
                    wanted.add(last)
        return self._read_ends(wanted) if wanted and self._read_ends is not None else {}

    def _state(self, topic: TopicNode, ends: Mapping[int, End | BkctlError]) -> TopicState:
        ledgers = [self._messages(each) for each in topic.info.ledgerInfo]
        if ledgers and ledgers[-1].facts is not None and not ledgers[-1].facts.is_closed:
            end = ends.get(ledgers[-1].ledger_id)
            ledgers[-1] = ledgers[-1]._replace(entry_count=end.entry_id + 1 if isinstance(end, End) else None)
        cursors = []
        for cursor in topic.cursors:
            state = self._cursor(cursor, ledgers, ends)
            cursors.append(state)
            if cursor.ledger_id is not None:
                ledgers.append(self._other(cursor.ledger_id, "cursor", cursor.name))
            ledgers += (self._other(ledger_id, "delayed-index-bucket", key) for key, ledger_id in cursor.buckets())
            if cursor.name == COMPACTION_CURSOR:
                if state.compacted_ledger_id is not None:
                    found = self._other(state.compacted_ledger_id, "compacted-ledger", None)
                    if found.facts is not None or not self._is_compacting(topic.name):
                        ledgers.append(found)
                if state.position is None:
                    self._uncertain.add(topic.name)
        return TopicState(topic, tuple(ledgers), tuple(cursors))

    def _is_compacting(self, name: str) -> bool:
        """Return whether a broker may have a compacted ledger that the store does not name yet: no orphan, then."""
        rows = self._database.execute(
            "SELECT id, ctime_ms, is_closed FROM ledger WHERE kind = 'compacted-ledger' AND owner = ? AND NOT named",
            (name,),
        ).fetchall()
        return any(self._is_in_flight(ctime_ms, is_closed) for _, ctime_ms, is_closed in rows)

    def _is_in_flight(self, ctime_ms: int | None, is_closed: int) -> bool:
        """Return whether a running broker may still have to name a compacted ledger."""
        since_ms = self._brokers_since_ms
        if since_ms is None or ctime_ms is None:
            return since_ms is not None
        age_ms = time.time_ns() // 1_000_000 - ctime_ms
        return ctime_ms >= since_ms - _SKEW_MS and age_ms < (_COMPACTION_MS if is_closed else _COMPACTING_MS)

    def _messages(self, info: Any) -> Named:
        facts = self.facts(info.ledgerId)
        context = info.offloadContext
        offload = context if context.complete or context.HasField("uidMsb") else None
        is_known = info.HasField("entries") and (info.entries or info.timestamp)
        entry_count = info.entries if is_known else facts.last_entry_id + 1 if facts is not None else None
        size_bytes = info.size or (facts.size_bytes if facts is not None else 0)
        ctime_ms = facts.ctime_ms if facts is not None else info.timestamp or None
        return Named(info.ledgerId, "managed-ledger", None, entry_count, size_bytes, ctime_ms, offload, facts)

    def _other(self, ledger_id: int, role: str, part: str | None) -> Named:
        facts = self.facts(ledger_id)
        size_bytes, ctime_ms = (0, None) if facts is None else (facts.size_bytes, facts.ctime_ms)
        count = facts.last_entry_id + 1 if facts is not None and facts.is_closed else None
        return Named(ledger_id, role, part, count, size_bytes, ctime_ms, None, facts)

    def _cursor(self, cursor: CursorNode, ledgers: list[Named], ends: Mapping[int, End | BkctlError]) -> CursorState:
        position, compacted = cursor.position, cursor.compacted_ledger_id()
        deleted = list(cursor.info.individualDeletedMessages)
        words: list[Any] = []  # Since 4.0, a bit for each entry.
        if cursor.ledger_id is not None:
            found = ends.get(cursor.ledger_id)
            if not isinstance(found, End):
                return CursorState(cursor, None, None, None, found)
            if found.entry_id >= 0:
                try:
                    info = _position(found.payload, cursor)
                except BkctlError as problem:
                    return CursorState(cursor, None, None, None, problem)
                position, deleted = (info.ledgerId, info.entryId), list(info.individualDeletedMessages)
                words = list(info.individualDeletedMessageRanges)
                compacted = next((each.value for each in info.properties if each.name == COMPACTED_PROPERTY), None)
        backlog: int | None = 0
        for each in ledgers:
            if each.role != "managed-ledger" or each.ledger_id < position[0]:
                continue
            if each.entry_count is None:
                backlog = None
                break
            read = position[1] + 1 if each.ledger_id == position[0] else 0
            backlog = (backlog or 0) + max(0, each.entry_count - read)
        if backlog:
            backlog -= sum(
                bits.bit_count()
                for each in words
                if each.key >= position[0]
                for bits in (value & (1 << 64) - 1 for value in each.values)
            )
            backlog = max(0, backlog - sum(
                each.upperEndpoint.entryId - each.lowerEndpoint.entryId for each in deleted
                if each.upperEndpoint.ledgerId == each.lowerEndpoint.ledgerId >= position[0]
            ))  # fmt: skip
        return CursorState(cursor, position, backlog, compacted)

    def name_schemas(self) -> Iterator[PulsarFinding]:
        """Yield the schemas with versions whose ledger does not exist. Their ledgers count as named."""
        for name, locator in self.nodes.schemas():
            if isinstance(locator, BkctlError):
                self.errors.append(locator)
                self._uncertain.add(name)
                continue
            for ledger_id, version in schema_ledgers(locator).items():
                if self.facts(ledger_id) is None:
                    yield PulsarFinding(
                        "schema-ledger-missing", name, ledger_id,
                        f"Version {version} of the schema is in a ledger that does not exist",
                        "upload the schema again, or delete it, with pulsar-admin schemas", kind="schema",
                    )  # fmt: skip

    def unnamed(self) -> Iterator[PulsarFinding]:
        """Yield Pulsar's ledgers that nothing names, after `topics` and `name_schemas` were consumed."""
        query = (
            "SELECT id, size, ctime_ms, is_closed, kind, owner, part FROM ledger "
            "WHERE kind IS NOT NULL AND owner IS NOT NULL AND NOT named ORDER BY id"
        )
        for ledger_id, size_bytes, ctime_ms, is_closed, kind, owner, part in self._database.execute(query):
            if owner in self._uncertain and kind in ("compacted-ledger", "schema"):
                continue
            if kind == "compacted-ledger" and self._is_in_flight(ctime_ms, is_closed):
                continue
            if isinstance(attempt(self.nodes.path, MANAGED_LEDGERS, owner), BkctlError):
                self.errors.append(Corrupt(f"ledger {ledger_id} names an impossible owner: {owner!r}"))
                continue
            what = f"cursor {part}" if kind == "cursor" else kind
            open_text = "" if is_closed else "; it is not closed, so its size is not known"
            yield PulsarFinding(
                "orphan", Owner(kind, owner, part).topic, ledger_id,
                f"Nothing names this ledger, which says that it is of {what} of {owner}{open_text}",
                "'bkctl pulsar orphans --delete' deletes it, once it is old enough",
                size_bytes, ctime_ms, part, kind,
            )  # fmt: skip

    def require_own_topics(self) -> None:
        """Raise Conflict, after a pass, if ledgers that nothing names here may be another Pulsar's."""
        place, hint = self.nodes.path(MANAGED_LEDGERS), "name the path of Pulsar's metadata with --pulsar-root"
        query = "SELECT 1 FROM ledger WHERE named AND kind IS NOT NULL LIMIT 1"
        if self._database.execute(query).fetchone() is None:
            raise Conflict(f"The topics at {place} name none of the cluster's ledgers: nothing is deleted", hint=hint)
        if strangers := self.nodes.strangers():
            hint = f"delete single ledgers with 'bkctl ledger delete'; if this is the wrong path: {hint}"
            problem = f"Topics are also at {', '.join(strangers)}, and may own what {place} does not name"
            raise Conflict(f"{problem}: nothing is deleted", hint=hint)

    def is_named(self, ledger_id: int, owner: Owner) -> bool:
        """Return whether what the ledger names as its owner names it now. Raises the error of unreadable nodes."""
        assert owner.name is not None
        if owner.kind == "schema":
            locator = self.nodes.schema(owner.name)
            return locator is not None and ledger_id in schema_ledgers(locator)
        topic = self.nodes.topic(owner.name)
        if topic is None:
            return False
        if topic.errors:
            raise topic.errors[0]
        if ledger_id in topic.named:
            return True
        if owner.kind != "compacted-ledger":
            return False
        compaction = [each for each in topic.cursors if each.name == COMPACTION_CURSOR]
        for state in self._state(topic, self._ends([topic])).cursors if compaction else ():
            if state.node.name == COMPACTION_CURSOR:
                if state.position is None:
                    raise state.error or UsageError(f"The compacted ledger of {topic.topic} is not known")
                return state.compacted_ledger_id == ledger_id
        return False

    def confirm_orphan(self, finding: PulsarFinding) -> tuple[int, LedgerMetadata] | None:
        """Read ledger and owner again: return version and metadata of the ledger while it is an orphan, else None.

        An owner that cannot be read leaves it unknown: None, and the error is kept.
        """
        assert finding.ledger_id is not None
        try:
            # In this order: a ledger that is named and deleted meanwhile is none.
            owner = owner_of(
                (found := self.cluster.ledgers.read(LedgerId(0, finding.ledger_id))).metadata.custom_metadata
            )
            # A damaged name leads to no node.
            if owner is None or owner.name is None or "\ufffd" in owner.name or self.is_named(finding.ledger_id, owner):
                return None
            again = self.cluster.ledgers.read(LedgerId(0, finding.ledger_id))
        except (LedgerNotFound, NotFound):
            return None
        except BkctlError as error:
            self.errors.append(error)
            return None
        return (again.version, again.metadata) if again.version == found.version else None

    def confirm(self, finding: PulsarFinding, name: str) -> bool:
        """Read again whether the ledger is missing, or left, and still named."""
        assert finding.ledger_id is not None
        found = attempt(self.cluster.ledgers.read, LedgerId(0, finding.ledger_id))
        is_missing, exists = isinstance(found, LedgerNotFound), not isinstance(found, BkctlError)
        if not (exists if finding.code == _LEFT else is_missing):
            return False
        try:
            return self.is_named(finding.ledger_id, Owner(finding.kind, name, finding.part))
        except BkctlError as error:
            self.errors.append(error)
            return False


def check_pulsar(inventory: Inventory, *, pause_s: float = 2.0) -> Iterator[PulsarFinding]:
    """Yield the faults of topics, cursors, schemas and ledgers. What may be passing is read twice, `pause_s` apart."""
    inventory.list_ledgers()
    doubts: list[tuple[str, PulsarFinding]] = []
    for topic in inventory.topics():
        for each in _faults(topic):
            if each.kind is None:
                yield each
            else:
                doubts.append((topic.node.name, each))
    doubts += ((each.name or "", each) for each in inventory.name_schemas())
    orphans = inventory.unnamed()
    first = next(orphans, None)
    if doubts or first is not None:
        time.sleep(pause_s)
    yield from (each for name, each in doubts if inventory.confirm(each, name))
    for each in chain(filter(None, [first]), orphans):
        if inventory.confirm_orphan(each):
            yield each
    for error in dict.fromkeys(map(str, inventory.errors)):
        yield PulsarFinding("unreadable", None, None, error, "what it names is not checked, and none of it an orphan")


_LEFT: Final = "offloaded-left"
_RISKS: Final = {
    "unavailable": "Entries of the ledger are on no bookie that is up",
    "one-copy": "Entries of the ledger are on one bookie that is up",
    "under-replicated": "The ledger is marked as under-replicated",
}
_LOSSES: Final = {
    "managed-ledger": ("ledger-missing", "Its messages are lost, and the topic may not load",
                       "restore it with 'bkctl metadata import', or skip it with pulsar-admin topics"),
    "cursor": ("cursor-ledger-missing", "The subscription goes back to an older position: messages come again",
               "pulsar-admin topics reset-cursor, once the topic is loaded"),
    "compacted-ledger": ("compacted-ledger-missing", "Readers of the compacted topic fail",
                         "pulsar-admin topics compact"),
    "delayed-index-bucket": ("bucket-ledger-missing", "The index of delayed messages is lost",
                             "reload the topic: pulsar-admin topics unload"),
}  # fmt: skip


def _faults(topic: TopicState) -> Iterator[PulsarFinding]:
    for each in topic.ledgers:
        what = f"cursor {each.part}" if each.role == "cursor" else each.role
        if each.bookkeeper_copy == "left":
            yield PulsarFinding(
                _LEFT, topic.node.topic, each.ledger_id,
                "Tiered storage has the ledger; an interrupted deletion left BookKeeper's copy, which no broker reads",
                f"bkctl ledger delete {each.ledger_id}", each.size_bytes, each.ctime_ms, kind=each.role,
            )  # fmt: skip
        if each.is_missing:
            code, loss, advice = _LOSSES[each.role]
            yield PulsarFinding(
                code, topic.node.topic, each.ledger_id, f"The ledger ({what}) does not exist. {loss}", advice,
                each.size_bytes, None, each.part, each.role,
            )  # fmt: skip
        elif each.state in _RISKS:
            yield PulsarFinding(
                f"topic-{each.state}", topic.node.topic, each.ledger_id, f"{_RISKS[each.state]} ({what})",
                f"bkctl autorecovery list; bkctl ledger locate {each.ledger_id} --check",
                each.size_bytes, each.ctime_ms,
            )  # fmt: skip


def find_orphans(inventory: Inventory) -> list[PulsarFinding]:
    """Make a whole pass, and return the ledgers that nothing names, not yet read again."""
    inventory.list_ledgers()
    for _ in chain(inventory.topics(), inventory.name_schemas()):
        pass
    return list(inventory.unnamed())


def _risk(metadata: LedgerMetadata, live: set[str]) -> str | None:
    """Return what entries of the ledger risk by the bookies that are up, at worst over all of its write sets."""
    absent = {bookie_id for fragment in metadata.ensembles for bookie_id in fragment.bookies} - live
    fewest = fewest_replicas(metadata, absent) if absent else metadata.write_quorum_size
    return "unavailable" if fewest == 0 else "one-copy" if fewest == 1 < metadata.write_quorum_size else None


async def read_ends(bookkeeper: BookKeeper, ledger_ids: Iterable[int]) -> dict[int, End | BkctlError]:
    """Return the last entry of each ledger, without fencing it; an error in the place of what cannot be known.

    A writer's bookies know of the last entry only that they have it: the entries behind the last add confirmed are
    asked for one by one.
    """
    limit = asyncio.Semaphore(_CONCURRENCY)
    found: dict[int, End | BkctlError] = {}

    async def read(ledger_id: int) -> None:
        async with limit:
            try:
                found[ledger_id] = await _read_end(bookkeeper, ledger_id)
            except BkctlError as error:
                found[ledger_id] = error

    await asyncio.gather(*map(read, ledger_ids))
    return found


async def _read_end(bookkeeper: BookKeeper, ledger_id: int) -> End:
    async with await bookkeeper.open_ledger(ledger_id, password=None) as handle:
        end = End(-1, b"")
        if handle.last_add_confirmed >= 0:
            async for entry in handle.read(handle.last_add_confirmed, handle.last_add_confirmed):
                end = End(entry.entry_id, bytes(entry.payload))
        while not handle.is_closed:
            try:
                async for entry in handle.read_unconfirmed(end.entry_id + 1, end.entry_id + 1):
                    end = End(entry.entry_id, bytes(entry.payload))
            except (EntryNotFound, LedgerNotFound):
                break
        return end


def _position(payload: bytes, cursor: CursorNode) -> PositionInfo:
    from bkctl.formats.managed_ledger_pb2 import PositionInfo

    what = f"position of cursor {cursor.subscription}"
    info = parse_message(PositionInfo, payload, what)
    wrong = [each.value for each in info.properties if each.name == COMPACTED_PROPERTY and each.value < 0]
    if wrong:
        raise Corrupt(f"{what} names the impossible ledger {wrong[0]}")
    return info


def totals(topics: Iterable[TopicState], name_of: Callable[[TopicNode], str]) -> Iterator[Total]:
    """Yield the sums of topics, by name. Memory: one name for each row."""
    found: dict[str, Total] = {}
    for topic in topics:
        name = name_of(topic.node)
        found[name] = found.get(name, Total(name)).plus(topic.total)
    yield from found.values()
