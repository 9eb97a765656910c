"""Ledgers, bookies and cookies of Apache's cluster, as our commands, Apache's shell and Apache's REST API tell them."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import urllib.request
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from support.command_line import CommandLine
from support.servers import ApacheBookie, ApacheCluster, Java, ZooKeeperServer, format_cluster, free_port
from support.waiting import LIMIT_S

Ledgers = list[dict[str, Any]]

#: `ledgerId=5, metadata=…` since 4.18 (`ledgermetadata`: on two lines), `ledgerID: 5` and a line of metadata before.
_LEDGER = re.compile(r"ledgerI[dD][=: ]+\{?(?:ledgerId=)?(\d+)[^\n]*?\n?[^\n]*?(LedgerMetadata\{.*?\}\})", re.DOTALL)


@pytest.fixture
def cli(apache_cluster: ApacheCluster) -> CommandLine:
    return CommandLine(apache_cluster.metadata_uri)


def metadata_of(text: str) -> dict[str, Any]:
    """The fields of LedgerMetadata's own text, as our JSON has them."""

    def field(name: str) -> str | None:
        found = re.search(rf"\b{name}=([^,}}]*)", text)
        return found[1] if found else None

    ensembles = re.search(r"ensembles=\{(.*?)\}", text, re.DOTALL)
    custom = re.search(r"customMetadata=\{(.*?)\}", text, re.DOTALL)
    assert ensembles is not None
    assert custom is not None
    password = field("password")
    return {
        "metadataFormatVersion": int(field("formatVersion") or 0),
        "state": field("state"),
        "ensembleSize": int(field("ensembleSize") or 0),
        "writeQuorumSize": int(field("writeQuorumSize") or 0),
        "ackQuorumSize": int(field("ackQuorumSize") or 0),
        "digestType": (field("digestType") or "").replace("MAC", "HMAC"),
        "length": int(field("length") or 0),
        "lastEntryId": int(field("lastEntryId") or -1),
        "password": None if password is None else password.removeprefix("base64:"),
        "customMetadata": dict(re.findall(r"([^=,\s]+)=base64:([^,}]*)", custom[1])),
        "ensembles": {first: bookies.split(", ") for first, bookies in re.findall(r"(\d+)=\[([^\]]*)\]", ensembles[1])},
    }


def test_list_agrees_with_apaches_shell_field_by_field(
    cli: CommandLine, apache_cluster: ApacheCluster, apache_ledgers: Ledgers, java: Java
) -> None:
    text = java.shell(apache_cluster.bookies[0], "listledgers", "-m", check=True).stdout
    told = {ledger_id: metadata_of(metadata) for ledger_id, metadata in _LEDGER.findall(text)}
    assert {one["ledgerId"] for one in apache_ledgers if not one["deleted"]} <= set(told)
    # All ranges of ids that Apache's layout has.
    assert min(map(int, told)) < 1 << 31 < max(map(int, told)) == (1 << 63) - 1
    rows = {row["ledgerId"]: row for row in cli("ledger", "list", "-o", "ndjson").rows}
    shown = {row["ledgerId"]: row for row in cli("ledger", "show", *told, "--show-secrets", "-o", "ndjson").rows}
    assert set(rows) == set(told)
    for ledger_id, expected in told.items():
        found = {name: shown[ledger_id][name] for name in expected}
        assert found | {"password": found["password"] or ""} == expected | {"password": expected["password"] or ""}
        assert {name: rows[ledger_id][name] for name in expected if name != "password"} == {
            name: value for name, value in expected.items() if name != "password"
        }
        one = java_metadata(java, apache_cluster, ledger_id) if int(ledger_id) > 1 << 31 else expected
        assert one == expected


def java_metadata(java: Java, cluster: ApacheCluster, ledger_id: str) -> dict[str, Any]:
    text = java.shell(cluster.bookies[0], "ledgermetadata", "-ledgerid", ledger_id, check=True).stdout
    found = _LEDGER.search(text)
    assert found is not None, text
    assert found[1] == ledger_id
    return metadata_of(found[2])


def test_bookies_agree_with_apaches_shell(cli: CommandLine, apache_cluster: ApacheCluster, java: Java) -> None:
    bookie = apache_cluster.bookies[0]
    text = java.shell(bookie, "listbookies", "-rw", check=True).stdout
    expected = sorted(re.findall(r"BookieID:([^,\s]+)", text))
    assert expected == sorted(each.bookie_id for each in apache_cluster.bookies)
    assert cli("bookies", "list", "--state", "rw", "-o", "id").ids == expected

    endpoint = java.shell(bookie, "endpointinfo", "-b", bookie.bookie_id, check=True).stdout
    [shown] = cli("bookies", "show", bookie.bookie_id, "-o", "ndjson").rows
    [mine] = shown["endpoints"]
    assert mine["id"] in endpoint
    assert re.search(r"[Pp]rotocol[=:]\s*([\w-]+)", endpoint)[1] == mine["protocol"]  # type: ignore[index]
    assert mine["host"] in endpoint
    assert str(mine["port"]) in endpoint
    assert (mine["auth"], mine["extensions"]) == ([], [])

    space = java.shell(bookie, "bookieinfo", check=True).stdout
    rows = {row["bookieId"]: row for row in cli("bookies", "usage", "-o", "ndjson").rows}
    assert set(rows) == set(expected)
    told = dict(re.findall(r"BookieID:([^,\s]+).*?[Tt]otal[=:] ?(\d+)", space))
    assert {bookie_id: int(total) for bookie_id, total in told.items()} == {
        bookie_id: row["totalSpace"] for bookie_id, row in rows.items()
    }


