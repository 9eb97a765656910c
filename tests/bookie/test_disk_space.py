"""Choice of directories for new files, and a bookie that accepts no entries on full disks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bkctl.bookie.disk_space import DiskState, DiskWatch
from bkctl.config import BookieConfig
from bkctl.disk import DiskUsage, Files
from bkctl.errors import UsageError

SIZE = 1 << 40
A, B, INDEX = Path("/a"), Path("/b"), Path("/index")


class Disks(Files):
    """Each directory on a disk of its own, as full as the test says."""

    def __init__(self) -> None:
        self.used: dict[Path, float] = {A: 0.5, B: 0.5, INDEX: 0.5}
        self.free: dict[Path, int] = {}

    def disk_usage(self, path: Path) -> DiskUsage:
        free = self.free.get(path, int((1 - self.used[path]) * SIZE))
        return DiskUsage(SIZE, free, hash(path))


def watch(disks: Disks, indexes: tuple[Path, ...] = (A, B), **settings: Any) -> DiskWatch:
    return DiskWatch(BookieConfig(**settings), disks, (A, B), indexes)


def test_with_space_everything_is_writable() -> None:
    assert watch(Disks()).look() == DiskState([0, 1], [0, 1], False, False, False, True)


@pytest.mark.parametrize("any_is_enough", [True, False])
def test_full_directory_takes_no_files_and_may_make_the_bookie_read_only(any_is_enough: bool) -> None:
    disks = Disks()
    watched = watch(disks, read_only_mode_on_any_disk_full_enabled=any_is_enough)
    disks.used[A] = 0.96
    assert watched.look() == DiskState([1], [1], any_is_enough, True, False, True)
    disks.used[A] = 0.94
    assert watched.look() == DiskState([0, 1], [0, 1], False, False, True, True), "another one was writable"


def test_with_every_directory_full_the_usage_of_all_disks_counts() -> None:
    disks = Disks()
    watched = watch(disks, disk_usage_lwm_threshold=0.8)
    disks.used |= {A: 0.96, B: 0.97}
    state = watched.look()
    assert state.full
    assert state.writable == [0, 1], "with more space left than an entry log takes"
    assert watched.not_full_count == 0, "what the metric says, as Apache's"
    disks.used[A] = 0.7
    assert watched.look().full, "together 83 %"
    disks.used[B] = 0.85
    state = watched.look()
    assert (state.writable, state.full) == ([0, 1], False)


def test_directories_without_the_minimum_space_take_no_files_or_high_priority_writes() -> None:
    disks = Disks()
    settings = {"log_size_limit": 1000, "min_usable_size_for_index_file_creation": 100}
    watched = watch(disks, **settings)
    disks.free |= {A: 1001, B: 500}
    assert watched.look() == DiskState([0], [0, 1], True, True, False, True)
    disks.free |= {A: 1000, B: 50}
    assert watched.look() == DiskState([], [0], True, True, False, False)
    more = watch(disks, **settings, min_usable_size_for_entry_log_creation=20)
    assert more.look() == DiskState([0, 1], [0], True, True, False, True)
    less = watch(disks, **settings, min_usable_size_for_high_priority_writes=2000)
    disks.free |= {A: 1999, B: 1999}
    assert not less.look().allows_high_priority


def test_almost_full_is_reported_before_full() -> None:
    disks = Disks()
    watched = watch(disks)
    disks.used[B] = 0.91
    assert watched.look() == DiskState([0, 1], [0, 1], False, False, True, True)


def test_index_directories_of_their_own_are_watched_too() -> None:
    disks = Disks()
    watched = watch(disks, indexes=(INDEX,))
    disks.used[INDEX] = 0.99
    state = watched.look()
    assert (state.writable, state.full) == ([0, 1], True)
    disks.used[INDEX] = 0.5
    assert not watched.look().full


def test_thresholds_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(UsageError, match="diskUsageLwmThreshold"):
        watch(Disks(), disk_usage_threshold=0.8, disk_usage_lwm_threshold=0.9)
