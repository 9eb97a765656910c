"""The sink of `bookkeeper.ledger`: writes a DataFrame to new ledgers, one a partition, and reports their ids.

    rows.write.format("bookkeeper.ledger").mode("append").options(metadataUri=…, names="names.txt").save()

The column `payload` (binary or string) becomes the entries, in the order of the partition's rows. Other columns are
ignored, and a partition without rows gets no ledger. A task that runs again writes another ledger: at the end, ledgers
of attempts that Spark does not count are deleted. A mark in the custom metadata finds these ledgers: within a range of
ids, or in scope 0 among the ids that were generated since the write began.
"""

from __future__ import annotations

import contextlib
import secrets
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from bkctl.client.ensemble import check_quorums
from bkctl.client.write_handle import WriteHandle
from bkctl.disk import atomic_write
from bkctl.errors import AlreadyExists, BkctlError, LedgerExists, LedgerNotFound, UsageError, on_error
from bkctl.formats.entry import DigestType
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import Cluster
from bkctl.spark.sources.ledgers import NAME, LedgerTable
from bkctl.spark.sources.options import Client

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

PAYLOAD: Final = "payload"
#: Custom metadata of every ledger of one write.
JOB_KEY: Final = "bkctl-write"
_LOW_BITS: Final = 32
_ID_ATTEMPTS_MAX: Final = 20


@dataclass
class LedgerWritten(WriterCommitMessage):
    """The ledger that a task wrote, as an unsigned 128-bit number; None for a partition without rows.

    `query`: the streaming query that it belongs to.
    """

    partition: int
    ledger: int | None
    query: str | None = None


