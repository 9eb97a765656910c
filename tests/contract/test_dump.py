"""A cluster's metadata goes into a file, out of it, and from each kind of store to each other one, byte for byte."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bkctl.errors import AlreadyExists, Conflict, Corrupt, NotFound, Unsupported, UsageError
from bkctl.formats.entry import DigestType
from bkctl.formats.metadata import Cookie, Fragment, LedgerMetadata, LedgerState
from bkctl.ids import I64_MAX, U64_MAX, LedgerId
from bkctl.metadata.admin.check import check_metadata, orphans
from bkctl.metadata.admin.dump.importing import import_records, prepare_target
from bkctl.metadata.admin.dump.sources import (
    ClusterSource,
    Difference,
    DumpRecord,
    ExportFile,
    compare,
    export_to_file,
    write_export,
)
from bkctl.metadata.admin.nuke import nuke, plan_nuke
from bkctl.metadata.backends.etcd.etcd_store import EtcdLedgerManager
from bkctl.metadata.cluster import Cluster, init_cluster, new_layout, open_cluster
from bkctl.metadata.store import NEW, delete_if_present
from bkctl.metadata.underreplication import AutoRecoveryState
from bkctl.replication.holdings import check_scopes_known

BOOKIES = ("b0:3181", "b1:3181", "b2:3181")
SHORT_IDS = [0, 5, 2**31 - 2]
LONG_IDS = [2**31 - 1, 2**40 + 3, 2**63 - 2]
SCOPED = [LedgerId(1, 0), LedgerId(7, 2**64 - 1), LedgerId(2**64 - 1, 9)]


def metadata(number: int) -> LedgerMetadata:
    closed = number % 2 == 0
    return LedgerMetadata(
        3, 2, 2, DigestType.CRC32C, b"secret %d" % number, (Fragment(0, BOOKIES), Fragment(4, BOOKIES[::-1])),
        LedgerState.CLOSED if closed else LedgerState.OPEN, 100 if closed else 0, 9 if closed else -1,
        custom_metadata={"application": b"pulsar", "binary": bytes(range(256))},
        format_version=3 if number % 2 else 2,
    )  # fmt: skip


def fill(cluster: Cluster, ledgers: list[LedgerId]) -> None:
    for number, ledger in enumerate(ledgers):
        cluster.ledgers.create(ledger, metadata(number))
    for bookie_id in BOOKIES:
        cluster.cookies.write(bookie_id, Cookie(bookie_id, ("/j",), ("/l",), instance_id=cluster.instance_id()), NEW)
    state = AutoRecoveryState(cluster.store)
    state.marks.add(ledgers[0], BOOKIES[:1], now_ms=1)
    state.marks.add(SCOPED[0], BOOKIES[:2], now_ms=2)
    state.settings.disable()
    state.settings.set_lost_bookie_recovery_delay_s(60)


def ids_of(uri: str) -> list[LedgerId]:
    short_only = uri.startswith("zk+flat")
    default = SHORT_IDS if short_only else SHORT_IDS + LONG_IDS
    return [*(LedgerId(0, each) for each in default), *SCOPED]


def text_of(cluster: Cluster) -> list[DumpRecord]:
    return [record for record in ClusterSource(cluster).records() if record.kind != "sequence"]


def copy(source: Cluster, target: Cluster) -> None:
    dump = ClusterSource(source)
    prepare_target(target, dump)
    assert import_records(dump.records(), target).conflicts == []


@pytest.fixture
def zookeeper_uri(zookeeper: Any) -> Callable[[str], str]:
    return lambda manager: str(zookeeper.metadata_uri(zookeeper.new_root(), manager))


@pytest.mark.parametrize("manager", ["hierarchical", "longhierarchical", "flat"])
def test_copy_through_etcd_hbase_and_sqlite_keeps_every_byte(
    zookeeper_uri: Callable[[str], str], etcd: Any, hbase: Any, tmp_path: Path, manager: str
) -> None:
    source_uri, back_uri = zookeeper_uri(manager), zookeeper_uri(manager)
    with (
        open_cluster(source_uri, create=True) as source,
        open_cluster(etcd.metadata_uri(etcd.new_root())) as etcd_cluster,
        open_cluster(hbase.metadata_uri(hbase.new_root())) as hbase_cluster,
        open_cluster(f"sqlite://{tmp_path}/m.db", create_store=True) as sqlite_cluster,
        open_cluster(back_uri) as back,
    ):
        fill(source, ids_of(source_uri))
        for one, other in pairwise((source, etcd_cluster, hbase_cluster, sqlite_cluster, back)):
            copy(one, other)
        expected = [record._replace(ctime_ms=None) for record in text_of(source)]
        assert [record._replace(ctime_ms=None) for record in text_of(back)] == expected
        assert list(compare(ClusterSource(source).records(), ClusterSource(hbase_cluster).records())) == []
        assert back.instance_id() == source.instance_id()
        assert back.store.get("LAYOUT").value == source.store.get("LAYOUT").value  # type: ignore[union-attr]
        for ledger in ids_of(source_uri):
            path = source.ledgers.path(ledger)
            assert back.store.get(path)[0] == source.store.get(path)[0]  # type: ignore[index]
        taken = {ledger.ledger_id for ledger in ids_of(source_uri) if not ledger.is_scoped}
        assert back.ledgers.new_ledger_id().ledger_id not in taken - set(SHORT_IDS)


@pytest.mark.parametrize(
    "managers",
    [("flat", "hierarchical", "longhierarchical", "flat"), ("longlonghierarchical", "longhierarchical", "null")],
    ids="-".join,
)
def test_copy_changes_the_layout_to_that_of_the_targets_uri(
    zookeeper_uri: Callable[[str], str], managers: tuple[str, ...]
) -> None:
    clusters = [open_cluster(zookeeper_uri(manager)) for manager in managers]
    ledgers = ids_of("zk+flat")
    init_cluster(clusters[0], layout=new_layout(clusters[0].location, long_long=managers[0] == "longlonghierarchical"))
    fill(clusters[0], ledgers)
    taken = clusters[0].ledgers.new_ledger_id()
    for one, other in pairwise(clusters):
        copy(one, other)
        assert list(other.ledgers.ledgers(None)) == ledgers
        assert list(compare(ClusterSource(one).records(), ClusterSource(other).records())) == []
        assert other.ledgers.new_ledger_id() > taken
    names = [cluster.layout().factory_class.removeprefix("org.apache.bookkeeper.meta.") for cluster in clusters]
    expected = {"flat": "Flat", "hierarchical": "Hierarchical", "longlonghierarchical": "LongLongHierarchical"}
    assert names == [f"{expected.get(each, 'LongHierarchical')}LedgerManagerFactory" for each in managers]
    for cluster in clusters:
        cluster.close()


def test_ids_that_the_target_cannot_hold_are_refused_before_a_write(
    zookeeper_uri: Callable[[str], str], tmp_path: Path
) -> None:
    file = tmp_path / "export"
    with (
        open_cluster(f"sqlite://{tmp_path}/m.db", create=True) as source,
        open_cluster(zookeeper_uri("flat")) as flat,
        open_cluster(zookeeper_uri("hierarchical")) as reused,
    ):
        fill(source, [LedgerId(0, each) for each in (5, 10**10 - 1, 10**10, I64_MAX)] + SCOPED)
        export_to_file(ClusterSource(source), file)
        reused.store.put_all([("", b""), ("scopes", b"another cluster")])
        with ExportFile(file) as export:
            for dump in (ClusterSource(source), export):
                for dry_run in (True, False):
                    with pytest.raises(Conflict, match=r"cannot hold 2 of the ledgers, from 10000000000 on"):
                        prepare_target(flat, dump, dry_run=dry_run)
                    with pytest.raises(Conflict, match=rf"cannot hold ledger {SCOPED[0]}: scopes has .* another"):
                        prepare_target(reused, dump, dry_run=dry_run)
        assert flat.store.get("") is None
        assert reused.store.children("") == ["scopes"]
        for ledger_id in (10**10, I64_MAX):
            source.ledgers.remove(LedgerId(0, ledger_id))
        copy(source, flat)
        assert list(flat.ledgers.ledgers(None)) == list(source.ledgers.ledgers(None))


def test_generated_ids_are_not_generated_again_after_import(cluster_uri: str, tmp_path: Path) -> None:
    with (
        open_cluster(cluster_uri, create=True) as source,
        open_cluster(f"sqlite://{tmp_path}/copy.db", create_store=True) as target,
    ):
        counted = -1
        if isinstance(source.ledgers, EtcdLedgerManager):
            source.ledgers._bucket = 125  # so that the buckets come round to the first ones meanwhile
            counted = (1 << 56) - 1
        generated = {source.ledgers.new_ledger_id().ledger_id for _ in range(5)}
        assert len(generated) == 5
        copy(source, target)
        assert target.ledgers.new_ledger_id().ledger_id > max(generated)
        position = source.ledgers.id_position()
        assert position is not None
        assert position > max(generated)
        assert source.ledgers.skip_ids(position + 7)
        later = {source.ledgers.new_ledger_id().ledger_id for _ in range(5)}
        assert min(each & counted for each in later) > max(each & counted for each in generated) + 7


def test_long_ids_follow_generated_short_ids_after_import(zookeeper_uri: Callable[[str], str]) -> None:
    """`idgen-long` without a directory: a generator that stopped between its two steps."""
    with (
        open_cluster(zookeeper_uri("hierarchical"), create=True) as source,
        open_cluster(zookeeper_uri("hierarchical")) as target,
    ):
        source.ledgers.new_ledger_id()
        source.store.put("idgen-long", b"", NEW)
        assert source.ledgers.id_position() == 1 << 32
        copy(source, target)
        taken = target.ledgers.new_ledger_id()
        assert taken >= LedgerId(0, 1 << 32)
        copy(source, target)  # skips no more ids
        assert target.ledgers.new_ledger_id() == LedgerId(0, taken.ledger_id + 1)


def test_sequence_position_survives_the_overflow_of_cversion(zookeeper_uri: Callable[[str], str]) -> None:
    with open_cluster(zookeeper_uri("hierarchical"), create=True) as cluster:
        cluster.store.put("idgen", b"", NEW)
        store: Any = cluster.store
        run = store._connection.run

        def counted(creations: int, children: int) -> Any:
            value, stat = run(store._connection.client.get_async, store._connection.full("idgen"), 20)
            changes = (2 * creations - children + (1 << 31)) % (1 << 32) - (
                1 << 31
            )  # DataNode.copyStat, an int of Java
            return value, stat._replace(cversion=changes, numChildren=children)

        for creations, children in ((0, 0), (5, 2), ((1 << 30) + 7, 1), ((1 << 31) - 1, 0)):
            store._connection.run = lambda *_, at=creations, left=children: counted(at, left)
            assert store.sequence_position("idgen") == creations


def test_import_keeps_a_missing_instance_id(tmp_path: Path) -> None:
    """Bookies' cookies name none either, and would not start where there is one."""
    with (
        open_cluster(f"sqlite://{tmp_path}/a.db", create=True) as source,
        open_cluster(f"sqlite://{tmp_path}/b.db", create_store=True) as target,
    ):
        source.store.delete("INSTANCEID")
        for _ in range(2):
            copy(source, target)
        assert target.store.get("INSTANCEID") is None
        assert target.layout() == source.layout()


