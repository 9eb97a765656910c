"""The JSON object of a ledger, as every command, REST answer and Spark row shows it."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, Final

from bkctl.errors import Corrupt
from bkctl.formats.metadata import Fragment, parse_custom_metadata
from bkctl.formats.pulsar import read_message_id
from bkctl.ids import LedgerId
from bkctl.metadata.ledgers import VersionedMetadata
from bkctl.metadata.pulsar_topics import topic_of
from bkctl.metadata.store import Versioned

#: Version of `_ledger_json` that fits; a module that was built from other sources is not used.
COMPILED_API: Final = 1
try:
    from bkctl.metadata import _ledger_json as compiled
except ImportError:  # installed without a compiler
    compiled = None  # type: ignore[assignment]
else:
    if getattr(compiled, "API", None) != COMPILED_API:
        compiled = None  # type: ignore[assignment]

_EPOCH: Final = datetime(1970, 1, 1)
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


def ledger_object(ledger: LedgerId, found: VersionedMetadata) -> dict[str, Any]:
    """Return the JSON object of a ledger: ids, metadata in camelCase, binary as base64, `ctime` in ISO 8601 UTC.

    `pulsar` is present for Pulsar's custom metadata; the password is left out.
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
        "ctime": iso8601(found.ctime_ms),
        "customMetadata": custom_object(metadata.custom_metadata),
        "ensembles": ensembles_object(metadata.ensembles),
    }
    if pulsar := pulsar_object(metadata.custom_metadata):
        value["pulsar"] = pulsar
    return value


def ledger_line(ledger: LedgerId, found: VersionedMetadata) -> str:
    """Return the JSON object of a ledger as a line of text."""
    return _json(ledger_object(ledger, found)) + "\n"


def usual_lines(found: list[tuple[LedgerId, Versioned[bytes] | None]], begin: int) -> tuple[str, int]:
    """Return the lines of the ledgers from index `begin` of `found` on, and the index of the first one without a line.

    A ledger that is deleted, or whose metadata is not in the usual form, gets none: see `ledger_line`.
    """
    return ("", begin) if compiled is None else compiled.lines(found, begin, _custom_texts)


@lru_cache(maxsize=1024)  # Topics have many ledgers.
def _custom_texts(fields: bytes) -> tuple[str, str] | None:
    """Return the JSON of `customMetadata`, and `,"pulsar":…` or ""; None for malformed fields."""
    try:
        custom = parse_custom_metadata(fields)
    except Corrupt:
        return None
    pulsar = pulsar_object(custom)
    return _json(custom_object(custom)), f',"pulsar":{_json(pulsar)}' if pulsar else ""


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def custom_object(custom: Mapping[str, bytes]) -> dict[str, str]:
    """Return custom metadata by key, in order, its values as base64."""
    return {key: _base64(custom[key]) for key in sorted(custom)}


def ensembles_object(ensembles: Iterable[Fragment]) -> dict[str, list[str]]:
    """Return the bookies of each fragment by its first entry id."""
    return {str(first_entry_id): list(bookies) for first_entry_id, bookies in ensembles}


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
                message_id = read_message_id(custom[key])
                value[name] = _base64(custom[key]) if message_id is None else str(message_id)
    if topic := topic_of(value.get("managedLedger", "")):
        value["topic"] = topic
    return value


def _text(value: bytes) -> str:
    return value.decode("utf-8", "backslashreplace")


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")


def iso8601(time_ms: int | None) -> str | None:
    """Return a time in UTC with milliseconds; None for no time, and for one out of the calendar's range."""
    if time_ms is None:
        return None
    try:
        moment = _EPOCH + timedelta(milliseconds=time_ms)
    except OverflowError:
        return None
    return moment.isoformat(timespec="milliseconds") + "Z"
