"""`bookkeeper.metadata`: every ledger once, from every kind of store and from exports; damage; no passwords."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support import servers
from support.source_rows import Planned, rows_of

from bkctl.errors import Corrupt, CorruptRecord, LedgerNotFound, UsageError
from bkctl.formats.entry import DigestType
from bkctl.formats.metadata import Fragment, LedgerMetadata, LedgerState
from bkctl.ids import U64_MAX, LedgerId
from bkctl.metadata import ledger_columns
from bkctl.metadata.admin.dump.sources import ClusterSource, export_to_file
from bkctl.metadata.cluster import Cluster, open_cluster
from bkctl.spark.sources.columns import ledger_values
from bkctl.spark.sources.filters import LEDGER_COLUMNS
from bkctl.spark.sources.metadata import COLUMNS, LedgerIds, MetadataSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

import itertools

from pyspark.sql.datasource import EqualTo, In, StringStartsWith

PASSWORD = b"hunter2 and more"
#: Columns of plain types.
PLAIN = ",".join((*LEDGER_COLUMNS, "state", "length", "lastEntryId"))
IDS = [
    *(LedgerId(0, number) for number in (0, 1, 5, 2**31 - 1, 2**31, 2**62, 2**63 - 2)),
    *(LedgerId(7, number) for number in (0, 1, 2**63, U64_MAX)),
    *(LedgerId(scope, 5) for scope in (8, 2**63, U64_MAX)),
]
PULSAR = {
    "application": b"pulsar", "component": b"managed-ledger", "pulsar/managed-ledger": b"t/n/persistent/topic",
    "binary": b"\x00\xff",
}  # fmt: skip


def metadata_of(ledger: LedgerId) -> LedgerMetadata:
    made = LedgerMetadata(
        ensemble_size=2, write_quorum_size=2, ack_quorum_size=1, digest_type=DigestType.HMAC, password=PASSWORD,
        ensembles=(Fragment(0, ("a:1", "b:1")), Fragment(4, ("c:1", "b:1"))),
        custom_metadata=PULSAR if ledger.ledger_id % 2 else {},
    )  # fmt: skip
    if ledger.ledger_id % 2:
        return made._replace(state=LedgerState.CLOSED, last_entry_id=9, length=ledger.ledger_id % 1000)
    return made


def fill(cluster: Cluster) -> None:
    for ledger in IDS:
        cluster.ledgers.create(ledger, metadata_of(ledger))


@pytest.fixture
def sqlite(tmp_path: Path) -> Iterator[Cluster]:
    with open_cluster(f"sqlite://{tmp_path / 'metadata.db'}", create=True) as cluster:
        fill(cluster)
        yield cluster


def names(rows: list[dict[str, Any]]) -> list[str]:
    return [row["ledgerQualifiedName"] for row in rows]


def check_ranges(uri: str) -> None:
    """Every ledger comes once, in order, whatever the ranges; and ranges are found again by scope and by name."""
    plan = Planned(MetadataSource, metadataUri=uri, columns=PLAIN, ledgersPerPartition=2)
    assert len(plan.parts) > 3
    ends = [tuple(part.value) for part in plan.parts if isinstance(part.value, LedgerIds)]
    assert all(one[1] < other[0] for one, other in itertools.pairwise(ends))
    rows = plan.rows()
    assert names(rows) == [ledger.qualified_name for ledger in IDS]
    assert [row["length"] for row in rows] == [metadata_of(ledger).length for ledger in IDS]
    scoped = rows_of(MetadataSource, metadataUri=uri, columns=PLAIN, ledgerScopeId=7, ledgersPerPartition=3)
    assert names(scoped) == [ledger.qualified_name for ledger in IDS if ledger.scope_id == 7]
    some = rows_of(
        MetadataSource, [In(("ledgerScopeId",), (7, 8, 9)), EqualTo(("ledgerId",), 5)],
        metadataUri=uri, columns=PLAIN,
    )  # fmt: skip
    assert names(some) == [LedgerId(8, 5).qualified_name]
    high = rows_of(MetadataSource, [EqualTo(("ledgerId",), 5)], metadataUri=uri, columns="ledgerScopeId")
    assert [row["ledgerScopeId"] for row in high] == [0, 8, 2**63, U64_MAX]


def test_ranges_of_sqlite_hold_every_ledger_once(sqlite: Cluster) -> None:
    check_ranges(sqlite.uri)


@pytest.mark.parametrize("kind", ["hierarchical", "longhierarchical", "longlonghierarchical"])
def test_ranges_of_zookeeper_hold_every_ledger_once(zookeeper: servers.ZooKeeperServer, kind: str) -> None:
    uri = zookeeper.metadata_uri(zookeeper.new_root()).replace("zk+hierarchical", f"zk+{kind}")
    with open_cluster(uri, create=True) as cluster:
        fill(cluster)
    check_ranges(uri)


@pytest.mark.parametrize("kind", ["etcd", "hbase"])
def test_ranges_of_etcd_and_hbase_hold_every_ledger_once(request: pytest.FixtureRequest, kind: str) -> None:
    server: servers.EtcdServer | servers.HBaseServer = request.getfixturevalue(kind)
    uri = server.metadata_uri(server.new_root())
    with open_cluster(uri, create=True) as cluster:
        fill(cluster)
    check_ranges(uri)


def test_ledgers_changed_between_plan_and_read(sqlite: Cluster) -> None:
    plan = Planned(MetadataSource, metadataUri=sqlite.uri, columns=PLAIN, ledgersPerPartition=2)
    sqlite.ledgers.remove(LedgerId(7, 1))
    sqlite.ledgers.create(LedgerId(0, 3), metadata_of(LedgerId(0, 3)))
    there = sorted({*IDS, LedgerId(0, 3)} - {LedgerId(7, 1)})
    assert names(plan.rows()) == [ledger.qualified_name for ledger in there]


def test_missing_named_ledger_is_an_error(sqlite: Cluster) -> None:
    options = {"metadataUri": sqlite.uri, "columns": PLAIN}
    assert names(rows_of(MetadataSource, ledger="7:1,5", **options)) == [
        LedgerId(0, 5).qualified_name, LedgerId(7, 1).qualified_name
    ]  # fmt: skip
    with pytest.raises(LedgerNotFound):
        rows_of(MetadataSource, ledger="7:9", **options)
    (row,) = rows_of(MetadataSource, ledger="7:9", mode="permissive", **options)
    assert (row["ledgerId"], row["state"], row["damage"]["file"]) == (9, None, None)
    assert "No ledger" in row["damage"]["reason"]
    assert rows_of(MetadataSource, [EqualTo(("ledgerQualifiedName",), LedgerId(7, 9).qualified_name)], **options) == []
    assert rows_of(MetadataSource, ledgerScopeId=99, **options) == []
    rest = StringStartsWith(("state",), "OP")
    assert Planned(MetadataSource, [rest], **options).left == [rest]


def test_damaged_metadata_is_an_error_or_row(sqlite: Cluster) -> None:
    path = sqlite.ledgers.path(LedgerId(7, 0))
    sqlite.store.put(path, b"BookieMetadataFormatVersion\t3\nrubbish", None)
    with pytest.raises(Corrupt):
        rows_of(MetadataSource, metadataUri=sqlite.uri, columns=PLAIN)
    rows = rows_of(MetadataSource, metadataUri=sqlite.uri, columns=PLAIN, mode="permissive")
    assert names(rows) == [ledger.qualified_name for ledger in IDS]
    (bad,) = [row for row in rows if row["damage"] is not None]
    assert (bad["ledgerScopeId"], bad["ledgerId"], bad["state"]) == (7, 0, None)


@pytest.fixture
def export(sqlite: Cluster, tmp_path: Path) -> Path:
    path = tmp_path / "metadata.ndjson"
    export_to_file(ClusterSource(sqlite), path)
    return path


@pytest.mark.parametrize("size", ["1", "900", "32MiB"])
def test_export_has_the_rows_of_its_store(sqlite: Cluster, export: Path, size: str) -> None:
    plan = Planned(MetadataSource, path=export, columns=PLAIN, maxPartitionBytes=size)
    assert (len(plan.parts) > 5) == (size == "1") or size == "900"
    assert plan.rows() == rows_of(MetadataSource, metadataUri=sqlite.uri, columns=PLAIN)
    scoped = rows_of(MetadataSource, path=export, columns=PLAIN, ledgerScopeId=7, maxPartitionBytes=size)
    assert names(scoped) == [ledger.qualified_name for ledger in IDS if ledger.scope_id == 7]


@pytest.mark.parametrize("damage", ["flip", "cut", "cut in a line", "without its end", "more behind"])
def test_damaged_export_is_an_error_or_row(export: Path, damage: str) -> None:
    data = export.read_bytes()
    lines = data.splitlines(keepends=True)
    at = len(data) - len(lines[-1])
    target = lines[-3].index(b'"value":"') + 12
    broken = {
        "flip": b"".join([*lines[:-3], lines[-3][:target] + b"!" + lines[-3][target + 1 :], *lines[-2:]]),
        "cut": b"".join(lines[:-4]),
        "cut in a line": data[: at - 20],
        "without its end": data[:at],
        "more behind": data + lines[-2],
    }[damage]
    export.write_bytes(broken)
    with pytest.raises(CorruptRecord, match=str(export)):
        rows_of(MetadataSource, path=export, columns=PLAIN)
    rows = rows_of(MetadataSource, path=export, columns=PLAIN, mode="permissive", maxPartitionBytes=500)
    good = [row for row in rows if row["damage"] is None]
    bad = [row["damage"] for row in rows if row["damage"] is not None]
    lost = {"flip": 1, "cut": 3, "cut in a line": 1, "without its end": 0, "more behind": -1}[damage]
    assert len(good) == len(IDS) - lost
    assert bad
    assert all(each["file"] == str(export) and 0 < each["offset"] <= len(broken) and each["reason"] for each in bad)


def test_damage_without_ledger_is_kept_by_options_and_dropped_by_filters(spark: SparkSession, export: Path) -> None:
    lines = export.read_bytes().splitlines(keepends=True)
    at = next(at for at, line in enumerate(lines) if b'"kind":"ledger"' in line)
    lines[at] = lines[at].replace(b'"value":"', b'"value":"!', 1)
    export.write_bytes(b"".join(lines))
    chosen = EqualTo(("ledgerScopeId",), 7)
    assert Planned(MetadataSource, [chosen], path=export, columns=PLAIN, mode="permissive").left == [chosen]
    read = spark.read.format("bookkeeper.metadata").options(mode="permissive", columns="ledgerScopeId,state")
    filtered = read.load(str(export)).filter("ledgerScopeId = 7").collect()
    assert {(row.ledgerScopeId, row.damage) for row in filtered} == {(7, None)}
    by_option = read.option("ledgerScopeId", "7").load(str(export)).collect()
    good = [row for row in by_option if row.damage is None]
    assert [row.ledgerScopeId for row in good] == [row.ledgerScopeId for row in filtered]
    assert {row.ledgerScopeId for row in by_option if row.damage is not None} == {None}


def test_export_changed_after_plan_fails_the_task(export: Path) -> None:
    plan = Planned(MetadataSource, path=export, columns=PLAIN, maxPartitionBytes=500)
    lines = export.read_bytes().splitlines(keepends=True)
    export.write_bytes(b"".join([*lines[:2], *lines[3:]]))
    with pytest.raises(CorruptRecord):
        plan.rows()


def test_exactly_one_of_uri_and_path_is_required() -> None:
    for options in ({}, {"metadataUri": "sqlite:///x", "path": "y"}):
        with pytest.raises(UsageError, match="metadataUri"):
            MetadataSource(options)


def test_all_columns_through_spark(spark: SparkSession, sqlite: Cluster, export: Path) -> None:
    live = spark.read.format("bookkeeper.metadata").options(metadataUri=sqlite.uri, ledgersPerPartition="4").load()
    assert live.columns == list(COLUMNS)
    rows = live.orderBy("ledgerQualifiedName").collect()
    for row, ledger in zip(rows, IDS, strict=True):
        wanted = ledger_columns.LEDGER_COLUMNS.object(ledger_columns.ledger_row(ledger, sqlite.ledgers.read(ledger)))
        found = row.asDict(recursive=True)
        assert found["customMetadata"] == dict(metadata_of(ledger).custom_metadata)
        assert {str(each["firstEntryId"]): each["bookies"] for each in found["ensembles"]} == wanted["ensembles"]
        assert found["pulsar"] == wanted.get("pulsar")
        assert found["ctime"].isoformat(timespec="milliseconds") + "Z" == wanted["ctime"]
        assert PASSWORD.decode() not in str(found)
        others = set(COLUMNS) - {"customMetadata", "ensembles", "pulsar", "ctime"}
        assert {name: found[name] for name in others} == {
            **{name: wanted[name] for name in others},
            **ledger_values(ledger),
        }
    offline = spark.read.format("bookkeeper.metadata").load(str(export))
    assert offline.orderBy("ledgerQualifiedName").collect() == rows
    assert live.filter("ledgerScopeId = 7 and state = 'CLOSED'").count() == 2
