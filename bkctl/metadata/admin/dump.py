"""A cluster's metadata as a stream of records: into a file, out of one, from store to store, and compared.

An export is ndjson, in the order below, so that two of them are compared without holding either:

    {"format": "bkctl-metadata", "version": 1, "time": …, "metadataUri": …, "instanceId": …, "layout": "<base64>"}
    {"kind": "node", "key": "underreplication/disable", "value": "<base64>"}       switches and clocks, by path
    {"kind": "cookie", "key": "10.0.0.1:3181", "value": "<base64>"}                 by bookie id
    {"kind": "sequence", "key": "ledger", "value": "<base64 of a decimal>"}         scope 0's ids below it may be taken
    {"kind": "mark", "key": "<32 hex>", "value": "<base64>"}                        under-replicated ledgers, by id
    {"kind": "ledger", "key": "<32 hex>", "value": "<base64>", "ctime": <ms>}       by id; ctime if it is known
    {"kind": "end", "records": <count>, "sha256": "<hex>"}                          of all lines before

Values are the bytes that the store holds, ledger passwords in them too. What belongs to a session (registrations,
locks, votes) is not part of it. A file without its last line is not whole.
"""

from __future__ import annotations

import hashlib
import json
import time
from abc import ABC, abstractmethod
from binascii import Error as Base64Error
from binascii import a2b_base64, b2a_base64
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NamedTuple, Self

from bkctl.disk import atomic_write
from bkctl.errors import (
    AlreadyExists,
    BkctlError,
    Conflict,
    Corrupt,
    CorruptRecord,
    MetadataVersionConflict,
    NotFound,
    Unsupported,
    UsageError,
)
from bkctl.formats.metadata import LedgerMetadata
from bkctl.ids import I64_MAX, U64_MAX, LedgerId
from bkctl.metadata.admin.health import DISABLE_HEALTH_CHECK
from bkctl.metadata.cluster import COOKIES, Cluster, new_layout
from bkctl.metadata.ledgers import INSTANCE_ID
from bkctl.metadata.store import NEW, VALUE_SIZE_BYTES_MAX, Versioned
from bkctl.metadata.underreplication import UNDERREPLICATION, AuditorCheck, LedgerUnderreplicationManager, mark_path

if TYPE_CHECKING:
    from concurrent.futures import Future

FORMAT: Final = "bkctl-metadata"
VERSION: Final = 1
#: A value in base64, a key, and the names around them.
LINE_SIZE_BYTES_MAX: Final = 2 * VALUE_SIZE_BYTES_MAX
KINDS: Final = ("node", "cookie", "sequence", "mark", "ledger")
CONCURRENCY: Final = 32
_NODES: Final = tuple(
    sorted(
        (
            DISABLE_HEALTH_CHECK,
            *(f"{UNDERREPLICATION}/{name}" for name in ("LAYOUT", "disable", "lostBookieRecoveryDelay")),
            *(f"{UNDERREPLICATION}/{check.value}" for check in AuditorCheck),
        )
    )
)
_WRITE_SIZE_BYTES: Final = 1 << 20


class DumpRecord(NamedTuple):
    """One value of a cluster's metadata; `key` is as the module says. `ctime_ms` is the store's, of ledgers only."""

    kind: str
    key: str
    value: bytes
    ctime_ms: int | None = None

    @property
    def place(self) -> tuple[int, str]:
        """What records are sorted by."""
        return KINDS.index(self.kind), self.key

    @property
    def name(self) -> str:
        """How to name it in a message."""
        if self.kind in ("ledger", "mark"):
            ledger = LedgerId.from_value(int(self.key, 16))
            return f"{'Ledger' if self.kind == 'ledger' else 'The mark of ledger'} {ledger}"
        return {"node": f"Node {self.key}", "cookie": f"The cookie of {self.key}"}.get(self.kind, "The ledger ids")


class DumpHeader(NamedTuple):
    """Which cluster it is. `layout` are the bytes of its LAYOUT, None where none is stored."""

    metadata_uri: str
    instance_id: str
    layout: bytes | None
    time: str


