"""The findings about racks: bookies without one, and too few of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from bkctl.client.placement import DEFAULT_RACK, DEFAULT_RULES, RackRules
from bkctl.metadata.admin.health import HealthFinding, health_finding
from bkctl.metadata.admin.health_codes import HealthCode
from bkctl.metadata.cluster import RegisteredBookie


def rack_findings(
    bookies: Sequence[RegisteredBookie], racks: Mapping[str, str], rules: RackRules = DEFAULT_RULES
) -> Iterator[HealthFinding]:
    """Yield the problems with the racks of the registered bookies; none where no bookie has a rack."""
    if not racks:
        return
    for bookie in bookies:
        if bookie.bookie_id not in racks and bookie.state != "down":
            yield health_finding(
                HealthCode.BOOKIE_WITHOUT_RACK, bookie.bookie_id,
                f"It has no rack, while other bookies do: clients place it in {DEFAULT_RACK}",
                advice=f"'bkctl bookies racks set {bookie.bookie_id} --rack RACK'",
            )  # fmt: skip
    writable = [bookie.bookie_id for bookie in bookies if bookie.state == "rw"]
    count = len({racks.get(bookie_id, DEFAULT_RACK) for bookie_id in writable})
    if len(writable) > 1 and count < rules.count_min:
        yield health_finding(
            HealthCode.TOO_FEW_RACKS, "",
            f"The {len(writable):,} writable bookies are in {count:,} rack{'s' if count > 1 else ''}; "
            f"{rules.count_min:,} are needed",
            details={"rackCount": count, "neededRackCount": rules.count_min},
        )  # fmt: skip
