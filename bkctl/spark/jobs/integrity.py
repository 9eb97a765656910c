"""The job `integrity`: the entries that metadata promises, against the files of the bookies that should have them.

An entry counts as present if a bookie that starts on these files serves it: a replay of the journal brings the entry (a
running bookie may not have written it to its logs yet), or its index points to a record in an entry log that is this
entry and matches its digest. Where neither is certain from columns alone, a second look reads the records. It also
checks the digests of copies that no index names.

Closed ledgers promise the entries that their metadata says. An open ledger promises entries up to the highest last add
confirmed in any of its entries. Source: LedgerChecker, ScanAndCompareGarbageCollector; DigestManager.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from bkctl.errors import BkctlError
from bkctl.files.journal import JournalReader
from bkctl.formats.entry import DigestManager, DigestType
from bkctl.formats.entry_log import log_id_of
from bkctl.formats.record import RECORD_SIZE, RECORD_SIZE_BYTES_MAX
from bkctl.ids import LedgerId
from bkctl.spark.engine import Frame, FrameColumn, Functions, JobSession, functions_of
from bkctl.spark.facts.frames import Facts
from bkctl.spark.jobs.bookie_records import QUALIFIED_NAME, REPLICA, KeptFrames, map_rows, with_ledger_ids
from bkctl.spark.jobs.bookies import check_clusters, open_store
from bkctl.spark.jobs.entries import (
    Ids,
    absent_bookies,
    damages,
    fragments_of,
    held_entries,
    promise_counts,
    promised_blocks,
    read_metadata,
    unfold,
    with_holder_count,
)
from bkctl.spark.sources.columns import DAMAGE
from bkctl.spark.sources.records import OpenLogs

if TYPE_CHECKING:
    from bkctl.metadata.cluster import Cluster
    from bkctl.spark.jobs.bookies import Bookies
    from bkctl.spark.jobs.entries import Mask

INTACT: Final = "intact"
#: Fragments of more entries are not compared: a number in metadata may be damaged, and no files hold so much.
COMPARED_ENTRIES_MAX: Final = 1 << 30
#: Columns cannot decide: the replica is intact if one of the deciding `looks` finds it.
IN_DOUBT: Final = "look"


class Problem(StrEnum):
    """Problems of a replica or file; the values are the words of every output."""

    #: The bookie has the entry nowhere, although metadata says that it should.
    MISSING = "missing"
    #: The bytes do not match the entry's digest, or cannot be read.
    DAMAGED = "damaged"
    #: An entry log has the entry, but the bookie's index does not, so the bookie does not serve it.
    NOT_INDEXED = "notIndexed"
    #: The index points to another entry.
    MISPLACED = "misplaced"
    #: Metadata promises more entries of a fragment than COMPARED_ENTRIES_MAX.
    NOT_COMPARED = "notCompared"
    #: A file ends in damage: entries behind the damage are found by the index alone, if at all.
    UNREADABLE = "unreadable"


@dataclass(frozen=True)
class Integrity(KeptFrames):
    """The findings as DataFrames, computed when they are used.

    `findings`: ledgerQualifiedName, ledgerScopeId, ledgerId, entryId, bookieId, problem, ledgerState, file, offset (of
    the size field), detail, intactCount (bookies of the write set that serve the entry; 0: lost, None: unknown, as
    the files of a bookie of the write set were not given), writeQuorumSize.
    `unchecked`: bookies that ensembles name and whose files were not given: bookieId, ledgerCount.
    `checked`: one row: ledgerCount, replicaCount (one for each entry and bookie of its write set), entryCount.
    """

    findings: Frame
    unchecked: Frame
    checked: Frame


def integrity(
    spark: JobSession,
    bookies: Bookies,
    connection: Mapping[str, str],
    *,
    ledger: LedgerId | None = None,
    scope_id: int | None = None,
    indexes: bool = True,
    held: Frame | None = None,
) -> Integrity:
    """Compare the promises of metadata with bookies' files; without `indexes`, with entry logs and journals only.

    `connection` has the options of `bookkeeper.metadata`. Metadata is read before the files, so that entries written
    meanwhile do not count as missing. `held` is a result of `held_entries` to use, not computed yet. Raises Conflict if
    a bookie belongs to another cluster.
    """
    F = functions_of(spark)
    check_clusters(bookies, connection)
    metadata = read_metadata(spark, connection, ledger, scope_id).persist()
    metadata.count()
    persisted = [metadata]
    if held is None:
        held = held_entries(spark, bookies, ledger, scope_id, indexes=indexes).persist()
        persisted.append(held)
    every = fragments_of(metadata, held).persist()
    fragments = every.filter(f"last - first < {COMPARED_ENTRIES_MAX}")
    ledgers = metadata.select(QUALIFIED_NAME, "digestType", F.col("state").alias("ledgerState"), "writeQuorumSize")
    # Replicas that agree end here: the rest is about the few others.
    doubtful = judge_replicas(promised_blocks(fragments, bookies), held, ledgers, indexes=indexes).persist()
    suspects = _absent(doubtful).unionByName(_decided(look_again(doubtful, bookies, connection))).persist()
    findings = _with_intact_count(suspects, fragments, bookies)
    findings = findings.unionByName(_not_compared(every, bookies), allowMissingColumns=True)
    findings = with_ledger_ids(findings.join(ledgers.drop("digestType"), QUALIFIED_NAME))
    findings = findings.unionByName(unreadable_files(held), allowMissingColumns=True).drop("promised")
    order = (QUALIFIED_NAME, "entryId", "bookieId", "file", "offset", "problem", "detail")
    return Integrity(
        (*persisted, every, doubtful, suspects),
        findings.orderBy(*order), absent_bookies(every, bookies), promise_counts(fragments, bookies),
    )  # fmt: skip


def _absent(judged: Frame) -> Frame:
    """Return the replicas that are missing or not indexed, with the newest copy in an entry log if there is one."""
    F = functions_of(judged)
    copy = F.array_max("copies")
    return judged.filter(F.col("verdict").isin(Problem.NOT_INDEXED.value, Problem.MISSING.value)).select(
        *REPLICA, "promised", F.col("verdict").alias("problem"), copy["file"].alias("file"),
        copy["offset"].alias("offset"), F.lit(None).cast("string").alias("detail"),
    )  # fmt: skip


def _not_compared(fragments: Frame, bookies: Bookies) -> Frame:
    """Return the fragments with more than COMPARED_ENTRIES_MAX entries as findings about their first entries."""
    F = functions_of(fragments)
    immense = fragments.filter(f"last - first >= {COMPARED_ENTRIES_MAX}")
    found = immense.select(
        F.explode("bookies").alias("bookieId"), QUALIFIED_NAME, F.col("first").alias("entryId"),
        F.lit(Problem.NOT_COMPARED.value).alias("problem"),
        F.lit(f"metadata promises more than {COMPARED_ENTRIES_MAX:,} entries from here on: none was looked for")
        .alias("detail"),
    )  # fmt: skip
    return found.filter(F.col("bookieId").isin([bookie.bookie_id for bookie in bookies]))


def _decided(looked: Frame) -> Frame:
    """Return one row for each promised replica: without a problem if a look found it, else the problem in a log."""
    F = functions_of(looked)
    names = ("problem", "file", "offset", "detail")
    is_bad, is_journal = F.col("problem").isNotNull(), F.coalesce(F.col("file").endswith(".txn"), F.lit(False))
    best = F.min(F.struct(is_bad.alias("isBad"), is_journal.alias("isJournal"), *names)).alias("best")
    promised = looked.filter("promised").groupBy(*REPLICA, "promised").agg(best)
    return looked.filter("NOT promised").unionByName(
        promised.select(*REPLICA, "promised", *(f"best.{name}" for name in names))
    )


def _with_intact_count(suspects: Frame, fragments: Frame, bookies: Bookies) -> Frame:
    """Return the suspects with a problem, and how many promised replicas of their entries are intact."""
    F = functions_of(suspects)
    entry = [QUALIFIED_NAME, "entryId"]
    found = suspects.filter(F.col("problem").isNotNull())
    bad = found.groupBy(*entry).agg(F.count(F.when(F.col("promised"), 1)).alias("badCount"))
    holders = with_holder_count(bad.select(*entry), fragments, bookies)
    # Nobody knows whether a bookie that is not given has the entry.
    checked = F.when(F.col("holderCount") == F.col("writeQuorumSize"), F.col("holderCount") - F.col("badCount"))
    intact = F.when(F.col("holderCount").isNull(), F.lit(0)).otherwise(checked).alias("intactCount")
    counts = bad.join(holders, entry, "left").select(*entry, intact)
    return found.join(counts, entry)


def unreadable_files(held: Frame) -> Frame:
    """Return the damages in `held_entries` as findings without a ledger."""
    F = functions_of(held)
    return damages(held).select(
        "bookieId",
        F.lit(Problem.UNREADABLE.value).alias("problem"),
        F.col(f"{DAMAGE}.file").alias("file"),
        F.col(f"{DAMAGE}.offset").alias("offset"),
        F.col(f"{DAMAGE}.reason").alias("detail"),
    )


# --- verdicts from columns --------------------------------------------------------------------------------------------


def judge_replicas(promised: Frame, held: Frame, ledgers: Frame, *, indexes: bool) -> Frame:
    """Return each replica, of existing `ledgers`, that is not intact by columns, with `verdict`, `served` and `looks`.

    `promised` and `held` are blocks; what agrees in them is not unfolded. `verdict` of a promised replica is INTACT,
    IN_DOUBT, missing or notIndexed, else null. `served` is the copy that the index names; without `indexes`, the newest
    copy. `looks` are the records to read: those that decide where the verdict is IN_DOUBT, and copies that no index
    names and whose columns do not match.
    """
    F = functions_of(promised)
    of_ledgers = held.join(ledgers.select(QUALIFIED_NAME, "digestType"), QUALIFIED_NAME)
    of_ledgers = of_ledgers.withColumn("matches", _matches(F, F.col("digest"))).drop(
        "digestType", DAMAGE, "size", "lac"
    )
    blocks = promised.unionByName(of_ledgers, allowMissingColumns=True)

    def choose(ids: Ids) -> Mask:
        """Choose the entries for which the verdict is more than INTACT, or which have copies to look at."""
        return ids.mismatched | (ids.promised & ~(ids.replayed | (ids.served if indexes else ids.logged)))

    rows = unfold(blocks, choose).join(ledgers, QUALIFIED_NAME)
    rows = _with_served_copy(rows, indexes=indexes).withColumn("verdict", _verdict(F))
    judged = rows.withColumn("looks", _looks(F))
    return judged.filter((F.col("verdict") != INTACT) | (F.size("looks") > 0))


def _with_served_copy(rows: Frame, *, indexes: bool) -> Frame:
    F = functions_of(rows)

    def is_at_place(copy: FrameColumn) -> FrameColumn:
        return (copy["logId"] == F.col("place.logId")) & (copy["offset"] == F.col("place.offset"))

    if indexes:
        return rows.withColumn("served", F.get(F.filter("copies", is_at_place), F.lit(0)))
    rows = rows.withColumn("served", F.array_max("copies"))
    place = F.struct("served.logId", "served.offset")
    return rows.withColumn("place", F.when(F.col("served").isNotNull(), place))


def _verdict(F: Functions) -> FrameColumn:
    """Return the verdict of the first condition that a replica meets, null for one that is not promised.

    A replayed copy comes first, since a start writes it to a new log and indexes it there.
    """
    served, journaled = F.col("served"), F.col("journaled")
    return (
        F.when(~F.col("promised"), None)
        .when(journaled.isNotNull() & _matches(F, journaled["digest"]), INTACT)
        .when(served.isNotNull() & _matches(F, served["digest"]), INTACT)
        .when(journaled.isNotNull(), IN_DOUBT)
        .when(F.col("place").isNotNull(), IN_DOUBT)
        .when(F.size("copies") > 0, Problem.NOT_INDEXED.value)
        .otherwise(Problem.MISSING.value)
    )


def _matches(F: Functions, digest: FrameColumn) -> FrameColumn:
    """Return whether a record's `digest` is its ledger's digest type, or the ledger has no digest to check."""
    digest_type = F.col("digestType")
    return digest_type.isNull() | (digest_type == DigestType.DUMMY.name) | digest.eqNullSafe(digest_type)


def _looks(F: Functions) -> FrameColumn:
    """Return the looks that decide about a replica in doubt: at the replayed copy, and at the copy in a log.

    And the looks at copies that are not served, and whose columns do not match.
    """
    served, place, journaled = F.col("served"), F.col("place"), F.col("journaled")
    in_doubt = F.coalesce(F.col("verdict") == IN_DOUBT, F.lit(False))
    deciding = F.array(
        F.when(journaled.isNotNull(), look_at(F, "journal", journaled, decides=True)),
        F.when(served.isNotNull(), look_at(F, "log", served, decides=True)).when(
            place.isNotNull(), look_at(F, "place", place, decides=True)
        ),
    )

    def is_doubtful(copy: FrameColumn) -> FrameColumn:
        return ~(F.col("promised") & copy.eqNullSafe(served)) & ~_matches(F, copy["digest"])

    others = F.transform(F.filter("copies", is_doubtful), lambda copy: look_at(F, "log", copy, decides=False))
    return F.concat(F.filter(deciding, lambda look: in_doubt & look.isNotNull()), others)


def look_at(F: Functions, kind: str, record: FrameColumn, *, decides: bool) -> FrameColumn:
    """Return one look: at a `log` by its file, at a `place` by log id (its file is unknown), or at a `journal`."""
    return F.struct(
        F.lit(kind).alias("kind"),
        (F.lit(None).cast("string") if kind == "place" else record["file"]).alias("file"),
        (F.lit(None).cast("bigint") if kind == "journal" else record["logId"]).alias("logId"),
        record["offset"].alias("offset"),
        F.lit(decides).alias("decides"),
    )


# --- the second look, with the passwords of ledgers -------------------------------------------------------------------

_RESULT: Final = (
    f"bookieId string, {QUALIFIED_NAME} string, entryId bigint, promised boolean, problem string, file string, "
    "offset bigint, detail string"
)


def look_again(judged: Frame, bookies: Bookies, connection: Mapping[str, str]) -> Frame:
    """Return the result of every look of `judge_replicas`; `problem` is null where the entry is intact."""
    F = functions_of(judged)
    looks = judged.select(*REPLICA, "promised", "digestType", F.explode("looks").alias("look"))
    looks = looks.select(*REPLICA, "digestType", "look.*")
    looks = looks.repartition("file", "bookieId", "logId").sortWithinPartitions("file", "bookieId", "logId", "offset")
    logs: dict[tuple[str, int, bool], list[str]] | None = None
    if isinstance(bookies, Facts):
        looks = bookies.with_evidence(judged.sparkSession, looks)
    else:
        logs = {}
        for bookie in bookies:
            for log in bookie.directories.entry_logs():
                if (log_id := log_id_of(log.path.name)) is not None:
                    logs.setdefault((bookie.bookie_id, log_id, log.scoped), []).append(str(log.path))

    def results(batches: Iterator[list[dict[str, Any]]]) -> Iterator[list[dict[str, Any]]]:
        with _SecondLook(logs, connection) as second:
            for rows in batches:
                yield [found for row in rows if (found := second.look(row)) is not None]

    return map_rows(looks, results, _RESULT)


#: A problem that a second look found, and its detail.
_Found = tuple[Problem, str]


class _SecondLook(ExitStack):
    """Checks single records against their ledgers' digests; a context manager that closes the files.

    `logs` has the paths of each bookie's logs by id and scope. None: each row has its `evidence`, the records that an
    extract left where columns cannot decide.
    """

    def __init__(
        self, logs: Mapping[tuple[str, int, bool], list[str]] | None, connection: Mapping[str, str]
    ) -> None:  # fmt: skip
        super().__init__()
        self._logs, self._connection = logs, connection
        self._cluster: Cluster | None = None
        self._managers: dict[LedgerId, DigestManager] = {}
        self._open_logs = self.enter_context(closing(OpenLogs()))

    def look(self, row: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the result of one look; None for an intact copy that is not served."""
        ledger = LedgerId.from_value(int(row[QUALIFIED_NAME], 16))
        file, problem = row["file"], _no_evidence(row)
        if file is None and not row.get("isLog"):
            problem = Problem.MISSING, f"its index names log {row['logId']}, which does not exist"
        for evidence in self._evidence(ledger, row):
            problem = self._problem_of(ledger, row, evidence)
            if problem is None:
                file = str(evidence["file"])
                break
        if problem is None and not row["decides"]:
            return None
        word, detail = (None, None) if problem is None else (problem[0].value, problem[1])
        place = {"promised": row["decides"], "offset": row["offset"], "file": file}
        return {key: row[key] for key in REPLICA} | place | {"problem": word, "detail": detail}

    def _evidence(self, ledger: LedgerId, row: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
        """Return what stands at the row's offset in its file, or in each log with its id, in the order to try."""
        path = row["file"]
        if self._logs is None:
            found = row["evidence"] or ()
            if path is not None:
                return [each for each in found if each["file"] == path]
            tried = [each for each in found if each["candidate"] is not None]
            return sorted(tried, key=lambda each: int(each["candidate"]))
        if row["kind"] == "journal":
            return [{**row, **_journal_record(path, row["offset"])}]
        # Each ledger directory has its own log ids, and an index does not name the directory.
        key = row["bookieId"], row["logId"], ledger.is_scoped
        paths = [path] if path is not None else self._logs.get(key, [])
        return (self._open_logs.record_at(each, row["offset"], BkctlError) for each in paths)

    def _problem_of(
        self, ledger: LedgerId, row: Mapping[str, Any], evidence: Mapping[str, Any]
    ) -> _Found | None:  # fmt: skip
        """Return None if the record of `evidence` is this entry and matches its digest, else the problem with it."""
        if evidence.get("problem") is not None:
            return Problem(evidence["problem"]), evidence["detail"]
        stands, entry_id = LedgerId.from_value(int(evidence[QUALIFIED_NAME], 16)), evidence["entryId"]
        if (stands, entry_id) != (ledger, row["entryId"]):
            place = f"stands at byte {row['offset']} of {evidence['file']}"
            return Problem.MISPLACED, f"entry {entry_id} of ledger {stands} {place}"
        if row["digestType"] is None or row["digestType"] == DigestType.DUMMY.name:
            return None
        if evidence["record"] is None:
            return None if row["digestType"] == evidence["digest"] else _no_evidence(row)
        manager = self._managers.get(ledger)
        if manager is None:
            digest_type = DigestType.parse(row["digestType"])
            password = self._password(ledger) if digest_type is DigestType.HMAC else b""
            manager = self._managers[ledger] = DigestManager(ledger, digest_type, password)
        try:
            manager.open(evidence["record"], entry_id)
        except BkctlError as error:
            return Problem.DAMAGED, str(error)
        return None

    def _password(self, ledger: LedgerId) -> bytes:
        """Return the ledger's password from the metadata store. Raises BkctlError."""
        if self._cluster is None:
            self._cluster = self.enter_context(open_store(self._connection))
        return self._cluster.ledgers.read(ledger).metadata.password or b""


def _journal_record(path: str, offset: int) -> dict[str, Any]:
    """Return the record at byte `offset` of a journal, or the `problem` with it and a `detail`."""
    try:
        with JournalReader.open(path) as reader:
            (size,) = RECORD_SIZE.unpack(reader.read(offset, RECORD_SIZE.size).ljust(RECORD_SIZE.size, b"\0"))
            body = reader.read(offset + RECORD_SIZE.size, min(max(size, 0), RECORD_SIZE_BYTES_MAX))
    except BkctlError as error:
        return {"problem": Problem.DAMAGED.value, "detail": str(error)}
    if not 0 < size == len(body):
        return {"problem": Problem.MISSING.value, "detail": f"{path} has no record at byte {offset}"}
    return {"record": body}


def _no_evidence(row: Mapping[str, Any]) -> _Found | None:
    return Problem.DAMAGED, f"it matches another digest than its ledger's {row['digestType']}"
