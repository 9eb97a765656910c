"""Measure single commands: time, processor time and memory of their processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

BKCTL = [str(Path(sys.executable).with_name("bkctl"))]
SHELL = "org.apache.bookkeeper.bookie.BookieShell"

#: Starts a command from a process that is smaller than any command: Linux counts the starter's memory, too.
_MEASURE = """
import os, sys, time
null = os.open(os.devnull, os.O_RDONLY)
output, errors = (os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for path in sys.argv[1:3])
start = time.perf_counter()
pid = os.posix_spawn(sys.argv[3], sys.argv[3:], os.environ, file_actions=[
    (os.POSIX_SPAWN_DUP2, null, 0), (os.POSIX_SPAWN_DUP2, output, 1), (os.POSIX_SPAWN_DUP2, errors, 2)])
_, status, usage = os.wait4(pid, 0)
print(time.perf_counter() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss, os.waitstatus_to_exitcode(status))
"""


class Run(NamedTuple):
    """One run of a command: wall-clock and processor seconds, and peak resident memory."""

    seconds: float
    cpu_s: float
    rss_mib: float


def measured(command: Sequence[str], directory: Path | None = None, exit_codes: Sequence[int] = (0,)) -> Run:
    """Run a command; its output goes to the files `output` and `errors` of `directory`, without one it is thrown away.

    Raises CalledProcessError for another exit code than `exit_codes`.
    """
    output, errors = (os.devnull if directory is None else str(directory / name) for name in ("output", "errors"))
    program = shutil.which(command[0]) or command[0]
    done = subprocess.run(
        [sys.executable, "-S", "-E", "-c", _MEASURE, output, errors, program, *command[1:]],
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    seconds, cpu_s, peak_kib, code = done.stdout.split()
    if int(code) not in exit_codes:
        raise subprocess.CalledProcessError(int(code), command, stderr=Path(errors).read_text())
    return Run(float(seconds), float(cpu_s), int(peak_kib) / 1024)


def processor_seconds(process: Path) -> float:
    """Return the user and system time so far of a process or thread, by its directory in /proc."""
    fields = (process / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
