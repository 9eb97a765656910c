from __future__ import annotations

import json
import time
from typing import Any

import pytest
from commands.conftest import BOOKIES, Cli
from support.pulsar_golden import COMPRESSIONS, GOLDEN, load
from support.pulsar_nodes import PulsarStore, bucket_of, compacted_of, compressed, messages_of, schema_of

from bkctl.formats.metadata import BookieServiceInfo
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import Cluster

ORDERS = "public/default/persistent/orders"
TOPIC = "persistent://public/default/orders"


@pytest.fixture
def pulsar(store: Cluster) -> PulsarStore:
    """A topic with all that a topic may have, each ledger named; no bookie is needed to know it."""
    store.ledgers.remove(LedgerId(0, 5))  # Of a managed ledger that does not exist.
    found = PulsarStore(store, BOOKIES[:2])
    for ledger_id in (10, 11):
        found.ledger(ledger_id, messages_of(ORDERS))
    found.ledger(12, compacted_of(TOPIC))
    found.ledger(13, bucket_of(ORDERS, "slow", "#pulsar.internal.delayed.bucket_10_11"))
    found.ledger(14, schema_of("public/default/orders"))
    found.ledger(15, {"application": b"pulsar", "component": b"of-a-later-release"})
    found.topic(ORDERS, 10, 11, properties=[{"key": "k", "value": "v"}])
    found.cursor(ORDERS, "fast", at=(11, 9))
    found.cursor(
        ORDERS, "slow+one", at=(10, 3),
        cursorProperties=[{"name": "#pulsar.internal.delayed.bucket_10_11", "value": "13"}],
    )  # fmt: skip
    found.cursor(ORDERS, "__compaction", at=(11, 9), properties=[{"name": "CompactedTopicLedger", "value": 12}])
    found.schema("public/default/orders", 14)
    return found


def test_topics_show_size_backlog_and_who_holds_it(cli: Cli, pulsar: PulsarStore) -> None:
    pulsar.topic("public/other/persistent/empty")
    rows = cli("pulsar", "topics", "-o", "ndjson").rows
    assert [row["topic"] for row in rows] == [TOPIC, "persistent://public/other/empty"]
    expected = {
        "ledgerCount": 4, "entryCount": 20, "size": 2000, "cursorCount": 3, "backlogEntryCount": 16,
        "heldBy": "slow one", "missingCount": 0, "unavailableCount": 0, "oldestCtime": "2025-08-21T09:53:20.000Z",
    }  # fmt: skip
    assert rows[0].items() >= expected.items()
    total = cli("pulsar", "topics", "--by", "tenant", "-o", "ndjson").rows
    assert [(row["name"], row["topicCount"], row["size"]) for row in total] == [("public", 2, 2000)]
    by = cli("pulsar", "topics", "public/other", "--by", "namespace", "-o", "ndjson").rows
    assert [(row["name"], row["topicCount"], row["size"]) for row in by] == [("public/other", 1, 0)]


def test_a_topic_shows_its_ledgers_with_their_roles(cli: Cli, pulsar: PulsarStore) -> None:
    shown = cli("pulsar", "topic", TOPIC, "-o", "json").json
    assert [(each["ledgerId"], each["role"], each["state"]) for each in shown["ledgers"]] == [
        ("10", "managed-ledger", "ok"),
        ("11", "managed-ledger", "ok"),
        ("12", "compacted-ledger", "ok"),
        ("13", "delayed-index-bucket", "ok"),
    ]
    assert {each["cursor"]: (each["position"], each["backlogEntryCount"]) for each in shown["cursors"]} == {
        "fast": ("11:9", 0),
        "slow one": ("10:3", 16),
        "__compaction": ("11:9", 0),
    }
    assert shown["properties"] == {"k": "v"}
    assert shown["schemaLedgerIds"] == ["14"]
    assert "orders" in cli("pulsar", "topic", "public/default/orders").out
    assert cli("pulsar", "topic", "public/default/none").code == 4


def test_a_sound_cluster_has_no_findings(cli: Cli, pulsar: PulsarStore) -> None:
    assert cli("pulsar", "check", "--pause", "0s").code == 0
    assert cli("pulsar", "orphans", "--pause", "0s", "--min-age", "0s").code == 0