class MetadataSource(ABC):
    """Where records come from, in order: a cluster, or an export. A context manager."""

    #: How to name it in a message.
    name: str
    header: DumpHeader

    @abstractmethod
    def records(self) -> Iterator[DumpRecord]:
        """Yield the records in ascending `place`; may be called again."""

    @abstractmethod
    def close(self) -> None:
        """Give up what it holds; a second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ClusterSource(MetadataSource):
    """The records of a cluster as it is now, or with `ledgers` only the metadata of these, which must be there.

    Scoped ledgers that another cluster left (`scopes_state` "foreign") are not part of it.
    """

    def __init__(self, cluster: Cluster, ledgers: Sequence[LedgerId] | None = None) -> None:
        self._cluster = cluster
        self._ledgers = None if ledgers is None else sorted(set(ledgers))
        cluster.layout()
        stored = cluster.store.get(cluster.places.layout)
        self.name = cluster.uri
        self.header = DumpHeader(cluster.uri, cluster.instance_id(), None if stored is None else stored.value, _now())

    def records(self) -> Iterator[DumpRecord]:
        """See MetadataSource.records. Raises LedgerNotFound for a ledger that was asked for."""
        cluster, store = self._cluster, self._cluster.store
        if self._ledgers is not None:
            for ledger in self._ledgers:
                cluster.ledgers.read(ledger)
            yield from self._of_ledgers(self._ledgers)
            return
        for path, found in zip(_NODES, store.get_many(_NODES), strict=True):
            if found is not None:
                yield DumpRecord("node", path, found.value)
        bookies = cluster.cookies.list()
        for bookie_id, found in zip(bookies, store.get_many(f"cookies/{each}" for each in bookies), strict=True):
            if found is not None:
                yield DumpRecord("cookie", bookie_id, found.value)
        position = cluster.ledgers.id_position()
        if position is not None:
            yield DumpRecord("sequence", "ledger", b"%d" % position)
        yield from self._marks()
        yield from self._of_ledgers(cluster.ledgers.ledgers(None))

    def _marks(self) -> Iterator[DumpRecord]:
        store = self._cluster.store
        waiting: deque[LedgerId] = deque()

        def paths() -> Iterator[str]:
            for ledger, _ in LedgerUnderreplicationManager(store).list(None):
                waiting.append(ledger)
                yield mark_path(ledger)

        for found in store.get_many(paths()):
            ledger = waiting.popleft()
            if found is not None:
                yield DumpRecord("mark", ledger.qualified_name, found.value)

    def _of_ledgers(self, ledgers: Iterable[LedgerId]) -> Iterator[DumpRecord]:
        for ledger, found in self._cluster.ledgers.values(ledgers):
            if found is not None:
                yield DumpRecord("ledger", ledger.qualified_name, found.value, found.ctime_ms)

    def close(self) -> None:
        """The cluster is its opener's."""


class ExportSection(NamedTuple):
    """Whole lines of an export: from byte `start` to before `end`, `line_count` of them."""

    start: int
    end: int
    line_count: int


