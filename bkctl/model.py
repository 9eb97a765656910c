"""Facts about ledgers that storage tools ask the metadata store for: liveness, master key, fence."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from enum import StrEnum
from typing import NamedTuple

from bkctl.ids import LedgerId


class LedgerLiveness(StrEnum):
    """Existence of a ledger in the metadata store. The values are the words in every output."""

    ALIVE = "alive"
    DEAD = "dead"
    #: The metadata store did not answer, or has no authority over the ledger: never treat such a ledger as dead.
    UNKNOWN = "unknown"


#: Looks up the liveness of each given ledger.
LivenessLookup = Callable[[Collection[LedgerId]], Mapping[LedgerId, LedgerLiveness]]


class LedgerFacts(NamedTuple):
    """Facts about a ledger in the metadata store; `master_key` and `fenced` are None where the store lacks them.

    `fenced`: the ledger is closed or in recovery, so its bookies must refuse ordinary adds.
    """

    liveness: LedgerLiveness
    master_key: bytes | None = None
    fenced: bool | None = None


#: Looks up the facts about each given ledger.
LedgerFactsLookup = Callable[[Collection[LedgerId]], Mapping[LedgerId, LedgerFacts]]