class LedgerWriter(DataSourceArrowWriter):
    """One write. Created on the driver, where `commit` and `abort` run; `write` runs in the tasks, on a copy.

    Options: the connection's; `ledgerScopeId` (default: a new scope), in which ids come from a random UUID, in scope 0
    from the metadata store; `names`, a file on the driver; `ensembleSize` (3), `writeQuorumSize` (2), `ackQuorumSize`
    (2), `digestType` (CRC32C), `customMetadata` (KEY=VALUE); the ledgers' password from `ledgerPasswordFile` or
    `ledgerPasswordEnv`. A `batch` of a stream has ids and a mark of its own, which every attempt at it shares.
    """

    def __init__(self, source: LedgerTable, schema: StructType, overwrite: bool, *, batch: int | None = None) -> None:
        self._source, options = source, source.checked
        job = uuid.uuid4()
        high, low = LedgerId.from_value(job.int)
        self._scope_id = high if source.scope_id is None else source.scope_id
        #: The first id of this write in scopes other than 0.
        self._first_id = low >> _LOW_BITS << _LOW_BITS if batch is None else batch + 1 << _LOW_BITS
        self._mark = job.hex if batch is None else f"batch-{batch}"
        types = {field.name: field.dataType for field in schema.fields}
        if PAYLOAD not in types:
            problem = f"{NAME}: the rows have no column {PAYLOAD}"
            raise UsageError(problem, hint=f"rename the one to write to {PAYLOAD}")
        if types[PAYLOAD].typeName() not in ("binary", "string"):
            raise UsageError(f"{NAME}: column {PAYLOAD} is {types[PAYLOAD].simpleString()}, not binary or string")
        self._column = [*types].index(PAYLOAD)
        self._shape = {
            "ensemble_size": options.integer("ensembleSize", 3, 1),
            "write_quorum_size": options.integer("writeQuorumSize", 2, 1),
            "ack_quorum_size": options.integer("ackQuorumSize", 2, 1),
        }
        check_quorums(*self._shape.values())
        self._digest_type = options.digest_type() or DigestType.CRC32C
        self._names = None if options.text("names") is None else Path(options.needed("names")).absolute()
        if self._names is not None:
            if self._names.exists() and not overwrite:
                raise AlreadyExists(f"{self._names} exists", hint="choose another file, or write with mode overwrite")
            if not self._names.parent.is_dir():
                raise UsageError(f"names {self._names}: its directory does not exist")
        #: The generator of ids in scope 0 before this write.
        self._generator_state: tuple[int, ...] = ()
        if self._scope_id == 0:
            with source.cluster.open() as cluster:
                self._generator_state = cluster.ledgers.generator_state()

    # --- in the tasks -------------------------------------------------------------------------------------------

    def write(self, iterator: Iterator[pa.RecordBatch]) -> LedgerWritten:
        """Write the rows of one partition to a new ledger and close it; delete the ledger if that fails."""
        from pyspark import TaskContext

        context = TaskContext.get()
        partition = 0 if context is None else context.partitionId()
        filled = (batch for batch in iterator if batch.num_rows)
        first = next(filled, None)
        if first is None:
            return LedgerWritten(partition, None)
        with Client(self._source.cluster) as client:
            handle = client.run(self._create(client))
            # The first error counts; `abort` deletes the ledger too.
            with on_error(partial(client.cluster.ledgers.remove, handle.ledger), BkctlError):
                for batch in chain((first,), filled):
                    column = batch.column(self._column)
                    if missing := column.null_count:
                        problem = f"{missing} rows have no {PAYLOAD}; an entry may be empty, but not null"
                        raise UsageError(f"{NAME}: {problem}")
                    client.run(_add(handle, column.cast(pa.large_binary()).to_pylist()))
                client.run(handle.close())
            return LedgerWritten(partition, handle.ledger.value)

    def ledger_settings(self, mark: str) -> dict[str, Any]:
        """Return the settings of a new ledger whose custom metadata has `mark`."""
        return {
            **self._shape,
            "digest_type": self._digest_type,
            "password": self._source.checked.secret("ledgerPassword") or b"",
            "custom_metadata": {**self._source.custom_metadata, JOB_KEY: mark.encode()},
        }

    async def _create(self, client: Client) -> WriteHandle:
        settings = self.ledger_settings(self._mark)
        if self._scope_id == 0:
            return await client.bookkeeper.create_ledger(**settings)
        for _ in range(_ID_ATTEMPTS_MAX):
            ledger_id = self._first_id | secrets.randbits(_LOW_BITS)
            with contextlib.suppress(LedgerExists):
                return await client.bookkeeper.create_ledger_adv(ledger_id, ledger_scope_id=self._scope_id, **settings)
        raise LedgerExists(f"{_ID_ATTEMPTS_MAX} generated ledger ids exist already in scope {self._scope_id}")

    # --- on the driver ------------------------------------------------------------------------------------------

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Delete the ledgers of attempts that do not count, then write the names. Raises the first error."""
        ledgers = ledgers_of(messages)
        self.delete_others(keep=frozenset(ledgers))
        if self._names is not None:
            with atomic_write(self._names) as file:
                file.writelines(f"{ledger}\n".encode("ascii") for ledger in ledgers)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Delete every ledger of this write. Raises the first error, with a hint that finds the ledgers that remain."""
        try:
            self.delete_others(keep=frozenset())
        except BkctlError as error:
            raise BkctlError(
                f"Ledgers of a write that failed may be left: {error.message}",
                hint="'bkctl ledger list --all-scopes --custom-metadata "
                f"{JOB_KEY}={self._mark}' shows them, and 'bkctl ledger delete' deletes them",
            ) from error

    def delete_others(self, keep: frozenset[LedgerId]) -> None:
        """Delete the ledgers of this write that are not in `keep`. Raises the errors of the metadata store."""
        with self._source.cluster.open() as cluster:
            others = (each for each in self._candidates(cluster) if each not in keep)
            mark = self._mark.encode()
            for ledger, found in cluster.ledgers.read_many(others):
                if not isinstance(found, BkctlError) and found.metadata.custom_metadata.get(JOB_KEY) == mark:
                    with contextlib.suppress(LedgerNotFound):
                        cluster.ledgers.remove(ledger)

    def _candidates(self, cluster: Cluster) -> Iterator[LedgerId]:
        """Return the ids that ledgers of this write may have."""
        if self._scope_id == 0:
            return cluster.ledgers.generated_since(self._generator_state)
        first = LedgerId(self._scope_id, self._first_id)
        end = LedgerId(self._scope_id, self._first_id | (1 << _LOW_BITS) - 1)
        listed = cluster.ledgers.ledgers(self._scope_id, LedgerId.from_value(first.value - 1))
        return takewhile(lambda each: each <= end, listed)


def ledgers_of(messages: Iterable[WriterCommitMessage | None]) -> list[LedgerId]:
    """Return the ledgers that tasks wrote, in the order of the partitions."""
    written = [each for each in messages if isinstance(each, LedgerWritten) and each.ledger is not None]
    written.sort(key=lambda each: each.partition)
    return [LedgerId.from_value(each.ledger) for each in written if each.ledger is not None]


async def _add(handle: WriteHandle, payloads: Iterable[bytes]) -> None:
    for payload in payloads:
        await handle.ready()
        handle.add(payload)
    await handle.flush()  # Nothing moves until the next batch is there.
