"""The extract of one bookie: reads its files without Spark, and writes their facts.

Journals are read before logs, and logs before the index, so that an entry that a running bookie moves meanwhile from
one to the next is in one of them. An entry log is read once: its part is named by log id, size and modification time,
and later extracts reuse it. Damage that arises in a log afterwards is therefore found by a `full` extract only.
"""

from __future__ import annotations

import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from bkctl.errors import BkctlError, Conflict, Corrupt, NotFound, Unsupported, UsageError
from bkctl.files.directories import BookieFile
from bkctl.files.entry_log import EntryLogReader
from bkctl.files.journal import JournalReader
from bkctl.files.scan import RecordBatch
from bkctl.formats.metadata import Cookie
from bkctl.formats.names import COOKIE_NAME
from bkctl.ids import I64_MAX, LedgerId
from bkctl.spark.facts.evidence import IndexExtract, LedgerDigests
from bkctl.spark.facts.facts_store import FactsStore, directory_name, list_path
from bkctl.spark.facts.tables import TABLES, arrow_schema
from bkctl.spark.jobs.bookie_records import replay_starts
from bkctl.spark.jobs.garbage import log_rows
from bkctl.spark.jobs.journal_audit import check_rows
from bkctl.spark.sources.columns import ledger_values, where_and_why
from bkctl.spark.sources.filters import Conditions
from bkctl.spark.sources.record_rows import RecordRows, Selection

if TYPE_CHECKING:
    from bkctl.metadata.cluster import Cluster
    from bkctl.spark.jobs.bookies import BookieFiles

#: Tables whose rows are kept for each log, for the next extract.
_PIECES: Final = ("ledgers", "damages")
#: Lists of files to try where a listed file is deleted meanwhile.
_ATTEMPTS_MAX: Final = 5
#: Age of files that no list of parts names, and that no other extract can be writing any more.
_LEFTOVER_AGE: Final = timedelta(days=1)


