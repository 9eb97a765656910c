"""Garbage collection removes ledgers that the metadata store has deleted, and nothing else."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.journals import flush_journals
from support.waiting import LIMIT_S

from bkctl.bookie.bookie import Bookie as RunningBookie
from bkctl.bookie.checkpoints import CheckpointRunner, NoSpaceForCheckpoint
from bkctl.bookie.entry_log_collection import (
    MAJOR,
    MINOR,
    ForcedRound,
    check_compaction_settings,
)
from bkctl.bookie.garbage_collector import GarbageCollectorThread
from bkctl.client.ledger import BookKeeper
from bkctl.config import BookieConfig
from bkctl.errors import BkctlError, Corrupt, Unreachable, UsageError
from bkctl.formats.entry import DigestManager, DigestType
from bkctl.formats.metadata import Fragment, LedgerMetadata, LedgerState
from bkctl.ids import LedgerId
from bkctl.metadata.backends.sqlite import SqliteStore
from bkctl.metadata.cluster import Cluster, init_cluster, open_cluster
from bkctl.metadata.ledgers import LedgerManager
from bkctl.metadata.store import Claim
from bkctl.metadata.underreplication import LedgerLocks
from bkctl.metadata.uri import parse_uri
from bkctl.storage.bookie_storage import BookieStorage, Checkpoint
from bkctl.storage.entry_logger import EntryLogger

BOOKIE = "bookie-1:3181"
OTHER = "bookie-2:3181"
OPEN = LedgerMetadata(1, 1, 1, DigestType.CRC32, b"pw", (Fragment(0, (BOOKIE,)),))
ELSEWHERE = LedgerMetadata(
    1, 1, 1, DigestType.CRC32, b"pw", (Fragment(0, (OTHER,)),), state=LedgerState.CLOSED, length=3, last_entry_id=0
)
PLAIN = [LedgerId(0, number) for number in (1, 5, 9)]
SCOPED = [LedgerId(7, 1), LedgerId(7, 5), LedgerId(9, 2)]


class Storage:
    """A bookie's storage as far as the collector asks it; `created` come into being right after the first listing."""

    entry_loggers = ()

    def __init__(self, *ledgers: LedgerId) -> None:
        self.ledgers = set(ledgers)
        self.after_listing: Callable[[], None] = lambda: None

    def ledger_ids(self, scope: int | None = None) -> Iterator[LedgerId]:
        listed = sorted(each for each in self.ledgers if scope is None or each.scope_id == scope)
        self.after_listing()
        return iter(listed)

    def delete(self, ledgers: Sequence[LedgerId]) -> int:
        self.ledgers -= set(ledgers)
        return len(ledgers)


class Bookie:
    """A collector over `storage` and a cluster as ZooKeeper keeps it."""

    def __init__(self, cluster: Cluster, storage: Storage, **settings: Any) -> None:
        self.cluster = cluster
        self.storage = storage
        self.now_ms = 1_000_000
        config = BookieConfig(gc_metadata_op_rate_limit=1_000_000, **settings)
        self.collector = GarbageCollectorThread(
            config,
            storage,  # type: ignore[arg-type]
            cluster,
            bookie_id=BOOKIE,
            instance_id=cluster.instance_id(),
            delete=storage.delete,
            checkpoint=lambda: None,
            clock_ms=lambda: self.now_ms,
        )

    @property
    def held_back(self) -> str:
        return self.collector.stats.scoped_held_back


@pytest.fixture(params=["zk+longhierarchical://nowhere/ledgers", "zk+hierarchical://nowhere/ledgers", "sqlite"])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    path = tmp_path / "metadata.db"
    uri = f"sqlite://{path}" if request.param == "sqlite" else request.param
    with Cluster(parse_uri(uri), SqliteStore(str(path), create=True)) as opened:
        init_cluster(opened)
        yield opened