class ExportFile(MetadataSource):
    """An export, read line by line. Raises NotFound (OSError), Corrupt for no export, Unsupported for a later version.

    `check` first to know that it is whole.
    """

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._file = open(path, "rb")  # noqa: SIM115 - closed by close
        try:
            fields = self._fields(self._file.readline(LINE_SIZE_BYTES_MAX), 0)
            if fields.get("format") != FORMAT:
                raise Corrupt(f"{self.name} is no export of metadata")
            if fields.get("version") != VERSION:
                raise Unsupported(
                    f"{self.name} is an export of version {fields.get('version')!r}; version {VERSION} is known"
                )
            layout, uri, instance_id = fields.get("layout"), fields.get("metadataUri"), fields.get("instanceId")
            if not isinstance(uri, str) or not isinstance(instance_id, str):
                raise CorruptRecord("The export does not say whose it is", offset=0, where=self.name)
            self.header = DumpHeader(
                uri, instance_id, None if layout is None else self._value(layout, 0), str(fields.get("time"))
            )
        except BkctlError:
            self.close()
            raise

    def check(self, progress: Callable[[int], None] = lambda _: None) -> Counter[str]:
        """Read the whole file; how many records of each kind there are. Raises Corrupt when it is not whole."""
        counts: Counter[str] = Counter()
        for record in self.records():
            counts[record.kind] += 1
            if not counts[record.kind] % 1000:
                progress(counts.total())
        return counts

    def records(self) -> Iterator[DumpRecord]:
        """See MetadataSource.records. Raises Corrupt, naming the byte, at the end also for a wrong hash or count."""
        self._file.seek(0)
        digest = hashlib.sha256()
        at = count = 0
        last: tuple[int, str] | None = None
        while line := self._file.readline(LINE_SIZE_BYTES_MAX):
            if at == 0:
                digest.update(line)
                at = len(line)
                continue
            fields = self._fields(line, at)
            if fields.get("kind") == "end":
                if fields.get("records") != count or fields.get("sha256") != digest.hexdigest():
                    raise self._changed(at)
                if self._file.read(1):
                    raise CorruptRecord(
                        "Something follows the export's last line", offset=at + len(line), where=self.name
                    )
                return
            record = self._record(fields, at)
            if last is not None and record.place <= last:
                raise CorruptRecord("The export's records are out of order", offset=at, where=self.name)
            last = record.place
            yield record
            digest.update(line)
            at += len(line)
            count += 1
        raise self._cut_short(at)

    def sections(self, size_bytes: int) -> tuple[list[ExportSection], CorruptRecord | None]:
        """The records' lines in sections of about `size_bytes`, for `section`; and why the file is not whole, if so.

        The whole file is read, but not looked into.
        """
        self._file.seek(0)
        line = self._file.readline(LINE_SIZE_BYTES_MAX)
        digest = hashlib.sha256(line)
        start = at = len(line)
        count = total = 0
        found = []
        line = self._file.readline(LINE_SIZE_BYTES_MAX)
        while following := self._file.readline(LINE_SIZE_BYTES_MAX):
            digest.update(line)
            at += len(line)
            count += 1
            if at - start >= size_bytes:
                found.append(ExportSection(start, at, count))
                start, total, count = at, total + count, 0
            line = following
        problem = self._end_problem(line, at, total + count, digest.hexdigest())
        if problem is not None and line and b'"kind":"end"' not in line:
            at, count = at + len(line), count + 1  # what is there of a record
        if count:
            found.append(ExportSection(start, at, count))
        return found, problem

    def _end_problem(self, line: bytes, at: int, count: int, sha256: str) -> CorruptRecord | None:
        """What is wrong with the last line, which begins at byte `at`, after `count` records of this hash."""
        try:
            fields = self._fields(line, at)
        except CorruptRecord:
            fields = {}
        if fields.get("kind") != "end":
            return self._cut_short(at + len(line))
        return None if fields.get("records") == count and fields.get("sha256") == sha256 else self._changed(at)

    def section(self, section: ExportSection) -> Iterator[tuple[int, DumpRecord | CorruptRecord]]:
        """Yield each line's byte, and the record that it is, or why it is none.

        Raises Corrupt where the file changed since `sections`.
        """
        self._file.seek(section.start)
        at = section.start
        for _ in range(section.line_count):
            line = self._file.readline(LINE_SIZE_BYTES_MAX)
            if not line:
                raise self._cut_short(at)
            try:
                found: DumpRecord | CorruptRecord = self._record(self._fields(line, at), at)
            except CorruptRecord as error:
                found = error
            yield at, found
            at += len(line)
        if at != section.end:
            raise self._changed(at)

    def _cut_short(self, at: int) -> CorruptRecord:
        return CorruptRecord(
            "The export is cut short: its last line is missing", offset=at, where=self.name,
            hint="export again; what is there is of no use without the rest",
        )  # fmt: skip

    def _changed(self, at: int) -> CorruptRecord:
        return CorruptRecord(
            "The export's hash is not that of its lines: it was changed, or damaged", offset=at, where=self.name
        )

    def _record(self, fields: dict[str, Any], at: int) -> DumpRecord:
        kind, key, ctime_ms = fields.get("kind"), fields.get("key"), fields.get("ctime")
        if kind not in KINDS or not isinstance(key, str) or not (ctime_ms is None or isinstance(ctime_ms, int)):
            raise CorruptRecord("This is no record of an export", offset=at, where=self.name)
        if (kind in ("ledger", "mark")) and (len(key) != 32 or key.strip("0123456789abcdef")):
            raise CorruptRecord(f"{key[:40]!r} is no ledger's qualified name", offset=at, where=self.name)
        if kind == "node" and key not in _NODES:
            raise CorruptRecord(f"{key[:80]!r} is no node of an export", offset=at, where=self.name)
        if kind in ("ledger", "mark") and I64_MAX < int(key, 16) <= U64_MAX:
            raise CorruptRecord(f"{key} is an id that no ledger of scope 0 has", offset=at, where=self.name)
        if kind == "cookie" and ("/" in key or key in ("", ".", "..") or not key.isprintable()):
            raise CorruptRecord(f"{key[:80]!r} is no bookie id", offset=at, where=self.name)
        return DumpRecord(kind, key, self._value(fields.get("value"), at), ctime_ms)

    def _fields(self, line: bytes, at: int) -> dict[str, Any]:
        if not line.endswith(b"\n"):
            long = len(line) == LINE_SIZE_BYTES_MAX
            what = f"The line is longer than {LINE_SIZE_BYTES_MAX:,} bytes" if long else "The export is cut short"
            raise CorruptRecord(what, offset=at, where=self.name)
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise CorruptRecord("This is no line of an export of metadata", offset=at, where=self.name) from error
        if not isinstance(fields, dict):
            raise CorruptRecord("This is no line of an export of metadata", offset=at, where=self.name)
        return fields

    def _value(self, text: object, at: int) -> bytes:
        try:
            if not isinstance(text, str):
                raise ValueError(text)
            return a2b_base64(text, strict_mode=True)
        except (ValueError, Base64Error) as error:
            raise CorruptRecord("The value is no base64", offset=at, where=self.name) from error

    def close(self) -> None:
        """See MetadataSource.close."""
        self._file.close()


