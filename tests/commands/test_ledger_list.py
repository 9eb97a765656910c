"""`bkctl ledger list` and `ledger show`, over SQLite."""

from __future__ import annotations

import base64
import time
from pathlib import Path

import pytest
import yaml
from support.command_line import CommandLine

from bkctl.formats.entry import DigestType
from bkctl.formats.metadata import Fragment, LedgerMetadata
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import Cluster, open_cluster
from bkctl.metadata.ledger_columns import LEDGER_COLUMNS

from .conftest import BOOKIES, Cli

LEDGER_NAMES = [name for column in LEDGER_COLUMNS.columns if not column.optional for name, _ in column.properties()]


def test_ledger_object(cli: Cli, store: Cluster) -> None:
    found = cli("ledger", "show", "6", "-o", "json").json
    assert list(found) == LEDGER_NAMES
    found = cli("ledger", "show", "7:5", "-o", "json").json
    assert list(found) == [*LEDGER_NAMES, "pulsar"]
    assert found["ledgerScopeId"] == "7"
    assert found["ensembles"] == {"0": list(BOOKIES)}
    assert found["ctime"] == "2025-08-21T09:53:20.123Z"
    assert base64.b64decode(found["customMetadata"]["application"]) == b"pulsar"
    assert found["pulsar"]["managedLedger"] == "t"
    assert cli("ledger", "show", "0000000000000007-0000000000000005".replace("-", ""), "-o", "id").out == (
        "00000000000000070000000000000005\n"
    )


def test_ledger_list(cli: Cli, store: Cluster) -> None:
    assert cli("ledger", "list", "-o", "id").out == "5\n6\n"
    assert cli("ledger", "list", "--all-scopes", "-o", "id").out.splitlines()[-1] == "00000000000000070000000000000005"
    assert cli("ledger", "list", "--ledger-scope-id", "7", "-o", "id").out.count("\n") == 1
    assert [list(row)[: len(LEDGER_NAMES)] for row in cli("ledger", "list", "-o", "ndjson").rows] == [LEDGER_NAMES] * 2
    assert len(cli("ledger", "list", "-o", "json").json) == 2
    header = cli("ledger", "list", "-o", "csv").out.splitlines()[0].split(",")
    assert [name for name in header if name != "pulsar"] == LEDGER_NAMES
    assert "3/2/2" in cli("ledger", "list").out


@pytest.mark.parametrize(
    ("arguments", "ids"),
    [
        (["--state", "closed"], "5"),
        (["--state", "OPEN"], "6"),
        (["--bookie", BOOKIES[2]], "5"),
        (["--min-size", "10"], "5"),
        (["--min-age", "1d"], "5"),
        (["--max-age", "1h"], "6"),
        (["--custom-metadata", "application=pulsar"], "5"),
        (["--custom-metadata", "application"], "5"),
        (["--min-age", "1w"], "5"),
        (["--sort", "-lastEntryId", "--max-size", "0"], "6"),
        (["--limit", "1"], "5"),
        (["--after", "5"], "6"),
    ],
)
def test_ledger_list_filters(cli: Cli, store: Cluster, arguments: list[str], ids: str) -> None:
    assert cli("ledger", "list", "-o", "id", *arguments).out.split() == [ids]
    assert [row["ledgerId"] for row in cli("ledger", "list", "-o", "ndjson", *arguments).rows] == [ids]


def test_an_order_without_a_column_is_named_as_it_was_given(cli: Cli, store: Cluster) -> None:
    refused = cli("ledger", "list", "--sort=-")
    assert (refused.code, "--sort '-': not a column" in refused.err) == (2, True)


@pytest.mark.parametrize("output", ["ndjson", "json"])
@pytest.mark.parametrize("damaged", [None, 0, 20, 41])
def test_ledger_list_of_many_is_the_list_of_a_few(
    cli: Cli, store: Cluster, output: str, damaged: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s)
    for number in range(10, 50):
        fragments = tuple(Fragment(first, BOOKIES[: number % 3 + 1]) for first in range(number % 4 + 1))
        sizes = (number % 3 + 1, 1, 1)
        metadata = LedgerMetadata(
            *sizes, DigestType.CRC32, b"", fragments, format_version=number % 3 + 1, custom_metadata={"é": b"\xff"}
        )
        if number % 3 == 0:
            metadata = metadata._replace(digest_type=None, password=None, custom_metadata={})
        store.ledgers.create(LedgerId(0, number), metadata)
    ids = list(store.ledgers.ledgers(0))
    if damaged is not None:
        store.store.put(store.ledgers.path(ids[damaged]), b"BookieMetadataFormatVersion\t3\n\x05x", None)
    for options in ((), ("--keep-going",), ("--all-scopes", "--keep-going"), ("--after", "30"), ("--after", "999")):
        lines = cli("ledger", "list", "-o", output, *options)
        rows = cli("ledger", "list", "-o", output, *options, "--limit", "1000")
        assert (lines.code, lines.out, lines.err) == (rows.code, rows.out, rows.err)
    assert not lines.rows if output == "ndjson" else lines.json == []


