"""A bookie with a lost index: garbage collection spares entries of existing ledgers until the index is rebuilt."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.command_line import CommandLine
from support.servers import DB, INTERLEAVED, SORTED, apache_settings, free_port, write_conf

from bkctl.bookie.bookie import Bookie
from bkctl.client.ledger import BookKeeper
from bkctl.config import BookieConfig
from bkctl.errors import Unreachable
from bkctl.files.entry_log import EntryLogReader
from bkctl.files.listing import log_contents
from bkctl.formats.metadata import Fragment, LedgerState
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import Cluster, open_cluster
from bkctl.metadata.ledgers import LedgerManager

KEPT = [LedgerId(0, 1), LedgerId(7, 1)]
DELETED, ELSEWHERE = LedgerId(0, 2), LedgerId(0, 3)
ENTRIES = 60
PAYLOAD = b"an entry " * 100
LOG_SIZE = 32 * 1024


class LostIndex:
    """A bookie that has written its ledgers, and whose index is removed then."""

    def __init__(self, directory: Path, storage: str) -> None:
        self.directory = directory
        self.storage = storage
        self.uri = f"sqlite://{directory / 'metadata.db'}"
        settings = {"logSizeLimit": LOG_SIZE, "compactionRateByEntries": 1_000_000, "flushInterval": 3_600_000}
        self.conf = write_conf(
            directory / "bk_server.conf", apache_settings(self.uri, free_port(), directory, storage, settings)
        )
        self.cluster: Cluster

    def serve(self, body: Callable[[Bookie, BookKeeper], Coroutine[Any, Any, None]]) -> None:
        async def run() -> None:
            # Small logs, as Java's configuration allows none.
            bookie = Bookie(replace(BookieConfig.load(self.conf), log_size_limit=LOG_SIZE), cluster=self.cluster)
            await bookie.start()
            try:
                async with BookKeeper(self.cluster) as client:
                    await body(bookie, client)
            finally:
                await bookie.stop()
            assert bookie.failure is None

        asyncio.run(run())

    async def write(self, bookie: Bookie, client: BookKeeper) -> None:
        async def add_all(*ledgers: LedgerId) -> None:
            handles = [
                await client.create_ledger_adv(
                    each.ledger_id, ledger_scope_id=each.scope_id, ensemble_size=1, write_quorum_size=1,
                    ack_quorum_size=1,
                )
                for each in ledgers
            ]  # fmt: skip
            for entry_id in range(ENTRIES):
                await asyncio.gather(*(each.add(PAYLOAD, entry_id=entry_id) for each in handles))
                if entry_id % 8 == 0:
                    await bookie.checkpoint()  # so that sorted entries are mixed too
            for each in handles:
                await each.close()

        await add_all(DELETED, ELSEWHERE)
        await add_all(LedgerId(0, 4), *KEPT)
        await add_all(LedgerId(0, 5), LedgerId(7, 5))  # completes the logs before
        for ledger_id in (DELETED.ledger_id, 4, 5):
            await client.delete_ledger(ledger_id)
        await client.delete_ledger(5, ledger_scope_id=7)

    def lose(self) -> None:
        moved = self.cluster.ledgers.read(ELSEWHERE)
        assert moved.metadata.state is LedgerState.CLOSED
        elsewhere = moved.metadata._replace(ensembles=(Fragment(0, ("other:3181",)),))
        self.cluster.ledgers.write(ELSEWHERE, elsewhere, moved.version)
        for path in list((self.directory / "ledgers" / "current").rglob("*.idx")):
            path.unlink()
        for name in ("ledgers", "locations"):
            for path in (self.directory / "ledgers" / "current").glob(f"*{name}"):
                shutil.rmtree(path)

    def logs(self) -> dict[Path, set[LedgerId]]:
        """The entry logs that have entries, and whose they are."""
        found = {}
        for path in (self.directory / "ledgers" / "current").rglob("*.log"):
            if path.parent.name in ("current", "scoped"):
                with EntryLogReader.open(path) as reader:
                    found[path] = set(log_contents(reader).sizes)
        return {path: ledgers for path, ledgers in found.items() if ledgers}


@pytest.fixture(params=[SORTED, INTERLEAVED, DB], ids=["sorted", "interleaved", "db"])
def lost(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LostIndex]:
    made = LostIndex(tmp_path, request.param)
    with open_cluster(made.uri, create=True) as made.cluster:
        made.serve(made.write)
        made.lose()
        yield made


async def collect(bookie: Bookie) -> None:
    collector = bookie.garbage_collector
    assert collector is not None
    assert collector.force(major=True)
    while collector.is_in_force_gc:
        await asyncio.sleep(0.01)


def test_entry_logs_of_ledgers_that_exist_outlive_the_index(
    lost: LostIndex, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = lost.logs()
    needed = {path: ledgers for path, ledgers in before.items() if ledgers & set(KEPT)}
    assert set().union(*needed.values()) > set(KEPT), "some of them have garbage too"
    assert len(needed) < len(before)
    command = "rebuild" if lost.storage == DB else "regenerate"

    async def spare(bookie: Bookie, client: BookKeeper) -> None:
        collector = bookie.garbage_collector
        assert collector is not None
        with monkeypatch.context() as unreachable:

            def nothing(*_: object) -> object:
                raise Unreachable("The metadata store does not answer")

            unreachable.setattr(LedgerManager, "read_many", nothing)
            await collect(bookie)
        assert lost.logs() == before, "nobody knows"
        assert collector.stats.unindexed_ledgers == 0
        for _ in range(2):
            await collect(bookie)
            assert lost.logs() == needed
            assert collector.stats.unindexed_ledgers == len(KEPT)
            assert collector.stats.failed_rounds == 0
        assert f"2 ledgers exist and have entries on this bookie, and its index does not have them: {KEPT[0]}" in (
            caplog.text
        )
        assert f"bkctl bookie index {command}" in caplog.text

    async def read(bookie: Bookie, client: BookKeeper) -> None:
        collector = bookie.garbage_collector
        assert collector is not None
        for _ in range(2):
            for ledger in KEPT:
                reader = await client.open_ledger(ledger.ledger_id, ledger_scope_id=ledger.scope_id)
                assert [each.payload async for each in reader.read(0, ENTRIES - 1)] == [PAYLOAD] * ENTRIES
            await collect(bookie)
        assert collector.stats.unindexed_ledgers == 0
        assert lost.logs().keys() != needed.keys(), "compacted now"

    lost.serve(spare)
    options: Sequence[str] = ("--ledgers", "--locations") if command == "rebuild" else ("--all",)
    made = CommandLine(None)("bookie", "index", command, *options, "--conf", str(lost.conf), "-u", lost.uri)
    assert made.code == 0, made.err
    lost.serve(read)
