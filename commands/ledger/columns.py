"""The ledger object and its columns, as the commands of `bkctl ledger` print it."""

from __future__ import annotations

from binascii import a2b_base64
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from bkctl.ids import LedgerId

from ..kit.columns import Column, Columns, Kind
from ..kit.command import Run
from ..kit.documents import union
from ..kit.lines import EncodedObject
from ..kit.texts import GREEN, RED, YELLOW, base64_text, readable_text

if TYPE_CHECKING:
    from bkctl.formats.metadata import LedgerMetadata
    from bkctl.metadata.ledgers import VersionedMetadata


class ListedLedger(NamedTuple):
    """A ledger whose metadata is not needed."""

    ledger: LedgerId


class LedgerRow(NamedTuple):
    """A ledger and its metadata; `ctime` in ISO 8601, `ensembles`, `custom` and `pulsar` as JSON objects."""

    ledger: LedgerId
    metadata: LedgerMetadata
    ctime: str | None
    ensembles: dict[str, list[str]]
    custom: EncodedObject
    pulsar: EncodedObject | None


def ledger_rows(ledgers: Iterable[tuple[LedgerId, VersionedMetadata]]) -> Iterator[LedgerRow]:
    """Yield a row for each ledger. Lists have millions of them, so what their ledgers share is made once."""
    from bkctl.metadata.ledger_json import ensembles_object, iso8601

    for ledger, (metadata, _, ctime_ms) in ledgers:
        custom = tuple(metadata.custom_metadata.items())
        small = sum([len(value) for _, value in custom]) <= _SHARED_SIZE_BYTES_MAX
        objects = _custom_objects(custom) if small else _custom_objects.__wrapped__(custom)
        yield LedgerRow(ledger, metadata, iso8601(ctime_ms), ensembles_object(metadata.ensembles), *objects)


def ledger_row(ledger: LedgerId, found: VersionedMetadata) -> LedgerRow:
    return next(ledger_rows([(ledger, found)]))


#: Larger custom metadata is not kept for the next ledgers.
_SHARED_SIZE_BYTES_MAX = 4096


@lru_cache(maxsize=1024)
def _custom_objects(items: tuple[tuple[str, bytes], ...]) -> tuple[EncodedObject, EncodedObject | None]:
    from bkctl.metadata.ledger_json import custom_object, pulsar_object

    custom = dict(items)
    pulsar = pulsar_object(custom)
    return EncodedObject(custom_object(custom)), EncodedObject(pulsar) if pulsar else None


def _digest_type(row: LedgerRow) -> str | None:
    digest_type = row.metadata.digest_type
    return None if digest_type is None else digest_type.name


def _password(row: LedgerRow) -> str | None:
    password = row.metadata.password
    return None if password is None else base64_text(password)


STATE_STYLE = {"OPEN": YELLOW, "IN_RECOVERY": RED, "CLOSED": GREEN}


def _custom_text(custom_metadata: dict[str, str]) -> str:
    return "\n".join(f"{key} = {readable_text(a2b_base64(value))}" for key, value in custom_metadata.items()) or "-"


#: The ledger object of every command that prints one; a list's table leaves the long fields out.
LEDGER_COLUMNS = Columns(
    Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
    Column("FORMAT", "metadataFormatVersion", "metadata.format_version", Kind.INTEGER),
    Column("STATE", "state", "metadata.state._name_", style=STATE_STYLE),
    Column("ENSEMBLE SIZE", "ensembleSize", "metadata.ensemble_size", Kind.INTEGER),
    Column("WRITE QUORUM", "writeQuorumSize", "metadata.write_quorum_size", Kind.INTEGER),
    Column("ACK QUORUM", "ackQuorumSize", "metadata.ack_quorum_size", Kind.INTEGER),
    Column("DIGEST TYPE", "digestType", _digest_type),
    Column("LENGTH", "length", "metadata.length", Kind.SIZE),
    Column("LAST ENTRY", "lastEntryId", "metadata.last_entry_id", Kind.INTEGER),
    Column("CREATED", "ctime", "ctime"),
    Column("CUSTOM METADATA", "customMetadata", "custom", Kind.NESTED, text=_custom_text),
    Column("ENSEMBLES", "ensembles", "ensembles", Kind.NESTED),
    Column("PULSAR", "pulsar", "pulsar", Kind.NESTED, optional=True),
    key="ledger",
)
SECRET_COLUMNS = LEDGER_COLUMNS.and_also(Column("PASSWORD (base64)", "password", _password))
#: The columns of `ledger show`, with and without --show-secrets.
SHOWN_COLUMNS = union(LEDGER_COLUMNS, SECRET_COLUMNS)


def _quorums(row: LedgerRow) -> str:
    metadata = row.metadata
    return f"{metadata.ensemble_size}/{metadata.write_quorum_size}/{metadata.ack_quorum_size}"


def _custom_line(row: LedgerRow) -> str | None:
    """Return custom metadata for the table of a list: Pulsar's in its own words, else keys and values."""
    if pulsar := row.pulsar:
        shown = dict(pulsar)
        managed_ledger = shown.pop("managedLedger", "")
        words = [shown.pop("application"), shown.pop("component", ""), shown.pop("topic", managed_ledger)]
        return " ".join([*filter(None, words), *(f"{name}={text}" for name, text in shown.items())])
    return ", ".join(f"{key}={readable_text(a2b_base64(value))}" for key, value in row.custom.items()) or None


LEDGER_TABLE_COLUMNS = Columns(
    Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
    Column("STATE", "state", "metadata.state._name_", style=STATE_STYLE),
    Column("E/W/A", "quorums", _quorums),
    Column("DIGEST", "digestType", _digest_type),
    Column("LENGTH", "length", "metadata.length", Kind.SIZE),
    Column("LAST ENTRY", "lastEntryId", "metadata.last_entry_id", Kind.INTEGER),
    Column("CREATED", "ctime", "ctime", text=lambda text: f"{text[:19]}Z"),
    Column("CUSTOM METADATA", "customMetadata", _custom_line, flexible=True),
    key="ledger",
)


def list_columns(run: Run) -> Columns:
    return run.table_columns(LEDGER_TABLE_COLUMNS, LEDGER_COLUMNS)
