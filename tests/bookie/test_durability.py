"""What an acknowledgement means, seen from outside the bookie's process: the system calls before it, and SIGKILL."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from own_bookies import OwnBookie
from servers import require

from bkctl.errors import BkctlError, Unreachable
from bkctl.formats.entry import DigestManager, DigestType
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import Cluster
from bkctl.protocol.connection import BookieConnection
from bkctl.protocol.messages import AddRequest, AddResponse, Protocol, ReadRequest, Status

MakeBookie = Callable[..., OwnBookie]
KILLS = int(os.environ.get("BKCTL_TEST_KILLS", "4"))


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


def test_sigkill_at_random_points_loses_no_acknowledged_entry(own_bookie: MakeBookie, cluster: Cluster) -> None:
    seed = int(os.environ.get("BKCTL_TEST_SEED") or random.SystemRandom().randrange(1 << 32))
    chance = random.Random(seed)
    # Small logs and frequent checkpoints, so that the kills meet rolls, index writes and last marks.
    settings = {"logSizeLimit": 200_000, "flushInterval": 20, "journalMaxSizeMB": 1}
    bookie = own_bookie(cluster.uri, settings=settings)
    managers = [
        DigestManager(ledger, DigestType.CRC32C, b"secret")
        for ledger in (LedgerId(0, 1), LedgerId(0, 2), LedgerId(1, 1), LedgerId((1 << 64) - 1, 1))
    ]
    acknowledged: dict[tuple[LedgerId, int], bytes] = {}
    given: dict[tuple[LedgerId, int], bytes] = {}

    async def write_until_killed() -> None:
        connection = await connect(bookie, Protocol.V3)
        waiting = []

        def note(future: asyncio.Future[AddResponse], request: AddRequest) -> None:
            if not future.cancelled() and future.exception() is None and future.result().status is Status.EOK:
                acknowledged[request.ledger, request.entry_id] = bytes(request.body)

        kill = asyncio.get_running_loop().call_later(chance.uniform(0.02, 1.0), bookie.process.kill)
        next_id = 1 + max((entry_id for _, entry_id in given), default=-1)
        with contextlib.suppress(Unreachable):
            while bookie.running:
                for by in managers:
                    request = entry(by, next_id, chance.randbytes(chance.randint(0, 3000)))
                    given[by.ledger, next_id] = request.body
                    future = connection.send(request)
                    future.add_done_callback(lambda future, request=request: note(future, request))
                    waiting.append(future)
                next_id += 1
                await connection.drain()
                await asyncio.sleep(0)
        kill.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        connection.close()

    async def check() -> None:
        connection = await connect(bookie, Protocol.V3)
        for by in managers:
            ids = [entry_id for ledger, entry_id in given if ledger == by.ledger]
            responses = await asyncio.gather(*(connection.send(ReadRequest(by.ledger, each)) for each in ids))
            for entry_id, response in zip(ids, responses, strict=True):
                if response.status is Status.EOK:
                    assert bytes(response.body) == given[by.ledger, entry_id]
                    by.open(bytes(response.body), entry_id)
                else:
                    # What was not acknowledged may be missing, and is nothing else.
                    assert response.status in (Status.ENOENTRY, Status.ENOLEDGER)
                    assert (by.ledger, entry_id) not in acknowledged
        connection.close()

    try:
        for _ in range(KILLS):
            bookie.start()
            asyncio.run(write_until_killed())
            bookie.kill()
            bookie.start()
            asyncio.run(check())
            bookie.kill()
        assert acknowledged
        bookie.start()
        bookie.stop()
        bookie.start()
        asyncio.run(check())
    except (AssertionError, BkctlError) as error:
        error.add_note(f"BKCTL_TEST_SEED={seed}")
        raise
