from __future__ import annotations

import json
from pathlib import Path

import pytest

from bkctl.errors import BkctlError, Corrupt, UsageError
from bkctl.formats.metadata import BookieEndpoint, BookieServiceInfo
from bkctl.metadata.cluster import Cluster, RegisteredBookie, open_cluster
from bkctl.metadata.racks import BookieRack, BookieRacks, KnownRacks, Topology, check_rack, racks_of
from bkctl.metadata.store import RACKS, full_path


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return open_cluster(f"sqlite://{tmp_path / 'metadata.db'}", create=True)


def stored(cluster: Cluster) -> object:
    found = cluster.store.get(RACKS)
    return None if found is None else json.loads(found.value)


def test_racks_are_beside_the_root() -> None:
    assert full_path("/ledgers", RACKS) == "/bookies"
    assert full_path("/pulsar/ledgers", RACKS) == "/pulsar/bookies"
    assert full_path("/ledgers", "cookies/b:1") == "/ledgers/cookies/b:1"
    for path in ("../ledgers", "../bookies/x", "..", "../../bookies"):
        with pytest.raises(UsageError):
            full_path("/ledgers", path)


def test_a_bookie_moves_between_racks_and_groups(cluster: Cluster) -> None:
    racks = BookieRacks(cluster)
    assert racks.all() == []
    racks.set(["b1:1", "b2:1"], "r1", hostname="h")
    racks.set(["b1:1"], "/r2", group="other")
    assert stored(cluster) == {
        "default": {"b2:1": {"hostname": "h", "rack": "/r1"}},
        "other": {"b1:1": {"hostname": "h", "rack": "/r2"}},
    }
    assert racks.all() == [BookieRack("b2:1", "/r1", "default", "h"), BookieRack("b1:1", "/r2", "other", "h")]
    assert racks.unset(["b3:1"]) == []
    assert racks.unset(["b1:1", "b3:1"], dry_run=True) == racks.unset(["b1:1", "b3:1"])
    assert stored(cluster) == {"default": {"b2:1": {"hostname": "h", "rack": "/r1"}}, "other": {}}


def test_fields_that_pulsar_writes_are_read_and_kept(cluster: Cluster) -> None:
    written = {
        "default": {"b1:1": {"rack": "r1", "hostname": None, "zone": 7}, "b2:1": {"rack": " / "}, "b3:1": {}},
        "europe": {"b4:1": {"rack": "/region/r2", "hostname": "four"}},
    }
    cluster.store.put(RACKS, json.dumps(written).encode(), None)
    racks = BookieRacks(cluster)
    assert [each.rack for each in racks.all()] == ["/r1", None, None, "/region/r2"]
    racks.set(["b1:1"], "/r9")
    assert stored(cluster)["default"]["b1:1"] == {"rack": "/r9", "hostname": None, "zone": 7}  # type: ignore[index]


@pytest.mark.parametrize("value", [b"x", b"[]", b'{"default":[]}', b'{"default":{"b:1":"/r"}}', b"[" * 100_000])
def test_another_node_is_refused_and_left_alone(cluster: Cluster, value: bytes) -> None:
    cluster.store.put(RACKS, value, None)
    racks = BookieRacks(cluster)
    for action in (racks.all, lambda: racks.set(["b:1"], "/r"), lambda: racks.unset(["b:1"])):
        with pytest.raises(Corrupt, match="racks"):
            action()
    found = cluster.store.get(RACKS)
    assert found is not None
    assert found.value == value


def test_bookies_get_racks_by_id_address_and_host() -> None:
    def bookie(bookie_id: str, host: str, port: int) -> RegisteredBookie:
        return RegisteredBookie(
            bookie_id, "rw", BookieServiceInfo((BookieEndpoint("bookie", port, host, "bookie-rpc"),))
        )

    racks = [
        BookieRack("named", "/r1", "default", None),
        BookieRack("10.0.0.2:3181", "/r2", "default", None),
        BookieRack("10.0.0.3:3181", None, "default", None),
    ]
    bookies = [
        bookie("named", "10.0.0.1", 3181),
        bookie("uuid", "10.0.0.2", 3181),
        bookie("second-on-host", "10.0.0.2", 3182),
        bookie("10.0.0.3:3181", "10.0.0.3", 3181),
    ]
    assert racks_of(racks, bookies) == {"named": "/r1", "uuid": "/r2", "second-on-host": "/r2"}


@pytest.mark.parametrize("text", ["", "/", " ", "//r", "/r/", "/a\nb"])
def test_a_rack_has_a_name(text: str) -> None:
    with pytest.raises(UsageError, match="Not a rack"):
        check_rack(text)


