"""Disk space and latency of bookies, and the health findings from them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.served_bookies import config_for, serving

from bkctl.client import disk_space
from bkctl.client.disk_space import BookieSpace, disk_findings, member_space
from bkctl.client.ledger import BookKeeper
from bkctl.errors import ProtocolError
from bkctl.formats.metadata import Cookie
from bkctl.metadata.cluster import RegisteredBookie, open_cluster


def test_a_read_only_bookie_with_room_on_its_disks_is_so_by_request(tmp_path: Path) -> None:
    with open_cluster(f"sqlite://{tmp_path}/m.db", create=True) as cluster:

        async def work() -> None:
            async with (
                serving(config_for(tmp_path, force_read_only_bookie=True), cluster) as bookie,
                BookKeeper(cluster) as bookkeeper,
            ):
                members = cluster.bookies.list()
                (finding,) = await disk_findings(bookkeeper, members, 100)
                assert (finding.code, finding.subject) == ("bookie-read-only", bookie.bookie_id)
                assert "by request" in finding.message
                assert f"'bkctl bookie readonly off --bookie {bookie.bookie_id}'" in finding.advice
                (finding,) = await disk_findings(bookkeeper, members, 0)
                assert finding.code == "bookie-read-only"
                assert "% of its disks are used" in finding.message
                assert "readonly off" not in finding.advice

        asyncio.run(work())


def test_members_are_measured_except_those_that_are_down(tmp_path: Path) -> None:
    with open_cluster(f"sqlite://{tmp_path}/m.db", create=True) as cluster:
        cluster.cookies.write("down:1", Cookie("down:1", ("/j",), ("/l",), instance_id=cluster.instance_id()), -1)

        async def work() -> None:
            async with (
                serving(config_for(tmp_path), cluster),
                BookKeeper(cluster) as bookkeeper,
            ):
                up, down = sorted(
                    await member_space(bookkeeper, cluster.bookies.list()), key=lambda each: each.bookie.state == "down"
                )
                assert up.latency_ms is not None
                assert up.total is not None
                assert (down.bookie.bookie_id, down.latency_ms, down.total, down.error) == ("down:1", None, None, None)

        asyncio.run(work())


async def test_few_bookies_are_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asking, most = 0, 0

    async def ask(_: Any, bookie: RegisteredBookie, wait_s: float | None) -> BookieSpace:
        nonlocal asking, most
        asking += 1
        most = max(most, asking)
        await asyncio.sleep(0)
        asking -= 1
        return BookieSpace(bookie, 1, 1, None)

    monkeypatch.setattr(disk_space, "ASKED_AT_ONCE", 3, raising=False)
    monkeypatch.setattr(disk_space, "_ask", ask)
    bookies = [RegisteredBookie(f"b{at}", "rw", None) for at in range(10)]
    bookkeeper: Any = None
    assert [space.bookie async for space in disk_space.disk_space(bookkeeper, bookies)] == bookies
    assert [space.bookie for space in await member_space(bookkeeper, bookies)] == bookies
    assert most == 3


@pytest.mark.parametrize(("total", "free"), [(-5, (1 << 63) - 1), (10, 11), (10, -1), (-1, 0)])
async def test_impossible_sizes_are_an_error_of_their_bookie(fake_cluster: Any, total: int, free: int) -> None:
    async with fake_cluster(2) as cluster, cluster.client() as client:
        cluster.bookies[0].total_bytes, cluster.bookies[0].free_bytes = total, free
        liar, other = await member_space(client, cluster.cluster.bookies.list())
        assert (liar.total, liar.free, liar.used, liar.latency_ms) == (None, None, None, None)
        assert isinstance(liar.error, ProtocolError)
        assert f"b0 reports impossible disks: {free} of {total} bytes free" in liar.error.message
        assert (other.total, other.free) == (1 << 40, 1 << 39)
