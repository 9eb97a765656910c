from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bkctl.commands.kit.completion import candidates
from bkctl.formats.entry import DigestType
from bkctl.formats.metadata import BookieEndpoint, BookieServiceInfo, Cookie, Fragment, LedgerMetadata, LedgerState
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import open_cluster
from bkctl.metadata.ledgers import LedgerManager
from bkctl.metadata.store import NEW, RACKS

from .conftest import Cli, applied


@pytest.fixture
def uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A cluster whose bookies are down: b1:1, b2:1, b3:1."""
    uri = f"sqlite://{tmp_path / 'metadata.db'}"
    with open_cluster(uri, create=True) as cluster:
        for name in ("b1:1", "b2:1", "b3:1"):
            cluster.cookies.write(name, Cookie(name, ("/j",), ("/l",), "i"), NEW)
    monkeypatch.setenv("BKCTL_METADATA_URI", uri)
    return uri


def racks(cli: Cli) -> dict[str, str | None]:
    return {row["bookieId"]: row["rack"] for row in cli("bookies", "racks", "list", "-o", "ndjson").rows}


def test_racks_are_set_unset_and_undone(cli: Cli, uri: str) -> None:
    assert racks(cli) == {"b1:1": None, "b2:1": None, "b3:1": None}
    shown = cli("bookies", "racks", "set", "b1:1,b2:1", "--rack", "r1", "--dry-run", "-o", "json")
    assert (shown.code, [row["rack"] for row in shown.json]) == (0, ["/r1", "/r1"])
    assert set(racks(cli).values()) == {None}
    done = cli("-u", uri, "bookies", "racks", "set", "b1:1", "b2:1", "--rack", "r1", "-o", "json")
    assert done.json == applied(shown.json)
    assert [row["applied"] for row in shown.json] == [False, False]
    assert re.search(f"Undo it with: bkctl metadata undo \\S+ --metadata-uri '?{re.escape(uri)}'?\n", done.err)
    assert racks(cli) == {"b1:1": "/r1", "b2:1": "/r1", "b3:1": None}
    again = cli("bookies", "racks", "set", "b1:1", "--rack", "r1")
    assert (again.code, again.err) == (0, "Bookie b1:1 is in rack /r1 already\n")
    removed = cli("bookies", "racks", "unset", "b2:1")
    assert removed.code == 0
    assert "b2:1 has no rack now; the table shows the former one" in removed.err
    assert racks(cli) == {"b1:1": "/r1", "b2:1": None, "b3:1": None}
    for expected in ({"b1:1": "/r1", "b2:1": "/r1", "b3:1": None}, {"b1:1": None, "b2:1": None, "b3:1": None}):
        file = cli("metadata", "undo", "--list", "-o", "id").out.split()[-1 if expected["b1:1"] else 0]
        undone = cli("metadata", "undo", file, "--yes")
        assert undone.code == 0, undone.err
        assert racks(cli) == expected


def test_a_migrated_cluster_has_its_racks_and_mutes(cli: Cli, uri: str, tmp_path: Path) -> None:
    assert cli("bookies", "racks", "set", "b1:1", "--rack", "r1").code == 0
    assert cli("cluster", "health", "mute", "bookie-down").code == 0
    target, other = (f"sqlite://{tmp_path / name}.db" for name in ("target", "other"))
    assert cli("metadata", "migrate", "--to", target).code == 0
    assert racks(cli) == {
        row["bookieId"]: row["rack"] for row in cli("-u", target, "bookies", "racks", "list", "-o", "ndjson").rows
    }
    assert cli("-u", target, "cluster", "health", "mutes", "-o", "id").out == "bookie-down\n"
    with open_cluster(other, create_store=True) as cluster:
        cluster.store.put(RACKS, b"{}", NEW)
    # Racks beside a new root are another cluster's.
    refused = cli("metadata", "migrate", "--to", other, "--overwrite", "--yes")
    assert (refused.code, "../bookies" in refused.err) == (3, True)
    with open_cluster(other) as cluster:
        assert next(iter(cluster.store.get_many([RACKS]))).value == b"{}"


def test_racks_refuse_what_they_cannot_do(cli: Cli, uri: str) -> None:
    absent = cli("bookies", "racks", "unset", "b1:1")
    assert (absent.code, absent.out, absent.err) == (0, "", "Bookie b1:1 has no rack\n")
    assert cli("bookies", "racks", "set", "b1:1", "--rack", "/").code == 2
    assert cli("bookies", "racks", "set", "b1:1").code == 2
    unknown = cli("bookies", "racks", "set", "gone:1", "--rack", "/r")
    assert unknown.code == 0
    assert "Warning: bookie gone:1" in unknown.err
    with open_cluster(uri) as cluster:
        cluster.store.put(RACKS, b"[]", None)
    assert cli("bookies", "racks", "list").code == 7


@pytest.fixture
def two_racks(cli: Cli, uri: str) -> str:
    """b1 and b2 in one rack, b3 in another; ledger 1 has entries on b1 and b2 alone, ledger 2 has none such."""
    with open_cluster(uri) as cluster:
        for number, ensemble in ((1, ("b1:1", "b2:1", "b3:1")), (2, ("b1:1", "b3:1"))):
            metadata = LedgerMetadata(
                len(ensemble), 2, 2, DigestType.CRC32C, b"", (Fragment(0, ensemble),), LedgerState.CLOSED,
                last_entry_id=9, length=10,
            )  # fmt: skip
            cluster.ledgers.create(LedgerId(0, number), metadata)
    assert cli("bookies", "racks", "set", "b1:1", "b2:1", "--rack", "/r1").code == 0
    assert cli("bookies", "racks", "set", "b3:1", "--rack", "/r2").code == 0
    return uri


def test_lists_of_bookies_have_racks(cli: Cli, two_racks: str) -> None:
    assert [row["rack"] for row in cli("bookies", "list", "-o", "json").json] == ["/r1", "/r1", "/r2"]
    with open_cluster(two_racks) as cluster:
        cluster.store.put(RACKS, b"[]", None)
    damaged = cli("bookies", "list", "-o", "json")
    assert (damaged.code, [row["rack"] for row in damaged.json]) == (0, [None] * 3)
    assert "Warning: racks are unknown" in damaged.err


def test_locate_marks_entries_in_one_rack(cli: Cli, two_racks: str, tmp_path: Path) -> None:
    rows = cli("ledger", "locate", "1", "-o", "json").json
    assert [(row["rack"], row["inTooFewRacks"]) for row in rows] == [("/r1", True), ("/r1", True), ("/r2", False)]
    for entry, is_few in ((0, True), (1, False), (2, False)):
        found = cli("ledger", "locate", "1", "--entry", entry, "-o", "json").json
        assert [row["inTooFewRacks"] for row in found] == [is_few] * 2
    assert {row["inTooFewRacks"] for row in cli("ledger", "locate", "2", "-o", "json").json} == {False}
    conf = tmp_path / "bk_server.conf"
    conf.write_text(f"metadataServiceUri={two_racks}\nminNumRacksPerWriteQuorum=1\n")
    assert not any(row["inTooFewRacks"] for row in cli("ledger", "locate", "1", "-c", conf, "-o", "json").json)
    assert "TOO FEW RACKS" in cli("ledger", "locate", "1", "--check", "-o", "wide").out


REGIONS = "ensemblePlacementPolicy=org.apache.bookkeeper.client.RegionAwareEnsemblePlacementPolicy\n"


def test_metadata_check_finds_ensembles_that_the_policy_does_not_accept(
    cli: Cli, two_racks: str, tmp_path: Path
) -> None:
    def misplaced(*options: object) -> list[dict[str, Any]]:
        found = cli("metadata", "check", *options, "-o", "json")
        assert found.code == 3
        return [row for row in found.json if row["code"] == "misplaced"]

    rows = misplaced()
    assert [row["ledgerId"] for row in rows] == ["1"]
    message = rows[0]["message"]
    assert "from entry 0, the write set b1:1, b2:1 is in 1 rack; 2 are needed" in message
    assert "repairedPlacementPolicyNotAdheringBookieEnabled=true" in message
    conf = tmp_path / "bk_server.conf"
    for settings, ledger_ids in (
        ("minNumRacksPerWriteQuorum=1\n", []),
        ("minNumRacksPerWriteQuorum=3\n", ["1"]),
        (REGIONS, []),
        (f"{REGIONS}reppRegionsToWrite=r1;r2\n", ["1"]),
        ("ensemblePlacementPolicy=org.apache.bookkeeper.client.DefaultEnsemblePlacementPolicy\n", []),
    ):
        conf.write_text(f"metadataServiceUri={two_racks}\n{settings}")
        assert [row["ledgerId"] for row in misplaced("-c", conf)] == ledger_ids, settings
    conf.write_text(f"metadataServiceUri={two_racks}\nensemblePlacementPolicy=com.acme.Policy\n")
    assert misplaced("-c", conf) == []
    unknown = cli("metadata", "check", "-c", conf)
    assert "Warning: placement is not judged: ensemblePlacementPolicy=com.acme.Policy is not supported" in unknown.err
    assert cli("bookies", "racks", "unset", "b1:1", "b2:1", "b3:1").code == 0
    assert misplaced() == []


@pytest.mark.parametrize(
    "line",
    [
        ("ledger", "write"),
        ("bookies", "recover", "b1:1", "--yes"),
        ("bookies", "drain", "b1:1", "--yes"),
        ("autorecovery", "run", "--id", "here"),
    ],
)
def test_an_unsupported_policy_is_refused_by_name(
    cli: Cli, two_racks: str, tmp_path: Path, line: tuple[str, ...]
) -> None:
    conf = tmp_path / "bk_server.conf"
    conf.write_text(f"metadataServiceUri={two_racks}\nensemblePlacementPolicy=com.acme.Policy\n")
    with open_cluster(two_racks) as cluster:
        before = dict(cluster.ledgers.values(list(cluster.ledgers.ledgers(None))))
    refused = cli(*line, "-c", conf, *([conf] if "write" in line else []))
    assert refused.code == 8, refused.err
    assert "ensemblePlacementPolicy=com.acme.Policy is not supported" in refused.err
    with open_cluster(two_racks) as cluster:
        assert dict(cluster.ledgers.values(list(cluster.ledgers.ledgers(None)))) == before


def test_locate_without_racks_has_no_rack_columns(cli: Cli, two_racks: str) -> None:
    assert cli("bookies", "racks", "unset", "b1:1", "b2:1", "b3:1").code == 0
    assert "rack" not in cli("ledger", "locate", "1", "-o", "json").json[0]


def test_health_reads_the_metadata_of_a_ledger_once(cli: Cli, two_racks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bookies that ledgers name are counted, and their racks checked, in one walk."""
    read = Counter[LedgerId]()
    read_many = LedgerManager.read_many

    def counted(manager: LedgerManager, ids: Iterable[LedgerId]) -> Iterator[Any]:
        asked = list(ids)
        read.update(asked)
        return read_many(manager, asked)

    monkeypatch.setattr(LedgerManager, "read_many", counted)
    assert cli("cluster", "health", "--ledgers", "--no-bookies").code == 3
    assert set(read.values()) == {1}