def test_check_finds_what_is_lost_and_what_nothing_names(cli: Cli, pulsar: PulsarStore) -> None:
    ledgers = pulsar.cluster.ledgers
    for ledger_id in (11, 12, 13, 14):
        ledgers.remove(LedgerId(0, ledger_id))
    pulsar.cursor(ORDERS, "gone", 99)
    pulsar.ledger(20, messages_of(ORDERS))
    pulsar.ledger(21, messages_of(ORDERS, "slow+one"))
    pulsar.ledger(22, messages_of("public/default/persistent/deleted"))
    pulsar.ledger(23, compacted_of(TOPIC))
    pulsar.ledger(24, bucket_of(ORDERS, "slow", "#pulsar.internal.delayed.bucket_1_2"))
    pulsar.ledger(25, schema_of("public/default/deleted"))
    found = cli("pulsar", "check", "--pause", "0s", "-o", "ndjson")
    assert found.code == 3
    assert sorted((row["code"], row["ledgerId"], row["topic"]) for row in found.rows) == [
        ("bucket-ledger-missing", "13", TOPIC),
        ("compacted-ledger-missing", "12", TOPIC),
        ("cursor-ledger-missing", "99", TOPIC),
        ("ledger-missing", "11", TOPIC),
        ("orphan", "20", TOPIC),
        ("orphan", "21", TOPIC),
        ("orphan", "22", "persistent://public/default/deleted"),
        ("orphan", "23", TOPIC),
        ("orphan", "24", TOPIC),
        ("orphan", "25", "public/default/deleted"),
        ("schema-ledger-missing", "14", "public/default/orders"),
    ]
    assert "6 orphans with" in found.err


def test_offloaded_ledgers_are_not_lost(cli: Cli, pulsar: PulsarStore) -> None:
    def offload(number: int, *, uid: int = 1 << 63, **fields: Any) -> None:
        context = info.ledgerInfo[number].offloadContext
        context.uidMsb = context.uidLsb = uid - (1 << 64)
        context.MergeFrom(type(context)(driverMetadata={"name": "aws-s3"}, **fields))
        context.driverMetadata.properties.add(key="bucket", value="b")

    pulsar.ledger(31, messages_of(ORDERS), bookies=("x:1", "x:2"))
    info = pulsar.topic(ORDERS, 10, 11, 31, 8, 9)
    offload(0)
    offload(1, complete=True, bookkeeperDeleted=True)
    offload(2, complete=True)
    offload(3, complete=True)
    offload(4, complete=True, bookkeeperDeleted=True)
    pulsar.put(f"managed-ledgers/{ORDERS}", info.SerializeToString())
    found = cli("pulsar", "check", "--pause", "0s", "-o", "ndjson").rows
    assert [(row["code"], row["ledgerId"], row["advice"]) for row in found] == [
        ("offloaded-left", "11", "bkctl ledger delete 11")
    ]
    assert (
        cli("pulsar", "topics", "-o", "json").json[0].items() >= {"offloadedSize": 4000, "unavailableCount": 0}.items()
    )
    assert cli("pulsar", "orphans", "--pause", "0s", "--min-age", "0s").code == 0
    shown = cli("pulsar", "topic", TOPIC, "-o", "json").json["ledgers"][:5]
    keys = ("ledgerId", "state", "offload", "offloaded", "bookkeeperCopy")
    assert [tuple(each[key] for key in keys) for each in shown] == [
        ("10", "ok", "started", None, None),
        ("11", "ok", "complete", "aws-s3", "left"),
        ("31", "offloaded", "complete", "aws-s3", "kept"),
        ("8", "offloaded", "complete", "aws-s3", "lost"),
        ("9", "offloaded", "complete", "aws-s3", "deleted"),
    ]
    assert {each["offloadId"] for each in shown} == {"80000000-0000-0000-8000-000000000000"}
    text = cli("pulsar", "topic", TOPIC).out
    assert "offloadedTo bucket=b  offloadId 80000000" in text
    info.ledgerInfo[3].offloadContext.complete = False
    pulsar.put(f"managed-ledgers/{ORDERS}", info.SerializeToString())
    codes = {row["code"] for row in cli("pulsar", "check", "--pause", "0s", "-o", "ndjson").rows}
    assert codes == {"offloaded-left", "ledger-missing"}


