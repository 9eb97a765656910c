"""Tables and empty lists on terminals of 60 to 200 columns."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands_reference import read_pages
from support.command_line import CommandLine

from bkctl.bookie.local import LocalCluster
from bkctl.checks.findings import Finding, FindingKind
from bkctl.client.disk_space import BookieSpace
from bkctl.columns import Column, Columns
from bkctl.commands.bookie.files import FINDING_COLUMNS
from bkctl.commands.bookie.running import METRIC_COLUMNS
from bkctl.commands.bookies.departure import _step_columns, loss_text, move_columns
from bkctl.commands.cluster import STATUS_COLUMNS, MemberRow
from bkctl.commands.kit.columns import Output
from bkctl.commands.kit.output import RowWriter
from bkctl.commands.kit.table import Table
from bkctl.commands.pipeline.jobs import GARBAGE_COLUMNS, GarbageBy
from bkctl.errors import BookieUnavailable
from bkctl.formats.metadata import LedgerState
from bkctl.http.bookie_load import Metric
from bkctl.ids import LedgerId, LedgerIdSet
from bkctl.metadata.cluster import RegisteredBookie
from bkctl.replication.departure import Step, StepKind, StepResult
from bkctl.replication.holdings import LedgerMove, MoveOutcome, MovePlan

WIDTHS = (60, 80, 100, 200)
WIDE = LedgerId(0x94837F5F73304158, 0x9A61E0C2BD18FE35)


class Screen(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def line(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandLine]:
    """Commands on a cluster with a ledger in scope 0 and one under a UUID."""
    line = CommandLine(cluster.metadata_uri)
    file = tmp_path_factory.mktemp("lines") / "line"
    file.write_text("x\n")
    names = [line("ledger", "write", file, *more, "-o", "id").ids[0] for more in ((), ("--uuid",))]
    yield line
    line("ledger", "delete", *names, "--yes")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    "words",
    [
        ("ledger", "list", "--all-scopes"), ("bookies", "list"), ("cluster", "status"), ("top", "--once"),
        ("metadata", "tree", "--totals", "--depth", "2"), ("bookies", "ok-to-stop", "--max"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_tables_fit_the_terminal(line: CommandLine, words: tuple[str, ...], width: int) -> None:
    code, seen = line.terminal("--no-color", *words, columns=width)
    assert code in (0, 3), seen
    notes = ("Left out for width", "may stop together", "bkctl: ")
    table = [row for row in seen.splitlines() if not any(note in row for note in notes)]
    assert table
    assert max(map(len, table)) <= width, seen


def test_audited_commands_wrap_at_words(line: CommandLine) -> None:
    assert line("cookie", "delete", "absent-bookie:3181", "--undo", "none", "--yes").code == 4
    _, seen = line.terminal("--no-color", "audit", "list", columns=80)
    assert "…" not in seen, seen
    assert max(map(len, seen.splitlines())) <= 80, seen
    for word in ("bkctl cookie", "absent-bookie:3181", "--undo none", "--yes"):
        assert word in " ".join(seen.split()), seen


def test_words_that_are_longer_than_a_wrapped_column_are_cut() -> None:
    column = Column("COMMAND", "command", "command", flexible=True, wraps=True)
    out = Screen()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "30")
        table = Table(Columns(column), out, False)
        shown = table.add([("bkctl context add p -u zk://" + "h" * 40,)], now=True)
    assert [line.rstrip() for text in shown for line in text.splitlines()] == [
        "COMMAND", "bkctl context add p -u", "zk://" + "h" * 24 + "…",
    ]  # fmt: skip


def test_lists_without_rows_are_sentences_on_a_terminal(tmp_path: Path) -> None:
    line = CommandLine(f"sqlite://{tmp_path}/m.db")
    assert line("cluster", "init").code == 0
    for words, sentence in (
        (("ledger", "list"), "No ledgers"),
        (("bookies", "list"), "No bookies"),
        (("bookies", "usage"), "0 B of 0 B free on 0 bookies"),
        (("cluster", "status"), "No bookie is writable: nothing can be written"),
        (("top", "--once"), "No bookies"),
        (("cookie", "list"), "No bookie has a cookie"),
        (("autorecovery", "list"), "No ledgers are marked as under-replicated"),
    ):
        _, seen = line.terminal("--no-color", *words)
        assert seen.splitlines()[0] == sentence, words
        assert line(*words).out, "a pipe has the header"


def test_the_tree_keeps_its_indentation_on_a_terminal(line: CommandLine) -> None:
    _, seen = line.terminal("--no-color", "metadata", "tree", "--totals", "--depth", "2")
    last = seen.splitlines().index(next(row for row in seen.splitlines() if row.startswith("└─ ")))
    below = seen.splitlines()[last + 1 :]
    assert below
    assert all(row.startswith("   ") for row in below), seen


def _printed(columns: Any, rows: list[Any], width: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(width))
    screen = Screen()
    with RowWriter(columns, Output.TABLE, stream=screen, live=True) as writer:
        for row in rows:
            writer.row(row)
    return screen.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 100, 200])
def test_steps_of_a_drain_stay_in_their_columns(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledgers come after steps with short cells, which settle the widths."""
    ledgers = [LedgerId(0, 5), WIDE]
    run: Any = SimpleNamespace(out=SimpleNamespace(output=Output.TABLE))
    steps = [
        Step(StepKind.SPACE, StepResult.OK, "About 279.1 KiB to copy, 230.7 GiB free on 4 bookies"),
        *(
            Step(StepKind.LEDGER, StepResult.MOVED, "Copied, in 1 fragment", ledger=ledger, entry_count=1333)
            for ledger in ledgers
        ),
    ]
    printed = _printed(_step_columns(run, MovePlan(ledgers)), steps, width, monkeypatch)
    header, *rows = printed
    assert header.startswith("STEP")
    at, entries = header.index("RESULT"), header.index("ENTRIES") + len("ENTRIES")
    moved = [row for row in rows if " moved " in row]
    assert [row.split()[0] for row in moved] == ["5", str(WIDE)]
    for row in moved:
        assert row.index("moved") == at
        assert row[:entries].endswith(" 1333")
    assert max(map(len, printed)) <= width


