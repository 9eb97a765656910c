"""`bookkeeper.ledger` as a table: every entry once, whatever the partitions; filters, columns, what cannot be read."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support import servers
from support.source_rows import Planned, rows_of

from bkctl.client.reader import LedgerAccess, LedgerEntry
from bkctl.errors import BkctlError, EntryNotFound, LedgerNotFound, UsageError
from bkctl.formats.entry import DigestType
from bkctl.ids import LedgerId
from bkctl.spark.sources import ledgers as ledger_source
from bkctl.spark.sources.columns import ledger_values
from bkctl.spark.sources.ledger_source import LedgerSource
from bkctl.spark.sources.ledgers import COLUMNS, EntryRange, cut

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from support.live_ledgers import Live

from pyspark.sql.datasource import EqualTo, GreaterThanOrEqual, In, LessThan, StringStartsWith

SCOPE = 0x1ED6E5


@pytest.fixture(scope="module")
def ledgers(live: Live) -> dict[LedgerId, list[bytes]]:
    """Ledgers of one scope and their entries; the last is open, and has one more, unconfirmed entry."""
    contents = {
        LedgerId(SCOPE, 1): [b"entry %d" % number for number in range(25)],
        LedgerId(SCOPE, 2): [],
        LedgerId(SCOPE, 2**64 - 1): [b"", b"\x00\xff" * 300_000, b"x" * 5, b"y" * 3_000_000, b"z" * 5_000_000],
    }
    for ledger, payloads in contents.items():
        live.write(payloads, ledger, password=b"a password", digest_type=DigestType.HMAC, custom_metadata={"k": b"v"})
    growing = live.open(LedgerId(SCOPE, 3), copies=3)
    growing.add([b"open %d" % number for number in range(4)])
    growing.add([b"not confirmed"], confirm=False)
    contents[growing.ledger] = [b"open %d" % number for number in range(4)]
    return contents


def expected(ledgers: dict[LedgerId, list[bytes]]) -> list[tuple[str, int, bytes]]:
    return [
        (ledger.qualified_name, entry_id, payload)
        for ledger, payloads in sorted(ledgers.items())
        for entry_id, payload in enumerate(payloads)
    ]


def found(rows: list[dict[str, Any]]) -> list[tuple[str, int, bytes]]:
    return [(row["ledgerQualifiedName"], row["entryId"], row["payload"]) for row in rows]


@pytest.mark.parametrize(
    "options", [{}, {"entriesPerPartition": 7}, {"maxPartitionBytes": "1KiB"}, {"entriesPerPartition": 1}]
)
def test_every_confirmed_entry_is_read_once(
    live: Live, ledgers: dict[LedgerId, list[bytes]], options: dict[str, Any]
) -> None:
    plan = Planned(LedgerSource, **live.options, ledgerScopeId=SCOPE, **options)
    assert found(plan.rows()) == expected(ledgers)
    if "entriesPerPartition" in options:
        count = options["entriesPerPartition"]
        assert all(sum(each.last - each.first + 1 for each in part.ranges) <= count for part in plan.parts)
        assert len(plan.parts) == -(-len(expected(ledgers)) // count)


def test_rows_match_ledger_read(live: Live, ledgers: dict[LedgerId, list[bytes]]) -> None:
    ledger = LedgerId(SCOPE, 1)
    rows = rows_of(LedgerSource, **live.options, ledger=f"{ledger},{LedgerId(SCOPE, 3).uuid}")
    assert list(rows[0]) == list(COLUMNS)
    assert [row["ledgerId"] for row in rows] == [1] * 25 + [3] * 4
    first = {name: rows[24][name] for name in COLUMNS if name != "lastAddConfirmed"}
    assert first == {
        **ledger_values(ledger), "entryId": 24, "length": sum(map(len, ledgers[ledger])), "size": 8, "formatVersion": 2,
        "payload": b"entry 24",
    }  # fmt: skip
    assert all(-1 <= row["lastAddConfirmed"] < row["entryId"] for row in rows)


def test_filters_select_entries(live: Live, ledgers: dict[LedgerId, list[bytes]]) -> None:
    name = LedgerId(SCOPE, 1).qualified_name
    scope = EqualTo(("ledgerScopeId",), SCOPE)
    plan = Planned(
        LedgerSource,
        [scope, EqualTo(("ledgerId",), 1), GreaterThanOrEqual(("entryId",), 3), LessThan(("entryId",), 6)],
        **live.options,
    )
    assert (plan.left, [part.ranges for part in plan.parts]) == ([], [[EntryRange(LedgerId(SCOPE, 1).value, 3, 5)]])
    assert [row["entryId"] for row in plan.rows()] == [3, 4, 5]
    plan = Planned(
        LedgerSource, [EqualTo(("ledgerQualifiedName",), name), In(("entryId",), (1, 2, 9, 24, 25, -1))], **live.options
    )
    assert [(each.first, each.last) for part in plan.parts for each in part.ranges] == [(1, 2), (9, 9), (24, 24)]
    assert [row["entryId"] for row in plan.rows()] == [1, 2, 9, 24]
    rest = StringStartsWith(("ledgerQualifiedName",), "0")
    assert Planned(LedgerSource, [scope, rest], **live.options).left == [rest]
    for nothing in (EqualTo(("ledgerId",), -1), EqualTo(("ledgerId",), 77), LessThan(("entryId",), 0)):
        assert rows_of(LedgerSource, [scope, nothing], **live.options) == []
    assert rows_of(LedgerSource, **live.options, ledgerScopeId=SCOPE, customMetadata="k=other") == []
    some = rows_of(LedgerSource, **live.options, ledgerScopeId=SCOPE, customMetadata="k=v", columns="ledgerId")
    assert some == [{"ledgerId": 1}] * 25 + [{"ledgerId": 2**64 - 1}] * 5


def test_missing_ledgers_and_entries_are_reported(live: Live, tmp_path: Path) -> None:
    real = live.write([b"0", b"1", b"2"], scope_id=SCOPE + 1)
    cluster = live.client().cluster
    metadata = cluster.ledgers.read(real).metadata
    # Its metadata promises five entries, and its bookies have three of them.
    beheaded, missing = LedgerId(SCOPE + 1, 5), LedgerId(SCOPE + 1, 6)
    cluster.ledgers.remove(real)
    cluster.ledgers.create(real, metadata._replace(last_entry_id=4, length=5))
    cluster.ledgers.create(beheaded, metadata._replace(c_token=None))
    options = {**live.options, "ledgerScopeId": SCOPE + 1}
    with pytest.raises((EntryNotFound, LedgerNotFound)):
        rows_of(LedgerSource, **options)
    rows = rows_of(LedgerSource, **options, mode="permissive", columns="ledgerQualifiedName,entryId,payload")
    good = [row for row in rows if row["damage"] is None]
    assert found(good) == [(real.qualified_name, number, b"%d" % number) for number in range(3)]
    bad = [row for row in rows if row["damage"] is not None]
    assert {(row["ledgerQualifiedName"], row["entryId"]) for row in bad} == {
        (real.qualified_name, 3), (real.qualified_name, 4), *((beheaded.qualified_name, number) for number in range(3))
    }  # fmt: skip
    assert all(row["damage"]["reason"] and row["payload"] is None for row in bad)
    assert "3" in next(row["damage"]["reason"] for row in bad if row["entryId"] == 3)

    with pytest.raises(LedgerNotFound):
        rows_of(LedgerSource, **live.options, ledger=missing)
    (row,) = rows_of(LedgerSource, **live.options, ledger=missing, mode="permissive")
    assert (row["ledgerId"], row["entryId"]) == (6, None)
    assert "No ledger" in row["damage"]["reason"]
    (tmp_path / "names").write_text(f"{real}\n{missing}\n")
    with pytest.raises(LedgerNotFound):
        rows_of(LedgerSource, **live.options, ledgersFile=tmp_path / "names")
    assert rows_of(LedgerSource, [EqualTo(("ledgerQualifiedName",), missing.qualified_name)], **live.options) == []


def test_ledger_deleted_after_plan_fails_the_task(live: Live) -> None:
    ledger = live.write([b"0", b"1"], scope_id=SCOPE + 2)
    plan = Planned(LedgerSource, **live.options, ledgerScopeId=SCOPE + 2)
    live.client().cluster.ledgers.remove(ledger)
    with pytest.raises(LedgerNotFound):
        plan.rows()


def test_deleted_ledgers_are_skipped_on_request(live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, kept = (live.write([b"0", b"1"], LedgerId(SCOPE + 3, number)) for number in (1, 2, 3))
    cluster = live.client().cluster
    (tmp_path / "names").write_text(f"{first}\n{second}\n{kept}\n{LedgerId(SCOPE + 3, 4)}\n")
    given = {**live.options, "ledgersFile": tmp_path / "names"}
    plan = Planned(LedgerSource, **given, failOnDataLoss="false")
    cluster.ledgers.remove(first)

    async def deleted_while_read(access: LedgerAccess, *arguments: Any) -> tuple[list[LedgerEntry], BkctlError | None]:
        taken, error = await take(access, *arguments)
        if access.ledger == second:
            cluster.ledgers.remove(second)
            return taken[:1], LedgerNotFound("A bookie has collected it")
        return taken, error

    take = ledger_source._take
    monkeypatch.setattr(ledger_source, "_take", deleted_while_read)
    assert found(plan.rows()) == [
        (second.qualified_name, 0, b"0"), (kept.qualified_name, 0, b"0"), (kept.qualified_name, 1, b"1")
    ]  # fmt: skip
    with pytest.raises(LedgerNotFound):
        Planned(LedgerSource, **given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "metadataUri"),
        ({"metadataUri": "etcd://root:hunter2@127.0.0.1:1/x"}, "password in it"),
        ({"metadataUri": "sqlite:///x", "customMetadata": "k"}, "KEY=VALUE"),
        ({"metadataUri": "sqlite:///x", "tlsCert": "x"}, "tlsCa"),
        ({"metadataUri": "sqlite:///x", "bookieAddress": "x"}, "ID=HOST:PORT"),
        ({"metadataUri": "sqlite:///x", "path": "x"}, "no path"),
        ({"metadataUri": "sqlite:///x", "ledgers": "x"}, "ledger"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        LedgerSource(options)
    assert "hunter2" not in str(caught.value)


def test_partitions_hold_each_entry_once() -> None:
    spans = [
        (EntryRange(1, 0, 9), 100),
        (EntryRange(2, 5, 5), 10_000),
        (EntryRange(3, 0, 99), 0),
        (EntryRange(4, 3, 2), 1),
    ]
    for size, count in ((1, 1), (1000, 3), (1000, 1000), (1 << 40, 7), (1 << 40, 1 << 40)):
        parts = list(cut(spans, size, count))
        entries = [(each.ledger, at) for part in parts for each in part for at in range(each.first, each.last + 1)]
        assert entries == [(1, at) for at in range(10)] + [(2, 5)] + [(3, at) for at in range(100)]
        assert all(sum(each.last - each.first + 1 for each in part) <= max(count, 1) for part in parts)
    assert len(parts) == 1


def test_through_spark_with_filters_in_sql(
    spark: SparkSession, live: Live, ledgers: dict[LedgerId, list[bytes]]
) -> None:
    frame = (
        spark.read.format("bookkeeper.ledger").options(**live.options, entriesPerPartition="10", pushdown="true").load()
    )
    frame.createOrReplaceTempView("entries")
    rows = spark.sql(
        f"select ledgerQualifiedName, entryId, payload from entries where ledgerScopeId = {SCOPE} "
        "and entryId >= 2 and entryId < 1000 and size < 100 order by 1, 2"
    )
    assert "entryId >= 2" not in rows._jdf.queryExecution().optimizedPlan().toString()
    assert [tuple(row) for row in rows.collect()] == [
        row for row in expected(ledgers) if row[1] >= 2 and len(row[2]) < 100
    ]


def test_ledgers_of_apache_have_their_entries(
    spark: SparkSession, apache_cluster: servers.ApacheCluster, apache_ledgers: list[dict[str, Any]]
) -> None:
    wanted = {}
    for each in apache_ledgers:
        # A bookie of Apache's that was started again may have forgotten an explicit LAC.
        if not each["deleted"] and each["explicitLac"] is None:
            for entry in each["entries"][: each["lastAddConfirmed"] + 1]:
                wanted[each["ledgerId"], entry["entryId"]] = (entry["size"], entry["length"], entry["sha256"])
    frame = spark.read.format("bookkeeper.ledger").options(
        metadataUri=apache_cluster.metadata_uri, entriesPerPartition="2000", ledger=",".join({key[0] for key in wanted})
    ).load()  # fmt: skip
    rows = frame.selectExpr(
        "string(ledgerId) as ledgerId", "entryId", "size", "length", "sha2(payload, 256) as sha256"
    ).collect()
    assert len(rows) == len(wanted)
    assert {(row.ledgerId, row.entryId): (row.size, row.length, row.sha256) for row in rows} == wanted
    assert hashlib.sha256(b"").hexdigest() in {row.sha256 for row in rows}
