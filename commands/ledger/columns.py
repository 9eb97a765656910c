"""The ledger object and its columns, as the commands of `bkctl ledger` print it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from bkctl.ids import LedgerId

from ..kit.columns import Column, Columns, Kind
from ..kit.command import Run
from ..kit.texts import GREEN, RED, YELLOW, readable_text

if TYPE_CHECKING:
    from bkctl.metadata.ledgers import VersionedMetadata


class LedgerRow(NamedTuple):
    """A ledger and its JSON object."""

    ledger: LedgerId
    object: dict[str, Any]


def ledger_row(ledger: LedgerId, found: VersionedMetadata, show_secrets: bool = False) -> LedgerRow:
    from bkctl.metadata.ledger_json import ledger_object

    return LedgerRow(ledger, ledger_object(ledger, found, show_secrets))


def _field(title: str | None, name: str, kind: Kind = Kind.TEXT, **settings: Any) -> Column:
    return Column(title, name, lambda row: row.object.get(name), kind, **settings)


STATE_STYLE = {"OPEN": YELLOW, "IN_RECOVERY": RED, "CLOSED": GREEN}


def _custom_text(custom_metadata: dict[str, str]) -> str:
    from binascii import a2b_base64

    return "\n".join(f"{key} = {readable_text(a2b_base64(value))}" for key, value in custom_metadata.items()) or "-"


#: The ledger object of every command that prints one; a list's table leaves the long fields out.
LEDGER_COLUMNS = Columns(
    Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
    _field("FORMAT", "metadataFormatVersion", Kind.INTEGER),
    _field("STATE", "state", style=STATE_STYLE),
    _field("ENSEMBLE SIZE", "ensembleSize", Kind.INTEGER),
    _field("WRITE QUORUM", "writeQuorumSize", Kind.INTEGER),
    _field("ACK QUORUM", "ackQuorumSize", Kind.INTEGER),
    _field("DIGEST TYPE", "digestType"),
    _field("LENGTH", "length", Kind.SIZE),
    _field("LAST ENTRY", "lastEntryId", Kind.INTEGER),
    _field("CREATED", "ctime"),
    _field("CUSTOM METADATA", "customMetadata", Kind.NESTED, text=_custom_text),
    _field("ENSEMBLES", "ensembles", Kind.NESTED),
    _field("PULSAR", "pulsar", Kind.NESTED, optional=True),
    key="ledger",
)
SECRET_COLUMNS = LEDGER_COLUMNS.and_also(_field("PASSWORD (base64)", "password"))


def _quorums(row: LedgerRow) -> str:
    return "/".join(str(row.object[name]) for name in ("ensembleSize", "writeQuorumSize", "ackQuorumSize"))


def _short_time(text: str | None) -> str:
    return "-" if text is None else f"{text[:19]}Z"


def _custom_line(row: LedgerRow) -> str | None:
    """Return custom metadata for the table of a list: Pulsar's in its own words, else keys and values."""
    if pulsar := row.object.get("pulsar"):
        shown = dict(pulsar)
        managed_ledger = shown.pop("managedLedger", "")
        words = [shown.pop("application"), shown.pop("component", ""), shown.pop("topic", managed_ledger)]
        return " ".join([*filter(None, words), *(f"{name}={text}" for name, text in shown.items())])
    from binascii import a2b_base64

    custom = row.object["customMetadata"]
    return ", ".join(f"{key}={readable_text(a2b_base64(value))}" for key, value in custom.items()) or None


LEDGER_TABLE_COLUMNS = Columns(
    Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
    _field("STATE", "state", style=STATE_STYLE),
    Column("E/W/A", "quorums", _quorums),
    _field("DIGEST", "digestType"),
    _field("LENGTH", "length", Kind.SIZE),
    _field("LAST ENTRY", "lastEntryId", Kind.INTEGER),
    _field("CREATED", "ctime", text=_short_time),
    Column("CUSTOM METADATA", "customMetadata", _custom_line, flexible=True),
    key="ledger",
)


def list_columns(run: Run) -> Columns:
    return run.table_columns(LEDGER_TABLE_COLUMNS, LEDGER_COLUMNS)