# --- cookies ---------------------------------------------------------------------------------------------------------


def cookie_text(java: Java, cluster: ApacheCluster, bookie_id: str) -> str:
    """The cookie as `cookie_get` prints it between its two rules."""
    text = java.shell(cluster.bookies[0], "cookie_get", bookie_id, check=True).stdout
    found = re.search(r"---\n(.*?)\n---", text, re.DOTALL)
    assert found is not None, text
    return found[1]


def test_cookies_agree_with_apaches_shell(
    cli: CommandLine, apache_cluster: ApacheCluster, java: Java, tmp_path: Path
) -> None:
    bookie = apache_cluster.bookies[0]
    raw = cli("cookie", "show", bookie.bookie_id, "--format", "raw").out
    assert raw.decode() == cookie_text(java, apache_cluster, bookie.bookie_id)
    assert raw == (bookie.journal_dir / "current" / "VERSION").read_bytes()
    assert cli("cookie", "verify", "--conf", bookie.conf).code == 0
    assert cli("cookie", "generate", "--conf", bookie.conf).out == raw

    theirs = tmp_path / "theirs"
    words = ("-j", "/a b,/ä", "-l", "/c,/d\\e", "-ix", '/f"g')
    java.shell(bookie, "cookie_generate", *words, "-o", theirs, "host:1", check=True)
    ours = cli(
        "cookie", "generate", "host:1", "--journal-dirs", "/a b,/ä", "--ledger-dirs", "/c,/d\\e",
        "--index-dirs", '/f"g',
    )  # fmt: skip
    assert ours.out == theirs.read_bytes()


def test_a_cookie_of_ours_is_apaches_and_the_reverse(
    cli: CommandLine, apache_cluster: ApacheCluster, java: Java, tmp_path: Path
) -> None:
    bookie, ours, theirs = apache_cluster.bookies[0], "ours.example:1", "theirs.example:1"
    names = {}
    for bookie_id in (ours, theirs):
        names[bookie_id] = tmp_path / bookie_id
        words = ("--journal-dirs", "/a", "--ledger-dirs", "/c", "-f", names[bookie_id])
        assert cli("cookie", "generate", bookie_id, *words).code == 0
    try:
        assert cli("cookie", "create", ours, "-f", names[ours], "--undo", tmp_path / "1").code == 0
        assert cookie_text(java, apache_cluster, ours) == names[ours].read_text()
        java.shell(bookie, "cookie_create", "-cf", names[theirs], theirs, check=True)
        assert cli("cookie", "show", theirs, "--format", "raw").out == names[theirs].read_bytes()
        assert set(cli("bookies", "list", "--state", "down", "-o", "id").ids) >= {ours, theirs}
        # Apache's shell says nothing of it in its exit code: that the cookie is still ours is the answer.
        java.shell(bookie, "cookie_create", "-cf", names[theirs], ours)
        assert cookie_text(java, apache_cluster, ours) == names[ours].read_text()
    finally:
        java.shell(bookie, "cookie_delete", ours)
        deleted = cli("cookie", "delete", theirs, "--yes", "--undo", tmp_path / "2")
    assert deleted.code == 0, deleted.err
    assert not {ours, theirs} & set(cli("cookie", "list", "-o", "id").ids)


