"""The findings about placement: bookies without a rack, too few racks, and ledgers that the policy does not accept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from bkctl.client.placement import Placement, region_of
from bkctl.formats.metadata import LedgerMetadata
from bkctl.metadata.admin.health import HealthFinding, health_finding
from bkctl.metadata.admin.health_codes import HealthCode
from bkctl.metadata.cluster import RegisteredBookie

#: Advice about a ledger that is misplaced.
MEND_HINT: Final = (
    "'bkctl ledger locate' shows the bookies; auto-recovery moves replicas to other racks with "
    "repairedPlacementPolicyNotAdheringBookieEnabled=true"
)


def rack_findings(bookies: Sequence[RegisteredBookie], placement: Placement) -> Iterator[HealthFinding]:
    """Yield the problems with the racks of the registered bookies; none where no bookie has a rack."""
    racks = placement.racks
    if not racks:
        return
    for bookie in bookies:
        if bookie.bookie_id not in racks and bookie.state != "down":
            yield health_finding(
                HealthCode.BOOKIE_WITHOUT_RACK, bookie.bookie_id,
                f"It has no rack, while other bookies do: clients place it in {placement.rules.default_location}",
                advice=f"'bkctl bookies racks set {bookie.bookie_id} --rack RACK'",
            )  # fmt: skip
    writable = [bookie.bookie_id for bookie in bookies if bookie.state == "rw"]
    domain, needed = placement.rules.domains
    count = len({rack if domain == "rack" else region_of(rack) for rack in map(placement.rack, writable)})
    if len(writable) > 1 and count < needed:
        yield health_finding(
            HealthCode.TOO_FEW_RACKS, "",
            f"The {len(writable):,} writable bookies are in {count:,} {domain}{'s' if count > 1 else ''}; "
            f"{needed:,} are needed",
            details={"rackCount": count, "neededRackCount": needed},
        )  # fmt: skip


def misplacement(placement: Placement, metadata: LedgerMetadata) -> str | None:
    """Return why the policy does not accept a ledger, and what to do; None if it does, or no bookie has a rack."""
    problem = placement.ledger_problem(metadata) if placement.racks else None
    return None if problem is None else f"The placement policy does not accept it: {problem}. {MEND_HINT}"
