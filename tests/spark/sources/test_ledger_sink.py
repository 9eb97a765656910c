"""The sink of `bookkeeper.ledger`: what counts is named and there, what does not is gone."""

from __future__ import annotations

import base64
import hashlib
import pickle
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support import servers
from support.source_rows import struct_of

from bkctl.errors import AlreadyExists, Unauthorized, UsageError
from bkctl.formats.entry import DigestType
from bkctl.formats.metadata import Fragment, LedgerMetadata
from bkctl.ids import LedgerId
from bkctl.metadata.backends.etcd.etcd_store import EtcdStore
from bkctl.metadata.cluster import open_cluster
from bkctl.spark.sources.ledger_sink import JOB_KEY, LedgerWriter, LedgerWritten
from bkctl.spark.sources.ledger_source import LedgerSource

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from support.live_ledgers import Live

import pyarrow as pa

SCOPE = 0x5111C


def writer(live: Live, *, overwrite: bool = False, kind: str = "binary", **options: object) -> LedgerWriter:
    """A write as the driver plans it."""
    given = {**live.options, "ensembleSize": "2", **{name: str(value) for name, value in options.items()}}
    return LedgerSource(given).writer(struct_of(f"`other` bigint, `payload` {kind}"), overwrite)


def batches(*payloads: bytes | str | None, kind: pa.DataType | None = None) -> Iterator[pa.RecordBatch]:
    """Rows as a task gets them, two a batch."""
    kind = kind or pa.binary()
    yield pa.RecordBatch.from_pydict({"other": pa.array([], pa.int64()), "payload": pa.array([], kind)})
    for at in range(0, len(payloads), 2):
        part = payloads[at : at + 2]
        yield pa.RecordBatch.from_pydict(
            {"other": pa.array([1] * len(part), pa.int64()), "payload": pa.array(part, kind)}
        )


def attempt(planned: LedgerWriter, *payloads: bytes | str | None, **settings: Any) -> LedgerWritten:
    """A task's attempt, with the writer that came over the wire."""
    return pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(planned)).write(batches(*payloads, **settings))))


def ledger_of(written: LedgerWritten) -> LedgerId:
    assert written.ledger is not None
    return LedgerId.from_value(written.ledger)


@pytest.mark.parametrize("scope_id", [0, SCOPE, None])
def test_commit_deletes_ledgers_of_uncounted_attempts(live: Live, tmp_path: Path, scope_id: int | None) -> None:
    scope = {} if scope_id is None else {"ledgerScopeId": scope_id}
    names = tmp_path / "names"
    planned, other = writer(live, names=names, **scope), writer(live, **scope)
    before = live.ledgers()
    lost = attempt(planned, b"0", b"1", b"2")  # Its executor died before the driver heard of it.
    first, empty, second = attempt(planned, b"0", b"1", b"2"), attempt(planned), attempt(planned, b"")
    unrelated = attempt(other, b"x")
    assert len(live.ledgers() - before) == 4
    assert empty.ledger is None
    planned = pickle.loads(pickle.dumps(planned))
    second.partition = 2
    planned.commit([second, first, None, empty])
    made = live.ledgers() - before
    assert made == {ledger_of(first), ledger_of(second), ledger_of(unrelated)}
    assert ledger_of(lost) not in made
    assert [LedgerId.parse(line) for line in names.read_text().splitlines()] == [ledger_of(first), ledger_of(second)]
    assert list(tmp_path.iterdir()) == [names]
    assert [live.read(ledger_of(each)) for each in (first, second)] == [[b"0", b"1", b"2"], [b""]]
    scopes = {ledger.scope_id for ledger in (ledger_of(first), ledger_of(second))}
    assert scopes == {scope_id} if scope_id is not None else (len(scopes) == 1 and 0 not in scopes)
    other.abort([unrelated, None])
    assert live.ledgers() - before == {ledger_of(first), ledger_of(second)}


