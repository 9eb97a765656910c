"""Exports to Parquet and back: the same ledgers, through commands too; and what is not whole is refused."""

from __future__ import annotations

import json
import shutil
from base64 import b64encode
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow
import pyarrow.compute
import pyarrow.parquet
import pytest

from bkctl.commands.main import run
from bkctl.errors import AlreadyExists, BkctlError, NotFound, UsageError
from bkctl.formats.entry import DigestType
from bkctl.ids import LedgerId
from bkctl.spark.jobs import copying
from bkctl.spark.jobs.copying import HASH_KEY, SHAPE_OPTIONS, SOURCE_KEY, export_ledgers, import_ledgers
from bkctl.spark.sources.options import SourceOptions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from support.live_ledgers import Live

SCOPE = 0xA2C
HIGH = 2**64 - 2


def fill(live: Live) -> dict[LedgerId, list[bytes]]:
    contents = {
        LedgerId(SCOPE, 1): [b"", b"\x00" * 100_000, *(b"%d" % number for number in range(300))],
        LedgerId(SCOPE, 2): [],
        LedgerId(SCOPE, 2**64 - 1): [b"last"],
    }
    for ledger, payloads in contents.items():
        live.write(
            payloads,
            ledger,
            password=b"hunter2",
            digest_type=DigestType.CRC32,
            custom_metadata={"k\u00e9": b"\x00\xff"},
        )
    growing = live.open(LedgerId(SCOPE, 3))
    growing.add([b"open"] * 5)
    growing.add([b"not confirmed"], confirm=False)
    return {**contents, growing.ledger: [b"open"] * 5}


def cli(capfd: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, list[dict[str, Any]], str]:
    capfd.readouterr()
    code = run([str(argument) for argument in arguments])
    out, err = capfd.readouterr()
    return code, [json.loads(line) for line in out.splitlines()], err