# --- export ---------------------------------------------------------------------------------------------------------


class Exported(NamedTuple):
    """What was written: records by kind, bytes, and the SHA-256 that the last line holds."""

    counts: dict[str, int]
    size_bytes: int
    sha256: str


def write_export(source: MetadataSource, file: BinaryIO, progress: Callable[[int], None] = lambda _: None) -> Exported:
    """Write all records of `source` as an export. Raises what reading and writing raise: then the file is not whole."""
    header = source.header
    digest = hashlib.sha256()
    counts: Counter[str] = Counter()
    size = 0

    def put(lines: list[str]) -> None:
        nonlocal size
        data = "".join(lines).encode("ascii")
        digest.update(data)
        file.write(data)
        size += len(data)

    first = {
        "format": FORMAT,
        "version": VERSION,
        "time": header.time,
        "metadataUri": header.metadata_uri,
        "instanceId": header.instance_id,
        "layout": None if header.layout is None else _base64(header.layout),
    }
    lines = [json.dumps(first, separators=(",", ":")) + "\n"]
    held = 0
    for kind, key, value, ctime_ms in source.records():
        ctime = "" if ctime_ms is None else f',"ctime":{ctime_ms}'
        name = key if kind in ("ledger", "mark") else json.dumps(key)[1:-1]
        lines.append(f'{{"kind":"{kind}","key":"{name}","value":"{_base64(value)}"{ctime}}}\n')
        counts[kind] += 1
        held += len(lines[-1])
        if held >= _WRITE_SIZE_BYTES:
            put(lines)
            lines, held = [], 0
            progress(counts.total())
    put(lines)
    sha256 = digest.hexdigest()
    end = json.dumps({"kind": "end", "records": counts.total(), "sha256": sha256}, separators=(",", ":")) + "\n"
    file.write(end.encode("ascii"))
    return Exported({kind: counts[kind] for kind in KINDS}, size + len(end), sha256)


def export_to_file(
    source: MetadataSource, path: Path, *, overwrite: bool = False, progress: Callable[[int], None] = lambda _: None
) -> Exported:
    """Write an export to `path`, which is there only once it is whole and on disk; readable by its owner only.

    Raises AlreadyExists for a file that is there, unless `overwrite`; OSError.
    """
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} is no file, and would be replaced by one", hint="write to -, and redirect that")
    if path.exists() and not overwrite:
        raise AlreadyExists(f"{path} exists", hint="name a new file, or add --overwrite where there is such an option")
    with atomic_write(path) as file:  # readable by its owner only: ledger metadata holds passwords
        return write_export(source, file, progress)


# --- import ---------------------------------------------------------------------------------------------------------


@dataclass
class Imported:
    """What became of the records. `conflicts` are those that are there with another value, and were left so."""

    created: Counter[str] = field(default_factory=Counter)
    replaced: Counter[str] = field(default_factory=Counter)
    same: Counter[str] = field(default_factory=Counter)
    conflicts: list[str] = field(default_factory=list)
    #: Below which ids may be generated again in the target; None where that cannot be.
    unskipped_position: int | None = None

    @property
    def count(self) -> int:
        """How many records were looked at."""
        return self.created.total() + self.replaced.total() + self.same.total() + len(self.conflicts)


