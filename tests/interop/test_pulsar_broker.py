"""`bkctl pulsar` beside a real broker: what it names, what it leaves when it dies, and what others take from it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.command_line import CommandLine
from support.own_cluster import OwnCluster
from support.servers import SORTED, JavaOnPulsar, ZooKeeperServer, conversation, wait_for

from bkctl.ids import LedgerId
from bkctl.metadata.cluster import Cluster, open_cluster
from bkctl.metadata.pulsar_nodes import PulsarNodes

Ask = Callable[..., dict[str, Any]]
ORDERS = "persistent://public/default/orders"
EVENTS = "persistent://public/default/events"

ROLES = ("managed-ledger", "cursor", "compacted-ledger", "delayed-index-bucket")

pytestmark = pytest.mark.java


class Pulsar(NamedTuple):
    """A cluster with room for a broker, which `start` starts: in a chroot of its own, with the ledgers in it."""

    cluster: Cluster
    start: Callable[[], Ask]

    def findings(self) -> set[tuple[str, str, str]]:
        found = CommandLine(self.cluster.uri)("pulsar", "check", "--pause", "1s", "-o", "ndjson")
        assert found.code in (0, 3), found.err
        rows = map(json.loads, found.out.splitlines())
        return {(row["code"], row["topic"], row["ledgerId"]) for row in rows}

    def bkctl(self, *words: str) -> list[dict[str, Any]]:
        return CommandLine(self.cluster.uri)("pulsar", *words, "-o", "ndjson").rows

    def show(self, topic: str) -> Any:
        return json.loads(CommandLine(self.cluster.uri)("pulsar", "topic", topic, "-o", "json").out)

    def lose(self, ledger_id: int) -> None:
        self.cluster.ledgers.remove(LedgerId(0, ledger_id))


@pytest.fixture
def pulsar(request: pytest.FixtureRequest, zookeeper: ZooKeeperServer, tmp_path: Path) -> Iterator[Pulsar]:
    chroot = zookeeper.new_root()
    uri = zookeeper.metadata_uri(f"{chroot}/ledgers")
    with ExitStack() as stack:
        cluster = stack.enter_context(open_cluster(uri, create=True))
        bookies = OwnCluster(uri, tmp_path, [SORTED, SORTED, SORTED])
        stack.callback(bookies.kill)
        bookies.ensure_up()
        java = JavaOnPulsar()
        offloaded = tmp_path / "offloaded"
        offloaded.mkdir()

        def start() -> Ask:
            # While a dead broker's session lasts, others send its topics' clients to it.
            brokers = PulsarNodes(cluster.store, None)
            wait_for(lambda: brokers.brokers_since_ms() is None, "the end of a dead broker's session")
            store = f"zk:{zookeeper.connect_string}{chroot}"
            return stack.enter_context(
                conversation(
                    java,
                    "org.apache.pulsar.broker.PulsarBroker",
                    store,
                    uri,
                    *request.param,
                    offloaded,
                    errors_raise=True,
                )
            )

        yield Pulsar(cluster, start)


@pytest.mark.parametrize("pulsar", [("NONE", 1)], indirect=True)
def test_all_that_a_broker_keeps_is_named(pulsar: Pulsar) -> None:
    ask = pulsar.start()
    topics = {name: f"persistent://public/default/{name}" for name in ("orders", "delayed", "typed")}
    for subscription in ("slow", "fast"):  # Messages before a subscription may be deleted.
        ask("subscribe", ORDERS, subscription, 0)
    ask("produce", ORDERS, 25)
    ask("subscribe", ORDERS, "slow", 12)
    ask("subscribe", ORDERS, "fast", 25)
    ask("schema", topics["typed"])
    assert ask("compact", ORDERS) == {"status": "SUCCESS"}
    ask("produce", ORDERS, 5)
    assert ask("compact", ORDERS) == {"status": "SUCCESS"}
    ask("produce", topics["delayed"], 1)
    ask("delay", topics["delayed"], "d", 40)
    assert pulsar.findings() == set()
    time.sleep(2)  # Until the positions are written.
    for name, topic in topics.items():
        truth, (shown,) = ask("ledgers", topic), [pulsar.show(topic)]
        of = {role: [int(each["ledgerId"]) for each in shown["ledgers"] if each["role"] == role] for role in ROLES}
        assert of["managed-ledger"] == truth["ledgers"], name
        assert set(of["cursor"]) == {ledger for ledger, _, _ in truth["cursors"].values() if ledger >= 0}
        assert of["compacted-ledger"] == [truth["compacted"]] * (truth["compacted"] >= 0)
        assert [int(each) for each in shown["schemaLedgerIds"]] == truth["schemas"]
        positions = {each["cursor"]: each["position"] for each in shown["cursors"]}
        assert positions == {cursor: position for cursor, (_, position, _) in truth["cursors"].items()}
        assert {each["cursor"]: each["backlogEntryCount"] for each in shown["cursors"]} == ask("backlog", topic)
    row = {row["topic"]: row for row in pulsar.bkctl("topics")}[ORDERS]
    assert (row["entryCount"], row["backlogEntryCount"], row["heldBy"]) == (20, 18, "slow")
    assert len([each for each in pulsar.show(topics["delayed"])["ledgers"] if "bucket" in each["role"]]) >= 1


@pytest.mark.parametrize("pulsar", [("ZSTD", 60)], indirect=True)
def test_orphans_of_a_dead_broker_are_found_and_deleted(pulsar: Pulsar) -> None:
    ask = pulsar.start()
    for topic in (ORDERS, EVENTS):
        ask("subscribe", topic, "all", 0)
    ask("produce", ORDERS, 35)
    ask("subscribe", ORDERS, "all", 3)
    ask("produce", EVENTS, 15)
    ask("subscribe", EVENTS, "all", 15)
    ask("arm", "create")
    created = ask("produce", ORDERS, 10)["created"]
    assert pulsar.findings() == {("orphan", ORDERS, str(created))}
    ask = pulsar.start()
    for topic in (ORDERS, EVENTS):  # Loading a topic deletes ledgers, too: those without entries.
        ask("produce", topic, 1)
    time.sleep(2)
    ask("arm", "delete")
    kept = ask("skip", ORDERS, "all")
    kept = kept if "kept" in kept else ask("trim", ORDERS)
    expected = {("orphan", ORDERS, str(created)), ("orphan", ORDERS, str(kept["kept"]))}
    assert pulsar.findings() >= expected
    ask = pulsar.start()
    before = ask("ledgers", EVENTS)
    ask("ledgers", ORDERS)
    found = pulsar.findings()
    assert found >= expected
    assert {(code, topic) for code, topic, _ in found} == {("orphan", ORDERS)}
    command = ("orphans", "--delete", "--yes", "--pause", "1s")
    assert pulsar.bkctl(*command, "--dry-run") == []  # Too young.
    deleted = {int(row["ledgerId"]) for row in pulsar.bkctl(*command, "--min-age", "0s")}
    assert deleted >= {created, kept["kept"]}
    assert pulsar.findings() == set()
    assert ask("ledgers", EVENTS) == before
    for topic in (ORDERS, EVENTS):
        ask("subscribe", topic, "again", 0)
        ask("produce", topic, 15)
        ask("subscribe", topic, "again", 15)


@pytest.mark.long
@pytest.mark.parametrize("pulsar", [("LZ4", 60)], indirect=True)
def test_losses_are_found_exactly_beside_a_broker_under_load(pulsar: Pulsar) -> None:
    ask = pulsar.start()
    lost = "persistent://public/default/lost"
    ask("subscribe", lost, "s", 0)
    ask("produce", lost, 25)
    ask("subscribe", lost, "s", 5)
    ask("compact", lost)
    ask("schema", "public/default/typed")
    truth, schema = ask("ledgers", lost), ask("ledgers", "public/default/typed")["schemas"][0]
    ask("namespace", "public/gone")
    ask("subscribe", "persistent://public/gone/x", "s", 0)
    ask("produce", "persistent://public/gone/x", 25)
    ask("subscribe", "persistent://public/gone/x", "s", 5)
    message, cursor, compacted = truth["ledgers"][0], truth["cursors"]["s"][0], truth["compacted"]
    for ledger_id in (message, cursor, compacted, schema):
        pulsar.lose(ledger_id)
    planted = {
        ("ledger-missing", lost, str(message)),
        ("cursor-ledger-missing", lost, str(cursor)),
        ("compacted-ledger-missing", lost, str(compacted)),
        ("schema-ledger-missing", "public/default/typed", str(schema)),
    }

    def load() -> None:
        ask("drop", "public/gone")
        for number in range(6):
            ask("subscribe", f"persistent://public/default/load-{number % 3}", "s", 0)
            ask("produce", f"persistent://public/default/load-{number % 3}", 60)
            ask("subscribe", f"persistent://public/default/load-{number % 3}", "s", 55)
            ask("trim", f"persistent://public/default/load-{number % 3}")
            ask("compact", f"persistent://public/default/load-{number % 3}")
        for number in range(3):
            ask("delete", f"persistent://public/default/load-{number}")

    with ThreadPoolExecutor(1) as executor:
        busy = executor.submit(load)
        looks = [pulsar.findings()]
        while not busy.done():
            looks.append(pulsar.findings())
        busy.result()
    looks += [pulsar.findings(), pulsar.findings()]
    assert looks == [planted] * len(looks)


@pytest.mark.long
@pytest.mark.parametrize("pulsar", [("ZLIB", 60)], indirect=True)
def test_offloaded_ledgers_are_neither_lost_nor_orphans(pulsar: Pulsar, tmp_path: Path) -> None:
    def copies() -> dict[int, tuple[str, str | None]]:
        """The offload of each ledger of messages, and what became of BookKeeper's copy."""
        ledgers = pulsar.show(ORDERS)["ledgers"]
        found = [each for each in ledgers if each["role"] == "managed-ledger" and each["offload"]]
        for each in found:
            assert each["offloadedTo"] == {"storageBasePath": str(tmp_path / "offloaded")}
            assert (tmp_path / "offloaded" / f"{each['ledgerId']}-{each['offloadId']}").exists()
            assert each["offloaded"] == ("filesystem" if each["offload"] == "complete" else None)
        return {int(each["ledgerId"]): (each["offload"], each["bookkeeperCopy"]) for each in found}

    ask = pulsar.start()
    ask("lag", 3_600_000)
    ask("subscribe", ORDERS, "s", 0)
    ask("produce", ORDERS, 35)
    first, second, third, _ = ask("ledgers", ORDERS)["ledgers"]

    ask("arm", "offload")
    assert ask("offload", ORDERS) == {"copied": first}
    assert copies() == {first: ("started", None)}
    assert pulsar.findings() == set()

    ask = pulsar.start()
    ask("lag", 3_600_000)
    assert ask("offload", ORDERS) == {}
    assert ask("ledgers", ORDERS)["offloaded"] == [first, second, third]
    assert copies() == dict.fromkeys((first, second, third), ("complete", "kept"))
    row = {row["topic"]: row for row in pulsar.bkctl("topics")}[ORDERS]
    assert row["offloadedSize"] == sum(
        each["size"] for each in pulsar.show(ORDERS)["ledgers"] if int(each["ledgerId"]) in (first, second, third)
    )
    assert pulsar.findings() == set()
    assert pulsar.bkctl("orphans", "--min-age", "0s", "--pause", "1s") == []

    pulsar.lose(second)  # The messages are in tiered storage.
    assert copies()[second] == ("complete", "lost")
    assert pulsar.findings() == set()

    ask("lag", 0)
    ask("arm", "delete")
    assert ask("trim", ORDERS) == {"kept": first}
    assert copies() == {
        first: ("complete", "left"),
        second: ("complete", "deleted"),
        third: ("complete", "left"),
    }
    left = {("offloaded-left", ORDERS, str(first)), ("offloaded-left", ORDERS, str(third))}
    assert pulsar.findings() == left
    assert pulsar.bkctl("orphans", "--min-age", "0s", "--pause", "1s") == []

    ask = pulsar.start()
    ask("produce", ORDERS, 10)
    ask("subscribe", ORDERS, "again", 45)  # All messages are there.
    assert pulsar.findings() == left
    pulsar.lose(third)
    assert pulsar.findings() == {("offloaded-left", ORDERS, str(first))}
    ask("lag", 0)
    assert ask("offload", ORDERS) == {}
    ask("trim", ORDERS)
    deleted = {ledger: copy for ledger, (_, copy) in copies().items()}
    assert deleted.pop(first) == "left"
    assert set(deleted.values()) == {"deleted"}
    assert len(deleted) >= 3
    assert pulsar.findings() == {("offloaded-left", ORDERS, str(first))}

    for subscription in ("s", "again"):
        ask("skip", ORDERS, subscription)
    ask("trim", ORDERS)
    assert first not in ask("ledgers", ORDERS)["ledgers"]
    assert pulsar.findings() == {("orphan", ORDERS, str(first))}
    (orphan,) = pulsar.bkctl("orphans", "--delete", "--yes", "--pause", "1s", "--min-age", "0s")
    assert orphan["ledgerId"] == str(first)
    assert pulsar.findings() == set()