class ExtractCounts(NamedTuple):
    """The result of an extract. `read_log_count` logs were read; the others were extracted before."""

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
    if listed logs vanish during every attempt, the errors of the metadata store, and BkctlError if `store` fails.
    """
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
        self._number = max(store.numbers(self._directory), default=0) + 1
        self._run_id = uuid.uuid4().hex[:8]
        self._parts: list[tuple[str, str]] = []
        #: Parts of the list written here, and parts that it no longer has.
        self._listed: set[str] = set()
        self._dropped: set[str] = set()
        #: Logs that were read here, and are not read again if the list of logs is made again.
        self._read: set[str] = set()

    def run(self) -> ExtractCounts:
        self._write("cookies", self._cookies())
        self._write("marks", self._marks())
        self._write_journals()
        logs = self._extract_logs()
        counts = self._write_pieces(logs)
        evidence = {file.path for file in self._store.files(f"evidence/{self._directory}")}
        for log in logs:
            self._parts.append(("records", self._part(log)))
            if self._evidence(log) in evidence:
                self._parts.append(("evidence", self._evidence(log)))
        self._publish()
        self._clean()
        read = sum(self._part(log) in self._read for log in logs)
        return ExtractCounts(self._bookie.bookie_id, len(logs), read, *counts, self._started_at)

    # --- cookies, marks, journals -------------------------------------------------------------------------------

    def _cookies(self) -> Iterator[dict[str, Any]]:
        bookie = self._bookie
        roles = (("journal", bookie.journal_dirs), ("ledger", bookie.ledger_dirs), ("index", bookie.index_dirs))
        for role, directories in roles:
            for directory in directories:
                path = Path(directory, COOKIE_NAME)
                row = {"bookieId": bookie.bookie_id, "file": str(path), "role": role}
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
        from bkctl.files.journals import latest_marks

        with suppress(NotFound):
            marks = latest_marks(self._bookie.directories)
            for each in marks.marks:
                yield {
                    "bookieId": self._bookie.bookie_id, "file": str(each.file.path), "journalIndex": each.journal_index,
                    "journalId": each.mark.journal_id, "offset": each.mark.offset,
                }  # fmt: skip
            for path, error in marks.damaged:
                yield {"bookieId": self._bookie.bookie_id, "file": str(path), "problem": str(error)}

    def _write_journals(self) -> None:
        self._write("journals", check_rows(self._bookie))
        listed, starts = set(self._bookie.journals()), replay_starts(self._bookie)
        with self._new_part("journal_records") as writer, self._new_part("evidence", "journals") as evidence:
            for path in self._bookie.journals():
                with suppress(NotFound, UsageError), _noting([]), JournalReader.open(path) as reader:
                    constants = {"file": path, "bookieId": self._bookie.bookie_id, "journalId": reader.journal_id}
                    rows = _record_rows("journal_records", constants)
                    # A journal that the bookie created after the listing is behind every mark.
                    start = starts.get(path, I64_MAX) if path in listed else 0
                    for batch in rows.of(_before_damage(reader.batches(), [])):
                        entries = batch.filter(pc.equal(batch.column("type"), "entry"))
                        found, proofs = self._digests.judge(entries, reader.read)
                        writer.add(found.append_column("replayed", pc.greater_equal(found.column("offset"), start)))
                        evidence.add(_with_constants(proofs, file=path, bookieId=self._bookie.bookie_id))

    # --- entry logs ---------------------------------------------------------------------------------------------

    def _extract_logs(self) -> list[BookieFile]:
        """Extract all entry logs and the index, and return the logs."""
        for _ in range(_ATTEMPTS_MAX):
            logs = self._bookie.directories.entry_logs()
            gone = self._read_logs(logs)
            if gone is None:
                self._write_index(logs)
                return logs
        raise Conflict(
            f"{gone} was deleted while it was read", hint="the bookie deletes many files now; try again later"
        )

    def _read_logs(self, logs: list[BookieFile]) -> Path | None:
        """Read the logs without a part. Returns a log that the bookie has deleted meanwhile: list them again."""
        known = {file.path for file in self._store.files(f"records/{self._directory}")}
        for number, log in enumerate(logs):
            self._progress(number, len(logs))
            part = self._part(log)
            if part in self._read or (part in known and not self._full):
                continue
            try:
                self._read_log(log, part)
            except NotFound:
                if log.path.exists():
                    raise
                return log.path
            self._read.add(part)
        self._progress(len(logs), len(logs))
        return None

    def _part(self, log: BookieFile) -> str:
        """Return the path of the part of one log; another size or time gives another part."""
        directory = zlib.crc32(str(log.path.parent).encode())
        assert isinstance(log.id, int)
        return f"records/{self._directory}/{log.id:x}-{log.size}-{log.mtime_ms}-{directory:08x}.parquet"

    def _evidence(self, log: BookieFile) -> str:
        return f"evidence/{self._part(log).removeprefix('records/')}"

    def _piece(self, log: BookieFile, table: str) -> str:
        return f"_pieces/{self._part(log).removeprefix('records/').removesuffix('.parquet')}/{table}.parquet"

    def _read_log(self, log: BookieFile, part: str) -> None:
        path, bookie_id = str(log.path), self._bookie.bookie_id
        constants = {"file": path, "bookieId": bookie_id, "logId": log.id, "scoped": log.scoped}
        damage: list[BkctlError] = []
        sums: dict[str, tuple[int, int]] = {}
        # The part of `records` comes last: it stands for a log that was extracted as a whole.
        with (
            self._store.new_part("records", part) as writer,
            self._store.new_part("evidence", self._evidence(log), if_empty=False) as evidence,
            self._store.new_part("damages", self._piece(log, "damages"), if_empty=False) as damages,
            self._store.new_part("ledgers", self._piece(log, "ledgers")) as ledgers,
        ):
            with _noting(damage), EntryLogReader.open(path) as reader:
                for batch in _record_rows("records", constants).of(_before_damage(reader.batches(), damage)):
                    found, doubtful = self._digests.judge(batch, reader.read)
                    writer.add(found)
                    evidence.add(_with_constants(doubtful, **constants))
                    _add_sums(sums, batch)
            damages.add_rows(_damage_row(bookie_id, "entryLog", path, *where_and_why(error)) for error in damage)
            ledgers.add_rows(_ledger_rows(log, bookie_id, sums))

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
            for damage in index.write(writer, evidence):
                damages.add_rows([_damage_row(self._bookie.bookie_id, "index", *damage)])

    # --- the end ------------------------------------------------------------------------------------------------

    def _write_pieces(self, logs: list[BookieFile]) -> tuple[int, int]:
        """Write the tables of all logs' pieces, and return the numbers of records and of damaged logs."""
        records = damaged = 0
        known = {file.path for file in self._store.files(f"_pieces/{self._directory}")}
        for table in _PIECES:
            with self._new_part(table) as writer:
                for piece in (self._piece(log, table) for log in logs):
                    if piece not in known:
                        continue
                    rows = self._store.read(table, piece)
                    writer.add(rows)
                    if table == "ledgers":
                        records += sum(count or 0 for count in rows.column("entryCount").to_pylist())
                    elif table == "damages":
                        damaged += rows.num_rows
        return records, damaged

    def _write(self, table: str, rows: Iterable[dict[str, Any]]) -> None:
        with self._new_part(table) as writer:
            writer.add_rows(rows)

    def _new_part(self, table: str, suffix: str = "") -> Any:
        # Two extracts of one bookie at once must not write the same file.
        name = f"{self._number:09d}-{self._run_id}{suffix and f'-{suffix}'}.parquet"
        part = f"{table}/{self._directory}/{name}"
        self._parts.append((table, part))
        return self._store.new_part(table, part)

    def _publish(self) -> None:
        """Write the list of parts, from which on these facts count."""
        current = {part for _, part in self._parts}
        rows = [
            {"bookieId": self._bookie.bookie_id, "table": table, "part": part, "startedAt": self._started_at}
            for table, part in self._parts
        ]
        for row in self._store.part_list(self._directory, self._number - 1).rows if self._number > 1 else ():
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

    def _clean(self) -> None:
        """Delete older lists, parts that were superseded long ago, and what killed extracts left."""
        for number in self._store.numbers(self._directory):
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


