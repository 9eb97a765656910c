"""Paths below `underreplication`, and the LAYOUT node that gives their version."""

from __future__ import annotations

from typing import Any, Final

from bkctl.errors import Unsupported, UsageError
from bkctl.formats.metadata import parse_text, print_text
from bkctl.ids import I64_MAX, LedgerId
from bkctl.metadata.store import MetadataStore, create_if_missing

UNDERREPLICATION: Final = "underreplication"
SCOPED: Final = f"{UNDERREPLICATION}/scopes"
DISABLE: Final = f"{UNDERREPLICATION}/disable"
LAYOUT_TYPE: Final = "BASIC"
LAYOUT_VERSION: Final = 1
_LAYOUT: Final = f"{UNDERREPLICATION}/LAYOUT"


class UnderreplicationLayout:
    """The nodes below `underreplication` in one store: their version, and their creation before the first write."""

    def __init__(self, store: MetadataStore) -> None:
        self.store = store
        self._prepared = False

    def check(self) -> bool:
        """Return whether LAYOUT exists. Raises Unsupported for a layout other than Apache's, Corrupt for bad bytes."""
        found = self.store.get(_LAYOUT)
        if found is None:
            return False
        message: Any = parse_text("LedgerRereplicationLayoutFormat", found.value, f"{_LAYOUT} in {self.store.name}")
        if (message.type, message.version) != (LAYOUT_TYPE, LAYOUT_VERSION):
            raise Unsupported(
                f"{_LAYOUT} in {self.store.name} is {message.type!r} version {message.version}; "
                f"{LAYOUT_TYPE!r} version {LAYOUT_VERSION} is known"
            )
        return True

    def prepare(self) -> None:
        """Create LAYOUT and the directories of marks and locks, as Apache's auditor does when it starts.

        Raises Unsupported for a later layout, Corrupt for bad bytes in LAYOUT. Source: checkLayout.
        """
        if self._prepared:
            return
        from bkctl.formats.data_formats_pb2 import LedgerRereplicationLayoutFormat

        if not self.check():
            layout = print_text(LedgerRereplicationLayoutFormat(type=LAYOUT_TYPE, version=LAYOUT_VERSION))
            create_if_missing(self.store, _LAYOUT, layout.encode("ascii"))
            self.check()
        for path in (f"{UNDERREPLICATION}/ledgers", f"{UNDERREPLICATION}/locks"):
            create_if_missing(self.store, path, b"")
        self._prepared = True


def base_path(scoped: bool) -> str:
    """Return the directory of scope 0, or with `scoped` of all other scopes."""
    return SCOPED if scoped else UNDERREPLICATION


def mark_path(ledger: LedgerId) -> str:
    """Return the path of the ledger's mark, below the root. Raises UsageError for an id of scope 0 above 2^63 − 1."""
    digits = ledger.qualified_name if ledger.is_scoped else f"{ledger.ledger_id:016x}"
    parts = "/".join(digits[at : at + 4] for at in range(0, len(digits), 4))
    return f"{base_path(ledger.is_scoped)}/ledgers/{parts}/{_node_name(ledger)}"


def lock_path(ledger: LedgerId) -> str:
    """Return the path of the ledger's lock, below the root. Raises as `mark_path`."""
    return f"{base_path(ledger.is_scoped)}/locks/{_node_name(ledger)}"


def _node_name(ledger: LedgerId) -> str:
    if ledger.is_scoped:
        return f"urL{ledger.qualified_name}"
    if ledger.ledger_id > I64_MAX:
        raise UsageError(f"Ledger id {ledger.ledger_id} is 2^63 or more, which no ledger of scope 0 can have")
    return f"urL{ledger.ledger_id:010d}"
