"""Streams of metadata records from a cluster or an export: written to an export, and compared."""

from __future__ import annotations

import hashlib
import heapq
import json
import time
from binascii import b2a_base64
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, repeat, tee
from pathlib import Path
from typing import Any, Final, NamedTuple

from bkctl.disk import atomic_write
from bkctl.errors import AlreadyExists, Corrupt, Unsupported, UsageError
from bkctl.formats.metadata import LedgerMetadata
from bkctl.ids import LedgerId
from bkctl.metadata.admin.dump.export_file import (
    FORMAT,
    KINDS,
    NODE_PATHS,
    VERSION,
    DumpHeader,
    DumpRecord,
    DumpSource,
    ExportFile,
)
from bkctl.metadata.cluster import Cluster
from bkctl.metadata.ledgers import INSTANCE_ID
from bkctl.metadata.underreplication import LedgerMarks, mark_path


class ClusterSource(DumpSource):
    """The present records of a cluster, or with `ledgers` only the metadata of these ledgers.

    Scoped ledgers that another cluster left (`scopes_state` "foreign") are left out.
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
        cluster, store = self._cluster, self._cluster.store
        if self._ledgers is not None:
            for ledger in self._ledgers:
                cluster.ledgers.read(ledger)
            yield from self._of_ledgers(self._ledgers)
            return
        for path, found in zip(NODE_PATHS, store.get_many(NODE_PATHS), strict=True):
            if found is not None:
                yield DumpRecord("node", path, found.value)
        bookies = cluster.cookies.list()
        cookies = store.get_many(f"cookies/{bookie_id}" for bookie_id in bookies)
        for bookie_id, found in zip(bookies, cookies, strict=True):
            if found is not None:
                yield DumpRecord("cookie", bookie_id, found.value)
        position = cluster.ledgers.id_position()
        if position is not None:
            yield DumpRecord("sequence", "ledger", b"%d" % position)
        yield from self._marks()
        yield from self._of_ledgers(cluster.ledgers.ledgers(None))

    def ledgers_after(self, ledger: LedgerId) -> Iterator[LedgerId]:
        if self._ledgers is not None:
            return (each for each in self._ledgers if each > ledger)
        return self._cluster.ledgers.ledgers(None, ledger)

    def _marks(self) -> Iterator[DumpRecord]:
        store = self._cluster.store
        ledgers, asked = tee(ledger for ledger, _ in LedgerMarks(store).list(None))
        for ledger, found in zip(ledgers, store.get_many(map(mark_path, asked)), strict=True):
            if found is not None:
                yield DumpRecord("mark", ledger.qualified_name, found.value)

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
        try:
            return ClusterSource(cluster), cluster
        except BaseException:
            cluster.close()
            raise
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
        lines.append(f'{{"kind":"{kind}","key":"{name}","value":"{_base64(value)}"{ctime}}}\n')
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
        "layout": None if header.layout is None else _base64(header.layout),
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


def _base64(value: bytes) -> str:
    return b2a_base64(value, newline=False).decode("ascii")


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
    names = {
        "format_version": "metadataFormatVersion", "state": "state", "ensemble_size": "ensembleSize",
        "write_quorum_size": "writeQuorumSize", "ack_quorum_size": "ackQuorumSize", "digest_type": "digestType",
        "length": "length", "last_entry_id": "lastEntryId", "ctime_ms": "ctime", "custom_metadata": "customMetadata",
        "ensembles": "ensembles", "password": "password", "c_token": "ctoken",
    }  # fmt: skip
    return tuple(shown for name, shown in names.items() if getattr(left, name) != getattr(right, name))