def test_topics_at_risk_are_found(cli: Cli, pulsar: PulsarStore) -> None:
    pulsar.topic("public/default/persistent/risky", 30, 31)
    pulsar.ledger(30, messages_of("public/default/persistent/risky"), bookies=(BOOKIES[0], BOOKIES[2]))
    pulsar.ledger(31, messages_of("public/default/persistent/risky"), bookies=(BOOKIES[2], "x:1"))
    rows = cli("pulsar", "check", "--pause", "0s", "-o", "ndjson").rows
    assert [(row["code"], row["ledgerId"]) for row in rows] == [("topic-one-copy", "30"), ("topic-unavailable", "31")]


def test_orphans_are_deleted_once_they_are_old_and_come_back(cli: Cli, pulsar: PulsarStore) -> None:
    pulsar.ledger(20, messages_of(ORDERS))
    pulsar.ledger(21, messages_of(ORDERS), ctime_ms=int(time.time() * 1000))
    command = ("pulsar", "orphans", "--pause", "0s", "--delete")
    dry = cli(*command, "--dry-run", "-o", "ndjson")
    assert [row["ledgerId"] for row in dry.rows] == ["20"]
    assert "1 orphan is younger than --min-age" in dry.err
    assert cli(*command).code == 2  # A question needs a terminal.
    done = cli(*command, "--yes")
    assert done.code == 0, done.err
    left = {ledger.ledger_id for ledger in pulsar.cluster.ledgers.ledgers(0)}
    assert 20 not in left
    assert left >= {6, 10, 11, 12, 13, 14, 15, 21}
    undo = done.err.split("metadata undo ")[1].split()[0]
    assert cli("metadata", "undo", undo, "--yes").code == 0
    assert 20 in {ledger.ledger_id for ledger in pulsar.cluster.ledgers.ledgers(0)}


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_compressed_metadata_is_read(cli: Cli, pulsar: PulsarStore, number: int) -> None:
    info = pulsar.topic(ORDERS, 10, 11)
    pulsar.put(f"managed-ledgers/{ORDERS}", compressed(info.SerializeToString(), number))
    assert cli("pulsar", "check", "--pause", "0s").code == 0


def test_old_metadata_in_text_is_read(cli: Cli, pulsar: PulsarStore) -> None:
    text = b"ledgerInfo {\n  ledgerId: 10\n  entries: 10\n}\nledgerInfo {\n  ledgerId: 11\n  unknown: 1\n}\n"
    pulsar.put(f"managed-ledgers/{ORDERS}", text)
    assert cli("pulsar", "check", "--pause", "0s").code == 0