def prepare_target(target: Cluster, header: DumpHeader, *, dry_run: bool = False) -> bool:
    """Make sure that `target` is the cluster of `header`, making it where there is none; True where it was not there.

    Its instance id is kept, since bookies' cookies name it, and its LAYOUT where target's URI allows. Raises Conflict
    when target is another cluster.
    """
    from bkctl.formats.metadata import LedgerLayout

    store, places = target.store, target.places
    has_layout = store.get(places.layout) is not None
    if has_layout or store.get(places.instance_id) is not None:
        instance_id = target.instance_id()
        if instance_id != header.instance_id:
            raise Conflict(
                f"{target.uri} is the cluster {instance_id or 'without an id'}, "
                f"not {header.instance_id or 'the one without an id'}",
                hint="import into a store without a cluster, or 'bkctl cluster nuke' that one first",
            )
        if has_layout:
            return False
        # One without a LAYOUT is as the URI says (Pulsar makes such), or was begun by an import that was stopped.
        if header.layout is None or store.children(COOKIES):
            return False
    location = target.location
    layout = new_layout(location)
    if header.layout is not None and location.driver == "zk":
        stored = LedgerLayout.parse(header.layout, "The export's LAYOUT")
        # Of a cluster that was in another kind of store there is none for ZooKeeper.
        if stored.factory_class.startswith("org.apache.bookkeeper.meta."):
            target.check_layout(stored)
            layout = stored
    if not dry_run:
        from bkctl.metadata.cluster import init_cluster

        init_cluster(target, instance_id=header.instance_id, layout=layout)
    return True


def import_records(
    records: Iterable[DumpRecord],
    target: Cluster,
    *,
    overwrite: bool = False,
    dry_run: bool = False,
    record_change: Callable[[str, bytes | None, bytes], None] = lambda *_: None,
    progress: Callable[[int], None] = lambda _: None,
) -> Imported:
    """Write records into a cluster, several at once; those that are there already with the same value are passed over.

    So what was stopped is finished by doing it again. A record that is there with another value is a conflict, and
    left as it is; with `overwrite` it is replaced, after `record_change(path, before, after)` (called from several
    threads). Raises what the store raises, once what is under way has ended; with `dry_run` nothing is changed.
    """
    from concurrent.futures import ThreadPoolExecutor

    result = Imported()
    under_way: deque[Future[tuple[DumpRecord, str]]] = deque()
    waiting: deque[DumpRecord] = deque()

    def paths() -> Iterator[str]:
        scoped = False
        for record in records:
            if record.kind == "sequence":
                position = _position(record)
                if not dry_run and not target.ledgers.skip_ids(position):
                    result.unskipped_position = position
                continue
            if record.kind == "ledger" and not scoped and (ledger := _ledger(record)).is_scoped:
                next(target.ledgers.ledgers(ledger.scope_id), None)  # raises where the scopes are another cluster's
                scoped = True
            waiting.append(record)
            yield _path(record, target)

    def write(record: DumpRecord, found: Versioned[bytes] | None) -> tuple[DumpRecord, str]:
        return record, _write(record, found, target, overwrite, record_change)

    def count(record: DumpRecord, outcome: str) -> None:
        if outcome == "conflict":
            result.conflicts.append(record.name)
        else:
            getattr(result, outcome)[record.kind] += 1
        if not result.count % 100:
            progress(result.count)

    with ThreadPoolExecutor(CONCURRENCY, thread_name_prefix="import") as executor:
        # Many are read at once, so that a second run only looks.
        for found in target.store.get_many(paths()):
            record = waiting.popleft()
            outcome = _outcome(record, found, overwrite)
            if dry_run or outcome in ("same", "conflict"):
                count(record, outcome)
                continue
            under_way.append(executor.submit(write, record, found))
            if len(under_way) >= 2 * CONCURRENCY:
                count(*under_way.popleft().result())
        while under_way:
            count(*under_way.popleft().result())
    return result


def _outcome(record: DumpRecord, found: Versioned[bytes] | None, overwrite: bool) -> str:
    """The name of the field of Imported that is to count it, or "conflict"."""
    if found is None:
        return "created"
    if found.value == record.value:
        return "same"
    return "replaced" if overwrite else "conflict"


def _write(
    record: DumpRecord,
    found: Versioned[bytes] | None,
    target: Cluster,
    overwrite: bool,
    record_change: Callable[[str, bytes | None, bytes], None],
) -> str:
    """Put the record in place of what was `found` there; returns as `_outcome`, also of what came between."""
    path = _path(record, target)
    while (outcome := _outcome(record, found, overwrite)) in ("created", "replaced"):
        record_change(path, None if found is None else found.value, record.value)
        try:
            _put(record, target, path, NEW if found is None else found.version)
        except (AlreadyExists, NotFound, MetadataVersionConflict):
            found = target.store.get(path)  # Somebody changed it just now.
        else:
            break
    return outcome