def test_filtered_lists_count_what_they_read_on_a_terminal(store: Cluster, tmp_path: Path) -> None:
    line = CommandLine(f"sqlite://{tmp_path}/m.db")
    code, seen = line.terminal("ledger", "list", "--state", "OPEN", columns=200)
    assert (code, seen.splitlines()[-1]) == (0, "1 of 2 ledgers")
    assert "of 2 ledgers" not in line.terminal("ledger", "list", columns=200)[1]
    assert line("ledger", "list", "--state", "OPEN").err == ""


def test_ledger_list_filter_by_key_finds_no_other_key(cli: Cli, store: Cluster) -> None:
    assert cli("ledger", "list", "-o", "id", "--custom-metadata", "nothing").out == ""
    assert cli("ledger", "list", "-o", "id", "--custom-metadata", "=pulsar").code == 2
    assert cli("ledger", "write", "--custom-metadata", "key", "/dev/null").code == 2


def test_ledgers_of_a_pulsar_topic_are_listed_by_it_and_name_it(cli: Cli, store: Cluster) -> None:
    def create(ledger_id: int, **names: bytes) -> None:
        custom = {"application": b"pulsar", "component": b"x"} | {f"pulsar/{key}": text for key, text in names.items()}
        fragments = (Fragment(0, BOOKIES[:1]),)
        metadata = LedgerMetadata(1, 1, 1, DigestType.CRC32, b"", fragments, custom_metadata=custom)
        store.ledgers.create(LedgerId(0, ledger_id), metadata)

    create(20, **{"managed-ledger": b"a/b/persistent/c-partition-0"})
    create(21, **{"managed-ledger": b"a/b/persistent/c", "cursor": b"sub"})
    create(22, compactedTopic=b"persistent://a/b/c", compactedTo=b"\x08\x14\x10\x05")
    create(23, schemaId=b"a/b/c")
    topic = ("ledger", "list", "--topic", "persistent://a/b/c")
    assert cli(*topic, "-o", "id").out.split() == ["20", "21", "22"]
    assert cli(*topic, "--subscription", "sub", "-o", "id").out.split() == ["21"]
    assert cli("ledger", "list", "--subscription", "sub").code == 2
    assert cli("ledger", "list", "--topic", "c").code == 2
    assert cli("ledger", "show", "21", "-o", "json").json["pulsar"]["topic"] == "persistent://a/b/c"
    shown = cli("ledger", "list", "--after", "19", "--columns", "ledger,customMetadata").out
    for words in (
        "pulsar x persistent://a/b/c-partition-0\n", "pulsar x persistent://a/b/c cursor=sub\n", "schemaId=a/b/c\n",
        "compactedTo=20:5 compactedTopic=persistent://a/b/c\n",
    ):  # fmt: skip
        assert words in shown


def test_ledger_list_in_the_order_and_with_the_columns_asked_for(cli: Cli, store: Cluster) -> None:
    assert cli("ledger", "list", "--sort", "-ledger", "-o", "id").out == "6\n5\n"
    assert cli("ledger", "list", "--sort", "-length", "--limit", "1", "-o", "id").out == "5\n"
    assert cli("ledger", "list", "--sort", "length", "--limit", "1", "-o", "id").out == "6\n"
    assert cli("--sort", "-ledger", "ledger", "list", "-o", "id").out == "6\n5\n"
    rows = cli("ledger", "list", "--columns", "state,ledger", "-o", "ndjson").rows
    assert list(rows[0]) == ["state", *LEDGER_NAMES[:3]]
    table = cli("ledger", "list", "--columns", "ensembleSize,state", "--sort", "ack quorum size").out.splitlines()
    assert table[0].split() == ["ENSEMBLE", "SIZE", "STATE"]
    assert cli("ledger", "list", "-o", "id", "--columns", "state").code == 2
    wrong = cli("ledger", "list", "--columns", "colour")
    assert (wrong.code, wrong.out) == (2, "")
    assert "'colour': not a column of this command; name some of ledger, state" in wrong.err
    assert "ENSEMBLES" in cli("ledger", "list", "-o", "wide").out
    shown = yaml.safe_load(cli("ledger", "show", "5", "-o", "yaml").out)
    as_json = cli("ledger", "show", "5", "-o", "json").json
    assert list(shown) == list(as_json)
    # A column may tell the time, which differs between two calls.
    assert shown.items() >= {name: as_json[name] for name in (*LEDGER_NAMES[:3], "state", "ensembles")}.items()


