"""Blocks of entries against plain Python over the same records: what is held, what is promised, and what differs."""

from __future__ import annotations

import random
from collections import defaultdict
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from support import source_rows  # noqa: F401 (skips where there is no PySpark)
from support.engines import Engine, on_both_engines

from bkctl.client.ensemble import RoundRobinDistributionSchedule
from bkctl.spark.engine import functions_of
from bkctl.spark.jobs import entries
from bkctl.spark.jobs.entries import INDEX, JOURNAL, LOG, Ids, fold, log_damages, promised_blocks, shares_of, unfold
from bkctl.spark.jobs.integrity import unreadable_files
from bkctl.spark.sources.columns import DAMAGE, TYPES, arrow_schema

LAST = 2**63 - 1
BOOKIES = ("a:1", "b:1", "c:1", "d:1")
NAMES = [f"{number:032x}" for number in (0, 7, 2**64 + 1, 2**128 - 1)]
#: Entry ids at the borders of blocks, far from each other, and at both ends of what a file can name.
EDGES = (
    0,
    1,
    1022,
    1023,
    1024,
    1025,
    2047,
    2048,
    5000,
    2**31 - 1,
    2**31,
    2**40,
    2**62,
    LAST - 1024,
    LAST - 1,
    LAST,
    -1,
)
RECORDS = (
    "bookieId string, ledgerQualifiedName string, entryId bigint, fileId bigint, file string, offset bigint, "
    f"recordSize bigint, lastAddConfirmed bigint, digest string, replayed boolean, {DAMAGE} {TYPES[DAMAGE]}"
)
FRAGMENTS = (
    "ledgerQualifiedName string, ensembleSize int, writeQuorumSize int, first bigint, last bigint, "
    "bookies array<string>"
)
DIGESTS = (None, "CRC32", "CRC32C", "CRC32C", "CRC32C")
Key = tuple[str, str, int]


class Held(NamedTuple):
    """Records of entry logs, places of indexes and records of journals."""

    logs: list[dict[str, Any]]
    places: list[dict[str, Any]]
    journals: list[dict[str, Any]]


def generated(seed: int) -> Held:
    """Return records of which some are twice in logs, of other places than the index says, or in journals only."""
    rng = random.Random(seed)
    held = Held([], [], [])
    entry_ids = [*EDGES, *range(900, 1300), *(rng.randrange(2**50) for _ in range(20))]
    for bookie, name in product(BOOKIES, NAMES):
        for entry_id in rng.sample(entry_ids, rng.randrange(len(entry_ids))):
            row: dict[str, Any] = {"bookieId": bookie, "ledgerQualifiedName": name, "entryId": entry_id}
            found = []
            for _ in range(rng.choice([0, 1, 1, 1, 1, 2])):
                place = {"fileId": rng.choice([0, 3, 2**32 - 1]), "offset": rng.randrange(2**33)}
                content = {"recordSize": rng.randrange(999), "digest": rng.choice(DIGESTS)}
                confirmed = {"lastAddConfirmed": rng.choice([entry_id, 5, None])}
                found.append(row | place | content | confirmed | {"file": f"/{bookie}/{place['fileId']:x}.log"})
            held.logs.extend(found)
            for _ in range(rng.choice([0, 1, 1, 1, 2])):
                named = rng.choice(found) if found and rng.random() < 0.9 else {"fileId": 9, "offset": -4}
                held.places.append({**row, "fileId": named["fileId"], "offset": named["offset"]})
            for _ in range(rng.choice([0, 0, 0, 1, 2])):
                place = {"fileId": rng.choice([1, 2]), "offset": rng.randrange(2**40), "file": "/j.txn"}
                content = {"recordSize": 77, "digest": rng.choice(DIGESTS), "replayed": rng.random() < 0.5}
                held.journals.append(row | place | content)
    for rows in held:
        rng.shuffle(rows)
    return held


