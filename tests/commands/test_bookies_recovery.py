"""`bkctl bookies recover`, `decommission`, `drain` and `ok-to-stop` over bookies of our own."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from client.fakes import FakeBookie, FakeCluster, Fault
from support.waiting import LIMIT_S

from bkctl.bookie.local import LocalCluster
from bkctl.commands.bookies.departure import move_columns
from bkctl.commands.kit.columns import Output
from bkctl.commands.kit.output import RowWriter
from bkctl.commands.kit.printer import Printer
from bkctl.commands.kit.table import SAMPLE_ROWS
from bkctl.formats.entry import DigestType
from bkctl.formats.metadata import BookieEndpoint, BookieServiceInfo, Cookie, Fragment, LedgerMetadata, LedgerState
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import Cluster, open_cluster
from bkctl.metadata.store import NEW
from bkctl.metadata.underreplication import AutoRecoverySettings, LedgerMarks
from bkctl.protocol.messages import Status
from bkctl.replication.holdings import LedgerMove, MoveOutcome, MovePlan, Risk, StopProblem

from .conftest import Cli

#: Nothing listens at its port.
UNSERVED = BookieServiceInfo((BookieEndpoint("bookie", 9, "127.0.0.1", "bookie-rpc"),), {"ledgerScopes": "1"})
OUTPUTS = ("table", "json", "ndjson", "csv", "id")


@pytest.fixture
def metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Metadata alone: bookies a to d are registered and serve nothing, e is down; two ledgers on a, b, c."""
    uri = f"sqlite://{tmp_path / 'metadata.db'}"
    monkeypatch.setenv("BKCTL_METADATA_URI", uri)
    fragments = (Fragment(0, ("a", "b", "c")), Fragment(10, ("a", "d", "c")))
    with open_cluster(uri, create=True) as cluster:
        for name in "abcd":
            cluster.bookies.register(name, UNSERVED)
        cluster.cookies.write("e", Cookie("e", ("/j",), ("/l",), "i"), NEW)
        for scope in (0, 7):
            cluster.ledgers.create(
                LedgerId(scope, 5),
                LedgerMetadata(3, 2, 2, DigestType.CRC32C, b"secret", fragments, LedgerState.CLOSED, 3000, 29),
            )
        yield cluster


@pytest.fixture
def bookies(metadata: Cluster) -> Iterator[dict[str, FakeBookie]]:
    """Bookies a to d of `metadata`, which answer."""
    loop, served = asyncio.new_event_loop(), {name: FakeBookie(name) for name in "abcd"}
    for bookie in served.values():
        loop.run_until_complete(bookie.start())
        FakeCluster(metadata).register(bookie)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield served
    for bookie in served.values():
        asyncio.run_coroutine_threadsafe(bookie.stop(), loop).result(LIMIT_S)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_query_shows_the_fragments_on_bookies(cli: Cli, metadata: Cluster) -> None:
    rows = cli("bookies", "recover", "b,d", "--query", "-o", "ndjson").rows
    assert [(row["ledgerScopeId"], row["firstEntryId"], row["lastEntryId"], row["bookies"]) for row in rows] == [
        ("0", 0, 9, ["b"]), ("0", 10, 29, ["d"]), ("7", 0, 9, ["b"]), ("7", 10, 29, ["d"]),
    ]  # fmt: skip
    assert rows[0]["ensemble"] == ["a", "b", "c"]
    assert "secret" not in str(rows)
    table = cli("bookies", "recover", "b", "--query")
    assert (table.code, "a, b*, c" in table.out, "2 ledgers on b" in table.err) == (0, True, True)
    one = cli("bookies", "recover", "b", "--query", "--ledger", "7:5", "-o", "id")
    assert one.out.splitlines() == [LedgerId(7, 5).qualified_name]
    same = cli("bookies", "recover", "b", "--query", "--ledger", "5", "--ledger-scope-id", "7", "-o", "id")
    assert same.out == one.out
    assert cli("bookies", "recover", "b", "--query", "--ledger", "7:6").code == 4
    for output in OUTPUTS:
        assert cli("bookies", "recover", "b", "--query", "-o", output).code == 0


