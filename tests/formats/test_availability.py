"""Lists of entries, by the bytes that Apache's writer makes."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bkctl.errors import BkctlError, CorruptRecord, TruncatedRecord, Unsupported
from bkctl.formats.availability import Availability, SequenceGroup, serialize


def group(first: int, last: int, size: int, period: int) -> bytes:
    return struct.pack(">qqii", first, last, size, period)


def listing(*groups: bytes, version: int = 0) -> bytes:
    return struct.pack(">ii", version, len(groups)) + bytes(56) + b"".join(groups)


@pytest.mark.parametrize(
    ("entries", "groups"),
    [
        ([], []),
        ([0], [(0, 0, 1, 0)]),
        ([0, 1, 2, 3], [(0, 0, 4, 0)]),
        ([0, 3, 6, 9], [(0, 0, 1, 0), (3, 3, 1, 0), (6, 6, 1, 0), (9, 9, 1, 0)]),
        ([0, 1, 4, 5, 8, 9, 20], [(0, 0, 2, 0), (4, 4, 2, 0), (8, 8, 2, 0), (20, 20, 1, 0)]),
        ([5, 1, 2, 3, 9], [(1, 1, 3, 0), (5, 5, 1, 0), (9, 9, 1, 0)]),
        ([0, 0, 1, 1, 7, 7], [(0, 0, 2, 0), (7, 7, 1, 0)]),
    ],
)
def test_availability_matches_apaches_bytes(entries, groups):
    data = listing(*(group(*each) for each in groups))
    assert serialize(sorted(entries)) == data
    assert sorted(Availability.parse(data)) == sorted(set(entries))
    assert Availability.parse(data).count() == len(set(entries))


def test_reads_groups_with_a_period():
    found = Availability.parse(listing(group(10, 30, 2, 10), group(100, 100, 3, 0)))
    assert list(found) == [10, 11, 20, 21, 30, 31, 100, 101, 102]
    assert found.count() == 9
    assert [entry in found for entry in (9, 10, 12, 21, 31, 32, 40, 102, 103)] == [
        False, True, False, True, True, False, False, True, False
    ]  # fmt: skip
    assert "x" not in found


@pytest.mark.parametrize(
    "damaged", [group(5, 4, 1, 1), group(-1, 0, 1, 1), group(0, 9, 1, 0), group(0, 0, -1, 0), group(0, 9, 1, -3)]
)
def test_refuses_impossible_groups(damaged):
    with pytest.raises(CorruptRecord, match="at byte 88"):
        Availability.parse(listing(group(0, 0, 1, 0), damaged))


def test_refuses_other_versions_and_truncated_lists():
    with pytest.raises(Unsupported):
        Availability.parse(listing(version=1))
    for data in (b"", listing()[:63], listing(group(0, 0, 1, 0))[:-1], struct.pack(">ii", 0, 2**31 - 1) + bytes(80)):
        with pytest.raises(TruncatedRecord):
            Availability.parse(data)
    with pytest.raises(CorruptRecord):
        Availability.parse(struct.pack(">ii", 0, -1) + bytes(56))


@given(st.sets(st.integers(0, 300)))
def test_availability_round_trips(entries):
    found = Availability.parse(serialize(sorted(entries)))
    assert set(found) == entries
    assert {entry for entry in range(302) if entry in found} == entries


@given(st.binary(max_size=200), st.integers(0, 4))
def test_any_bytes_raise_only_declared_errors(data, count):
    for each in (data, struct.pack(">ii", 0, count) + bytes(56) + data):
        with contextlib.suppress(BkctlError):
            Availability.parse(each).count()


def test_hostile_group_uses_bounded_memory():
    found = Availability.parse(listing(group(0, 2**62, 2**31 - 1, 1)))
    assert 2**61 in found
    assert found.groups == (SequenceGroup(0, 2**62, 2**31 - 1, 1),)


def test_runs_without_entries_take_no_time() -> None:
    """A bookie may say so: 2^62 runs of nothing."""
    found = Availability([SequenceGroup(0, 1 << 62, 0, 1), SequenceGroup((1 << 62) + 1, (1 << 62) + 1, 1, 0)])
    assert list(Availability.parse(found.serialize())) == [(1 << 62) + 1]
    assert found.count() == 1


def test_serializing_pauses_and_takes_the_memory_of_the_result() -> None:
    pauses: list[int] = []
    tracemalloc.start()
    data = serialize(range(0, 40_000, 2), lambda: pauses.append(1))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert list(Availability.parse(data)) == list(range(0, 40_000, 2))
    assert len(pauses) == 20
    assert peak < 4 * len(data)
