"""`bkctl bookies …` over three bookies of our own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.servers import free_port

from bkctl import __version__
from bkctl.bookie.local import LocalCluster
from bkctl.formats.metadata import BookieEndpoint, BookieServiceInfo, Cookie
from bkctl.metadata.cluster import open_cluster
from bkctl.metadata.store import NEW

from .conftest import Cli


@pytest.fixture(autouse=True)
def _connected(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BKCTL_METADATA_URI", cluster.metadata_uri)


@pytest.fixture
def odd_cluster(tmp_path: Path) -> str:
    """A cluster with a bookie that is down, one that is unreachable, and one with a damaged cookie."""
    uri = f"sqlite://{tmp_path / 'metadata.db'}"
    with open_cluster(uri, create=True) as cluster:
        cluster.cookies.write("down:1", Cookie("down:1", ("/j",), ("/l",), "i"), NEW)
        cluster.store.put("cookies/bad:1", b"x", NEW)
    return uri


def test_show_prints_every_known_field(cli: Cli, cluster: LocalCluster) -> None:
    bookie = cluster.bookies()[0]
    shown = cli("bookies", "show", bookie.bookie_id, "-o", "json").json
    assert (shown["bookieId"], shown["state"], shown["ledgerScopes"]) == (bookie.bookie_id, "rw", True)
    assert shown["address"] == f"127.0.0.1:{bookie.port}"
    assert shown["properties"] == {"ledgerScopes": "1", "version": f"bkctl {__version__}"}
    assert [endpoint["protocol"] for endpoint in shown["endpoints"]] == ["bookie-rpc"]
    assert shown["cookie"]["ledgerDirs"] == [str(bookie.directory / "ledgers")]
    assert "ledgerCount" not in shown
    text = cli("bookies", "show", bookie.bookie_id).out
    assert f"bookie-rpc://127.0.0.1:{bookie.port}" in text


def test_show_counts_ledgers_of_every_scope(cli: Cli, tmp_path: Path) -> None:
    def counts() -> dict[str, tuple[int, int]]:
        rows = cli("bookies", "show", "bookie-0", "bookie-1", "--ledgers", "-o", "json").json
        return {row["bookieId"]: (row["ledgerCount"], row["openLedgerCount"]) for row in rows}

    before = counts()
    (tmp_path / "x").write_text("x\n")
    for scope in ("0", "7"):
        assert cli("ledger", "write", tmp_path / "x", "--ledger-scope-id", scope).code == 0
    after = counts()
    assert after == {name: (all_count + 2, open_count) for name, (all_count, open_count) in before.items()}


def test_show_reports_down_damaged_and_unknown_bookies(cli: Cli, odd_cluster: str) -> None:
    down = cli("bookies", "show", "down:1", "-u", odd_cluster, "-o", "json").json
    assert (down["state"], down["endpoints"], down["cookie"]["instanceId"]) == ("down", [], "i")
    bad = cli("bookies", "show", "bad:1", "-u", odd_cluster, "-o", "json").json
    assert (bad["state"], bad["cookie"]) == ("down", None)
    assert "layout version" in bad["cookieError"]
    assert cli("bookies", "show", "none:1", "-u", odd_cluster).code == 4
    assert cli("bookies", "show", "a b", "-u", odd_cluster).code == 2


def test_usage_asks_every_bookie(cli: Cli, cluster: LocalCluster) -> None:
    result = cli("bookies", "usage", "-o", "ndjson")
    assert result.code == 0, result.err
    assert [row["bookieId"] for row in result.rows] == [bookie.bookie_id for bookie in cluster.bookies()]
    for row in result.rows:
        assert row["totalSpace"] > row["freeSpace"] > 0
        assert row["usedSpace"] == row["totalSpace"] - row["freeSpace"]
        assert row["usedPercent"] == pytest.approx(100 * row["usedSpace"] / row["totalSpace"], abs=0.06)
        assert row["error"] is None
    full = cli("bookies", "usage", "--threshold", "0", "--sort", "used")
    assert full.code == 3
    assert "3 bookies are above 0%" in full.err
    assert cli("bookies", "usage", "--threshold", "100", "--sort", "free").code == 0
    assert cli("bookies", "usage", "--threshold", "101").code == 2
    assert cli("bookies", "usage", "--threshold", "nan").code == 2


def test_bookies_that_do_not_answer_are_rows(cli: Cli, odd_cluster: str, cluster: LocalCluster) -> None:
    live = cluster.bookies()[0]
    with open_cluster(odd_cluster) as store:
        nobody = free_port()
        store.bookies.register(
            f"127.0.0.1:{nobody}", BookieServiceInfo((BookieEndpoint("bookie", nobody, "127.0.0.1", "bookie-rpc"),))
        )
        alone = cli("bookies", "usage", "-u", odd_cluster, "-o", "ndjson", "--timeout", "20")
        assert alone.code == 6
        [row] = alone.rows
        assert (row["totalSpace"], bool(row["error"])) == (None, True)
        store.bookies.register(
            live.bookie_id, BookieServiceInfo((BookieEndpoint("bookie", live.port, "127.0.0.1", "bookie-rpc"),))
        )
        both = cli("bookies", "usage", "-u", odd_cluster, "-o", "ndjson", "--timeout", "20")
        assert both.code == 3
        assert [row["error"] is None for row in both.rows] == [False, True]


def test_every_form_of_output(cli: Cli) -> None:
    for words in (("list",), ("show", "bookie-0"), ("show", "bookie-0", "bookie-1"), ("usage",)):
        for output in ("table", "json", "ndjson", "csv", "id"):
            result = cli("bookies", *words, "-o", output)
            assert result.code == 0, (words, output, result.err)
            if output == "json":
                json.loads(result.out)
