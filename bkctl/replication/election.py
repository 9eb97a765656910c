"""The elections of the auditors, by Apache's own votes. Source: AuditorElector."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from bkctl.errors import BkctlError, Unreachable
from bkctl.metadata.underreplication import AuditorElection
from bkctl.replication.signals import Signal, opened, watching
from bkctl.tasks import cancel_and_wait

if TYPE_CHECKING:
    from bkctl.metadata.store import Claim

log: Final = logging.getLogger("bkctl.replication")

BACK_OFF_S: Final = 2.0
#: Watches report every change; this bounds the delay if a report is lost.
LOOK_AGAIN_S: Final = 30.0


@dataclass(eq=False)
class AuditorElector:
    """Takes part in one election while `run` runs, and runs `audit` whenever it wins.

    `audit` is cancelled when our vote is gone, because the store's session ended or it was deleted; then the
    elector votes again. `scoped` selects the election for the scopes ≠ 0.
    """

    election: AuditorElection
    bookie_id: str
    audit: Callable[[], Awaitable[None]]
    scoped: bool
    back_off_s: float = BACK_OFF_S
    #: True while we are the auditor.
    elected: bool = False
    #: The number of our votes.
    attempt_count: int = 0

    def __post_init__(self) -> None:
        self._what = "the scopes" if self.scoped else "scope 0"

    async def run(self) -> None:
        """Vote, wait and audit in turns until cancelled, and withdraw the vote then."""
        while True:
            try:
                await self._term()
            except BkctlError as error:
                log.warning("The election of the auditor of %s is interrupted: %s", self._what, error)
            await asyncio.sleep(self.back_off_s)

    async def _term(self) -> None:
        """Run from one vote of ours to its end."""
        self.attempt_count += 1
        async with opened(lambda: self.election.vote(self.bookie_id, scoped=self.scoped), _withdraw) as vote:
            changed = Signal()
            directory = vote.path.rpartition("/")[0]
            async with watching(self.election.store.watch, directory, changed.set, children=True):
                if await self._won(vote, changed):
                    await self._be_auditor(vote, changed)

    async def _won(self, vote: Claim, changed: Signal) -> bool:
        """Wait until our vote is the first one; return False if it is gone."""
        while True:
            changed.clear()
            paths = await asyncio.to_thread(self.election.vote_paths, scoped=self.scoped)
            if vote.path not in paths:
                return False
            if paths[0] == vote.path:
                return True
            await changed.wait(LOOK_AGAIN_S)

    async def _be_auditor(self, vote: Claim, changed: Signal) -> None:
        await asyncio.to_thread(self.election.announce, self.bookie_id, scoped=self.scoped)
        log.info("%s is the auditor of %s", self.bookie_id, self._what)
        self.elected = True
        auditing = asyncio.ensure_future(self.audit())
        try:
            while await self._holds(vote, changed):
                waiting = asyncio.ensure_future(changed.wait(LOOK_AGAIN_S))
                try:
                    await asyncio.wait([waiting, auditing], return_when=asyncio.FIRST_COMPLETED)
                finally:
                    await cancel_and_wait(waiting)
                if auditing.done():
                    await auditing
                    return
        finally:
            self.elected = False
            await cancel_and_wait(auditing)

    async def _holds(self, vote: Claim, changed: Signal) -> bool:
        """Return False if our vote is gone. While the store is unreachable, the vote counts as held."""
        changed.clear()
        try:
            if await asyncio.to_thread(vote.is_held):
                return True
        except Unreachable as error:
            # No other auditor is elected before our session ends, and nothing can be marked without the store.
            log.warning("The auditor of %s cannot reach the metadata store: %s", self._what, error)
            return True
        log.warning("%s is no longer the auditor of %s: its vote is gone", self.bookie_id, self._what)
        return False


def _withdraw(vote: Claim) -> None:
    with contextlib.suppress(BkctlError):  # the end of the session withdraws it
        vote.release()