def _ledger(record: DumpRecord) -> LedgerId:
    return LedgerId.from_value(int(record.key, 16))


def _put(record: DumpRecord, target: Cluster, path: str, expected: int) -> None:
    if record.kind == "ledger":
        target.ledgers.restore(_ledger(record), record.value, expected)
    else:
        target.store.put(path, record.value, expected)


def _path(record: DumpRecord, cluster: Cluster) -> str:
    if record.kind == "ledger":
        return cluster.ledgers.path(_ledger(record))
    if record.kind == "mark":
        return mark_path(_ledger(record))
    return f"cookies/{record.key}" if record.kind == "cookie" else record.key


def _position(record: DumpRecord) -> int:
    if not record.value.isdigit() or len(record.value) > 19:
        raise Corrupt(f"{record.value[:40]!r} is no position of the ledger ids")
    return int(record.value)


# --- compare --------------------------------------------------------------------------------------------------------


class Difference(NamedTuple):
    """A record that is not the same on both sides: `what` is "onlyInFirst", "onlyInSecond" or "differs".

    `fields` are the fields of a ledger's metadata that differ, none where that cannot be told.
    """

    kind: str
    key: str
    what: str
    fields: tuple[str, ...] = ()

    @property
    def ledger(self) -> LedgerId | None:
        """The ledger that it is about, if it is about one."""
        return LedgerId.from_value(int(self.key, 16)) if self.kind in ("ledger", "mark") else None


def compare_headers(first: DumpHeader, second: DumpHeader) -> Iterator[Difference]:
    """Yield that two streams are of two clusters, if they are. LAYOUTs differ with the kind of store, and may."""
    if first.instance_id != second.instance_id:
        yield Difference("node", INSTANCE_ID, "differs")


def compare(
    first: Iterable[DumpRecord], second: Iterable[DumpRecord], *, progress: Callable[[int], None] = lambda _: None
) -> Iterator[Difference]:
    """Yield what differs between two streams of records, in order. How far the ledger ids got is not compared."""
    left, right = iter(first), iter(second)
    one, other = next(left, None), next(right, None)
    count = 0
    while one is not None or other is not None:
        count += 1
        if not count % 1000:
            progress(count)
        if other is None or (one is not None and one.place < other.place):
            assert one is not None
            if one.kind != "sequence":
                yield Difference(one.kind, one.key, "onlyInFirst")
            one = next(left, None)
        elif one is None or other.place < one.place:
            if other.kind != "sequence":
                yield Difference(other.kind, other.key, "onlyInSecond")
            other = next(right, None)
        else:
            if one.value != other.value and one.kind != "sequence":
                yield Difference(one.kind, one.key, "differs", _fields_that_differ(one, other))
            one, other = next(left, None), next(right, None)


def _fields_that_differ(one: DumpRecord, other: DumpRecord) -> tuple[str, ...]:
    if one.kind != "ledger":
        return ()
    try:
        left, right = LedgerMetadata.parse(one.value), LedgerMetadata.parse(other.value)
    except (Corrupt, Unsupported):
        return ()
    names = {
        "format_version": "metadataFormatVersion", "state": "state", "ensemble_size": "ensembleSize",
        "write_quorum_size": "writeQuorumSize", "ack_quorum_size": "ackQuorumSize", "digest_type": "digestType",
        "length": "length", "last_entry_id": "lastEntryId", "ctime_ms": "ctime", "custom_metadata": "customMetadata",
        "ensembles": "ensembles", "password": "password", "c_token": "ctoken",
    }  # fmt: skip
    return tuple(shown for name, shown in names.items() if getattr(left, name) != getattr(right, name))


def open_source(text: str, open_cluster: Callable[[str], Cluster]) -> tuple[MetadataSource, Cluster | None]:
    """What `text` names: a store by its URI or as `context:NAME` (then its cluster too, for the caller to close), else
    an export file."""
    if "://" in text or text.startswith(("context:", "metadata-store:")):
        cluster = open_cluster(text)
        try:
            return ClusterSource(cluster), cluster
        except BaseException:
            cluster.close()
            raise
    if not text:
        raise UsageError("An export file, or a metadata URI, is needed")
    return ExportFile(Path(text)), None


def _base64(value: bytes) -> str:
    return b2a_base64(value, newline=False).decode("ascii")


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
