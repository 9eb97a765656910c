"""The tables of facts: names, columns and types, in one place, for Arrow, Spark and the documentation.

A change of a column's name, type or meaning needs another `VERSION`, which is part of every path. New columns at the
end of a table do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from bkctl.spark.sources import columns as source_columns
from bkctl.spark.sources.columns import table_of

if TYPE_CHECKING:
    import pyarrow as pa

VERSION: Final = 1
#: Rows of a Parquet row group at most.
ROW_GROUP_ROWS: Final = 1 << 19


class FactColumn(NamedTuple):
    """A column: its type in Spark's DDL, and its meaning."""

    type: str
    meaning: str


#: The columns of every table but `parts`, before and behind its own.
_FIRST: Final = {"bookieId": ("string", "The bookie"), "file": ("string", "Path of the file on the bookie's host")}
_LAST: Final = {"part": ("string", "Path of the row's Parquet file, as in the table parts")}
_LEDGER: Final = {
    "ledgerQualifiedName": ("string", "The ledger: 32 hexadecimal digits of scope id and ledger id"),
    "ledgerScopeId": ("decimal(20,0)", "The ledger's scope id"),
    "ledgerId": ("decimal(20,0)", "The ledger id"),
}
_LOG: Final = {
    "logId": ("bigint", "The log's id"),
    "scoped": ("boolean", "The file is for scoped ledgers, with log ids of their own"),
}
_DIGEST: Final = {
    "digestType": ("string", "Digest type that the record names (scoped ledgers only)"),
    "digest": ("string", "Digest type that the record matches; null: none, or not known here"),
}
_TABLES: Final[Mapping[str, Mapping[str, tuple[str, str]]]] = {
    "records": {
        **_LOG,
        **_LEDGER,
        "entryId": ("bigint", "The entry id"),
        "lastAddConfirmed": ("bigint", "The entry's last add confirmed"),
        "length": ("bigint", "Payload bytes of the ledger up to this entry"),
        "formatVersion": ("int", "Format version of the entry: 1, or 2 for scoped ledgers"),
        "offset": ("bigint", "Byte of the record's size field in the file"),
        "recordSize": ("bigint", "Bytes of the record behind its size field"),
        "type": ("string", "Record type; entry for all but special records"),
        **_DIGEST,
    },
    "ledgers": {
        **_LOG,
        "logIdHex": ("string", "The log's id as in its name"),
        "fileSize": ("bigint", "Bytes of the file when listed"),
        **_LEDGER,
        "entryCount": ("bigint", "Entries of the ledger in the log, counted; null: none was read"),
        "size": ("bigint", "Their bytes with size fields, counted"),
        "mapSize": ("bigint", "The same by the log's ledgers map, else by a scan; null: neither names the ledger"),
        "fromLedgersMap": ("boolean", "mapSize comes from a ledgers map"),
        "complete": ("boolean", "mapSize covers the whole log"),
        "reason": ("string", "Damage that mapSize stops at, or of the ledgers map"),
    },
    "damages": {
        "source": ("string", "entryLog or index"),
        "offset": ("bigint", "Byte where the file ends in damage; null: unknown"),
        "reason": ("string", "The damage"),
    },
    "index": {
        "scoped": _LOG["scoped"],
        **_LEDGER,
        "entryId": ("bigint", "The entry id"),
        "logId": ("bigint", "The log that the index names"),
        "offset": ("bigint", "Byte of the record's size field there"),
    },
    "journals": {
        "journalId": ("bigint", "The journal's id"),
        "journalIdHex": ("string", "The journal's id as in its name"),
        "version": ("int", "Version of the file"),
        "state": ("string", "As in 'bkctl journal verify'"),
        "size": ("bigint", "Bytes of the file"),
        "goodEnd": ("bigint", "Byte up to which the records are sound"),
        "mark": ("bigint", "Byte that a last mark names"),
        "replayFrom": ("bigint", "Byte where a restart begins to replay; null: it does not replay the file"),
        "recordCount": ("bigint", "Records"),
        "entryCount": ("bigint", "Entries among them"),
        "replayRecordCount": ("bigint", "Records that a restart replays"),
        "replayEntryCount": ("bigint", "Entries among them"),
        "replaySize": ("bigint", "Their bytes with size fields"),
        "sizeBehind": ("bigint", "Bytes behind a torn or damaged end"),
        "recordsBehind": ("bigint", "Plausible records in them"),
        "entriesBehind": ("bigint", "Entries among them"),
        "resumesAt": ("bigint", "Byte of the first of them"),
        "problem": ("string", "Every fault in words; null: sound"),
        "damaged": ("boolean", "The file is damaged"),
    },
    "journal_records": {
        "journalId": ("bigint", "The journal's id"),
        "offset": ("bigint", "Byte of the record's size field in the file"),
        "recordSize": ("bigint", "Bytes of the record behind its size field"),
        **_LEDGER,
        "entryId": ("bigint", "The entry id"),
        "lastAddConfirmed": ("bigint", "The entry's last add confirmed"),
        "replayed": ("boolean", "A restart replays the record"),
        **_DIGEST,
    },
    "evidence": {
        "logId": ("bigint", "The log's id; null: a journal"),
        "scoped": ("boolean", "The log is for scoped ledgers; null: a journal"),
        "offset": ("bigint", "Byte of the record's size field in the file"),
        "candidate": ("int", "Order in which files of one log id are tried"),
        "ledgerQualifiedName": ("string", "Ledger of the record that stands there"),
        "entryId": ("bigint", "Its entry id"),
        "digest": ("string", "Digest type that it matches; null: none, or not known here"),
        "record": ("binary", "Its bytes, where digest is null"),
        "problem": ("string", "missing or damaged: the record cannot be read"),
        "detail": ("string", "Why"),
    },
    "cookies": {
        "role": ("string", "Role of the directory: journal, ledger or index"),
        "cookieBookieId": ("string", "The bookie that the cookie names"),
        "instanceId": ("string", "The cluster that the cookie names"),
        "layoutVersion": ("int", "Layout version of the cookie"),
        "problem": ("string", "Why the cookie cannot be read"),
    },
    "marks": {
        "journalIndex": ("int", "Index of the journal directory"),
        "journalId": ("bigint", "The journal that the last mark names; null: the file is damaged"),
        "offset": ("bigint", "Byte in that journal"),
        "problem": ("string", "Damage of the file"),
    },
    "parts": {
        "bookieId": ("string", "The bookie"),
        "table": ("string", "The table"),
        "part": ("string", "Path of the Parquet file, below the version's directory"),
        "startedAt": ("timestamp", "Start of the extract that lists the file"),
        "supersededAt": ("timestamp", "Start of the extract that no longer needs the file; null: current"),
    },
}
TABLES: Final[Mapping[str, Mapping[str, FactColumn]]] = {
    table: {
        name: FactColumn(*column)
        for name, column in (columns if table == "parts" else {**_FIRST, **columns, **_LAST}).items()
    }
    for table, columns in _TABLES.items()
}

