"""Bookies that a swap replaces in metadata that may have changed since the fragment was copied."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from bkctl.client.ensemble import RoundRobinDistributionSchedule
from bkctl.formats.entry import DigestType
from bkctl.formats.metadata import Fragment, LedgerMetadata, LedgerState
from bkctl.ids import LedgerId
from bkctl.metadata.ledgers import VersionedMetadata
from bkctl.replication.fragments import LedgerFragment
from bkctl.replication.replicator import EnsembleSwap

COPIED = ("a", "b", "c", "d")


def found(bookies: tuple[str, ...]) -> VersionedMetadata:
    metadata = LedgerMetadata(
        4, 2, 2, DigestType.CRC32C, b"", (Fragment(0, bookies),), LedgerState.CLOSED, last_entry_id=9, length=10
    )
    return VersionedMetadata(metadata, 1, None)


@pytest.mark.parametrize(
    ("present", "moved", "after"),
    [
        (COPIED, {1: "x"}, ("a", "x", "c", "d")),
        (COPIED, {1: "c", 2: "b"}, ("a", "c", "b", "d")),
        (COPIED, {1: "c", 2: "x"}, ("a", "c", "x", "d")),
        # c stays, so it gets no second index.
        (COPIED, {1: "c"}, COPIED),
        # Another worker replaced c at index 2.
        (("a", "b", "y", "d"), {1: "c", 2: "b"}, ("a", "c", "y", "d")),
        (("a", "b", "y", "d"), {1: "d", 2: "b", 3: "c"}, ("a", "d", "y", "c")),
        (("a", "y", "c", "d"), {1: "c", 2: "b"}, ("a", "y", "b", "d")),
        (("a", "b", "c", "b2"), {1: "d", 2: "b", 3: "c"}, ("a", "d", "b", "b2")),
        (("y", "b", "c", "d"), {0: "b", 1: "a"}, ("y", "a", "c", "d")),
        (("b", "y", "c", "d"), {0: "c", 2: "a"}, ("b", "y", "a", "d")),
        (("a", "x", "c", "d"), {1: "x"}, ("a", "x", "c", "d")),
    ],
)
def test_swaps_never_name_a_bookie_twice(
    present: tuple[str, ...], moved: Mapping[int, str], after: tuple[str, ...]
) -> None:
    fragment = LedgerFragment(LedgerId(0, 1), 0, 9, COPIED, True, RoundRobinDistributionSchedule(4, 2, 2))
    metadata, replaced = EnsembleSwap(found(COPIED), fragment, moved, None).applied_to(found(present))
    assert metadata.ensembles[0].bookies == after
    assert len(set(after)) == len(after)
    assert replaced == {old: new for old, new in zip(present, after, strict=True) if old != new}
