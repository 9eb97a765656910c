"""Parameters and bounds that several endpoints of a cluster share."""

from __future__ import annotations

from typing import Final

from bkctl.http.endpoints import ApiCall, Value
from bkctl.ids import parse_scope_id

#: Every scope, as the value of a scope parameter.
ALL_SCOPES: Final = "*"
LIMIT_MAX: Final = 1_000_000
#: Items that are sent as one piece, which bounds the memory of an endless answer.
BATCH_COUNT: Final = 1000

SCOPES: Final = Value("ledger_scope_id", f"Ledgers of this scope (BP-35); default 0, {ALL_SCOPES} for all scopes.")


def scope_of(call: ApiCall) -> int | None:
    """Return the scope that the request names; None for all scopes. Raise UsageError."""
    text = call.values.get("ledger_scope_id", "0")
    return None if text == ALL_SCOPES else parse_scope_id(text)