@pytest.mark.parametrize(
    "words",
    [
        ("recover", "a b", "--query"), ("recover", ","), ("recover",), ("recover", "a", "--rate", "0", "--yes"),
        ("recover", "a", "--rate", "fast", "--yes"), ("recover", "a", "--query", "--dry-run"),
        ("recover", "a", "--query", "--delete-cookie"), ("recover", "a", "--ledger-scope-id", "7", "--yes"),
        ("recover", "a", "--ledger", "x", "--yes"), ("recover", "a"), ("decommission",), ("decommission", "a", "b"),
        ("decommission", "a b"), ("drain", "a b"), ("ok-to-stop",), ("ok-to-stop", "a", "--min-replicas", "0"),
        ("decommission", "e", "--deadline", "soon"), ("decommission", "e", "--watch=0"),
    ],
)  # fmt: skip
def test_contradicting_arguments_are_a_usage_error(cli: Cli, metadata: Cluster, words: tuple[str, ...]) -> None:
    result = cli("bookies", *words)
    assert result.code == 2, result.err
    assert result.out == ""
    assert metadata.ledgers.read(LedgerId(7, 5)).version == 0


def test_bookies_that_nothing_names_are_not_found(cli: Cli, metadata: Cluster) -> None:
    for words in (
        ("recover", "z", "--yes"), ("decommission", "z", "--yes"), ("decommission", "z", "--dry-run"),
        ("drain", "z", "--yes"), ("ok-to-stop", "a", "z"), ("recover", "z", "--query"), ("recover", "z", "--dry-run"),
    ):  # fmt: skip
        result = cli("bookies", *words)
        assert (result.code, result.out) == (4, ""), words
        assert "bookies list" in result.err


def test_a_cookie_is_not_deleted_while_its_bookie_is_up(cli: Cli, metadata: Cluster) -> None:
    for more in ("--yes", "--dry-run"):
        result = cli("bookies", "recover", "a", "--delete-cookie", more)
        assert (result.code, "registered" in result.err) == (5, True)


def test_drain_that_exceeds_its_deadline_says_that_the_bookie_is_read_only(cli: Cli, metadata: Cluster) -> None:
    found = metadata.bookies.get("b")
    assert found is not None
    assert found.info is not None
    metadata.bookies.register("b", found.info, read_only=True)
    late = cli("bookies", "drain", "b", "--yes", "--deadline", "1ms")
    assert (late.code, "b stays read-only" in late.err, "readonly off" in late.err) == (6, True, True)


@pytest.mark.parametrize("words", [("--dry-run",), ("--yes",)])
def test_recover_says_that_a_bookie_is_up_and_its_writers_are_fenced(
    cli: Cli, metadata: Cluster, words: tuple[str, ...]
) -> None:
    warning = "a is still up: running writers are fenced; 'bkctl bookies drain a' moves ledgers without that"
    words = ("bookies", "recover", "a", *words, "--ledger", "5", "--timeout", "1s")
    assert warning in cli(*words).err
    assert warning not in cli(*words, "--skip-open").err


def test_table_of_moves_has_room_for_later_rows() -> None:
    ledgers = [*(LedgerId(0, number) for number in range(SAMPLE_ROWS)), LedgerId(7, 1)]
    stream = io.StringIO()
    with RowWriter(move_columns(MovePlan(ledgers)), Output.TABLE, stream=stream) as writer:
        for ledger in ledgers:
            outcome = MoveOutcome.UNRECOVERABLE if ledger.is_scoped else MoveOutcome.MOVED
            writer.row(LedgerMove(ledger, outcome, LedgerState.IN_RECOVERY, 1, 2, 3))
    lines = stream.getvalue().splitlines()
    assert len({line.index("IN_RECOVERY") for line in lines[1:]}) == 1
    assert len({line.rindex("3 B") for line in lines[1:]}) == 1


