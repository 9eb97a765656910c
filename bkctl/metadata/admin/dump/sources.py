"""Streams of metadata records from a cluster or an export: read whole or in sections, written, and compared."""

from __future__ import annotations

import hashlib
import heapq
import json
import time
from abc import abstractmethod
from binascii import Error as Base64Error
from binascii import a2b_base64
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import groupby, repeat, tee
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, NamedTuple

from bkctl.columns import base64_text
from bkctl.disk import Closing, atomic_write
from bkctl.errors import AlreadyExists, Corrupt, CorruptRecord, Unauthorized, Unsupported, UsageError, on_error
from bkctl.formats.metadata import LedgerMetadata
from bkctl.ids import I64_MAX, U64_MAX, LedgerId
from bkctl.metadata.admin.health import DISABLE_HEALTH_CHECK, MUTES
from bkctl.metadata.cluster import COOKIES, Cluster
from bkctl.metadata.ledger_columns import LEDGER_COLUMNS, ledger_row
from bkctl.metadata.ledgers import INSTANCE_ID, VersionedMetadata
from bkctl.metadata.store import RACKS, VALUE_SIZE_BYTES_MAX, attempt, is_path
from bkctl.metadata.underreplication import SCOPED, UNDERREPLICATION, AuditorCheck, LedgerMarks, mark_path

FORMAT: Final = "bkctl-metadata"
VERSION: Final = 1
KINDS: Final = ("node", "cookie", "sequence", "mark", "ledger")
_CHECKS: Final = tuple(check.value for check in AuditorCheck)
#: Paths of the records of kind "node".
NODE_PATHS: Final = sorted((
    RACKS, DISABLE_HEALTH_CHECK, MUTES, *(f"{SCOPED}/{name}" for name in _CHECKS),
    *(f"{UNDERREPLICATION}/{name}" for name in ("LAYOUT", "disable", "lostBookieRecoveryDelay", *_CHECKS)),
))  # fmt: skip


class DumpRecord(NamedTuple):
    """One value of a cluster's metadata; the package describes `key`. `ctime_ms` is the store's, of ledgers only."""

    kind: str
    key: str
    value: bytes
    ctime_ms: int | None = None

    @property
    def place(self) -> tuple[int, str]:
        """Sort key of records."""
        return KINDS.index(self.kind), self.key

    @property
    def ledger(self) -> LedgerId:
        """The ledger of a record of kind "ledger" or "mark"."""
        return LedgerId.from_value(int(self.key, 16))

    def path(self, cluster: Cluster) -> str:
        """Return the path of the record's node in a cluster; of any but a sequence."""
        if self.kind == "ledger":
            return cluster.ledgers.path(self.ledger)
        if self.kind == "mark":
            return mark_path(self.ledger)
        return f"{COOKIES}/{self.key}" if self.kind == "cookie" else self.key

    @property
    def name(self) -> str:
        """Name of the record in messages."""
        if self.kind in ("ledger", "mark"):
            return f"{'Ledger' if self.kind == 'ledger' else 'The mark of ledger'} {self.ledger}"
        return {"node": f"Node {self.key}", "cookie": f"The cookie of {self.key}"}.get(self.kind, "The ledger ids")


class DumpHeader(NamedTuple):
    """Identity of the exported cluster. `layout` holds the bytes of its LAYOUT, None where none is stored."""

    metadata_uri: str
    instance_id: str
    layout: bytes | None
    time: str


class DumpSource(Closing):
    """A cluster or an export that gives records in order. A context manager."""

    #: Name of the source in messages.
    name: str
    header: DumpHeader

    @abstractmethod
    def records(self) -> Iterator[DumpRecord]:
        """Yield the records in ascending `place`; each call starts from the first one."""

    @abstractmethod
    def ledgers_after(self, ledger: LedgerId) -> Iterator[LedgerId]:
        """Yield the ids of the ledgers after `ledger`, in ascending order."""


#: A value in base64, a key, and the names around them.
LINE_SIZE_BYTES_MAX: Final = 2 * VALUE_SIZE_BYTES_MAX


