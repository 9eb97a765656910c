from __future__ import annotations

import csv
import importlib
import io
import json
import math
import pkgutil
import time
import tracemalloc
from array import array
from enum import StrEnum
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import yaml
from support import golden
from support.waiting import eventually

from bkctl import commands
from bkctl.columns import Column, Columns, Constant, Kind, iso_time, some_of
from bkctl.commands.cluster import HEALTH_COLUMNS
from bkctl.commands.kit.columns import Output, RowOrder, RowSelection
from bkctl.commands.kit.job import Activity
from bkctl.commands.kit.lines import yaml_text
from bkctl.commands.kit.output import RowWriter, open_writer, show
from bkctl.commands.kit.terminal import ClosedOutput, emit, wants_color
from bkctl.commands.kit.texts import cut, duration_text, milliseconds, plain, plain_lines, size_text, width_of, words
from bkctl.errors import UsageError
from bkctl.ids import LedgerId
from bkctl.metadata.admin.health import HealthFinding, Severity
from bkctl.metadata.admin.health_codes import HealthCode

from .conftest import Cli


class Row(NamedTuple):
    ledger: LedgerId | None
    number: int | None = 1
    text: str | None = "a"
    flag: bool | None = True
    at: int | None = 0
    data: bytes | None = b"hi"
    nested: Any = None


COLUMNS = Columns(
    Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
    Column("NUMBER", "number", "number", Kind.INTEGER),
    Column("TEXT", "text", "text"),
    Column("FLAG", "flag", "flag", Kind.BOOLEAN),
    Column("AT", "at", "at", Kind.TIME),
    Column("DATA", "data", "data", Kind.BINARY),
    Column("NESTED", "nested", lambda row: row.nested, Kind.NESTED),
    key="ledger",
)
NUMBERS = {4: -1, 5: 2**63 - 1, 6: -(2**63), 50: 10**18, 700: 2**63, 701: -(10**25)}
ROWS = [
    Row(LedgerId(7, 1), 5, 'x,"y"\n', False, 1755770000123, b"\x00\xff", {"a": ["b", "c"]}),
    Row(None, None, None, None, None, None, None),
    Row(LedgerId(0, 12)),
]


class Word(StrEnum):
    """A value of a StrEnum, as the types of records are."""

    QUOTED = 'a,"b"'


ODD_COLUMNS = Columns(
    *COLUMNS.columns,
    Column("SIZE", "size", "number", Kind.SIZE),
    Column("FIXED", "100 % of", Constant("it's {a} 100 %\\ \n")),
    Column("NOTHING", "nothing", Constant(None), Kind.LEDGER),
    Column("SHOWN", "shown", "number", Kind.INTEGER, text=lambda number: f"<{number}>\x07", flexible=True),
    Column("MAYBE", "maybe", "text", optional=True),
    Column("OFTEN", "often", "number", Kind.INTEGER, optional=True),
    Column("LAST", "last", lambda row: row.text, flexible=True, style={"a": "\x1b[32m"}),
    key="text",
)
ODD_ROWS = [
    Row(None, None, None, None, None, None, None),
    Row(LedgerId(0, 0), 0, "", False, 0, b"", {}),
    Row(LedgerId(2**64 - 1, 2**64 - 1), 2**63 - 1, "ends in spaces   ", True, -1, bytes(range(30)), []),
    Row(LedgerId(1, 2**64 - 1), -(2**63), 'a,"b"', True, 1755770000123, bytearray(b"ab"), "text"),
    Row(LedgerId(0, 2**63 - 1), 10**30, "two\r\nlines", False, 1 << 70, memoryview(b"xyz"), {"a": [1, {"b": None}]}),
    Row(LedgerId(0, 5), True, "\x00\x1b[31m\x7f\x85\t", True, -(10**14), b"\xff", [True, None, 1.5, b"\x00", (1, "x")]),
    Row(LedgerId(0, 5), -(10**25), "日本 äöü 😀 \udc80", False, 999, b"hi", {"ä\n": "\x1b", "": {"k": []}}),
    Row(LedgerId(7, 5), 1e16, "%s %(a)s {b} \\ '", True, 10**12, b"hi", float("nan")),
    Row(LedgerId(7, 5), 10240, Word.QUOTED, False, 10**12, b"hi", 10**40),
    Row(None, 0.1, "\r", True, 10**12 + 7, b"hi", "a,b\n"),
    *(Row(LedgerId(each % 2, each), each, "a" * (each % 9), at=None) for each in range(94)),
]  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def written(output: Output, rows: list[Any] = ROWS, columns: Columns = COLUMNS, **settings: Any) -> str:
    stream = io.StringIO()
    with RowWriter(columns, output, stream=stream, **settings) as writer:
        writer.rows(rows)
    return stream.getvalue()


