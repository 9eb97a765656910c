"""The contract of ledger managers, over SQLite, etcd, HBase, and each of Apache's layouts on a real ZooKeeper."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import islice

import pytest
from support.waiting import LIMIT_S

from bkctl.errors import (
    BkctlError,
    Corrupt,
    LedgerExists,
    LedgerNotFound,
    MetadataVersionConflict,
    UsageError,
)
from bkctl.formats.entry import DigestType
from bkctl.formats.metadata import Fragment, LedgerMetadata, LedgerState
from bkctl.ids import I64_MAX, U64_MAX, LedgerId
from bkctl.metadata.backends.hbase.hbase_store import HBaseLedgerManager
from bkctl.metadata.backends.zookeeper.ledger_managers import SHORT_ID_END, LegacyHierarchicalLedgerManager
from bkctl.metadata.cluster import Cluster, open_cluster
from bkctl.metadata.ledgers import LedgerManager, VersionedMetadata
from bkctl.metadata.store import NEW

METADATA = LedgerMetadata(
    ensemble_size=2,
    write_quorum_size=2,
    ack_quorum_size=1,
    digest_type=DigestType.CRC32C,
    password=b"secret",
    ensembles=(Fragment(0, ("127.0.0.1:3181", "bookie-2")),),
    custom_metadata={"key": b"\x00\xff"},
)
#: Across every seam of the layouts: the 2/4/4 tree, the long tree, 2**63, scopes with the same ledger ids.
IDS = [
    LedgerId(0, 0),
    LedgerId(0, 9999),
    LedgerId(0, 10000),
    LedgerId(0, SHORT_ID_END - 1),
    LedgerId(0, SHORT_ID_END),
    LedgerId(0, 10**10 - 1),
    LedgerId(0, 10**10),
    LedgerId(0, I64_MAX),
    LedgerId(1, 0),
    LedgerId(7, 0),
    LedgerId(7, 1),
    LedgerId(7, SHORT_ID_END),
    LedgerId(7, U64_MAX),
    LedgerId(1 << 63, 9999),
    LedgerId(U64_MAX, 0),
    LedgerId(U64_MAX, U64_MAX),
]


@pytest.fixture
def ledgers(cluster: Cluster) -> LedgerManager:
    return cluster.ledgers


@pytest.fixture
def ids(ledgers: LedgerManager) -> list[LedgerId]:
    """Return the IDS that the layout has room for: all but the longest."""
    return [ledger for ledger in IDS if _fits(ledgers, ledger)]


def _fits(ledgers: LedgerManager, ledger: LedgerId) -> bool:
    try:
        ledgers.path(ledger)
    except UsageError:
        assert isinstance(ledgers, LegacyHierarchicalLedgerManager)
        return False
    return True


def create_all(ledgers: LedgerManager, ids: list[LedgerId]) -> None:
    for ledger in ids:
        ledgers.create(ledger, METADATA)


@pytest.mark.parametrize("ledger", [LedgerId(0, 5), LedgerId(0, 10**10 - 1), LedgerId(7, 5)], ids=str)
def test_ledger_is_created_written_and_removed(ledgers: LedgerManager, ledger: LedgerId) -> None:
    with pytest.raises(LedgerNotFound):
        ledgers.read(ledger)
    first = ledgers.create(ledger, METADATA)
    found = ledgers.read(ledger)
    assert found.metadata._replace(c_token=None) == METADATA
    assert found.metadata.c_token is not None
    assert found.version == first
    assert (found.ctime_ms is None) == any(name in ledgers.store.name for name in ("etcd", "HBase"))

    closed = found.metadata._replace(state=LedgerState.CLOSED, last_entry_id=3, length=99)
    second = ledgers.write(ledger, closed, first)
    assert second > first
    found = ledgers.read(ledger)
    assert (found.metadata.state, found.metadata.last_entry_id, found.version) == (LedgerState.CLOSED, 3, second)
    assert found.metadata.c_token == 0
    with pytest.raises(MetadataVersionConflict):
        ledgers.write(ledger, METADATA, first)
    with pytest.raises(MetadataVersionConflict):
        ledgers.remove(ledger, first)
    ledgers.remove(ledger, second)
    for call in (
        lambda: ledgers.read(ledger),
        lambda: ledgers.write(ledger, METADATA, second),
        lambda: ledgers.remove(ledger),
    ):
        with pytest.raises(LedgerNotFound):
            call()
    assert list(ledgers.ledgers(None)) == []


def test_a_ledger_is_created_once(ledgers: LedgerManager) -> None:
    for ledger in (LedgerId(0, 5), LedgerId(7, 5)):
        version = ledgers.create(ledger, METADATA)
        with pytest.raises(LedgerExists):
            ledgers.create(ledger, METADATA)
        ledgers.write(ledger, METADATA, version)
        with pytest.raises(LedgerExists):
            ledgers.create(ledger, METADATA)


def test_create_with_lost_answer_is_recognised_by_its_token(ledgers: LedgerManager) -> None:
    ours = METADATA._replace(c_token=123)
    version = ledgers.create(LedgerId(0, 5), ours)
    assert ledgers.create(LedgerId(0, 5), ours) == version
    with pytest.raises(LedgerExists):
        ledgers.create(LedgerId(0, 5), ours._replace(c_token=124))


def test_the_versions_1_and_2_are_kept_and_have_no_token(ledgers: LedgerManager) -> None:
    second = METADATA._replace(format_version=2)
    version = ledgers.create(LedgerId(0, 2), second)
    assert ledgers.read(LedgerId(0, 2)).metadata == second
    with pytest.raises(LedgerExists):
        ledgers.create(LedgerId(0, 2), second)
    ledgers.write(LedgerId(0, 2), second._replace(state=LedgerState.IN_RECOVERY), version)
    assert ledgers.read(LedgerId(0, 2)).metadata.format_version == 2


def test_a_stored_ctime_wins_over_the_stores(ledgers: LedgerManager) -> None:
    ledgers.create(LedgerId(0, 5), METADATA._replace(ctime_ms=1_600_000_000_123))
    assert ledgers.read(LedgerId(0, 5)).ctime_ms == 1_600_000_000_123


def test_too_large_ids_of_scope_0_are_refused_on_create_and_not_found_else(ledgers: LedgerManager) -> None:
    ledger = LedgerId(0, 1 << 63)
    with pytest.raises(UsageError):
        ledgers.create(ledger, METADATA)
    for call in (lambda: ledgers.read(ledger), lambda: ledgers.remove(ledger)):
        with pytest.raises(LedgerNotFound):
            call()


def test_ledgers_come_in_ascending_order_by_scope(ledgers: LedgerManager, ids: list[LedgerId]) -> None:
    create_all(ledgers, ids[::2] + ids[1::2])
    assert list(ledgers.ledgers(None)) == ids
    assert list(ledgers.ledgers()) == [ledger for ledger in ids if ledger.scope_id == 0]
    for scope_id in (0, 1, 7, 8, 1 << 63, U64_MAX):
        assert list(ledgers.ledgers(scope_id)) == [ledger for ledger in ids if ledger.scope_id == scope_id]
    assert list(ledgers.scopes()) == [0, 1, 7, 1 << 63, U64_MAX]


def test_listing_resumes_after_any_id(ledgers: LedgerManager, ids: list[LedgerId]) -> None:
    create_all(ledgers, ids)
    between = [LedgerId.from_value(min(ledger.value + 1, (1 << 128) - 1)) for ledger in ids]
    for after in [*ids, *between, LedgerId(0, 1 << 63), LedgerId(0, U64_MAX), LedgerId(3, 3)]:
        assert list(ledgers.ledgers(None, after)) == [ledger for ledger in ids if ledger > after]
        for scope_id in (0, 7):
            expected = [ledger for ledger in ids if ledger > after and ledger.scope_id == scope_id]
            assert list(ledgers.ledgers(scope_id, after)) == expected


def test_emptied_scope_vanishes_and_can_be_filled_again(ledgers: LedgerManager) -> None:
    create_all(ledgers, [LedgerId(7, 1), LedgerId(8, 1)])
    ledgers.remove(LedgerId(7, 1))
    assert list(ledgers.scopes()) == [8]
    ledgers.remove(LedgerId(8, 1))
    assert list(ledgers.scopes()) == []
    assert ledgers.scopes_state() == "ours"
    ledgers.create(LedgerId(7, 1), METADATA)
    assert list(ledgers.ledgers(None)) == [LedgerId(7, 1)]


def test_listing_has_every_ledger_that_exists_throughout(cluster_uri: str) -> None:
    with open_cluster(cluster_uri, create=True) as cluster, open_cluster(cluster_uri) as other:
        bases = (0, 20_000, 1 << 33)
        stable = [LedgerId(scope, base + n) for scope in (0, 7) for base in bases for n in range(0, 60, 2)]
        create_all(cluster.ledgers, stable)
        stop = threading.Event()
        problems: list[BaseException] = []

        def churn() -> None:
            try:
                while not stop.is_set():
                    for scope in (0, 7):
                        for base in (0, 20_000, 30_000, 1 << 33, (1 << 33) + 50_000):
                            ledger = LedgerId(scope, base + 1)
                            other.ledgers.create(ledger, METADATA)
                            other.ledgers.remove(ledger)
            except BaseException as error:  # noqa: BLE001 - raised below
                problems.append(error)

        churner = threading.Thread(target=churn)
        churner.start()
        try:
            for _ in range(30):
                listed = list(cluster.ledgers.ledgers(None))
                assert listed == sorted(set(listed))
                assert set(stable) <= set(listed)
        finally:
            stop.set()
            churner.join()
        assert problems == []


def test_many_creators_share_one_store(cluster_uri: str) -> None:
    with open_cluster(cluster_uri, create=True) as first, open_cluster(cluster_uri) as second:
        made: list[LedgerId] = []
        problems: list[BaseException] = []

        def create(manager: LedgerManager, scope_id: int) -> None:
            try:
                for _ in range(25):
                    ledger = manager.new_ledger_id(scope_id)
                    manager.create(ledger, METADATA)
                    made.append(ledger)
            except BaseException as error:  # noqa: BLE001 - raised below
                problems.append(error)

        threads = [
            threading.Thread(target=create, args=(cluster.ledgers, scope_id))
            for cluster in (first, second)
            for scope_id in (0, 7, U64_MAX)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert problems == []
        assert len(made) == 150
        assert list(first.ledgers.ledgers(None)) == sorted(made)


def test_generated_since_finds_the_ledgers_created_since(ledgers: LedgerManager) -> None:
    def create() -> LedgerId:
        ledger = ledgers.new_ledger_id()
        ledgers.create(ledger, METADATA)
        return ledger

    empty = ledgers.generator_state()
    before = [create() for _ in range(3)]
    state = ledgers.generator_state()
    assert list(ledgers.generated_since(state)) == []
    since = [create() for _ in range(130)]
    ledgers.new_ledger_id()  # Without a ledger.
    found = list(ledgers.generated_since(state))
    assert found == sorted(found)
    assert set(since) <= set(found)
    assert set(found).isdisjoint(before)
    assert {*before, *since} <= set(ledgers.generated_since(empty))


def test_read_many_keeps_order_with_errors_in_place(ledgers: LedgerManager, ids: list[LedgerId]) -> None:
    create_all(ledgers, ids)
    broken = LedgerId(7, 500)
    version = ledgers.create(broken, METADATA)
    ledgers.store.put(ledgers.path(broken), b"BookieMetadataFormatVersion\t3\nnonsense", version)
    asked = [LedgerId(0, U64_MAX), *ids[:5], LedgerId(0, 123), broken, *ids[5:], LedgerId(9, 9), LedgerId(0, 1 << 63)]
    found = list(ledgers.read_many(iter(asked)))
    assert [ledger for ledger, _ in found] == asked
    for ledger, answer in found:
        if ledger in ids:
            assert isinstance(answer, VersionedMetadata)
            assert answer.metadata._replace(c_token=None) == METADATA
        else:
            assert isinstance(answer, Corrupt if ledger == broken else LedgerNotFound)


def test_damaged_metadata_is_one_clear_error_and_stays_listed(ledgers: LedgerManager) -> None:
    create_all(ledgers, [LedgerId(0, 1), LedgerId(0, 2), LedgerId(7, 3)])
    for ledger in (LedgerId(0, 2), LedgerId(7, 3)):
        ledgers.store.put(ledgers.path(ledger), b"\x00\xff damaged", None)
        with pytest.raises(Corrupt) as caught:
            ledgers.read(ledger)
        assert f"ledger {ledger} " in str(caught.value)
        assert ledgers.path(ledger) in str(caught.value)
        with pytest.raises(LedgerExists):
            ledgers.create(ledger, METADATA)
    assert list(ledgers.ledgers(None)) == [LedgerId(0, 1), LedgerId(0, 2), LedgerId(7, 3)]
    ledgers.remove(LedgerId(0, 2))
    assert list(ledgers.ledgers()) == [LedgerId(0, 1)]


def test_watch_reports_each_change_and_the_removal(cluster_uri: str) -> None:
    with open_cluster(cluster_uri, create=True) as cluster, open_cluster(cluster_uri) as other:
        ledger = LedgerId(7, 5)
        version = cluster.ledgers.create(ledger, METADATA)
        told: list[VersionedMetadata | BkctlError] = []
        heard = threading.Condition()

        def hear(found: VersionedMetadata | BkctlError) -> None:
            with heard:
                told.append(found)
                heard.notify()

        def wait_for_count(count: int) -> None:
            with heard:
                assert heard.wait_for(lambda: len(told) >= count, timeout=LIMIT_S)

        cancel = cluster.ledgers.watch(ledger, hear)
        assert [found.version for found in told if isinstance(found, VersionedMetadata)] == [version]
        other.ledgers.write(ledger, METADATA._replace(state=LedgerState.IN_RECOVERY), version)
        wait_for_count(2)
        other.ledgers.remove(ledger)
        wait_for_count(3)
        assert isinstance(told[1], VersionedMetadata)
        assert told[1].metadata.state is LedgerState.IN_RECOVERY
        assert isinstance(told[2], LedgerNotFound)
        cancel()
        assert len(told) == 3


def test_listing_streams(ledgers: LedgerManager) -> None:
    """The first ids come without the rest of the tree being read: taking some leaves no request open behind it."""
    create_all(ledgers, [LedgerId(scope, n * 10_000) for scope in (0, 7) for n in range(40)])
    listing: Iterator[LedgerId] = ledgers.ledgers(None)
    assert list(islice(listing, 3)) == [LedgerId(0, 0), LedgerId(0, 10_000), LedgerId(0, 20_000)]
    for n in range(40):
        ledgers.remove(LedgerId(7, n * 10_000))
    rest = list(listing)
    if isinstance(ledgers, HBaseLedgerManager):  # It reads one page of each bucket ahead.
        rest = [ledger for ledger in rest if not ledger.is_scoped]
    assert rest == [LedgerId(0, n * 10_000) for n in range(3, 40)]


def test_foreign_names_are_skipped_in_listings(ledgers: LedgerManager) -> None:
    create_all(ledgers, [LedgerId(0, 5), LedgerId(0, 1 << 33), LedgerId(7, 5)])
    for path in (
        "underreplication/ledgers/0000/0000/0000/0005/urL0000000005",
        "00/0000/X0007",
        "00/0000/L07",
        "00/00a0/L0007",
        "000/0000/0000/0000/Labcd",
        "0000/0000/L0007",
        "scopes/0000/00000000000G/0000/0000/0000/L0001",
        "scopes/0000/000000000007/0000/0000/0000/M0001",
        "L123",
        "Lxyz",
        "ledgers/0000000000000000000000000000000",
        "ledgers/0000000000000007g",
        "ledgers/zz",
    ):
        if isinstance(ledgers, HBaseLedgerManager) and path.startswith("ledgers/"):  # All rows are ledgers.
            with pytest.raises(UsageError):
                ledgers.store.put(path, b"", NEW)
        else:
            ledgers.store.put(path, b"", NEW)
    assert list(ledgers.ledgers(None)) == [LedgerId(0, 5), LedgerId(0, 1 << 33), LedgerId(7, 5)]
    assert list(ledgers.scopes()) == [0, 7]
