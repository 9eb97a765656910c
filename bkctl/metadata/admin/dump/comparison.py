"""Comparing two streams of records, without holding either."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby, repeat
from typing import NamedTuple

from bkctl.errors import Corrupt, Unsupported
from bkctl.formats.metadata import LedgerMetadata
from bkctl.ids import LedgerId
from bkctl.metadata.admin.dump.records import DumpHeader, DumpRecord
from bkctl.metadata.ledgers import INSTANCE_ID


class Difference(NamedTuple):
    """A record that differs between the two sides: `what` is "onlyInFirst", "onlyInSecond" or "differs".

    `fields` are the differing fields of a ledger's metadata, empty where one side cannot be parsed.
    """

    kind: str
    key: str
    what: str
    fields: tuple[str, ...] = ()

    @property
    def ledger(self) -> LedgerId | None:
        """The ledger of a record of kind "ledger" or "mark", else None."""
        return LedgerId.from_value(int(self.key, 16)) if self.kind in ("ledger", "mark") else None


def compare_headers(first: DumpHeader, second: DumpHeader) -> Iterator[Difference]:
    """Yield a difference of the instance ids. LAYOUTs may differ, as they do between kinds of stores."""
    if first.instance_id != second.instance_id:
        yield Difference("node", INSTANCE_ID, "differs")


def compare(
    first: Iterable[DumpRecord], second: Iterable[DumpRecord], *, progress: Callable[[int], None] = lambda _: None
) -> Iterator[Difference]:
    """Yield the differences between two streams of records, in order. Positions of ledger ids are not compared."""
    sides = (zip(repeat("onlyInFirst"), first), zip(repeat("onlyInSecond"), second))
    by_place = groupby(heapq.merge(*sides, key=_place), _place)
    for count, (_, records) in enumerate(by_place, 1):
        progress(count)
        (side, record), *others = records
        if record.kind == "sequence":
            continue
        if not others:
            yield Difference(record.kind, record.key, side)
        elif record.value != others[0][1].value:
            yield Difference(record.kind, record.key, "differs", _differing_fields(record, others[0][1]))


def _place(record: tuple[str, DumpRecord]) -> tuple[int, str]:
    return record[1].place


def _differing_fields(first: DumpRecord, second: DumpRecord) -> tuple[str, ...]:
    if first.kind != "ledger":
        return ()
    try:
        left, right = LedgerMetadata.parse(first.value), LedgerMetadata.parse(second.value)
    except (Corrupt, Unsupported):
        return ()
    names = {
        "format_version": "metadataFormatVersion", "state": "state", "ensemble_size": "ensembleSize",
        "write_quorum_size": "writeQuorumSize", "ack_quorum_size": "ackQuorumSize", "digest_type": "digestType",
        "length": "length", "last_entry_id": "lastEntryId", "ctime_ms": "ctime", "custom_metadata": "customMetadata",
        "ensembles": "ensembles", "password": "password", "c_token": "ctoken",
    }  # fmt: skip
    return tuple(shown for name, shown in names.items() if getattr(left, name) != getattr(right, name))
