"""Our metadata beside that of Apache's own driver on one etcd: the same keys and bytes, and never our scopes."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import servers
from support.own_bookies import OwnBookie
from support.own_cluster import start_all, stop_all

from bkctl.client.ledger import BookKeeper
from bkctl.errors import LedgerExists, LedgerNotFound, MetadataVersionConflict
from bkctl.formats.entry import DigestType
from bkctl.formats.metadata import Cookie, Fragment, LedgerMetadata, LedgerState
from bkctl.ids import I64_MAX, LedgerId
from bkctl.metadata.backends.etcd.etcd_connection import etcd3
from bkctl.metadata.cluster import Cluster, open_cluster

pytestmark = pytest.mark.java

METADATA = LedgerMetadata(
    2, 2, 1, DigestType.CRC32C, b"secret", (Fragment(0, ("127.0.0.1:3181", "bookie-2")),), c_token=0
)
SCOPED = [LedgerId(7, 1), LedgerId(7, 1 << 40), LedgerId((1 << 64) - 1, (1 << 64) - 1)]
#: Apache's driver lists up to 2^63 - 2.
EDGES = [0, 1, 9999, 1 << 31, 1 << 40, 3 << 56 | 5, I64_MAX - 1]

Ask = Callable[..., dict[str, Any]]


def raw(etcd: Any, root: str) -> dict[str, bytes]:
    """All keys of a root and their values, read by etcd3 alone."""
    with etcd3.client(port=etcd.port) as client:
        return {found.key.decode(): value for value, found in client.get_prefix(root)}


@pytest.fixture
def root(etcd: Any) -> str:
    found: str = etcd.new_root()
    return found


@pytest.fixture
def uri(etcd: Any, root: str) -> str:
    """A root that we made, and Apache's classes work on."""
    found: str = etcd.metadata_uri(root)
    open_cluster(found, create=True).close()
    return found


@pytest.fixture
def cluster(uri: str) -> Iterator[Cluster]:
    with open_cluster(uri) as opened:
        yield opened


@pytest.fixture
def apache(java_on_etcd: Any, uri: str) -> Iterator[Ask]:
    """Apache's metadata classes on the same root: `apache("read", 5)`."""
    with tempfile.TemporaryFile("w+") as errors:
        program = java_on_etcd.start("LedgerMetadataStore", uri, stderr=errors)

        def ask(*words: object) -> dict[str, Any]:
            program.stdin.write(" ".join(map(str, words)) + "\n")
            program.stdin.flush()
            line = program.stdout.readline()
            if not line:
                errors.seek(0)
                raise servers.JavaFailed(errors.read()[-6000:])
            answer: dict[str, Any] = json.loads(line)
            return answer

        try:
            yield ask
        finally:
            program.stdin.close()
            java_on_etcd.end(program)


def test_new_cluster_has_the_keys_of_apaches_driver(
    java_on_etcd: Any, etcd: Any, root: str, uri: str, tmp_path: Path
) -> None:
    theirs = etcd.new_root()
    there = f"etcd+hierarchical://{etcd.connect_string}{theirs}"
    conf = servers.shell_conf(tmp_path / "shell.conf", there)
    java_on_etcd.shell(conf, "initnewcluster", check=True)
    made = {key.removeprefix(theirs): value for key, value in raw(etcd, theirs).items()}
    ours = {key.removeprefix(root): value for key, value in raw(etcd, root).items()}
    assert len(made.pop("/instanceid")) == len(ours.pop("/instanceid")) == 36
    assert made == ours
    assert len(ours) == 9
    with open_cluster(etcd.metadata_uri(theirs)) as opened:
        assert opened.instance_id() == raw(etcd, theirs)[f"{theirs}/instanceid"].decode()
        assert opened.layout().manager_version == 0
        assert list(opened.ledgers.ledgers(None)) == []


