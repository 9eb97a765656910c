"""Identity of a process on this machine, and whether a process with an earlier identity may still live."""

from __future__ import annotations

import contextlib
import os


def process_identity() -> tuple[int, str, str, str]:
    """Return this process's id, start time, id namespace and boot id; "" where the system does not tell."""
    pid = os.getpid()
    namespace = boot_id = ""
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot_id = file.read().strip()
    return pid, process_start(pid) or "", namespace, boot_id


def process_start(pid: int) -> str | None:
    """Return the start of process `pid` in ticks since boot; "" when it ended, None when the system does not tell.

    Source: proc(5), stat.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return "" if fields[0] in (b"Z", b"X") else fields[19].decode("ascii")


def may_live(pid: int) -> bool:
    """Return whether process `pid` may exist: `hidepid` hides the processes of other users from /proc."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