def test_ledger_list_count_and_damage(cli: Cli, store: Cluster) -> None:
    assert cli("ledger", "list", "--count", "-o", "json").json == {"count": 2}
    assert cli("ledger", "list", "--count", "--all-scopes", "--state", "CLOSED", "-o", "csv").out == "count\n2\n"
    path = store.ledgers.path(LedgerId(0, 5))
    store.store.put(path, b"damage", None)
    result = cli("ledger", "list", "-o", "ndjson")
    assert result.code == 7
    result = cli("ledger", "list", "-o", "ndjson", "--keep-going")
    assert result.code == 3
    assert [row["ledgerId"] for row in result.rows] == ["6"]
    assert cli("ledger", "show", "5").code == 7


def test_ledger_not_found(cli: Cli, store: Cluster) -> None:
    result = cli("ledger", "show", "99")
    assert result.code == 4
    assert "No ledger 99" in result.err


def test_ledgers_of_an_unknown_bookie_are_not_found(cli: Cli, store: Cluster) -> None:
    for more in ([], ["--count"], ["-o", "json"], ["-o", "id"]):
        missing = cli("ledger", "list", "--bookie", "nowhere:1", *more)
        assert (missing.code, missing.out) == (4, ""), missing
        assert "No bookie nowhere:1" in missing.err
    assert cli("ledger", "list", "--bookie", BOOKIES[2], "--state", "IN_RECOVERY", "-o", "json").json == []
    store.store.put(store.ledgers.path(LedgerId(0, 5)), b"damage", None)
    for more in ([], ["--count"], ["-o", "ndjson"]):  # The ledger may name it.
        unknown = cli("ledger", "list", "--bookie", "nowhere:1", "--keep-going", *more)
        assert unknown.code == 3
        assert "No bookie" not in unknown.err


def test_an_empty_scope_says_what_other_scopes_hold(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = f"sqlite://{tmp_path}/scoped.db"
    with open_cluster(uri, create=True) as cluster:
        for more in ([], ["--all-scopes"], ["--ledger-scope-id", 9]):
            assert cli("ledger", "list", "-u", uri, *more).err == "No ledgers\n"
        metadata = LedgerMetadata(1, 1, 1, DigestType.CRC32C, b"", (Fragment(0, ("b0:1",)),))
        for ledger in (LedgerId(7, 1), LedgerId(7, 2), LedgerId(8, 1)):
            cluster.ledgers.create(ledger, metadata)
        for more in ([], ["--count"], ["-o", "id"], ["-o", "json"]):
            answer = cli("ledger", "list", "-u", uri, *more)
            assert answer.code == 0
            assert "No ledgers in scope 0; 2 other scopes with 3 ledgers: add --all-scopes" in answer.err
        assert "No ledgers in scope 9; 2 other scopes" in cli("ledger", "list", "-u", uri, "--ledger-scope-id", 9).err
        cluster.ledgers.create(LedgerId(0, 1), metadata)
        assert cli("ledger", "list", "-u", uri, "--state", "CLOSED").err == ""


def test_ledgers_are_summed_by_application(cli: Cli, store: Cluster) -> None:
    assert cli("ledger", "list", "--all-scopes", "--by", "application", "-o", "ndjson").rows == [
        {
            "application": "pulsar", "ledgerCount": 2, "size": 20, "ledgerScopeId": "0", "ledgerId": "5",
            "ledgerQualifiedName": "00000000000000000000000000000005", "ledgerSize": 10,
        },
        {
            "application": None, "ledgerCount": 1, "size": 0, "ledgerScopeId": "0", "ledgerId": "6",
            "ledgerQualifiedName": "00000000000000000000000000000006", "ledgerSize": 0,
        },
    ]  # fmt: skip
    assert cli("ledger", "list", "--by", "application", "--state", "closed", "-o", "csv").out.splitlines()[1:] == [
        "pulsar,1,10,0,5,00000000000000000000000000000005,10"
    ]
    assert "BIGGEST LEDGER" in cli("ledger", "list", "--by", "application").out
    assert cli("ledger", "list", "--by", "application", "--count").code == 2


def test_ids_are_printed_in_the_form_in_which_they_were_given(cli: Cli, store: Cluster) -> None:
    forms = ("0x5", "7:5", "00000000-0000-0007-0000-000000000005", "00000000000000070000000000000005")
    for form in forms:
        assert cli("ledger", "show", form).out.splitlines()[0].split()[1] == form
        assert f"ledger {form.replace('5', '9')} " in cli("ledger", "show", form.replace("5", "9")).err.lower()
    assert [line.split()[0] for line in cli("ledger", "show", *forms[:2]).out.splitlines()[1:]] == list(forms[:2])
    assert cli("ledger", "show", "0x5", "-o", "json").json["ledgerId"] == "5"
    # A bare id names another ledger without its scope beside it.
    named = cli("ledger", "show", "5", "--ledger-scope-id", "7").out
    assert named.splitlines()[0].split()[1] == "00000000000000070000000000000005"