def test_apache_and_bkctl_read_each_others_ledgers_and_scopes_stay_hidden(
    cluster: Cluster, apache: Ask, etcd: Any, root: str
) -> None:
    versions = {}
    for index, ledger_id in enumerate(EDGES):
        if index % 2:
            versions[ledger_id] = cluster.ledgers.create(LedgerId(0, ledger_id), METADATA)
            assert apache("create", ledger_id) == {"error": -20}
        else:
            versions[ledger_id] = apache("create", ledger_id)["version"]
            with pytest.raises(LedgerExists):
                cluster.ledgers.create(LedgerId(0, ledger_id), METADATA._replace(c_token=None))
    for ledger in SCOPED:
        cluster.ledgers.create(ledger, METADATA)

    names = [str(ledger_id) for ledger_id in EDGES]
    assert [str(ledger) for ledger in cluster.ledgers.ledgers()] == names
    assert apache("list")["ledgerIds"] == names
    assert list(cluster.ledgers.ledgers(None)) == [*(LedgerId(0, ledger_id) for ledger_id in EDGES), *SCOPED]
    values = raw(etcd, f"{root}/ledgers/")
    # Both were asked for the same ledger, and wrote the same bytes.
    assert {value for key, value in values.items() if key.startswith(f"{root}/ledgers/00000000-0000-0000-")} == {
        METADATA.serialize()
    }
    assert f"{root}/ledgers/00000000-0000-0000-0000-000000000001" in values
    assert f"{root}/ledgers/ffffffff-ffff-ffff-ffff-ffffffffffff" in values

    for ledger_id in EDGES:
        ours, theirs = cluster.ledgers.read(LedgerId(0, ledger_id)), apache("read", ledger_id)
        assert (ours.version, ours.metadata.state.name) == (theirs["version"], theirs["state"])
        assert ours.version == versions[ledger_id]
        assert list(ours.metadata.last_fragment.bookies) == theirs["bookies"]

    # A compare-and-set of either is seen by the other.
    closed = apache("close", EDGES[1], versions[EDGES[1]])["version"]
    assert closed > versions[EDGES[1]]
    with pytest.raises(MetadataVersionConflict):
        cluster.ledgers.write(LedgerId(0, EDGES[1]), METADATA, versions[EDGES[1]])
    found = cluster.ledgers.read(LedgerId(0, EDGES[1]))
    assert (found.version, found.metadata.state) == (closed, LedgerState.CLOSED)
    assert (found.metadata.last_entry_id, found.metadata.length) == (7, 70)
    written = cluster.ledgers.write(LedgerId(0, EDGES[0]), METADATA, versions[EDGES[0]])
    assert apache("close", EDGES[0], versions[EDGES[0]]) == {"error": -17}
    assert apache("close", EDGES[0], written)["state"] == "CLOSED"

    apache("remove", EDGES[3])
    with pytest.raises(LedgerNotFound):
        cluster.ledgers.read(LedgerId(0, EDGES[3]))
    cluster.ledgers.remove(LedgerId(0, EDGES[4]))
    assert apache("read", EDGES[4]) == {"error": -7}
    left = [str(ledger_id) for ledger_id in EDGES if ledger_id not in (EDGES[3], EDGES[4])]
    assert apache("list")["ledgerIds"] == [str(one) for one in cluster.ledgers.ledgers()] == left
    assert list(cluster.ledgers.scopes()) == [0, 7, (1 << 64) - 1]


def test_apache_and_bkctl_share_id_buckets(cluster: Cluster, apache: Ask, etcd: Any, root: str) -> None:
    """More than the 128 buckets have: so both counted in each, one after the other."""
    made = []
    for _ in range(140):
        made += [cluster.ledgers.new_ledger_id().ledger_id, int(apache("id")["ledgerId"])]
    assert len(set(made)) == 280
    assert {number >> 56 for number in made} == set(range(128))
    assert {number & (1 << 56) - 1 for number in made} >= {1, 2}
    assert max(number & (1 << 56) - 1 for number in made) <= 4
    buckets = raw(etcd, f"{root}/buckets/")
    assert buckets == {f"{root}/buckets/{bucket:03d}": b"" for bucket in range(128)}


