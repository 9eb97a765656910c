"""Channels to bookies that cannot be reached: each waiting caller gets an error."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.waiting import LIMIT_S

from bkctl.client.bookies import BookiePool
from bkctl.errors import BookieUnavailable
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import open_cluster
from bkctl.protocol.messages import Protocol, ReadLacRequest


@pytest.mark.parametrize(
    "address",
    [(f"{'x' * 70}.example", 3181), ("a\0b", 3181), ("127.0.0.1", 65536), ("no such host", 3181)],
    ids=["label too long", "zero byte", "port too large", "unknown name"],
)
async def test_invalid_address_makes_bookie_unavailable(tmp_path: Path, address: tuple[str, int]) -> None:
    with open_cluster(f"sqlite://{tmp_path / 'metadata.db'}", create=True) as cluster:
        pool = BookiePool(cluster, protocol=Protocol.V3, tls=None, timeout_s=LIMIT_S, addresses={"bookie-1": address})
        answer = pool.channel("bookie-1").send(ReadLacRequest(LedgerId(0, 1)))
        with pytest.raises(BookieUnavailable, match="bookie-1"):
            await asyncio.wait_for(answer, LIMIT_S)
        await pool.close()


async def test_unexpected_error_of_connecting_is_named_and_delays_the_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = []

    async def address(bookie_id: str) -> tuple[str, int]:
        attempts.append(bookie_id)
        raise RuntimeError("can't start new thread")

    with open_cluster(f"sqlite://{tmp_path / 'metadata.db'}", create=True) as cluster:
        pool = BookiePool(cluster, protocol=Protocol.V3, tls=None, timeout_s=LIMIT_S, addresses={})
        monkeypatch.setattr(pool, "address", address)
        monkeypatch.setattr("bkctl.client.bookies.BACK_OFF_S_MIN", LIMIT_S)
        monkeypatch.setattr("bkctl.client.bookies.BACK_OFF_S_MAX", LIMIT_S)
        for _ in range(2):
            answer = pool.channel("bookie-1").send(ReadLacRequest(LedgerId(0, 1)))
            with pytest.raises(BookieUnavailable, match=r"bookie-1.*can't start new thread"):
                await asyncio.wait_for(answer, LIMIT_S)
        assert attempts == ["bookie-1"]
        await pool.close()
