"""Chooses the bookies that get the entries of a fragment's bad bookies."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Final

from bkctl.client.placement import Placement, PlacementRules, choose_replacements, mend_placement
from bkctl.errors import NotEnoughBookies
from bkctl.replication.fragments import ANSWERED, LedgerFragment, fragments_of
from bkctl.replication.signals import BatchedCalls

if TYPE_CHECKING:
    from bkctl.client.ledger import BookKeeper
    from bkctl.metadata.cluster import RegisteredBookie
    from bkctl.replication.checker import LedgerCheck

#: The largest age of the list of registered bookies; a target that is gone by then fails, and another one is chosen.
REGISTERED_AGE_S: Final = 1.0


async def misplaced_fragments(
    bookkeeper: BookKeeper, check: LedgerCheck
) -> list[tuple[LedgerFragment, dict[int, str]]]:
    """Return the fragments of a closed ledger that the placement policy does not accept, each with targets.

    The faults of a fragment are the bookies that should leave; the targets, by ensemble index, are empty if no usable
    bookies can mend it.
    """
    pool, metadata = bookkeeper.pool, check.metadata
    await pool.weigh()
    registered = await asyncio.to_thread(pool.registered)
    placement = await asyncio.to_thread(
        pool.placement, registered, *(fragment.bookies for fragment in metadata.ensembles)
    )
    found = []
    for fragment in fragments_of(bookkeeper.access(check.ledger, check.versioned), check.last_add_confirmed):
        if not placement.problems(metadata, fragment.ensemble):
            continue
        targets = mend_placement(
            fragment.ensemble, metadata.write_quorum_size, registered, placement,
            scoped=check.ledger.is_scoped, ack_quorum_size=metadata.ack_quorum_size, avoid=pool.suspects(),
            rng=_rng(fragment),
        )  # fmt: skip
        found.append((fragment.given(sorted(targets)), targets))
    return found


def _rng(fragment: LedgerFragment) -> random.Random:
    """Return a random choice that is the same after a crash: the bookie that has part of the entries."""
    return random.Random(f"{fragment.ledger} {fragment.first_entry_id}")


class TargetChooser:
    """Chooses targets among the registered bookies, by the client's placement policy."""

    def __init__(self, bookkeeper: BookKeeper) -> None:
        """Raise as `PlacementRules.of`, before anything is copied."""
        PlacementRules.of(bookkeeper.pool.config)
        self._bookkeeper = bookkeeper
        self._registered: list[RegisteredBookie] = []
        self._registered_s = -REGISTERED_AGE_S
        #: The racks of these bookies, registered or gone.
        self._placement, self._placed = Placement(), frozenset[str]()
        self._read_registered: BatchedCalls[None, list[RegisteredBookie]] = BatchedCalls(
            lambda asking: [bookkeeper.pool.registered()] * len(asking)
        )

    async def targets(self, fragment: LedgerFragment, *, exclude: Collection[str] = ()) -> dict[int, str]:
        """Return the target of each bad bookie of the fragment, by ensemble index.

        As in Apache's, a bookie that lacks entries is replaced even if it is alive. If no bookie can replace it, and it
        reported itself what it lacks, it is its own target and gets the missing entries back. Bookies in `exclude` are
        never targets. Raise NotEnoughBookies.
        """
        repairable = {fault.ensemble_index for fault in fragment.faults if fault.reason in ANSWERED}
        own = {index: fragment.ensemble[index] for index in repairable if fragment.ensemble[index] not in exclude}
        moving = fragment.bookie_indexes
        if time.monotonic() - self._registered_s < REGISTERED_AGE_S:
            with contextlib.suppress(NotEnoughBookies):
                return await self._targets(fragment, own, moving, exclude)
        await self._bookkeeper.pool.weigh()
        self._registered = await self._read_registered(None)
        self._registered_s, self._placed = time.monotonic(), frozenset()
        try:
            return await self._targets(fragment, own, moving, exclude)
        except NotEnoughBookies:
            if not own:
                raise
        return await self._targets(fragment, own, [index for index in moving if index not in own], exclude)

    async def _targets(
        self, fragment: LedgerFragment, own: Mapping[int, str], moving: Collection[int], exclude: Collection[str]
    ) -> dict[int, str]:
        """Return replacements of the bookies at `moving`, and the `own` ones of the others."""
        registered, placement, pool = self._registered, self._placement, self._bookkeeper.pool
        if moving and not self._placed.issuperset(fragment.ensemble):
            placed = self._placed.union(fragment.ensemble)
            placement = await asyncio.to_thread(pool.placement, registered, placed)
            if registered is self._registered:  # Not read again meanwhile.
                self._placement, self._placed = placement, placed
        chosen = choose_replacements(
            fragment.ensemble,
            moving,
            fragment.schedule.write_quorum_size,
            registered,
            placement,
            scoped=fragment.ledger.is_scoped,
            ack_quorum_size=fragment.schedule.ack_quorum_size,
            exclude=exclude,
            avoid=pool.suspects(),
            rng=_rng(fragment),
        )
        return {index: bookie_id for index, bookie_id in own.items() if index not in moving} | chosen