FIRST = {
    "ledgerScopeId": "7",
    "ledgerId": "1",
    "ledgerQualifiedName": "00000000000000070000000000000001",
    "number": 5,
    "text": 'x,"y"\n',
    "flag": False,
    "at": "2025-08-21T09:53:20.123Z",
    "data": "AP8=",
    "nested": {"a": ["b", "c"]},
}


def test_messages_name_the_first_of_many() -> None:
    assert some_of([]) == ""
    assert some_of([LedgerId(0, 1), LedgerId(0, 2)]) == "1, 2"
    assert some_of("abcdefg") == "a, b, c, d, e and 2 more"
    assert some_of(["a"] * 1101, 1) == "a and 1,100 more"


def test_ndjson_is_an_object_a_line() -> None:
    lines = written(Output.NDJSON).splitlines()
    assert json.loads(lines[0]) == FIRST
    assert json.loads(lines[1]) == dict.fromkeys(FIRST)
    assert list(json.loads(lines[2])) == list(FIRST)


RECORDED = json.loads((golden.DATA / "rows.json").read_text())
RECORDED_COMMANDS = [
    ("entrylog", "show", "ledgers"),
    ("entrylog", "read", "ledgers", "--limit", "5"),
    ("entrylog", "read", "ledgers", "--limit", "5", "--body"),
    ("entrylog", "read", "ledgers", "--limit", "5", "--digest-type", "CRC32C", "--body"),
    ("entrylog", "read", "ledgers", "--type", "ledgersMap", "--type", "padding", "--limit", "5"),
    ("entrylog", "extract", "ledgers", "--ledger", "3", "--format", "ndjson", "--file", "-", "--to", "5"),
    ("journal", "read", "journal", "--show-secrets", "--limit", "12"),
    ("journal", "stats", "journal", "--by", "type"),
]


#: The odd rows that are JSON: JSON has no NaN, and its numbers are not True.
JSON_ROWS = [row for row in ODD_ROWS if row.number is not True and row.nested == row.nested]
#: The forms whose text is recorded; the others are read back.
RECORDED_FORMS = [output for output in Output if f"odd {output}" in RECORDED]


def odd_rows(output: Output, stream: io.StringIO, *, color: bool = False) -> str:
    with RowWriter(ODD_COLUMNS, output, stream=stream, color=color) as writer:
        writer.rows(ODD_ROWS[:60])
        for row in ODD_ROWS[60:]:
            writer.row(row)
    return stream.getvalue()