#: Columns in which every row of an extract has a value, beside bookieId and file, of the tables that jobs reckon with.
REQUIRED: Final[Mapping[str, tuple[str, ...]]] = {
    "records": ("logId", "entryId", "offset", "recordSize"),
    "ledgers": ("logId", "scoped", "logIdHex", "fileSize"),
    "damages": ("source",),
    "index": ("ledgerQualifiedName", "entryId", "logId", "offset"),
    "journals": (),
    "journal_records": ("journalId", "offset", "recordSize", "ledgerQualifiedName", "entryId", "replayed"),
    "evidence": ("offset",),
}


def arrow_schema(table: str) -> pa.Schema:
    """Return the columns of a table as an Arrow schema."""
    return source_columns.arrow_schema(spark_schema(table))


def spark_schema(table: str) -> str:
    """Return the columns of a table in Spark's DDL."""
    return ", ".join(f"`{name}` {column.type}" for name, column in TABLES[table].items())


def conform(rows: pa.RecordBatch | pa.Table, table: str, constants: Mapping[str, Any]) -> pa.Table:
    """Return `rows` with the columns and types of `table`; columns that `rows` lacks are constant, or null."""
    columns = {name: rows.column(name) for name in rows.schema.names if name != "part" or table == "parts"}
    return table_of(arrow_schema(table), columns, rows.num_rows, constants)
