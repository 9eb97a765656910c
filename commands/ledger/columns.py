"""The ledger object as the commands of `bkctl ledger` print it."""

from __future__ import annotations

from binascii import a2b_base64
from typing import Final

from bkctl.columns import Column, Columns, Kind, base64_text
from bkctl.metadata import ledger_columns
from bkctl.metadata.ledger_columns import APPLICATION_COLUMNS as APPLICATION_COLUMNS
from bkctl.metadata.ledger_columns import LedgerRow

from ..kit.command import Run, union
from ..kit.texts import GREEN, RED, YELLOW, readable_text

STATE_STYLE = {"OPEN": YELLOW, "IN_RECOVERY": RED, "CLOSED": GREEN}


def _password(row: LedgerRow) -> str | None:
    password = row.metadata.password
    return None if password is None else base64_text(password)


def _custom_text(custom_metadata: dict[str, str]) -> str:
    return "\n".join(f"{key} = {readable_text(a2b_base64(value))}" for key, value in custom_metadata.items()) or "-"


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


#: The ledger object of every command that prints one.
LEDGER_COLUMNS = ledger_columns.LEDGER_COLUMNS.changed(
    state={"style": STATE_STYLE}, customMetadata={"text": _custom_text}
)
SECRET_COLUMNS = LEDGER_COLUMNS.and_also(Column("PASSWORD (base64)", "password", _password))
#: The columns of `ledger show`, with and without --show-secrets.
SHOWN_COLUMNS = union(LEDGER_COLUMNS, SECRET_COLUMNS)
#: The ids of a list alone, of rows that are LedgerIds.
ID_COLUMNS: Final = Columns(Column("LEDGER", "ledger", lambda ledger: ledger, Kind.LEDGER), key="ledger")
#: A list's table: one column for three sizes, and custom metadata in one line.
LEDGER_TABLE_COLUMNS = LEDGER_COLUMNS.listed(Column("E/W/A", "quorums", _quorums), after="state").changed(
    customMetadata={"source": _custom_line, "kind": Kind.TEXT, "text": None, "flexible": True}
)


def list_columns(run: Run) -> Columns:
    return run.out.table_columns(LEDGER_TABLE_COLUMNS, LEDGER_COLUMNS)