def frame(session: Any, rows: list[dict[str, Any]], schema: str = RECORDS) -> Any:
    import pyarrow as pa

    arrow = arrow_schema(schema)
    return session.createDataFrame(pa.Table.from_pylist(rows, arrow), schema)


def folded(session: Any, held: Held) -> Any:
    """Return the blocks of all records."""
    F = functions_of(session)
    logged = {name: F.col(name) for name in ("file", "recordSize", "lastAddConfirmed", "digest")}
    blocks = fold(frame(session, held.logs), LOG, "fileId", **logged)
    blocks = blocks.unionByName(fold(frame(session, held.places), INDEX, "fileId"))
    journaled = {name: F.col(name) for name in (*logged, "replayed")}
    return blocks.unionByName(fold(frame(session, held.journals), JOURNAL, "fileId", **journaled))


def key_of(row: Any) -> Key:
    values = row if isinstance(row, dict) else row.asDict()
    return values["bookieId"], values["ledgerQualifiedName"], values["entryId"]


def place_of(row: dict[str, Any]) -> tuple[int, int]:
    return row["fileId"], row["offset"]


#: Fragments of ledgers: at both ends of entry ids, and changes of the ensemble in the middle of a block.
PROMISES: list[tuple[str, int, int, list[tuple[int, int, tuple[str, ...]]]]] = [
    (
        NAMES[0], 3, 2,
        [(0, 999, BOOKIES[:3]), (1000, 1029, BOOKIES[1:]), (1030, 1030, BOOKIES[:3]), (1031, 2048, BOOKIES[1:])],
    ),
    (NAMES[1], 4, 3, [(LAST - 1500, LAST - 1024, BOOKIES), (LAST - 1023, LAST, BOOKIES[::-1])]),
    (NAMES[2], 2, 1, [(1023, 1023, BOOKIES[:2]), (1024, 1024, BOOKIES[2:])]),
    (NAMES[3], 1, 1, [(0, 1500, ("elsewhere:1",))]),
]  # fmt: skip


def promises() -> tuple[list[dict[str, Any]], set[Key]]:
    """Return fragments, and the entries that they promise on the bookies."""
    rows: list[dict[str, Any]] = []
    keys: set[Key] = set()
    for name, size, quorum, fragments in PROMISES:
        schedule = RoundRobinDistributionSchedule(size, quorum, quorum)
        for first, last, bookies in fragments:
            values = (name, size, quorum, first, last, list(bookies))
            rows.append(dict(zip(arrow_schema(FRAGMENTS).names, values, strict=True)))
            for entry_id in range(first, last + 1):
                keys |= {(bookies[at], name, entry_id) for at in schedule.write_set(entry_id)}
    return rows, {key for key in keys if key[0] in BOOKIES}


