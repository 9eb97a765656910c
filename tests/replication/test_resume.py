"""Resume files: what is done is kept whatever happens to the process, and only the same recovery takes it up again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bkctl.errors import BkctlError, Conflict, Corrupt, Unsupported
from bkctl.ids import U64_MAX, LedgerId
from bkctl.replication.resume import ResumeFile

LEDGERS = [LedgerId(0, 0), LedgerId(0, (1 << 63) - 1), LedgerId(7, 5), LedgerId(U64_MAX, U64_MAX)]


def opened(path: Path, instance_id: str = "i-1", bookies: tuple[str, ...] = ("b-1:3181", "b-2:3181")) -> ResumeFile:
    return ResumeFile(path, instance_id=instance_id, bookies=bookies)


def test_next_run_reads_finished_ledgers(tmp_path: Path) -> None:
    path = tmp_path / "resume"
    with opened(path) as file:
        assert file.done == set()
        for index, ledger in enumerate(LEDGERS[:3]):
            file.record(ledger, index, 1000 * index)
    with opened(path, bookies=("b-2:3181", "b-1:3181")) as file:
        assert (file.done, file.entry_count, file.size_bytes) == (set(LEDGERS[:3]), 3, 3000)
        file.record(LEDGERS[3], 1, 1)
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert (lines[0]["format"], lines[0]["version"], lines[0]["instanceId"]) == ("bkctl-recovery", 1, "i-1")
    assert lines[0]["bookies"] == ["b-1:3181", "b-2:3181"]
    assert [each["ledger"] for each in lines[1:]] == [each.qualified_name for each in LEDGERS]


@pytest.mark.parametrize("cut", range(1, 90, 8))
def test_incomplete_last_line_is_truncated(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "resume"
    with opened(path) as file:
        for ledger in LEDGERS:
            file.record(ledger, 1, 10)
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    last_size = len(whole) - whole.rstrip(b"\n").rindex(b"\n") - 1
    kept = LEDGERS[: -1 if cut <= last_size else -2]
    with opened(path) as file:
        assert file.done == set(kept)
        for ledger in LEDGERS[len(kept) :]:
            file.record(ledger, 1, 10)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("size", [0, 1, 20, 90])
def test_incomplete_own_header_is_rewritten(tmp_path: Path, size: int) -> None:
    path = tmp_path / "resume"
    opened(path).close()
    path.write_bytes(path.read_bytes()[:size])
    with opened(path) as file:
        assert file.done == set()
        file.record(LEDGERS[0], 1, 1)
    with opened(path) as file:
        assert file.done == {LEDGERS[0]}


def test_file_of_another_recovery_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "resume"
    with opened(path) as file:
        file.record(LEDGERS[0], 1, 1)
    before = path.read_bytes()
    with pytest.raises(Conflict, match=r"'i-1'.*'i-2'"):
        opened(path, instance_id="i-2")
    for bookies in (("b-1:3181",), ("b-1:3181", "b-2:3181", "b-3:3181"), ("b-1:3181", "b-3:3181")):
        with pytest.raises(Conflict, match="b-1:3181, b-2:3181, not of"):
            opened(path, bookies=bookies)
    assert path.read_bytes() == before


def test_file_in_use_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path / "resume"), pytest.raises(Conflict, match="another process"):
        opened(tmp_path / "resume")
    opened(tmp_path / "resume").close()


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"hello\n", Corrupt), (b"hello", Corrupt), (b'{"format": "bkctl-undo", "version": 1}\n', Corrupt),
        (b'{"format": "bkctl-recovery", "version": 2}\n', Unsupported), (b"[1]\n", Corrupt), (b"\0" * 5000, Corrupt),
        (b"x" * (1 << 21), Corrupt),
    ],
)  # fmt: skip
def test_foreign_file_is_refused_and_kept(tmp_path: Path, content: bytes, error: type[BkctlError]) -> None:
    path = tmp_path / "resume"
    path.write_bytes(content)
    with pytest.raises(error):
        opened(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "line",
    [
        b"nonsense\n", b"{}\n", b'{"ledger": "5", "entryCount": 1, "sizeBytes": 1}\n',
        b'{"ledger": "%s"}\n' % (b"0" * 32),
        b'{"ledger": "%s", "entryCount": 1e999, "sizeBytes": 2}\n' % (b"0" * 32),
        b'{"ledger": "%s", "entryCount": 1, "sizeBytes": true}\n' % (b"0" * 32),
    ],
)  # fmt: skip
def test_damaged_line_is_reported_with_its_number(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "resume"
    with opened(path) as file:
        file.record(LEDGERS[0], 1, 1)
    path.write_bytes(path.read_bytes() + line)
    with pytest.raises(Corrupt, match="line 3"):
        opened(path)


def test_killed_process_loses_no_line(tmp_path: Path) -> None:
    path = tmp_path / "resume"
    program = f"""
import os, signal, pathlib
from bkctl.ids import LedgerId
from bkctl.replication.resume import ResumeFile
file = ResumeFile(pathlib.Path({str(path)!r}), instance_id="i-1", bookies=("b-1:3181", "b-2:3181"))
for number in range(100):
    file.record(LedgerId(7, number), 1, 10)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=os.getcwd(), check=False)
    assert done.returncode == -signal.SIGKILL
    with opened(path) as file:
        assert file.done == {LedgerId(7, number) for number in range(100)}