def test_moves_of_a_recovery_stay_in_their_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    ledgers = [LedgerId(0, 5), WIDE]
    moves = [LedgerMove(ledger, MoveOutcome.MOVED, LedgerState.CLOSED, 1, 2, 3) for ledger in ledgers]
    header, *rows = _printed(move_columns(MovePlan(ledgers)), moves, 80, monkeypatch)
    assert [row.index("moved") for row in rows] == [header.index("OUTCOME")] * 2


def test_every_command_that_names_ledgers_takes_them_by_option() -> None:
    names = {"--ledger-id", "--ledger-scope-id", "--ledger-qualified-name"}
    for page in read_pages().walk():
        if any(argument.metavar.strip("[].") == "LEDGER" for argument in page.arguments):
            assert names <= {name for option in page.options for name in option.names}, page.name


def test_a_question_about_a_move_says_how_many_ledgers_cannot_be_moved() -> None:
    plan = MovePlan(ledgers=LedgerIdSet(LedgerId(0, each) for each in (1, 2)), crowded=LedgerIdSet([LedgerId(0, 2)]))
    assert loss_text(plan, ["b1"], (), skip_open=True, delete_cookie=False) == (
        "2 ledgers on b1 would be copied to other bookies; 1 of them cannot be moved, since too few other bookies are "
        "writable"
    )


def test_columns_that_repeat_others_leave_a_narrow_table_first(monkeypatch: pytest.MonkeyPatch) -> None:
    row = SimpleNamespace(
        bookieId="bookie-0", logId=12, logIdHex="c", scoped=False, aliveCount=3, deadCount=1, unknownCount=0,
        totalSize=14_000, remainingSize=11_000, garbageSize=3_000, usage=0.786, compaction="major",
        reclaimableSize=0, rewrittenSize=0, fromLedgersMap=True, complete=True, file="/data/ledgers/current/c.log",
    )  # fmt: skip
    header, _ = _printed(GARBAGE_COLUMNS[GarbageBy.ENTRYLOG], [row], 80, monkeypatch)
    assert " ".join(header.split()) == "BOOKIE LOG SCOPED ALIVE TOTAL REMAINING GARBAGE USAGE COMPACTION"


def test_a_hung_bookie_keeps_state_and_problem_in_a_narrow_status(monkeypatch: pytest.MonkeyPatch) -> None:
    hung = BookieSpace(
        RegisteredBookie("bookie-1.example.org:3181", "rw", None), None, None,
        BookieUnavailable("Bookie bookie-1.example.org:3181 did not answer within 5 s"), hangs=True,
    )  # fmt: skip
    header, *lines = _printed(STATUS_COLUMNS, [MemberRow(hung, 12_345, 90.0)], 60, monkeypatch)
    assert {"BOOKIE", "STATE", "PROBLEM"} <= set(header.split())
    assert "hangs" in " ".join(lines)


def test_a_reason_that_begins_with_a_path_wraps(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path("/data/bookkeeper/ledgers/current/0.log")
    reason = f"{path}: the record at 1024 does not fit its size field; 12 entries are lost"
    found = [Finding(FindingKind.LOG_DAMAGED, path, reason), Finding(FindingKind.LOG_DAMAGED, path, reason)]
    printed = _printed(FINDING_COLUMNS, found, 80, monkeypatch)
    assert max(map(len, printed)) <= 80
    at = printed[0].index("REASON")
    assert " ".join(" ".join(line[at:].split()) for line in printed[1:]).count("does not fit its size field") == 2
    assert "…" not in "".join(line[at:] for line in printed)


@pytest.mark.parametrize("width", [60, 80])
def test_labels_of_a_metric_are_never_cut(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    quantiles = ("0.99", "0.999", "0.9999")
    name = "bookkeeper_server_ADD_ENTRY_REQUEST"
    rows = [Metric(name, {"success": "true", "quantile": each}, 12.345, "summary") for each in quantiles]
    printed = _printed(METRIC_COLUMNS, rows, width, monkeypatch)
    assert max(map(len, printed)) <= width
    for each in quantiles:
        assert f"quantile={each} " in f"{' '.join(printed)} ", printed
    assert {"METRIC", "LABELS", "VALUE"} <= set(printed[0].split())