def test_an_apache_bookie_starts_on_directories_that_we_expanded_and_under_the_id_that_we_gave_it(
    java: Java, zookeeper: ZooKeeperServer, apache_bookie: Callable[..., ApacheBookie], tmp_path: Path
) -> None:
    uri = zookeeper.metadata_uri(zookeeper.new_root())
    format_cluster(java, uri, tmp_path)
    cli = CommandLine(uri)
    bookie = apache_bookie(uri)
    bookie.start()
    refused = cli("cookie", "rename", bookie.bookie_id, "named", "--conf", bookie.conf, "--yes")
    assert refused.code == 5
    bookie.stop()
    more = f"{bookie.ledger_dir},{tmp_path / 'more'}"
    place = {"journalDirectory": bookie.journal_dir, "ledgerDirectories": more}
    larger = apache_bookie(uri, port=bookie.port, settings=place)
    assert cli("cookie", "verify", "--conf", larger.conf).code == 3
    expanded = cli("cookie", "expand", "--conf", larger.conf, "--yes", "--undo", tmp_path / "1", "-o", "id")
    assert (expanded.code, expanded.out.decode()) == (0, f"{tmp_path / 'more'}\n"), expanded.err
    renamed = cli(
        "cookie", "rename", bookie.bookie_id, "named-bookie", "--conf", larger.conf, "--yes", "--undo", tmp_path / "2"
    )
    assert renamed.code == 0, renamed.err
    named = apache_bookie(uri, port=bookie.port, settings={**place, "bookieId": "named-bookie"})
    named.start()
    assert cli("bookies", "list", "--state", "rw", "-o", "id").ids == ["named-bookie"]
    named.stop()
    # And back: both undo files in turn.
    for undo in ("2", "1"):
        assert cli("metadata", "undo", tmp_path / undo, "--yes").code == 0
    assert cli("cookie", "verify", "--conf", bookie.conf).code == 0
    bookie.start()
    assert cli("bookies", "list", "--state", "rw", "-o", "id").ids == [bookie.bookie_id]
    bookie.stop()


# --- REST ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def rest(apache_cluster: ApacheCluster, apache_bookie: Callable[..., ApacheBookie]) -> Iterator[Callable[[str], Any]]:
    """Asks Apache's REST API on the cluster; the bookie that serves it is read-only, so that it gets no ledgers."""
    port = free_port()
    bookie = apache_bookie(
        apache_cluster.metadata_uri,
        settings={
            "httpServerEnabled": "true",
            "httpServerPort": port,
            "httpServerHost": "127.0.0.1",
            "httpServerClass": "org.apache.bookkeeper.http.vertx.VertxHttpServer",
            "forceReadOnlyBookie": "true",
        },
    )

    def get(path: str) -> Any:
        with contextlib.closing(
            urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/{path}", timeout=LIMIT_S)
        ) as answer:
            return json.loads(answer.read())

    try:
        bookie.start()
        yield get
    finally:
        bookie.stop()
        CommandLine(apache_cluster.metadata_uri)("cookie", "delete", bookie.bookie_id, "--yes")


def object_of(told: dict[str, Any]) -> dict[str, Any]:
    """Apache's REST object of a ledger, with the names and types that differ as ours has them."""
    ctime = datetime.fromtimestamp(told["ctime"] / 1000, UTC) if told["ctime"] >= 0 else None
    return {
        **{name: told[name] for name in ("metadataFormatVersion", "state", "length", "lastEntryId")},
        **{name: told[name] for name in ("ensembleSize", "writeQuorumSize", "ackQuorumSize")},
        "ledgerId": str(told["ledgerId"]),
        "digestType": told["digestType"].replace("MAC", "HMAC"),
        "ctime": None if ctime is None else f"{ctime:%Y-%m-%dT%H:%M:%S}.{told['ctime'] % 1000:03d}Z",
        "password": told["password"],
        "customMetadata": told["customMetadata"],
        "ensembles": {
            first: [bookie["id"] if isinstance(bookie, dict) else bookie for bookie in bookies]
            for first, bookies in told["allEnsembles"].items()
        },
    }


def test_ledgers_agree_with_apaches_rest_api_field_by_field(
    cli: CommandLine, apache_ledgers: Ledgers, rest: Callable[[str], Any]
) -> None:
    ids = cli("ledger", "list", "-o", "id").ids
    assert sorted(rest("ledger/list"), key=int) == ids
    shown = {row["ledgerId"]: row for row in cli("ledger", "show", *ids, "--show-secrets", "-o", "ndjson").rows}
    for ledger_id in ids:
        told = rest(f"ledger/metadata?ledger_id={ledger_id}")[ledger_id]
        expected = object_of(told)
        found = {name: shown[ledger_id][name] for name in expected}
        assert found == expected
    assert base64.b64decode(shown[ids[0]]["password"]) is not None


def test_bookies_agree_with_apaches_rest_api(
    cli: CommandLine, apache_cluster: ApacheCluster, rest: Callable[[str], Any]
) -> None:
    states = {row["bookieId"]: row for row in cli("bookies", "list", "-o", "ndjson").rows}
    for state in ("rw", "ro"):
        told = rest(f"bookie/list_bookies?type={state}")
        assert sorted(told) == sorted(name for name, row in states.items() if row["state"] == state)
        assert told
    [reader] = [name for name, row in states.items() if row["state"] == "ro"]
    endpoints = {each["protocol"]: each for each in states[reader]["endpoints"]}
    assert set(endpoints) == {"bookie-rpc", "http"}
    space = rest("bookie/list_bookie_info")
    rows = cli("bookies", "usage", "-o", "ndjson").rows
    assert {row["bookieId"] for row in rows} <= set(states)
    for row in rows:
        assert str(row["totalSpace"]) in next(text for name, text in space.items() if row["bookieId"] in name)