@pytest.fixture
def zookeeper_cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster whose scopes are a tree of their own."""
    location = parse_uri("zk+longhierarchical://nowhere/ledgers")
    with Cluster(location, SqliteStore(str(tmp_path / "metadata.db"), create=True)) as opened:
        init_cluster(opened)
        yield opened


def create(cluster: Cluster, *ledgers: LedgerId, metadata: LedgerMetadata = OPEN) -> None:
    for ledger in ledgers:
        cluster.ledgers.create(ledger, metadata)


def test_only_deleted_ledgers_are_collected_in_every_scope(cluster: Cluster) -> None:
    create(cluster, *PLAIN[:2], *SCOPED[1:], LedgerId(0, 77), LedgerId(8, 1))
    bookie = Bookie(cluster, Storage(*PLAIN, *SCOPED))
    bookie.collector.run_round()
    assert bookie.storage.ledgers == {*PLAIN[:2], *SCOPED[1:]}
    stats = bookie.collector.stats
    assert (stats.deleted_ledgers, stats.deleted_scoped_ledgers, stats.failed_rounds) == (2, 1, 0)
    assert (stats.active_ledgers, bookie.held_back) == (6, "")


def test_scope_without_ledgers_is_empty(cluster: Cluster) -> None:
    create(cluster, LedgerId(8, 1))
    cluster.ledgers.remove(LedgerId(8, 1))
    bookie = Bookie(cluster, Storage(*SCOPED))
    bookie.collector.run_round()
    assert bookie.storage.ledgers == set()


def test_without_a_scopes_tree_no_scoped_ledger_is_collected(zookeeper_cluster: Cluster) -> None:
    bookie = Bookie(zookeeper_cluster, Storage(*PLAIN, *SCOPED))
    bookie.collector.run_round(ForcedRound(accept_scoped_deletes=True))
    assert bookie.storage.ledgers == set(SCOPED)
    assert "no scopes tree" in bookie.held_back


def test_scopes_tree_of_another_cluster_is_never_collected_on(zookeeper_cluster: Cluster) -> None:
    create(zookeeper_cluster, SCOPED[0])
    zookeeper_cluster.store.put("scopes", b"another instance", None)
    zookeeper_cluster._ledgers = None  # as a bookie that starts now
    bookie = Bookie(zookeeper_cluster, Storage(*PLAIN, *SCOPED))
    bookie.collector.run_round(ForcedRound(accept_scoped_deletes=True))
    assert bookie.storage.ledgers == set(SCOPED)
    assert "no scopes tree" in bookie.held_back


@pytest.mark.parametrize("change", ["gone", "foreign"])
def test_scopes_tree_that_vanishes_during_the_round_proves_nothing(zookeeper_cluster: Cluster, change: str) -> None:
    create(zookeeper_cluster, SCOPED[0])
    bookie = Bookie(zookeeper_cluster, Storage(*SCOPED))
    store = zookeeper_cluster.store
    children_many = store.children_many

    def vanish(paths: Iterable[str]) -> Iterator[list[str] | None]:
        asked, given = itertools.tee(paths)
        for path, found in zip(asked, children_many(given), strict=True):
            if path == "scopes":
                zookeeper_cluster.ledgers.remove(SCOPED[0])
                if change == "gone":
                    store.delete("scopes")
                else:
                    store.put("scopes", b"another instance", None)
                store.children_many = children_many  # type: ignore[method-assign]
            yield found

    store.children_many = vanish  # type: ignore[method-assign]
    bookie.collector.run_round()
    assert store.children_many is children_many, "the tree was never listed"
    assert bookie.storage.ledgers == set(SCOPED)


def test_the_scopes_tree_outlives_its_last_ledger(zookeeper_cluster: Cluster) -> None:
    create(zookeeper_cluster, SCOPED[0])
    zookeeper_cluster.ledgers.remove(SCOPED[0])
    Bookie(zookeeper_cluster, Storage(*SCOPED)).collector.run_round()
    assert zookeeper_cluster.ledgers.scopes_state() == "ours"


@pytest.mark.parametrize("listed_before", [0, 1, 2])
def test_error_while_listing_leaves_every_scoped_ledger(cluster: Cluster, listed_before: int) -> None:
    create(cluster, LedgerId(0, 2), SCOPED[1])
    bookie = Bookie(cluster, Storage(*PLAIN, *SCOPED))
    batches = cluster.ledgers.batches

    def fail(*arguments: Any) -> Iterator[list[LedgerId]]:
        for number, batch in enumerate(batches(*arguments)):
            if number == listed_before:
                break
            yield batch
        raise Unreachable("The store is gone")

    cluster.ledgers.batches = fail  # type: ignore[method-assign]
    bookie.collector.run_round()
    assert set(SCOPED) <= bookie.storage.ledgers
    assert bookie.held_back
    assert bookie.collector.stats.failed_rounds == 1
    cluster.ledgers.batches = batches  # type: ignore[method-assign]
    bookie.collector.run_round()
    assert bookie.storage.ledgers == {SCOPED[1]}


def test_candidates_whose_metadata_cannot_be_read_again_stay(cluster: Cluster) -> None:
    create(cluster, SCOPED[1])
    bookie = Bookie(cluster, Storage(*PLAIN, *SCOPED))
    read_many = cluster.ledgers.read_many

    def fail(ids: Any) -> Iterator[Any]:
        raise Unreachable("The store is gone")

    cluster.ledgers.read_many = fail  # type: ignore[method-assign]
    bookie.collector.run_round()
    assert bookie.storage.ledgers == {*PLAIN, *SCOPED}
    cluster.ledgers.read_many = read_many  # type: ignore[method-assign]
    bookie.collector.run_round()
    assert bookie.storage.ledgers == {SCOPED[1]}


def test_ledger_created_during_the_round_is_never_deleted(cluster: Cluster) -> None:
    """Its metadata comes first, then the bookie gets it: before or behind the listing of what is here."""
    create(cluster, SCOPED[0])
    young = [LedgerId(0, 20), LedgerId(7, 20)]
    bookie = Bookie(cluster, Storage(*PLAIN, *SCOPED))

    def born() -> None:
        bookie.storage.after_listing = lambda: None
        create(cluster, *young)
        bookie.storage.ledgers.update(young)

    bookie.storage.after_listing = born
    bookie.collector.run_round()
    assert bookie.storage.ledgers == {SCOPED[0], *young}


def test_ledger_that_a_stale_listing_lacks_is_read_again_and_stays(cluster: Cluster) -> None:
    create(cluster, *PLAIN, *SCOPED)
    bookie = Bookie(cluster, Storage(*PLAIN, *SCOPED))
    batches = cluster.ledgers.batches
    lacking = {PLAIN[1], SCOPED[1]}
    cluster.ledgers.batches = lambda *arguments: (  # type: ignore[method-assign]
        [ledger for ledger in batch if ledger not in lacking] for batch in batches(*arguments)
    )
    bookie.collector.run_round()
    assert bookie.storage.ledgers == {*PLAIN, *SCOPED}


def test_nothing_is_collected_in_another_cluster_than_the_cookies(cluster: Cluster) -> None:
    bookie = Bookie(cluster, Storage(*PLAIN, *SCOPED))
    cluster.store.put(cluster.places.instance_id, b"formatted anew", None)
    bookie.collector.run_round(ForcedRound(accept_scoped_deletes=True))
    assert bookie.storage.ledgers == {*PLAIN, *SCOPED}
    assert bookie.collector.stats.failed_rounds == 1


def test_unindexed_ledgers_are_looked_up_once_a_round(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    alive, elsewhere, deleted, dead = PLAIN[0], PLAIN[1], PLAIN[2], SCOPED[1]
    create(cluster, alive, SCOPED[0])
    create(cluster, elsewhere, metadata=ELSEWHERE)
    read_many, asked = LedgerManager.read_many, []

    def counted(manager: LedgerManager, ids: Iterable[LedgerId]) -> Any:
        ids = list(ids)
        asked.extend(ids)
        return read_many(manager, ids)

    collector = Bookie(cluster, Storage(deleted)).collector
    collector.run_round()  # asks about the one that it deletes
    monkeypatch.setattr(LedgerManager, "read_many", counted)
    impossible = LedgerId(0, 1 << 63)
    some = [alive, elsewhere, deleted, SCOPED[0], dead, impossible]
    for _ in range(2):
        assert collector.unindexed.garbage_of(some) == {elsewhere, deleted, dead, impossible}
    assert asked.count(dead) == 1
    assert deleted not in asked
    collector.unindexed.report()
    assert collector.stats.unindexed_ledgers == 2
    collector.run_round()
    assert collector.stats.unindexed_ledgers == 0, "no log has them"


def test_impossible_ledger_id_is_ignored(cluster: Cluster) -> None:
    impossible = LedgerId(0, 1 << 63)
    bookie = Bookie(cluster, Storage(impossible))
    bookie.collector.run_round()
    assert bookie.storage.ledgers == {impossible}


# --- the brake ------------------------------------------------------------------------------------------------------


def test_too_many_scoped_deletions_wait_for_a_forced_round(cluster: Cluster) -> None:
    many = [LedgerId(7, number) for number in range(1, 11)]
    create(cluster, *many[:4])
    plain = PLAIN[0]
    bookie = Bookie(cluster, Storage(*many, plain), gc_scoped_delete_count_min=6, gc_scoped_delete_ratio_max=0.5)
    bookie.collector.run_round()
    assert bookie.storage.ledgers == set(many), "the brake is for scoped ledgers alone"
    assert bookie.held_back == "6 of 10 scoped ledgers would be deleted"
    bookie.collector.run_round(ForcedRound())
    assert bookie.storage.ledgers == set(many)
    bookie.collector.run_round(ForcedRound(accept_scoped_deletes=True))
    assert bookie.storage.ledgers == set(many[:4])
    for ledger in many[:4]:
        cluster.ledgers.remove(ledger)
    bookie.storage.ledgers.update(many)
    bookie.collector.run_round()
    assert bookie.storage.ledgers == set(many), "the next round is on its own again"


@pytest.mark.parametrize(
    ("settings", "goes"),
    [
        ({"gc_scoped_delete_count_min": 7, "gc_scoped_delete_ratio_max": 0.1}, True),
        ({"gc_scoped_delete_count_min": 6, "gc_scoped_delete_ratio_max": 0.6}, True),
        ({"gc_scoped_delete_count_min": 6, "gc_scoped_delete_ratio_max": 0.59}, False),
        ({}, True),
    ],
)
def test_scoped_deletions_stop_beyond_both_count_and_ratio(
    cluster: Cluster, settings: dict[str, Any], goes: bool
) -> None:
    many = [LedgerId(7, number) for number in range(1, 11)]
    create(cluster, *many[:4])
    bookie = Bookie(cluster, Storage(*many), **settings)
    bookie.collector.run_round()
    assert bookie.storage.ledgers == (set(many[:4]) if goes else set(many))


# --- over-replicated ledgers ----------------------------------------------------------------------------------------


def test_overreplicated_ledgers_are_deleted_after_their_wait_time(cluster: Cluster) -> None:
    elsewhere, still_open, here = [LedgerId(0, 1), LedgerId(7, 1)], [LedgerId(0, 2), LedgerId(7, 2)], LedgerId(0, 3)
    create(cluster, *elsewhere, metadata=ELSEWHERE)
    create(cluster, *still_open, metadata=OPEN._replace(ensembles=ELSEWHERE.ensembles))
    create(cluster, here)
    bookie = Bookie(cluster, Storage(*elsewhere, *still_open, here), gc_overreplicated_ledger_wait_time=60_000)
    bookie.collector.run_round()
    assert len(bookie.storage.ledgers) == 5, "metadata that names other bookies only is no deletion"
    bookie.now_ms += 60_001
    bookie.collector.run_round()
    assert bookie.storage.ledgers == {*still_open, here}
    assert bookie.collector.stats.deleted_overreplicated_ledgers == 2
    assert list(LedgerLocks(cluster.store).list()) == []


def test_ledger_that_is_being_replicated_is_not_over_replicated(cluster: Cluster) -> None:
    ledgers = [LedgerId(0, 1), LedgerId(7, 1)]
    create(cluster, *ledgers, metadata=ELSEWHERE)
    locks = LedgerLocks(cluster.store)
    for ledger in ledgers:
        locks.lock(ledger, "worker")
    bookie = Bookie(cluster, Storage(*ledgers), gc_overreplicated_ledger_wait_time=60_000)
    bookie.now_ms += 60_001
    bookie.collector.run_round()
    assert bookie.storage.ledgers == set(ledgers)
    assert [each.owner for each in locks.list()] == ["worker", "worker"]


def test_ledger_replicated_back_before_the_lock_stays(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = LedgerId(7, 1)
    create(cluster, ledger, metadata=ELSEWHERE)
    bookie = Bookie(cluster, Storage(ledger), gc_overreplicated_ledger_wait_time=60_000)
    bookie.now_ms += 60_001
    lock = LedgerLocks.lock

    def bring_back(self: LedgerLocks, which: LedgerId, owner: str) -> None:
        cluster.ledgers.write(which, OPEN, cluster.ledgers.read(which).version)
        lock(self, which, owner)

    monkeypatch.setattr(LedgerLocks, "lock", bring_back)
    bookie.collector.run_round()
    assert bookie.storage.ledgers == {ledger}
    assert list(LedgerLocks(cluster.store).list()) == []


def test_lock_kept_by_an_outage_is_released_in_the_next_round(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: SqliteStore, claims: Sequence[Claim]) -> None:
        if claims:
            raise Unreachable("The store is gone")

    ledger = LedgerId(7, 1)
    create(cluster, ledger, metadata=ELSEWHERE)
    bookie = Bookie(cluster, Storage(ledger), gc_overreplicated_ledger_wait_time=60_000)
    bookie.now_ms += 60_001
    with monkeypatch.context() as outage:
        outage.setattr(SqliteStore, "release_many", fail)
        bookie.collector.run_round()
    locks = LedgerLocks(cluster.store)
    assert locks.ledgers() == {ledger}
    bookie.collector.run_round()
    assert locks.ledgers() == set()
    assert bookie.collector.stats.failed_rounds == 1


# --- settings and control -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"minor_compaction_interval": 599}, "minorCompactionInterval of 599 s is shorter"),
        ({"major_compaction_interval": 300}, "majorCompactionInterval of 300 s is shorter"),
        ({"entry_location_compaction_interval": 1}, "entryLocationCompactionInterval of 1 s is shorter"),
        ({"minor_compaction_threshold": 0.8}, "minorCompactionThreshold 0.8 is not below"),
        ({"minor_compaction_interval": 86_400}, "minorCompactionInterval 86400 s is not below"),
    ],
)
def test_settings_that_apache_refuses_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_compaction_settings(BookieConfig(**settings))


def test_settings_of_a_disabled_compaction_are_ignored() -> None:
    check_compaction_settings(BookieConfig(minor_compaction_interval=0, minor_compaction_threshold=0.9))
    check_compaction_settings(BookieConfig(major_compaction_threshold=0.0, major_compaction_interval=1))


def test_forced_round_runs_once_in_the_thread(cluster: Cluster) -> None:
    create(cluster, SCOPED[1])
    storage = Storage(*PLAIN, *SCOPED)
    bookie = Bookie(cluster, storage)
    collector = bookie.collector
    begun, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        assert go_on.wait(LIMIT_S)

    storage.after_listing = hold
    collector.start()
    try:
        assert not collector.is_in_force_gc
        assert collector.force()
        assert begun.wait(LIMIT_S)
        assert collector.is_in_force_gc
        assert collector.statuses()[0].force_compacting
        assert not collector.force(), "one at a time"
        go_on.set()
        while collector.is_in_force_gc:
            assert not threading.Event().wait(0.01)
        assert storage.ledgers == {SCOPED[1]}
        (status,) = collector.statuses()
        assert (status.major_compaction_counter, status.minor_compaction_counter) == (1, 0)
        assert not status.major_compacting
    finally:
        go_on.set()
        collector.stop()
    assert not collector.force(), "nothing runs any more"


def test_rounds_continue_after_an_exception(cluster: Cluster) -> None:
    storage = Storage(*PLAIN)
    bookie = Bookie(cluster, storage, gc_wait_time=1)
    failures = [ValueError("a mistake"), BkctlError("a failure")]

    def fail() -> None:
        if failures:
            raise failures.pop()

    storage.after_listing = fail
    bookie.collector.start()
    try:
        while storage.ledgers:
            assert not threading.Event().wait(0.01)
    finally:
        bookie.collector.stop()
    assert not failures


def test_compaction_runs_when_it_is_due_and_not_suspended(cluster: Cluster) -> None:
    began_ms = time.time_ns() // 1_000_000
    bookie = Bookie(cluster, Storage())
    collector, stats = bookie.collector, bookie.collector.stats

    def counts() -> tuple[int, int]:
        collector.run_round()
        return stats.major_compactions, stats.minor_compactions

    assert counts() == (0, 0)
    bookie.now_ms += 3_600_001
    assert counts() == (0, 1)
    assert counts() == (0, 1)
    bookie.now_ms += 86_400_001
    assert counts() == (1, 1)
    collector.suspend(MAJOR)
    bookie.now_ms += 86_400_001
    assert counts() == (1, 2)
    collector.suspend(MINOR)
    assert (collector.is_suspended(MAJOR), collector.is_suspended(MINOR)) == (True, True)
    bookie.now_ms += 86_400_001
    assert counts() == (1, 2)
    collector.run_round(ForcedRound())
    assert counts() == (1, 2)
    collector.run_round(ForcedRound(major=True))
    assert counts() == (2, 2)
    collector.resume(MINOR)
    collector.resume(MAJOR)
    collector.run_round(ForcedRound(major=False, minor=False))
    assert counts() == (2, 2)
    collector.run_round(ForcedRound(major=False, minor=True))
    assert counts() == (2, 3)
    (status,) = collector.statuses()
    assert status.last_minor_compaction_time == status.last_major_compaction_time >= began_ms


def test_disabled_compaction_runs_only_when_forced_and_allowed(cluster: Cluster) -> None:
    settings = {"minor_compaction_interval": 0, "major_compaction_interval": 0}
    bookie = Bookie(cluster, Storage(), **settings)
    bookie.now_ms += 1 << 40
    bookie.collector.run_round()
    bookie.collector.run_round(ForcedRound(major=True))
    assert bookie.collector.stats.major_compactions == 0
    allowed = Bookie(cluster, Storage(), force_allow_compaction=True, **settings)
    allowed.now_ms += 1 << 40
    allowed.collector.run_round()
    assert allowed.collector.stats.major_compactions == 0
    allowed.collector.run_round(ForcedRound(major=True))
    assert allowed.collector.stats.major_compactions == 1


def test_full_disks_suspend_compaction_major_first(cluster: Cluster) -> None:
    collector = Bookie(cluster, Storage()).collector
    for full, almost_full, major, minor in (
        (False, True, True, False),
        (True, True, True, True),
        (False, True, True, False),
        (False, False, False, False),
    ):
        collector.disks_are(full=full, almost_full=almost_full)
        assert (collector.is_suspended(MAJOR), collector.is_suspended(MINOR)) == (major, minor)
    collector.suspend(MINOR)
    collector.disks_are(full=False, almost_full=False)
    assert collector.is_suspended(MINOR), "what somebody suspended stays so"
    forcing = Bookie(cluster, Storage(), is_force_gc_allow_when_no_space=True).collector
    forcing.disks_are(full=True, almost_full=True)
    assert forcing.is_in_force_gc
    assert not forcing.is_suspended(MAJOR)


def test_a_forced_round_says_what_it_could_not_do(cluster: Cluster) -> None:
    bookie = Bookie(cluster, Storage())
    collector, stats = bookie.collector, bookie.collector.stats
    collector.run_round(ForcedRound())
    assert (stats.problem, collector.suspended_by_disks()) == ("", "")
    collector.disks_are(full=True, almost_full=True)
    collector.run_round(ForcedRound())
    assert stats.problem == f"it freed no entry log; {collector.suspended_by_disks()}"
    assert "major and minor compaction is suspended while ledger directories are above diskUsageThr" in stats.problem
    collector.run_round(ForcedRound(major=True))
    assert stats.problem == f"it freed no entry log; {collector.suspended_by_disks()}"
    collector.disks_are(full=False, almost_full=False)
    collector.run_round(ForcedRound(major=True))
    assert stats.problem == ""


def test_a_forced_round_that_freed_logs_on_full_disks_has_no_problem(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector = Bookie(cluster, Storage()).collector
    collector.disks_are(full=True, almost_full=True)

    def collect() -> None:
        collector.stats.reclaimed_by_deletion_bytes += 1

    monkeypatch.setattr(collector._logs, "collect", collect)
    collector.run_round(ForcedRound())
    assert collector.stats.problem == ""


def test_databases_of_locations_are_compacted_at_their_own_interval(cluster: Cluster) -> None:
    storage = Storage()
    calls: list[Callable[[], bool]] = []
    index = SimpleNamespace(compact=lambda paths, is_wanted: calls.append(is_wanted))
    storage.location_indexes = [index]  # type: ignore[attr-defined]
    bookie = Bookie(cluster, storage, entry_location_compaction_interval=1000)
    bookie.collector.run_round()
    assert not calls
    bookie.now_ms += 2_000_001
    bookie.collector.run_round()
    bookie.collector.run_round()
    (is_wanted,) = calls
    assert bookie.collector.statuses()[0].entry_location_compaction_counter == 1
    assert is_wanted()
    bookie.collector.cancel()
    assert not is_wanted(), "a stop ends the compaction"


# --- in a bookie ----------------------------------------------------------------------------------------------------


STORAGE_CLASSES = [
    "org.apache.bookkeeper.bookie.InterleavedLedgerStorage",
    "org.apache.bookkeeper.bookie.SortedLedgerStorage",
    "org.apache.bookkeeper.bookie.storage.ldb.DbLedgerStorage",
]


def bookie_config(root: Path, **settings: Any) -> BookieConfig:
    return BookieConfig(
        bookie_port=0,
        listening_interface="lo",
        allow_loopback=True,
        bookie_id="one",
        journal_directories=(str(root / "journal"),),
        ledger_directories=(str(root / "ledgers-0"), str(root / "ledgers-1")),
        journal_pre_alloc_size_mb=1,
        log_size_limit=64 * 1024,
        disk_usage_threshold=1.0,
        compaction_rate=1_000_000,
    ).with_changes(**settings)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Cluster]:
    with open_cluster(f"sqlite://{tmp_path / 'metadata.db'}", create=True) as opened:
        yield opened


@pytest.mark.parametrize(
    ("storage_class", "transactional"), [*((each, False) for each in STORAGE_CLASSES), (STORAGE_CLASSES[1], True)]
)
def test_bookie_collects_and_compacts_while_it_serves(
    tmp_path: Path, store: Cluster, storage_class: str, transactional: bool
) -> None:
    config = bookie_config(
        tmp_path, ledger_storage_class=storage_class, use_transactional_compaction=transactional, flush_interval=50
    )
    payload = b"an entry " * 100
    entries = 60

    async def write(client: BookKeeper, scope_id: int, count: int) -> list[LedgerId]:
        one = {"ensemble_size": 1, "write_quorum_size": 1, "ack_quorum_size": 1}
        handles = [await client.create_ledger_adv(ledger_scope_id=scope_id, **one) for _ in range(count)]  # type: ignore[arg-type]
        for entry_id in range(entries):
            await asyncio.gather(*(each.add(payload, entry_id=entry_id) for each in handles))
        for each in handles:
            await each.close()
        return [each.ledger for each in handles]

    async def read(client: BookKeeper, ledger: LedgerId) -> None:
        reader = await client.open_ledger(ledger.ledger_id, ledger_scope_id=ledger.scope_id)
        found = [entry.payload async for entry in reader.read(0, reader.last_add_confirmed)]
        assert found == [payload] * entries

    async def serve(body: Callable[[BookKeeper, RunningBookie], Coroutine[Any, Any, None]]) -> None:
        bookie = RunningBookie(config, cluster=store)
        await bookie.start()
        try:
            async with BookKeeper(store) as client:
                await body(client, bookie)
        finally:
            await bookie.stop()
        assert bookie.failure is None

    kept: list[LedgerId] = []

    async def collect(client: BookKeeper, bookie: RunningBookie) -> None:
        collector = bookie.garbage_collector
        assert collector is not None
        ledgers = [*await write(client, 0, 4), *await write(client, 7, 4)]
        gone = ledgers[::2]
        kept.extend(ledgers[1::2])
        for ledger in gone:
            await client.delete_ledger(ledger.ledger_id, ledger_scope_id=ledger.scope_id)
        kept.extend([*await write(client, 0, 2), *await write(client, 7, 2)])  # completes the logs in use
        logs = {
            path for path in tmp_path.glob("ledgers-*/current/**/*.log") if path.parent.name in ("current", "scoped")
        }
        await bookie.checkpoint()
        assert collector.force(major=True)
        while collector.is_in_force_gc:
            for ledger in kept:
                await read(client, ledger)
            kept.extend(await write(client, 7, 1))
        for ledger in kept:
            await read(client, ledger)
        stats = collector.stats
        assert stats.failed_rounds == 0
        assert stats.deleted_ledgers == len(gone)
        assert set(bookie.storage.ledgers.ledger_ids()) == set(kept)
        assert collector.statuses()[0].major_compaction_counter == 1
        assert {path for path in logs if path.exists()} < logs
        # Of four ledgers. Where logs end is a matter of time, and full ones, and those in use, keep what they have.
        assert stats.reclaimed_by_compaction_bytes + stats.reclaimed_by_deletion_bytes > entries * len(payload)

    async def read_again(client: BookKeeper, bookie: RunningBookie) -> None:
        for ledger in kept:
            await read(client, ledger)

    asyncio.run(serve(collect))
    asyncio.run(serve(read_again))


def filled(
    root: Path, store: Cluster, storage_class: str
) -> tuple[BookieStorage, GarbageCollectorThread, list[LedgerId], list[Path]]:
    """A storage with three ledgers mixed in small logs, its collector, the ledgers and the completed logs."""
    config = bookie_config(root, ledger_storage_class=storage_class, log_size_limit=4096)
    storage = BookieStorage(config.with_changes(force_allow_compaction=True))
    storage.open()
    ledgers = [LedgerId(0, number) for number in (2, 4, 6)]
    create(store, *ledgers)
    for entry_id in range(40):
        for ledger in ledgers:
            digest = DigestManager(ledger, DigestType.CRC32, b"pw")
            storage.add(ledger, entry_id, digest.master_key, digest.seal(entry_id, -1, 99, bytes(99)) + bytes(99), None)
        if entry_id % 10 == 9:
            flush_journals(storage)
            storage.run_checkpoint()
    collector = GarbageCollectorThread(
        config,
        storage.ledgers,
        store,
        bookie_id=BOOKIE,
        instance_id=store.instance_id(),
        delete=lambda gone: len([storage.delete_ledger(ledger) for ledger in gone]),
        checkpoint=storage.run_checkpoint,
    )
    logs = [logger.path_of(each) for logger in storage.ledgers.entry_loggers for each in logger.flushed_log_ids()]
    return storage, collector, ledgers, logs


@pytest.mark.parametrize("storage_class", STORAGE_CLASSES)
@pytest.mark.parametrize("step", ["live", "move"])
def test_logs_are_collected_after_a_fault_of_the_index(
    tmp_path: Path,
    store: Cluster,
    storage_class: str,
    step: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    storage, collector, ledgers, logs = filled(tmp_path, store, storage_class)

    def fail(*_: object) -> None:
        raise Corrupt("the index is damaged")

    store.ledgers.remove(ledgers[1])
    with monkeypatch.context() as damaged:
        for index in storage.ledgers.indexes:
            damaged.setattr(index, step, fail)
        collector.run_round(ForcedRound(major=True))
    assert "the index is damaged" in caplog.text
    assert "cannot be read to its end" not in caplog.text
    for ledger in (ledgers[0], ledgers[2]):
        store.ledgers.remove(ledger)
    collector.run_round(ForcedRound(major=False, minor=False))
    assert len(logs) > 1
    assert not [path for path in logs if path.exists()]
    storage.close()


@pytest.mark.parametrize("storage_class", STORAGE_CLASSES)
@pytest.mark.parametrize("step", ["collect", "compact"])
def test_a_log_outlives_its_ledgers_map(
    tmp_path: Path, store: Cluster, storage_class: str, step: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The map has no checksum: one flipped bit hides a ledger."""
    storage, collector, ledgers, logs = filled(tmp_path, store, storage_class)
    for path in logs:
        data = path.read_bytes()
        at = int.from_bytes(data[8:16], "big")
        path.write_bytes(data[:at] + data[at:].replace((4).to_bytes(8, "big"), (1028).to_bytes(8, "big")))
    store.ledgers.remove(ledgers[0])
    if step == "collect":
        store.ledgers.remove(ledgers[2])
    for _ in range(2):
        collector.run_round(ForcedRound(major=step == "compact", minor=False))
        for ledger in ledgers[1 : 2 if step == "collect" else 3]:
            for entry_id in range(40):
                assert bytes(storage.read_entry(ledger, entry_id))
    lacking = f"Entry log {logs[0]} has entries of ledgers that its damaged ledgers map lacks: 4"
    assert caplog.text.count(lacking) == 1
    assert not logs[0].exists() or step == "collect", "the second round compacts it"
    for ledger in ledgers[1:]:
        if step == "compact" or ledger == ledgers[1]:
            store.ledgers.remove(ledger)
    collector.run_round(ForcedRound(major=False, minor=False))
    assert not [path for path in logs if path.exists()]
    storage.close()