def bookie(name: str, *, host: str | None = None) -> RegisteredBookie:
    return RegisteredBookie(
        name, "rw", BookieServiceInfo((BookieEndpoint("bookie", 3181, host or name, "bookie-rpc"),))
    )


def script(tmp_path: Path, text: str) -> str:
    path = tmp_path / "racks"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_script_gets_each_host_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bkctl.metadata.racks.SCRIPT_ARGUMENT_COUNT_MAX", 2)
    log = tmp_path / "calls"
    tell = script(tmp_path, f'echo "$@" >> {log}\nfor host in "$@"; do echo "/rack-$host"; done')
    topology = Topology(tell)
    bookies = [bookie("a", host="h1"), bookie("b", host="h2"), bookie("c", host="h3"), bookie("d", host="h1")]
    assert topology.racks(bookies) == {"a": "/rack-h1", "b": "/rack-h2", "c": "/rack-h3", "d": "/rack-h1"}
    assert log.read_text().split("\n") == ["h1 h2", "h3", ""]
    topology.racks([*bookies, bookie("e", host="h4"), RegisteredBookie("no-address", "rw", None)])
    assert log.read_text().split("\n")[2:] == ["h4", ""]


@pytest.mark.parametrize("text", ["exit 3", "echo /1", "echo /1 /2 /3"])
def test_failing_script_is_an_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(BkctlError, match="for 2 hosts"):
        Topology(script(tmp_path, text)).racks([bookie("a"), bookie("b")])


def test_missing_script_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BkctlError, match="Network topology script"):
        Topology(str(tmp_path / "none")).racks([bookie("a")])


def test_invalid_hosts_never_reach_the_script(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    script = tmp_path / "topology"
    script.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >> "{tmp_path}/asked"\nfor host; do echo "/rack-$host"; done\n')
    script.chmod(0o755)
    hostile = ["--output=/etc/passwd", "-x", "", " ", "a b", "$(id)", "a;b", "a\nb", "h" * 256, "../x", "\u00e9", "%a"]
    fine = ["bookie-1.example", "10.0.0.1", "fe80::1%eth0", "::1", "under_score"]
    bookies = [bookie(f"bad-{at}", host=host or " ") for at, host in enumerate(hostile)]
    bookies += [bookie(f"good-{at}", host=host) for at, host in enumerate(fine)]
    topology = Topology(str(script))
    expected = {f"good-{at}": f"/rack-{host}" for at, host in enumerate(fine)}
    assert topology.racks(bookies) == topology.racks(bookies) == expected
    assert sorted((tmp_path / "asked").read_text().splitlines()) == sorted(fine)
    assert len(caplog.messages) == len(hostile)  # each is said once


def test_placement_reads_racks_anew_after_a_while(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    now, reads = [1000.0], []
    monkeypatch.setattr("bkctl.metadata.racks.time.monotonic", lambda: now[0])
    get = cluster.store.get
    monkeypatch.setattr(cluster.store, "get", lambda path: (reads.append(path), get(path))[1])
    known = KnownRacks(cluster.store)
    assert known.racks([bookie("b1:1")]) == {}
    BookieRacks(cluster).set(["b1:1"], "/r1")
    reads.clear()
    assert known.racks([bookie("b1:1")]) == {}
    assert reads == []
    now[0] += 11
    assert known.racks([bookie("b1:1"), bookie("b2:1")]) == {"b1:1": "/r1"}
    assert reads == [RACKS]


def test_placement_keeps_known_racks_while_the_node_is_damaged(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("bkctl.metadata.racks.RACKS_AGE_S", -1)
    BookieRacks(cluster).set(["b1:1"], "/r1")
    known, strict = KnownRacks(cluster.store), KnownRacks(cluster.store, must_be_known=True)
    assert known.racks([bookie("b1:1")]) == strict.racks([bookie("b1:1")]) == {"b1:1": "/r1"}
    cluster.store.put(RACKS, b"[]", None)
    for _ in range(3):
        assert known.racks([bookie("b1:1")]) == {"b1:1": "/r1"}
    assert len(caplog.messages) == 1
    with pytest.raises(Corrupt, match="racks"):
        strict.racks([bookie("b1:1")])


def test_racks_of_a_script_count_before_stored_ones(cluster: Cluster, tmp_path: Path) -> None:
    BookieRacks(cluster).set(["a", "no-address"], "/stored")
    known = KnownRacks(cluster.store, script(tmp_path, 'for host in "$@"; do echo "/rack-$host"; done'))
    bookies = [bookie("a", host="h1"), RegisteredBookie("no-address", "rw", None)]
    assert known.racks(bookies) == {"a": "/rack-h1", "no-address": "/stored"}