def test_health_finds_ledgers_and_bookies_with_bad_racks(cli: Cli, two_racks: str) -> None:
    def codes(*options: str) -> set[tuple[str, str]]:
        found = cli("cluster", "health", *options, "--no-bookies", "-o", "json").json
        return {(row["code"], row["subject"]) for row in found if "rack" in row["code"]}

    bad_ledgers = ("racks-violated", "scope 0")
    assert codes() == codes("--ledgers") == {bad_ledgers}
    assert cli("cluster", "health", "mute", "racks-violated").code == 0
    with open_cluster(two_racks) as cluster:
        for name in ("b1:1", "b2:1"):
            cluster.bookies.register(name, BookieServiceInfo((BookieEndpoint("bookie", 1, name[:2], "bookie-rpc"),)))
        assert codes() == {("too-few-racks", None)}
        sizes = ("--ensemble-size", 2, "--write-quorum", 2, "--ack-quorum", 2)
        why = cli("why", "create", *sizes).out
        assert "bookies are in 1 rack; 2 are needed" in why
        assert "bkctl bookies racks list" in why
        assert "Nothing is to be done" not in why
        cli("bookies", "racks", "unset", "b1:1")
        assert codes() == {("bookie-without-rack", "b1:1")}
        muted = cli("cluster", "health", "mute", "bookie-without-rack")
        assert muted.code == 0
        assert codes() == set()