def _record_rows(table: str, constants: dict[str, Any]) -> RecordRows:
    """Return what makes rows of `table` from records."""
    schema = arrow_schema(table)
    fields = [field for field in schema if field.name not in ("part", "replayed")]
    if "type" not in schema.names:
        fields.append(pa.field("type", pa.string()))
    return RecordRows(pa.schema(fields), constants, Selection(Conditions(), None), None)


def _before_damage(batches: Iterable[RecordBatch], damage: list[BkctlError]) -> Iterator[RecordBatch]:
    """Yield the records before damage, which is added to `damage`."""
    with _noting(damage):
        yield from batches


@contextmanager
def _noting(damage: list[BkctlError]) -> Iterator[None]:
    """Add damage that ends the block to `damage`; raise errors that say nothing about the file's content."""
    try:
        yield
    except (Corrupt, Unsupported) as error:
        damage.append(error)


def _with_constants(batch: pa.RecordBatch, **constants: Any) -> pa.RecordBatch:
    for name, value in constants.items():
        batch = batch.append_column(name, pa.repeat(value, batch.num_rows))
    return batch


def _damage_row(bookie_id: str, source: str, path: str, offset: int | None, reason: str) -> dict[str, Any]:
    return {"bookieId": bookie_id, "source": source, "file": path, "offset": offset, "reason": reason}


def _add_sums(sums: dict[str, tuple[int, int]], batch: pa.RecordBatch) -> None:
    """Add the records of each ledger, and their bytes with size fields, to `sums`."""
    rows = pa.table({"ledger": batch.column("ledgerQualifiedName"), "size": batch.column("recordSize")})
    for row in rows.group_by("ledger").aggregate([("size", "sum"), ("size", "count")]).to_pylist():
        if row["ledger"] is not None:
            count, size = sums.get(row["ledger"], (0, 0))
            sums[row["ledger"]] = count + row["size_count"], size + row["size_sum"] + 4 * row["size_count"]


def _ledger_rows(log: BookieFile, bookie_id: str, sums: dict[str, tuple[int, int]]) -> list[dict[str, Any]]:
    """Return the ledgers of one log, by a scan and by its ledgers map; one row without a ledger for an empty log."""
    shares = list(log_rows((bookie_id, str(log.path))))
    if not shares:
        raise NotFound(f"{log.path} does not exist")
    of_log = {name: shares[0][name] for name in ("fromLedgersMap", "complete", "reason")}
    sizes = {share["ledgerQualifiedName"]: share["size"] for share in shares}
    rows = []
    for name in sorted(name for name in {*sizes, *sums} if name is not None) or [None]:
        count, size = sums.get(name or "", (None, None))
        rows.append(
            {
                "bookieId": bookie_id, "file": str(log.path), "logId": log.id, "scoped": log.scoped,
                "logIdHex": f"{log.id:x}", "fileSize": log.size, "entryCount": count, "size": size,
                "mapSize": sizes.get(name), **of_log,
                **({} if name is None else ledger_values(LedgerId.from_value(int(name, 16)))),
            }
        )  # fmt: skip
    return rows