class ExportSection(NamedTuple):
    """`line_count` whole lines of an export, from byte `start` to before byte `end`."""

    start: int
    end: int
    line_count: int


class ExportFile(DumpSource):
    """An export, read line by line; `check` reads the whole file and verifies its hash.

    Raises OSError; Corrupt for another kind of file, Unsupported for a later version.
    """

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._file = open(path, "rb")  # noqa: SIM115 - closed by close
        with on_error(self.close):
            fields = self._fields(self._file.readline(LINE_SIZE_BYTES_MAX), 0)
            if fields.get("format") != FORMAT:
                raise Corrupt(f"{self.name} is not a metadata export")
            if fields.get("version") != VERSION:
                raise Unsupported(
                    f"{self.name} is an export of version {fields.get('version')!r}; version {VERSION} is known"
                )
            layout, uri, instance_id = fields.get("layout"), fields.get("metadataUri"), fields.get("instanceId")
            if not isinstance(uri, str) or not isinstance(instance_id, str):
                raise self._damaged("The export's first line lacks metadataUri or instanceId", 0)
            self.header = DumpHeader(
                uri, instance_id, None if layout is None else self._value(layout, 0), str(fields.get("time"))
            )

    def check(self, progress: Callable[[int], None] = lambda _: None) -> Counter[str]:
        """Read the whole file; return the number of records of each kind. Raises Corrupt for an incomplete file."""
        counts: Counter[str] = Counter()
        for record in self.records():
            counts[record.kind] += 1
            if not counts[record.kind] % 1000:
                progress(counts.total())
        return counts

    def records(self) -> Iterator[DumpRecord]:
        """See DumpSource.records. Raises Corrupt, naming the byte; at the end also for a wrong hash or count."""
        last: tuple[int, str] | None = None
        for at, line in self._lines():
            record = self._record(self._fields(line, at), at)
            if last is not None and record.place <= last:
                raise self._damaged("The export's records are out of order", at)
            last = record.place
            yield record

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield the lines of records, each with its byte, and then raise Corrupt unless the last line ends the export.

        The last line of an incomplete export is yielded too: it may be a record, or the part of one that was written.
        """
        self._file.seek(0)
        line = self._file.readline(LINE_SIZE_BYTES_MAX)
        digest, at, count = hashlib.sha256(line), len(line), 0
        line = self._file.readline(LINE_SIZE_BYTES_MAX)
        while following := self._file.readline(LINE_SIZE_BYTES_MAX):
            digest.update(line)
            yield at, line
            line, at, count = following, at + len(line), count + 1
        try:
            fields = self._fields(line, at)
        except CorruptRecord:
            fields = {}
        if fields.get("kind") != "end":
            if line and b'"kind":"end"' not in line:
                yield at, line
            raise self._cut_short(at + len(line))
        if fields.get("records") != count or fields.get("sha256") != digest.hexdigest():
            raise self._changed(at)

    def ledgers_after(self, ledger: LedgerId) -> Iterator[LedgerId]:
        """See DumpSource.ledgers_after; reads the whole file."""
        name = ledger.qualified_name
        return (each.ledger for each in self.records() if each.kind == "ledger" and each.key > name)

    def sections(self, size_bytes: int) -> tuple[list[ExportSection], CorruptRecord | None]:
        """Return the records' lines in sections of about `size_bytes`, and the error of an incomplete file.

        Reads and hashes the whole file, without parsing records.
        """
        found: list[ExportSection] = []
        problem: CorruptRecord | None = None
        start = end = count = 0
        try:
            for at, line in self._lines():
                if end - start >= size_bytes:
                    found.append(ExportSection(start, end, count))
                    start, count = end, 0
                start, end, count = start or at, at + len(line), count + 1
        except CorruptRecord as error:
            problem = error
        if count:
            found.append(ExportSection(start, end, count))
        return found, problem

    def section(self, section: ExportSection) -> Iterator[tuple[int, DumpRecord | CorruptRecord]]:
        """Yield the byte of each line with its record, or with its error.

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
        hint = "export again: an incomplete export cannot be imported"
        return self._damaged("The export is cut short: its last line is missing", at, hint)

    def _changed(self, at: int) -> CorruptRecord:
        return self._damaged("The export's lines do not match its hash: the file was changed or damaged", at)

    def _damaged(self, problem: str, at: int, hint: str | None = None) -> CorruptRecord:
        return CorruptRecord(problem, offset=at, where=self.name, hint=hint)

    def _record(self, fields: dict[str, Any], at: int) -> DumpRecord:
        kind, key, ctime_ms = fields.get("kind"), fields.get("key"), fields.get("ctime")
        if kind == "end":
            raise self._damaged("Data follows the export's last line", at)
        if kind not in KINDS or not isinstance(key, str) or not (ctime_ms is None or isinstance(ctime_ms, int)):
            raise self._damaged("Not a record of a metadata export", at)
        if (kind in ("ledger", "mark")) and (len(key) != 32 or key.strip("0123456789abcdef")):
            raise self._damaged(f"{key[:40]!r} is not a ledger's qualified name", at)
        if kind == "node" and key not in NODE_PATHS:
            raise self._damaged(f"{key[:80]!r} is not a node that exports hold", at)
        if kind in ("ledger", "mark") and I64_MAX < int(key, 16) <= U64_MAX:
            raise self._damaged(f"{key} is not an id of scope 0: it is 2^63 or more", at)
        if kind == "cookie" and ("/" in key or not is_path(f"{COOKIES}/{key}")):
            raise self._damaged(f"{key[:80]!r} is not a bookie id", at)
        value = self._value(fields.get("value"), at)
        if len(value) > VALUE_SIZE_BYTES_MAX:
            raise self._damaged(f"The value has {len(value):,} bytes, above a store's {VALUE_SIZE_BYTES_MAX:,}", at)
        if kind == "sequence" and (not value.isdigit() or len(value) > 19):
            raise self._damaged(f"{value[:40]!r} is not a position in the sequence of ledger ids", at)
        return DumpRecord(kind, key, value, ctime_ms)

    def _fields(self, line: bytes, at: int) -> dict[str, Any]:
        if not line.endswith(b"\n"):
            long = len(line) == LINE_SIZE_BYTES_MAX
            what = f"The line is longer than {LINE_SIZE_BYTES_MAX:,} bytes" if long else "The export is cut short"
            raise self._damaged(what, at)
        try:
            fields = json.loads(line)
            if not isinstance(fields, dict):
                raise ValueError(fields)
        except (ValueError, RecursionError) as error:
            raise self._damaged("Not a metadata export: the line is not a JSON record", at) from error
        return fields

    def _value(self, text: object, at: int) -> bytes:
        try:
            if not isinstance(text, str):
                raise ValueError(text)
            return a2b_base64(text, strict_mode=True)
        except (ValueError, Base64Error) as error:
            raise self._damaged("The value is not base64", at) from error

    def close(self) -> None:
        self._file.close()


