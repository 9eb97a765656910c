"""Explanations: facts, ways that can be pasted, topics, and ledgers that stay on a bookie that leaves."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, MagicMock

import pytest
from client.fakes import FakeCluster
from support.command_line import CommandLine

from bkctl.client.placement import Placement
from bkctl.formats.entry import DigestType
from bkctl.formats.metadata import BookieEndpoint, BookieServiceInfo, Cookie, Fragment, LedgerMetadata, LedgerState
from bkctl.http.why import Inquiry
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import Cluster, open_cluster
from bkctl.metadata.underreplication import LedgerMarks, ReplicationFailure, ReplicationFailures

ODD = "b1;ls>[x]"
TOPIC = {
    "application": b"pulsar",
    "component": b"managed-ledger",
    "pulsar/managed-ledger": b"public/default/persistent/t",
}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with open_cluster(f"sqlite://{tmp_path}/my metadata.db", create=True) as cluster:
        for bookie_id in (ODD, "b2", "b3"):
            cookie = Cookie(bookie_id, ("/j",), ("/l",), instance_id=cluster.instance_id())
            cluster.cookies.write(bookie_id, cookie, -1)
        yield cluster


def add(cluster: Cluster, ledger: LedgerId, bookies: tuple[str, ...], *, is_open: bool = False, **more: Any) -> None:
    state = {} if is_open else {"state": LedgerState.CLOSED, "last_entry_id": 9, "length": 90}
    metadata = LedgerMetadata(2, 2, 2, DigestType.CRC32C, b"", (Fragment(0, bookies),), **state, **more)
    cluster.ledgers.create(ledger, metadata)


def test_names_from_the_store_cannot_steer_the_terminal(cluster: Cluster) -> None:
    endpoint = BookieEndpoint("bookie", 1, "h\x1b[31mX\u202e\x1b]0;pwn\x07", "bookie-rpc")
    cluster.bookies.register("b2", BookieServiceInfo((endpoint,), {}))
    shown = CommandLine(cluster.uri)("why", "bookie", "b2", "--timeout", "5s")
    assert not {"\x1b", "\x07", "\u202e"} & {*shown.out.decode(), *shown.err}
    assert "\\x1b[31mX" in shown.out.decode()


def test_ways_name_the_cluster_and_quote_odd_bookie_ids(cluster: Cluster) -> None:
    add(cluster, LedgerId(0, 1), (ODD, "b2"))
    shell = CommandLine(None)
    for words in (("why", "ledger", "1"), ("why", "bookie", ODD), ("why", "create")):
        done = shell(*words, "-u", cluster.uri, "--timeout", "5s", "-o", "json")
        assert done.code == 0, done.err
        ways = [shlex.split(way["command"]) for way in json.loads(done.out)["ways"]]
        assert ways
        for way in ways:
            assert not {"b1", "ls", "b1;ls"}.intersection(way), way
            if "CONF" not in way:
                assert way[-2:] == ["--metadata-uri", cluster.uri]
    rows = json.loads(shell("cluster", "health", "-u", cluster.uri, "-o", "json").out)
    assert {tuple(shlex.split(row["nextCommand"])[-2:]) for row in rows} == {("--metadata-uri", cluster.uri)}
    inside = CommandLine(cluster.uri)
    rows = json.loads(inside("cluster", "health", "-o", "json").out)
    assert not any("--metadata-uri" in row["nextCommand"] for row in rows)


def test_passwords_of_the_store_are_not_in_ways() -> None:
    from bkctl.commands.kit.next_steps import name_connection, pasted
    from bkctl.commands.kit.settings import GlobalOptions

    name_connection(GlobalOptions(metadata_uri="etcd://u:secret@h:1/x", conf=Path("/etc/a b.conf")))
    try:
        assert "secret" not in pasted("bkctl bookie gc")
        assert pasted("bkctl bookie gc").endswith(" --conf '/etc/a b.conf'")
        assert pasted("kill -CONT 7") == "kill -CONT 7"
        assert pasted("bkctl local up") == "bkctl local up"
    finally:
        name_connection(GlobalOptions())


@pytest.mark.parametrize("scope", [0, 7])
def test_why_ledger_names_the_topic(cluster: Cluster, scope: int) -> None:
    add(cluster, LedgerId(scope, 1), ("b2", "b3"), custom_metadata=TOPIC)
    done = CommandLine(cluster.uri)("why", "ledger", str(LedgerId(scope, 1)), "--timeout", "5s", "-o", "json")
    assert "public/default/t" in json.dumps(json.loads(done.out)["facts"])


@pytest.mark.parametrize("scope", [0, 7])
def test_why_bookie_says_why_a_decommission_does_not_end(cluster: Cluster, scope: int) -> None:
    cluster.bookies.register("b2", BookieServiceInfo())
    cluster.bookies.register("b3", BookieServiceInfo())
    alone, failed, opened, free = (LedgerId(scope, number) for number in range(1, 5))
    add(cluster, alone, (ODD, "gone"))
    add(cluster, failed, (ODD, "b2"))
    add(cluster, opened, (ODD, "b2"), is_open=True)
    if scope == 0:  # bookies that know scopes are registered as such
        add(cluster, free, (ODD, "b2"))
    LedgerMarks(cluster.store).add(failed, [ODD])
    ReplicationFailures(cluster.store).publish(ReplicationFailure(failed, 3, "b2 does not answer", "w1", 1, None))
    done = CommandLine(cluster.uri)("why", "bookie", ODD, "--timeout", "5s", "-o", "json")
    assert done.code == 0, done.err
    stay = [fact["what"] for fact in json.loads(done.out)["facts"] if fact["what"].startswith("Ledgers that stay")]
    text = "\n".join(stay)
    assert f"({alone}): no bookie that is up has all entries from 0 on" in text
    assert f"({failed}): worker w1 failed 3 times: b2 does not answer" in text
    assert f"({opened}): " in text
    assert str(free) not in text.replace(f"({failed}", "")


async def test_why_ledger_says_of_which_entries_some_are_missing(fake_cluster: Callable[..., Any]) -> None:
    async with fake_cluster(3) as cluster, cluster.client() as client:
        writer = await client.create_ledger(ensemble_size=3, write_quorum_size=3, ack_quorum_size=2)
        for _ in range(40):
            await writer.add(b"x")
        await writer.close()
        for bookie in cluster.bookies[:2]:
            for entry_id in range(25, 40):
                del bookie.ledgers[writer.ledger].entries[entry_id]
        inquiry = Inquiry(client, cast(Any, None), cast(Any, None), cast(Any, None))
        why = await inquiry.ledger(writer.ledger)
        text = "Bookie b0 does not serve all of the entries 0 to 39: Entry 39 of ledger"
        assert any(fact.what.startswith(text) for fact in why.facts), why.facts
        assert [way.command for way in why.ways].count(f"bkctl ledger verify {writer.ledger}") == 1


@pytest.mark.parametrize("ack_quorum_size", [1, 2])
def test_why_ledger_offers_a_recovery_only_if_enough_bookies_answer(cluster: Cluster, ack_quorum_size: int) -> None:
    async def ways() -> list[str]:
        bookies = FakeCluster(cluster)
        first, other = [await bookies.add_bookie() for _ in range(2)]
        async with bookies.client() as client:
            writer = await client.create_ledger(
                ensemble_size=2, write_quorum_size=2, ack_quorum_size=ack_quorum_size, password=b""
            )
            await writer.add(b"entry")
            await first.stop()
            bookies.unregister(first)
            inquiry = Inquiry(client, Placement(), lambda _: {}, lambda _: pytest.fail("asked"))
            found = await inquiry.ledger(writer.ledger)
        await other.stop()
        return [way.command for way in found.ways]

    offered = [command for command in asyncio.run(ways()) if "ledger recover" in command]
    assert len(offered) == (ack_quorum_size == 2)


def test_why_bookie_restores_a_lost_or_damaged_cookie_before_a_start(cluster: Cluster) -> None:
    add(cluster, LedgerId(0, 1), ("b2", "b3"))
    cluster.store.put("cookies/b3", b"nonsense", None)
    for bookie_id, verb in (("b2", "create"), ("b3", "update")):
        if verb == "create":
            cluster.cookies.remove(bookie_id, None)
        done = CommandLine(cluster.uri)("why", "bookie", bookie_id, "--timeout", "5s", "-o", "json")
        ways = json.loads(done.out)["ways"]
        assert ways[0]["command"].startswith(f"bkctl cookie {verb} {bookie_id} DIR/current/VERSION")
        start = next(way["effect"] for way in ways if way["command"].startswith("bkctl bookie start"))
        assert start.startswith("starts it once its cookie is restored")


@pytest.mark.parametrize("low_mark", [None, "0.9"])
async def test_why_space_raises_the_low_water_mark_too(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, low_mark: str | None
) -> None:
    cluster.bookies.register("b2", BookieServiceInfo())
    used = AsyncMock(return_value=[SimpleNamespace(error=None, used_percent=96.0)])
    monkeypatch.setattr("bkctl.http.why.member_space", used)
    api = MagicMock()
    api.metrics.return_value = "bookie_gc_ACTIVE_ENTRY_LOG_SPACE_BYTES 0\nbookie_gc_RECLAIMED_DELETION_SPACE_BYTES 7\n"
    api.config.return_value = {"diskUsageThreshold": "0.95"} | (
        {} if low_mark is None else {"diskUsageLwmThreshold": low_mark}
    )
    why = await Inquiry(SimpleNamespace(cluster=cluster), MagicMock(), MagicMock(), lambda _: api).space("b2")  # type: ignore[arg-type]
    (way,) = (each.command for each in why.ways if "bookie config" in each.command)
    assert "--set diskUsageThreshold=0.99 --set diskUsageWarnThreshold=0.98" in way
    assert ("--set diskUsageLwmThreshold=0.98" in way) is (low_mark is not None)
    facts = [fact.what for fact in why.facts if "bytes" in fact.what]
    assert facts == ["bytes reclaimed by deletion: 7"]  # The logs are not counted before the first collection.


def test_why_bookie_says_what_a_decommission_waits_for(cluster: Cluster) -> None:
    cluster.bookies.register("b2", BookieServiceInfo())
    for number in (1, 2):
        add(cluster, LedgerId(0, number), (ODD, "b2"))
    failure = ReplicationFailure(LedgerId(0, 2), 1, "b2 does not answer", "w1", 1, None)
    ReplicationFailures(cluster.store).publish(failure)
    done = CommandLine(cluster.uri)("why", "bookie", ODD, "--timeout", "5s", "-o", "json")
    why = json.loads(done.out)
    text = "\n".join(fact["what"] for fact in why["facts"])
    assert "1 writable bookie is needed outside its ensemble in place of lost ones; found: 0; start another" in text
    assert "worker w1 failed 1 time: " in text
    (leave,) = (way["effect"] for way in why["ways"] if "decommission" in way["command"])
    assert "once the reasons why ledgers stay are mended" in leave


def test_why_ledger_says_once_that_its_end_is_unknown(cluster: Cluster) -> None:
    add(cluster, LedgerId(0, 1), (ODD, "b2"), is_open=True)
    done = CommandLine(cluster.uri)("why", "ledger", "1", "--timeout", "5s", "-o", "json")
    (fact,) = (each["what"] for each in json.loads(done.out)["facts"] if "confirmed" in each["what"])
    assert fact.lower().count("last add confirmed") == 1


def test_why_ledger_explains_an_empty_ledger_whose_bookies_are_down(cluster: Cluster) -> None:
    shape = {"state": LedgerState.CLOSED, "last_entry_id": -1, "length": 0}
    metadata = LedgerMetadata(2, 2, 2, DigestType.CRC32C, b"", (Fragment(0, (ODD, "b2")),), **shape)  # type: ignore[arg-type]
    cluster.ledgers.create(LedgerId(0, 1), metadata)
    done = CommandLine(cluster.uri)("why", "ledger", "1", "--timeout", "5s", "-o", "json")
    assert json.loads(done.out)["verdict"] == "The ledger is empty: no entry can be missing"
