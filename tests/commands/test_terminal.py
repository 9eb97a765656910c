"""stdout and stderr that fail: what a command does then, its exit code, and what the audit log says."""

from __future__ import annotations

import errno
import io
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support import golden
from support.command_line import CommandLine
from support.waiting import LIMIT_S, eventually

from bkctl.bookie.local import LocalCluster
from bkctl.commands.kit.job import Activity
from bkctl.commands.kit.terminal import ClosedOutput, emit
from bkctl.formats.entry import DigestType
from bkctl.formats.metadata import Fragment, LedgerMetadata, LedgerState
from bkctl.formats.names import DIRTY_NAME
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import Cluster, open_cluster
from bkctl.metadata.underreplication import AutoRecoverySettings

from . import files
from .conftest import Cli

#: More than are printed at once.
LEDGERS = [str(each) for each in range(40)]
CONTINUES = "stdout was closed; the command continues"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    uri = f"sqlite://{tmp_path}/m.db"
    monkeypatch.setenv("BKCTL_METADATA_URI", uri)
    closed = LedgerMetadata(
        1, 1, 1, DigestType.CRC32C, b"", (Fragment(0, ("b0:3181",)),), LedgerState.CLOSED, 10, 3
    )  # fmt: skip
    with open_cluster(uri, create=True) as cluster:
        for each in LEDGERS:
            cluster.ledgers.create(LedgerId(0, int(each)), closed)
        yield cluster


def closed_pipe() -> int:
    """A pipe without a reader."""
    read, write = os.pipe()
    os.close(read)
    return write


def closed_terminal() -> int:
    """A terminal whose window is closed: writes fail with EIO."""
    window, terminal = pty.openpty()
    os.close(window)
    return terminal


def full_disk() -> int:
    return os.open("/dev/full", os.O_WRONLY)


OPENERS = pytest.mark.parametrize("opener", [closed_pipe, closed_terminal])


def run_closed(
    uri: str | None, *words: str, stdout: Callable[[], int] = closed_pipe, stderr: Callable[[], int] | None = None
) -> tuple[int, list[str]]:
    """Run a command whose stdout, and stderr where it is given, fail; return its exit code and the lines on stderr."""
    with ExitStack() as stack:
        streams = [stdout()] if stderr is None else [stdout(), stderr()]
        for stream in streams:
            stack.callback(os.close, stream)
        settings: dict[str, Any] = dict(zip(("stdout", "stderr"), streams, strict=False))
        with CommandLine(uri).process(*words, stdin=subprocess.DEVNULL, **settings) as process:
            _, err = process.communicate(timeout=LIMIT_S)
    return process.returncode, (err or b"").decode().splitlines()


@pytest.mark.parametrize("words", [("--help",), ("help",), ("ledger", "list", "-h"), ()], ids=" ".join)
def test_help_without_a_reader_is_not_an_error(words: tuple[str, ...]) -> None:
    assert run_closed(None, *words) == (0, [])