def test_enforced_racks_of_a_conf_refuse_new_ledgers(cli: Cli, uri: str, tmp_path: Path) -> None:
    conf, file = tmp_path / "bk_server.conf", tmp_path / "file"
    file.write_text("line\n")
    cli("bookies", "racks", "set", "b1:1", "b2:1", "b3:1", "--rack", "/r1")
    with open_cluster(uri) as cluster:
        for name in ("b1:1", "b2:1", "b3:1"):
            cluster.bookies.register(name, BookieServiceInfo((BookieEndpoint("bookie", 1, "127.0.0.1", "bookie-rpc"),)))
        for settings, code, words in (
            ("enforceMinNumRacksPerWriteQuorum=true", 6, "needs bookies in 2 racks; the 3 usable bookies are in /r1"),
            ("enforceMinNumRacksPerWriteQuorum=true\nminNumRacksPerWriteQuorum=3", 6, "needs bookies in 2 racks"),
            ("enforceMinNumRacksPerWriteQuorum=maybe", 2, "enforceMinNumRacksPerWriteQuorum"),
            ("minNumRacksPerWriteQuorum=x", 2, "minNumRacksPerWriteQuorum"),
        ):
            conf.write_text(f"metadataServiceUri={uri}\n{settings}\n")
            refused = cli("ledger", "write", file, "-c", conf)
            assert (refused.code, words in refused.err) == (code, True), refused.err
        assert list(cluster.ledgers.ledgers(None)) == []


