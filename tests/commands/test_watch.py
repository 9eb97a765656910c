"""`--watch`: what is printed at first, and when something changes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from io import StringIO
from pathlib import Path
from typing import IO, Any, NamedTuple

import pytest
from commands_reference import read_pages
from support.command_line import CommandLine
from support.waiting import LIMIT_S

from bkctl.columns import Column, Columns, Kind
from bkctl.commands.kit.columns import Output
from bkctl.commands.kit.printer import Printer
from bkctl.commands.kit.settings import GlobalOptions, Session
from bkctl.formats.metadata import Cookie
from bkctl.metadata.cluster import open_cluster
from bkctl.metadata.store import NEW

from .conftest import Cli


@pytest.fixture
def uri(tmp_path: Path) -> str:
    uri = f"sqlite://{tmp_path / 'metadata.db'}"
    with open_cluster(uri, create=True) as cluster:
        cluster.cookies.write("b1", Cookie("b1", ("/j",), ("/l",)), NEW)
    return uri


@pytest.fixture
def watching(uri: str) -> Iterator[object]:
    """Starts a command that watches."""
    made: list[subprocess.Popen[bytes]] = []

    def start(*words: str) -> IO[bytes]:
        process = CommandLine(uri).process(*words)
        made.append(process)
        assert process.stdout is not None
        return process.stdout

    yield start
    for process in made:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=LIMIT_S)
        assert (process.returncode, err) == (130, b"bkctl: Interrupted\n")


def test_ndjson_reports_added_changed_and_removed_rows(uri: str, watching: object) -> None:
    # A bookie that comes and goes is seen by the store's watches, long before the minute is over.
    out = watching("bookies", "list", "--watch", "60", "-o", "ndjson")  # type: ignore[operator]
    assert json.loads(out.readline())["bookieId"] == "b1"
    with open_cluster(uri) as cluster:
        from bkctl.formats.metadata import BookieServiceInfo

        cluster.bookies.register("b2", BookieServiceInfo(()))
        row = json.loads(out.readline())
        assert (row["bookieId"], row["state"]) == ("b2", "rw")
        cluster.bookies.register("b1", BookieServiceInfo(()), read_only=True)
        row = json.loads(out.readline())
        assert (row["bookieId"], row["state"]) == ("b1", "ro")
        cluster.bookies.unregister("b2")
        gone = json.loads(out.readline())
        assert (gone["bookieId"], gone["removed"]) == ("b2", True)


class Finding(NamedTuple):
    code: str
    subject: str
    age: int = 1


FINDING_COLUMNS = Columns(
    Column("CODE", "code", "code"),
    Column("SUBJECT", "subject", "subject"),
    Column("AGE", "age", "age", Kind.INTEGER),
    key="code",
)
B1, B2 = Finding("down", "b1"), Finding("down", "b2")


def watched(
    *looks: Iterable[Any],
    key: Callable[[Any], Any] | None = None,
    columns: Columns = FINDING_COLUMNS,
    output: Output = Output.NDJSON,
) -> None:
    """Watch until the looks are used up."""
    following = iter(looks)
    options = GlobalOptions(output=output)
    with pytest.raises(StopIteration):
        Printer(Session(no_color=True), options, options).watch(0, lambda: next(following), columns, key=key)


def changes(out: str) -> list[tuple[str, int, bool]]:
    """The subject and age of each printed row, and if it was removed."""
    rows = [json.loads(line) for line in out.splitlines()]
    return [(row["subject"], row["age"], row.get("removed", False)) for row in rows]


def test_rows_of_one_id_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    watched([B1, B2], [B1, B2], [B2], [B2], [B2, B2])
    assert changes(capsys.readouterr().out) == [("b1", 1, False), ("b2", 1, False), ("b1", 1, True), ("b2", 1, False)]


def test_a_row_with_a_key_of_its_own_changes_and_goes(capsys: pytest.CaptureFixture[str]) -> None:
    older = B2._replace(age=2)
    watched([B1, B2], [older], [B1], key=lambda row: (row.code, row.subject))
    assert changes(capsys.readouterr().out) == [
        ("b1", 1, False), ("b2", 1, False), ("b2", 2, False), ("b1", 1, True), ("b1", 1, False), ("b2", 2, True),
    ]  # fmt: skip


def test_one_object_changes_and_is_never_removed(capsys: pytest.CaptureFixture[str]) -> None:
    columns = Columns(*FINDING_COLUMNS.columns)
    watched([B1], [B2], [B2], columns=columns)
    assert changes(capsys.readouterr().out) == [("b1", 1, False), ("b2", 1, False)]


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_csv_does_not_steer_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    watched([Finding("down", "\x1b[31mred")], output=Output.CSV)
    assert terminal.getvalue() == "code,subject,age\ndown,\\x1b[31mred,1\n"


def test_the_clock_of_a_table_goes_on_while_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter(range(0, 60_000_000_000, 2_000_000_000))
    monkeypatch.setattr("bkctl.commands.kit.printer.time.time_ns", lambda: next(moments))
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    watched([B1], [B1], [B2], output=Output.TABLE)
    first, again, changed = terminal.getvalue().split("\x1b[H")[1:]
    assert first.startswith("00:00:00Z, every 0 s; ")
    assert again == "00:00:02Z, every 0 s; Ctrl-C ends it\x1b[K\x1b8"
    assert first.endswith("\x1b[J\x1b7")
    assert changed.startswith("00:00:04Z")
    assert "b2" in changed
    monkeypatch.setattr(sys, "stdout", pipe := StringIO())
    watched([B1], [B1], output=Output.TABLE)
    assert pipe.getvalue().count("CODE") == 1


def test_health_reports_the_finding_that_is_over(uri: str, cli: Cli, watching: object) -> None:
    with open_cluster(uri) as cluster:
        from bkctl.formats.metadata import BookieServiceInfo

        cluster.cookies.write("b2", Cookie("b2", ("/j",), ("/l",)), NEW)
        health = ("cluster", "health", "--no-bookies", "-o", "ndjson")
        found = CommandLine(uri)(*health).out.decode().splitlines()
        assert sum('"bookie-down"' in line for line in found) == 2
        out = watching(*health, "--watch=200ms")  # type: ignore[operator]
        assert [out.readline().decode().rstrip() for _ in found] == found
        cluster.bookies.register("b1", BookieServiceInfo(()))
        rows = [json.loads(out.readline())]
        while not rows[-1].get("removed"):
            rows.append(json.loads(out.readline()))
        removed = rows.pop()
        assert (removed["code"], removed["subject"]) == ("bookie-down", "b1")
        assert [row for row in rows if row["code"] == "bookie-down"] == []


def test_a_table_is_printed_again_below(uri: str, watching: object) -> None:
    out = watching("bookies", "list", "--watch")  # type: ignore[operator]
    first = [out.readline(), out.readline()]
    assert first[1].split()[:2] == [b"b1", b"down"]
    with open_cluster(uri) as cluster:
        from bkctl.formats.metadata import BookieServiceInfo

        cluster.bookies.register("b1", BookieServiceInfo(()))
        assert [out.readline(), out.readline()] == [b"\n", first[0]]
        assert out.readline().split()[:2] == [b"b1", b"rw"]


def test_watch_requires_a_form_without_an_end(cli: Cli, uri: str) -> None:
    assert "-o ndjson" in cli("bookies", "list", "--watch", "-o", "json", "-u", uri).err
    assert cli("bookies", "list", "--watch=0", "-u", uri).code == 2
    assert cli("bookies", "list", "--watch=soon", "-u", uri).code == 2
    # In a command with arguments, a word behind --watch is one.
    assert cli("ledger", "show", "--watch", "5", "-u", uri).code == 4
    assert cli("ledger", "show", "--watch=5", "-u", uri).code == 2


def test_a_row_that_only_became_older_is_not_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    columns = FINDING_COLUMNS.changed(age={"ages": True})
    older = B1._replace(age=2)
    watched([B1], [older], [older._replace(subject="b2", age=3)], [], columns=columns)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["subject"], row.get("age"), row.get("removed", False)) for row in rows] == [
        ("b1", 1, False), ("b2", 3, False), ("b2", None, True),
    ]  # fmt: skip


def test_columns_of_ages_are_declared_as_such() -> None:
    """Else `--watch -o ndjson` repeats their rows at each look."""
    found = {
        (page.name, column.name)
        for page in read_pages().commands
        if page.declaration is not None
        for columns in page.declaration.forms(Output.NDJSON)
        for column in columns.columns
        if column.name.lower().startswith("age") and not column.ages
    }
    assert found == set()