def test_export_and_import_restore_ledgers(
    spark: SparkSession, live: Live, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BKCTL_METADATA_URI", live.uri)
    contents = fill(live)
    path = tmp_path / "export"
    code, rows, err = cli(capfd, "pipeline", "export", path, "--ledger-scope-id", SCOPE, "-o", "ndjson")
    assert code == 0, err
    assert {row["ledgerId"]: (row["state"], row["entryCount"], row["size"]) for row in rows} == {
        str(ledger.ledger_id): ("OPEN" if ledger.ledger_id == 3 else "CLOSED", len(each), sum(map(len, each)))
        for ledger, each in contents.items()
    }
    assert [each.name for each in (path / "entries").iterdir() if each.is_dir()] == [f"ledgerScopeId={SCOPE}"]
    entries = spark.read.parquet(str(path / "entries")).orderBy("ledgerQualifiedName", "entryId").collect()
    assert [(row.ledgerQualifiedName, row.entryId, bytes(row.payload)) for row in entries] == [
        (ledger.qualified_name, at, payload)
        for ledger, payloads in sorted(contents.items())
        for at, payload in enumerate(payloads)
    ]
    assert not [each for each in path.rglob("*") if each.is_file() and b"hunter2" in each.read_bytes()]
    with pytest.raises(AlreadyExists):
        export_ledgers(spark, str(path), live.options)

    arguments = ("pipeline", "import", path, "--to-scope", HIGH, "-o", "ndjson")
    code, rows, err = cli(capfd, *arguments, "--dry-run")
    assert (code, [row["state"] for row in rows]) == (0, ["planned"] * 4), err
    assert live.ledgers(HIGH) == set()
    secret = tmp_path / "secret"
    secret.write_text("new password")
    in_the_way = live.write([], LedgerId(HIGH, 3))  # Nothing of it is left on the bookies later.
    code, rows, err = cli(capfd, *arguments, "--dry-run")
    assert (code, [row["state"] for row in rows]) == (3, ["planned", "planned", "failed", "planned"]), err
    code, rows, err = cli(capfd, *arguments, "--password-file", secret)
    assert code == 3, err
    assert [row["state"] for row in rows] == ["copied", "copied", "failed", "copied"]
    _, rows, _ = cli(capfd, *arguments, "--dry-run")
    assert [row["state"] for row in rows] == ["present", "present", "failed", "present"]
    live.client().cluster.ledgers.remove(in_the_way)
    code, rows, err = cli(capfd, *arguments, "--password-file", secret)
    assert code == 0, err
    assert [row["state"] for row in rows] == ["present", "present", "copied", "present"]
    assert "new password" not in str(rows)
    ledgers = live.client().cluster.ledgers
    for ledger, payloads in contents.items():
        target = LedgerId(HIGH, ledger.ledger_id)
        assert live.read(target) == payloads
        made = ledgers.read(target).metadata
        assert (made.digest_type, made.password, made.is_closed) == (
            DigestType.CRC32C if ledger.ledger_id == 3 else DigestType.CRC32, b"new password", True
        )  # fmt: skip
        own = {key: value for key, value in made.custom_metadata.items() if key not in (SOURCE_KEY, HASH_KEY)}
        assert own == ({} if ledger.ledger_id == 3 else {"k\u00e9": b"\x00\xff"})

    # Each damaged ledger is reported, and an incomplete one is not begun.
    for part in (path / "entries").rglob("*.parquet"):
        part.unlink()
    for crc in path.rglob(".*.crc"):
        crc.unlink()
    states = {
        row.ledgerId: (row.state, row.message)
        for row in import_ledgers(spark, str(path), live.options, to_scope_id=HIGH - 1).collect()
    }
    assert states.pop("2")[0] == "copied"
    assert all(state == "failed" and "entries in the export" in message for state, message in states.values())
    shutil.rmtree(path / "counts")
    with pytest.raises(NotFound):
        import_ledgers(spark, str(path), live.options)


Rows = list[tuple[int, bytes | None]]


def imported(live: Live, scope_id: int, *ledgers: tuple[Mapping[str, Any], Rows]) -> list[dict[str, Any]]:
    """Import ledgers 1, 2, …, without Spark, from what differs in their heads and from their entries; the results."""
    fields = {"ensembleSize": 2, "writeQuorumSize": 2, "ackQuorumSize": 2, "digestType": "CRC32C"}
    rows = []
    for ledger_id, (changes, entries) in enumerate(ledgers, 1):
        counts = {"entryCount": len(entries), "size": sum(len(payload or b"") for _, payload in entries)}
        head = json.dumps({**fields, "customMetadata": {}, **counts, **changes}).encode()
        name = LedgerId(scope_id - 1, ledger_id).qualified_name
        rows += [
            {"ledgerQualifiedName": name, "entryId": entry_id, "payload": payload}
            for entry_id, payload in ((-1, head), *entries)
        ]
    options = SourceOptions("test", live.options, ("metadataUri", *SHAPE_OPTIONS))
    return [row for batch in copying._import_rows(options, scope_id, [rows]) for row in batch]


def test_import_of_a_ledger_without_enough_bookies_fails_alone(live: Live) -> None:
    failed, copied = imported(live, SCOPE + 31, ({"ensembleSize": 5}, [(0, b"x")]), ({}, [(0, b"x")]))
    assert (failed["state"], copied["state"]) == ("failed", "copied")
    assert "5 writable bookies are needed" in failed["message"]


def test_import_fails_ledgers_whose_rows_are_not_the_export_s(live: Live) -> None:
    rows: Rows = [(0, b"0"), (1, b"1"), (2, b"2")]
    cases: list[tuple[Mapping[str, Any], Rows, str]] = [
        ({}, [(0, b"0"), (1, b"1"), (1, b"1")], "lacks entry 2 "),
        ({}, [(0, b"0"), (1, None), (2, b"2")], "lacks entry 1 "),
        ({"size": 4}, rows, "3 entries in the export (3 bytes), not 3 (4 bytes)"),
        ({"entryCount": 4}, rows, "3 entries in the export (3 bytes), not 4 (3 bytes)"),
        ({"customMetadata": {"a": None}}, rows, "damaged metadata"),
        ({"digestType": "MD5"}, rows, "damaged metadata"),
        ({"writeQuorumSize": None}, rows, "damaged metadata"),
    ]
    found = imported(live, SCOPE + 33, *((head, entries) for head, entries, _ in cases), ({}, rows))
    assert [row["state"] for row in found] == ["failed"] * len(cases) + ["copied"]
    for row, (*_, message) in zip(found, cases, strict=False):
        assert message in row["message"]


def test_import_takes_the_shape_of_a_ledger_as_copies_do(live: Live) -> None:
    """The new ledger does not inherit the marks of an exported copy: it was not read back yet."""
    marks = {name: b64encode(b"of another copy").decode() for name in (SOURCE_KEY, HASH_KEY)}
    heads = {"ackQuorumSize": 0, "customMetadata": {"own": "AA==", **marks}}, {"customMetadata": None}
    copied, bare = imported(live, SCOPE + 35, *((head, [(0, b"x")]) for head in heads))
    assert (copied["state"], bare["state"]) == ("copied", "copied")
    made = live.client().cluster.ledgers.read(LedgerId(SCOPE + 35, 1)).metadata
    marks = {SOURCE_KEY: copied["source"], HASH_KEY: copied["sha256"]}
    assert made.custom_metadata == {"own": b"\0", **{name: value.encode() for name, value in marks.items()}}
    assert made.ack_quorum_size == 1


def test_exports_of_empty_partial_and_missing_selections(
    spark: SparkSession, live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = {**live.options, "ledgerScopeId": str(SCOPE + 50)}
    assert export_ledgers(spark, str(tmp_path / "none"), nothing).collect() == []
    assert import_ledgers(spark, str(tmp_path / "none"), live.options).collect() == []
    one, other = (live.write([b"x"], LedgerId(SCOPE + 60 + number, number)) for number in (1, 2))
    live.write([b"x"], LedgerId(SCOPE + 61, 3))
    some = {**live.options, "ledger": f"{one},{other}"}
    (tmp_path / "some").mkdir()
    # Too many scopes to have a directory each.
    monkeypatch.setattr(copying, "SCOPES_MAX", 1)
    rows = export_ledgers(spark, str(tmp_path / "some"), some, overwrite=True).collect()
    assert [row.ledgerId for row in rows] == [1, 2]
    assert not [each for each in (tmp_path / "some" / "entries").iterdir() if each.is_dir()]
    rows = import_ledgers(spark, str(tmp_path / "some"), live.options, to_scope_id=SCOPE + 63).collect()
    assert [(row.ledgerId, row.state, row.entryCount) for row in rows] == [("1", "copied", 1), ("2", "copied", 1)]
    # Rows of impossible entry ids hide no ledger: of two that have such rows, one has lost an entry.
    shutil.copytree(tmp_path / "some", tmp_path / "odd", ignore=shutil.ignore_patterns(".*.crc"))
    for file in (tmp_path / "odd" / "entries").rglob("*.parquet"):
        table = pyarrow.parquet.read_table(file)
        odd = pyarrow.Table.from_pylist([{**row, "entryId": -5} for row in table.to_pylist()], table.schema)
        is_lost = pyarrow.compute.equal(table["ledgerId"], 2)
        pyarrow.parquet.write_table(pyarrow.concat_tables([odd, table.filter(pyarrow.compute.invert(is_lost))]), file)
    rows = import_ledgers(spark, str(tmp_path / "odd"), live.options, to_scope_id=SCOPE + 66).collect()
    assert [(row.ledgerId, row.state) for row in rows] == [("1", "copied"), ("2", "failed")]
    twin = live.write([b"y"], LedgerId(SCOPE + 62, 1))
    export_ledgers(spark, str(tmp_path / "twins"), {**live.options, "ledger": f"{one},{twin}"})
    for dry_run in (True, False):
        with pytest.raises(UsageError, match=f"Ledgers {one} and {twin} would both become "):
            import_ledgers(spark, str(tmp_path / "twins"), live.options, to_scope_id=SCOPE + 65, dry_run=dry_run)
    # Exports of earlier releases have ids as text.
    for part in ("ledgers", "entries", "counts"):
        found = spark.read.parquet(str(tmp_path / "some" / part))
        ids = {name: found[name].cast("string") for name in ("ledgerScopeId", "ledgerId")}
        found.withColumns(ids).write.parquet(str(tmp_path / "earlier" / part))
    rows = import_ledgers(spark, str(tmp_path / "earlier"), live.options, to_scope_id=SCOPE + 64).collect()
    assert [(row.ledgerId, row.state, row.entryCount) for row in rows] == [("1", "copied", 1), ("2", "copied", 1)]
    with pytest.raises(Exception, match=r"LedgerNotFound|No ledger"):
        export_ledgers(spark, str(tmp_path / "more"), {**live.options, "ledger": LedgerId(SCOPE + 60, 9).uuid})
    with pytest.raises(BkctlError):
        import_ledgers(spark, str(tmp_path / "more"), live.options)


def test_ledgers_deleted_during_an_export_are_left_out(
    spark: SparkSession, live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scope_id, path = SCOPE + 70, tmp_path / "export"
    early, partly, kept = (live.write([b"0", b"1"], LedgerId(scope_id, number)) for number in (1, 2, 3))
    growing = live.open(LedgerId(scope_id, 4))
    growing.add([b"0"])
    deleted = {early, partly, growing.ledger}
    ledgers = live.client().cluster.ledgers
    write = copying._write_entries

    def write_while_others_delete(*arguments: Any, **settings: Any) -> None:
        for ledger in deleted & live.ledgers(scope_id):
            ledgers.remove(ledger)
        write(*arguments, **settings)
        # One was read in part.
        (part,) = (path / "entries").rglob("*.parquet")
        rows = pyarrow.parquet.read_table(part, partitioning=None).slice(0, 1).to_pylist()
        rows[0]["ledgerQualifiedName"] = partly.qualified_name
        table = pyarrow.Table.from_pylist(rows, pyarrow.parquet.read_schema(part))
        pyarrow.parquet.write_table(table, part.with_name("more.parquet"))

    monkeypatch.setattr(copying, "_write_entries", write_while_others_delete)
    options = {**live.options, "ledgerScopeId": str(scope_id)}
    assert [row.ledgerId for row in export_ledgers(spark, str(path), options).collect()] == [3]
    rows = import_ledgers(spark, str(path), live.options, to_scope_id=scope_id + 1).collect()
    assert [(row.ledgerId, row.state, row.entryCount) for row in rows] == [("3", "copied", 2)]
    assert live.read(LedgerId(scope_id + 1, 3)) == [b"0", b"1"]
    states = {row.ledgerId: row.state for row in spark.read.parquet(str(path / "counts")).collect()}
    assert states == {1: "DELETED", 2: "DELETED", 3: "CLOSED", 4: "DELETED"}
    for part in ("ledgers", "counts"):
        lost = shutil.copytree(path, tmp_path / part, ignore=shutil.ignore_patterns(".*.crc"))
        for file in (lost / part).glob("*.parquet"):
            rows = pyarrow.parquet.read_table(file)
            pyarrow.parquet.write_table(rows.filter(pyarrow.compute.not_equal(rows["ledgerId"], 3)), file)
        for dry_run in (True, False):
            rows = import_ledgers(spark, str(lost), live.options, to_scope_id=scope_id + 2, dry_run=dry_run).collect()
            assert [(row.ledgerId, row.state) for row in rows] == [("3", "failed")]
            assert "has lost its metadata or its counts" in rows[0].message
    deleted = {kept}
    with pytest.raises(Exception, match="No ledger"):
        export_ledgers(spark, str(tmp_path / "named"), {**live.options, "ledger": kept.uuid})


@pytest.mark.usefixtures("spark")
def test_export_since_former_exports_has_what_is_new(
    live: Live, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BKCTL_METADATA_URI", live.uri)
    scope_id = SCOPE + 80
    live.write([b"closed"], LedgerId(scope_id, 1))
    created_again = live.write([], LedgerId(scope_id, 2))
    growing = live.open(LedgerId(scope_id, 3))
    growing.add([b"before"])
    days = tmp_path / "days"
    days.mkdir()

    def exported(day: int, *options: object, since: object = days / "*") -> dict[int, int]:
        """Run an export; return the entries of each ledger that it says and has."""
        words = ("export", days / str(day), "--ledger-scope-id", scope_id, "--since", since, "-o", "ndjson", *options)
        code, rows, err = cli(capfd, "pipeline", *words)
        assert code == 0, err
        counts = {int(row["ledgerId"]): row["entryCount"] for row in rows}
        entries = pyarrow.parquet.read_table(days / str(day) / "entries", columns=["ledgerId"]) if counts else None
        stored = Counter(map(int, entries.column(0).to_pylist() if entries else ()))
        assert {ledger_id: count for ledger_id, count in counts.items() if count} == stored
        return counts

    assert exported(1) == {1: 1, 2: 0, 3: 1}
    growing.add([b"after"] * 4)
    growing.close()
    live.client().cluster.ledgers.remove(created_again)
    live.write([], created_again)
    live.write([b"new"] * 2, LedgerId(scope_id, 4))
    still_open = live.open(LedgerId(scope_id, 5))
    still_open.add([b"open"])
    for options in ((), ("--overwrite",)):
        assert exported(2, *options) == {2: 0, 3: 5, 4: 2, 5: 1}
    assert exported(3, since=days / "2") == {1: 1, 5: 1}
    assert exported(4, "--state", "closed") == {}
    # Without its mark of completeness an export does not count, nor does one that a pattern leaves out.
    (days / "2" / "counts" / "_SUCCESS").unlink()
    assert exported(5, "--state", "closed", since=days / "[2-3]") == {2: 0, 3: 5, 4: 2}
    still_open.close()
    again = ("pipeline", "export", days / "6", "--ledger-scope-id", scope_id, "--since", days / "3", "-o", "ndjson")
    for part in (days / "3" / "entries").rglob("*.parquet"):  # Of a ledger that was deleted then, more may be left.
        rows = pyarrow.parquet.read_table(part, partitioning=None).to_pylist()
        table = pyarrow.Table.from_pylist(rows * 5, pyarrow.parquet.read_schema(part))
        others = pyarrow.array([f"{7:032x}"] * len(table))
        at = table.schema.get_field_index("ledgerQualifiedName")
        pyarrow.parquet.write_table(table.set_column(at, "ledgerQualifiedName", others), part)
    for crc in days.rglob(".*.crc"):
        crc.unlink()
    code, _, err = cli(capfd, *again)
    assert (code, "days/3 has lost entries" in err) == (7, True), err
    shutil.rmtree(days / "3" / "entries")
    code, _, err = cli(capfd, *again)
    assert (code, "days/3 has lost entries" in err) == (7, True), err
    code, rows, err = cli(capfd, "pipeline", "export", days / "6", "--since", days / "2", "-o", "ndjson")
    assert (code, rows) == (4, [])
    assert "days/2 is not a complete export" in err
