"""The findings about placement: bookies without a rack, too few racks, and ledgers that the policy does not accept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from bkctl.client.placement import Placement, region_of
from bkctl.formats.metadata import LedgerMetadata
from bkctl.ids import LedgerId
from bkctl.metadata.admin.health import HealthFinding, Severity
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
            yield HealthFinding(
                HealthCode.BOOKIE_WITHOUT_RACK, Severity.WARNING, bookie.bookie_id,
                f"It has no rack, while other bookies do: clients place it in {placement.rules.default_location}",
                f"'bkctl bookies racks set {bookie.bookie_id} --rack RACK'",
            )  # fmt: skip
    writable = [bookie.bookie_id for bookie in bookies if bookie.state == "rw"]
    domain, needed = placement.rules.domains
    count = len({rack if domain == "rack" else region_of(rack) for rack in map(placement.rack, writable)})
    if len(writable) > 1 and count < needed:
        yield HealthFinding(
            HealthCode.TOO_FEW_RACKS, Severity.WARNING, "",
            f"The {len(writable):,} writable bookies are in {count:,} {domain}{'s' if count > 1 else ''}; "
            f"{needed:,} are needed",
            f"start bookies in another {domain}: new ledgers do not survive the loss of one",
            {"rackCount": count, "neededRackCount": needed},
        )  # fmt: skip


def misplacement(placement: Placement, metadata: LedgerMetadata) -> str | None:
    """Return why the policy does not accept a ledger, and what to do; None if it does, or no bookie has a rack."""
    problem = placement.ledger_problem(metadata) if placement.racks else None
    return None if problem is None else f"The placement policy does not accept it: {problem}. {MEND_HINT}"


class RackCensus:
    """Counts the ledgers that the placement policy does not accept, by scope; none where no bookie has a rack."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._counts = Counter[int]()
        self._examples: dict[int, list[str]] = {}

    def count(self, ledger: LedgerId, metadata: LedgerMetadata) -> None:
        """Look at one more ledger; ledgers come in order."""
        if not self._placement.racks or self._placement.ledger_problem(metadata) is None:
            return
        self._counts[ledger.scope_id] += 1
        if self._counts[ledger.scope_id] <= 5:
            self._examples.setdefault(ledger.scope_id, []).append(str(ledger))

    def findings(self) -> Iterator[HealthFinding]:
        """Yield a finding for each scope that has such ledgers."""
        domain, _ = self._placement.rules.domains
        for scope_id, count in sorted(self._counts.items()):
            names = ", ".join(self._examples[scope_id]) + (", …" if count > 5 else "")
            yield HealthFinding(
                HealthCode.LEDGERS_IN_FEW_RACKS, Severity.WARNING, f"scope {scope_id}",
                f"{count:,} ledger{'s have' if count > 1 else ' has'} entries with all replicas in too few {domain}s: "
                f"{names}",
                MEND_HINT,
                {"ledgerScopeId": str(scope_id), "ledgerCount": count},
            )  # fmt: skip
