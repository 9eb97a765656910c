"""The JSON object of a ledger, as every command, REST answer and Spark row shows it."""

from __future__ import annotations

from typing import Any, Final

from bkctl.formats.metadata import LedgerMetadata
from bkctl.formats.pulsar import read_message_id
from bkctl.ids import LedgerId
from bkctl.metadata.ledgers import VersionedMetadata
from bkctl.metadata.pulsar_topics import topic_of

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


def ledger_object(ledger: LedgerId, found: VersionedMetadata, show_secrets: bool = False) -> dict[str, Any]:
    """Return the JSON object of a ledger: ids, metadata in camelCase, binary as base64, `ctime` in ISO 8601 UTC.

    `pulsar` is present for Pulsar's custom metadata, the password only with `show_secrets`.
    """
    metadata = found.metadata
    value: dict[str, Any] = {
        **ledger.to_json(),
        "metadataFormatVersion": metadata.format_version,
        "state": metadata.state.name,
        "ensembleSize": metadata.ensemble_size,
        "writeQuorumSize": metadata.write_quorum_size,
        "ackQuorumSize": metadata.ack_quorum_size,
        "digestType": None if metadata.digest_type is None else metadata.digest_type.name,
        "length": metadata.length,
        "lastEntryId": metadata.last_entry_id,
        "ctime": _iso8601(found.ctime_ms),
        "customMetadata": {key: _base64(metadata.custom_metadata[key]) for key in sorted(metadata.custom_metadata)},
        "ensembles": {str(fragment.first_entry_id): list(fragment.bookies) for fragment in metadata.ensembles},
    }
    if pulsar := pulsar_object(metadata):
        value["pulsar"] = pulsar
    if show_secrets:
        value["password"] = None if metadata.password is None else _base64(metadata.password)
    return value


def pulsar_object(metadata: LedgerMetadata) -> dict[str, str]:
    """Return Pulsar's custom metadata (application, component, managedLedger, cursor …), {} for others' ledgers.

    `topic` is the topic of the managed ledger, `compactedTo` a message id as `ledger:entry` (base64 for other bytes).
    """
    custom = metadata.custom_metadata
    if custom.get("application") != b"pulsar":
        return {}
    value = {key: _text(custom[key]) for key in ("application", "component") if key in custom}
    for key in sorted(custom):
        prefix, _, name = key.rpartition("/")
        if prefix in ("", "pulsar", "psr"):  # 2.x releases before 2.3 wrote "psr/" or no prefix
            if name in _PULSAR_NAMES:
                value[_PULSAR_NAMES[name]] = _text(custom[key])
            elif name == "compactedTo":
                message_id = read_message_id(custom[key])
                value[name] = _base64(custom[key]) if message_id is None else str(message_id)
    if topic := topic_of(value.get("managedLedger", "")):
        value["topic"] = topic
    return value


def _text(value: bytes) -> str:
    return value.decode("utf-8", "backslashreplace")


def _base64(value: bytes) -> str:
    import base64

    return base64.b64encode(value).decode("ascii")


def _iso8601(time_ms: int | None) -> str | None:
    if time_ms is None:
        return None
    from datetime import UTC, datetime, timedelta

    try:
        moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=time_ms)
    except OverflowError:
        return None
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
