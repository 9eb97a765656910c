"""The sink of a stream of `bookkeeper.ledger`: each batch becomes ledgers of one scope, exactly once.

    rows.writeStream.format("bookkeeper.ledger").options(metadataUri=…, ledgerScopeId="7", checkpointLocation=…).start()

The scope belongs to the query. Each task writes a ledger, with an id from (batch id + 1) << 32 on. A batch counts from
the moment when its record is complete: the ledger whose id is the batch id, closed, with an entry for each ledger of
the batch, the qualified name. Its custom metadata has their number, because a write that fails closes the record early.
Spark repeats a batch that it does not know to be complete: if the record of that batch is complete, the ledgers of the
repetition are deleted; else the ledgers of the attempt before are. So records name each row once, whatever ends when.
A ledger without a record that names it may be deleted at any time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage

from bkctl.client.reader import read_entries
from bkctl.errors import Conflict, LedgerNotFound, UsageError
from bkctl.formats.metadata import LedgerMetadata
from bkctl.ids import LedgerId
from bkctl.metadata.ledgers import VersionedMetadata
from bkctl.spark.sources.ledger_sink import JOB_KEY, LedgerWriter, LedgerWritten, ledgers_of
from bkctl.spark.sources.ledgers import NAME, LedgerTable
from bkctl.spark.sources.options import Client

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

#: Batch ids are below 2^31: data ledgers of a batch take 2^32 ids.
BATCH_ID_MAX: Final = (1 << 31) - 1
#: Local properties that Spark sets for the tasks of a micro-batch.
_BATCH_PROPERTY: Final = "streaming.sql.batchId"
_QUERY_PROPERTY: Final = "sql.streaming.queryId"
_RECORD_MARK: Final = "record-of-"
#: Custom metadata of a record: the number of its entries. Records of earlier releases lack it.
_COUNT_KEY: Final = "bkctl-write-count"


class LedgerStreamWriter(DataSourceStreamArrowWriter):
    """The sink of one micro-batch; Spark creates one for the tasks, and another one for `commit` or `abort`.

    Options: as LedgerWriter has, without `names`; `ledgerScopeId` (not 0) is needed.
    """

    def __init__(self, source: LedgerTable, schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise UsageError(f"{NAME} has no output mode complete", hint="use append or update")
        if not source.scope_id:
            raise UsageError(
                f"{NAME}: a stream needs a ledger scope of its own", hint="set ledgerScopeId to a scope other than 0"
            )
        if source.checked.text("names") is not None:
            raise UsageError(
                f"{NAME}: a stream has no option names", hint="ledger_stream_sink.committed_ledgers lists its ledgers"
            )
        self._source, self._schema = source, schema
        self._scope_id = source.scope_id
        self._writer(0)  # Checks the options.

    def write(self, iterator: Iterator[pa.RecordBatch]) -> LedgerWritten:
        """Write the rows of one partition to a new ledger of the batch and close it."""
        from pyspark import TaskContext

        context = TaskContext.get()
        batch = None if context is None else context.getLocalProperty(_BATCH_PROPERTY)
        query = None if context is None else context.getLocalProperty(_QUERY_PROPERTY)
        if batch is None or query is None:
            raise UsageError(f"{NAME}: no micro-batch is running", hint="this sink does not support continuous mode")
        return replace(self._writer(int(batch)).write(iterator), query=query)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Record the ledgers of the batch, unless an earlier attempt did, and delete the ledgers of other attempts.

        Raises Conflict if the scope belongs to another query.
        """
        writer = self._writer(batchId)
        queries = {each.query for each in messages if isinstance(each, LedgerWritten) and each.query is not None}
        with Client(self._source.cluster) as client:
            recorded = self._recorded(client, batchId, queries)
            if recorded is not None:
                writer.delete_others(keep=frozenset(recorded))
                return
            ledgers = ledgers_of(messages)
            writer.delete_others(keep=frozenset(ledgers))
            mark = f"{_RECORD_MARK}{next(iter(queries), '')}"
            client.run(_write_record(client, LedgerId(self._scope_id, batchId), ledgers, writer.ledger_settings(mark)))

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Delete the ledgers of the batch that no record names. Raises the errors of the metadata store."""
        with Client(self._source.cluster) as client:
            recorded = self._recorded(client, batchId, set())
        self._writer(batchId).delete_others(keep=frozenset(recorded or ()))

    def _writer(self, batch: int) -> LedgerWriter:
        if batch > BATCH_ID_MAX:
            raise UsageError(f"{NAME}: batch {batch} is above {BATCH_ID_MAX}", hint="use a new scope and checkpoint")
        return LedgerWriter(self._source, self._schema, False, batch=batch)

    def _recorded(self, client: Client, batch: int, queries: set[str]) -> list[LedgerId] | None:
        """Return the ledgers that the record of `batch` names; None without a complete one. Deletes any other one."""
        record = LedgerId(self._scope_id, batch)
        try:
            found = client.cluster.ledgers.read(record)
        except LedgerNotFound:
            return None
        mark = found.metadata.custom_metadata.get(JOB_KEY, b"").decode(errors="replace")
        query = mark.removeprefix(_RECORD_MARK)
        if not mark.startswith(_RECORD_MARK) or (query and queries and query not in queries):
            raise Conflict(
                f"Ledger scope {self._scope_id} has ledger {record}, which is not a record of this query",
                hint="give each query, with its checkpoint, a ledgerScopeId of its own",
            )
        if not _is_complete(found.metadata):
            # The driver ended, or writing failed, before the batch counted.
            client.cluster.ledgers.remove(record)
            return None
        return client.run(_read_record(client, record, found))


def _is_complete(record: LedgerMetadata) -> bool:
    return record.is_closed and record.custom_metadata.get(_COUNT_KEY) in (None, b"%d" % (record.last_entry_id + 1))


async def _write_record(client: Client, record: LedgerId, ledgers: list[LedgerId], settings: dict[str, Any]) -> None:
    settings["custom_metadata"][_COUNT_KEY] = b"%d" % len(ledgers)
    handle = await client.bookkeeper.create_ledger_adv(record.ledger_id, ledger_scope_id=record.scope_id, **settings)
    for ledger in ledgers:
        await handle.ready()
        handle.add(ledger.qualified_name.encode())
    await handle.close()


async def _read_record(client: Client, record: LedgerId, found: VersionedMetadata) -> list[LedgerId]:
    last = found.metadata.last_entry_id
    if last < 0:
        return []
    entries = read_entries(client.bookkeeper.access(record, found), 0, last)
    return [LedgerId.parse(entry.payload.decode("ascii")) async for entry in entries]


class CommittedLedger(NamedTuple):
    """A ledger of a batch that counts."""

    batch: int
    ledger: LedgerId


def committed_ledgers(options: Mapping[str, str]) -> list[CommittedLedger]:
    """Return the ledgers that a stream wrote to `ledgerScopeId`, in the order of batches and partitions.

    `options` are the connection's and `ledgerScopeId`.
    """
    source = LedgerTable(dict(options))
    committed = []
    with Client(source.cluster) as client:
        for record in client.cluster.ledgers.ledgers(source.scope_id):
            if record.ledger_id > BATCH_ID_MAX:
                break
            found = client.cluster.ledgers.read(record)
            if _is_complete(found.metadata):
                ledgers = client.run(_read_record(client, record, found))
                committed += [CommittedLedger(record.ledger_id, ledger) for ledger in ledgers]
    return committed
