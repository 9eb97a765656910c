"""Fragments of ledgers."""

from __future__ import annotations

import pytest

from bkctl.ids import LedgerId
from bkctl.replication.fragments import LedgerFragment


@pytest.mark.parametrize(("ensemble_size", "write_quorum_size"), [(1, 1), (3, 2), (5, 3), (4, 4)])
@pytest.mark.parametrize(("first", "last"), [(0, -1), (0, 0), (3, 4), (7, 40), (10, 9)])
def test_fragment_computes_entries_of_each_bookie(ensemble_size, write_quorum_size, first, last):
    from bkctl.client.ensemble import RoundRobinDistributionSchedule

    schedule = RoundRobinDistributionSchedule(ensemble_size, write_quorum_size, 1)
    names = tuple(f"b{index}" for index in range(ensemble_size))
    fragment = LedgerFragment(LedgerId(0, 1), first, last, names, True, schedule)
    for index in range(ensemble_size):
        expected = [each for each in range(first, last + 1) if index in schedule.write_set(each)]
        assert list(fragment.entries_of(index)) == expected
        assert fragment.entry_count(index) == len(expected)
        assert fragment.first_and_last_of(index) == ((expected[0], expected[-1]) if expected else None)