def test_recover_refuses_to_delete_cookies_if_scopes_are_of_a_formatted_cluster(
    cli: Cli, metadata: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bkctl.metadata.ledgers.LedgerManager.scopes_state", lambda _: "foreign")
    result = cli("bookies", "recover", "e", "--delete-cookie", "--yes")
    assert (result.code, result.out) == (5, "")
    assert "are in no listing" in result.err
    assert metadata.cookies.list() == ["e"]


def test_a_bookie_without_ledgers_is_decommissioned_at_once(cli: Cli, metadata: Cluster) -> None:
    assert cli("bookies", "decommission", "e").code == 2  # asked no question
    assert metadata.cookies.list() == ["e"]
    # The bookies that would take something over do not answer, which is a warning.
    rows = cli("bookies", "decommission", "e", "--yes", "-o", "ndjson", "--timeout", "1").rows
    assert {row["step"]: row["result"] for row in rows} == {
        "stopped": "ok", "auto-recovery": "ok", "auditor": "warning", "bookies": "warning", "space": "ok",
        "ledgers": "ok", "cookie": "deleted",
    }  # fmt: skip
    assert metadata.cookies.list() == []


def test_decommission_requires_a_stopped_bookie_and_auto_recovery(cli: Cli, metadata: Cluster) -> None:
    AutoRecoverySettings(metadata.store).disable()
    for options in (("--yes",), ("--dry-run",)):
        result = cli("bookies", "decommission", "a", *options, "-o", "ndjson", "--timeout", "1")
        assert result.code == 3
        found = {row["step"]: row["result"] for row in result.rows}
        assert (found["stopped"], found["auto-recovery"]) == ("blocked", "blocked")
    assert "not decommissioned" in result.err or "cannot be decommissioned" in result.err
    assert metadata.ledgers.read(LedgerId(7, 5)).version == 0


def test_an_interrupted_decommission_says_nothing_of_a_cookie_that_it_deletes(
    cli: Cli, metadata: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bkctl.replication.bookie_mover.check_scopes_known", lambda _: interrupt_main_thread())
    result = cli("bookies", "decommission", "e", "--yes", "--timeout", "1")
    assert (result.code, metadata.cookies.list()) == (130, [])
    assert "keeps its cookie" not in result.err
    assert "start the bookie to go back, after 'bkctl metadata undo' if its cookie is deleted" in result.err
    assert cli("metadata", "undo", "--last", "--yes").code == 0
    assert metadata.cookies.list() == ["e"]


def test_a_drain_that_is_interrupted_before_its_bookie_is_read_only_does_not_say_that_it_is(
    cli: Cli, metadata: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoints = (
        BookieEndpoint("bookie", 9, "127.0.0.1", "bookie-rpc"), BookieEndpoint("httpserver", 9, "127.0.0.1", "http"),
    )  # fmt: skip
    metadata.bookies.register("b", BookieServiceInfo(endpoints))
    monkeypatch.setattr("bkctl.commands.bookies.departure._set_read_only", lambda *_: interrupt_main_thread())
    result = cli("bookies", "drain", "b", "--yes", "--timeout", "1")
    assert (result.code, "stays read-only" in result.err) == (130, False)
    assert "Interrupted: Making b read-only; b may be read-only: run the command again to continue" in result.err


def interrupt_main_thread() -> None:
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)


def test_a_bookie_without_http_server_is_not_drained_while_it_takes_writes(cli: Cli, metadata: Cluster) -> None:
    for options in (("--yes",), ("--dry-run",), ()):  # Nobody is asked.
        result = cli("bookies", "drain", "a", *options, "-o", "ndjson", "--timeout", "1")
        assert result.code == 3, result.err
        (row,) = [row for row in result.rows if row["step"] == "read-only"]
        assert row["result"] == "blocked"
        assert "has no HTTP server that could make it read-only" in row["message"]
        assert "forceReadOnlyBookie" in row["advice"]
    down = cli("bookies", "drain", "e", "--yes")
    assert (down.code, "decommission" in down.err) == (5, True)


def test_a_resume_file_of_other_bookies_is_refused(cli: Cli, metadata: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "resume"
    path.write_text("mine\n")
    result = cli("bookies", "recover", "a", "--yes", "--resume", path)
    assert result.code == 7
    assert path.read_text() == "mine\n"
    assert metadata.ledgers.read(LedgerId(7, 5)).version == 0


@pytest.mark.usefixtures("bookies")
def test_ok_to_stop_names_each_ledger_and_risk(cli: Cli) -> None:
    alone = cli("bookies", "ok-to-stop", "a", "--for-good", "-o", "ndjson")
    assert alone.code == 3
    assert {(row["ledgerScopeId"], row["risk"], row["replicasLeft"]) for row in alone.rows} == {
        ("0", "under-quorum", 1), ("7", "under-quorum", 1),
    }  # fmt: skip
    restart = cli("bookies", "ok-to-stop", "a", "-o", "ndjson")
    assert (restart.code, restart.out) == (0, "")
    assert "a may restart; " in restart.err
    assert f"Not for good: {len(alone.rows)} ledgers would have fewer replicas" in restart.err
    assert "Not for good" not in cli("bookies", "ok-to-stop", "a", "--min-replicas", "1").err
    assert cli("bookies", "ok-to-stop", "a", "--min-replicas", "1").code == 0
    assert {row["risk"] for row in cli("bookies", "ok-to-stop", "a", "c", "-o", "ndjson").rows} == {"lost"}
    both = cli("bookies", "ok-to-stop", "a", "c", "--min-replicas", "1", "-o", "ndjson")
    assert both.code == 3
    assert {row["risk"] for row in both.rows} == {"lost"}
    assert "Not for good" not in cli("bookies", "ok-to-stop", "e").err
    assert cli("bookies", "ok-to-stop", "e", "--for-good").code == 0
    for output in OUTPUTS:
        assert cli("bookies", "ok-to-stop", "a", "c", "-o", output).code == 3


@pytest.mark.usefixtures("bookies")
def test_ok_to_stop_proposes_the_largest_set(cli: Cli, metadata: Cluster) -> None:
    """Two replicas of each entry on a, b, c and a, d, c: of neighbours one may stop, so b and d, or one of a and c."""

    def together(*words: object) -> list[str]:
        result = cli("bookies", "ok-to-stop", "--max", *words, "-o", "ndjson")
        assert result.code == 0, result.err
        return [row["bookieId"] for row in result.rows]

    assert together() == ["b", "d"]
    assert together("d") == ["d", "b"]
    assert together("a") == ["a"]
    for found in (["b", "d"], ["a"]):
        assert cli("bookies", "ok-to-stop", *found).code == 0
        for other in set("abcd") - set(found):
            assert cli("bookies", "ok-to-stop", *found, other).code == 3
    refused = cli("bookies", "ok-to-stop", "a", "b", "--max", "-o", "ndjson")
    assert (refused.code, {row["risk"] for row in refused.rows}) == (3, {"lost"})
    shown = cli("bookies", "ok-to-stop", "--max")
    assert "2 bookies may stop together, and no other one with them; 2 writable bookies would remain" in shown.err
    none = cli("bookies", "ok-to-stop", "--max", "--for-good", "-o", "ndjson")
    assert (none.code, none.out) == (3, "")
    assert cli("bookies", "ok-to-stop", "--max", "--watch").code == 2
    assert cli("bookies", "ok-to-stop", "z", "--max").code == 4

    # One rack after the other.
    for scope in (0, 7):
        metadata.ledgers.remove(LedgerId(scope, 5))
    pair = LedgerMetadata(2, 2, 2, DigestType.CRC32C, b"", (Fragment(0, ("a", "c")),), LedgerState.CLOSED, 10, 9)
    metadata.ledgers.create(LedgerId(0, 1), pair)
    assert cli("bookies", "racks", "set", "c", "d", "--rack", "/r1").code == 0
    assert together() == ["a", "b", "d"]
    assert together("d") == ["d", "b", "c"]
    (row,) = (row for row in cli("bookies", "ok-to-stop", "d", "--max", "-o", "ndjson").rows if row["given"])
    assert row == {"bookieId": "d", "rack": "/r1", "given": True}


@pytest.mark.parametrize("fault", [Fault.SILENCE, Fault.DISCONNECT, "unreachable"])
def test_replicas_on_registered_bookies_that_do_not_answer_do_not_count(
    cli: Cli, metadata: Cluster, bookies: dict[str, FakeBookie], fault: Fault | str
) -> None:
    """Two replicas of each entry on a, b, c and a, d, c: without c, none of the others may stop."""
    if isinstance(fault, Fault):
        bookies["c"].fault = lambda request: fault
    else:
        metadata.bookies.register("c", UNSERVED)
    note = "1 registered bookie does not answer, and counts as down: Bookie c "
    for words in (("a",), ("a", "--for-good"), ("a", "--max"), ("b",)):
        result = cli("bookies", "ok-to-stop", *words, "-o", "ndjson", "--timeout", "1s")
        lost = [row["message"] for row in result.rows if row["risk"] == "lost"]
        assert (result.code, note in result.err) == (3, True), words
        assert lost
        assert all("c lacks them, or is down" in message for message in lost)
    none = cli("bookies", "ok-to-stop", "--max", "-o", "ndjson", "--timeout", "1s")
    assert (none.code, none.out, note in none.err) == (3, "", True)
    # The bookie itself may stop, and is not asked.
    alone = cli("bookies", "ok-to-stop", "c", "--timeout", "1s")
    assert (alone.code, note in alone.err) == (0, False)
    assert "3 writable bookies would remain" in alone.err
    down = cli("bookies", "ok-to-stop", "e", "--timeout", "1s")
    assert (down.code, note in down.err) == (0, True)
    assert "3 writable bookies would remain" in down.err


@pytest.mark.parametrize("words", [("recover", "e"), ("recover", "b"), ("decommission", "e"), ("drain", "b")])
def test_dry_runs_give_no_entries_to_registered_bookies_that_do_not_answer(
    cli: Cli, metadata: Cluster, bookies: dict[str, FakeBookie], words: tuple[str, ...]
) -> None:
    metadata.bookies.register("d", UNSERVED)
    result = cli("bookies", *words, "--dry-run", "-o", "ndjson", "--timeout", "1s")
    assert "1 registered bookie does not answer, and counts as down: Bookie d " in result.err
    if words[0] == "recover":
        assert not any(
            "d" in row["newEnsemble"] for row in result.rows if "d" not in row["ensemble"] and row["newEnsemble"]
        )
    else:
        (step,) = (row for row in result.rows if row["step"] == "bookies")
        assert "; no answer from d" in step["message"]


def test_each_look_of_watch_asks_again(
    cli: Cli, bookies: dict[str, FakeBookie], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[list[Risk]] = []

    def watch(self: Printer, seconds: float, look: Callable[[], Iterable[StopProblem]], *_: Any, **__: Any) -> None:
        looks.append([problem.risk for problem in look()])
        for _ in range(2):
            bookies["c"].fault = lambda request: Fault.DISCONNECT
            looks.append([problem.risk for problem in look()])
        raise KeyboardInterrupt

    monkeypatch.setattr(Printer, "watch", watch)
    result = cli("bookies", "ok-to-stop", "a", "--watch", "-o", "ndjson")
    assert looks == [[], [Risk.LOST, Risk.LOST], [Risk.LOST, Risk.LOST]]
    assert result.err.count("counts as down: Bookie c ") == 1


def test_bookies_that_answer_with_an_error_are_up(cli: Cli, bookies: dict[str, FakeBookie]) -> None:
    bookies["c"].fault = lambda request: Status.EBADREQ
    result = cli("bookies", "ok-to-stop", "a")
    assert (result.code, "does not answer" in result.err) == (0, False)
    assert "3 writable bookies would remain" in result.err


def test_bookies_that_do_not_answer_are_named_up_to_a_bound(cli: Cli, metadata: Cluster) -> None:
    for number in range(300):
        metadata.bookies.register(f"gone-{number:03}", UNSERVED)
    result = cli("bookies", "ok-to-stop", "e")
    assert result.code == 0
    assert "304 registered bookies do not answer, and count as down: Bookie a " in result.err
    assert " and 299 more\n" in result.err
    assert "0 writable bookies would remain" in result.err


@pytest.mark.usefixtures("bookies")
def test_open_ledgers_keep_enough_bookies_to_write_to(cli: Cli, metadata: Cluster) -> None:
    growing = LedgerMetadata(2, 2, 1, DigestType.CRC32C, b"", (Fragment(0, ("a", "b")),))
    for scope in (0, 7):
        metadata.ledgers.remove(LedgerId(scope, 5))
    metadata.ledgers.create(LedgerId(7, 6), growing)
    found = cli("bookies", "ok-to-stop", "--max", "-o", "id").out.split()
    assert len(found) == 2
    assert cli("bookies", "ok-to-stop", *found).code == 0


def test_health_counts_underreplicated_ledgers_by_scope_and_age(cli: Cli, metadata: Cluster) -> None:
    marks = LedgerMarks(metadata.store)
    marks.add(LedgerId(0, 5), ["a"], now_ms=1)
    marks.add(LedgerId(0, 6), ["a"])
    marks.add(LedgerId(7, 5), ["a"])
    rows = cli("cluster", "health", "--no-bookies", "-o", "ndjson").rows
    found = {row["subject"]: row for row in rows if row["code"] == "underreplicated"}
    assert found["scope 0"]["severity"] == "error"
    assert found["scope 0"]["details"]["ledgerCount"] == 2
    assert found["scope 0"]["details"]["olderThan"] == {"10m": 1, "1h": 1, "1d": 1}
    assert "2 ledgers are under-replicated, the oldest for " in found["scope 0"]["message"]
    assert "1 for 1d or more" in found["scope 0"]["message"]
    assert found["scope 7"]["severity"] == "warning"
    assert found["scope 7"]["details"]["olderThan"] == {"10m": 0, "1h": 0, "1d": 0}
    assert cli("cluster", "health", "--no-bookies").code == 3


def test_a_cookie_stays_while_ledgers_name_its_bookie(cli: Cli, metadata: Cluster) -> None:
    fragments = (Fragment(0, ("a", "b", "e")),)
    for scope in (0, 9):
        found = LedgerMetadata(3, 2, 2, DigestType.CRC32C, b"", fragments, LedgerState.CLOSED, 3000, 29)
        metadata.ledgers.create(LedgerId(scope, 8), found)
    for options in (("--yes",), ("--dry-run",), ()):
        refused = cli("cookie", "delete", "e", *options)
        assert (refused.code, "2 ledgers in 2 scopes would lose 40 replicas" in refused.err) == (5, True), refused.err
    assert metadata.cookies.list() == ["e"]
    metadata.cookies.remove("e", 0)
    for options in ((), ("--ledgers",)):
        rows = cli("cluster", "health", "--no-bookies", *options, "-o", "ndjson").rows
        (row,) = [row for row in rows if row["code"] == "bookie-unknown"]
        assert (row["subject"], row["severity"], "2 ledgers name it" in row["message"]) == ("e", "error", True)
    status = cli("cluster", "status", "--timeout", "1", "-o", "ndjson")
    (row,) = [row for row in status.rows if row["bookieId"] == "e"]
    assert (status.code, row["state"], row["ledgerCount"]) == (3, "unknown", 2)


def test_from_a_drain_to_the_last_cookie(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a local cluster, over SQLite: every command once, in the order in which an operator needs them."""
    local = LocalCluster(tmp_path / "cluster")
    monkeypatch.setenv("BKCTL_METADATA_URI", local.metadata_uri)
    local.up(5, http=True)
    try:
        (tmp_path / "lines").write_text("".join(f"line {number}\n" for number in range(30)))
        for scope in (0, 7):
            for shape in ((3, 2, 2), (2, 2, 2), (5, 3, 2)):
                sizes = zip(("--ensemble-size", "--write-quorum", "--ack-quorum"), shape, strict=True)
                words = [word for pair in sizes for word in pair]
                assert cli("ledger", "write", tmp_path / "lines", "--ledger-scope-id", scope, *words).code == 0
        wide = [row["ledgerQualifiedName"] for row in cli("ledger", "list", "--all-scopes", "-o", "ndjson").rows
                if row["ensembleSize"] == 5]  # fmt: skip
        stuck = cli("bookies", "drain", "bookie-0", "--dry-run", "-o", "ndjson")
        assert stuck.code == 3
        blocked = {row["ledgerQualifiedName"] for row in stuck.rows if row["step"] == "ledger"}
        assert blocked == set(wide)
        assert cli("ledger", "delete", *wide, "--yes").code == 0
        drained = cli("bookies", "drain", "bookie-0", "--yes", "--watch", "-o", "ndjson", "--deadline", "10m")
        assert drained.code == 0, drained.err
        assert {row["step"] for row in drained.rows} >= {"read-only", "progress", "ledgers"}
        moving = next(row for row in drained.rows if row["step"] == "progress")
        assert {"ledgersDone", "ledgersToMove", "bytesPerSecond"} <= set(moving)
        assert cli("bookies", "ok-to-stop", "bookie-0", "--for-good").code == 0
        local.down("bookie-0")
        gone = cli("bookies", "decommission", "bookie-0", "--yes")
        assert (gone.code, "cookie of bookie-0 is deleted" in gone.out) == (0, True)
        undone = cli("metadata", "undo", "--last", "--dry-run", "-o", "ndjson")
        assert ("cookies/bookie-0", "restored") in {(row["path"], row["outcome"]) for row in undone.rows}
        # One that is lost without warning.
        local.down("bookie-1")
        resume = tmp_path / "resume"
        planned = cli("bookies", "recover", "bookie-1", "--dry-run")
        assert planned.code == 0, planned.err
        words = ("bookies", "recover", "bookie-1", "--yes", "--delete-cookie", "--resume", resume, "--rate", "50MB/s")
        done = cli(*words)
        assert done.code == 0, done.err
        assert "The cookie of bookie-1 is deleted" in done.err
        undone = cli("metadata", "undo", "--last", "--dry-run", "-o", "ndjson")
        assert undone.code == 3, undone.err
        assert {"moved", "restored"} <= {row["outcome"] for row in undone.rows}
        noted = [json.loads(line)["ledger"] for line in resume.read_text().splitlines()[1:]]
        moved = [line for line in done.out.splitlines() if " moved " in line]
        assert len(noted) == len(moved)
        ids = cli("ledger", "list", "--all-scopes", "-o", "id").out.split()
        assert len(ids) == 4
        verified = cli("ledger", "verify", *ids)
        assert verified.code == 0, verified.out
        names = {row["bookieId"] for row in cli("bookies", "list", "-o", "ndjson").rows}
        assert names == {"bookie-2", "bookie-3", "bookie-4"}
    finally:
        local.down()
