"""`bkctl cluster health` names bookies of ours that cannot serve some ledgers, by their metrics."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.command_line import CommandLine
from support.served_bookies import add, on_a_bookie, statuses
from support.servers import DB, INTERLEAVED, SORTED
from support.simulated_disk import Fault, SimulatedFiles

from bkctl.bookie.bookie import Bookie
from bkctl.bookie.waiting_requests import UnreadableLedgers
from bkctl.errors import BkctlError, Corrupt, EntryNotFound, NotFound
from bkctl.formats.metadata import Fragment, LedgerMetadata
from bkctl.http.bookie_load import BookieVitals, read_vitals, without_moved
from bkctl.http.bookie_metrics import CLOCK_SECONDS, UNREADABLE_LEDGERS, UNREGISTERED_SECONDS, metrics_text
from bkctl.http.service import BookieProxy
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import open_cluster
from bkctl.protocol.connection import BookieConnection
from bkctl.protocol.messages import ReadRequest, Status
from bkctl.storage import open_ledgers

ONE, TWO = LedgerId(0, 1), LedgerId(0, 2)


def exchange(bookie: Any, *requests: Any) -> list[Status]:
    async def main() -> list[Status]:
        connection = await BookieConnection.open(*bookie.address, bookie_id=bookie.bookie_id)
        try:
            return await statuses(connection, *requests)
        finally:
            connection.close()

    return asyncio.run(main())


def findings(bookie: Any) -> dict[str, dict[str, Any]]:
    cli = CommandLine(str(bookie.settings["metadataServiceUri"]))
    answer = cli("cluster", "health", "-o", "ndjson", "--timeout", "60s")
    assert answer.code in (0, 3), answer.err
    return {row["code"]: row for row in map(json.loads, answer.out.splitlines())}


@pytest.mark.parametrize("storage", [SORTED, INTERLEAVED], ids=["sorted", "interleaved"])
def test_health_names_bookies_that_set_ledgers_aside(
    http_bookie: Callable[..., Any], storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bkctl.commands.kit.access.METRICS_WAIT_S", 60.0)
    bookie = http_bookie(ledgerStorageClass=storage, flushInterval=3_600_000)
    bookie.start()
    assert exchange(bookie, add(ONE, 0), add(TWO, 0)) == [Status.EOK] * 2
    assert "ledgers-set-aside" not in findings(bookie)
    bookie.stop()
    bookie.start()
    assert exchange(bookie, add(ONE, 1), add(TWO, 1)) == [Status.EOK] * 2
    bookie.kill()
    (index,) = bookie.ledger_dir.rglob("1.idx")
    whole = index.read_bytes()
    index.write_bytes(whole[:8] + b"\xff\xff\xff\xff" + whole[12:])
    bookie.start()
    assert exchange(bookie, ReadRequest(ONE, 0), ReadRequest(TWO, 1)) == [Status.EIO, Status.EOK]
    found = findings(bookie)["ledgers-set-aside"]
    assert (found["subject"], found["severity"]) == (bookie.bookie_id, "error")
    assert found["message"] == "1 ledger is set aside and answered with EIO: their state on disk cannot be read"
    assert "bkctl autorecovery mark" in found["advice"]
    assert found["details"] == {"setAsideLedgerCount": 1, "refusedLedgerCount": 0}
    index.write_bytes(whole)
    bookie.kill()
    bookie.start()
    assert "ledgers-set-aside" not in findings(bookie)


@pytest.mark.parametrize("storage", [SORTED, INTERLEAVED, DB], ids=["sorted", "interleaved", "db"])
def test_health_names_bookies_whose_disks_cannot_read_entries(
    http_bookie: Callable[..., Any], storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bkctl.commands.kit.access.METRICS_WAIT_S", 60.0)
    bookie = http_bookie(ledgerStorageClass=storage)
    bookie.start()
    assert exchange(bookie, add(ONE, 0), add(ONE, 1), add(TWO, 0)) == [Status.EOK] * 3
    assert exchange(bookie, ReadRequest(ONE, 2), ReadRequest(LedgerId(0, 9), 0)) == [Status.ENOENTRY, Status.ENOLEDGER]
    assert "ledgers-unreadable" not in findings(bookie)
    bookie.stop()
    damaged = add(ONE, 0).body
    for path in bookie.ledger_dir.rglob("*.log"):
        path.write_bytes(path.read_bytes().replace(damaged, b"\xff" + damaged[1:]))
    bookie.start()
    reads = (ReadRequest(ONE, 0), ReadRequest(ONE, 0), ReadRequest(ONE, 1), ReadRequest(TWO, 0))
    assert exchange(bookie, *reads) == [Status.EIO, Status.EIO, Status.EOK, Status.EOK]
    found = findings(bookie)["ledgers-unreadable"]
    assert (found["subject"], found["severity"]) == (bookie.bookie_id, "error")
    assert found["message"] == "Entries of 1 ledger could not be read within the last day"
    assert "bkctl bookie check" in found["advice"]
    assert found["details"] == {"unreadableLedgerCount": 1}


def test_unreadable_ledgers_are_bounded_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(open_ledgers, "time", SimpleNamespace(monotonic=lambda: now_s))
    ledgers = UnreadableLedgers()
    for number in range(3000):
        ledgers.note(LedgerId(0, number % 2000), OSError(errno.EIO, "EIO"))
    assert len(ledgers) == 1000
    for error in (OSError(errno.EMFILE, ""), EntryNotFound(""), BkctlError("stops"), ValueError()):
        ledgers.note(LedgerId(7, 7), error)
    ledgers.discard(LedgerId(0, 999))
    ledgers.discard(LedgerId(0, 999))
    assert len(ledgers) == 999
    now_s = 86_000.0
    ledgers.note(LedgerId(7, 7), Corrupt(""))
    assert len(ledgers) == 1000
    now_s = 90_000.0
    assert len(ledgers) == 1


@pytest.mark.parametrize("storage", [SORTED, INTERLEAVED], ids=["sorted", "interleaved"])
def test_metrics_count_ledgers_whose_index_the_disk_refuses(tmp_path: Path, storage: str) -> None:
    files = SimulatedFiles(tmp_path)

    async def body(bookie: Bookie, connection: BookieConnection) -> None:
        async def counts() -> list[str]:
            text = await metrics_text(BookieProxy(bookie, asyncio.get_running_loop()))
            return [line for line in text.splitlines() if line.startswith(("bkctl_set_aside", "bkctl_refused"))]

        assert await statuses(connection, add(ONE, 0), add(TWO, 0)) == [Status.EOK] * 2
        await bookie.checkpoint()
        assert await counts() == ["bkctl_set_aside_ledgers 0", "bkctl_refused_ledgers 0"]
        files.faults.append(Fault("sync", "1.idx", errno.EIO, times=1))
        assert await statuses(connection, add(ONE, 1), add(TWO, 1)) == [Status.EOK] * 2
        await bookie.checkpoint()
        assert await counts() == ["bkctl_set_aside_ledgers 0", "bkctl_refused_ledgers 1"]
        await bookie.checkpoint()
        assert await counts() == ["bkctl_set_aside_ledgers 0", "bkctl_refused_ledgers 0"]

    with open_cluster(f"sqlite://{tmp_path}/metadata.db", create=True) as cluster:
        on_a_bookie(tmp_path, cluster, body, files=files, ledger_storage_class=storage, flush_interval=3_600_000)


def test_impossible_names_of_unreadable_ledgers_stop_no_look(tmp_path: Path) -> None:
    with open_cluster(f"sqlite://{tmp_path}/m.db", create=True) as cluster:
        cluster.ledgers.create(LedgerId(0, 1), LedgerMetadata(1, 1, 1, None, None, (Fragment(0, ("c:1",)),)))
        gauges = {UNREADABLE_LEDGERS: 4}
        vitals = {"b:1": BookieVitals(gauges, unreadable=("", "x y", "1", "2"))}
        found = without_moved(cluster, vitals)["b:1"]
    assert found.unreadable == ("2",)
    assert found.gauges[UNREADABLE_LEDGERS] == 3


def test_numbers_without_an_end_are_left_out() -> None:
    class Api:
        def metrics(self) -> str:
            return f"{CLOCK_SECONDS} +Inf\n{UNREGISTERED_SECONDS} NaN\n"

        def garbage_collection(self) -> None:
            raise NotFound("none")

    assert read_vitals(Api()) == BookieVitals()  # type: ignore[arg-type]