class ClusterSource(DumpSource):
    """The present records of a cluster, or with `ledgers` only the metadata of these ledgers.

    Ledgers that no listing has, and racks that the store refuses, are left out (`left_out`).
    """

    def __init__(self, cluster: Cluster, ledgers: Sequence[LedgerId] | None = None) -> None:
        self._cluster = cluster
        self._ledgers = None if ledgers is None else sorted(set(ledgers))
        cluster.layout()
        stored = cluster.store.get(cluster.places.layout)
        self.name = cluster.uri
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.header = DumpHeader(cluster.uri, cluster.instance_id(), None if stored is None else stored.value, now)

    def records(self) -> Iterator[DumpRecord]:
        """See DumpSource.records. Raises LedgerNotFound for a missing one of `ledgers`."""
        cluster = self._cluster
        if self._ledgers is not None:
            for ledger in self._ledgers:
                cluster.ledgers.read(ledger)
            yield from self._of_ledgers(self._ledgers)
            return
        yield from self._stored("node", NODE_PATHS if self.may_read_racks else NODE_PATHS[1:])
        yield from self._stored("cookie", cluster.cookies.list())
        position = cluster.ledgers.id_position()
        if position is not None:
            yield DumpRecord("sequence", "ledger", b"%d" % position)
        yield from self._stored("mark", (each.qualified_name for each, _ in LedgerMarks(cluster.store).list(None)))
        yield from self._of_ledgers(cluster.ledgers.ledgers(None))

    def ledgers_after(self, ledger: LedgerId) -> Iterator[LedgerId]:
        if self._ledgers is not None:
            return (each for each in self._ledgers if each > ledger)
        return self._cluster.ledgers.ledgers(None, ledger)

    @cached_property
    def may_read_racks(self) -> bool:
        """False if the store refuses the racks, which are Pulsar's: `records` leaves them out."""
        return not isinstance(attempt(self._cluster.store.get, RACKS), Unauthorized)

    def left_out(self) -> list[str]:
        """Return what `records` leaves out, although all was asked for, in words."""
        if self._ledgers is not None:
            return []
        racks = [] if self.may_read_racks else ["The racks of bookies are left out: the store refuses to show them"]
        unlisted, why = self._cluster.ledgers.unlisted(), "'bkctl metadata check' says why"
        return [*(f"The ledgers at {path} are left out: {why}" for path in unlisted), *racks]

    def _stored(self, kind: str, keys: Iterable[str]) -> Iterator[DumpRecord]:
        records, asked = tee(DumpRecord(kind, key, b"") for key in keys)
        values = self._cluster.store.get_many(record.path(self._cluster) for record in asked)
        return (each._replace(value=found.value) for each, found in zip(records, values, strict=True) if found)

    def _of_ledgers(self, ledgers: Iterable[LedgerId]) -> Iterator[DumpRecord]:
        for ledger, found in self._cluster.ledgers.values(ledgers):
            if found is not None:
                yield DumpRecord("ledger", ledger.qualified_name, found.value, found.ctime_ms)

    def close(self) -> None:
        """Do nothing: the caller who opened the cluster closes it."""


