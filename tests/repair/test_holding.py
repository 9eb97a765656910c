"""Locks on a bookie's directories."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from bkctl.disk import Files
from bkctl.errors import DirectoryInUse
from bkctl.formats.metadata import Cookie
from bkctl.repair import holding
from bkctl.repair.holding import hold, holders, refuse_writers


@contextmanager
def child(script: str, *arguments: object) -> Iterator[int]:
    """A process that runs `script`, prints a line when it is ready and lives until the end of the block."""
    command = [sys.executable, "-c", f"import sys, os, fcntl\n{script}\nprint('ready', flush=True)\nsys.stdin.read()"]
    with subprocess.Popen(
        [*command, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process.pid
        process.stdin.close()
        process.wait()


@pytest.fixture
def ledgers(tmp_path: Path) -> Path:
    """A ledger directory with an entry log and a database's lock file."""
    current = tmp_path / "ledgers" / "current"
    (current / "locations").mkdir(parents=True)
    (current / "locations" / "LOCK").touch()
    (current / "0.log").write_bytes(bytes(1024))
    return tmp_path / "ledgers"


def test_unopened_directories_have_no_holders(ledgers: Path) -> None:
    with (ledgers / "current" / "0.log").open("rb"):
        assert holders([ledgers]) == []
    with hold([ledgers]):
        assert holders([ledgers]) == []


def test_missing_directories_have_no_holders(tmp_path: Path) -> None:
    assert holders([tmp_path / "none"]) == []


@pytest.mark.parametrize("mode", ["rb", "r+b"])
def test_an_open_file_is_held_by_its_process(ledgers: Path, mode: str) -> None:
    log = ledgers / "current" / "0.log"
    with child("file = open(sys.argv[1], sys.argv[2])", log, mode) as pid:
        (holder,) = holders([ledgers])
        assert (holder.pid, holder.path) == (pid, log)
        assert holder.command.startswith(os.path.basename(sys.executable))
        with pytest.raises(DirectoryInUse, match=rf"0\.log is in use by process {pid} "), hold([ledgers]):
            pytest.fail("held")


def test_only_a_process_that_writes_is_a_writer(ledgers: Path) -> None:
    log = ledgers / "current" / "0.log"
    with child("file = open(sys.argv[1], 'rb')", log):
        refuse_writers([ledgers, ledgers / "none"])
    with (
        child("file = open(sys.argv[1], 'r+b')", log) as pid,
        pytest.raises(DirectoryInUse, match=rf"0\.log is in use by process {pid} "),
    ):
        refuse_writers([ledgers])


@pytest.mark.parametrize("removed", [False, True])
def test_a_mapped_file_is_held_by_its_process(ledgers: Path, removed: bool) -> None:
    log = ledgers / "current" / "0.log"
    script = "import mmap\nfd = os.open(sys.argv[1], os.O_RDWR)\nkept = mmap.mmap(fd, 0)\nos.close(fd)"
    with child(script, log) as pid:
        if removed:
            log.unlink()
        assert [(holder.pid, holder.path) for holder in holders([ledgers])] == [(pid, log)]
        with pytest.raises(DirectoryInUse, match=f"process {pid}"), hold([ledgers]):
            pass


@pytest.mark.parametrize("is_another", [True, False])
def test_in_a_container_the_file_counts_and_not_its_path(ledgers: Path, is_another: bool) -> None:
    if subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True).returncode:
        pytest.skip("needs root, for a mount namespace")
    script = (
        "import ctypes, mmap, subprocess\nctypes.CDLL(None).unshare(0x20000)  # CLONE_NEWNS\n"
        "subprocess.run(['mount', '--make-rprivate', '/'], check=True)\n"
        "if sys.argv[2]: subprocess.run(['mount', '-t', 'tmpfs', 'none', os.path.dirname(sys.argv[1])], check=True)\n"
        "file = open(sys.argv[1], 'ab+')\nfile.truncate(9)\nkept = mmap.mmap(file.fileno(), 0)"
    )
    with child(script, ledgers / "current" / "0.log", "yes" if is_another else "") as pid:
        assert [holder.pid for holder in holders([ledgers])] == ([] if is_another else [pid])
        with nullcontext() if is_another else pytest.raises(DirectoryInUse):
            refuse_writers([ledgers])


