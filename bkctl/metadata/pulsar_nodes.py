"""Pulsar's nodes in the metadata store: managed ledgers with their cursors, and schemas; read, never written.

Source: MetaStoreImpl (`/managed-ledgers/TENANT/NAMESPACE/persistent/TOPIC/CURSOR`), BookkeeperSchemaStorage
(`/schemas/TENANT/NAMESPACE/TOPIC`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, tee
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import unquote_plus

from bkctl.errors import BkctlError, Corrupt
from bkctl.formats.managed_ledger import parse_message
from bkctl.metadata.pulsar_topics import topic_of
from bkctl.metadata.store import INVALID_NAMES_MAX, PATH_LENGTH_MAX, AbsolutePath, MetadataStore, attempt

if TYPE_CHECKING:
    from bkctl.formats.managed_ledger_pb2 import ManagedCursorInfo, ManagedLedgerInfo, SchemaLocator

MANAGED_LEDGERS: Final = "/managed-ledgers"
SCHEMAS: Final = "/schemas"
COMPACTION_CURSOR: Final = "__compaction"
COMPACTED_PROPERTY: Final = "CompactedTopicLedger"
_BUCKET_PREFIX: Final = "#pulsar.internal.delayed.bucket"
_DOMAINS: Final = ("persistent", "non-persistent")
#: Topics whose nodes are read together.
_BATCH_COUNT: Final = 256
#: Paths in which other Pulsars' topics are looked for.
_PLACES_MAX: Final = 1000


class CursorNode(NamedTuple):
    """A cursor: the position of a subscription. `name` is as in the path."""

    name: str
    info: ManagedCursorInfo

    @property
    def subscription(self) -> str:
        return unquote_plus(self.name)

    @property
    def ledger_id(self) -> int | None:
        """The ledger with its positions; None where the node itself has the position."""
        return self.info.cursorsLedgerId if self.info.cursorsLedgerId >= 0 else None

    @property
    def position(self) -> tuple[int, int]:
        """The last acknowledged entry, as the node has it: the present one only without a ledger."""
        return self.info.markDeleteLedgerId, self.info.markDeleteEntryId

    def buckets(self) -> Iterator[tuple[str, int]]:
        """Yield key and ledger of the snapshots of delayed delivery. Source: ImmutableBucket."""
        for each in self.info.cursorProperties:
            if each.name.startswith(_BUCKET_PREFIX) and each.value.isdecimal():
                yield each.name, int(each.value[:20])  # So many digits are too many for an id already.

    def compacted_ledger_id(self) -> int | None:
        """The ledger of compacted messages that the node names."""
        return next((each.value for each in self.info.properties if each.name == COMPACTED_PROPERTY), None)


class TopicNode(NamedTuple):
    """A managed ledger with its cursors; `errors` has one for each cursor that cannot be read."""

    name: str
    info: ManagedLedgerInfo
    ctime_ms: int | None
    cursors: tuple[CursorNode, ...] = ()
    errors: tuple[BkctlError, ...] = ()

    @property
    def topic(self) -> str:
        return topic_of(self.name) or self.name

    @property
    def namespace(self) -> str:
        parts = self.name.split("/")
        return "/".join(parts[:-2]) if len(parts) in (4, 5) else self.name

    @property
    def tenant(self) -> str:
        return self.name.split("/")[0]

    @property
    def named(self) -> set[int]:
        """The ledgers that the nodes name: of messages, cursors and buckets, and compacted ones."""
        found = {each.ledgerId for each in self.info.ledgerInfo}
        for cursor in self.cursors:
            found |= {each for each in (cursor.ledger_id, cursor.compacted_ledger_id()) if each is not None}
            found.update(bucket for _, bucket in cursor.buckets())
        return found


class PulsarNodes:
    """Reads the nodes below Pulsar's `root` ("" is the top) in the store of a cluster."""

    def __init__(self, store: MetadataStore, root: str | None = None) -> None:
        self.store = store
        if root is None:
            root = getattr(store, "root", "").rpartition("/")[0]
        self.root = root.rstrip("/")

    def path(self, *parts: str) -> AbsolutePath:
        return AbsolutePath(self.root + "/".join(parts))

    def brokers_since_ms(self) -> int | None:
        """Return when the oldest running broker registered (0: unknown), None where none runs."""
        names = self.store.children(self.path("/loadbalance/brokers")) or []
        found = list(self.store.get_many(self.path("/loadbalance/brokers", name) for name in names))
        return min((each.ctime_ms or 0 for each in found if each is not None), default=None)

    def strangers(self) -> list[str]:
        """Return other paths with topics whose ledgers may be this cluster's, as far as the store shows them.

        Those beside ledgers of their own are left out.
        """
        home = getattr(self.store, "root", "").rpartition("/")[0]
        places = {"", home}
        for top in {"", home, self.root.rpartition("/")[0]}:
            names = attempt(self.store.children, AbsolutePath(top or "/"), limit=_PLACES_MAX)
            places |= {f"{top}/{name}" for name in names or ()} if not isinstance(names, BkctlError) else set()

        def has(path: str) -> bool:
            return bool(attempt(self.store.children, AbsolutePath(path), limit=1))

        return sorted(
            place or "/"
            for place in places - {self.root}
            if has(f"{place}{MANAGED_LEDGERS}") and (place == home or not has(f"{place}/ledgers"))
        )

    def names(self, below: str = "") -> Iterator[str]:
        """Yield the names of managed ledgers in order; `below` a tenant or a namespace."""
        yield from self._names(below, below.count("/") + 1 if below else 0)

    def _names(self, place: str, depth: int) -> Iterator[str]:
        for name in self.store.children(self.path(MANAGED_LEDGERS, *filter(None, [place]))) or ():
            path = f"{place}/{name}" if place else name
            if depth in (2, 3) and name in _DOMAINS:
                for topic in self.store.children(self.path(MANAGED_LEDGERS, path)) or ():
                    yield f"{path}/{topic}"
            elif depth < 3:
                yield from self._names(path, depth + 1)

    def topics(self, below: str = "") -> Iterator[TopicNode | BkctlError]:
        """Yield the managed ledgers below `below` with all cursors, in order; unreadable ones as their errors."""
        names = self.names(below)
        while batch := list(islice(names, _BATCH_COUNT)):
            yield from self._batch(batch)
        yield from self._hidden(self.path(MANAGED_LEDGERS))

    def _hidden(self, place: str) -> list[BkctlError]:
        """Return an error for the first node below `place` that was met and that no path can name."""
        names, start = self.store.invalid_names, f"{place}/"[1:PATH_LENGTH_MAX]
        if len(names) < INVALID_NAMES_MAX:  # Else the store noted no more.
            names = [each for each in names if each.lstrip("/").startswith(start)]
        return [Corrupt(f"The node {each!r} cannot be read: no path can name it") for each in names[:1]]

    def _batch(self, names: list[str]) -> Iterator[TopicNode | BkctlError]:
        from bkctl.formats.managed_ledger_pb2 import ManagedCursorInfo, ManagedLedgerInfo

        paths = [self.path(MANAGED_LEDGERS, name) for name in names]
        cursors = [children or [] for children in self.store.children_many(paths)]
        below = [AbsolutePath(f"{path}/{cursor}") for path, each in zip(paths, cursors, strict=True) for cursor in each]
        values = iter(list(self.store.get_many(below)))
        # The topics come after their cursors: what is deleted meanwhile is not taken for a topic without cursors.
        for name, each, found in zip(names, cursors, list(self.store.get_many(paths)), strict=True):
            read: list[CursorNode] = []
            errors = self._hidden(self.path(MANAGED_LEDGERS, name))
            for cursor in each:
                value = next(values)
                if value is None:
                    continue
                where = f"cursor {unquote_plus(cursor)} of {topic_of(name) or name}"
                info = attempt(parse_message, ManagedCursorInfo, value.value, where)
                if isinstance(info, BkctlError):
                    errors.append(info)
                else:
                    read.append(CursorNode(cursor, info))
            if found is None:
                continue
            parsed = attempt(parse_message, ManagedLedgerInfo, found.value, f"topic {topic_of(name) or name}")
            if isinstance(parsed, BkctlError):
                yield parsed
            else:
                topic = TopicNode(name, parsed, found.ctime_ms, tuple(read), tuple(errors))
                wrong = [each for each in topic.named if not 0 <= each < 1 << 63]  # Java's longs from 0 on are right.
                yield Corrupt(f"topic {topic.topic} names the impossible ledger {wrong[0]}") if wrong else topic

    def topic(self, name: str) -> TopicNode | None:
        """Return a managed ledger, None for a missing one. Raises Corrupt, Unsupported."""
        for found in self._batch([name]):
            if isinstance(found, BkctlError):
                raise found
            return found
        return None

    def schemas(self) -> Iterator[tuple[str, SchemaLocator | BkctlError]]:
        """Yield the schemas: TENANT/NAMESPACE/TOPIC, and the places of all versions."""
        names, asked = tee(self._schema_names("", 0))
        values = self.store.get_many(self.path(SCHEMAS, name) for name in asked)
        for name, found in zip(names, values, strict=True):
            if found is not None and found.value:
                yield name, attempt(self._locator, found.value, name)

    def _schema_names(self, place: str, depth: int) -> Iterator[str]:
        for name in self.store.children(self.path(SCHEMAS, *filter(None, [place]))) or ():
            path = f"{place}/{name}" if place else name
            if depth >= 2:
                yield path
            if depth < 3:  # TENANT/CLUSTER/NAMESPACE/TOPIC in old clusters
                yield from self._schema_names(path, depth + 1)

    def schema(self, name: str) -> SchemaLocator | None:
        """Return the places of a schema's versions, None for a missing schema. Raises Corrupt."""
        found = self.store.get(self.path(SCHEMAS, name))
        return self._locator(found.value, name) if found is not None else None

    def _locator(self, value: bytes, name: str) -> SchemaLocator:
        from bkctl.formats.managed_ledger_pb2 import SchemaLocator

        locator = parse_message(SchemaLocator, value, f"schema {name}")
        if (first := min(schema_ledgers(locator))) < 0:
            raise Corrupt(f"schema {name} names the impossible ledger {first}")
        return locator


def schema_ledgers(locator: SchemaLocator) -> dict[int, int]:
    """Return the ledgers of a schema → the version that each holds."""
    return {each.position.ledgerId: each.version for each in (*locator.index, locator.info)}


def schema_of(managed_ledger: str) -> str | None:
    """Return the name of a topic's schema, shared by its partitions. Source: TopicName.getSchemaName."""
    import re

    parts = managed_ledger.split("/")
    if len(parts) not in (4, 5):
        return None
    base = re.sub(r"-partition-[0-9]+$", "", parts[-1])
    return "/".join((*parts[:-2], base))
