"""The extract of one bookie: reads its files without Spark, and writes their facts.

Journals are read before logs, and logs before the index, so that an entry that a running bookie moves meanwhile from
one to the next is in one of them. An entry log is read once: its part is named by log id, size and modification time,
and later extracts reuse it. Damage that arises in a log afterwards is therefore found by a `full` extract only.
"""

from __future__ import annotations

import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from bkctl.errors import (
    BkctlError,
    Conflict,
    Corrupt,
    LedgerNotFound,
    NotFound,
    Unauthorized,
    Unreachable,
    Unsupported,
    UsageError,
)  # fmt: skip
from bkctl.files.directories import BookieDirectories, BookieFile
from bkctl.files.entry_log import EntryLogReader
from bkctl.files.index import BookieIndexes, LedgerIndexReader
from bkctl.files.journal import JournalReader
from bkctl.files.journals import latest_marks
from bkctl.formats.entry import DigestManager, DigestType
from bkctl.formats.metadata import Cookie
from bkctl.formats.names import COOKIE_NAME, DATABASE_NAMES
from bkctl.formats.record import RECORD_SIZE
from bkctl.ids import I64_MAX, LedgerId
from bkctl.spark.facts.facts_store import FactsStore, PartWriter, directory_name, list_path
from bkctl.spark.facts.tables import TABLES, arrow_schema
from bkctl.spark.jobs.bookie_records import replay_starts
from bkctl.spark.jobs.garbage import log_rows
from bkctl.spark.jobs.inventory import log_row
from bkctl.spark.jobs.journal_audit import check_rows
from bkctl.spark.sources.columns import damage_of, ledger_values
from bkctl.spark.sources.filters import Conditions
from bkctl.spark.sources.indexes import DatabaseRange, IndexedEntries, entry_rows
from bkctl.spark.sources.records import DATA_TYPES, VALUES, OpenLogs, RecordRows, digest_of

if TYPE_CHECKING:
    from bkctl.metadata.cluster import Cluster
    from bkctl.spark.jobs.bookies import BookieFiles

_T = TypeVar("_T")

#: Tables whose rows are kept for each log, for the next extract.
_PIECES: Final = ("ledgers", "damages")
#: Ledgers whose digests are kept in memory.
_LEDGERS_MAX: Final = 100_000
#: Entries of the index that are compared with the logs at once.
_CHUNK_ROWS: Final = 1 << 22
#: Lists of files to try where a listed file is deleted meanwhile.
_ATTEMPTS_MAX: Final = 5
#: Age of files that no list of parts names, and that no other extract can be writing any more.
_LEFTOVER_AGE: Final = timedelta(days=1)


class ExtractCounts(NamedTuple):
    """The result of an extract. `read_log_count` logs were read; the others were extracted before.

    `damage_count` files are damaged: journals, logs and indexes.
    """

    bookie_id: str
    log_count: int
    read_log_count: int
    record_count: int
    damage_count: int
    started_at: datetime


def extract(
    bookie: BookieFiles,
    store: FactsStore,
    cluster: Cluster | None,
    *,
    full: bool = False,
    keep: timedelta = timedelta(hours=1),
    progress: Callable[[int, int], None] = lambda done, known: None,
) -> ExtractCounts:
    """Write the facts of `bookie` to `store`, and return what was read.

    `cluster` has the digest types and passwords for records that match no digest by themselves (HMAC, DUMMY); without
    it such records are copied whole. `full` reads logs again that were extracted before. Parts that are superseded stay
    for `keep`, for jobs that still read them. `progress` gets the number of finished and of all logs. Raises Conflict
    for the bookie of another cluster, and if listed logs or lists of parts vanish during every attempt; the errors of
    the metadata store; and BkctlError if `store` fails.
    """
    if cluster is not None:
        bookie.check_cluster(cluster)
    return _Extract(bookie, store, LedgerDigests(cluster), full=full, keep=keep, progress=progress).run()


