"""Ledgers of the scopes ≠ 0 on ZooKeeper: one tree beside the ledgers of scope 0, in every layout of Apache's (BP-35).

    scopes/<scope: 4 hex>/<12 hex>/<ledger: 4 hex>/<4>/<4>/L<4>

The node `scopes` holds the cluster's instance id: a tree with another id belongs to a cluster that was formatted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from bkctl.errors import AlreadyExists, Conflict
from bkctl.ids import LedgerId, ledger_ids
from bkctl.metadata.ledgers import INSTANCE_ID, SCOPES, ScopesState
from bkctl.metadata.store import NEW, MetadataStore, walk_levels

_LEAF: Final = re.compile(r"L([0-9a-f]{4})", re.ASCII)


class ScopesTree:
    """The tree `scopes` of one cluster."""

    def __init__(self, store: MetadataStore) -> None:
        self.store = store
        self._is_ours = False

    def state(self) -> ScopesState:
        """See LedgerManager.scopes_state."""
        scopes, instance_id = self.store.get_many((SCOPES, INSTANCE_ID))
        if scopes is None:
            return "absent"
        return "ours" if scopes.value == (b"" if instance_id is None else instance_id.value) else "foreign"

    def is_ours(self) -> bool:
        """Return whether the tree exists. Raises Conflict for another cluster's tree."""
        if not self._is_ours:
            state = self.state()
            if state == "foreign":
                raise Conflict(
                    f"The scoped ledgers in {self.store.name} belong to a cluster that was formatted: "
                    f"{SCOPES} names another instance id than {INSTANCE_ID}",
                    hint="remove the orphaned scopes tree first",
                )
            self._is_ours = state == "ours"
        return self._is_ours

    def prepare(self) -> None:
        """Create the tree where it is missing. Raises Conflict for another cluster's tree."""
        if not self.is_ours():
            instance_id = self.store.get(INSTANCE_ID)
            try:
                self.store.put(SCOPES, b"" if instance_id is None else instance_id.value, NEW)
            except AlreadyExists:
                self.is_ours()

    def batches(self, scope_id: int | None, after: LedgerId | None) -> Iterator[list[LedgerId]]:
        """Yield the ledgers of the scope (None: of every scope ≠ 0) after `after`, one directory at a time.

        Raises Conflict for another cluster's tree; with None such a tree is passed over.
        """
        if scope_id is None:
            if self._is_ours or self.state() == "ours":
                yield from self._walk(SCOPES, (4, 12, 4, 4, 4), after, 0)
        elif (after is None or after.scope_id <= scope_id) and self.is_ours():
            first = after if after is not None and after.scope_id == scope_id else None
            yield from self._walk(_scope_path(scope_id), (4, 4, 4), first, scope_id)

    def _walk(
        self, base: str, widths: tuple[int, ...], after: LedgerId | None, scope_id: int
    ) -> Iterator[list[LedgerId]]:
        """Walk the tree below `base`, whose directories name the part of the id that `scope_id` does not."""
        first = after.qualified_name[-sum(widths) - 4 :] if after is not None else ""
        levels = tuple(re.compile(f"[0-9a-f]{{{width}}}", re.ASCII) for width in widths)
        for _, digits, names in walk_levels(self.store, base, levels, first):
            high = LedgerId.from_value(scope_id << 64 | int(digits, 16) << 16)
            ids = [high.ledger_id | int(match[1], 16) for match in map(_LEAF.fullmatch, names) if match]
            found = ledger_ids(high.scope_id, ids)
            if after is not None and found and found[0] <= after:
                found = [ledger for ledger in found if ledger > after]
            if found:
                yield found


def scoped_ledger_path(ledger: LedgerId) -> str:
    """Return the path of a scoped ledger's metadata, below the root."""
    name = f"{ledger.ledger_id:016x}"
    return f"{_scope_path(ledger.scope_id)}/{name[:4]}/{name[4:8]}/{name[8:12]}/L{name[12:]}"


def _scope_path(scope_id: int) -> str:
    name = f"{scope_id:016x}"
    return f"{SCOPES}/{name[:4]}/{name[4:]}"