@pytest.mark.parametrize("unbuffered", ["", "1"])
@OPENERS
def test_an_export_without_a_reader_is_an_error(
    store: Cluster, opener: Callable[[], int], unbuffered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    code, lines = run_closed(store.uri, "metadata", "export", "-f", "-", stdout=opener)
    assert (code, lines[-1]) == (1, "bkctl: The export is incomplete: the reader of stdout is gone")


def outcome(cli: Cli) -> tuple[str, int]:
    """The result and exit code of the last change in the audit log."""
    row = cli("audit", "list", "-o", "ndjson").rows[-1]
    return row["result"], row["exitCode"]


@OPENERS
@pytest.mark.parametrize("stderr", [None, closed_pipe, closed_terminal, full_disk])
def test_a_change_continues_without_stdout(
    cli: Cli,
    store: Cluster,
    opener: Callable[[], int],
    stderr: Callable[[], int] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The first row fails, and not only the last flush.
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    words = ("ledger", "delete", *LEDGERS, "-y", "-o", "ndjson")
    code, lines = run_closed(store.uri, *words, stdout=opener, stderr=stderr)
    assert code == 0
    assert lines.count(CONTINUES) == (stderr is None)
    assert list(store.ledgers.ledgers(0)) == []
    assert outcome(cli) == ("done", 0)


def test_rows_are_saved_without_stdout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    saved = tmp_path / "rows.csv"
    place = str(golden.GoldenBookie("4.18.0", "sorted").ledger_dir)
    words = ("pipeline", "inventory", place, "--by", "ledger", "--save", str(saved), "-o", "ndjson")
    code, lines = run_closed(None, *words)
    assert (code, lines.count(CONTINUES)) == (0, 1), lines
    assert saved.read_text().count("\n") > 2


def test_a_change_without_stdout_keeps_its_exit_code(cli: Cli, store: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    code, lines = run_closed(store.uri, "ledger", "delete", *LEDGERS, "99", "--keep-going", "-y", "-o", "ndjson")
    assert code == 3
    assert lines[-1] == "bkctl: 1 ledger was not deleted"
    assert outcome(cli) == ("findings", 3)


@pytest.mark.parametrize(
    "words",
    [
        ("ledger", "list", "-o", "ndjson"),
        ("ledger", "list", "--watch=60", "-o", "ndjson"),
        ("ledger", "list", "--watch=60"),
        ("help", "connection"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
@OPENERS
def test_a_command_that_reads_ends_without_stdout(
    store: Cluster,
    opener: Callable[[], int],
    words: tuple[str, ...],
    unbuffered: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    assert run_closed(store.uri, *words, stdout=opener) == (0, [])


@pytest.mark.parametrize("unbuffered", ["", "1"])
@OPENERS
def test_a_check_without_stdout_keeps_its_exit_code(
    tmp_path: Path, opener: Callable[[], int], unbuffered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    files.make(tmp_path)
    for name in ("1f.log", "scoped/1f.log"):
        (tmp_path / "ledgers" / "current" / name).unlink()
    words = ("bookie", "check", "--dir", str(tmp_path / "ledgers"), "-o", "ndjson")
    code, lines = run_closed(None, *words, stdout=opener)
    assert code == 3, lines


def test_a_full_disk_behind_stdout_ends_a_change(cli: Cli, store: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    code, lines = run_closed(store.uri, "ledger", "delete", *LEDGERS, "-y", "-o", "ndjson", stdout=full_disk)
    assert (code, lines[-1]) == (1, "bkctl: stdout: No space left on device")
    assert outcome(cli) == ("failed", 1)


def test_a_failing_disk_behind_stdout_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.EIO, "Input/output error")

    with open(tmp_path / "rows", "w") as file, os.fdopen(closed_terminal(), "w") as terminal:
        monkeypatch.setattr(sys, "stdout", file)
        with pytest.raises(OSError, match="stdout"):
            emit("x", Failing())
        monkeypatch.setattr(sys, "stdout", terminal)
        with pytest.raises(ClosedOutput):
            emit("x", Failing())


def test_work_continues_without_the_terminal_of_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Activity, "DELAY_S", 0.0)
    monkeypatch.setattr(Activity, "PERIOD_S", 0.001)
    window, terminal = pty.openpty()
    with os.fdopen(terminal, "w") as stream, Activity("Reading", stream=stream) as activity:
        assert os.read(window, 100)
        os.close(window)
        activity.clear()
        eventually(lambda: activity._shown)  # It draws on.


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("words", ["bookie start", "autorecovery run", "api serve --port 0"])
def test_a_server_without_stdout_serves_until_a_signal(store: Cluster, tmp_path: Path, words: str, number: int) -> None:
    conf = tmp_path / "bk_server.conf"
    conf.write_text(
        f"metadataServiceUri={store.uri}\n"
        "bookiePort=0\nadvertisedAddress=127.0.0.1\nallowLoopback=true\ndiskUsageThreshold=0.99\n"
        f"journalDirectory={tmp_path}/journal\nledgerDirectories={tmp_path}/ledgers\njournalPreAllocSizeMB=1\n"
    )
    options = [] if words.startswith("api") else ["--conf", conf]
    stdout = closed_pipe()
    with CommandLine(store.uri).process(*words.split(), *options, stdout=stdout) as process:
        os.close(stdout)
        assert process.stderr is not None
        assert f"{CONTINUES}\n".encode() in process.stderr
        process.send_signal(number)
        process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0
    assert not list(tmp_path.rglob(DIRTY_NAME))


def test_entries_end_with_their_reader(cli: Cli, cluster: LocalCluster, tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("one\n")
    uri = cluster.metadata_uri
    ledger = cli("ledger", "write", tmp_path / "lines", "-o", "id", "-u", uri).out.strip()
    assert run_closed(uri, "ledger", "tail", ledger, "-f", "%s") == (0, [])
    # Both are in the audit log, and neither changes anything once it prints.
    for words in (("tail", ledger, "--as-admin"), ("read", ledger, "--recover")):
        code, lines = run_closed(uri, "ledger", *words)
        assert (code, CONTINUES in lines) == (0, False)
        assert outcome(cli) == ("done", 0)


def test_a_note_to_a_closed_stderr_is_dropped(cli: Cli, store: Cluster) -> None:
    read, write = os.pipe()
    os.close(read)
    with CommandLine(store.uri).process("-v", "cluster", "id", stderr=write) as process:
        os.close(write)
        out, _ = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out.decode()) == (0, cli("cluster", "id").out)


def test_a_broken_pipe_elsewhere_is_an_error(cli: Cli, store: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_off(*_: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(AutoRecoverySettings, "disable", break_off)
    answer = cli("autorecovery", "disable")
    assert (answer.code, answer.err) == (1, "bkctl: Cannot write to a pipe or connection: its reader is gone\n")
    assert outcome(cli) == ("failed", 1)
