"""Digest verdicts of an extract, the index of a bookie, and the evidence for what only metadata or records decide."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from bkctl.errors import (
    BkctlError,
    Corrupt,
    LedgerNotFound,
    NotFound,
    Unauthorized,
    Unreachable,
    Unsupported,
    UsageError,
)
from bkctl.files.directories import BookieDirectories
from bkctl.files.index import BookieIndexes, LedgerIndexReader
from bkctl.files.rocksdb import LedgersDatabase, LocationsDatabase
from bkctl.formats.entry import DigestManager, DigestType
from bkctl.formats.names import DATABASE_NAMES
from bkctl.ids import LedgerId
from bkctl.spark.facts.facts_store import FactsStore, PartWriter
from bkctl.spark.facts.tables import arrow_schema
from bkctl.spark.sources.columns import where_and_why
from bkctl.spark.sources.filters import Conditions
from bkctl.spark.sources.index_plan import DatabaseRange
from bkctl.spark.sources.index_rows import DatabaseReader, IndexedEntries, entry_rows
from bkctl.spark.sources.record_rows import digest_of_v1, digest_of_v2
from bkctl.spark.sources.records import OpenLogs

if TYPE_CHECKING:
    from bkctl.metadata.cluster import Cluster
    from bkctl.spark.jobs.bookies import BookieFiles

#: Ledgers whose digests are kept in memory.
_LEDGERS_MAX: Final = 100_000


class LedgerDigests:
    """The digests of ledgers with their passwords, from `cluster`; None: digests that need a password stay unknown."""

    def __init__(self, cluster: Cluster | None) -> None:
        self._cluster = cluster
        self._known = lru_cache(_LEDGERS_MAX)(self._digest_of)

    def of_record(self, ledger: str, entry_id: int, body: bytes) -> tuple[str | None, bool]:
        """Return the digest type that a record matches (None: none, or unknown), and whether its bytes are evidence.

        They are not if the digest type of the ledger has nothing to check, or the ledger no longer exists.
        """
        if self._cluster is None:
            return None, True
        manager = self._known(self._cluster, ledger)
        if not isinstance(manager, DigestManager):
            return None, manager is not None
        try:
            manager.open(body, entry_id)
        except BkctlError:
            return None, True
        return manager.digest_type.name, False

    def judge(
        self, records: pa.RecordBatch, read: Callable[[int, int], bytes]
    ) -> tuple[pa.RecordBatch, pa.RecordBatch]:
        """Return `records` with the digests that `cluster` tells, and the evidence of those that stay in doubt.

        `read(offset, size)` reads the file of the records.
        """
        digests = records.column("digest")
        ledgers = records.column("ledgerQualifiedName")
        doubtful = pc.and_(digests.is_null(), ledgers.is_valid())
        places = np.flatnonzero(doubtful.to_numpy(zero_copy_only=False))
        chosen = records.take(pa.array(places))
        found: dict[int, str] = {}
        kept: list[int] = []
        bodies: list[bytes] = []
        names = ("ledgerQualifiedName", "entryId", "offset", "recordSize")
        for number, (ledger, entry_id, offset, size) in enumerate(
            zip(*(chosen.column(name).to_pylist() for name in names), strict=True)
        ):
            body = read(offset + 4, size)
            digest, is_evidence = self.of_record(ledger, entry_id, body)
            if digest is not None:
                found[int(places[number])] = digest
            elif is_evidence:
                kept.append(number)
                bodies.append(body)
        if found:
            values = digests.to_pylist()
            for place, digest in found.items():
                values[place] = digest
            records = records.set_column(records.schema.get_field_index("digest"), "digest", pa.array(values))
        evidence = chosen.take(pa.array(kept, pa.int64())).select(["offset", "ledgerQualifiedName", "entryId"])
        return records, evidence.append_column("record", pa.array(bodies, pa.binary()))

    @staticmethod
    def _digest_of(cluster: Cluster, name: str) -> DigestManager | BkctlError | None:
        """Return None if there is nothing to check, or no ledger any more; an error: its metadata cannot be used."""
        ledger = LedgerId.from_value(int(name, 16))
        try:
            metadata = cluster.ledgers.read(ledger).metadata
            if metadata.digest_type in (None, DigestType.DUMMY):
                return None
            return DigestManager(ledger, metadata.digest_type, metadata.password or b"")
        except LedgerNotFound:
            return None
        except (Corrupt, Unsupported, UsageError) as error:
            return error
        except (Unauthorized, Unreachable):
            raise
        except BkctlError as error:
            # A refusal of the metadata store must not pass for damage of the file whose records are judged.
            raise Unreachable(error.message, hint=error.hint) from error


# --- the index --------------------------------------------------------------------------------------------------------

#: Entries of the index that are compared with the logs at once.
_CHUNK_ROWS: Final = 1 << 22
_Damage = tuple[str, int | None, str]


class IndexExtract:
    """Writes the index of a bookie. `parts` maps (log id, scoped) to the paths and `records` parts of its logs."""

    def __init__(
        self, bookie: BookieFiles, store: FactsStore, digests: LedgerDigests,
        parts: Mapping[tuple[int, bool], list[tuple[str, str]]],
    ) -> None:  # fmt: skip
        self._bookie, self._store, self._digests, self._parts = bookie, store, digests, parts
        self._schema = arrow_schema("index")
        self._chunk: list[IndexedEntries] = []
        self._count = 0
        self._logs = OpenLogs()
        self._damages: list[_Damage] = []

    def write(self, writer: PartWriter, evidence: PartWriter) -> Iterator[_Damage]:
        """Write the entries and the evidence; yield the path, offset and reason of each damage."""
        with closing(self._logs):
            for directory in self._bookie.index_dirs:
                for path, scoped, entries in self._sources(BookieDirectories((), (), [directory])):
                    for found in self._before_damage(path, entries):
                        self._add(found, path, scoped, writer, evidence)
                yield from self._damages
                self._damages.clear()
            self._compare(evidence)

    def _sources(self, directories: BookieDirectories) -> Iterator[tuple[str, bool, Iterator[IndexedEntries]]]:
        """Yield path, scope and entries of each file and database; what cannot be opened goes to the damages."""
        with BookieIndexes(directories) as indexes:
            for file in indexes.files():
                path = str(file.path)
                with self._noting(path), LedgerIndexReader.open(file.path) as reader:
                    yield path, file.scoped, _entries_of_file(reader)
        databases = {
            (file.path.parent, file.scoped) for file in directories.rocksdbs() if file.path.name in DATABASE_NAMES
        }
        for current, scoped in sorted(databases):
            part = DatabaseRange(str(current), scoped, self._bookie.bookie_id)
            database = part.path("locations")
            path = str(database)
            try:
                with (
                    LedgersDatabase.open(part.path("ledgers"), scoped=scoped) as ledgers,
                    LocationsDatabase.open(database, scoped=scoped) as locations,
                ):
                    yield path, scoped, DatabaseReader(part, ledgers, locations, Conditions()).entries()
            except PermissionError:
                raise
            except OSError as error:
                self._damages.append((path, None, f"{path} cannot be read: {error.strerror or error}"))
            except (Corrupt, NotFound, Unsupported, UsageError) as error:
                self._damages.append((path, *where_and_why(error)))

    def _before_damage(self, path: str, entries: Iterator[IndexedEntries]) -> Iterator[IndexedEntries]:
        """Yield the entries before damage, which goes to the damages."""
        with self._noting(path):
            yield from entries

    @contextmanager
    def _noting(self, path: str) -> Iterator[None]:
        """Add the error of reading that ends the block to the damages, unless the bookie has deleted the ledger."""
        try:
            yield
        except NotFound:
            pass
        except (Corrupt, Unsupported) as error:
            self._damages.append((path, *where_and_why(error)))

    def _add(
        self, entries: IndexedEntries, path: str, scoped: bool, writer: PartWriter, evidence: PartWriter
    ) -> None:  # fmt: skip
        constants = {"file": path, "scoped": scoped, "bookieId": self._bookie.bookie_id}
        for batch in entry_rows(self._schema, entries, Conditions(), constants):
            writer.add(batch)
        self._chunk.append(entries)
        self._count += len(entries.entry_ids)
        if self._count >= _CHUNK_ROWS:
            self._compare(evidence)

    def _compare(self, evidence: PartWriter) -> None:
        """Write the evidence for the places of the current chunk that are not records of their entries."""
        chunk, self._chunk, self._count = self._chunk, [], 0
        if not chunk:
            return
        entries = IndexedEntries(*(np.concatenate(columns) for columns in zip(*chunk, strict=True)))
        log_ids = entries.locations >> 32 & 0xFFFFFFFF
        scoped = entries.scope_ids != 0
        order = np.lexsort((log_ids, scoped))
        borders = np.flatnonzero(np.diff(log_ids[order]) | np.diff(scoped[order])) + 1
        rows: Any
        for rows in np.split(order, borders):
            key = int(log_ids[rows[0]]), bool(scoped[rows[0]])
            of_log = entries.select(rows)
            found = np.zeros(len(rows), np.bool_)
            for _, part in self._parts.get(key, ()):
                found |= self._stands_in(part, of_log)
            evidence.add_rows(self._look(key, of_log.select(~found)))

    def _stands_in(self, part: str, entries: IndexedEntries) -> npt.NDArray[np.bool_]:
        """Return which entries have their record at their place in the log of `part`."""
        table = self._store.read("records", part, ["offset", "ledgerScopeId", "ledgerId", "entryId"])
        offsets = table.column("offset").to_numpy()
        if not len(offsets):
            return np.zeros(len(entries.entry_ids), np.bool_)
        wanted = (entries.locations & 0xFFFFFFFF) - 4
        places = np.minimum(np.searchsorted(offsets, wanted), len(offsets) - 1)
        scopes, ledgers = (_unsigned(table.column(name)) for name in ("ledgerScopeId", "ledgerId"))
        found: npt.NDArray[np.bool_] = (
            (offsets[places] == wanted)
            & (scopes[places] == entries.scope_ids)
            & (ledgers[places] == entries.ledger_ids)
            & (table.column("entryId").to_numpy()[places] == entries.entry_ids)
        )
        return found

    def _look(self, key: tuple[int, bool], entries: IndexedEntries) -> Iterator[dict[str, Any]]:
        """Yield the evidence for each place, in each log with this id."""
        log_id, scoped = key
        columns = (column.tolist() for column in entries)
        for scope_id, ledger_id, entry_id, location in zip(*columns, strict=True):
            offset = (location & 0xFFFFFFFF) - 4
            for candidate, (path, _) in enumerate(self._parts.get(key, ())):
                yield {
                    "bookieId": self._bookie.bookie_id, "file": path, "logId": log_id, "scoped": scoped,
                    "offset": offset, "candidate": candidate,
                    **self._record_at(path, offset, LedgerId(scope_id, ledger_id), entry_id),
                }  # fmt: skip

    def _record_at(self, path: str, offset: int, ledger: LedgerId, entry_id: int) -> dict[str, Any]:
        try:
            record = self._logs.reader(path).entry_at(offset + 4)
        except NotFound as error:
            return {"problem": "missing", "detail": str(error)}
        except (Corrupt, Unsupported, UsageError) as error:
            return {"problem": "damaged", "detail": str(error)}
        found: dict[str, Any] = {"ledgerQualifiedName": record.ledger.qualified_name, "entryId": record.entry_id}
        if (record.ledger, record.entry_id) == (ledger, entry_id):
            check = digest_of_v1 if record.format_version == 1 else digest_of_v2
            found["digest"], is_evidence = check(record.body, 0, record.record_size), False
            if found["digest"] is None:
                found["digest"], is_evidence = self._digests.of_record(ledger.qualified_name, entry_id, record.body)
            found["record"] = record.body if is_evidence else None
        return found


def _entries_of_file(reader: LedgerIndexReader) -> Iterator[IndexedEntries]:
    ledger = reader.ledger
    assert ledger is not None, reader.name  # BookieIndexes lists files whose path names their ledger.
    for entry_id, page in reader.pages():
        locations = np.frombuffer(page, np.int64)
        filled = np.flatnonzero(locations)
        yield IndexedEntries(
            np.full(len(filled), ledger.scope_id, np.uint64),
            np.full(len(filled), ledger.ledger_id, np.uint64),
            filled + entry_id,
            locations[filled],
        )


def _unsigned(column: pa.ChunkedArray) -> npt.NDArray[np.uint64]:
    """Return ids as numbers. A record without a ledger gets an arbitrary id: no index has an entry of its entry id."""
    encoded = column.combine_chunks().dictionary_encode()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.combine_chunks()
    if not len(encoded.dictionary):
        return np.zeros(len(column), np.uint64)
    values = np.array([int(value) for value in encoded.dictionary.to_pylist()], np.uint64)
    found: npt.NDArray[np.uint64] = values[encoded.indices.fill_null(0).to_numpy()]
    return found