@pytest.mark.parametrize("storage_class", STORAGE_CLASSES[:2])
def test_the_index_of_a_deleted_ledger_leaves_the_disk_before_its_logs(
    tmp_path: Path, store: Cluster, storage_class: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash in between would leave an index that points at what is gone."""
    config = bookie_config(tmp_path, ledger_storage_class=storage_class, flush_interval=3_600_000)
    indexes: list[set[str]] = []
    plain_remove = EntryLogger.remove_log

    def remove_log(logger: EntryLogger, log_id: int) -> None:
        indexes.append({path.name for path in tmp_path.glob("ledgers-*/current/**/*.idx")})
        plain_remove(logger, log_id)

    monkeypatch.setattr(EntryLogger, "remove_log", remove_log)

    async def run() -> None:
        bookie = RunningBookie(config, cluster=store)
        await bookie.start()
        async with BookKeeper(store) as client:
            for ledger_id in (1, 2):
                handle = await client.create_ledger_adv(
                    ledger_id, ensemble_size=1, write_quorum_size=1, ack_quorum_size=1
                )
                await asyncio.gather(*(handle.add(bytes(1000), entry_id=each) for each in range(200)))
                await handle.close()
                await bookie.checkpoint()
            await client.delete_ledger(1)
        collector = bookie.garbage_collector
        assert collector is not None
        assert collector.force(major=False, minor=False)
        while collector.is_in_force_gc:
            await asyncio.sleep(0.01)
        await bookie.stop()

    asyncio.run(run())
    assert indexes
    assert all(names == {"2.idx"} for names in indexes)


@pytest.mark.parametrize("storage_class", STORAGE_CLASSES)
async def test_disk_without_space_for_a_checkpoint_is_freed_of_the_logs_of_deleted_ledgers(
    tmp_path: Path, store: Cluster, storage_class: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else would free it, and the bookie would never take entries again."""
    config = bookie_config(
        tmp_path, ledger_storage_class=storage_class, flush_interval=3_600_000, log_size_limit=1 << 16
    )

    def logs() -> set[Path]:
        return {path for path in tmp_path.glob("ledgers-*/current/*.log") if path.stat().st_size > 2048}

    bookie = RunningBookie(config, cluster=store)
    await bookie.start()
    async with BookKeeper(store) as client:
        for ledger_id in (1, 2):
            handle = await client.create_ledger_adv(ledger_id, ensemble_size=1, write_quorum_size=1, ack_quorum_size=1)
            await asyncio.gather(*(handle.add(bytes(1000), entry_id=each) for each in range(200)))
            await handle.close()
            await bookie.checkpoint()
        await client.delete_ledger(1)
    before = logs()
    collector = bookie.garbage_collector
    assert collector is not None
    with monkeypatch.context() as full:

        async def no_space(_: CheckpointRunner) -> None:
            raise NoSpaceForCheckpoint("Bookie has no space for a checkpoint")

        full.setattr(CheckpointRunner, "_run_another", no_space)
        assert collector.force(major=False, minor=False)
        while collector.is_in_force_gc:
            await asyncio.sleep(0.01)
    assert len(logs()) < len(before)
    async with BookKeeper(store) as client:
        handle = await client.open_ledger(2)
        assert [entry.entry_id async for entry in handle.read(0, 199)] == list(range(200))
    await bookie.stop()


@pytest.mark.parametrize("storage_class", STORAGE_CLASSES)
async def test_ledgers_are_deleted_while_checkpoints_never_end(
    tmp_path: Path, store: Cluster, storage_class: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy bookie one begins with the end of another, and its disks fill up if it does not collect."""
    config = bookie_config(tmp_path, ledger_storage_class=storage_class, flush_interval=3_600_000)

    bookie = RunningBookie(config, cluster=store)
    await bookie.start()
    may_end = threading.Event()
    plain_checkpoint = bookie.storage.checkpoints.write

    def checkpoint(begun: Checkpoint) -> None:
        may_end.wait(LIMIT_S)
        plain_checkpoint(begun)

    monkeypatch.setattr(bookie.storage.checkpoints, "write", checkpoint)
    async with BookKeeper(store) as client:
        for ledger_id in (1, 2):
            handle = await client.create_ledger_adv(ledger_id, ensemble_size=1, write_quorum_size=1, ack_quorum_size=1)
            await handle.add(b"an entry", entry_id=0)
            await handle.close()
        await client.delete_ledger(1)
        running = asyncio.ensure_future(bookie.checkpoint())
        collector = bookie.garbage_collector
        assert collector is not None
        assert collector.force(major=False, minor=False)
        async with asyncio.timeout(LIMIT_S):
            while not collector.stats.deleted_ledgers:
                await asyncio.sleep(0.01)
        assert not running.done()
        may_end.set()
        await running
        assert list(bookie.storage.ledgers.ledger_ids()) == [LedgerId(0, 2)]
    await bookie.stop()
    assert bookie.failure is None


async def test_bookie_that_gave_up_collects_no_more(tmp_path: Path, store: Cluster) -> None:
    bookie = RunningBookie(bookie_config(tmp_path, gc_wait_time=1), cluster=store)
    await bookie.start()
    bookie.state_manager.thread_died(RuntimeError("a thread"))
    assert bookie.garbage_collector is not None
    assert not bookie.garbage_collector.force()
    await bookie.stop()


def test_bookie_refuses_impossible_compaction_settings(tmp_path: Path, store: Cluster) -> None:
    async def run() -> None:
        bookie = RunningBookie(bookie_config(tmp_path, minor_compaction_interval=1), cluster=store)
        with pytest.raises(UsageError, match="minorCompactionInterval"):
            await bookie.start()

    asyncio.run(run())
    assert not (tmp_path / "ledgers-0").exists()