@pytest.mark.parametrize("manager", ["flat", "hierarchical"])
def test_of_two_imports_into_one_empty_store_the_slower_is_refused(
    zookeeper_uri: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, manager: str
) -> None:
    uri = zookeeper_uri(manager)
    with (
        open_cluster(f"sqlite://{tmp_path}/a.db", create=True) as first,
        open_cluster(f"sqlite://{tmp_path}/b.db", create=True) as second,
        open_cluster(uri) as target,
        open_cluster(uri) as same,
    ):
        fill(first, [LedgerId(0, 5)])
        fill(second, [LedgerId(0, 6)])

        def init_later(cluster: Cluster, **how: Any) -> bool:
            """Create the cluster after another import has done so."""
            monkeypatch.undo()
            copy(first, same)
            return init_cluster(cluster, **how)

        monkeypatch.setattr("bkctl.metadata.admin.dump.importing.init_cluster", init_later)
        with pytest.raises(Conflict, match=f"is the cluster {first.instance_id()}, not {second.instance_id()}"):
            prepare_target(target, ClusterSource(second))
        assert list(target.ledgers.ledgers()) == [LedgerId(0, 5)]


def test_second_import_finishes_an_interrupted_one(cluster_uri: str, tmp_path: Path) -> None:
    with (
        open_cluster(f"sqlite://{tmp_path}/source.db", create=True) as source,
        open_cluster(cluster_uri, create_store=True) as target,
    ):
        fill(source, ids_of("zk+flat"))
        dump = ClusterSource(source)
        if target.store.get("LAYOUT") is not None:  # the legacy layout: a cluster of its own
            with pytest.raises(Conflict):
                prepare_target(target, dump)
            return
        records = list(dump.records())
        prepare_target(target, dump)
        import_records(records[: len(records) // 2], target)
        prepare_target(target, dump)
        done = import_records(records, target)
        assert done.same.total() >= len(records) // 2 - 1
        assert done.created.total() + done.same.total() == len(records) - 1  # the ids are neither
        assert list(compare(records, ClusterSource(target).records())) == []


def test_nuke_removes_every_node_and_refuses_registered_bookies(cluster_uri: str) -> None:
    from bkctl.formats.metadata import BookieServiceInfo

    with open_cluster(cluster_uri, create=True) as cluster:
        fill(cluster, [LedgerId(0, 5), *SCOPED])
        with open_cluster(cluster_uri) as bookie:
            bookie.bookies.register("b0:3181", BookieServiceInfo())
            with pytest.raises(Conflict, match="registered"):
                nuke(cluster)
        plan = plan_nuke(cluster)
        assert plan[1:] == (1 + len(SCOPED), len(SCOPED), len(BOOKIES), False)
        nuke(cluster)
        assert cluster.store.children("") in (None, [])
        with pytest.raises(NotFound):
            plan_nuke(cluster)


def test_nuke_finishes_after_it_removed_a_directory_of_bookies(cluster_uri: str) -> None:
    with open_cluster(cluster_uri, create=True) as cluster:
        fill(cluster, [LedgerId(0, 5)])
        delete_if_present(cluster.store, cluster.places.read_only)
        assert plan_nuke(cluster).ledger_count == 1
        nuke(cluster)
        assert cluster.store.children("") in (None, [])


def test_nuke_refuses_foreign_nodes_in_the_root(cluster_uri: str) -> None:
    with open_cluster(cluster_uri, create=True) as cluster:
        cluster.store.put("brokers", b"", NEW)
        with pytest.raises(Conflict, match="brokers"):
            nuke(cluster)
        assert cluster.store.get("brokers") is not None


@pytest.mark.parametrize("kind", ["zookeeper", "etcd"])
@pytest.mark.parametrize("name", ["ledgers", "cookies"])
def test_nuke_refuses_a_root_with_another_cluster_in_it(request: pytest.FixtureRequest, kind: str, name: str) -> None:
    server = request.getfixturevalue(kind)
    uri = server.metadata_uri(server.new_root())
    with open_cluster(uri, create=True) as mistaken, open_cluster(f"{uri}/{name}", create=True) as real:
        fill(real, [LedgerId(0, 5)])
        with pytest.raises(Conflict, match=f"do not belong to a cluster: {name}"):
            nuke(mistaken)
        assert [(each.path, each.removable) for each in orphans(mistaken)][-1] == (name, False)
        assert list(real.ledgers.ledgers()) == [LedgerId(0, 5)]
        nuke(real)
        assert mistaken.store.get(mistaken.places.layout) is not None


@pytest.mark.parametrize(
    ("made", "other", "left"),
    [
        ("longhierarchical", "hierarchical", ["000/0000/0000/0000/L0005"]),
        ("hierarchical", "longhierarchical", ["00/0000/L0005"]),
        ("flat", "hierarchical", ["L0000000005"]),
        ("hierarchical", "flat", ["00/0000/L0005", "000/0001/0995/1162/L7779"]),
    ],
)
def test_ledgers_of_another_layout_than_the_stored_one_are_found(
    zookeeper_uri: Callable[[str], str], made: str, other: str, left: list[str]
) -> None:
    with open_cluster(zookeeper_uri("null")) as cluster:
        layouts = [new_layout(cluster.location._replace(manager_type=each)) for each in (made, other)]
        init_cluster(cluster, layout=layouts[0])
        for number in [5, 6, *([LONG_IDS[1]] if made == "hierarchical" else [])]:
            cluster.ledgers.create(LedgerId(0, number), metadata(number))
        assert cluster.ledgers.unlisted() == []
        cluster.store.put("LAYOUT", layouts[1].serialize(), None)
        with open_cluster(cluster.uri) as wrong:
            assert wrong.ledgers.unlisted() == left
            assert [each.split()[3] for each in ClusterSource(wrong).left_out()] == left
            found = [each.path for each in check_metadata(wrong) if each.code == "other-layout"]
            assert found == left
            with pytest.raises(Conflict, match=f"another layout: {left[0]}"):
                plan_nuke(wrong)
            with pytest.raises(Conflict, match=left[0]):
                check_scopes_known(wrong)


@pytest.mark.parametrize("kind", ["sqlite", "etcd", "hbase"])
def test_id_that_no_ledger_of_scope_0_can_have_is_an_invalid_name(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    uri = f"sqlite://{tmp_path}/m.db"
    if kind != "sqlite":
        server = request.getfixturevalue(kind)
        uri = server.metadata_uri(server.new_root())
    with open_cluster(uri, create=True) as cluster:
        fill(cluster, [LedgerId(0, 5), LedgerId(0, I64_MAX), *SCOPED])
        paths = [cluster.ledgers.path(LedgerId(0, number)) for number in (I64_MAX + 1, U64_MAX)]
        for path in paths:
            cluster.store.put(path, metadata(0).serialize(), NEW)
        assert list(cluster.ledgers.ledgers(None)) == [LedgerId(0, 5), LedgerId(0, I64_MAX), *SCOPED]
        assert list(cluster.ledgers.ledgers(0)) == [LedgerId(0, 5), LedgerId(0, I64_MAX)]
        assert [each.path for each in check_metadata(cluster) if each.code == "invalid-name"] == paths
        assert export_to_file(ClusterSource(cluster), tmp_path / "x").counts["ledger"] == 2 + len(SCOPED)


# --- files ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path: Path) -> Any:
    with open_cluster(f"sqlite://{tmp_path}/m.db", create=True) as cluster:
        fill(cluster, [LedgerId(0, 5), *SCOPED])
        yield cluster


def test_an_export_is_read_back_and_hashed(source: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "export"
    exported = export_to_file(ClusterSource(source), path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_size == exported.size_bytes
    with ExportFile(path) as file:
        assert list(file.records()) == list(ClusterSource(source).records())
        assert dict(file.check()) == {kind: count for kind, count in exported.counts.items() if count}
        assert file.header.instance_id == source.instance_id()
    with pytest.raises(AlreadyExists):
        export_to_file(ClusterSource(source), path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="is not a regular file, and would be replaced by one"):
        export_to_file(ClusterSource(source), tmp_path / "pipe", overwrite=True)


def test_every_damage_of_an_export_is_corrupt(source: Cluster, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    write_export(ClusterSource(source), buffer.write)
    data = buffer.getvalue()
    path = tmp_path / "damaged"
    for at in range(0, len(data), 7):
        for damaged in (data[:at], data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]):
            path.write_bytes(damaged)
            with pytest.raises((Corrupt, Unsupported)), ExportFile(path) as file:
                file.check()
    path.write_bytes(data + b"x")
    with pytest.raises(Corrupt), ExportFile(path) as file:
        file.check()


def test_import_refuses_another_cluster(source: Cluster, tmp_path: Path) -> None:
    with open_cluster(f"sqlite://{tmp_path}/other.db", create=True) as other, pytest.raises(Conflict):
        prepare_target(other, ClusterSource(source))


def test_import_reports_or_replaces_different_values(source: Cluster, tmp_path: Path) -> None:
    records = list(ClusterSource(source).records())
    path = source.ledgers.path(LedgerId(0, 5))
    before = source.store.get(path)
    assert before is not None
    source.store.put(path, b"other", before.version)
    assert import_records(records, source).conflicts == ["Ledger 5"]
    assert source.store.get(path)[0] == b"other"  # type: ignore[index]
    assert import_records(records, source, overwrite=True).replaced == {"ledger": 1}
    assert source.store.get(path)[0] == before.value  # type: ignore[index]


def test_differences_name_the_fields(source: Cluster) -> None:
    records = list(ClusterSource(source).records())
    changed = [
        each._replace(value=LedgerMetadata.parse(each.value).serialize().replace(b"secret 0", b"Secret 0"))
        if each.key == LedgerId(0, 5).qualified_name and each.kind == "ledger"
        else each
        for each in records
    ]
    without = [each for each in changed if each.kind != "cookie"]
    found = list(compare(records, without))
    assert [each.what for each in found] == ["onlyInFirst"] * len(BOOKIES) + ["differs"]
    assert found[-1] == Difference("ledger", LedgerId(0, 5).qualified_name, "differs", ("password",))
    json.dumps(found)
