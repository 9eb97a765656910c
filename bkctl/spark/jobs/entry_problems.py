"""Problems of entries that a bookie should have, as the job `integrity` reports them."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from bkctl.spark.jobs.frames import QUALIFIED_NAME

#: One entry on one bookie.
REPLICA: Final = ("bookieId", QUALIFIED_NAME, "entryId")


class Problem(StrEnum):
    """Problems of a replica or file; the values are the words of every output."""

    #: The bookie has the entry nowhere, although metadata says that it should.
    MISSING = "missing"
    #: The bytes do not match the entry's digest, or cannot be read.
    DAMAGED = "damaged"
    #: An entry log has the entry, but the bookie's index does not, so the bookie does not serve it.
    NOT_INDEXED = "notIndexed"
    #: The index points to another entry.
    MISPLACED = "misplaced"
    #: A file ends in damage: entries behind the damage are found by the index alone, if at all.
    UNREADABLE = "unreadable"