class _Extract:
    def __init__(
        self, bookie: BookieFiles, store: FactsStore, digests: LedgerDigests, *, full: bool, keep: timedelta,
        progress: Callable[[int, int], None],
    ) -> None:  # fmt: skip
        self._bookie, self._store, self._digests = bookie, store, digests
        self._full, self._keep, self._progress = full, keep, progress
        self._directory = directory_name(bookie.bookie_id)
        self._started_at = datetime.now(UTC)
        self._number = self._newest() + 1
        self._run_id = uuid.uuid4().hex[:8]
        self._parts: list[tuple[str, str]] = []
        #: Parts of the list written here, and parts that it no longer has.
        self._listed: set[str] = set()
        self._dropped: set[str] = set()
        #: Logs that were read here.
        self._read: set[str] = set()
        self._damage_count = 0

    def run(self) -> ExtractCounts:
        self._write("cookies", self._cookies())
        self._write("marks", self._marks())
        self._write_journals()
        logs = self._extract_logs()
        record_count = self._write_pieces(logs)
        evidence = {file.path for file in self._store.files(f"evidence/{self._directory}")}
        for log in logs:
            self._parts.append(("records", self._part(log)))
            if (part := self._part(log, "evidence")) in evidence:
                self._parts.append(("evidence", part))
        self._publish()
        self._clean()
        read = sum(self._part(log) in self._read for log in logs)
        return ExtractCounts(
            self._bookie.bookie_id, len(logs), read, record_count, self._damage_count, self._started_at
        )

    # --- cookies, marks, journals -------------------------------------------------------------------------------

    def _cookies(self) -> Iterator[dict[str, Any]]:
        bookie = self._bookie
        roles = (("journal", bookie.journal_dirs), ("ledger", bookie.ledger_dirs), ("index", bookie.index_dirs))
        for role, directories in roles:
            for directory in directories:
                path = Path(directory, COOKIE_NAME)
                row = {"file": str(path), "role": role}
                try:
                    cookie = Cookie.parse(path.read_bytes(), str(path))
                except (OSError, BkctlError) as error:
                    yield {**row, "problem": str(error)}
                else:
                    yield {
                        **row, "cookieBookieId": cookie.bookie_id, "instanceId": cookie.instance_id,
                        "layoutVersion": cookie.layout_version,
                    }  # fmt: skip

    def _marks(self) -> Iterator[dict[str, Any]]:
        with suppress(NotFound):
            marks = latest_marks(self._bookie.directories)
            for each in marks.marks:
                yield {
                    "file": str(each.file.path), "journalIndex": each.journal_index, "journalId": each.mark.journal_id,
                    "offset": each.mark.offset,
                }  # fmt: skip
            for path, error in marks.damaged:
                yield {"file": str(path), "problem": str(error)}

    def _write_journals(self) -> None:
        checks = list(check_rows(self._bookie))
        self._damage_count += sum(row["damaged"] for row in checks)
        self._write("journals", checks)
        listed, starts = set(self._bookie.journals()), replay_starts(self._bookie)
        with self._new_part("journal_records") as writer, self._new_part("evidence", "journals") as evidence:
            for path in self._bookie.journals():
                with suppress(NotFound, UsageError), _noting([]), JournalReader.open(path) as reader:
                    # A journal that the bookie created after the listing is behind every mark.
                    start = starts.get(path, I64_MAX) if path in listed else 0
                    for batch in _rows_of("journal_records", reader, []):
                        entries = batch.filter(pc.equal(batch.column("type"), "entry"))
                        found, proofs = self._digests.judge(entries, reader.read)
                        found = found.append_column("replayed", pc.greater_equal(found.column("offset"), start))
                        writer.add(found, file=path, journalId=reader.journal_id)
                        evidence.add(proofs, file=path)

    # --- entry logs ---------------------------------------------------------------------------------------------

    def _extract_logs(self) -> list[BookieFile]:
        """Extract all entry logs and the index, and return the logs."""
        known = {file.path for file in self._store.files(f"records/{self._directory}") if not self._full}
        for _ in range(_ATTEMPTS_MAX):
            logs = self._bookie.directories.entry_logs()
            try:
                for number, log in enumerate(logs):
                    self._progress(number, len(logs))
                    if (part := self._part(log)) not in known:
                        self._read_log(log, part)
                        known.add(part)
                        self._read.add(part)
            except NotFound:
                if log.path.exists():
                    raise
                gone = log.path
                continue  # The bookie has deleted it meanwhile: list them again.
            self._progress(len(logs), len(logs))
            self._write_index(logs)
            return logs
        raise Conflict(
            f"{gone} was deleted while it was read", hint="the bookie deletes many files now; try again later"
        )

    def _part(self, log: BookieFile, table: str = "records") -> str:
        """Return the path of the part or piece of one log; another size or time gives another one."""
        directory = zlib.crc32(str(log.path.parent).encode())
        assert isinstance(log.id, int)
        name = f"{self._directory}/{log.id:x}-{log.size}-{log.mtime_ms}-{directory:08x}"
        return f"_pieces/{name}/{table}.parquet" if table in _PIECES else f"{table}/{name}.parquet"

    def _read_log(self, log: BookieFile, part: str) -> None:
        constants = {**log_row(self._bookie.bookie_id, log), "source": "entryLog"}
        damage: list[BkctlError] = []
        #: Ledger (None: of records without one) → its records, and their bytes with size fields.
        sums: dict[str | None, tuple[int, int]] = {}
        new_part = self._store.new_part
        # The part of `records` comes last: it stands for a log that was extracted as a whole.
        with (
            new_part("records", part, **constants) as writer,
            new_part("evidence", self._part(log, "evidence"), if_empty=False, **constants) as evidence,
            new_part("damages", self._part(log, "damages"), if_empty=False, **constants) as damages,
            new_part("ledgers", self._part(log, "ledgers"), **constants) as ledgers,
        ):
            with _noting(damage), EntryLogReader.open(log.path) as reader:
                for batch in _rows_of("records", reader, damage):
                    found, doubtful = self._digests.judge(batch, reader.read)
                    writer.add(found)
                    evidence.add(doubtful)
                    of_ledgers = pa.Table.from_batches([batch]).group_by("ledgerQualifiedName")
                    for row in of_ledgers.aggregate([("recordSize", "sum"), ("recordSize", "count")]).to_pylist():
                        count, size = sums.get(row["ledgerQualifiedName"], (0, 0))
                        count, size = count + row["recordSize_count"], size + row["recordSize_sum"]
                        sums[row["ledgerQualifiedName"]] = count, size + RECORD_SIZE.size * row["recordSize_count"]
            damages.add_rows(damage_of(error, str(log.path)) for error in damage)
            ledgers.add_rows(_ledger_rows(log, sums))

    def _write_index(self, logs: list[BookieFile]) -> None:
        parts: dict[tuple[int, bool], list[tuple[str, str]]] = {}
        for log in logs:
            assert isinstance(log.id, int)
            parts.setdefault((log.id, log.scoped), []).append((str(log.path), self._part(log)))
        index = IndexExtract(self._bookie, self._store, self._digests, parts)
        with (
            self._new_part("index") as writer,
            self._new_part("evidence", "index") as evidence,
            self._new_part("damages", "index") as damages,
        ):
            found = [{**damage, "source": "index"} for damage in index.write(writer, evidence)]
            self._damage_count += len(found)
            damages.add_rows(found)

    # --- the end ------------------------------------------------------------------------------------------------

    def _write_pieces(self, logs: list[BookieFile]) -> int:
        """Write the tables of all logs' pieces, and return the number of records."""
        records = 0
        known = {file.path for file in self._store.files(f"_pieces/{self._directory}")}
        for table in _PIECES:
            with self._new_part(table) as writer:
                for piece in (self._part(log, table) for log in logs):
                    if piece not in known:
                        continue
                    rows = self._store.read(table, piece)
                    writer.add(rows)
                    if table == "ledgers":
                        records += sum(count or 0 for count in rows.column("entryCount").to_pylist())
                    elif table == "damages":
                        self._damage_count += rows.num_rows
        return records

    def _write(self, table: str, rows: Iterable[dict[str, Any]]) -> None:
        with self._new_part(table) as writer:
            writer.add_rows(rows)

    def _new_part(self, table: str, suffix: str = "") -> Any:
        # Two extracts of one bookie at once must not write the same file.
        name = f"{self._number:09d}-{self._run_id}{suffix and f'-{suffix}'}.parquet"
        part = f"{table}/{self._directory}/{name}"
        self._parts.append((table, part))
        return self._store.new_part(table, part, bookieId=self._bookie.bookie_id)

    def _publish(self) -> None:
        """Write the list of parts, from which on these facts count."""
        current = {part for _, part in self._parts}
        rows = [
            {"bookieId": self._bookie.bookie_id, "table": table, "part": part, "startedAt": self._started_at}
            for table, part in self._parts
        ]
        for row in self._earlier_rows():
            superseded_at = row["supersededAt"] or self._started_at
            if row["part"] in current:
                continue
            if self._started_at - superseded_at <= self._keep:
                rows.append({**row, "supersededAt": superseded_at})
            else:
                self._dropped.add(row["part"])
        with self._store.new_part("parts", list_path(self._directory, self._number)) as writer:
            writer.add_rows(rows)
        self._listed = {str(row["part"]) for row in rows}

    def _newest(self) -> int:
        return max(self._store.numbers().get(self._directory, ()), default=0)

    def _earlier_rows(self) -> list[dict[str, Any]]:
        """Return the rows of the newest list of parts, behind which this extract's list gets its number."""
        for _ in range(_ATTEMPTS_MAX):
            newest = self._newest()
            self._number = newest + 1
            with suppress(NotFound):  # Another extract deletes it once it has written a newer one.
                return self._store.part_list(self._directory, newest).rows if newest else []
        problem = f"Other extracts of bookie {self._bookie.bookie_id} write to {self._store.uri}"
        raise Conflict(problem, hint="run this one again when they are done")

    def _clean(self) -> None:
        """Delete older lists, parts that were superseded long ago, and what killed extracts left."""
        for number in self._store.numbers().get(self._directory, ()):
            if number < self._number:
                self._store.delete(list_path(self._directory, number))
        for table in [*(name for name in TABLES if name != "parts"), "_pieces"]:
            for file in self._store.files(f"{table}/{self._directory}"):
                part = file.path
                if table == "_pieces":
                    part = f"records/{part.removeprefix('_pieces/').rpartition('/')[0]}.parquet"
                is_old = file.mtime is not None and self._started_at - file.mtime > _LEFTOVER_AGE
                if part in self._dropped or (is_old and part not in self._listed):
                    self._store.delete(file.path)


