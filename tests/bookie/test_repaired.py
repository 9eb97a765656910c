"""Our bookie serves scoped and plain ledgers from rebuilt indexes, and from indexes converted there and back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.command_line import CommandLine
from support.own_bookies import OwnBookie

from bkctl.client.ledger import BookKeeper
from bkctl.formats.metadata import LedgerState
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import Cluster, open_cluster
from bkctl.protocol.connection import run

LEDGERS = [LedgerId(0, 5), LedgerId(7, 5), LedgerId(7, 6)]
COUNT = 1500


async def write(cluster: Cluster) -> None:
    async with BookKeeper(cluster) as client:
        for ledger in LEDGERS:
            handle = await client.create_ledger_adv(
                ledger.ledger_id, ledger_scope_id=ledger.scope_id, ensemble_size=1, write_quorum_size=1,
                ack_quorum_size=1, password=b"pw",
            )  # fmt: skip
            for number in range(COUNT - 1):
                handle.add(b"%d" % number, entry_id=number)
            await handle.flush()
            await handle.add(b"%d" % (COUNT - 1), entry_id=COUNT - 1)
            if ledger.ledger_id == 6:
                await handle.close()


async def check(cluster: Cluster, *, recovery: bool) -> None:
    async with BookKeeper(cluster) as client:
        for ledger in LEDGERS:
            handle = await client.open_ledger(
                ledger.ledger_id, ledger_scope_id=ledger.scope_id, password=b"pw", recovery=recovery
            )
            last = handle.last_add_confirmed
            assert last >= COUNT - 2
            found = [bytes(entry.payload) async for entry in handle.read(0, last)]
            assert found == [b"%d" % number for number in range(last + 1)]
            if recovery:
                assert (handle.metadata.state, last) == (LedgerState.CLOSED, COUNT - 1)


@pytest.fixture
def bkctl() -> CommandLine:
    return CommandLine(None)


def test_bookie_survives_repairs(own_bookie: Callable[..., OwnBookie], tmp_path: Path, bkctl: CommandLine) -> None:
    uri = f"sqlite://{tmp_path / 'metadata.db'}"
    with open_cluster(uri, create=True) as cluster:
        bookie = own_bookie(uri)
        bookie.start()
        run(write(cluster))
        bookie.stop()
        place: tuple[Any, ...] = ("--conf", bookie.conf)
        for path in (bookie.ledger_dir / "current").rglob("*.idx"):
            path.unlink()
        rows = bkctl("bookie", "index", "regenerate", "--all", *place, "-u", uri, "-o", "ndjson").rows
        assert [(row["ledgerScopeId"], row["ledgerId"], row["entries"], row["fenced"]) for row in rows] == [
            ("0", "5", COUNT, False), ("7", "5", COUNT, False), ("7", "6", COUNT, True)
        ]  # fmt: skip
        bookie.start()
        run(check(cluster, recovery=False))
        bookie.stop()
        for to in ("db", "interleaved"):
            (row,) = bkctl("bookie", "convert", "--to", to, *place, "-o", "ndjson").rows
            assert (row["ledgers"], row["entries"]) == (3, 3 * COUNT)
            if to == "db":
                rows = bkctl("bookie", "index", "rebuild", "--ledgers", "--locations", *place, "-o", "ndjson").rows
                assert [(row["ledgers"], row["entries"]) for row in rows] == [
                    (1, None), (2, None), (1, COUNT), (2, 2 * COUNT)
                ]  # fmt: skip
        bookie.start()
        run(check(cluster, recovery=True))
        bookie.stop()
