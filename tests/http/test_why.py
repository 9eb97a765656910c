"""`bkctl why`: the ways out lose nothing while an answer may still come."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bkctl.client.placement import Placement
from bkctl.errors import BkctlError, EntryNotFound, TimedOut
from bkctl.formats.metadata import BookieServiceInfo, Fragment, LedgerMetadata
from bkctl.http.why import Inquiry
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import open_cluster


@pytest.mark.parametrize(
    ("error", "first", "is_deleted"),
    [
        (TimedOut("no answer"), "bkctl why bookie b:1", False),
        (EntryNotFound("no entry"), "bkctl autorecovery mark 1 --missing b:1", True),
    ],
    ids=["hung", "empty"],
)
def test_a_ledger_on_a_bookie_that_does_not_answer_is_not_to_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BkctlError, first: str, is_deleted: bool
) -> None:
    fault = SimpleNamespace(bookie_id="b:1", error=error)
    found = SimpleNamespace(fragments=[SimpleNamespace(faults=[fault], first_entry_id=0)], problem=None)

    async def check(*_: Any) -> Any:
        return found

    monkeypatch.setattr("bkctl.http.why.LedgerChecker.check", check)
    with open_cluster(f"sqlite://{tmp_path}/m.db", create=True) as cluster:
        cluster.bookies.register("b:1", BookieServiceInfo())
        cluster.ledgers.create(LedgerId(0, 1), LedgerMetadata(1, 1, 1, None, None, (Fragment(0, ("b:1",)),)))
        bookkeeper: Any = SimpleNamespace(cluster=cluster, pool=SimpleNamespace(), config=SimpleNamespace())
        inquiry = Inquiry(bookkeeper, Placement(), lambda _: {}, lambda _: pytest.fail("not asked"))
        why = asyncio.run(inquiry.ledger(LedgerId(0, 1)))
    commands = [way.command for way in why.ways]
    assert commands[0] == first
    assert ("bkctl ledger delete 1" in commands) is is_deleted