def test_unreadable_topics_are_named_and_have_no_orphans(
    cli: Cli, pulsar: PulsarStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = pulsar.topic(ORDERS, 10, 11)
    pulsar.put(f"managed-ledgers/{ORDERS}", compressed(info.SerializeToString(), 3))
    pulsar.topic("public/default/persistent/other")
    pulsar.ledger(20, messages_of("public/default/persistent/other"))
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    found = cli("pulsar", "check", "--pause", "0s", "-o", "ndjson")
    assert [(row["code"], row["ledgerId"]) for row in found.rows] == [("orphan", "20"), ("unreadable", None)]
    assert f"topic {TOPIC} is compressed with ZSTD, which needs the library pyarrow" in found.rows[1]["message"]
    topics = cli("pulsar", "topics", "-o", "ndjson")
    assert [row["topic"] for row in topics.rows] == ["persistent://public/default/other"]
    assert topics.code == 3
    assert cli("pulsar", "orphans", "--delete", "--yes", "--pause", "0s").code != 0
    left = {ledger.ledger_id for ledger in pulsar.cluster.ledgers.ledgers(0)}
    assert left >= {10, 11, 12, 13, 14}
    assert 20 not in left


def test_a_cluster_without_topics_says_where_it_looked(cli: Cli, store: Cluster) -> None:
    found = cli("pulsar", "topics")
    assert found.code == 4
    assert "--pulsar-root" in found.err


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_all_that_a_broker_wrote_is_read(cli: Cli, store: Cluster, compression: str) -> None:
    for ledger_id in (5, 6):
        store.ledgers.remove(LedgerId(0, ledger_id))
    golden: dict[str, Any] = json.loads(GOLDEN.read_text())[compression]
    load(store, golden)
    ledgers = store.ledgers.read_many(store.ledgers.ledgers(0))
    for bookie in {name for _, found in ledgers for part in found.metadata.ensembles for name in part.bookies}:  # type: ignore[union-attr]
        store.bookies.register(bookie, BookieServiceInfo())
    found = cli("pulsar", "check", "--pause", "0s")
    assert found.code == 0, found.out
    for topic, truth in golden["topics"].items():
        shown = cli("pulsar", "topic", topic, "--quick", "-o", "json").json
        of = {each["role"]: int(each["ledgerId"]) for each in shown["ledgers"]}
        assert {each["cursor"]: each["backlogEntryCount"] for each in shown["cursors"]} == truth["backlog"]
        assert of.get("compacted-ledger", -1) == truth["ledgers"]["compacted"]
        assert [int(each) for each in shown["schemaLedgerIds"]] == truth["ledgers"]["schemas"]
        assert shown["missingCount"] == 0


def test_the_topic_is_named_wherever_ledgers_are_listed(cli: Cli, pulsar: PulsarStore) -> None:
    from bkctl.metadata.underreplication import LedgerMarks

    for ledger_id in (10, 12, 14):
        LedgerMarks(pulsar.cluster.store).add(LedgerId(0, ledger_id), BOOKIES[:1])
    topics = [row["topic"] for row in cli("autorecovery", "list", "-o", "ndjson").rows]
    assert topics == [TOPIC, f"{TOPIC} (compacted-ledger)", "public/default/orders (schema)"]
    assert cli("ledger", "show", "12", "-o", "json").json["pulsar"]["topic"] == TOPIC
    health = cli("cluster", "health", "--no-bookies", "-o", "json")
    named = [row for row in health.json if row["code"] == "underreplicated"]
    assert TOPIC in named[0]["message"]
    assert named[0]["details"]["topics"][0] == TOPIC


@pytest.mark.parametrize(
    ("nodes", "root", "problem"),
    [
        ("other/managed-ledgers/t/n/persistent/x", None, "Topics are also at /other"),
        ("other/managed-ledgers/t/n/persistent/x", "/other", "name none of the cluster's ledgers"),
    ],
    ids=["a second Pulsar", "the path of another"],
)
def test_no_ledger_is_deleted_that_another_pulsar_may_own(
    cli: Cli, pulsar: PulsarStore, nodes: str, root: str | None, problem: str
) -> None:
    pulsar.put(nodes, b"")
    pulsar.ledger(20, messages_of("t/n/persistent/x"))
    before = list(pulsar.cluster.ledgers.ledgers(0))
    given = () if root is None else ("--pulsar-root", root)
    found = cli("pulsar", "orphans", "--delete", "--yes", "--pause", "0s", *given)
    assert found.code == 5
    assert problem in found.err
    assert list(pulsar.cluster.ledgers.ledgers(0)) == before


def test_a_pulsar_with_ledgers_of_its_own_does_not_hinder_a_deletion(cli: Cli, pulsar: PulsarStore) -> None:
    pulsar.put("other/managed-ledgers/t/n/persistent/x", b"")
    pulsar.put("other/ledgers/LAYOUT", b"")
    pulsar.ledger(20, messages_of(ORDERS))
    assert cli("pulsar", "orphans", "--delete", "--yes", "--pause", "0s").code == 0


@pytest.mark.parametrize("topic", ["t/n/a*b~c", "t/persistent/c"])
def test_a_compacted_ledger_whose_position_is_not_known_is_no_orphan(cli: Cli, pulsar: PulsarStore, topic: str) -> None:
    tenant, namespace, name = topic.split("/")
    node = f"{tenant}/{namespace}/persistent/{name.replace('~', '%7E')}"  # As Java's URLEncoder.
    pulsar.topic(node)
    pulsar.put(f"managed-ledgers/{node}/__compaction", b"damaged")
    pulsar.ledger(20, compacted_of(f"persistent://{topic}"))
    assert cli("pulsar", "orphans", "--delete", "--yes", "--pause", "0s").code == 3
    assert LedgerId(0, 20) in list(pulsar.cluster.ledgers.ledgers(0))


def test_a_ledger_whose_owner_has_a_damaged_name_is_no_orphan(cli: Cli, pulsar: PulsarStore) -> None:
    pulsar.ledger(20, {**messages_of(ORDERS), "pulsar/managed-ledger": b"public/default/persistent/\xff"})
    assert cli("pulsar", "orphans", "--pause", "0s").code == 0


@pytest.mark.parametrize(
    "custom",
    [
        messages_of("../x"),
        messages_of("t/n/persistent/x\1"),
        compacted_of("persistent://t/n/.."),
        bucket_of("t/./x", "c", "k"),
        schema_of(".."),
    ],
)
def test_a_ledger_whose_owner_has_an_impossible_name_is_no_orphan(
    cli: Cli, pulsar: PulsarStore, custom: dict[str, bytes]
) -> None:
    pulsar.ledger(20, custom)
    pulsar.ledger(21, messages_of(ORDERS))
    found = cli("pulsar", "check", "--pause", "0s", "-o", "ndjson")
    assert [(row["code"], row["ledgerId"]) for row in found.rows] == [("orphan", "21"), ("unreadable", None)]
    assert "ledger 20 names an impossible owner" in found.rows[1]["message"]
    found = cli("pulsar", "orphans", "--delete", "--yes", "--pause", "0s")
    assert (found.code, "ledger 20 names an impossible owner" in found.err) == (3, True)
    left = {ledger.ledger_id for ledger in pulsar.cluster.ledgers.ledgers(0)}
    assert (20 in left, 21 in left) == (True, False)


@pytest.mark.parametrize(
    "arguments", [("topic", "persistent://t/n/.."), ("topics", ".."), ("topics", "--pulsar-root", "/a/../b")]
)
def test_relative_names_and_paths_are_refused(cli: Cli, pulsar: PulsarStore, arguments: tuple[str, ...]) -> None:
    refused = cli("pulsar", *arguments)
    assert (refused.code, "Not a path of the metadata store" in refused.err) == (2, True)


def test_deeply_nested_text_is_a_damaged_topic(cli: Cli, pulsar: PulsarStore) -> None:
    pulsar.put(f"managed-ledgers/{ORDERS}", b"ledgerInfo " + b"{ ledgerInfo " * 5000)
    found = cli("pulsar", "check", "--pause", "0s", "-o", "ndjson")
    assert [row["code"] for row in found.rows] == ["unreadable"]


def test_a_pulsar_beside_the_one_of_the_root_is_seen(cli: Cli, store: Cluster) -> None:
    pulsar = PulsarStore(store, BOOKIES[:2])
    pulsar.ledger(10, messages_of(ORDERS))
    pulsar.ledger(20, messages_of("t/n/persistent/x"))
    info = pulsar.topic("a", 10).SerializeToString()
    pulsar.cluster.store.delete("managed-ledgers/a")
    pulsar.put(f"pulsar/a/managed-ledgers/{ORDERS}", info)
    pulsar.put("pulsar/b/managed-ledgers/t/n/persistent/x", b"")
    found = cli("pulsar", "orphans", "--delete", "--yes", "--pause", "0s", "--pulsar-root", "/pulsar/a")
    assert (found.code, "Topics are also at /pulsar/b" in found.err) == (5, True)


@pytest.mark.parametrize("node", ["topic", "bucket", "compacted", "schema", "emptied schema"])
def test_impossible_ids_are_damage_and_stop_nothing(cli: Cli, pulsar: PulsarStore, node: str) -> None:
    pulsar.ledger(20, messages_of("public/default/persistent/deleted"))
    if node == "topic":
        pulsar.topic(ORDERS, -5, 11)
    elif node == "bucket":
        value = {"name": "#pulsar.internal.delayed.bucket_1_2", "value": "9" * 5000}
        pulsar.cursor(ORDERS, "slow+one", at=(10, 3), cursorProperties=[value])
    elif node == "compacted":
        properties = [{"name": "CompactedTopicLedger", "value": -1}]
        pulsar.cursor(ORDERS, "__compaction", at=(11, 9), properties=properties)
    elif node == "schema":
        pulsar.schema("public/default/orders", -3)
    else:
        pulsar.put("schemas/public/default/orders", b"")
    if "schema" in node:
        shown = cli("pulsar", "topic", TOPIC, "-o", "json")
        assert (shown.code, shown.json["schemaLedgerIds"], len(shown.json["cursors"]) > 0) == (3, [], True)
    found = cli("pulsar", "check", "--pause", "0s", "-o", "ndjson")
    assert [(row["code"], row["ledgerId"]) for row in found.rows] == [("orphan", "20"), ("unreadable", None)]
    assert cli("pulsar", "orphans", "--delete", "--yes", "--pause", "0s").code == 3
    left = {ledger.ledger_id for ledger in pulsar.cluster.ledgers.ledgers(0)}
    assert left >= {10, 11, 12, 13, 14}
    assert 20 not in left