def test_hold_says_where_open_files_cannot_be_seen(
    ledgers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with hold([ledgers]):
        assert not caplog.text
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: ledgers.stat().st_uid + 1)
        with hold([ledgers]):
            assert "belong to another user" in caplog.text
    monkeypatch.setattr(holding, "_PROC", tmp_path / "none")
    with hold([ledgers]):
        assert "has no /proc" in caplog.text


def test_a_removed_file_that_is_open_still_counts(ledgers: Path) -> None:
    log = ledgers / "current" / "0.log"
    with child("file = open(sys.argv[1]); os.unlink(sys.argv[1])", log) as pid:
        assert [holder.pid for holder in holders([ledgers])] == [pid]


def test_a_directory_with_the_same_prefix_does_not_count(ledgers: Path) -> None:
    other = ledgers.with_name("ledgers2")
    other.mkdir()
    (other / "file").touch()
    with child("file = open(sys.argv[1])", other / "file"):
        assert holders([ledgers]) == []


def test_a_link_to_the_directory_is_the_directory(ledgers: Path) -> None:
    link = ledgers.with_name("link")
    link.symlink_to(ledgers)
    with child("file = open(sys.argv[1])", ledgers / "current" / "0.log") as pid:
        assert [holder.pid for holder in holders([link])] == [pid]


def test_a_database_that_another_process_has_open_is_held(ledgers: Path) -> None:
    lock = ledgers / "current" / "locations" / "LOCK"
    with child("file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX)", lock) as pid:
        assert [(holder.pid, holder.path) for holder in holders([ledgers])] == [(pid, lock)]


def test_a_directory_that_our_bookie_locked_is_held(ledgers: Path) -> None:
    script = "fd = os.open(sys.argv[1], os.O_RDONLY); fcntl.flock(fd, fcntl.LOCK_EX)"
    with (
        child(script, ledgers / "current") as pid,
        pytest.raises(DirectoryInUse, match=f"process {pid} "),
        hold([ledgers]),
    ):
        pytest.fail("held")


def test_while_held_neither_our_bookie_nor_a_database_gets_in(ledgers: Path) -> None:
    current = ledgers / "current"
    with hold([ledgers]):
        with pytest.raises(DirectoryInUse), Files().lock([current]):
            pytest.fail("locked")
        script = "import errno\ntry:\n    fcntl.lockf(open(sys.argv[1], 'w'), fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        script += "except OSError as error:\n    print(error.errno in (errno.EAGAIN, errno.EACCES))\n"
        lock = current / "locations" / "LOCK"
        done = subprocess.run(
            [sys.executable, "-c", f"import sys, fcntl\n{script}", lock], capture_output=True, text=True, check=True
        )
        assert done.stdout == "True\n"
        with pytest.raises(DirectoryInUse, match="Another process holds"), hold([ledgers]):
            pytest.fail("held twice")
    with Files().lock([current]), (current / "locations" / "LOCK").open("w") as lock_file:
        fcntl.lockf(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_journal_in_use_holds_the_ledger_directory_of_the_same_bookie(ledgers: Path, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    (journal / "current").mkdir(parents=True)
    (journal / "current" / "1.txn").touch()
    cookie = Cookie("127.0.0.1:3181", (str(journal),), (str(ledgers),)).serialize()
    (ledgers / "current" / "VERSION").write_bytes(cookie)
    copy = tmp_path / "copy"
    (copy / "current").mkdir(parents=True)
    (copy / "current" / "VERSION").write_bytes(cookie)
    with child("file = open(sys.argv[1])", journal / "current" / "1.txn") as pid:
        with pytest.raises(DirectoryInUse, match=f"process {pid} "), hold([ledgers]):
            pytest.fail("held")
        with hold([copy]):
            pass
