from __future__ import annotations

import json
from pathlib import Path

import pytest

from bkctl.errors import Corrupt, NotFound, UsageError
from bkctl.formats.metadata import BookieEndpoint, BookieServiceInfo
from bkctl.metadata.cluster import Cluster, RegisteredBookie, open_cluster
from bkctl.metadata.racks import BookieRack, BookieRacks, check_rack, racks_of
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
    with pytest.raises(NotFound, match="b3:1"):
        racks.unset(["b1:1", "b3:1"])
    assert len(racks.all()) == 2
    assert racks.unset(["b1:1"], dry_run=True) == racks.unset(["b1:1"])
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