def test_the_script_of_a_conf_counts_first(cli: Cli, uri: str, tmp_path: Path) -> None:
    script = tmp_path / "racks.sh"
    script.write_text('#!/bin/sh\nfor host; do echo "/from-$host"; done\n')
    script.chmod(0o755)
    conf = tmp_path / "bk_server.conf"
    conf.write_text(f"metadataServiceUri={uri}\nnetworkTopologyScriptFileName={script}\n")
    cli("bookies", "racks", "set", "b1:1", "--rack", "/stored")
    rows = cli("bookies", "racks", "list", "-c", conf, "-o", "json").json
    assert [(row["rack"], row["source"]) for row in rows] == [(f"/from-b{n}", "script") for n in (1, 2, 3)]
    assert cli("bookies", "racks", "list", "-o", "json").json[0]["source"] == "metadata"


def test_racks_are_audited_and_completed(cli: Cli, uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "audit"
    monkeypatch.setenv("BKCTL_AUDIT_LOG", str(log))
    cli("bookies", "racks", "set", "b1:1", "--rack", "/r1")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert lines[-1]["exitCode"] == 0
    assert "undoFile" in lines[-1]
    assert list(candidates("rack", {"g_metadata_uri": [uri]}, "/")) == ["/r1"]


def test_pulsar_admins_names_are_answered(cli: Cli) -> None:
    for name, ours in (
        ("racks-placement", "list"), ("get-bookie-rack", "list"), ("set-bookie-rack", "set"),
        ("delete-bookie-rack", "unset"),
    ):  # fmt: skip
        assert f"it is 'bkctl bookies racks {ours}' here" in cli("bookies", name).err