def test_commit_on_etcd_reads_only_ledgers_created_since(
    etcd: servers.EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = etcd.metadata_uri(etcd.new_root())
    with open_cluster(uri, create=True) as cluster:

        def create(mark: str) -> LedgerId:
            ledger = cluster.ledgers.new_ledger_id()
            metadata = LedgerMetadata(1, 1, 1, DigestType.CRC32C, b"", (Fragment(0, ("bookie-1",)),))
            cluster.ledgers.create(ledger, metadata._replace(custom_metadata={JOB_KEY: mark.encode()}))
            return ledger

        older = [create("older") for _ in range(130)]
        planned = LedgerSource({"metadataUri": uri, "ledgerScopeId": "0"}).writer(struct_of("`payload` binary"), False)
        lost, counted, other = create(planned._mark), create(planned._mark), create("other")
        asked: list[str] = []
        get_many = EtcdStore.get_many

        def get_noted(self: EtcdStore, paths: Iterable[str]) -> Any:
            asked.extend(given := list(paths))
            return get_many(self, given)

        with monkeypatch.context() as patch:
            patch.setattr(EtcdStore, "get_many", get_noted)
            patch.setattr(EtcdStore, "children", None)  # no listing
            planned.commit([LedgerWritten(0, counted.value)])
        assert set(asked) == {cluster.ledgers.path(ledger) for ledger in (lost, other)}
        assert set(cluster.ledgers.ledgers()) == {*older, counted, other}
        planned.abort([])
        assert set(cluster.ledgers.ledgers()) == {*older, other}


def test_ledgers_have_the_requested_settings(live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret").write_text("pass word\n")
    made = attempt(
        writer(
            live, ledgerScopeId=SCOPE + 1, ensembleSize=3, writeQuorumSize=2, ackQuorumSize=1, digestType="HMAC",
            customMetadata="a=b,c=d=e", ledgerPasswordFile=tmp_path / "secret", kind="string",
        ),
        "höre", "", kind=pa.string(),
    )  # fmt: skip
    ledger = ledger_of(made)
    assert live.read(ledger) == ["höre".encode(), b""]
    metadata = live.client().cluster.ledgers.read(ledger).metadata
    assert metadata.is_closed
    sizes = (metadata.ensemble_size, metadata.write_quorum_size, metadata.ack_quorum_size)
    assert (sizes, metadata.digest_type, metadata.password) == ((3, 2, 1), DigestType.HMAC, b"pass word")
    assert {key: value for key, value in metadata.custom_metadata.items() if key != JOB_KEY} == {"a": b"b", "c": b"d=e"}
    client = live.client()
    with pytest.raises(Unauthorized):
        client.run(client.bookkeeper.open_ledger(ledger.ledger_id, ledger_scope_id=ledger.scope_id, password=b""))
    monkeypatch.setenv("LEDGER_SECRET", "other")
    made = attempt(writer(live, ledgerScopeId=SCOPE + 1, ledgerPasswordEnv="LEDGER_SECRET"), b"x")
    assert client.cluster.ledgers.read(ledger_of(made)).metadata.password == b"other"


def test_failed_write_leaves_no_ledger(live: Live, tmp_path: Path) -> None:
    planned = writer(live, ledgerScopeId=SCOPE + 2)

    def dying() -> Iterator[pa.RecordBatch]:
        yield from batches(b"0", b"1")
        raise OSError("no more rows")

    with pytest.raises(OSError, match="no more rows"):
        planned.write(dying())
    with pytest.raises(UsageError, match="1 rows have no payload"):
        attempt(planned, b"0", b"1", None)
    assert live.ledgers(SCOPE + 2) == set()
    attempt(planned, b"0")
    planned.abort([None])
    assert live.ledgers(SCOPE + 2) == set()


def test_names_file_is_replaced_only_with_overwrite(live: Live, tmp_path: Path) -> None:
    names = tmp_path / "names"
    names.write_text("precious")
    with pytest.raises(AlreadyExists):
        writer(live, names=names)
    planned = writer(live, names=names, overwrite=True, ledgerScopeId=SCOPE + 3)
    assert names.read_text() == "precious"
    planned.commit([])
    assert names.read_text() == ""
    with pytest.raises(UsageError, match="its directory does not exist"):
        writer(live, names=tmp_path / "none" / "names")
    with pytest.raises(UsageError, match="payload"):
        LedgerSource(live.options).writer(struct_of("`a` binary"), False)
    with pytest.raises(UsageError, match="bigint"):
        LedgerSource(live.options).writer(struct_of("`payload` bigint"), False)
    with pytest.raises(UsageError):
        writer(live, ensembleSize=2, writeQuorumSize=3)


def test_frame_is_written_to_ledgers_through_spark(spark: SparkSession, live: Live, tmp_path: Path) -> None:
    def write(frame: DataFrame, scope_id: int) -> None:
        options = {**live.options, "ledgerScopeId": str(scope_id), "ensembleSize": "2", "names": str(names)}
        frame.write.format("bookkeeper.ledger").mode("append").options(**options).save()

    names = tmp_path / "names"
    rows = spark.createDataFrame([(f"row {number}",) for number in range(50)], "payload string").repartition(3)
    write(rows, SCOPE + 4)
    ledgers = [LedgerId.parse(line) for line in names.read_text().split()]
    names.unlink()
    assert len(ledgers) == 3
    assert set(ledgers) == live.ledgers(SCOPE + 4)
    parts = [live.read(ledger) for ledger in ledgers]
    assert sorted(payload for part in parts for payload in part) == sorted(b"row %d" % number for number in range(50))
    bad = rows.selectExpr("case when payload = 'row 7' then null else payload end as payload")
    with pytest.raises(Exception, match="1 rows have no payload"):
        write(bad, SCOPE + 5)
    assert live.ledgers(SCOPE + 5) == set()


def test_apache_client_reads_written_ledgers(
    apache_cluster: servers.ApacheCluster, java: servers.Java, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("pw")
    planned = LedgerSource(
        {
            "metadataUri": apache_cluster.metadata_uri, "ledgerScopeId": "0", "names": str(tmp_path / "names"),
            "ledgerPasswordFile": str(tmp_path / "secret"), "digestType": "HMAC",
        }
    ).writer(struct_of("`payload` binary"), False)  # fmt: skip

    def rows(*payloads: bytes) -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_pydict({"payload": pa.array(payloads, pa.binary())})

    lost, counted = planned.write(rows(b"lost")), planned.write(rows(b"", b"one", b"two" * 9000))
    planned.commit([counted])
    names = (tmp_path / "names").read_text().split()
    assert names == [str(ledger_of(counted).ledger_id)]
    password = base64.b64encode(b"pw").decode()
    asked = [{"ledgerId": name, "digestType": "MAC", "password": password} for name in (*names, str(ledger_of(lost)))]
    read, gone = servers.read_ledgers(java, apache_cluster.metadata_uri, "v3", asked)
    assert [(entry["size"], entry["sha256"]) for entry in read["entries"]] == [
        (len(payload), hashlib.sha256(payload).hexdigest()) for payload in (b"", b"one", b"two" * 9000)
    ]
    assert gone["code"] == -25  # NoSuchLedgerExistsOnMetadataServerException