def test_apaches_and_own_bookies_and_clients_share_a_cluster(
    java_on_etcd: Any, cluster: Cluster, uri: str, etcd: Any, root: str, tmp_path: Path
) -> None:
    theirs = servers.ApacheBookie(java_on_etcd, uri, tmp_path / "apache", servers.SORTED)
    ours = [OwnBookie(uri, tmp_path / f"own-{index}") for index in range(2)]
    try:
        start_all([theirs, *ours])
        keys = raw(etcd, root)
        assert keys[f"{root}/bookies/writable/{theirs.bookie_id}"] == b""
        cookie = Cookie.parse(keys[f"{root}/cookies/{theirs.bookie_id}"])
        assert (cookie.bookie_id, cookie.instance_id) == (theirs.bookie_id, cluster.instance_id())
        shown = {one.bookie_id: one for one in cluster.bookies.list()}
        assert set(shown) == {theirs.bookie_id, *(bookie.bookie_id for bookie in ours)}
        assert {one.state for one in shown.values()} == {"rw"}
        assert shown[theirs.bookie_id].address == ("127.0.0.1", theirs.port)
        assert [one.bookie_id for one in shown.values() if one.ledger_scopes] == sorted(b.bookie_id for b in ours)

        known = servers.write_ledgers(java_on_etcd, uri, "v3", small=True)
        there = [one for one in known if not one["deleted"]]
        scoped, payloads = LedgerId(7, 5), [b"one", b"two" * 100]

        async def use() -> int:
            async with BookKeeper(cluster) as client:
                for one in there:
                    reader = await client.open_ledger(int(one["ledgerId"]), password=None)
                    last = reader.last_add_confirmed
                    assert last == max(one["lastAddConfirmed"], one["explicitLac"] or -1), one["name"]
                    found = [entry async for entry in reader.read(0, last)] if last >= 0 else []
                    sizes = [(entry["entryId"], entry["size"]) for entry in one["entries"]]
                    assert [(entry.entry_id, len(entry.payload)) for entry in found] == sizes[: last + 1]
                for ledger, scope in ((None, 0), (scoped, 7)):
                    quorum = {"ensemble_size": 2 if scope else 3, "write_quorum_size": 2, "ack_quorum_size": 2}
                    if ledger is None:
                        writer = await client.create_ledger(password=b"pw", **quorum)
                        made = writer.ledger_id
                    else:
                        writer = await client.create_ledger_adv(
                            ledger.ledger_id, ledger_scope_id=scope, password=b"pw", **quorum
                        )
                    for payload in payloads:
                        await writer.ready()
                        writer.add(payload)
                    await writer.close()
                reader = await client.open_ledger(5, ledger_scope_id=7, password=b"pw")
                assert [entry.payload async for entry in reader.read(0, 1)] == payloads
                return int(made)

        made = asyncio.run(use())
        asked = [*there, {"ledgerId": str(made), "digestType": "CRC32C", "password": "cHc="}]
        answers = servers.read_ledgers(java_on_etcd, uri, "v3", asked)
        assert answers[-1]["state"] == "CLOSED"
        assert [entry["size"] for entry in answers[-1]["entries"]] == [3, 300]
        listed = java_on_etcd.shell(theirs, "listledgers", check=True).stdout
        assert str(made) in listed
        stop_all(ours)
        assert [one.bookie_id for one in cluster.bookies.list() if one.state == "rw"] == [theirs.bookie_id]
        theirs.stop()  # It leaves its lease behind.
        servers.wait_for(lambda: {one.state for one in cluster.bookies.list()} == {"down"}, "Apache's lease over")
    finally:
        for bookie in (theirs, *ours):
            bookie.kill()