@pytest.mark.parametrize("seed", [1, 2])
def test_unfolded_entries_are_those_of_the_records(engine: Engine, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    # In the test, so that it travels to Spark by value: workers lack the tests' modules.
    def anything(ids: Ids) -> Any:
        return ids.promised | ids.logged | ids.recorded

    def differing(ids: Ids) -> Any:
        return ids.mismatched | (ids.promised & ~(ids.replayed | ids.served))

    # Small chunks: groups of records, and of blocks, end in the middle of ledgers.
    monkeypatch.setattr(entries, "_FOLD_ROWS", 50)
    monkeypatch.setattr(entries, "_COMPARE_ENTRIES", 3000)
    F = functions_of(engine.session)
    held = generated(seed)
    fragments, promised = promises()
    given = [SimpleNamespace(bookie_id=bookie) for bookie in BOOKIES]
    blocks = folded(engine.session, held).withColumn("matches", F.col("digest").eqNullSafe(F.lit("CRC32C")))
    chosen = promised_blocks(frame(engine.session, fragments, FRAGMENTS), given)
    both = chosen.unionByName(blocks.drop(DAMAGE, "size", "lac"), allowMissingColumns=True)
    rows = {key_of(row): row.asDict(recursive=True) for row in unfold(both, anything).collect()}

    logs, places, journals = (defaultdict(list) for _ in range(3))
    for into, records in zip((logs, places, journals), held, strict=True):
        for record in records:
            into[key_of(record)].append(record)
    assert set(rows) == promised | set(logs) | set(journals)
    differ = set()
    for key, row in rows.items():
        copies = sorted(logs[key], key=place_of)
        assert row["promised"] == (key in promised)
        assert [(each["logId"], each["offset"], each["file"], each["digest"]) for each in row["copies"]] == [
            (*place_of(each), each["file"], each["digest"]) for each in copies
        ]
        place = max(map(place_of, places[key]), default=None)
        assert (row["place"] and tuple(row["place"].values())) == place
        recorded = max(((each["replayed"], *place_of(each)) for each in journals[key]), default=None)
        assert (row["recorded"] and tuple(row["recorded"].values())) == (recorded and (*recorded, "/j.txn", 77))
        replayed = max((each for each in journals[key] if each["replayed"]), key=place_of, default=None)
        assert (row["journaled"] and tuple(row["journaled"].values())) == (
            replayed and (*place_of(replayed), "/j.txn", replayed["digest"])
        )
        served = any(place_of(each) == place for each in copies)
        is_whole = served or (replayed is not None and replayed["digest"] == "CRC32C")
        if any(each["digest"] != "CRC32C" for each in copies) or (key in promised and not is_whole):
            differ.add(key)
    assert {key_of(row) for row in unfold(both, differing).collect()} == differ
    assert 0 < len(differ) < len(rows)


@on_both_engines
def test_counts_and_confirmed_entries_come_from_blocks(engine: Engine) -> None:
    held = generated(3)
    found = {
        (row.bookieId, row.file, row.ledgerQualifiedName): (row.entryCount, row.size)
        for row in shares_of(folded(engine.session, held)).collect()
    }
    expected: dict[Any, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for row in held.logs:
        key = row["bookieId"], row["file"], row["ledgerQualifiedName"]
        expected[key] = expected[key][0] + 1, expected[key][1] + row["recordSize"] + 4
    assert found == expected
    confirmed = folded(engine.session, held._replace(places=[], journals=[])).groupBy("ledgerQualifiedName", "digest")
    highest = functions_of(engine.session).max("lac").alias("lac")
    lacs = {(row[0], row[1]): row.lac for row in confirmed.agg(highest).collect()}
    for (name, digest), lac in lacs.items():
        of_ledger = [each for each in held.logs if (each["ledgerQualifiedName"], each["digest"]) == (name, digest)]
        # No entry confirms itself.
        known = [each for each in of_ledger if each["lastAddConfirmed"] is not None]
        assert lac == max((min(each["lastAddConfirmed"], each["entryId"] - 1) for each in known), default=None)


@on_both_engines
def test_damages_stay_rows_beside_blocks(engine: Engine) -> None:
    damage = {"file": "/a/0.log", "offset": None, "reason": "torn"}
    held = generated(4)
    row = dict.fromkeys(held.logs[0]) | {"bookieId": "a:1", "file": "/a/0.log", DAMAGE: damage}
    blocks = folded(engine.session, held._replace(logs=[*held.logs, row, row]))
    assert [(each.bookieId, each.file) for each in log_damages(blocks).collect()] == [("a:1", "/a/0.log")]
    (found,) = unreadable_files(blocks).collect()
    assert (found.problem, found.file, found.offset, found.detail) == ("unreadable", "/a/0.log", None, "torn")
    alone = fold(frame(engine.session, [row]), LOG, "fileId")
    assert [each.damage["reason"] for each in alone.collect()] == ["torn"]
    assert fold(frame(engine.session, []), INDEX, "fileId").collect() == []
