"""Entries are taken out of what was read of a log only where they are the ones at their locations."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.mutation import changed, changes

from bkctl.formats.entry import DigestManager, DigestType
from bkctl.formats.record import record_of
from bkctl.ids import LedgerId
from bkctl.storage.location_reader import entries_in

LEDGERS = (LedgerId(0, 5), LedgerId(0, 2**63 - 1), LedgerId(7, 5), LedgerId(2**64 - 1, 2**64 - 1))
#: Of the first record: of a log with a high number.
BEGIN = 0x7FFF_FFFF_0000_0404


def entry(ledger: LedgerId, entry_id: int, payload: bytes) -> bytes:
    return DigestManager(ledger, DigestType.CRC32C).seal(entry_id, entry_id - 1, 70_000, payload) + payload


def log_of(entries: list[tuple[LedgerId, int, bytes]]) -> tuple[bytes, list[int]]:
    """Some records one after the other, and their locations."""
    data, locations = b"", []
    for ledger, entry_id, payload in entries:
        locations.append(BEGIN + len(data))
        data += record_of(entry(ledger, entry_id, payload))
    return data, locations


@pytest.mark.parametrize("ledger", LEDGERS, ids=repr)
def test_takes_entries_at_their_locations_alone(ledger: LedgerId) -> None:
    other = LedgerId(ledger.scope_id, 6)
    data, locations = log_of([(ledger, 1, b"one"), (other, 2, b"two"), (ledger, 3, b""), (ledger, 4, b"four")])
    found = entries_in(memoryview(data), BEGIN, ledger, [1, 2, 3, 4], locations)
    assert [None if body is None else bytes(body) for body in found] == [
        entry(ledger, 1, b"one"), None, entry(ledger, 3, b""), entry(ledger, 4, b"four")
    ]  # fmt: skip
    assert entries_in(memoryview(data), BEGIN, ledger, [2, 4], [locations[0], locations[2]]) == [None, None]
    for end in range(len(data)):
        *_, last = entries_in(memoryview(data)[:end], BEGIN, ledger, [1, 4], [locations[0], locations[3]])
        assert last is None


entries = st.tuples(st.sampled_from(LEDGERS), st.integers(0, 5), st.binary(max_size=40))


@given(st.lists(entries, min_size=1, max_size=8), changes, st.integers(0, 60), st.sampled_from(LEDGERS), st.data())
def test_of_any_bytes_only_whole_entries_of_that_ledger_and_id_are_taken(
    written: list[tuple[LedgerId, int, bytes]], where: list[tuple[int, int]], cut: int, ledger: LedgerId, data: Any
) -> None:
    log, locations = log_of(written)
    log = changed(log, where)[: len(log) - cut if cut < 30 else None]
    entry_ids = [entry_id for _, entry_id, _ in written]
    at = data.draw(st.lists(st.sampled_from(range(len(written))), max_size=8).map(sorted))
    shift = data.draw(st.sampled_from((0, 0, 0, 1, 300)))
    arguments = ([entry_ids[each] for each in at], [locations[each] + shift for each in at])
    view = memoryview(bytearray(log))
    for entry_id, location, body in zip(*arguments, entries_in(view, BEGIN, ledger, *arguments), strict=True):
        begin = location - BEGIN
        size = int.from_bytes(log[begin : begin + 4], "big", signed=True)
        expected = log[begin + 4 : begin + 4 + size] if size >= 0 else b""
        ids = struct.pack(">Qq", ledger.ledger_id, entry_id)
        if ledger.is_scoped:
            fits = expected[:1] >= b"\xa0" and expected[:1] <= b"\xa4"
            fits = fits and expected[1:25] == ledger.scope_id.to_bytes(8, "big") + ids
        else:
            fits = expected[:16] == ids
        assert (None if body is None else bytes(body)) == (expected if fits and len(expected) == size else None)