@pytest.mark.parametrize("output", RECORDED_FORMS)
def test_odd_values_keep_their_recorded_text(output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    assert odd_rows(output, io.StringIO()) == RECORDED[f"odd {output}"]
    on_terminal = RECORDED["odd table on a terminal"] if output is Output.TABLE else RECORDED[f"odd {output}"]
    if output is Output.CSV:
        on_terminal = plain_lines(on_terminal)
    assert odd_rows(output, Terminal(), color=True) == on_terminal


ADVICE = "look at its disks with 'bkctl bookies usage', and at its log; then start it again, or decommission it"


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_sentences_wrap_at_words_and_are_never_cut(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    found = HealthFinding(
        HealthCode.UNDERREPLICATED, Severity.WARNING, "scope 0", "2 ledgers are under-replicated, for 3 h", ADVICE
    )
    notes: list[str] = []
    with RowWriter(HEALTH_COLUMNS, Output.TABLE, stream=(terminal := Terminal()), note=notes.append) as writer:
        writer.rows([found, found])
    lines = terminal.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert not notes or width == 60
    for title, text in (("WHAT", found.message), ("ADVICE", found.advice)):
        start = lines[0].index(title)
        end = lines[0].index("ADVICE") if title == "WHAT" else width
        column = " ".join(" ".join(line[start:end].split()) for line in lines[1:]).split()
        assert column == (text + " " + text).split()


def test_sentences_behind_the_sample_wrap_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    columns = Columns(
        Column("PATH", "path", Constant("/a/long/path/to/a/file")), Column("PROBLEM", "problem", "text"),
        Column("NUMBER", "number", "number", Kind.INTEGER),
    )  # fmt: skip
    with RowWriter(columns, Output.TABLE, stream=(terminal := Terminal())) as writer:
        writer.rows([Row(None, each, None) for each in range(100)])
        writer.row(Row(None, 100, ADVICE))
    assert set(ADVICE.split()) <= set(terminal.getvalue().split())


def test_a_table_without_rows_is_a_sentence_on_a_terminal() -> None:
    columns = Columns(Column("KEY", "key", "number"), none="No keys")
    for each in (columns, columns.widened(), columns.and_also(Column("TEXT", "text", "text"))):
        notes: list[str] = []
        with RowWriter(each, Output.TABLE, stream=(terminal := Terminal()), note=notes.append):
            pass
        assert (terminal.getvalue(), notes) == ("", ["No keys"])
    assert written(Output.TABLE, [], columns) == "KEY\n"
    assert written(Output.JSON, [], columns) == "[]\n"


@pytest.mark.parametrize("width", [20, 40, 60, 80])
def test_columns_that_do_not_fit_are_left_out_and_named(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    columns = Columns(
        Column("KEY", "key", "number", Kind.INTEGER),
        Column("EMPTY", "empty", Constant(None)),
        *(Column(f"COUNT {each}", f"count{each}", Constant(123456789), Kind.INTEGER) for each in range(5)),
        Column("FILE", "file", Constant("/a/long/path/to/a/file/with/a/name.log"), flexible=True),
        Column("PROBLEM", "problem", "text"),
    )
    notes: list[str] = []
    with RowWriter(columns, Output.TABLE, stream=(terminal := Terminal()), note=notes.append) as writer:
        writer.rows([Row(None, 1, "it is gone")])
    lines = terminal.getvalue().splitlines()
    assert max(map(len, lines)) <= max(width, 45)
    assert "gone" in terminal.getvalue()
    assert "name.log" in terminal.getvalue()
    (note,) = notes
    assert note.startswith("Left out for width: COUNT ")
    left_out = note.removeprefix("Left out for width: ").partition(";")[0].split(", ")
    header = " ".join(lines[0].split())
    assert [name for name in left_out if name in header] == []
    assert written(Output.TABLE, [Row(None, 1, "gone")], columns).splitlines()[0].split()[:2] == ["KEY", "EMPTY"]


def test_an_object_wraps_its_sentences_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    columns = Columns(Column("N", "n", "number", Kind.INTEGER), Column("ADVICE", "advice", "text"))
    show(Row(None, 1, ADVICE), columns, Output.TABLE, stream=(terminal := Terminal()))
    lines = terminal.getvalue().splitlines()
    assert max(map(len, lines)) <= 40
    assert " ".join(terminal.getvalue().split()) == f"N 1 ADVICE {ADVICE}"


def test_sentences_are_never_flexible() -> None:
    names = [each.name for each in pkgutil.walk_packages(commands.__path__, "bkctl.commands.")]
    values = [value for name in names for value in vars(importlib.import_module(name)).values()]
    columns = [column for value in values if isinstance(value, Columns) for column in value.columns]
    sentences = [each for each in columns if each.title in {"WHAT", "ADVICE", "PROBLEM", "REASON", "MESSAGE"}]
    assert len(sentences) > 10
    assert [each.name for each in sentences if each.flexible] == []


@pytest.mark.parametrize("output", RECORDED_FORMS)
@pytest.mark.parametrize("arguments", RECORDED_COMMANDS, ids=" ".join)
def test_records_keep_their_recorded_text(
    cli: Cli, arguments: tuple[str, ...], output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(golden.DATA / "4.18.0" / "interleaved")
    assert cli(*arguments, "-o", output).out == RECORDED[f"{' '.join(arguments)} -o {output}"]


def test_json_is_one_array_of_the_same_objects() -> None:
    assert json.loads(written(Output.JSON)) == [json.loads(line) for line in written(Output.NDJSON).splitlines()]
    assert json.loads(written(Output.JSON, [])) == []


def test_yaml_is_one_list_of_the_same_objects() -> None:
    for rows, columns in ((ROWS, COLUMNS), (JSON_ROWS, ODD_COLUMNS)):
        lines = written(Output.NDJSON, rows, columns).splitlines()
        found = yaml.safe_load(written(Output.YAML, rows, columns))
        assert repr(found) == repr([json.loads(line) for line in lines])
    assert written(Output.YAML, []) == "[]\n"
    stream = io.StringIO()
    show(ROWS[0], COLUMNS, Output.YAML, stream=stream)
    assert yaml.safe_load(stream.getvalue()) == FIRST


ODD_STRINGS = ("no", "Null", "1e5", "0x1f", "-", "- a", "a: b", "a #b", "~", "", " a", "1", "a\tb", "=", "\x85\ufeff")


@pytest.mark.parametrize("text", ODD_STRINGS)
def test_yaml_strings_stay_strings(text: str) -> None:
    document = {"a": text, text: ["b", {}, [], {"c": [[text], {"d": text}]}]}
    assert yaml.safe_load(yaml_text(document)) == document


def test_wide_tables_have_every_column_uncut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    columns = Columns(
        Column("LONG", "long", Constant("x" * 70), flexible=True), Column(None, "lastEntryId", "number", Kind.INTEGER)
    )
    with RowWriter(columns, Output.WIDE, stream=(terminal := Terminal())) as writer:
        writer.rows(ROWS[:1])
    assert terminal.getvalue().split() == ["LONG", "LAST", "ENTRY", "ID", "x" * 70, "5"]


@pytest.mark.parametrize("output", [Output.TABLE, Output.CSV])
def test_columns_are_chosen_by_title_or_name_in_the_given_order(output: Output) -> None:
    chosen = RowSelection(("Text", "NUMBER", "ledgerId", "ledger"))
    lines = written(output, selection=chosen).splitlines()
    if output is Output.TABLE:
        assert lines[0].split() == ["TEXT", "NUMBER", "LEDGER", "ID", "LEDGER"]
        assert lines[3].split() == ["a", "1", "12", "12"]
    else:
        assert lines[0] == "text,number,ledgerId,ledgerScopeId,ledgerId,ledgerQualifiedName"
    with pytest.raises(UsageError, match="'no': not a column of this command; name some of ledger, number"):
        written(output, selection=RowSelection(("no",)))
    with pytest.raises(UsageError, match="--sort 'no'"):
        written(output, selection=RowSelection(None, RowOrder.parse("no")))


def sorted_by(order: str, name: str, output: Output = Output.NDJSON, columns: Columns = ODD_COLUMNS) -> list[Any]:
    stream = io.StringIO()
    with open_writer(columns, output, RowSelection(None, RowOrder.parse(order)), stream=stream) as writer:
        writer.rows(JSON_ROWS)
    return [json.loads(line)[name] for line in stream.getvalue().splitlines()]


def test_rows_are_sorted_by_values_with_absent_ones_last() -> None:
    ids = sorted_by("ledgerid", "ledgerId")
    numbers = [int(each) for each in ids if each is not None]
    assert numbers == sorted(numbers)
    assert ids[len(numbers) :] == [None] * (len(JSON_ROWS) - len(numbers))
    sizes = sorted_by("-size", "size")
    known = [each for each in sizes if each is not None]
    assert known == sorted(known, reverse=True)
    assert sizes[-1] is None
    names = sorted_by("ledger", "ledgerQualifiedName")
    assert [each for each in names if each] == sorted(each for each in names if each)
    assert len(sorted_by("nested", "nested")) == len(JSON_ROWS)


@pytest.mark.parametrize("output", [each for each in Output if each is not Output.ID])
@pytest.mark.parametrize("order", ["ledgerid", "-ledgerid", "text", "-text"])
@pytest.mark.parametrize("limit", [None, 0, 3, 5, 70])
def test_many_rows_are_sorted_as_few_are(
    monkeypatch: pytest.MonkeyPatch, output: Output, order: str, limit: int | None
) -> None:
    """Equal rows stay in the order in which they came."""
    selection = RowSelection(None, RowOrder.parse(order), limit)
    given = [*JSON_ROWS, *ROWS, *reversed(JSON_ROWS)] * 4
    rows = [SimpleNamespace(**row._asdict(), place=place) for place, row in enumerate(given)]
    numbered = Columns(*ODD_COLUMNS.columns, Column("PLACE", "place", "place", Kind.INTEGER))
    texts = []
    for count in (10_000, 7):
        monkeypatch.setattr("bkctl.commands.kit.output.SORTED_ROWS", count)
        monkeypatch.setattr("bkctl.commands.kit.output._BLOCK_ROWS", 3)
        with open_writer(numbered, output, selection, stream=(stream := io.StringIO())) as writer:
            writer.rows(rows)
        texts.append(stream.getvalue())
    assert texts[0] == texts[1]
    assert output is not Output.NDJSON or texts[0].count("\n") == (
        len(rows) if limit is None else min(limit, len(rows))
    )


def test_rows_given_as_columns_are_sorted_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = Columns(
        Column("NAME", "name", "name"), Column("NUMBER", "number", "number", Kind.INTEGER),
        Column("KIND", "kind", Constant("x")), key="name",
    )  # fmt: skip
    monkeypatch.setattr("bkctl.commands.kit.output.SORTED_ROWS", 1000)

    def peak(block_count: int) -> int:
        selection = RowSelection(None, RowOrder.parse("-number"))
        seen: list[int] = []
        stream = io.StringIO()
        monkeypatch.setattr(stream, "write", lambda text: seen.extend(map(int, text.split())) if text else None)
        tracemalloc.start()
        try:
            with open_writer(columns, Output.ID, selection, stream=stream) as writer:
                for block in range(block_count):
                    numbers = [number * 7919 % 1000 + 1000 * block for number in range(1000)]
                    writer.block(1000, {"name": [f"{number:0100}" for number in numbers], "number": numbers})
                assert seen == []
                _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert seen == list(reversed(range(1000 * block_count)))
        return peak_bytes

    assert peak(20) < peak(4) + (1 << 18)


def test_sorted_rows_keep_the_columns_they_came_with() -> None:
    def columns(place: str) -> Columns:
        return Columns(Column("N", "n", "number", Kind.INTEGER), Column("AT", "at", Constant(place)), key="at")

    for output, expected in ((Output.CSV, "n,at\n1,one\n2,two\n3,block\n"), (Output.ID, "one\ntwo\nblock\n")):
        stream = io.StringIO()
        with open_writer(columns("one"), output, RowSelection(None, RowOrder.parse("n")), stream=stream) as writer:
            one = ROWS[2]._replace(number=1)
            writer.use(columns("two"))
            writer.row(ROWS[2]._replace(number=2))
            writer.use(columns("block"))
            writer.block(1, {"n": [3]})
            writer.use(columns("one"))
            writer.row(one)
        assert stream.getvalue() == expected


def test_tables_of_findings_are_empty_without_any() -> None:
    assert written(Output.TABLE, [], findings=True) == ""
    assert written(Output.TABLE, ROWS, findings=True) == written(Output.TABLE, ROWS)
    assert written(Output.JSON, [], findings=True) == "[]\n"
    assert written(Output.TABLE, []).startswith("LEDGER")


def test_names_are_words_in_tables_only(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(golden.DATA / "4.18.0" / "interleaved")
    read = ("journal", "read", "journal", "--limit", "1", "--type")
    for name in ("ledgerKey", "ledger key"):
        assert cli(*read, name, "-o", "json").json[0]["type"] == "ledgerKey"
        assert "  ledger key  " in cli(*read, name).out
    assert words("explicitLac") == "explicit LAC"
    kinds = {cli("bookie", "files", ".", "--kind", name).out for name in ("entryLog", "entrylog", "entry log")}
    assert len(kinds) == 1
    assert "entry log" in kinds.pop()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (0.25, "250 ms"), (1.5, "1.5 s"), (90, "1 min 30 s"), (3600, "1 h"), (90061, "1 d 1 h 1 min 1 s")],
)
def test_durations_are_exact(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_csv_has_a_header_and_quotes() -> None:
    rows = list(csv.reader(io.StringIO(written(Output.CSV))))
    assert rows[0] == list(FIRST)
    assert rows[1] == [
        "7", "1", "00000000000000070000000000000001", "5", 'x,"y"\n', "false", "2025-08-21T09:53:20.123Z", "AP8=",
        '{"a":["b","c"]}',
    ]  # fmt: skip
    assert rows[2] == [""] * 9


def test_id_prints_the_key_a_line() -> None:
    assert written(Output.ID).splitlines() == ["00000000000000070000000000000001", "-", "12"]


def test_output_id_without_ids_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="-o id"):
        written(Output.ID, columns=Columns(Column("A", "a", "number")))


def test_table_aligns_and_escapes() -> None:
    lines = written(Output.TABLE).splitlines()
    assert lines[0].split() == ["LEDGER", "NUMBER", "TEXT", "FLAG", "AT", "DATA", "NESTED"]
    assert 'x,"y"\\x0a' in lines[1]
    assert lines[2].split() == ["-"] * 7
    assert len({line.index(word) for line, word in ((lines[0], "FLAG"), (lines[1], "no "), (lines[3], "yes"))}) == 1


def test_table_widths_come_from_the_first_hundred_rows() -> None:
    columns = Columns(Column("A", "a", "number", Kind.INTEGER), Column("B", "b", "text"))
    rows = [Row(None, index, "t") for index in range(100)] + [Row(None, 12345, "long text")]
    lines = written(Output.TABLE, rows, columns).splitlines()
    assert lines[1] == " 0  t"
    assert lines[101] == "12345  long text"


def test_a_table_is_printed_before_the_error_that_follows() -> None:
    def rows() -> Any:
        yield ROWS[2]
        raise ValueError

    for output in Output:
        stream = io.StringIO()
        with pytest.raises(ValueError), RowWriter(COLUMNS, output, stream=stream) as writer:  # noqa: PT011
            writer.rows(rows())
        assert "12" in stream.getvalue()
        if output is Output.JSON:
            assert len(json.loads(stream.getvalue())) == 1


def test_rows_before_one_that_cannot_be_read_are_printed() -> None:
    def text(row: Row) -> str:
        if row.number == 3:
            raise ValueError
        return "here"

    columns = Columns(Column("N", "n", "number", Kind.INTEGER), Column("T", "t", text), key="t")
    for output in Output:
        stream = io.StringIO()
        with pytest.raises(ValueError), RowWriter(columns, output, stream=stream) as writer:  # noqa: PT011
            writer.rows(Row(None, number) for number in range(10))
        assert stream.getvalue().count("here") == 3


def test_rows_are_printed_as_they_were_when_they_were_given() -> None:
    row = {"at": 0}

    def rows() -> Any:
        for row["at"] in range(600):
            yield row

    columns = Columns(Column("AT", "at", lambda row: row["at"], Kind.INTEGER), key="at")
    assert written(Output.ID, rows(), columns).split() == [str(number) for number in range(600)]


def test_large_rows_are_printed_few_at_a_time() -> None:
    sizes: list[int] = []

    class Sizes(io.StringIO):
        def write(self, text: str) -> int:
            sizes.append(len(text))
            return len(text)

    rows = [Row(None, data=bytes(1 << 18))] * 100
    for give in (lambda writer: writer.rows(rows), lambda writer: [writer.row(row) for row in rows]):
        with RowWriter(COLUMNS, Output.NDJSON, stream=Sizes()) as writer:
            give(writer)
    assert sum(sizes) > 60 << 20
    assert max(sizes) < 12 << 20


@pytest.mark.parametrize("text", ["", "a", " a ", 'a"b', "a,b", "a\nb", "a\r", "\r\n", "\0", "ä", "'", ";", "\t", '"'])
def test_csv_cells_match_the_csv_module(text: str) -> None:
    rows = io.StringIO()
    csv.writer(rows, lineterminator="\r\n").writerow([1, text])
    columns = Columns(Column("N", "n", "number", Kind.INTEGER), Column("T", "t", "text"))
    assert written(Output.CSV, [Row(None, 1, text)], columns) == "n,t\n" + rows.getvalue().removesuffix("\r\n") + "\n"


def test_failure_before_the_first_row_prints_nothing() -> None:
    for output in Output:
        stream = io.StringIO()
        with pytest.raises(KeyError), RowWriter(COLUMNS, output, stream=stream) as writer:
            writer.rows({}[1] for _ in range(1))
        assert stream.getvalue() == ""


def test_slow_rows_do_not_wait_for_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    seen = []
    with RowWriter(COLUMNS, Output.NDJSON, stream=stream) as writer:

        def rows() -> Any:
            for _ in range(4):
                now[0] += 1
                seen.append(len(stream.getvalue().splitlines()))
                yield ROWS[0]

        writer.rows(rows())
    assert seen[-1] >= 1


def test_sources_may_be_constants_and_functions() -> None:
    columns = Columns(
        Column("C", "c", Constant("it's {a}\\ \n")),
        Column("N", "n", Constant(None), Kind.INTEGER),
        Column("E", "e", lambda row: row.number + 2, Kind.INTEGER),
        Column("L", "l", lambda row: row.ledger if row.ledger.ledger_id == 13 else None, Kind.LEDGER),
        Column("O", "o", "text", optional=True),
    )
    rows = [Row(LedgerId(0, 12), 1, None), Row(LedgerId(0, 13), 2, "t")]
    first, second = map(json.loads, written(Output.NDJSON, rows, columns).splitlines())
    assert first == {"c": "it's {a}\\ \n", "n": None, "e": 3} | dict.fromkeys(list(FIRST)[:3])
    assert second["ledgerId"] == "13"
    assert second["o"] == "t"
    assert "it's {a}" in written(Output.CSV, rows, columns)
    assert written(Output.TABLE, rows, columns).splitlines()[1].split()[-2:] == ["-", "-"]


def test_columns_can_change_between_files() -> None:
    def of(name: str) -> Columns:
        return Columns(Column("F", "file", Constant(name)), Column("N", "n", "number", Kind.INTEGER), key="file")

    for output, expected in (
        (Output.NDJSON, '{"file":"a","n":1}\n{"file":"b","n":1}\n'),
        (Output.CSV, "file,n\na,1\nb,1\n"),
        (Output.ID, "a\nb\n"),
        (Output.TABLE, "F  N\na  1\nb  1\n"),
    ):
        stream = io.StringIO()
        with RowWriter(of("a"), output, stream=stream) as writer:
            writer.rows(ROWS[2:])
            writer.use(of("b"))
            writer.rows(ROWS[2:])
        assert stream.getvalue() == expected


@pytest.mark.parametrize("output", list(Output))
@pytest.mark.parametrize("counts", [(1,), (3, 700, 2, 1500), (99, 1, 1), (2000,)])
@pytest.mark.parametrize("umlaut", ["ä", "a"])
def test_rows_given_as_columns_are_printed_as_rows_are(
    output: Output, counts: tuple[int, ...], umlaut: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = Columns(
        *COLUMNS.columns,
        Column("SAME", "same", Constant("100 % {of} 'it'\n")),
        Column("NONE", "none", Constant(None), Kind.INTEGER),
        Column("SHOWN", "shown", "number", Kind.INTEGER, text=lambda number: f"<{number}>"),
        Column("MAYBE", "maybe", Constant(None), optional=True),
        Column("LAST", "last", "text", flexible=True),
        key="number",
    )
    # A table that waits for more rows does not know yet which columns have values.
    monkeypatch.setattr("bkctl.commands.kit.table.PATIENCE_S", math.inf)
    blocks, number = [], 0
    for count in counts:
        blocks.append(
            [
                Row(
                    LedgerId(each % 3, each),
                    NUMBERS.get(each, each),
                    None if each % 11 == 3 else f"{umlaut}," * (each % 5),
                    None if each % 7 == 3 else each % 2 == 0,
                    None,
                    bytes(each % 7),
                    [each, {}],
                )
                for each in range(number, number + count)
            ]
        )
        number += count
    one_by_one, at_once = Terminal(), Terminal()
    with RowWriter(columns, output, stream=one_by_one) as writer:
        for rows in blocks:
            writer.rows(rows)
    with RowWriter(columns, output, stream=at_once) as writer:
        for rows in blocks:
            values: dict[str, Any] = {name: [getattr(row, name) for row in rows] for name in Row._fields}
            values["at"] = Constant(None)
            values["shown"], values["last"] = values["number"], values["text"]
            if max(map(abs, values["number"])) < 2**63:
                values["number"] = memoryview(array("q", [each for row in rows for each in (row.number, 7)]))[::2]
            writer.block(len(rows), values)
    assert at_once.getvalue() == one_by_one.getvalue()
    assert at_once.getvalue().count("\n") >= sum(counts)


def test_an_object_is_shown_field_by_field() -> None:
    stream = io.StringIO()
    show(ROWS[0], COLUMNS, Output.TABLE, stream=stream)
    assert "LEDGER  00000000000000070000000000000001  (scope 7, ledger 1)" in stream.getvalue()
    stream = io.StringIO()
    show(ROWS[0], COLUMNS, Output.JSON, stream=stream)
    assert json.loads(stream.getvalue()) == FIRST
    stream = io.StringIO()
    show(ROWS[0], COLUMNS, Output.CSV, stream=stream)
    assert stream.getvalue().startswith("ledgerScopeId,")


def test_colours_are_for_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert wants_color(Terminal(), no_color=False)
    assert not wants_color(io.StringIO(), no_color=False)
    assert not wants_color(Terminal(), no_color=True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not wants_color(Terminal(), no_color=False)
    columns = Columns(Column("S", "s", "text", style={"a": "\x1b[32m"}))
    assert written(Output.TABLE, ROWS[2:], columns, color=True) == "\x1b[1mS\x1b[0m\n\x1b[32ma\x1b[0m\n"


def test_a_narrow_terminal_cuts_flexible_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    columns = Columns(Column("N", "n", "number", Kind.INTEGER), Column("T", "t", "text", flexible=True))
    stream = Terminal()
    with RowWriter(columns, Output.TABLE, stream=stream) as writer:
        writer.rows([Row(None, 1, "x" * 100)])
    assert stream.getvalue().splitlines()[1] == "1  " + "x" * 36 + "…"
    assert "x" * 100 in written(Output.TABLE, [Row(None, 1, "x" * 100)], columns)


def test_text_helpers() -> None:
    assert iso_time(0) == "1970-01-01T00:00:00.000Z"
    assert iso_time(1 << 70) == str(1 << 70)
    assert [size_text(size) for size in (0, 10239, 10240, 1 << 20, 1 << 62)] == [
        "0 B", "10239 B", "10.0 KiB", "1.0 MiB", "4096 PiB",
    ]  # fmt: skip
    assert plain("a\x1b[31m") == "a\\x1b[31m"
    assert width_of("日本") == 4
    assert cut("abcdef", 4) == "abc…"
    assert cut("/a/b/current/0.log", 10) == "…ent/0.log"


def test_broken_pipe_raises_closed_output() -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    with pytest.raises(ClosedOutput):
        emit("x", Broken())


def test_activity_is_drawn_on_a_terminal_and_erased(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Activity, "DELAY_S", 0.0)
    monkeypatch.setattr(Activity, "PERIOD_S", 0.001)
    stream = Terminal()
    with Activity("Reading", total=10, unit="entries", stream=stream) as activity:
        activity.update(5)
        eventually(lambda: "50%" in stream.getvalue())
    assert "Reading" in stream.getvalue()
    assert stream.getvalue().endswith("\r\x1b[K")
    silent = io.StringIO()
    with Activity("Reading", stream=silent):
        pass
    assert silent.getvalue() == ""


def test_latencies_below_a_millisecond_keep_their_digits() -> None:
    found = [milliseconds(value) for value in (0, 0.0004, 0.0036, 0.034, 0.999, 7.5, 123.44, 1234.5)]
    assert found == ["0", "<0.001", "0.0036", "0.034", "1", "7.5", "123.4", "1,234"]