def open_source(text: str, open_cluster: Callable[[str], Cluster]) -> tuple[DumpSource, Cluster | None]:
    """Open the source that `text` names: a store by its URI or as `context:NAME`, else an export file.

    Returns the cluster of a store too, for the caller to close.
    """
    if "://" in text or text.startswith(("context:", "metadata-store:")):
        cluster = open_cluster(text)
        with on_error(cluster.close):
            return ClusterSource(cluster), cluster
    if not text:
        raise UsageError("An export file, or a metadata URI, is needed")
    return ExportFile(Path(text)), None


_WRITE_SIZE_BYTES: Final = 1 << 20


class ExportSummary(NamedTuple):
    """A written export: records by kind, size, and the SHA-256 in its last line."""

    counts: dict[str, int]
    size_bytes: int
    sha256: str


def write_export(
    source: DumpSource, write: Callable[[bytes], object], progress: Callable[[int], None] = lambda _: None
) -> ExportSummary:
    """Write all records of `source` as an export. Any error of the source or `write` leaves the export incomplete."""
    digest = hashlib.sha256()
    counts: Counter[str] = Counter()
    size = 0

    def put(lines: list[str]) -> None:
        nonlocal size
        data = "".join(lines).encode("ascii")
        digest.update(data)
        write(data)
        size += len(data)

    lines = [_json_line(_header_fields(source.header))]
    held = 0
    for count, (kind, key, value, ctime_ms) in enumerate(source.records(), 1):
        ctime = "" if ctime_ms is None else f',"ctime":{ctime_ms}'
        name = key if kind in ("ledger", "mark") else json.dumps(key)[1:-1]
        lines.append(f'{{"kind":"{kind}","key":"{name}","value":"{base64_text(value)}"{ctime}}}\n')
        counts[kind] += 1
        held += len(lines[-1])
        if held >= _WRITE_SIZE_BYTES:
            put(lines)
            lines, held = [], 0
        progress(count)
    put(lines)
    sha256 = digest.hexdigest()
    end = _json_line({"kind": "end", "records": counts.total(), "sha256": sha256})
    write(end.encode("ascii"))
    return ExportSummary({kind: counts[kind] for kind in KINDS}, size + len(end), sha256)


