"""Long polls without a server: which of them a change of the ledger answers."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import Any, cast

import pytest

from bkctl.bookie.reads import LongPoll, LongPolls
from bkctl.ids import LedgerId
from bkctl.protocol.handler import Responder
from bkctl.protocol.messages import LAST_ENTRY, ReadRequest
from bkctl.storage.ledger.ledger_handle import LedgerHandle

LEDGER = LedgerId(0, 5)
HOUR_MS = 3_600_000
#: The LACs that readers of a ledger with LAC 4 claim: two are up to date, the others are higher.
KNOWN = (7, 4, 1 << 62, 4, 5, 7)


class Client:
    """Stands for the responder of a client that stays connected."""

    is_lost = False

    def __init__(self) -> None:
        self.on_lost: dict[Callable[[], None], None] = {}
        self.answers: list[Any] = []

    def __call__(self, response: Any) -> None:
        self.answers.append(response)


class Waiting:
    """Long polls of one ledger: of each of KNOWN, for an hour."""

    def __init__(self) -> None:
        self.handle = LedgerHandle(LEDGER, b"", lac=4)
        self.answered: list[tuple[int | None, bool]] = []
        self.polls = LongPolls(self._answer)
        self.clients = [Client() for _ in KNOWN]
        for client, lac in zip(self.clients, KNOWN, strict=True):
            request = ReadRequest(LEDGER, LAST_ENTRY, previous_lac=lac, timeout_ms=HOUR_MS)
            assert self.polls.wait(self.handle, request, cast("Responder", client))

    def _answer(self, handle: LedgerHandle, request: ReadRequest, respond: Responder, updated: bool) -> None:
        assert handle is self.handle
        self.answered.append((request.previous_lac, updated))

    async def known_after_wake(self) -> list[tuple[int | None, bool]]:
        """Return what the polls that the handle's state answers know, and whether by a higher LAC."""
        self.handle.wake()
        await asyncio.sleep(0)
        answered, self.answered = self.answered, []
        assert len(self.handle.watchers) == len(self.polls), "those that are left stay registered"
        return answered


async def test_a_higher_lac_answers_the_polls_that_know_a_lower_one_and_touches_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    touched = []
    look = LongPoll._look
    monkeypatch.setattr(LongPoll, "_look", lambda poll: (touched.append(poll), look(poll)))
    waiting = Waiting()
    assert await waiting.known_after_wake() == []
    waiting.handle.lac = 5
    assert await waiting.known_after_wake() == [(4, True), (4, True)]
    waiting.handle.lac = 7
    assert await waiting.known_after_wake() == [(5, True)]
    waiting.handle.lac = 8
    assert await waiting.known_after_wake() == [(7, True), (7, True)]
    assert len(touched) == 5
    assert len(waiting.polls) == 1


@pytest.mark.parametrize("change", ["fenced", "deleted"])
async def test_a_ledger_without_more_entries_answers_all_polls(change: str) -> None:
    waiting = Waiting()
    setattr(waiting.handle, change, True)
    assert await waiting.known_after_wake() == [(lac, False) for lac in sorted(KNOWN)]


async def test_polls_that_end_leave_the_ledger_and_are_freed_at_once() -> None:
    waiting = Waiting()
    alive = weakref.WeakSet(waiting.polls.waiting)
    for client in waiting.clients[:2]:
        (abandon,) = client.on_lost
        abandon()
        assert len(client.answers) == 1
    waiting.handle.lac = 5
    waiting.handle.wake()  # to look in the loop's next turn, which is too late
    waiting.polls.finish()
    assert not waiting.handle.watchers
    await asyncio.sleep(0)
    assert sorted(waiting.answered) == [(lac, False) for lac in sorted(KNOWN[2:])]
    del client, abandon
    assert not alive
