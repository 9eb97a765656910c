"""Chooses the bookies that get the entries of a fragment's bad bookies."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Final

from bkctl.client.bookies import in_thread
from bkctl.errors import NotEnoughBookies
from bkctl.replication.batching import BatchedCalls
from bkctl.replication.fragments import ANSWERED
from bkctl.replication.placement import Topology, choose_replacements

if TYPE_CHECKING:
    from bkctl.client.ledger import BookKeeper
    from bkctl.metadata.cluster import RegisteredBookie
    from bkctl.replication.fragments import LedgerFragment

#: The largest age of the list of registered bookies; a target that is gone by then fails, and another one is chosen.
REGISTERED_AGE_S: Final = 1.0


class TargetChooser:
    """Chooses targets among the registered bookies. `topology` knows the racks (None: racks are unknown)."""

    def __init__(self, bookkeeper: BookKeeper, topology: Topology | None) -> None:
        self._bookkeeper = bookkeeper
        self._topology = topology
        self._registered: list[RegisteredBookie] = []
        self._registered_s = -REGISTERED_AGE_S
        self._read_registered: BatchedCalls[None, list[RegisteredBookie]] = BatchedCalls(
            lambda asking: [bookkeeper.pool.registered()] * len(asking)
        )

    async def targets(
        self, fragment: LedgerFragment, *, exclude: Collection[str] = (), in_place: bool | None = None
    ) -> dict[int, str]:
        """Return the target of each bad bookie of the fragment, by ensemble index.

        As in Apache's, a bookie that lacks entries is replaced even if it is alive. If no bookie can replace it, and it
        reported itself what it lacks, it is its own target and gets the missing entries back. `in_place` True prefers
        this, False forbids it. Bookies in `exclude` are never targets. Raise NotEnoughBookies.
        """
        repairable = {fault.ensemble_index for fault in fragment.faults if fault.reason in ANSWERED}
        own = {index: fragment.ensemble[index] for index in repairable if fragment.ensemble[index] not in exclude}
        moving = [index for index in fragment.bookie_indexes if not (in_place and index in own)]
        if time.monotonic() - self._registered_s < REGISTERED_AGE_S:
            with contextlib.suppress(NotEnoughBookies):
                return await self._targets(fragment, own, moving, exclude)
        self._registered = await self._read_registered(None)
        self._registered_s = time.monotonic()
        try:
            return await self._targets(fragment, own, moving, exclude)
        except NotEnoughBookies:
            if in_place is False or not any(index in own for index in moving):
                raise
        return await self._targets(fragment, own, [index for index in moving if index not in own], exclude)

    async def _targets(
        self, fragment: LedgerFragment, own: Mapping[int, str], moving: Collection[int], exclude: Collection[str]
    ) -> dict[int, str]:
        """Return replacements of the bookies at `moving`, and the `own` ones of the others."""
        registered = self._registered
        racks: Mapping[str, str] = {}
        if self._topology is not None and moving:
            racks = await in_thread(self._racks, self._topology, fragment, registered)
        chosen = choose_replacements(
            fragment.ledger,
            fragment.first_entry_id,
            fragment.ensemble,
            moving,
            registered,
            exclude=exclude,
            avoid=self._bookkeeper.pool.suspects(),
            racks=racks,
        )
        return {index: bookie_id for index, bookie_id in own.items() if index not in moving} | chosen

    def _racks(
        self, topology: Topology, fragment: LedgerFragment, registered: list[RegisteredBookie]
    ) -> Mapping[str, str]:
        up = {bookie.bookie_id for bookie in registered}
        cluster = self._bookkeeper.cluster
        gone = [cluster.bookies.get(bookie_id) for bookie_id in fragment.ensemble if bookie_id not in up]
        return topology.racks([*registered, *(bookie for bookie in gone if bookie is not None)])