def _rows_of(table: str, reader: EntryLogReader | JournalReader, damage: list[BkctlError]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of `table` and their `type`, without columns of the whole file; damage goes to `damage`."""
    fields = [field for field in arrow_schema(table) if field.name in VALUES and field.name != "type"]
    schema = pa.schema([*fields, pa.field("type", pa.string())])
    rows = RecordRows(schema, {}, Conditions({"type": DATA_TYPES}), None)
    return rows.of(_before_damage(reader.batches(), damage))


def _before_damage(rows: Iterator[_T], damage: list[BkctlError]) -> Iterator[_T]:
    """Yield the rows before damage, which goes to `damage`."""
    with _noting(damage):
        yield from rows


@contextmanager
def _noting(damage: list[BkctlError]) -> Iterator[None]:
    """Add damage that ends the block to `damage`; raise errors that say nothing about the file's content."""
    try:
        yield
    except (Corrupt, Unsupported) as error:
        damage.append(error)


def _ledger_rows(log: BookieFile, sums: dict[str | None, tuple[int, int]]) -> list[dict[str, Any]]:
    """Return the ledgers of one log, by a scan and by its ledgers map; one row without a ledger for an empty log."""
    shares = list(log_rows(("", str(log.path))))
    if not shares:
        raise NotFound(f"{log.path} does not exist")
    of_log = {name: shares[0][name] for name in ("fromLedgersMap", "complete", "reason")}
    sizes = {share["ledgerQualifiedName"]: share["size"] for share in shares}
    rows = []
    for name in sorted(name for name in {*sizes, *sums} if name is not None) or [None]:
        count, size = (None, None) if name is None else sums.get(name, (None, None))
        rows.append(
            {
                "entryCount": count, "size": size, "mapSize": sizes.get(name), **of_log,
                **({} if name is None else ledger_values(LedgerId.from_value(int(name, 16)))),
            }
        )  # fmt: skip
    return rows


# --- digests ----------------------------------------------------------------------------------------------------------


class LedgerDigests:
    """The digests of ledgers with their passwords, from `cluster`; None: digests that need a password stay unknown."""

    def __init__(self, cluster: Cluster | None) -> None:
        self._cluster = cluster
        self._known = lru_cache(_LEDGERS_MAX)(self._digest_of)

    def of_record(self, ledger: str, entry_id: int, body: bytes) -> tuple[str | None, bool]:
        """Return the digest type that a record matches (None: none, or unknown), and whether its bytes are evidence.

        They are not if the digest type of the ledger has nothing to check.
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
        doubtful = pc.and_(digests.is_null(), records.column("ledgerQualifiedName").is_valid())
        chosen = records.filter(doubtful)
        found: list[str | None] = []
        bodies: list[bytes | None] = []
        names = ("ledgerQualifiedName", "entryId", "offset", "recordSize")
        for ledger, entry_id, offset, size in zip(*(chosen.column(name).to_pylist() for name in names), strict=True):
            body = read(offset + 4, size)
            digest, is_evidence = self.of_record(ledger, entry_id, body)
            found.append(digest)
            bodies.append(body if is_evidence else None)
        if any(found):
            judged = pc.replace_with_mask(digests, doubtful, pa.array(found, pa.string()))
            records = records.set_column(records.schema.get_field_index("digest"), "digest", judged)
        chosen = chosen.select(["offset", "ledgerQualifiedName", "entryId"])
        evidence = chosen.append_column("record", pa.array(bodies, pa.binary()))
        return records, evidence.filter(evidence.column("record").is_valid())

    @staticmethod
    def _digest_of(cluster: Cluster, name: str) -> DigestManager | BkctlError | None:
        """Return None if there is nothing to check; an error if its metadata is unusable or was deleted."""
        ledger = LedgerId.from_value(int(name, 16))
        try:
            metadata = cluster.ledgers.read(ledger).metadata
            if metadata.digest_type in (None, DigestType.DUMMY):
                return None
            return DigestManager(ledger, metadata.digest_type, metadata.password or b"")
        except (Corrupt, LedgerNotFound, Unsupported, UsageError) as error:
            return error
        except (Unauthorized, Unreachable):
            raise
        except BkctlError as error:
            # A refusal of the metadata store must not pass for damage of the file whose records are judged.
            raise Unreachable(error.message, hint=error.hint) from error


# --- the index --------------------------------------------------------------------------------------------------------


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

    def write(self, writer: PartWriter, evidence: PartWriter) -> Iterator[dict[str, Any]]:
        """Write the entries and the evidence; yield each damage."""
        with closing(self._logs):
            for directory in self._bookie.index_dirs:
                for path, scoped, entries in self._sources(BookieDirectories((), (), [directory])):
                    damage: list[BkctlError] = []
                    for found in _before_damage(entries, damage):
                        self._add(found, path, scoped, writer, evidence)
                    yield from (damage_of(error, path) for error in damage)
            self._compare(evidence)

    def _sources(self, directories: BookieDirectories) -> Iterator[tuple[str, bool, Iterator[IndexedEntries]]]:
        """Yield path, scope and entries of each file and database, which is opened for its first entry."""
        with BookieIndexes(directories) as indexes:
            for file in indexes.files():
                yield str(file.path), file.scoped, _entries_of_file(file)
        databases = {
            (file.path.parent, file.scoped) for file in directories.rocksdbs() if file.path.name in DATABASE_NAMES
        }
        for current, scoped in sorted(databases):
            part = DatabaseRange(str(current), scoped, self._bookie.bookie_id)
            yield str(part.path("locations")), scoped, _entries_of_databases(part)

    def _add(
        self, entries: IndexedEntries, path: str, scoped: bool, writer: PartWriter, evidence: PartWriter
    ) -> None:  # fmt: skip
        of_file = {"file": path, "scoped": scoped, "bookieId": self._bookie.bookie_id}
        for batch in entry_rows(self._schema, [entries], Conditions(), [of_file]):
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
        entries = IndexedEntries.joined(chunk)
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
        # A record without a ledger gets an arbitrary id: no index has an entry of its entry id.
        ids = (pc.fill_null(table.column(name).cast(pa.uint64()), 0) for name in ("ledgerScopeId", "ledgerId"))
        scopes, ledgers = (column.to_numpy() for column in ids)
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
        for scope_id, ledger_id, entry_id, location, _ in zip(*columns, strict=True):
            offset = (location & 0xFFFFFFFF) - 4
            for candidate, (path, _) in enumerate(self._parts.get(key, ())):
                found = self._logs.record_at(path, offset, Corrupt, Unsupported, UsageError)
                record, ledger = found.pop("record", None), LedgerId(scope_id, ledger_id)
                if (found.get("ledgerQualifiedName"), found.get("entryId")) == (ledger.qualified_name, entry_id):
                    digest, is_evidence = digest_of(record, 0, len(record), 2 if ledger.is_scoped else 1), False
                    if digest is None:
                        digest, is_evidence = self._digests.of_record(ledger.qualified_name, entry_id, record)
                    found |= {"digest": digest, "record": record if is_evidence else None}
                yield {"logId": log_id, "scoped": scoped, "offset": offset, "candidate": candidate, **found}


def _entries_of_file(file: BookieFile) -> Iterator[IndexedEntries]:
    """Yield the entries of an index file; none of a ledger that the bookie has deleted."""
    assert isinstance(file.id, LedgerId)
    with suppress(NotFound), LedgerIndexReader.open(file.path) as reader:
        for page in reader.pages():
            yield IndexedEntries.of_page(file.id, *page)


def _entries_of_databases(part: DatabaseRange) -> Iterator[IndexedEntries]:
    """Yield the entries of a pair of databases. Raises Corrupt where these are not there, or cannot be read."""
    try:
        yield from part.entries(Conditions())
    except PermissionError:
        raise
    except OSError as error:
        raise Corrupt(f"{part.path('locations')} cannot be read: {error.strerror or error}") from error
    except (NotFound, UsageError) as error:
        raise Corrupt(str(error)) from error
