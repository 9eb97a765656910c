"""System calls before an acknowledgement, seen from outside the bookie's process."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from support.own_bookies import OwnBookie
from support.servers import require

from bkctl.formats.entry import DigestManager, DigestType
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import Cluster
from bkctl.protocol.connection import BookieConnection
from bkctl.protocol.messages import AddRequest, Protocol, Status

MakeBookie = Callable[..., OwnBookie]


def entry(by: DigestManager, entry_id: int, payload: bytes) -> AddRequest:
    sealed = by.seal(entry_id, entry_id - 1, len(payload) * (entry_id + 1), payload)
    return AddRequest(by.ledger, entry_id, by.master_key, sealed + payload)


async def connect(bookie: OwnBookie, protocol: Protocol) -> BookieConnection:
    connection = await BookieConnection.open(*bookie.address, bookie_id=bookie.bookie_id, protocol=protocol)
    if protocol is Protocol.V3:
        assert await connection.supports_scopes()
    return connection


def strace() -> str:
    """The path of a strace that may trace a child here; else the test is skipped."""
    found = shutil.which("strace")
    if found is None:
        require("strace", "strace is not installed")
    tried = subprocess.run([found, "-e", "trace=none", "true"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        require("strace", f"tracing is not permitted here: {tried.stderr.strip()}")
    return found


def calls_of(trace: Path) -> list[str]:
    """The journal's writes (W) and completed syncs (S), and the beginnings of what is sent (A), in order."""
    order = []
    unfinished: dict[str, str] = {}
    for line in trace.read_text(errors="replace").splitlines():
        match = re.match(r"(\d+) +(?:<\.\.\. )?(\w+)(.*)", line)
        if match is None:
            continue
        pid, name, rest = match.groups()
        is_resumed = " resumed>" in rest
        subject = unfinished.pop(f"{pid} {name}", "") if is_resumed else rest
        if "<TCP" in rest and not is_resumed and name in ("write", "writev", "sendto", "sendmsg"):
            order.append("A")
        if rest.endswith("<unfinished ...>"):
            unfinished[f"{pid} {name}"] = rest
        elif ".txn>" in subject and name in ("pwritev", "pwritev2", "pwrite64", "write"):
            assert int(rest.rpartition("= ")[2].split()[0]) > 0, line
            order.append("W")
        elif ".txn>" in subject and name in ("fdatasync", "fsync"):
            assert rest.rstrip().endswith("= 0"), line
            order.append("S")
    return order


def test_the_journal_is_on_disk_before_each_acknowledgement_leaves(
    own_bookie: MakeBookie, cluster: Cluster, tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    calls = "trace=pwritev,pwritev2,pwrite64,write,writev,sendto,sendmsg,fsync,fdatasync"
    prefix = [strace(), "-f", "-yy", "-s", "0", "-e", calls, "-o", str(trace)]
    # Without its own checkpoints, which sync other files and open no journal.
    bookie = own_bookie(cluster.uri, prefix=prefix, settings={"flushInterval": 600_000})
    bookie.start()
    count = 25

    async def add() -> None:
        by = DigestManager(LedgerId(0, 1), DigestType.CRC32C)
        connection = await connect(bookie, Protocol.V2)
        for entry_id in range(count):
            response = await connection.send(entry(by, entry_id, b"x" * 100))
            assert response.status is Status.EOK
        connection.close()
        await connection.wait_closed()

    before = len(calls_of(trace))
    asyncio.run(add())
    bookie.kill()
    seen = "".join(calls_of(trace)[before:])
    # One at a time: each entry is written, then synced, and only then answered.
    assert seen.startswith("WSA" * count), seen
    assert seen.count("A") == count