def _header_fields(header: DumpHeader) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "time": header.time,
        "metadataUri": header.metadata_uri,
        "instanceId": header.instance_id,
        "layout": None if header.layout is None else base64_text(header.layout),
    }


def _json_line(fields: dict[str, Any]) -> str:
    return json.dumps(fields, separators=(",", ":")) + "\n"


def export_to_file(
    source: DumpSource, path: Path, *, overwrite: bool = False, progress: Callable[[int], None] = lambda _: None
) -> ExportSummary:
    """Write an export to `path`, readable by its owner only. The file appears once it is complete and on disk.

    Raises AlreadyExists for an existing file, unless `overwrite`; UsageError for a directory; OSError.
    """
    if path.exists() and not path.is_file():
        raise UsageError(
            f"{path} is not a regular file, and would be replaced by one", hint="write to - and redirect stdout"
        )
    if path.exists() and not overwrite:
        raise AlreadyExists(f"{path} exists", hint="choose another file, or add --overwrite")
    with atomic_write(path) as file:  # readable by its owner only: ledger metadata holds passwords
        return write_export(source, file.write, progress)


class Difference(NamedTuple):
    """A record that differs between the two sides: `what` is "onlyInFirst", "onlyInSecond" or "differs".

    `fields` are the differing fields of a ledger's metadata, empty where one side cannot be parsed.
    """

    kind: str
    key: str
    what: str
    fields: tuple[str, ...] = ()

    @property
    def ledger(self) -> LedgerId | None:
        """The ledger of a record of kind "ledger" or "mark", else None."""
        return LedgerId.from_value(int(self.key, 16)) if self.kind in ("ledger", "mark") else None


def compare_headers(first: DumpHeader, second: DumpHeader) -> Iterator[Difference]:
    """Yield a difference of the instance ids. LAYOUTs may differ, as they do between kinds of stores."""
    if first.instance_id != second.instance_id:
        yield Difference("node", INSTANCE_ID, "differs")


def compare(
    first: Iterable[DumpRecord], second: Iterable[DumpRecord], *, progress: Callable[[int], None] = lambda _: None
) -> Iterator[Difference]:
    """Yield the differences between two streams of records, in order. Positions of ledger ids are not compared."""
    sides = (zip(repeat("onlyInFirst"), first), zip(repeat("onlyInSecond"), second))
    by_place = groupby(heapq.merge(*sides, key=_place), _place)
    for count, (_, records) in enumerate(by_place, 1):
        progress(count)
        (side, record), *others = records
        if record.kind == "sequence":
            continue
        if not others:
            yield Difference(record.kind, record.key, side)
        elif record.value != others[0][1].value:
            yield Difference(record.kind, record.key, "differs", _differing_fields(record, others[0][1]))


def _place(record: tuple[str, DumpRecord]) -> tuple[int, str]:
    return record[1].place


def _differing_fields(first: DumpRecord, second: DumpRecord) -> tuple[str, ...]:
    if first.kind != "ledger":
        return ()
    try:
        left, right = LedgerMetadata.parse(first.value), LedgerMetadata.parse(second.value)
    except (Corrupt, Unsupported):
        return ()
    names = {column.name: column.getter() for column in LEDGER_COLUMNS.columns if not (column.optional or column.ages)}
    names |= {"password": attrgetter("metadata.password"), "ctoken": attrgetter("metadata.c_token")}
    ledger = LedgerId(0, 0)  # both sides have the same
    rows = [ledger_row(ledger, VersionedMetadata(each, 0, each.ctime_ms)) for each in (left, right)]
    return tuple(name for name, get in names.items() if get(rows[0]) != get(rows[1]))
