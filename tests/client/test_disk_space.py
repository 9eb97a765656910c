"""Disk space and latency of bookies, and the health findings from them."""

from __future__ import annotations

import asyncio
from pathlib import Path

from support.served_bookies import config_for, serving

from bkctl.client.disk_space import disk_findings, member_space
from bkctl.client.ledger import BookKeeper
from bkctl.formats.metadata import Cookie
from bkctl.metadata.cluster import open_cluster


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
