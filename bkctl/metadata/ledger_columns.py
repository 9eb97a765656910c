"""The fields of a ledger, declared once: tables, JSON, CSV, schemas, REST and Spark's source show these columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from bkctl.columns import TEXTS, TIME_MS_MAX, TIME_MS_MIN, Column, Columns, Kind, SharedObject, base64_text
from bkctl.formats.managed_ledger import message_id_text
from bkctl.metadata.pulsar_topics import owner_of, topic_of

if TYPE_CHECKING:
    from bkctl.formats.metadata import LedgerMetadata
    from bkctl.ids import LedgerId
    from bkctl.metadata.ledgers import VersionedMetadata

#: Custom metadata that Pulsar writes as text, by its key without the prefix. Source: Pulsar's LedgerMetadataUtils.
_PULSAR_NAMES: Final = {
    "managed-ledger": "managedLedger",
    "cursor": "cursor",
    "schemaId": "schemaId",
    "compactedTopic": "compactedTopic",
    "delayedIndexBucketKey": "delayedIndexBucketKey",
    "delayedIndexTopic": "delayedIndexTopic",
    "delayedIndexCursor": "delayedIndexCursor",
}


class LedgerRow(NamedTuple):
    """A ledger and its metadata, with the JSON objects that ledgers share; `pulsar` is None for others' ledgers."""

    ledger: LedgerId
    metadata: LedgerMetadata
    ctime_ms: int | None
    custom: SharedObject
    pulsar: SharedObject | None
    ensembles: SharedObject


def ledger_rows(ledgers: Iterable[tuple[LedgerId, VersionedMetadata]]) -> Iterator[LedgerRow]:
    """Yield a row for each ledger. Lists have millions of them, so what their ledgers share is made once."""
    from bkctl.formats.metadata import CustomMetadata, Ensembles

    for ledger, (metadata, _, ctime_ms) in ledgers:
        fragments, custom = metadata.ensembles, metadata.custom_metadata
        try:
            ensembles, (shown, pulsar) = fragments.shown, custom.shown  # type: ignore[attr-defined]
        except (AttributeError, TypeError):
            ensembles = shown = None
        if ensembles is None:
            ensembles = SharedObject((str(first_entry_id), list(bookies)) for first_entry_id, bookies in fragments)
            if isinstance(fragments, Ensembles):
                fragments.shown = ensembles
        if shown is None:
            shown, pulsar = _custom_objects(custom)
            if isinstance(custom, CustomMetadata):
                custom.shown = shown, pulsar
        # A call of the class takes twice as long.
        yield tuple.__new__(LedgerRow, (ledger, metadata, ctime_ms, shown, pulsar, ensembles))


def ledger_row(ledger: LedgerId, found: VersionedMetadata) -> LedgerRow:
    """Return the row of one ledger."""
    return next(ledger_rows([(ledger, found)]))


def _digest_type(row: LedgerRow) -> str | None:
    digest_type = row.metadata.digest_type
    return None if digest_type is None else digest_type._name_  # `name` takes four times as long.


def _ctime(row: LedgerRow) -> int | None:
    """Return the time of creation; None for a time out of the calendar's range, too."""
    time_ms = row.ctime_ms
    return None if time_ms is None or not TIME_MS_MIN <= time_ms <= TIME_MS_MAX else time_ms


#: The password is left out.
LEDGER_COLUMNS: Final = Columns(
    Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
    Column("FORMAT", "metadataFormatVersion", "metadata.format_version", Kind.INTEGER, detail=True, spark="int"),
    Column("STATE", "state", "metadata.state._name_"),
    Column("ENSEMBLE SIZE", "ensembleSize", "metadata.ensemble_size", Kind.INTEGER, detail=True, spark="int"),
    Column("WRITE QUORUM", "writeQuorumSize", "metadata.write_quorum_size", Kind.INTEGER, detail=True, spark="int"),
    Column("ACK QUORUM", "ackQuorumSize", "metadata.ack_quorum_size", Kind.INTEGER, detail=True, spark="int"),
    Column("DIGEST", "digestType", _digest_type),
    Column("LENGTH", "length", "metadata.length", Kind.SIZE),
    Column("LAST ENTRY", "lastEntryId", "metadata.last_entry_id", Kind.INTEGER),
    Column("CREATED", "ctime", _ctime, Kind.TIME),
    Column(
        "CUSTOM METADATA", "customMetadata", "custom", Kind.NESTED, spark="map<string,binary>",
        shape={"type": "object", "additionalProperties": {"type": "string", "contentEncoding": "base64"}},
    ),
    Column(
        "ENSEMBLES", "ensembles", "ensembles", Kind.NESTED, detail=True,
        spark="array<struct<firstEntryId:bigint,bookies:array<string>>>",
        shape={"type": "object", "propertyNames": {"pattern": "^[0-9]+$"}, "additionalProperties": TEXTS},
    ),
    Column(
        "PULSAR", "pulsar", "pulsar", Kind.NESTED, detail=True, optional=True, spark="map<string,string>",
        shape={"type": "object", "additionalProperties": {"type": ["string", "object"]}},
    ),
    key="ledger",
)  # fmt: skip


#: `ledger list --by application`.
APPLICATION_COLUMNS: Final = Columns(
    Column("APPLICATION", "application", "application"),
    Column("LEDGERS", "ledgerCount", "ledger_count", Kind.INTEGER),
    Column("SIZE", "size", "size_bytes", Kind.SIZE),
    Column("BIGGEST LEDGER", "ledger", "biggest", Kind.LEDGER),
    Column("ITS SIZE", "ledgerSize", "biggest_size_bytes", Kind.SIZE),
    key="application",
)


def _custom_objects(custom: Mapping[str, bytes]) -> tuple[SharedObject, SharedObject | None]:
    pulsar = pulsar_object(custom)
    shown = SharedObject((key, base64_text(custom[key])) for key in sorted(custom))
    return shown, SharedObject(pulsar) if pulsar else None


def pulsar_object(custom: Mapping[str, bytes]) -> dict[str, str]:
    """Return Pulsar's custom metadata (application, component, managedLedger, cursor …), {} for others' ledgers.

    `topic` is the topic of the managed ledger, `compactedTo` a message id as `ledger:entry` (base64 for other bytes).
    """
    if custom.get("application") != b"pulsar":
        return {}
    value = {key: _text(custom[key]) for key in ("application", "component") if key in custom}
    for key in sorted(custom):
        prefix, _, name = key.rpartition("/")
        if prefix in ("", "pulsar", "psr"):  # 2.x releases before 2.3 wrote "psr/" or no prefix
            if name in _PULSAR_NAMES:
                value[_PULSAR_NAMES[name]] = _text(custom[key])
            elif name == "compactedTo":
                value[name] = message_id_text(custom[key]) or base64_text(custom[key])
    owner = owner_of(custom)
    owned = None if owner is None else owner.name
    if topic := topic_of(owned or value.get("managedLedger", "")):
        value["topic"] = topic
    return value


def _text(value: bytes) -> str:
    return value.decode("utf-8", "backslashreplace")
