"""Copies in another scope: verified, passed over when they are there, finished when they were left half way."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from support.waiting import LIMIT_S

from bkctl.errors import Conflict, Corrupt, IllegalOperation, TimedOut, UsageError
from bkctl.formats.entry import DigestType
from bkctl.formats.metadata import Fragment
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import Cluster
from bkctl.spark.jobs.copying import (
    HASH_KEY,
    SHAPE_OPTIONS,
    SOURCE_KEY,
    CopyResult,
    EntryHash,
    LedgerCopy,
    Shape,
    _copy_ledgers,
    _foreseen,
    copy_ledger,
    import_ledgers,
    migrate_scope,
)
from bkctl.spark.sources.options import Client, SourceOptions

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession
    from support.live_ledgers import Live

SCOPE = 0xC0B1
NO_OPTIONS = SourceOptions("test", {}, ())
PAYLOADS = [b"", b"one", b"two" * 100_000, *(b"%d" % number for number in range(5000))]


@pytest.fixture
def client(live: Live) -> Client:
    return live.client()


def copy(client: Client, source: LedgerId, target: LedgerId) -> CopyResult:
    return client.run(copy_ledger(client, source, target, NO_OPTIONS))


def hash_of(payloads: list[bytes]) -> str:
    made = EntryHash()
    for payload in payloads:
        made.add(payload)
    return made.hex


def test_copy_equals_its_source(live: Live, client: Client) -> None:
    source = live.write(
        PAYLOADS, LedgerId(SCOPE, 1), password=b"pw", digest_type=DigestType.HMAC, custom_metadata={"a": b"b"}, copies=3
    )
    target = LedgerId(SCOPE + 1, 1)
    made = copy(client, source, target)
    size = sum(map(len, PAYLOADS))
    assert made == CopyResult(source, target, "copied", len(PAYLOADS), size, hash_of(PAYLOADS))
    assert live.read(target) == PAYLOADS
    one, other = (client.cluster.ledgers.read(each).metadata for each in (source, target))
    assert other.custom_metadata == {
        "a": b"b", SOURCE_KEY: source.qualified_name.encode(), HASH_KEY: hash_of(PAYLOADS).encode()
    }  # fmt: skip
    same = {"c_token": None, "ctime_ms": None, "custom_metadata": {}, "ensembles": ()}
    assert one._replace(**same) == other._replace(**same)
    assert copy(client, source, target) == made._replace(state="present")
    empty = live.write([], LedgerId(SCOPE, 2))
    assert copy(client, empty, LedgerId(SCOPE + 1, 2))[2:5] == ("copied", 0, 0)


def test_unfinished_copy_is_resumed(live: Live, client: Client) -> None:
    source, target = live.write(PAYLOADS, LedgerId(SCOPE, 3)), LedgerId(SCOPE + 1, 3)
    shape = Shape.of(client.cluster.ledgers.read(source).metadata)
    dying = live.client()
    half = LedgerCopy(dying, source, target, shape, b"", len(PAYLOADS))

    async def begin() -> None:
        await half.begin()
        await half.add(PAYLOADS[:700])
        await half.flush()

    dying.run(begin())
    assert copy(client, source, target)[2:4] == ("copied", len(PAYLOADS))
    assert live.read(target) == PAYLOADS
    # A task that was taken for dead continues: it can neither change the copy nor close it elsewhere.
    with pytest.raises(Conflict):
        dying.run(half.finish())
    assert live.read(target) == PAYLOADS


@pytest.mark.parametrize("by_recovery", [False, True])
def test_copy_closed_before_its_end_is_resumed(live: Live, client: Client, by_recovery: bool) -> None:
    ledger_id = 7 + by_recovery
    source, target = live.write(PAYLOADS, LedgerId(SCOPE, ledger_id)), LedgerId(SCOPE + 1, ledger_id)
    half = live.open(target, custom_metadata={SOURCE_KEY: source.qualified_name.encode()}, copies=3)
    half.add(PAYLOADS[:5])
    if by_recovery:
        # All bookies keep the fence.
        opened = client.bookkeeper.open_ledger(target.ledger_id, ledger_scope_id=target.scope_id, recovery=True)
        client.run(opened)
    else:
        half.close()
    assert client.cluster.ledgers.read(target).metadata.last_entry_id == 4
    assert copy(client, source, target)[2:4] == ("copied", len(PAYLOADS))
    assert live.read(target) == PAYLOADS


def test_resumed_copy_replaces_bookies_before_its_last_fragment(live: Live, client: Client) -> None:
    source, target = live.write(PAYLOADS, LedgerId(SCOPE, 9)), LedgerId(SCOPE + 1, 9)
    live.open(target, custom_metadata={SOURCE_KEY: source.qualified_name.encode()}).add(PAYLOADS[:100])
    ledgers = client.cluster.ledgers
    found = ledgers.read(target)
    (first,) = found.metadata.ensembles
    kept, failing = first.bookies
    (spare,) = {bookie.bookie_id for bookie in client.cluster.bookies.list()} - {kept, failing}
    changed = found.metadata._replace(ensembles=(first, Fragment(100, (spare, failing))))
    ledgers.write(target, changed, found.version)
    resumed = LedgerCopy(client, source, target, Shape.of(changed), b"", len(PAYLOADS))

    async def finish() -> CopyResult:
        await resumed.begin()
        await resumed.add(PAYLOADS[:50])
        await resumed.flush()
        assert resumed._handle is not None
        resumed._handle._pipeline._bookies_failed({1: failing})
        await resumed.add(PAYLOADS[50:])
        return await resumed.finish()

    assert client.run(finish())[2:4] == ("copied", len(PAYLOADS))
    assert live.read(target) == PAYLOADS
    assert ledgers.read(target).metadata.ensembles == (first, Fragment(50, (kept, spare)))


def test_closed_copy_is_verified(live: Live, client: Client) -> None:
    source, target = live.write(PAYLOADS, LedgerId(SCOPE, 4)), LedgerId(SCOPE + 1, 4)
    mark = {SOURCE_KEY: source.qualified_name.encode()}
    live.write(PAYLOADS, target, custom_metadata=mark)
    assert copy(client, source, target)[2] == "present"
    assert client.cluster.ledgers.read(target).metadata.custom_metadata[HASH_KEY] == hash_of(PAYLOADS).encode()
    other = LedgerId(SCOPE + 2, 4)
    live.write([*PAYLOADS[:-1], b"xxxx"], other, custom_metadata=mark)
    with pytest.raises(Corrupt, match="differ"):
        copy(client, source, other)
    verified, long = LedgerId(SCOPE + 3, 4), LedgerId(SCOPE + 5, 4)
    live.write(PAYLOADS[:5], verified, custom_metadata={**mark, HASH_KEY: hash_of(PAYLOADS[:5]).encode()})
    live.write([*PAYLOADS, b"more"], long, custom_metadata=mark)
    for target, count in {verified: 5, long: len(PAYLOADS) + 1}.items():
        with pytest.raises(Conflict, match=f"closed after {count} entries"):
            copy(client, source, target)
    foreign = live.write(PAYLOADS, LedgerId(SCOPE + 4, 4))
    with pytest.raises(Conflict, match="is not a copy of ledger"):
        copy(client, source, foreign)
    growing = live.open(LedgerId(SCOPE, 5))
    assert copy(client, growing.ledger, LedgerId(SCOPE + 1, 5))[2] == "open"


def test_copy_that_is_not_closed_is_not_foreseen_as_present(live: Live, client: Client) -> None:
    """It was not read back, whatever its custom metadata says."""
    source, target = LedgerId(SCOPE, 10), LedgerId(SCOPE + 1, 10)
    marks = {SOURCE_KEY: source.qualified_name.encode(), HASH_KEY: b"5a"}
    half = live.open(target, custom_metadata=marks)
    planned = CopyResult(source, target, "planned", 1, 1)
    assert list(_foreseen(client.cluster, [planned])) == [planned]
    half.close()
    assert list(_foreseen(client.cluster, [planned])) == [planned._replace(state="present", sha256="5a")]


def test_copy_raises_the_error_of_a_closed_client(live: Live, client: Client) -> None:
    source = live.write([b"x"], LedgerId(SCOPE, 6))

    async def unreachable() -> Any:
        await client.bookkeeper.close()
        return await asyncio.wait_for(copy_ledger(client, source, LedgerId(SCOPE + 1, 6), NO_OPTIONS), LIMIT_S)

    with pytest.raises(IllegalOperation, match="closed"):
        client.run(unreachable())


def test_ledger_without_enough_bookies_fails_alone(live: Live, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    sound, wide = live.write([b"x"], LedgerId(SCOPE, 12)), LedgerId(SCOPE, 11)
    metadata = client.cluster.ledgers.read(sound).metadata
    bookies = Fragment(0, tuple(f"b{number}:3181" for number in range(5)))
    empty = metadata._replace(ensemble_size=5, ensembles=(bookies,), last_entry_id=-1, length=0, c_token=None)
    client.cluster.ledgers.create(wide, empty)
    work = [(each, LedgerId(SCOPE + 6, each.ledger_id)) for each in (wide, sound)]
    options = SourceOptions("test", live.options, ("metadataUri", *SHAPE_OPTIONS))

    def copied() -> list[tuple[str, str]]:
        return [(row["state"], row["message"] or "") for row in _copy_ledgers(options, work)]

    (failed, message), done = copied()
    assert (failed, done) == ("failed", ("copied", ""))
    assert "5 writable bookies are needed, 3 are there" in message

    def unreachable(_: Cluster) -> str:
        raise TimedOut("the store does not answer")

    monkeypatch.setattr(Cluster, "instance_id", unreachable)
    with pytest.raises(TimedOut, match="store"):
        copied()


def test_scope_is_copied_through_spark(spark: SparkSession, live: Live) -> None:
    scope, to = SCOPE + 10, SCOPE + 11
    contents = {LedgerId(scope, number): PAYLOADS[: number * 3] for number in range(6)}
    for ledger, payloads in contents.items():
        live.write(payloads, ledger)
    growing = live.open(LedgerId(scope, 7))
    live.write([b"in the way"], LedgerId(to, 2))
    options = live.options

    def states(**settings: Any) -> dict[int, str]:
        rows = migrate_scope(spark, options, to, from_scope_id=scope, **settings).collect()
        assert [row.source for row in rows] == sorted(row.source for row in rows)
        assert all(row.ledgerScopeId == str(to) for row in rows)
        assert all(("is not a copy" in row.message) for row in rows if row.state == "failed")
        return {int(row.ledgerId): row.state for row in rows}

    usual = dict.fromkeys(range(6), "copied") | {2: "failed", 7: "open"}
    assert states(dry_run=True) == dict.fromkeys(range(6), "planned") | {2: "failed", 7: "open"}
    assert live.ledgers(to) == {LedgerId(to, 2)}
    assert states() == usual
    for ledger, payloads in contents.items():
        if ledger.ledger_id != 2:
            assert live.read(LedgerId(to, ledger.ledger_id)) == payloads
    assert states(dry_run=True) == dict.fromkeys(range(6), "present") | {2: "failed", 7: "open"}
    growing.close()
    assert states() == dict.fromkeys(range(6), "present") | {2: "failed", 7: "copied"}
    for problem, settings in {
        "already": {"ledgers": [LedgerId(to, 0)]},
        "both become": {"ledgers": [LedgerId(scope, 1), LedgerId(to + 1, 1)]},
        "No ledgers to copy": {},
    }.items():
        with pytest.raises(UsageError, match=problem):
            migrate_scope(spark, options, to, **settings)


def test_jobs_that_write_ledgers_refuse_speculation(spark: SparkSession, live: Live, tmp_path: Path) -> None:
    # Spark takes the setting when it starts; new sessions show it.
    core = spark.sparkContext._jsc.sc().conf()  # type: ignore[union-attr]
    core.set("spark.speculation", "True")
    try:
        speculative = spark.newSession()
        assert speculative.conf.get("spark.speculation") == "True"
    finally:
        core.remove("spark.speculation")
    source = live.write([b"x"], LedgerId(SCOPE + 20, 1))
    with pytest.raises(UsageError, match="speculation is on"):
        migrate_scope(speculative, live.options, SCOPE + 21, ledgers=[source])
    with pytest.raises(UsageError, match="speculation is on"):
        import_ledgers(speculative, str(tmp_path), live.options)
    assert live.ledgers(SCOPE + 21) == set()
    (row,) = migrate_scope(speculative, live.options, SCOPE + 21, ledgers=[source], dry_run=True).collect()
    assert row.state == "planned"
    spark.createDataFrame([], "id int")  # The session that made a frame last is the one that other tests get.
